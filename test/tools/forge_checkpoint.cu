/*
Puts a fault into the index of a checkpoint, with correct checksums: only a careful reader finds it.

    forge_checkpoint FOLDER FAULT    one of the faults below
*/
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "data/checkpoint/files.h"

constexpr int64_t vast = (int64_t)1 << 55;

struct RawIndex {
    checkpoint_format::IndexPreamble preamble;
    nlohmann::ordered_json header;
    std::vector<CheckpointPiece> pieces;
};

inline RawIndex read_raw(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string bytes(std::istreambuf_iterator<char>(file), {});
    parse_checkpoint_index(bytes, path);
    RawIndex raw;
    memcpy(&raw.preamble, bytes.data(), sizeof raw.preamble);
    raw.header = nlohmann::ordered_json::parse(bytes.substr(sizeof raw.preamble, raw.preamble.header_bytes));
    raw.pieces.resize(raw.preamble.pieces);
    memcpy((void*)raw.pieces.data(), &bytes[bytes.size() - raw.pieces.size() * sizeof raw.pieces[0]],
           raw.pieces.size() * sizeof raw.pieces[0]);
    return raw;
}

// `claims` changes what the first 64 bytes say about the rest.
template <typename Claims>
void write_raw(const std::string& path, RawIndex raw, Claims&& claims) {
    using checkpoint_format::alignment;
    std::string header = raw.header.dump();
    header.resize((header.size() + alignment - 1) / alignment * alignment, ' ');
    std::string pieces((const char*)raw.pieces.data(), raw.pieces.size() * sizeof raw.pieces[0]);
    auto& preamble = raw.preamble;
    preamble.header_bytes = header.size();
    preamble.header_hash = XXH3_64bits(header.data(), header.size());
    preamble.pieces = raw.pieces.size();
    preamble.pieces_hash = XXH3_64bits(pieces.data(), pieces.size());
    claims(preamble);
    preamble.hash = checkpoint_format::preamble_hash(preamble);
    std::ofstream file(path, std::ios::binary);
    file.write((const char*)&preamble, sizeof preamble) << header << pieces;
    if (!file.flush()) fail("%s: cannot write it; check the disk", path.c_str());
}

int main(int argc, char** argv) try {
    using Fault = void (*)(RawIndex&);
    const std::map<std::string, Fault> faults = {
        {"overlapping-pieces", [](RawIndex& raw) { raw.pieces[1] = raw.pieces[0]; }},
        {"missing-piece", [](RawIndex& raw) { raw.pieces.pop_back(); }},
        {"shorter-piece", [](RawIndex& raw) { raw.pieces[0].count--; }},
        {"piece-of-no-tensor", [](RawIndex& raw) { raw.pieces[0].tensor = UINT32_MAX; }},
        {"piece-of-no-slot", [](RawIndex& raw) { raw.pieces[0].slot = (Slot)UINT32_MAX; }},
        {"piece-of-no-file", [](RawIndex& raw) { raw.pieces[0].file = UINT32_MAX; }},
        {"piece-beyond-the-file", [](RawIndex& raw) { raw.pieces[0].offset = UINT64_MAX - 3; }},
        {"piece-beyond-the-tensor", [](RawIndex& raw) { raw.pieces[0].begin = UINT64_MAX; }},
        {"vast-piece", [](RawIndex& raw) { raw.pieces[0].count = UINT64_MAX / 4 + 2; }},
        {"vast-tensor",
         [](RawIndex& raw) {
             raw.header["tensors"][0]["shape"] = {vast, vast};
         }},
        {"vast-file", [](RawIndex& raw) { raw.header["files"][0] = vast; }},
        {"tensor-twice", [](RawIndex& raw) { raw.header["tensors"][1] = raw.header["tensors"][0]; }},
        {"no-tensors", [](RawIndex& raw) { raw.header.erase("tensors"); }},
        {"empty-tensors", [](RawIndex& raw) { raw.header["tensors"] = nlohmann::json::array(); }},
        {"no-step", [](RawIndex& raw) { raw.header["step"] = -1; }},
        {"vast-header", nullptr},
        {"vast-table", nullptr},
    };
    std::string fault = argc == 3 ? argv[2] : "";
    if (!faults.count(fault)) {
        std::string known;
        for (const auto& [name, unused] : faults) known += " " + name;
        fail("usage: forge_checkpoint FOLDER FAULT; faults:%s", known.c_str());
    }
    std::string path = index_path(argv[1]);
    RawIndex raw = read_raw(path);
    if (faults.at(fault)) faults.at(fault)(raw);
    write_raw(path, raw, [&](checkpoint_format::IndexPreamble& preamble) {
        if (fault == "vast-header") preamble.header_bytes = (uint64_t)1 << 62;
        if (fault == "vast-table") preamble.pieces = (uint64_t)1 << 60;
    });
    return 0;
} catch (const std::exception& error) {
    fprintf(stderr, "forge_checkpoint: %s\n", error.what());
    return 1;
}
