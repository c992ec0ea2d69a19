/*
Evaluates how well models predict token files, and how well they answer multiple-choice questions. A
LossSource hides the model, which may be split over many ranks.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/tokens/batch_reader.h"
#include "data/commands/multiple_choice.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/log_file.h"
#include "data/base/figures.h"
#include "data/run/meter.h"
#include "data/options/named_lists.h"
#include "data/options/options.h"
#include "data/base/terminal.h"
#include "data/tokens/token_record.h"
#include "data/tokenizer/tokenizer.h"
#include "data/launch/trained_model.h"

// Computes the losses of batches under a model, on all ranks that hold a part of it. The data ranks take the
// batches in turn.
class LossSource {
public:
    virtual ~LossSource() = default;

    // The arrays of a batch are laid out in memory as in batch_at(); by_token and by_position may be null.
    // Batches past the last one are empty.
    using Load = std::function<HostBatch(uint64_t number)>;
    using Take = std::function<void(uint64_t number, const std::vector<int>& targets,
                                    const std::vector<float>& losses)>;

    virtual int ranks() const = 0;  // data ranks
    // For all ranks: loads this rank's part of the batches 0 .. count-1, and passes the targets and losses
    // (B*T) of each batch to take(). Each loss is passed on one rank only. An exception from load() or take()
    // is thrown on all ranks.
    virtual void each(uint64_t count, const Load& load, const Take& take) = 0;
    // For all ranks: replaces the values by their sums over the ranks.
    virtual void add_up(std::vector<double>& values) = 0;
};

// Calls visit(position, loss) for the positions that have a target.
template <typename Visit>
void each_loss(const std::vector<float>& losses, const std::vector<int>& targets, Visit&& visit) {
    for (size_t i = 0; i < losses.size(); i++) {
        if (targets[i] >= 0) visit(i, losses[i]);
    }
}

// ----------------------------------------------------------------------------
// token files

struct DataScore {
    double loss = 0;       // the sum
    uint64_t targets = 0;  // tokens that the model predicted
    uint64_t bytes = 0;    // bytes of their text; 0 without a tokenizer
    uint64_t samples = 0;

    double mean() const { return loss / (double)targets; }
    double bits_per_byte() const { return loss / std::log(2.0) / (double)bytes; }
};

// For all ranks: evaluates the first `limit` samples of these files (0: all), under the options of the model.
inline DataScore evaluate_data(const TokenLoader& files, const std::string& title, int limit,
                               const Options& o, const Tokenizer* tokenizer, LossSource& model) {
    int B = o.micro_batch, T = o.sequence_length;
    DataScore score;
    score.samples = files.samples_per_epoch();
    if (limit > 0) score.samples = std::min(score.samples, (uint64_t)limit);
    BatchReader reader(files, {B, T, o.document_end, resets_positions(o)},
                       (uint64_t)B * (uint64_t)model.ranks());
    ProgressLine progress("eval", (double)score.samples * T / model.ranks(), "tokens");
    std::vector<double> sums(3);
    double &loss = sums[0], &targets = sums[1], &bytes = sums[2];
    auto load = [&](uint64_t number) {
        uint64_t first = std::min(number * (uint64_t)B, score.samples);
        progress.add((double)B * T);
        return reader.load(first, (int)std::min((uint64_t)B, score.samples - first));
    };
    auto take = [&](uint64_t, const std::vector<int>& targets_here, const std::vector<float>& losses) {
        each_loss(losses, targets_here, [&](size_t i, float loss_here) {
            int target = targets_here[i];
            loss += loss_here;
            targets++;
            if (!tokenizer || target == o.document_end || tokenizer->is_special(target)) return;
            if (!tokenizer->has(target)) {
                fail("%s: token %d is not in the tokenizer; name the one that the data was made with",
                     title.c_str(), target);
            }
            bytes += (double)tokenizer->token_bytes(target).size();
        });
    };
    model.each((score.samples + (uint64_t)B - 1) / (uint64_t)B, load, take);
    model.add_up(sums);
    score.loss = loss, score.targets = (uint64_t)targets, score.bytes = (uint64_t)bytes;
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

// For all ranks: finds which choices the model considers likeliest. examples: the same on all ranks.
inline ChoiceScore evaluate_choices(const std::vector<ChoiceExample>& examples, const Options& o,
                                    LossSource& model, bool shows_progress) {
    std::vector<std::pair<size_t, size_t>> rows;  // example and choice
    for (size_t i = 0; i < examples.size(); i++)
        for (size_t j = 0; j < examples[i].choices.size(); j++) rows.push_back({i, j});
    size_t B = (size_t)o.micro_batch, T = (size_t)o.sequence_length;
    ProgressLine progress("eval", (double)rows.size() / model.ranks(), "choices");
    std::vector<double> likelihoods(rows.size());
    std::vector<int> memory(batch_ints((int)B, (int)T));
    auto load = [&](uint64_t number) -> HostBatch {
        BatchArrays<int> batch = batch_at(memory.data(), (int)B, (int)T);
        std::ranges::fill(memory, 0);
        std::fill_n(batch.targets, B * T, -1);
        for (size_t n = 0; n < B * T; n++) batch.positions[n] = (int)(n % T);
        for (size_t i = number * B; i < std::min((number + 1) * B, rows.size()); i++) {
            size_t at = i % B * T;
            choice_row(examples[rows[i].first], rows[i].second, (int)T, batch.tokens + at,
                       batch.targets + at);
        }
        if (shows_progress) progress.add((double)B);
        return {.tokens = batch.tokens, .targets = batch.targets, .positions = batch.positions};
    };
    model.each((rows.size() + B - 1) / B, load,
               [&](uint64_t number, const std::vector<int>& targets, const std::vector<float>& losses) {
                   each_loss(losses, targets,
                             [&](size_t i, float loss) { likelihoods[number * B + i / T] -= loss; });
               });
    model.add_up(likelihoods);
    ChoiceScore score;
    auto first = likelihoods.begin();
    for (const ChoiceExample& example : examples) {
        auto end = first + (ptrdiff_t)example.choices.size();
        score.add(example, {first, end});
        first = end;
    }
    return score;
}

inline nlohmann::ordered_json score_record(const ChoiceScore& score, const std::string& path) {
    return {{"choices", path},
            {"right", score.accuracy()},
            {"right_by_mean", score.accuracy_by_mean()},
            {"questions", score.examples}};
}

// Each share has its own standard error.
inline std::string score_text(const ChoiceScore& score, const std::string& path) {
    double by_sum = score.accuracy(), by_mean = score.accuracy_by_mean();
    return text("right %.1f%% +- %.1f by the sum of log-likelihoods, %.1f%% +- %.1f by their mean per token  "
                "(%s of %s)",
                100 * by_sum, 100 * score.standard_error(by_sum), 100 * by_mean,
                100 * score.standard_error(by_mean), counted(score.examples, "question").c_str(),
                path.c_str());
}

// ----------------------------------------------------------------------------
// the eval command

inline std::vector<NamedList> evaluation_sets(const EvalOptions& command) {
    return named_lists("--data", command.data);
}

// Sets the sizes of the batches in which the command evaluates a model.
inline void shape_evaluation(Options& model, const EvalOptions& command) {
    model.micro_batch = command.micro_batch;
    model.sequence_length = command.sequence_length;
    complete_sequence_length(model);
    check_micro_batch(model);
}

// Returns the log of the run that a model belongs to.
inline std::string log_of(const TrainedModel& model) {
    std::string run = run_of_checkpoint(model.reader.folder());
    if (run.empty()) {
        fail("--log: %s is not in a run directory; leave the option out, or name a run",
             model.reader.folder().c_str());
    }
    return log_path(run);
}

// Returns a score with the time added, in the form that the log of a run uses.
inline nlohmann::ordered_json with_time(nlohmann::ordered_json record) {
    record["time"] = utc_time();
    return record;
}

// The results of the command. They are printed as they are computed (JSON at the end) or, with --output,
// written to a file at the end; --log also adds them to the logs of their runs. Only the first rank prints
// and writes them.
class EvaluationResults {
public:
    EvaluationResults(const EvalOptions& command, bool is_root) : command_(command), is_root_(is_root) {}

    // Must be called for each run, in the order of the command line, before the first result, because a log
    // may not be writable.
    void open(const TrainedModel& model) {
        if (!is_root_) return;
        if (command_.log) logs_.push_back(std::make_unique<LogFile>(log_of(model)));
        runs_.push_back({{"run", command_.runs[runs_.size()]},
                         {"checkpoint", model.reader.folder()},
                         {"step", model.reader.index().step()},
                         {"results", nlohmann::ordered_json::array()}});
    }

    void begin_run() {
        run_++;
        if (is_root_ && runs_.size() > 1)
            say(text("%s, step %lld", command_.runs[run_].c_str(),
                     (long long)runs_[run_]["step"].get<int64_t>()));
    }

    // Score: DataScore or ChoiceScore; title: what was evaluated.
    template <typename Score>
    void add(const Score& score, const std::string& title) {
        if (!is_root_) return;
        nlohmann::ordered_json record = score_record(score, title);
        runs_[run_]["results"].push_back(record);
        say(score_text(score, title));
        if (command_.log)
            logs_[run_]->append(json_line({{"step", runs_[run_]["step"]}, {"eval", with_time(record)}}));
    }

    // Reports a note about the files of a run.
    void note(const std::string& words) {
        if (command_.format == EvalFormat::json || !command_.output.empty())
            fprintf(stderr, "note: %s\n", visible(words).c_str());
        else
            say("note: " + words);
    }

    void finish() {
        if (!is_root_) return;
        if (command_.format == EvalFormat::json)
            words_ = runs_.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
        if (!command_.output.empty())
            write_whole(command_.output, words_);
        else if (command_.format == EvalFormat::json)
            print("%s", words_.c_str());
    }

private:
    void say(const std::string& line) {
        if (command_.format == EvalFormat::json) return;
        words_ += line + "\n";
        if (command_.output.empty()) print("%s\n", line.c_str());
        fflush(stdout);
    }

    const EvalOptions& command_;
    const bool is_root_;
    size_t run_ = SIZE_MAX;  // the one being evaluated
    std::vector<std::unique_ptr<LogFile>> logs_;
    nlohmann::ordered_json runs_ = nlohmann::ordered_json::array();
    std::string words_;
};
