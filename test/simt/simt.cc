// The simulated device: threads, warps and blocks, and their scheduling. Its other parts are included at the
// end.
#include <boost/context/detail/fcontext.hpp>
#include <algorithm>
#include <array>
#include <cstdarg>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>

#include "test/simt/cuda_bf16.h"
#include "test/simt/memory.h"
#include "test/simt/order.h"
#include "test/simt/shadow.h"
#include "test/simt/simt.h"

// The variables that kernels see as threadIdx etc.
struct Index {
    unsigned x, y, z;
};
Index thread_index asm("simt_thread_index"), block_index asm("simt_block_index");
dim3 block_size asm("simt_block_size"), grid_size asm("simt_grid_size");

namespace simt {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr unsigned warp_size = 32, max_warps = Stacks::max_threads / warp_size;
constexpr size_t dynamic_shared_without_asking = 48 * 1024;

// ----------------------------------------------------------------------------
// state

// Computes the results of a warp operation once all of its lanes have arrived. lanes[i] is what lane i
// passed.
using Complete = void (*)(void* const* lanes, unsigned present);

struct Copy {
    void* shared;
    const void* global;  // null: zeros
};

// One bulk copy between shared memory and global memory, in pieces.
struct BulkCopy {
    struct Piece {
        void* shared;
        void* global;  // null: zeros
        size_t bytes;
    };
    std::vector<Piece> pieces;
    bool add;
    Stamp issued;
    const void* where;
};

// A group of bulk stores of one piece each.
struct BulkGroup {
    struct Unit {
        char bytes[16];
    };
    std::vector<BulkCopy> copies;
    std::vector<std::vector<Unit>> read;  // the contents of each copy's source, once it has been read
};

struct Warp {
    struct Meeting {
        const char* name;
        Complete complete;
        unsigned mask, present;
    };
    unsigned ended;  // lanes, including those that never existed
    uint32_t epoch;  // warp operations so far
    unsigned meetings;
    std::array<Meeting, warp_size> meeting;
    std::array<void*, warp_size> arguments;
};

struct Thread {
    fcontext_t context;
    unsigned number;  // in its block
    Index index;
    Warp* warp;
    const char* waits_in;  // null if it can run
    bool ended;
    std::vector<std::vector<Copy>> copies;  // committed groups, oldest first, then the open one
    std::vector<BulkGroup> stores;          // bulk copies to global memory
    Stamp fenced;                           // when it last called fence_async
    const unsigned* looked_at;              // by its last counter_now
    bool fenced_device;                     // it has called fence_device

    unsigned lane() const { return number % warp_size; }
};

struct Failure {
    bool happened = false;
    Kind kind;
    char text[512];
    const void* where;  // address in the kernel's code
};

Stacks stacks;
DeviceMemory device_memory;
Program program;
Region dynamic_space = reserve(1 << 20, PROT_READ | PROT_WRITE);
const uintptr_t dynamic_begin = dynamic_space.begin + (256 << 10);
size_t dynamic_size;
std::optional<Shadow<Scope::block>> shadow;  // covers dynamic shared memory, then the thread-local block
Shadow<Scope::grid> device_shadow(device_memory.size());

std::array<Thread, Stacks::max_threads> threads;
std::array<Warp, max_warps> warps;
Thread* running;
fcontext_t scheduler;
Invoke invoke;
Failure failure;

struct {
    unsigned threads, ended;
    uint32_t interval = 1;
    const char* barrier;  // the one that threads wait at
    unsigned waiting, votes, result;
} block;

// The threads that can run; the last one is next.
std::array<Thread*, Stacks::max_threads> ready;
unsigned ready_count;

uint64_t seed = [] {
    const char* text = getenv("SIMT_SEED");
    return text ? strtoull(text, nullptr, 0) : 1;
}();
uint64_t random_state;

// xorshift64*
uint32_t random(uint32_t below) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545F4914F6CDD1Du >> 32) * below >> 32);
}

void seed_random(uint64_t of_what) {
    random_state = (seed * 0x9E3779B97F4A7C15u ^ of_what * 0xD1B54A32D192ED03u) | 1;
    for (int i = 0; i < 4; i++) random(1);
}

// ----------------------------------------------------------------------------
// failing

struct Name {
    char text[64];
};

Name name(Index i, const char* what = "") {
    Name result;
    snprintf(result.text, sizeof result.text, "%s(%u,%u,%u)", what, i.x, i.y, i.z);
    return result;
}

Name name(const Thread& thread) {
    return name(thread.index, "thread ");
}

// Ends the kernel. Fibers are abandoned; the next block reuses their stacks. Neither this function nor its
// callers may use std::string, or containers of any types but our own: the linker may have chosen a copy of
// their functions that calls our hooks.
[[noreturn, gnu::format(printf, 3, 4)]] void fail(Kind kind, const void* where, const char* pattern, ...) {
    failure.happened = true;
    failure.kind = kind;
    failure.where = where;
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(failure.text, sizeof failure.text, pattern, arguments);
    va_end(arguments);
    jump_fcontext(scheduler, nullptr);
    __builtin_unreachable();
}

// ----------------------------------------------------------------------------
// fibers

void arrive(transfer_t from) {
    (from.data ? static_cast<Thread*>(from.data)->context : scheduler) = from.fctx;
}

// Returns when `running` has its turn again.
void run_next() {
    Thread* self = running;
    fcontext_t to = scheduler;
    if (ready_count) {
        running = ready[--ready_count];
        if (running == self) return;  // it reached a barrier last, and leaves it first
        thread_index = running->index;
        to = running->context;
    }
    arrive(jump_fcontext(to, self));
}

void make_ready(Thread& thread) {
    thread.waits_in = nullptr;
    ready[ready_count++] = &thread;
}

// Makes these lanes ready, in an order that the seed determines.
void make_ready(const Warp& warp, unsigned lanes) {
    Thread* first = &threads[(&warp - &warps[0]) * warp_size];
    unsigned factor = random(warp_size) | 1, offset = random(warp_size);
    for (unsigned i = 0; i < warp_size; i++) {
        unsigned lane = (i * factor + offset) % warp_size;
        if (lanes >> lane & 1) make_ready(first[lane]);
    }
}

void make_all_ready() {
    unsigned order[max_warps], count = (block.threads + warp_size - 1) / warp_size;
    std::iota(order, order + count, 0);
    for (unsigned i = count; i > 0; i--) {
        std::swap(order[i - 1], order[random(i)]);
        Warp& warp = warps[order[i - 1]];
        make_ready(warp, ~warp.ended);
    }
}

// Completes a meeting of a warp if no lane is missing. The running thread, if it participates, simply
// continues.
bool complete(Warp& warp, unsigned at) {
    Warp::Meeting meeting = warp.meeting[at];
    if (meeting.mask & ~(meeting.present | warp.ended)) return false;
    warp.meeting[at] = warp.meeting[--warp.meetings];
    warp.epoch++;
    meeting.complete(warp.arguments.data(), meeting.present);
    unsigned self = &warp == running->warp && !running->ended ? 1u << running->lane() : 0;
    if (meeting.present & self) running->waits_in = nullptr;
    make_ready(warp, meeting.present & ~self);
    return true;
}

void meet(const char* name, unsigned mask, Complete complete_with, void* arguments) {
    Warp& warp = *running->warp;
    unsigned self = 1u << running->lane();
    if (!(mask & self)) {
        fail(Kind::divergence, __builtin_return_address(0), "%s calls %s with a mask (0x%08x) that lacks it",
             simt::name(*running).text, name, mask);
    }
    unsigned at = 0;
    while (at < warp.meetings &&
           (warp.meeting[at].mask != mask || warp.meeting[at].complete != complete_with))
        at++;
    if (at == warp.meetings) warp.meeting[warp.meetings++] = {name, complete_with, mask, 0};
    warp.meeting[at].present |= self;
    warp.arguments[running->lane()] = arguments;
    running->waits_in = name;
    if (!complete(warp, at)) run_next();
}

void end_thread() {
    Warp& warp = *running->warp;
    running->ended = true;
    block.ended++;
    warp.ended |= 1u << running->lane();
    for (unsigned at = 0; at < warp.meetings;) {
        if (!complete(warp, at)) at++;
    }
}

void end_stores();
void end_hopper();

void thread_main(transfer_t from) {
    arrive(from);
    invoke(stacks.parameters());
    end_stores();
    end_thread();
    if (block.ended == block.threads) end_hopper();
    run_next();
}

// ----------------------------------------------------------------------------
// blocks

void start_hopper();

Index block_at(uint32_t number) {
    return {number % grid_size.x, number / grid_size.x % grid_size.y, number / grid_size.x / grid_size.y};
}

void start_block(uint32_t number) {
    block_index = block_at(number);
    block.threads = block_size.x * block_size.y * block_size.z;
    block.ended = block.waiting = block.votes = 0;
    block_start = ++block.interval;
    grid_order.start_block(block_start, number);
    ready_count = 0;
    memset((void*)program.thread_locals.begin, 0xff, program.thread_locals.size);
    memset((void*)dynamic_begin, 0xff, dynamic_size);
    for (unsigned w = 0; w * warp_size < block.threads; w++) {
        unsigned lanes = std::min(block.threads - w * warp_size, warp_size);
        warps[w].ended = lanes == warp_size ? 0 : ~0u << lanes;
        warps[w].epoch = warps[w].meetings = 0;
    }
    Index index = {0, 0, 0};
    for (unsigned t = 0; t < block.threads; t++) {
        Thread& thread = threads[t];
        thread.context = make_fcontext(stacks.top(t), Stacks::stack_size, thread_main);
        thread.number = t;
        thread.index = index;
        thread.warp = &warps[t / warp_size];
        thread.waits_in = nullptr;
        thread.ended = false;
        thread.copies.clear();
        thread.stores.clear();
        thread.fenced = 0;
        thread.looked_at = nullptr;
        thread.fenced_device = false;
        if (++index.x == block_size.x) index.x = 0, index.y++;
        if (index.y == block_size.y) index.y = 0, index.z++;
    }
    start_hopper();
    make_all_ready();
}

// Reports that no thread can run although some have not ended.
void describe_deadlock() {
    struct Group {
        unsigned count = 0;
        Index first;
    };
    std::map<std::string, Group> groups;
    for (unsigned t = 0; t < block.threads; t++) {
        const Thread& thread = threads[t];
        Group& group = groups[thread.ended ? "have ended" : std::string("wait in ") + thread.waits_in];
        if (group.count++ == 0) group.first = thread.index;
    }
    std::string text = "a wait that never ends";
    const char* separator = ": ";
    for (auto& [what, group] : groups) {
        text += separator + std::to_string(group.count) + " threads (first: " + name(group.first).text +
                ") " + what;
        separator = ", ";
    }
    failure = {true, Kind::divergence, {}, nullptr};
    snprintf(failure.text, sizeof failure.text, "%s", text.c_str());
}

bool run_block(uint32_t number) {
    start_block(number);
    running = nullptr;
    run_next();
    if (!failure.happened && block.ended < block.threads) describe_deadlock();
    return !failure.happened;
}

}  // namespace
}  // namespace simt

#include "test/simt/reports.h"
#include "test/simt/traffic.h"
#include "test/simt/grids.h"
#include "test/simt/checks.h"
#include "test/simt/operations.h"
#include "test/simt/hopper.h"
#include "test/simt/wgmma.h"
