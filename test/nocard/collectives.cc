#include "test/nocard/collectives.h"

#include <algorithm>
#include <cstring>

#include "test/nocard/device_memory.h"
#include "test/nocard/fault.h"
#include "test/nocard/number_types.h"

namespace nocard {
namespace {

// ----------------------------------------------------------------------------
// sums

template <typename T>
void reduce_numbers(T* sum, const T* other, size_t count, ncclRedOp_t reduction) {
    for (size_t i = 0; i < count; i++) {
        if (reduction == ncclSum) sum[i] = T(sum[i] + other[i]);
        if (reduction == ncclMax) sum[i] = std::max(sum[i], other[i]);
        if (reduction == ncclMin) sum[i] = std::min(sum[i], other[i]);
    }
}

// Rounded after each addition, as on a ring of cards.
void reduce_bf16(uint16_t* sum, const uint16_t* other, size_t count, ncclRedOp_t reduction) {
    for (size_t i = 0; i < count; i++) {
        float a = from_bf16(sum[i]), b = from_bf16(other[i]);
        sum[i] = to_bf16(reduction == ncclSum   ? a + b
                         : reduction == ncclMax ? std::max(a, b)
                                                : std::min(a, b));
    }
}

void reduce_into(char* sum, const char* other, size_t count, ncclDataType_t type, ncclRedOp_t reduction) {
    auto as = [&]<typename T>(T*) { reduce_numbers((T*)sum, (const T*)other, count, reduction); };
    switch (type) {
    case ncclInt8:
        return as((int8_t*)nullptr);
    case ncclUint8:
        return as((uint8_t*)nullptr);
    case ncclInt32:
        return as((int32_t*)nullptr);
    case ncclUint32:
        return as((uint32_t*)nullptr);
    case ncclInt64:
        return as((int64_t*)nullptr);
    case ncclUint64:
        return as((uint64_t*)nullptr);
    case ncclFloat32:
        return as((float*)nullptr);
    case ncclFloat64:
        return as((double*)nullptr);
    case ncclBfloat16:
        return reduce_bf16((uint16_t*)sum, (const uint16_t*)other, count, reduction);
    default:
        fault("NCCL", text("type %d is not known here", (int)type));
    }
}

// ----------------------------------------------------------------------------
// a call in flight

class Running {
public:
    Running(const Group& group, const CollectiveCall& call, uint64_t number)
        : group_(&group), call_(call), number_(number) {}

    // Does what can be done; returns false if something is left.
    bool advance() {
        if (phase_ == 0) begin(), phase_ = 1;
        if (phase_ == 1 && take_all(0)) phase_ = after_first(), taken_.clear();
        if (phase_ == 2 && take_all(1)) finish_all_reduce(), phase_ = 3;
        std::erase_if(sendings_, [](auto& sending) { return is_sent(*sending); });
        return phase_ == 3 && sendings_.empty();
    }

private:
    using Kind = CollectiveKind;

    bool is(Kind kind) const { return call_.kind == kind; }
    size_t unit() const { return bytes_of(call_.type); }
    size_t bytes() const { return call_.count * unit(); }
    std::string name() const { return name_of(call_.kind); }

    // An all-reduce cuts its numbers into one slice per rank; the first slices may be one number longer.
    size_t slice_begin(int rank) const {
        size_t slices = (size_t)group_->size(), slice = (size_t)rank;
        return call_.count / slices * slice + std::min(slice, call_.count % slices);
    }
    size_t slice_bytes(int rank) const { return (slice_begin(rank + 1) - slice_begin(rank)) * unit(); }

    template <typename F>
    void for_others(F&& f) const {
        for (int other = 0; other < group_->size(); other++)
            if (other != group_->rank) f(other);
    }

    void send(int to, int32_t phase, const void* data, size_t bytes) {
        Label label = {group_->number,
                       number_,
                       phase + (is_between_two() ? phase_between_two : 0),
                       (int32_t)call_.kind,
                       (int32_t)call_.type,
                       (int32_t)call_.reduction,
                       call_.root,
                       call_.count};
        if (is(Kind::send)) label.call = (int32_t)Kind::receive, label.root = group_->rank;
        sendings_.push_back(send_message(group_->members[(size_t)to], label, data, bytes));
    }

    bool is_between_two() const { return is(Kind::send) || is(Kind::receive); }

    void read(const void* data, size_t bytes) const { require_written(name(), "what it sends", data, bytes); }

    // All data of the first phase is copied when it is sent, so that results may overwrite it.
    void begin() {
        auto from = (const char*)call_.from;
        switch (call_.kind) {
        case Kind::all_reduce:
            read(from, bytes());
            for_others(
                [&](int other) { send(other, 0, from + slice_begin(other) * unit(), slice_bytes(other)); });
            own_.assign(from + slice_begin(group_->rank) * unit(),
                        from + slice_begin(group_->rank + 1) * unit());
            break;
        case Kind::reduce_scatter:
            read(from, bytes() * (size_t)group_->size());
            for_others([&](int other) { send(other, 0, from + (size_t)other * bytes(), bytes()); });
            own_.assign(from + (size_t)group_->rank * bytes(), from + (size_t)(group_->rank + 1) * bytes());
            break;
        case Kind::all_gather:
            read(from, bytes());
            for_others([&](int other) { send(other, 0, from, bytes()); });
            break;
        case Kind::broadcast: {
            // The others send only their labels, for comparison.
            bool is_root = group_->rank == call_.root;
            if (is_root) read(from, bytes());
            for_others([&](int other) { send(other, 0, from, is_root ? bytes() : 0); });
            break;
        }
        case Kind::send:
            read(from, bytes());
            send(call_.root, 0, from, bytes());
            break;
        case Kind::receive:
            break;
        }
    }

    bool takes_from(int other) const {
        if (is(Kind::receive)) return other == call_.root;
        return !is(Kind::send) && other != group_->rank;
    }

    // Takes the messages of a phase; returns whether all have arrived.
    bool take_all(int32_t phase) {
        taken_.resize((size_t)group_->size());
        bool all = true;
        for (int other = 0; other < group_->size(); other++) {
            auto& message = taken_[(size_t)other];
            if (!takes_from(other) || message) continue;
            message = take_message(group_->members[(size_t)other], group_->number, number_,
                                   phase + (is_between_two() ? phase_between_two : 0));
            all = all && message;
            if (message) compare(other, message->label);
        }
        return all;
    }

    static std::string words(CollectiveKind kind, uint64_t count, int32_t type, int32_t reduction,
                             int32_t root) {
        return text("%s of %zu numbers of type %d, operation %d, root %d", name_of(kind), (size_t)count, type,
                    reduction, root);
    }

    void compare(int other, const Label& label) const {
        bool same = label.call == (int32_t)call_.kind && label.type == (int32_t)call_.type &&
                    label.count == call_.count && label.reduction == (int32_t)call_.reduction &&
                    label.root == call_.root;
        if (same) return;
        std::string mine = words(call_.kind, call_.count, call_.type, call_.reduction, call_.root);
        std::string theirs =
            words((CollectiveKind)label.call, label.count, label.type, label.reduction, label.root);
        fault(name(), text("ranks %d and %d make different calls, as number %zu on a group of %d: %s; %s",
                           group_->members[(size_t)group_->rank], group_->members[(size_t)other],
                           (size_t)number_, group_->size(), mine.c_str(), theirs.c_str()));
    }

    // Adds up the parts of all ranks in the order of a ring: an all-reduce begins with this rank's part, a
    // reduce-scatter ends with it.
    void add_up() {
        std::vector<char> sum;
        size_t count = own_.size() / unit();
        int first = group_->rank + (is(Kind::all_reduce) ? 0 : 1);
        for (int step = 0; step < group_->size(); step++) {
            int rank = (first + step) % group_->size();
            const std::vector<char>& part = rank == group_->rank ? own_ : taken_[(size_t)rank]->bytes;
            if (step == 0)
                sum = part;
            else
                reduce_into(sum.data(), part.data(), count, call_.type, call_.reduction);
        }
        own_ = std::move(sum);
    }

    // Returns the next phase.
    int after_first() {
        auto to = (char*)call_.to;
        switch (call_.kind) {
        case Kind::all_reduce:
            add_up();
            for_others([&](int other) { send(other, 1, own_.data(), own_.size()); });
            return 2;
        case Kind::reduce_scatter:
            add_up();
            write(to, own_.data(), own_.size());
            break;
        case Kind::all_gather:
            for (int rank = 0; rank < group_->size(); rank++) {
                const void* part =
                    rank == group_->rank ? call_.from : (const void*)taken_[(size_t)rank]->bytes.data();
                write(to + (size_t)rank * bytes(), part, bytes());
            }
            break;
        case Kind::broadcast:
            write(to, group_->rank == call_.root ? call_.from : taken_[(size_t)call_.root]->bytes.data(),
                  bytes());
            break;
        case Kind::receive:
            write(to, taken_[(size_t)call_.root]->bytes.data(), bytes());
            break;
        case Kind::send:
            break;
        }
        return 3;
    }

    void finish_all_reduce() {
        for (int rank = 0; rank < group_->size(); rank++) {
            const std::vector<char>& slice = rank == group_->rank ? own_ : taken_[(size_t)rank]->bytes;
            write((char*)call_.to + slice_begin(rank) * unit(), slice.data(), slice.size());
        }
    }

    static void write(void* to, const void* from, size_t bytes) {
        if (bytes && to != from) memmove(to, from, bytes);
        note_written(to, bytes);
    }

    static constexpr int32_t phase_between_two = 100;  // sends and receives are numbered separately

    const Group* group_;
    CollectiveCall call_;
    uint64_t number_;
    int phase_ = 0;
    std::vector<std::shared_ptr<Sending>> sendings_;
    std::vector<std::unique_ptr<Message>> taken_;  // each rank's, in this phase
    std::vector<char> own_;                        // this rank's slice
};

struct Ranges {
    const char* from = nullptr;
    size_t bytes_from = 0;
    char* to = nullptr;
    size_t bytes_to = 0;
};

Ranges ranges_of(const Group& group, const CollectiveCall& call) {
    size_t bytes = call.count * bytes_of(call.type), all = bytes * (size_t)group.size();
    Ranges ranges;
    bool reads = call.kind != CollectiveKind::receive &&
                 (call.kind != CollectiveKind::broadcast || call.root == group.rank);
    if (reads)
        ranges.from = (const char*)call.from,
        ranges.bytes_from = call.kind == CollectiveKind::reduce_scatter ? all : bytes;
    if (call.kind != CollectiveKind::send)
        ranges.to = (char*)call.to, ranges.bytes_to = call.kind == CollectiveKind::all_gather ? all : bytes;
    return ranges;
}

uint64_t next_number(Group& group, const CollectiveCall& call) {
    if (call.kind == CollectiveKind::send) return group.sent[(size_t)call.root]++;
    if (call.kind == CollectiveKind::receive) return group.received[(size_t)call.root]++;
    return group.collectives++;
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

const char* name_of(CollectiveKind kind) {
    constexpr const char* names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                     "ncclBroadcast", "ncclSend",          "ncclRecv"};
    return names[(int)kind];
}

void check_memory(const Group& group, const CollectiveCall& call) {
    const char* name = name_of(call.kind);
    Ranges ranges = ranges_of(group, call);
    require_device(name, "what it reads", ranges.from, ranges.bytes_from);
    require_device(name, "what it writes", ranges.to, ranges.bytes_to);
    if (!ranges.bytes_from || !ranges.bytes_to) return;
    // Results may be in place: at the input's address, or at this rank's part of the larger buffer.
    size_t part = call.count * bytes_of(call.type), own = part * (size_t)group.rank;
    const char* in_place = ranges.to;
    if (call.kind == CollectiveKind::all_gather) in_place = ranges.to + own;
    if (call.kind == CollectiveKind::reduce_scatter) in_place = ranges.to - own;
    bool overlap = ranges.from < ranges.to + ranges.bytes_to && ranges.to < ranges.from + ranges.bytes_from;
    if (overlap && ranges.from != in_place)
        fault(name, "what it reads overlaps what it writes, and is not in its place");
}

Operation collective_operation(const GroupPtr& group, const std::vector<CollectiveCall>& calls) {
    Operation operation;
    operation.call = name_of(calls[0].kind);
    for (const CollectiveCall& call : calls) {
        Ranges ranges = ranges_of(*group, call);
        if (ranges.bytes_from) operation.touched.push_back({ranges.from, ranges.bytes_from});
        if (ranges.bytes_to) operation.touched.push_back({ranges.to, ranges.bytes_to});
    }
    operation.begin = [group, calls]() -> Advance {
        auto running = std::make_shared<std::vector<Running>>();
        for (const CollectiveCall& call : calls)
            running->emplace_back(*group, call, next_number(*group, call));
        group->outstanding++;
        return [group, running] {
            if (!group->aborted) std::erase_if(*running, [](Running& call) { return call.advance(); });
            if (!running->empty() && !group->aborted) return false;
            group->outstanding--;
            return true;
        };
    };
    return operation;
}

}  // namespace nocard
