// A golden run of PyTorch; test/golden/make_golden.py describes the format.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/base/error.h"

struct Golden {
    nlohmann::json header;
    std::vector<char> data;

    explicit Golden(const char* name) {
        std::string path = text("test/golden/%s.bin", name);
        std::ifstream file(path, std::ios::binary);
        REQUIRE_MESSAGE(file.good(), path);
        char magic[8];
        uint64_t length = 0;
        file.read(magic, 8).read((char*)&length, 8);
        REQUIRE(std::string(magic, 6) == "GOLDEN");
        std::string json(length, 0);
        file.read(json.data(), (std::streamsize)length);
        header = nlohmann::json::parse(json);
        data.assign(std::istreambuf_iterator<char>(file), {});
    }

    template <typename T>
    std::vector<T> tensor(const std::string& kind, const std::string& name) const {
        for (auto& row : header["tensors"]) {
            if (row["kind"] != kind || row["name"] != name) continue;
            size_t count = 1;
            for (size_t extent : row["shape"]) count *= extent;
            std::vector<T> values(count);
            memcpy(values.data(), data.data() + (size_t)row["offset"], count * sizeof(T));
            return values;
        }
        FAIL("no " << kind << " " << name);
        return {};
    }

    bool has(const char* kind) const {
        return std::ranges::any_of(header["tensors"], [&](auto& row) { return row["kind"] == kind; });
    }
};
