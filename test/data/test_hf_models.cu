// Models of Hugging Face, imported and exported: what config.json says about them, which tensors they have,
// and a checkpoint that is exported and imported again. test/scripts/check_transformers.sh compares with
// transformers itself.
#include <doctest/doctest.h>

#include <cstring>

#include "data/commands/export_import.h"
#include "data/commands/generation.h"
#include "data/options/presets.h"
#include "data/options/rules.h"
#include "data/exchange/hf_export.h"
#include "data/exchange/hf_import.h"
#include "test/data/failing_calls.h"
#include "test/support/file_testing.h"
#include "test/data/hf_configs.h"
#include "test/support/golden.h"

namespace {

// Small models that use every switch of their family.
ModelConfig gpt2_model() {
    return {.layers = 2, .channels = 24, .heads = 4, .mlp_width = 40, .vocab_size = 61, .context = 16};
}

ModelConfig llama_model() {
    ModelConfig c = gpt2_model();
    c.kv_heads = 2;
    c.head_size = 8;
    c.norm = NormKind::rmsnorm;
    c.position = PositionKind::rope;
    c.mlp = MlpKind::swiglu;
    c.bias = false;
    c.tie_embeddings = false;
    return c;
}

ModelConfig qwen3_model() {
    ModelConfig c = llama_model();
    c.qk_norm = true;
    c.norm_eps = 1e-6f;
    c.rope_theta = 1e6f;
    c.tie_embeddings = true;
    return c;
}

ModelConfig qwen2_model() {
    ModelConfig c = qwen3_model();
    c.qk_norm = false;
    c.qkv_bias = true;
    return c;
}

ModelConfig neox_model() {
    ModelConfig c = gpt2_model();
    c.position = PositionKind::rope;
    c.rope_dims = 4;
    c.rope_theta = 500;
    c.mlp = MlpKind::gelu_exact;
    c.block = BlockKind::parallel;
    c.tie_embeddings = false;
    return c;
}

ModelConfig yuan_model() {
    ModelConfig c = llama_model();
    c.kv_heads = c.head_size = 0;
    c.norm_eps = 1e-6f;
    c.tie_embeddings = true;
    c.local_filter = true;
    return c;
}

ModelConfig gptj_model() {
    ModelConfig c = neox_model();
    c.rope_theta = 10000;
    c.mlp = MlpKind::gelu;
    c.bias = false;
    return c;
}

template <typename Change>
ModelConfig with(ModelConfig config, Change&& change) {
    change(config);
    return config;
}

struct NamedModel {
    const char* family;
    ModelConfig config;
};

std::vector<NamedModel> models() {
    auto llama31 = [](ModelConfig& c) {
        c.rope_scaling = 4, c.rope_low_frequency = 1.5f, c.rope_original_context = 8;
    };
    return {
        {"gpt2", gpt2_model()},
        {"gpt2",
         with(gpt2_model(), [](ModelConfig& c) { c.mlp = MlpKind::gelu_exact, c.tie_embeddings = false; })},
        {"llama", llama_model()},
        {"llama", with(llama_model(), [](ModelConfig& c) { c.bias = true, c.tie_embeddings = true; })},
        {"llama", with(llama_model(), llama31)},
        {"mistral", with(llama_model(), [](ModelConfig& c) { c.window = 5; })},
        {"qwen2", qwen2_model()},
        {"qwen2", with(qwen2_model(), [](ModelConfig& c) { c.window = 5, c.channels = 26; })},
        {"seed_oss", with(llama_model(), [](ModelConfig& c) { c.bias = true, c.channels = 26; })},
        {"seed_oss", with(qwen2_model(), [](ModelConfig& c) { c.channels = 26; })},
        {"qwen3", qwen3_model()},
        {"qwen3", with(qwen3_model(), [](ModelConfig& c) { c.window = 5; })},
        {"qwen3",
         with(qwen3_model(), [](ModelConfig& c) { c.layers = 5, c.window = 5, c.window_pattern = "3:1"; })},
        {"yuan", yuan_model()},
        {"yuan",
         with(yuan_model(), [](ModelConfig& c) { c.tie_embeddings = false, c.channels = 18, c.heads = 3; })},
        {"gpt_neox", neox_model()},
        {"gpt_neox",
         with(neox_model(), [](ModelConfig& c) { c.tie_embeddings = true, c.mlp = MlpKind::gelu; })},
        {"gpt_neox", with(neox_model(), [](ModelConfig& c) { c.block = BlockKind::sequential; })},
        {"gpt_neox", with(neox_model(), llama31)},
        {"gptj", gptj_model()},
        {"gptj",
         with(gptj_model(), [](ModelConfig& c) { c.tie_embeddings = true, c.mlp = MlpKind::gelu_exact; })}};
}

ModelConfig completed(ModelConfig config) {
    complete(config);
    return config;
}

// Returns all options of a model, as text.
std::string description(const ModelConfig& config) {
    Options options;
    static_cast<ModelConfig&>(options) = completed(config);
    std::string result;
    for (const OptionRow& row : option_table()) {
        if (std::string(row.group) == "Model" && row.belongs_to(command_train) &&
            std::string(row.field) != "model")
            result += std::string(row.field) + "=" + value_text(row, options) + " ";
    }
    return result;
}

// The tensors of a model, as the program names them.
std::vector<CheckpointTensor> tensors_of(const ModelConfig& c) {
    int64_t C = c.channels, A = (int64_t)c.heads * c.head_size, QKV = qkv_width(c), F = c.mlp_width;
    bool norm_bias = c.bias && c.norm == NormKind::layernorm;
    std::vector<CheckpointTensor> tensors;
    auto add = [&](const std::string& name, std::vector<int64_t> shape, bool bias) {
        tensors.push_back({name + (bias || shape.size() == 1 ? ".weight" : ""), shape, {Dtype::fp32}});
        if (bias) tensors.push_back({name + ".bias", {shape[0]}, {Dtype::fp32}});
    };
    auto matrix = [&](const std::string& name, int64_t rows, int64_t columns, bool bias) {
        tensors.push_back({name + ".weight", {rows, columns}, {Dtype::fp32}});
        if (bias) tensors.push_back({name + ".bias", {rows}, {Dtype::fp32}});
    };
    tensors.push_back({"wte", {c.vocab_size, C}, {Dtype::fp32}});
    if (c.position == PositionKind::learned) tensors.push_back({"wpe", {c.context, C}, {Dtype::fp32}});
    for (int l = 0; l < c.layers; l++) {
        std::string layer = "layers." + std::to_string(l) + ".";
        add(layer + "norm1", {C}, norm_bias);
        if (c.local_filter) {
            tensors.push_back({layer + "filter1.weight", {C, C}, {Dtype::fp32}});
            tensors.push_back({layer + "filter1.bias", {C / 2}, {Dtype::fp32}});
            tensors.push_back({layer + "filter2.weight", {2 * C, C / 2}, {Dtype::fp32}});
            tensors.push_back({layer + "filter2.bias", {C}, {Dtype::fp32}});
            add(layer + "filternorm", {C}, false);
        }
        matrix(layer + "qkv", QKV, C, c.bias || c.qkv_bias);
        if (c.qk_norm) add(layer + "qnorm", {c.head_size}, false);
        if (c.qk_norm) add(layer + "knorm", {c.head_size}, false);
        matrix(layer + "attproj", C, A, c.bias);
        if (c.block == BlockKind::sequential) add(layer + "norm2", {C}, norm_bias);
        matrix(layer + "fc", fc_width(c), C, c.bias);
        matrix(layer + "fcproj", C, F, c.bias);
    }
    add("normf", {C}, norm_bias);
    if (!c.tie_embeddings) tensors.push_back({"head.weight", {c.vocab_size, C}, {Dtype::fp32}});
    int64_t parameters = 0;
    for (const CheckpointTensor& tensor : tensors) parameters += (int64_t)tensor.size();
    REQUIRE(parameters == parameter_count(c));
    return tensors;
}

// Element i of tensor t: values that differ and are exact in bf16, too.
float value_of(size_t t, uint64_t i) {
    return (float)((t * 31 + i * 7) % 251) - 125;
}

std::vector<float> values_of(size_t t, uint64_t size) {
    std::vector<float> values(size);
    for (uint64_t i = 0; i < size; i++) values[i] = value_of(t, i);
    return values;
}

Options options_of(const ModelConfig& config) {
    Options options;
    static_cast<ModelConfig&>(options) = completed(config);
    options.tokenizer = "none";
    return options;
}

// A run whose checkpoint holds values_of().
void make_run(const std::string& run_dir, const ModelConfig& config,
              const nlohmann::ordered_json& published = nlohmann::ordered_json::object()) {
    Options options = options_of(config);
    auto tensors = tensors_of(options);
    ImportedRun run(run_dir, options, false, 7, tensors, published);
    for (size_t t = 0; t < tensors.size(); t++) {
        auto values = values_of(t, tensors[t].size());
        run.checkpoint.append((int)t, Slot::weight, 0, values.size(), values.data());
    }
    run.commit();
}

void export_run(const std::string& run_dir, const ModelConfig& config, const std::string& folder,
                Dtype dtype = Dtype::fp32) {
    CheckpointReader reader(newest_checkpoint(run_dir));
    export_hf(reader, options_of(config), "", folder, dtype);
}

std::vector<std::string> import_run(const std::string& folder, const std::string& run_dir) {
    return import_hf(folder, run_dir, false, [](const Options& options) { return tensors_of(options); });
}

// Reads one tensor of a folder.
std::vector<float> read_tensor(const std::string& folder, const std::string& name) {
    SafetensorsFolder files(folder);
    const SafeTensor* tensor = files.find(name);
    REQUIRE(tensor);
    std::vector<float> values(tensor->size());
    files.read_floats(name, 0, values.size(), values.data());
    return values;
}

// A tensor of a folder whose weights rewrite() changes: its name, shape or values.
struct Rewritten {
    std::string name;
    std::vector<uint64_t> shape;
    std::vector<float> values;
};

template <typename Change>
void rewrite(const std::string& folder, Change&& change) {
    std::vector<Rewritten> tensors;
    {
        SafetensorsFolder files(folder);
        for (const std::string& name : files.names())
            tensors.push_back({name, files.find(name)->shape, read_tensor(folder, name)});
    }
    change(tensors);
    fs::remove(folder + "/model.safetensors");
    std::vector<NamedShape> shapes;
    for (const Rewritten& tensor : tensors) shapes.push_back({tensor.name, tensor.shape});
    SafetensorsWriter writer(folder, shapes, Dtype::fp32);
    for (const Rewritten& tensor : tensors)
        writer.append(tensor.name, 0, tensor.values.size(), tensor.values.data());
    writer.commit();
}

Rewritten& find(std::vector<Rewritten>& tensors, const std::string& name) {
    for (Rewritten& tensor : tensors) {
        if (tensor.name == name) return tensor;
    }
    FAIL("no tensor " << name);
    return tensors[0];
}

}  // namespace

// ----------------------------------------------------------------------------
// config.json

TEST_CASE("published configs of GPT-NeoX and GPT-J") {
    ModelConfig neox = completed(parse_hf_config(hf_gpt_neox().dump(), "config.json"));
    CHECK(neox.block == BlockKind::parallel);
    CHECK(neox.bias);
    CHECK(neox.mlp == MlpKind::gelu_exact);
    CHECK(neox.rope_dims == 16);
    CHECK(parameter_count(neox) == 70426624 - 6 * 2 * 512);  // pythia-70m, without one norm of each layer
    ModelConfig gptj = completed(parse_hf_config(hf_gptj().dump(), "config.json"));
    CHECK(gptj.block == BlockKind::parallel);
    CHECK(!gptj.bias);
    CHECK(gptj.mlp == MlpKind::gelu);
    CHECK(gptj.rope_dims == 64);
    CHECK(gptj.mlp_width == 16384);
    CHECK(parameter_count(gptj) ==
          6050882784 - 50400 - 28 * (16384 + 2 * 4096) - 4096);  // gpt-j-6b, without its biases
}

TEST_CASE("published configs of Yuan 2.0") {
    ModelConfig yuan = completed(parse_hf_config(hf_yuan2().dump(), "config.json"));
    CHECK(yuan.local_filter);
    CHECK(yuan.tie_embeddings);
    CHECK(yuan.kv_heads == 64);
    CHECK(description(yuan) == description(find_preset("yuan2-51B")->config));
    auto refuse = [](const char* key, nlohmann::json value, const char* words) {
        nlohmann::json config = hf_yuan2();
        config[key] = value;
        CHECK_REFUSED(parse_hf_config(config.dump(), "config.json"), words);
    };
    refuse("rms_norm_eps", 1e-5, "rms_norm_eps 1e-05 is not supported; only 1e-06 is");
    refuse("causal_mask", false, "causal_mask false is not supported; ");
    refuse("is_causal", false, "is_causal false is not supported; ");
    refuse("use_shareqk", true, "use_shareqk is true, which is not supported; ");
    refuse("use_moe", true, "use_moe is true, which is not supported; ");
    refuse("moe_config", {{"moe_num_experts", 32}}, "moe_config");
}

TEST_CASE("a config that is written is the same model when it is read") {
    std::vector<NamedModel> all = models();
    for (const Preset& preset : preset_table()) all.push_back({nullptr, preset.config});
    // in floating point, 2 / 49 * 49 is less than 2
    for (int width : {45, 47, 49, 250}) {
        for (int dims = 2; dims <= width; dims += 2) {
            auto share = [&](ModelConfig& c) { c.heads = 3, c.channels = 3 * width, c.rope_dims = dims; };
            all.push_back({"gpt_neox", with(neox_model(), share)});
        }
    }
    for (const NamedModel& model : all) {
        ModelConfig config = completed(model.config);
        std::string json = hf_config_json(config, "float32", 5).dump();
        CAPTURE(json);
        if (model.family) CHECK(nlohmann::json::parse(json)["model_type"] == model.family);
        CHECK(description(parse_hf_config(json, "config.json")) == description(config));
    }
}

TEST_CASE("models that no family expresses are refused by the option") {
    auto refuse = [](const ModelConfig& config, const char* words) {
        CHECK_REFUSED(hf_family(completed(config)), words);
    };
    refuse(with(llama_model(), [](ModelConfig& c) { c.block = BlockKind::parallel; }),
           "--block parallel: Hugging Face's llama, the nearest family, has only sequential; ");
    refuse(with(llama_model(), [](ModelConfig& c) { c.position = PositionKind::learned; }),
           "--position learned: ");
    refuse(with(llama_model(), [](ModelConfig& c) { c.mlp = MlpKind::gelu; }), "--mlp gelu: ");
    refuse(with(llama_model(), [](ModelConfig& c) { c.rope_dims = 4; }), "--rope-dims 4: ");
    refuse(with(llama_model(), [](ModelConfig& c) { c.window = 4, c.bias = true; }),
           "--bias on: Hugging Face's mistral, the nearest family, has only off; ");
    refuse(with(qwen3_model(), [](ModelConfig& c) { c.bias = true; }), "--bias on: Hugging Face's qwen3");
    for (const ModelConfig& model : {gptj_model(), qwen3_model(), yuan_model()})
        refuse(with(model, [](ModelConfig& c) { c.qkv_bias = true; }), "--qkv-bias on: Hugging Face's ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.mlp = MlpKind::swiglu; }), "--mlp swiglu: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.qk_norm = true; }), "--qk-norm on: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.window = 4; }), "--window 4: ");
    auto pattern = [](ModelConfig& c) { c.window = 4, c.window_pattern = "1:1"; };
    refuse(with(llama_model(), pattern),
           "--window-pattern 1:1: Hugging Face's mistral, the nearest family, has only none; ");
    // two layers, of which one or none has full attention
    auto patterned = [](ModelConfig model, const char* windows) {
        model.window = 4, model.window_pattern = windows;
        return std::string(hf_family(completed(model)).name);
    };
    CHECK(patterned(qwen3_model(), "1:2") == "qwen3");
    CHECK(patterned(qwen3_model(), "02:1") == "qwen3");
    CHECK(patterned(llama_model(), "3:1") == "mistral");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.kv_heads = 2; }), "--kv-heads 2: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.head_size = 8; }), "--head-size 8: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.head_size = 8, c.heads = 5, c.kv_heads = 0; }),
           "--head-size 8: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.block = BlockKind::parallel; }), "--block parallel: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.bias = false; }),
           "--bias off: Hugging Face's gpt2, the nearest family, has only on; ");
    refuse(with(gptj_model(), [](ModelConfig& c) { c.block = BlockKind::sequential; }),
           "--block sequential: ");
    refuse(with(gptj_model(), [](ModelConfig& c) { c.rope_theta = 500; }), "--rope-theta 500: ");
    refuse(with(gptj_model(), [](ModelConfig& c) { c.rope_scaling = 2; }), "--rope-scaling 2: ");
    refuse(with(gpt2_model(), [](ModelConfig& c) { c.local_filter = true; }), "--norm layernorm: ");
    refuse(with(yuan_model(), [](ModelConfig& c) { c.qk_norm = true; }), "--qk-norm on: ");
    refuse(with(yuan_model(), [](ModelConfig& c) { c.norm_eps = 1e-5f; }), "--norm-eps 1e-05: ");
    refuse(with(yuan_model(), [](ModelConfig& c) { c.kv_heads = 2; }), "--kv-heads 2: ");
    refuse(with(yuan_model(), [](ModelConfig& c) { c.rope_theta = 500; }), "--rope-theta 500: ");
}

TEST_CASE("GPT-NeoX and GPT-J that are not ours") {
    auto refuse = [](nlohmann::json config, const char* key, nlohmann::json value, const char* words) {
        config[key] = value;
        CHECK_REFUSED(parse_hf_config(config.dump(), "config.json"), words);
    };
    refuse(hf_gpt_neox(), "attention_bias", false, "attention_bias false is not supported; ");
    refuse(hf_gpt_neox(), "rotary_pct", 0.01, "rotary_pct 0.01 is not supported; ");
    refuse(hf_gpt_neox(), "rotary_pct", 0, "rotary_pct is 0; it must be a number above 0");
    refuse(hf_gpt_neox(), "rotary_pct", "x", "rotary_pct is \"x\"; it must be a number above 0");
    refuse(hf_gpt_neox(), "rope_theta", 5, "rope_theta 5 is not supported; ");
    refuse(hf_gpt_neox(), "partial_rotary_factor", 0.5, "partial_rotary_factor 0.5 is not supported; ");
    refuse(hf_gpt_neox(), "hidden_act", "relu", "hidden_act relu is not supported; ");
    refuse(hf_gptj(), "rotary", false, "rotary false is not supported; ");
    refuse(hf_gptj(), "rotary_dim", nullptr, "rotary_dim is missing; ");
    refuse(hf_gptj(), "rotary_dim", 512, "config.json: --rope-dims 512: ");
    refuse(hf_gptj(), "scale_attn_weights", false, "scale_attn_weights false is not supported; ");
}

TEST_CASE("the tokens that end a text in a config") {
    using Ends = std::vector<int>;
    auto ends = [](HfConfig::Json value) { return hf_ends_of_text({{"eos_token_id", value}}, 10); };
    CHECK(ends(3) == Ends{3});
    CHECK(ends({4, 5}) == Ends{4, 5});
    CHECK(ends({4, 10, -1, "3", 5}) == Ends{4, 5});
    for (HfConfig::Json none : {HfConfig::Json(10), HfConfig::Json(-1), HfConfig::Json(18446744073709551615u),
                                HfConfig::Json("3"), HfConfig::Json(), HfConfig::Json::array()})
        CHECK(ends(none).empty());
    CHECK(hf_ends_of_text(HfConfig::Json::object(), 10).empty());
}

TEST_CASE("a width that heads do not divide goes out as what transformers takes") {
    ModelConfig uneven = completed(with(llama_model(), [](ModelConfig& c) { c.channels = 26; }));
    nlohmann::json config = hf_config_json(uneven, "float32", -1);
    CHECK(config["model_type"] == "mistral");
    CHECK(config["architectures"][0] == "MistralForCausalLM");
    CHECK(config["sliding_window"].is_null());
    CHECK(description(parse_hf_config(config.dump(), "config.json")) == description(uneven));
    uneven.bias = true;
    config = hf_config_json(uneven, "float32", -1);
    CHECK(config["architectures"][0] == "SeedOssForCausalLM");
    for (const char* key : {"attention_bias", "attention_out_bias", "mlp_bias"}) CHECK(config[key] == true);
    CHECK(config["residual_dropout"] == 0.0);
    CHECK(config["pad_token_id"].is_null());
    CHECK(description(parse_hf_config(config.dump(), "config.json")) == description(uneven));
}

TEST_CASE("linear RoPE goes out as that") {
    ModelConfig linear = completed(
        with(llama_model(), [](ModelConfig& c) { c.rope_scaling = 2, c.rope_original_context = 1; }));
    nlohmann::json config = hf_config_json(linear, "float32", -1);
    CHECK(config["rope_scaling"] == nlohmann::json{{"rope_type", "linear"}, {"factor", 2.0}});
    CHECK(description(parse_hf_config(config.dump(), "config.json")) == description(linear));
}

// ----------------------------------------------------------------------------
// tensors

// Each element of our tensors is in exactly one place of theirs.
TEST_CASE("a table covers a model") {
    for (const NamedModel& model : models()) {
        ModelConfig config = completed(model.config);
        auto tensors = tensors_of(config);
        auto table = hf_tensors(config);
        auto numbers = match_hf_tensors(table, tensors, "here");
        std::vector<std::vector<int>> seen;
        for (const CheckpointTensor& tensor : tensors) seen.emplace_back(tensor.size());
        for (const HfTensor& theirs : table) {
            if (theirs.role != HfRole::holds) continue;
            std::vector<int>& ours = seen[(size_t)numbers.at(theirs.ours)];
            uint64_t last = 0;
            theirs.each_element(0, theirs.rows(), [&](uint64_t at, uint64_t our_at) {
                ours[theirs.our_first() + our_at]++;
                last = at;
            });
            CHECK(last == theirs.size() - 1);
        }
        for (const auto& ours : seen) CHECK(std::count(ours.begin(), ours.end(), 1) == (int64_t)ours.size());
    }
}

TEST_CASE("orders") {
    TemporaryFolder folder;
    auto exported = [&](const ModelConfig& config, const char* family, const std::string& name) {
        if (!fs::exists(folder / family)) {
            make_run(folder / std::string("run-") + family, config);
            export_run(folder / std::string("run-") + family, config, folder / family);
        }
        return read_tensor(folder / family, name);
    };
    auto number = [](const ModelConfig& config, const char* name) {
        auto tensors = tensors_of(completed(config));
        for (size_t t = 0; t < tensors.size(); t++) {
            if (tensors[t].name == name) return t;
        }
        FAIL("no tensor " << name);
        return tensors.size();
    };
    constexpr int C = 24, HS = 6, NH = 4;
    auto conv1d = exported(gpt2_model(), "gpt2", "transformer.h.1.attn.c_attn.weight");  // (C, 3C)
    size_t t = number(gpt2_model(), "layers.1.qkv.weight");
    for (size_t i : {0, 5, 23})
        for (size_t j : {0, 1, 50, 71}) CHECK(conv1d[i * 3 * C + j] == value_of(t, j * C + i));

    // query, key and value heads of six elements
    auto fused = exported(neox_model(), "neox", "gpt_neox.layers.0.attention.query_key_value.bias");
    t = number(neox_model(), "layers.0.qkv.bias");
    CHECK(fused[0] == value_of(t, 0));
    CHECK(fused[HS] == value_of(t, C));                          // the first key of the first head
    CHECK(fused[2 * HS + 1] == value_of(t, 2 * C + 1));          // a value of that head
    CHECK(fused[3 * HS] == value_of(t, HS));                     // the first query of the second head
    CHECK(fused[(3 * NH - 1) * HS] == value_of(t, 3 * C - HS));  // the first value of the last
    CHECK(exported(neox_model(), "neox", "gpt_neox.layers.1.post_attention_layernorm.weight") ==
          exported(neox_model(), "neox", "gpt_neox.layers.1.input_layernorm.weight"));

    auto values = exported(qwen2_model(), "qwen2", "model.layers.1.self_attn.v_proj.bias");
    t = number(qwen2_model(), "layers.1.qkv.bias");
    CHECK(values.size() == 16);
    CHECK(values[5] == value_of(t, 32 + 16 + 5));  // after the queries and the keys

    // RoPE rotates four of the six elements; ours pairs 0 with 2 and 1 with 3
    auto keys = exported(gptj_model(), "gptj", "transformer.h.1.attn.k_proj.weight");
    t = number(gptj_model(), "layers.1.qkv.weight");
    int ours[HS] = {0, 2, 1, 3, 4, 5};
    for (int head = 0; head < NH; head++) {
        for (int row = 0; row < HS; row++)
            CHECK(keys[(size_t)(head * HS + row) * C] ==
                  value_of(t, (uint64_t)(C + head * HS + ours[row]) * C));
    }
    CHECK(exported(gptj_model(), "gptj", "transformer.h.1.mlp.fc_in.bias") == std::vector<float>(40));
    CHECK(exported(gptj_model(), "gptj", "lm_head.bias") == std::vector<float>(61));
}

// The weights of the golden run under their published names and under ours, from PyTorch's model.
TEST_CASE("a model with a local filter, in its published order") {
    Golden golden("yuan");
    ModelConfig config = yuan_model();
    config.channels = 8, config.heads = 2, config.mlp_width = 12, config.vocab_size = 31;
    for (const HfTensor& theirs : hf_tensors(completed(config))) {
        if (theirs.role != HfRole::holds) continue;
        CAPTURE(theirs.name);
        auto published = golden.tensor<float>("published", theirs.name),
             ours = golden.tensor<float>("weight", theirs.ours);
        REQUIRE(published.size() == theirs.size());
        bool same = true;
        theirs.each_element(0, theirs.rows(), [&](uint64_t at, uint64_t our_at) {
            same &= published[at] == ours.at(theirs.our_first() + our_at);
        });
        CHECK(same);
    }
}

TEST_CASE("what goes out comes back, bit for bit") {
    for (const NamedModel& model : models()) {
        CAPTURE(description(model.config));
        for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
            TemporaryFolder folder;
            make_run(folder / "run", model.config);
            export_run(folder / "run", model.config, folder / "out", dtype);
            import_run(folder / "out", folder / "back");
            CheckpointReader reader(newest_checkpoint(folder / "back"));
            CHECK(reader.index().step() == 0);
            auto tensors = tensors_of(completed(model.config));
            REQUIRE(reader.index().tensors.size() == tensors.size());
            for (size_t t = 0; t < tensors.size(); t++) {
                std::vector<float> values(tensors[t].size());
                CAPTURE(tensors[t].name);
                CHECK(reader.index().tensors[t].name == tensors[t].name);
                CHECK(reader.index().tensors[t].shape == tensors[t].shape);
                CHECK(reader.index().tensors[t].dtype(Slot::weight) == dtype);
                reader.read_floats((int)t, Slot::weight, 0, values.size(), values.data());
                CHECK(values == values_of(t, values.size()));
            }
            Options options = stored_options(reader.index().about["options"], "index.bin");
            CHECK(description(options) == description(model.config));
        }
    }
}

TEST_CASE("the master copy goes out, where there is one") {
    TemporaryFolder folder;
    Options options = options_of(llama_model());
    auto tensors = tensors_of(options);
    for (CheckpointTensor& tensor : tensors) tensor.slots = {Dtype::bf16, Dtype::fp32};
    ImportedRun run(folder / "run", options, false, 0, tensors);
    for (size_t t = 0; t < tensors.size(); t++) {
        std::vector<float> values(tensors[t].size(), 1.0f);
        run.checkpoint.append((int)t, Slot::weight, 0, values.size(), values.data());
        std::fill(values.begin(), values.end(), 1.001f);
        run.checkpoint.append((int)t, Slot::master, 0, values.size(), values.data());
    }
    run.commit();
    export_run(folder / "run", llama_model(), folder / "out");
    for (float value : read_tensor(folder / "out", "model.norm.weight")) CHECK(value == 1.001f);
}

// ----------------------------------------------------------------------------
// files

TEST_CASE("a folder that was exported") {
    TemporaryFolder folder;
    make_run(folder / "run", gpt2_model());
    std::string tokenizer =
        R"({"added_tokens": [{"id": 60, "content": "<|endoftext|>"}, {"id": 59, "content": "<pad>"}]})";
    write_file(folder / "tokenizer.json", tokenizer);
    Options options = options_of(gpt2_model());
    options.document_end = 60;
    CheckpointReader reader(newest_checkpoint(folder / "run"));
    std::string out = folder / "out";
    export_hf(reader, options, folder / "tokenizer.json", out, Dtype::bf16);
    auto json = [&](const char* name) { return nlohmann::json::parse(read_text(out + "/" + name)); };
    CHECK(json("config.json")["torch_dtype"] == "bfloat16");
    CHECK(json("config.json")["eos_token_id"] == 60);
    CHECK(json("config.json")["architectures"] == nlohmann::json::array({"GPT2LMHeadModel"}));
    CHECK(json("generation_config.json")["eos_token_id"] == 60);
    CHECK(json("tokenizer_config.json")["eos_token"] == "<|endoftext|>");
    CHECK(read_text(out + "/tokenizer.json") == tokenizer);
    // an export overwrites no file, and writes none if one of its files exists
    for (const auto& entry : fs::directory_iterator(out)) {
        std::string name = entry.path().filename(), other = folder / ("other " + name);
        fs::create_directory(other);
        write_file(other + "/" + name, "");
        CHECK_REFUSED(export_hf(reader, options, folder / "tokenizer.json", other, Dtype::bf16),
                      name + ": already exists; ");
        CHECK(std::distance(fs::directory_iterator(other), fs::directory_iterator()) == 1);
    }
    SafetensorsFolder files(out);
    CHECK(!files.find("lm_head.weight"));  // tied
    CHECK(files.find("transformer.wte.weight")->dtype == "BF16");
}

TEST_CASE("an export that fails leaves nothing, and its config comes last") {
    TemporaryFolder folder;
    make_run(folder / "run", gpt2_model());
    synced.clear();
    export_run(folder / "run", gpt2_model(), folder / "out");
    CHECK(synced.back() == folder / "out");
    for (const char* name : {"generation_config.json", "config.json", "model.safetensors"}) {
        std::string out = folder / ("no " + std::string(name));
        fail_next_sync_of = out + "/" + name + ".partial";
        CHECK_REFUSED(export_run(folder / "run", gpt2_model(), out), "cannot write it: Input/output error; ");
        CHECK(!fs::exists(out));
    }
    fail_next_rename_to = folder / "last/config.json";
    CHECK_REFUSED(export_run(folder / "run", gpt2_model(), folder / "last"), "give the new file this name");
    CHECK(fs::exists(folder / "last/model.safetensors"));
    fail_next_rename_to = folder / "first/model.safetensors";
    CHECK_REFUSED(export_run(folder / "run", gpt2_model(), folder / "first"), "give the new file this name");
    CHECK(!fs::exists(folder / "first"));
}

TEST_CASE("an import of a file of a folder names the folder as what is to be given") {
    TemporaryFolder folder;
    auto import_file = [&](const std::string& name) {
        ImportOptions options;
        options.source = folder / name, options.output = folder / "run";
        import_model(options, [](const Options& model) { return tensors_of(model); });
    };
    for (std::string name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
        CHECK_REFUSED(import_file(name), name + ": cannot open it: No such file or directory; ");
        write_file(folder / name, "{}");
        CHECK_REFUSED(import_file(name), name + ": a file of a Hugging Face model; name its folder");
    }
}

TEST_CASE("an export of Yuan 2.0 asks for the published code, unless it is there") {
    TemporaryFolder folder;
    make_run(folder / "yuan", yuan_model());
    make_run(folder / "llama", llama_model());
    auto said = [&](const std::string& run, const std::string& to) {
        ExportOptions options;
        options.run = folder / run, options.output = folder / to;
        auto [printed, error] = printed_by([&] { export_model(options); });
        CHECK(error == "no error");
        return printed;
    };
    const std::string files = "copy configuration_yuan.py and yuan_hf_model.py of a published model there";
    CHECK(said("yuan", "out").find(folder / "out: " + files) != std::string::npos);
    CHECK(said("llama", "other").find(files) == std::string::npos);
    fs::create_directories(folder / "again");
    write_file(folder / "again/yuan_hf_model.py", "");
    CHECK(said("yuan", "again").find(files) == std::string::npos);
}

TEST_CASE("an import replaces a run when all of it is there") {
    TemporaryFolder folder;
    std::string run = folder / "run", out = folder / "out";
    ModelConfig config = with(gpt2_model(), [](ModelConfig& c) { c.vocab_size = 257; });
    make_run(folder / "bytes", config);
    Options options = options_of(config);
    options.tokenizer = "bytes";
    options.document_end = 256;
    CheckpointReader reader(newest_checkpoint(folder / "bytes"));
    export_hf(reader, options, "", out, Dtype::fp32);
    auto import_model = [&] {
        import_hf(out, run, true, [](const Options& model) { return tensors_of(model); });
    };
    make_run(run, llama_model());  // its checkpoint has step 7
    write_file(run + "/tokenizer.json", "older");
    auto old_run_is_whole = [&] {
        CHECK(checkpoint_steps(run)[0] == 7);
        CheckpointReader older(newest_checkpoint(run));
        for (const CheckpointPiece& piece : older.index().pieces) {
            std::vector<char> bytes(older.index().bytes_of(piece));
            older.read(piece, bytes.data());
        }
    };
    std::string partial = checkpoint_folder(run, 0) + ".partial";
    for (const std::string& file :
         {partial + "/data_00000.bin", partial + "/index.bin.partial", run + "/tokenizer.json.new.partial"}) {
        fail_next_sync_of = file;
        CHECK_REFUSED(import_model(), "cannot write it: Input/output error; ");
        old_run_is_whole();
        CHECK(read_text(run + "/tokenizer.json") == "older");
        CHECK(checkpoint_steps(run) == std::vector<int64_t>{7});
    }
    // a failed rename, as if the import were killed in the middle
    fail_next_rename_to = checkpoint_folder(run, 7) + ".partial";
    CHECK_REFUSED(import_model(), "cannot rename it: Input/output error; ");
    old_run_is_whole();
    CHECK(!fs::exists(run + "/tokenizer.json"));
    import_model();
    CHECK(checkpoint_steps(run) == std::vector<int64_t>{0});
    CHECK(Tokenizer::load(run + "/tokenizer.json").vocab_size() == 257);
    for (const char* name : {"/tokenizer.json", "/tokenizer_config.json"}) fs::remove(out + name);
    import_model();  // without a tokenizer
    CHECK(!fs::exists(run + "/tokenizer.json"));
    CHECK(!fs::exists(run + "/tokenizer.json.aside"));
}

TEST_CASE("a run whose tokens are bytes goes out with a tokenizer, and comes back with it") {
    TemporaryFolder folder;
    ModelConfig config = with(llama_model(), [](ModelConfig& c) { c.vocab_size = 257; });
    make_run(folder / "run", config);
    Options options = options_of(config);
    options.tokenizer = "bytes";
    options.document_end = 256;
    CheckpointReader reader(newest_checkpoint(folder / "run"));
    export_hf(reader, options, "", folder / "out", Dtype::fp32);
    Tokenizer tokenizer = Tokenizer::load(folder / "out");
    std::vector<int> tokens = tokenizer.encode("a\xc3\xa9 \n\x7f");
    CHECK(tokens == std::vector<int>{'a', 0xc3, 0xa9, ' ', '\n', 0x7f});
    for (int byte = 0; byte < 256; byte++) CHECK(tokenizer.token_bytes(byte) == std::string(1, (char)byte));
    CHECK(tokenizer.end_of_text() == 256);
    import_run(folder / "out", folder / "back");
    CheckpointReader back(newest_checkpoint(folder / "back"));
    CHECK(back.index().about["options"]["document_end"] == 256);
    CHECK(back.index().about["options"]["tokenizer"] == folder / "back/tokenizer.json");
    CHECK(Tokenizer::load(folder / "back/tokenizer.json").vocab_size() == 257);
}

// A model folder as others publish it, with settings that none of our options expresses.
struct PublishedModel {
    TemporaryFolder folder;
    std::string out = folder / "out", run = folder / "run", again = folder / "again";

    explicit PublishedModel(const ModelConfig& model, const char* said) {
        make_run(folder / "made", model);
        Options options = options_of(model);
        options.tokenizer = "bytes";
        CheckpointReader reader(newest_checkpoint(folder / "made"));
        export_hf(reader, options, "", out, Dtype::fp32);
        nlohmann::json config = json(out, "config.json");
        for (const char* key : {"bos_token_id", "eos_token_id", "torch_dtype"}) config.erase(key);
        config.update(nlohmann::json::parse(said));
        write_file(out + "/config.json", config.dump());
        for (const char* name : {"generation_config.json", "tokenizer_config.json"})
            fs::remove(out + "/" + name);
    }
    nlohmann::json json(const std::string& place, const std::string& name) const {
        return nlohmann::json::parse(read_text(place + "/" + name));
    }
    // Imports it, and exports it again with another end-of-document token, or with the imported one (-1).
    void go_through(int document_end = -1, Dtype dtype = Dtype::fp32, bool as_stored = true) {
        for (const std::string& place : {run, again}) fs::remove_all(place);
        import_run(out, run);
        CheckpointReader reader(newest_checkpoint(run));
        Options options = stored_options(reader.index().about["options"], "index.bin");
        if (document_end >= 0) options.document_end = document_end;
        export_hf(reader, options, run + "/tokenizer.json", again, dtype, as_stored);
    }
};

constexpr const char* identities = R"({"bos_token_id": 7, "eos_token_id": [256, 9], "pad_token_id": 8,
    "unk_token_id": 3, "initializer_range": 0.008, "torch_dtype": "float16", "hidden_act": "swish",
    "model_type": "mistral", "sliding_window": null, "quantization_config": null,
    "nobody_knows": [1, {"a": 2}],
    "architectures": ["MistralForCausalLM"], "transformers_version": "4.40.0"})";

ModelConfig bytes_model() {
    return with(llama_model(), [](ModelConfig& c) { c.vocab_size = 257; });
}

TEST_CASE("what a model was published with goes out as it came in") {
    PublishedModel model(bytes_model(), identities);
    const char* generation = R"({"eos_token_id": [9, 256, 11], "do_sample": true, "pad_token_id": 8})";
    const char* settings = R"({"chat_template": "{{ x }}", "padding_side": "left", "pad_token": "<p>",
        "unk_token": {"content": "<u>"}, "tokenizer_class": "LlamaTokenizer"})";
    write_file(model.out + "/generation_config.json", generation);
    write_file(model.out + "/tokenizer_config.json", settings);
    write_file(model.out + "/special_tokens_map.json", R"({"pad_token": "<p>"})");
    write_file(model.out + "/chat_template.jinja", "{% for m in messages %}\n");
    model.go_through();
    CHECK(model.json(model.again, "config.json") == model.json(model.out, "config.json"));
    CHECK(model.json(model.again, "generation_config.json") == nlohmann::json::parse(generation));
    for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"})
        CHECK(read_text(model.again + "/" + name) == read_text(model.out + "/" + name));

    // A change that a run made is exported.
    model.go_through(11, Dtype::bf16);
    nlohmann::json config = model.json(model.again, "config.json");
    CHECK(config["eos_token_id"] == 11);
    CHECK(config["bos_token_id"] == 7);
    CHECK(config["torch_dtype"] == "bfloat16");
    CHECK(model.json(model.again, "generation_config.json") ==
          nlohmann::json::parse(generation));  // it has 11 already
    model.go_through(-1, Dtype::fp32, false);
    CHECK(model.json(model.again, "config.json")["torch_dtype"] == "float32");

    // settings of a tokenizer other than the run's are left out
    std::string tokenizer = read_text(model.run + "/tokenizer.json");
    write_file(model.run + "/tokenizer.json", tokenizer + "\n");
    CheckpointReader reader(newest_checkpoint(model.run));
    Options options = stored_options(reader.index().about["options"], "index.bin");
    export_hf(reader, options, model.run + "/tokenizer.json", model.folder / "other", Dtype::fp32);
    CHECK(model.json(model.folder / "other", "tokenizer_config.json")["tokenizer_class"] ==
          "PreTrainedTokenizerFast");
    CHECK(!fs::exists(model.folder / "other/chat_template.jinja"));
}

TEST_CASE("documents end as the tokenizer says, and the config's own end goes out again") {
    PublishedModel model(bytes_model(), R"({"eos_token_id": 9})");
    model.go_through();
    CheckpointReader reader(newest_checkpoint(model.run));
    CHECK(reader.index().about["options"]["document_end"] == 256);
    CHECK(model.json(model.again, "config.json") == model.json(model.out, "config.json"));
    CHECK(model.json(model.again, "generation_config.json")["eos_token_id"] == 9);
}

TEST_CASE("fp16 weights that were trained since are not called fp16") {
    TemporaryFolder folder;
    nlohmann::ordered_json config = hf_config_json(completed(llama_model()), "float16", -1);
    make_run(folder / "run", llama_model(), {{"config.json", config.dump()}});
    CheckpointReader reader(newest_checkpoint(folder / "run"));
    export_hf(reader, options_of(llama_model()), "", folder / "out", Dtype::fp32, true);
    auto exported = nlohmann::json::parse(read_text(folder / "out/config.json"));
    CHECK(exported["torch_dtype"] == "float32");
}

TEST_CASE("a sample ends at every token that a model was published with") {
    PublishedModel model(bytes_model(), identities);
    auto ends = [&] {
        model.go_through();
        return ends_of_text(TrainedModel(model.run, ""));
    };
    CHECK(ends() == std::vector<int>{256, 9, 256});
    write_file(model.out + "/generation_config.json", R"({"eos_token_id": [9, 256, 11, 257]})");
    CHECK(ends() == std::vector<int>{9, 256, 11, 256});
    write_file(model.out + "/generation_config.json", R"({"bos_token_id": 1})");
    CHECK(ends() == std::vector<int>{256, 9, 256});
    CHECK(ends_of_text(TrainedModel(model.folder / "made", "")) == std::vector<int>{-1});
}

TEST_CASE("an import goes on without what it cannot read besides the weights") {
    PublishedModel model(bytes_model(), R"({"zeta": 1})");
    write_file(model.out + "/tokenizer.json",
               R"({"version": "1.0", "model": {"type": "Unigram", "vocab": []}})");
    write_file(model.out + "/generation_config.json", "{");
    std::vector<std::string> remarks = import_run(model.out, model.run);
    REQUIRE(remarks.size() == 3);
    CHECK(remarks[0].starts_with(model.out +
                                 "/tokenizer.json: of type \"Unigram\", but only BPE is supported: "
                                 "the run has no tokenizer; make token files "));
    CHECK(remarks[1].starts_with(model.out + "/config.json: unknown keys, ignored: zeta; "));
    CHECK(remarks[2].starts_with(model.out + "/generation_config.json: not valid JSON at byte "));
    CHECK(!fs::exists(model.run + "/tokenizer.json"));
    CheckpointReader reader(newest_checkpoint(model.run));
    CHECK(reader.index().about["options"]["tokenizer"] == "none");
    write_file(model.out + "/tokenizer.json", R"({"version": "1.0", "model": {"type": "BPE"}})");
    CHECK_REFUSED(import_run(model.out, model.folder / "refused"), "tokenizer.json: model: ");
}

TEST_CASE("a checkpoint that is damaged leaves no folder behind") {
    TemporaryFolder folder;
    make_run(folder / "run", neox_model());
    std::string data = newest_checkpoint(folder / "run") + "/data_00000.bin", bytes = read_text(data);
    bytes[bytes.size() / 2] ^= 1;
    write_file(data, bytes);
    CHECK_REFUSED(export_run(folder / "run", neox_model(), folder / "out"), "does not match its checksum; ");
    CHECK(!fs::exists(folder / "out"));
    CHECK_REFUSED(export_run(folder / "run", gptj_model(), folder / "out"), "does not match the options; ");
    CHECK(!fs::exists(folder / "out"));
}

TEST_CASE("names of other versions, and what they have besides") {
    TemporaryFolder folder;
    make_run(folder / "run", gpt2_model());
    export_run(folder / "run", gpt2_model(), folder / "out");
    rewrite(folder / "out", [](std::vector<Rewritten>& tensors) {
        for (Rewritten& tensor : tensors) tensor.name = tensor.name.substr(strlen("transformer."));
        tensors.push_back({"h.0.attn.bias", {1, 1, 2, 2}, {1, 0, 1, 1}});
        tensors.push_back({"lm_head.weight", {61, 24}, find(tensors, "wte.weight").values});
    });
    import_run(folder / "out", folder / "back");
    CheckpointReader reader(newest_checkpoint(folder / "back"));
    std::vector<float> wte(61 * 24);
    reader.read_floats(reader.index().find("wte"), Slot::weight, 0, wte.size(), wte.data());
    CHECK(wte == values_of(0, wte.size()));
}

TEST_CASE("a weight that is not finite is told, and imported") {
    TemporaryFolder folder;
    make_run(folder / "run", gptj_model());
    export_run(folder / "run", gptj_model(), folder / "out");
    CHECK(import_run(folder / "out", folder / "finite").empty());
    rewrite(folder / "out", [](std::vector<Rewritten>& tensors) {
        find(tensors, "transformer.h.1.mlp.fc_in.weight").values[5] = NAN;
        find(tensors, "transformer.h.1.mlp.fc_in.weight").values[7] = -INFINITY;
        find(tensors, "transformer.ln_f.weight").values[0] = INFINITY;
    });
    CHECK(import_run(folder / "out", folder / "back") ==
          std::vector<std::string>{
              "not finite: 3 of the numbers, the first in tensor layers.1.fc.weight: element 5 is nan; "
              "all outputs of the model will be NaN, so get an intact copy"});
    // A tensor that is reordered is checked, too.
    rewrite(folder / "out", [](std::vector<Rewritten>& tensors) {
        find(tensors, "transformer.h.0.attn.q_proj.weight").values[0] = NAN;
    });
    CHECK(import_run(folder / "out", folder / "other")[0].starts_with("not finite: 4 of the numbers, "));
}

TEST_CASE("weights that are not of the model are refused, and nothing is made") {
    struct {
        ModelConfig config;
        const char* words;
        std::function<void(std::vector<Rewritten>&)> change;
    } cases[] = {
        {llama_model(), "tensor model.norm.weight is missing; ",
         [](auto& tensors) { find(tensors, "model.norm.weight").name = "model.norm2.weight"; }},
        {llama_model(), "tensor extra does not exist in a model of this kind; ",
         [](auto& tensors) {
             tensors.push_back({"extra", {1}, {0}});
         }},
        {llama_model(),
         "tensor model.layers.0.self_attn.k_proj.weight has shape 24 x 16, but config.json says 16 x 24; ",
         [](auto& tensors) {
             find(tensors, "model.layers.0.self_attn.k_proj.weight").shape = {24, 16};
         }},
        {gptj_model(), "tensor transformer.h.1.ln_1.bias is not zero; ",
         [](auto& tensors) { find(tensors, "transformer.h.1.ln_1.bias").values[3] = 1e-8f; }},
        {gptj_model(), "tensor lm_head.bias is not zero; ",
         [](auto& tensors) { find(tensors, "lm_head.bias").values[60] = NAN; }},
        {neox_model(),
         "tensor gpt_neox.layers.1.post_attention_layernorm.bias is not the same as "
         "gpt_neox.layers.1.input_layernorm.bias; --block parallel has one norm for attention and MLP",
         [](auto& tensors) {
             find(tensors, "gpt_neox.layers.1.post_attention_layernorm.bias").values[0] += 1;
         }},
        {gpt2_model(),
         "tensor lm_head.weight is not the same as transformer.wte.weight; --tie-embeddings on has one "
         "tensor",
         [](auto& tensors) {
             tensors.push_back({"lm_head.weight", {61, 24}, std::vector<float>(61 * 24)});
         }},
    };
    for (auto& row : cases) {
        TemporaryFolder folder;
        make_run(folder / "run", row.config);
        export_run(folder / "run", row.config, folder / "out");
        rewrite(folder / "out", row.change);
        CHECK_REFUSED(import_run(folder / "out", folder / "back"), row.words);
        CHECK(!fs::exists(folder / "back"));
    }
    TemporaryFolder folder;
    make_run(folder / "run", llama_model());
    export_run(folder / "run", llama_model(), folder / "out");
    CHECK_REFUSED(
        import_run(folder / "out", folder / "run"),
        "already holds a run; replace it with --overwrite, or name another directory with --output");
    write_file(folder / "out/tokenizer.json", "{}");
    CHECK_REFUSED(import_run(folder / "out", folder / "back"), "tokenizer.json");
    fs::remove(folder / "out/tokenizer.json");
    auto config = nlohmann::json::parse(read_text(folder / "out/config.json"));
    config["num_hidden_layers"] = 16777216;
    write_file(folder / "out/config.json", config.dump());
    CHECK_REFUSED(import_run(folder / "out", folder / "back"), "--layers 16777216: out of range; ");
    fs::remove(folder / "out/config.json");
    CHECK_REFUSED(import_run(folder / "out", folder / "back"), "config.json: cannot open it");
    CHECK(!fs::exists(folder / "back"));
}
