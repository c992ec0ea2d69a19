/*
Shared by the tests of the whole model: the program without its main, small models, and batches of given
tokens.
*/
#pragma once

#include "test/support/program.h"

#include "test/support/testing.h"

constexpr bool exact = std::is_same_v<floatX, float>;

// A micro-batch of given tokens and targets, on the device and on the host. By default positions count from
// the beginning of each row, which is one document.
class TestBatch {
public:
    TestBatch(int B, int T, const std::vector<int>& tokens, const std::vector<int>& targets,
              const std::vector<int>& positions = {}, const std::vector<int>& doc_start = {})
        : values_(batch_ints(B, T)), memory_(values_.size()) {
        BatchArrays<int> rows = batch_at(values_.data(), B, T);
        for (int n = 0; n < B * T; n++) {
            rows.tokens[n] = tokens[n];
            rows.targets[n] = targets[n];
            rows.positions[n] = positions.empty() ? n % T : positions[n];
            rows.doc_start[n] = doc_start.empty() ? 0 : doc_start[n];
        }
        sort_by_token(rows.by_token, rows.tokens, B * T);
        sort_by_position(rows.by_position, rows.positions, B * T);
        copy_to_device<int>(memory_, values_.data(), values_.size(), test_stream());
        batch_ = {batch_at<const int>(memory_, B, T), B, T};
        if (doc_start.empty()) batch_.doc_start = nullptr;
        valid_ = (int)std::count_if(targets.begin(), targets.end(), [](int target) { return target >= 0; });
    }

    const Batch& operator*() const { return batch_; }
    int valid() const { return valid_; }
    // The batch's rows in the form that table lookups take.
    std::vector<NgramTokens> rows() const {
        HostBatch host = batch_at(values_.data(), batch_.B, batch_.T);
        if (!batch_.doc_start) host.doc_start = nullptr;
        return rows_of(host, batch_.B, batch_.T);
    }

private:
    std::vector<int> values_;
    Buffer<int> memory_;
    Batch batch_;
    int valid_;
};

// Returns the batch after looking up its rows in the model's tables, if it has any. Earlier lookups are
// forgotten.
inline const Batch& looked_up(Gpt& g, const TestBatch& batch) {
    g.tables.look_up({0, 1, [&](int) { return batch.rows(); }});
    return *batch;
}

// Initializes the tables of a model that has some. No tokens are folded together.
inline void begin_tables(Gpt& g, uint64_t seed) {
    g.tables.set_hash(seed, folded_tokens(nullptr, g.config.vocab_size));
}

inline const ZeroSettings with_master = {.keep_master = !exact}, inference = {.training = false};

// Makes an optimizer of the given kind, with the settings of AdamW.
inline Optimizer optimizer_of(OptimizerKind kind, const AdamW& settings, uint64_t seed) {
    switch (kind) {
    case OptimizerKind::adamw:
        return adamw_optimizer(settings, seed);
    case OptimizerKind::lamb:
        return lamb_optimizer(settings, seed);
    case OptimizerKind::muon:
        return muon_optimizer({settings, 0.95}, seed);
    }
    __builtin_unreachable();
}
inline ZeroSettings for_optimizer(OptimizerKind kind, ZeroSettings settings) {
    Options o;
    o.optimizer = kind;
    ZeroSettings asked = zero_settings(o);
    settings.slots = asked.slots, settings.not_of_matrices = asked.not_of_matrices;
    settings.takes_norms = asked.takes_norms, settings.transform_scratch = asked.transform_scratch;
    return settings;
}

template <typename T>
std::vector<T> from_device(const T* pointer, size_t count) {
    std::vector<T> values(count);
    cudaCheck(cudaMemcpy(values.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

// Bytes that an arena holds in a class.
inline size_t bytes_of(const Arena& memory, std::string_view name) {
    for (const MemoryClass& one : memory.classes()) {
        if (one.name == name) return one.bytes;
    }
    return 0;
}

inline std::vector<double> gradient_of(const Gpt& g, size_t offset, size_t count) {
    cudaCheck(cudaStreamSynchronize(g.stream));
    return to_doubles(from_device(g.state.grads(0) + offset, count));
}

inline ModelConfig small_config() {
    ModelConfig c;
    c.layers = 2, c.channels = 20, c.heads = 4, c.head_size = 6, c.mlp_width = 28, c.vocab_size = 37,
    c.context = 16;
    complete(c);
    return c;
}
