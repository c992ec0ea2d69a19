/*
An option with a few named values is an enum class, followed by its names in the same order:

    enum class NormKind { layernorm, rmsnorm };
    NAMES_OF(NormKind, "layernorm", "rmsnorm");

The command line, JSON and messages use the names; the program uses the enum. If an option also accepts
something longer (a file, a list) instead of one of the names, its last enumerator stands for that, and has no
name:

    enum class TokenizerKind { none, bytes, file };
    NAMES_OF(TokenizerKind, "none", "bytes");
*/
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>

template <typename Enum>
struct NamesOf;  // an enum without names does not compile

#define NAMES_OF(Enum, ...)                                                                                  \
    template <>                                                                                              \
    struct NamesOf<Enum> {                                                                                   \
        static constexpr const char* all[] = {__VA_ARGS__};                                                  \
    }

NAMES_OF(bool, "off", "on");

template <typename Enum>
constexpr const char* name_of(Enum value) {
    return NamesOf<Enum>::all[(int)value];
}

// Returns the enumerator with this name, or the last one if no name matches.
template <typename Enum>
constexpr Enum kind_of(std::string_view value) {
    auto& names = NamesOf<Enum>::all;
    return (Enum)(std::find(std::begin(names), std::end(names), value) - std::begin(names));
}

// A value of any of these enums, with the names of its type.
struct Choice {
    int value;
    std::span<const char* const> names;
};
