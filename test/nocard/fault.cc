#include "test/nocard/fault.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace nocard {

std::string text(const char* format, ...) {
    char buffer[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

void fault(const std::string& call, const std::string& reason) {
    std::string line = "nocard: " + call + ": " + reason + "\n";
    fflush(stdout);
    fputs(line.c_str(), stderr);
    fflush(stderr);
    if (getenv("NOCARD_ABORT")) abort();
    // Other threads may hold locks that destructors want, or wait for work that will never end.
    _exit(exit_of_fault);
}

long setting(const char* name, long otherwise) {
    const char* value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

int local_rank() {
    return (int)setting("OMPI_COMM_WORLD_LOCAL_RANK", 0);
}

unsigned long seed_of_process() {
    return (unsigned long)(setting("NOCARD_SEED", 1) + 1000003 * setting("OMPI_COMM_WORLD_RANK", 0));
}

}  // namespace nocard
