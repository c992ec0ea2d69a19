// Tests of the simulated device: kernels whose blocks or threads race in device memory are reported,
// whichever of them runs first; kernels that order their accesses are not.
// seconds: 8
#include "kernels/ptx_hopper.cuh"
#include "test/simt/errors.h"

#include <set>

using simt::Kind;

namespace {

constexpr uint64_t seeds = 4;

// Calls f with seeds that run blocks and threads in several orders.
template <typename F>
void each_seed(F&& f) {
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        CAPTURE(seed);
        simt::set_seed(seed);
        f();
    }
    simt::set_seed(1);
}

bool has(const std::string& text, const char* part) {
    return text.find(part) != text.npos;
}

// ----------------------------------------------------------------------------
// unordered

__global__ void one_element_kernel(int* out) {
    *out = 1;
}

__global__ void writer_and_reader_kernel(int* value, int* out) {
    if (blockIdx.x == 0)
        *value = 1;
    else
        *out = *value;
}

// All blocks read an element, and one writes it.
__global__ void readers_and_writer_kernel(int* value, int* out, unsigned writer) {
    out[blockIdx.x] = *value;
    if (blockIdx.x == writer) *value = 1;
}

// Block 0 writes 16 bytes, block 1 a `Type` at byte `at`.
template <typename Type>
__global__ void overlap_kernel(unsigned char* bytes, int at) {
    if (blockIdx.x == 0)
        store(bytes, Vec<unsigned char, 16>{});
    else
        *(Type*)(bytes + at) = {};
}

template <typename Type>
__global__ void neighbours_kernel(Type* out) {
    size_t i = threadIdx.x * gridDim.x + blockIdx.x;
    out[i] = Type{};
}

enum class Between { nothing, warp_operation, barrier };

template <Between between>
__global__ void threads_kernel(int* out, int distance) {
    int t = threadIdx.x;
    out[t] = t;
    if (between == Between::warp_operation) __syncwarp();
    if (between == Between::barrier) __syncthreads();
    out[64 + t] = out[t ^ distance];
}

}  // namespace

TEST_CASE("two blocks that use the same bytes are reported, whichever runs first") {
    Buffer<int> values(std::vector<int>(64, 0)), out(64);
    std::set<bool> write_first;
    each_seed([&] {
        check_one(errors_of(one_element_kernel, 2, 1, 0, (int*)out), Kind::race,
                  {"thread (0,0,0) writes 4 bytes", "byte 0 of its allocation",
                   "which thread (0,0,0) of block (", "wrote, and no counter orders the two",
                   "one_element_kernel", "test_simt_grid_errors.cu:"});
        auto errors = errors_of(writer_and_reader_kernel, 2, 1, 0, (int*)values, (int*)out);
        check_one(errors, Kind::race, {});
        bool write = has(errors[0].text, "of block (0,0,0) wrote");
        CHECK(write == has(errors[0].text, "thread (0,0,0) reads 4 bytes"));
        CHECK(!write == has(errors[0].text, "of block (1,0,0) read,"));
        write_first.insert(write);
        for (unsigned writer : {0, 1, 2})
            check_one(errors_of(readers_and_writer_kernel, 3, 1, 0, (int*)values, (int*)out, writer),
                      Kind::race, {});
        CHECK(errors_of(readers_and_writer_kernel, 3, 1, 0, (int*)values, (int*)out, 3).empty());
        CHECK(errors_of(one_element_kernel, 1, 1, 0, (int*)out).empty());
        CHECK(errors_of(one_element_kernel, 1, 1, 0, (int*)out).empty());  // grids run one after another
    });
    CHECK(write_first.size() == 2);
}

TEST_CASE("neighbouring bytes are no race, the same bytes are") {
    Buffer<unsigned char> bytes(256);
    unsigned char* at = bytes;
    each_seed([&] {
        for (int place : {0, 1, 8, 15}) {
            CAPTURE(place);
            check_one(errors_of(overlap_kernel<char>, 2, 1, 0, at, place), Kind::race, {});
            check_one(errors_of(overlap_kernel<short>, 2, 1, 0, at, place / 2 * 2), Kind::race, {});
            check_one(errors_of(overlap_kernel<double>, 2, 1, 0, at, place / 8 * 8), Kind::race, {});
        }
        CHECK(errors_of(overlap_kernel<char>, 2, 1, 0, at, 16).empty());
        CHECK(errors_of(neighbours_kernel<char>, 4, 64, 0, (char*)at).empty());
        CHECK(errors_of(neighbours_kernel<__nv_bfloat16>, 4, 32, 0, (__nv_bfloat16*)at).empty());
        CHECK(errors_of(neighbours_kernel<float>, 4, 16, 0, (float*)at).empty());
        CHECK(errors_of(neighbours_kernel<Vec<float, 4>>, 4, 4, 0, (Vec<float, 4>*)at).empty());
    });
}

TEST_CASE("threads of a block that nothing orders are reported") {
    Buffer<int> out(128);
    each_seed([&] {
        auto errors = [&](auto kernel, int distance) {
            return errors_of(kernel, 1, 64, 0, (int*)out, distance);
        };
        check_one(errors(threads_kernel<Between::nothing>, 1), Kind::race, {"since the last barrier"});
        CHECK(errors(threads_kernel<Between::nothing>, 0).empty());
        CHECK(errors(threads_kernel<Between::warp_operation>, 1).empty());
        check_one(errors(threads_kernel<Between::warp_operation>, 32), Kind::race, {});
        CHECK(errors(threads_kernel<Between::barrier>, 32).empty());
    });
}

// ----------------------------------------------------------------------------
// turns

namespace {

enum class Slip { none, no_wait, other_counter, look_at_other, no_barrier_after_wait, no_barrier_before_set };

// Blocks add to the same sums, each in its turn.
template <Slip slip>
__global__ void turns_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    int t = threadIdx.x;
    unsigned turn = 0;
    if (t == 0) {
        turn = atomicAdd(ticket, 1);
        if (slip == Slip::other_counter)
            counter_wait(counters + 1 + turn, 0);
        else if (slip == Slip::look_at_other)
            counter_wait(counters, turn, counter_now(counters + 1) + turn);
        else if (slip != Slip::no_wait)
            counter_wait(counters, turn);
    }
    if (slip != Slip::no_barrier_after_wait) __syncthreads();
    for (int i = t; i < 256; i += blockDim.x) sums[i] += 1;
    if (slip != Slip::no_barrier_before_set) __syncthreads();
    if (t == 0) counter_set(counters, turn + 1);
}

// Lane 0 waits on behalf of its warp.
template <bool sync>
__global__ void warp_turns_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    unsigned turn = 0;
    if (threadIdx.x == 0) counter_wait(counters, turn = atomicAdd(ticket, 1));
    if (sync) __syncwarp();
    sums[threadIdx.x] += 1;
    __syncwarp();
    if (threadIdx.x == 0) counter_set(counters, turn + 1);
}

// Warp 1 adds; warp 0 waits for the turn and passes it on. They synchronize at named barriers only.
template <bool meet>
__global__ void two_warps_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    int t = threadIdx.x;
    unsigned turn = 0;
    if (t == 0) counter_wait(counters, turn = atomicAdd(ticket, 1));
    if (t < 32)
        named_barrier_arrive(1, 64);
    else
        named_barrier_sync(1, 64);
    if (t >= 32) sums[t - 32] += 1;
    if (meet && t < 32) named_barrier_sync(2, 64);
    if (meet && t >= 32) named_barrier_arrive(2, 64);
    if (t == 0) counter_set(counters, turn + 1);
}

// The first block signals the second, and the second the third, which reads what the first wrote.
template <bool second_waits>
__global__ void chain_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    unsigned block = atomicAdd(ticket, 1);
    if (block == 0) {
        sums[0] = 1;
    } else if (block == 1) {
        if (second_waits) counter_wait(counters, 1);
    } else {
        counter_wait(counters, 2);
        sums[1] = sums[0];
    }
    counter_set(counters, block + 1);
}

// Writes after a block has passed its turn on are not part of the turn.
__global__ void late_write_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    unsigned turn = atomicAdd(ticket, 1);
    counter_wait(counters, turn);
    counter_set(counters, turn + 1);
    sums[0] = 1;
}

template <bool waits>
__global__ void bulk_turns_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    int* values = dynamic_shared<int>();
    for (int i = 0; i < 4; i++) values[i] = i;
    fence_async();
    unsigned turn = atomicAdd(ticket, 1);
    counter_wait(counters, turn);
    if (turn == 0)
        bulk_store(sums, values, 16);
    else
        bulk_add((float*)sums, (float*)values, 16);
    bulk_commit();
    if (waits)
        bulk_wait<0>();
    else
        bulk_wait_read<0>();
    counter_set(counters, turn + 1);
}

// The first block writes; the second, in its turn, and the third, which does not wait, add.
__global__ void early_add_kernel(int* sums, unsigned* counters, unsigned* ticket) {
    unsigned turn = atomicAdd(ticket, 1);
    if (turn == 1) counter_wait(counters, 1);
    if (turn == 0)
        sums[0] = 1;
    else
        atomicAdd(sums, 1);
    counter_set(counters, turn + 1);
}

template <typename Kernel>
std::vector<simt::Error> turn_errors(Kernel kernel, unsigned blocks, unsigned threads) {
    Buffer<int> sums(std::vector<int>(256, 0));
    Buffer<unsigned> counters(std::vector<unsigned>(16, 0)), ticket(std::vector<unsigned>{0});
    return errors_of(kernel, blocks, threads, 16, (int*)sums, (unsigned*)counters, (unsigned*)ticket);
}

}  // namespace

TEST_CASE("blocks that take turns are in order, unless they forget a part of it") {
    each_seed([&] {
        for (unsigned threads : {64, 256}) {
            auto errors = [&](auto kernel) { return turn_errors(kernel, 4, threads); };
            CHECK(errors(turns_kernel<Slip::none>).empty());
            check_one(errors(turns_kernel<Slip::no_wait>), Kind::race, {"no counter orders"});
            check_one(errors(turns_kernel<Slip::other_counter>), Kind::race, {"no counter orders"});
            check_one(errors(turns_kernel<Slip::look_at_other>), Kind::misuse, {"another counter"});
            check_one(errors(turns_kernel<Slip::no_barrier_after_wait>), Kind::race, {"no counter orders"});
            check_one(errors(turns_kernel<Slip::no_barrier_before_set>), Kind::race, {"no counter orders"});
        }
        CHECK(turn_errors(warp_turns_kernel<true>, 4, 32).empty());
        for (unsigned threads : {2, 32})
            check_one(turn_errors(warp_turns_kernel<false>, 2, threads), Kind::race, {"no counter orders"});
        CHECK(turn_errors(two_warps_kernel<true>, 4, 64).empty());
        check_one(turn_errors(two_warps_kernel<false>, 4, 64), Kind::race, {"no counter orders"});
        CHECK(turn_errors(early_add_kernel, 2, 1).empty());
        check_one(turn_errors(early_add_kernel, 3, 1), Kind::race, {"updates atomically", "wrote, and no"});
        check_one(turn_errors(late_write_kernel, 2, 1), Kind::race, {"no counter orders"});
    });
}

TEST_CASE("what a block learned from another it hands on") {
    each_seed([&] {
        CHECK(turn_errors(chain_kernel<true>, 3, 1).empty());
        check_one(turn_errors(chain_kernel<false>, 3, 1), Kind::race, {"reads 4 bytes"});
    });
}

TEST_CASE("a bulk store belongs to a turn when it has been waited for") {
    each_seed([&] {
        CHECK(turn_errors(bulk_turns_kernel<true>, 3, 1).empty());
        check_one(turn_errors(bulk_turns_kernel<false>, 3, 1), Kind::race, {"no counter orders"});
    });
}

// ----------------------------------------------------------------------------
// atomics

namespace {

template <bool plain_read>
__global__ void counting_kernel(int* count, int* out) {
    atomicAdd(count, 1);
    add_global((float*)count + 1, 1.0f);
    if (plain_read) out[blockIdx.x * blockDim.x + threadIdx.x] = *count;
}

__global__ void bulk_counting_kernel(float* sums) {
    float* values = dynamic_shared<float>();
    for (int i = 0; i < 4; i++) values[i] = 1;
    fence_async();
    bulk_add(sums, values, 16);
    bulk_commit();
    bulk_wait<0>();
}

// The block that finishes last adds up the parts of all blocks.
template <bool fence>
__global__ void last_block_kernel(int* parts, unsigned* count, int* total) {
    __shared__ bool last;
    int t = threadIdx.x;
    parts[blockIdx.x * 64 + t] = t;
    __syncthreads();
    if (t == 0) {
        if (fence) __threadfence();
        last = atomicAdd(count, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || t > 0) return;
    *total = 0;
    for (int i = 0; i < (int)gridDim.x * 64; i++) *total += parts[i];
}

}  // namespace

TEST_CASE("atomic operations do not race with each other, but with others") {
    Buffer<int> count(std::vector<int>(2, 0)), out(64);
    Buffer<float> sums(std::vector<float>(4, 0.0f));
    each_seed([&] {
        CHECK(errors_of(counting_kernel<false>, 4, 8, 0, (int*)count, (int*)out).empty());
        CHECK(errors_of(bulk_counting_kernel, 4, 1, 16, (float*)sums).empty());
        check_one(errors_of(counting_kernel<true>, 4, 8, 0, (int*)count, (int*)out), Kind::race, {});
        check_one(errors_of(counting_kernel<true>, 4, 1, 0, (int*)count, (int*)out), Kind::race,
                  {"of block ("});
    });
}

TEST_CASE("the block that comes last has what the others fenced") {
    each_seed([&] {
        Buffer<int> parts(256), total(1);
        Buffer<unsigned> counts(std::vector<unsigned>(2, 0));
        unsigned* count = counts;
        CHECK(errors_of(last_block_kernel<true>, 4, 64, 0, (int*)parts, count, (int*)total).empty());
        CHECK(total.host()[0] == 4 * 2016);
        check_one(errors_of(last_block_kernel<false>, 4, 64, 0, (int*)parts, count + 1, (int*)total),
                  Kind::race, {"reads 4 bytes", "no counter orders"});
    });
}

// ----------------------------------------------------------------------------
// copies

namespace {

enum class By { cp_async, bulk_load };

template <By by>
__global__ void copy_kernel(float* values) {
    float* shared = dynamic_shared<float>();
    auto* barrier = (Mbarrier*)(shared + 4);
    if (blockIdx.x == 0) {
        values[2] = 1;
    } else if (by == By::cp_async) {
        cp_async_16(shared, values);
        cp_async_commit();
        cp_async_wait<0>();
    } else {
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect(barrier, 16);
        bulk_load(shared, values, 16, barrier);
        mbarrier_wait(barrier, 0);
    }
}

// Another thread writes to the source that a copy of thread 0 may still read.
template <bool waits>
__global__ void write_under_copy_kernel(float* values) {
    float* shared = dynamic_shared<float>();
    auto* barrier = (Mbarrier*)(shared + 4);
    if (threadIdx.x == 0) mbarrier_init(barrier, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(barrier, 16);
        bulk_load(shared, values, 16, barrier);
        mbarrier_wait(barrier, 0);
    } else if (threadIdx.x == 32) {
        if (waits) mbarrier_wait(barrier, 0);
        values[0] = 1;
    }
}

}  // namespace

TEST_CASE("copies read device memory, too") {
    Buffer<float> values(std::vector<float>(4, 0.0f));
    each_seed([&] {
        check_one(errors_of(copy_kernel<By::cp_async>, 2, 1, 32, (float*)values), Kind::race, {"of block ("});
        check_one(errors_of(copy_kernel<By::bulk_load>, 2, 1, 32, (float*)values), Kind::race,
                  {"of block ("});
        CHECK(errors_of(write_under_copy_kernel<true>, 1, 64, 32, (float*)values).empty());
        check_one(errors_of(write_under_copy_kernel<false>, 1, 64, 32, (float*)values), Kind::race, {});
    });
}
