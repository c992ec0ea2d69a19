// A run that resumes from a checkpoint, or begins with the weights of one: the options that it takes over,
// those that are refused or reported, and how the checkpoint is found.
#include <map>

#include "data/checkpoint/builder.h"
#include "data/launch/parse_command_line.h"
#include "data/launch/trained_model.h"
#include "test/support/file_testing.h"

// Checkpoints by the place where they are looked for.
using Checkpoints = std::map<std::string, StoredRun>;

static TrainingLine train(std::vector<std::string> arguments, const Checkpoints& checkpoints = {},
                          int processes = 1) {
    arguments.insert(arguments.begin(), "train");
    auto find = [&](const std::string& place) -> std::optional<StoredRun> {
        auto found = checkpoints.find(place);
        if (found == checkpoints.end()) return std::nullopt;
        return found->second;
    };
    return parse_training(read_arguments(command_train, arguments), processes, find);
}

// Parses a line, split at blanks.
static TrainingLine train_line(std::string line, const Checkpoints& checkpoints = {}) {
    return train(words_of(line), checkpoints);
}

// The stored state of a run with these arguments after 100 steps.
static StoredRun run_with(std::vector<std::string> arguments, int processes = 1) {
    arguments.insert(arguments.begin(), {"--train-data", "x.bin"});
    StoredRun run;
    run.checkpoint = "runs/a/checkpoints/step_00000100";
    run.run_dir = "runs/a";
    run.step = 100;
    run.options = options_to_json(train(arguments, {}, processes).options);
    return run;
}

static Checkpoints at_runs_a(std::vector<std::string> arguments, int processes = 1) {
    return {{"runs/a", run_with(std::move(arguments), processes)}};
}

// Returns a run's options, without those that belong to a single start.
static nlohmann::json lasting(const Options& options) {
    nlohmann::json json = options_to_json(options);
    for (const OptionRow& row : option_table()) {
        if (row.resume == Resume::not_stored) json.erase(row.field);
    }
    return json;
}

TEST_CASE("what is not given is as it was") {
    Checkpoints checkpoints =
        at_runs_a({"--model",      "gpt2-124M", "--layers",        "3",     "--seed",        "7",
                   "--steps",      "2000",      "--learning-rate", "1e-3",  "--micro-batch", "2",
                   "--recompute",  "block",     "--val-every",     "50",    "--prompt",      "once",
                   "--tokenizer",  "bytes",     "--save-every",    "10",    "--keep",        "0",
                   "--zero",       "2",         "--shard-group",   "2",     "--tp",          "2",
                   "--tp-overlap", "8",         "--run-dir",       "runs/a"},
                  8);
    TrainingLine line = train({"--resume", "runs/a"}, checkpoints, 8);
    CHECK(lasting(line.options) ==
          lasting(options_from_json(checkpoints.at("runs/a").options, "checkpoint")));
    CHECK(line.options.layers == 3);
    CHECK(line.options.warmup_steps == 100);
    CHECK(line.options.run_dir == "runs/a");
    CHECK(line.options.shard_group == 2);
    CHECK(line.folder == RunFolder::continued);
    CHECK(line.origin->step == 100);
    CHECK(!line.weights_only);
    CHECK(line.notes.empty());
    CHECK(train({"--resume", "auto", "--run-dir", "runs/a"}, checkpoints, 8).options.layers == 3);
    // options that belong to a single start
    CHECK(line.options.resume == "runs/a");
    CHECK(train({"--resume", "runs/a", "--data-reader", "node"}, checkpoints, 8).options.data_reader ==
          DataReader::node);
    CHECK(train({"--resume", "runs/a"}, at_runs_a({"--data-reader", "node"})).options.data_reader ==
          DataReader::rank);
    CHECK(!train({"--resume", "runs/a"}, at_runs_a({"--overwrite"})).options.overwrite);
}

TEST_CASE("every option that a run has can be given again as it was") {
    Checkpoints checkpoints = at_runs_a({"--model", "qwen3-0.6B", "--schedule", "wsd", "--sequence-length",
                                         "128", "--run-dir", "runs/a", "--tokenizer", "bytes", "--zero", "1"},
                                        2);
    Options stored = options_from_json(checkpoints.at("runs/a").options, "checkpoint");
    std::vector<std::string> words = {"--resume", "auto"};
    for (const OptionRow& row : option_table()) {
        bool of_origin = &row == find_option("--resume");
        if (!row.belongs_to(command_train) || of_origin) continue;
        words.push_back(option_name(row) + "=" + value_text(row, stored));
    }
    std::vector<std::string> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    TrainingLine line = train(arguments, checkpoints, 2);
    CHECK(line.notes.empty());
    CHECK(lasting(line.options) == lasting(stored));
}

TEST_CASE("a learning rate that jumps is told, with what goes on from the last one") {
    Checkpoints checkpoints = at_runs_a({"--steps", "100", "--run-dir", "runs/a"});
    auto jump = [&](const std::string& line) {
        std::vector<std::string> notes = train_line("--resume runs/a " + line, checkpoints).notes;
        return notes.empty() || !notes.back().starts_with("the learning rate") ? "" : notes.back();
    };
    CHECK(jump("") == "");
    CHECK(jump("--steps 200") == "the learning rate jumps from 6e-05 to 0.000337; --schedule constant "
                                 "--learning-rate 6e-05 --warmup-steps 0 keeps the last step's");
    CHECK(jump("--steps 200 --schedule constant --learning-rate 6e-05 --warmup-steps 0") == "");
    CHECK(jump("--steps 102") == "");
    // between steps of a warm-up, or while wsd stays at the peak, the learning rate does not jump
    Checkpoints others = {{"runs/b", run_with({"--steps", "1000", "--warmup-steps", "1000"})},
                          {"runs/c", run_with({"--steps", "1000", "--schedule", "wsd"})}};
    for (const char* line : {"--resume runs/b", "--resume runs/c --steps 2000 --run-dir x"}) {
        for (const std::string& note : train_line(line, others).notes)
            CHECK(!note.starts_with("the learning rate"));
    }
}

TEST_CASE("epochs of a run that goes on are those of all of it") {
    Checkpoints checkpoints = at_runs_a({"--run-dir", "runs/a", "--steps", "200"});
    LayoutChoices choose;
    choose.tokens_of_epoch = [](const Options&) { return 150 * 1024.; };
    auto go_on = [&](std::string words) {
        std::string line = "train --resume runs/a " + words;
        return parse_training(
            read_arguments(command_train, words_of(line)), 1,
            [&](const std::string& place) { return std::optional(checkpoints.at(place)); }, choose);
    };
    CHECK(go_on("").options.steps == 200);
    TrainingLine line = go_on("--epochs 2");
    CHECK(line.options.steps == 300);
    CHECK(line.notes[0] == "--steps 300: the checkpoint had 200");
    CHECK_REFUSED(
        go_on("--epochs 0.5"),
        "--epochs 0.5 (75 steps): the checkpoint runs/a/checkpoints/step_00000100 is already at step "
        "100; give more epochs, or ");
    CHECK_REFUSED(
        go_on("--steps 75"),
        "--steps 75: the checkpoint runs/a/checkpoints/step_00000100 is already at step 100; give more "
        "steps, or ");
}

TEST_CASE("a run that goes on validates on the tokens that it has validated on") {
    using Lines = std::vector<std::string>;
    Checkpoints checkpoints = at_runs_a(
        {"--val-data", "v.bin", "--val-batches", "2", "--global-batch", "4k", "--run-dir", "runs/a"});
    TrainingLine line = train_line("--resume runs/a --global-batch 8k", checkpoints);
    CHECK(line.options.val_tokens == 8192);
    CHECK(line.options.val_batches == 0);
    CHECK(line.notes == Lines{"--global-batch 8192: the checkpoint had 4096"});
    line = train_line("--resume runs/a --val-batches 4", checkpoints);
    CHECK(line.options.val_tokens == 16384);
    CHECK(line.notes == Lines{"--val-tokens 16384: the checkpoint had 8192"});
    CHECK(train_line("--train-data x.bin --global-batch 4k").options.val_tokens == 128 << 10);
    CHECK(error_of([&] { train_line("--train-data x.bin --val-batches 4 --val-tokens 1k"); }) ==
          "--val-batches 4: conflicts with --val-tokens; leave one of them out");
    // an older record, which has val_batches in place of val_tokens
    nlohmann::json& record = checkpoints.at("runs/a").options;
    record.erase("val_tokens");
    record["val_batches"] = 3;
    line = train_line("--resume runs/a --global-batch 8k", checkpoints);
    CHECK(line.options.val_tokens == 12288);
    CHECK(line.notes == Lines{"--global-batch 8192: the checkpoint had 4096",
                              "--val-tokens 12288: from the --val-batches of this run so far, so that it "
                              "still validates on the same tokens"});
}

TEST_CASE("another value is used and told, or used without a word, or refused") {
    Checkpoints checkpoints = at_runs_a({"--run-dir", "runs/a"});
    auto notes = [&](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), {"--resume", "runs/a"});
        return train(arguments, checkpoints).notes;
    };
    TrainingLine line = train({"--resume", "runs/a", "--learning-rate", "3e-4", "--steps", "5000", "--prompt",
                               "hm", "--recompute", "mlp", "--val-data", "v.bin"},
                              checkpoints);
    CHECK(line.options.learning_rate == 3e-4f);
    CHECK(line.options.steps == 5000);
    CHECK(line.options.prompt == "hm");
    CHECK(line.options.recompute == Recompute::mlp);
    using Lines = std::vector<std::string>;
    CHECK(line.notes == Lines{"--val-data v.bin: the checkpoint had ''",
                              "--steps 5000: the checkpoint had 1000",
                              "--learning-rate 0.0003: the checkpoint had 0.0006",
                              "the learning rate jumps from 0.000596 to 0.0003; --schedule constant "
                              "--learning-rate 0.000596 --warmup-steps 0 keeps the last step's"});
    CHECK(notes({"--learning-rate", "0.0006", "--seed", "1337", "--layers", "4"}) == Lines{});
    CHECK(notes({"--global-batch", "4k"}) == Lines{"--global-batch 4096: the checkpoint had 1024"});
    CHECK(notes({"--global-batch", "0", "--micro-batch", "8"}) ==
          Lines{"--global-batch 2048: the checkpoint had 1024"});
    CHECK(notes({"--zero", "1", "--pp-schedule", "gpipe"}) ==
          Lines{"--pp-schedule gpipe: the checkpoint had 1f1b", "--zero 1: the checkpoint had 0"});
    CHECK(notes({"--document-end", "-1"}) == Lines{"--document-end -1: the checkpoint had 256"});
    // 0 stands for the value that follows from the model
    CHECK(notes({"--kv-heads", "4", "--head-size", "0", "--sequence-length", "0"}) == Lines{});

    // options that the checkpoint fixes
    const struct {
        std::string line;
        const char* stored;
    } fixed[] = {
        {"--layers 6", "4"},
        {"--seed 2", "1337"},
        {"--sequence-length 128", "256"},
        {"--heads 3", "4"},
        {"--kv-heads 3", "4"},
        {"--vocab-size 100", "257"},
        {"--norm layernorm", "rmsnorm"},
        {"--model gpt2-124M", "tiny"},
        {"--window 16", "0"},
        {"--tie-embeddings off", "on"},
        {"--mlp-width 0", "384"},
        {"--optimizer lamb", "adamw"},
    };
    for (auto& row : fixed) {
        CAPTURE(row.line);
        CHECK_REFUSED(train_line("--resume runs/a " + row.line, checkpoints),
                      text("%s: the checkpoint runs/a/checkpoints/step_00000100 was made with %s; ",
                           row.line.c_str(), row.stored));
    }
    CHECK_REFUSED(train({"--resume", "runs/a", "--steps", "99"}, checkpoints),
                  "--steps 99: the checkpoint runs/a/checkpoints/step_00000100 is already at step 100; ");
    CHECK(train({"--resume", "runs/a", "--steps", "100"}, checkpoints).options.steps == 100);
    CHECK_REFUSED(train({"--resume", "runs/a", "--layers", "x"}, checkpoints), "--layers x: not a number; ");
}

TEST_CASE("every option of train has been given a thought") {
    // Options that shape the state or the data can be told from the others by their group.
    auto policy = [](const char* name) { return find_option(name, command_train)->resume; };
    for (const OptionRow& row : option_table()) {
        INFO(row.field);
        std::string group = row.group;
        if (!row.belongs_to(command_train)) CHECK(row.resume == Resume::overridable);
        if (group == "Model" && row.belongs_to(command_train)) CHECK(row.resume == Resume::shape);
        if (group == "Optimizer" && row.field != std::string("optimizer"))
            CHECK(row.resume == Resume::overridable_noted);
        if (group == "Evaluation" || group == "Sampling") CHECK(row.resume == Resume::overridable);
    }
    for (const char* name : {"--seed", "--sequence-length", "--optimizer"})
        CHECK(policy(name) == Resume::fixed);
    for (const char* name :
         {"--train-data", "--val-data", "--val-tokens", "--steps", "--global-batch", "--master-weights",
          "--stochastic-rounding", "--ngram-dtype", "--tp", "--pp", "--zero", "--pp-schedule"})
        CHECK(policy(name) == Resume::overridable_noted);
    for (const char* name : {"--tokenizer", "--document-end"}) CHECK(policy(name) == Resume::tokens);
    for (const char* name : {"--dp", "--shard-group", "--tp-overlap", "--pp-chunks", "--pp-layers"})
        CHECK(policy(name) == Resume::layout);
    for (const char* name :
         {"--run-dir", "--overwrite", "--resume", "--init", "--throttle-link", "--val-batches"})
        CHECK(policy(name) == Resume::not_stored);
}

TEST_CASE("a resumed run keeps values that its new options do not use; they are refused only if given") {
    Checkpoints checkpoints = at_runs_a({"--schedule", "wsd", "--decay-fraction", "0.3", "--choices", "q",
                                         "--choices-every", "50", "--ngram", "2", "--ngram-gate", "off"});
    std::string line = "--resume runs/a --schedule cosine --choices= --ngram-place disk --ngram-dir /x";
    Options options = train_line(line, checkpoints).options;
    CHECK(options.decay_fraction == 0.3f);
    CHECK(options.choices_every == 50);
    CHECK(options.ngram_dir == "/x");
    CHECK_REFUSED(train_line(line + " --decay-fraction 0.4", checkpoints),
                  "--decay-fraction 0.4: only has an effect with --schedule wsd; ");
}

TEST_CASE("on another number of processes the run is cut anew") {
    Checkpoints of_4 =
        at_runs_a({"--run-dir", "runs/a", "--zero", "1", "--shard-group", "2", "--global-batch", "12k"}, 4);
    TrainingLine line = train({"--resume", "auto", "--run-dir", "runs/a"}, of_4, 2);
    CHECK(line.options.dp == 2);
    CHECK(line.options.shard_group == 2);
    CHECK(line.options.global_batch == 12288);
    CHECK(line.notes == std::vector<std::string>{"--dp 2: the checkpoint had 4"});
    line = train({"--resume", "runs/a"}, of_4, 6);
    CHECK(line.options.dp == 6);
    CHECK(line.options.shard_group == 6);
    CHECK(train({"--resume", "runs/a"}, of_4, 4).options.shard_group == 2);
    CHECK(train({"--resume", "runs/a", "--zero", "3"}, of_4, 4).options.shard_group == 4);
    CHECK(train({"--resume", "runs/a", "--shard-group", "1"}, of_4, 4).options.shard_group == 1);
    CHECK(train({"--resume", "runs/a", "--zero", "0"}, of_4, 4).options.shard_group == 1);
    // the batch stays the same on any number of data ranks that have a micro-batch each
    CHECK(train({"--resume", "runs/a"}, of_4, 5).options.global_batch == 12288);
    CHECK_REFUSED(
        train({"--resume", "runs/a"}, of_4, 13),
        "--global-batch 12288: less than a micro-batch for each of 13 data ranks, 4 sequences * 256 "
        "tokens * 13 = 13312; give 13312, or --micro-batch 3");
    CHECK(train({"--resume", "runs/a", "--micro-batch", "1"}, of_4, 13).options.global_batch == 12288);

    Checkpoints piped =
        at_runs_a({"--run-dir", "runs/a", "--pp", "2", "--pp-layers", "3,1", "--global-batch", "8k"}, 2);
    CHECK(train({"--resume", "runs/a"}, piped, 2).options.pp_layers == "3,1");
    CHECK(train({"--resume", "runs/a"}, piped, 4).options.pp_layers == "3,1");
    CHECK(train({"--resume", "runs/a", "--pp", "1"}, piped).options.pp_layers == "time");
    CHECK(
        train({"--resume", "runs/a", "--pp", "4"}, piped, 4).notes ==
        std::vector<std::string>{"--pp 4: the checkpoint had 2", "--pp-layers time: the checkpoint had 3,1"});

    Checkpoints cut = at_runs_a({"--run-dir", "runs/a", "--tp", "2", "--tp-overlap", "8"}, 2);
    CHECK(train({"--resume", "runs/a"}, cut, 2).options.tp_overlap == 8);
    CHECK(train({"--resume", "runs/a", "--micro-batch", "1", "--global-batch", "1k"}, cut, 2)
              .options.tp_overlap == 4);
    CHECK(train({"--resume", "runs/a", "--tp", "1"}, cut).options.tp_overlap == 1);
}

TEST_CASE("--tp and --pp of a checkpoint are kept where they fit, and else lowered") {
    const char* const place[] = {"--run-dir", "runs/a"};
    Checkpoints of_4 =
        at_runs_a({"--run-dir", "runs/a", "--tp", "2", "--pp", "2", "--global-batch", "12k"}, 4);
    auto cut = [&](std::vector<std::string> given, int processes) {
        given.insert(given.begin(), {"--resume", "auto", place[0], place[1]});
        TrainingLine line = train(given, of_4, processes);
        const Options& o = line.options;
        std::string lines = text("%d %d %d", o.tp, o.pp, o.dp);
        for (const std::string& note : line.notes) lines += "; " + note;
        return lines;
    };
    CHECK(cut({}, 4) == "2 2 1");
    CHECK(cut({}, 12) == "2 2 3; --dp 3: the checkpoint had 1");
    CHECK(cut({}, 2) == "2 1 1; the checkpoint's --tp 2 --pp 2 need 4 processes: now --tp 2 --pp 1");
    CHECK(cut({}, 6) == "2 1 3; the checkpoint's --tp 2 --pp 2 need 4 processes: now --tp 2 --pp 1; --dp 3: "
                        "the checkpoint had "
                        "1");
    CHECK(cut({}, 3).starts_with(
        "1 1 3; the checkpoint's --tp 2 --pp 2 need 4 processes: now --tp 1 --pp 1; "));
    // given values stay
    CHECK(cut({"--pp", "2"}, 2)
              .starts_with("1 2 1; the checkpoint's --tp 2 with --pp 2 need 4 processes: now --tp 1 --pp 2"));
    CHECK(cut({"--tp", "1"}, 3)
              .starts_with("1 1 3; the checkpoint's --pp 2 with --tp 1 need 2 processes: now --tp 1 --pp 1"));
    CHECK(cut({"--dp", "2"}, 4)
              .starts_with(
                  "2 1 2; the checkpoint's --tp 2 --pp 2 with --dp 2 need 8 processes: now --tp 2 --pp 1"));
    CHECK_REFUSED(cut({"--tp", "2", "--pp", "2"}, 3), "--tp 2 --pp 2: a multiple of 4 processes is needed");
    CHECK_REFUSED(cut({"--tp", "2"}, 3), "a multiple of 4 processes is needed");
    CHECK_REFUSED(cut({"--dp", "3"}, 4), "--dp 3: with --tp 2 and --pp 2 needs 12 processes");
    CHECK_REFUSED(
        cut({}, 1000),
        "was made by 4 processes, and its options do not fit 1000; start 4, or: --global-batch 12288");
    // --init: only the new run's options decide the layout
    TrainingLine line = train({"--init", "runs/a", "--train-data", "x"}, of_4, 3);
    CHECK(line.options.dp == 3);
    CHECK(line.notes.empty());
}

TEST_CASE("a run that was moved away from its files asks for all of them at once") {
    Checkpoints moved = at_runs_a({"--run-dir", "runs/a", "--val-data", "y.bin"});
    moved["runs/a"].gone = {"--train-data", "--val-data"};
    CHECK(error_of([&] { train_line("--resume runs/a", moved); }) ==
          "runs/a/checkpoints/step_00000100: was made with files that are missing here; give these options "
          "with their new paths: --train-data 'x.bin' --val-data 'y.bin'");
    CHECK_REFUSED(train_line("--resume runs/a --train-data z.bin", moved), "paths: --val-data 'y.bin'");
    CHECK(train_line("--resume runs/a --train-data z --val-data z", moved).options.train_data == "z");
    CHECK(train_line("--init runs/a --train-data z", moved).weights_only);
}

TEST_CASE("the run directory follows from the checkpoint, or from the model") {
    StoredRun tiny = run_with({});
    tiny.run_dir = "runs/tiny";
    CHECK(train({"--resume", "auto", "--train-data", "x"}, {{"runs/tiny", tiny}}).origin->step == 100);
    CHECK(train({"--resume", "auto", "--train-data", "x"}, {{"runs/other", tiny}}).options.run_dir ==
          "runs/tiny");
    StoredRun gpt2 = run_with({"--model", "gpt2-124M"});
    gpt2.run_dir = "runs/gpt2-124M";
    CHECK(train({"--resume", "auto", "--model", "gpt2-124M"}, {{"runs/gpt2-124M", gpt2}}).options.channels ==
          768);

    Checkpoints named = {{"elsewhere/step_00000100", run_with({"--run-dir", "runs/a"})}};
    TrainingLine line = train({"--resume", "elsewhere/step_00000100"}, named);
    CHECK(line.options.run_dir == "runs/a");
    CHECK(line.folder == RunFolder::continued);
    line = train({"--resume", "elsewhere/step_00000100", "--run-dir", "runs/branch"}, named);
    CHECK(line.options.run_dir == "runs/branch");
    CHECK(line.folder == RunFolder::fresh);
    named.begin()->second.run_dir = "";
    CHECK(train({"--resume", "elsewhere/step_00000100"}, named).options.run_dir == "runs/tiny");

    // a model that has been moved since
    TemporaryFolder folder;
    StoredRun moved = run_with({});
    moved.options["model"] = folder / "gone/My-Model/config.json";
    CHECK(train({"--init", "m", "--train-data", "x"}, {{"m", moved}}).options.run_dir == "runs/My-Model");
    moved.options["model"] = folder / "gone/My-Model-0.6B/";
    CHECK(train({"--init", "m", "--train-data", "x"}, {{"m", moved}}).options.run_dir ==
          "runs/My-Model-0.6B");
}

TEST_CASE("a run that can begin or go on with the same words") {
    TrainingLine line = train({"--resume", "auto", "--train-data", "x.bin", "--layers", "2"});
    CHECK(!line.origin);
    CHECK(line.options.layers == 2);
    CHECK(line.options.tokenizer == "bytes");
    CHECK(line.folder == RunFolder::continued);
    CHECK(line.notes == std::vector<std::string>{"no checkpoint in runs/tiny yet: a new run begins"});

    Checkpoints base = {{"base", run_with({"--layers", "3"})}};
    std::vector<std::string> words = {"--resume",  "auto",       "--init",       "base",
                                      "--run-dir", "runs/tuned", "--train-data", "y.bin"};
    line = train(words, base);
    CHECK(line.weights_only);
    CHECK(line.options.layers == 3);
    base["runs/tuned"] = run_with({"--layers", "3", "--run-dir", "runs/tuned", "--learning-rate", "1e-5"});
    base["runs/tuned"].run_dir = "runs/tuned";
    line = train(words, base);
    CHECK(!line.weights_only);
    CHECK(line.options.learning_rate == 1e-5f);
    CHECK(line.notes == std::vector<std::string>{"--train-data y.bin: the checkpoint had x.bin"});

    StoredRun broken = run_with({});
    broken.notes = {"passed over: step 300: torn; use another", "passed over: step 200: gone; use another"};
    std::vector<std::string> told = {"passed over: step 300: torn; use another",
                                     "passed over: step 200: gone; use another"};
    CHECK(train({"--init", "runs/a", "--train-data", "x"}, {{"runs/a", broken}}).notes == told);
    CHECK(train({"--resume", "runs/a"}, {{"runs/a", broken}}).notes == told);
}

TEST_CASE("the last checkpoint of a run may be in --fallback-dir") {
    auto at = [](int64_t step) {
        StoredRun run = run_with({"--run-dir", "runs/a"});
        run.step = step;
        run.checkpoint = std::to_string(step);
        run.older = {run.checkpoint + "'s older one"};
        return run;
    };
    std::string spare = shared_run_dir("spare", "runs/a");
    std::vector<std::string> words = {"--resume", "auto", "--run-dir", "runs/a", "--fallback-dir", "spare"};
    TrainingLine line = train(words, {{"runs/a", at(10)}, {spare, at(20)}});
    CHECK(line.origin->step == 20);
    CHECK(line.origin->run_dir == "runs/a");
    CHECK(line.origin->older == std::vector<std::string>{"10", "10's older one"});
    CHECK(line.folder == RunFolder::continued);
    CHECK(train(words, {{spare, at(20)}}).origin->step == 20);
    CHECK(train(words, {{"runs/a", at(30)}, {spare, at(20)}}).origin->step == 30);

    // a run has its own folder there, however its path is written
    CHECK(spare == shared_run_dir("spare", fs::current_path() / "runs/./b/../a/"));
    CHECK(spare != shared_run_dir("spare", "runs/b"));
    CHECK(spare != shared_run_dir("spare", "other/a"));
    CHECK(spare.starts_with("spare/a-"));

    // if one place cannot be used, the other still is
    auto parse = [&](const char* broken, const char* whole) {
        std::vector<std::string> arguments = words;
        arguments.insert(arguments.begin(), "train");
        return parse_training(read_arguments(command_train, arguments), 1,
                              [&](const std::string& place) -> std::optional<StoredRun> {
                                  if (place == broken) fail("%s: damaged; use another", broken);
                                  if (place == whole) return at(5);
                                  return std::nullopt;
                              });
    };
    line = parse("runs/a", spare.c_str());
    CHECK(line.origin->step == 5);
    CHECK(line.notes.back() == "passed over: runs/a: damaged; use another");
    CHECK(parse(spare.c_str(), "runs/a").origin->step == 5);
    CHECK_REFUSED(parse("runs/a", ""), "runs/a: damaged; use another");

    // without the option, too: the run has it from its checkpoint, wherever it is resumed
    std::string absolute = fs::current_path() / "spare";
    Checkpoints checkpoints = at_runs_a({"--run-dir", "runs/a", "--fallback-dir", "spare"});
    auto folder_of = [&](const std::string& line) {
        return train_line("--run-dir runs/a " + line, checkpoints).options.fallback_dir;
    };
    CHECK(folder_of("--resume auto") == absolute);
    CHECK(folder_of("--resume runs/a") == absolute);
    CHECK(folder_of("--resume auto --fallback-dir /else") == "/else");
    CHECK(folder_of("--resume auto --fallback-dir=") == "");
    CHECK(folder_of("--init runs/a --train-data x") == "");
    checkpoints.at("runs/a").options.erase("fallback_dir");
    CHECK(folder_of("--resume auto") == "");
}

TEST_CASE("ways to begin that exclude each other, or lead nowhere") {
    Checkpoints checkpoints = at_runs_a({"--run-dir", "runs/a"});
    const struct {
        std::string line;
        const char* words;
    } rows[] = {
        {"--resume runs/b", "--resume runs/b: no checkpoint there; "},
        {"--init runs/b", "--init runs/b: no checkpoint there; "},
        {"--init auto", "--init auto: no checkpoint there; "},
        {"--resume runs/a --overwrite",
         "--overwrite: would delete what --resume runs/a/checkpoints/step_00000100 reads; "},
        {"--resume auto --run-dir runs/a --overwrite",
         "--overwrite: would delete what --resume auto resumes from; "},
        {"--init runs/a --run-dir runs/a --overwrite --train-data x",
         "--overwrite: would delete what --init runs/a/checkpoints/step_00000100 reads; "},
        {"--resume runs/a --init runs/a", "--init runs/a: the weights already come from --resume runs/a; "},
        {"--resume auto --init runs/a", "--run-dir: missing; "},
        {"--resume auto --model tyni", "neither a preset nor a config.json"},
        {"--train-data x --keep-every 500", "--keep-every 500: is not a multiple of --save-every 1000; "},
        {"--train-data x --keep-every 500 --save-every 0", "--save-every 0; "},
        {"--train-data x --keep-every 500 --save-every 10m", "--save-every 10m; give --save-every a divisor"},
        {"--train-data x --keep-every 500 --save-every auto", "--save-every auto; "},
    };
    for (auto& row : rows) {
        CAPTURE(row.line);
        CHECK_REFUSED(train_line(row.line, checkpoints), row.words);
    }
    CHECK(train({"--train-data", "x", "--overwrite"}).folder == RunFolder::replaced);
    CHECK(train({"--train-data", "x"}).folder == RunFolder::fresh);
    CHECK(train_line("--train-data x --keep-every 500 --save-every 100").options.keep_every == 500);
}

TEST_CASE("weights alone: the model and its text, and nothing else") {
    StoredRun base = run_with({"--model", "gpt2-124M", "--layers", "2", "--tokenizer", "bytes", "--seed", "7",
                               "--learning-rate", "1e-3", "--steps", "50", "--sequence-length", "64",
                               "--zero", "1", "--document-end", "10"},
                              2);
    base.run_dir = "runs/base";
    Checkpoints checkpoints = {{"runs/base", base}};
    TrainingLine line =
        train({"--init", "runs/base", "--train-data", "y.bin", "--run-dir", "runs/tuned"}, checkpoints);
    const Options &o = line.options, fresh = train({"--train-data", "y.bin"}).options;
    CHECK(line.weights_only);
    CHECK(line.folder == RunFolder::fresh);
    CHECK(line.notes.empty());
    CHECK(o.model == "gpt2-124M");
    CHECK(o.layers == 2);
    CHECK(o.channels == 768);
    CHECK(o.vocab_size == 257);
    CHECK(o.tokenizer == "bytes");
    CHECK(o.document_end == 10);
    CHECK(o.sequence_length == 1024);
    CHECK(o.seed == fresh.seed);
    CHECK(o.learning_rate == fresh.learning_rate);
    CHECK(o.steps == fresh.steps);
    CHECK(o.zero == 0);
    CHECK(o.train_data == "y.bin");
    CHECK_REFUSED(train({"--init", "runs/base"}, checkpoints), "--train-data: missing; ");
    std::vector<std::string> words = {"--init", "runs/base", "--train-data", "y.bin"};
    auto with = [&](std::vector<std::string> more) {
        more.insert(more.begin(), words.begin(), words.end());
        return train(more, checkpoints);
    };
    CHECK(with({"--seed", "3", "--sequence-length", "32", "--learning-rate", "1"}).notes.empty());
    CHECK(with({"--document-end", "-1"}).notes[0] == "--document-end -1: the checkpoint had 10");
    CHECK_REFUSED(with({"--layers", "3"}), "--layers 3: the checkpoint ");
    CHECK_REFUSED(with({"--model", "tiny"}), "--model tiny: the checkpoint ");

    // an imported model: the record has no other options
    base.options = model_options_to_json(line.options);
    CHECK(!base.options.contains("seed"));
    CHECK(train(words, {{"runs/base", base}}).options.layers == 2);
    base.step = 0;
    TrainingLine resumed =
        train({"--resume", "runs/base", "--train-data", "z", "--seed", "3"}, {{"runs/base", base}});
    CHECK(resumed.options.seed == 3);
    CHECK(resumed.options.global_batch == 4 * 1024);
    CHECK(resumed.notes.empty());
    base.options.erase("layers");
    CHECK_REFUSED(train(words, {{"runs/base", base}}), "option layers is missing; ");
    base.options = nlohmann::json::array();
    CHECK_REFUSED(train(words, {{"runs/base", base}}), "options are not a JSON object; ");
}

TEST_CASE("weights of a model with RoPE may get another context, and other wavelengths") {
    using Lines = std::vector<std::string>;
    Checkpoints checkpoints = at_runs_a({"--run-dir", "runs/a"});
    auto init = [&](const std::string& more) {
        return train_line("--init runs/a --run-dir runs/b --train-data x.bin " + more, checkpoints);
    };
    TrainingLine line = init("--context 512 --rope-scaling 2");
    CHECK(line.options.context == 512);
    CHECK(line.options.sequence_length == 512);
    CHECK(line.options.rope_original_context == 256);
    CHECK(line.notes ==
          Lines{"--context 512: the checkpoint had 256", "--rope-scaling 2: the checkpoint had 1"});
    CHECK(init("--context 512 --rope-theta 50000").notes ==
          Lines{"--context 512: the checkpoint had 256", "--rope-theta 50000: the checkpoint had 10000"});
    CHECK(init("--context 1024").notes == Lines{"--context 1024: the checkpoint had 256",
                                                "the context is longer and RoPE is unchanged; --rope-scaling "
                                                "4 or a larger --rope-theta is usual"});
    CHECK(init("--context 128").notes == Lines{"--context 128: the checkpoint had 256"});
    CHECK(init("--rope-scaling 2 --rope-original-context 1").options.rope_original_context == 1);
    CHECK(init("").options.rope_original_context == 8192);
    CHECK_REFUSED(init("--context 512 --rope-dims 16"), "--rope-dims 16: the checkpoint ");
    CHECK_REFUSED(init("--context 512 --sequence-length 600"), "--sequence-length 600: longer than ");
    CHECK_REFUSED(train_line("--resume runs/a --context 512", checkpoints), "--context 512: the checkpoint ");
    CHECK_REFUSED(train_line("--resume runs/a --rope-theta 9", checkpoints),
                  "--rope-theta 9: the checkpoint ");

    // weights whose context was stretched are stretched further from the original context
    checkpoints.at("runs/a").options = options_to_json(line.options);
    CHECK(init("--context 1024 --rope-scaling 4").options.rope_original_context == 256);
    CHECK(
        init("--context 1024").notes.back().ends_with("--rope-scaling 4 or a larger --rope-theta is usual"));
    CHECK(train_line("--resume runs/a --context 512 --rope-scaling 2", checkpoints).notes.empty());

    checkpoints = at_runs_a({"--model", "gpt2-124M", "--run-dir", "runs/a"});
    for (const char* context : {"512", "2048"})
        CHECK_REFUSED(
            init("--context " + std::string(context)),
            "--context " + std::string(context) +
                ": the checkpoint runs/a/checkpoints/step_00000100 was made with 1024; each "
                "position has a learned vector; leave the option out, or begin a run with --position rope");
    CHECK_REFUSED(init("--rope-scaling 2"), "--rope-scaling 2: the checkpoint ");
}

TEST_CASE("the tokenizer is the copy in the run, unless another is given") {
    std::string llama3 = "test/golden/tokenizers/llama3.json";
    Checkpoints checkpoints = at_runs_a({"--tokenizer", llama3.c_str(), "--run-dir", "runs/a"});
    StoredRun& run = checkpoints.at("runs/a");
    run.options["tokenizer"] = "gone/since.json";
    CHECK_REFUSED(train({"--resume", "runs/a"}, checkpoints), "gone/since.json: cannot open it");
    run.tokenizer = llama3;
    TrainingLine line = train({"--resume", "runs/a"}, checkpoints);
    CHECK(line.options.tokenizer == llama3);
    CHECK(line.notes.empty());
    // the file it came from is the same tokenizer, and another is refused
    line = train({"--resume", "runs/a", "--tokenizer", "./test/golden/tokenizers/llama3.json"}, checkpoints);
    CHECK(line.options.tokenizer == llama3);
    CHECK(line.notes.empty());
    for (const char* other : {"bytes", "none", "test/golden/tokenizers/gpt2.json"}) {
        CHECK_REFUSED(train({"--resume", "runs/a", "--tokenizer", other}, checkpoints),
                      "the run has another, " + llama3);
    }
    // if only the weights are used, a new tokenizer brings its own end-of-document token, unless one is given
    int llama3_end = Tokenizer::load(llama3).end_of_text(), bytes_end = Tokenizer::byte_end_of_text;
    line = train({"--init", "runs/a", "--tokenizer", "bytes", "--train-data", "y.bin"}, checkpoints);
    CHECK(line.options.tokenizer == "bytes");
    CHECK(line.options.vocab_size == Tokenizer::load(llama3).vocab_size());
    CHECK(line.options.document_end == bytes_end);
    CHECK(line.notes ==
          std::vector<std::string>{"--tokenizer bytes: the checkpoint had " + llama3,
                                   text("--document-end %d: the checkpoint had %d", bytes_end, llama3_end)});
    line = train({"--init", "runs/a", "--tokenizer", "bytes", "--document-end", "7", "--train-data", "y.bin"},
                 checkpoints);
    CHECK(line.options.document_end == 7);

    Checkpoints bytes = at_runs_a({"--run-dir", "runs/a"});
    bytes.at("runs/a").tokenizer = llama3;  // ignored: the run uses bytes
    CHECK(train({"--resume", "runs/a"}, bytes).options.tokenizer == "bytes");
    CHECK_REFUSED(train({"--resume", "runs/a", "--tokenizer", llama3.c_str()}, bytes),
                  "the run has another, bytes");
    CHECK_REFUSED(train({"--init", "runs/a", "--train-data", "y.bin", "--tokenizer", llama3.c_str()}, bytes),
                  "but the model of runs/a/checkpoints/step_00000100 has only 257; ");
}

TEST_CASE("the places where a run may begin follow from the command line") {
    auto places = [](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "train");
        return origin_places(asked_options(read_arguments(command_train, arguments)));
    };
    using Places = std::vector<std::string>;
    CHECK(places({}) == Places{});
    CHECK(places({"--resume", "a/b"}) == Places{"a/b"});
    CHECK(places({"--init", "a"}) == Places{"a"});
    CHECK(places({"--resume", "auto", "--model", "gpt2-124M"}) ==
          Places{"runs/gpt2-124M", "runs/gpt2-124M/options.json"});
    CHECK(places({"--resume", "auto", "--run-dir", "c", "--init", "a"}) ==
          Places{"c", "a", "c/options.json"});
    CHECK(places({"--resume", "auto", "--run-dir", "c", "--fallback-dir", "d"}) ==
          Places{"c", "c/options.json", shared_run_dir("d", "c")});
    CHECK(places({"--resume", "c", "--fallback-dir", "d"}) == Places{"c"});
    CHECK_REFUSED(places({"--resume", "a", "--init", "b"}),
                  "--init b: the weights already come from --resume a");
}

TEST_CASE("options of other programs") {
    Checkpoints checkpoints = at_runs_a({"--run-dir", "runs/a", "--seed", "7"});
    StoredRun& run = checkpoints.at("runs/a");
    run.options.erase("seed");
    run.options.erase("save_every");
    run.options.erase("pp_chunks");
    TrainingLine line = train({"--resume", "runs/a", "--seed", "3", "--save-every", "5"}, checkpoints);
    CHECK(line.options.seed == 3);
    CHECK(line.notes.empty());
    CHECK(train({"--resume", "runs/a"}, checkpoints).options.seed == Options().seed);
    run.options["no_such"] = true;
    CHECK_REFUSED(train({"--resume", "runs/a"}, checkpoints), "option no_such is not known here; ");
}

// ----------------------------------------------------------------------------
// checkpoints on disk

static const std::vector<float> some_values = {1, 2, 3, 4, 5, 6};

static void make_checkpoint(const std::string& run_dir, int64_t step, const nlohmann::ordered_json& options) {
    CheckpointBuilder builder(
        run_dir, step, {{"program", "test"}, {"step", step}, {"samples", 4 * step}, {"options", options}},
        {{"wte", {3, 2}, {Dtype::fp32}}});
    builder.append(0, Slot::weight, 0, 6, some_values.data());
    builder.commit();
}

TEST_CASE("the newest checkpoint that can be used is found") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    auto options = options_to_json(train({"--train-data", "x"}).options);
    CHECK(!find_checkpoint(run));
    fs::create_directories(run);
    CHECK(!find_checkpoint(run));
    for (int step : {5, 10, 100}) make_checkpoint(run, step, options);
    fs::create_directories(checkpoint_folder(run, 200) + ".partial");
    std::optional<StoredRun> found = find_checkpoint(run);
    REQUIRE(found);
    CHECK(found->step == 100);
    CHECK(found->checkpoint == checkpoint_folder(run, 100));
    CHECK(found->run_dir == run);
    CHECK(found->tokenizer.empty());
    CHECK(found->options == nlohmann::json(options));
    CHECK(found->notes.empty());
    CHECK(found->older == std::vector{checkpoint_folder(run, 10), checkpoint_folder(run, 5)});
    CHECK(found->index == read_text(index_path(found->checkpoint)));
    write_file(tokenizer_path(run), "{}");
    CHECK(find_checkpoint(run)->tokenizer == tokenizer_path(run));
    CHECK(find_checkpoint(checkpoint_folder(run, 10))->step == 10);
    CHECK(find_checkpoint(checkpoint_folder(run, 10))->older.empty());
    CHECK(find_checkpoint(checkpoint_folder(run, 10) + "/")->run_dir == run);

    // the whole way from the command line to the disk
    auto parse = [](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "train");
        return parse_training(read_arguments(command_train, arguments));
    };
    std::string other = run + "/../run";
    fs::remove(tokenizer_path(run));
    TrainingLine line = parse({"--resume", run.c_str(), "--run-dir", other.c_str()});
    CHECK(line.folder == RunFolder::continued);
    CHECK(line.origin->step == 100);

    // damage
    fs::resize_file(checkpoint_folder(run, 100) + "/data_00000.bin", 70);
    fs::remove(checkpoint_folder(run, 10) + "/data_00000.bin");
    found = find_checkpoint(run);
    REQUIRE(found);
    CHECK(found->step == 5);
    REQUIRE(found->notes.size() == 2);
    CHECK(found->notes[0].starts_with("passed over: " + checkpoint_folder(run, 100)));
    CHECK(found->notes[1].starts_with("passed over: " + checkpoint_folder(run, 10)));
    CHECK(parse({"--init", run.c_str(), "--train-data", "x"}).notes.size() == 2);
    CHECK_REFUSED(find_checkpoint(checkpoint_folder(run, 10)), checkpoint_folder(run, 10));
    fs::remove_all(checkpoint_folder(run, 10));
    fs::remove_all(checkpoint_folder(run, 100));
    fs::rename(checkpoint_folder(run, 5), checkpoint_folder(run, 7));
    CHECK_REFUSED(find_checkpoint(run), run + ": has 1 checkpoint, but none can be used; the newest: ");
    CHECK_REFUSED(find_checkpoint(run), "holds a checkpoint of step 5; ");
    CHECK_REFUSED(parse({"--resume", "auto", "--run-dir", run.c_str()}), "none can be used");
}

TEST_CASE("a run's last checkpoint is found in the --fallback-dir that its record names") {
    TemporaryFolder folder;
    std::string run = folder / "run", spare = folder / "spare";
    Options options = train({"--train-data", "x", "--fallback-dir", spare}).options;
    auto found = [&](std::vector<std::string> line) {
        line.insert(line.begin(), {"train", "--resume", "auto", "--train-data", "x"});
        return parse_training(read_arguments(command_train, line));
    };
    make_checkpoint(run, 5, options_to_json(options));
    write_run_options(run, options_to_json(options));
    CHECK(found({"--run-dir", run}).origin->step == 5);
    make_checkpoint(shared_run_dir(spare, run), 6, options_to_json(options));
    for (const std::string& written : {run, run + "/", folder / "spare/../run"}) {
        TrainingLine line = found({"--run-dir", written});
        CHECK(line.origin->step == 6);
        CHECK(line.origin->older == std::vector{checkpoint_folder(written, 5)});
        CHECK(line.options.fallback_dir == spare);
        CHECK(line.folder == RunFolder::continued);
        CHECK(line.notes.empty());
    }
    CHECK(found({"--run-dir", run, "--fallback-dir", folder / "other"}).origin->step == 6);
    CHECK(found({"--run-dir", run, "--fallback-dir", spare}).origin->step == 6);
    fs::remove_all(checkpoints_folder(run));
    CHECK(found({"--run-dir", run}).origin->step == 6);
    make_checkpoint(run, 7, options_to_json(options));
    CHECK(found({"--run-dir", run}).origin->step == 7);
    // records without the option, and one that cannot be read
    for (const char* record : {"{}", "[]", "{\"fallback_dir\": 1}", "{\"fallback_dir\": \"\"}"}) {
        write_file(options_path(run), record);
        CHECK(found({"--run-dir", run}).notes.empty());
    }
    write_file(options_path(run), "{");
    CHECK(found({"--run-dir", run}).notes.back().starts_with("passed over: options.json: not valid JSON"));
}

TEST_CASE("a checkpoint that lacks only its name gets it") {
    TemporaryFolder folder;
    std::string run = folder / "run", partial = checkpoint_folder(run, 20) + ".partial";
    auto options = options_to_json(train({"--train-data", "x"}).options);
    auto interrupt = [&] {
        fs::remove_all(partial);
        make_checkpoint(run, 20, options);
        fs::rename(checkpoint_folder(run, 20), partial);
    };
    make_checkpoint(run, 10, options);
    write_file(log_path(run), "");
    interrupt();
    std::optional<StoredRun> found = find_checkpoint(run);
    REQUIRE(found);
    CHECK(found->step == 20);
    REQUIRE(found->notes.size() == 1);
    CHECK(found->notes[0].starts_with(partial + ": complete "));
    CHECK(!fs::exists(partial));
    fs::remove_all(checkpoint_folder(run, 20));

    interrupt();  // but one byte of it differs
    std::string data = contents(partial + "/data_00000.bin");
    data.back() ^= 1;
    write_file(partial + "/data_00000.bin", data);
    found = find_checkpoint(run);
    REQUIRE(found);
    CHECK(found->step == 10);
    REQUIRE(found->notes.size() == 1);
    CHECK(found->notes[0].starts_with("passed over: " + partial + ": 1 of "));

    interrupt();  // but the run that saves it is still alive
    {
        RunLog in_use(run, RunFolder::continued);
        CHECK(find_checkpoint(run)->step == 10);
        CHECK(find_checkpoint(run)->notes.empty());
    }
    make_checkpoint(run, 30, options);  // an older one is being removed
    CHECK(find_checkpoint(run)->step == 30);
    CHECK(fs::exists(partial));
}

TEST_CASE("the run that a checkpoint lies in") {
    CHECK(run_of_checkpoint("runs/a/checkpoints/step_00000001") == "runs/a");
    CHECK(run_of_checkpoint("runs/a/checkpoints/step_00000001//") == "runs/a");
    CHECK(run_of_checkpoint("/a/./checkpoints/b/../step_00000001") == "/a");
    CHECK(run_of_checkpoint("checkpoints/step_00000001") == ".");
    CHECK(run_of_checkpoint("step_00000001") == "");
    CHECK(run_of_checkpoint("backup/step_00000001") == "");
    CHECK(run_of_checkpoint("") == "");
}

TEST_CASE("a trained model is a run or a checkpoint of it") {
    TemporaryFolder folder;
    std::string run = folder / "run", llama3 = "test/golden/tokenizers/llama3.json";
    auto record = [&](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), {"--train-data", "x"});
        return options_to_json(train(arguments).options);
    };
    make_checkpoint(run, 5, record({"--layers", "2"}));
    make_checkpoint(run, 7, record({"--layers", "3"}));
    TrainedModel model(run, "");
    CHECK(model.options.layers == 3);
    CHECK(model.tokenizer->vocab_size() == 257);
    std::vector<float> values(6);
    model.reader.read_floats(0, Slot::weight, 0, 6, values.data());
    CHECK(values == some_values);
    CHECK(TrainedModel(checkpoint_folder(run, 5), "").options.layers == 2);
    CHECK(!TrainedModel(run, "none").tokenizer);
    CHECK_REFUSED(TrainedModel(run, llama3),
                  "but the model of " + checkpoint_folder(run, 7) + " has only 257; ");
    CHECK_REFUSED(TrainedModel(folder / "none", ""), folder / "none" + ": ");

    make_checkpoint(run, 9, record({"--tokenizer", llama3.c_str()}));
    CHECK_REFUSED(TrainedModel(run, ""), run + "/tokenizer.json: the tokenizer of the run is missing; ");
    fs::copy_file(llama3, tokenizer_path(run));
    CHECK(TrainedModel(run, "").tokenizer->file() == tokenizer_path(run));
    CHECK(TrainedModel(checkpoint_folder(run, 9), "").tokenizer->file() == tokenizer_path(run));
    make_checkpoint(run, 10, {{"layers", 1}});
    CHECK_REFUSED(TrainedModel(run, ""), checkpoint_folder(run, 10) + ": option ");
}
