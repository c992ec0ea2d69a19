/*
An option with a few named values is an enum class, and its names stand beneath it, in its order:

    enum class NormKind { layernorm, rmsnorm };
    NAMES_OF(NormKind, "layernorm", "rmsnorm");

The command line, JSON and messages have the names, the program has the enum. Where an option takes a few
words or else something longer (a file, a list), its last enumerator is for that, and has no name:

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

// The enumerator that has the text as its name, else the last one.
template <typename Enum>
constexpr Enum kind_of(std::string_view value) {
    auto& names = NamesOf<Enum>::all;
    return (Enum)(std::find(std::begin(names), std::end(names), value) - std::begin(names));
}

// A value of one of these enums, whatever its type.
struct Choice {
    int value;
    std::span<const char* const> names;
};
