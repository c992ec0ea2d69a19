/*
A file of pages that may be larger than memory. Pages are read and written with direct I/O, in batches, by a
few threads. A page that was never written occupies no space on disk, and is read as zeros.

The file can return to the state that it had when a checkpoint was saved (mark()): before a page is first
overwritten after that, its content is appended to an undo log. The time to return is proportional to the
number of pages that have changed since.

    NAME.pages      the pages; each ends with a checksum
    NAME.undo.7     undo logs (data/tables/undo_log.h), one for each mark
    NAME.sets.7     the owner's notes about a mark (companion())

A page is `page_bytes` long, a multiple of 4096. Its last eight bytes are the XXH3-64 of the other bytes,
seeded with the page's number.
*/
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/tables/undo_log.h"

// Memory for pages, aligned for direct reads and writes.
class PageBuffer {
public:
    static constexpr size_t alignment = 4096;

    explicit PageBuffer(size_t bytes)
        : data_((char*)std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment), free) {
        if (!data_) throw std::bad_alloc();
    }
    char* data() const { return data_.get(); }

private:
    std::unique_ptr<char, decltype(&free)> data_;
};

class PageFile {
public:
    static constexpr size_t payload(size_t page_bytes) { return page_bytes - sizeof(uint64_t); }

    // path: NAME, with its folder. identity: see UndoLog. is_scratch: only this process needs the file, so
    // its name is removed at once, and the system frees its space when the process ends
    PageFile(std::string path, uint64_t pages, size_t page_bytes, uint64_t identity, bool is_scratch = false)
        : path_(std::move(path)),
          file_path_(path_ + ".pages"),
          pages_(pages),
          page_bytes_(page_bytes),
          identity_(identity),
          logged_((size_t)((pages + 63) / 64)) {
        std::error_code error;
        std::filesystem::path folder = std::filesystem::path(path_).parent_path();
        std::filesystem::create_directories(folder, error);
        if (error) fail_with_code(error, folder.string(), "make it");
        file_ = open_to_write(file_path_, O_RDWR | O_CREAT | O_DIRECT);
        if (!file_ && errno == EINVAL) direct_ = false, file_ = open_to_write(file_path_, O_RDWR | O_CREAT);
        if (!file_) fail_with_errno(file_path_, "create it");
        if (!try_lock(file_))
            fail("%s: another run is using it; wait until it ends, or choose another --ngram-dir",
                 file_path_.c_str());
        if (is_scratch) remove_file(file_path_);
        bool ours = true;
        for (const std::string& other : files_of(".undo.")) {
            std::optional<UndoLog::Preamble> found = UndoLog::preamble_of(other);
            ours = ours && found && found->identity == identity_ && found->page_bytes == page_bytes_;
            if (ours) logs_[found->number] = {other, found->save_id};
        }
        struct stat status;
        if (fstat(file_.get(), &status) != 0) fail_with_errno(file_path_, "stat it");
        bool whole = (uint64_t)status.st_size == pages_ * page_bytes_;
        if (!whole || !ours || logs_.empty()) clear();
    }
    PageFile(const PageFile&) = delete;
    PageFile& operator=(const PageFile&) = delete;

    size_t page_bytes() const { return page_bytes_; }
    bool is_direct() const { return direct_; }  // false: the file system has no direct I/O
    uint64_t bytes_read() const { return bytes_read_; }
    uint64_t bytes_written() const { return bytes_written_; }

    // Sets all pages to zeros, and forgets all marks.
    void clear() {
        log_.reset(), before_.reset();
        logs_.clear();
        set_size(0);  // until the logs are gone: if this run ends here, the next one clears the rest
        sync_file(file_, file_path_);
        for (const char* ending : {".undo.", ".sets."})
            for (const std::string& file : files_of(ending)) remove_file(file);
        sync_folder(folder());
        set_size(pages_ * page_bytes_);
        sync_file(file_, file_path_);
    }

    // Reads these pages, in ascending order, into consecutive places of a PageBuffer.
    void read(const std::vector<uint64_t>& numbers, char* pages) {
        each_run(numbers, pages, [&](uint64_t first, char* of_run, size_t count) {
            if (!read_at(file_, file_path_, first * page_bytes_, of_run, count * page_bytes_))
                fail("%s: was truncated while in use; restart from the last checkpoint", file_path_.c_str());
            for (size_t i = 0; i < count; i++) check(first + i, of_run + i * page_bytes_);
        });
        bytes_read_ += numbers.size() * page_bytes_;
    }

    // Call before write(), with the current content of the same pages: logs those not logged since the mark.
    void log_pages(const std::vector<uint64_t>& numbers, const char* pages) {
        if (log_) log_first(*log_, logged_, numbers, pages);
    }
    // Writes these pages, in ascending order, and sets their checksums.
    void write(const std::vector<uint64_t>& numbers, char* pages) {
        each_run(numbers, pages, [&](uint64_t first, char* of_run, size_t count) {
            for (size_t i = 0; i < count; i++) {
                char* page = of_run + i * page_bytes_;
                uint64_t hash = hash_of(first + i, page);
                memcpy(page + payload(page_bytes_), &hash, sizeof hash);
            }
            write_at(file_, file_path_, first * page_bytes_, of_run, count * page_bytes_);
        });
        bytes_written_ += numbers.size() * page_bytes_;
    }

    // ---- marks

    // Marks the current state as that of a checkpoint.
    void mark(uint64_t save_id) {
        sync_file(file_, file_path_);
        begin_log(logs_.empty() ? 1 : logs_.rbegin()->first + 1, save_id);
    }

    // Forgets the newest mark, if it is this save's, which failed. Its log is added to the one before it,
    // which lacks only pages that had not changed before that mark. So logs do not pile up while saves fail.
    void forget_newest(uint64_t save_id) {
        if (!before_ || logs_.rbegin()->second.save_id != save_id) return;
        auto newest = std::prev(logs_.cend());
        bool whole = UndoLog::each_batch(newest->second.path, page_bytes_,
                                         [&](const std::vector<uint64_t>& numbers, const char* pages) {
                                             log_first(*before_, logged_before_, numbers, pages);
                                         });
        if (!whole) fail("%s: is damaged; check the disk", newest->second.path.c_str());
        log_ = std::exchange(before_, std::nullopt);
        logged_ = logged_before_;
        remove_log(newest);
    }

    // Forgets all marks before this checkpoint's, if it has one.
    void forget_before(uint64_t save_id) {
        before_.reset();
        while (can_return_to(save_id) && logs_.begin()->second.save_id != save_id) remove_log(logs_.begin());
    }

    bool can_return_to(uint64_t save_id) const { return log_of(save_id) != logs_.end(); }
    // Returns the name of a file that is removed together with this checkpoint's mark, which must exist.
    std::string companion(uint64_t save_id) const { return companion_of(log_of(save_id)->first); }

    // Returns the file to the mark of a checkpoint. Returns false if an undo log is damaged; then the file's
    // content is undefined until clear(). Logs are undone from the newest on, and each is removed before the
    // next is used: if the run ends here, the file can still return to every mark that is left.
    bool return_to(uint64_t save_id) {
        auto wanted = log_of(save_id);
        log_.reset();
        while (true) {
            auto last = std::prev(logs_.cend());
            if (!undo(last->second.path)) return false;
            sync_file(file_, file_path_);
            if (last == wanted) break;
            remove_log(last);
        }
        begin_log(wanted->first, save_id);
        return true;
    }

private:
    struct Log {
        std::string path;
        uint64_t save_id;
    };
    using Logs = std::map<uint64_t, Log>;  // by number

    // Starts an empty undo log, which replaces any log of this number.
    void begin_log(uint64_t number, uint64_t save_id) {
        std::string path = path_ + ".undo." + std::to_string(number);
        UndoLog log(path,
                    {.number = number, .save_id = save_id, .identity = identity_, .page_bytes = page_bytes_});
        sync_folder(folder());
        before_ = std::exchange(log_, std::move(log));
        logs_[number] = {path, save_id};
        logged_before_ = logged_;
        std::ranges::fill(logged_, 0);
    }
    // Adds those of the pages that the log does not have yet.
    void log_first(UndoLog& log, std::vector<uint64_t>& logged, const std::vector<uint64_t>& numbers,
                   const char* pages) const {
        std::vector<uint64_t> first_time;
        std::vector<const char*> contents;
        for (size_t i = 0; i < numbers.size(); i++)
            if (!(logged[numbers[i] / 64] >> numbers[i] % 64 & 1))
                first_time.push_back(numbers[i]), contents.push_back(pages + i * page_bytes_);
        if (!first_time.empty()) log.append(first_time, contents);
        for (uint64_t page : first_time) logged[page / 64] |= (uint64_t)1 << page % 64;
    }
    std::string companion_of(uint64_t number) const { return path_ + ".sets." + std::to_string(number); }

    std::string folder() const { return std::filesystem::path(path_).parent_path().string(); }
    std::vector<std::string> files_of(const char* ending) const {
        std::vector<std::string> files;
        const std::string begin = std::filesystem::path(path_).filename().string() + ending;
        for (const auto& entry : std::filesystem::directory_iterator(folder()))
            if (entry.path().filename().string().starts_with(begin)) files.push_back(entry.path().string());
        return files;
    }
    Logs::const_iterator log_of(uint64_t save_id) const {
        return std::ranges::find_if(logs_, [=](auto& log) { return log.second.save_id == save_id; });
    }
    void remove_file(const std::string& path) const {
        WorksOn work("removing " + path);
        if (unlink(path.c_str()) != 0 && errno != ENOENT) fail_with_errno(path, "remove it");
    }
    void remove_log(Logs::const_iterator log) {
        remove_file(log->second.path);
        remove_file(companion_of(log->first));
        sync_folder(folder());
        logs_.erase(log);
    }
    void set_size(uint64_t bytes) const {
        WorksOn work("sizing " + file_path_);
        if (ftruncate(file_.get(), (off_t)bytes) != 0) fail_with_errno(file_path_, "size it");
    }

    bool undo(const std::string& path) {
        return UndoLog::each_batch(
            path, page_bytes_, [&](const std::vector<uint64_t>& numbers, const char* pages) {
                bytes_read_ += numbers.size() * page_bytes_;
                PageBuffer page(page_bytes_);
                for (size_t i = 0; i < numbers.size(); i++) {
                    memcpy(page.data(), pages + i * page_bytes_, page_bytes_);
                    write_at(file_, file_path_, numbers[i] * page_bytes_, page.data(), page_bytes_);
                }
            });
    }

    uint64_t hash_of(uint64_t number, const char* page) const {
        return XXH3_64bits_withSeed(page, payload(page_bytes_), number);
    }
    void check(uint64_t number, const char* page) const {
        uint64_t hash;
        memcpy(&hash, page + payload(page_bytes_), sizeof hash);
        if (hash == hash_of(number, page)) return;
        bool empty = std::all_of(page, page + page_bytes_, [](char c) { return c == 0; });
        if (!empty)
            fail("%s: page %llu does not match its checksum; remove the file and restart from the last "
                 "checkpoint",
                 file_path_.c_str(), (unsigned long long)number);
    }

    // Calls work(first, pages, count) for runs of adjacent pages, on several threads.
    template <typename Work>
    void each_run(const std::vector<uint64_t>& numbers, char* pages, Work&& work) const {
        constexpr size_t threads = 16, most = 64;     // most: pages in a run
        std::vector<std::pair<size_t, size_t>> runs;  // (begin, count)
        for (size_t i = 0; i < numbers.size(); i++) {
            bool adjacent = i > 0 && numbers[i] == numbers[i - 1] + 1 && runs.back().second < most;
            if (adjacent)
                runs.back().second++;
            else
                runs.push_back({i, 1});
        }
        std::mutex mutex;
        std::exception_ptr error;
        std::atomic<size_t> next = 0;
        auto take_turns = [&] {
            for (size_t i; (i = next++) < runs.size();) {
                try {
                    auto [begin, count] = runs[i];
                    work(numbers[begin], pages + begin * page_bytes_, count);
                } catch (...) {
                    std::lock_guard lock(mutex);
                    error = std::current_exception();
                }
            }
        };
        std::vector<std::thread> helpers;  // a few runs are not worth a thread
        try {
            for (size_t i = 1; i < std::min(threads, runs.size() / 4); i++) helpers.emplace_back(take_turns);
        } catch (const std::system_error&) {
            // the system allows no more threads
        }
        take_turns();
        for (std::thread& helper : helpers) helper.join();
        if (error) std::rethrow_exception(error);
    }

    const std::string path_, file_path_;
    const uint64_t pages_;
    const size_t page_bytes_;
    const uint64_t identity_;
    FileHandle file_;
    bool direct_ = true;
    Logs logs_;
    std::optional<UndoLog> log_, before_;           // begin at the last mark, and at the one before it
    std::vector<uint64_t> logged_, logged_before_;  // a bit for each page: whether these logs contain it
    uint64_t bytes_read_ = 0, bytes_written_ = 0;
};
