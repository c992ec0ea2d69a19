/*
Shared by the tests of files: temporary folders, token shards as bytes, the form of error messages, and a
small disk.
*/
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <sys/mount.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/token_shards.h"
#include "test/support/cases.h"

namespace fs = std::filesystem;

// A temporary folder, removed at the end of its lifetime.
struct TemporaryFolder {
    std::string path;
    TemporaryFolder() {
        std::string name = fs::temp_directory_path() / ("test_data." + std::string(6, 'X'));  // for mkdtemp
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~TemporaryFolder() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
    std::vector<std::string> files() const {
        std::vector<std::string> names;
        for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename());
        std::sort(names.begin(), names.end());
        return names;
    }
};

inline std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    REQUIRE(file.good());
    return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& content) {
    std::ofstream file(path, std::ios::binary);
    file << content;
    file.close();
    REQUIRE(file.good());
}

// A token shard as bytes, built independently of ShardWriter.
template <typename Stored>
std::string shard_bytes(int32_t magic, int32_t version, int32_t count, const std::vector<Stored>& tokens) {
    std::vector<int32_t> header(256);
    header[0] = magic, header[1] = version, header[2] = count;
    return std::string((const char*)header.data(), 1024) +
           std::string((const char*)tokens.data(), tokens.size() * sizeof(Stored));
}

inline std::string shard_bytes(const std::vector<uint16_t>& tokens) {
    return shard_bytes(20240520, 1, (int32_t)tokens.size(), tokens);
}

inline std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

// Returns the function's output, and its error.
template <typename F>
std::pair<std::string, std::string> printed_by(F&& f) {
    TemporaryFolder folder;
    fflush(stdout);
    int before = dup(1);
    FileHandle file(open((folder / "out").c_str(), O_WRONLY | O_CREAT, 0600));
    dup2(file.get(), 1);
    std::string error = error_of(f);
    fflush(stdout);
    dup2(before, 1);
    close(before);
    return {contents(folder / "out"), error};
}

// Splits a command line into words.
inline std::vector<std::string> words_of(const std::string& line) {
    std::istringstream stream(line);
    return {std::istream_iterator<std::string>(stream), {}};
}

// Checks that a refusal is one line that contains the words, and a remedy.
inline void check_refusal(const std::string& refused_with, const std::string& words, int line) {
    CAPTURE(line);
    CAPTURE(words);
    CAPTURE(refused_with);
    CHECK(refused_with.find(words) != std::string::npos);
    CHECK(refused_with.find("; ") != std::string::npos);
    CHECK(refused_with.find('\n') == std::string::npos);
}
#define CHECK_REFUSED(expression, words) check_refusal(error_of([&] { expression; }), words, __LINE__)

// Checks that an error is one line that begins with the thing, contains the reason and gives a remedy.
inline void check_error(const std::string& error, const std::string& thing, const std::string& reason) {
    CAPTURE(error);
    CHECK(error.starts_with(thing + ":"));
    CHECK(error.find(reason) != std::string::npos);
    CHECK(error.find("; ") != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
}

inline std::vector<int> all_tokens(const std::string& path, int vocab) {
    TokenShard shard(path);
    std::vector<int> tokens((size_t)shard.count());
    shard.copy(0, shard.count(), vocab, tokens.data());
    return tokens;
}

// Mounts a file system of the given size; `mounted` is false if that is not permitted.
struct SmallDisk {
    TemporaryFolder folder;
    bool mounted;
    explicit SmallDisk(const char* size) {
        mounted = mount("tmpfs", folder.path.c_str(), "tmpfs", 0, (std::string("size=") + size).c_str()) == 0;
    }
    ~SmallDisk() {
        if (mounted) umount2(folder.path.c_str(), MNT_DETACH);
    }
};
