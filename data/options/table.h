/*
Every option of the program, one row each: the parser, --help, the log header and the record in run
directories and checkpoints are all made from this table. A value is known by one name: learning_rate in
the struct and in JSON, --learning-rate on the command line.
*/
#pragma once

#include <type_traits>
#include <vector>

#include "data/options/option_row.h"
#include "data/options/options.h"

// A constraint of a parameter, for nvcc drops one that stands behind all parameters of a lambda.
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
// The field of one struct alone, where others have another option of the name.
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
        {FIELD(norm), "Model", alike, by_name, "Normalisation before each sublayer.", shape},
        {FIELD(norm_eps), "Model", alike, range(1e-12, 1), "Added to the variance before its square root.",
         shape},
        {FIELD(position), "Model", alike, by_name,
         "Position encoding: a learned vector each, or rotation of queries and keys (RoPE).", shape},
        {FIELD(rope_theta), "Model", alike, range(1, 1e12), "RoPE: base of the wavelengths.", shape},
        {FIELD(rope_dims), "Model", alike, range(0, most_head_size),
         "RoPE: rotated dimensions of each head. 0: all.", shape},
        {FIELD(rope_scaling), "Model", alike, range(1, 1e6),
         "RoPE: Llama 3.1 stretching of long wavelengths by this factor. 1: none.", shape},
        {FIELD(rope_low_frequency), "Model", alike, range(1e-3, 1e6),
         "RoPE scaling: wavelengths beyond the original context over this are stretched in full.", shape},
        {FIELD(rope_high_frequency), "Model", alike, range(1e-3, 1e6),
         "RoPE scaling: wavelengths below the original context over this are left alone.", shape},
        {FIELD(rope_original_context), "Model", alike, range(1, 16777216),
         "RoPE scaling: context before stretching, in tokens; where --init begins to stretch, that of the "
         "weights if none is given. 1: all wavelengths are stretched (linear RoPE).",
         shape},
        {FIELD(mlp), "Model", alike, by_name,
         "Activation of the MLP: GELU by its tanh formula, GELU by the error function, or gated SiLU.",
         shape},
        {FIELD(bias), "Model", alike, on_off, "Biases in the matrix products and in layernorm.", shape},
        {FIELD(qkv_bias), "Model", alike, on_off,
         "With --bias off: biases of queries, keys and values alone, as in Qwen2.", shape, !positional,
         later},
        {FIELD(window), "Model", alike, range(0, 16777216),
         "Sliding window: each token attends to this many tokens, itself included. 0: to all before it.",
         shape},
        {FIELD(window_pattern), "Model", alike, any_text,
         "Layers that have the window: 3:1 is one full layer after three with a window, in turn. Empty: all.",
         shape, !positional, later},
        {FIELD(block), "Model", alike, by_name, "MLP after attention, or both side by side behind one norm.",
         shape},
        {FIELD(tie_embeddings), "Model", alike, on_off, "Use the token embedding as the output matrix too.",
         shape},
        {FIELD(qk_norm), "Model", alike, on_off, "RMSNorm of each query and key head before RoPE.", shape},
        {FIELD(local_filter), "Model", alike, on_off,
         "Make queries and keys of each token and the two before it, by two convolutions (Yuan 2.0).", shape,
         !positional, later},
        {FIELD(ngram), "Model", alike, any_text,
         "N-gram memory: the last 2 tokens and the last 3, for 2,3, look rows up in tables, and what these "
         "hold is added to the residual stream (Engram). Empty: there is none.",
         shape, !positional, later},
        {FIELD(ngram_rows), "Model", alike, count(1, 1e12),
         "Rows of each table for each number of tokens in --ngram; the heads share them, each a prime "
         "number.",
         shape, !positional, later},
        {FIELD(ngram_width), "Model", alike, range(8, 4096), "Numbers of a row of a table, a multiple of 8.",
         shape, !positional, later},
        {FIELD(ngram_heads), "Model", alike, range(1, 256),
         "Rows that each n-gram looks up, by hashes of their own.", shape, !positional, later},
        {FIELD(ngram_gate), "Model", alike, on_off,
         "The residual stream decides how much of what n-grams find is added to it. off: all of it.", shape,
         !positional, later},
        {FIELD(ngram_layers), "Model", alike, any_text,
         "Layers with a table of n-grams, counted from 0, as in 1,6. Empty: the second.", shape, !positional,
         later},

        {FIELD(machine), "Machine", own, any_text,
         "What a run is planned for, and its steps are compared with: a card by its name, such as h100 or "
         "A100-40GB, in the nodes that such cards are usually bought in; cpu; or a .json file that describes "
         "other devices and nodes (see the README). Empty: the cards of this machine.",
         not_stored},
        {FIELD_OF(PlanOptions, measure), "Machine", alike, any_text,
         "Measures the devices and links of the ranks that this is started with, writes them to this .json "
         "file for --machine, and plans nothing."},
        {FIELD(gpus), "Machine", alike, range(0, most_ranks),
         "The devices that you have. A layout may leave some idle if that is faster."},
        {FIELD(price), "Machine", alike, range(0, 1e6),
         "Price of a device for an hour, in any currency. 0: not told."},
        {FIELD(failures), "Failures", alike, range(0, 1e6),
         "Failures that end a run, in 1,000 days of a node. The default is that of Llama 3 on 16,384 "
         "devices. 0: there are none."},
        {FIELD(machine_failures), "Failures", alike, range(-1, 1e6),
         "Those of them that break a node, which another one replaces. -1: the share of --failures that they "
         "were there, 73%."},
        {FIELD(network_failures), "Failures", alike, range(-1, 1e6),
         "Those of the network. -1: likewise, 12%."},
        {FIELD(software_failures), "Failures", alike, range(-1, 1e6),
         "Those of software. -1: likewise, 15%."},
        {FIELD(restart_time), "Failures", alike, range(0, most),
         "Seconds until a run that ended trains again: processes start, connect and load the checkpoint."},
        {FIELD_OF(PlanOptions, spares), "Failures", alike, range(0, most_ranks),
         "Nodes that wait to replace one that broke; else it takes half an hour until there is another."},
        {FIELD(elastic), "Failures", alike, on_off,
         "Until there is another node, the run goes on with a data rank less: a checkpoint loads on any "
         "number of them."},
        {FIELD_OF(PlanOptions, tokens), "Run", alike, count(0, 1e16),
         "Tokens that are to be trained on, for days, cost and --steps. 0: not told."},
        {FIELD(explain), "Output", alike, on_off,
         "Tell of one layout alone, whether it fits or not: the one that is given. What is left out of it is "
         "as in train."},
        {FIELD(exposed), "Output", alike, by_name,
         "Plans as if messages of this kind were never hidden behind work, which tells what hiding them is "
         "worth; train hides all of them, or with --overlap off none."},
        {FIELD_OF(PlanOptions, format), "Output", alike, by_name, "A table and sentences, or JSON."},

        {FIELD(hosts), "Hosts", alike, any_text,
         "File of the hosts, in the form of mpirun's: a line `node1 slots=8` for each, with the number of "
         "ranks that it takes; # begins a comment. Empty: the nodes and tasks of the job of Slurm or PBS "
         "around this one (SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE, or PBS_NODEFILE), or this machine."},
        {FIELD(ranks), "Hosts", alike, range(0, most_ranks),
         "Processes of the job. Hosts are filled in the order of their file, and what is left over are "
         "spares. 0: as many as the hosts have slots, without those of the last --spares hosts; on this "
         "machine, one."},
        {FIELD_OF(LaunchOptions, spares), "Hosts", alike, range(0, most_ranks),
         "Hosts that must be left over, to take the place of those that fail their check. Where none is "
         "left, the job goes on with fewer data ranks and the same batch."},
        {FIELD(launcher), "Hosts", alike, any_text,
         "What starts processes: mpirun, srun, or a command line, where {hosts} stands for the file of the "
         "hosts to use, {names} for their names with commas between them, {nodes} and {ranks} for the "
         "numbers of hosts and ranks. What a command line that begins with mpirun or srun leaves out of "
         "these is added to it: 'mpirun --oversubscribe --mca btl_tcp_if_include eth0'. It starts a job, and "
         "with one rank whatever is to run on a single host."},
        {FIELD(hang_timeout), "Failures", alike, range(0, most),
         "Seconds without a sign of progress of any rank before {launch: the job is ended, and }who holds it "
         "up is named{launch: ; until its first step, a minute at least}. {launch: 0: twenty times the "
         "longest of the last steps, a minute at least; ten minutes while a job starts and while it "
         "saves.}{agent: 0: nobody is.}"},
        {FIELD_OF(AgentOptions, run_dir), "Run", own, any_text, "Directory of the run that is watched."},
        {FIELD(every), "Run", own, range(0.01, 3600), "Seconds from one line to the next."},
        {FIELD(grace), "Failures", alike, range(0, most),
         "Seconds between the SIGTERM and the SIGKILL that end a job that hangs."},
        {FIELD(check_timeout), "Failures", alike, range(1, most),
         "Seconds in which a host must run a small command. That is tried before the job starts and after "
         "each failure; a host that does not is put aside, and tried again after the next one."},
        {FIELD(selftest), "Failures", alike, on_off,
         "Each host runs train_gpt selftest with all its slots before the job starts and after each failure, "
         "and one that names a suspect is put aside: a minute with GPUs."},
        {FIELD(max_restarts), "Failures", alike, range(0, most),
         "Restarts in --restart-window, after which the job is given up."},
        {FIELD(restart_window), "Failures", alike, range(1, most),
         "Seconds that --max-restarts counts over."},
        {FIELD(backoff), "Failures", alike, range(0, 3600),
         "Seconds before a restart; doubled for each that made no progress, up to an hour."},
        {FIELD(on_event), "Failures", alike, any_text,
         "Command line for /bin/sh at each incident and at the end, with the incident as JSON in its "
         "standard input and in the variable TRAIN_GPT_INCIDENT. Nobody waits for it."},
        {FIELD(seconds), "Selftest", alike, range(0, 3600),
         "Seconds that it takes, about: half of them multiply matrices, a fifth writes patterns to memory. "
         "0: as many as are usual, 60 with GPUs and 2 without."},
        {FIELD_OF(SelftestOptions, run_dir), "Selftest", alike, any_text,
         "Folder whose disk is tested: that of the runs, where checkpoints will be. Empty: that of temporary "
         "files, $TMPDIR or /tmp."},
        {FIELD_OF(SelftestOptions, measure), "Output", alike, any_text,
         "Measures what a plan has to know as well, if all is healthy, and writes the machine to this .json "
         "file for train_gpt plan --machine, with the rate of its disk."},
        {FIELD_OF(SelftestOptions, format), "Output", alike, by_name,
         "A table, or JSON: all rates of all ranks and links, and the suspects."},

        {FIELD(train_data), "Data", alike, any_text,
         "Token files to train on, .bin of llm.c (train_gpt tokenize makes them) or .idx of Megatron: paths "
         "or glob patterns, separated by commas; with weights, a blend: 0.7:web_*.bin,0.3:code.idx.",
         overridable_noted},
        {FIELD(val_data), "Data", alike, any_text,
         "Token files to measure the validation loss on, in the same form. Given several times, each with a "
         "name, web=web_*.bin and code=code_*.bin, they are sets with losses of their own. Empty: no "
         "validation.",
         overridable_noted},
        {FIELD(val_tokens), "Data", alike, count(0, 1e12),
         "Tokens that one validation takes, the first of each set of --val-data: the same ones whatever the "
         "batch and the layout are, so that losses of several runs can be compared. 0: all.",
         overridable_noted},
        {FIELD(val_batches), "Data", alike, range(0, 1048576),
         "In place of --val-tokens: the tokens of this many batches of --global-batch, as it is when the run "
         "begins. 0: --val-tokens says it.",
         not_stored},
        {FIELD(tokenizer), "Data", own, any_text,
         "What turns text into tokens: none, bytes (a token for each), a tokenizer.json, or a rank file of "
         "tiktoken as ENCODING:FILE. {train: The vocabulary's size and the document end are taken from it.} "
         "Empty: {train: that of the model}{tokenize: bytes}{sample eval: that of the run}{data: none}.",
         tokens},
        {FIELD(document_end), "Data", alike, range(-1, 16777215),
         "Token that ends a document; attention does not reach across it. -1: documents are not told apart.",
         tokens},
        {FIELD(reset_positions), "Data", alike, on_off,
         "Count positions from the beginning of each document. For learned positions: rotary ones tell "
         "distances only, so it makes no difference to them.",
         overridable_noted},
        {FIELD(data_reader), "Data", alike, by_name,
         "Who reads the files: each rank what it needs, or one process of each machine for all there, so "
         "that a shared file system has one reader from each. The batches are the same.",
         not_stored},

        {FIELD(config), "Run", own, any_text,
         "File of options, for those that the command line leaves open: the options.json of a run, except "
         "its ranks and what holds for one start, or lines such as learning-rate = 3e-4, as --print-config "
         "makes them; # begins a comment.",
         not_stored},
        {FIELD(print_config), "Run", alike, on_off,
         "Print all options that the run would have, as --config reads them, and do not train.", not_stored},
        {FIELD_OF(Options, run_dir), "Run", own, any_text,
         "Folder for the log, the options, the samples and the checkpoints. Empty: that of the run that "
         "--resume names, else runs/ and the model's name.",
         not_stored},
        {FIELD(overwrite), "Run", alike, on_off, "Replace what an earlier run left there.", not_stored},
        {FIELD(seed), "Run", alike, range(0, most),
         "Seed of all random numbers: the same seed gives the same result, bit for bit.", fixed},
        {FIELD(log_every), "Run", alike, count(1, most),
         "Steps between lines on the screen, each with the means of the steps since the one before; "
         "log.jsonl has every step."},
        {FIELD(quiet), "Run", own, on_off,
         "Show warnings and errors, on standard error, and the last line of the run; log.jsonl has the rest.",
         not_stored},
        {FIELD(log_trust_ratios), "Run", alike, count(0, most),
         "--optimizer lamb: steps between records of the ratios of all matrices in log.jsonl. 0: none."},
        {FIELD(timings), "Run", alike, on_off,
         "Record when each rank's device does what: log.jsonl then has the phases of every step on the "
         "fastest and the slowest rank, ranks.jsonl those of all ranks, and ranks that are slow are named.",
         not_stored},
        {FIELD(trace_steps), "Run", alike, any_text,
         "First and last step, as in 100:103, whose work on all ranks is written to the run directory as a "
         "timeline for ui.perfetto.dev, trace_000100.json.gz. Empty: none.",
         not_stored},
        {FIELD(peak_tflops), "Run", alike, range(0, 1e6),
         "TFLOP/s that MFU is a share of. 0: the card's published dense rate, or an estimate.", not_stored},
        {FIELD(matmul_tuning), "Run", alike, any_text,
         "bf16 builds for GPUs: before the first step, time several algorithms of cuBLASLt for each matrix "
         "product of the model and take the fastest, which may change the last bits of results. The choice "
         "is kept in the run directory, in matmul_algorithms.json, and a resumed run takes it again. A "
         "file: keep it there, for several runs to share and agree bit for bit. off: take what cuBLASLt "
         "proposes."},
        {FIELD(steps), "Run", alike, count(1, most), "Optimizer steps of the run.", overridable_noted},
        {FIELD(epochs), "Run", alike, range(0, 1e6),
         "In place of --steps: passes over --train-data; of a blend, over as many tokens as all sources "
         "have. "
         "0: --steps says it.",
         not_stored},
        {FIELD(max_time), "Run", alike, time(0, most),
         "Seconds since the start of the process by which the run has saved and ended, as if asked to stop, "
         "for a job with a time limit. It begins no step that would leave too little time to save, judged by "
         "how long steps, validations and saves have taken. 0: no limit.",
         not_stored},
        {FIELD(micro_batch), "Run", alike, range(1, 1048576),
         "Sequences that go through the model at once on each data rank; more is faster and takes more "
         "memory."},
        {FIELD(sequence_length), "Run", alike, range(0, 16777216), "Tokens of each sequence. 0: --context.",
         fixed},
        {FIELD(global_batch), "Run", alike, size(0, 1e12),
         "Tokens of each step, gathered from several micro-batches where need be. 0: {train: one micro-batch "
         "of each data rank, or --pp of them where --pp-schedule is interleaved}{plan: about as many as "
         "GPT-3 "
         "of the same size had}.",
         overridable_noted},
        {FIELD(batch_ramp), "Run", alike, any_text,
         "A batch that rises, START:END:STEPS: from START tokens a step to END, which is --global-batch, "
         "when STEPS steps have been made; in multiples of START, each as long as the others. As in "
         "256k:1M:2000.",
         overridable_noted},

        {FIELD(resume), "Checkpoints", alike, any_text,
         "Go on from a checkpoint: a run directory, for its newest, or the folder of one. auto: the newest "
         "of --run-dir, and a new run where there is none, so that one command both starts a run and "
         "restarts it. Options that are not given are those of the checkpoint; it may have been made on "
         "another number of processes, cut in another way. A --tp and --pp of the checkpoint that do not "
         "fit the processes are lowered, and the run says so.",
         not_stored},
        {FIELD(init), "Checkpoints", alike, any_text,
         "Begin a new run with the weights of a run, of one checkpoint or of an import, to train them on: "
         "the model and its tokenizer are taken from there, the optimizer starts afresh.",
         not_stored},
        {FIELD(save_every), "Checkpoints", alike, count(0, most),
         "Steps between checkpoints, or time, as in 90s, 10m and 2h. auto: as often as costs least, by Young "
         "and Daly, from how long saves keep the training waiting and --failure-rate; no sooner than twice "
         "the time that one takes to be written, and each hour at least. 0: one when the run ends or is "
         "asked to stop, as there is in any case."},
        {FIELD(failure_rate), "Checkpoints", alike, range(0, 1e6),
         "Failures that end a run, in 1,000 days of a device, for --save-every auto. The default is that of "
         "Llama 3: 419 in 54 days on 16,384 devices. 0: there are none."},
        {FIELD(keep), "Checkpoints", alike, range(0, most),
         "Newest checkpoints to keep; an older one is deleted when a new one is safely on disk. 0: all."},
        {FIELD(keep_every), "Checkpoints", alike, count(0, most),
         "Keep those after every so many steps too, for good; a multiple of --save-every. 0: none."},
        {FIELD(keep_best), "Checkpoints", alike, range(0, most),
         "Keep this many checkpoints with the lowest validation losses, beside those of --keep. One is saved "
         "whenever a validation finds such a loss. 0: none."},
        {FIELD(best_set), "Checkpoints", alike, any_text,
         "The set of --val-data that --keep-best goes by. Empty: the first."},
        {FIELD(async_save), "Checkpoints", alike, on_off,
         "Train on while a checkpoint is written from a copy in the memory of the host. off: wait for the "
         "disk and save that memory."},
        {FIELD(disk_wait), "Checkpoints", alike, range(0, most),
         "Seconds to try again where the last checkpoint of a run cannot be written; meanwhile there are its "
         "weights alone, if they can be. On a disk that is still full then, older ones are deleted, but "
         "neither the newest that is whole nor what --keep-every or --keep 0 keeps."},
        {FIELD(fallback_dir), "Checkpoints", alike, any_text,
         "Where the last checkpoint of a run goes, at once, if the run directory does not take it; several "
         "runs may share it. --resume auto looks there too. On several machines, a place that all of them "
         "share.",
         not_stored},

        {FIELD(optimizer), "Optimizer", alike, by_name,
         "What makes new weights of gradients. lamb: AdamW's update, scaled for each matrix to the norm of "
         "its weights, for batches several times larger; it wants learning rates of its own, around 0.01. "
         "muon: the blocks' matrices go by an orthogonal matrix near the gradient's mean, the rest by AdamW, "
         "with AdamW's learning rates; it keeps one moment of these instead of two.",
         fixed},
        {FIELD(learning_rate), "Optimizer", alike, range(0, 10), "Step size at its peak.", overridable_noted},
        {FIELD(schedule), "Optimizer", alike, by_name,
         "Course of the learning rate after the warm-up; wsd stays at the peak and falls at the end of the "
         "run.",
         overridable_noted},
        {FIELD(warmup_steps), "Optimizer", alike, count(-1, most),
         "Steps in which the learning rate rises from 0 to its peak. -1: a twentieth of the run, at most "
         "2000.",
         overridable_noted},
        {FIELD(final_learning_rate), "Optimizer", alike, range(0, 1),
         "Learning rate at the last step, as a fraction of the peak.", overridable_noted},
        {FIELD(decay_fraction), "Optimizer", alike, range(0, 1),
         "wsd: part of the run in which the learning rate falls.", overridable_noted},
        {FIELD(weight_decay), "Optimizer", alike, range(0, 10),
         "Decay of the matrices towards 0; biases and norms do not decay.", overridable_noted},
        {FIELD(embedding_lr), "Optimizer", alike, range(0, 1e4),
         "Learning rate of the embeddings, as a multiple of --learning-rate. Tied ones are the head too.",
         overridable_noted},
        {FIELD(head_lr), "Optimizer", alike, range(0, 1e4),
         "Learning rate of the output matrix, likewise, where it is not tied.", overridable_noted},
        {FIELD(vector_lr), "Optimizer", alike, range(0, 1e4), "Learning rate of biases and norms, likewise.",
         overridable_noted},
        {FIELD(embedding_decay), "Optimizer", alike, range(0, 1e4),
         "Decay of the embeddings, as a multiple of --weight-decay.", overridable_noted},
        {FIELD(head_decay), "Optimizer", alike, range(0, 1e4),
         "Decay of the output matrix, likewise, where it is not tied.", overridable_noted},
        {FIELD(beta1), "Optimizer", alike, range(0, 0.999999), "AdamW, LAMB: memory of the gradient's mean.",
         overridable_noted},
        {FIELD(beta2), "Optimizer", alike, range(0, 0.999999),
         "AdamW, LAMB: memory of the gradient's mean square.", overridable_noted},
        {FIELD(adam_eps), "Optimizer", alike, range(1e-20, 1),
         "AdamW, LAMB: added to the root of the mean square.", overridable_noted},
        {FIELD(muon_momentum), "Optimizer", alike, range(0, 0.999999),
         "Muon: memory of the gradient's mean, for the blocks' matrices.", overridable_noted},
        {FIELD(ngram_lr), "Optimizer", alike, range(0, 10),
         "Step size at its peak for the rows of tables, by row-wise AdaGrad, whatever --optimizer is.",
         overridable_noted, !positional, later},
        {FIELD(gradient_clip), "Optimizer", alike, range(0, 1e9),
         "Gradients whose global norm exceeds this are scaled down to it. 0: never.", overridable_noted},

        {FIELD(spike_sigma), "Checks", alike, range(0, 1e6),
         "Leave out the update of a step whose loss, or the logarithm of whose gradient norm, exceeds the "
         "running mean by more than so many running deviations; the first 20 steps are taken as they are. "
         "6 is usual. 0: take every step.",
         overridable_noted},
        {FIELD(spike_skips), "Checks", alike, count(0, most),
         "--spike-sigma: after so many steps in a row that were left out, go back to the checkpoint before "
         "them, and on with the samples behind them. 0: never go back.",
         overridable_noted},
        {FIELD(check_replicas), "Checks", alike, count(0, most),
         "Steps between comparisons of what ranks hold alike, by hashes of 64 bits: weights and, where "
         "replicas of a shard have it, the optimizer's state. One that holds other bits than most ends the "
         "run, and is named. Checkpoints are checked too, before they are written. 0: never."},
        {FIELD(check_replay), "Checks", alike, count(0, most),
         "Steps between comparisons of what data ranks compute: each goes through a micro-batch of its own "
         "and one of another rank, beside the training, and their gradients must be the same to the bit. 0: "
         "never."},
        {FIELD(matmul_dtype), "Memory", alike, by_name,
         "Numbers that matrix products are made of; sums are fp32, or in fp8 nearly. auto: those of the "
         "build. bf16: in the fp32 build for CPUs, on processors that have such products, faster and "
         "coarser; weights, activations and gradients stay fp32. fp8: in bf16 builds, on Hopper, those of "
         "the blocks; not with --zero 3. Copies of these weights are kept, unless activations are "
         "recomputed.",
         overridable_noted},
        {FIELD(fp8_fast_gradients), "Memory", alike, on_off,
         "fp8: products for gradients add up in the about 14 bits of the tensor cores, as those of the "
         "forward pass do, which is faster and coarser.",
         overridable_noted},
        {FIELD(master_weights), "Memory", alike, on_off,
         "bf16 builds: keep an fp32 copy of the weights for the optimizer, 4 bytes a parameter.",
         overridable_noted},
        {FIELD(stochastic_rounding), "Memory", alike, on_off,
         "bf16 builds: round updated weights up or down at random, so that small updates are not lost.",
         overridable_noted},
        {FIELD(recompute), "Memory", alike, by_name,
         "Activations that the backward pass makes again, for want of memory; the result is the same. none: "
         "all are kept. elementwise: outputs of norms and of activation functions are not, unless these "
         "are fused into a matrix product; in fp8 they are, and copies of weights are not; no product is "
         "repeated. mlp: nothing of the MLP is kept. block: only the input of each block is. auto: the first "
         "of these that fits, which is the fastest."},
        {FIELD(loss_chunk), "Memory", alike, range(0, 16777216),
         "Tokens whose logits exist at the same time. 0: chosen by size."},

        {FIELD(attention), "Speed", alike, by_name,
         "GPUs: the kernels of attention; they differ in rounding. wgmma: those of Hopper, in bf16, for "
         "heads of a multiple of 8 up to 128. mma: those of every card since Ampere. auto: wgmma where it "
         "can.",
         overridable_noted},
        {FIELD(cuda_graphs), "Speed", alike, by_name,
         "Give each pass over a micro-batch to the device in one piece (CUDA graphs) instead of kernel by "
         "kernel; the result is the same. auto: in one process with a GPU, where layers are so small that "
         "giving kernels out takes longer than running them."},

        {FIELD(dp), "Layout", alike, range(0, most_ranks),
         "Data parallelism: ranks (processes) that train on different sequences and add up their gradients. "
         "They take the micro-batches of a step in turn, so any number of them trains the same batch. 0: the "
         "number of processes / (tp * pp).",
         layout},
        {FIELD(tp), "Layout", alike, range(0, most_ranks),
         "Tensor parallelism: ranks that share each layer, every one with a part of the heads and of the "
         "MLP, and of the sequence in between. They talk in every layer, so they belong into one machine. It "
         "must divide --heads, --channels, --mlp-width and --sequence-length. 0, or auto: {train plan: train "
         "takes the layout that plan finds to be the fastest for its ranks, on --machine; options of the "
         "layout that are not at their defaults hold.}{sample eval: the fewest ranks that the model fits on; "
         "those that are left over share the work.}",
         overridable_noted},
        {FIELD(pp), "Layout", alike, range(0, most_ranks),
         "Pipeline parallelism: stages that the layers are dealt to, in order, each on ranks of its own. "
         "Only what goes from one layer to the next is sent, so stages may be far apart{train plan: ; but "
         "they wait for each other at the beginning and end of a step, the less the more micro-batches "
         "--global-batch holds}. 0, or auto: as for --tp.",
         overridable_noted},
        {FIELD(tp_overlap), "Layout", alike, range(0, 64),
         "--tp: parts in which the rows around a product are sent, each while another is computed. More "
         "parts hide more of the sending, and make smaller, slower products. It must divide the rows of a "
         "rank, micro-batch * sequence length / tp. 0: the largest of 4, 3, 2 and 1 that does.",
         layout},
        {FIELD(pp_schedule), "Layout", alike, by_name,
         "--pp: order of the work on a stage. gpipe: all micro-batches forward, then all backward, keeping "
         "the activations of every one. 1f1b: backward as soon as can be, keeping those of --pp "
         "micro-batches at most. interleaved: 1f1b with --pp-chunks parts of the layers on each stage, so "
         "that stages wait less and send more, least where a rank's micro-batches are a multiple of --pp. "
         "zero-bubble: 1f1b that puts off the gradients of the weights to when it would wait, and needs "
         "memory for that; with --zero 2 or 3 it sends gradients twice.",
         overridable_noted},
        {FIELD(pp_chunks), "Layout", alike, range(0, 10000),
         "--pp-schedule interleaved: parts of the layers on each stage. More parts make the stages wait less "
         "and send more. 0: 2 for an interleaved pipeline, else 1.",
         layout},
        {FIELD(pp_layers), "Layout", alike, any_text,
         "--pp: layers of each part. time: so that the slowest part is as fast as can be, for it sets the "
         "pace of all; memory: so that the fullest stage needs as little as can be, to fit a larger model; "
         "or pp * pp-chunks numbers in the order of the layers, such as 3,4,4,3.",
         layout},
        {FIELD(zero), "Layout", alike, range(0, 3),
         "ZeRO: what {train plan: a shard group keeps once instead of each data rank whole. 0: nothing, 1: "
         "the optimizer's state, 2: the gradients too, 3: the parameters too. Each level saves memory; 1 "
         "sends as much as 0, 2 and 3 more where a step has several micro-batches.}{sample eval: the data "
         "ranks keep once instead of each. 0: nothing, 3: the parameters.}",
         overridable_noted},
        {FIELD(shard_group), "Layout", alike, range(0, most_ranks),
         "Data ranks that --zero cuts over; the groups repeat each other. Smaller than --dp is hybrid "
         "sharding: the large messages stay within a group. 0: as many as make a step shortest by plan and "
         "fit, on cards and with --machine; elsewhere all data ranks.",
         layout},
        {FIELD(reduce_dtype), "Layout", alike, by_name,
         "Numbers that gradients travel in from data rank to data rank. bf16: half the bytes, for networks "
         "that hold a run up. Each addend is rounded once, sums are fp32; with several shard groups, or "
         "--zero 0, the sum is rounded too.",
         overridable_noted},
        {FIELD(overlap), "Layout", alike, on_off,
         "Talk to the other ranks while computing; the result is the same."},
        {FIELD(prefetch), "Layout", alike, range(0, 16),
         "--zero 3: layers whose parameters are gathered before they are needed, each in memory of its own; "
         "the result is the same."},
        {FIELD(ngram_place), "Layout", alike, by_name,
         "Where the rows of tables lie, dealt to all ranks of the stages that have them: in the memory of "
         "devices, or in that of hosts, from where a step's rows come to the devices, and whose cores step "
         "them. The result is the same.",
         overridable, !positional, later},
        {FIELD(ngram_prefetch), "Layout", alike, range(0, 1),
         "--ngram-place host: steps that rows come ahead of their use, while devices compute. Those that an "
         "update has yet to change come behind it; the result is the same.",
         overridable, !positional, later},
        {FIELD(ngram_staleness), "Layout", alike, range(0, 1),
         "--ngram-place host: updates that a step's rows may miss. 1: a step waits for none, and sees rows "
         "as "
         "they were before the last step's update, unless a validation, a check or a save lies between.",
         overridable_noted, !positional, later},
        {FIELD(offload), "Layout", alike, by_name,
         "What lives in the memory of the host: the optimizer's state, updated there, frees device memory."},
        {FIELD(throttle_link), "Layout", alike, range(0, 1000),
         "Builds whose ranks talk over MPI: send at most this many GB/s, to see what a slow network costs. "
         "0: as fast as it goes.",
         not_stored},
        {FIELD(communication_timeout), "Layout", alike, range(0, most),
         "Seconds that a rank waits for the others, or for its device or a disk, in any phase of a run, "
         "before the job ends with the name of the rank that is stuck. Work that the device still has to do "
         "counts too: give more than a step takes. A process alone waits so long for a disk. 0: for ever."},

        {FIELD(val_every), "Evaluation", alike, count(0, most), "Steps between validations. 0: never."},
        {FIELD(sample_every), "Sampling", alike, count(0, most),
         "Steps between samples from the model. 0: never."},
        {FIELD(sample_tokens), "Sampling", alike, count(1, 16777216), "Tokens of such a sample."},
        {FIELD_OF(Options, prompt), "Sampling", alike, any_text, "Text that samples continue."},

        {FIELD(run), "Model", alike, any_text,
         "Run directory, for its newest checkpoint, or the folder of one.", overridable, positional},
        {FIELD(runs), "Runs", alike, any_text,
         "{report: Run directories, drawn over each other; also while they are trained.}{eval: Run "
         "directories, for their newest checkpoints, or folders of checkpoints.}",
         overridable, positional},
        {FIELD(source), "Model", alike, any_text,
         "Folder of a Hugging Face model (config.json, *.safetensors), or a model_*.bin of llm.c; the "
         "optimizer's state is taken from state_*.bin files beside that one.",
         overridable, positional},
        {FIELD(verify), "Checkpoints", alike, on_off,
         "Read all of the checkpoint, compare it with its checksums, and name each damaged piece."},
        {FIELD_OF(SampleOptions, prompt), "Sampling", alike, any_text,
         "Text to continue. May be given several times: all prompts are continued together."},
        {FIELD(prompt_file), "Sampling", own, any_text,
         "File that holds the prompt; - for the standard input. A .jsonl holds several, a line "
         "{\"prompt\": ...} each."},
        {FIELD(interactive), "Sampling", alike, on_off,
         "Ask for prompts, one a line, and answer each, until the input ends. On a terminal, arrow keys move "
         "in a line and bring back earlier ones, /help lists commands that change options, and a --seed is "
         "drawn unless one is given. Ctrl-C there ends an answer or drops a line; Ctrl-D ends the program."},
        {FIELD_OF(SampleOptions, tokens), "Sampling", alike, count(1, 16777216),
         "Tokens to add to the prompt."},
        {FIELD(temperature), "Sampling", alike, range(0, 100),
         "Divides the logits: below 1 plays safe, above 1 is wild. 0: always the likeliest token."},
        {FIELD(top_k), "Sampling", alike, range(0, 16777216),
         "Choose among this many likeliest tokens. 0: among all."},
        {FIELD(top_p), "Sampling", alike, range(0, 1),
         "Choose among the fewest likeliest tokens that have this much probability together. 1: among all."},
        {FIELD(min_p), "Sampling", alike, range(0, 1),
         "Leave out tokens whose probability is less than this share of the likeliest one's. 0: none."},
        {FIELD(repetition_penalty), "Sampling", alike, range(0.01, 100),
         "Makes tokens that the text has already less likely: their logits are divided by it, or multiplied "
         "where negative. 1: no penalty."},
        {FIELD(stop), "Sampling", alike, any_text,
         "Text that ends a sample, and is left out. May be given several times."},
        {FIELD(samples), "Sampling", alike, count(1, 65535),
         "Number of samples of each prompt. All are made together; one alone appears word by word."},
        {FIELD(cache), "Sampling", alike, on_off,
         "Keep keys and values of earlier tokens, instead of computing them again for each token."},

        {FIELD(data), "Evaluation", alike, any_text,
         "Token files to measure loss, perplexity and bits per byte on, in the form of --train-data. Given "
         "several times, each with a name, web=web_*.bin and code=code_*.bin, they are several results."},
        {FIELD(choices_every), "Evaluation", alike, count(0, most),
         "Steps between evaluations on --choices. 0: never."},
        {FIELD(choices), "Evaluation", alike, any_text,
         "Multiple-choice questions: lines of JSON, {\"context\": ..., \"choices\": [...], \"answer\": 0}, "
         "or an evaluation .bin of llm.c (HellaSwag)."},
        {FIELD(limit), "Evaluation", alike, count(0, most), "Samples and questions to take at most. 0: all."},
        {FIELD(log), "Evaluation", alike, on_off,
         "Add the results to log.jsonl of each run, with the step of the checkpoint; also while it trains "
         "on."},

        {FIELD(output), "Output", alike, any_text,
         "{tokenize: Beginning of the names of the files to write: PREFIX_train_000000.bin, "
         "PREFIX_val_000000.bin ...}{export: Folder to make, or with --format llmc the file.}{import: Run "
         "directory to make.}{report: File to write, or with --format tensorboard the folder. Empty: "
         "report.html or report.csv in the first run, tensorboard in each.}{eval: File to write the "
         "results to. Empty: the standard output.}"},
        {FIELD_OF(EvalOptions, format), "Output", alike, by_name,
         "Sentences, or JSON: a list of runs, each with its results."},
        {FIELD_OF(ExportOptions, format), "Output", alike, by_name,
         "hf: a folder that Hugging Face transformers loads: config.json, model.safetensors, tokenizer.json. "
         "llmc: a model .bin of llm.c, for models of the shape of GPT-2."},
        {FIELD_OF(ReportOptions, format), "Output", alike, by_name,
         "html: a page of drawings and tables that a browser shows without a network. csv: a table of all "
         "numbers, a row for each step. tensorboard: event files of the same."},
        {FIELD(dtype), "Output", alike, by_name,
         "Numbers to write the weights in. stored: those of the model's own parameters; fp32 is as precise "
         "as the checkpoint, whose master copy it takes."},

        {FIELD(inputs), "Text", alike, any_text,
         "{tokenize: Files and folders of text; a file is a document, and in a .jsonl each line; .gz too. -: "
         "standard input.}"
         "{data: Token files.}",
         overridable, positional},
        {FIELD(text_field), "Text", alike, any_text,
         ".jsonl: the field that holds a document's text; a line without it is a bad one."},
        {FIELD(skip_binary), "Text", alike, on_off,
         "Leave out files that do not begin as text in UTF-8: those with zero bytes, UTF-16, Latin-1. off: "
         "they are named, and taken as they are."},
        {FIELD(skip_bad), "Text", alike, count(0, most),
         ".jsonl: how many bad lines are skipped, counted and named, such as one that is cut or whose text "
         "is null. One more ends the command."},
        {FIELD(val_fraction), "Text", alike, range(0, 1),
         "Part of the documents kept for validation. 0: none. 1: all, a validation set alone."},
        {FIELD(shard_tokens), "Text", alike, count(1024, 1 << 30), "Tokens of each file at most."},
        {FIELD(threads), "Text", alike, range(0, 4096), "Threads that encode. 0: one for each core."},
        {FIELD(train_tokenizer), "Text", alike, count(0, 16777216),
         "Train a byte-level BPE tokenizer with so many tokens on the text, write it to "
         "PREFIX_tokenizer.json and use it; the last of them ends a text. 0: use --tokenizer."},
        {FIELD(pre_tokenizer), "Text", alike, by_name,
         "Whose rules cut text into words for a tokenizer that is trained."},
        {FIELD(tokenizer_text), "Text", alike, size(1, 1e12),
         "Bytes of text that a tokenizer is trained on at most, taken from all files."},
    };
#undef FIELD
#undef FIELD_OF
    return table;
}
