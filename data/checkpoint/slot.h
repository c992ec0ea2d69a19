/*
The values that a checkpoint, and a training state, hold for each parameter.
*/
#pragma once

#include <cstdint>

// The model's own parameters, their fp32 master copy, and optimizer state: running means of the gradient
// (first moment) and of its square (second moment). `data` does not belong to parameters: it holds integers
// that a contributor to checkpoints needs to resume. The names are part of the file format.
enum class Slot : uint32_t { weight, master, m, v, data };
constexpr int slot_count = 5;
constexpr int common_slots = 4;  // the first ones, which files need not list

inline const char* slot_name(Slot slot) {
    constexpr const char* names[slot_count] = {"weight", "master", "m", "v", "data"};
    return names[(uint32_t)slot];
}

// Returns whether only the optimizer uses the slot.
constexpr bool is_of_optimizer(Slot slot) {
    return slot == Slot::m || slot == Slot::v;
}
