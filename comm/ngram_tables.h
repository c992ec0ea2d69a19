/*
The tables of n-gram memory: each layer that has such memory has its own table. All tables use the same row
numbers, so the lookups of a step are computed once for all layers of a stage.

The rows that a step needs follow from its tokens. The host lists them before the step, while the device works
on the previous one: the distinct rows of all micro-batches, and for each lookup its row's place among them.
Each row has one owner among the ranks of the stage (row r: rank r modulo their number), which holds the only
copy of it, on the device, in host memory or on disk.

    host      tokens of the step -> rows that the heads look up -> distinct ones, by owner
    owner     table --fetch--> answers                        sums of ranks --AdaGrad--> table
                                  | send                          ^ send
    rank      rows of the step <--+                           gradients of the rows
                  | gather, by micro-batch                        ^ sums, in the order of tokens
              layer, forward                                  layer, backward

Rows in host memory that the next step needs are fetched while the device works on this one, except those that
this step's update changes. Those are fetched last, after their update, and the next step waits only for them.
If staleness is allowed, it uses their old values and waits for none. The host stream runs, in order:

    step k computes               rows of k+1 that k does not change -> device
    step k has its gradients      update of rows that k+1 needs too; these rows -> device
    step k+1 computes             update of the other rows of k; rows of k+2 that k+1 does not change ...

An owner of tables on disk keeps them in a file, and the rows that steps use in host memory (data/tables/). A
fetch first reads the rows that are missing in memory, and evicts rows that have not been used for long.
Everything else is as for tables in host memory.

Each sum has a fixed order: by position in the micro-batch, then micro-batch, then rank. So results are
bit-identical wherever a table is kept. The summed gradients are part of the global norm, and owners update
their rows once the clipping factor is known: a skipped step leaves no trace.

Each tensor rank has its own heads, for all tokens of the micro-batch, so no two fetch the same rows.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/activations.h"       // Workload
#include "comm/mesh.h"              // Mesh, wait_for
#include "comm/ngram_arrays.h"      // TableSizes, TableArrays
#include "comm/ngram_rows.h"        // OwnRows
#include "data/base/error.h"        // fail
#include "data/tokens/ngrams.h"     // NgramHash, NgramTokens
#include "kernels/embedding.cuh"    // sum_rows
#include "kernels/global_norm.cuh"  // sum_squares
#include "kernels/row_order.h"      // sort_by
#include "kernels/streams.cuh"
#include "kernels/table_rows.cuh"

class NgramTables {
public:
    // For all ranks. The memory, the mesh and the configuration must outlive this.
    NgramTables(Arena& memory, const ModelConfig& config, const Workload& workload,
                const ZeroSettings& settings, const Mesh& mesh, const Stage& stage, cudaStream_t compute)
        : config_(config),
          settings_(settings),
          mesh_(mesh),
          sizes_(checked(TableSizes(config, workload.B, workload.T, stage,
                                    settings.rows_dtype(memory.element_bytes())))),
          most_at_once_(stage.layout().pipeline.micro_batches),
          compute_(compute),
          asks_(compute),
          arrays_(memory, sizes_, settings, compute),
          own_(sizes_, arrays_, settings, mesh, compute) {
        if (!here()) return;
        if (sizes_.owners > 1 && mesh.stage().size() != (int)sizes_.owners)
            fail("mesh: has no group for the ranks of a stage, which send each other table rows; see "
                 "MeshShape::stage_group");
        found_.resize(sizes_.lookups);
        moved_.resize(sizes_.owners > 1 ? sizes_.distinct() : 0);
        if (settings.overlap.data && sizes_.owners > 1) asks_ = new_communication_stream("lists of rows");
    }
    ~NgramTables() {
        drain(compute_);
        if (asks_ != compute_) end_stream(asks_);
    }
    NgramTables(const NgramTables&) = delete;
    NgramTables& operator=(const NgramTables&) = delete;

    // Returns whether the model has tables, and whether this stage has some.
    bool any() const { return !config_.ngram.empty(); }
    bool here() const { return sizes_.tables() > 0; }
    const TableSizes& sizes() const { return sizes_; }
    // How many micro-batches can be looked up at once, at most `count`; the same on all stages.
    int most_at_once(int count) const { return any() ? std::min(count, most_at_once_) : count; }
    const ZeroSettings& settings() const { return settings_; }
    const ModelConfig& config() const { return config_; }
    const Mesh& mesh() const { return mesh_; }

    // The seed determines which rows tokens look up, and the initial values of rows. folded: see NgramHash.
    void set_hash(uint64_t seed, std::vector<uint64_t> folded) {
        hash_.emplace(config_, seed, std::move(folded));
        own_.set_seed(seed);
        ahead_.reset();
    }
    const NgramHash& hash() const { return *hash_; }

    // Lists what will be looked up next, while the device does other work; rows in host memory are fetched
    // ahead too. Call between sum_gradients() and the update() that may change these rows. All ranks of the
    // stage must call this, look_up() and sum_gradients() in the same order.
    void look_ahead(const Lookups& lookups) {
        if (!here()) return;
        TableLists& next = arrays_.lists[1 - front_];
        list(next, lookups);
        ahead_ = lookups;
        if (!on_host()) return;
        order_fetches(next, front());
        fetch(next, next.early);
    }
    // Makes the next step see all updates, as it would after a resume.
    void forget_stale() {
        if (settings_.table_staleness > 0) ahead_.reset();
    }
    // Brings the rows of a step to the device, for the compute stream's next work, and zeros their gradients.
    void look_up(const Lookups& lookups);
    // Copies the lookups of a micro-batch to the device, into this slot.
    PlacesOfRows places(int micro_batch, int slot);

    // The rows of the step in a layer's table (distinct, W), and their gradients.
    const floatX* rows(int layer) const { return arrays_.rows[table_of(layer)]; }
    float* grads(int layer) const { return arrays_.grads + table_of(layer) * sizes_.distinct() * sizes_.W; }

    // Sums the gradients of a step at the rows' owners. squares() (1) is then the sum of squares over the
    // rows of this rank.
    void sum_gradients();
    const float* squares() const { return arrays_.squares; }
    // How many rows of this step this rank sends from host memory, and how many of them waited for an update.
    size_t sent() const { return here() && on_host() ? front().asks() : 0; }
    size_t waited_for() const { return here() && on_host() ? front().asks() - front().early : 0; }
    // Updates the rows that this rank owns, unless the scale (1) is NaN.
    void update(const AdaGrad& adagrad, const float* scale);

    // The rows that this rank owns.
    OwnRows& own() { return own_; }
    // Returns the number of a layer's table among those of this stage.
    size_t table_of(int layer) const {
        return (size_t)(std::ranges::find(sizes_.layers, layer) - sizes_.layers.begin());
    }
    // Waits for all work on the tables, and throws its errors.
    void synchronize() const {
        wait_for(own_.host(), mesh_);
        wait_for(compute_, mesh_);
        own_.raise_error();
    }

private:
    bool on_host() const { return own_.on_host(); }
    bool several() const { return sizes_.owners > 1; }
    const TableSizes& checked(const TableSizes& sizes) const {
        if (sizes.asked() > INT32_MAX)
            fail("--ngram %s: a rank is asked for %zu rows in a step, more than 2^31; lower --global-batch, "
                 "or start more processes",
                 config_.ngram.c_str(), sizes.asked());
        return sizes;
    }
    TableLists& front() { return arrays_.lists[front_]; }
    const TableLists& front() const { return arrays_.lists[front_]; }
    size_t sums_of_table() const {
        return (several() ? sizes_.asked() : sizes_.distinct()) * (size_t)sizes_.W;
    }

    void list(TableLists& list, const Lookups& lookups);
    void imagine(TableLists& list, const Lookups& lookups) const;
    void list_rows(TableLists& list, const Lookups& lookups);
    void ask_owners(TableLists& list);
    void list_sums(TableLists& list);
    void order_fetches(TableLists& next, TableLists& now);
    void fetch(TableLists& list, size_t end);
    size_t where(uint64_t row) const;
    int place_of(uint64_t row, size_t& count, uint64_t* distinct);
    void forget_places() { std::fill_n(arrays_.known_at, arrays_.places, -1); }
    template <typename T>
    void exchange(const Communicator& group, const T* sent, const std::vector<size_t>& to, T* received,
                  const std::vector<size_t>& from, int W, Traffic kind, cudaStream_t stream) const;

    const ModelConfig& config_;
    const ZeroSettings settings_;
    const Mesh& mesh_;
    const TableSizes sizes_;
    const int most_at_once_;
    cudaStream_t compute_, asks_;
    TableArrays arrays_;
    std::optional<NgramHash> hash_;
    std::vector<uint64_t> found_;   // (lookups) rows of a micro-batch
    std::vector<int> moved_;        // (distinct) each row's place once rows are sorted by owner
    std::optional<Lookups> ahead_;  // set by look_ahead(), which fills the back list
    size_t front_ = 0;
    Event order_, sums_copied_, fetched_, taken_;  // fetched_: rows on the device; taken_: buffer is free
    std::array<Event, 2> read_by_compute_, read_by_host_;  // the last work with each list
    OwnRows own_;                                          // last: destroyed before what its work uses
};

// ----------------------------------------------------------------------------
// lists, on the host

inline void NgramTables::list(TableLists& list, const Lookups& lookups) {
    list.early = list.sent = 0;
    if (ledger) {
        imagine(list, lookups);
    } else {
        own_.raise_error();
        list.number = own_.next_turn();
        size_t number = (size_t)(&list - arrays_.lists.data());
        wait_for(read_by_compute_[number], mesh_);
        wait_for(read_by_host_[number], mesh_);
        list_rows(list, lookups);
    }
    list.from = list.to;
    list.distinct = list.wants();
    if (several()) ask_owners(list);
    if (ledger) return;
    if (several() && settings_.training) list_sums(list);
    if (!on_host()) return;
    std::copy_n(list.asked, list.asks(), list.fetched);
    std::iota(list.place, list.place + list.asks(), 0);
}

// A ledger assumes that all lookups are of different rows, spread evenly over the owners.
inline void NgramTables::imagine(TableLists& list, const Lookups& lookups) const {
    size_t all = std::min(sizes_.distinct(), (size_t)lookups.count * sizes_.lookups);
    list.to.assign(sizes_.owners, all / sizes_.owners);
}

// The place of a row in the hash table, or the empty place where it belongs.
inline size_t NgramTables::where(uint64_t row) const {
    size_t at = (row * 0x9e3779b97f4a7c15 >> 20) & (arrays_.places - 1);
    while (arrays_.known_at[at] >= 0 && arrays_.known[at] != row) at = (at + 1) & (arrays_.places - 1);
    return at;
}

// Returns the number of a row among the distinct rows since forget_places(), and adds it if it is new.
inline int NgramTables::place_of(uint64_t row, size_t& count, uint64_t* distinct) {
    size_t at = where(row);
    if (arrays_.known_at[at] < 0) {
        arrays_.known[at] = row;
        distinct[count] = row;
        arrays_.known_at[at] = (int)count++;
    }
    return arrays_.known_at[at];
}

// Fills wanted, slots, by_slot and `to`.
inline void NgramTables::list_rows(TableLists& list, const Lookups& lookups) {
    const int heads = sizes_.heads, first_head = mesh_.position[Axis::tensor] * heads;
    if (lookups.count > sizes_.micro_batches)
        fail("n-gram tables: %d micro-batches are looked up at once, but there is only room for %d; see "
             "most_at_once",
             lookups.count, sizes_.micro_batches);
    size_t count = 0;
    std::vector<size_t> lookups_of(lookups.count);  // a batch may have fewer lookups than the largest
    forget_places();
    for (int micro = 0; micro < lookups.count; micro++) {
        int* slots = list.slots + (size_t)micro * sizes_.lookups;
        size_t& found = lookups_of[micro];
        for (const NgramTokens& tokens : lookups.tokens(micro)) {
            hash_->look_up(&found_[found], tokens, first_head, heads);
            found += (size_t)tokens.count * (size_t)heads;
        }
        for (size_t i = 0; i < found; i++) slots[i] = place_of(found_[i], count, list.wanted);
        std::fill(slots + found, slots + sizes_.lookups, 0);
    }
    list.to.assign(sizes_.owners, 0);
    for (size_t i = 0; i < count; i++) list.to[sizes_.owner_of(list.wanted[i])]++;
    const size_t all = (size_t)lookups.count * sizes_.lookups;
    if (several()) {
        std::vector<size_t> next(sizes_.owners);
        std::exclusive_scan(list.to.begin(), list.to.end(), next.begin(), (size_t)0);
        std::vector<uint64_t> by_owner(count);
        for (size_t i = 0; i < count; i++) {
            size_t place = next[sizes_.owner_of(list.wanted[i])]++;
            by_owner[place] = list.wanted[i];
            moved_[i] = (int)place;
        }
        std::ranges::copy(by_owner, list.wanted);
        for (size_t i = 0; i < all; i++) list.slots[i] = moved_[(size_t)list.slots[i]];
    }
    for (int micro = 0; settings_.training && micro < lookups.count; micro++) {
        size_t at = (size_t)micro * sizes_.lookups;
        const int* slots = list.slots + at;
        std::fill_n(list.by_slot + at, sizes_.lookups, 0);
        sort_by(list.by_slot + at, (int)lookups_of[micro], [=](int i) { return slots[i]; });
    }
}

// Fills asked and `from`. Rows are numbered within this owner's table. A ledger's lists are not backed by
// memory, so it only records the work.
inline void NgramTables::ask_owners(TableLists& list) {
    const size_t owners = sizes_.owners;
    int *received = arrays_.counts + owners, *there = arrays_.host_counts, *back = there + owners;
    if (!ledger) std::ranges::copy(list.to, there);
    copy_async(arrays_.counts, there, owners, asks_);
    copy_async(received + own_.me(), arrays_.counts + own_.me(), 1, asks_);
    mesh_.asks().all_to_all(arrays_.counts, received, 1, Traffic::statistics, asks_);
    copy_async(arrays_.wanted, list.wanted, list.wants(), asks_);
    copy_async(back, received, owners, asks_);
    wait_for(asks_, mesh_);
    if (!ledger) list.from.assign(back, back + owners);
    if (list.asks() > sizes_.asked())
        fail("n-gram tables: a rank is asked for %zu rows, but hashing should assign it at most %zu; this is "
             "a bug in the program",
             list.asks(), sizes_.asked());
    exchange(mesh_.asks(), arrays_.wanted, list.to, arrays_.asks, list.from, 1, Traffic::statistics, asks_);
    copy_async(list.asked, arrays_.asks, list.asks(), asks_);
    wait_for(asks_, mesh_);
    for (size_t i = 0; i < list.asks() && !ledger; i++) list.asked[i] = sizes_.own_number(list.asked[i]);
}

// Fills own, rows and order.
inline void NgramTables::list_sums(TableLists& list) {
    forget_places();
    list.distinct = 0;
    for (size_t i = 0; i < list.asks(); i++) list.rows[i] = place_of(list.asked[i], list.distinct, list.own);
    sort_by(list.order, (int)list.asks(), [&](int i) { return list.rows[i]; });
}

// Splits the rows that the next step fetches, and those that this one updates, by whether they are in both:
// rows in both are updated first and fetched last. The hash table has the next step's rows.
inline void NgramTables::order_fetches(TableLists& next, TableLists& now) {
    bool ahead = settings_.table_prefetch > 0;
    next.early = ahead ? next.asks() : 0;
    now.shared = ahead ? 0 : now.distinct;
    if (ledger || !ahead || settings_.table_staleness > 0) return;
    std::vector<char> is_late(next.distinct);
    size_t other = now.distinct;
    for (size_t i = 0; i < now.distinct; i++) {
        int found = arrays_.known_at[where(now.own[i])];
        if (found >= 0) is_late[(size_t)found] = true;
        now.turn[found >= 0 ? now.shared++ : --other] = (int)i;
    }
    auto late = [&](size_t i) { return is_late[several() ? (size_t)next.rows[i] : i]; };
    next.early = 0;
    for (size_t i = 0; i < next.asks(); i++) next.early += !late(i);
    size_t early = 0, behind = next.early;
    for (size_t i = 0; i < next.asks(); i++) {
        size_t place = late(i) ? behind++ : early++;
        next.place[i] = (int)place, next.fetched[place] = next.asked[i];
    }
}

// ----------------------------------------------------------------------------
// rows, on the device

// Sends rows from host memory to the device: those of `fetched` up to `end` that have not been sent yet.
inline void NgramTables::fetch(TableLists& list, size_t end) {
    if (end == list.sent) return;
    const int count = (int)(end - list.sent);
    taken_.hold(own_.host());
    const uint64_t* places = own_.bring(list, list.sent, count);
    for (size_t i = 0; i < sizes_.tables(); i++) {
        size_t at = (i * sizes_.asked() + list.sent) * (size_t)sizes_.W;
        own_.fetch(arrays_.host_answers + at, i, places, count);
        copy_async(arrays_.fetched + at, arrays_.host_answers + at, (size_t)count * (size_t)sizes_.W,
                   own_.host());
    }
    fetched_.record(own_.host());
    read_by_host_[(size_t)(&list - arrays_.lists.data())].record(own_.host());
    list.sent = end;
}

// Sends to[rank] rows of W elements to each rank and receives from[rank] rows from it, in order of rank.
template <typename T>
void NgramTables::exchange(const Communicator& group, const T* sent, const std::vector<size_t>& to,
                           T* received, const std::vector<size_t>& from, int W, Traffic kind,
                           cudaStream_t stream) const {
    grouped({group}, [&] {
        for (int rank = 0; rank < (int)sizes_.owners; rank++) {
            size_t out = to[(size_t)rank] * (size_t)W, in = from[(size_t)rank] * (size_t)W;
            if (rank == own_.me()) {
                copy_async(received, sent, out, stream);
            } else {
                if (out > 0) group.send(sent, out, rank, kind, stream);
                if (in > 0) group.receive(received, in, rank, stream, kind);
            }
            sent += out, received += in;
        }
    });
}

inline void NgramTables::look_up(const Lookups& lookups) {
    if (!here()) return;
    if (!ahead_ || !ahead_->are_those_of(lookups)) list(arrays_.lists[1 - front_], lookups);
    ahead_.reset();
    front_ = 1 - front_;
    TableLists& l = front();
    const int asks = (int)l.asks(), W = sizes_.W;
    sums_copied_.hold(compute_);
    if (on_host()) {
        fetch(l, l.asks());
        copy_async(arrays_.place, l.place, l.asks(), compute_);
        fetched_.hold(compute_);
    } else {
        copy_async(arrays_.asked, l.asked, l.asks(), compute_);
    }
    if (several() && settings_.training) {
        copy_async(arrays_.own, l.own, l.distinct, compute_);
        copy_async(arrays_.list_rows, l.rows, l.asks(), compute_);
        copy_async(arrays_.order, l.order, l.asks(), compute_);
    }
    for (size_t i = 0; i < sizes_.tables(); i++) {
        floatX* answers = several() ? arrays_.answers : arrays_.rows[i];
        if (on_host())
            embedding_forward(answers, arrays_.place, arrays_.fetched + i * sizes_.asked() * (size_t)W,
                              nullptr, nullptr, asks, W, compute_);
        else
            fetch_rows(answers, own_.by_place(i), arrays_.asked, asks, compute_);
        if (several())
            exchange(mesh_.stage(), answers, l.from, arrays_.rows[i], l.to, W, Traffic::parameters, compute_);
        if (settings_.training)
            zero_async(arrays_.grads + i * sizes_.distinct() * (size_t)W, l.wants() * (size_t)W, compute_);
    }
    taken_.record(compute_);
    read_by_compute_[front_].record(compute_);
}

inline PlacesOfRows NgramTables::places(int micro_batch, int slot) {
    if (!here()) return {};
    size_t at = (size_t)micro_batch * sizes_.lookups;
    int* to = arrays_.slots + (size_t)slot * 2 * sizes_.lookups;
    copy_async(to, front().slots + at, sizes_.lookups, compute_);
    if (settings_.training) copy_async(to + sizes_.lookups, front().by_slot + at, sizes_.lookups, compute_);
    read_by_compute_[front_].record(compute_);
    return {to, to + sizes_.lookups};
}

inline void NgramTables::sum_gradients() {
    if (!here()) return;
    const TableLists& l = front();
    const size_t W = (size_t)sizes_.W, each = sums_of_table();
    std::vector<SquaresRange> ranges;
    for (size_t i = 0; i < sizes_.tables(); i++) {
        float *grads = arrays_.grads + i * sizes_.distinct() * W, *sums = arrays_.sums + i * each;
        if (several()) {
            exchange(mesh_.stage(), (const float*)grads, l.to, arrays_.received, l.from, sizes_.W,
                     Traffic::gradients, compute_);
            zero_async(sums, l.distinct * W, compute_);
            sum_rows(sums, arrays_.scratch, (const float*)arrays_.received, arrays_.list_rows, arrays_.order,
                     (int)l.asks(), sizes_.W, compute_);
        }
        ranges.push_back({i * each, l.distinct * W});
    }
    sum_squares(arrays_.squares, arrays_.norm_scratch, arrays_.sums, ranges, compute_);
}

inline void NgramTables::update(const AdaGrad& adagrad, const float* scale) {
    if (!here()) return;
    TableLists& l = front();
    const size_t each = sums_of_table(), W = (size_t)sizes_.W;
    for (size_t i = 0; i < l.distinct && !ledger; i++) own_.changed().insert(l.own[i]);
    for (size_t i = 0; i < sizes_.tables() && !on_host(); i++)
        step_rows(own_.by_place(i), arrays_.own, arrays_.sums + i * each, (int)l.distinct, scale, adagrad,
                  compute_);
    if (on_host()) {
        // two copies, used in turn: the host may still be applying the previous step's update
        float* scale_there = arrays_.host_scale + front_;
        copy_async(scale_there, scale, 1, compute_);
        order_.order(compute_, own_.host());
        for (size_t i = 0; i < sizes_.tables(); i++)
            copy_async(arrays_.host_sums + i * each, arrays_.sums + i * each, l.distinct * W, own_.host());
        sums_copied_.record(own_.host());
        TableLists& next = arrays_.lists[1 - front_];
        size_t first = ahead_ ? l.shared : 0;
        own_.step(l, 0, first, arrays_.host_sums, each, scale_there, adagrad);
        if (ahead_) fetch(next, next.asks());
        own_.step(l, first, l.distinct, arrays_.host_sums, each, scale_there, adagrad);
    }
    read_by_host_[front_].record(own_.host());
}
