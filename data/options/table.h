/*
Every option of the program, one row each: the parser, --help, the log header and the record in run
directories and checkpoints are all driven by this table. An option has one name: learning_rate in the struct
and in JSON, --learning-rate on the command line.
*/
#pragma once

#include <type_traits>
#include <vector>

#include "data/options/option_row.h"
#include "data/options/options.h"

// Constrains the parameter, because nvcc drops a constraint that follows all parameters of a lambda.
template <typename O, typename Struct>
concept Of = std::is_same_v<std::remove_cvref_t<O>, Struct>;

inline const std::vector<OptionRow>& option_table() {
    using enum Resume;
    using enum Ranks;
    constexpr bool positional = true, later = true;
    constexpr double most = 2147483647;  // shown as no limit
    constexpr double most_ranks = 1048576;
    const Limits any_text = {}, on_off = {}, by_name = {};
    const auto range = [](double low, double high) { return Limits{low, high}; };
    const auto count = [](double low, double high) { return Limits{low, high, Suffixes::of_count}; };
    const auto size = [](double low, double high) { return Limits{low, high, Suffixes::of_size}; };
    const auto time = [](double low, double high) { return Limits{low, high, Suffixes::of_time}; };
#define FIELD(name) #name, [](auto&& options) -> decltype((options.name)) { return options.name; }
// The field of one struct only, for a name that means another option in other structs.
#define FIELD_OF(Struct, name)                                                                               \
#name, [](Of <Struct> auto&& options) -> decltype((options.name)) { return options.name; }
    static const std::vector<OptionRow> table = {
        {FIELD(model), "Model", alike, any_text,
         "Starting point: a preset's name, or a Hugging Face config.json or the folder that holds one. The "
         "other model options change it.",
         shape},
        {FIELD(layers), "Model", alike, range(1, 10000), "Transformer blocks.", shape},
        {FIELD(channels), "Model", alike, range(1, 131072), "Width of the residual stream.", shape},
        {FIELD(heads), "Model", alike, range(1, 4096), "Query heads of each attention layer.", shape},
        {FIELD(kv_heads), "Model", alike, range(0, 4096),
         "Key and value heads; fewer than --heads is grouped-query attention. 0: as many as --heads.", shape},
        {FIELD(head_size), "Model", alike, range(0, most_head_size), "Width of a head. 0: channels / heads.",
         shape},
        {FIELD(mlp_width), "Model", alike, range(0, 1048576), "Hidden width of the MLP. 0: 4 * channels.",
         shape},
        {FIELD(vocab_size), "Model", alike, range(1, 16777216), "Number of different tokens.", shape},
        {FIELD(context), "Model", alike, range(1, 16777216),
         "Positions the model is made for, in tokens. With --init, a model with RoPE can be given more or "
         "fewer.",
         shape},
        {FIELD(norm), "Model", alike, by_name, "Normalization before each sublayer.", shape},
        {FIELD(norm_eps), "Model", alike, range(1e-12, 1), "Added to the variance before its square root.",
         shape},
        {FIELD(position), "Model", alike, by_name,
         "Position encoding: a learned vector for each position, or rotation of queries and keys (RoPE).",
         shape},
        {FIELD(rope_theta), "Model", alike, range(1, 1e12), "RoPE: base of the wavelengths.", shape},
        {FIELD(rope_dims), "Model", alike, range(0, most_head_size),
         "RoPE: rotated dimensions of each head. 0: all.", shape},
        {FIELD(rope_scaling), "Model", alike, range(1, 1e6),
         "RoPE: stretch long wavelengths by this factor, as Llama 3.1 does. 1: no stretching.", shape},
        {FIELD(rope_low_frequency), "Model", alike, range(1e-3, 1e6),
         "RoPE scaling: wavelengths longer than the original context divided by this are stretched in full.",
         shape},
        {FIELD(rope_high_frequency), "Model", alike, range(1e-3, 1e6),
         "RoPE scaling: wavelengths shorter than the original context divided by this are left unchanged.",
         shape},
        {FIELD(rope_original_context), "Model", alike, range(1, 16777216),
         "RoPE scaling: the context before stretching, in tokens. If stretching begins with --init, the "
         "default is the context of its weights. 1: stretch all wavelengths (linear RoPE).",
         shape},
        {FIELD(mlp), "Model", alike, by_name,
         "Activation of the MLP: GELU by its tanh formula, GELU by the error function, or gated SiLU.",
         shape},
        {FIELD(bias), "Model", alike, on_off, "Biases in the matrix products and in layernorm.", shape},
        {FIELD(qkv_bias), "Model", alike, on_off,
         "With --bias off: biases for queries, keys and values only, as in Qwen2.", shape, !positional,
         later},
        {FIELD(window), "Model", alike, range(0, 16777216),
         "Sliding window: each token attends to this many tokens, itself included. 0: to all earlier ones.",
         shape},
        {FIELD(window_pattern), "Model", alike, any_text,
         "Layers with the window: 3:1 alternates three layers with a window and one full layer. Empty: all.",
         shape, !positional, later},
        {FIELD(block), "Model", alike, by_name,
         "MLP after attention, or both in parallel after a shared norm.", shape},
        {FIELD(tie_embeddings), "Model", alike, on_off, "Use the token embedding as the output matrix too.",
         shape},
        {FIELD(qk_norm), "Model", alike, on_off, "RMSNorm of each query and key head before RoPE.", shape},
        {FIELD(local_filter), "Model", alike, on_off,
         "Compute queries and keys from each token and the two before it, by two convolutions (Yuan 2.0).",
         shape, !positional, later},
        {FIELD(ngram), "Model", alike, any_text,
         "N-gram memory (Engram): 2,3 lets the last 2 and the last 3 tokens look up rows in tables; the rows "
         "are added to the residual stream. Empty: no n-gram memory.",
         shape, !positional, later},
        {FIELD(ngram_rows), "Model", alike, count(1, 1e12),
         "Rows of each table for each n in --ngram. The heads split them, with a prime number of rows each.",
         shape, !positional, later},
        {FIELD(ngram_width), "Model", alike, range(8, 4096), "Elements in a row of a table, a multiple of 8.",
         shape, !positional, later},
        {FIELD(ngram_heads), "Model", alike, range(1, 256),
         "Rows that each n-gram looks up, each with its own hash.", shape, !positional, later},
        {FIELD(ngram_gate), "Model", alike, on_off,
         "Let the residual stream decide how much of the looked-up rows is added to it. off: add them all.",
         shape, !positional, later},
        {FIELD(ngram_layers), "Model", alike, any_text,
         "Layers that have an n-gram table, counted from 0, as in 1,6. Empty: the second layer.", shape,
         !positional, later},

        {FIELD(machine), "Machine", own, any_text,
         "The machine to plan for, or to compare step times with: a card by its name, such as h100 or "
         "A100-40GB, in the nodes in which it is usually sold; cpu; or a .json file that describes other "
         "devices and nodes (see the README). Empty: the cards of this machine.",
         not_stored},
        {FIELD_OF(PlanOptions, measure), "Machine", alike, any_text,
         "Measure the devices and links of the ranks that run this command, write them to this .json file "
         "for --machine, and plan nothing."},
        {FIELD(gpus), "Machine", alike, range(0, most_ranks),
         "Number of devices that you have. A layout may leave some idle if that is faster."},
        {FIELD(price), "Machine", alike, range(0, 1e6),
         "Price of one device for one hour, in any currency. 0: unknown."},
        {FIELD(failures), "Failures", alike, range(0, 1e6),
         "Failures that end a run, per 1,000 node-days. The default is that of Llama 3 on 16,384 devices. 0: "
         "none."},
        {FIELD(machine_failures), "Failures", alike, range(-1, 1e6),
         "Failures that break a node, which is then replaced, per 1,000 node-days. -1: 73% of --failures, as "
         "for Llama 3."},
        {FIELD(network_failures), "Failures", alike, range(-1, 1e6),
         "Failures of the network, per 1,000 node-days. -1: 12% of --failures."},
        {FIELD(software_failures), "Failures", alike, range(-1, 1e6),
         "Failures of software, per 1,000 node-days. -1: 15% of --failures."},
        {FIELD(restart_time), "Failures", alike, range(0, most),
         "Seconds from the end of a run until it trains again: starting processes, connecting, loading the "
         "checkpoint."},
        {FIELD_OF(PlanOptions, spares), "Failures", alike, range(0, most_ranks),
         "Spare nodes that replace broken ones. Without a spare, a replacement takes half an hour."},
        {FIELD(elastic), "Failures", alike, on_off,
         "While a node is missing, keep training with one data rank fewer: a checkpoint loads on any number "
         "of data ranks."},
        {FIELD_OF(PlanOptions, tokens), "Run", alike, count(0, 1e16),
         "Tokens to train on; they determine days, cost and --steps. 0: unknown."},
        {FIELD(explain), "Output", alike, on_off,
         "Report only on the given layout, whether it fits or not. Options left out have the same defaults "
         "as in train."},
        {FIELD(exposed), "Output", alike, by_name,
         "Plan as if messages of this kind were never hidden behind computation, which shows what hiding "
         "them is worth. train hides all of them, or none with --overlap off."},
        {FIELD_OF(PlanOptions, format), "Output", alike, by_name, "A table and sentences, or JSON."},

        {FIELD(hosts), "Hosts", alike, any_text,
         "Host file in mpirun's format: one line `node1 slots=8` per host, with its number of ranks; # "
         "begins a comment. Empty: the nodes and tasks of the surrounding Slurm or PBS job "
         "(SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE, or PBS_NODEFILE), or this machine."},
        {FIELD(ranks), "Hosts", alike, range(0, most_ranks),
         "Number of processes. Hosts are filled in the order of the host file; those left over are spares. "
         "0: one per slot of all hosts except the last --spares; on this machine, one."},
        {FIELD_OF(LaunchOptions, spares), "Hosts", alike, range(0, most_ranks),
         "Hosts to hold back as spares, which replace hosts that fail their check. Once no spare is left, "
         "the job continues with fewer data ranks and the same batch."},
        {FIELD(launcher), "Hosts", alike, any_text,
         "Program that starts processes: mpirun, srun, or a command line in which {hosts} is replaced by the "
         "host file, {names} by the host names separated by commas, and {nodes} and {ranks} by the numbers "
         "of hosts and ranks. If a command line that begins with mpirun or srun leaves any of these out, "
         "they are added, as for 'mpirun --oversubscribe --mca btl_tcp_if_include eth0'. The launcher starts "
         "the job, and single-rank commands on individual hosts."},
        {FIELD(hang_timeout), "Failures", alike, range(0, most),
         "Seconds without progress on any rank before {launch: the job is ended and }the rank that blocks "
         "progress is named{launch: ; until the first step, at least a minute}. {launch: 0: twenty times the "
         "longest recent step, at least a minute; ten minutes while a job starts, and --disk-wait more while "
         "it saves.}{agent: 0: never.}"},
        {FIELD_OF(AgentOptions, run_dir), "Run", own, any_text, "Run directory to watch."},
        {FIELD(every), "Run", own, range(0.01, 3600), "Seconds between lines."},
        {FIELD(grace), "Failures", alike, range(0, most),
         "Seconds between the SIGTERM and the SIGKILL that end a hung job."},
        {FIELD(check_timeout), "Failures", alike, range(1, most),
         "Seconds within which a host must run a small command. Every host is checked before the job starts "
         "and after each failure; one that fails is set aside, and checked again after the next failure."},
        {FIELD(selftest), "Failures", alike, on_off,
         "Run train_gpt selftest on every host, with all its slots, before the job starts and after each "
         "failure, and set aside hosts that it names as suspects. Takes a minute with GPUs."},
        {FIELD(max_restarts), "Failures", alike, range(0, most),
         "Restarts within --restart-window after which launch gives up."},
        {FIELD(restart_window), "Failures", alike, range(1, most),
         "Length in seconds of the window for --max-restarts."},
        {FIELD(backoff), "Failures", alike, range(0, 3600),
         "Seconds to wait before a restart; doubled after each restart that made no progress, up to an "
         "hour."},
        {FIELD(on_event), "Failures", alike, any_text,
         "Command line for /bin/sh, run at each incident and at the end, with the incident as JSON on its "
         "standard input and in the variable TRAIN_GPT_INCIDENT. launch does not wait for it, except for up "
         "to 2 seconds at the end. If it fails by then, launch prints its exit code and the last lines of "
         "its errors."},
        {FIELD(seconds), "Selftest", alike, range(0, 3600),
         "Approximate seconds: half of them for matrix products, a fifth for memory patterns. 0: 60 with "
         "GPUs, 2 without."},
        {FIELD_OF(SelftestOptions, run_dir), "Selftest", alike, any_text,
         "Folder whose disk is tested: the one that will hold runs and checkpoints. Empty: the folder for "
         "temporary files, $TMPDIR or /tmp."},
        {FIELD_OF(SelftestOptions, measure), "Output", alike, any_text,
         "If the ranks are healthy, also measure what a plan needs, and write it, with the rate of the disk, "
         "to this .json file for train_gpt plan --machine."},
        {FIELD_OF(SelftestOptions, format), "Output", alike, by_name,
         "A table, or JSON: the rates of all ranks and links, and the suspects."},

        {FIELD(train_data), "Data", alike, any_text,
         "Token files to train on, .bin of llm.c (train_gpt tokenize makes them) or .idx of Megatron: paths "
         "or glob patterns, separated by commas; with weights, a blend: 0.7:web_*.bin,0.3:code.idx.",
         overridable_noted},
        {FIELD(val_data), "Data", alike, any_text,
         "Token files for the validation loss, in the form of --train-data. Given several times with names, "
         "as in web=web_*.bin and code=code_*.bin, each is a set with its own loss. Empty: no validation.",
         overridable_noted},
        {FIELD(val_tokens), "Data", alike, count(0, 1e12),
         "Number of tokens at the start of each set of --val-data that a validation uses: the same for any "
         "batch and layout, so that the losses of several runs can be compared. 0: all.",
         overridable_noted},
        {FIELD(val_batches), "Data", alike, range(0, 1048576),
         "Instead of --val-tokens: the tokens of this many batches, each of the --global-batch that the run "
         "begins with. 0: use --val-tokens.",
         not_stored},
        {FIELD(tokenizer), "Data", own, any_text,
         "Turns text into tokens: none, bytes (one token per byte), a tokenizer.json, or a tiktoken rank "
         "file as ENCODING:FILE. {train: It sets the vocabulary size and the document end.} Empty: {train: "
         "that of the model}{tokenize: bytes}{sample eval: that of the run}{data: none}.",
         tokens},
        {FIELD(document_end), "Data", alike, range(-1, 16777215),
         "Token that ends a document; attention does not cross it. -1: ignore document boundaries.", tokens},
        {FIELD(reset_positions), "Data", alike, on_off,
         "Count positions from the beginning of each document. This matters for learned positions only: "
         "rotary ones depend on distances.",
         overridable_noted},
        {FIELD(data_reader), "Data", alike, by_name,
         "Which processes read the token files: each rank its own share, or one process per machine for all "
         "its ranks, so that a shared file system has one reader per machine. The batches are the same.",
         not_stored},

        {FIELD(config), "Run", own, any_text,
         "File with values for options that the command line leaves out: lines such as learning-rate = 3e-4, "
         "as printed by --print-config (# begins a comment), or a run's options.json, except for options "
         "that apply to one start, or that the run derived from its number of ranks and its layout.",
         not_stored},
        {FIELD(print_config), "Run", alike, on_off,
         "Print all options that the run would have, in the form that --config reads, and do not train. "
         "Those that it derives from its number of ranks and its layout are left out.",
         not_stored},
        {FIELD_OF(Options, run_dir), "Run", own, any_text,
         "Folder for the log, the options, the samples and the checkpoints. Empty: that of the run that "
         "--resume names, else runs/ followed by the model's name.",
         not_stored},
        {FIELD(overwrite), "Run", alike, on_off, "Replace an earlier run in the same folder.", not_stored},
        {FIELD(seed), "Run", alike, range(0, most),
         "Seed of all random numbers: the same seed gives the same result, bit for bit.", fixed},
        {FIELD(log_every), "Run", alike, count(1, most),
         "Steps between lines on the screen, each with means over the steps since the previous line; "
         "log.jsonl has every step."},
        {FIELD(quiet), "Run", own, on_off,
         "Show only warnings and errors (standard error) and the last line of the run; log.jsonl has the "
         "rest.",
         not_stored},
        {FIELD(log_trust_ratios), "Run", alike, count(0, most),
         "--optimizer lamb: steps between records of all matrices' trust ratios in log.jsonl. 0: none."},
        {FIELD(timings), "Run", alike, on_off,
         "Record how each rank's device spends its time: log.jsonl then has the phases of every step on the "
         "fastest and the slowest rank, ranks.jsonl those of all ranks, and slow ranks are named.",
         not_stored},
        {FIELD(trace_steps), "Run", alike, any_text,
         "First and last step to trace on all ranks, as in 100:103. The timeline, trace_000100.json.gz in "
         "the run directory, is for ui.perfetto.dev. Empty: none.",
         not_stored},
        {FIELD(peak_tflops), "Run", alike, range(0, 1e6),
         "Peak TFLOP/s that MFU is relative to. 0: the card's published dense rate, or an estimate.",
         not_stored},
        {FIELD(matmul_tuning), "Run", alike, any_text,
         "bf16 builds for GPUs: before the first step, time several cuBLASLt algorithms for each matrix "
         "product of the model and use the fastest, which may change the last bits of results. The choice is "
         "stored in the run directory, in matmul_algorithms.json, and reused when the run resumes. A file: "
         "store it there, so that several runs share it and agree bit for bit. off: use what cuBLASLt "
         "proposes."},
        {FIELD(steps), "Run", alike, count(1, most), "Optimizer steps of the run.", overridable_noted},
        {FIELD(epochs), "Run", alike, range(0, 1e6),
         "Instead of --steps: passes over --train-data; for a blend, over as many tokens as all its sources "
         "hold. 0: use --steps.",
         not_stored},
        {FIELD(max_time), "Run", alike, time(0, most),
         "For jobs with a time limit: seconds from the start of the process within which the run saves and "
         "ends, as if asked to stop. No step begins that would leave too little time to save, judging by how "
         "long steps, validations and saves have taken. 0: no limit.",
         not_stored},
        {FIELD(micro_batch), "Run", alike, range(1, 1048576),
         "Sequences that each data rank passes through the model at once; larger is faster and needs more "
         "memory."},
        {FIELD(sequence_length), "Run", alike, range(0, 16777216), "Tokens of each sequence. 0: --context.",
         fixed},
        {FIELD(global_batch), "Run", alike, size(0, 1e12),
         "Tokens of each step, accumulated over several micro-batches if necessary. 0: {train: one "
         "micro-batch per data rank, or --pp of them with --pp-schedule interleaved}{plan: about as many as "
         "GPT-3 used at the same size}.",
         overridable_noted},
        {FIELD(batch_ramp), "Run", alike, any_text,
         "Growing batch, START:END:STEPS, as in 256k:1M:2000: it grows from START tokens per step to END, "
         "which is --global-batch, within STEPS steps, in multiples of START that last equally long.",
         overridable_noted},

        {FIELD(resume), "Checkpoints", alike, any_text,
         "Continue from a checkpoint: its folder, or a run directory for the newest one. auto: the newest "
         "one of --run-dir, or a new run if there is none, so that the same command starts and restarts a "
         "run. Options that are not given are those of the checkpoint, which may come from another number of "
         "processes and another layout. If its --tp and --pp do not fit the processes, they are lowered, and "
         "the run says so.",
         not_stored},
        {FIELD(init), "Checkpoints", alike, any_text,
         "Begin a new run with the weights of a run, a checkpoint or an import: it takes the model and its "
         "tokenizer from there and starts the optimizer afresh.",
         not_stored},
        {FIELD(save_every), "Checkpoints", alike, count(0, most),
         "Steps between checkpoints, or a time, as in 90s, 10m and 2h. auto: the interval that costs least "
         "(Young and Daly), from how long a save makes training wait and from --failure-rate; at least twice "
         "the time that writing takes, at most an hour. 0: only the checkpoint that every run writes when it "
         "ends or is asked to stop."},
        {FIELD(failure_rate), "Checkpoints", alike, range(0, 1e6),
         "Failures that end a run, per 1,000 device-days, for --save-every auto. The default is that of "
         "Llama 3: 419 in 54 days on 16,384 devices. 0: none."},
        {FIELD(keep), "Checkpoints", alike, range(0, most),
         "Checkpoints to keep, newest first; older ones are deleted once a new one is safely on disk. 0: "
         "all."},
        {FIELD(keep_every), "Checkpoints", alike, count(0, most),
         "Steps between checkpoints that are kept for good; a multiple of --save-every. 0: none."},
        {FIELD(keep_best), "Checkpoints", alike, range(0, most),
         "Checkpoints with the lowest validation losses to keep, besides those of --keep. A validation that "
         "finds such a loss also saves a checkpoint. 0: none."},
        {FIELD(best_set), "Checkpoints", alike, any_text,
         "The set of --val-data whose losses --keep-best compares. Empty: the first."},
        {FIELD(async_save), "Checkpoints", alike, on_off,
         "Keep training while a checkpoint is written from a copy in host memory. off: wait for the disk and "
         "save that memory."},
        {FIELD(disk_wait), "Checkpoints", alike, range(0, most),
         "Seconds for which a run retries if it cannot write its last checkpoint; it first saves the weights "
         "alone, if they fit. If the disk is still full after this time, it deletes older checkpoints, "
         "except "
         "the newest complete one and those kept by --keep-every or --keep 0."},
        {FIELD(fallback_dir), "Checkpoints", alike, any_text,
         "Folder that receives the last checkpoint of a run, without delay, if it cannot be written to the "
         "run directory; several runs may share it. --resume auto looks there too, even if the option is not "
         "given again. With several machines, use a folder that they all share."},

        {FIELD(optimizer), "Optimizer", alike, by_name,
         "Optimizer. lamb: AdamW's update, scaled for each matrix to the norm of its weights, for batches "
         "several times larger; it needs its own learning rates, around 0.01. muon: for the blocks' "
         "matrices, steps along an orthogonalized mean of the gradient, with one moment instead of two; for "
         "the rest, AdamW. It works with AdamW's learning rates.",
         fixed},
        {FIELD(learning_rate), "Optimizer", alike, range(0, 10), "Peak learning rate.", overridable_noted},
        {FIELD(schedule), "Optimizer", alike, by_name,
         "Learning rate schedule after the warm-up; wsd stays at the peak and decays at the end of the run.",
         overridable_noted},
        {FIELD(warmup_steps), "Optimizer", alike, count(-1, most),
         "Steps over which the learning rate rises from 0 to its peak. -1: a twentieth of the run, at most "
         "2000.",
         overridable_noted},
        {FIELD(final_learning_rate), "Optimizer", alike, range(0, 1),
         "Learning rate at the last step, as a fraction of the peak.", overridable_noted},
        {FIELD(decay_fraction), "Optimizer", alike, range(0, 1),
         "wsd: fraction of the run over which the learning rate decays.", overridable_noted},
        {FIELD(weight_decay), "Optimizer", alike, range(0, 10),
         "Weight decay of the matrices; biases and norms do not decay.", overridable_noted},
        {FIELD(embedding_lr), "Optimizer", alike, range(0, 1e4),
         "Learning rate of the embeddings, as a multiple of --learning-rate. Tied embeddings are also the "
         "output matrix.",
         overridable_noted},
        {FIELD(head_lr), "Optimizer", alike, range(0, 1e4),
         "Learning rate of an untied output matrix, as a multiple of --learning-rate.", overridable_noted},
        {FIELD(vector_lr), "Optimizer", alike, range(0, 1e4),
         "Learning rate of biases and norms, as a multiple of --learning-rate.", overridable_noted},
        {FIELD(embedding_decay), "Optimizer", alike, range(0, 1e4),
         "Decay of the embeddings, as a multiple of --weight-decay.", overridable_noted},
        {FIELD(head_decay), "Optimizer", alike, range(0, 1e4),
         "Decay of an untied output matrix, as a multiple of --weight-decay.", overridable_noted},
        {FIELD(beta1), "Optimizer", alike, range(0, 0.999999),
         "AdamW, LAMB: decay rate of the mean of gradients.", overridable_noted},
        {FIELD(beta2), "Optimizer", alike, range(0, 0.999999),
         "AdamW, LAMB: decay rate of the mean of squared gradients.", overridable_noted},
        {FIELD(adam_eps), "Optimizer", alike, range(1e-20, 1),
         "AdamW, LAMB: added to the root of the mean square.", overridable_noted},
        {FIELD(muon_momentum), "Optimizer", alike, range(0, 0.999999),
         "Muon: decay rate of the mean of gradients, for the blocks' matrices.", overridable_noted},
        {FIELD(ngram_lr), "Optimizer", alike, range(0, 10),
         "Peak learning rate of the tables' rows, which row-wise AdaGrad updates with any --optimizer.",
         overridable_noted, !positional, later},
        {FIELD(gradient_clip), "Optimizer", alike, range(0, 1e9),
         "Scale gradients down to this global norm if theirs is larger. 0: never.", overridable_noted},

        {FIELD(spike_sigma), "Checks", alike, range(0, 1e6),
         "Skip the update of a step whose loss, or the logarithm of whose gradient norm, exceeds the running "
         "mean by more than this number of running standard deviations; the first 20 steps are never "
         "skipped. 6 is usual. 0: never skip.",
         overridable_noted},
        {FIELD(spike_skips), "Checks", alike, count(0, most),
         "--spike-sigma: after this number of skipped steps in a row, go back to the checkpoint before them "
         "and continue with the samples after them. 0: never go back.",
         overridable_noted},
        {FIELD(check_replicas), "Checks", alike, count(0, most),
         "Steps between comparisons, by 64-bit hashes, of data that several ranks hold: weights, and the "
         "optimizer state where shard groups replicate it. A rank that differs from the majority is named, "
         "and the run ends. Checkpoints are compared too, before they are written. 0: never."},
        {FIELD(check_replay), "Checks", alike, count(0, most),
         "Steps between comparisons of what data ranks compute: besides training, each rank processes a "
         "micro-batch of its own and one of another rank, and their gradients must be bit-identical. 0: "
         "never."},
        {FIELD(matmul_dtype), "Memory", alike, by_name,
         "Number format of the inputs of matrix products; sums are fp32, or nearly so in fp8. auto: the "
         "build's format, but bf16 in training on CPUs with AMX. fp32, bf16: that format. GPU builds have "
         "only one of them. In CPU builds, bf16 needs a processor with bf16 products and is less precise; "
         "weights, activations and gradients stay fp32. fp8: in blocks only, in bf16 builds on Ada, Hopper "
         "or later; not with --zero 3. fp8 copies of weights are kept unless activations are recomputed.",
         overridable_noted},
        {FIELD(fp8_fast_gradients), "Memory", alike, on_off,
         "fp8: let products for gradients accumulate in the roughly 14 bits of the tensor cores, as those of "
         "the forward pass do; faster and less precise.",
         overridable_noted},
        {FIELD(master_weights), "Memory", alike, on_off,
         "bf16 builds: keep an fp32 copy of the weights for the optimizer, 4 bytes per parameter.",
         overridable_noted},
        {FIELD(stochastic_rounding), "Memory", alike, on_off,
         "bf16 builds: round updated weights up or down at random, so that small updates are not lost.",
         overridable_noted},
        {FIELD(ngram_dtype), "Memory", alike, by_name,
         "Number format of the rows of tables, in any build. auto: the build's. bf16 takes half the "
         "memory of fp32; updated rows are rounded up or down at random, so that small updates are not lost.",
         overridable_noted, !positional, later},
        {FIELD(recompute), "Memory", alike, by_name,
         "Activations that the backward pass recomputes to save memory; the result is the same. none: keep "
         "all. elementwise: recompute the outputs of norms and of activation functions, except those fused "
         "into a matrix product; in fp8, keep these too, but not the copies of weights; no product is "
         "repeated. mlp: keep nothing of the MLP. block: keep only the input of each block. auto: the first "
         "of these that fits, which is the fastest."},
        {FIELD(loss_chunk), "Memory", alike, range(0, 16777216),
         "Tokens whose logits exist at the same time. 0: chosen by size."},

        {FIELD(attention), "Speed", alike, by_name,
         "GPUs: which attention kernels to use; they differ in rounding. wgmma: Hopper's, in bf16, for head "
         "sizes that are a multiple of 8 up to 128. mma: for any card since Ampere. auto: wgmma if possible.",
         overridable_noted},
        {FIELD(cuda_graphs), "Speed", alike, by_name,
         "Launch each pass over a micro-batch as one unit (CUDA graphs) instead of kernel by kernel; the "
         "result is the same. auto: in a single process with a GPU, if layers are so small that launching "
         "kernels takes longer than running them."},

        {FIELD(dp), "Layout", alike, range(0, most_ranks),
         "Data parallelism: ranks (processes) that train on different sequences and sum their gradients. "
         "They take turns with the micro-batches of a step, so any number of them trains on the same batch. "
         "0: the number of processes / (tp * cp * pp).",
         layout},
        {FIELD(tp), "Layout", alike, range(0, most_ranks),
         "Tensor parallelism: ranks that share each layer, each with a part of the heads, of the MLP and, "
         "between them, of the sequence. They communicate in every layer, so keep them within one machine. "
         "It must divide --heads, --channels, --mlp-width and --sequence-length / cp. 0, or auto: {train "
         "plan: train uses the layout that plan finds fastest for its ranks, on --machine; layout options "
         "that are not at their defaults are kept.}{sample eval: the fewest ranks that the model fits on; "
         "ranks left over share the work.}",
         overridable_noted},
        {FIELD(cp), "Layout", alike, range(1, most_ranks),
         "Context parallelism: ranks that share each sequence, for sequences whose activations do not fit on "
         "one. Each rank has the same number of tokens, in an early and a late piece, so that all ranks see "
         "equally many keys; attention gathers the keys and values of all. --sequence-length must be a "
         "multiple of 128 * cp.{train plan:  What --zero shards is split over context ranks too; with --zero "
         "0, they split the optimizer state.}",
         overridable_noted},
        {FIELD(pp), "Layout", alike, range(0, most_ranks),
         "Pipeline parallelism: stages that divide the layers, in order, each on its own ranks. They send "
         "each other only the activations between layers, so stages may be far apart{train plan: ; but they "
         "wait for each other at the beginning and end of a step, less with more micro-batches in "
         "--global-batch}. 0, or auto: as for --tp.",
         overridable_noted},
        {FIELD(tp_overlap), "Layout", alike, range(0, 64),
         "--tp: pieces into which the rows around a product are cut, so that one is sent while another is "
         "computed. More pieces hide more of the communication, but make smaller, slower products. It must "
         "divide the rows of a rank, micro-batch * sequence length / cp / tp. 0: the largest of 4, 3, 2 and "
         "1 that does.",
         layout},
        {FIELD(pp_schedule), "Layout", alike, by_name,
         "--pp: order of the work on a stage. gpipe: all micro-batches forward, then all backward, which "
         "keeps the activations of all. 1f1b: backward as soon as possible, which keeps those of at most "
         "--pp micro-batches. interleaved: 1f1b with --pp-chunks groups of layers per stage, so that stages "
         "wait less and send more; best if a rank's micro-batches are a multiple of --pp. zero-bubble: 1f1b "
         "that defers weight gradients to times when it would wait, which takes memory; with --zero 2 or 3 "
         "it sends gradients twice.",
         overridable_noted},
        {FIELD(pp_chunks), "Layout", alike, range(0, 10000),
         "--pp-schedule interleaved: groups of layers per stage. More groups make stages wait less and send "
         "more. 0: 2 for an interleaved pipeline, else 1.",
         layout},
        {FIELD(pp_layers), "Layout", alike, any_text,
         "--pp: number of layers in each part. time: the slowest part, which sets the pace, is as fast as "
         "possible; memory: the fullest stage needs as little memory as possible, to fit a larger model; or "
         "pp * pp-chunks numbers in the order of the layers, such as 3,4,4,3.",
         layout},
        {FIELD(zero), "Layout", alike, range(0, 3),
         "ZeRO: what {train plan: a shard group holds once, instead of every data rank holding it whole. 0: "
         "nothing, 1: the optimizer state, 2: the gradients too, 3: the parameters too. Each level saves "
         "memory; 1 sends as much as 0; 2 and 3 send more if a step has several micro-batches.}{sample eval: "
         "the data ranks hold once, instead of each holding it whole. 0: nothing, 3: the parameters.}",
         overridable_noted},
        {FIELD(shard_group), "Layout", alike, range(0, most_ranks),
         "Data ranks that --zero shards over, with their context ranks; several groups are replicas of each "
         "other. Smaller than --dp is hybrid sharding: the large messages stay within a group. 0: the number "
         "that fits and that plan finds fastest, on GPUs and with --machine; otherwise all data ranks.",
         layout},
        {FIELD(reduce_dtype), "Layout", alike, by_name,
         "Number format in which gradients travel between data ranks. bf16: half the bytes, for slow "
         "networks. Each addend is rounded once and sums are fp32; with several shard groups, or --zero 0, "
         "the sum is rounded too.",
         overridable_noted},
        {FIELD(overlap), "Layout", alike, on_off,
         "Communicate with other ranks while computing; the result is the same."},
        {FIELD(prefetch), "Layout", alike, range(0, 16),
         "--zero 3: layers whose parameters are gathered in advance, each into its own buffer; the result is "
         "the same."},
        {FIELD(ngram_place), "Layout", alike, by_name,
         "Where the rows of tables are stored, spread over all ranks of the stages that have tables: in "
         "device memory; in host memory, where CPU cores update them, and each step's rows are copied to the "
         "devices; or on disk, with the rows in use cached in host memory. The result is the same. sample "
         "and eval choose the fastest place with enough memory, and put files into $TMPDIR or /tmp.",
         overridable, !positional, later},
        {FIELD(ngram_cache), "Layout", alike, size(4096, 1e15),
         "--ngram-place disk: bytes of host memory in which each rank keeps rows of its tables. It must hold "
         "the rows of two steps; the more it holds, the fewer are read from disk.",
         overridable, !positional, later},
        {FIELD(ngram_dir), "Layout", alike, any_text,
         "--ngram-place disk: folder for the files of the tables, best on a local disk of each machine; "
         "several runs may share it. A run that resumes on the machines that have its files reads only what "
         "has changed since the checkpoint. Empty: tables/ in the run directory.",
         not_stored},
        {FIELD(ngram_prefetch), "Layout", alike, range(0, 1),
         "--ngram-place host or disk: steps by which rows are fetched in advance, while devices compute. "
         "Rows that an update is about to change are fetched after it; the result is the same.",
         overridable, !positional, later},
        {FIELD(ngram_staleness), "Layout", alike, range(0, 1),
         "--ngram-place host or disk: updates that the rows of a step may miss. 1: a step waits for no "
         "update and sees rows as they were before the last one, unless a validation, a check or a save came "
         "in between.",
         overridable_noted, !positional, later},
        {FIELD(offload), "Layout", alike, by_name,
         "What is kept in host memory: the optimizer state, which is updated there, to free device memory."},
        {FIELD(throttle_link), "Layout", alike, range(0, 1000),
         "Builds whose ranks communicate over MPI: send at most this many GB/s, to see what a slow network "
         "costs. 0: unlimited.",
         not_stored},
        {FIELD(communication_timeout), "Layout", alike, range(0, most),
         "Seconds that a rank waits for others, for its device or for a disk, in any phase of a run, before "
         "the job ends and names the rank that is stuck. Pending work of the device counts too: give more "
         "than a step takes. A single process waits this long for a disk. 0: forever."},

        {FIELD(val_every), "Evaluation", alike, count(0, most), "Steps between validations. 0: never."},
        {FIELD(sample_every), "Sampling", alike, count(0, most),
         "Steps between samples from the model. 0: never."},
        {FIELD(sample_tokens), "Sampling", alike, count(1, 16777216), "Tokens of each sample."},
        {FIELD_OF(Options, prompt), "Sampling", alike, any_text, "Text that samples continue."},

        {FIELD(run), "Model", alike, any_text,
         "Folder of a checkpoint, or a run directory for its newest one.", overridable, positional},
        {FIELD(runs), "Runs", alike, any_text,
         "{report: Run directories, drawn in the same charts; runs may still be training.}{eval: Run "
         "directories, for their newest checkpoints, or folders of checkpoints.}",
         overridable, positional},
        {FIELD(source), "Model", alike, any_text,
         "Folder of a Hugging Face model (config.json, *.safetensors), or a model_*.bin of llm.c; the "
         "optimizer's state is read from state_*.bin files beside it.",
         overridable, positional},
        {FIELD(verify), "Checkpoints", alike, on_off,
         "Read the whole checkpoint, compare it with its checksums, and name each damaged piece."},
        {FIELD_OF(SampleOptions, prompt), "Sampling", alike, any_text,
         "Text to continue. May be given several times: all prompts are continued at once."},
        {FIELD(prompt_file), "Sampling", own, any_text,
         "File that holds the prompt; - for standard input. A .jsonl file holds several, one {\"prompt\": "
         "...} per line."},
        {FIELD(interactive), "Sampling", alike, on_off,
         "Read prompts, one per line, and answer each, until the input ends. On a terminal, the arrow keys "
         "edit the line and recall earlier ones, /help lists commands that change options, and --seed is "
         "random unless given. Ctrl-C ends an answer or discards a line; Ctrl-D ends the program."},
        {FIELD_OF(SampleOptions, tokens), "Sampling", alike, count(1, 16777216),
         "Tokens to add to the prompt."},
        {FIELD(temperature), "Sampling", alike, range(0, 100),
         "Divides the logits: below 1 is more predictable, above 1 more varied. 0: always the most likely "
         "token."},
        {FIELD(top_k), "Sampling", alike, range(0, 16777216),
         "Choose among this many most likely tokens. 0: among all."},
        {FIELD(top_p), "Sampling", alike, range(0, 1),
         "Choose among the smallest set of most likely tokens whose probabilities add up to this. 1: among "
         "all."},
        {FIELD(min_p), "Sampling", alike, range(0, 1),
         "Exclude tokens whose probability is below this fraction of the most likely one's. 0: none."},
        {FIELD(repetition_penalty), "Sampling", alike, range(0.01, 100),
         "Makes tokens that already occur in the text less likely: their logits are divided by it, or "
         "multiplied if negative. 1: no penalty."},
        {FIELD(stop), "Sampling", alike, any_text,
         "Text at which a sample ends; it is not part of the sample. May be given several times."},
        {FIELD(samples), "Sampling", alike, count(1, 65535),
         "Number of samples of each prompt, generated at once; a single one is shown word by word."},
        {FIELD(cache), "Sampling", alike, on_off,
         "Keep the keys and values of earlier tokens instead of recomputing them for each token."},

        {FIELD(data), "Evaluation", alike, any_text,
         "Token files to measure loss, perplexity and bits per byte on, in the form of --train-data. Given "
         "several times with names, as in web=web_*.bin and code=code_*.bin, each has its own result."},
        {FIELD(choices_every), "Evaluation", alike, count(0, most),
         "Steps between evaluations on --choices. 0: never."},
        {FIELD(choices), "Evaluation", alike, any_text,
         "Multiple-choice questions: lines of JSON, {\"context\": ..., \"choices\": [...], \"answer\": 0}, "
         "or an evaluation .bin of llm.c (HellaSwag)."},
        {FIELD(limit), "Evaluation", alike, count(0, most),
         "Largest number of samples and questions to use. 0: all."},
        {FIELD(log), "Evaluation", alike, on_off,
         "Append the results to log.jsonl of each run, with the step of the checkpoint, even while the run "
         "is training."},

        {FIELD(output), "Output", alike, any_text,
         "{tokenize: Prefix of the files to write: PREFIX_train_000000.bin, PREFIX_val_000000.bin "
         "...}{export: Folder to create, or with --format llmc the file.}{import: Run directory to "
         "create.}{report: File to write, or with --format tensorboard the folder. Empty: report.html or "
         "report.csv in the first run, tensorboard in each.}{eval: File to write the results to. Empty: "
         "standard output.}"},
        {FIELD_OF(EvalOptions, format), "Output", alike, by_name,
         "Sentences, or JSON: a list of runs, each with its results."},
        {FIELD_OF(ExportOptions, format), "Output", alike, by_name,
         "hf: a folder that Hugging Face transformers loads: config.json, model.safetensors, tokenizer.json. "
         "llmc: a model .bin of llm.c, for models with the shape of GPT-2."},
        {FIELD_OF(ReportOptions, format), "Output", alike, by_name,
         "html: a page of charts and tables that works in a browser without a network. csv: a table of all "
         "numbers, one row per step. tensorboard: event files with the same numbers."},
        {FIELD(dtype), "Output", alike, by_name,
         "Number format of the written weights. stored: that of the model's own parameters; fp32: full "
         "precision, from the checkpoint's master copy if it has one."},

        {FIELD(inputs), "Text", alike, any_text,
         "{tokenize: Files and folders of text, also as .gz; each file, or each line of a .jsonl file, is a "
         "document. -: standard input.}{data: Token files.}",
         overridable, positional},
        {FIELD(text_field), "Text", alike, any_text,
         ".jsonl: the field that holds a document's text; a line without it is a bad line."},
        {FIELD(skip_binary), "Text", alike, on_off,
         "Skip packed files, and files that do not begin as UTF-8 text: those with zero bytes, UTF-16 or "
         "Latin-1. off: refuse packed files, and name the others, but use them as they are."},
        {FIELD(skip_bad), "Text", alike, count(0, most),
         ".jsonl: number of bad lines (truncated, or with null as text) to skip; they are counted and named. "
         "One more ends the command."},
        {FIELD(val_fraction), "Text", alike, range(0, 1),
         "Fraction of the documents set aside for validation. 0: none. 1: all, for a validation set only."},
        {FIELD(shard_tokens), "Text", alike, count(1024, 1 << 30), "Maximum number of tokens per file."},
        {FIELD(threads), "Text", alike, range(0, 4096), "Encoding threads. 0: one per core."},
        {FIELD(train_tokenizer), "Text", alike, count(0, 4194304),
         "Train a byte-level BPE tokenizer with this many tokens on the text, write it to "
         "PREFIX_tokenizer.json and use it; its last token ends a document. 0: use --tokenizer."},
        {FIELD(pre_tokenizer), "Text", alike, by_name,
         "Model family whose rules split text into words for --train-tokenizer."},
        {FIELD(tokenizer_text), "Text", alike, size(1, 1e12),
         "Maximum number of bytes of text to train a tokenizer on, taken from all files."},
    };
#undef FIELD
#undef FIELD_OF
    return table;
}
