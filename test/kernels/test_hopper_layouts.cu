// The places of matrix elements in registers and in shared memory, against tables that share nothing with the
// kernels or the simulated device: test/golden/make_hopper_layouts.py derives them from NVIDIA's
// publications.
// devices: simt-bf16 cuda-bf16 nocard
#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/attention.cuh"
#include "test/support/testing.h"

#ifdef PRECISION_BF16

namespace {

using bf16 = __nv_bfloat16;

const nlohmann::json& golden() {
    static const auto table = nlohmann::json::parse(std::ifstream("test/golden/hopper_layouts.json"));
    return table;
}

// Flattens the (rows, columns) of JSON.
template <typename T = int>
std::vector<T> flat(const nlohmann::json& json) {
    if (!json.is_array()) return {json.get<T>()};
    std::vector<T> all;
    for (auto& part : json)
        for (T number : flat<T>(part)) all.push_back(number);
    return all;
}

// Converts a table of (row, column) pairs to offsets in matrices of this width.
std::vector<int> places(const nlohmann::json& table, int width) {
    std::vector<int> numbers = flat(table), result;
    for (size_t i = 0; i < numbers.size(); i += 2) result.push_back(numbers[i] * width + numbers[i + 1]);
    return result;
}

// The row and column of one value of a thread in a warpgroup.
struct Place {
    int row, column;
};
Place place(int thread, int value) {
    auto of = [](const char* what, int i) { return golden()["wgmma"][what][i]; };
    return {of("thread", thread)[0].get<int>() + of("value", value)[0].get<int>(),
            of("thread", thread)[1].get<int>() + of("value", value)[1].get<int>()};
}

// For a matrix (rows, columns) in panels as wide as the swizzle: the offset of each element, in elements.
std::vector<int> tile_places(int rows, int columns, int width) {
    const nlohmann::json& table = golden()["swizzle"][std::to_string(width)];
    std::vector<int> result;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            int panel = column * 2 / width, within = column * 2 % width, repeat = row / 16;
            int unit = table[row % 16][within / 16].get<int>() + repeat * 16 * width;
            result.push_back((panel * rows * width + unit + within % 16) / 2);
        }
    return result;
}

template <typename T>
std::vector<T> small_numbers(const char* name, size_t count) {
    std::vector<T> numbers;
    for (float value : random_values<float>(name, count, 3.0f))
        numbers.push_back(T(std::round(value)));  // so that all sums of products are exact
    return numbers;
}

// D (16, 8) = A (16, 16) B (16, 8) by one warp, with fragments given by tables of (lane, element).
__global__ void mma_kernel(float* d, const bf16* a, const bf16* b, const int* at_a, const int* at_b,
                           const int* at_d) {
    int lane = threadIdx.x;
    uint32_t fragment_a[4], fragment_b[2];
    float sums[4] = {};
    for (int i = 0; i < 4; i++)
        fragment_a[i] = bf16_pair(a[at_a[lane * 8 + 2 * i]], a[at_a[lane * 8 + 2 * i + 1]]);
    for (int i = 0; i < 2; i++)
        fragment_b[i] = bf16_pair(b[at_b[lane * 4 + 2 * i]], b[at_b[lane * 4 + 2 * i + 1]]);
    mma_m16n8k16(sums, fragment_a, fragment_b);
    for (int i = 0; i < 4; i++) d[at_d[lane * 4 + i]] = sums[i];
}

// Writes the row and column of all results of each thread (128, 64), and both packed in pairs as a left
// operand (128, 8, 4).
__global__ void results_kernel(int* rows, int* columns, uint32_t* packed_rows, uint32_t* packed_columns) {
    int t = threadIdx.x;
    float row[64], column[64];
    for (int n = 0; n < 64; n++) {
        row[n] = result_row(n), column[n] = result_column(n);
        rows[t * 64 + n] = result_row(n), columns[t * 64 + n] = result_column(n);
    }
    uint32_t of_rows[8][4], of_columns[8][4];
    pack_results(of_rows, row);
    pack_results(of_columns, column);
    for (int i = 0; i < 32; i++) {
        packed_rows[t * 32 + i] = of_rows[i / 4][i % 4];
        packed_columns[t * 32 + i] = of_columns[i / 4][i % 4];
    }
}

// Descriptors of a tile at the beginning of shared memory, minus the address of that beginning.
// cases (count, 3): along k, row, column.
template <typename Tile>
__global__ void descriptor_kernel(uint64_t* bits, const int* cases, int count) {
    char* tile = swizzled_shared<char>();
    uint64_t begin = matrix_descriptor(tile, Swizzle::bytes_128, 0, 0) & 0x3fff;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        int row = cases[3 * i + 1], column = cases[3 * i + 2];
        bits[i] = (cases[3 * i] ? Tile::right(Tile::rows_from(tile, row), column)
                                : Tile::down(Tile::columns_from(tile, column), row)) -
                  begin;
    }
}

// The pairs of a tile (64, 128) in bf16, as a warpgroup stores them.
__global__ void store_kernel(uint32_t* out, const uint32_t* pairs) {
    char* tile = swizzled_shared<char>();
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
        int row = i / 64, column = i % 64 * 2;
        SwizzledTile<64, 128>::store(tile, row, column % 8, column / 8 * 8, pairs[i]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) out[i] = ((uint32_t*)tile)[i];
}

// Copies a box (16, columns) out as it lies in shared memory.
__global__ void box_kernel(bf16* out, const __grid_constant__ CUtensorMap map, int columns) {
    if constexpr (is_hopper) {
        bf16* shared = swizzled_shared<bf16>();
        auto* barrier = (Mbarrier*)(shared + 16 * columns);
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect(barrier, 16 * columns * 2);
            copy_box(shared, map, 0, 0, 0, 0, barrier);
        }
        __syncthreads();
        mbarrier_wait(barrier, 0);
        for (int i = threadIdx.x; i < 16 * columns; i += blockDim.x) out[i] = shared[i];
    } else {
        __trap();
    }
}

// D (64, 128) = A (64, 16) B. B is 16 columns or rows of a tile (128, 128) whose elements lie at `at`.
template <Major major>
__global__ void wgmma_kernel(float* d, const bf16* a, const bf16* tile, const int* at_a, const int* at_d,
                             const int* at, uint64_t bits) {
    if constexpr (is_hopper) {
        bf16* shared = swizzled_shared<bf16>();
        int t = threadIdx.x;
        for (int i = t; i < 128 * 128; i += blockDim.x) shared[at[i]] = tile[i];
        fence_async();
        __syncthreads();
        uint32_t registers[4];
        for (int i = 0; i < 4; i++)
            registers[i] = bf16_pair(a[at_a[t * 8 + 2 * i]], a[at_a[t * 8 + 2 * i + 1]]);
        float sums[64] = {};
        uint64_t begin = matrix_descriptor(shared, Swizzle::bytes_128, 0, 0) & 0x3fff;
        pin(sums);
        wgmma_fence();
        wgmma<major>(sums, registers, bits + begin, false);
        wgmma_commit();
        wgmma_wait<0>();
        pin(sums);
#pragma unroll
        for (int i = 0; i < 64; i++) d[at_d[t * 64 + i]] = sums[i];
    } else {
        __trap();
    }
}

bool on_hopper() {
    return device_properties().major == 9;
}

uint64_t bits_of(const nlohmann::json& descriptor) {
    return std::stoull(descriptor["bits"].get<std::string>(), nullptr, 16);
}

template <typename Tile>
void check_descriptors(const nlohmann::json& tile) {
    CHECK(tile["width"] == Tile::width);
    std::vector<int> cases;
    for (auto& each : tile["descriptors"])
        cases.insert(cases.end(), {each["along"] == "k", each["row"].get<int>(), each["column"].get<int>()});
    int count = (int)cases.size() / 3;
    Buffer<int> device_cases(cases);
    Buffer<uint64_t> bits(count);
    launch(descriptor_kernel<Tile>, 1, 64, Tile::bytes, test_stream(), (uint64_t*)bits, (int*)device_cases,
           count);
    auto got = bits.host();
    constexpr uint64_t leading = 0x3fff0000;  // ignored along k
    for (int i = 0; i < count; i++) {
        auto& each = tile["descriptors"][i];
        CAPTURE(each.dump());
        CHECK((cases[3 * i] ? got[i] & ~leading : got[i]) == bits_of(each));
    }
}

// Checks A (64, 16) times columns (Major::k) or rows 16 ... 31 of a tile.
template <Major major>
void check_wgmma() {
    auto a = small_numbers<bf16>("a", 64 * 16), tile = small_numbers<bf16>("b", 128 * 128);
    constexpr bool along_k = major == Major::k;
    std::vector<int> at_a, at_d;
    for (int t = 0; t < 128; t++) {
        for (int i = 0; i < 8; i++) at_a.push_back(place(t, i).row * 16 + place(t, i).column);
        for (int i = 0; i < 64; i++) at_d.push_back(place(t, i).row * 128 + place(t, i).column);
    }
    uint64_t bits = 0;
    for (auto& each : golden()["tiles"][0]["descriptors"])
        if (each["along"] == (along_k ? "k" : "mn") && each["row"] == (along_k ? 0 : 16) &&
            each["column"] == (along_k ? 16 : 0))
            bits = bits_of(each);
    std::vector<double> want;
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < 128; n++) {
            double sum = 0;
            for (int k = 0; k < 16; k++)
                sum += (double)(float)a[m * 16 + k] *
                       (double)(float)tile[along_k ? n * 128 + 16 + k : (16 + k) * 128 + n];
            want.push_back(sum);
        }
    Buffer<float> d(64 * 128);
    Buffer<bf16> device_a(a), device_tile(tile);
    Buffer<int> device_at_a(at_a), device_at_d(at_d), at(tile_places(128, 128, 128));
    launch(wgmma_kernel<major>, 1, 128, 128 * 128 * 2, test_stream(), (float*)d, (bf16*)device_a,
           (bf16*)device_tile, (int*)device_at_a, (int*)device_at_d, (int*)at, bits);
    CHECK(d.doubles() == want);
}

}  // namespace

TEST_CASE("fragments of a product by a warp") {
    auto a = small_numbers<bf16>("a", 16 * 16), b = small_numbers<bf16>("b", 16 * 8);
    std::vector<double> want;
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            double sum = 0;
            for (int k = 0; k < 16; k++) sum += (double)(float)a[m * 16 + k] * (double)(float)b[k * 8 + n];
            want.push_back(sum);
        }
    const nlohmann::json& mma = golden()["mma"];
    Buffer<float> d(16 * 8);
    Buffer<bf16> device_a(a), device_b(b);
    Buffer<int> at_a(places(mma["a"], 16)), at_b(places(mma["b"], 8)), at_d(places(mma["d"], 8));
    launch(mma_kernel, 1, 32, 0, test_stream(), (float*)d, (bf16*)device_a, (bf16*)device_b, (int*)at_a,
           (int*)at_b, (int*)at_d);
    CHECK(d.doubles() == want);
}

TEST_CASE("results of a warpgroup, and the left side of a product that is made of them") {
    Buffer<int> rows(128 * 64), columns(128 * 64);
    Buffer<uint32_t> packed_rows(128 * 32), packed_columns(128 * 32);
    launch(results_kernel, 1, 128, 0, test_stream(), (int*)rows, (int*)columns, (uint32_t*)packed_rows,
           (uint32_t*)packed_columns);
    auto row = rows.host(), column = columns.host();
    auto row_pairs = packed_rows.host(), column_pairs = packed_columns.host();
    auto half = [](const std::vector<uint32_t>& pairs, int i) {
        uint32_t pair = pairs[i / 2];
        return std::bit_cast<float>(i % 2 ? pair & 0xffff0000u : pair << 16);
    };
    int wrong = 0;
    for (int t = 0; t < 128; t++)
        for (int n = 0; n < 64; n++) {
            Place of_result = place(t, n), of_left = place(t, n % 8);
            wrong += row[t * 64 + n] != of_result.row || column[t * 64 + n] != of_result.column;
            wrong += half(row_pairs, t * 64 + n) != of_left.row;
            wrong += half(column_pairs, t * 64 + n) != of_left.column + n / 8 * 16;
        }
    CHECK(wrong == 0);
}

TEST_CASE("descriptors of tiles") {
    check_descriptors<SwizzledTile<128, 128>>(golden()["tiles"][0]);
    check_descriptors<SwizzledTile<128, 96>>(golden()["tiles"][1]);
}

TEST_CASE("pairs that are stored to a tile") {
    std::vector<uint32_t> pairs(64 * 64), want(64 * 64);
    auto at = tile_places(64, 128, 128);
    for (uint32_t i = 0; i < pairs.size(); i++) want[at[2 * i] / 2] = pairs[i] = i + 1;
    Buffer<uint32_t> inp(pairs), out(64 * 64);
    launch(store_kernel, 1, 128, 64 * 128 * 2, test_stream(), (uint32_t*)out, (uint32_t*)inp);
    CHECK(out.host() == want);
}

TEST_CASE("boxes that the copy engine brings, in every swizzle") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    for (int width : {32, 64, 128}) {
        CAPTURE(width);
        int columns = width / 2, count = 16 * columns;
        std::vector<double> want(count);
        std::vector<bf16> values;
        auto at = tile_places(16, columns, width);
        for (int i = 0; i < count; i++) {
            values.push_back(bf16((float)(i % 256)));
            want[at[i]] = i % 256;
        }
        Buffer<bf16> inp(values), out(count);
        auto all = (size_t)count;
        CUtensorMap map =
            tensor_map(inp, {{columns, 16, 1, 1}, {(size_t)columns, all, all}, {columns, 16, 1, 1}});
        launch(box_kernel, 1, 64, count * 2 + 8, test_stream(), (bf16*)out, map, columns);
        CHECK(out.doubles() == want);
    }
}

TEST_CASE("a product of a warpgroup from registers and swizzled memory") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    check_wgmma<Major::k>();
    check_wgmma<Major::mn>();
}

#endif
