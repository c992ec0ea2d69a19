/*
The data files of a checkpoint, one for each rank that writes: 64 bytes, then contiguous pieces up to the end.
The index lists the pieces (data/checkpoint/index.h). A file shared by several checkpoints keeps the number
and the save id that it has in the first of them.

    at  bytes
     0      8  magic: 89 54 47 44 54 0d 0a 1a ("\x89TGDT\r\n\x1a")
     8      4  version of this format: 1
    12      4  number of the file
    16      8  save id, as in the index
    24      8  bytes of the file
    32     24  zero
    56      8  checksum of the preceding 56 bytes
    64         pieces
*/
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "data/checkpoint/index.h"
#include "data/base/error.h"
#include "data/base/file.h"

inline std::string checkpoint_name(int64_t step) {
    return text("step_%08lld", (long long)step);
}

// Returns the step in the name of a checkpoint's folder; -1 for any other name.
inline int64_t step_of_name(const std::string& name) {
    long long step = -1;
    return sscanf(name.c_str(), "step_%lld", &step) == 1 && checkpoint_name(step) == name ? step : -1;
}

inline std::string index_path(const std::string& folder) {
    return folder + "/index.bin";
}

inline std::string data_file_name(int number) {
    return text("data_%05d.bin", number);
}

inline uint64_t new_save_id() {
    std::random_device random;
    return (uint64_t)random() << 32 | random();
}

namespace checkpoint_format {

constexpr unsigned char data_magic[8] = {0x89, 'T', 'G', 'D', 'T', '\r', '\n', 0x1a};

struct DataPreamble {
    unsigned char magic[8];
    uint32_t version;
    uint32_t file;
    uint64_t save_id;
    uint64_t bytes;
    unsigned char zeros[24];
    uint64_t hash;  // covers everything before it
};
static_assert(sizeof(DataPreamble) == alignment);

inline DataPreamble data_preamble(uint32_t file, uint64_t save_id, uint64_t bytes) {
    DataPreamble preamble = {};
    memcpy(preamble.magic, data_magic, sizeof data_magic);
    preamble.version = version;
    preamble.file = file;
    preamble.save_id = save_id;
    preamble.bytes = bytes;
    preamble.hash = preamble_hash(preamble);
    return preamble;
}

// Returns the checksum of bytes that move(done, n) reads or writes chunk by chunk: each chunk is hashed while
// it is in the processor's cache.
template <typename Move>
uint64_t move_and_hash(const void* data, uint64_t bytes, Move&& move) {
    constexpr uint64_t chunk = 256 << 10;
    std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), XXH3_freeState);
    if (!state) throw std::bad_alloc();
    XXH3_64bits_reset(state.get());
    for (uint64_t done = 0, n; done < bytes; done += n) {
        n = std::min(chunk, bytes - done);
        move(done, n);
        XXH3_64bits_update(state.get(), (const char*)data + done, n);
    }
    return XXH3_64bits_digest(state.get());
}

}  // namespace checkpoint_format

// ----------------------------------------------------------------------------
// writing

// A new data file in an existing folder. It is not valid until finish() returns, because its first bytes are
// written last. An abandoned file is removed, so that a full disk gets its space back.
class CheckpointDataFile {
public:
    CheckpointDataFile(const std::string& folder, int number, uint64_t save_id)
        : path_(folder + "/" + data_file_name(number)),
          number_((uint32_t)number),
          save_id_(save_id),
          file_(open_to_write(path_, O_WRONLY | O_CREAT | O_EXCL)) {
        if (!file_) fail_with_errno(path_, "create it");
    }
    CheckpointDataFile(const CheckpointDataFile&) = delete;
    CheckpointDataFile& operator=(const CheckpointDataFile&) = delete;
    ~CheckpointDataFile() {
        WorksOn work("removing " + path_);
        if (!finished_) unlink(path_.c_str());
    }

    // Appends a piece, and fills in its location and checksum.
    void append(CheckpointPiece& piece, const void* data, uint64_t bytes) {
        piece.file = number_;
        piece.offset = end_;
        piece.hash = checkpoint_format::move_and_hash(data, bytes, [&](uint64_t done, uint64_t n) {
            write_at(file_, path_, end_ + done, (const char*)data + done, n);
        });
        WorksOn work("writing " + path_);
        // Starts writeback now instead of at fsync(), which will report any errors.
        sync_file_range(file_.get(), (off_t)end_, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
        end_ += bytes;
    }

    // Brings the whole file to disk. Returns its size in bytes.
    uint64_t finish() {
        auto preamble = checkpoint_format::data_preamble(number_, save_id_, end_);
        write_at(file_, path_, 0, &preamble, sizeof preamble);
        sync_file(file_, path_);
        if (file_.close() != 0) fail_with_errno(path_, "write it");
        finished_ = true;
        return end_;
    }

private:
    std::string path_;
    uint32_t number_;
    uint64_t save_id_;
    FileHandle file_;
    uint64_t end_ = sizeof(checkpoint_format::DataPreamble);
    bool finished_ = false;
};

// ----------------------------------------------------------------------------
// reading

// Returns the bytes of a checkpoint's index, as they are on disk.
inline std::string read_checkpoint_index(const std::string& folder) {
    return read_whole(index_path(folder), checkpoint_format::largest_index,
                      "too long for the index of a checkpoint; use another checkpoint");
}

// Returns the save id of the checkpoint in a folder; nothing if there is no checkpoint.
inline std::optional<uint64_t> save_id_in(const std::string& folder) {
    std::string path = index_path(folder);
    FileHandle file = open_file(path, O_RDONLY);
    checkpoint_format::IndexPreamble preamble;
    if (!file || !read_at(file, path, 0, &preamble, sizeof preamble)) return std::nullopt;
    return preamble.save_id;
}

// Reads a checkpoint in one process. Data files are opened on demand.
class CheckpointReader {
public:
    // whole: requires that every data file exists and has the size that the index lists; otherwise a missing
    // file is noticed only when it is read.
    explicit CheckpointReader(const std::string& folder, bool whole = true)
        : CheckpointReader(folder, read_checkpoint_index(folder)) {
        if (whole) check_sizes();
    }

    // index_bytes: the content of the index, already read.
    CheckpointReader(const std::string& folder, const std::string& index_bytes)
        : folder_(folder),
          index_(parse_checkpoint_index(index_bytes, index_path(folder))),
          files_(index_.file_bytes.size()) {
        // The folder's name may end in a slash.
        int64_t named = step_of_name((std::filesystem::path(folder) / "").parent_path().filename().string());
        if (named >= 0 && named != index_.step()) {
            fail("%s: holds a checkpoint of step %lld; use another checkpoint", folder.c_str(),
                 (long long)index_.step());
        }
    }

    void check_sizes() const {
        for (uint32_t number = 0; number < files_.size(); number++) {
            WorksOn work("checking " + data_path(number));
            struct stat status;
            if (stat(data_path(number).c_str(), &status) != 0) fail_with_errno(data_path(number), "stat it");
            check_size(number, status);
        }
    }

    // Checks a data file's size and its first bytes.
    void check_file(uint32_t number) const { data_file(number); }

    const CheckpointIndex& index() const { return index_; }
    const std::string& folder() const { return folder_; }

    // The description of a piece in messages: its file, tensor, slot, elements and offset.
    std::string name_of(const CheckpointPiece& piece) const {
        const CheckpointTensor& tensor = index_.tensors[piece.tensor];
        std::string columns;
        if (piece.columns != tensor.width()) {
            columns = text(" of columns %llu to %llu", (unsigned long long)piece.column,
                           (unsigned long long)(piece.column + piece.columns - 1));
        }
        return text("%s: tensor %s, %s, elements %llu to %llu%s, %llu bytes from byte %llu on",
                    data_path(piece.file).c_str(), printable(tensor.name).c_str(), slot_name(piece.slot),
                    (unsigned long long)piece.begin, (unsigned long long)(piece.begin + piece.count - 1),
                    columns.c_str(), (unsigned long long)index_.bytes_of(piece),
                    (unsigned long long)piece.offset);
    }

    // Reads the whole piece. Several threads may call this.
    void read(const CheckpointPiece& piece, void* to) const {
        uint64_t bytes = index_.bytes_of(piece);
        std::shared_ptr<const FileHandle> file = data_file(piece.file);
        std::string name = name_of(piece);
        uint64_t hash = checkpoint_format::move_and_hash(to, bytes, [&](uint64_t done, uint64_t n) {
            if (!read_at(*file, name, piece.offset + done, (char*)to + done, n))
                fail("%s: the file was truncated; use another checkpoint", name.c_str());
        });
        if (hash != piece.hash) fail("%s: does not match its checksum; use another checkpoint", name.c_str());
    }

    // Reads elements [first, first + count) of a tensor as floats. Caches the pieces that contain them, so
    // that sequential reading reads each piece once. Only one thread at a time may call this.
    void read_floats(int tensor, Slot slot, uint64_t first, uint64_t count, float* to) {
        const CheckpointTensor& whole = index_.tensors.at((size_t)tensor);
        if (!whole.dtype(slot) || first > whole.size() || count > whole.size() - first) {
            fail("%s: tensor %s: %s of elements %llu to %llu is not stored; use a checkpoint that has it",
                 folder_.c_str(), printable(whole.name).c_str(), slot_name(slot), (unsigned long long)first,
                 (unsigned long long)(first + count));
        }
        if (slot == Slot::data)
            fail("%s: tensor %s holds integers; name a tensor of parameters", folder_.c_str(),
                 printable(whole.name).c_str());
        if (tensor != kept_tensor_ || slot != kept_slot_) keep_pieces_of(tensor, slot);
        const BoxRun wanted = {0, whole.width(), first, count};
        Dtype dtype = *whole.dtype(slot);
        for (const CheckpointPiece* piece : pieces_) {
            uint64_t first_row = piece->begin / piece->columns;
            uint64_t last_row = (piece->begin + piece->count - 1) / piece->columns;
            if (last_row < first / whole.width() || first_row > (first + count) / whole.width()) continue;
            piece->run().each_common(wanted, whole.width(), [&](uint64_t at, uint64_t there, uint64_t n) {
                to_floats(dtype, bytes_of(*piece) + at * dtype_size(dtype), n, to + there);
            });
        }
    }

private:
    // The piece of a box that was read last. It is kept because each row spans all boxes, so the next row
    // continues in it.
    struct Kept {
        const CheckpointPiece* piece = nullptr;
        std::vector<char> bytes;
    };

    std::string data_path(uint32_t number) const { return folder_ + "/" + data_file_name((int)number); }

    void check_size(uint32_t number, const struct stat& status) const {
        if (S_ISREG(status.st_mode) && (uint64_t)status.st_size == index_.file_bytes[number]) return;
        fail("%s: %lld bytes, but the index says %llu; use another checkpoint", data_path(number).c_str(),
             (long long)status.st_size, (unsigned long long)index_.file_bytes[number]);
    }

    // Returns a data file after checking that it belongs to this save. The files opened last stay open.
    std::shared_ptr<const FileHandle> data_file(uint32_t number) const {
        constexpr size_t most_open = 64;
        std::lock_guard lock(mutex_);
        if (files_[number]) return files_[number];
        struct stat status;
        auto file = std::make_shared<const FileHandle>(open_regular(data_path(number), &status));
        check_size(number, status);
        check_preamble(number, *file);
        if (open_.size() == most_open) {
            files_[open_.front()].reset();
            open_.pop_front();
        }
        open_.push_back(number);
        return files_[number] = std::move(file);
    }

    void check_preamble(uint32_t number, const FileHandle& file) const {
        using namespace checkpoint_format;
        FileOrigin origin = index_.origin_of(number);
        DataPreamble found, wanted = data_preamble(origin.number, origin.save_id, index_.file_bytes[number]);
        std::string path = data_path(number);
        if (!read_at(file, path, 0, &found, sizeof found))
            fail("%s: was truncated while being read; use another checkpoint", path.c_str());
        if (memcmp(&found, &wanted, sizeof found) == 0) return;
        bool whole =
            memcmp(found.magic, data_magic, sizeof data_magic) == 0 && found.hash == preamble_hash(found);
        if (!whole) fail("%s: damaged in its first 64 bytes; use another checkpoint", path.c_str());
        fail("%s: belongs to another save, or was renamed; use another checkpoint", path.c_str());
    }

    void keep_pieces_of(int tensor, Slot slot) {
        kept_.clear();
        pieces_.clear();
        kept_tensor_ = tensor;
        kept_slot_ = slot;
        for (const CheckpointPiece& piece : index_.pieces) {
            if (piece.tensor == (uint32_t)tensor && piece.slot == slot) pieces_.push_back(&piece);
        }
        std::sort(pieces_.begin(), pieces_.end(),
                  [](auto* a, auto* b) { return place_of(*a) < place_of(*b); });
    }

    const char* bytes_of(const CheckpointPiece& piece) {
        Kept& kept = kept_[piece.column];
        if (kept.piece != &piece) {
            kept.piece = nullptr;
            kept.bytes.resize(index_.bytes_of(piece));
            read(piece, kept.bytes.data());
            kept.piece = &piece;
        }
        return kept.bytes.data();
    }

    std::string folder_;
    CheckpointIndex index_;

    mutable std::mutex mutex_;                                      // guards files_ and open_
    mutable std::vector<std::shared_ptr<const FileHandle>> files_;  // null: not open
    mutable std::deque<uint32_t> open_;                             // oldest first

    // for read_floats()
    int kept_tensor_ = -1;
    Slot kept_slot_ = Slot::weight;
    std::vector<const CheckpointPiece*> pieces_;  // pieces of this tensor and slot
    std::map<uint64_t, Kept> kept_;               // by the first column of the box
};
