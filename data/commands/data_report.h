/*
The data subcommand, which examines token files. For each file it reports the kind, the numbers of tokens and
documents, the lengths of the documents, the largest token, how the text begins, and any damage. Every token
is read once, in order, so files may be larger than memory, and a file that passes is complete.

A damaged file does not stop the examination of the others; one error at the end covers all damaged files.

In token shards, a document consists of the tokens between two end-of-document tokens, so one that continues
in the next shard counts once in each. The index of a Megatron data set states where documents begin.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "data/options/options.h"
#include "data/tokens/blend.h"
#include "data/commands/multiple_choice.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/tokens/megatron_shards.h"
#include "data/base/terminal.h"
#include "data/tokens/token_record.h"
#include "data/commands/token_scan.h"
#include "data/tokens/token_shards.h"
#include "data/tokenizer/tokenizer.h"
#include "data/base/strings.h"

// ----------------------------------------------------------------------------

class DataReport {
public:
    // `tokenizer` may be null. `document_end` -1: the tokenizer's end-of-text token; without a tokenizer,
    // documents are not separated.
    DataReport(const Tokenizer* tokenizer, int document_end, ProgressLine* progress = nullptr)
        : tokenizer_(tokenizer),
          document_end_(document_end < 0 && tokenizer ? tokenizer->end_of_text() : document_end),
          progress_(progress) {}

    // Returns the report on a file, as lines that each end in a newline. If the file is damaged, one line
    // says how.
    std::string file(const std::string& path) {
        return report(path, [&] {
            if (is_choice_file(path))
                choices(read_choices(path, nullptr, INT32_MAX));
            else if (path.ends_with(".idx"))
                megatron(MegatronData(path));
            else
                shard(TokenShard(path));
        });
    }

    // Returns the report on a name that cannot be examined; `error` says why.
    std::string refused(const std::string& name, const Error& error) {
        return report(name, [&] { throw error; });
    }

    // Returns the report on all undamaged files together.
    std::string total() {
        out_ = text("total of %zu files\n", files_);
        row("tokens", with_commas(total_tokens_));
        row_largest(largest_);
        if (total_lengths_.count() > 0) documents(total_lengths_, "");
        return std::move(out_);
    }

    size_t files() const { return files_; }                               // not damaged
    const std::vector<std::string>& damaged() const { return damaged_; }  // names
    const std::string& damage() const { return damage_; }                 // the last error

private:
    template <typename F>
    std::string report(const std::string& name, F&& look) {
        out_ = one_line(name) + "\n";
        try {
            look();
            files_++;
        } catch (const Error& error) {
            damage_ = error.what();
            damaged_.push_back(name);
            row("DAMAGED", one_line(damage_));
        }
        return std::move(out_);
    }

    void shard(const TokenShard& shard) {
        row("kind", text("token shard of llm.c, %d bytes a token", shard.width()));
        if (auto record = read_token_record(record_of_shard(shard.path()))) {
            row("made with", text("tokenizer %s, whose token %d ends documents",
                                  printable(record->tokenizer).c_str(), record->document_end));
            std::string note = check_token_record(shard.path(), *record, tokenizer_, document_end_);
            if (!note.empty()) row("note", note);
        }
        TokenScan tokens = scan(shard);
        if (document_end_ < 0) {
            row("documents", "cannot be separated; name the tokenizer");
        } else if (tokens.document_ends == 0) {
            row("documents",
                text("1 or part of one: token %d, which ends documents, does not occur", document_end_));
        } else {
            documents(tokens.lengths, text(", separated by token %d", document_end_));
        }
        begins(shard);
        check_fit(shard.path(), tokens.largest);
        add_to_total(tokens.count, tokens.lengths, tokens.largest);
    }

    void megatron(const MegatronData& data) {
        row("kind", text("data set of Megatron-LM, %d bytes a token, %s sequences", data.width(),
                         with_commas(data.sequences()).c_str()));
        TokenScan tokens = scan(data);
        LengthHistogram lengths;
        for (int64_t i = 0; i < data.documents(); i++) lengths.add(data.document(i).count);
        std::string ends;
        if (document_end_ >= 0) {
            ends = text(", with %s of token %d, which ends documents",
                        with_commas(tokens.document_ends).c_str(), document_end_);
        }
        documents(lengths, ends);
        begins(data);
        check_fit(data.path(), tokens.largest);
        add_to_total(tokens.count, lengths, tokens.largest);
    }

    void choices(const std::vector<ChoiceExample>& examples) {
        LengthHistogram contexts, lengths;
        int64_t tokens = 0;
        int largest = -1;
        auto look_at = [&](const std::vector<int>& part, LengthHistogram& histogram) {
            histogram.add((int64_t)part.size());
            tokens += (int64_t)part.size();
            largest = std::max(largest, *std::max_element(part.begin(), part.end()));
        };
        for (const ChoiceExample& example : examples) {
            look_at(example.context, contexts);
            for (const auto& choice : example.choices) look_at(choice, lengths);
        }
        row("kind", "multiple-choice questions of llm.c, 2 bytes a token");
        row("tokens", with_commas(tokens));
        row_largest(largest);
        row("questions", summary(contexts));
        histogram(contexts);
        row("choices", summary(lengths));
        histogram(lengths);
        row("the first", "");
        const ChoiceExample& first = examples[0];
        excerpt(first.context, false);
        for (size_t i = 0; i < first.choices.size(); i++) {
            out_ += (int)i == first.answer ? "      right:\n" : "      wrong:\n";
            excerpt(first.choices[i], false);
        }
        check_fit(first.place, largest);
        add_to_total(tokens, {}, largest);
    }

    static bool is_choice_file(const std::string& path) {
        struct stat status;
        FileHandle file = open_regular(path, &status);
        char magic[4];
        return pread(file.get(), magic, sizeof magic, 0) == sizeof magic &&
               begins_choice_file({magic, sizeof magic});
    }

    template <typename Source>
    TokenScan scan(const Source& source) {
        constexpr int64_t piece = 1 << 16;
        TokenScan scan(document_end_);
        std::vector<int> tokens((size_t)piece);
        for (int64_t at = 0; at < source.count(); at += piece) {
            int64_t n = std::min(piece, source.count() - at);
            source.copy(at, n, INT32_MAX, tokens.data());
            scan.add(tokens.data(), n);
            if (progress_) progress_->add((double)n * source.width());
        }
        scan.finish();
        row("tokens", with_commas(scan.count));
        row_largest(scan.largest);
        // A power failure can leave such a stretch in a file, and so can a copy that skips unreadable parts.
        if (auto [token, start, length] = scan.longest_run; length >= 1 << 14) {
            row("suspicious",
                text("token %d is repeated %s times, starting at token %s; was this part of the file ever "
                     "written?",
                     token, with_commas(length).c_str(), with_commas(start).c_str()));
        }
        return scan;
    }

    void row(const char* name, const std::string& value) {
        out_ += value.empty() ? text("  %s\n", name) : text("  %-11s %s\n", name, value.c_str());
    }

    void row_largest(int largest) {
        row("largest",
            text("token %d: fits a vocabulary of %s", largest, with_commas((int64_t)largest + 1).c_str()));
    }

    void check_fit(const std::string& path, int largest) const {
        if (!tokenizer_ || largest < tokenizer_->vocab_size()) return;
        fail("%s: has token %d, outside the %d tokens of the tokenizer %s; name the tokenizer "
             "that it was made with",
             path.c_str(), largest, tokenizer_->vocab_size(),
             tokenizer_->file().empty() ? "bytes" : printable(tokenizer_->file()).c_str());
    }

    static std::string summary(const LengthHistogram& lengths) {
        return text("%s of %s .. %s tokens, %.1f on average", with_commas(lengths.count()).c_str(),
                    with_commas(lengths.smallest()).c_str(), with_commas(lengths.largest()).c_str(),
                    lengths.mean());
    }

    void documents(const LengthHistogram& lengths, const std::string& more) {
        row("documents", summary(lengths) + more);
        histogram(lengths);
    }

    void histogram(const LengthHistogram& lengths) {
        for (const std::string& line : lengths.lines()) out_ += "      " + line + "\n";
    }

    template <typename Source>
    void begins(const Source& source) {
        constexpr int64_t longest = 512;
        std::vector<int> tokens((size_t)std::min(longest, source.count()));
        source.copy(0, (int64_t)tokens.size(), INT32_MAX, tokens.data());
        row("begins", "");
        excerpt(tokens, (int64_t)tokens.size() < source.count());
    }

    // Adds the text of the tokens or, without a tokenizer, the tokens.
    void excerpt(const std::vector<int>& tokens, bool goes_on) {
        std::string words;
        if (tokenizer_) {
            TextDecoder decoder(tokenizer_, true);
            for (int token : tokens) words += decoder.add(token);
            if (!goes_on) words += decoder.finish();
        } else {
            size_t shown = std::min<size_t>(tokens.size(), 16);
            for (size_t i = 0; i < shown; i++) words += (i ? " " : "") + std::to_string(tokens[i]);
            if (shown < tokens.size()) words += " ...";
            goes_on = false;
        }
        std::vector<std::string> lines = visible_lines(words, 5, 100);
        if (goes_on && (lines.empty() || lines.back() != "...")) lines.push_back("...");
        for (const std::string& line : lines) out_ += "      | " + line + "\n";
    }

    void add_to_total(int64_t tokens, const LengthHistogram& lengths, int largest) {
        total_tokens_ += tokens;
        total_lengths_.add(lengths);
        largest_ = std::max(largest_, largest);
    }

    const Tokenizer* tokenizer_;
    int document_end_;
    ProgressLine* progress_;
    std::string out_;
    size_t files_ = 0;
    int64_t total_tokens_ = 0;
    LengthHistogram total_lengths_;
    int largest_ = -1;
    std::vector<std::string> damaged_;
    std::string damage_;
};

// ----------------------------------------------------------------------------

// Returns the Megatron index beside a .bin that is not an llm.c file; otherwise returns the path itself.
inline std::string index_or_shard(const std::string& path) {
    std::string index = index_beside(path);
    if (index.empty()) return path;
    FileHandle file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    int32_t magic = 0;
    if (!file || pread(file.get(), &magic, sizeof magic, 0) != sizeof magic) return index;
    return find_shard_format(magic) || magic == choice_file_magic ? path : index;
}

// Returns the number of bytes that report_data() reads from a file; 0 if it does not exist.
inline double data_bytes(const std::string& path) {
    struct stat status;
    std::string tokens = path.ends_with(".idx") ? tokens_beside(path) : path;
    return stat(tokens.c_str(), &status) == 0 ? (double)status.st_size : 0;
}

// Prints what files contain. names: given as for training (files, folders, glob patterns, lists, blends);
// they are token shards, Megatron's .idx (or the .bin beside it) or llm.c's evaluation files. The tokenizer
// (null: none) decodes their text. Throws at the end if a file is damaged, or does not fit the tokenizer.
inline void report_data(const std::vector<std::string>& names, const Tokenizer* tokenizer, int document_end) {
    struct Item {
        std::string path;
        bool found;
        Error error;
    };
    std::vector<Item> items;
    std::set<std::string> seen;
    double bytes = 0;
    auto add = [&](const std::string& path, bool found, const Error& error = Error("")) {
        if (!seen.insert(path).second) return;
        items.push_back({path, found, error});
        bytes += data_bytes(path);
    };
    auto try_to = [&](const std::string& name, auto&& look) {
        try {
            look();
        } catch (const Error& error) {
            add(name, false, error);
        }
    };
    // A list is split here, so that one wrong name does not discard the others.
    auto add_list = [&](const std::string& list) {
        for (const std::string& name : comma_separated(list)) {
            try_to(name, [&] {
                for (const std::string& path : files_named(name)) add(index_or_shard(path), true);
            });
        }
    };
    for (const std::string& name : names) {
        try_to(name, [&] {
            for (const BlendSource& source : parse_blend(name)) add_list(source.files);
        });
    }
    if (items.empty()) fail("data: no files are named; give paths or patterns such as data/*.bin");

    ProgressLine progress("data", bytes);
    DataReport report(tokenizer, document_end, &progress);
    for (const auto& [path, found, error] : items) {
        std::string lines = found ? report.file(path) : report.refused(path, error);
        progress.clear();
        print_text(lines);
        fflush(stdout);
    }
    if (report.files() > 1) print_text(report.total());
    if (report.damaged().size() == 1) fail("%s", report.damage().c_str());
    if (!report.damaged().empty()) {
        constexpr size_t most = 5;
        std::string list;
        for (size_t i = 0; i < std::min(most, report.damaged().size()); i++)
            append_item(list, printable(report.damaged()[i]));
        if (report.damaged().size() > most) list += ", ...";
        fail("data: %zu of %zu files are damaged (%s); see above for details, and make or copy them "
             "again",
             report.damaged().size(), items.size(), list.c_str());
    }
}

inline void report_data(const DataOptions& command) {
    report_data(command.inputs, Tokenizer::load_if_any(command.tokenizer).get(), command.document_end);
}
