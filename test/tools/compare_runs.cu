/*
Compares two run directories (test/tools/compare_runs.h). Prints one line with the largest differences and
their places; the exit code is 1 if one exceeds its limit, or if the two are not runs of the same length and
model.

    compare_runs RUN REFERENCE [--losses LIMIT] [--weights LIMIT] [--moments LIMIT] [--bitwise]
*/
#include "test/tools/compare_runs.h"

int main(int argc, char** argv) try {
    if (argc < 3)
        fail("usage: compare_runs RUN REFERENCE [--losses LIMIT] [--weights LIMIT] [--moments LIMIT] "
             "[--bitwise]");
    std::string line;
    bool good = compare_runs(argv[1], argv[2], parse_limits(argc, argv), &line);
    printf("%s\n", line.c_str());
    return good ? 0 : 1;
} catch (const std::exception& error) {
    fprintf(stderr, "compare_runs: %s\n", error.what());
    return 1;
}
