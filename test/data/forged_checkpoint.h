// Checkpoint files with any content and correct checksums: damage that only a careful reader finds.
#pragma once

#include <string>
#include <vector>

#include "data/checkpoint/files.h"

constexpr uint64_t forged_save_id = 0x1122334455667788;

inline std::string forged_index(std::string header, const std::vector<CheckpointPiece>& pieces) {
    using namespace checkpoint_format;
    header.resize((header.size() + alignment - 1) / alignment * alignment, ' ');
    std::string rest((const char*)pieces.data(), pieces.size() * sizeof(CheckpointPiece));
    IndexPreamble preamble = {};
    memcpy(preamble.magic, index_magic, sizeof index_magic);
    preamble.version = version;
    preamble.save_id = forged_save_id;
    preamble.header_bytes = header.size();
    preamble.header_hash = XXH3_64bits(header.data(), header.size());
    preamble.pieces = pieces.size();
    preamble.pieces_hash = XXH3_64bits(rest.data(), rest.size());
    preamble.hash = XXH3_64bits(&preamble, 56);
    return std::string((const char*)&preamble, sizeof preamble) + header + rest;
}

// A header with these tensors and sizes of data files, both written as JSON.
inline std::string forged_header(const std::string& tensors, const std::string& files) {
    return R"({"program": "train_gpt 0", "step": 3, "samples": 96, "options": {"layers": 2}, "tensors": [)" +
           tensors + R"(], "files": [)" + files + "]}";
}

inline std::string forged_data_file(uint32_t number, const std::string& pieces) {
    auto preamble = checkpoint_format::data_preamble(number, forged_save_id, 64 + pieces.size());
    return std::string((const char*)&preamble, sizeof preamble) + pieces;
}
