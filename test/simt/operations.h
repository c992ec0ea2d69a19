/*
Part of simt.cc: barriers, warp operations, and the instructions of kernels/ptx.cuh.
*/
#pragma once

namespace simt {

void* dynamic_shared() {
    return (void*)dynamic_begin;
}
unsigned lane() {
    return running->lane();
}
unsigned live_lanes() {
    return ~running->warp->ended;
}

int sync_block(const char* name, bool predicate) {
    if (block.waiting && strcmp(name, block.barrier) != 0) {
        fail(Kind::divergence, __builtin_return_address(0), "%s calls %s while others wait in %s",
             simt::name(*running).text, name, block.barrier);
    }
    block.barrier = name;
    block.waiting++;
    block.votes += predicate;
    running->waits_in = name;
    if (block.waiting == block.threads) {
        block.result = block.votes;
        block.waiting = block.votes = 0;
        block.interval++;
        make_all_ready();
    }
    run_next();
    return (int)block.result;
}

void sync_warp(unsigned mask) {
    meet(
        "__syncwarp", mask, [](void* const*, unsigned) {}, nullptr);
}

// The value from a lane that does not participate is undefined in CUDA; here it is all ones.
uint64_t shuffle(unsigned mask, uint64_t value, unsigned source_lane) {
    struct Lane {
        uint64_t value, result;
        unsigned source;
    } self = {value, ~uint64_t(0), source_lane};
    auto exchange = [](void* const* lanes, unsigned present) {
        for (unsigned rest = present; rest; rest &= rest - 1) {
            Lane& lane = *static_cast<Lane*>(lanes[__builtin_ctz(rest)]);
            if (present >> lane.source & 1) lane.result = static_cast<Lane*>(lanes[lane.source])->value;
        }
    };
    meet("a warp shuffle", mask, exchange, &self);
    return self.result;
}

unsigned ballot(unsigned mask, bool predicate) {
    struct Lane {
        bool predicate;
        unsigned result;
    } self = {predicate, 0};
    auto collect = [](void* const* lanes, unsigned present) {
        unsigned result = 0;
        for (unsigned i = 0; i < warp_size; i++) {
            if (present >> i & 1 && static_cast<Lane*>(lanes[i])->predicate) result |= 1u << i;
        }
        for (unsigned i = 0; i < warp_size; i++) {
            if (present >> i & 1) static_cast<Lane*>(lanes[i])->result = result;
        }
    };
    meet("a warp vote", mask, collect, &self);
    return self.result;
}

namespace {

void need_whole_warp(const char* name, unsigned present) {
    if (present != ~0u) fail(Kind::divergence, nullptr, "%s without all 32 lanes", name);
}

float bf16_half(uint32_t pair, int half) {
    return std::bit_cast<float>(half ? pair & 0xffff0000u : pair << 16);
}

struct MmaLane {
    float* d;
    const uint32_t *a, *b;
};

void multiply(void* const* lanes, unsigned present) {
    need_whole_warp("mma", present);
    float a[16][16], b[16][8], d[16][8];
    auto each_d = [&](auto move) {
        for (int lane = 0; lane < 32; lane++) {
            float* own = static_cast<const MmaLane*>(lanes[lane])->d;
            for (int i = 0; i < 4; i++) move(own[i], d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
        }
    };
    for (int lane = 0; lane < 32; lane++) {
        const auto& own = *static_cast<const MmaLane*>(lanes[lane]);
        int group = lane / 4, pair = lane % 4 * 2;
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++)
                a[group + i % 2 * 8][pair + i / 2 * 8 + half] = bf16_half(own.a[i], half);
            for (int i = 0; i < 2; i++) b[pair + i * 8 + half][group] = bf16_half(own.b[i], half);
        }
    }
    each_d([](float& own, float& element) { element = own; });
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
#pragma omp simd
            for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
        }
    }
    each_d([](float& own, float& element) { own = element; });
}

struct LdmatrixLane {
    uint32_t* out;
    const void* row;
    int matrices;
    bool transposed;
    const void* where;
};

void load_matrices(void* const* lanes, unsigned present) {
    need_whole_warp("ldmatrix", present);
    const auto& first = *static_cast<const LdmatrixLane*>(lanes[0]);
    Thread* thread = &threads[running->number / warp_size * warp_size];
    for (int m = 0; m < first.matrices; m++) {
        uint16_t matrix[8][8];
        for (int r = 0; r < 8; r++) {
            const auto& own = *static_cast<const LdmatrixLane*>(lanes[m * 8 + r]);
            check(thread[m * 8 + r], own.row, 16, 16, Access::read, own.where);
            memcpy(matrix[r], own.row, 16);
        }
        for (int lane = 0; lane < 32; lane++) {
            int row = lane / 4, column = lane % 4 * 2;
            uint32_t low = first.transposed ? matrix[column][row] : matrix[row][column];
            uint32_t high = first.transposed ? matrix[column + 1][row] : matrix[row][column + 1];
            static_cast<const LdmatrixLane*>(lanes[lane])->out[m] = low | high << 16;
        }
    }
}

bool is_shared(const void* pointer) {
    return dynamic_space.holds((uintptr_t)pointer) || program.thread_locals.holds((uintptr_t)pointer);
}

void need_shared(const void* pointer, const char* name, const void* where) {
    if (is_shared(pointer)) return;
    fail(Kind::out_of_bounds, where, "%s: %s needs an address in shared memory", simt::name(*running).text,
         name);
}

}  // namespace

void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    MmaLane self = {d, a, b};
    meet("mma", ~0u, multiply, &self);
}

void ldmatrix(uint32_t* out, const void* row, int matrices, bool transposed) {
    LdmatrixLane self = {out, row, matrices, transposed, __builtin_return_address(0)};
    if ((int)running->lane() < matrices * 8) need_shared(row, "ldmatrix", self.where);
    meet("ldmatrix", ~0u, load_matrices, &self);
}

void fence_device() {
    running->fenced_device = true;
}

// On a GPU, shared memory has its own address space, and this access would go astray.
void need_global(const void* pointer, const char* name) {
    if (!is_shared(pointer)) return;
    fail(Kind::out_of_bounds, __builtin_return_address(0), "%s: %s needs an address in global memory",
         simt::name(*running).text, name);
}

void add_global(float* sum, float value) {
    const void* where = __builtin_return_address(0);
    check(*running, sum, sizeof *sum, sizeof *sum, Access::atomic, where);
    if (!device_memory.holds((uintptr_t)sum))
        fail(Kind::out_of_bounds, where, "%s: red.global needs an address in global memory",
             simt::name(*running).text);
    *sum += value;
}

// The bytes belong to the copy from here until the wait: any other read or write of them is reported.
void cp_async_16(void* shared, const void* global, bool valid) {
    const void* where = __builtin_return_address(0);
    need_shared(shared, "cp.async", where);
    if (valid) check(*running, global, 16, 16, Access::read, where);
    check(*running, shared, 16, 16, Access::write, where, pending_bit);
    if (running->copies.empty()) running->copies.emplace_back();
    running->copies.back().push_back({shared, valid ? global : nullptr});
}

void cp_async_commit() {
    if (running->copies.empty()) running->copies.emplace_back();
    running->copies.emplace_back();
}

// Waits for all but the `pending` youngest committed groups; the last group is the open one.
void cp_async_wait(int pending) {
    auto& groups = running->copies;
    while ((int)groups.size() > pending + 1) {
        for (const Copy& copy : groups.front()) {
            if (copy.global)
                memcpy(copy.shared, copy.global, 16);
            else
                memset(copy.shared, 0, 16);
            check(*running, copy.shared, 16, 16, Access::write, __builtin_return_address(0));
        }
        groups.erase(groups.begin());
    }
}

}  // namespace simt
