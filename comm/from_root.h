/*
What the first rank finds out for all: a file that thousands of ranks would look at is a load on the file
system, and they may see different ones.
*/
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "comm/world.h"  // World, raise_error
#include "data/base/error.h"

// For all ranks: the first one's text, on everyone.
inline std::string broadcast_text(const World& world, std::string text) {
    uint64_t bytes = text.size();
    world.broadcast(&bytes, sizeof bytes);
    text.resize(bytes);
    world.broadcast(text.data(), bytes);
    return text;
}

// For all ranks: what make() gives on the first one. What it throws there, all ranks throw.
template <typename Make>
std::string text_from_root(const World& world, Make&& make) {
    std::string text, error;
    if (world.is_root()) note_error(error, [&] { text = make(); });
    raise_error(world, broadcast_text(world, error));
    return broadcast_text(world, std::move(text));
}
