#include "test/nocard/report.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "test/nocard/device_memory.h"
#include "test/nocard/fault.h"

namespace nocard {
namespace {

struct Report {
    std::mutex mutex;
    size_t launches = 0, pinned = 0;
    std::map<std::string, size_t> kernels, work;
    std::vector<size_t> allocations;  // for each of the card's, the number of launches before it

    Report() {
        if (getenv("NOCARD_REPORT")) atexit([] { report().print(); });
    }

    static Report& report() {
        static Report& report = *new Report;
        return report;
    }

    void print() {
        std::lock_guard lock(mutex);
        auto late = std::count_if(allocations.begin(), allocations.end(),
                                  [&](size_t at) { return at > launches / 2; });
        Leaks left = leaks();
        std::string others;
        for (auto& [kind, count] : work) others += text(", %zu %s", count, kind.c_str());
        fprintf(stderr,
                "nocard: report: %zu launches of %zu kernels%s; %zu allocations of the card, %zu of them in "
                "the second "
                "half, %zu pinned; not freed: %zu of the card with %zu bytes, %zu pinned\n",
                launches, kernels.size(), others.c_str(), allocations.size(), (size_t)late, pinned,
                left.device, left.device_bytes, left.pinned);
        if (setting("NOCARD_REPORT", 0) < 2) return;
        for (auto& [kernel, count] : kernels)
            fprintf(stderr, "nocard: report: %zu launches of %s\n", count, kernel.c_str());
    }
};

}  // namespace

void report_launch(const std::string& kernel) {
    Report& report = Report::report();
    std::lock_guard lock(report.mutex);
    report.launches++;
    report.kernels[kernel]++;
}

void report_work(const char* kind) {
    Report& report = Report::report();
    std::lock_guard lock(report.mutex);
    report.work[kind]++;
}

void report_allocation(bool device) {
    Report& report = Report::report();
    std::lock_guard lock(report.mutex);
    if (device)
        report.allocations.push_back(report.launches);
    else
        report.pinned++;
}

}  // namespace nocard
