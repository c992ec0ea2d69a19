#include "test/nocard/counts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "test/nocard/cards.h"
#include "test/nocard/fault.h"

namespace nocard {
namespace {

// Warp instructions per clock of a multiprocessor, from CUDA's table of arithmetic throughput. of_warps: the
// fraction of the tensor cores' rate that instructions of single warps reach.
struct Rates {
    int capability;
    double issued, fp32, integer, special, of_warps;
};
constexpr Rates all_rates[] = {{80, 4, 2, 2, 0.5, 1},
                               {89, 4, 4, 2, 0.5, 1},
                               {90, 4, 4, 2, 0.5, 0.5},
                               {100, 4, 4, 2, 0.5, 0.5},
                               {120, 4, 4, 4, 0.5, 1}};

const Rates& rates() {
    int capability = 10 * card().major + card().minor;
    return *std::ranges::find(all_rates, capability, &Rates::capability);
}

enum Unit { memory, issue, fp32, integer, special, shared, tensor, units };
constexpr const char* unit_names[units] = {"memory",  "issue",  "fp32",  "integer",
                                           "special", "shared", "tensor"};

struct Sum {
    size_t launches = 0;
    GridCounts counts;

    void add(const GridCounts& one) {
        launches++;
        counts.read += one.read, counts.written += one.written;
        UnitCounts &to = counts.units, from = one.units;
        to.issued += from.issued, to.fp32 += from.fp32, to.integer += from.integer;
        to.special += from.special, to.lanes += from.lanes, to.multiply_adds += from.multiply_adds;
        to.passes += from.passes, to.least_passes += from.least_passes;
        to.sectors += from.sectors, to.asked += from.asked;
        to.by_warps |= from.by_warps, to.blocks = from.blocks;
    }

    std::array<double, units> microseconds() const {
        const Card& c = card();
        const UnitCounts& u = counts.units;
        double clocks = 1e-3 * c.clock_khz * c.multiprocessors,  // per microsecond, of all multiprocessors
            bytes = 2e-3 * c.memory_clock_khz * c.memory_bits / 8,
               products = 1e-6 * c.bf16_flops / 2 * (u.by_warps ? rates().of_warps : 1);
        auto time = [&](uint64_t count, double in_a_clock) { return (double)count / in_a_clock / clocks; };
        return {(double)(counts.read + counts.written) / bytes,
                time(u.issued, rates().issued),
                time(u.fp32, rates().fp32),
                time(u.integer, rates().integer),
                time(u.special, rates().special),
                time(u.passes, 1),
                u.multiply_adds / products};
    }
};

struct Counts {
    std::mutex mutex;
    std::map<std::string, Sum> kernels;
    FILE* file = nullptr;

    Counts() {
        const char* path = getenv("NOCARD_COUNTS");
        if (!path) return;
        file = fopen(path, "w");
        if (!file) fault("NOCARD_COUNTS", text("%s cannot be written", path));
        atexit([] { counts().print(); });
    }

    static Counts& counts() {
        static Counts& counts = *new Counts;
        return counts;
    }

    void print() {
        std::lock_guard lock(mutex);
        std::vector<std::pair<std::string, Sum>> all(kernels.begin(), kernels.end());
        auto most = [](const Sum& sum) { return std::ranges::max(sum.microseconds()); };
        std::ranges::sort(all, [&](auto& a, auto& b) { return most(a.second) > most(b.second); });
        fprintf(file, "%-52s %5s", card().name, "x");
        for (const char* name : unit_names) fprintf(file, " %8s", name);
        fprintf(file, " %7s %9s %7s %6s\n", "blocks", "conflicts", "sectors", "lanes");
        auto share = [](double part, double whole) { return whole > 0 ? part / whole : 1; };
        for (auto& [kernel, sum] : all) {
            const UnitCounts& u = sum.counts.units;
            fprintf(file, "%-52.52s %5zu", kernel.c_str(), sum.launches);
            for (double time : sum.microseconds())
                fprintf(file, " %7.2f%c", time, time == most(sum) ? '*' : ' ');
            fprintf(file, " %7d %9.2f %7.2f %5.0f%%\n", u.blocks,
                    share((double)u.passes, (double)u.least_passes),
                    share(32.0 * (double)u.sectors, (double)u.asked),
                    100 * share((double)u.lanes / 32, (double)u.issued));
        }
        fclose(file);
    }
};

}  // namespace

bool counts_units() {
    return Counts::counts().file;
}

void report_counts(const std::string& kernel, const GridCounts& counts) {
    std::lock_guard lock(Counts::counts().mutex);
    Counts::counts().kernels[kernel].add(counts);
}

}  // namespace nocard
