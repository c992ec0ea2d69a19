/*
Checks that all ranks have been given the same work. On each host, MPI runs the command line given for that
host: a rank with a different seed or learning rate would train on silently while its weights drift away from
the others', and one with a different number of layers would wait for messages that no rank sends. So before
the work begins, each rank reports what it was given, and the first rank compares.

Options are compared by value, except those whose row of the table says that ranks may have their own. The
program is compared by the sources that it was built from, not by its bytes, which differ if it was built for
another processor. Files are compared by content, because nodes may have copies of their own.
*/
#pragma once

#include <algorithm>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>
#include <xxhash.h>

#include "comm/world.h"      // World
#include "data/base/file.h"  // NewFile, File
#include "data/base/program_version.h"
#include "data/options/help.h"         // option_name
#include "data/options/values.h"       // value_text
#include "data/tokens/token_source.h"  // CheckedFile

// Properties of a rank, by name: {"--seed", "1337"}. All ranks have the same names, in the same order.
using RankFacts = std::vector<std::pair<std::string, std::string>>;

// "rank 1 of 4 on a", "ranks 1 and 3 of 4, on a and b" or "3 of 4 ranks, the first of them rank 1 on a".
inline std::string named_ranks(const std::vector<int>& ranks, const World& world) {
    if (ranks.size() == 1) return world.name_of(ranks[0]);
    const std::string first = text("rank %d on %s", ranks[0], world.host(ranks[0]).c_str());
    if (ranks.size() == 2)
        return text("%s and rank %d on %s", first.c_str(), ranks[1], world.host(ranks[1]).c_str());
    return text("%zu of %d ranks, the first of them %s", ranks.size(), world.size(), first.c_str());
}

// Describes how ranks differ, given the facts of each: the first fact that differs, with its values and the
// ranks that have them, then the names of the other facts that differ. Empty if none differs. A rank without
// facts is not compared; the first rank must have some.
inline std::string difference_between(const std::vector<RankFacts>& of_ranks, const World& world) {
    std::string values, others;
    for (size_t fact = 0; fact < of_ranks[0].size(); fact++) {
        std::map<std::string, std::vector<int>> ranks;  // by value
        for (int rank = 0; rank < world.size(); rank++) {
            const RankFacts& facts = of_ranks[(size_t)rank];
            if (!facts.empty()) ranks[facts[fact].second].push_back(rank);
        }
        if (ranks.size() == 1) continue;
        const std::string& name = of_ranks[0][fact].first;
        if (!values.empty()) {
            append_item(others, name);
            continue;
        }
        std::vector<std::pair<std::string, std::vector<int>>> by_rank(ranks.begin(), ranks.end());
        std::ranges::sort(by_rank, {}, [](const auto& one) { return one.second[0]; });
        for (const auto& [value, who] : by_rank) {
            values += (values.empty() ? name + ": ranks differ: " : ", ") +
                      (value.empty() ? "nothing" : printable(value)) + " on " + named_ranks(who, world);
        }
    }
    return others.empty() ? values : values + " (and " + others + ")";
}

// For all ranks, each with its own facts: fails on all of them if these differ. remedy: ends the message.
inline void check_same(const World& world, const RankFacts& mine, const std::string& remedy) {
    if (world.size() == 1) return;
    std::string packed;  // in CBOR, because values that are not UTF-8 cannot be JSON text
    nlohmann::json::to_cbor(nlohmann::json(mine), packed);
    std::string difference = world.agree(packed, [&](const std::vector<std::string>& texts) {
        std::vector<RankFacts> of_ranks;
        for (const std::string& one : texts) of_ranks.push_back(nlohmann::json::from_cbor(one));
        return difference_between(of_ranks, world);
    });
    if (!difference.empty()) world.fail_on_all(difference + "; " + remedy, exit_bad_input);
}

// ----------------------------------------------------------------------------
// the program and its options

// For all ranks: checks that their programs can work together, and run the same command. source: a hash of
// the sources that this program was built from.
inline void check_same_program(const World& world, const char* source, const char* command) {
#ifdef __CUDACC__
    const char* device = "GPUs";
#elif defined(DEVICE_CPU)
    const char* device = "CPUs";
#else
    const char* device = "a simulated GPU";
#endif
#ifdef RANKS_USE_NCCL
    const char* transport = "NCCL";
#else
    const char* transport = "MPI";
#endif
    std::string build = text("for %s in %s over %s", device, floatX_name, transport);
    check_same(
        world,
        {{"program", program_version}, {"its build", build}, {"its source", source}, {"command", command}},
        "start the same program on all hosts, for the same command");
}

// For all ranks, each with its own options: checks that they are the same. remedy: ends the message.
template <typename O>
void check_same_options(const World& world, const O& options,
                        const std::string& remedy = "give all ranks the same options") {
    RankFacts facts;
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(O::command) && row.ranks != Ranks::own)
            facts.emplace_back(option_name(row), value_text(row, options));
    }
    check_same(world, facts, remedy);
}

// ----------------------------------------------------------------------------
// files

// For all ranks: checks that all have read the same content. name: names it in the message.
inline void check_same_content(const World& world, const std::string& name, const std::string& content) {
    uint64_t hash = XXH3_64bits(content.data(), content.size());
    check_same(world, {{name, text("content %016llx", (unsigned long long)hash)}},
               "copy the same file to all nodes");
}

// Returns a hash of `blocks` evenly spaced blocks of a file's tokens.
inline uint64_t sampled_hash(const CheckedFile& file, int blocks) {
    constexpr uint64_t block_bytes = 4096;
    std::string content((size_t)blocks * block_bytes, '\0');
    uint64_t bytes = (uint64_t)file.tokens.count * (uint64_t)file.tokens.width;
    struct stat status;
    FileHandle handle = open_regular(file.tokens_path, &status);
    for (int block = 0; block < blocks; block++) {
        uint64_t at = bytes / (uint64_t)blocks * (uint64_t)block;
        uint64_t wanted = std::min(block_bytes, bytes - at);
        if (!read_at(handle, file.tokens_path, file.tokens.first_byte + at,
                     &content[(size_t)block * block_bytes], wanted))
            fail("%s: is shorter here than on the first rank's node; copy the same file to all nodes",
                 file.path.c_str());
    }
    return XXH3_64bits(content.data(), content.size());
}

// For all ranks: checks that token files, known to have the same paths and sizes on all nodes, also have the
// same content. The ranks that read, one per node, compare 64 blocks of each file. If there are many files,
// they compare fewer blocks, and above 4096 files, only some of the files.
inline void check_same_tokens(const World& world, const std::vector<CheckedFile>& files, bool reads) {
    constexpr size_t most_blocks = 4096, blocks_of_file = 64;
    RankFacts facts;
    world.on_all_ranks([&] {
        if (!reads) return;
        size_t every = files.size() / most_blocks + 1;
        auto blocks = (int)std::clamp(most_blocks / files.size(), (size_t)1, blocks_of_file);
        for (size_t i = 0; i < files.size(); i += every) {
            uint64_t hash = sampled_hash(files[i], blocks);
            facts.emplace_back(files[i].path, text("content %016llx (sampled)", (unsigned long long)hash));
        }
    });
    check_same(world, facts, "copy the same file to all nodes");
}

// For all ranks: checks that all nodes share a folder. The first rank writes a file there, and the ranks that
// look, one per node, must find it.
inline void check_shared_folder(const World& world, const std::string& folder, bool looks, int seconds = 10) {
    struct Removed {
        std::string path;
        ~Removed() {
            if (!path.empty()) unlink(path.c_str());
        }
    } written;  // on the first rank
    std::string name = text_from_root(world, [&] {
        std::string name = text(".seen_by_all_%d_%lld", (int)getpid(), (long long)time(nullptr));
        write_whole(folder + "/" + name, "");
        written.path = folder + "/" + name;
        return name;
    });
    world.on_all_ranks([&] {
        // A network file system may show a new file a little later.
        for (int tries = seconds * 10; looks && access((folder + "/" + name).c_str(), F_OK) != 0; tries--) {
            if (tries == 0)
                fail("--run-dir %s: the first rank's node writes there, but this node does not see the file; "
                     "name a folder on a file system that all nodes share",
                     printable(folder).c_str());
            usleep(100000);
        }
    });
}
