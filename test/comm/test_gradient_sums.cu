/*
Sums of gradients whose addends are sent as bf16, on real ranks: every result matches the exact sum within the
error bound of rounding its addends, and the bytes sent are checked.
*/
// ranks: 3 1 2 4
#include "comm/mesh.h"
#include "comm/gradient_sums.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

// A layout with one unit of one matrix.
ParameterLayout layout_of(size_t size, int shards) {
    return ParameterLayout({{0, Unit::block, "weight", size / 8, 8, 0, 1, true}}, 1, false, shards);
}

float addend(int rank, size_t i) {
    return random_normal(random_key(11, text("rank %d", rank)), i);
}

std::vector<float> addends(int rank, size_t count) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; i++) values[i] = addend(rank, i);
    return values;
}

// The exact sum of element i, and the error bound of the fp32 sum of rounded addends. The owner's addend is
// not rounded.
struct Exact {
    double sum = 0, bound = 0;

    Exact(size_t i, int owner) {
        double all = 0;
        for (int rank = 0; rank < test_world().size(); rank++) {
            double value = addend(rank, i);
            sum += value, all += std::abs(value);
            if (rank != owner) bound += 0x1p-8 * std::abs(value);
        }
        bound += test_world().size() * 0x1p-23 * all;
    }
};

constexpr size_t parts[] = {8, 40, 1000, 4096};

}  // namespace

TEST_CASE("a reduce-scatter rounds each addend of another rank once") {
    int ranks = test_world().size(), me = test_world().rank();
    Mesh mesh(test_world(), {.dp = ranks, .shard = ranks}, test_stream(), {.all_to_all = true});
    for (size_t part : parts) {
        CAPTURE(part);
        size_t size = part * (size_t)ranks;
        Arena memory;
        GradientSums sums({memory, layout_of(size, ranks), mesh.shape, {.reduce_dtype = Dtype::bf16}});
        auto values = addends(me, size);
        Buffer<float> data(values);
        reset_traffic();
        sums.reduce_scatter(mesh.shard(), data, part, test_stream());
        auto got = data.host();
        CHECK(bytes_sent(Traffic::gradients) == 2 * (ranks - 1) * part);
        size_t wrong = 0, rounded = 0;
        for (size_t i = 0; i < size; i++) {
            if (i / part != (size_t)me) {
                wrong += got[i] != values[i];
                continue;
            }
            Exact exact(i, me);
            wrong += !(std::abs(got[i] - exact.sum) <= exact.bound);
            rounded += std::abs(got[i] - exact.sum) > 0x1p-12 * std::abs(exact.sum);
        }
        CHECK(wrong == 0);
        CHECK((ranks == 1 ? rounded == 0 : rounded > part / 2));
    }
}

TEST_CASE("an all-reduce gives all ranks the same bits, of a sum that is rounded once more") {
    int ranks = test_world().size(), me = test_world().rank();
    Mesh mesh(test_world(), {.dp = ranks}, test_stream(), {.all_to_all = true});
    for (size_t count : parts) {  // need not be divisible by the number of ranks
        CAPTURE(count);
        Arena memory;
        GradientSums sums({memory, layout_of(count, 1), mesh.shape, {.reduce_dtype = Dtype::bf16}});
        Buffer<float> data(addends(me, count));
        reset_traffic();
        sums.all_reduce(mesh.replica(), data, count, test_stream());
        auto got = data.host();
        size_t part = summed_part(count, ranks);
        CHECK(bytes_sent(Traffic::gradients) == 2 * 2 * (ranks - 1) * part);
        size_t wrong = 0;
        for (size_t i = 0; i < count; i++) {
            Exact exact(i, (int)(i / part));
            double of_sum = ranks > 1 ? 0x1p-8 * (std::abs(exact.sum) + exact.bound) : 0;
            wrong += !(std::abs(got[i] - exact.sum) <= exact.bound + of_sum);
        }
        CHECK(wrong == 0);
        std::string bits((const char*)got.data(), count * sizeof(float));
        for (const std::string& other : test_world().all_gather(bits)) CHECK((other == bits));
    }
}

TEST_CASE("what is not finite on one rank is not finite in the sum") {
    int ranks = test_world().size(), me = test_world().rank();
    Mesh mesh(test_world(), {.dp = ranks}, test_stream());
    Arena memory;
    GradientSums sums({memory, layout_of(64, 1), mesh.shape, {.reduce_dtype = Dtype::bf16}});
    auto values = addends(me, 64);
    if (me == ranks - 1) values[3] = NAN, values[60] = INFINITY;
    Buffer<float> data(values);
    sums.all_reduce(mesh.replica(), data, 64, test_stream());
    auto got = data.host();
    CHECK(std::isnan(got[3]));
    CHECK(got[60] == INFINITY);
    CHECK(std::isfinite(got[4]));
}

TEST_CASE("gradients that travel in fp32, or not at all, take no memory on their way") {
    auto bytes = [](MeshShape mesh, ZeroSettings settings) {
        Arena counted(Arena::counts);
        GradientSumArrays(counted, layout_of(8000, mesh.shard), mesh, settings);
        return memory_total(counted.classes());
    };
    ZeroSettings in_bf16 = {.reduce_dtype = Dtype::bf16};
    size_t unit = layout_of(8000, 4).unit_size(1);
    CHECK(bytes({.dp = 4, .shard = 4}, {}) == 0);
    CHECK(bytes({}, in_bf16) == 0);
    CHECK(bytes({.dp = 4, .shard = 4}, {.training = false, .reduce_dtype = Dtype::bf16}) == 0);
    CHECK(bytes({.dp = 4, .shard = 4}, in_bf16) == doctest::Approx(2.0 * 2 * (double)unit).epsilon(0.02));
    CHECK(bytes({.dp = 3}, in_bf16) >= 2 * 2 * 3 * summed_part(layout_of(8000, 1).unit_size(1), 3));
}
