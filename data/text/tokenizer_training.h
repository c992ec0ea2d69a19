/*
Trains a tokenizer on the text to be tokenized: byte-level byte-pair encoding, with words cut by the rules of
GPT-2, Llama 3 or Qwen, and <|endoftext|> as the last token. It is written as a tokenizer.json that Hugging
Face's `tokenizers` can read.

If there is more text than `most_text`, only parts of it are read, spread evenly over the files.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer/bpe_training.h"
#include "data/base/error.h"
#include "data/base/json_lines.h"
#include "data/base/terminal.h"
#include "data/base/stop_signals.h"
#include "data/text/text_files.h"
#include "data/tokenizer/tiktoken.h"
#include "data/options/options.h"  // PreTokenizerRules
#include "data/tokenizer/tokenizer_json.h"
#include "data/tokenizer/word_counts.h"

struct TokenizerTraining {
    int vocab_size = 8192;  // includes the end-of-text token
    PreTokenizerRules pre_tokenizer = PreTokenizerRules::llama3;
    uint64_t most_text = 1 << 30;  // bytes
    std::string text_field = "text";
    unsigned threads = 1;
};

// Returns the settings of the pre-tokenizer, in the format of tokenizer.json.
inline nlohmann::json pre_tokenizer_settings(PreTokenizerRules rules) {
    if (rules == PreTokenizerRules::gpt2) return byte_level_settings(true);
    return pattern_settings(tiktoken_encoding(name_of(rules)).pattern);
}

inline TokenizerParts tokenizer_parts(const TrainedBpe& trained, const nlohmann::json& pre_tokenizer) {
    TokenizerParts parts;
    for (const std::string& token : trained.tokens) parts.vocabulary.push_back(to_byte_alphabet(token));
    for (auto [left, right] : trained.merges)
        parts.merges.push_back({left, right, 256 + (int)parts.merges.size()});
    parts.added.push_back({(int)trained.tokens.size(), "<|endoftext|>", false, false, false, true});
    parts.pre_tokenizer = pre_tokenizer;
    parts.decoder = byte_level_settings(true);
    return parts;
}

// ----------------------------------------------------------------------------
// training text

// A part of a file. spread_parts() chooses parts with about `most` bytes in total, evenly spread.
struct FilePart {
    const TextFile* file;
    uint64_t begin, bytes;
};

inline std::vector<FilePart> spread_parts(const std::vector<TextFile>& files, uint64_t most) {
    const uint64_t part = std::clamp<uint64_t>(most / 256, 64 << 10, 1 << 20);
    constexpr uint64_t usual_ratio = 4;  // typical compression; if the text is larger, reading stops at
                                         // `most`
    auto size_of = [](const TextFile& file) { return file.bytes * (file.compressed ? usual_ratio : 1); };
    double total = 0, seen = 0;
    for (const TextFile& file : files) total += (double)size_of(file);
    double share = std::min(1.0, (double)most / std::max(1.0, total));
    std::vector<FilePart> parts;
    double taken = 0;
    for (const TextFile& file : files) {
        uint64_t size = size_of(file);
        seen += (double)size;
        uint64_t allowed = std::min(size, (uint64_t)(seen * share - taken));
        if (allowed < std::min(size, part / 4)) continue;  // later files get more
        taken += (double)allowed;
        if (allowed == size) {
            parts.push_back({&file, 0, UINT64_MAX});
            continue;
        }
        // Compressed text can only be read from the beginning.
        uint64_t count = file.compressed ? 1 : (allowed + part - 1) / part;
        for (uint64_t i = 0; i < count; i++) {
            uint64_t begin = (uint64_t)((double)size * ((double)i / (double)count));
            parts.push_back({&file, begin, allowed / count});
        }
    }
    return parts;
}

// Counts the words of parts of files.
class TrainingText {
public:
    TrainingText(WordCounter& words, const TokenizerTraining& options) : words_(words), options_(options) {}

    void add(const FilePart& part, TextInput& input) {
        if (part.begin > 0) input.seek(part.begin);
        uint64_t wanted = std::min(part.bytes, options_.most_text - bytes_);
        begun_ = part.begin == 0;
        rest_.clear();
        bool more = true;
        for (uint64_t read = 0; more && read < wanted;) {
            size_t before = rest_.size();
            more = input.append(rest_, (size_t)std::min<uint64_t>(piece, wanted - read));
            read += rest_.size() - before;
            if (part.file->lines)
                add_lines(!more);
            else
                add_text();
        }
        words_.end_document();
    }

    uint64_t bytes() const { return bytes_; }

private:
    static constexpr size_t piece = 1 << 18;

    // Drops the text before the first whole line.
    bool find_beginning() {
        if (begun_) return true;
        size_t newline = rest_.find('\n');
        if (newline == rest_.npos) return false;
        rest_.erase(0, newline + 1);
        return begun_ = true;
    }

    // A part may begin in the middle of a line if the line is very long.
    void add_text() {
        constexpr size_t long_line = 1 << 16;
        if (!find_beginning() && rest_.size() < long_line) return;
        begun_ = true;
        count(rest_);
        rest_.clear();
    }

    // Bad lines are skipped here: they are refused later, when their line number is known.
    void add_lines(bool ended) {
        if (!find_beginning()) return;
        size_t end = ended ? rest_.size() : rest_.rfind('\n') + 1;  // 0 if there is no line end
        std::string_view lines = std::string_view(rest_).substr(0, end);
        while (!lines.empty()) {
            std::string_view line = next_line(lines);
            if (is_blank(line) || !read_json_line(line, options_.text_field, document_).empty()) continue;
            count(document_);
            words_.end_document();
        }
        rest_.erase(0, end);
    }

    void count(std::string_view text) {
        words_.add(text);
        bytes_ += text.size();
    }

    WordCounter& words_;
    const TokenizerTraining& options_;
    std::string rest_, document_;
    bool begun_ = false;
    uint64_t bytes_ = 0;
};

// ----------------------------------------------------------------------------

inline HfTokenizer train_tokenizer(const std::vector<TextFile>& files, const TokenizerTraining& options,
                                   const std::string& name) {
    if (options.vocab_size < 257) {
        fail("--train-tokenizer %d: too few tokens; bytes and the end-of-text token need 257, and 8192 is "
             "common for a small model",
             options.vocab_size);
    }
    nlohmann::json settings = pre_tokenizer_settings(options.pre_tokenizer);
    PreTokenizer pre_tokenizer(settings, name);
    auto split = [&](std::string_view text, const std::function<void(std::string_view)>& word) {
        pre_tokenizer.split(text, false, word);
    };
    WordCounter words(split, options.threads);
    TrainingText text(words, options);
    {
        std::vector<FilePart> parts = spread_parts(files, options.most_text);
        double total = 0;
        for (const FilePart& part : parts) total += (double)std::min(part.bytes, part.file->bytes);
        ProgressLine progress("tokenize: reading words", total);
        for (const FilePart& part : parts) {
            check_interrupted("tokenize");
            TextInput input(*part.file);
            text.add(part, input);
            progress.add((double)input.consumed());
        }
    }
    BpeTrainingOptions training;
    training.vocab_size = options.vocab_size - 1;
    TrainedBpe trained = train_bpe(words.finish(), training);
    int made = (int)trained.tokens.size() + 1;
    print("tokenize: trained a tokenizer of %d tokens on %llu bytes of text%s\n", made,
          (unsigned long long)text.bytes(),
          made < options.vocab_size ? ", in which no further pair occurs twice" : "");
    return HfTokenizer(tokenizer_parts(trained, settings), name);
}
