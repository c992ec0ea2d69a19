/*
The tokenize subcommand: files and folders of text become the token shards

    OUTPUT_train_000000.bin, OUTPUT_train_000001.bin, ...    OUTPUT_val_000000.bin, ...

Each file is one document, ended by the end-of-text token. Folders are searched in sorted order, and a file
that can be reached in several ways is taken once. A document goes to validation when a hash of (seed, its
number) falls below the validation fraction, so text is never split between the two; only a single document
has to be cut. The outputs get their names when all of them are complete: a run that fails leaves none.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <set>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "data/error.h"
#include "data/file.h"
#include "data/token_shards.h"
#include "data/tokenizer.h"
#include "kernels/random.cuh"

struct TokenizeOptions {
    std::vector<std::string> inputs;  // files and folders
    std::string output;               // beginning of the names of the shards
    double val_fraction = 0.01;       // 0: no validation shards
    int64_t shard_tokens = 100 << 20;
    uint64_t seed = 1;
    bool overwrite = false;
};

// ----------------------------------------------------------------------------
// inputs

struct Document {
    std::string path;
    uint64_t bytes;
};

// Collects the documents under files and folders.
class DocumentSearch {
public:
    std::vector<Document> documents;
    uint64_t bytes = 0;
    size_t skipped = 0;  // empty files, and in folders also broken links, pipes and devices

    // Links given by name are followed, and so are links to files; links to folders found on the way are not.
    void add(const std::string& path, bool given_by_name = true) {
        struct stat status, target;
        if (lstat(path.c_str(), &status) != 0) fail_with_errno(path, "read it");
        if (S_ISLNK(status.st_mode)) {
            bool broken = stat(path.c_str(), &target) != 0;
            if (broken && given_by_name) fail_with_errno(path, "read it");
            if (!given_by_name && (broken || !S_ISREG(target.st_mode))) {
                skipped += broken;
                return;
            }
            status = target;
        }
        if (!seen_.insert({status.st_dev, status.st_ino}).second) return;
        if (S_ISDIR(status.st_mode))
            add_folder(path);
        else if (S_ISREG(status.st_mode))
            add_file(path, (uint64_t)status.st_size);
        else if (given_by_name)
            fail("%s: is neither a file nor a folder; copy its text to a file", path.c_str());
        else
            skipped++;
    }

    // Do not take this file if it is found.
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
        for (const std::string& name : names) add(name, false);
    }

    // A file that cannot be read is found here, before hours of work.
    void add_file(const std::string& path, uint64_t size) {
        if (size == 0) {
            skipped++;
            return;
        }
        if (faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) != 0) fail_with_errno(path, "read it");
        documents.push_back({path, size});
        bytes += size;
    }

    std::set<std::pair<dev_t, ino_t>> seen_;
};

// Marks the documents of validation: about `fraction` of them, and when there are two or more, one at least
// of each kind.
inline std::vector<bool> choose_validation(size_t documents, double fraction, uint64_t seed) {
    std::vector<bool> chosen(documents);
    if (fraction <= 0 || documents == 0) return chosen;
    uint64_t key = random_key(seed, "validation");
    auto draw = [key](size_t document) {
        Random4 random = philox(key, document);
        return (double)((uint64_t)random.at[0] << 32 | random.at[1]) * 0x1p-64;
    };
    size_t lowest = 0, highest = 0;
    for (size_t i = 0; i < documents; i++) {
        chosen[i] = draw(i) < fraction;
        if (draw(i) < draw(lowest)) lowest = i;
        if (draw(i) >= draw(highest)) highest = i;
    }
    chosen[lowest] = true;
    chosen[highest] = false;
    return chosen;
}

// ----------------------------------------------------------------------------
// outputs

// OUTPUT_SPLIT_000000.bin and its successors, a new one every `shard_tokens`.
class ShardSeries {
public:
    ShardSeries(std::string prefix, int vocab, int64_t shard_tokens)
        : prefix_(std::move(prefix)), vocab_(vocab), shard_tokens_(shard_tokens) {}

    void write(const int* tokens, size_t n) {
        while (n > 0) {
            if (shards_.empty() || shards_.back().count() == shard_tokens_) begin_shard();
            size_t fits = std::min(n, (size_t)(shard_tokens_ - shards_.back().count()));
            shards_.back().write(tokens, fits);
            tokens += fits, n -= fits, total_ += fits;
        }
    }

    void finish() {
        for (ShardWriter& shard : shards_) shard.finish();
    }

    // Gives all shards their names, and removes the longer tail of an older series.
    void commit(const std::vector<std::string>& older) {
        std::set<std::string> names;
        for (ShardWriter& shard : shards_) {
            shard.close();
            names.insert(shard.path());
        }
        for (const std::string& path : older) {
            if (path.starts_with(prefix_ + "_") && !names.count(path)) unlink(path.c_str());
        }
    }

    std::string summary() const {
        std::string files = shards_.size() == 1
                                ? shards_[0].path()
                                : text("the %zu files %s_*.bin", shards_.size(), prefix_.c_str());
        return text("%llu in %s", (unsigned long long)total_, files.c_str());
    }

    uint64_t total() const { return total_; }

private:
    // The first shard stays open, and so locked, until the end: a second run cannot write the same series.
    void begin_shard() {
        if (shards_.size() > 1) shards_.back().finish();
        shards_.emplace_back(text("%s_%06zu.bin", prefix_.c_str(), shards_.size()), vocab_);
    }

    std::string prefix_;
    int vocab_;
    int64_t shard_tokens_;
    std::deque<ShardWriter> shards_;
    uint64_t total_ = 0;
};

// What an earlier run with this output left: OUTPUT_{train,val}_DIGITS.bin, or .bin.partial if interrupted.
inline std::vector<std::string> existing_outputs(const std::string& output) {
    size_t slash = output.rfind('/');
    std::string folder = slash == std::string::npos ? "" : output.substr(0, slash + 1);
    std::vector<std::string> found;
    try {
        for (const auto& entry : std::filesystem::directory_iterator(folder.empty() ? "." : folder)) {
            std::string path = folder + entry.path().filename().string();
            for (std::string prefix : {output + "_train_", output + "_val_"}) {
                if (!path.starts_with(prefix)) continue;
                size_t end = std::min(path.find_first_not_of("0123456789", prefix.size()), path.size());
                std::string ending = path.substr(end);
                if (end > prefix.size() && (ending == ".bin" || ending == ".bin.partial"))
                    found.push_back(path);
            }
        }
    } catch (const std::filesystem::filesystem_error& error) {
        fail("%s: cannot look into the folder of the output: %s; make it first, or name another --output",
             folder.c_str(), error.code().message().c_str());
    }
    std::sort(found.begin(), found.end());
    return found;
}

// ----------------------------------------------------------------------------

// A line on the terminal that says how far it is, from one second on; nothing when stderr is not a terminal.
class TokenizeProgress {
public:
    explicit TokenizeProgress(uint64_t total_bytes)
        : total_((double)total_bytes), shown_(isatty(STDERR_FILENO)) {}
    ~TokenizeProgress() {
        if (drawn_) fprintf(stderr, "\r\033[K");
    }

    void add(size_t bytes) {
        done_ += (double)bytes;
        double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
        if (!shown_ || seconds < next_) return;
        next_ = seconds + 0.2;
        drawn_ = true;
        double share = std::min(1.0, done_ / total_);
        fprintf(stderr, "\r\033[Ktokenize: %3.0f%% of %.0f MB, %.0f MB/s, %.0f s left", 100 * share,
                total_ * 1e-6, done_ * 1e-6 / seconds, seconds * (1 / share - 1));
    }

private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point start_ = Clock::now();
    double total_, done_ = 0, next_ = 1;
    bool shown_, drawn_ = false;
};

// Reads documents in pieces of 1 MiB and writes their tokens to the two series.
class DocumentSplitter {
public:
    ShardSeries train, val;

    explicit DocumentSplitter(const TokenizeOptions& options)
        : train(options.output + "_train", ByteTokenizer::vocab_size, options.shard_tokens),
          val(options.output + "_val", ByteTokenizer::vocab_size, options.shard_tokens) {}

    // Bytes before the cut are for training, those after it for validation; each part is a document.
    void add(const Document& document, uint64_t cut, TokenizeProgress& progress) {
        struct stat status;
        FileHandle file = open_regular(document.path, &status);
        uint64_t at = 0;
        for (;;) {
            ssize_t n = read(file.get(), piece_.data(), piece_.size());
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) fail_with_errno(document.path, "read it");
            if (n == 0) break;
            ByteTokenizer::encode({piece_.data(), (size_t)n}, tokens_);
            size_t before = (size_t)std::min<uint64_t>((size_t)n, cut - std::min(cut, at));
            train.write(tokens_.data(), before);
            val.write(tokens_.data() + before, (size_t)n - before);
            at += (size_t)n;
            progress.add((size_t)n);
        }
        if (cut > 0) train.write(&ByteTokenizer::end_of_text, 1);
        if (at > cut) val.write(&ByteTokenizer::end_of_text, 1);
        bytes_ += at;
    }

    // Everything is written before anything gets its name.
    void commit(const std::vector<std::string>& older) {
        train.finish();
        val.finish();
        train.commit(older);
        val.commit(older);
    }

    uint64_t bytes() const { return bytes_; }

private:
    std::vector<char> piece_ = std::vector<char>(1 << 20);
    std::vector<int> tokens_;
    uint64_t bytes_ = 0;
};

// Where the only document is cut: its last `fraction` is for validation, and neither part is empty.
inline uint64_t cut_of(const Document& document, double fraction) {
    auto [path, size] = document;
    if (size < 2) fail("%s: is too short to split; give more text, or --val-fraction 0", path.c_str());
    uint64_t cut = std::clamp<uint64_t>((uint64_t)((double)size * (1 - fraction)), 1, size - 1);
    printf("tokenize: %s is the only document, so its last %llu bytes are for validation\n", path.c_str(),
           (unsigned long long)(size - cut));
    return cut;
}

inline void tokenize(const TokenizeOptions& options) {
    if (!(options.val_fraction >= 0 && options.val_fraction < 1)) {
        fail("--val-fraction %g: must be at least 0 and below 1; 0.01 is usual", options.val_fraction);
    }
    if (options.shard_tokens < 1 || options.shard_tokens > max_shard_tokens) {
        fail("--shard-tokens %lld: must be 1 .. %lld; 100000000 is usual", (long long)options.shard_tokens,
             (long long)max_shard_tokens);
    }
    std::vector<std::string> older = existing_outputs(options.output);
    for (const std::string& path : older) {
        if (path.ends_with(".partial") || options.overwrite) continue;
        fail("%s: exists already; give --overwrite, or another --output", path.c_str());
    }

    DocumentSearch search;
    for (const std::string& path : older) search.exclude(path);
    for (const std::string& path : options.inputs) search.add(path);
    const std::vector<Document>& documents = search.documents;
    if (documents.empty()) {
        fail("%s: has no text; name files or folders with text in them",
             options.inputs.empty() ? "the list of inputs" : options.inputs[0].c_str());
    }
    if (search.skipped > 0) {
        printf("tokenize: skipped %zu empty files, broken links, pipes and devices\n", search.skipped);
    }

    DocumentSplitter splitter(options);
    if (documents.size() == 1 && options.val_fraction > 0) {
        uint64_t cut = cut_of(documents[0], options.val_fraction);
        TokenizeProgress progress(search.bytes);
        splitter.add(documents[0], cut, progress);
    } else {
        std::vector<bool> validation =
            choose_validation(documents.size(), options.val_fraction, options.seed);
        TokenizeProgress progress(search.bytes);
        for (size_t i = 0; i < documents.size(); i++) {
            splitter.add(documents[i], validation[i] ? 0 : UINT64_MAX, progress);
        }
    }
    splitter.commit(older);
    std::string where = splitter.train.summary();
    if (splitter.val.total() > 0) where += ", " + splitter.val.summary();
    printf("tokenize: %zu document%s, %llu bytes, %llu tokens: %s\n", documents.size(),
           documents.size() == 1 ? "" : "s", (unsigned long long)splitter.bytes(),
           (unsigned long long)(splitter.train.total() + splitter.val.total()), where.c_str());
}
