/*
Generates text with a model, and implements the sample command. A TextGenerator runs the forward passes;
StopText ends a text at given strings.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/figures.h"
#include "data/base/json.h"
#include "data/base/screen.h"
#include "data/base/stop_signals.h"
#include "data/base/strings.h"
#include "data/commands/sampler.h"
#include "data/exchange/published.h"
#include "data/tokenizer/tokenizer.h"
#include "data/launch/trained_model.h"
#include "kernels/random.cuh"

// Ends a text where one of some given strings appears in it. The text arrives in pieces. If it ends in a
// possible beginning of such a string, that part is held back until the next piece decides, so no part of a
// stop string is ever shown.
class StopText {
public:
    explicit StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    // Adds a piece, and returns the text that is now certain to stay.
    std::string add(std::string_view piece) {
        if (stopped_) return "";
        held_ += piece;
        size_t end = std::string::npos;
        for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
        stopped_ = end != std::string::npos;
        if (!stopped_) end = held_.size() - held_back();
        std::string certain = held_.substr(0, end);
        held_.erase(0, end);
        return certain;
    }

    bool stopped() const { return stopped_; }

    // Returns the held-back end of a text that ended without a stop string.
    std::string finish() { return stopped_ ? "" : std::exchange(held_, {}); }

private:
    // Returns the number of bytes at the end that may begin a stop string.
    size_t held_back() const {
        size_t longest = 0;
        for (const std::string& stop : stops_) {
            for (size_t n = std::min(stop.size() - 1, held_.size()); n > longest; n--) {
                if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, n))) longest = n;
            }
        }
        return longest;
    }

    std::vector<std::string> stops_;
    std::string held_;
    bool stopped_ = false;
};

// Continues several texts together, each from its own prompt. Tokens that are not in the model's cache are
// recomputed: all of them if there is no cache. Once a text exceeds what the model sees at once, its older
// half is dropped, and the newer half gets new positions.
//
// Each data rank has a contiguous range of the texts. Every rank knows all texts, so it knows how many passes
// the others run. If passes gather weights, all ranks run the same number of them, with or without a text.
class TextGenerator {
public:
    // Logits (V) of the next token, one row for each text of this rank; row r is that of text number(r).
    using Rows = std::vector<std::vector<float>>;
    struct DataRanks {
        int count, rank;
        bool gather;  // a pass needs all data ranks
    };

    // The model sees at most `limit` tokens of a text at once, and reads multiples of `multiple` tokens.
    TextGenerator(const std::vector<std::vector<int>>& prompts, int limit, bool cached, int multiple = 1,
                  DataRanks ranks = {1, 0, false})
        : limit_(limit), cached_(cached), multiple_(multiple), ranks_(ranks) {
        for (const std::vector<int>& prompt : prompts) texts_.push_back({prompt});
    }
    virtual ~TextGenerator() = default;
    TextGenerator(const TextGenerator&) = delete;
    TextGenerator& operator=(const TextGenerator&) = delete;

    // Hides a prompt that is only this token from all tokens but the first that follows: training hides the
    // end of a document from the next one.
    void hide_first(int document_end) { hidden_ = document_end; }

    // Returns the tokens of a text so far.
    const std::vector<int>& text(int number) const { return texts_[(size_t)number].tokens; }
    int number(int row) const { return number(row, ranks_.rank); }

    // For all ranks: returns the logits of the next tokens, or nothing on a rank that does not choose tokens.
    Rows next() {
        for (Text& text : texts_) {
            if (text.seen() <= limit_) continue;
            text.begin = text.tokens.size() - (size_t)std::max(limit_ / 2, 1);
            text.past = 0;
        }
        Rows logits((size_t)texts_of(ranks_.rank));
        // Texts in the cache are processed first, because their pass may overwrite the rows of the texts that
        // it leaves out, which are read from the beginning afterwards.
        if (has_cached(ranks_.rank)) take(logits, 0, add_newest());
        for (int row = 0; row < (int)logits.size(); row++) {
            const Text& text = text_at(row, ranks_.rank);
            if (text.past > 0) continue;
            if (!is_read(row, ranks_.rank)) {
                logits[(size_t)row] = logits[(size_t)row - 1];
                if (cached_) copy_row(row - 1, row, text.seen());
            } else {
                std::vector<int> window(text.tokens.begin() + (ptrdiff_t)text.begin, text.tokens.end());
                window.resize((size_t)padded(text.seen()), 0);
                take(logits, row, this->logits(window, (int)window.size(), {}, row, text.seen() - 1));
            }
        }
        int most = 0;
        for (int rank = 0; ranks_.gather && rank < ranks_.count; rank++)
            most = std::max(most, passes_of(rank));
        for (int pass = passes_of(ranks_.rank); pass < most; pass++)
            this->logits(std::vector<int>((size_t)multiple_), multiple_, {}, no_row, 0);
        for (Text& text : texts_) text.past = cached_ ? text.seen() : 0;
        return chooses_ ? logits : Rows();
    }

    // For all ranks: adds a token to each text. A rank that chooses tokens determines those of its own texts.
    void add(std::vector<int>& tokens) {
        agree_on(tokens);
        for (size_t i = 0; i < texts_.size(); i++) {
            Text& text = texts_[i];
            text.tokens.push_back(tokens[i]);
            if (text.tokens.size() == 2 && text.tokens[0] == hidden_) text.begin = 1, text.past = 0;
        }
    }

protected:
    static constexpr int no_row = -1;

    // Runs a forward pass over T tokens of each text, which follow its `pasts` tokens in the cache (negative:
    // the text is left out; empty: no text has any). `row` is the row of the first text in the cache, or
    // no_row if nothing is to be kept. Returns the logits (V) after token `last` of each text; later tokens
    // are padding. Returns nothing on a rank that does not choose tokens.
    virtual Rows logits(const std::vector<int>& tokens, int T, const std::vector<int>& pasts, int row,
                        int last) = 0;
    // Copies the first `length` tokens of row `from` of the cache to row `to`.
    virtual void copy_row(int from, int to, int length) = 0;
    // Replaces the tokens of all texts by those of the ranks that choose.
    virtual void agree_on(std::vector<int>&) {}

private:
    struct Text {
        std::vector<int> tokens;
        size_t begin = 0;  // the first token that the model sees
        int past = 0;      // tokens from `begin` on that are in the cache

        int seen() const { return (int)(tokens.size() - begin); }
    };

    int block() const { return ((int)texts_.size() + ranks_.count - 1) / ranks_.count; }
    int texts_of(int rank) const { return std::clamp((int)texts_.size() - rank * block(), 0, block()); }
    int number(int row, int rank) const { return rank * block() + row; }
    const Text& text_at(int row, int rank) const { return texts_[(size_t)number(row, rank)]; }

    bool has_cached(int rank) const {
        for (int row = 0; row < texts_of(rank); row++)
            if (text_at(row, rank).past > 0) return true;
        return false;
    }

    // Returns whether a text must be read from the beginning: it is not in the cache, and differs from the
    // one before it if that is read too. So a prompt is read once for all its texts.
    bool is_read(int row, int rank) const {
        const Text& text = text_at(row, rank);
        if (text.past > 0) return false;
        if (row == 0) return true;
        const Text& before = text_at(row - 1, rank);
        return before.past > 0 || before.begin != text.begin || before.tokens != text.tokens;
    }

    int passes_of(int rank) const {
        int passes = has_cached(rank);
        for (int row = 0; row < texts_of(rank); row++) passes += is_read(row, rank);
        return passes;
    }

    // Runs a pass over the newest token of each text in the cache.
    Rows add_newest() {
        std::vector<int> newest, pasts;
        for (int row = 0; row < texts_of(ranks_.rank); row++) {
            const Text& text = text_at(row, ranks_.rank);
            newest.push_back(text.tokens.back());
            pasts.push_back(text.past > 0 ? text.past : -1);
        }
        return logits(newest, 1, pasts, 0, 0);
    }

    void take(Rows& logits, int row, Rows&& some) {
        chooses_ = !some.empty();
        for (std::vector<float>& one : some) logits[(size_t)row++] = std::move(one);
    }

    // Rounds lengths up, so that matrix products have few shapes.
    int padded(int length) const {
        auto rounded = [](int n, int unit) { return (n + unit - 1) / unit * unit; };
        return std::min(rounded(length, 64 * multiple_), rounded(limit_, multiple_));
    }

    const int limit_;
    const bool cached_;
    const int multiple_;
    const DataRanks ranks_;
    std::vector<Text> texts_;
    int hidden_ = -1;
    bool chooses_ = false;
};

// Adds up to `count` tokens to each text of a generator. Each text has a key for its random numbers: the same
// key gives the same text. show(text, token) is called for each new token and returns false to end the text.
// A token of `ends` also ends it. All ranks see all texts, and if one rank cannot choose a token, all fail.
template <typename Show>
void generate_texts(TextGenerator& generator, int count, const std::vector<int>& ends,
                    const Sampling& sampling, const std::vector<uint64_t>& keys, Show&& show) {
    std::vector<bool> over(keys.size());
    for (int i = 0; i < count && std::count(over.begin(), over.end(), false) > 0; i++) {
        TextGenerator::Rows logits = generator.next();
        std::vector<int> tokens(keys.size());
        std::string error;
        for (size_t row = 0; row < logits.size(); row++) {
            auto number = (size_t)generator.number((int)row);
            if (over[number]) continue;
            float u = random_uniform(philox(keys[number], (uint64_t)i).at[0]);
            tokens[number] = -1;  // stays -1 if choosing fails, so that all ranks see it
            note_error(error, [&] {
                tokens[number] =
                    choose_token(std::move(logits[row]), sampling, generator.text((int)number), u);
            });
        }
        generator.add(tokens);
        if (std::ranges::min(tokens) < 0)
            fail("%s", error.empty() ? "sample: no token can be chosen" : error.c_str());
        for (size_t text = 0; text < keys.size(); text++) {
            bool ended = std::find(ends.begin(), ends.end(), tokens[text]) != ends.end();
            if (!over[text]) over[text] = ended || !show((int)text, tokens[text]);
        }
    }
}

// Returns the tokens that a text starts from: the prompt or, if it is empty, the token that begins a text or
// ends the document before it.
inline std::vector<int> prompt_tokens(const Options& o, const Tokenizer* tokenizer, std::string_view prompt) {
    std::vector<int> tokens = tokenizer ? tokenizer->encode_prompt(prompt) : std::vector<int>();
    if (tokens.empty() && prompt.empty()) return {std::max(o.document_end, 0)};
    if (tokens.empty()) fail("--prompt: has no tokens; give it other text, or use another tokenizer");
    return tokens;
}

// Returns the text that a run shows after a step. make_generator(tokens of the prompts) returns a generator.
template <typename MakeWriter>
std::string sample_text(const Options& o, const Tokenizer* tokenizer, int step, MakeWriter&& make_generator) {
    TextDecoder decoder(tokenizer, o.prompt.empty());
    std::string sample = o.prompt;
    uint64_t key = random_key(o.seed, text("sample at step %d", step));
    auto generator = make_generator({prompt_tokens(o, tokenizer, o.prompt)});
    generator.hide_first(o.document_end);
    generate_texts(generator, o.sample_tokens, {o.document_end}, {.temperature = 0.8f}, {key},
                   [&](int, int token) {
                       sample += decoder.add(token);
                       return true;
                   });
    return sample + decoder.finish();
}

// ----------------------------------------------------------------------------
// the sample command

// Returns the prompts of a file: its whole content is one, except in a .jsonl, where each line has one.
inline std::vector<std::string> read_prompts(const std::string& path) {
    std::string content = read_text(path);
    if (!path.ends_with(".jsonl")) return {content};
    std::vector<std::string> prompts;
    each_json_object(content, path, [&](const nlohmann::json& value, const std::string& place) {
        prompts.push_back(JsonObject(value, place).string("prompt"));
    });
    if (prompts.empty()) fail("%s: has no prompts; give some, one a line", path.c_str());
    return prompts;
}

// Returns the prompts of the command line, or a single empty one if there are none.
inline std::vector<std::string> sample_prompts(const TrainedModel& model, const SampleOptions& command) {
    std::vector<std::string> prompts = command.prompt;
    if (!command.prompt_file.empty()) prompts = read_prompts(command.prompt_file);
    if (!model.tokenizer && (command.interactive || !prompts.empty() || !command.stop.empty())) {
        const char* option = command.interactive           ? "--interactive"
                             : prompts.empty()             ? "--stop"
                             : command.prompt_file.empty() ? "--prompt"
                                                           : "--prompt-file";
        fail("%s: needs a tokenizer, and there is none for %s; leave it out, or name one with --tokenizer",
             option, model.reader.folder().c_str());
    }
    if (prompts.empty()) prompts.emplace_back();
    return prompts;
}

// Returns the largest number of tokens seen at once. A prompt that is not known yet may fill the context.
inline int sample_length(const TrainedModel& model, const SampleOptions& command,
                         const std::vector<std::string>& prompts) {
    auto context = (size_t)model.options.context, most = command.interactive ? context : (size_t)0;
    for (const std::string& prompt : prompts)
        most = std::max(most, prompt_tokens(model.options, model.tokenizer.get(), prompt).size() +
                                  (size_t)command.tokens);
    return (int)std::min(most, context);
}

// Returns the token that ends a document, and the end tokens that an imported model was published with.
inline std::vector<int> ends_of_text(const TrainedModel& model) {
    PublishedFiles published(model.reader.index().about);
    std::vector<int> ends = published.ends_of_text(model.options.vocab_size);
    ends.push_back(model.options.document_end);
    return ends;
}

// Continues each prompt --samples times and prints the texts: a single text as it is generated, several once
// all are complete. Control characters are printed only if the output is not shown on a terminal. `number` is
// the number of earlier texts, so that each text has its own random numbers. make_generator(tokens of the
// prompts) returns a generator. Returns a line about the time that generation took.
template <typename MakeWriter>
std::string print_samples(const TrainedModel& model, const SampleOptions& command,
                          const std::vector<std::string>& prompts, int number, MakeWriter&& make_generator) {
    const Options& o = model.options;
    std::vector<uint64_t> keys;
    std::vector<TextDecoder> decoders;
    std::vector<std::string> texts;
    std::vector<std::vector<int>> prompts_of_texts;
    for (const std::string& prompt : prompts) {
        const std::vector<int> tokens = prompt_tokens(o, model.tokenizer.get(), prompt);
        for (int i = 0; i < command.samples; i++) {
            keys.push_back(random_key(command.seed, text("sample %d", number + (int)keys.size())));
            decoders.emplace_back(model.tokenizer.get(), prompt.empty());
            texts.push_back(prompt);
            prompts_of_texts.push_back(tokens);
        }
    }
    std::vector<StopText> stops(texts.size(), StopText(command.stop));
    bool streams = texts.size() == 1;
    auto show = [&, on_terminal = is_shown_on_terminal()](const std::string& shown) {
        on_terminal ? print_text(shown) : print_bytes(shown);
    };
    auto add = [&](size_t i, const std::string& piece) {
        texts[i] += piece;
        if (!streams) return;
        show(piece);
        fflush(stdout);
    };

    if (streams) show(texts[0]);
    double start = seconds_now();
    long long tokens = 0;
    auto generator = make_generator(prompts_of_texts);
    if (model.is_trained_here()) generator.hide_first(o.document_end);
    generate_texts(
        generator, command.tokens, ends_of_text(model),
        {command.temperature, command.top_k, command.top_p, command.min_p, command.repetition_penalty}, keys,
        [&](int number, int token) {
            auto i = (size_t)number;
            tokens++;
            add(i, stops[i].add(decoders[i].add(token)));
            return !stops[i].stopped() && !stop_requested;
        });
    double seconds = seconds_now() - start;
    for (size_t i = 0; i < texts.size(); i++) {
        add(i, stops[i].add(decoders[i].finish()));
        add(i, stops[i].finish());
        if (!streams) show(texts[i]);
        print("\n%s", i + 1 < texts.size() ? "----\n" : "");
    }
    check_standard_output();
    return text("%lld tokens in %.1f s, %.1f tokens/s", tokens, seconds, (double)tokens / seconds);
}
