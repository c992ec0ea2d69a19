/*
Finds text files in files and folders, and reads their bytes: plain, or compressed with gzip, which is
recognized by name (.gz) or by the first bytes. Folders are searched in sorted order, and a file that can be
reached in several ways is used once. The name - is standard input, which can be read only once; its first
bytes show whether it consists of lines.

gzip stores a checksum of its text, so a file that is cut short or damaged is noticed and refused, and never
mistaken for a shorter text.
*/
#pragma once

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <poll.h>
#include <set>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <zlib.h>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/stop_signals.h"
#include "data/tokens/token_shards.h"  // find_shard_format, token_record_beginning
#include "data/base/strings.h"         // printable
#include "data/base/utf8.h"

constexpr int gzip_only = 16 + MAX_WBITS;  // for inflateInit2

struct TextFile {
    std::string path;
    uint64_t bytes;    // on disk; 0: unknown
    bool compressed;   // by gzip
    bool lines;        // .jsonl: each line is an object with a document; any other file is one document
    uint64_t cut = 0;  // not 0: the document ends after this many bytes of text, and another begins
    std::optional<std::string> begun = {};  // bytes of standard input that were already read
};

// Reads once. A pipe may stay silent for a long time, so the wait can be interrupted.
inline size_t read_some(const FileHandle& file, const std::string& path, char* out, size_t capacity) {
    for (;;) {
        pollfd waited = {file.get(), POLLIN, 0};
        while (poll(&waited, 1, 200) <= 0) check_interrupted("tokenize");
        ssize_t n = ::read(file.get(), out, capacity);
        if (n >= 0) return (size_t)n;
        if (errno != EINTR) fail_with_errno(path, "read it");
    }
}

// A group of files: how many, and the names of the first few.
struct NamedFiles {
    static constexpr size_t named = 3;
    size_t count = 0;
    std::vector<std::string> names;

    void add(const std::string& name) {
        count++;
        if (names.size() < named) names.push_back(name);
    }
    // "12 (a, b, c, ...)"
    std::string text() const {
        std::string list;
        for (const std::string& name : names) append_item(list, printable(name));
        return std::to_string(count) + " (" + list + (count > names.size() ? ", ...)" : ")");
    }
};

// Collects the text files in files and folders.
class DocumentSearch {
public:
    std::vector<TextFile> files;
    uint64_t bytes = 0;  // sum over all files; 0: unknown
    // Files that were skipped, by kind: empty ones; in folders also hidden ones, token files, broken links,
    // pipes and devices; and with skip_binary packed ones and those that would be in `strange`.
    std::map<std::string, NamedFiles> skipped;
    // Files that are not UTF-8, by kind: binary, UTF-16, others. They are in `files` nevertheless.
    std::map<std::string, NamedFiles> strange;

    // skip_binary: skips packed and strange files.
    explicit DocumentSearch(bool skip_binary = false) : skip_binary_(skip_binary) {}

    // Links given by name are followed, and so are links to files; links to folders found on the way are not.
    void add(const std::string& path, bool given_by_name = true) {
        struct stat status, target;
        if (path == "-" && given_by_name) {
            if (fstat(STDIN_FILENO, &status) != 0) fail_with_errno("standard input", "stat it");
            bool first = seen_.insert({status.st_dev, status.st_ino}).second;
            if (first) add_text("standard input", FileHandle(dup(STDIN_FILENO)), 0, true, true);
            return;
        }
        if (lstat(path.c_str(), &status) != 0) fail_with_errno(path, "read it");
        if (S_ISLNK(status.st_mode)) {
            bool broken = stat(path.c_str(), &target) != 0;
            if (broken && given_by_name) fail_with_errno(path, "read it");
            if (!given_by_name && (broken || !S_ISREG(target.st_mode))) {
                if (broken) skipped["broken link"].add(path);
                return;
            }
            status = target;
        }
        if (!seen_.insert({status.st_dev, status.st_ino}).second) return;
        if (S_ISDIR(status.st_mode))
            add_folder(path);
        else if (S_ISREG(status.st_mode))
            add_file(path, (uint64_t)status.st_size, given_by_name);
        else if (given_by_name)
            fail("%s: is neither a file nor a folder; copy its text to a file", path.c_str());
        else
            skipped["pipe or device"].add(path);
    }

    // Ignores this file if it is found.
    void exclude(const std::string& path) {
        struct stat status;
        if (stat(path.c_str(), &status) == 0) seen_.insert({status.st_dev, status.st_ino});
    }

private:
    void add_folder(const std::string& path) {
        std::vector<std::string> names;
        try {
            for (const auto& entry : std::filesystem::directory_iterator(path)) names.push_back(entry.path());
        } catch (const std::filesystem::filesystem_error& error) {
            fail("%s: cannot list the folder: %s; check the permissions, or leave it out", path.c_str(),
                 error.code().message().c_str());
        }
        std::sort(names.begin(), names.end());
        for (const std::string& name : names) {
            if (std::filesystem::path(name).filename().string().starts_with('.'))
                skipped["hidden"].add(name);  // .git, and editors' backup files
            else
                add(name, false);
        }
    }

    // Opens the file, so that an unreadable file is noticed here, before hours of work.
    void add_file(const std::string& path, uint64_t size, bool given_by_name) {
        if (size == 0) {
            skipped["empty"].add(path);
            return;
        }
        struct stat status;
        add_text(path, open_regular(path, &status), size, given_by_name, false);
    }

    void add_text(const std::string& path, const FileHandle& file, uint64_t size, bool given_by_name,
                  bool standard_input) {
        std::string beginning(looked_at, '\0');
        size_t got = 0;
        while (size_t n = read_some(file, path, beginning.data() + got, looked_at - got)) got += n;
        beginning.resize(got);
        if (got == 0) {
            skipped["empty"].add(path);
            return;
        }
        if (!given_by_name && is_made_here(path, beginning)) {
            skipped["tokens or tokenizer"].add(path);
            return;
        }
        if (const char* packed = packed_with(beginning)) {
            if (!skip_binary_)
                fail("%s: is packed with %s; unpack it first, or leave it out", path.c_str(), packed);
            skipped["packed"].add(path);
            return;
        }
        std::string name = path;
        for (char& c : name) c = (char)tolower((unsigned char)c);
        bool named = name.ends_with(".gz");
        bool compressed = named || beginning.starts_with("\x1f\x8b\x08");
        if (named) name.resize(name.size() - 3);
        std::string text = compressed ? inflated(beginning) : beginning;
        if (const char* kind = strange_kind(text, compressed || got == looked_at)) {
            (skip_binary_ ? skipped : strange)[kind].add(path);
            if (skip_binary_) return;
        }
        bool lines =
            standard_input ? looks_like_lines(text) : name.ends_with(".jsonl") || name.ends_with(".ndjson");
        files.push_back({path, size, compressed, lines});
        if (standard_input) files.back().begun = std::move(beginning);
        sizes_known_ &= size > 0;
        bytes = sizes_known_ ? bytes + size : 0;
    }

    // Returns the decompressed beginning of a gzip file, or what precedes the first damage in it.
    static std::string inflated(const std::string& beginning) {
        std::string text(looked_at, '\0');
        z_stream gzip = {};
        gzip.next_in = (Bytef*)beginning.data(), gzip.avail_in = (uInt)beginning.size();
        gzip.next_out = (Bytef*)text.data(), gzip.avail_out = (uInt)text.size();
        if (inflateInit2(&gzip, gzip_only) == Z_OK) inflate(&gzip, Z_SYNC_FLUSH);
        text.resize(gzip.total_out);
        inflateEnd(&gzip);
        return text;
    }

    // Returns whether the first line begins like a JSON object with a field.
    static bool looks_like_lines(std::string_view text) {
        auto skip = [&](const char* letters) {
            text.remove_prefix(std::min(text.find_first_not_of(letters), text.size()));
        };
        skip("\xef\xbb\xbf \t\r\n");
        if (!text.starts_with('{')) return false;
        text.remove_prefix(1);
        skip(" \t");
        return text.starts_with('"');
    }

    // Detects token shards, their records and tokenizers, which may be in the same folder as the text.
    static bool is_made_here(const std::string& path, std::string_view beginning) {
        int32_t magic = 0;
        memcpy(&magic, beginning.data(), std::min(sizeof magic, beginning.size()));
        return find_shard_format(magic) || beginning.starts_with(token_record_beginning) ||
               path.ends_with("_tokenizer.json");
    }

    // Returns the kind of a file that does not look like UTF-8 text; null if it does. UTF-8 text has no zero
    // byte. UTF-16 begins with a byte order mark, or has a zero as every other byte of most letters. `cut`:
    // the text continues.
    static const char* strange_kind(std::string_view beginning, bool cut) {
        if (beginning.starts_with("\xff\xfe") || beginning.starts_with("\xfe\xff")) return "UTF-16";
        size_t zeros[2] = {};
        for (size_t i = 0; i < beginning.size(); i++) zeros[i % 2] += beginning[i] == 0;
        if (zeros[0] + zeros[1] == 0) {
            size_t whole = cut ? whole_characters(beginning) : beginning.size();
            return is_utf8(beginning.substr(0, whole)) ? nullptr : "neither UTF-8 nor UTF-16";
        }
        size_t most = std::max(zeros[0], zeros[1]), least = std::min(zeros[0], zeros[1]);
        return most > beginning.size() / 4 && 8 * least < most ? "UTF-16" : "binary";
    }

    // Returns what a file is packed with; null: nothing. Without this check, such a file would be treated as
    // text with strange bytes.
    static const char* packed_with(std::string_view beginning) {
        struct {
            std::string_view magic;
            const char* name;
            std::string_view then = {};  // follows after four bytes
        } kinds[] = {{"\x28\xb5\x2f\xfd", "zstd"},
                     {std::string_view("\xfd"
                                       "7zXZ\0",
                                       6),
                      "xz"},
                     {"BZh", "bzip2", "1AY&SY"},
                     {"PK\x03\x04", "zip"},
                     {"PAR1", "Parquet"}};
        std::string_view rest = beginning.substr(std::min<size_t>(4, beginning.size()));
        for (const auto& [magic, name, then] : kinds) {
            if (beginning.starts_with(magic) && rest.starts_with(then)) return name;
        }
        return nullptr;
    }

    static constexpr size_t looked_at = 8192;  // bytes examined at the beginning of a file

    const bool skip_binary_;
    bool sizes_known_ = true;
    std::set<std::pair<dev_t, ino_t>> seen_;
};

// ----------------------------------------------------------------------------

// Reads the text of a file from its beginning. A gzip file may be a concatenation of several. It is read with
// inflate() and not gzread(), which mistakes a part whose first bytes are damaged for padding, and silently
// drops it and everything after it.
class TextInput {
public:
    explicit TextInput(const TextFile& file) : path_(file.path), begun_(file.begun.value_or("")) {
        struct stat status;
        file_ = file.begun ? FileHandle(dup(STDIN_FILENO)) : open_regular(path_, &status);
        posix_fadvise(file_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
        compressed_ = file.compressed;
        if (compressed_ && inflateInit2(&gzip_, gzip_only) != Z_OK)
            fail("%s: cannot be decompressed: out of memory; close other programs", path_.c_str());
    }
    ~TextInput() { inflateEnd(&gzip_); }

    // Reads up to `capacity` bytes of text. Returns 0 only at the end.
    size_t read(char* out, size_t capacity) {
        if (!compressed_) return read_file(out, capacity);
        uInt room = (uInt)std::min<size_t>(capacity, 1u << 30);
        gzip_.next_out = (Bytef*)out;
        gzip_.avail_out = room;
        while (gzip_.avail_out == room) {
            if (gzip_.avail_in == 0) {
                buffer_.resize(256 << 10);
                gzip_.next_in = (Bytef*)buffer_.data();
                gzip_.avail_in = (uInt)read_file(buffer_.data(), buffer_.size());
                if (gzip_.avail_in == 0 && !complete_) {
                    fail("%s: is cut short: its compressed data is incomplete; copy it again", path_.c_str());
                }
                if (gzip_.avail_in == 0) return 0;
            }
            if (complete_) inflateReset(&gzip_);
            int result = inflate(&gzip_, Z_NO_FLUSH);
            complete_ = result == Z_STREAM_END;
            if (result != Z_OK && !complete_) {
                fail("%s: is damaged, or not a gzip file (%s); copy it again", path_.c_str(),
                     gzip_.msg ? gzip_.msg : "its data is damaged");
            }
        }
        return room - gzip_.avail_out;
    }

    // Appends up to `bytes` of text; returns false at the end of the text.
    bool append(std::string& text, size_t bytes) {
        size_t size = text.size(), goal = size + bytes;
        text.resize(goal);
        while (size < goal) {
            size_t n = read(text.data() + size, goal - size);
            if (n == 0) break;
            size += n;
        }
        text.resize(size);
        return size == goal;
    }

    // Moves to an offset. Only for text that is not compressed.
    void seek(uint64_t offset) {
        if (lseek(file_.get(), (off_t)offset, SEEK_SET) < 0) fail_with_errno(path_, "read it");
    }

    // Bytes read from the file, fewer than those of the text if it is compressed.
    uint64_t consumed() const { return consumed_; }

private:
    size_t read_file(char* out, size_t capacity) {
        size_t n = consumed_ < begun_.size() ? begun_.copy(out, capacity, consumed_)
                                             : read_some(file_, path_, out, capacity);
        consumed_ += n;
        return n;
    }

    std::string path_, begun_;
    FileHandle file_;
    bool compressed_;
    z_stream gzip_ = {};
    std::vector<char> buffer_;  // compressed bytes
    bool complete_ = false;     // a compressed part has ended, and the next has not begun
    uint64_t consumed_ = 0;
};
