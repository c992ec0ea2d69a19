/*
The options of the program as fields, with their defaults. data/options/table.h has a row for each.
*/
#pragma once

#include <string>
#include <vector>

#include "data/options/model_config.h"

enum Command {
    command_train = 1,
    command_sample = 2,
    command_tokenize = 4,
    command_eval = 8,
    command_data = 16,
    command_inspect = 32,
    command_export = 64,
    command_import = 128
};

// ----------------------------------------------------------------------------
// choices

enum class TokenizerKind { none, bytes, file };
template <>
inline constexpr const char* names_of<TokenizerKind>[] = {"none", "bytes"};

enum class DataReader { rank, node };
template <>
inline constexpr const char* names_of<DataReader>[] = {"rank", "node"};

enum class PipelineSchedule { gpipe, one_f_one_b, interleaved, zero_bubble };
template <>
inline constexpr const char* names_of<PipelineSchedule>[] = {"gpipe", "1f1b", "interleaved", "zero-bubble"};

enum class PipelineLayers { time, memory, list };
template <>
inline constexpr const char* names_of<PipelineLayers>[] = {"time", "memory"};

enum class Offload { none, optimizer };
template <>
inline constexpr const char* names_of<Offload>[] = {"none", "optimizer"};

// wsd is warm-up, stable, decay (Hu et al., MiniCPM, 2024).
enum class ResumeFrom { newest, place };
template <>
inline constexpr const char* names_of<ResumeFrom>[] = {"auto"};

enum class LearningRateSchedule { cosine, linear, constant, wsd };
template <>
inline constexpr const char* names_of<LearningRateSchedule>[] = {"cosine", "linear", "constant", "wsd"};

enum class MatmulDtype { bf16, fp8 };
template <>
inline constexpr const char* names_of<MatmulDtype>[] = {"bf16", "fp8"};

enum class Recompute { none, mlp, block };
template <>
inline constexpr const char* names_of<Recompute>[] = {"none", "mlp", "block"};

enum class AttentionChoice { automatic, mma, wgmma };
template <>
inline constexpr const char* names_of<AttentionChoice>[] = {"auto", "mma", "wgmma"};

enum class CudaGraphs { automatic, on, off };
template <>
inline constexpr const char* names_of<CudaGraphs>[] = {"auto", "on", "off"};

enum class MatmulTuning { on, off, file };
template <>
inline constexpr const char* names_of<MatmulTuning>[] = {"on", "off"};

enum class ExportFormat { hf, llmc };
template <>
inline constexpr const char* names_of<ExportFormat>[] = {"hf", "llmc"};

enum class ExportDtype { stored, fp32, bf16 };
template <>
inline constexpr const char* names_of<ExportDtype>[] = {"stored", "fp32", "bf16"};

enum class PreTokenizerRules { gpt2, llama3, qwen };
template <>
inline constexpr const char* names_of<PreTokenizerRules>[] = {"gpt2", "llama3", "qwen"};

// ----------------------------------------------------------------------------
// options

// Sizes left at 0 that can be worked out from the others are filled in by complete_options().
struct Options : ModelConfig {
    std::string model = "tiny";

    std::string train_data, val_data;  // globs, comma separated, with weights before them or without
    std::string tokenizer;             // none | bytes | a file; empty: as fits the command
    int document_end = -1;             // token that ends a document; -1: documents are not told apart
    bool reset_positions = false;
    DataReader data_reader = DataReader::rank;
    std::string run_dir;
    bool overwrite = false;
    int seed = 1337;

    int steps = 1000;
    int micro_batch = 4;
    int sequence_length = 0;     // 0: context
    long long global_batch = 0;  // tokens of one step; 0: as few as can be

    int dp = 0;  // 0: processes / (tp * pp)
    int tp = 1;
    int pp = 1;
    int tp_overlap = 0;  // 0: chosen by complete_layout
    PipelineSchedule pp_schedule = PipelineSchedule::one_f_one_b;
    int pp_chunks = 0;                                      // 0: 2 for an interleaved pipeline, else 1
    std::string pp_layers = name_of(PipelineLayers::time);  // or a list like 3,4,4,3
    int zero = 0;
    int shard_group = 0;  // 0: dp, and 1 where --zero 0 cuts nothing
    bool overlap = true;
    int prefetch = 1;
    Offload offload = Offload::none;
    float throttle_link = 0;          // GB/s; 0: as fast as it goes
    int communication_timeout = 600;  // seconds; 0: for ever

    std::string resume;  // auto | a run directory | a checkpoint
    std::string init;    // a run directory | a checkpoint
    int save_every = 1000;
    int keep = 2;
    int keep_every = 0;
    bool async_save = true;
    int disk_wait = 600;       // seconds
    std::string fallback_dir;  // empty: none

    float learning_rate = 6e-4f;
    LearningRateSchedule schedule = LearningRateSchedule::cosine;
    int warmup_steps = -1;  // -1: a twentieth of the run, at most 2000
    float final_learning_rate = 0.1f;
    float decay_fraction = 0.2f;
    float weight_decay = 0.1f;
    float beta1 = 0.9f;
    float beta2 = 0.95f;
    float adam_eps = 1e-8f;
    float gradient_clip = 1;

    MatmulDtype matmul_dtype = MatmulDtype::bf16;
    bool master_weights = true;
    bool stochastic_rounding = false;
    Recompute recompute = Recompute::none;
    AttentionChoice attention = AttentionChoice::automatic;
    CudaGraphs cuda_graphs = CudaGraphs::automatic;
    int loss_chunk = 0;

    int log_every = 1;
    float peak_tflops = 0;
    std::string matmul_tuning = name_of(MatmulTuning::on);

    int val_every = 100;
    int val_batches = 20;
    int sample_every = 0;
    int sample_tokens = 256;
    std::string prompt;

    std::string run;     // sample, eval, inspect, export: a run directory | a checkpoint
    std::string source;  // import: a model as others store it
    bool verify = false;
    ExportFormat format = ExportFormat::hf;
    ExportDtype dtype = ExportDtype::stored;

    int tokens = 256;
    float temperature = 1;
    int top_k = 0;
    float top_p = 1;
    float min_p = 0;
    float repetition_penalty = 1;
    int samples = 1;
    std::string prompt_file;
    bool interactive = false;
    std::vector<std::string> stop;
    bool cache = true;

    std::string data, choices;  // eval: what to measure on
    int limit = 0;              // samples or examples; 0: all
    bool log = false;           // whether the results go into the log of the run

    std::vector<std::string> inputs;  // tokenize, data: what to read
    std::string output;
    int train_tokenizer = 0;  // tokens of its vocabulary; 0: none is trained
    PreTokenizerRules pre_tokenizer = PreTokenizerRules::llama3;
    long long tokenizer_text = 1 << 30;  // bytes
    std::string text_field = "text";
    bool skip_binary = false;
    int threads = 0;  // 0: one for each core
    double val_fraction = 0.01;
    long long shard_tokens = 100 << 20;
};

// --resume auto
inline bool resumes_newest(const Options& o) {
    return kind_of<ResumeFrom>(o.resume) == ResumeFrom::newest;
}

// Says whether positions count from the beginning of each document. Heads that are rotated see no more of
// their positions than how far they are apart, so for those --reset-positions changes nothing.
inline bool resets_positions(const Options& o) {
    return o.reset_positions && o.position == PositionKind::learned;
}
