/*
Where the time of a step goes on one rank.

The compute stream of a rank is at one of these phases at any time of a step, or it has nothing to do. A pass
counts without what it waited for others in between; what it waited counts by what it waited for:

    forward, backward, weight_gradients, optimizer     own work
    wait_tensor      rows of activations of other tensor ranks
    wait_pipeline    the stage before, or behind
    wait_gradients   sums over ranks: gradients, and the statistics of the step, where all ranks meet
    wait_parameters  parts of parameters that other ranks own
    other            the rest of the step

Beside them stands what the host waited: for batches (data), and for a checkpoint to begin (save). The device
works on meanwhile, if it has been given enough.
*/
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

// In the order of a step, in which they are logged and shown.
enum class StepPhase : uint8_t {
    data,
    forward,
    backward,
    weight_gradients,
    optimizer,
    save,
    wait_tensor,
    wait_pipeline,
    wait_gradients,
    wait_parameters,
    other
};
inline constexpr std::array<const char*, 11> step_phase_names = {
    "data",        "forward",       "backward",       "weight_gradients", "optimizer", "save",
    "wait_tensor", "wait_pipeline", "wait_gradients", "wait_parameters",  "other"};
constexpr size_t step_phases = step_phase_names.size();

// How many micro-batches are done of those that are worked on. Each is several pieces of work, and counts in
// parts.
struct PassProgress {
    float done = 0;
    int of = 0;
};

constexpr bool is_own_work(StepPhase phase) {
    return phase >= StepPhase::forward && phase <= StepPhase::optimizer;
}
constexpr bool is_waiting(StepPhase phase) {
    return phase >= StepPhase::wait_tensor && phase <= StepPhase::wait_parameters;
}

struct StepTimes {
    int32_t step = 0;
    bool detailed = false;  // without, waits are not told apart from the passes that they are in
    float seconds = 0;      // the step's time on the device
    std::array<float, step_phases> phases = {};  // seconds

    float& operator[](StepPhase phase) { return phases[(size_t)phase]; }
    float operator[](StepPhase phase) const { return phases[(size_t)phase]; }

    template <typename Counts>
    float sum(Counts&& counts) const {
        float seconds = 0;
        for (size_t phase = 0; phase < step_phases; phase++)
            if (counts((StepPhase)phase)) seconds += phases[phase];
        return seconds;
    }
    float own_work() const { return sum(is_own_work); }
    float waited() const { return sum(is_waiting); }
    // Makes `other` of what is left of the step.
    void complete() { (*this)[StepPhase::other] = std::max(0.0f, seconds - own_work() - waited()); }
};
