// libFuzzer: whatever the index of a checkpoint holds, it is read in full or refused in one line; and if it
// is read, its pieces make up the tensors and the files exactly. The first byte chooses what the rest is: the
// whole file; header and pieces, after a valid preamble; or damage to the header of a good file or to fields
// of its pieces, with recomputed checksums, because the fuzzer could not guess them.
#include <cstdlib>

#include "data/checkpoint/index.h"
#include "test/data/forged_checkpoint.h"
#include "test/fuzz/fuzz_json.h"

using Pieces = std::vector<CheckpointPiece>;

static const std::string good_header = forged_header(
    R"({"name": "a", "shape": [2, 4], "weight": "fp32"},
           {"name": "b", "shape": [8], "weight": "bf16", "m": "fp32"},
           {"name": "c", "shape": [3, 3], "weight": "fp32"})",
    "118, 126");

static const Pieces good_pieces = {
    {0, Slot::weight, 0, 0, 0, 4, 0, 8, 64, 1},  {1, Slot::weight, 0, 0, 0, 1, 0, 5, 96, 2},
    {1, Slot::weight, 1, 0, 0, 1, 5, 3, 64, 3},  {1, Slot::m, 1, 0, 0, 1, 0, 8, 70, 4},
    {2, Slot::weight, 1, 0, 0, 2, 0, 6, 102, 5}, {2, Slot::weight, 0, 0, 2, 1, 0, 3, 106, 6}};

// Every three bytes are one change: two choose the place, one is the number that is added there.
static Pieces damaged_pieces(std::string_view bytes) {
    Pieces pieces = good_pieces;
    for (; bytes.size() >= 3; bytes.remove_prefix(3)) {
        size_t place = ((uint8_t)bytes[0] * 256u + (uint8_t)bytes[1]) % (pieces.size() * 16);
        uint32_t field;
        char* at = (char*)pieces.data() + place * sizeof field;
        memcpy(&field, at, sizeof field);
        field += (uint32_t)(int8_t)bytes[2];
        memcpy(at, &field, sizeof field);
    }
    return pieces;
}

static std::string file_from(uint8_t choice, const std::string& rest) {
    if (choice % 4 == 0) return rest;
    size_t end = std::min(rest.find('\0'), rest.size());
    if (choice % 4 == 1) {
        Pieces pieces((rest.size() - end) / sizeof(CheckpointPiece));
        if (!pieces.empty()) memcpy(pieces.data(), rest.data() + end, pieces.size() * sizeof pieces[0]);
        return forged_index(rest.substr(0, end), pieces);
    }
    nlohmann::json header = nlohmann::json::parse(good_header);
    if (choice % 4 == 2) damage_json(header, rest);
    return forged_index(header.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                        choice % 4 == 2 ? good_pieces : damaged_pieces(rest));
}

// Counts every element and every byte, which the reader does not do.
static void check_tiling(const CheckpointIndex& index) {
    uint64_t bytes = 0;
    std::vector<std::vector<bool>> seen(index.tensors.size() * slot_count);
    for (uint64_t file : index.file_bytes) bytes += file - 64;
    for (const CheckpointPiece& piece : index.pieces) {
        const CheckpointTensor& tensor = index.tensors[piece.tensor];
        if (tensor.size() > 1 << 20) return;  // would take too long
        bytes -= index.bytes_of(piece);
        std::vector<bool>& elements = seen[piece.tensor * slot_count + (uint32_t)piece.slot];
        elements.resize(tensor.size());
        piece.run().each_run(tensor.width(), [&](uint64_t first, uint64_t n, uint64_t) {
            for (uint64_t i = first; i < first + n; i++) {
                if (elements.at(i)) abort();
                elements[i] = true;
            }
        });
    }
    if (bytes != 0) abort();
    for (size_t t = 0; t < index.tensors.size(); t++) {
        for (size_t s = 0; s < slot_count; s++) {
            const std::vector<bool>& elements = seen[t * slot_count + s];
            if (elements.size() != (index.tensors[t].slots[s] ? index.tensors[t].size() : 0)) abort();
            if (!std::all_of(elements.begin(), elements.end(), [](bool b) { return b; })) abort();
        }
    }
}

// Damage only tests something if the file can be read without it.
static const CheckpointIndex good_index =
    parse_checkpoint_index(forged_index(good_header, good_pieces), "good");

static int test_one_input(const uint8_t* input, size_t size) {
    if (size == 0) return 0;
    try {
        CheckpointIndex index = parse_checkpoint_index(
            file_from(input[0], std::string((const char*)input + 1, size - 1)), "index");
        check_tiling(index);
        CheckpointIndex again = parse_checkpoint_index(checkpoint_index_bytes(index), "again");
        if (again.pieces.size() != index.pieces.size()) abort();
    } catch (const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
    }
    return 0;
}
