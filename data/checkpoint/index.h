/*
The index of a checkpoint: the tensors of the model, and the location of each piece of them in the data files.
A checkpoint is a folder with one index.bin, and data_00000.bin, data_00001.bin ..., one for each rank that
wrote data. All numbers are little-endian, all checksums XXH3-64.

    index.bin
    at  bytes
     0      8  magic: 89 54 47 49 58 0d 0a 1a ("\x89TGIX\r\n\x1a"; converting line ends breaks it)
     8      4  version of this format: 1
    12      4  zero
    16      8  save id: drawn at random, the same in all files of one save
    24      8  H, bytes of the header; a multiple of 64
    32      8  checksum of the header
    40      8  P, number of pieces
    48      8  checksum of the pieces
    56      8  checksum of the 56 bytes before
    64      H  header: {"program", "step", "samples", "options": {...}, "tensors": [{"name", "shape": [...],
               "weight": "fp32" | "bf16", "master", "m", "v": "fp32", "data": "uint64"}, ...], "files":
               [bytes of each data file], ...}, then spaces. A slot that is not stored is left out. A file
               that an earlier save wrote is {"bytes", "number", "save"}: the number and the save id that
               are in the file. Optional fields: "slots", if any but weight, master, m and v are used;
               "spikes" (data/run/spike_rule.h), if the run watches for spikes or has skipped samples;
               "published" (data/exchange/published.h), if the model came from Hugging Face.
  64+H   64*P  pieces; then the file ends

    a piece
    at  bytes
     0      4  number of the tensor
     4      4  slot: 0 weight, 1 master copy, 2 first moment (m), 3 second moment (v); or an index into
               "slots"
     8      4  number of the data file
    12      4  zero
    16      8  first column of a box: a range of columns of all rows; a tensor (n) has n rows of one column
    24      8  number of its columns
    32      8  first element of the piece, in the box in row-major order
    40      8  number of its elements, at most 2^22
    48      8  offset of its bytes in the data file
    56      8  checksum of its bytes

The boxes of a slot are side by side, and the pieces of a box follow one another, without overlaps or holes;
so do the pieces in a data file. The reader checks all of this.
*/
#pragma once

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "data/base/dtype.h"
#include "data/base/error.h"
#include "data/base/json.h"
#include "data/checkpoint/box.h"
#include "data/checkpoint/slot.h"

constexpr uint64_t largest_piece = 1 << 22;  // elements
constexpr const char* published_key = "published";

struct CheckpointTensor {
    std::string name;
    std::vector<int64_t> shape;                          // (n) or (rows, columns)
    std::array<std::optional<Dtype>, slot_count> slots;  // types of the stored slots

    uint64_t rows() const { return (uint64_t)shape[0]; }
    uint64_t width() const { return shape.size() == 2 ? (uint64_t)shape[1] : 1; }
    uint64_t size() const { return rows() * width(); }
    std::optional<Dtype> dtype(Slot slot) const { return slots[(uint32_t)slot]; }
    bool keeps_optimizer() const {
        for (int s = 0; s < slot_count; s++) {
            if (is_of_optimizer((Slot)s) && slots[s]) return true;
        }
        return false;
    }
};

struct CheckpointPiece {
    uint32_t tensor;
    Slot slot;
    uint32_t file;
    uint32_t zero = 0;
    uint64_t column, columns;
    uint64_t begin, count;
    uint64_t offset, hash;

    BoxRun run() const { return {column, columns, begin, count}; }
};

// Tensor, slot, column and first element: sorts pieces into the order of the model.
using PiecePlace = std::tuple<uint32_t, Slot, uint64_t, uint64_t>;
inline PiecePlace place_of(const CheckpointPiece& piece) {
    return {piece.tensor, piece.slot, piece.column, piece.begin};
}

// The identity of a data file, stored in its first bytes.
struct FileOrigin {
    uint32_t number;
    uint64_t save_id;
};

struct CheckpointIndex {
    uint64_t save_id = 0;
    nlohmann::ordered_json about;  // the header without tensors and files
    std::vector<CheckpointTensor> tensors;
    std::vector<uint64_t> file_bytes;  // sizes of the data files
    std::vector<CheckpointPiece> pieces;
    std::map<uint32_t, FileOrigin> shared = {};         // data files written by earlier saves
    std::unordered_map<std::string, int> numbers = {};  // tensor numbers by name, in an index that was read

    FileOrigin origin_of(uint32_t file) const {
        auto found = shared.find(file);
        return found == shared.end() ? FileOrigin{file, save_id} : found->second;
    }

    // Returns the number of a tensor; -1 if none has this name.
    int find(const std::string& name) const {
        auto found = numbers.find(name);
        return found == numbers.end() ? -1 : found->second;
    }

    uint64_t bytes_of(const CheckpointPiece& piece) const {
        return piece.count * dtype_size(*tensors[piece.tensor].dtype(piece.slot));
    }

    // Returns the numbers of the pieces, sorted by key(piece).
    template <typename Key>
    std::vector<uint32_t> sorted_by(Key&& key) const {
        std::vector<uint32_t> order(pieces.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](uint32_t a, uint32_t b) { return key(pieces[a]) < key(pieces[b]); });
        return order;
    }

    int64_t step() const { return about.at("step").get<int64_t>(); }
    int64_t samples() const { return about.at("samples").get<int64_t>(); }  // samples trained on so far
};

namespace checkpoint_format {

constexpr unsigned char index_magic[8] = {0x89, 'T', 'G', 'I', 'X', '\r', '\n', 0x1a};
constexpr uint32_t version = 1;
constexpr uint64_t alignment = 64;
constexpr uint64_t longest_header = 64 << 20;
constexpr uint64_t most_pieces = 1 << 24;
constexpr uint64_t largest_tensor = (uint64_t)1 << 56;  // elements

struct IndexPreamble {
    unsigned char magic[8];
    uint32_t version;
    uint32_t zero;
    uint64_t save_id;
    uint64_t header_bytes, header_hash;
    uint64_t pieces, pieces_hash;
    uint64_t hash;  // covers everything before it
};
static_assert(sizeof(IndexPreamble) == alignment && sizeof(CheckpointPiece) == alignment);
static_assert(std::endian::native == std::endian::little);

// An index must not be longer, because it is read whole.
constexpr uint64_t largest_index =
    sizeof(IndexPreamble) + longest_header + most_pieces * sizeof(CheckpointPiece);

template <typename Preamble>
uint64_t preamble_hash(const Preamble& preamble) {
    return XXH3_64bits(&preamble, offsetof(Preamble, hash));
}

inline std::vector<Slot> first_slots(int count) {
    std::vector<Slot> slots;
    for (int slot = 0; slot < count; slot++) slots.push_back((Slot)slot);
    return slots;
}

// Reads and checks an index.
class IndexParser {
public:
    IndexParser(std::string_view bytes, const std::string& path, int64_t most_samples)
        : bytes_(bytes), path_(path), most_samples_(most_samples) {}

    CheckpointIndex parse() {
        read_preamble();
        read_header();
        read_pieces();
        check_boxes();
        check_files();
        return std::move(index_);
    }

private:
    [[noreturn]] void refuse(const char* reason) const { fail("%s: %s", path_.c_str(), reason); }

    void read_preamble() {
        if (bytes_.size() < sizeof preamble_)
            refuse("too short for the index of a checkpoint; use another checkpoint");
        memcpy(&preamble_, bytes_.data(), sizeof preamble_);
        if (memcmp(preamble_.magic, index_magic, sizeof index_magic) != 0)
            refuse("not the index of a checkpoint (wrong magic); name a folder that train_gpt wrote");
        if (preamble_.version != version) {
            fail("%s: checkpoint format %u, but this program reads format %u; use the program that wrote it",
                 path_.c_str(), preamble_.version, version);
        }
        if (preamble_hash(preamble_) != preamble_.hash || preamble_.zero != 0 ||
            preamble_.header_bytes > longest_header || preamble_.header_bytes % alignment ||
            preamble_.pieces > most_pieces) {
            refuse("damaged in its first 64 bytes; use another checkpoint");
        }
        uint64_t size =
            sizeof preamble_ + preamble_.header_bytes + preamble_.pieces * sizeof(CheckpointPiece);
        if (bytes_.size() != size) {
            fail("%s: %zu bytes, but its first 64 bytes say %llu; use another checkpoint", path_.c_str(),
                 bytes_.size(), (unsigned long long)size);
        }
        index_.save_id = preamble_.save_id;
    }

    void read_header() {
        std::string_view source = bytes_.substr(sizeof preamble_, preamble_.header_bytes);
        if (XXH3_64bits(source.data(), source.size()) != preamble_.header_hash)
            refuse("header does not match its checksum; use another checkpoint");
        nlohmann::json header = parse_json(source, path_);
        JsonObject fields(header, path_ + ": header");
        fields.string("program");
        fields.integer("step", 0, INT64_MAX);
        fields.integer("samples", 0, most_samples_);
        if (!fields.get("options").is_object()) refuse("header has no options; use another checkpoint");
        if (header.contains("slots")) read_slots(fields.array("slots"));
        read_tensors(fields.array("tensors"));
        for (const auto& file : fields.array("files")) read_file(file);
        if (index_.tensors.empty()) refuse("header has no tensors; use another checkpoint");
        header.erase("tensors");
        header.erase("files");
        header.erase("slots");
        index_.about = std::move(header);
    }

    void read_slots(const nlohmann::json& names) {
        slots_.clear();
        for (const auto& name : names) {
            Slot slot = {};
            while ((int)slot < slot_count && name != slot_name(slot)) slot = Slot((int)slot + 1);
            if ((int)slot == slot_count || std::ranges::count(slots_, slot))
                fail("%s: slot %s, which this program does not know; use the program that wrote it",
                     path_.c_str(), json_text(name).c_str());
            slots_.push_back(slot);
        }
    }

    void read_file(const nlohmann::json& file) {
        auto number = (uint32_t)index_.file_bytes.size();
        const nlohmann::json* bytes = &file;
        if (file.is_object()) {
            JsonObject fields(file, text("%s: data file %u", path_.c_str(), number));
            index_.shared[number] = {(uint32_t)fields.integer("number", 0, UINT32_MAX), fields.bits("save")};
            bytes = &fields.get("bytes");
        }
        std::string what = text("%s: bytes of data file %u", path_.c_str(), number);
        index_.file_bytes.push_back((uint64_t)json_integer(*bytes, alignment, INT64_MAX, what));
    }

    void read_tensors(const nlohmann::json& rows) {
        for (const auto& row : rows) {
            JsonObject fields(row, text("%s: tensor %zu", path_.c_str(), index_.tensors.size()));
            CheckpointTensor tensor;
            tensor.name = fields.string("name");
            std::string what = text("%s: tensor %s", path_.c_str(), printable(tensor.name).c_str());
            if (!index_.numbers.emplace(tensor.name, (int)index_.tensors.size()).second)
                fail("%s appears twice; use another checkpoint", what.c_str());
            int64_t size = 1;
            for (const auto& dimension : fields.array("shape")) {
                bool may_be_none = tensor.shape.empty();  // the first dimension may be 0
                tensor.shape.push_back(
                    json_integer(dimension, may_be_none ? 0 : 1, largest_tensor / size, what + ": shape"));
                size *= std::max<int64_t>(tensor.shape.back(), 1);
            }
            if (tensor.shape.empty() || tensor.shape.size() > 2)
                fail("%s: %zu dimensions; a tensor has one or two", what.c_str(), tensor.shape.size());
            for (int s = 0; s < slot_count; s++) tensor.slots[s] = read_dtype(fields, (Slot)s, what);
            if (!tensor.dtype(Slot::weight) && !tensor.dtype(Slot::data))
                fail("%s: no weight; use another checkpoint", what.c_str());
            index_.tensors.push_back(std::move(tensor));
        }
    }

    static std::optional<Dtype> read_dtype(JsonObject& fields, Slot slot, const std::string& what) {
        const nlohmann::json& value = fields.get(slot_name(slot));
        if (value.is_null()) return std::nullopt;
        if (value == "fp32" && slot != Slot::data) return Dtype::fp32;
        if (value == "bf16" && slot == Slot::weight) return Dtype::bf16;
        if (value == "uint64" && slot == Slot::data) return Dtype::uint64;
        fail("%s: %s is stored as %s; it must be fp32 (for weights, fp32 or bf16; for data, uint64)",
             what.c_str(), slot_name(slot), json_text(value).c_str());
    }

    void read_pieces() {
        std::string_view source = bytes_.substr(sizeof preamble_ + preamble_.header_bytes);
        if (XXH3_64bits(source.data(), source.size()) != preamble_.pieces_hash)
            refuse("pieces do not match their checksum; use another checkpoint");
        index_.pieces.resize(preamble_.pieces);
        if (!source.empty()) memcpy(index_.pieces.data(), source.data(), source.size());
        for (CheckpointPiece& piece : index_.pieces) {
            auto number = (uint32_t)piece.slot;
            piece.slot = number < slots_.size() ? slots_[number] : Slot(slot_count);
            check_piece(piece);
        }
    }

    void check_piece(const CheckpointPiece& piece) const {
        auto within = [](uint64_t begin, uint64_t count, uint64_t end) {
            return count > 0 && count <= end && begin <= end - count;
        };
        bool good = piece.tensor < index_.tensors.size() && (uint32_t)piece.slot < slot_count &&
                    piece.file < index_.file_bytes.size() && piece.zero == 0;
        if (good) {
            const CheckpointTensor& tensor = index_.tensors[piece.tensor];
            good = tensor.dtype(piece.slot) && within(piece.column, piece.columns, tensor.width()) &&
                   piece.count <= largest_piece &&
                   within(piece.begin, piece.count, tensor.rows() * piece.columns) &&
                   within(piece.offset, index_.bytes_of(piece), index_.file_bytes[piece.file]);
        }
        if (!good) {
            fail("%s: piece %td refers to a tensor, slot, range or file that does not exist; use another "
                 "checkpoint",
                 path_.c_str(), &piece - index_.pieces.data());
        }
    }

    // In each slot the boxes tile the columns, and in each box the pieces tile the elements.
    void check_boxes() const {
        std::vector<uint32_t> order = index_.sorted_by(place_of);
        size_t at = 0;
        auto next_of = [&](uint32_t tensor, Slot slot) -> const CheckpointPiece* {
            if (at == order.size()) return nullptr;
            const CheckpointPiece& piece = index_.pieces[order[at]];
            return piece.tensor == tensor && piece.slot == slot ? &piece : nullptr;
        };
        for (uint32_t t = 0; t < index_.tensors.size(); t++) {
            const CheckpointTensor& tensor = index_.tensors[t];
            for (uint32_t s = 0; s < slot_count; s++) {
                if (!tensor.slots[s]) continue;
                for (uint64_t column = 0; tensor.rows() > 0 && column < tensor.width();) {
                    const CheckpointPiece* box = next_of(t, (Slot)s);
                    bool tiles = box && box->column == column;
                    for (uint64_t begin = 0; tiles && begin < tensor.rows() * box->columns; at++) {
                        const CheckpointPiece* piece = next_of(t, (Slot)s);
                        tiles = piece && piece->column == column && piece->columns == box->columns &&
                                piece->begin == begin;
                        if (tiles) begin += piece->count;
                    }
                    if (!tiles) refuse_tiling(tensor, (Slot)s);
                    column += box->columns;
                }
                if (next_of(t, (Slot)s)) refuse_tiling(tensor, (Slot)s);
            }
        }
    }

    [[noreturn]] void refuse_tiling(const CheckpointTensor& tensor, Slot slot) const {
        fail("%s: tensor %s: pieces of its %s overlap or leave a hole; use another checkpoint", path_.c_str(),
             printable(tensor.name).c_str(), slot_name(slot));
    }

    // In each data file the pieces are contiguous, up to the end.
    void check_files() const {
        auto place_in_file = [](const CheckpointPiece& piece) {
            return std::tuple(piece.file, piece.offset);
        };
        std::vector<uint32_t> order = index_.sorted_by(place_in_file);
        std::vector<uint64_t> ends(index_.file_bytes.size(), alignment);
        for (uint32_t number : order) {
            const CheckpointPiece& piece = index_.pieces[number];
            if (piece.offset != ends[piece.file]) refuse_file(piece.file);
            ends[piece.file] += index_.bytes_of(piece);
        }
        for (size_t file = 0; file < ends.size(); file++) {
            if (ends[file] != index_.file_bytes[file]) refuse_file(file);
        }
    }

    [[noreturn]] void refuse_file(size_t file) const {
        fail("%s: pieces in data file %zu overlap or leave a hole; use another checkpoint", path_.c_str(),
             file);
    }

    std::string_view bytes_;
    const std::string& path_;
    int64_t most_samples_;
    IndexPreamble preamble_;
    std::vector<Slot> slots_ = first_slots(common_slots);  // slots by their number in the pieces
    CheckpointIndex index_;
};

}  // namespace checkpoint_format

// most_samples: the limit on the number of samples that an index reports. A run continues the count that it
// reads, so an index that it writes may exceed the limit.
inline CheckpointIndex parse_checkpoint_index(std::string_view bytes, const std::string& path,
                                              int64_t most_samples = (int64_t)1 << 60) {
    return checkpoint_format::IndexParser(bytes, path, most_samples).parse();
}

// Returns the content of the file. Refuses an index that a reader would refuse.
inline std::string checkpoint_index_bytes(const CheckpointIndex& index) {
    using namespace checkpoint_format;
    nlohmann::ordered_json header = index.about;
    nlohmann::ordered_json& rows = header["tensors"] = nlohmann::ordered_json::array();
    for (const CheckpointTensor& tensor : index.tensors) {
        nlohmann::ordered_json row = {{"name", tensor.name}, {"shape", tensor.shape}};
        for (int s = 0; s < slot_count; s++) {
            if (tensor.slots[s]) row[slot_name((Slot)s)] = dtype_name(*tensor.slots[s]);
        }
        rows.push_back(std::move(row));
    }
    // Pieces store this program's slot numbers, so "slots", if needed, lists all slots in order.
    if (std::ranges::any_of(index.pieces, [](auto& piece) { return (int)piece.slot >= common_slots; })) {
        for (Slot slot : first_slots(slot_count)) header["slots"].push_back(slot_name(slot));
    }
    nlohmann::ordered_json& files = header["files"] = nlohmann::ordered_json::array();
    for (uint32_t file = 0; file < index.file_bytes.size(); file++) {
        files.push_back(index.file_bytes[file]);
        if (auto found = index.shared.find(file); found != index.shared.end()) {
            auto [number, save_id] = found->second;
            files.back() = {{"bytes", files.back()}, {"number", number}, {"save", save_id}};
        }
    }
    std::string source = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    source.resize((source.size() + alignment - 1) / alignment * alignment, ' ');

    IndexPreamble preamble = {};
    memcpy(preamble.magic, index_magic, sizeof index_magic);
    preamble.version = version;
    preamble.save_id = index.save_id;
    preamble.header_bytes = source.size();
    preamble.header_hash = XXH3_64bits(source.data(), source.size());
    preamble.pieces = index.pieces.size();
    size_t pieces_bytes = index.pieces.size() * sizeof(CheckpointPiece);
    preamble.pieces_hash = XXH3_64bits(index.pieces.data(), pieces_bytes);
    preamble.hash = preamble_hash(preamble);
    std::string bytes((const char*)&preamble, sizeof preamble);
    bytes += source;
    bytes.append((const char*)index.pieces.data(), pieces_bytes);
    parse_checkpoint_index(bytes, "index of a checkpoint", INT64_MAX);
    return bytes;
}
