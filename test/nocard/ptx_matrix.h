/*
Tensor cores: ldmatrix, stmatrix, mma, and wgmma with its descriptors. kernels/ptx.cuh and
kernels/ptx_hopper.cuh describe the layout of fragments in registers and of matrices in shared memory.

A product reads shared memory when it is computed, which the seed draws: at once, when it is waited for, or in
between. Until then no other instruction may touch its registers; check_registers() (ptx_run.h) checks that.
*/
#pragma once

#include "test/nocard/ptx_async.h"

namespace nocard::ptx {

using Float8 = float __attribute__((vector_size(32), aligned(4), may_alias));

// d (16, n) += a (16, k) @ b (k, n), n a multiple of 8. Products of bf16, fp16 and fp8 are exact in float.
struct TileProduct {
    alignas(32) float a[16][32];
    alignas(32) float b[32][256];
    alignas(32) float d[16][256];

    void run(int n, int k) {
        for (int column = 0; column < n; column += 8) {
            for (int row = 0; row < 16; row += 4) {
                Float8 sum[4];
                for (int r = 0; r < 4; r++) sum[r] = Float8{};
                for (int j = 0; j < k; j++) {
                    Float8 right = *(const Float8*)&b[j][column];
                    for (int r = 0; r < 4; r++) sum[r] += right * a[row + r][j];
                }
                for (int r = 0; r < 4; r++) *(Float8*)&d[row + r][column] += sum[r];
            }
        }
    }
};

inline TileProduct& tile_product() {
    static thread_local TileProduct tile;
    return tile;
}

// ----------------------------------------------------------------------------
// numbers in memory and in fragments

enum class Element : uint8_t { bf16, fp16, e4m3, e5m2 };

inline int bytes_of(Element element) {
    return element == Element::bf16 || element == Element::fp16 ? 2 : 1;
}

inline float to_float(Element element, uint32_t bits) {
    switch (element) {
    case Element::bf16:
        return from_bf16((uint16_t)bits);
    case Element::fp16:
        return from_fp16((uint16_t)bits);
    case Element::e4m3:
        return from_small<e4m3>(bits & 255);
    default:
        return from_small<e5m2>(bits & 255);
    }
}

inline bool parse_element(std::string_view word, Element& element) {
    if (word == "bf16")
        element = Element::bf16;
    else if (word == "f16")
        element = Element::fp16;
    else if (word == "e4m3")
        element = Element::e4m3;
    else if (word == "e5m2")
        element = Element::e5m2;
    else
        return false;
    return true;
}

// Splits a register into its numbers: those of consecutive columns, the lowest column in the lowest bits.
template <typename Set>
void each_number(uint32_t word, Element element, Set set) {
    int bits = 8 * bytes_of(element);
    for (int k = 0; k < 32 / bits; k++) set(k, to_float(element, word >> bits * k));
}

inline void check_result(Warp& w, const std::vector<uint32_t>& registers, size_t count) {
    if (!w.grid->checks) return;
    for (size_t k = 0; k < count; k++) {
        for (int l = 0; l < 32; l++) {
            if (words(w, registers[k])[l] == undefined_bits) {
                fault(l, format("adds to register %zu of D, which nobody set", k));
            }
        }
    }
}

// Unpacks the registers of A (16, k): a pair of rows 8 apart, then the next columns.
inline void take_a(TileProduct& tile, const uint32_t* registers, size_t lanes_apart, Element element) {
    int each = 4 / bytes_of(element);
    for (int l = 0; l < 32; l++) {
        for (int h = 0; h < 4; h++) {
            float* row = &tile.a[l / 4 + 8 * (h & 1)][l % 4 * each + 4 * each * (h >> 1)];
            each_number(registers[(size_t)h * lanes_apart + (size_t)l], element,
                        [&](int k, float x) { row[k] = x; });
        }
    }
}

inline void put_d(Warp& w, const TileProduct& tile, const std::vector<uint32_t>& registers, size_t count) {
    for (size_t k = 0; k < count; k++) {
        LaneWord* to = words(w, registers[k]);
        for (int l = 0; l < 32; l++) {
            size_t row = (size_t)l / 4 + 8 * (k % 4 / 2), column = 8 * (k / 4) + 2 * ((size_t)l % 4) + k % 2;
            to[l] = std::bit_cast<uint32_t>(tile.d[row][column]);
        }
    }
}

inline void take_d(Warp& w, TileProduct& tile, const std::vector<uint32_t>& registers, size_t from,
                   size_t count) {
    for (size_t k = 0; k < count; k++) {
        const LaneWord* words_of = words(w, registers[from + k]);
        for (int l = 0; l < 32; l++) {
            size_t row = (size_t)l / 4 + 8 * (k % 4 / 2), column = 8 * (k / 4) + 2 * ((size_t)l % 4) + k % 2;
            tile.d[row][column] = std::bit_cast<float>((uint32_t)words_of[l]);
        }
    }
}

// ----------------------------------------------------------------------------
// mma

// list: D, A, B, C. value: the element of A; vector: that of B; access_bytes: the number of A's registers
inline void mma(Warp& w, const Instruction& i, uint32_t) {
    TileProduct& tile = tile_product();
    auto a_element = (Element)i.value, b_element = (Element)i.vector;
    size_t a_count = i.access_bytes, b_count = a_count / 2;
    std::array<uint32_t, 4 * 32> a{};
    for (size_t k = 0; k < a_count; k++) memcpy(&a[k * 32], words(w, i.list[4 + k]), 128);
    take_a(tile, a.data(), 32, a_element);
    int each = 4 / bytes_of(b_element), depth = 4 * each * (int)b_count;
    for (size_t h = 0; h < b_count; h++) {
        const LaneWord* from = words(w, i.list[4 + a_count + h]);
        for (int l = 0; l < 32; l++) {
            int row = l % 4 * each + 4 * each * (int)h;
            each_number(from[l], b_element, [&](int k, float x) { tile.b[row + k][l / 4] = x; });
        }
    }
    if (w.grid->checks) {
        for (size_t k = 0; k < 4; k++) {
            for (int l = 0; l < 32; l++) {
                if (words(w, i.list[4 + a_count + b_count + k])[l] == undefined_bits) {
                    fault(l, format("adds to register %zu of C, which nobody set", k));
                }
            }
        }
    }
    take_d(w, tile, i.list, 4 + a_count + b_count, 4);
    tile.run(8, depth);
    put_d(w, tile, i.list, 4);
}

inline void decode_mma(Decoding& x) {
    Instruction& i = x.to;
    Element a, b;
    if (x.words.size() < 9 || !parse_element(x.words[x.words.size() - 3], a) ||
        !parse_element(x.words[x.words.size() - 2], b) || x.type() != "f32") {
        x.unknown();
    }
    std::string_view shape = x.word(3);
    bool wide = shape == "m16n8k16" && bytes_of(a) == 2, bytes = shape == "m16n8k32" && bytes_of(a) == 1;
    if (!(wide || bytes || (shape == "m16n8k8" && bytes_of(a) == 2)) || !x.has("row") || !x.has("col"))
        x.unknown();
    i.access_bytes = wide || bytes ? 4 : 2;
    i.value = (int64_t)a, i.vector = (uint8_t)b;
    for (std::string_view member : members(x.operand(0))) i.list.push_back(x.result(member));
    for (size_t k = 1; k < 4; k++) {
        for (std::string_view member : members(x.operand(k))) i.list.push_back(x.source(member, Width::word));
    }
    if (i.list.size() != 8u + i.access_bytes * 3 / 2)
        throw std::runtime_error("has another number of registers");
    i.role = Role::aligned;
    i.run = mma;
}

// ----------------------------------------------------------------------------
// ldmatrix and stmatrix

// value: 1 transposes. Lanes 8 m to 8 m + 7 give the row addresses of matrix m.
template <bool stores>
void move_matrices(Warp& w, const Instruction& i, uint32_t) {
    for (size_t m = 0; m < i.list.size(); m++) {
        std::array<std::array<uint16_t, 8>, 8> tile;
        LaneWord* fragment = words(w, i.list[m]);
        auto each_pair = [&](auto use) {
            for (int l = 0; l < 32; l++) {
                size_t row = (size_t)l / 4, column = 2 * ((size_t)l % 4);
                if (i.value)
                    use(l, tile[column][row], tile[column + 1][row]);
                else
                    use(l, tile[row][column], tile[row][column + 1]);
            }
        };
        if (stores) {
            each_pair([&](int l, uint16_t& low, uint16_t& high) {
                low = (uint16_t)fragment[l], high = (uint16_t)(fragment[l] >> 16);
            });
        }
        for (size_t r = 0; r < 8; r++) {
            int lane = (int)(8 * m + r);
            uint32_t address = (uint32_t)(address_in(w, i.a, i.wide_address, lane) + (uint64_t)i.offset);
            if (address % 16) fault(lane, format("shared address %#x is not a multiple of 16", address));
            char* at = shared_place(w, lane, address, 16);
            // All lanes read each row, so what one of them wrote has to be known to the others.
            note_shared(Toucher::warp_itself(w, lane), address, 16, stores ? Access::write : Access::read);
            if (stores)
                memcpy(at, tile[r].data(), 16);
            else
                memcpy(tile[r].data(), at, 16);
        }
        if (!stores) {
            each_pair(
                [&](int l, uint16_t& low, uint16_t& high) { fragment[l] = low | (uint32_t)high << 16; });
        }
    }
    if (stores) w.grid->progress++;
}

inline void decode_matrices(Decoding& x) {
    Instruction& i = x.to;
    bool stores = x.words[0] == "stmatrix";
    if (!x.has("m8n8") || x.type() != "b16") x.unknown();
    x.address(x.operand(stores ? 0 : 1), Space::shared);
    for (std::string_view member : members(x.operand(stores ? 1 : 0))) {
        i.list.push_back(stores ? x.source(member, Width::word) : x.result(member));
    }
    i.value = x.has("trans");
    i.role = Role::aligned;
    i.run = stores ? move_matrices<true> : move_matrices<false>;
}

// ----------------------------------------------------------------------------
// wgmma

struct Descriptor {
    uint64_t bits;
    uint32_t start() const { return (uint32_t)(bits & 0x3fff) << 4; }
    uint32_t leading() const { return (uint32_t)(bits >> 16 & 0x3fff) << 4; }
    uint32_t stride() const { return (uint32_t)(bits >> 32 & 0x3fff) << 4; }
    uint32_t base_offset() const { return (uint32_t)(bits >> 49 & 7); }
    // Numbered as in tensor maps: 0 none, 3 for 128 bytes.
    unsigned swizzle() const {
        unsigned mode = (unsigned)(bits >> 62);
        return mode == 0 ? 0 : 4 - mode;
    }
};

// A or B of a product, in shared memory: `rows` along m or n, 32 bytes of k.
struct SharedMatrix {
    Descriptor descriptor;
    bool mn_major;
    Element element;
    int first, rows;

    // Calls unit(address, row, k, along_k) for each 16 bytes.
    template <typename Unit>
    void each_16_bytes(Unit unit) const {
        uint32_t start = descriptor.start(), leading = descriptor.leading(), stride = descriptor.stride();
        unsigned swizzle = descriptor.swizzle();
        uint32_t width = 16u << swizzle;
        if (!mn_major) {
            int per_unit = 16 / bytes_of(element);
            for (int row = first; row < first + rows; row++) {
                for (uint32_t k = 0; k < 2; k++) {
                    // Without a swizzle the two columns of 8 x 16 bytes are `leading` apart.
                    uint32_t within = swizzle ? k * 16 : k * leading;
                    uint32_t address =
                        start + (uint32_t)row / 8 * stride + (uint32_t)row % 8 * width + within;
                    unit(swizzled(address, swizzle), row - first, (int)k * per_unit, true);
                }
            }
        } else {
            int per_piece = (int)width / 2;
            for (int k = 0; k < 16; k++) {
                for (int row = first; row < first + rows; row += 8) {
                    uint32_t address = start + (uint32_t)(row / per_piece) * leading +
                                       (uint32_t)(k / 8) * stride + (uint32_t)(k % 8) * width +
                                       (uint32_t)(row % per_piece) * 2;
                    unit(swizzled(address, swizzle), row - first, k, false);
                }
            }
        }
    }
};

inline void check_matrix(Warp& w, const SharedMatrix& matrix, const char* which) {
    if (matrix.descriptor.base_offset())
        fault(0, format("%s: nobody taught the interpreter base offsets", which));
    if (matrix.mn_major && (bytes_of(matrix.element) != 2 || matrix.descriptor.swizzle() == 0)) {
        fault(0, format("%s: nobody taught the interpreter this layout", which));
    }
    Toucher who{w, 0, w.block->agents.products_of(w.index), w.product_epoch + 1, true};
    matrix.each_16_bytes([&](uint32_t address, int, int, bool) {
        shared_place(w, 0, address, 16, which);
        note_shared(who, address, 16, Access::read);
    });
}

// The shape of a product, packed into its instruction's `value`.
struct ProductShape {
    int n;
    Element a, b;
    bool a_mn_major, b_mn_major, a_negated, b_negated;

    int64_t packed() const {
        return n | (int64_t)a << 16 | (int64_t)b << 20 | a_mn_major << 24 | b_mn_major << 25 |
               a_negated << 26 | b_negated << 27;
    }
    static ProductShape of(const Instruction& i) {
        int64_t v = i.value;
        return {(int)(v & 0xffff), Element(v >> 16 & 15), Element(v >> 20 & 15), bool(v >> 24 & 1),
                bool(v >> 25 & 1), bool(v >> 26 & 1),     bool(v >> 27 & 1)};
    }
    SharedMatrix a_matrix(const Warp& w, uint64_t descriptor) const {
        return {{descriptor}, a_mn_major, a, 16 * (int)(w.index % 4), 16};
    }
    SharedMatrix b_matrix(uint64_t descriptor) const { return {{descriptor}, b_mn_major, b, 0, n}; }
};

inline void perform(Warp& w, Product& product) {
    const Instruction& i = *product.instruction;
    ProductShape shape = ProductShape::of(i);
    TileProduct& tile = tile_product();
    int a_bytes = bytes_of(shape.a), b_bytes = bytes_of(shape.b);
    auto number_at = [](const char* at, int k, Element element) {
        if (bytes_of(element) == 1) return to_float(element, (uint8_t)at[k]);
        uint16_t bits;
        memcpy(&bits, at + 2 * k, 2);
        return to_float(element, bits);
    };
    if (i.list2.empty()) {
        shape.a_matrix(w, product.a).each_16_bytes([&](uint32_t address, int row, int column, bool along_k) {
            const char* at = w.block->shared_at(address);
            for (int k = 0; k < 16 / a_bytes; k++) {
                float x = number_at(at, k, shape.a);
                if (along_k)
                    tile.a[row][column + k] = x;
                else
                    tile.a[row + k][column] = x;
            }
        });
    } else {
        take_a(tile, product.fragment.data(), 32, shape.a);
    }
    if (shape.a_negated != shape.b_negated) {
        for (auto& row : tile.a)
            for (float& x : row) x = -x;
    }
    shape.b_matrix(product.b).each_16_bytes([&](uint32_t address, int row, int column, bool along_k) {
        const char* at = w.block->shared_at(address);
        for (int k = 0; k < 16 / b_bytes; k++) {
            float x = number_at(at, k, shape.b);
            if (along_k)
                tile.b[column + k][row] = x;
            else
                tile.b[column][row + k] = x;
        }
    });
    if (product.keep) {
        check_result(w, i.list, i.list.size());
        take_d(w, tile, i.list, 0, i.list.size());
    } else {
        for (auto& row : tile.d) memset(row, 0, (size_t)shape.n * sizeof row[0]);
    }
    tile.run(shape.n, 32 / a_bytes);
    put_d(w, tile, i.list, i.list.size());
    product.done = true;
    w.grid->progress++;
}

// Calls use() with the register numbers of D, and of A if that is in registers; decode_wgmma() puts them
// first in `uses`.
template <typename Use>
void each_result(const Instruction& i, Use use) {
    for (size_t k = 0; k < i.list.size(); k++) use(i.uses[k]);
}
template <typename Use>
void each_source(const Instruction& i, Use use) {
    for (size_t k = 0; k < i.list2.size(); k++) use(i.uses[i.list.size() + k]);
}

inline void check_fence(Warp& w, const Instruction& i) {
    auto check = [&](uint32_t number) {
        if (w.set_at[number] > w.fenced_at)
            fault(0, "a register of the product was set with no wgmma.fence since");
    };
    each_result(i, check);
    each_source(i, check);
    each_source(i, [&](uint32_t number) {
        if (w.busy_results[number]) fault(0, "a register of A is the result of a product under way");
    });
    each_result(i, [&](uint32_t number) {
        if (w.busy_sources[number]) fault(0, "a register of D is read by a product under way");
    });
}

inline void start_product(Warp& w, const Instruction& i, uint32_t) {
    if (w.block->threads < 32 * (w.index / 4 * 4 + 4)) fault(0, "wgmma by less than four warps");
    uint64_t b = wides(w, i.b)[0], a = i.list2.empty() ? wides(w, i.a)[0] : 0;
    for (int l = 1; l < 32; l++) {
        if (wides(w, i.b)[l] != b || (i.list2.empty() && wides(w, i.a)[l] != a)) {
            fault(l, "the descriptor differs from that of lane 0");
        }
    }
    uint32_t keep = predicate(w, i.c);
    if (keep != 0 && keep != all_lanes) fault(0, "scale-d differs between lanes");
    ProductShape shape = ProductShape::of(i);
    if (w.grid->checks) {
        check_fence(w, i);
        if (i.list2.empty()) check_matrix(w, shape.a_matrix(w, a), "A");
        check_matrix(w, shape.b_matrix(b), "B");
    }
    Product product{&i, a, b, keep != 0, w.product_epoch + 1, {}};
    for (size_t k = 0; k < i.list2.size(); k++) memcpy(&product.fragment[k * 32], words(w, i.list2[k]), 128);
    each_result(i, [&](uint32_t number) { w.busy_results[number]++; });
    each_source(i, [&](uint32_t number) { w.busy_sources[number]++; });
    bool in_order = w.products.empty() || w.products.back().done;
    w.products.push_back(product);
    if (in_order && happens_at_once(w)) perform(w, w.products.back());
}

inline void commit_products(Warp& w, const Instruction&, uint32_t) {
    w.product_epoch++;
}

inline void wait_for_products(Warp& w, const Instruction& i, uint32_t) {
    while (!w.products.empty() && w.products.front().epoch + (uint64_t)i.value <= w.product_epoch) {
        Product& product = w.products.front();
        if (!product.done) perform(w, product);
        each_result(*product.instruction, [&](uint32_t number) { w.busy_results[number]--; });
        each_source(*product.instruction, [&](uint32_t number) { w.busy_sources[number]--; });
        w.products.pop_front();
    }
    uint32_t ended = w.product_epoch - (uint32_t)std::min<uint64_t>((uint64_t)i.value, w.product_epoch);
    uint32_t& seen = w.knowledge.seen.clock[w.block->agents.products_of(w.index)];
    seen = std::max(seen, ended);
}

inline void decode_wgmma(Decoding& x) {
    Instruction& i = x.to;
    i.role = Role::aligned;
    if (x.has("fence")) {
        i.run = [](Warp& w, const Instruction&, uint32_t) { w.fenced_at = w.now; };
        return;
    }
    if (x.has("commit_group")) {
        i.run = commit_products;
        return;
    }
    if (x.has("wait_group")) {
        i.value = (int64_t)number(x.operand(0));
        i.run = wait_for_products;
        return;
    }
    // wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16
    ProductShape shape{};
    if (x.words.size() != 8 || x.words[5] != "f32" || !parse_element(x.words[6], shape.a) ||
        !parse_element(x.words[7], shape.b)) {
        x.unknown();
    }
    std::string_view size = x.words[4];
    size_t k_at = size.find('k');
    if (!size.starts_with("m64n") || k_at == size.npos) x.unknown();
    shape.n = (int)number(size.substr(4, k_at - 4));
    if (number(size.substr(k_at + 1)) != 32u / (unsigned)bytes_of(shape.a)) x.unknown();
    for (std::string_view member : members(x.operand(0))) i.list.push_back(x.source_and_result(member));
    if (i.list.size() != (size_t)shape.n / 2) throw std::runtime_error("D has another number of registers");
    bool from_registers = x.operand(1)[0] == '{';
    if (from_registers) {
        for (std::string_view member : members(x.operand(1)))
            i.list2.push_back(x.source(member, Width::word));
    } else {
        i.a = x.source(1, Width::wide);
    }
    i.b = x.source(2, Width::wide);
    i.c = x.source(3, Width::predicate);
    auto is_negated = [&](size_t at) {
        std::string_view text = x.operand(at);
        if (text != "1" && text != "-1") x.unknown();
        return text == "-1";
    };
    shape.a_negated = is_negated(4), shape.b_negated = is_negated(5);
    size_t next = 6;
    if (bytes_of(shape.a) == 2) {
        if (!from_registers) shape.a_mn_major = number(x.operand(next++)) != 0;
        shape.b_mn_major = number(x.operand(next++)) != 0;
    }
    i.value = shape.packed();
    x.assembler.kernel().has_products = true;
    i.run = start_product;
}

}  // namespace nocard::ptx
