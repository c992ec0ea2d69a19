/*
The tokenize subcommand: converts files and folders of text to token shards

    OUTPUT_train_000000.bin, OUTPUT_train_000001.bin, ...    OUTPUT_val_000000.bin, ...

and, if it trains a tokenizer first, OUTPUT_tokenizer.json. OUTPUT.json records how they were made
(data/tokens/token_record.h). Each file is one document, except that each line of a .jsonl file is one; files
may be compressed with gzip. The end-of-text token ends every document. All cores encode text, and their
results are written in order, so the output does not depend on the number of threads. The outputs get their
final names only once all are complete: a run that fails leaves none.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "data/text/document_split.h"
#include "data/base/error.h"
#include "data/base/figures.h"  // counted, seconds_now
#include "data/base/file.h"
#include "data/options/options.h"
#include "data/base/ordered_work.h"
#include "data/base/terminal.h"
#include "data/tokens/shard_series.h"
#include "data/base/stop_signals.h"
#include "data/text/text_documents.h"
#include "data/text/text_files.h"
#include "data/tokens/token_record.h"
#include "data/tokenizer/tokenizer.h"
#include "data/text/tokenizer_training.h"
#include "data/base/strings.h"

// The tokens of a TextBatch.
struct TokenBatch {
    struct Piece {
        size_t tokens;
        bool last;  // the piece ends its document
    };
    std::vector<int> tokens;
    std::vector<Piece> pieces;
    uint64_t input_bytes = 0, text_bytes = 0;
    std::map<int32_t, uint64_t> unknown;  // counts of characters unknown to patterns
    LineNotes lines;
};

// Sums the notes on all lines. Skips up to `allowed` bad lines; one more is an error.
class SkippedLines {
public:
    explicit SkippedLines(long long allowed) : allowed_((uint64_t)allowed) {}

    void add(const LineNotes& batch) {
        lone_surrogates_ += batch.lone_surrogates;
        if (batch.bad > allowed_ - bad_.count) {
            size_t next = std::min<size_t>(allowed_ - bad_.count, batch.named.size() - 1);
            std::string remedy = allowed_ == 0 ? "skip such lines with --skip-bad"
                                               : text("raise --skip-bad %llu", (unsigned long long)allowed_);
            fail("%s, or %s", batch.named[next].c_str(), remedy.c_str());
        }
        uint64_t all = bad_.count + batch.bad;
        for (const std::string& line : batch.named) bad_.add(line.substr(0, line.rfind("; ")));
        bad_.count = all;
    }

    void print_counts() const {
        if (bad_.count > 0) print("tokenize: skipped, bad lines: %s\n", bad_.text().c_str());
        if (lone_surrogates_ > 0)
            print("tokenize: %s (\\ud800 to \\udfff), each half a character, replaced by U+FFFD\n",
                  counted(lone_surrogates_, "lone surrogate").c_str());
    }

private:
    const uint64_t allowed_;
    NamedFiles bad_;
    uint64_t lone_surrogates_ = 0;
};

// Counts the characters of a text that are newer than the Unicode version that patterns use.
inline void count_unknown(std::string_view text, std::map<int32_t, uint64_t>& unknown) {
    static const std::vector<bool> unassigned = characters_of("\\p{Cn}+");
    for (const char *at = text.data(), *end = at + text.size(); at < end;) {
        int32_t code = next_code_point(at, end);
        bool never_assigned = (code & 0xfffe) == 0xfffe || (code >= 0xfdd0 && code <= 0xfdef);
        if (code >= 0x80 && unassigned[(size_t)code] && !never_assigned) unknown[code]++;
    }
}

inline void print_unknown(const std::map<int32_t, uint64_t>& unknown) {
    uint64_t count = 0;
    std::string names;
    size_t named = 0;
    for (auto [code, times] : unknown) {
        if (named++ < 8) append_item(names, text("U+%04X", (unsigned)code));
        count += times;
    }
    if (count == 0) return;
    print("tokenize: %llu character%s newer than Unicode %s, which patterns use here (%s%s): with another "
          "version they may be tokenized differently\n",
          (unsigned long long)count, count == 1 ? " is" : "s are", pattern_unicode().c_str(), names.c_str(),
          named > 8 ? ", ..." : "");
}

inline TokenBatch encode_batch(const TextBatch& batch, const Tokenizer& tokenizer,
                               const std::string& text_field) {
    TokenBatch result;
    result.input_bytes = batch.input_bytes;
    std::vector<int> tokens;
    result.lines = documents_of(batch, text_field, [&](std::string_view text, bool last) {
        tokenizer.encode(text, tokens);
        if (!tokenizer.file().empty()) count_unknown(text, result.unknown);
        result.tokens.insert(result.tokens.end(), tokens.begin(), tokens.end());
        result.pieces.push_back({tokens.size(), last});
        result.text_bytes += text.size();
    });
    return result;
}

// ----------------------------------------------------------------------------

// Returns the size of a file's text, decompressed.
inline uint64_t text_size(const TextFile& file) {
    if (!file.compressed) return file.bytes;
    ProgressLine progress("tokenize: measuring " + file.path, (double)file.bytes);
    TextInput input(file);
    std::vector<char> piece(1 << 20);
    uint64_t size = 0, consumed = 0;
    while (size_t n = input.read(piece.data(), piece.size())) {
        size += n;
        progress.add((double)(input.consumed() - consumed));
        consumed = input.consumed();
    }
    return size;
}

// Cuts the only document: its last `fraction` is for validation, and neither part is empty.
inline void cut_file(TextFile& file, double fraction) {
    uint64_t size = text_size(file);
    if (size < 2) fail("%s: is too short to split; give more text, or --val-fraction 0", file.path.c_str());
    file.cut = std::clamp<uint64_t>((uint64_t)((double)size * (1 - fraction)), 1, size - 1);
    print("tokenize: %s is the only document, so its last %g%% is for validation\n", file.path.c_str(),
          100 * fraction);
}

inline DocumentSearch find_text(const TokenizeOptions& options, const std::vector<std::string>& older) {
    DocumentSearch search(options.skip_binary);
    for (const std::string& path : older) search.exclude(path);
    search.exclude(options.output + "_tokenizer.json");
    search.exclude(record_path(options.output));
    for (const std::string& path : options.inputs) search.add(path);
    for (const auto& [kind, files] : search.skipped)
        print("tokenize: skipped, %s: %s\n", kind.c_str(), files.text().c_str());
    for (const auto& [kind, files] : search.strange) {
        print("tokenize: treated as text, but %s: %s; %s\n", kind.c_str(), files.text().c_str(),
              kind == "binary" ? "leave them out with --skip-binary on"
              : kind == "UTF-16"
                  ? "convert them with iconv -f UTF-16 -t UTF-8, or leave them out with --skip-binary on"
                  : "convert them with iconv (-f LATIN1 -t UTF-8), or leave them out with --skip-binary on");
    }
    for (const TextFile& file : search.files) {
        if (!file.begun) continue;
        print("tokenize: %s is treated as %s\n", file.path.c_str(),
              file.lines ? "JSON lines" : "one document, as it does not begin with {\" like JSON lines");
    }
    if (search.files.empty()) {
        fail("%s: has no text; name files or folders with text in them",
             options.inputs.empty() ? "the list of inputs" : options.inputs[0].c_str());
    }
    return search;
}

// The mean loss over fewer tokens than this is accurate only to a few percent.
constexpr uint64_t few_for_validation = 20000;

// Tokenizes the files. A tokenizer trained for them gets its final name together with the shards, and the
// record follows; the old record is removed first, so a record never describes other shards.
inline void tokenize_files(const TokenizeOptions& options, const Tokenizer& tokenizer, DocumentSearch& search,
                           const std::vector<std::string>& older, unsigned threads, NewFile* tokenizer_file) {
    NewFile record_file(record_path(options.output));
    SplitOptions split{options.output,
                       tokenizer.vocab_size(),
                       tokenizer.end_of_text(),
                       options.shard_tokens,
                       options.val_fraction,
                       (uint64_t)options.seed,
                       {}};
    std::vector<TextFile>& files = search.files;
    bool is_cut = files.size() == 1 && !files[0].lines && !files[0].begun && options.val_fraction > 0 &&
                  options.val_fraction < 1;
    if (is_cut) {
        cut_file(files[0], options.val_fraction);
        split.validation = {false, true};
    } else if (std::none_of(files.begin(), files.end(), [](const TextFile& file) {
                   return file.lines || file.compressed || file.begun;
               })) {
        std::vector<uint64_t> sizes;
        for (const TextFile& file : files) sizes.push_back(file.bytes);
        split.validation = choose_validation(sizes, options.val_fraction, options.seed);
    }

    double start = seconds_now();
    DocumentSplitter splitter(std::move(split));
    uint64_t bytes = 0;
    std::map<int32_t, uint64_t> unknown;
    SkippedLines lines(options.skip_bad);
    {
        ProgressLine progress("tokenize", (double)search.bytes);
        TextBatches batches(files, [&](std::string_view text) { return tokenizer.cut_place(text); });
        OrderedWork<TextBatch, TokenBatch> work(
            [&](TextBatch& batch) { return batches.next(batch); },
            [&](const TextBatch& batch) { return encode_batch(batch, tokenizer, options.text_field); },
            threads);
        for (TokenBatch batch; work.take(batch);) {
            check_interrupted("tokenize");
            lines.add(batch.lines);
            const int* tokens = batch.tokens.data();
            for (auto [n, last] : batch.pieces) {
                splitter.add(tokens, n, last);
                tokens += n;
            }
            bytes += batch.text_bytes;
            for (auto [code, times] : batch.unknown) unknown[code] += times;
            progress.add((double)batch.input_bytes);
        }
    }
    check_interrupted("tokenize");  // the program that feeds standard input also ends on Ctrl-C
    lines.print_counts();
    if (splitter.documents() == 0)
        fail("%s: has no text; name files or folders with text in them", options.inputs[0].c_str());
    splitter.finish(files[0].path);
    double seconds = seconds_now() - start;
    uint64_t documents = splitter.documents() - is_cut,
             tokens = splitter.train_tokens() + splitter.val_tokens();
    TokenRecord record = {.tokenizer = tokenizer_file ? tokenizer_file->path() : options.tokenizer,
                          .fingerprint = tokenizer_fingerprint(tokenizer),
                          .vocab_size = tokenizer.vocab_size(),
                          .document_end = tokenizer.end_of_text(),
                          .documents = documents,
                          .bytes = bytes,
                          .train_tokens = splitter.train_tokens(),
                          .val_tokens = splitter.val_tokens()};
    std::string content = token_record_text(record);
    record_file.write(content.data(), content.size());
    unlink(record_file.path().c_str());
    splitter.commit(older);
    if (tokenizer_file) tokenizer_file->commit();
    record_file.commit();

    if (splitter.empty() > 0)
        print("tokenize: skipped %llu empty documents\n", (unsigned long long)splitter.empty());
    print_unknown(unknown);
    if (options.val_fraction == TokenizeOptions().val_fraction && record.val_tokens < few_for_validation) {
        print("tokenize: note: only %llu tokens are for validation, so the loss is noisy; reserve more with "
              "a larger "
              "--val-fraction, or make a separate set from other text with --val-fraction 1\n",
              (unsigned long long)record.val_tokens);
    }
    print("tokenize: %s, %llu bytes, %llu tokens: %s\n", counted(documents, "document").c_str(),
          (unsigned long long)bytes, (unsigned long long)tokens, splitter.summary().c_str());
    print("tokenize: %.2f bytes per token, %.1f MB/s, tokenizer: %s\n", (double)bytes / (double)tokens,
          (double)bytes * 1e-6 / std::max(seconds, 1e-9), printable(record.tokenizer).c_str());
}

// Runs the command.
inline void tokenize(const TokenizeOptions& options) {
    stop_on_signals();
    unsigned threads = options.threads > 0 ? (unsigned)options.threads : std::thread::hardware_concurrency();
    std::string tokenizer_path = options.output + "_tokenizer.json";
    bool trains = options.train_tokenizer > 0;
    std::vector<std::string> older = existing_outputs(options.output);
    std::vector<std::string> in_the_way = older;
    bool has_tokenizer = access(tokenizer_path.c_str(), F_OK) == 0;
    if (has_tokenizer && trains) in_the_way.push_back(tokenizer_path);
    if (std::string record = record_path(options.output);
        access(record.c_str(), F_OK) == 0 && !read_token_record(record))
        fail("%s: would be overwritten, but is not a token record; move it away, or give another --output",
             record.c_str());
    for (const std::string& path : in_the_way) {
        if (path.ends_with(".partial") || options.overwrite) continue;
        fail("%s: already exists; give --overwrite, or another --output", path.c_str());
    }

    if (!trains) {
        Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
        if (tokenizer.end_of_text() < 0) {
            fail("--tokenizer %s: has no token that ends a document; use one with <|endoftext|>",
                 printable(options.tokenizer).c_str());
        }
        DocumentSearch search = find_text(options, older);
        tokenize_files(options, tokenizer, search, older, threads, nullptr);
        if (has_tokenizer && options.tokenizer != tokenizer_path)
            print("tokenize: note: %s was not used and is kept; to make tokens with it, give "
                  "--tokenizer %s\n",
                  tokenizer_path.c_str(), tokenizer_path.c_str());
        return;
    }
    DocumentSearch search = find_text(options, older);
    NewFile file(tokenizer_path);
    TokenizerTraining training{options.train_tokenizer, options.pre_tokenizer,
                               (uint64_t)options.tokenizer_text, options.text_field, threads};
    Tokenizer tokenizer(train_tokenizer(search.files, training, tokenizer_path), tokenizer_path);
    std::string json = tokenizer.json();
    file.write(json.data(), json.size());
    tokenize_files(options, tokenizer, search, older, threads, &file);
}
