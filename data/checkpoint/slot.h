/*
What a checkpoint, and a state that trains, have of each parameter.
*/
#pragma once

#include <cstdint>

// The model's own parameters, their fp32 master copy, and what optimizers keep: means of the gradient (first
// moment) and of its square (second moment). Data are no parameters: whole numbers that a contributor to
// checkpoints goes on from. Files have the names.
enum class Slot : uint32_t { weight, master, m, v, data };
constexpr int slot_count = 5;
constexpr int common_slots = 4;  // the first ones, which files need not name

inline const char* slot_name(Slot slot) {
    constexpr const char* names[slot_count] = {"weight", "master", "m", "v", "data"};
    return names[(uint32_t)slot];
}

// Tells whether it is there for the optimizer alone.
constexpr bool is_of_optimizer(Slot slot) {
    return slot == Slot::m || slot == Slot::v;
}
