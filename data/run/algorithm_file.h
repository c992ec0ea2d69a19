/*
The algorithms that a run has chosen for its matrix products, stored in a file. Their speeds depend on the GPU
and the library version, so the file has a section for each combination of these that it was used with:

    {"algorithms": {SETUP: {KIND OF PRODUCT: bytes as hexadecimal digits, ...}, ...}, "checksum": ...}

An empty byte string means that a separate kernel computes the product's epilogue. The bytes are passed to the
library unchecked, so a file whose checksum does not match is refused.
*/
#pragma once

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <map>
#include <string>
#include <string_view>
#include <sys/stat.h>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"

// Maps a setup and a kind of product to the bytes of its algorithm.
using AlgorithmTable = std::map<std::string, std::map<std::string, std::string>>;

inline std::string algorithm_path(const std::string& run_dir) {
    return run_dir + "/matmul_algorithms.json";
}

inline std::string hex_of(std::string_view bytes) {
    std::string digits;
    for (unsigned char byte : bytes) digits += text("%02x", byte);
    return digits;
}

inline std::string bytes_of_hex(const std::string& digits) {
    if (digits.size() % 2 || digits.find_first_not_of("0123456789abcdef") != digits.npos)
        fail("'%s' is not a string of hexadecimal bytes", printable(digits).c_str());
    std::string bytes;
    for (size_t i = 0; i < digits.size(); i += 2) {
        bytes += (char)std::stoi(digits.substr(i, 2), nullptr, 16);
    }
    return bytes;
}

inline std::string algorithm_checksum(const nlohmann::json& algorithms) {
    std::string source = algorithms.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    return text("%016llx", (unsigned long long)XXH3_64bits(source.data(), source.size()));
}

// Returns an empty table if there is no file.
inline AlgorithmTable read_algorithms(const std::string& path) {
    struct stat status;
    if (stat(path.c_str(), &status) != 0 && errno == ENOENT) return {};
    constexpr uint64_t most = 64 << 20;
    try {
        nlohmann::json json = parse_json(read_whole(path, most, "too many for this kind of file"), path);
        if (!json.is_object() || !json.contains("algorithms") || !json.contains("checksum"))
            fail("%s: not a file of matrix-product algorithms", path.c_str());
        if (json["checksum"] != algorithm_checksum(json["algorithms"]))
            fail("%s: damaged, its checksum does not match", path.c_str());
        AlgorithmTable table;
        for (auto& [setup, kinds] : json["algorithms"].items()) {
            for (auto& [kind, digits] : kinds.items())
                table[setup][kind] = bytes_of_hex(digits.get<std::string>());
        }
        return table;
    } catch (const nlohmann::json::exception& error) {
        fail("%s: %s; delete it to have the products timed again, or give another --matmul-tuning",
             path.c_str(), printable(error.what()).c_str());
    } catch (const Error& error) {
        fail("%s; delete it to have the products timed again, or give another --matmul-tuning", error.what());
    }
}

inline void write_algorithms(const std::string& path, const AlgorithmTable& table) {
    nlohmann::json algorithms = nlohmann::json::object();
    for (auto& [setup, kinds] : table) {
        for (auto& [kind, bytes] : kinds) algorithms[setup][kind] = hex_of(bytes);
    }
    nlohmann::json json = {{"algorithms", algorithms}, {"checksum", algorithm_checksum(algorithms)}};
    write_whole(path, json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n");
}
