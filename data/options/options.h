/*
The options of each command as fields of its own struct, with their defaults. data/options/table.h has a row
for each name.
*/
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "data/base/dtype.h"  // Dtype
#include "data/options/model_config.h"

// ----------------------------------------------------------------------------
// choices

enum class TokenizerKind { none, bytes, file };
NAMES_OF(TokenizerKind, "none", "bytes");

enum class DataReader { rank, node };
NAMES_OF(DataReader, "rank", "node");

enum class PipelineSchedule { gpipe, one_f_one_b, interleaved, zero_bubble };
NAMES_OF(PipelineSchedule, "gpipe", "1f1b", "interleaved", "zero-bubble");

enum class PipelineLayers { time, memory, list };
NAMES_OF(PipelineLayers, "time", "memory");

enum class Offload { none, optimizer };
NAMES_OF(Offload, "none", "optimizer");

// The ranks whose messages a plan assumes are never overlapped with computation.
enum class Exposed { none, tensor, pipeline, data };
NAMES_OF(Exposed, "none", "tensor", "pipeline", "data");

enum class ResumeFrom { newest, place };
NAMES_OF(ResumeFrom, "auto");

// The place of the rows of n-gram tables.
enum class TablePlace { device, host, disk };
NAMES_OF(TablePlace, "device", "host", "disk");

enum class OptimizerKind { adamw, lamb, muon };
NAMES_OF(OptimizerKind, "adamw", "lamb", "muon");

// wsd is warm-up, stable, decay (Hu et al., MiniCPM, 2024).
enum class LearningRateSchedule { cosine, linear, constant, wsd };
NAMES_OF(LearningRateSchedule, "cosine", "linear", "constant", "wsd");

enum class RowDtype { automatic, fp32, bf16 };
NAMES_OF(RowDtype, "auto", "fp32", "bf16");

enum class MatmulDtype { automatic, fp32, bf16, fp8 };
NAMES_OF(MatmulDtype, "auto", "fp32", "bf16", "fp8");

// Each recomputes more than the one before it; automatic chooses one of them.
enum class Recompute { none, elementwise, mlp, block, automatic };
NAMES_OF(Recompute, "none", "elementwise", "mlp", "block", "auto");

enum class AttentionChoice { automatic, mma, wgmma };
NAMES_OF(AttentionChoice, "auto", "mma", "wgmma");

enum class CudaGraphs { automatic, on, off };
NAMES_OF(CudaGraphs, "auto", "on", "off");

enum class MatmulTuning { on, off, file };
NAMES_OF(MatmulTuning, "on", "off");

enum class ExportFormat { hf, llmc };
NAMES_OF(ExportFormat, "hf", "llmc");

NAMES_OF(Dtype, "fp32", "bf16");

enum class ExportDtype { stored, fp32, bf16 };
NAMES_OF(ExportDtype, "stored", "fp32", "bf16");

enum class EvalFormat { text, json };
NAMES_OF(EvalFormat, "text", "json");

enum class PlanFormat { text, json };
NAMES_OF(PlanFormat, "text", "json");

enum class ReportFormat { html, csv, tensorboard };
NAMES_OF(ReportFormat, "html", "csv", "tensorboard");

enum class SelftestFormat { text, json };
NAMES_OF(SelftestFormat, "text", "json");

enum class PreTokenizerRules { gpt2, llama3, qwen };
NAMES_OF(PreTokenizerRules, "gpt2", "llama3", "qwen");

// How often something is done: every `count` steps, every `count` seconds, or at the interval of lowest cost.
struct Interval {
    enum Unit { steps, seconds, best } unit;
    int count;  // 0: never; always 0 for best
};

// ----------------------------------------------------------------------------
// options

enum Command {
    command_tokenize,
    command_data,
    command_train,
    command_plan,
    command_launch,
    command_agent,
    command_selftest,
    command_sample,
    command_eval,
    command_inspect,
    command_report,
    command_export,
    command_import
};
constexpr int command_count = command_import + 1;

constexpr int usual_seed = 1337, usual_micro_batch = 4;

// How a step is cut over processes and into micro-batches. `plan` searches for the fastest cut within what is
// given.
struct Cut {
    int tp = 1, cp = 1, pp = 1;
    int dp = 0;  // 0: processes / (tp * cp * pp)
    int micro_batch = usual_micro_batch;
    PipelineSchedule pp_schedule = PipelineSchedule::one_f_one_b;
    int pp_chunks = 0;  // 0: 2 for an interleaved pipeline, otherwise 1
    int zero = 0;
    int shard_group = 0;  // 0: chosen automatically; always 1 with --zero 0
    Recompute recompute = Recompute::automatic;
    int tp_overlap = 0;          // 0: chosen by complete_layout
    int sequence_length = 0;     // 0: context
    long long global_batch = 0;  // tokens of one step; 0: as few as possible, or a plan's usual number
    Dtype reduce_dtype = Dtype::fp32;
    bool overlap = true;
    int prefetch = 1;
    Offload offload = Offload::none;
    TablePlace ngram_place = TablePlace::device;
    long long ngram_cache = 8LL << 30;  // bytes

    auto operator<=>(const Cut&) const = default;
    // Processes per data rank, and in the whole layout. dp 0 means any number, and counts as 1.
    long long ranks_of_data() const { return (long long)std::max(tp, 1) * cp * std::max(pp, 1); }
    long long ranks() const { return ranks_of_data() * std::max(dp, 1); }
    int own_tokens() const { return sequence_length / cp; }  // per sequence, on each rank
};

// The optimizer, and the number formats of a step.
struct Arithmetic {
    OptimizerKind optimizer = OptimizerKind::adamw;
    MatmulDtype matmul_dtype = MatmulDtype::automatic;
    bool fp8_fast_gradients = false;
    bool master_weights = true;
    bool stochastic_rounding = false;
    RowDtype ngram_dtype = RowDtype::automatic;
};

// The options of `train`; a checkpoint records those of the run that wrote it. complete_options() derives
// sizes that are left at 0 from the other options.
struct Options : ModelConfig, Cut, Arithmetic {
    static constexpr Command command = command_train;

    std::string model = "tiny";

    std::string train_data, val_data;  // comma-separated globs, with or without weights before them
    std::string tokenizer;             // none | bytes | a file; empty: that of the model
    int document_end = -1;             // token that ends a document; -1: documents are not separated
    bool reset_positions = false;
    DataReader data_reader = DataReader::rank;
    std::string config;  // a file of options; empty: none
    bool print_config = false;
    int max_time = 0;  // seconds; 0: no limit
    std::string run_dir;
    bool overwrite = false;
    int seed = usual_seed;

    int steps = 1000;
    double epochs = 0;       // 0: use steps
    std::string batch_ramp;  // 256k:1M:2000; empty: no ramp

    std::string pp_layers = name_of(PipelineLayers::time);  // or a list like 3,4,4,3
    float throttle_link = 0;                                // GB/s; 0: not throttled
    int communication_timeout = 600;                        // seconds; 0: no limit

    std::string resume;  // auto | a run directory | a checkpoint
    std::string init;    // a run directory | a checkpoint
    Interval save_every = {Interval::steps, 1000};
    double failure_rate = 0.474;  // per device in 1,000 days; 0: none
    int keep = 2;
    int keep_every = 0;
    int keep_best = 0;
    std::string best_set;  // a name in --val-data; empty: the first
    bool async_save = true;
    int disk_wait = 600;       // seconds
    std::string fallback_dir;  // empty: none

    float learning_rate = 6e-4f;
    LearningRateSchedule schedule = LearningRateSchedule::cosine;
    int warmup_steps = -1;  // -1: a twentieth of the run, at most 2000
    float final_learning_rate = 0.1f;
    float decay_fraction = 0.2f;
    float weight_decay = 0.1f;
    // multipliers
    float embedding_lr = 1, head_lr = 1, vector_lr = 1;
    float embedding_decay = 1, head_decay = 1;
    float beta1 = 0.9f;
    float beta2 = 0.95f;
    float adam_eps = 1e-8f;
    float muon_momentum = 0.95f;
    float ngram_lr = 0.02f;
    std::string ngram_dir;    // empty: in the run directory
    int ngram_prefetch = 1;   // steps
    int ngram_staleness = 0;  // likewise
    float gradient_clip = 1;

    double spike_sigma = 0;  // deviations; 0: nothing is a spike
    int spike_skips = 3;     // skips in a row; 0: no limit
    int check_replicas = 0;  // steps; 0: never
    int check_replay = 0;    // likewise

    AttentionChoice attention = AttentionChoice::automatic;
    CudaGraphs cuda_graphs = CudaGraphs::automatic;
    int loss_chunk = 0;

    int log_every = 1;
    bool quiet = false;
    int log_trust_ratios = 0;  // steps; 0: never
    bool timings = true;
    std::string trace_steps;  // 100:103; empty: none
    float peak_tflops = 0;
    std::string machine;  // a card or a file, to predict step times for; empty: the cards present
    std::string matmul_tuning = name_of(MatmulTuning::on);

    int val_every = 100;
    long long val_tokens = 128 << 10;  // 0: all
    int val_batches = 0;               // 0: use val_tokens
    std::string choices;               // a file of questions; empty: none
    int choices_every = 1000;          // steps; 0: never
    int sample_every = 0;
    int sample_tokens = 256;
    std::string prompt;
};

// The options of the model, the step and the layout are those of `train`.
struct PlanOptions : ModelConfig, Cut, Arithmetic {
    static constexpr Command command = command_plan;

    std::string model = "tiny";
    std::string machine;     // a card | a file; empty: the card present
    std::string measure;     // a file to write measurements to, instead of planning
    int gpus = 0;            // devices; must be given
    long long tokens = 0;    // the run's length; 0: not given
    double price = 0;        // one device-hour; 0: not given
    double failures = 3.79;  // per node in 1,000 days; 0: none
    double machine_failures = -1, network_failures = -1, software_failures = -1;  // -1: share of failures
    int restart_time = 300;                                                       // seconds
    int spares = 0;                                                               // nodes
    bool elastic = false;
    Interval save_every = {Interval::steps, 1000};
    int communication_timeout = 600;
    bool explain = false;  // explain the one layout that is given
    Exposed exposed = Exposed::none;
    PlanFormat format = PlanFormat::text;
};

// The job follows these options, after a `--`.
struct LaunchOptions {
    static constexpr Command command = command_launch;

    std::string hosts;                // a file; empty: this machine
    int ranks = 0;                    // 0: all slots except those of the spares; without hosts, 1
    int spares = 0;                   // hosts
    std::string launcher = "mpirun";  // mpirun | srun | a command line
    double hang_timeout = 0;          // seconds; 0: derived from the run's step times
    double grace = 30;                // seconds
    double check_timeout = 60;        // seconds
    bool selftest = false;            // each host tests itself before the job starts, and after failures
    int max_restarts = 20;
    double restart_window = 86400;  // seconds
    double backoff = 5;             // seconds
    std::string on_event;           // a command; empty: none
};

struct AgentOptions {
    static constexpr Command command = command_agent;

    std::string run_dir;
    double every = 1;         // seconds
    double hang_timeout = 0;  // seconds; 0: reports no hangs
};

struct SelftestOptions {
    static constexpr Command command = command_selftest;

    double seconds = 0;   // 0: the usual number for the device
    std::string run_dir;  // its disk is tested; empty: that of the folder for temporary files
    std::string measure;  // a file to write the measured machine to; empty: none
    SelftestFormat format = SelftestFormat::text;
    int communication_timeout = 60;  // seconds
};

struct TokenizeOptions {
    static constexpr Command command = command_tokenize;

    std::vector<std::string> inputs;  // files and folders of text
    std::string output;               // prefix of the names of the files to write
    std::string tokenizer;            // bytes | a file; empty: bytes, or the tokenizer that is trained
    bool overwrite = false;
    int seed = usual_seed;
    int train_tokenizer = 0;  // vocabulary size; 0: none is trained
    PreTokenizerRules pre_tokenizer = PreTokenizerRules::llama3;
    long long tokenizer_text = 1 << 30;  // bytes
    std::string text_field = "text";
    bool skip_binary = false;
    long long skip_bad = 0;      // lines of .jsonl
    int threads = 0;             // 0: one for each core
    double val_fraction = 0.01;  // 0: no validation files
    long long shard_tokens = 100 << 20;
};

struct DataOptions {
    static constexpr Command command = command_data;

    std::vector<std::string> inputs;  // token files
    std::string tokenizer;
    int document_end = -1;
};

// How a model is cut over processes for inference; left-over processes share the work as data ranks.
struct InferenceCut {
    int tp = 0, pp = 0;  // 0: the fewest ranks that the model fits on
    int zero = 0;        // 3: data ranks share the parameters
};

struct SampleOptions : InferenceCut {
    static constexpr Command command = command_sample;

    std::string run;        // a run directory | a checkpoint
    std::string tokenizer;  // empty: that of the run
    int seed = usual_seed;
    bool seed_is_given = false;  // not an option; if false, a session on a terminal draws a seed
    std::vector<std::string> prompt;
    std::string prompt_file;
    bool interactive = false;
    int tokens = 256;
    float temperature = 1;
    int top_k = 0;
    float top_p = 1;
    float min_p = 0;
    float repetition_penalty = 1;
    int samples = 1;
    std::vector<std::string> stop;
    bool cache = true;
};

struct EvalOptions : InferenceCut {
    static constexpr Command command = command_eval;

    std::vector<std::string> runs;  // run directories | checkpoints
    std::string tokenizer;          // empty: that of each run
    std::string data, choices;      // data to measure on
    int cp = 1;
    int micro_batch = usual_micro_batch;
    int sequence_length = 0;  // 0: the model's context
    int limit = 0;            // samples or examples; 0: all
    bool log = false;         // also write the results to the log of each run
    EvalFormat format = EvalFormat::text;
    std::string output;  // a file; empty: standard output
};

struct InspectOptions {
    static constexpr Command command = command_inspect;

    std::string run;  // a run directory | a checkpoint
    bool verify = false;
};

struct ReportOptions {
    static constexpr Command command = command_report;

    std::vector<std::string> runs;  // run directories
    std::string output;             // a file, or with --format tensorboard a folder; empty: in the first run
    ReportFormat format = ReportFormat::html;
};

struct ExportOptions {
    static constexpr Command command = command_export;

    std::string run;     // a run directory | a checkpoint
    std::string output;  // a folder, or a file of llm.c
    ExportFormat format = ExportFormat::hf;
    ExportDtype dtype = ExportDtype::stored;
};

struct ImportOptions {
    static constexpr Command command = command_import;

    std::string source;  // a model in the format of another program
    std::string output;  // a run directory
    bool overwrite = false;
};

// --resume auto
inline bool resumes_newest(const Options& o) {
    return kind_of<ResumeFrom>(o.resume) == ResumeFrom::newest;
}

// Returns whether positions count from the beginning of each document. Rotary attention depends only on the
// distance between positions, so --reset-positions changes nothing for it.
inline bool resets_positions(const Options& o) {
    return o.reset_positions && o.position == PositionKind::learned;
}
