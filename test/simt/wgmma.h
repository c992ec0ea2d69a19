/*
Part of simt.cc: wgmma, the products of a warpgroup.

A product is computed when it is waited for, from the contents of shared memory at that time. Until then the
registers of D and A hold a poison value that no correct result contains, so a kernel that reads them is
exposed: by its result, or by the poison in a later product's shared memory. Writes to them are detected.
*/
#pragma once

namespace simt {
namespace {

constexpr unsigned warpgroup_size = 128;
constexpr uint32_t in_flight = 0x6fdeadbf;  // poison in registers: a large number, which arithmetic changes

struct Descriptor {
    uint64_t bits;

    uintptr_t start() const { return (bits & 0x3fff) << 4; }
    uintptr_t leading() const { return (bits >> 16 & 0x3fff) << 4; }
    uintptr_t stride() const { return (bits >> 32 & 0x3fff) << 4; }
    uintptr_t width() const { return 256u >> (bits >> 62); }  // bytes of the swizzle

    // The offset of element (i, k) in shared memory; i is m or n.
    uintptr_t at(bool mn_major, uintptr_t i, uintptr_t k) const {
        uintptr_t elements = width() / 2;
        uintptr_t offset = start() + (mn_major ? i / elements * leading() + i % elements * 2 +
                                                     k / 8 * stride() + k % 8 * width()
                                               : i / 8 * stride() + i % 8 * width() + k * 2);
        return offset ^ (offset >> 7 & (width() / 16 - 1)) << 4;
    }
};

// One wgmma of a warpgroup.
struct WarpgroupProduct {
    int count;
    float* d;  // thread 0's; identifies the accumulators of a warpgroup
    Descriptor a, b;
    const uint32_t* a_registers;  // thread 0's; null: A is in shared memory
    bool a_mn, b_mn, keep;
    const void* where;
};

// The registers that hold A for products in flight.
struct Fragments {
    std::array<uint32_t*, warpgroup_size> at;
    std::array<uint32_t, warpgroup_size * 4> values;
    int products;
};

struct Accumulator {
    std::array<float, 64 * 256> values;  // (64, N)
    std::array<float*, warpgroup_size> at;
    int count, products;  // products: in flight
};

struct Warpgroup {
    const char* name;
    unsigned present;
    bool fenced;
    std::array<void*, warpgroup_size> arguments;
    std::vector<std::vector<WarpgroupProduct>> groups;  // committed, oldest first, then the open one
    std::map<float*, Accumulator> accumulators;
    std::map<const uint32_t*, Fragments> fragments;
};

std::array<Warpgroup, Stacks::max_threads / warpgroup_size> warpgroups;

Warpgroup& my_warpgroup() {
    return warpgroups[running->number / warpgroup_size];
}
Thread* first_thread() {
    return &threads[running->number / warpgroup_size * warpgroup_size];
}

// All threads of the warpgroup call this with their own argument; the last to arrive completes the operation.
template <typename CompleteGroup>
void meet_warpgroup(const char* name, void* argument, const void* where, CompleteGroup complete_group) {
    Warpgroup& group = my_warpgroup();
    if (group.present && strcmp(group.name, name) != 0)
        fail(Kind::divergence, where, "%s calls %s while others of its warpgroup wait in %s",
             simt::name(*running).text, name, group.name);
    group.name = name;
    group.arguments[running->number % warpgroup_size] = argument;
    running->waits_in = name;
    if (++group.present < warpgroup_size) return run_next();
    group.present = 0;
    complete_group(group);
    running->waits_in = nullptr;
    Warp* first = &warps[first_thread()->number / warp_size];
    for (unsigned w = 0; w < 4; w++) {
        first[w].epoch++;
        make_ready(first[w], &first[w] == running->warp ? ~(1u << running->lane()) : ~0u);
    }
}

// Calls move() with each register and the accumulator's value for it in (64, N).
template <typename Move>
void each_value(Accumulator& accumulator, Move move) {
    int columns = accumulator.count * 2;
    for (unsigned t = 0; t < warpgroup_size; t++) {
        int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
        for (int i = 0; i < accumulator.count; i++) {
            int at = (row + i / 2 % 2 * 8) * columns + i / 4 * 8 + column + i % 2;
            move(accumulator.at[t][i], accumulator.values[at]);
        }
    }
}

struct Operand {
    const Descriptor& descriptor;
    bool mn_major;
    int size;  // m or n
    const void* where;
};

// Reads matrix (16, size) from shared memory, on behalf of one warp that the seed selects.
void read_operand(float* matrix, const Operand& operand) {
    const Thread& reader = first_thread()[random(4) * warp_size];
    const Descriptor& descriptor = operand.descriptor;
    uintptr_t repeat = 8 * descriptor.width(), start = descriptor.start() % repeat;
    if (!(descriptor.bits >> 62) || start >= descriptor.width())
        fail(Kind::misuse, operand.where,
             "wgmma: a descriptor without swizzle, or one that does not begin in the first row of an atom");
    int across = operand.mn_major ? 16 : operand.size, along = operand.mn_major ? operand.size : 16;
    for (int row = 0; row < across; row++)
        for (int unit = 0; unit < along; unit += 8) {
            int k = operand.mn_major ? row : unit, i = operand.mn_major ? unit : row;
            uintptr_t offset = descriptor.at(operand.mn_major, i, k);
            auto* from = (const uint16_t*)(dynamic_begin + offset);
            check_engine_read(reader, from, 16, operand.where);
            for (int e = 0; e < 8; e += 2) {
                if (memcmp(from + e, &in_flight, 4) == 0)
                    fail(Kind::race, operand.where,
                         "wgmma: in shared memory is what was read of registers of a wgmma not waited for");
            }
            for (int e = 0; e < 8; e++) {
                float value = bf16_half(from[e], 0);
                matrix[operand.mn_major ? k * operand.size + i + e : (k + e) * operand.size + i] = value;
            }
        }
}

void run_product(Warpgroup& group, WarpgroupProduct& product) {
    Accumulator& d = group.accumulators[product.d];
    int columns = product.count * 2;
    static float a[16][64], b[16 * 256];
    if (product.a_registers) {
        Fragments& fragments = group.fragments.at(product.a_registers);
        bool last = --fragments.products == 0;
        for (unsigned t = 0; t < warpgroup_size; t++) {
            const uint32_t* own = &fragments.values[t * 4];
            for (int i = 0; i < 4; i++) {
                if (fragments.at[t][i] != in_flight)
                    fail(Kind::race, product.where,
                         "%s changes registers of A of a wgmma that is not waited for",
                         name(first_thread()[t]).text);
                if (last) fragments.at[t][i] = own[i];
            }
            int row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
            for (int i = 0; i < 4; i++)
                for (int half = 0; half < 2; half++)
                    a[pair + i / 2 * 8 + half][row + i % 2 * 8] = bf16_half(own[i], half);
        }
        if (last) group.fragments.erase(product.a_registers);
    } else {
        read_operand(&a[0][0], {product.a, product.a_mn, 64, product.where});
    }
    read_operand(b, {product.b, product.b_mn, columns, product.where});
    if (!product.keep) memset(&d.values, 0, sizeof d.values);
    for (int m = 0; m < 64; m++) {
        float* row = &d.values[m * columns];
        for (int k = 0; k < 16; k++) {
            float left = a[k][m];
            const float* right = b + k * columns;
#pragma omp simd
            for (int n = 0; n < columns; n++) row[n] += left * right[n];
        }
    }
    if (--d.products) return;
    each_value(d, [&](float& own, float& value) {
        if (std::bit_cast<uint32_t>(own) != in_flight)
            fail(Kind::race, product.where, "an accumulator was written before its wgmma was waited for");
        own = value;
    });
    group.accumulators.erase(product.d);
}

struct ProductArgument {
    float* d;
    const uint32_t* a;
};

// Starts a product. The threads' `arguments` differ by thread; everything else must be the same.
void start_product(Warpgroup& group, WarpgroupProduct product) {
    auto argument = [&](unsigned t) { return static_cast<const ProductArgument*>(group.arguments[t]); };
    product.d = argument(0)->d;
    auto [found, is_new] = group.accumulators.try_emplace(product.d);
    Accumulator& d = found->second;
    if (is_new) {
        if (!group.fenced)
            fail(Kind::misuse, product.where, "wgmma on registers after a wait without wgmma_fence");
        d.count = product.count;
        d.products = 0;
        for (unsigned t = 0; t < warpgroup_size; t++) d.at[t] = argument(t)->d;
        each_value(d, [](float& own, float& value) { value = own, own = std::bit_cast<float>(in_flight); });
    }
    d.products++;
    product.a_registers = argument(0)->a;
    if (product.a_registers) {
        auto [known, is_first] = group.fragments.try_emplace(product.a_registers);
        Fragments& fragments = known->second;
        for (unsigned t = 0; t < warpgroup_size && is_first; t++) {
            fragments.at[t] = const_cast<uint32_t*>(argument(t)->a);  // variables in the kernel
            memcpy(&fragments.values[t * 4], fragments.at[t], 16);
            std::fill_n(fragments.at[t], 4, in_flight);
        }
        fragments.products = is_first ? 1 : fragments.products + 1;
    }
    if (group.groups.empty()) group.groups.emplace_back();
    group.groups.back().push_back(std::move(product));
}

void start_warpgroups() {
    for (Warpgroup& group : warpgroups) {
        group.present = 0;
        group.fenced = false;
        group.groups.clear();
        group.accumulators.clear();
        group.fragments.clear();
    }
}

}  // namespace

uint64_t matrix_descriptor(const void* start, uint64_t swizzle, int leading, int stride) {
    uintptr_t offset = (uintptr_t)start - dynamic_begin;
    if (offset >= dynamic_size || (offset | (unsigned)leading | (unsigned)stride) % 16 != 0)
        fail(Kind::misuse, __builtin_return_address(0),
             "%s: a matrix descriptor needs dynamic shared memory and multiples of 16 bytes",
             name(*running).text);
    return offset >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | swizzle << 62;
}

void wgmma(float* d, int count, uint64_t a, bool a_mn, uint64_t b, bool b_mn, bool keep) {
    const void* where = __builtin_return_address(0);
    ProductArgument argument = {d, nullptr};
    meet_warpgroup("wgmma", &argument, where, [&](Warpgroup& group) {
        start_product(group, {count, nullptr, {a}, {b}, nullptr, a_mn, b_mn, keep, where});
    });
}

void wgmma(float* d, int count, const uint32_t* a, uint64_t b, bool b_mn, bool keep) {
    const void* where = __builtin_return_address(0);
    ProductArgument argument = {d, a};
    meet_warpgroup("wgmma", &argument, where, [&](Warpgroup& group) {
        start_product(group, {count, nullptr, {}, {b}, nullptr, false, b_mn, keep, where});
    });
}

void wgmma_fence() {
    meet_warpgroup("wgmma_fence", nullptr, nullptr, [](Warpgroup& group) { group.fenced = true; });
}

void wgmma_commit() {
    meet_warpgroup("wgmma_commit", nullptr, nullptr, [](Warpgroup& group) {
        if (group.groups.empty()) group.groups.emplace_back();
        group.groups.emplace_back();
    });
}

void wgmma_wait(int pending) {
    meet_warpgroup("wgmma_wait", nullptr, nullptr, [&](Warpgroup& group) {
        while ((int)group.groups.size() > pending + 1) {
            for (auto& product : group.groups.front()) run_product(group, product);
            group.groups.erase(group.groups.begin());
        }
        group.fenced = false;
    });
}

// A block's registers are allocated per warpgroup; one that requests more waits until enough are free.
void set_registers(int registers, bool more) {
    const void* where = __builtin_return_address(0);
    if (registers % 8 != 0 || registers < 24 || registers > 256)
        fail(Kind::misuse, where, "setmaxnreg to %d: not a multiple of 8 from 24 to 256", registers);
    unsigned& own = registers_of[running->number / warpgroup_size];
    unsigned wanted = (unsigned)registers;
    if (more ? wanted < own : wanted > own)
        fail(Kind::misuse, where, "%s: setmaxnreg from %u to %u, the wrong way", name(*running).text, own,
             wanted);
    meet_warpgroup(more ? "setmaxnreg.inc" : "setmaxnreg.dec", nullptr, where, [&](Warpgroup&) {
        while (own + registers_left < wanted) sleep("setmaxnreg.inc", register_waiters);
        registers_left += own;
        registers_left -= wanted;
        own = wanted;
        wake(register_waiters);
    });
}

}  // namespace simt
