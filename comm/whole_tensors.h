/*
Operations on whole tensors, whose parts are owned by different ranks: initial values, the gradient that stops
a run, and LAMB's trust ratios. No rank ever assembles a whole tensor that is larger than a piece.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/world.h"
#include "comm/zero.h"  // ZeroState
#include "data/base/figures.h"
#include "kernels/lamb.cuh"    // trust_ratio
#include "kernels/random.cuh"  // random_key, random_normal, random_symmetric

constexpr size_t tensor_piece = 1 << 22;  // elements that pass through host memory at a time

// For all ranks: sets every parameter. values(row, name, first, count) returns the elements [first, first +
// count) of a whole tensor as a span of floats; a rank asks only for those it owns.
template <typename Values>
void set_tensors(ZeroState& state, Values&& values) {
    state.synchronize();
    std::vector<float> here;
    for (int unit : state.layout().held()) {
        each_piece(state.owned_parts(unit), tensor_piece, [&](const TensorPart& piece) {
            here.resize(piece.count);
            piece.each_run([&](size_t first, size_t count, size_t offset) {
                std::span<const float> run = values(*piece.row, piece.name, first, count);
                std::copy(run.begin(), run.end(), here.begin() + offset);
            });
            state.set(unit, piece.at - state.owned_begin(unit), here);
        });
    }
    state.publish_all();
}

// For all ranks: sets the initial weights. Each value depends only on the seed, the tensor's name and the
// element's index.
inline void initialize(ZeroState& state, uint64_t seed) {
    std::vector<float> values;
    set_tensors(state, [&](const TensorRow& row, const std::string& name, size_t first, size_t count) {
        uint64_t key = random_key(seed, name);
        values.assign(count, row.mean);
        auto number = row.uniform ? random_symmetric : random_normal;
        if (row.deviation > 0) {
#pragma omp parallel for
            for (size_t i = 0; i < count; i++) values[i] += row.deviation * number(key, first + i);
        }
        return std::span<const float>(values);
    });
}

// Describes the first gradient of this rank that is not finite, for the message that stops a run; empty if
// there is none.
inline std::string first_bad_gradient(const ZeroState& state) {
    for (int unit : state.layout().held()) {
        std::vector<float> values(state.part_size(unit));
        copy_to_host(values.data(), state.owned_grads(unit), values.size(), state.stream(), state.mesh());
        for (const TensorPart& part : state.owned_parts(unit)) {
            const float* value = &values[part.at - state.owned_begin(unit)];
            for (size_t i = 0; i < part.count; i++) {
                if (std::isfinite(value[i])) continue;
                size_t element = 0;
                part.slice(i, 1).each_run([&](size_t first, size_t, size_t) { element = first; });
                return text("%s[%zu] = %g", part.name.c_str(), element, plain_nan(value[i]));
            }
        }
    }
    return "";
}

// For all ranks, after a step whose loss or gradient is not finite: throws an error that says what is known.
inline void raise_not_finite(const World& world, const ZeroState& state, int step, float loss,
                             float gradient_norm) {
    std::string bad = world.agree(first_bad_gradient(state), [](const std::vector<std::string>& of_ranks) {
        auto first = std::ranges::find_if(of_ranks, [](const std::string& each) { return !each.empty(); });
        return first == of_ranks.end() ? "" : *first;
    });
    world.fail_on_all(text("step %d: loss %g, gradient norm %g, first gradient that is not finite: %s; try a "
                           "lower --learning-rate or a longer --warmup-steps",
                           step, plain_nan(loss), plain_nan(gradient_norm),
                           bad.empty() ? "none" : bad.c_str()),
                      exit_not_finite);
}

// Returns the name of each matrix and its LAMB trust ratio in the last step.
inline std::vector<std::pair<std::string, float>> trust_ratios(const ZeroState& state) {
    size_t sections = state.layout().sections();
    std::vector<float> squares(2 * sections);
    state.synchronize();
    copy_to_host(squares.data(), state.section_squares(), squares.size(), state.stream(), state.mesh());
    std::vector<std::pair<std::string, float>> ratios;
    size_t number = 0;
    for (const ModelSection& section : state.layout().sections_of_model()) {
        if (section.row->decay)
            ratios.push_back({section.name, trust_ratio(squares[number], squares[sections + number])});
        number++;
    }
    return ratios;
}
