/*
The header of a safetensors file: a table of tensors as JSON, before their bytes.

    at  bytes
     0      8  N, little-endian
     8      N  {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...,
               "__metadata__": {"KEY": "VALUE", ...}}, and white space around it
   8+N         the tensors' bytes, row-major and little-endian; offsets count from here

Nothing is trusted: a header is refused unless it has exactly this form and the tensors, in the order of their
offsets, cover the bytes up to the end of the file without holes or overlaps. The table is read row by row, so
that a hostile header of the largest size needs little more memory than its own size.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "data/base/error.h"
#include "data/base/json.h"
#include "data/base/strings.h"

struct SafeTensor {
    std::string name, dtype;
    std::vector<uint64_t> shape;
    uint64_t begin = 0, end = 0;  // bytes, from the end of the header

    // Returns the number of elements.
    uint64_t size() const {
        uint64_t result = 1;
        for (uint64_t dimension : shape) result *= dimension;
        return result;
    }
};

struct SafetensorsHeader {
    std::vector<SafeTensor> tensors;  // in the order of their bytes

    // Returns null if there is none of this name.
    const SafeTensor* find(const std::string& name) const {
        auto row = by_name.find(name);
        return row == by_name.end() ? nullptr : &tensors[row->second];
    }

    std::map<std::string, size_t, std::less<>> by_name;
};

namespace safetensors {

constexpr uint64_t longest_header = 100'000'000;
constexpr const char* metadata_key = "__metadata__";

// Returns the bits of an element; 0 for a type that does not exist.
inline uint64_t element_bits(std::string_view dtype) {
    static const std::map<std::string_view, uint64_t> bits = {
        {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"BOOL", 8}, {"U8", 8},   {"I8", 8},
        {"F8_E5M2", 8},     {"F8_E4M3", 8},     {"F8_E8M0", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},
        {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"BF16", 16},   {"I32", 32}, {"U32", 32}, {"F32", 32},
        {"C64", 64},        {"F64", 64},        {"I64", 64},    {"U64", 64}};
    auto row = bits.find(dtype);
    return row == bits.end() ? 0 : row->second;
}

// Returns the type of a value, for messages about one that has the wrong type.
inline const char* kind_of(const nlohmann::json& value) {
    static constexpr const char* kinds[] = {
        "null",          "an object",         "an array", "a string",
        "true or false", "a negative number", "a number", "a number that is too large or not whole"};
    static_assert((int)nlohmann::json::value_t::number_float == std::size(kinds) - 1);
    return kinds[(size_t)value.type()];
}

// Adds the tensor that a row of the table describes. Metadata is a row too, but is only checked.
inline void add_row(SafetensorsHeader& header, const std::string& name, const nlohmann::json& row,
                    const std::string& path) {
    auto refuse_row = [&](const char* what) {
        fail("%s: \"%s\" %s in the header; the file is damaged or of another kind", path.c_str(),
             printable(name).c_str(), what);
    };
    auto refuse_field = [&](const std::string& field, const nlohmann::json& value) {
        fail("%s: \"%s\": %s is %s in the header; the file is damaged or of another kind", path.c_str(),
             printable(name).c_str(), printable(field).c_str(), kind_of(value));
    };
    if (!row.is_object()) refuse_row(text("is %s", kind_of(row)).c_str());
    if (name == metadata_key) {
        for (const auto& [field, value] : row.items()) {
            if (value.is_string()) continue;
            fail("%s: %s: \"%s\" is %s; metadata values must be strings", path.c_str(), metadata_key,
                 printable(field).c_str(), kind_of(value));
        }
        return;
    }
    for (const auto& [field, value] : row.items()) {
        if (field != "dtype" && field != "shape" && field != "data_offsets")
            refuse_row("has a field that is not dtype, shape or data_offsets");
        if (field == "dtype" ? !value.is_string() : !value.is_array()) refuse_field(field, value);
        for (const auto& number : value) {
            if (field != "dtype" && !number.is_number_unsigned()) refuse_field(field, number);
        }
    }
    if (row.size() != 3) refuse_row("lacks one of dtype, shape and data_offsets");
    SafeTensor tensor{name, row["dtype"], row["shape"]};
    if (element_bits(tensor.dtype) == 0) {
        fail("%s: tensor %s: dtype %s is not known; write the file with another", path.c_str(),
             printable(name).c_str(), printable(tensor.dtype).c_str());
    }
    const nlohmann::json& offsets = row["data_offsets"];
    if (offsets.size() != 2) refuse_row("has data_offsets that are not two numbers");
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
    header.tensors.push_back(std::move(tensor));
}

// Reads the table row by row. The tree of a hostile header could be twenty times its size and very deep, and
// would keep only one of two equal keys; so keys and depth are checked during parsing, and only one row is
// kept at a time.
inline SafetensorsHeader read_rows(std::string_view source, const std::string& path) {
    using Event = nlohmann::json::parse_event_t;
    constexpr int deepest = 4;                 // values are nested in the table, a row and a shape at most
    constexpr size_t most_values = 1'000'000;  // in a row
    constexpr size_t most_objects = 16;        // there, too: after each, the parser walks over all before it
    SafetensorsHeader header;
    std::set<std::string> names, fields;  // fields: of the row called `name`
    std::string name;
    size_t values = 0, objects = 0;
    auto on_event = [&](int depth, Event event, nlohmann::json& value) {
        objects += event == Event::object_start && depth > 1;
        if (depth > deepest || objects > most_objects || ++values > most_values) {
            fail("%s: \"%s\" is too deep or has too many values in the header; the file is of another kind",
                 path.c_str(), printable(name).c_str());
        }
        if (event == Event::key && depth == 1) {
            name = value;
            fields.clear();
            values = objects = 0;
            if (!names.insert(name).second) {
                fail("%s: \"%s\" is in the header twice; the file is damaged", path.c_str(),
                     printable(name).c_str());
            }
        } else if (event == Event::key && !fields.insert(value).second) {
            fail("%s: \"%s\" has a field twice in the header; the file is damaged or of another kind",
                 path.c_str(), printable(name).c_str());
        }
        bool row =
            depth == 1 && (event == Event::value || event == Event::object_end || event == Event::array_end);
        if (row) add_row(header, name, value, path);
        return !row;
    };
    try {
        nlohmann::json empty = nlohmann::json::parse(source, on_event);
    } catch (const nlohmann::json::parse_error& error) {
        fail("%s: header is not valid JSON at byte %zu; the file is damaged or of another kind", path.c_str(),
             error.byte);
    } catch (const nlohmann::json::exception& error) {
        fail("%s: header is not valid JSON (%s); the file is damaged", path.c_str(),
             printable(error.what()).c_str());
    }
    return header;
}

// Checks that the size of the shape does not overflow, and that the byte range matches it.
inline void check_size(const SafeTensor& tensor, const std::string& where) {
    uint64_t bits = 1;
    bool overflow = false;
    for (uint64_t dimension : tensor.shape) overflow |= __builtin_mul_overflow(bits, dimension, &bits);
    overflow |= __builtin_mul_overflow(bits, element_bits(tensor.dtype), &bits);
    if (overflow) fail("%s: shape overflows 64 bits; the file is damaged", where.c_str());
    if (bits % 8) {
        fail("%s: %llu bits of %s are not a whole number of bytes; the file is damaged", where.c_str(),
             (unsigned long long)bits, tensor.dtype.c_str());
    }
    if (tensor.end - tensor.begin != bits / 8) {
        fail("%s: data_offsets [%llu, %llu] hold %llu bytes, but its shape needs %llu; the file is damaged",
             where.c_str(), (unsigned long long)tensor.begin, (unsigned long long)tensor.end,
             (unsigned long long)(tensor.end - tensor.begin), (unsigned long long)(bits / 8));
    }
}

// Sorts the tensors by their offsets. Their bytes must be exactly the `data_bytes` bytes after the header.
inline void check_places(SafetensorsHeader& header, uint64_t data_bytes, const std::string& path) {
    std::sort(header.tensors.begin(), header.tensors.end(), [](const SafeTensor& a, const SafeTensor& b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    uint64_t end = 0;
    for (size_t i = 0; i < header.tensors.size(); i++) {
        const SafeTensor& tensor = header.tensors[i];
        std::string where = path + ": tensor " + printable(tensor.name);
        if (tensor.begin != end || tensor.end < tensor.begin) {
            fail("%s: data_offsets [%llu, %llu] leave a hole, overlap another tensor or run backwards (byte "
                 "%llu is next); the file is damaged",
                 where.c_str(), (unsigned long long)tensor.begin, (unsigned long long)tensor.end,
                 (unsigned long long)end);
        }
        check_size(tensor, where);
        end = tensor.end;
        header.by_name[tensor.name] = i;
    }
    if (end != data_bytes) {
        fail("%s: %llu bytes after the header, but the tensors have %llu: %s; copy or download it again",
             path.c_str(), (unsigned long long)data_bytes, (unsigned long long)end,
             data_bytes < end ? "it is cut short" : "something else follows them");
    }
}

}  // namespace safetensors

// `source`: the N bytes after the first 8; `data_bytes`: the number of bytes in the file after those.
inline SafetensorsHeader parse_safetensors_header(std::string_view source, uint64_t data_bytes,
                                                  const std::string& path) {
    size_t begin = source.find_first_not_of(" \t\r\n");
    // a zero byte would end the parser's input
    if (begin == source.npos || source[begin] != '{' || source.find('\0') != source.npos) {
        fail("%s: header is not a JSON object; the file is damaged or of another kind", path.c_str());
    }
    SafetensorsHeader header = safetensors::read_rows(source, path);
    safetensors::check_places(header, data_bytes, path);
    return header;
}
