/*
One pass of an optimizer over parts of tensors, element by element:

    steps      w = formula(w, g, scale, slots...)      rounded to the parameters
    prepares   g = formula(w, g, scale, slots...)

A formula is a small struct with that function; it changes the slots in place. Every array is (n), and float
except for the parameters, which are floatX. In bf16, w is too coarse to be updated in place: most updates are
less than half a unit in its last place. So it is either kept in float beside the parameters (master), or
rounded up or down at random so that its mean is exact (stochastic rounding). A NaN scale leaves everything
unchanged.

A unit of many tensors takes one launch. Its parts may be any parts of tensors, and may be on the device or on
the host: the results are bit-identical. For this, random numbers are indexed from the start of a tensor, and
formulas use fmaf for a product and a sum that are rounded once, because different compilers would otherwise
fuse them differently.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/bf16_bits.h"  // rounded_at_random
#include "kernels/block_table.cuh"
#include "kernels/common.cuh"
#include "kernels/optimizer.h"
#include "kernels/ragged.cuh"
#include "kernels/random.cuh"

// How new weights are rounded to parameters.
struct Rounding {
    bool stochastic;
    int step;       // random numbers differ between steps
    uint64_t seed;  // and between runs
};

// A formula, for the elements of one part, has these members:
//
//     a default constructor: formulas are stored in tables
//     static constexpr int slots          number of slots that it uses: the optimizer's first ones
//     static constexpr bool steps         the function returns the new weight, else the update
//     static constexpr bool reads_weight  the result depends on the weight
//     at_work()                           returns the formula with its inputs loaded from memory
//     float operator()(float w, float g, float scale, float& slot...) const

// Returns the random numbers of elements i .. i + 3 of a tensor in this step. If i is a multiple of 4, they
// are one result of philox; otherwise they are the end of one and the beginning of the next. They are shifted
// into place by 2 and by 1, because GPU registers cannot be indexed.
HOST_DEVICE inline Random4 rounding_random(uint64_t key, size_t i, int step) {
    Random4 low = philox(key, i / 4, step);
    if (i % 4 == 0) return low;
    Random4 high = philox(key, i / 4 + 1, step);
    if (i & 2) {
        low = {{low.at[2], low.at[3], high.at[0], high.at[1]}};
        high.at[0] = high.at[2];
    }
    if (i & 1) low = {{low.at[1], low.at[2], low.at[3], high.at[0]}};
    return low;
}

// Returns w rounded to a parameter.
HOST_DEVICE inline floatX round_weight(float w, [[maybe_unused]] bool stochastic,
                                       [[maybe_unused]] uint32_t random) {
    if constexpr (std::is_same_v<floatX, float>) {
        return w;
    } else {
        bool finite = fabsf(w) <= FLT_MAX;
        if (!stochastic || !finite) return floatX(w);
        return floatX(rounded_at_random(w, random));
    }
}

// ----------------------------------------------------------------------------
// CPU

template <bool has_master, bool stochastic, typename Formula>
void optimizer_part_cpu(const OptimizerArrays& arrays, const OptimizerPart& part, const Formula& formula,
                        const Rounding& rounding) {
    constexpr size_t piece = 4096;  // elements for which random numbers are drawn at once
    constexpr auto each_slot = std::make_index_sequence<Formula::slots>();
    uint64_t key = random_key(rounding.seed, part.name);
    floatX* params = arrays.params + part.at;
    float *master = has_master ? arrays.master + part.at : nullptr, *grads = arrays.grads + part.at;
    float scale = *arrays.scale;
    std::array<float*, Formula::slots> slots;
    for (int k = 0; k < Formula::slots; k++) slots[k] = arrays.slots[k] + part.at;
    const auto element = formula.at_work();
    size_t n = part.count;
#pragma omp parallel for if (n > 4 * piece)
    for (size_t start = 0; start < n; start += piece) {
        size_t end = std::min(n, start + piece);
        [[maybe_unused]] size_t fours = (part.first + start) / 4, phase = (part.first + start) % 4;
        [[maybe_unused]] uint32_t random[stochastic ? piece + 4 : 1];
        if constexpr (stochastic) {
            for (size_t i = 0; i < phase + end - start; i += 4)
                std::copy_n(philox(key, fours + i / 4, rounding.step).at, 4, random + i);
        }
        [&]<size_t... k>(std::index_sequence<k...>) {
#pragma omp simd
            for (size_t i = start; i < end; i++) {
                float w = has_master ? master[i] : float(params[i]);
                float result = element(w, grads[i], scale, slots[k][i]...);
                if constexpr (Formula::steps) {
                    if constexpr (has_master) master[i] = result;
                    params[i] = round_weight(result, stochastic, stochastic ? random[phase + i - start] : 0);
                } else {
                    grads[i] = result;
                }
            }
        }
        (each_slot);
    }
}

// formula_of(part, arrays) returns the formula of a part.
template <typename FormulaOf>
void optimizer_pass_on_host(const OptimizerArrays& arrays, const std::vector<OptimizerPart>& parts,
                            const FormulaOf& formula_of, const Rounding& rounding) {
    using Formula = std::invoke_result_t<FormulaOf, const OptimizerPart&, const OptimizerArrays&>;
    if (std::isnan(*arrays.scale)) return;
    bool stochastic = Formula::steps && rounding.stochastic && !std::is_same_v<floatX, float>;
    auto run = arrays.master ? (stochastic ? optimizer_part_cpu<true, Formula::steps, Formula>
                                           : optimizer_part_cpu<true, false, Formula>)
                             : (stochastic ? optimizer_part_cpu<false, Formula::steps, Formula>
                                           : optimizer_part_cpu<false, false, Formula>);
    for (const OptimizerPart& part : parts) run(arrays, part, formula_of(part, arrays), rounding);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned optimizer_block = 256;  // threads, of W elements each

template <typename Formula>
struct OptimizerWork {
    size_t at, count, first;
    uint64_t key;  // for random numbers
    Formula formula;
};
constexpr int optimizer_parts = 32;  // maximum per launch

template <bool has_master, int W, typename Formula>
__global__ void
optimizer_pass_kernel(OptimizerArrays arrays, bool stochastic, int step, RaggedVectors vectors,
                      const __grid_constant__ BlockTable<OptimizerWork<Formula>, optimizer_parts> table) {
    constexpr auto each_slot = std::make_index_sequence<Formula::slots>();
    int number = table.find(blockIdx.x);
    const auto& part = table.part[number];
    const auto element = part.formula.at_work();
    size_t thread = (size_t)table.place(blockIdx.x, number) * blockDim.x + threadIdx.x;
    float scale = *arrays.scale;
    each_ragged_vector<W>(thread, part.count, vectors.from(part.at).skip, [&](auto width, size_t i) {
        size_t at = part.at + i;
        Vec<float, width> slots[Formula::slots + 1], ws;  // + 1 because some formulas have none
        for (int k = 0; k < Formula::slots; k++) slots[k] = load<width>(arrays.slots[k] + at);
        auto gs = load<width>(arrays.grads + at);
        Vec<floatX, width> ps;
        if constexpr (has_master)
            ws = load<width>(arrays.master + at);
        else
            ps = load<width>(arrays.params + at);
        Random4 random = {};
        if (Formula::steps && stochastic && !std::is_same_v<floatX, float>)
            random = rounding_random(part.key, part.first + i, step);
        if (std::isnan(scale)) return;  // tested only now, while the loads are in flight
        for (int j = 0; j < width; j++) {
            if constexpr (!has_master) ws[j] = float(ps[j]);
            float result = [&]<size_t... k>(std::index_sequence<k...>) {
                return element(ws[j], gs[j], scale, slots[k][j]...);
            }
            (each_slot);
            if constexpr (Formula::steps) {
                ws[j] = result;
                ps[j] = round_weight(result, stochastic, random.at[j]);
            } else {
                gs[j] = result;
            }
        }
        for (int k = 0; k < Formula::slots; k++) store(arrays.slots[k] + at, slots[k]);
        if constexpr (Formula::steps) {
            store(arrays.params + at, ps);
            if constexpr (has_master) store(arrays.master + at, ws);
        } else {
            store(arrays.grads + at, gs);
        }
    });
}

template <typename Formula>
void launch_formulas(const OptimizerArrays& arrays, const std::vector<OptimizerWork<Formula>>& works,
                     const Rounding& rounding, cudaStream_t stream) {
    static_assert(Formula::slots <= 2, "only slots 0 and 1 are passed to ragged_vectors()");
    auto slot = [&](int k) { return k < Formula::slots ? arrays.slots[k] : arrays.grads; };
    RaggedVectors vectors = ragged_vectors(arrays.params, arrays.master ? arrays.master : arrays.grads,
                                           slot(0), slot(1), arrays.grads);
    auto blocks = [=](const OptimizerWork<Formula>& work) {
        size_t threads = work.count ? vectors.from(work.at).threads(work.count) : 0;
        return (unsigned)ceil_div(threads, optimizer_block);
    };
    using Table = BlockTable<OptimizerWork<Formula>, optimizer_parts>;
    with_ragged_width(vectors, [&](auto width) {
        auto kernel = arrays.master ? optimizer_pass_kernel<true, width, Formula>
                                    : optimizer_pass_kernel<false, width, Formula>;
        each_block_table<Table>(works, blocks, [&](const Table& table) {
            launch(kernel, table.blocks(), optimizer_block, 0, stream, arrays, rounding.stochastic,
                   rounding.step, vectors, table);
        });
    });
}

template <typename Formula>
OptimizerWork<Formula> work_of(const OptimizerPart& part, uint64_t seed, const Formula& formula) {
    return {part.at, part.count, part.first, random_key(seed, part.name), formula};
}

template <typename FormulaOf>
void launch_optimizer_pass(const OptimizerArrays& arrays, const std::vector<OptimizerPart>& parts,
                           const FormulaOf& formula_of, const Rounding& rounding, cudaStream_t stream) {
    if (parts.empty()) return;
    std::vector works = {work_of(parts[0], rounding.seed, formula_of(parts[0], arrays))};
    for (size_t i = 1; i < parts.size(); i++)
        works.push_back(work_of(parts[i], rounding.seed, formula_of(parts[i], arrays)));
    launch_formulas(arrays, works, rounding, stream);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Returns the cost of a pass. Without parts nothing is launched.
template <typename Formula>
std::vector<LaunchCost> optimizer_cost(const OptimizerArrays& arrays,
                                       const std::vector<OptimizerPart>& parts) {
    size_t n = 0;
    for (const OptimizerPart& part : parts) n += part.count;
    if (n == 0) return {};
    double grads = array_bytes(arrays.grads, n), slots = Formula::slots * grads,
           params = array_bytes(arrays.params, n), master = array_bytes(arrays.master, n);
    double weight = master > 0 ? master : params;
    return {{.read = grads + slots + (Formula::reads_weight ? weight : 0),
             .written = slots + (Formula::steps ? params + master : grads),
             .place = holder_of(arrays.grads)}};
}

// formula_of(part, arrays) returns the formula of a part. Its pointers must be to the same memory (device or
// host) as the arrays.
template <typename FormulaOf>
void optimizer_pass(const OptimizerArrays& arrays, const std::vector<OptimizerPart>& parts,
                    const FormulaOf& formula_of, const Rounding& rounding, cudaStream_t stream) {
    ON_DEVICE(stream, optimizer_cost<decltype(formula_of(parts[0], arrays))>(arrays, parts),
              optimizer_pass_on_host(arrays, parts, formula_of, rounding),
              launch_optimizer_pass(arrays, parts, formula_of, rounding, stream));
}

// Returns the pass of a formula, for an Optimizer.
template <typename FormulaOf>
OptimizerPass make_pass(const FormulaOf& formula_of, const Rounding& rounding) {
    return {.on_device =
                [=](const OptimizerArrays& arrays, const OptimizerPass::Parts& parts, cudaStream_t stream) {
                    optimizer_pass(arrays, parts, formula_of, rounding, stream);
                },
            .on_host =
                [=](const OptimizerArrays& arrays, const OptimizerPass::Parts& parts) {
                    optimizer_pass_on_host(arrays, parts, formula_of, rounding);
                }};
}
