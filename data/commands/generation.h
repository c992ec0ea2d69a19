/*
Text from a model, and the sample command. The passes through the model are those of a TextGenerator; StopText
ends a text where it was asked to end.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/figures.h"
#include "data/commands/sampler.h"
#include "data/exchange/published.h"
#include "data/tokenizer/tokenizer.h"
#include "data/launch/trained_model.h"
#include "kernels/random.cuh"

// Ends a text where one of some given texts appears in it. Text comes in pieces, and what may be the
// beginning of such a text is held back until it is clear; so nothing of it is ever shown.
class StopText {
public:
    explicit StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    // Returns the part of the text so far that is certain to stay.
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

    // The rest of a text that has ended by itself.
    std::string finish() { return stopped_ ? "" : std::exchange(held_, {}); }

private:
    // Bytes at the end that begin one of the texts.
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

// Continues a prompt once for each of some texts, all of them together. What is not in the model's cache is
// computed again: all of it where there is no cache. When what the model sees at once is full, the older half
// is left out from then on, and the rest has new positions.
class TextGenerator {
public:
    using Rows = std::vector<std::vector<float>>;  // logits (V) of what comes next, one row for each text

    // The cache holds cache_length tokens of each text; 0: there is none, and the model sees `without_cache`
    // tokens at once. It reads multiples of `multiple` tokens, which divides without_cache.
    TextGenerator(const std::vector<int>& prompt, int texts, int cache_length, int without_cache,
                  int multiple = 1)
        : cached_(cache_length > 0),
          step_(64 * multiple),
          limit_(cached_ ? cache_length : without_cache),
          texts_((size_t)texts, prompt) {}
    virtual ~TextGenerator() = default;
    TextGenerator(const TextGenerator&) = delete;
    TextGenerator& operator=(const TextGenerator&) = delete;

    // The tokens of a text so far.
    const std::vector<int>& text(int number) const { return texts_[(size_t)number]; }

    // Logits (V) of what comes next, for each text.
    Rows next() {
        int length = (int)(texts_[0].size() - begin_), rows = (int)texts_.size();
        if (length > limit_) {
            length = std::max(limit_ / 2, 1);
            begin_ = texts_[0].size() - (size_t)length;
            past_ = 0;
        }
        Rows logits;
        if (past_ > 0) {
            std::vector<int> newest;
            for (const auto& text : texts_) newest.push_back(text.back());
            logits = this->logits(newest, 1, past_, 0, 0);
        } else {
            for (int row = 0; row < (all_alike_ ? 1 : rows); row++) {
                std::vector<int> seen = window(row, length);
                for (auto& of_row : this->logits(seen, (int)seen.size(), 0, row, length - 1))
                    logits.push_back(std::move(of_row));
            }
            if (all_alike_ && !logits.empty()) logits.resize((size_t)rows, logits[0]);
            if (all_alike_ && cached_) copy_first_row(length, rows);
        }
        past_ = cached_ ? length : 0;
        return logits;
    }

    // A token for each text. All ranks take those of the one that chooses.
    void add(std::vector<int>& tokens) {
        agree_on(tokens);
        for (size_t i = 0; i < texts_.size(); i++) texts_[i].push_back(tokens[i]);
        all_alike_ = false;
    }

protected:
    int limit() const { return limit_; }

    // Passes through the model, over texts of T tokens each, after the `past` that are in the cache; `row` is
    // the place of the first text there. Returns logits (V) of what comes after token `last` of each; tokens
    // after that are padding. Returns nothing on a rank that does not choose.
    virtual Rows logits(const std::vector<int>& tokens, int T, int past, int row, int last) = 0;
    // In the cache: the first text's `length` tokens are those of all, for the prompt is read once.
    virtual void copy_first_row(int length, int texts) = 0;
    // Replaces the tokens by those of the rank that chooses.
    virtual void agree_on(std::vector<int>&) {}

private:
    // The part of a text that the model sees. Lengths are rounded up, so that products come in few shapes.
    std::vector<int> window(int row, int length) const {
        std::vector<int> tokens(text(row).begin() + (ptrdiff_t)begin_, text(row).end());
        tokens.resize((size_t)std::min((length + step_ - 1) / step_ * step_, limit_), 0);
        return tokens;
    }

    const bool cached_;
    const int step_;
    const int limit_;  // tokens that the model sees at once
    std::vector<std::vector<int>> texts_;
    bool all_alike_ = true;
    size_t begin_ = 0;  // the first token that the model sees
    int past_ = 0;      // tokens of that in the cache
};

// Adds up to `count` tokens to the texts of a generator, each with its key: the same key gives the same text.
// show(text, token) is called for each new token and returns false to end the text. A token of `ends` ends it
// as well. All ranks do the same work, and if no token can be chosen on one of them, all fail.
template <typename Show>
void generate_texts(TextGenerator& generator, int count, const std::vector<int>& ends,
                    const Sampling& sampling, const std::vector<uint64_t>& keys, Show&& show) {
    std::vector<bool> over(keys.size());
    for (int i = 0; i < count && std::count(over.begin(), over.end(), false) > 0; i++) {
        TextGenerator::Rows logits = generator.next();
        std::vector<int> tokens(keys.size());
        std::string error;
        for (size_t row = 0; row < logits.size(); row++) {
            if (over[row]) continue;
            float u = random_uniform(philox(keys[row], (uint64_t)i).at[0]);
            note_error(error, [&] {
                tokens[row] = choose_token(std::move(logits[row]), sampling, generator.text((int)row), u);
            });
        }
        if (!error.empty()) tokens[0] = -1;  // so that all ranks hear of it
        generator.add(tokens);
        if (tokens[0] < 0) fail("%s", error.empty() ? "sample: no token can be chosen" : error.c_str());
        for (size_t row = 0; row < keys.size(); row++) {
            bool ended = std::find(ends.begin(), ends.end(), tokens[row]) != ends.end();
            if (!over[row]) over[row] = ended || !show((int)row, tokens[row]);
        }
    }
}

// The tokens a text starts from: the prompt, or what comes before a document.
inline std::vector<int> prompt_tokens(const Options& o, const Tokenizer* tokenizer, std::string_view prompt) {
    if (prompt.empty()) return {std::max(o.document_end, 0)};
    std::vector<int> tokens = tokenizer->encode(prompt);
    if (tokens.empty()) fail("--prompt: has no tokens; give it other text, or use another tokenizer");
    return tokens;
}

// The text that a run shows after a step. make_generator(prompt's tokens) begins to generate.
template <typename MakeWriter>
std::string sample_text(const Options& o, const Tokenizer* tokenizer, int step, MakeWriter&& make_generator) {
    TextDecoder decoder(tokenizer, o.prompt.empty());
    std::string sample = o.prompt;
    uint64_t key = random_key(o.seed, text("sample at step %d", step));
    auto generator = make_generator(prompt_tokens(o, tokenizer, o.prompt));
    generate_texts(generator, o.sample_tokens, {o.document_end}, {.temperature = 0.8f}, {key},
                   [&](int, int token) {
                       sample += decoder.add(token);
                       return true;
                   });
    return sample + decoder.finish();
}

// ----------------------------------------------------------------------------
// the sample command

// The prompt of the command line, empty if there is none yet.
inline std::string sample_prompt(const TrainedModel& model, const SampleOptions& command) {
    std::string prompt = command.prompt_file.empty() ? command.prompt : read_text(command.prompt_file);
    if (!model.tokenizer && (command.interactive || !prompt.empty() || !command.stop.empty())) {
        const char* option = command.interactive           ? "--interactive"
                             : prompt.empty()              ? "--stop"
                             : command.prompt_file.empty() ? "--prompt"
                                                           : "--prompt-file";
        fail("%s: needs a tokenizer, and there is none for %s; leave it out, or name one with --tokenizer",
             option, model.reader.folder().c_str());
    }
    return prompt;
}

// Tokens that the model sees at once, at most. A prompt that is not known yet may fill the context.
inline int sample_length(const TrainedModel& model, const SampleOptions& command, const std::string& prompt) {
    int context = model.options.context;
    if (command.interactive) return context;
    size_t length =
        prompt_tokens(model.options, model.tokenizer.get(), prompt).size() + (size_t)command.tokens;
    return (int)std::min(length, (size_t)context);
}

// The token that ends a document, and those that an imported model was published with.
inline std::vector<int> ends_of_text(const TrainedModel& model) {
    PublishedFiles published(model.reader.index().about);
    std::vector<int> ends = published.ends_of_text(model.options.vocab_size);
    ends.push_back(model.options.document_end);
    return ends;
}

// Continues a prompt and prints it, with its control characters only where no terminal shows it: a single
// text as it comes, several when all are there. `number` counts the prompts. make_generator(prompt's tokens,
// texts) begins to generate.
template <typename MakeWriter>
void print_samples(const TrainedModel& model, const SampleOptions& command, const std::string& prompt,
                   int number, MakeWriter&& make_generator) {
    const Options& o = model.options;
    int samples = command.samples;
    bool streams = samples == 1;
    std::vector<uint64_t> keys;
    std::vector<TextDecoder> decoders(samples, TextDecoder(model.tokenizer.get(), prompt.empty()));
    std::vector<StopText> stops(samples, StopText(command.stop));
    std::vector<std::string> texts(samples, prompt);
    for (int i = 0; i < samples; i++) keys.push_back(random_key(command.seed, text("sample %d", number + i)));
    auto show = [&, on_terminal = isatty(STDOUT_FILENO)](const std::string& shown) {
        on_terminal ? print_text(shown) : print_bytes(shown);
    };
    auto add = [&](int i, const std::string& piece) {
        texts[i] += piece;
        if (!streams) return;
        show(piece);
        fflush(stdout);
    };

    if (streams) show(prompt);
    double start = seconds_now();
    long long tokens = 0;
    auto generator = make_generator(prompt_tokens(o, model.tokenizer.get(), prompt), samples);
    generate_texts(
        generator, command.tokens, ends_of_text(model),
        {command.temperature, command.top_k, command.top_p, command.min_p, command.repetition_penalty}, keys,
        [&](int i, int token) {
            tokens++;
            add(i, stops[i].add(decoders[i].add(token)));
            return !stops[i].stopped();
        });
    double seconds = seconds_now() - start;
    for (int i = 0; i < samples; i++) {
        add(i, stops[i].add(decoders[i].finish()));
        add(i, stops[i].finish());
        if (!streams) show(texts[i]);
        print("\n%s", i + 1 < samples ? "----\n" : "");
    }
    check_standard_output();
    fprintf(stderr, "%lld tokens in %.1f s, %.1f tokens/s\n", tokens, seconds, (double)tokens / seconds);
}

// Continues the prompt, or each line of the standard input.
template <typename MakeWriter>
void generate_samples(const TrainedModel& model, const SampleOptions& command, std::string prompt,
                      MakeWriter&& make_generator) {
    if (!command.interactive) return print_samples(model, command, prompt, 0, make_generator);
    bool on_terminal = isatty(STDIN_FILENO);
    for (int number = 0;; number++) {
        if (on_terminal) fputs("> ", stdout), fflush(stdout);
        if (!std::getline(std::cin, prompt)) break;
        if (prompt.ends_with('\r')) prompt.pop_back();
        if (!prompt.empty()) print_samples(model, command, prompt, number, make_generator);
    }
    if (on_terminal) print("\n");
}
