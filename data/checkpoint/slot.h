/*
What a checkpoint, and a state that trains, have of each parameter.
*/
#pragma once

#include <cstdint>

// The model's own parameters, their fp32 master copy, and AdamW's moments.
enum class Slot : uint32_t { weight, master, m, v };
constexpr int slot_count = 4;

inline const char* slot_name(Slot slot) {
    constexpr const char* names[slot_count] = {"weight", "master", "m", "v"};
    return names[(uint32_t)slot];
}
