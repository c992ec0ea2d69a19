/*
Models that are run but not trained: how `sample` and `eval` cut a model over their processes, how the ranks
together compute texts and losses, and the two commands. train_gpt.cu implements the passes through a model as
ModelPasses; training runs use them too, for samples and questions.

A model is cut by --tp, --pp and --zero 3; `eval` also cuts sequences, by --cp. If --tp or --pp is not given,
the model is cut over the fewest ranks on which it fits. The remaining processes form further data ranks,
which divide the texts and batches among themselves. Only if no cut fits do tables move to a slower place.
*/
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/agreement.h"               // check_same_content
#include "comm/batches.h"                 // Batch, open_token_files
#include "comm/layout.h"                  // Layout, pipeline_split
#include "comm/memory_plan.h"             // MemoryPlan
#include "comm/mesh.h"                    // Mesh
#include "comm/placement.h"               // ranks_sharing_device
#include "comm/settings.h"                // Workload
#include "comm/world.h"                   // World
#include "data/commands/eval.h"           // LossSource, EvaluationResults
#include "data/commands/generation.h"     // TextGenerator, print_samples
#include "data/commands/prompt_reader.h"  // PromptReader
#include "data/commands/session.h"        // commands between prompts
#include "data/launch/command_line.h"     // content_of
#include "data/launch/trained_model.h"    // TrainedModel
#include "data/options/cut_rules.h"       // cut_refusal, complete_ranks
#include "data/tokens/token_record.h"     // check_token_records

// ----------------------------------------------------------------------------
// cutting a model

struct InferencePlan {
    Options options;  // the model's, with this cut
    Workload workload;
    Layout layout;
    ZeroSettings settings;
    MemoryPlan memory;
};

// Returns the options of a model that is cut over tp * cp * pp ranks; data ranks have copies of it or, with
// --zero 3, shards.
inline Options inference_options(Options model, int zero, int tp, int cp, int pp, int processes) {
    int data_ranks = std::max(processes / (tp * cp * pp), 1);
    static_cast<Cut&>(model) = {.tp = tp,
                                .cp = cp,
                                .pp = pp,
                                .dp = data_ranks,
                                .micro_batch = model.micro_batch,
                                .pp_chunks = 1,
                                .zero = zero,
                                .shard_group = zero == 3 ? data_ranks : 1,
                                .tp_overlap = 1,
                                .sequence_length = model.sequence_length,
                                .ngram_place = model.ngram_place};
    model.pp_layers = name_of(PipelineLayers::time);
    model.optimizer = OptimizerKind::adamw;  // not used; AdamW so that no groups are made for Muon
    return model;
}

// Returns the number of micro-batches that go through the stages together. With four per stage, stages idle
// for at most a fifth of the time.
inline int inference_micro_batches(int pp) {
    return pp == 1 ? 1 : 4 * pp;
}

// Returns where the tables of a model may be, the best place first. A run has them on the host because they
// are too large for the device; those of a run on disk may fit into memory here, where nothing is trained.
inline std::vector<TablePlace> inference_places(const Options& model) {
    if (model.ngram.empty()) return {model.ngram_place};
    if (model.ngram_place != TablePlace::device) return {TablePlace::host, TablePlace::disk};
    return {TablePlace::device, TablePlace::host, TablePlace::disk};
}

// For all ranks: determines how a model is cut, and where its tables are. shape(options) sets the batch sizes
// for a cut and returns the workload of its passes. free: what this rank may use. Refuses a cut that does not
// divide the model or does not fit into memory.
inline InferencePlan plan_inference(Options model, const InferenceCut& asked, const World& world,
                                    const std::function<Workload(Options&)>& shape, MemoryCapacity free,
                                    int cp = 1) {
    int processes = world.size(), most_tensor_ranks = world.most_on_a_host();
    auto options_of = [&](int tp, int pp) {
        Options options = inference_options(model, asked.zero, tp, cp, pp, processes);
        return std::pair{options, shape(options)};
    };
    world.on_all_ranks([&] {
        Options options = options_of(std::max(asked.tp, 1), std::max(asked.pp, 1)).first;
        options.dp = 0;
        complete_ranks(options, processes);
    });
    std::optional<InferencePlan> plan;  // the last one tried
    // the rest of the memory is for what the plan does not count
    const size_t cache = std::min((size_t)model.ngram_cache, (has_own_memory ? free.host : free.device) / 4);
    auto fits = [&](int tp, int pp) {
        auto [options, workload] = options_of(tp, pp);
        if (!cut_refusal(options, tp, cp, pp).empty()) return false;
        int micro_batches = workload.cache_length ? 1 : inference_micro_batches(pp);
        Layout layout = {mesh_shape(options),
                         1,
                         {PipelineSchedule::gpipe, pp, micro_batches, 1},
                         pipeline_split(options, {})};
        ZeroSettings settings = {.level = asked.zero,
                                 .training = false,
                                 .table_place = options.ngram_place,
                                 .table_dtype = options.ngram_dtype,
                                 .table_cache = cache,
                                 .table_dir = temporary_folder()};
        auto groups = [classes = memory_of_mesh(layout.mesh, world)](const Workload&) { return classes; };
        plan.emplace(options, workload, layout, settings,
                     memory_plan(options, workload, settings, layout, free, groups));
        return world.largest(!plan->memory.fits()) == 0;
    };
    for (TablePlace place : inference_places(model)) {
        model.ngram_place = place;
        for (int ranks = 1; ranks <= processes; ranks++) {
            for (int tp = ranks; tp >= 1; tp--) {
                if (processes % (ranks * cp) || ranks % tp) continue;
                if (asked.tp ? tp != asked.tp : tp > most_tensor_ranks) continue;
                if (asked.pp && ranks / tp != asked.pp) continue;
                if (fits(tp, ranks / tp)) return std::move(*plan);
            }
        }
    }
    world.on_all_ranks([&] { plan->memory.check(); });
    return std::move(*plan);
}

// ----------------------------------------------------------------------------
// texts and losses

// Returns the logits of the whole vocabulary, a row for each text, from the parts of the tensor ranks: values
// (ranks, texts, padded part).
inline TextGenerator::Rows joined_logits(const std::vector<floatX>& values, int texts, const Stage& stage,
                                         int ranks) {
    TextGenerator::Rows rows((size_t)texts);
    size_t part = values.size() / (size_t)(ranks * texts);
    for (int text = 0; text < texts; text++)
        for (int rank = 0; rank < ranks; rank++) {
            const floatX* begin = &values[(size_t)(rank * texts + text) * part];
            rows[text].insert(rows[text].end(), begin, begin + stage.vocab_of(rank).count);
        }
    return rows;
}

// A model that is cut over the ranks of a mesh.
struct ModelOnRanks {
    const ModelConfig& config;
    const Workload& workload;
    const Mesh& mesh;
    cudaStream_t stream;
    int slots;       // batches on the device at the same time
    int at_once;     // batches whose losses can be requested together
    bool needs_all;  // a pass needs all data ranks, to gather parameters or rows of tables
    size_t held;     // parameters on this rank
};

// The passes through a ModelOnRanks.
struct ModelPasses : ModelOnRanks {
    using Logits = TextGenerator::Rows;
    using Load = std::function<Batch(int number, int slot)>;
    using Take = std::function<void(int number, const std::vector<float>& losses)>;

    explicit ModelPasses(const ModelOnRanks& model) : ModelOnRanks(model) {}
    virtual ~ModelPasses() = default;
    // For all data ranks: fetches the rows of tables that the next passes, over `count` batches, look up.
    virtual void look_up(int count, const std::function<std::vector<NgramTokens>(int batch)>& tokens) = 0;
    // Runs a pass of one data rank. The first tensor and context rank of the last stage returns logits (V)
    // for the token after batch.last in each of the first `texts` sequences; others return nothing.
    virtual Logits logits(const Batch& batch, int texts) = 0;
    // Copies the first `length` tokens of text `from` in the key/value cache to text `to`, which begins with
    // the same tokens.
    virtual void copy_row(int from, int to, int length) = 0;
    // Computes the losses (B*T) of a context rank's tokens in each of `count` batches, and passes them to
    // take() on the first tensor rank of the last stage.
    virtual void losses(int count, const Load& load, const Take& take) = 0;
    // Throws if rows of tables could not be read. The results of passes before that are then wrong.
    virtual void check_tables() const = 0;
};

// Continues texts with a model. In each data rank, one process chooses tokens: the one with the logits.
class Generator final : public TextGenerator {
public:
    // The model sees at most as many tokens of a text as the cache holds (without a cache: as a sequence of a
    // batch holds), and never more than its context.
    Generator(ModelPasses& model, const std::vector<std::vector<int>>& prompts)
        : TextGenerator(prompts, most_seen(model), model.workload.cache_length > 0, model.mesh.shape.tp,
                        {model.mesh.data_ranks(), model.mesh.data_rank(), model.needs_all}),
          model_(model),
          numbers_(2 * (size_t)model.workload.B * model.workload.T + model.workload.cache_rows),
          chosen_(prompts.size()) {}

private:
    static int most_seen(const ModelPasses& model) {
        const Workload& w = model.workload;
        return std::min(w.cache_length ? w.cache_length : w.T, model.config.context);
    }

    // Tensor ranks divide the rows, so padding rows, which have no text, extend them to a multiple of the
    // tensor ranks.
    Rows logits(const std::vector<int>& tokens, int T, const std::vector<int>& pasts, int row,
                int last) override {
        size_t N = round_up(tokens.size(), (size_t)model_.mesh.shape.tp);
        std::vector<int> numbers = tokens, past = pasts;
        numbers.resize(N);
        if (!pasts.empty()) past.resize(N, -1);
        for (size_t n = 0; n < N; n++) {
            int position = (int)n % T + (pasts.empty() ? 0 : past[n]);
            numbers.push_back(std::clamp(position, 0, model_.config.context - 1));
        }
        numbers.insert(numbers.end(), past.begin(), past.end());
        copy_to_device(numbers_.data, numbers.data(), numbers.size(), model_.stream);
        const int* at = numbers_.data;
        Batch batch = {{.tokens = at, .positions = at + N}, (int)N / T, T, nullptr, row, last};
        batch.whole = true;
        if (!pasts.empty()) batch.past = at + 2 * N;
        // N-grams of a text in the cache also see the tokens before its newest one.
        model_.look_up(1, [&](int) {
            std::vector<NgramTokens> rows;
            for (int n = 0; n < (int)N; n += T) {
                bool cached = !past.empty() && past[(size_t)n] > 0;
                rows.push_back({cached ? &text(this->number(n / T)).back() : &numbers[(size_t)n], T,
                                cached ? past[(size_t)n] : 0});
            }
            return rows;
        });
        return model_.logits(batch, (int)tokens.size() / T);
    }

    void copy_row(int from, int to, int length) override { model_.copy_row(from, to, length); }

    // A text's new token is set on the rank that chooses it, and 0 on all others, so the sum over ranks is
    // the token. Floats represent every token exactly.
    void agree_on(std::vector<int>& tokens) override {
        const Communicator& world = model_.mesh.world();
        if (world.size() == 1) return;
        std::vector<float> chosen(tokens.begin(), tokens.end());
        copy_to_device(chosen_.data, chosen.data(), chosen.size(), model_.stream);
        world.all_reduce(chosen_.data, chosen.size(), Traffic::statistics, model_.stream);
        copy_to_host(chosen.data(), chosen_.data, chosen.size(), model_.stream, model_.mesh);
        std::ranges::transform(chosen, tokens.begin(), [](float token) { return (int)token; });
    }

    ModelPasses& model_;
    DeviceArray<int> numbers_;  // tokens, their positions, and each text's number of cached tokens
    DeviceArray<float> chosen_;
};

// Computes the losses of batches for evaluations. A data rank runs several batches together, so that the
// stages of a pipeline wait little for each other.
class BatchLosses final : public LossSource {
public:
    BatchLosses(ModelPasses& model, const World& world)
        : model_(model),
          world_(world),
          shape_{.B = model.workload.B,
                 .T = model.workload.sequence(),
                 .document_end = -1,
                 .reset_positions = false,
                 .contexts = model.workload.contexts,
                 .context = model.mesh.position[Axis::context]},
          numbers_((size_t)model.slots * shape_.ints()) {}

    int ranks() const override { return model_.mesh.data_ranks(); }

    void each(uint64_t count, const Load& load, const Take& take) override {
        uint64_t all = ranks(), rank = model_.mesh.data_rank(), most = model_.at_once;
        for (uint64_t first = 0, some; first < count; first += some * all) {
            some = std::min(most, ceil_div(count - first, all));
            NotedError error;
            // Reads all batches first, because tables are looked up before the first pass. Batches that
            // cannot be read are zeros.
            const auto [B, T] = std::pair(shape_.B, shape_.T);
            const ContextCut cut = shape_.cut(shape_.context);
            std::vector<std::vector<int>> read(some, std::vector<int>(shape_.ints()));
            bool documents = false;
            auto number = [&](int micro) { return first + micro * all + rank; };
            auto of_host = [&](int micro) {
                HostBatch batch = batch_at((const int*)read[micro].data(), B, T, cut.ranks);
                if (!documents) batch.doc_start = nullptr;
                return batch;
            };
            for (int micro = 0; micro < (int)some; micro++) {
                note_error(error, [&] {
                    HostBatch host = load(number(micro));
                    documents = host.doc_start;
                    if (cut.ranks > 1)
                        cut_batch(shape_, shape_.context, host, read[micro].data());
                    else
                        std::copy_n(host.tokens, read[micro].size(), read[micro].data());
                });
            }
            model_.look_up((int)some, [&](int micro) { return rows_of(of_host(micro), B, cut); });
            auto on_device = [&](int micro, int slot) { return copy(of_host(micro), slot); };
            model_.losses((int)some, on_device, [&](int micro, const std::vector<float>& losses) {
                // in the order of whole rows; the other targets are on other context ranks
                std::vector<int> targets((size_t)B * T, -1);
                std::vector<float> in_order(targets.size());
                for (size_t i = 0; i < losses.size(); i++) {
                    size_t at = i / cut.own() * T + cut.position((int)(i % cut.own()));
                    targets[at] = of_host(micro).targets[i], in_order[at] = losses[i];
                }
                if (error.empty()) note_error(error, [&] { take(number(micro), targets, in_order); });
            });
            raise_error(world_, error);
        }
    }

    void add_up(std::vector<double>& values) override { world_.sum(values); }

private:
    Batch copy(const HostBatch& host, int slot) {
        int* to = numbers_.data + (size_t)slot * shape_.ints();
        copy_to_device(to, host.tokens, shape_.ints(), model_.stream);
        return batch_on_device(to, host, shape_.B, shape_.T, shape_.contexts);
    }

    ModelPasses& model_;
    const World& world_;
    const BatchShape shape_;
    DeviceArray<int> numbers_;  // the batches' integers on the device
};

// ----------------------------------------------------------------------------
// the commands

// Makes a model with the weights of a checkpoint, for all ranks.
using LoadModel = std::shared_ptr<ModelPasses>(const InferencePlan&, const Mesh&, const CheckpointReader&,
                                               const World&);

// For all ranks: opens the newest checkpoint of a run, the same one on all.
inline std::unique_ptr<TrainedModel> open_model(const std::string& run, const std::string& tokenizer,
                                                const World& world) {
    std::string folder = text_from_root(world, [&] { return newest_checkpoint(run); });
    std::unique_ptr<TrainedModel> model;
    world.on_all_ranks([&] { model = std::make_unique<TrainedModel>(folder, tokenizer); });
    check_same_content(world, "--tokenizer", content_of(model->tokenizer.get(), model->options.tokenizer));
    return model;
}

// A model that a plan cuts over all ranks. The first rank prints the cut.
struct CutModel {
    InferencePlan plan;
    Mesh mesh;
    std::shared_ptr<ModelPasses> passes;

    CutModel(const TrainedModel& model, const InferenceCut& asked, const World& world,
             const std::function<Workload(Options&)>& shape, LoadModel* load, int cp = 1)
        : plan(check_place(plan_inference(model.options, asked, world, shape, memory_capacity(world), cp),
                           world)),
          mesh(world, plan.layout.mesh, nullptr,
               mesh_traffic(plan.options, plan.layout, plan.workload.B, plan.workload.sequence(),
                            plan.options.reduce_dtype)),
          passes(load(plan, mesh, model.reader, world)) {
        if (world.size() == 1) return;
        constexpr int parts = 1000000;
        size_t all = parameter_layout(plan.options).size();
        double most = world.largest((int)(passes->held * parts / all)) / (double)parts;
        const Cut& cut = plan.options;
        if (!world.is_root()) return;
        fprintf(
            stderr,
            "cut over %d ranks: --tp %d%s --pp %d%s, %s; each holds at most %.1f%% of the %s of weights\n",
            world.size(), cut.tp, cut.cp > 1 ? text(" --cp %d", cut.cp).c_str() : "", cut.pp,
            cut.zero == 3 ? " --zero 3" : "", counted(cut.dp, "data rank").c_str(), 100 * most,
            size_text(all * sizeof(floatX)).c_str());
    }

private:
    // For all ranks: says where tables go that do not fit into memory.
    static InferencePlan check_place(InferencePlan plan, const World& world) {
        if (plan.settings.table_place != TablePlace::disk) return plan;
        const std::string& folder = plan.settings.table_dir;
        if (world.is_root())
            fprintf(stderr, "tables do not fit into memory: their rows go to temporary files in %s\n",
                    folder.c_str());
        world.on_all_ranks([&] {
            if (access(folder.c_str(), W_OK | X_OK) != 0)
                fail(
                    "%s: no temporary file for tables can be created there: %s; set TMPDIR to another folder",
                    folder.c_str(), strerror(errno));
        });
        return plan;
    }
};

inline void sample(SampleOptions command, const World& world, LoadModel* load) {
    const auto opened = open_model(command.run, command.tokenizer, world);
    const TrainedModel& model = *opened;
    std::vector<std::string> prompts = nlohmann::json::from_cbor(text_from_root(world, [&] {
        std::string message;  // in CBOR: prompts that are not UTF-8 cannot be JSON text
        nlohmann::json::to_cbor(nlohmann::json(sample_prompts(model, command)), message);
        return message;
    }));
    int length = sample_length(model, command, prompts), texts = (int)prompts.size() * command.samples;
    auto shape = [&](Options& o) -> Workload {
        int seen = round_up(length, o.tp), rows = round_up(ceil_div(texts, o.dp), o.tp);
        o.micro_batch = 1, o.sequence_length = std::max(seen, rows);
        return {.B = 1,
                .T = o.sequence_length,
                .training = false,
                .loss_chunk = rows * o.tp,
                .cache_rows = command.cache ? rows : 0,
                .cache_length = command.cache ? seen : 0};
    };
    CutModel cut(model, command, world, shape, load);
    auto generator = [&](const std::vector<std::vector<int>>& prompts) {
        return Generator(*cut.passes, prompts);
    };
    auto answer = [&](const std::vector<std::string>& prompts, int number) {
        world.on_all_ranks([&] {
            std::string figures = print_samples(model, command, prompts, number, generator);
            cut.passes->check_tables();
            if (world.is_root()) fprintf(stderr, "%s\n", figures.c_str());
        });
    };
    if (!command.interactive) return answer(prompts, 0);
    time_limit = 0;  // the other ranks wait while the user types
    PromptReader reader(world.size() == 1, !command.seed_is_given);
    for (int number = 0;;) {
        std::string line = text_from_root(world, [&] { return reader.next(); });
        if (line.empty()) break;
        if (!obey(line, command, number, world.is_root())) answer({line}, number++);
    }
}

// A run to be evaluated, with all of its input: this is read first, so that bad input is refused at once, not
// after hours of work.
struct OpenedRun {
    std::unique_ptr<TrainedModel> model;
    std::vector<NamedList> sets;
    std::vector<std::unique_ptr<TokenLoader>> files;  // one for each set
    std::vector<ChoiceExample> questions;

    // For all ranks.
    OpenedRun(const std::string& run, const EvalOptions& command, const World& world,
              EvaluationResults& results)
        : model(open_model(run, command.tokenizer, world)), sets(evaluation_sets(command)) {
        const Options& o = model->options;
        const Tokenizer* tokenizer = model->tokenizer.get();
        world.on_all_ranks([&] {
            shape_evaluation(model->options, command);
            results.open(*model);
        });
        for (const NamedList& set : sets) {
            files.push_back(
                open_token_files(world, set.list, o.vocab_size, o.sequence_length, SampleOrder::sequential));
            world.on_all_ranks([&] {
                if (!world.is_root()) return;
                for (const std::string& note : check_token_records(*files.back(), tokenizer, o.document_end))
                    results.note(note);
            });
        }
        if (command.choices.empty()) return;
        questions = read_questions(command.choices, o, tokenizer, world);
        if (command.limit > 0) questions.resize(std::min(questions.size(), (size_t)command.limit));
    }
};

// For all ranks.
inline void evaluate_run(const OpenedRun& run, const EvalOptions& command, const World& world,
                         LoadModel* load, EvaluationResults& results) {
    Options o = run.model->options;
    // Models published by others are evaluated with attention across documents.
    if (!run.model->is_trained_here()) o.document_end = -1;
    auto shape = [](const Options& o) -> Workload {
        return {.B = o.micro_batch,
                .T = o.own_tokens(),
                .training = false,
                .loss_chunk = chosen_loss_chunk(o, o.micro_batch * o.own_tokens()),
                .contexts = o.cp};
    };
    CutModel cut(*run.model, command, world, shape, load, command.cp);
    BatchLosses losses(*cut.passes, world);
    for (size_t i = 0; i < run.sets.size(); i++) {
        const std::string& title = run.sets[i].title();
        DataScore score =
            evaluate_data(*run.files[i], title, command.limit, o, run.model->tokenizer.get(), losses);
        world.on_all_ranks([&] { cut.passes->check_tables(), results.add(score, title); });
    }
    if (run.questions.empty()) return;
    ChoiceScore score = evaluate_choices(run.questions, o, losses, true);
    world.on_all_ranks([&] { cut.passes->check_tables(), results.add(score, command.choices); });
}

inline void evaluate_runs(const EvalOptions& command, const World& world, LoadModel* load) {
    EvaluationResults results(command, world.is_root());
    std::vector<OpenedRun> runs;
    for (const std::string& run : command.runs) runs.emplace_back(run, command, world, results);
    for (const OpenedRun& run : runs) {
        results.begin_run();
        evaluate_run(run, command, world, load, results);
    }
    world.on_all_ranks([&] { results.finish(); });
}
