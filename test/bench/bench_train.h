/*
Training speed of whole models on this device: tokens per second, MFU by the published definition, and the
share of the rate of a large matrix product in the same run.

    bench_train [--records FILE] [MODEL:BxT[xM][:DTYPE]]...

A step has M micro-batches of B sequences of T tokens. DTYPE selects products as --matmul-dtype DTYPE does:
fp8 in bf16 builds, bf16 in CPU builds. Without it, they have the build's type. fp8-fast is fp8 with
--fp8-fast-gradients. The fastest algorithms for products are chosen by timing first, as in a run. Without
arguments, the models of the table below run. If a micro-batch does not fit in memory, it is made smaller and
there are more of them; if even one large enough for efficient products does not fit, bf16 weights go without
an fp32 copy and are rounded stochastically, and then less is kept for the backward pass, with that copy or
without. FILE receives one line of JSON for each model, from which bench_train.py measures the same in
PyTorch.
*/
#pragma once

#include <map>
#include <optional>

#include "test/bench/bench.h"

struct Row {
    std::string model;
    int B, T, micro_batches = 1;
    MatmulDtype dtype = MatmulDtype::automatic;
    bool fast_gradients = false;

    bool fp8() const { return dtype == MatmulDtype::fp8; }
    const char* type() const {
        return dtype == MatmulDtype::automatic ? floatX_name : fast_gradients ? "fp8-fast" : name_of(dtype);
    }
};

inline bool can_multiply_in(MatmulDtype dtype) {
#ifdef DEVICE_CPU
    if (dtype == MatmulDtype::bf16) return has_cpu_products_in_bf16();
#endif
    return dtype == MatmulDtype::automatic || has_products_in_bf16;
}

inline std::vector<Row> default_rows(const cudaDeviceProp& device) {
    if (!has_own_memory) {
        std::vector<Row> rows = {{"tiny", 8, 256}, {"gpt2-124M", 4, 64}, {"gpt2-124M", 1, 1024}};
        if (!can_multiply_in(MatmulDtype::bf16)) return rows;
        std::vector<Row> both;
        for (Row& row : rows) {
            both.push_back(row);
            row.dtype = MatmulDtype::bf16;
            both.push_back(row);
        }
        return both;
    }
    std::vector<Row> rows;
    for (const Row& row : {Row{"gpt2-124M", 64, 1024, 4}, Row{"gpt2-1558M", 16, 1024, 8},
                           Row{"llama3.2-1B", 4, 8192, 4}, Row{"llama3-8B", 4, 8192, 1}}) {
        rows.push_back(row);
        if (!can_multiply_in(MatmulDtype::fp8) || !multiplies_fp8(capability_of(device))) continue;
        for (bool fast : {false, true}) {
            rows.push_back(row);
            rows.back().dtype = MatmulDtype::fp8;
            rows.back().fast_gradients = fast;
        }
    }
    return rows;
}

inline Row parse_row(const char* argument) {
    char model[64];
    int B = 0, T = 0, micro_batches = 1, end = 0;
    int fields = sscanf(argument, "%63[^:]:%dx%d%nx%d%n", model, &B, &T, &end, &micro_batches, &end);
    Row row = {model, B, T, micro_batches};
    std::string type = argument + end;
    row.fast_gradients = type == ":fp8-fast";
    if (type == ":bf16") row.dtype = MatmulDtype::bf16;
    if (type == ":fp8" || row.fast_gradients) row.dtype = MatmulDtype::fp8;
    if (fields < 3 || (!type.empty() && row.dtype == MatmulDtype::automatic) || B < 1 || T < 1 ||
        micro_batches < 1) {
        fail("bench_train: %s: give MODEL:BxT, MODEL:BxTxM or one of these with :bf16, :fp8 or :fp8-fast, "
             "such as gpt2-124M:4x1024",
             argument);
    }
    if (!can_multiply_in(row.dtype))
        fail("bench_train: %s: no %s in this build, or on this device; leave it out", argument, row.type());
    return row;
}

// How a row is trained in the available memory.
struct Setting {
    Workload workload;
    ZeroSettings zero;
    int micro_batches;

    bool at_random() const { return sizeof(floatX) < sizeof(float) && !zero.keep_master; }
};

// Returns the first setting, in order from fastest to slowest, whose micro-batch is large enough for
// efficient products; otherwise the one with the largest micro-batch. Empty if none fits.
inline std::optional<Setting> setting_that_fits(const ModelConfig& config, const Row& row) {
    int enough = std::min(row.B, ceil_div(8192, row.T));
    std::optional<Setting> smaller;
    for (Recompute recompute : {Recompute::none, Recompute::elementwise, Recompute::mlp, Recompute::block}) {
        for (bool master : {true, false}) {
            if (master && sizeof(floatX) == sizeof(float)) continue;
            Setting s = {{.B = row.B,
                          .T = row.T,
                          .training = true,
                          .recompute = recompute,
                          .loss_chunk = chosen_loss_chunk(config, row.B * row.T),
                          .fp8 = row.fp8(),
                          .fast_gradients = row.fast_gradients},
                         {.keep_master = master},
                         row.micro_batches};
            int fits = std::min(row.B, memory_plan(config, s.workload, s.zero).largest_micro_batch());
            if (fits == 0) continue;
            s.workload.B = fits;
            s.workload.loss_chunk = chosen_loss_chunk(config, fits * row.T);
            s.micro_batches = ceil_div(row.B * row.micro_batches, fits);
            if (fits >= enough) return s;
            if (!smaller || fits > smaller->workload.B) smaller = s;
        }
    }
    return smaller;
}

// Fills a state's parameters, or their master copies, with repeating values. owned(unit) points to those of a
// unit.
template <typename T, typename Owned>
inline void fill_tensors(Gpt& g, const std::vector<float>& values, Owned&& owned) {
    std::vector<T> rounded(values.begin(), values.end());
    size_t period = values.size();
    DeviceArray<T> table(period);
    copy_to_device(table.data, rounded.data(), period, g.stream);
    for (int unit : g.layout.held()) {
        for (const TensorPart& part : g.state.owned_parts(unit)) {
            T* to = owned(unit) + part.at - g.state.owned_begin(unit);
            if (part.row->deviation == 0) {
                std::vector<T> same(part.count, T(part.row->mean));
                copy_to_device(to, same.data(), part.count, g.stream);
                continue;
            }
            for (size_t at = 0; at < part.count; at += period) {
                cudaCheck(cudaMemcpyAsync(to + at, table.data, std::min(period, part.count - at) * sizeof(T),
                                          cudaMemcpyDeviceToDevice, g.stream));
            }
        }
    }
    cudaCheck(cudaStreamSynchronize(g.stream));
}

// Uses repeating values: random numbers for every element of a large model would take longer than the steps.
inline void fill_weights(Gpt& g) {
    std::vector<float> values(1048573);
    constexpr float deviation = 0.02f;
    uint64_t key = random_key(1, "weights");
#pragma omp parallel for
    for (size_t i = 0; i < values.size(); i++) values[i] = deviation * random_normal(key, i);
    fill_tensors<floatX>(g, values, [&](int unit) { return g.state.owned_params(unit); });
    if (g.state.settings().keep_master)
        fill_tensors<float>(g, values, [&](int unit) { return g.state.owned_master(unit); });
}

// Chooses the fastest algorithm for each product of a step.
template <typename Step>
inline void tune([[maybe_unused]] Gpt& g, Step&& step) {
#ifdef DEVICE_CPU
    step();
#else
    NotedProducts noted = note_products(step);
    if (!has_products_in_bf16) return;
    AlgorithmChoices choices;
    for (const TunedProduct& product : time_products(noted, g.stream))
        choices[product.kind] = product.algorithm;
    choose_algorithms(choices);
#endif
}

// Returns the median seconds of several steps, after one that is not counted.
inline double measured_step(Gpt& g, int micro_batches) {
    constexpr size_t least = 3, most = 9;
    constexpr double long_enough = 4;
    RandomBatch batch(g, g.config.vocab_size);
    tune(g, [&] { step_seconds(g, *batch, 1); });
    step_seconds(g, *batch, 1, micro_batches);
    std::vector<double> seconds;
    for (double start = seconds_now();
         seconds.size() < least || (seconds.size() < most && seconds_now() - start < long_enough);)
        seconds.push_back(step_seconds(g, *batch, (int)seconds.size() + 2, micro_batches));
    return median(seconds);
}

inline nlohmann::ordered_json record(const Row& row, const ModelConfig& c, const Setting& s, double rate,
                                     double peak) {
    return {{"model", row.model},
            {"dtype", row.type()},
            {"master", s.zero.keep_master || sizeof(floatX) == sizeof(float)},
            {"batch", s.workload.B},
            {"tokens", row.T},
            {"micro_batches", s.micro_batches},
            {"tokens_per_s", rate},
            {"flops_per_token", flops_per_token(c, row.T, false)},
            {"peak", peak},
            {"layers", c.layers},
            {"channels", c.channels},
            {"heads", c.heads},
            {"kv_heads", c.kv_heads},
            {"head_size", c.head_size},
            {"mlp_width", c.mlp_width},
            {"vocab", padded_vocab(c)},
            {"norm", name_of(c.norm)},
            {"norm_eps", c.norm_eps},
            {"position", name_of(c.position)},
            {"rope_theta", c.rope_theta},
            {"mlp", name_of(c.mlp)},
            {"bias", c.bias},
            {"qkv_bias", c.qkv_bias},
            {"tie_embeddings", c.tie_embeddings}};
}

// Selects the row's kind of products for the steps that follow, and returns their FLOP/s (for fp8, those of
// products in the build's own type).
inline double choose_products(const Row& row) {
#ifdef DEVICE_CPU
    cpu_products_in_bf16 = row.dtype == MatmulDtype::bf16;
#endif
    static std::map<MatmulDtype, double> rates;
    double& rate = rates[row.fp8() ? MatmulDtype::automatic : row.dtype];
    ComputeStream compute;
    if (rate == 0) rate = measured_gemm_rate(available_memory(), compute.stream);
    return rate;
}

inline void measure(const Row& row, FILE* records) {
    double gemm = choose_products(row);
    const Preset* preset = find_preset(row.model);
    if (!preset) fail("bench_train: %s: no such preset", row.model.c_str());
    ModelConfig config = preset->config;
    complete(config);
    if (config.position == PositionKind::learned && row.T > config.context)
        fail("bench_train: %s: %d tokens, and the model is made for %d", row.model.c_str(), row.T,
             config.context);
    printf("%-12s %-8s ", row.model.c_str(), row.type());
    auto setting = setting_that_fits(config, row);
    if (!setting) {
        Workload least = {1, row.T, true, Recompute::block, chosen_loss_chunk(config, row.T)};
        printf("left out: needs %s at least, and %s are free\n",
               size_text(memory_total(memory_classes(config, least, {}))).c_str(),
               size_text(available_memory()).c_str());
        return;
    }
    auto& [workload, zero, micro_batches] = *setting;
    Gpt g(config, workload, zero);
    fill_weights(g);
    double seconds = measured_step(g, micro_batches);
    double rate = (double)workload.B * row.T * micro_batches / seconds, peak = card_rate();
    Meter meter(config, row.T, peak, gemm, 1);
    printf("%14s %-9s %-9s %9.1f %9.0f %7s %13.1f%% %7.1f%%\n",
           text("%dx%dx%d", workload.B, row.T, micro_batches).c_str(), name_of(workload.recompute),
           setting->at_random() ? "at random" : "in fp32", seconds * 1e3, rate,
           peak > 0 ? text("%.1f%%", 100 * meter.mfu(rate)).c_str() : "-", 100 * meter.gemm_share(rate),
           100 * meter.gemm_share_causal(rate));
    static std::map<std::string, double> rates;  // for rows with products in the build's type
    std::string key = text("%s:%dx%d", row.model.c_str(), row.B, row.T);
    if (row.dtype == MatmulDtype::automatic)
        rates[key] = rate;
    else if (rates.contains(key))
        printf("%-12s %-8s %14s %.2f times as fast as in %s\n", "", "", "", rate / rates[key], floatX_name);
    fflush(stdout);
    if (!records) return;
    fprintf(records, "%s\n", record(row, config, *setting, rate, peak).dump().c_str());
    fflush(records);
}

// Runs the benchmark that the top of this file describes; throws errors.
inline void bench_train(const std::vector<std::string>& arguments) {
    std::vector<Row> rows;
    FILE* records = nullptr;
    for (size_t i = 0; i < arguments.size(); i++) {
        if (arguments[i] != "--records") {
            rows.push_back(parse_row(arguments[i].c_str()));
        } else {
            if (++i == arguments.size()) fail("bench_train: --records: give a file");
            if (!(records = fopen(arguments[i].c_str(), "w"))) fail_with_errno(arguments[i], "write it");
        }
    }
    if (simulated) fail("bench_train: a simulated device has no speed; build with DEVICE=cuda or DEVICE=cpu");
    const cudaDeviceProp& device = device_properties();
    if (rows.empty()) rows = default_rows(device);
    printf("%s (%s, %s): training steps, beside %sFLOP/s in products\n", device.name, device_name,
           floatX_name, human(choose_products({})).c_str());
    // "share of GEMM" uses the published FLOP count; "causal" leaves out what a causal mask hides
    printf("%-12s %-8s %14s %-9s %-9s %9s %9s %7s %14s %8s\n", "model", "type", "B x T x M", "recompute",
           "weights", "ms", "tokens/s", "MFU", "share of GEMM", "causal");
    for (const Row& row : rows) measure(row, records);
    if (records) fclose(records);
}
