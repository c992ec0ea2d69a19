/*
Part of simt.cc: how an error in a kernel is reported.
*/
#pragma once

namespace simt {
namespace {

std::mutex errors_mutex;
std::vector<Error> errors;
int keepers = 0;

// The lines that addr2line prints; empty if it prints none.
std::vector<std::string> addr2line(const char* options, const void* address) {
    char path[page] = {};
    if (readlink("/proc/self/exe", path, sizeof path - 1) < 0) return {};
    char hex[32];
    snprintf(hex, sizeof hex, "0x%zx", (size_t)address - program.base);
    std::string command =
        std::string("addr2line -C ") + options + " -e '" + path + "' " + hex + " 2>/dev/null";
    std::vector<std::string> lines;
    if (FILE* pipe = popen(command.c_str(), "r")) {
        char line[4096];
        while (fgets(line, sizeof line, pipe)) lines.emplace_back(line, strcspn(line, "\n"));
        pclose(pipe);
    }
    return lines;
}

// "at kernels/norm.cuh:55": the innermost place in the kernel's source, then the places into which it was
// inlined.
std::string location(const void* where) {
    if (!where) return "";
    std::string text;
    char directory[page] = {};
    std::string here = getcwd(directory, sizeof directory) ? std::string(directory) + "/" : "";
    for (std::string line : addr2line("-i", (const char*)where - 1)) {
        bool of_shim = line.find("test/simt/") != line.npos && line.find("test/simt/test_") == line.npos;
        if (of_shim || line[0] == '?') continue;
        if (line.starts_with(here)) line.erase(0, here.size());
        line.erase(std::min(line.find(" (discriminator"), line.size()));
        text += (text.empty() ? ", at " : ", inlined at ") + line;
    }
    return text;
}

void report(const void* kernel) {
    auto kernel_lines = addr2line("-f", kernel);
    std::string text = std::string(failure.text) + ", in kernel " +
                       (kernel_lines.empty() ? "?" : kernel_lines[0]) + ", block " + name(block_index).text;
    text += location(failure.where);
    std::lock_guard lock(errors_mutex);
    if (!keepers) {
        fflush(stdout);
        fprintf(stderr, "simt: %s\n", text.c_str());
        _exit(1);
    }
    errors.push_back({failure.kind, text});
}

}  // namespace

Errors::Errors() {
    std::lock_guard lock(errors_mutex);
    keepers++;
}

Errors::~Errors() {
    std::lock_guard lock(errors_mutex);
    if (--keepers == 0) errors.clear();
}

std::vector<Error> Errors::take() {
    std::lock_guard lock(errors_mutex);
    return std::exchange(errors, {});
}

}  // namespace simt
