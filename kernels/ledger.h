/*
A record of the work that a program would give to a card, made instead of doing that work. While a thread has
a Ledger, its launches, copies and fills, events and messages become entries, in order, and nothing runs: so a
step can be priced for a card that is not present, by the very code that trains. Arrays, streams and events
that are made meanwhile are imaginary: they have addresses at which nothing can be mapped, so that an
accidental access crashes.

Each launcher states what its kernels cost on a card, regardless of the device this program is built for: the
bytes of memory that they read and write, counting each pass over a tensor, and their FLOPs. Scalars, and
fills of scalars, are left out.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

// D (rows, columns), each element a sum of `sums` products.
struct ProductShape {
    double rows = 0, columns = 0, sums = 0;
    bool fp8 = false, fast_sums = false;  // 8-bit operands; fast_sums: see Product (kernels/cublas.cuh)
    bool gelu = false;                    // its epilogue is GELU or its gradient
    double flops() const { return 2 * rows * columns * sums; }
};

// Attention over heads of one size. Scores that are computed and then masked do not count.
struct AttentionWork {
    double flops = 0, mean_keys = 0;  // keys that a query sees
    int head_size = 0;
    bool forward = true;
};

struct LaunchCost {
    double read = 0, written = 0;  // bytes
    ProductShape product = {};
    AttentionWork attention = {};
    int launches = 1;  // number of kernels
    // The part that does the work: the card, its host, the link between these, or a disk.
    enum Place { card, host, host_link, disk } place = card;

    LaunchCost plus(double more_read, double more_written) const {
        LaunchCost sum = *this;
        sum.read += more_read, sum.written += more_written;
        return sum;
    }
    double flops() const { return attention.flops + product.flops(); }
};

// Properties that launchers need of the card that a ledger is for.
struct LedgerCard {
    size_t element_bytes;  // of a parameter or an activation
    int capability = 90;   // see capability_of; 0: the host

    bool is_hopper() const { return capability / 10 == 9; }
    bool has_wgmma() const { return element_bytes == 2 && is_hopper(); }
    // On other cards, cuBLASLt starts a second, slow kernel for GELU (see EpilogueRow).
    bool has_gelu_in_products() const { return is_hopper(); }
};

// A group of ranks, identified by its number among the groups of the mesh: `ranks` of them, `stride` apart,
// from `first` on.
struct GroupOfRanks {
    int number = 0, first = 0, stride = 1, ranks = 1;
    int side_by_side = 0;  // for a pair of ranks in two stages: the number of such pairs; else 0
    int blocks = 0;        // for such a pair: most thread blocks that move its messages; 0: no limit

    // Returns the group that consists of two of this group's ranks, given by their indices.
    GroupOfRanks pair(int one, int other) const {
        auto [low, high] = std::minmax(one, other);
        return {number, first + low * stride, (high - low) * stride, 2, 1};
    }
    bool has(int rank) const {
        int distance = (rank - first) / stride;
        return distance >= 0 && distance < ranks && first + distance * stride == rank;
    }
    auto operator<=>(const GroupOfRanks&) const = default;
};

// A communication call of a group. operation, purpose: Operation and Traffic (data/run/flight_record.h).
struct GroupCall {
    int operation, purpose;
    GroupOfRanks group;
    double bytes;        // all ranks' parts together; for sums, broadcasts and messages, one rank's
    int number_bytes;    // bytes of one element
    bool joins = false;  // begins together with the call before it, so adds no latency
};

// The number of multiprocessors that launches of this thread leave to communication kernels, which run
// concurrently. A product with one block per multiprocessor would have to wait until those end before its
// last blocks could run.
inline thread_local int spared_multiprocessors = 0;

struct LedgerEntry {
    enum Kind { launch, record, hold, call, repeat, step } kind;
    const void* stream;
    int section = 0;                 // index in Ledger::sections
    const char* launcher = nullptr;  // launch: function in kernels/; null: a fill or copy by the driver
    LaunchCost cost = {};            // launch
    int spared = 0;                  // launch: spared multiprocessors
    double seconds = 0;              // launch: if above 0, its duration, regardless of its cost
    const void* event = nullptr;     // record, hold
    GroupCall call_of = {};          // call
    size_t begin = 0, end = 0;       // repeat: the range of entries to repeat
};

class Ledger;
// This thread's ledger. Null: launches run.
inline thread_local Ledger* ledger = nullptr;

// The ledger of the thread that constructs it, until it is destroyed.
class Ledger {
public:
    // A part of a pass: the work on one unit (comm/parameters.h), or between units (unit -1). Outside of
    // passes, work is -1.
    struct Section {
        int task, work, micro_batch, unit;  // the pass's number, kind (PipelineWork) and micro-batch; unit
    };

    // Costs that depend on data assume that a sequence has T positions, and that tokens are distinct, from a
    // vocabulary of V.
    explicit Ledger(const LedgerCard& card, int T = 1, int V = INT_MAX)
        : card(card), T(T), V(V), before_(std::exchange(ledger, this)) {}
    ~Ledger() { ledger = before_; }
    Ledger(const Ledger&) = delete;

    const LedgerCard card;
    const int T, V;
    size_t together_from = SIZE_MAX;  // index of an entry: calls recorded from it on start together
    std::vector<LedgerEntry> entries;
    std::vector<Section> sections = {beside_passes};

    void add(const LedgerEntry& entry) {
        entries.push_back(entry);
        entries.back().section = (int)sections.size() - 1;
    }
    void launched(const char* launcher, const void* stream, const LaunchCost& cost) {
        add({.kind = LedgerEntry::launch,
             .stream = stream,
             .launcher = launcher,
             .cost = cost,
             .spared = spared_multiprocessors});
    }
    void launched(const char* launcher, const void* stream, const std::vector<LaunchCost>& costs) {
        for (const LaunchCost& cost : costs) launched(launcher, stream, cost);
    }
    void begin_task(int work, int micro_batch) {
        sections.push_back({sections.back().task + 1, work, micro_batch, -1});
    }
    void enter(int unit) {
        if (sections.back().unit == unit) return;
        sections.push_back(sections.back());
        sections.back().unit = unit;
    }
    void end_passes() { sections.push_back(beside_passes); }
    // Marks the end of a step on the stream, or the beginning of the first.
    void end_step(const void* stream) { add({.kind = LedgerEntry::step, .stream = stream}); }
    // Records work() if its key is new; otherwise records a repeat of its entries.
    template <typename Work>
    void once(std::string key, Work&& work) {
        for (int number : left_behind.get ? left_behind.get() : std::vector<int>())
            key += std::to_string(number) + ' ';
        auto [place, is_new] = known_.try_emplace(key);
        Known& known = place->second;
        if (!is_new) {
            add({.kind = LedgerEntry::repeat, .stream = nullptr, .begin = known.begin, .end = known.end});
            if (left_behind.set) left_behind.set(known.leaves);
            return;
        }
        known.begin = entries.size();
        work();
        known.end = entries.size();
        if (left_behind.get) known.leaves = left_behind.get();
    }
    // The state that work leaves for later work, such as which units are gathered already.
    struct {
        std::function<std::vector<int>()> get;
        std::function<void(const std::vector<int>&)> set;
    } left_behind;

    // Visits all entries, repeated ones each time they occur.
    template <typename Visit>
    void each(Visit&& visit) const {
        for (const LedgerEntry& entry : entries) {
            bool again = entry.kind == LedgerEntry::repeat;
            for (size_t i = entry.begin; again && i < entry.end; i++) visit(entries[i]);
            if (!again) visit(entry);
        }
    }
    void forget() { entries.clear(), sections = {beside_passes}, known_.clear(); }

    // Returns an address for an array of this size, or for a stream or an event. Arrays of floatX have a
    // separate address range, because in an fp32 build their type is also float; so do arrays of the host.
    template <typename T>
    T imagine(size_t bytes = 1, bool is_floatX = false, bool on_host = false) {
        uintptr_t &next = next_[is_floatX][on_host], at = next;
        next += (bytes + 255) / 256 * 256;
        return reinterpret_cast<T>(at | imagined_bit | is_floatX * floatX_bit | on_host * host_bit);
    }
    static constexpr uintptr_t imagined_bit = (uintptr_t)1 << 55, floatX_bit = (uintptr_t)1 << 54,
                               host_bit = (uintptr_t)1 << 53;

private:
    static constexpr Section beside_passes = {0, -1, -1, -1};

    Ledger* const before_;
    uintptr_t next_[2][2] = {};
    struct Known {
        size_t begin = 0, end = 0;  // entries
        std::vector<int> leaves = {};
    };
    std::map<std::string, Known> known_;  // work by its key
};

inline bool is_imagined(const void* thing) {
    return (uintptr_t)thing & Ledger::imagined_bit;
}

inline LaunchCost::Place holder_of(const void* thing) {
    return (uintptr_t)thing & Ledger::host_bit ? LaunchCost::host : LaunchCost::card;
}

// Returns the bytes on the card of an array of these sizes, or 0 if it is null.
template <typename T, typename... Sizes>
double array_bytes(const T* array, Sizes... sizes) {
    bool of_floatX = is_imagined(array) && (uintptr_t)array & Ledger::floatX_bit;
    return array ? (of_floatX ? ledger->card.element_bytes : sizeof(T)) * (1.0 * ... * (double)sizes) : 0;
}
