// Options, presets and Hugging Face configs: what is read, and the one-line errors for bad input.
#include <set>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <variant>

#include "data/launch/parse_command_line.h"
#include "kernels/rope.cuh"
#include "test/support/file_testing.h"
#include "test/data/hf_configs.h"

static CommandLine parse(Command command, std::vector<std::string> arguments, int processes = 1) {
    arguments.insert(arguments.begin(), command_name(command));
    GivenOptions given = read_arguments(command, arguments);
    return parse_options(command, given, processes);
}

// The options of a command other than train.
template <typename O>
static O options_of(std::vector<std::string> arguments) {
    CommandLine line = parse(O::command, arguments);
    if constexpr (std::is_constructible_v<FileCommand, O>)
        return std::get<O>(std::get<FileCommand>(line));
    else
        return std::get<O>(line);
}

static Options train(std::vector<std::string> arguments, int processes = 1) {
    arguments.insert(arguments.begin(), {"--train-data", "x.bin"});
    return std::get<TrainingLine>(parse(command_train, arguments, processes)).options;
}

// Parses a line of options of `train`.
static Options train_line(std::string_view line, int processes = 1) {
    std::string copy(line);
    return train(words_of(copy), processes);
}

// Parses a whole command line, which begins with the command.
static CommandLine typed(std::string_view line) {
    std::string copy(line);
    std::vector<std::string> words = words_of(copy);
    return parse(parse_command(words[0]), {words.begin() + 1, words.end()});
}

// A config file with this content.
struct ConfigFile {
    TemporaryFolder folder;
    std::string path = folder / "run.conf";
    explicit ConfigFile(const std::string& content) { write_file(path, content); }
};

TEST_CASE("presets have the published numbers of parameters") {
    struct {
        const char* name;
        int64_t parameters;
    } published[] = {
        {"gpt2-124M", 124439808},     {"gpt2-350M", 354823168},     {"gpt2-774M", 774030080},
        {"gpt2-1558M", 1557611200},   {"llama2-7B", 6738415616},    {"llama3-8B", 8030261248},
        {"llama3-70B", 70553706496},  {"llama3.1-8B", 8030261248},  {"llama3.2-1B", 1235814400},
        {"llama3.2-3B", 3212749824},  {"mistral-7B", 7241732096},   {"qwen2.5-0.5B", 494032768},
        {"qwen2.5-1.5B", 1543714304}, {"qwen2.5-7B", 7615616512},   {"qwen3-0.6B", 596049920},
        {"qwen3-1.7B", 1720574976},   {"qwen3-8B", 8190735360},     {"yuan2-2B", 2088724480},
        {"yuan2-51B", 51842105344},   {"yuan2-102B", 102577954816},
    };
    for (auto& row : published) {
        INFO(row.name);
        const Preset* preset = find_preset(row.name);
        REQUIRE(preset);
        ModelConfig config = preset->config;
        complete(config);
        CHECK(parameter_count(config) == row.parameters);
    }
    // The paper gives two or three digits.
    for (auto [name, billions] : {std::pair{"gpt3-125M", 0.125},
                                  {"gpt3-350M", 0.356},
                                  {"gpt3-760M", 0.760},
                                  {"gpt3-2.7B", 2.65},
                                  {"gpt3-6.7B", 6.66},
                                  {"gpt3-175B", 174.6}}) {
        ModelConfig config = find_preset(name)->config;
        complete(config);
        CHECK(parameter_count(config) / 1e9 == doctest::Approx(billions).epsilon(0.01));
    }
}

TEST_CASE("every preset is accepted and makes the same options again from its record") {
    for (const Preset& preset : preset_table()) {
        Options options = train({"--model", preset.name});
        auto record = options_to_json(options);
        Options again = options_from_json(nlohmann::json::parse(record.dump()), "record");
        CHECK(options_to_json(again) == record);
        CHECK(again.head_size > 0);
    }
}

TEST_CASE("what earlier versions recorded is read, with every value that an option had") {
    const std::string folder = "test/golden/earlier_run/";
    auto record = nlohmann::json::parse(std::ifstream(folder + "run/options.json"));
    CHECK(options_from_json(record, "record").channels == 24);
    std::ifstream file(folder + "option_values");
    int values = 0;
    for (std::string name, value; file >> name >> value; values++) {
        CAPTURE(name);
        CAPTURE(value);
        nlohmann::json other = record;
        REQUIRE(other.contains(name));
        other[name] = value;
        std::string error = error_of([&] { options_from_json(other, "record"); });
        CHECK(error == "no error");
    }
    CHECK(values >= 31);
}

TEST_CASE("bf16 products that an earlier version recorded were those of its build") {
    auto record = nlohmann::json::parse(std::ifstream("test/golden/earlier_run/run/options.json"));
    REQUIRE(record["matmul_dtype"] == "bf16");
    CHECK(options_from_json(record, "record").matmul_dtype == MatmulDtype::automatic);
    for (const char* value : {"auto", "fp32", "bf16", "fp8"}) {
        nlohmann::json today = options_to_json(train({"--matmul-dtype", value}));
        CHECK(name_of(options_from_json(today, "record").matmul_dtype) == std::string(value));
    }
    nlohmann::json later = options_to_json(Options());
    later["record_form"] = 3;
    CHECK(error_of([&] { options_from_json(later, "record"); }) ==
          "record: options are in an unknown format; use the program that wrote the file");
}

TEST_CASE("explicit options come over the preset, in any order, and the rest follows") {
    Options options =
        train({"--channels=256", "--model", "gpt2-124M", "--heads", "4", "--learning-rate", "1e-3"});
    CHECK(options.layers == 12);
    CHECK(options.channels == 256);
    CHECK(options.head_size == 64);
    CHECK(options.kv_heads == 4);
    CHECK(options.mlp_width == 1024);
    CHECK(options.learning_rate == 1e-3f);
    CHECK(options.sequence_length == 1024);
    CHECK(options.global_batch == 4 * 1024);
    CHECK(options.warmup_steps == 50);
    CHECK(options.run_dir == "runs/gpt2-124M");
    CHECK(train({}).tokenizer == "bytes");
    CHECK(train({}).document_end == 256);
    CHECK(train({"--seed", "1", "--seed", "2"}).seed == 2);
    CHECK(train({"--model", "gpt2-124M", "--global-batch", "512k"}).global_batch == 524288);
    CHECK(train({"--micro-batch", "1024", "--sequence-length", "256", "--global-batch", "1M"}).global_batch ==
          1 << 20);
    CHECK(train({"--document-end", "-1"}).document_end == -1);
    CHECK(train({"--tokenizer", "none"}).document_end == -1);  // not the end of the model's own
    CHECK(train({"--beta1", "0.999999"}).beta1 == 0.999999f);
}

TEST_CASE("numbers with a suffix are powers of 1000 where things are counted, and of 1024 in sizes") {
    const struct {
        const char *option, *given;
        long long value;
    } rows[] = {
        {"--steps", "20k", 20000},
        {"--steps", "1.5M", 1500000},
        {"--steps", "2e3", 2000},
        {"--steps", "4Ki", 4096},
        {"--val-tokens", "300B", 300000000000},
        {"--val-tokens", "0.3G", 300000000},
        {"--val-tokens", "1.15k", 1150},
        {"--val-tokens", "0.7T", 700000000000},
        {"--val-tokens", "1.5Gi", 3LL << 29},
        {"--val-tokens", "0.5Ti", 1LL << 39},
        {"--val-tokens", "128Mi", 128 << 20},
        {"--warmup-steps", "-1", -1},
        {"--max-time", "3h50m", 13800},
        {"--max-time", "90m", 5400},
        {"--max-time", "1h1m1s", 3661},
        {"--max-time", "45", 45},
        {"--global-batch", "512k", 512 << 10},
        {"--global-batch", "512Ki", 512 << 10},
        {"--global-batch", "1.5M", 3 << 19},
        {"--global-batch", "1G", 1 << 30},
        {"--global-batch", "3e2", 300},
    };
    for (auto& row : rows) {
        CAPTURE(row.given);
        Options options;
        const OptionRow& option = *find_option(row.option, command_train);
        set_value(option, options, row.given);
        CHECK(value_text(option, options) == std::to_string(row.value));
    }
    CHECK(train({"--save-every", "1k"}).save_every.count == 1000);
    CHECK(options_of<TokenizeOptions>({"a", "--output", "o", "--train-tokenizer", "32k"}).train_tokenizer ==
          32000);
    CHECK(options_of<TokenizeOptions>({"a", "--output", "o", "--tokenizer-text", "1M"}).tokenizer_text ==
          1 << 20);
    CHECK(parse_batch_ramp("1k:2k:3k").steps == 3000);
    std::string help = help_text(command_train, 200);
    CHECK(help.find(
              "--steps N                   Optimizer steps of the run. [at least 1; k, M, B, T: powers of "
              "1000; Ki to Ti: of 1024; default 1000]") != std::string::npos);
    CHECK(help.find("; k, M, G: powers of 1024; default 0]") != std::string::npos);
}

TEST_CASE("switches") {
    CHECK(!train({}).bias);
    CHECK(!train({"--model", "gpt2-124M", "--bias", "off", "--steps", "3"}).bias);
    CHECK(train({"--bias"}).bias);
    CHECK(train({"--bias", "on"}).bias);
    CHECK(train({"--bias", "--steps", "3"}).bias);
    CHECK(train({"--bias=off", "--model", "gpt2-124M"}).bias == false);
    CHECK_REFUSED(train({"--bias=maybe"}), "--bias maybe: not a switch; give on or off");
}

TEST_CASE("commands with arguments that have no name") {
    TokenizeOptions options =
        options_of<TokenizeOptions>({"a,b.txt", "--output", "o", "--overwrite", "c", "--shard-tokens", "4k"});
    CHECK(options.inputs == std::vector<std::string>{"a,b.txt", "c"});
    CHECK(options.shard_tokens == 4000);
    CHECK(options.overwrite);
    CHECK(options_of<SampleOptions>({"--seed", "3", "runs/tiny"}).run == "runs/tiny");
    CHECK(options_of<SampleOptions>({"r", "--prompt", "a b, -c", "--prompt", ""}).prompt ==
          std::vector<std::string>{"a b, -c", ""});
    CHECK(parse_command("sample") == command_sample);
}

TEST_CASE("an interval is of steps or of time, or is chosen, and comes back from a record") {
    const struct {
        const char *given, *shown, *in_json;
        Interval::Unit unit;
        int count;
    } rows[] = {{"500", "500", "500", Interval::steps, 500},
                {"0", "0", "0", Interval::steps, 0},
                {"90s", "90s", "\"90s\"", Interval::seconds, 90},
                {"600s", "10m", "\"10m\"", Interval::seconds, 600},
                {"10m", "10m", "\"10m\"", Interval::seconds, 600},
                {"1h30m", "90m", "\"90m\"", Interval::seconds, 5400},
                {"120m", "2h", "\"2h\"", Interval::seconds, 7200},
                {"auto", "auto", "\"auto\"", Interval::best, 0}};
    for (auto& row : rows) {
        CAPTURE(row.given);
        Options options = train({"--save-every", row.given});
        CHECK(options.save_every.unit == row.unit);
        CHECK(options.save_every.count == row.count);
        CHECK(value_text(*find_option("--save-every"), options) == row.shown);
        nlohmann::json record = options_to_json(options);
        CHECK(record["save_every"].dump() == row.in_json);
        Interval again = options_from_json(record, "record").save_every;
        CHECK(again.unit == row.unit);
        CHECK(again.count == row.count);
    }
}

TEST_CASE("bad options") {
    const struct {
        std::string_view line;
        const char* words;
    } rows[] = {
        // numbers
        {"--layers 0", "--layers 0: out of range; give a whole number from 1 to 10000"},
        {"--layers 12abc", "--layers 12abc: not a number; "},
        {"--layers 1.5", "--layers 1.5: not a number; "},
        {"--layers +3", "not a number; "},
        {"--steps 99999999999999999999",
         "out of range; give a whole number from 1 to 2147483647 (k, M, B, T"},
        {"--seed 2147483648", "--seed 2147483648: out of range; give a whole number from 0 to 2147483647"},
        {"--seed -1", "--seed -1: out of range; give a whole number of at least 0"},
        {"--log-every 0", "--log-every 0: out of range; give a whole number of at least 1"},
        {"--steps -3", "--steps -3: out of range; give a whole number of at least 1"},
        {"--steps 1kk", "--steps 1kk: not a number; "},
        {"--max-time 50m3h", "--max-time 50m3h: not a number; give a whole number of at least 0"},
        {"--max-time 3d", "--max-time 3d: not a number; "},
        {"--max-time 1h-5m", "--max-time 1h-5m: out of range; "},
        {"--max-time 999999h", "--max-time 999999h: out of range; "},
        {"--steps 1e", "--steps 1e: not a number; "},
        {"--steps 1e-3", "--steps 1e-3: not a number; "},
        {"--steps 1.5", "--steps 1.5: not a whole number; "},
        {"--steps 1.0005k", "--steps 1.0005k: not a whole number; "},
        {"--steps 3B", "--steps 3B: out of range; give a whole number from 1 to 2147483647"},
        {"--steps 1e999", "--steps 1e999: out of range; "},
        {"--val-tokens 2T", "--val-tokens 2000000000000: out of range; "},
        {"--layers 1k", "--layers 1k: not a number; "},
        {"--seed 1e3", "--seed 1e3: not a number; "},
        {"--global-batch k", "not a number; "},
        {"--global-batch 9999999999G", "out of range; "},
        {"--global-batch 0.5B",
         "--global-batch 0.5B: either 500000000, by powers of 1000, or 536870912, by "},
        {"--global-batch 1e6",
         "--global-batch 1e6: either 1000000, by powers of 1000, or 1048576, by powers "},
        {"--global-batch 1T",
         "either 1000000000000, by powers of 1000, or 1099511627776, by powers of 1024; "},
        {"--global-batch -1k", "out of range; "},
        {"--learning-rate nan", "not a finite number; give a number from 0 to 10"},
        {"--learning-rate inf", "not a finite number; "},
        {"--learning-rate 1e-3x", "not a number; "},
        {"--learning-rate 1e999", "out of range; "},
        {"--learning-rate 0x1", "not a number; "},
        {"--beta2 1", "out of range; "},
        {"--channels 8388608", "--channels 8388608: out of range; "},
        {"--head-size 512", "--head-size 512: out of range; give a whole number from 0 to 256"},
        // choices
        {"--schedule cosin", "not one of the choices; give cosine, linear, constant or wsd"},
        {"--bias maybe", "maybe: unexpected argument; write options as --name value and switches"},
        {"--model gpt2-124", "neither a preset nor a config.json, the nearest is gpt2-124M; "},
        {"--tokenizer bites", "--tokenizer bites: not a tokenizer; "},
        {"--tokenizer bites.json", "bites.json: cannot open it"},
        // names
        {"--lerning-rate 1", "no such option, the nearest is --learning-rate; "},
        {"--lerning-rate=1", "--lerning-rate: no such option, the nearest is --learning-rate; "},
        {"--xyzzy-plugh 1", "--xyzzy-plugh: no such option; "},
        {"-l 1", "-l: no such option; "},
        {"--lr 1", "--lr: no such option, it is --learning-rate here; "},
        {"--batch_size=8", "--batch_size: no such option, it is --micro-batch here, the sequences "},
        {"--dtype bf16", "--dtype: no such option, it is --matmul-dtype here; make PRECISION=bf16|fp32 "},
        {"--dropout 0.1", "--dropout: no such option, there is no dropout; "},
        {"--wandb on", "--wandb: no such option, a run writes log.jsonl, and train_gpt report makes "},
        {"--rope-base 1", "--rope-base: no such option, it is --rope-theta here; "},
        {"--top-k 1", "--top-k: not an option of train_gpt train; "},
        {"--evil\n\x1b[31m", "no such option"},
        // steps or a time
        {"--save-every often",
         "--save-every often: neither steps nor a time; give a number of steps, a time such as 90s, 10m or "
         "2h, or auto"},
        {"--save-every 10min", "--save-every 10min: neither steps nor a time; "},
        {"--save-every m", "--save-every m: neither steps nor a time; "},
        {"--save-every 1.5h", "--save-every 1.5h: neither steps nor a time; "},
        {"--save-every -5", "--save-every -5: out of range; "},
        {"--save-every 0s", "--save-every 0s: out of range; "},
        {"--save-every 9999999h", "--save-every 9999999h: out of range; "},
        {"--save-every 99999999999", "--save-every 99999999999: out of range; "},
        {"--failure-rate -1", "--failure-rate -1: out of range; "},
        // values that are missing, or that belong to no option
        {"--steps", "--steps: value missing; "},
        {"--steps --seed 3", "--steps: value missing before --seed; "},
        {"--train-data y.bin", "--train-data: given twice; name all files in one list, as in x.bin,y.bin"},
        {"3", "3: unexpected argument; "},
        {"-- 3", "3: unexpected argument; "},
    };
    for (auto& row : rows) {
        CAPTURE(row.line);
        CHECK_REFUSED(train_line(row.line), row.words);
    }
    CHECK_REFUSED(typed("tokenize a.txt --output b --pre-tokenizer metaspace"),
                  "--pre-tokenizer metaspace: not one of the choices; give gpt2, llama3 or qwen");
    CHECK_REFUSED(parse(command_train, {}), "--train-data: missing; ");
    CHECK_REFUSED(train({"--layers", " 3"}), "not a number; ");
    CHECK_REFUSED(train({"--layers", ""}), "--layers '': not a number; ");
    CHECK_REFUSED(train({"--schedule", ""}), "--schedule '': not one of the choices; ");
    CHECK_REFUSED(train({"--model", ""}), "neither a preset nor a config.json");
    CHECK_REFUSED(train({"--matmul-tuning", ""}), "--matmul-tuning: empty; give on, off or a file");
}

TEST_CASE("names of other trainers are each those of one option, which there is") {
    std::set<std::string> names;
    for (const Synonym& row : synonyms) {
        CAPTURE(std::string(row.names));
        if (row.option) CHECK(find_option(row.option));
        CHECK((row.option || *row.note));
        std::istringstream words{std::string(row.names)};
        for (std::string word; words >> word;) {
            CHECK(names.insert(word).second);
            CHECK(find_synonym("--" + word) == &row);
            CHECK(!find_option("--" + word, command_train));
        }
        CHECK((row.names.front() == ' ' && row.names.back() == ' '));
    }
    CHECK(find_synonym("lr") == nullptr);
    CHECK(find_synonym("--") == nullptr);
    CHECK(find_synonym("--learning-rate") == nullptr);
}

TEST_CASE("options that do not fit together") {
    const struct {
        std::string_view line;
        const char* words;
    } rows[] = {
        // the model
        {"--heads 3", "--heads 3: does not divide --channels 128; "},
        {"--kv-heads 3", "--kv-heads 3: does not divide --heads 4; "},
        {"--kv-heads 8", "does not divide"},
        {"--heads 1 --kv-heads 1 --channels 512", "--head-size 512: attention supports"},
        {"--head-size 33", "--rope-dims 33: "},
        {"--rope-dims 34", "--rope-dims 34: "},
        {"--window-pattern 3:1", "--window-pattern 3:1: no layer has a window; give --window too"},
        {"--window 9 --window-pattern 3", "--window-pattern 3: not two numbers of layers; "},
        {"--window 9 --window-pattern 3:0", "--window-pattern 3:0: not two numbers of layers; "},
        {"--window 9 --window-pattern 3:1x", "--window-pattern 3:1x: not two numbers of layers; "},
        {"--bias --qkv-bias", "--qkv-bias on: --bias on includes these biases; "},
        {"--rope-scaling 2 --rope-low-frequency 4", "--rope-high-frequency 4: "},
        {"--layers 10000 --channels 131072 --heads 1024 --kv-heads 0 --mlp-width 1048576",
         "parameters: too large; "},
        // tokens
        {"--document-end 257", "--document-end 257: not a token"},
        {"--vocab-size 256 --document-end -1", "--vocab-size 256: too small"},
        {"--tokenizer none --reset-positions --document-end -1",
         "--reset-positions on: document boundaries are unknown; "},
        {"--model gpt2-124M --prompt a", "--prompt: cannot be turned into tokens"},
        // the batch and the run
        {"--sequence-length 512", "--sequence-length 512: longer than the model's context of 256; "},
        {"--global-batch 2500", "4 sequences * 256 tokens = 1024; give 2048 or 3072"},
        {"--global-batch 7", "= 1024; give 1024"},
        {"--micro-batch 1048576 --context 4096", "--micro-batch 1048576: "},
        {"--micro-batch 1 --sequence-length 1 --global-batch 1000000000000",
         "--global-batch 1000000000000: more than 2^31 micro-batches of 1 tokens; "},
        {"--warmup-steps 2000", "--warmup-steps 2000: more than the run's 1000 steps; "},
        {"--batch-ramp 1k:2k", "--batch-ramp 1k:2k: not three numbers; "},
        {"--batch-ramp 1k:2k:3:4", "--batch-ramp 1k:2k:3:4: 3:4 is not a number; "},
        {"--batch-ramp 1k:x:3", "--batch-ramp 1k:x:3: x is not a number; "},
        {"--batch-ramp :2k:3", "--batch-ramp :2k:3: '' is not a number; "},
        {"--batch-ramp 1k:1B:3", "--batch-ramp 1k:1B:3: 1B is either 1000000000, by powers of 1000, or "},
        {"--batch-ramp 0:2k:3", "it begins with less than one token; "},
        {"--batch-ramp 2k:3k:3", "--batch-ramp 2k:3k:3: the end is not 2, 3, 4 ... times the start"},
        {"--batch-ramp 2k:2k:3", "the end is not 2, 3, 4 ... times the start; "},
        {"--batch-ramp 1k:8k:6", "it has fewer steps than batch sizes, "},
        {"--batch-ramp 512:1k:5", "begins with 512 tokens, but must begin with a multiple of 1024 (a "
                                  "micro-batch) that is at least 1024 "},
        {"--batch-ramp 1k:4k:9 --global-batch 8k", "ends with 4096 tokens, but --global-batch is 8192; "},
        {"--steps 5 --batch-ramp 1k:2k:9", "--batch-ramp 1k:2k:9: does not end within the run's 5 steps; "},
        {"--muon-momentum 0.9",
         "--muon-momentum 0.9: only has an effect with --optimizer muon; give it too, or leave this out"},
        {"--decay-fraction 0.3", "--decay-fraction 0.3: only has an effect with --schedule wsd; "},
        {"--schedule linear --decay-fraction 0.3", "--decay-fraction 0.3: only has an effect with "},
        {"--choices-every 50", "--choices-every 50: only has an effect with --choices; give it too, "},
        {"--ngram-place disk", "--ngram-place disk: only has an effect with --ngram; give it too, or leave "},
        {"--ngram-dir /x", "--ngram-dir /x: only has an effect with --ngram; "},
        {"--ngram-cache 1M", "--ngram-cache 1048576: only has an effect with --ngram; "},
        {"--ngram-gate off", "--ngram-gate off: only has an effect with --ngram; "},
        {"--ngram-rows 4M", "--ngram-rows 4000000: only has an effect with --ngram; "},
        {"--ngram-prefetch 0", "--ngram-prefetch 0: only has an effect with --ngram; "},
        {"--ngram-staleness 1", "--ngram-staleness 1: only has an effect with --ngram; "},
        {"--ngram-lr 0.5", "--ngram-lr 0.5: only has an effect with --ngram; "},
        {"--ngram-dtype bf16", "--ngram-dtype bf16: only has an effect with --ngram; "},
        {"--head-lr 2", "--head-lr: the output matrix is the embedding; give --embedding-lr, or "},
        {"--head-decay 0", "--head-decay: the output matrix is the embedding; "},
        {"--log-trust-ratios 1", "--log-trust-ratios 1: --optimizer adamw has no trust ratios; "},
        // validation
        {"--val-data a --val-data b", "--val-data a: with several lists, each needs a name; write NAME=a, "},
        {"--val-data x=a --val-data x=b", "--val-data: two lists are named x; "},
        {"--val-data x=", "--val-data x=: names no files; "},
        {"--keep-best 2", "--keep-best 2: the best are chosen by validation, but there is none; "},
        {"--val-data a --val-every 0 --keep-best 2", "--keep-best 2: "},
        {"--val-data web=a --val-data code=b --best-set code",
         "--best-set code: only has an effect with --keep-best; "},
        {"--choices q --choices-every 0", "--choices q: never evaluated with --choices-every 0; "},
        {"--steps 2x",
         "--steps 2x: not a number; give a whole number of at least 1 (k, M, B, T: powers of 1000; "},
        {"--val-data web=a --val-data code=b --keep-best 1 --best-set cod",
         "--best-set cod: no set of --val-data has that name, the nearest is code; "},
        {"--val-data a --keep-best 1 --best-set b",
         "--best-set b: the set of --val-data has no name; leave this out"},
        {"--optimizer sgd", "--optimizer sgd: not one of the choices; give adamw, lamb or muon"},
    };
    for (auto& row : rows) {
        CAPTURE(row.line);
        CHECK_REFUSED(train_line(row.line), row.words);
    }
}

TEST_CASE("options without an effect are accepted with what they need, or if they change nothing") {
    for (std::string_view line :
         {"--decay-fraction 0.2 --muon-momentum 0.95 --choices-every 1000 --ngram-place device --ngram-gate "
          "on",
          "--choices-every 0", "--schedule wsd --decay-fraction 0.3", "--choices q --choices-every 50",
          "--optimizer muon --muon-momentum 0.9",
          "--ngram 2 --ngram-place disk --ngram-dir /x --ngram-cache 1M --ngram-gate off --ngram-lr 0.5"}) {
        CAPTURE(line);
        CHECK(error_of([&] { train_line(line); }) == "no error");
    }
    const std::string plan = "plan --model gpt2-124M --machine h100 --gpus 8 --ngram-place host";
    CHECK_REFUSED(typed(plan), "--ngram-place host: only has an effect with --ngram; ");
    CHECK(std::get<PlanLine>(typed(plan + " --ngram 2,3")).options.ngram_place == TablePlace::host);
}

TEST_CASE("validation sets have names, and are one option in records and files") {
    std::vector<NamedList> sets =
        named_lists("--val-data", train_line("--val-data web=0.7:a,0.3:b").val_data);
    REQUIRE(sets.size() == 1);
    CHECK(sets[0].name == "web");
    CHECK(sets[0].list == "0.7:a,0.3:b");
    CHECK(named_lists("--val-data", "").empty());
    for (const char* unnamed : {"a.bin", "./x=1/a.bin", "0.5:a,0.5:b"}) {
        sets = named_lists("--val-data", unnamed);
        REQUIRE(sets.size() == 1);
        CHECK(sets[0].title() == unnamed);
        CHECK(sets[0].name == "");
    }
    Options two = train_line("--val-data web=a --steps 5 --val-data code=b,c");
    CHECK(two.val_data == "web=a;code=b,c");
    CHECK(options_from_json(options_to_json(two), "record").val_data == two.val_data);
    ConfigFile file("val-data = web=a\nval-data = code=b,c\n");
    CHECK(train({"--config", file.path}).val_data == two.val_data);
    CHECK(train({"--config", file.path, "--val-data", "d"}).val_data == "d");
    CHECK(options_of<EvalOptions>({"r", "s", "--data", "x=a", "--data", "y=b"}).data == "x=a;y=b");
    CHECK(options_of<EvalOptions>({"r", "s", "--data", "a"}).runs == std::vector<std::string>{"r", "s"});
    CHECK_REFUSED(options_of<EvalOptions>({"r", "--data", "a", "--data", "b"}),
                  "--data a: with several lists, each needs a name; ");
    CHECK_REFUSED(options_of<SampleOptions>({"r", "--zero", "1"}), "--zero 1: shards only training state, ");
}

TEST_CASE("a batch that rises") {
    Options o = train({"--batch-ramp", "1k:4k:10", "--steps", "14"});
    CHECK(o.global_batch == 4096);
    const std::vector<long long> want = {1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4};
    long long tokens = 0;
    for (int step = 0; step < 14; step++) {
        CAPTURE(step);
        CHECK(tokens_of_step(o, step) == 1024 * want[step]);
        CHECK(tokens_until(o, step) == tokens);
        tokens += tokens_of_step(o, step);
    }
    CHECK(tokens_until(o, 14) == tokens);
    // micro-batches of half the size give the same ramp
    CHECK(tokens_of_step(train({"--batch-ramp", "1k:4k:10", "--micro-batch", "2"}), 4) == 2048);
    CHECK(tokens_until(train({"--steps", "14"}), 14) == 14 * 1024);
    o = train({"--batch-ramp", "1k:2k:1", "--global-batch", "2k"});
    CHECK(tokens_of_step(o, 0) == 1024);
    CHECK(tokens_of_step(o, 1) == 2048);
}

TEST_CASE("a run of so many epochs has the steps that these take") {
    LayoutChoices choose;
    choose.tokens_of_epoch = [](const Options& o) { return o.train_data == "x.bin" ? 1e6 : 0; };
    auto steps = [&](std::string_view line, int processes = 1) {
        std::string copy = "train --train-data x.bin " + std::string(line);
        GivenOptions given = read_arguments(command_train, words_of(copy));
        Options o =
            std::get<TrainingLine>(parse_options(command_train, given, processes, find_checkpoint, choose))
                .options;
        CHECK(o.epochs == 0);
        return o.steps;
    };
    CHECK(steps("--epochs 1") == 977);  // 976.6 batches of 1024 tokens
    CHECK(steps("--epochs 2", 2) == 977);
    CHECK(steps("--epochs 0.1024") == 100);
    CHECK(steps("--epochs 1.1 --sequence-length 250") == 1100);
    CHECK(steps("--epochs 0.0001") == 1);
    CHECK(steps("--epochs 0 --steps 7") == 7);
    Options ramp = train_line("--batch-ramp 1k:4k:10 --steps 1000");
    int risen = steps("--epochs 2 --batch-ramp 1k:4k:10");
    CHECK(tokens_until(ramp, risen) >= 2000000);
    CHECK(tokens_until(ramp, risen - 1) < 2000000);
    CHECK_REFUSED(steps("--epochs 1 --steps 7"), "--epochs 1: conflicts with --steps; leave one of them out");
    CHECK_REFUSED(steps("--epochs 0.001 --batch-ramp 1k:4k:10"),
                  "--batch-ramp 1k:4k:10: does not end within the run's 10 steps; ");
    CHECK_REFUSED(steps("--epochs 1e6 --micro-batch 1 --sequence-length 1"),
                  "--epochs 1e+06: more than 2^31 ");
    CHECK_REFUSED(steps("--epochs -1"), "--epochs -1: out of range; give a number from 0 to 1e+06");
    CHECK_REFUSED(train_line("--epochs 1"),
                  "--epochs: tokens are only counted when a run starts; give --steps");
    ConfigFile file("steps = 7");
    CHECK(steps("--epochs 1 --config " + file.path) == 977);
    ConfigFile other("epochs = 1");
    CHECK(steps("--steps 7 --config " + other.path) == 7);
    CHECK(steps("--config " + other.path) == 977);
}

TEST_CASE("layers with a window and without, in turn") {
    Options o = train({"--window", "9", "--window-pattern", "3:1", "--layers", "9"});
    for (int layer = 0; layer < 9; layer++) CHECK(window_of_layer(o, layer) == (layer % 4 == 3 ? 0 : 9));
    o = train({"--window", "9"});
    CHECK(window_of_layer(o, 3) == 9);
}

TEST_CASE("command lines that lack something, or say two things") {
    const struct {
        std::string_view line;
        const char* words;
    } rows[] = {
        {"trian", "trian: no such command, the nearest is train; "},
        {"sample", "nothing to sample from; "},
        {"sample a b", "b: unexpected argument; "},
        {"sample r --temperature -1", "--temperature -1: out of range; give a number from 0 to 100"},
        {"sample r --prompt a --prompt-file b", "prompts come from"},
        {"sample r --interactive --samples 2", "--samples 2: "},
        {"eval --data x", "nothing to evaluate; "},
        {"eval r", "nothing to evaluate on; "},
        {"data", "nothing to inspect; "},
        {"inspect", "inspect: nothing to inspect; "},
        {"report", "report: nothing to report on; "},
        {"export", "export: nothing to export; "},
        {"export r", "--output: missing; give the folder to make"},
        {"import", "import: nothing to import; "},
        {"import m", "--output: missing; give the run directory to make"},
        {"tokenize --output o", "nothing to read; "},
        {"tokenize a", "--output: missing; "},
        {"tokenize a --output b --tokenizer none", "--tokenizer none: "},
        {"tokenize a --output b --tokenizer bytes --train-tokenizer 300",
         "--tokenizer bytes: --train-tokenizer trains its own; "},
        {"tokenize a - --output b --train-tokenizer 300", "--train-tokenizer 300: reads text twice"},
        {"tokenize a --output b --skip-bad -1", "--skip-bad -1: out of range; "},
        {"tokenize a --output b --val-fraction 1.5", "--val-fraction 1.5: out of range; "},
        {"tokenize a --output b --val-fraction -0.1", "--val-fraction -0.1: out of range; "},
        {"tokenize a --output b --val-fraction nan", "--val-fraction nan: not a finite number; "},
        {"tokenize a --output b --shard-tokens 0", "--shard-tokens 0: out of range; "},
        {"tokenize a --output b --shard-tokens -1", "--shard-tokens -1: out of range; "},
        {"tokenize a --output b --shard-tokens 2G", "--shard-tokens 2000000000: out of range; "},
    };
    for (auto& row : rows) {
        CAPTURE(row.line);
        CHECK_REFUSED(typed(row.line), row.words);
    }
    CHECK_REFUSED(parse(command_sample, {"r", "--stop", ""}), "--stop: an empty string");
}

TEST_CASE("records of options") {
    auto record = nlohmann::json::parse(options_to_json(train({})).dump());
    CHECK(record["learning_rate"].dump() == "0.0006");
    CHECK(record["bias"] == false);
    auto changed = [&](const char* key, nlohmann::json value) {
        auto copy = record;
        copy[key] = std::move(value);
        return options_from_json(copy, "index.bin");
    };
    CHECK(changed("layers", 7).layers == 7);
    const struct {
        const char* key;
        nlohmann::json value;
        const char* words;
    } rows[] = {
        {"layers", "7", "index.bin: option layers should not be of type string; "},
        {"layers", 7.5, "index.bin: --layers 7.5: not a number; "},
        {"layers", -7, "index.bin: --layers -7: out of range; "},
        {"norm", "batchnorm", "index.bin: --norm batchnorm: not one of the choices; "},
        {"bias", "on", "option bias should not be of type string; "},
        {"no_such", true, "index.bin: option no_such is not known here; "},
    };
    for (auto& row : rows) {
        CAPTURE(row.value);
        CHECK_REFUSED(changed(row.key, row.value), row.words);
    }
    auto without = record;
    without.erase("learning_rate");
    CHECK(options_from_json(without, "index.bin").learning_rate == 6e-4f);
    without.erase("qkv_bias");
    CHECK(!options_from_json(without, "index.bin").qkv_bias);
    without.erase("qk_norm");
    CHECK_REFUSED(options_from_json(without, "index.bin"), "index.bin: option qk_norm is missing; ");
    CHECK_REFUSED(options_from_json(nlohmann::json::array(), "index.bin"), "index.bin: ");
}

// Returns the error that a training run gets from a file, without the file's path.
static std::string config_error(const std::string& content) {
    ConfigFile file(content);
    std::string error = error_of([&] { train({"--config", file.path}); });
    REQUIRE(error.starts_with(file.path));
    return error.substr(file.path.size());
}

TEST_CASE("a file has the options that the command line does not say itself") {
    ConfigFile file("# a run\n\n"
                    "model=gpt2-124M\r\n"
                    "  learning_rate = 1e-3   # as in JSON\n"
                    "steps = 2k\n"
                    "global-batch = '512k'\n"
                    "prompt = \"a # \\\"b\\\"\\n\" # c\n"
                    "tokenizer = bytes\n"
                    "resume = ''\n"
                    "run-dir = runs/a#b\n"
                    "val-tokens = 4Ki");
    Options o = train({"--config", file.path, "--learning-rate", "2e-3", "--val-batches", "3"});
    CHECK(o.model == "gpt2-124M");
    CHECK(o.channels == 768);
    CHECK(o.learning_rate == 2e-3f);
    CHECK(o.steps == 2000);
    CHECK(o.global_batch == 512 << 10);
    CHECK(o.prompt == "a # \"b\"\n");
    CHECK(o.run_dir == "runs/a#b");
    CHECK(o.val_tokens == 3 * (512 << 10));  // set by --val-batches on the command line
    CHECK(train({"--config", file.path}).val_tokens == 4096);
}

TEST_CASE("what follows from an option of the command line is not taken from a file") {
    ConfigFile file(
        "model = tiny\nchannels = 64\nhead-size = 16\nmlp-width = 200\nvocab-size = 300\ndocument-end = 299\n"
        "steps = 40\nwarmup-steps = 30\ncontext = 64\nsequence-length = 64\n");
    auto with = [&](std::vector<std::string> line) {
        line.insert(line.begin(), {"--config", file.path});
        return train(line);
    };
    CHECK(with({"--learning-rate", "1e-3"}).mlp_width == 200);
    CHECK(with({"--steps", "10"}).warmup_steps == 0);
    CHECK(with({"--context", "128"}).sequence_length == 128);
    CHECK(with({"--tokenizer", "bytes"}).document_end == 256);
    CHECK(with({"--channels", "128"}).head_size == 32);
    Options gpt2 = with({"--model", "gpt2-124M"}), preset = train({"--model", "gpt2-124M"});
    CHECK(gpt2.layers == preset.layers);
    CHECK(gpt2.head_size == preset.head_size);
    CHECK(gpt2.vocab_size == preset.vocab_size);
    CHECK(gpt2.steps == 40);
}

TEST_CASE("a run's own record is a file of options, but for what held for its start alone") {
    Options o = train({"--layers", "3", "--norm", "layernorm", "--overwrite", "--run-dir", "runs/a", "--bias",
                       "--save-every", "10m", "--config", ConfigFile("seed = 5").path});
    ConfigFile file(options_to_json(o).dump(2));
    Options again = train({"--config", file.path, "--seed", "6"});
    CHECK(again.layers == 3);
    CHECK(again.bias);
    CHECK(again.seed == 6);
    CHECK(!again.overwrite);
    CHECK(again.run_dir == "runs/tiny");
    CHECK(train({"--config", file.path, "--micro-batch", "1"}, 4).dp == 4);
    again.config = o.config, again.run_dir = o.run_dir, again.overwrite = true, again.seed = o.seed;
    CHECK(options_to_json(again) == options_to_json(o));
}

TEST_CASE("what a run derived from its ranks and its layout is derived anew from its record") {
    const struct {
        const char* run;    // a run of one process
        const char* given;  // for two processes that read its record
    } rows[] = {
        {"", ""},
        {"", "--micro-batch 8"},
        {"--micro-batch 2", "--pp 2 --pp-schedule interleaved"},
        {"--layers 4", "--tp 2"},
        {"--layers 4", "--pp 2 --pp-schedule interleaved"},
        {"--batch-ramp 2k:8k:10", ""},
        {"--global-batch 8k", "--tp 2 --micro-batch 1"},
        {"--zero 1 --batch-ramp 2k:8k:10", "--batch-ramp 2k:4k:10"},
        {"--pp-schedule interleaved", "--pp 2 --pp-schedule 1f1b"},
    };
    for (auto [run, given] : rows) {
        CAPTURE(run);
        CAPTURE(given);
        Options o = train_line(run);
        Options fresh = train_line(std::string(run) + " " + given, 2);
        for (const std::string& content : {options_to_json(o).dump(2), config_text(o)}) {
            ConfigFile file(content);
            Options again = train_line("--config " + file.path + " " + given, 2);
            for (const OptionRow& row : option_table()) {
                CAPTURE(row.field);
                if (row.belongs_to(command_train) && row.resume != Resume::not_stored)
                    CHECK(value_text(row, again) == value_text(row, fresh));
            }
        }
    }
    // a given value stays, unless it has no meaning any more
    Options o = train_line("--layers 8 --pp 2 --pp-schedule interleaved --pp-chunks 4 --global-batch 4k", 2);
    ConfigFile file(options_to_json(o).dump(2));
    auto with = [&](const std::string& given) {
        return train_line("--config " + file.path + " " + given, 2);
    };
    CHECK(with("").pp_chunks == 4);
    CHECK(with("").global_batch == 4096);
    CHECK(with("--pp-schedule 1f1b").pp_chunks == 1);
    CHECK_REFUSED(with("--pp 1 --micro-batch 16 --pp-schedule 1f1b"),
                  "--global-batch 4096: less than a micro-batch for each of 2 data ranks");
}

TEST_CASE("options that were printed are read back, whatever is in them") {
    for (auto [line, processes] : {std::pair{"--model tiny --prompt '' --val-data a,b*.bin", 1},
                                   {"--model qwen3-0.6B --save-every auto --trace-steps 1:2", 1},
                                   {"--layers 4 --pp 2 --pp-schedule interleaved --zero 1", 8},
                                   {"--tp 2 --zero 3 --batch-ramp 16k:64k:9 --optimizer lamb", 4},
                                   {"--window 9 --window-pattern 3:1 --tie-embeddings off --head-lr 2", 2}}) {
        CAPTURE(line);
        Options o = train_line(line, processes);
        for (const char* prompt : {"it's", " \"a\\ ", "#", "a\n\x1b\xe2\x80\x8e", "='", ""}) {
            o.prompt = *prompt && o.tokenizer != "none" ? prompt : "";
            std::string printed = config_text(o);
            ConfigFile file(printed);
            std::vector<std::string> words = {"train", "--config", file.path};
            GivenOptions given = read_arguments(command_train, words);
            std::string again =
                config_text(std::get<TrainingLine>(parse_options(command_train, given, processes)).options);
            CHECK(again == printed);
        }
    }
    Options o = train({});
    o.run_dir = "runs/\xff";
    CHECK_REFUSED(config_text(o), "--run-dir runs/\\xff: is not valid UTF-8, ");
}

TEST_CASE("what is wrong in a file of options is told with its line") {
    const struct {
        const char *content, *error;
    } rows[] = {
        {"\n# a\nlerning-rate = 1", ":3: --lerning-rate: no such option, the nearest is --learning-rate; "},
        {"lr = 1", ":1: --lr: no such option, it is --learning-rate here; "},
        {"top_k = 1", ":1: --top-k: not an option of train_gpt train; "},
        {"seed = 1\nlayers = 0", ":2: --layers 0: out of range; give a whole number from 1 to 10000"},
        {"layers =", ":1: --layers '': not a number; "},
        {"config = a", ":1: --config: works only on the command line; "},
        {"print-config = on", ":1: --print-config: works only on the command line; "},
        {"seed 1", ":1: seed 1: not an option; write KEY = VALUE, as in learning-rate = 3e-4"},
        {"= 1", ":1: --: no such option"},
        {"prompt = 'a", ":1: the quote is not closed; "},
        {"prompt = \"\\q\"", ":1: the double quotes do not hold a JSON string; "},
        {"prompt = 'a' b", ":1: b: unexpected after the value; "},
        {"{\n\"seed\": 1,\n\"top_k\": 2}", ":3: --top-k: not an option of train_gpt train; "},
        {"{\n\"layers\": \"2\"}", ":2: option layers should not be of type string; "},
        {"{\"seed\": 1", ": not valid JSON at byte 11; "},
        {"seed = 1\nepoch = 2", ":2: --epoch: no such option"},
    };
    for (auto& row : rows) {
        CAPTURE(row.content);
        CAPTURE(row.error);
        std::string error = config_error(row.content);
        CAPTURE(error);
        CHECK(error.starts_with(row.error));
    }
    ConfigFile twice("train-data = a\ntrain-data = b");
    CHECK_REFUSED(parse(command_train, {"--config", twice.path}), "--train-data: given twice; ");
    CHECK_REFUSED(train({"--config", "no/such"}), "no/such: ");
}

TEST_CASE("a tokenizer brings its vocabulary and document end, and what is given itself counts more") {
    CHECK(train({"--model", "gpt2-124M"}).vocab_size == 50257);
    Options bytes = train({"--model", "gpt2-124M", "--tokenizer", "bytes"});
    CHECK(bytes.vocab_size == 257);
    CHECK(bytes.document_end == 256);
    Options wider = train({"--tokenizer", "bytes", "--vocab-size", "300", "--document-end", "-1"});
    CHECK(wider.vocab_size == 300);
    CHECK(wider.document_end == -1);
    Options llama3 = train({"--tokenizer", "test/golden/tokenizers/llama3.json"});
    CHECK(llama3.vocab_size == Tokenizer::load("test/golden/tokenizers/llama3.json").vocab_size());
    CHECK(options_of<SampleOptions>({"r", "--stop", "a", "--stop", "b"}).stop ==
          std::vector<std::string>{"a", "b"});
}

TEST_CASE("help names every option, its choices and its default, within the width") {
    for (const CommandHelp& command : command_table()) {
        for (int width : {60, 80, 110}) {
            std::string help = help_text(command.command, width);
            for (const OptionRow& row : option_table()) {
                if (!row.belongs_to(command.command)) continue;
                INFO(row.field);
                CHECK(help.find(row.positional ? positional_name(row) : option_name(row)) !=
                      std::string::npos);
                std::string words = words_for(command.command, row.help);
                CHECK(words.find_last_of(".") == words.size() - 1);
                CHECK(words.find("  ") == std::string::npos);
            }
            std::istringstream lines(help);
            for (std::string line; std::getline(lines, line);) {
                INFO(line);
                CHECK((int)line.size() <= width);
            }
        }
    }
    CHECK(help_text(command_train, 110).find("default 0.0006") != std::string::npos);
    CHECK(help_text(command_train, 110).find("qwen3-0.6B") != std::string::npos);
    CHECK(general_help(110).find("tokenize") != std::string::npos);
    std::string codes = general_help(110);
    codes = codes.substr(std::min(codes.find("\nExit codes: 0 done"), codes.size()));
    for (int code : {exit_bad_input, exit_not_finite, exit_failed_part})
        CHECK(codes.find(text("; %d ", code)) != std::string::npos);
}

TEST_CASE("the help of a command is about that command alone") {
    CHECK(words_for(command_eval, "A. {train: B.} Empty: {data sample: c}{eval: d}.") == "A. Empty: d.");
    CHECK(words_for(command_train, "A. {train: B.} Empty: {data sample: c}{eval: d}.") == "A. B. Empty: .");
    CHECK(words_for(command_eval, "lines of {\"a\": 1} {eval: or b}") == "lines of {\"a\": 1} or b");
    for (const CommandHelp& command : command_table()) {
        std::string help = help_text(command.command, 110);
        for (const CommandHelp& other : command_table()) {
            INFO(command.name << other.name);
            CHECK(help.find("{" + std::string(other.name)) == std::string::npos);
        }
    }
    CHECK(help_text(command_export, 110).find("PREFIX_") == std::string::npos);
    CHECK(help_text(command_tokenize, 110).find("PREFIX_train_000000.bin") != std::string::npos);
}

// A shell splits an example into the words that the table has.
TEST_CASE("examples in the help are command lines that can be copied") {
    for (const CommandHelp& command : command_table()) {
        for (const char* example : command.examples) {
            std::string shown = example_help(example, 60);
            for (size_t at; (at = shown.find(" \\\n     ")) != std::string::npos;) shown.replace(at, 8, "");
            CHECK(shown == "  train_gpt " + std::string(example) + "\n");
        }
    }
    CHECK(example_help("launch --launcher 'mpirun --mca a b' -- train", 30) ==
          "  train_gpt launch \\\n      --launcher 'mpirun --mca a b' \\\n      -- train\n");
}

TEST_CASE("a section of the help has the options of one group, and there is no other") {
    std::string all = help_text(command_train, 80), data = help_section(command_train, "data", 80);
    CHECK(all.find(data) != std::string::npos);
    CHECK(data.starts_with("Data\n  --train-data TEXT "));
    CHECK(data.find("--steps ") == std::string::npos);
    CHECK(help_section(command_train, "presets", 80).find("qwen3-0.6B") != std::string::npos);
    for (const CommandHelp& command : command_table()) {
        std::string rest = help_text(command.command, 80);
        for (const std::string& section : help_sections(command.command)) {
            size_t at = rest.find(help_section(command.command, section, 80));
            REQUIRE(at != std::string::npos);
            rest.erase(at, help_section(command.command, section, 80).size());
        }
        CHECK(rest.find("\n  --") == std::string::npos);  // every option is in a section
    }
    CHECK_REFUSED(
        help_section(command_train, "dat", 80),
        "--help dat: train_gpt train has no such section, the nearest is data; give model, machine");
    CHECK_REFUSED(help_section(command_inspect, "model", 80), "give checkpoints");
}

TEST_CASE("the header has the options that are not as usual, and says where all are") {
    auto summary = [](std::vector<std::string> words) { return options_summary(train(words), 1000); };
    std::string all = "other options have their defaults; all are in runs/";
    CHECK(summary({"--model", "tiny"}) == "Data         train-data=x.bin\n" + all + "tiny/options.json\n");
    // Options that follow from others are not repeated; given ones are listed, in the table's order and
    // groups.
    std::string several = summary({"--model", "tiny", "--channels", "64", "--heads", "4", "--steps", "400",
                                   "--learning-rate", "0.001", "--run-dir", "runs/a", "--norm", "layernorm",
                                   "--warmup-steps", "20", "--micro-batch", "3"});
    CHECK(several.find("\nRun          run-dir=runs/a steps=400 micro-batch=3\n") != std::string::npos);
    CHECK(several.starts_with("Model        channels=64 norm=layernorm\n"));
    CHECK(several.find("learning-rate=0.001\n") != std::string::npos);
    for (const char* follows : {"head-size", "mlp-width", "kv-heads", "warmup-steps", "global-batch", "seed"})
        CHECK(several.find(follows) == std::string::npos);
    CHECK(several.ends_with("\n" + all + "a/options.json\n"));
    CHECK(summary({"--model", "tiny", "--steps", "400", "--warmup-steps", "21"}).find("warmup-steps=21") !=
          std::string::npos);
    std::string of_preset = summary({"--model", "llama3.2-1B"});
    CHECK(of_preset.starts_with("Model        model=llama3.2-1B\n"));
}

TEST_CASE("help is given wherever it is asked for, but a value of an option asks for nothing") {
    auto answer = [](std::vector<std::string> words) { return answer_to(words); };
    std::string general = general_help(80), of_train = help_text(command_train, 80),
                data = help_section(command_train, "data", 80);
    for (auto words : std::vector<std::vector<std::string>>{{}, {"--help"}, {"-h"}, {"help"}, {"help", "-h"}})
        CHECK(answer(words) == general);
    for (auto words : std::vector<std::vector<std::string>>{{"train", "--help"},
                                                            {"train", "-h"},
                                                            {"help", "train"},
                                                            {"-h", "train"},
                                                            {"train", "--help", "--steps", "3"},
                                                            {"train", "--steps", "--help"},
                                                            {"train", "--overwrite", "-h"}}) {
        CHECK(answer(words) == of_train);
    }
    CHECK(answer({"train", "--help", "data"}) == data);
    CHECK(answer({"help", "train", "data"}) == data);
    CHECK_REFUSED(answer({"help", "trian"}), "trian: no such command");
    CHECK_REFUSED(answer({"train", "--help", "dta"}), "--help dta: train_gpt train has no such section");
    CHECK(answer({"--version"}) == std::string(program_version) + "\n");
    CHECK(answer({"train"}) == "");
    CHECK(answer({"sample", "runs/tiny", "--prompt", "-h"}) == "");
    CHECK_REFUSED(answer({"trian", "--help"}), "trian: no such command");
}

// ----------------------------------------------------------------------------
// layouts

// The model `tiny` has 4 layers, 128 channels, 4 heads, an MLP of 344, a context of 256; micro-batches of 4.
TEST_CASE("what is left out of a layout follows from the number of processes") {
    constexpr long long k = 1024;
    struct {
        int processes;
        std::string_view options;
        int dp, shard_group;
        long long global_batch;
    } rows[] = {
        {1, "", 1, 1, k},
        {1, "--zero 3", 1, 1, k},
        {1, "--dp 1 --tp 1 --pp 1 --shard-group 1 --zero 0", 1, 1, k},
        {4, "", 4, 1, 4 * k},
        {7, "", 7, 1, 7 * k},
        {4, "--shard-group 1", 4, 1, 4 * k},
        {4, "--zero 1", 4, 4, 4 * k},
        {4, "--zero 2 --shard-group 2", 4, 2, 4 * k},
        {4, "--zero 3 --shard-group 1", 4, 1, 4 * k},
        {12, "--zero 3 --shard-group 6", 12, 6, 12 * k},
        {8, "--tp 2", 4, 1, 4 * k},
        {8, "--tp 4 --pp 2", 1, 1, k},
        {8, "--tp 2 --pp 2 --zero 1", 2, 2, 2 * k},
        {8, "--tp 2 --pp 2 --dp 2", 2, 1, 2 * k},
        {4, "--pp 4", 1, 1, k},
        // context ranks share sequences, so they need no more of them
        {4, "--cp 4 --context 1024", 1, 1, 4 * k},
        {8, "--cp 2 --tp 2 --zero 1", 2, 2, 2 * k},
        {8, "--cp 2 --zero 3 --shard-group 2", 4, 2, 4 * k},
        {4, "--global-batch 16k", 4, 1, 16 * k},
        {4, "--micro-batch 1 --sequence-length 32", 4, 1, 128},
        {3, "--global-batch 6144", 3, 1, 6 * k},
        // fewer key and value heads than tensor ranks: some ranks share one
        {4, "--tp 4 --kv-heads 2", 1, 1, k},
        {4, "--tp 4 --kv-heads 1", 1, 1, k},
        {1048576, "--micro-batch 1 --sequence-length 1", 1048576, 1, 1048576},
        // data ranks may have different numbers of micro-batches
        {3, "--global-batch 8k", 3, 1, 8 * k},
        {6, "--zero 3 --shard-group 3 --global-batch 7k", 6, 3, 7 * k},
        {4, "--batch-ramp 5k:10k:9", 4, 1, 10 * k},
        // an interleaved pipeline gets a micro-batch for each stage, unless the batch is given
        {4, "--pp 2 --pp-schedule interleaved", 2, 1, 4 * k},
        {4, "--pp 2 --pp-schedule interleaved --global-batch 11k", 2, 1, 11 * k},
        {4, "--pp 4 --pp-schedule interleaved --pp-chunks 1 --global-batch 1k", 1, 1, k},
        {1, "--pp-schedule interleaved", 1, 1, k},
        {4, "--pp 2 --pp-schedule zero-bubble", 2, 1, 2 * k},
    };
    for (auto& row : rows) {
        CAPTURE(row.processes);
        CAPTURE(row.options);
        Options options = train_line(row.options, row.processes);
        CHECK(options.dp == row.dp);
        CHECK(options.shard_group == row.shard_group);
        CHECK(options.global_batch == row.global_batch);
        CHECK(options.tp * options.cp * options.pp * options.dp == row.processes);
    }
}

TEST_CASE("the parts that tensor parallelism sends, and those of a pipeline") {
    struct {
        int processes;
        std::string_view options;
        int tp_overlap, pp_chunks;
    } rows[] = {
        {1, "", 1, 1},
        {1, "--tp-overlap 3", 1, 1},  // one tensor rank sends nothing
        {2, "--tp 2", 4, 1},          // 512 rows
        {2, "--tp 2 --tp-overlap 1", 1, 1},
        {2, "--tp 2 --tp-overlap 64", 64, 1},
        {4, "--tp 4 --micro-batch 1 --sequence-length 36", 3, 1},  // 9 rows
        {4, "--tp 4 --micro-batch 1 --sequence-length 24", 3, 1},  // 6 rows
        {4, "--tp 4 --micro-batch 1 --sequence-length 40", 2, 1},  // 10 rows
        {4, "--tp 4 --micro-batch 1 --sequence-length 28", 1, 1},  // 7 rows
        {8, "--tp 4 --cp 2 --micro-batch 3", 4, 1},                // 96 rows
        {2, "--pp 2", 1, 1},
        {2, "--pp 2 --pp-schedule gpipe --pp-chunks 1", 1, 1},
        {2, "--pp 2 --pp-schedule zero-bubble", 1, 1},
        {2, "--pp 2 --pp-schedule interleaved", 1, 2},
        {4, "--pp 2 --tp 2 --pp-schedule interleaved", 4, 2},
        {2, "--pp 2 --pp-schedule interleaved --pp-chunks 1", 1, 1},
        {2, "--pp 2 --pp-schedule interleaved --pp-chunks 3 --layers 7", 1, 3},
        {1, "--pp-schedule interleaved", 1, 1},
        {1, "--pp-schedule interleaved --pp-chunks 4", 1, 4},
        {1, "--pp-schedule zero-bubble", 1, 1},
        {2, "--pp 2 --pp-layers memory", 1, 1},
        {2, "--pp 2 --pp-layers 3,1", 1, 1},
        {2, "--pp 2 --pp-schedule interleaved --layers 7 --pp-layers 1,2,2,2", 1, 2},
        {1, "--pp-layers 4", 1, 1},
    };
    for (auto& row : rows) {
        CAPTURE(row.processes);
        CAPTURE(row.options);
        Options options = train_line(row.options, row.processes);
        CHECK(options.tp_overlap == row.tp_overlap);
        CHECK(options.pp_chunks == row.pp_chunks);
    }
    CHECK(train({}).pp_schedule == PipelineSchedule::one_f_one_b);
    CHECK(train({}).pp_layers == "time");
}

TEST_CASE("layers of the parts of a pipeline, as a list") {
    using Split = std::vector<int>;
    CHECK(parse_split("3,4,4,3", 14, 4) == Split{3, 4, 4, 3});
    CHECK(parse_split("5", 5, 1) == Split{5});
    for (const char* bad : {"", "3,", "3,,4", "a", "3,0,4", "-1,8", "3 4", "99999999999", "Time", "3;4"})
        check_error(error_of([&] { parse_split(bad, 7, 2); }), text("--pp-layers %s", bad),
                    "is not a number of layers; give time, memory or a list like 3,4,4,3");
    check_error(error_of([] { parse_split("a\n\x1b[2J", 7, 2); }), "--pp-layers a\\u000a\\u001b[2J",
                "'a\\u000a\\u001b[2J' is no");
    const struct {
        const char* list;
        int layers, parts;
        const char* reason;
    } rows[] = {
        {"3,4", 8, 2, "adds up to 7 layers, but the model has 8; "},
        {"2147483647,2147483647,3", 1, 3, "adds up to 4294967297 layers, but the model has 1; "},
        {"3,4", 7, 3, "2 numbers, but --pp with --pp-chunks makes 3 parts; "},
        {"7", 7, 2, "1 number, but"},
        {"3,4", 7, 1, "makes 1 part; "},
    };
    for (auto& row : rows) {
        CAPTURE(row.layers);
        CAPTURE(row.parts);
        check_error(error_of([&] { parse_split(row.list, row.layers, row.parts); }),
                    text("--pp-layers %s", row.list), row.reason);
    }
}

TEST_CASE("layouts that do not fit, and the nearest that do") {
    struct {
        int processes;
        std::string_view options;
        const char* message;
    } rows[] = {
        // the number of processes
        {6, "--tp 4 --heads 12 --channels 96 --mlp-width 384 --sequence-length 96",
         "--tp 4: a multiple of 4 processes is needed and this run has 6; give --tp 3 or --tp 2, or start 4 "
         "or 8 (mpirun -np 4)"},
        {6, "--tp 4", "this run has 6; give --tp 2 or --tp 1, or start 4 or 8 (mpirun -np 4)"},
        {1, "--tp 2", "has 1; give --tp 1, or start 2 (mpirun -np 2)"},
        {6, "--tp 2 --pp 2",
         "--tp 2 --pp 2: a multiple of 4 processes is needed and this run has 6; give --tp 1 "
         "or --pp 1, or start 4 or 8"},
        {6, "--pp 4",
         "--pp 4: a multiple of 4 processes is needed and this run has 6; give --pp 3 or --pp 2"},
        {7, "--pp 2",
         "--pp 2: a multiple of 2 processes is needed and this run has 7; give --pp 1, or start 6 "
         "or 8 (mpirun -np 6)"},
        {1, "--dp 4",
         "--dp 4: with --tp 1 and --pp 1 needs 4 processes, but this run has 1; give --dp 1, "
         "or start 4 (mpirun -np 4)"},
        {8, "--dp 4", "this run has 8; give --dp 8, or start 4"},
        {8, "--tp 4 --dp 4", "needs 16 processes, but this run has 8; give --dp 2 or --tp 2, or start 16"},
        {4, "--tp 1048576 --pp 1048576 --dp 1048576", "--tp 1048576: does not divide --heads 4; give "},
        {4, "--tp 1048576 --pp 1048576", "--tp 1048576: does not divide --heads 4; give "},
        // the model
        {3, "--tp 3", "--tp 3: does not divide --heads 4; give --tp 1"},
        {4, "--cp 4",
         "--cp 4: --sequence-length 256 is not a multiple of 512 (128 * cp), unlike 512; give --cp 2 "
         "or --cp 1"},
        {2, "--cp 2 --context 1000",
         "--cp 2: --sequence-length 1000 is not a multiple of 256 (128 * cp), unlike 768 or 1024; give "
         "--cp 1"},
        {6, "--cp 2 --tp 2",
         "--tp 2 --cp 2: a multiple of 4 processes is needed and this run has 6; give --tp 1"},
        {4, "--cp 2 --dp 4",
         "--dp 4: with --tp 1, --cp 2 and --pp 1 needs 8 processes, but this run has 4; give"},
        {8, "--tp 8", "--tp 8: does not divide --heads 4; give --tp 4 or --tp 2"},
        {8, "--tp 8 --dp 1", "does not divide --heads 4; give --tp 4 --dp 2 or --tp 2 --dp 4"},
        {4, "--tp 4 --channels 126 --heads 4 --head-size 32",
         "--tp 4: does not divide --channels 126; give --tp 2 or --tp 1"},
        {4, "--tp 4 --mlp-width 342", "--tp 4: does not divide --mlp-width 342; give --tp 2 or --tp 1"},
        {4, "--tp 4 --heads 12 --kv-heads 6 --channels 144",
         "--tp 4: neither divides --kv-heads 6 nor is a multiple of it; give --tp 2 or --tp 1"},
        {4, "--tp 4 --vocab-size 3 --tokenizer none --document-end -1",
         "--tp 4: more parts than --vocab-size 3; give --tp 2"},
        {6, "--pp 6", "--pp 6: more stages than --layers 4; give --pp 3 or --pp 2"},
        {8, "--tp 2 --pp 4 --layers 3", "--pp 4: more stages than --layers 3; give --pp 2 or --pp 1"},
        {4, "--tp 4 --sequence-length 250",
         "--tp 4: does not divide --sequence-length 250; give --tp 2 or --tp 1"},
        // the parts of a pipeline
        {3, "--pp 3 --pp-schedule interleaved",
         "--pp 3: with --pp-chunks 2, more parts than --layers 4; give --pp 1, or --pp-chunks 1"},
        {4, "--pp 4 --pp-schedule interleaved --pp-chunks 3 --layers 11",
         "--pp 4: with --pp-chunks 3, more parts than --layers 11; give --pp 2 or --pp 1, or --pp-chunks 2"},
        {8, "--pp 8 --pp-schedule interleaved --layers 6",
         "--pp 8: more stages than --layers 6; give --pp 2 or --pp 1"},
        {4, "--tp 4 --channels 132 --head-size 32 --local-filter on",
         "--tp 4: does not divide the width of the local filter (half of --channels): 66; give --tp 2"},
        {2, "--pp 2 --pp-schedule interleaved --layers 1",
         "--pp 2: more stages than --layers 1; give --pp 1"},
        {2, "--pp 2 --pp-schedule interleaved --pp-chunks 5",
         "--pp-chunks 5: more parts than --layers 4; lower it"},
        {2, "--pp 2 --pp-chunks 2",
         "--pp-chunks 2: with --pp-schedule 1f1b each stage has only one chunk; add --pp-schedule "
         "interleaved, or leave --pp-chunks out"},
        {1, "--pp-chunks 2 --pp-schedule zero-bubble",
         "--pp-chunks 2: with --pp-schedule zero-bubble each stage"},
        {2, "--pp 2 --pp-layers 1,2", "--pp-layers 1,2: adds up to 3 layers, but the model has 4; "},
        {2, "--pp 2 --pp-layers 4", "--pp-layers 4: 1 number, but --pp with --pp-chunks makes 2 parts; "},
        {1, "--pp-layers 2,2", "--pp-layers 2,2: 2 numbers, but --pp with --pp-chunks makes 1 part; "},
        {2, "--pp 2 --pp-schedule interleaved --pp-layers 2,2",
         "2 numbers, but --pp with --pp-chunks makes 4"},
        {2, "--pp 2 --pp-layers tme",
         "--pp-layers tme: 'tme' is not a number of layers; give time, memory or a list like 3,4,4,3"},
        // the parts that tensor parallelism sends
        {2, "--tp 2 --tp-overlap 3",
         "--tp-overlap 3: does not divide the 512 rows of a rank, 4 sequences * 256 tokens / 2 tensor ranks; "
         "give 2 or 4"},
        {2, "--tp 2 --tp-overlap 63",
         "the 512 rows of a rank, 4 sequences * 256 tokens / 2 tensor ranks; give 32 or 64"},
        {2, "--tp 2 --tp-overlap 64 --sequence-length 250",
         "the 500 rows of a rank, 4 sequences * 250 tokens / 2 "
         "tensor ranks; give 50"},
        {2, "--tp 2 --tp-overlap 4 --sequence-length 2 --micro-batch 2",
         "the 2 rows of a rank, 2 sequences * 2 "
         "tokens / 2 tensor ranks; give 2"},
        // shard groups
        {4, "--shard-group 2",
         "--shard-group 2: with --zero 0 every rank keeps everything; add --zero 1, 2 or 3"},
        {8, "--zero 1 --shard-group 3", "--shard-group 3: does not divide the 8 data ranks; give 2 or 4"},
        {6, "--zero 3 --shard-group 4", "does not divide the 6 data ranks; give 3 or 6"},
        {4, "--zero 3 --shard-group 8", "--shard-group 8: does not divide the 4 data ranks; give 4"},
        {8, "--zero 3 --tp 2 --shard-group 8", "does not divide the 4 data ranks; give 4"},
        {1, "--zero 1 --shard-group 2", "does not divide the 1 data rank; give 1"},
        // the batch
        {6, "--global-batch 8000",
         "--global-batch 8000: not a multiple of the micro-batch of 4 sequences * 256 tokens = 1024; give "
         "7168 or 8192"},
        {4, "--global-batch 2k",
         "--global-batch 2048: less than a micro-batch for each of 4 data ranks, 4 sequences * 256 tokens * "
         "4 = 4096; give 4096, or --micro-batch 2"},
        {3, "--global-batch 3840", "tokens = 1024; give 3072 or 4096, or --micro-batch 3"},
        {5, "--global-batch 100", "256 tokens * 5 = 5120; give 5120"},
        {4, "--batch-ramp 2k:8k:9",
         "--batch-ramp 2k:8k:9: begins with 2048 tokens, but must begin with a multiple of 1024 (a "
         "micro-batch) that is at least 4096 (one per data rank); give one, or a smaller --micro-batch"},
        {1, "--global-batch 2500", "256 tokens = 1024; give 2048 or 3072"},
        {1, "--global-batch 1536", "256 tokens = 1024; give 1024 or 2048, or --micro-batch 3"},
        {8, "--tp 2 --global-batch 1k", "256 tokens * 4 = 4096; give 4096, or --micro-batch 1"},
        {1048576, "--micro-batch 4096", "--global-batch 1099511627776: out of range; "},
        // ranges
        {1, "--tp 0", "--tp auto: the layout is only chosen when a run starts; "},
        {1, "--pp -1", "--pp -1: out of range; "},
        {1, "--dp 2000000", "--dp 2000000: out of range; "},
        {1, "--zero 4", "--zero 4: out of range; give a whole number from 0 to 3"},
        {1, "--tp-overlap 65", "--tp-overlap 65: out of range; give a whole number from 0 to 64"},
        {1, "--pp-chunks -1", "--pp-chunks -1: out of range; "},
        {1, "--pp-schedule 1F1B",
         "--pp-schedule 1F1B: not one of the choices; give gpipe, 1f1b, interleaved or zero-bubble"},
        {1, "--prefetch 17", "--prefetch 17: out of range; give a whole number from 0 to 16"},
        {1, "--offload weights", "--offload weights: not one of the choices; give none or optimizer"},
        {1, "--throttle-link -1", "--throttle-link -1: out of range; "},
        {1, "--communication-timeout -1", "--communication-timeout -1: out of range; "},
        {1, "--overlap perhaps", "perhaps"},
        // graphs
        {2, "--cuda-graphs on",
         "--cuda-graphs on: works only with one process, but there are 2; give auto or off"},
        {1, "--cuda-graphs on --offload optimizer", "or leave out --offload optimizer"},
        {1, "--check-replay 5",
         "--check-replay 5: data ranks compare their results, but there is only one; leave it out"},
        {1, "--check-replicas 5", "--check-replicas 5: each value is held by only one rank; leave it out"},
        {2, "--check-replicas 5 --zero 3", "only one rank; give a smaller --shard-group, or --check-replay"},
        {2, "--pp 2 --check-replay 5", "there is only one"},
        {1, "--ngram 2 --ngram-staleness 1",
         "read only after all updates; give --ngram-place host too, or 0"},
        {1, "--ngram 2 --ngram-place host --ngram-prefetch 0 --ngram-staleness 1",
         "give --ngram-prefetch 1 too"},
    };
    for (auto& row : rows) {
        CAPTURE(row.processes);
        CAPTURE(row.options);
        CHECK_REFUSED(train_line(row.options, row.processes), row.message);
    }
}

// Returns the layouts that a refusal offers: "give --tp 2 --dp 4 or --pp 2, or start ..."
static std::vector<std::string> offered_layouts(const std::string& refusal) {
    std::vector<std::string> offers;
    size_t give = refusal.find("; give --");
    if (give == std::string::npos) return offers;
    std::string rest = refusal.substr(give + 7);
    rest = rest.substr(0, rest.find(','));
    for (size_t at = 0; at != std::string::npos;) {
        size_t end = rest.find(" or ", at);
        offers.push_back(rest.substr(at, end == std::string::npos ? end : end - at));
        at = end == std::string::npos ? end : end + 4;
    }
    return offers;
}

TEST_CASE("every layout that a refusal offers is accepted" * doctest::test_suite("long")) {
    int refused = 0, accepted = 0;
    for (auto [model, interleaved] : {std::pair{"tiny", false},
                                      {"tiny", true},
                                      {"gpt2-124M", false},
                                      {"gpt2-124M", true},
                                      {"llama3.2-1B", false}}) {
        for (int processes : {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}) {
            for (int tp : {1, 2, 3, 4, 8, 16}) {
                for (int pp : {1, 2, 3, 8, 24}) {
                    for (int dp : {0, 1, 2, 6}) {
                        std::string line = text("--model %s --tp %d --pp %d", model, tp, pp);
                        if (dp) line += text(" --dp %d", dp);
                        if (interleaved) line += " --pp-schedule interleaved";
                        std::string error = error_of([&] { train_line(line, processes); });
                        if (error == "no error") {
                            accepted++;
                            continue;
                        }
                        refused++;
                        CAPTURE(processes);
                        CAPTURE(line);
                        CAPTURE(error);
                        std::vector<std::string> offers = offered_layouts(error);
                        CHECK(offers.size() >= 1);
                        CHECK(offers.size() <= 2);
                        for (const std::string& offer : offers) {
                            std::string changed = line + " " + offer;
                            CHECK(error_of([&] { train_line(changed, processes); }) == "no error");
                        }
                    }
                }
            }
        }
    }
    CHECK(refused > 1000);
    CHECK(accepted > 100);
}

TEST_CASE("a run's record holds its layout, and needs none") {
    Options options = train({"--zero", "3", "--shard-group", "2", "--offload", "optimizer"}, 4);
    auto record = nlohmann::json::parse(options_to_json(options).dump());
    CHECK(record["dp"] == 4);
    CHECK(record["shard_group"] == 2);
    CHECK(record["zero"] == 3);
    CHECK(record["offload"] == "optimizer");
    CHECK(record["overlap"] == true);
    CHECK(record["pp_schedule"] == "1f1b");
    CHECK(record["pp_chunks"] == 1);
    CHECK(record["pp_layers"] == "time");
    CHECK(stored_options(record, "index.bin").dp == 4);
    for (const OptionRow& row : option_table()) {
        if (std::string(row.group) != "Layout") continue;
        CHECK(!describes_model(row));
        CHECK(row.belongs_to(command_train));
        record.erase(row.field);
    }
    CHECK(stored_options(record, "index.bin").tp == 1);
}

// ----------------------------------------------------------------------------
// Hugging Face

static ModelConfig read_hf(const nlohmann::json& json) {
    return parse_hf_config(json.dump(), "config.json");
}

static nlohmann::json with(nlohmann::json json, const char* key, nlohmann::json value) {
    json[key] = std::move(value);
    return json;
}

static nlohmann::json without(nlohmann::json json, const char* key) {
    json.erase(key);
    return json;
}

// Returns all options of a model, as text.
static std::string description(ModelConfig config) {
    complete(config);
    Options options;
    static_cast<ModelConfig&>(options) = config;
    std::string all;
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(command_train) && row.resume == Resume::shape)
            all += std::string(row.field) + "=" + value_text(row, options) + " ";
    }
    return all;
}

TEST_CASE("published configs are the presets") {
    CHECK(description(read_hf(hf_gpt2())) == description(find_preset("gpt2-124M")->config));
    CHECK(description(read_hf(hf_llama())) == description(find_preset("llama3.2-1B")->config));
    CHECK(description(read_hf(hf_mistral())) == description(find_preset("mistral-7B")->config));
    CHECK(description(read_hf(hf_qwen2())) == description(find_preset("qwen2.5-0.5B")->config));
    CHECK(description(read_hf(hf_qwen3())) == description(find_preset("qwen3-0.6B")->config));
}

TEST_CASE("variants of the families that are the same arithmetic") {
    CHECK(read_hf(with(hf_gpt2(), "activation_function", "gelu")).mlp == MlpKind::gelu_exact);
    CHECK(read_hf(with(hf_gpt2(), "n_inner", 1000)).mlp_width == 1000);
    CHECK(read_hf(without(hf_llama(), "num_key_value_heads")).kv_heads == 32);
    CHECK(read_hf(without(hf_llama(), "rope_scaling")).rope_scaling == 1);
    CHECK(read_hf(with(with(hf_llama(), "attention_bias", true), "mlp_bias", true)).bias);
    CHECK(read_hf(with(hf_mistral(), "sliding_window", nullptr)).window == 0);
    auto windowed = with(with(hf_qwen3(), "use_sliding_window", true), "sliding_window", 512);
    CHECK(read_hf(windowed).window == 0);  // no layer of 28 has a window: they begin at layer 28
    CHECK(read_hf(with(windowed, "max_window_layers", 0)).window == 512);
    CHECK_REFUSED(read_hf(with(windowed, "max_window_layers", 5)), "max_window_layers 5 is not supported; ");
    auto qwen2 = with(with(hf_qwen2(), "use_sliding_window", true), "sliding_window", 512);
    CHECK(read_hf(qwen2).window == 0);
    CHECK(read_hf(with(qwen2, "max_window_layers", 0)).window == 512);
    CHECK(read_hf(with(hf_qwen2(), "attention_bias", false)).qkv_bias);  // transformers does not read this
    CHECK(parameter_count(read_hf(hf_seed_oss())) == 36151104512);
    CHECK(read_hf(hf_seed_oss()).qkv_bias);
    CHECK_FALSE(read_hf(with(hf_seed_oss(), "attention_bias", false)).qkv_bias);
    CHECK(read_hf(with(with(hf_seed_oss(), "attention_out_bias", true), "mlp_bias", true)).bias);
    CHECK_REFUSED(read_hf(with(hf_seed_oss(), "mlp_bias", true)),
                  "attention_out_bias false is not supported; ");
    CHECK_REFUSED(read_hf(with(with(with(hf_seed_oss(), "attention_out_bias", true), "mlp_bias", true),
                               "attention_bias", false)),
                  "attention_bias false is not supported; ");
    auto rope = nlohmann::json{{"rope_type", "default"}, {"rope_theta", 1000000}};
    auto newer = with(without(without(hf_qwen3(), "rope_theta"), "rope_scaling"), "rope_parameters", rope);
    CHECK(read_hf(newer).rope_theta == 1000000);
    CHECK(read_hf(with(newer, "layer_types", std::vector<std::string>(28, "full_attention"))).window == 0);
    CHECK_REFUSED(read_hf(with(newer, "layer_types", std::vector<std::string>(28, "sliding_attention"))),
                  "layer_types");
    std::vector<std::string> types;
    for (int layer = 0; layer < 28; layer++)
        types.push_back(layer % 6 == 5 ? "full_attention" : "sliding_attention");
    CHECK(read_hf(with(windowed, "layer_types", types)).window_pattern == "5:1");
    CHECK(read_hf(with(windowed, "layer_types", types)).window == 512);
    CHECK(read_hf(with(windowed, "layer_types", std::vector<std::string>(28, "full_attention"))).window == 0);
    types[20] = "full_attention";
    CHECK_REFUSED(read_hf(with(windowed, "layer_types", types)), "layer_types");
}

TEST_CASE("a missing key means what transformers takes it for") {
    auto usual = [](nlohmann::json config, std::initializer_list<const char*> keys) {
        for (const char* key : keys) config.erase(key);
        return read_hf(config);
    };
    CHECK(usual(hf_gpt2(), {"activation_function"}).mlp == MlpKind::gelu);
    CHECK(usual(hf_gptj(), {"activation_function"}).mlp == MlpKind::gelu);
    CHECK(usual(hf_gpt_neox(), {"hidden_act"}).mlp == MlpKind::gelu_exact);
    CHECK(usual(hf_llama(), {"hidden_act", "rms_norm_eps"}).norm_eps == 1e-6f);
    CHECK(usual(hf_mistral(), {"sliding_window"}).window == 4096);
    CHECK(usual(hf_mistral(), {"num_key_value_heads"}).kv_heads == 8);
    CHECK(read_hf(with(hf_mistral(), "num_key_value_heads", nullptr)).kv_heads == 32);
    CHECK(read_hf(with(with(hf_qwen3(), "num_key_value_heads", nullptr), "head_dim", 64)).kv_heads == 16);
    CHECK(
        usual(with(with(hf_qwen2(), "num_attention_heads", 32), "hidden_size", 1024), {"num_key_value_heads"})
            .kv_heads == 32);
    CHECK(usual(with(hf_qwen3(), "num_attention_heads", 32), {"num_key_value_heads"}).kv_heads == 32);
    CHECK(usual(hf_qwen3(), {"head_dim"}).head_size == 128);
    auto windowed = with(with(hf_qwen3(), "use_sliding_window", true), "max_window_layers", 0);
    CHECK(usual(windowed, {"sliding_window"}).window == 4096);
    CHECK(read_hf(windowed).window == 0);  // the config says null
    CHECK(usual(with(windowed, "sliding_window", 5), {"max_window_layers"}).window ==
          0);  // by default, windows begin at layer 28
}

TEST_CASE("keys of a config that change nothing, and keys that nobody knows") {
    auto notes = [](const nlohmann::json& config) {
        std::vector<std::string> notes;
        hf_model(config, "config.json", notes);
        return notes;
    };
    // Configs of distilgpt2, SmolLM2 and tools have these, and to_dict() of older transformers writes them.
    auto plain = nlohmann::json::parse(R"({"_num_labels": 1, "_commit_hash": null, "is_llama_config": true,
        "rope_interleaved": false, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "unsloth_version": "2024.9", "quantization_config": null, "pruned_heads": {},
        "is_encoder_decoder": false,
        "temperature": 1.0, "bad_words_ids": null, "torchscript": false, "embedding_multiplier": 1.0,
        "unk_token_id": 0, "cross_attention_hidden_size": null})");
    for (auto config : {hf_gpt2(), hf_llama(), hf_mistral(), hf_qwen2(), hf_qwen3(), hf_seed_oss(),
                        hf_gpt_neox(), hf_gptj(), hf_yuan2()}) {
        std::string usual = description(read_hf(config));
        config.update(plain);
        CHECK(notes(config).empty());
        CHECK(description(read_hf(config)) == usual);
        config["hidden_shift"] = 3, config["zeta\n"] = nullptr;
        CHECK(notes(config) ==
              std::vector<std::string>{"config.json: unknown keys, ignored: hidden_shift, zeta\\u000a; "
                                       "check that the model computes the same without them"});
        CHECK(description(read_hf(config)) == usual);
    }
    // transformers reads these in other families only
    std::vector<std::string> types(16, "sliding_attention");
    auto llama = with(with(hf_llama(), "layer_types", types), "sliding_window", 4096);
    CHECK(description(read_hf(llama)) == description(read_hf(hf_llama())));
    CHECK(read_hf(with(hf_mistral(), "layer_types", types)).window == 4096);
    CHECK_REFUSED(read_hf(with(hf_gpt_neox(), "layer_types", types)),
                  "layer_types is an array, which is not ");
    CHECK(notes(with(hf_llama(), "rope_scaling", {{"rope_type", "default"}, {"sigma", 1}}))[0].starts_with(
        "config.json: unknown keys, ignored: sigma; "));
}

TEST_CASE("activations by all their names") {
    auto gpt2 = [](const char* name) { return read_hf(with(hf_gpt2(), "activation_function", name)).mlp; };
    for (const char* tanh :
         {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"})
        CHECK(gpt2(tanh) == MlpKind::gelu);
    for (const char* exact : {"gelu", "gelu_python"}) CHECK(gpt2(exact) == MlpKind::gelu_exact);
    CHECK(read_hf(with(hf_llama(), "hidden_act", "swish")).mlp == MlpKind::swiglu);
    CHECK_REFUSED(gpt2("silu"),
                  "activation_function silu is not supported; only gelu_new, gelu_pytorch_tanh, ");
    CHECK_REFUSED(gpt2("quick_gelu"), "activation_function quick_gelu is not supported; ");
    CHECK_REFUSED(read_hf(with(hf_llama(), "hidden_act", 3)), "hidden_act is 3; it must be a string");
}

// The ratios of scaled to unscaled frequencies in Transformers 5, for pairs 0, 8 and 31 of 32.
TEST_CASE("scaled RoPE, wherever a config has it") {
    auto base = without(without(hf_llama(), "rope_scaling"), "rope_theta");
    auto read = [&](const char* changes) {
        nlohmann::json config = base;
        config.update(nlohmann::json::parse(changes));
        return read_hf(config);
    };
    auto factors = [](const ModelConfig& c) {
        std::vector<double> ratios;
        for (int pair : {0, 8, 31}) {
            RopeScaling scaling = {c.rope_scaling, c.rope_low_frequency, c.rope_high_frequency,
                                   c.rope_original_context};
            ratios.push_back(rope_frequency(pair, 64, c.rope_theta, scaling) /
                             rope_frequency(pair, 64, c.rope_theta, {}));
        }
        return ratios;
    };
    using Ratios = std::vector<double>;
    const char* linear = R"({"rope_theta": 7000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})";
    CHECK(read(linear).rope_theta == 7000);
    CHECK(factors(read(linear)) == Ratios{0.5, 0.5, 0.5});
    // a rope_scaling that somebody added takes precedence over rope_parameters, whose base is ignored too
    ModelConfig both = read(R"({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                                "rope_scaling": {"rope_type": "linear", "factor": 2.0}})");
    CHECK(factors(both) == Ratios{0.5, 0.5, 0.5});
    CHECK(both.rope_theta == 10000);
    CHECK(read(R"({"rope_parameters": {"rope_theta": 500000.0}, "rope_scaling": {}})").rope_theta == 500000);
    CHECK(read(R"({"rope_parameters": {"rope_theta": 500000.0}, "rope_scaling": null})").rope_theta ==
          500000);
    CHECK(factors(read(R"({"rope_scaling": {"factor": 4.0}})")) == Ratios{1, 1, 1});  // default
    // the original context inside rope_scaling, next to it, or left out; the one next to it takes precedence
    const std::string llama3 =
        R"("rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0)";
    auto original = [&](const std::string& inner, const std::string& outer) {
        return read(("{\"rope_scaling\": {" + llama3 + inner + "}" + outer + "}").c_str())
            .rope_original_context;
    };
    CHECK(original(R"(, "original_max_position_embeddings": 4096)", "") == 4096);
    CHECK(original("", R"(, "original_max_position_embeddings": 2048)") == 2048);
    CHECK(original(R"(, "original_max_position_embeddings": 4096)",
                   R"(, "original_max_position_embeddings": 2048)") == 2048);
    CHECK(original("", "") == 131072);
    CHECK_REFUSED(read(R"({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}})"),
                  "rope_parameters: partial_rotary_factor is 0.5, which is not supported; ");
    CHECK_REFUSED(read(R"({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}})"),
                  "rope_parameters: full_attention is an object, which is not supported; ");
}

TEST_CASE("configs that cannot be expressed, or make no sense") {
    for (const char* key : {"model_type", "n_layer", "n_embd", "n_head", "n_positions", "vocab_size"}) {
        CHECK_REFUSED(read_hf(without(hf_gpt2(), key)), "config.json: " + std::string(key) + " is missing; ");
    }
    CHECK_REFUSED(read_hf(without(hf_qwen3(), "hidden_size")), "config.json: hidden_size is missing; ");
    const struct {
        nlohmann::json (*config)();
        const char* key;
        nlohmann::json value;
        const char* words;
    } rows[] = {
        {hf_gpt2, "model_type", "bert", "model_type bert is not supported; "},
        {hf_gpt2, "model_type", "evil\n\x1b[2J", "model_type evil\\u000a"},
        {hf_gpt2, "n_layer", "12", "; it must be a whole number from 1 to 16777216"},
        {hf_gpt2, "n_layer", -12, "; it must be a whole number from 1 to 16777216"},
        {hf_gpt2, "n_layer", 1.5, "; it must be a whole number from 1 to 16777216"},
        {hf_gpt2, "n_layer", 18446744073709551615u, "; it must be a whole number from 1 to 16777216"},
        {hf_gpt2, "n_layer", nlohmann::json::array(), "; it must be a whole number from 1 to 16777216"},
        {hf_gpt2, "n_embd", 770, "config.json: --heads 12: does not divide"},
        {hf_gpt2, "layer_norm_epsilon", 0, "layer_norm_epsilon is 0; it must be a number above 0"},
        {hf_gpt2, "activation_function", "relu", "activation_function relu is not supported; "},
        {hf_gpt2, "scale_attn_by_inverse_layer_idx", true, "is true, which is not supported; "},
        {hf_gpt2, "scale_attn_weights", "yes", "scale_attn_weights is \"yes\"; it must be true or false"},
        {hf_llama, "attention_bias", true, "attention_bias true is not supported; "},
        {hf_llama, "hidden_act", "gelu", "hidden_act gelu is not supported; "},
        {hf_llama, "attn_logit_softcapping", 50.0,
         "attn_logit_softcapping is 50.0, which is not supported; "},
        {hf_llama, "quantization_config", {{"bits", 4}}, "quantization_config is an object, which is not "},
        {hf_llama, "pruned_heads", {{"1", {2}}}, "pruned_heads is an object, which is not supported; "},
        {hf_llama, "rope_interleaved", true,
         "rope_interleaved is true, which is not supported; remove it if"},
        {hf_llama, "embedding_multiplier", 12, "embedding_multiplier is 12, which is not supported; "},
        {hf_llama, "rope_scaling", 2, "config.json: rope_scaling is 2; it must be an object"},
        {hf_qwen2, "use_mrope", true, "use_mrope is true, which is not supported; "},
        {hf_qwen3, "attention_bias", true, "attention_bias true is not supported; "},
    };
    for (auto& row : rows) {
        CAPTURE(row.value);
        CHECK_REFUSED(read_hf(with(row.config(), row.key, row.value)), row.words);
    }
    CHECK_REFUSED(read_hf(with(with(hf_gpt2(), "n_embd", 16777216), "n_head", 65536)), "config.json: ");
    for (const char* type : {"dynamic", "yarn", "longrope"}) {
        CHECK_REFUSED(read_hf(with(hf_llama(), "rope_scaling", {{"type", type}, {"factor", 2.0}})),
                      "config.json: rope_scaling: rope_type " + std::string(type) + " is not supported; ");
    }
    CHECK_REFUSED(read_hf(nlohmann::json::array()), "config.json is an array; it must be an object");
    CHECK_REFUSED(parse_hf_config("", "config.json"), "config.json: not valid JSON at byte ");
    CHECK_REFUSED(parse_hf_config("{\"n_layer\": 1e999}", "config.json"), "config.json: not valid JSON");
    CHECK_REFUSED(parse_hf_config("{\"model_type\": \"\xff\"}", "config.json"),
                  "config.json: not valid JSON");
    CHECK_REFUSED(parse_hf_config(std::string(100000, '['), "config.json"), "nested more than 32 deep; ");
    std::string whole = hf_llama().dump();
    for (size_t length = 0; length < whole.size(); length++) {
        CHECK_REFUSED(parse_hf_config(whole.substr(0, length), "config.json"),
                      "config.json: not valid JSON at byte ");
    }
}

TEST_CASE("--model with a path") {
    TemporaryFolder folder;
    std::string config = folder / "config.json";
    write_file(config, hf_qwen3().dump());
    Options options = train({"--model", folder.path.c_str(), "--layers", "2"});
    CHECK(options.layers == 2);
    CHECK(options.qk_norm);
    CHECK(options.run_dir == "runs/" + fs::path(folder.path).filename().string());
    CHECK(train({"--model", config.c_str()}).layers == 28);

    write_file(config, hf_qwen3().dump() + std::string(2 << 20, ' '));
    CHECK_REFUSED(train({"--model", folder.path.c_str()}), "a config.json is smaller than a megabyte");
    fs::remove(config);
    CHECK_REFUSED(train({"--model", folder.path.c_str()}), "/config.json: cannot open it: No such file");
}

TEST_CASE("the tokens that a file asks for are in its vocabulary") {
    nlohmann::json json = options_to_json(train({}));
    CHECK(stored_options(json, "f").document_end == 256);
    json["document_end"] = 300;
    CHECK_REFUSED(stored_options(json, "f"), "f: --document-end 300: ");
}
