/*
The header of a safetensors file: a table of tensors as JSON, in front of their bytes.

    at  bytes
     0      8  N, little-endian
     8      N  {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...,
               "__metadata__": {"KEY": "VALUE", ...}}, and white space around it
   8+N         the tensors' bytes, row-major and little-endian; offsets count from here

Nothing is trusted: a header is refused unless it is exactly of this form and the tensors, put in order, cover
the bytes up to the end of the file without holes or overlaps. It is read by events, so that a hostile one of
the largest size takes little more memory than its own, and nesting takes none.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/json.h"
#include "data/base/strings.h"

struct SafeTensor {
    std::string name, dtype;
    std::vector<uint64_t> shape;
    uint64_t begin = 0, end = 0;  // bytes, from the end of the header

    // Elements.
    uint64_t size() const {
        uint64_t result = 1;
        for (uint64_t dimension : shape) result *= dimension;
        return result;
    }
};

struct SafetensorsHeader {
    std::vector<SafeTensor> tensors;  // in the order of their bytes

    // Null if there is none of this name.
    const SafeTensor* find(const std::string& name) const {
        auto row = by_name.find(name);
        return row == by_name.end() ? nullptr : &tensors[row->second];
    }

    std::map<std::string, size_t, std::less<>> by_name;
};

namespace safetensors {

constexpr uint64_t longest_header = 100'000'000;
constexpr const char* metadata_key = "__metadata__";

// Bits of an element; 0 for a type that does not exist.
inline uint64_t element_bits(std::string_view dtype) {
    static const std::map<std::string_view, uint64_t> bits = {
        {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"BOOL", 8}, {"U8", 8},   {"I8", 8},
        {"F8_E5M2", 8},     {"F8_E4M3", 8},     {"F8_E8M0", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},
        {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"BF16", 16},   {"I32", 32}, {"U32", 32}, {"F32", 32},
        {"C64", 64},        {"F64", 64},        {"I64", 64},    {"U64", 64}};
    auto row = bits.find(dtype);
    return row == bits.end() ? 0 : row->second;
}

// Takes the events of nlohmann's parser; what does not belong to a header is refused where it begins.
class HeaderEvents {
public:
    HeaderEvents(const std::string& path, SafetensorsHeader& header) : path_(path), header_(header) {}

    bool start_object(size_t) {
        if (place_ == Place::outside) return go(Place::table);
        if (place_ == Place::entry) return go(key_ == metadata_key ? Place::metadata : Place::tensor);
        refuse("an object");
    }

    bool end_object() {
        if (place_ == Place::tensor && fields_ != all_fields)
            refuse_entry("not all of dtype, shape and data_offsets");
        return go(place_ == Place::table ? Place::outside : Place::table);
    }

    bool key(std::string& key) {
        if (place_ == Place::table) {
            key_ = key;
            fields_ = 0;
            bool first = key == metadata_key ? !std::exchange(has_metadata_, true)
                                             : header_.by_name.emplace(key, header_.tensors.size()).second;
            if (!first) {
                fail("%s: \"%s\" is in the header twice; the file is damaged", path_.c_str(),
                     printable(key).c_str());
            }
            if (key != metadata_key) header_.tensors.emplace_back().name = key;
            return go(Place::entry);
        }
        field_ = key;
        bool first = place_ == Place::metadata ? metadata_.insert(key).second : !(fields_ & field_bit(key));
        if (!first) refuse_entry("a field twice");
        if (place_ == Place::tensor) fields_ |= field_bit(key);
        return true;
    }

    bool string(std::string& value) {
        if (place_ == Place::tensor && field_ == "dtype")
            set_dtype(value);
        else if (place_ != Place::metadata)
            refuse("a text");
        return true;
    }

    bool start_array(size_t) {
        if (place_ != Place::tensor || field_ == "dtype") refuse("an array");
        numbers_.clear();
        return go(Place::numbers);
    }

    bool end_array() {
        SafeTensor& tensor = header_.tensors.back();
        if (field_ == "shape") {
            tensor.shape = std::move(numbers_);
        } else {
            if (numbers_.size() != 2) refuse_entry("data_offsets that are not two numbers");
            tensor.begin = numbers_[0];
            tensor.end = numbers_[1];
        }
        return go(Place::tensor);
    }

    bool number_unsigned(uint64_t value) {
        if (place_ != Place::numbers) refuse("a number");
        numbers_.push_back(value);
        return true;
    }

    bool number_integer(int64_t) { refuse("a negative number"); }
    bool number_float(double, const std::string&) { refuse("a number that is not whole or too large"); }
    bool boolean(bool) { refuse("true or false"); }
    bool null() { refuse("null"); }
    bool binary(std::vector<uint8_t>&) { refuse("bytes"); }

    bool parse_error(size_t at, const std::string&, const nlohmann::json::exception&) {
        fail("%s: header is not valid JSON at byte %zu; the file is damaged or of another kind",
             path_.c_str(), at);
    }

private:
    enum class Place { outside, table, entry, metadata, tensor, numbers };

    bool go(Place place) {
        place_ = place;
        return true;
    }

    static constexpr int all_fields = 7;

    int field_bit(const std::string& field) const {
        if (field == "dtype") return 1;
        if (field == "shape") return 2;
        if (field == "data_offsets") return 4;
        refuse_entry("a field that is not dtype, shape or data_offsets");
    }

    void set_dtype(const std::string& dtype) {
        if (element_bits(dtype) == 0) {
            fail("%s: tensor %s: dtype %s is not known; write the file with another", path_.c_str(),
                 printable(key_).c_str(), printable(dtype).c_str());
        }
        header_.tensors.back().dtype = dtype;
    }

    [[noreturn]] void refuse_entry(const char* what) const {
        fail("%s: \"%s\" has %s in the header; the file is damaged or of another kind", path_.c_str(),
             printable(key_).c_str(), what);
    }

    [[noreturn]] void refuse(const char* what) const {
        if (place_ == Place::outside || place_ == Place::table)
            fail("%s: header is not a JSON object; the file is damaged or of another kind", path_.c_str());
        if (place_ == Place::metadata) {
            fail("%s: %s: \"%s\" is %s; metadata must be texts", path_.c_str(), metadata_key,
                 printable(field_).c_str(), what);
        }
        if (place_ == Place::entry)
            fail("%s: \"%s\" is %s in the header; it must be an object", path_.c_str(),
                 printable(key_).c_str(), what);
        fail("%s: \"%s\": %s is %s in the header; the file is damaged or of another kind", path_.c_str(),
             printable(key_).c_str(), printable(field_).c_str(), what);
    }

    const std::string& path_;
    SafetensorsHeader& header_;
    Place place_ = Place::outside;
    std::string key_, field_;  // where we are
    bool has_metadata_ = false;
    std::set<std::string> metadata_;  // keys that were there
    int fields_ = 0;                  // of this tensor: those that were there
    std::vector<uint64_t> numbers_;
};

// That the shape has a size, and that the bytes are those of the shape.
inline void check_size(const SafeTensor& tensor, const std::string& where) {
    uint64_t bits = 1;
    bool overflow = false;
    for (uint64_t dimension : tensor.shape) overflow |= __builtin_mul_overflow(bits, dimension, &bits);
    overflow |= __builtin_mul_overflow(bits, element_bits(tensor.dtype), &bits);
    if (overflow) fail("%s: shape overflows 64 bits; the file is damaged", where.c_str());
    if (bits % 8) {
        fail("%s: %llu bits of %s are no whole number of bytes; the file is damaged", where.c_str(),
             (unsigned long long)bits, tensor.dtype.c_str());
    }
    if (tensor.end - tensor.begin != bits / 8) {
        fail("%s: data_offsets [%llu, %llu] hold %llu bytes, and its shape needs %llu; the file is damaged",
             where.c_str(), (unsigned long long)tensor.begin, (unsigned long long)tensor.end,
             (unsigned long long)(tensor.end - tensor.begin), (unsigned long long)(bits / 8));
    }
}

// Puts the tensors in the order of their bytes, which must be the `data_bytes` bytes behind the header.
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
        fail("%s: %llu bytes behind the header, and the tensors have %llu: %s; copy or download it again",
             path.c_str(), (unsigned long long)data_bytes, (unsigned long long)end,
             data_bytes < end ? "it is cut short" : "something else follows them");
    }
}

}  // namespace safetensors

// `source`: the N bytes behind the first 8; `data_bytes`: what the file has behind those.
inline SafetensorsHeader parse_safetensors_header(std::string_view source, uint64_t data_bytes,
                                                  const std::string& path) {
    size_t begin = source.find_first_not_of(" \t\r\n");
    // a zero byte would end the parser's input
    if (begin == source.npos || source[begin] != '{' || source.find('\0') != source.npos) {
        fail("%s: header is not a JSON object; the file is damaged or of another kind", path.c_str());
    }
    SafetensorsHeader header;
    safetensors::HeaderEvents events(path, header);
    try {
        nlohmann::json::sax_parse(source, &events);
    } catch (const nlohmann::json::exception& error) {
        fail("%s: header is not valid JSON (%s); the file is damaged", path.c_str(),
             printable(error.what()).c_str());
    }
    safetensors::check_places(header, data_bytes, path);
    return header;
}
