/*
The time of a step on one rank, by what it is spent on.

At any time of a step, the compute stream of a rank is in one of these phases, or idle. The time of a pass
does not include the waits inside it, which are counted by what was waited for:

    forward, backward, weight_gradients, optimizer     own work
    wait_tensor      rows of activations of other tensor ranks
    wait_pipeline    the previous or the next stage
    wait_gradients   sums over ranks: of gradients, and of the step's statistics, where all ranks meet
    wait_parameters  shards of parameters that other ranks own
    other            the rest of the step

The waits of the host are recorded beside these: for batches (data), and for a checkpoint to begin (save). The
device continues meanwhile if it has been given enough work.
*/
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

// In the order of a step, which is also the order in the log and in reports.
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

// How many micro-batches of a step, or of a validation, are done. Each consists of several pieces of work, so
// `done` can be a fraction.
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
    bool detailed = false;  // false: waits are not separated from the passes that they are in
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
    // Sets `other` to the rest of the step.
    void complete() { (*this)[StepPhase::other] = std::max(0.0f, seconds - own_work() - waited()); }
};
