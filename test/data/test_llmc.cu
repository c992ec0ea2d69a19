// Models of llm.c: export and import are inverse, and the state of any number of ranks is assembled. The
// files are forged here from llm.c's memory layout, so that nothing is compared with itself.
#include <cmath>

#include "data/exchange/llmc_import.h"
#include "test/support/file_testing.h"

// A GPT-2 whose vocabulary is padded from 5 to 128.
static ModelConfig gpt2() {
    ModelConfig model = {.layers = 3, .channels = 8, .heads = 2, .vocab_size = 5, .context = 4};
    complete(model);
    return model;
}

static std::vector<CheckpointTensor> tensors_of(const Options& c) {
    int64_t C = c.channels;
    std::vector<CheckpointTensor> table = {{"wte", {c.vocab_size, C}, {}}, {"wpe", {c.context, C}, {}}};
    for (int l = 0; l < c.layers; l++) {
        auto add = [&](const char* name, std::vector<int64_t> shape) {
            table.push_back({text("layers.%d.%s", l, name), std::move(shape), {}});
        };
        add("norm1.weight", {C});
        add("norm1.bias", {C});
        add("qkv.weight", {3 * C, C});
        add("qkv.bias", {3 * C});
        add("attproj.weight", {C, C});
        add("attproj.bias", {C});
        add("norm2.weight", {C});
        add("norm2.bias", {C});
        add("fc.weight", {4 * C, C});
        add("fc.bias", {4 * C});
        add("fcproj.weight", {C, 4 * C});
        add("fcproj.bias", {C});
    }
    table.push_back({"normf.weight", {C}, {}});
    table.push_back({"normf.bias", {C}, {}});
    return table;
}

// ----------------------------------------------------------------------------
// llm.c's memory

enum Kind { weight, master, first_moment, second_moment };

// An element of one of our tensors. Weights are the masters rounded to bf16, up or down.
static float value_of(Kind kind, const std::string& name, uint64_t element, Dtype dtype) {
    uint32_t seed = XXH32(name.data(), name.size(), (uint32_t)element);
    float moment = (float)(seed >> 8) * 0x1p-24f;
    if (kind == first_moment) return moment - 0.5f;
    if (kind == second_moment) return moment;
    uint32_t bits = std::bit_cast<uint32_t>((moment - 0.5f) * 0.1f);
    if (kind == master || dtype == Dtype::fp32) return std::bit_cast<float>(bits);
    return std::bit_cast<float>((bits >> 16 << 16) + (seed & 1 && bits & 0xffff ? 0x10000u : 0));
}

// The 16 tensors of llm.c: their names here, whether they span all layers, and the elements of one layer.
struct Param {
    const char* name;
    bool layered;
    uint64_t size;
};

static std::vector<Param> params(uint64_t C, uint64_t T, uint64_t Vp) {
    return {{"wte", false, Vp * C},
            {"wpe", false, T * C},
            {"norm1.weight", true, C},
            {"norm1.bias", true, C},
            {"qkv.weight", true, 3 * C * C},
            {"qkv.bias", true, 3 * C},
            {"attproj.weight", true, C * C},
            {"attproj.bias", true, C},
            {"norm2.weight", true, C},
            {"norm2.bias", true, C},
            {"fc.weight", true, 4 * C * C},
            {"fc.bias", true, 4 * C},
            {"fcproj.weight", true, C * 4 * C},
            {"fcproj.bias", true, C},
            {"normf.weight", false, C},
            {"normf.bias", false, C}};
}

// The memory of a rank for one kind: all of it, or with ZeRO 1 the shards that llm.c's update works on.
static std::vector<float> memory_of(Kind kind, Dtype dtype, int ranks = 1, int rank = 0) {
    ModelConfig c = gpt2();
    uint64_t total = 0, P = (uint64_t)ranks, r = (uint64_t)rank, C = (uint64_t)c.channels;
    auto table = params(C, (uint64_t)c.context, 128);
    for (const Param& param : table) total += param.size * (param.layered ? (uint64_t)c.layers : 1);
    std::vector<float> memory(total / P);
    uint64_t tensor_offset = 0;
    for (const Param& param : table) {
        uint64_t layers = param.layered ? (uint64_t)c.layers : 1, shard_size = param.size / P;
        for (uint64_t l = 0; l < layers; l++) {
            std::string name = param.layered ? text("layers.%d.%s", (int)l, param.name) : param.name;
            for (uint64_t k = 0; k < shard_size; k++) {
                uint64_t element = r * shard_size + k;
                bool padding = name == "wte" && element >= (uint64_t)c.vocab_size * C;
                memory[tensor_offset / P + l * shard_size + k] =
                    padding ? 0 : value_of(kind, name, element, dtype);
            }
        }
        tensor_offset += layers * param.size;
    }
    return memory;
}

static std::string bytes_of(const std::vector<float>& values, Dtype dtype = Dtype::fp32) {
    if (dtype == Dtype::fp32) return {(const char*)values.data(), values.size() * 4};
    std::string bytes;
    for (float value : values) bytes.append((const char*)&value + 2, 2);
    return bytes;
}

static std::string header_of(std::vector<std::pair<int, int32_t>> numbers) {
    std::vector<int32_t> header(256);
    for (auto [place, number] : numbers) header[(size_t)place] = number;
    return {(const char*)header.data(), 1024};
}

static std::string model_bytes(Dtype dtype) {
    return header_of({{0, 20240326},
                      {1, dtype == Dtype::fp32 ? 3 : 5},
                      {2, 4},
                      {3, 5},
                      {4, 3},
                      {5, 2},
                      {6, 8},
                      {7, 128}}) +
           bytes_of(memory_of(weight, dtype), dtype);
}

struct State {
    Dtype dtype = Dtype::bf16;
    int ranks = 1;
    bool zero = false, masters = true, shuffles = false;

    std::string bytes(int rank) const {
        int parts = zero ? ranks : 1, part = zero ? rank : 0;
        std::string file = header_of({{0, 20240527},
                                      {1, 1},
                                      {2, ranks},
                                      {3, rank},
                                      {4, masters},
                                      {5, shuffles},
                                      {10, 700},
                                      {20, 13371337 + rank},
                                      {30, 1},
                                      {32, 17}});
        file += bytes_of(memory_of(first_moment, dtype, parts, part));
        file += bytes_of(memory_of(second_moment, dtype, parts, part));
        if (masters) file += bytes_of(memory_of(master, dtype, parts, part));
        if (!shuffles) return file;
        uint64_t shards = 3, samples = 11;
        file.append((const char*)&shards, 8);
        file.append(4 * shards, 's');
        file.append((const char*)&samples, 8);
        file.append(4 * samples + 2520, 'm');
        return file;
    }
};

struct Folder : TemporaryFolder {
    std::string model = *this / "model_00000700.bin", run = *this / "run";

    std::string state(int rank) const { return *this / text("state_00000700_%05d.bin", rank); }
    void write(const State& state_files) {
        write_file(model, model_bytes(state_files.dtype));
        for (int rank = 0; rank < state_files.ranks; rank++) write_file(state(rank), state_files.bytes(rank));
    }
    std::vector<std::string> import_model(bool overwrite = false) {
        LlmcImport made = import_llmc(model, run, overwrite, tensors_of);
        goes_on = made.goes_on;
        return made.remarks;
    }
    bool goes_on = false;
    void check_refused(const std::string& thing, const std::string& reason) {
        check_error(error_of([&] { import_model(); }), thing, reason);
        CHECK(!fs::exists(run));
    }
};

static void check_values(CheckpointReader& reader, Slot slot, Kind kind, Dtype dtype) {
    CAPTURE(slot_name(slot));
    for (size_t i = 0; i < reader.index().tensors.size(); i++) {
        const CheckpointTensor& tensor = reader.index().tensors[i];
        std::vector<float> values(tensor.size());
        reader.read_floats((int)i, slot, 0, values.size(), values.data());
        for (size_t k = 0; k < values.size(); k++) {
            if (values[k] == value_of(kind, tensor.name, k, dtype)) continue;
            FAIL_CHECK(tensor.name << " element " << k);
            break;
        }
    }
}

static bool any_line(const std::vector<std::string>& lines, const std::string& words) {
    return std::any_of(lines.begin(), lines.end(), [&](const auto& l) { return l.find(words) != l.npos; });
}

// ----------------------------------------------------------------------------
// models

TEST_CASE_FIXTURE(Folder, "a model is imported, and exported as it was") {
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
        CAPTURE(dtype_name(dtype));
        write_file(model, model_bytes(dtype));
        std::vector<std::string> lines = import_model(dtype == Dtype::bf16);
        CHECK(any_line(lines, "weights only"));
        CHECK(!goes_on);
        CheckpointReader reader(newest_checkpoint(run));
        CHECK(reader.index().step() == 0);
        CHECK(reader.index().samples() == 0);
        CHECK(reader.index().about["program"] == program_version);
        CHECK(reader.index().tensors[0].slots == decltype(CheckpointTensor::slots){dtype});
        check_values(reader, Slot::weight, weight, dtype);

        Options options = options_from_json(reader.index().about["options"], "options");
        complete(static_cast<ModelConfig&>(options));
        CHECK(options.layers == 3);
        CHECK(options.channels == 8);
        CHECK(options.heads == 2);
        CHECK(options.vocab_size == 5);
        CHECK(options.context == 4);
        CHECK(options.tokenizer == "none");
        CHECK(nlohmann::json::parse(contents(run + "/options.json")) == reader.index().about["options"]);

        export_llmc(reader, options, *this / "again.bin", dtype);
        CHECK((contents(*this / "again.bin") == contents(model)));
        CHECK_REFUSED(export_llmc(reader, options, *this / "again.bin", dtype), "already exists; ");
        Dtype other = dtype == Dtype::fp32 ? Dtype::bf16 : Dtype::fp32;
        export_llmc(reader, options, *this / "other.bin", other);
        LlmcModel converted(*this / "other.bin");
        CHECK(converted.dtype() == other);
        std::vector<float> values(40);
        converted.read_floats(0, 40, values.data());
        for (size_t k = 0; k < 40; k++) {
            float want = value_of(weight, "wte", k, dtype);
            CHECK(values[k] == (other == Dtype::fp32 ? want : bf16_to_float(float_to_bf16(want))));
        }
        for (const char* written : {"again.bin", "other.bin"}) fs::remove(*this / written);
    }
}

TEST_CASE("an export takes the master weights") {
    Folder folder;
    folder.write({});
    folder.import_model();
    CheckpointReader reader(newest_checkpoint(folder.run));
    export_llmc(reader, gpt2(), folder / "out.bin", Dtype::fp32);
    CHECK((contents(folder / "out.bin").substr(1024) == bytes_of(memory_of(master, Dtype::bf16))));
}

TEST_CASE("tensors that are larger than what is held of them") {
    Folder folder;
    write_file(
        folder.model,
        header_of({{0, 20240326}, {1, 5}, {2, 3}, {3, 300'001}, {4, 1}, {5, 1}, {6, 4}, {7, 300'032}}));
    uint64_t elements = 300'032 * 4 + 3 * 4 + 12 * 16 + 13 * 4 + 8;
    std::string padded = contents(folder.model);
    for (uint64_t i = 0; i < elements; i++) {
        uint16_t bits = i < 300'001 * 4 || i >= 300'032 * 4 ? (uint16_t)(i % 16381) : 0;
        padded.append((const char*)&bits, 2);
    }
    write_file(folder.model, padded);
    folder.import_model();
    CheckpointReader reader(newest_checkpoint(folder.run));
    Options options = options_from_json(reader.index().about["options"], "options");
    complete(static_cast<ModelConfig&>(options));
    export_llmc(reader, options, folder / "out.bin", Dtype::bf16);
    CHECK((contents(folder / "out.bin") == padded));
}

TEST_CASE_FIXTURE(Folder, "files that are no model") {
    std::string good = model_bytes(Dtype::fp32);
    auto check = [&](const std::string& bytes, const char* reason) {
        write_file(model, bytes);
        check_refused(model, reason);
    };
    auto with = [&](int place, int32_t number) {
        std::string bytes = good;
        memcpy(bytes.data() + 4 * place, &number, 4);
        return bytes;
    };
    check_refused(model, "cannot open it: No such file");
    check("", "too short for a model of llm.c; ");
    check("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
          "only a git-lfs pointer to the file; ");
    check(good.substr(0, 1023), "too short for a model of llm.c; ");
    check(with(0, 20240327), "not a model of llm.c (wrong magic); ");
    for (int version : {1, 2, 4, 6}) check(with(1, version), "only 3 (fp32) and 5 (bf16) are known; ");
    check(with(1, 5), "bytes, and its header says ");
    const char* names[] = {"context", "vocabulary", "layers", "heads", "channels"};
    for (int place = 2; place < 7; place++) {
        for (int number : {0, -1, INT32_MIN}) check(with(place, number), names[place - 2]);
        check(with(place, INT32_MAX), place == 3 ? "vocabulary of 2147483647 padded to 128" : ": --");
    }
    check(with(2, 5), "bytes, and its header says ");
    check(with(5, 3), "--heads 3: does not divide --channels 8; ");
    check(with(7, 4), "vocabulary of 5 padded to 4; ");
    check(with(7, -1), "vocabulary of 5 padded to -1; ");
    check(with(7, INT32_MAX), "bytes, and its header says ");
    check(with(8, 1), "number 8 of the header is 1; it must be zero");
    check(with(255, -7), "number 255 of the header is -7; ");
    check(good.substr(0, good.size() - 1), "bytes, and its header says ");
    check(good + "x", "bytes, and its header says ");
}

TEST_CASE_FIXTURE(Folder, "a run that is there stays, unless it is to go") {
    write_file(model, model_bytes(Dtype::fp32));
    import_model();
    std::string before = contents(run + "/options.json");
    write_file(model, "broken");
    CHECK_REFUSED(import_model(true), "too short for a model of llm.c; ");
    CHECK(contents(run + "/options.json") == before);
    CHECK(newest_checkpoint(run) == checkpoint_folder(run, 0));
}

TEST_CASE_FIXTURE(Folder, "what llm.c cannot express is refused by the name of the option") {
    write_file(model, model_bytes(Dtype::fp32));
    import_model();
    CheckpointReader reader(newest_checkpoint(run));
    auto check = [&](auto&& change, const char* option, const char* only) {
        ModelConfig config = gpt2();
        change(config);
        check_error(error_of([&] { export_llmc(reader, config, *this / "out.bin", Dtype::fp32); }), option,
                    std::string("llm.c has only ") + only + "; ");
    };
    check([](ModelConfig& c) { c.norm = NormKind::rmsnorm; }, "--norm rmsnorm", "layernorm");
    check([](ModelConfig& c) { c.position = PositionKind::rope; }, "--position rope", "learned");
    check([](ModelConfig& c) { c.mlp = MlpKind::swiglu; }, "--mlp swiglu", "gelu");
    check([](ModelConfig& c) { c.mlp = MlpKind::gelu_exact; }, "--mlp gelu-exact", "gelu");
    check([](ModelConfig& c) { c.block = BlockKind::parallel; }, "--block parallel", "sequential");
    check([](ModelConfig& c) { c.bias = false; }, "--bias off", "on");
    check([](ModelConfig& c) { c.tie_embeddings = false; }, "--tie-embeddings off", "on");
    check([](ModelConfig& c) { c.qk_norm = true; }, "--qk-norm on", "off");
    check([](ModelConfig& c) { c.window = 2; }, "--window 2", "0");
    check([](ModelConfig& c) { c.kv_heads = 1; }, "--kv-heads 1", "2");
    check([](ModelConfig& c) { c.head_size = 8; }, "--head-size 8", "4");
    check([](ModelConfig& c) { c.mlp_width = 16; }, "--mlp-width 16", "32");
    check([](ModelConfig& c) { c.norm_eps = 1e-6f; }, "--norm-eps 1e-06", "1e-05");
    ModelConfig larger = gpt2();
    larger.layers = 4;
    CHECK_REFUSED(export_llmc(reader, larger, *this / "out.bin", Dtype::fp32),
                  "tensor layers.3.norm1.weight is missing ");
    larger.layers = 2;
    CHECK_REFUSED(export_llmc(reader, larger, *this / "out.bin", Dtype::fp32),
                  "more tensors than llm.c has; ");
    CHECK(files() == std::vector<std::string>{"model_00000700.bin", "run"});
}

// ----------------------------------------------------------------------------
// training state

TEST_CASE("the state of any number of ranks is put together") {
    for (int ranks : {1, 2, 4, 8}) {
        for (int switches = 0; switches < 16; switches++) {
            State state = {.dtype = switches & 8 ? Dtype::fp32 : Dtype::bf16,
                           .ranks = ranks,
                           .zero = (switches & 1) != 0,
                           .masters = (switches & 2) != 0,
                           .shuffles = (switches & 4) != 0};
            CAPTURE(ranks);
            CAPTURE(switches);
            Folder folder;
            folder.write(state);
            std::vector<std::string> lines = folder.import_model();
            CHECK(any_line(lines, text("step 700, with the state of %d ranks", ranks)));
            CHECK(any_line(lines, "DONE_00000700 is missing"));
            CHECK(folder.goes_on);
            CHECK(newest_checkpoint(folder.run) == checkpoint_folder(folder.run, 700));
            CheckpointReader reader(newest_checkpoint(folder.run));
            CHECK(reader.index().step() == 700);
            CHECK(reader.index().samples() == 0);
            check_values(reader, Slot::weight, weight, state.dtype);
            check_values(reader, Slot::m, first_moment, state.dtype);
            check_values(reader, Slot::v, second_moment, state.dtype);
            for (const CheckpointTensor& tensor : reader.index().tensors)
                CHECK(tensor.dtype(Slot::master).has_value() == state.masters);
            if (state.masters) check_values(reader, Slot::master, master, state.dtype);
        }
    }
}

TEST_CASE_FIXTURE(Folder, "the mark of a complete save, and other files, are no trouble") {
    write({.ranks = 2, .zero = true});
    write_file(*this / "DONE_00000700", "");
    write_file(*this / "state_00000600_00000.bin", "of another step");
    write_file(*this / "state_00000700_0.bin", "of another name");
    write_file(*this / "state_00000700_00000.bin.old", "of another name");
    CHECK(!any_line(import_model(), "DONE_"));
}

TEST_CASE_FIXTURE(Folder, "a model of another name is imported alone") {
    write({});
    fs::rename(model, *this / "gpt2.bin");
    model = *this / "gpt2.bin";
    CHECK(any_line(import_model(), "weights only"));
    CHECK(CheckpointReader(newest_checkpoint(run)).index().step() == 0);
}

TEST_CASE_FIXTURE(Folder, "ranks that are missing, too many or exchanged") {
    write({.ranks = 4, .zero = true});
    for (int rank = 0; rank < 4; rank++) {
        std::string bytes = contents(state(rank));
        fs::remove(state(rank));
        check_refused(state(rank), rank == 0 ? "missing, although state_00000700_00001.bin is present; "
                                             : "missing, although state_00000700_00000.bin is present; ");
        write_file(state(rank), bytes);
    }
    State eight = {.ranks = 8, .zero = true};
    write_file(state(4), eight.bytes(4));
    check_refused(state(4), "ranks, master weights or shuffling are not those of ");
    write_file(state(4), State{.ranks = 4, .zero = true}.bytes(3));
    check_refused(state(4), "of rank 3 of 4, but its name says rank 4; ");
    fs::rename(state(4), state(5));
    check_refused(state(0), "there are files of 5 ranks, but it says that 4 wrote the state; ");
    fs::remove(state(5));

    std::string one = contents(state(1)), two = contents(state(2));
    write_file(state(1), two);
    check_refused(state(1), "of rank 2 of 4, but its name says rank 1; ");
    // swapped contents under the right headers
    write_file(state(1), one.substr(0, 1024) + two.substr(1024));
    check_refused(model, "tensor wpe: element 8 is ");  // rank 1 has padding of wte only
    write_file(state(1), one);
    import_model();
}

TEST_CASE_FIXTURE(Folder, "state that is damaged, or not of the model") {
    State good = {.ranks = 2, .zero = true};
    write(good);
    auto check = [&](int rank, const std::string& bytes, const char* reason) {
        std::string before = contents(state(rank));
        write_file(state(rank), bytes);
        check_refused(state(rank), reason);
        write_file(state(rank), before);
    };
    auto with = [&](int rank, int place, int32_t number) {
        std::string bytes = good.bytes(rank);
        memcpy(bytes.data() + 4 * place, &number, 4);
        return bytes;
    };
    check(0, "", "too short, or was truncated ");
    check(1, good.bytes(1).substr(0, 1000), "too short, or was truncated ");
    check(0, with(0, 0, 20240326), "not a training state of llm.c (wrong magic); ");
    check(0, with(0, 1, 2), "version 2 of llm.c's state, but only 1 is known; ");
    check(0, with(0, 2, 0), "of rank 0 of 0, ");
    check(0, with(0, 2, -1), "of rank 0 of -1, ");
    check(1, with(1, 2, 3), "ranks, master weights or shuffling are not those of ");
    check(1, with(1, 4, 0), "ranks, master weights or shuffling are not those of ");
    check(1, with(1, 5, 1), "ranks, master weights or shuffling are not those of ");
    check(0, with(0, 4, 2), "master weights 2, shuffles 0; both must be 0 or 1");
    check(0, with(0, 5, -1), "master weights 1, shuffles -1; both must be 0 or 1");
    check(1, with(1, 10, 699), "of step 699, but its name says step 700; ");
    for (int place : {6, 9, 11, 19, 24, 29, 34, 255})
        check(0, with(0, place, 1), "of the header is 1; it must be zero");
    for (int rank : {0, 1}) {
        check(rank, good.bytes(rank) + "x", "its size does not fit a state of ");
        check(rank, good.bytes(rank).substr(0, good.bytes(rank).size() - 4),
              "its size does not fit a state of ");
    }
    check(1, State{.ranks = 2}.bytes(1), "differs in size from ");

    // a run that shuffles appends this data; here its counts are wrong
    State shuffling = {.ranks = 2, .zero = true, .shuffles = true};
    write(shuffling);
    std::string bytes = shuffling.bytes(0);
    size_t tail = bytes.size() - (8 + 12 + 8 + 44 + 2520);
    for (uint64_t count : std::vector<uint64_t>{0, 4, UINT64_MAX, 1ull << 62, 1ull << 61}) {
        memcpy(bytes.data() + tail, &count, 8);
        check(0, bytes, "its size does not fit a state of ");
    }
    for (size_t size = tail; size < bytes.size(); size += 7)
        check(0, shuffling.bytes(0).substr(0, size), "its size does not fit a state of ");

    // the model is of another save
    write(good);
    std::string other = model_bytes(Dtype::bf16);
    other[1024 + 2 * 1030 + 1] ^= 0x40;  // in wpe
    write_file(model, other);
    check_refused(model, "tensor wpe: element 6 is ");
}
