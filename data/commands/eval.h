/*
How well a model knows token files, and answers multiple-choice questions. The model itself is behind
losses(batch): the loss of each position (B*T) of a HostBatch whose arrays lie in memory as batch_at() has
them; by_token and by_position may be null.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/tokens/batch_reader.h"
#include "data/commands/multiple_choice.h"
#include "data/base/error.h"
#include "data/base/json.h"
#include "data/base/log_file.h"
#include "data/base/figures.h"
#include "data/run/meter.h"
#include "data/options/options.h"
#include "data/base/terminal.h"
#include "data/tokens/token_record.h"
#include "data/tokenizer/tokenizer.h"
#include "data/launch/trained_model.h"

// Calls visit(position, loss) for the positions that have a target.
template <typename Visit>
void each_loss(const std::vector<float>& losses, const int* targets, Visit&& visit) {
    for (size_t i = 0; i < losses.size(); i++) {
        if (targets[i] >= 0) visit(i, losses[i]);
    }
}

// ----------------------------------------------------------------------------
// token files

struct DataScore {
    double loss = 0;       // the sum
    uint64_t targets = 0;  // tokens that were predicted
    uint64_t bytes = 0;    // their text; 0 without a tokenizer
    uint64_t samples = 0;

    double mean() const { return loss / (double)targets; }
    double bits_per_byte() const { return loss / std::log(2.0) / (double)bytes; }
};

// Evaluates the first `limit` samples (0: all), under the options of the model.
template <typename Losses>
DataScore evaluate_data(const std::string& data, int limit, const Options& o, const Tokenizer* tokenizer,
                        Losses&& losses) {
    int B = o.micro_batch, T = o.sequence_length;
    TokenLoader loader(data, o.vocab_size, T, SampleOrder::sequential);
    for (const std::string& note : check_token_records(loader, tokenizer, o.document_end))
        print("note: %s\n", note.c_str());
    DataScore score;
    score.samples = loader.samples_per_epoch();
    if (limit > 0) score.samples = std::min(score.samples, (uint64_t)limit);
    BatchReader reader(loader, {B, T, o.document_end, resets_positions(o)}, (uint64_t)B);
    ProgressLine progress("eval", (double)score.samples * T, "tokens");
    for (uint64_t first = 0; first < score.samples; first += (uint64_t)B) {
        const HostBatch& batch = reader.load(first, (int)std::min((uint64_t)B, score.samples - first));
        each_loss(losses(batch), batch.targets, [&](size_t i, float loss) {
            int target = batch.targets[i];
            score.loss += loss;
            score.targets++;
            if (!tokenizer || target == o.document_end) return;
            if (!tokenizer->has(target)) {
                fail("%s: has token %d, which the tokenizer does not have; name the one it was made with",
                     data.c_str(), target);
            }
            score.bytes += tokenizer->token_bytes(target).size();
        });
        progress.add((double)B * T);
    }
    return score;
}

inline nlohmann::ordered_json score_record(const DataScore& score, const std::string& data) {
    nlohmann::ordered_json record = {{"data", data},
                                     {"loss", score.mean()},
                                     {"perplexity", std::exp(score.mean())},
                                     {"tokens", score.targets},
                                     {"samples", score.samples}};
    if (score.bytes > 0) record["bits_per_byte"] = score.bits_per_byte();
    return record;
}

// Loss, perplexity and bits per byte.
inline std::string score_text(const DataScore& score, const std::string& data) {
    std::string per_byte, bytes;
    if (score.bytes > 0) {
        per_byte = text("  bits per byte %.4f", score.bits_per_byte());
        bytes = text(", %llu bytes of text", (unsigned long long)score.bytes);
    }
    return text("loss %.4f  perplexity %.2f%s  (%llu tokens%s in %llu samples of %s)", score.mean(),
                std::exp(score.mean()), per_byte.c_str(), (unsigned long long)score.targets, bytes.c_str(),
                (unsigned long long)score.samples, data.c_str());
}

// ----------------------------------------------------------------------------
// multiple-choice questions

// Which choice the model finds likeliest, in the first `limit` questions (0: all).
template <typename Losses>
ChoiceScore evaluate_choices(const std::string& path, int limit, const Options& o, const Tokenizer* tokenizer,
                             Losses&& losses) {
    std::vector<ChoiceExample> examples = read_choices(path, tokenizer, o.vocab_size);
    if (limit > 0 && examples.size() > (size_t)limit) examples.resize((size_t)limit);
    std::vector<std::vector<double>> likelihoods;
    std::vector<std::pair<size_t, size_t>> rows;  // example and choice
    for (size_t i = 0; i < examples.size(); i++) {
        likelihoods.emplace_back(examples[i].choices.size());
        for (size_t j = 0; j < examples[i].choices.size(); j++) rows.push_back({i, j});
    }
    size_t B = (size_t)o.micro_batch, T = (size_t)o.sequence_length;
    ProgressLine progress("eval", (double)rows.size(), "choices");
    for (size_t first = 0; first < rows.size(); first += B) {
        std::vector<int> memory(batch_ints((int)B, (int)T));
        BatchArrays<int> batch = batch_at(memory.data(), (int)B, (int)T);
        std::fill_n(batch.targets, B * T, -1);
        for (size_t n = 0; n < B * T; n++) batch.positions[n] = (int)(n % T);
        for (size_t i = first; i < std::min(first + B, rows.size()); i++) {
            size_t at = (i - first) * T;
            choice_row(examples[rows[i].first], rows[i].second, (int)T, batch.tokens + at,
                       batch.targets + at);
        }
        HostBatch asked = {.tokens = batch.tokens, .targets = batch.targets, .positions = batch.positions};
        each_loss(losses(asked), asked.targets, [&](size_t i, float loss) {
            auto [example, choice] = rows[first + i / T];
            likelihoods[example][choice] -= loss;
        });
        progress.add((double)B);
    }
    ChoiceScore score;
    for (size_t i = 0; i < examples.size(); i++) score.add(examples[i], likelihoods[i]);
    return score;
}

inline nlohmann::ordered_json score_record(const ChoiceScore& score, const std::string& path) {
    return {{"choices", path},
            {"right", score.accuracy()},
            {"right_by_mean", score.accuracy_by_mean()},
            {"questions", score.examples}};
}

// Each share with its own standard error.
inline std::string score_text(const ChoiceScore& score, const std::string& path) {
    double by_sum = score.accuracy(), by_mean = score.accuracy_by_mean();
    return text(
        "right %.1f%% +- %.1f by the sum of log-likelihoods, %.1f%% +- %.1f by their mean per token, of "
        "%lld questions of %s",
        100 * by_sum, 100 * score.standard_error(by_sum), 100 * by_mean, 100 * score.standard_error(by_mean),
        (long long)score.examples, path.c_str());
}

// ----------------------------------------------------------------------------
// the eval command

// The options of a model with the sizes of the batches in which the command evaluates it.
inline const Options& shape_evaluation(Options& model, const EvalOptions& command) {
    model.micro_batch = command.micro_batch;
    model.sequence_length = command.sequence_length;
    complete_sequence_length(model);
    check_micro_batch(model);
    return model;
}

// The log of the run that a model is of.
inline std::string log_of(const TrainedModel& model) {
    std::string run = run_of_checkpoint(model.reader.folder());
    if (run.empty()) {
        fail("--log: %s lies in no run directory; leave the option out, or name a run",
             model.reader.folder().c_str());
    }
    return log_path(run);
}

// Evaluates what the command asks for, prints it and, with --log, adds it to the log of the run.
template <typename Losses>
void print_scores(const TrainedModel& model, const EvalOptions& command, Losses&& losses) {
    const Tokenizer* tokenizer = model.tokenizer.get();
    std::optional<LogFile> log;
    if (command.log) log.emplace(log_of(model));  // before there is a result that it could not take
    auto tell = [&](const auto& score, const std::string& of) {
        print("%s\n", score_text(score, of).c_str());
        nlohmann::ordered_json line = {{"step", model.reader.index().step()},
                                       {"eval", score_record(score, of)}};
        line["eval"]["time"] = utc_time();
        if (log) log->append(json_line(line));
    };
    if (const std::string& data = command.data; !data.empty())
        tell(evaluate_data(data, command.limit, model.options, tokenizer, losses), data);
    if (const std::string& choices = command.choices; !choices.empty())
        tell(evaluate_choices(choices, command.limit, model.options, tokenizer, losses), choices);
}
