/*
Tensors of Hugging Face models: which of them hold what of ours. The table of a family has a row for each of
theirs, and both export and import walk it. A row of theirs holds rows of one of ours, from `first_row` on:

    straight      in our order
    transposed    as columns: GPT-2's Conv1D multiplies from the other side
    by_head       queries, keys and values of the first head, then those of the second ... (GPT-NeoX); ours
                  are all queries, then all keys, then all values
    interleaved   in each head, elements 2i and 2i + 1 are the pair that RoPE turns (GPT-J); ours are i and
                  i + R/2 (kernels/rope.cuh)
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/checkpoint/index.h"
#include "data/base/error.h"
#include "data/exchange/hf_config_writer.h"
#include "data/options/model_config.h"

enum class HfOrder { straight, transposed, by_head, interleaved };

enum class HfRole {
    holds,     // of ours
    copies,    // what another row holds; an import wants both to be the same
    may_copy,  // the same, but it may be missing, and is not exported
    zero,      // what ours do not have; an import wants zeros
};

struct HfTensor {
    std::string name;
    std::string other_name;  // in files of some versions; empty: none
    std::vector<uint64_t> shape;
    HfRole role = HfRole::holds;
    std::string ours;  // unless zero
    uint64_t first_row = 0;
    HfOrder order = HfOrder::straight;
    uint64_t heads = 0, head_size = 0, rope_dims = 0;  // of rows that are ordered by them

    uint64_t rows() const { return shape[0]; }
    uint64_t columns() const { return shape.size() == 2 ? shape[1] : 1; }
    uint64_t size() const { return rows() * columns(); }

    // Of the rows of ours.
    uint64_t our_width() const { return order == HfOrder::transposed ? rows() : columns(); }

    // In our tensor, where that which this one holds begins; it has size() elements.
    uint64_t our_first() const { return first_row * our_width(); }

    // Calls visit(theirs, ours) for the elements of some rows: their places counted from the first of these
    // rows, and from our_first().
    template <typename Visit>
    void each_element(uint64_t row, uint64_t count, Visit&& visit) const {
        bool transposed = order == HfOrder::transposed;
        uint64_t theirs = 0, stride = transposed ? rows() : 1;
        for (uint64_t end = row + count; row < end; row++) {
            uint64_t ours_at = transposed ? row : our_row(row) * columns();
            for (uint64_t c = 0; c < columns(); c++) visit(theirs++, ours_at + c * stride);
        }
    }

    // Calls visit(row, rows) for parts that are small enough to be held in memory.
    template <typename Visit>
    void each_part(Visit&& visit) const {
        constexpr uint64_t most = 1 << 22;  // elements
        uint64_t step = std::max<uint64_t>(1, most / columns());
        for (uint64_t row = 0; row < rows(); row += step) visit(row, std::min(step, rows() - row));
    }

private:
    uint64_t our_row(uint64_t row) const {
        uint64_t head = row / head_rows(), in_head = row % head_rows();
        switch (order) {
        case HfOrder::by_head:
            return (in_head / head_size * heads + head) * head_size + in_head % head_size;
        case HfOrder::interleaved:
            if (in_head < rope_dims) in_head = in_head % 2 * (rope_dims / 2) + in_head / 2;
            return head * head_size + in_head;
        default:
            return row;
        }
    }

    uint64_t head_rows() const {
        return order == HfOrder::by_head ? 3 * head_size : order == HfOrder::interleaved ? head_size : 1;
    }
};

namespace hf {

// Makes the table of a family, row after row.
class TableMaker {
public:
    // The names of a model without its head may come without the prefix.
    TableMaker(const ModelConfig& config, std::string prefix) : c(config), prefix_(std::move(prefix)) {}

    std::vector<HfTensor> finish() { return std::move(table_); }

    // Adds to the names of theirs and ours.
    void begin_layer(const std::string& theirs, int layer) {
        their_layer_ = theirs + std::to_string(layer) + ".";
        our_layer_ = "layers." + std::to_string(layer) + ".";
    }
    void end_layers() { their_layer_ = our_layer_ = ""; }

    void add(const std::string& theirs, std::vector<uint64_t> shape, HfRole role,
             const std::string& ours = "", HfOrder order = HfOrder::straight, uint64_t first_row = 0) {
        HfTensor tensor;
        std::string within = their_layer_ + theirs;
        tensor.name = prefix_ + within;
        tensor.other_name = within;
        tensor.shape = std::move(shape);
        tensor.role = role;
        if (role != HfRole::zero) tensor.ours = our_layer_ + ours;
        tensor.first_row = first_row;
        tensor.order = order;
        tensor.heads = (uint64_t)c.heads;
        tensor.head_size = (uint64_t)c.head_size;
        tensor.rope_dims = (uint64_t)c.rope_dims;
        table_.push_back(std::move(tensor));
    }

    // A bias as their family has it: where ours is there, or always, with zeros for one that we have not.
    enum class Bias { like_ours, always, never };

    void norm(const std::string& theirs, const std::string& ours, HfRole role = HfRole::holds) {
        uint64_t C = (uint64_t)c.channels;
        add(theirs + ".weight", {C}, role, ours + ".weight");
        if (c.norm != NormKind::layernorm) return;
        if (c.bias)
            add(theirs + ".bias", {C}, role, ours + ".bias");
        else
            add(theirs + ".bias", {C}, HfRole::zero);
    }

    void linear(const std::string& theirs, const std::string& ours, uint64_t rows, uint64_t columns,
                Bias bias = Bias::like_ours, HfOrder order = HfOrder::straight, uint64_t first_row = 0) {
        std::vector<uint64_t> shape = {rows, columns};
        bool transposed = order == HfOrder::transposed;
        if (transposed) std::swap(shape[0], shape[1]);
        add(theirs + ".weight", shape, HfRole::holds, ours + ".weight", order, first_row);
        HfOrder bias_order = transposed ? HfOrder::straight : order;
        if (c.bias && bias != Bias::never)
            add(theirs + ".bias", {rows}, HfRole::holds, ours + ".bias", bias_order, first_row);
        else if (bias == Bias::always)
            add(theirs + ".bias", {rows}, HfRole::zero);
    }

    void embedding(const std::string& theirs, const std::string& ours, int rows) {
        add(theirs + ".weight", {(uint64_t)rows, (uint64_t)c.channels}, HfRole::holds, ours);
    }

    // The output matrix, which is outside of the prefix.
    void head(const std::string& theirs, const std::string& other_name) {
        bool tied = c.tie_embeddings;
        add("", {(uint64_t)c.vocab_size, (uint64_t)c.channels}, tied ? HfRole::may_copy : HfRole::holds,
            tied ? "wte" : "head.weight");
        table_.back().name = theirs;
        table_.back().other_name = other_name;
    }

    // Of a head's bias, where their family has one.
    void zero_head_bias(const std::string& theirs) {
        add("", {(uint64_t)c.vocab_size}, HfRole::zero);
        table_.back().name = theirs;
        table_.back().other_name = "";
    }

private:
    const ModelConfig& c;
    std::string prefix_, their_layer_, our_layer_;
    std::vector<HfTensor> table_;
};

using Bias = TableMaker::Bias;

inline std::vector<HfTensor> gpt2_tensors(const ModelConfig& c) {
    uint64_t C = (uint64_t)c.channels, F = (uint64_t)c.mlp_width;
    TableMaker table(c, "transformer.");
    auto conv1d = [&](const char* theirs, const char* ours, uint64_t rows, uint64_t columns) {
        table.linear(theirs, ours, rows, columns, Bias::like_ours, HfOrder::transposed);
    };
    table.embedding("wte", "wte", c.vocab_size);
    table.embedding("wpe", "wpe", c.context);
    for (int l = 0; l < c.layers; l++) {
        table.begin_layer("h.", l);
        table.norm("ln_1", "norm1");
        conv1d("attn.c_attn", "qkv", 3 * C, C);
        conv1d("attn.c_proj", "attproj", C, C);
        table.norm("ln_2", "norm2");
        conv1d("mlp.c_fc", "fc", F, C);
        conv1d("mlp.c_proj", "fcproj", C, F);
    }
    table.end_layers();
    table.norm("ln_f", "normf");
    table.head("lm_head.weight", "");
    return table.finish();
}

// llama, mistral and qwen3.
inline std::vector<HfTensor> llama_tensors(const ModelConfig& c) {
    uint64_t C = (uint64_t)c.channels, F = (uint64_t)c.mlp_width, HS = (uint64_t)c.head_size;
    uint64_t A = (uint64_t)c.heads * HS, KV = (uint64_t)c.kv_heads * HS;
    TableMaker table(c, "model.");
    auto part = [&](const char* theirs, const char* ours, uint64_t first_row, uint64_t rows) {
        table.linear(theirs, ours, rows, C, Bias::like_ours, HfOrder::straight, first_row);
    };
    table.embedding("embed_tokens", "wte", c.vocab_size);
    for (int l = 0; l < c.layers; l++) {
        table.begin_layer("layers.", l);
        table.norm("input_layernorm", "norm1");
        part("self_attn.q_proj", "qkv", 0, A);
        part("self_attn.k_proj", "qkv", A, KV);
        part("self_attn.v_proj", "qkv", A + KV, KV);
        if (c.qk_norm) {
            table.add("self_attn.q_norm.weight", {HS}, HfRole::holds, "qnorm.weight");
            table.add("self_attn.k_norm.weight", {HS}, HfRole::holds, "knorm.weight");
        }
        table.linear("self_attn.o_proj", "attproj", C, A);
        table.norm("post_attention_layernorm", "norm2");
        part("mlp.gate_proj", "fc", 0, F);
        part("mlp.up_proj", "fc", F, F);
        table.linear("mlp.down_proj", "fcproj", C, F);
    }
    table.end_layers();
    table.norm("norm", "normf");
    table.head("lm_head.weight", "");
    return table.finish();
}

inline std::vector<HfTensor> gpt_neox_tensors(const ModelConfig& c) {
    uint64_t C = (uint64_t)c.channels, F = (uint64_t)c.mlp_width;
    TableMaker table(c, "gpt_neox.");
    table.embedding("embed_in", "wte", c.vocab_size);
    for (int l = 0; l < c.layers; l++) {
        table.begin_layer("layers.", l);
        table.norm("input_layernorm", "norm1");
        if (c.block == BlockKind::parallel)
            table.norm("post_attention_layernorm", "norm1", HfRole::copies);
        else
            table.norm("post_attention_layernorm", "norm2");
        table.linear("attention.query_key_value", "qkv", 3 * C, C, Bias::like_ours, HfOrder::by_head);
        table.linear("attention.dense", "attproj", C, C);
        table.linear("mlp.dense_h_to_4h", "fc", F, C);
        table.linear("mlp.dense_4h_to_h", "fcproj", C, F);
    }
    table.end_layers();
    table.norm("final_layer_norm", "normf");
    table.head("embed_out.weight", "lm_head.weight");
    return table.finish();
}

inline std::vector<HfTensor> gptj_tensors(const ModelConfig& c) {
    uint64_t C = (uint64_t)c.channels, F = (uint64_t)c.mlp_width;
    TableMaker table(c, "transformer.");
    table.embedding("wte", "wte", c.vocab_size);
    for (int l = 0; l < c.layers; l++) {
        table.begin_layer("h.", l);
        table.norm("ln_1", "norm1");
        table.linear("attn.q_proj", "qkv", C, C, Bias::never, HfOrder::interleaved);
        table.linear("attn.k_proj", "qkv", C, C, Bias::never, HfOrder::interleaved, C);
        table.linear("attn.v_proj", "qkv", C, C, Bias::never, HfOrder::straight, 2 * C);
        table.linear("attn.out_proj", "attproj", C, C, Bias::never);
        table.linear("mlp.fc_in", "fc", F, C, Bias::always);
        table.linear("mlp.fc_out", "fcproj", C, F, Bias::always);
    }
    table.end_layers();
    table.norm("ln_f", "normf");
    table.head("lm_head.weight", "");
    table.zero_head_bias("lm_head.bias");
    return table.finish();
}

}  // namespace hf

// Of a completed config; one that no family expresses is refused.
inline std::vector<HfTensor> hf_tensors(const ModelConfig& c) {
    switch (hf_family(c)) {
    case HfFamily::gpt2:
        return hf::gpt2_tensors(c);
    case HfFamily::gpt_neox:
        return hf::gpt_neox_tensors(c);
    case HfFamily::gptj:
        return hf::gptj_tensors(c);
    default:
        return hf::llama_tensors(c);
    }
}

// The numbers of our tensors by name, of a model that the table describes. Anything else is refused; `what`
// is where our tensors come from.
inline std::map<std::string, int> match_hf_tensors(const std::vector<HfTensor>& table,
                                                   const std::vector<CheckpointTensor>& tensors,
                                                   const std::string& what) {
    std::map<std::string, int> numbers;
    std::map<std::string, uint64_t> held;  // elements
    for (const CheckpointTensor& tensor : tensors) numbers[tensor.name] = (int)numbers.size();
    for (const HfTensor& theirs : table) {
        if (theirs.role == HfRole::zero) continue;
        auto ours = numbers.find(theirs.ours);
        bool fits = ours != numbers.end() && tensors[(size_t)ours->second].width() == theirs.our_width();
        if (!fits)
            fail("%s: tensor %s is missing or of another shape than the options say; use another checkpoint",
                 what.c_str(), theirs.ours.c_str());
        if (theirs.role == HfRole::holds) held[theirs.ours] += theirs.size();
    }
    for (const CheckpointTensor& tensor : tensors) {
        if (held[tensor.name] != tensor.size())
            fail("%s: tensor %s is of another shape than the options say; use another checkpoint",
                 what.c_str(), printable(tensor.name).c_str());
    }
    return numbers;
}

// Tensors in files of older versions that are computed again when a model is loaded: masks, and angles of
// RoPE.
inline bool hf_recomputes(const std::string& name) {
    for (const char* end : {".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
                            ".rotary_emb.inv_freq"}) {
        if (name.ends_with(end)) return true;
    }
    return false;
}
