/*
The configuration of a model: one transformer with switches, and the parameter tensors that follow from them.
The fields are options of the same names (--mlp-width for mlp_width). Zero means "derived from the others";
complete() fills those in.
*/
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"  // printable
#include "data/options/choice.h"

enum class NormKind { layernorm, rmsnorm };
NAMES_OF(NormKind, "layernorm", "rmsnorm");

enum class PositionKind { learned, rope };
NAMES_OF(PositionKind, "learned", "rope");

// gelu is the tanh approximation; gelu_exact uses the error function.
enum class MlpKind { gelu, gelu_exact, swiglu };
NAMES_OF(MlpKind, "gelu", "gelu-exact", "swiglu");

// A parallel block has one norm, followed by attention and MLP side by side.
enum class BlockKind { sequential, parallel };
NAMES_OF(BlockKind, "sequential", "parallel");

struct ModelConfig {
    int layers = 12;
    int channels = 768;
    int heads = 12;
    int kv_heads = 0;   // 0: heads
    int head_size = 0;  // 0: channels / heads
    int mlp_width = 0;  // 0: 4 * channels
    int vocab_size = 50257;
    int context = 1024;  // positions the model is made for
    NormKind norm = NormKind::layernorm;
    float norm_eps = 1e-5f;
    PositionKind position = PositionKind::learned;
    float rope_theta = 10000;
    int rope_dims = 0;       // rotated dimensions of each head; 0: head_size
    float rope_scaling = 1;  // Llama 3.1 frequency scaling; 1: none
    float rope_low_frequency = 1;
    float rope_high_frequency = 4;
    int rope_original_context = 8192;
    MlpKind mlp = MlpKind::gelu;
    bool bias = true;
    bool qkv_bias = false;            // biases of queries, keys and values only
    int window = 0;                   // sliding attention window; 0: none
    std::string window_pattern = {};  // layers with a window : layers without, repeated; empty: all have one
    BlockKind block = BlockKind::sequential;
    bool tie_embeddings = true;
    bool qk_norm = false;
    bool local_filter = false;
    std::string ngram = {};          // lengths of n-grams that look up table rows, such as 2,3; empty: none
    long long ngram_rows = 1 << 20;  // rows of a table for each n-gram length, in all heads together
    int ngram_width = 64;            // numbers of a row
    int ngram_heads = 4;             // rows that an n-gram looks up
    bool ngram_gate = true;          // the residual stream gates what is added to it
    std::string ngram_layers = {};   // layers with a table, counted from 0, as in 1,6; empty: the second
};

// Layers alternate: `sliding` with a window, then `full` without.
struct WindowPattern {
    int sliding, full;
    std::string text() const { return std::to_string(sliding) + ":" + std::to_string(full); }
};

// Parses a pattern such as "3:1". Refuses anything else.
inline WindowPattern parse_window_pattern(const std::string& source) {
    WindowPattern pattern = {};
    auto number = [](const char* from, const char* to, int& value) {
        auto [end, error] = std::from_chars(from, to, value);
        return error == std::errc() && end == to && value >= 1;
    };
    const char *begin = source.data(), *end = begin + source.size(), *colon = std::find(begin, end, ':');
    if (colon == end || !number(begin, colon, pattern.sliding) || !number(colon + 1, end, pattern.full)) {
        fail("--window-pattern %s: not two numbers of layers; give, for example, 3:1 for three layers with a "
             "window and one full layer",
             printable(source).c_str());
    }
    return pattern;
}

// The window of a layer (counted from 0); 0: no window.
inline int window_of_layer(const ModelConfig& c, int layer) {
    if (c.window_pattern.empty()) return c.window;
    auto [sliding, full] = parse_window_pattern(c.window_pattern);
    return layer % ((int64_t)sliding + full) < sliding ? c.window : 0;
}

// The smallest pattern that is equivalent for the model's layers; empty if all layers are alike.
inline std::string effective_window_pattern(const ModelConfig& c) {
    int sliding = 0;
    while (sliding < c.layers && window_of_layer(c, sliding) > 0) sliding++;
    int end = sliding;
    while (end < c.layers && window_of_layer(c, end) == 0) end++;
    return sliding == 0 || sliding == c.layers ? "" : WindowPattern{sliding, end - sliding}.text();
}

// Parses a list of ascending numbers within limits, such as "2,3". Refuses anything else.
inline std::vector<int> parse_ascending(const char* option, const std::string& list, int least, int most) {
    std::vector<int> numbers;
    if (list.empty()) return numbers;
    for (const std::string& item : comma_separated(list)) {
        int number = 0;
        const char* end = item.data() + item.size();
        auto [rest, error] = std::from_chars(item.data(), end, number);
        if (error != std::errc() || rest != end || number < (numbers.empty() ? least : numbers.back() + 1) ||
            number > most) {
            std::string such_as = std::to_string(least) + (most > least ? text(",%d", least + 1) : "");
            fail("%s %s: not ascending numbers from %d to %d; give, for example, %s", option,
                 printable(list).c_str(), least, most, such_as.c_str());
        }
        numbers.push_back(number);
    }
    return numbers;
}

// ----------------------------------------------------------------------------
// n-gram memory (kernels/ngram_gate.cuh): the layers that have a table, and the heads that look up its rows

constexpr int longest_ngram = 8;  // tokens

// For each token, a head looks up one of its own rows, chosen by the n-gram that ends with the token.
struct NgramHead {
    int tokens;            // length of the n-gram
    uint64_t first, rows;  // its rows in each table
};

inline std::vector<int> ngram_sizes(const ModelConfig& c) {
    return parse_ascending("--ngram", c.ngram, 1, longest_ngram);
}

// Heads of a table, or the part of them that one of `tp` tensor ranks looks up.
inline int ngram_head_count(const ModelConfig& c, int tp = 1) {
    return (int)ngram_sizes(c).size() * c.ngram_heads / tp;
}

inline bool has_table(const ModelConfig& c, int layer) {
    if (c.ngram.empty()) return false;
    constexpr int any = 1 << 20;  // complete() refuses layers beyond the model's
    return std::ranges::count(parse_ascending("--ngram-layers", c.ngram_layers, 0, any), layer) > 0;
}
inline std::vector<bool> layers_with_table(const ModelConfig& c) {
    std::vector<bool> has(c.layers);
    for (int layer = 0; layer < c.layers; layer++) has[layer] = has_table(c, layer);
    return has;
}

// Heads have distinct prime numbers of rows, so n-grams that collide in one head rarely do in another.
inline std::vector<NgramHead> ngram_heads(const ModelConfig& c) {
    // Trial division by 2, 3 and the numbers that neither divides.
    auto is_prime = [](uint64_t n) {
        if (n < 5 || n % 2 == 0 || n % 3 == 0) return n == 2 || n == 3;
        for (uint64_t divisor = 5; divisor * divisor <= n; divisor += 6)
            if (n % divisor == 0 || n % (divisor + 2) == 0) return false;
        return true;
    };
    std::vector<NgramHead> heads;
    uint64_t rows = (uint64_t)c.ngram_rows / (uint64_t)c.ngram_heads + 1, first = 0;
    for (int tokens : ngram_sizes(c)) {
        for (int head = 0; head < c.ngram_heads; head++) {
            do rows--;
            while (rows > 0 && !is_prime(rows));
            if (rows == 0)
                fail("--ngram-rows %lld: too few for %d heads, each with a prime number of rows; raise it",
                     c.ngram_rows, ngram_head_count(c));
            heads.push_back({tokens, first, rows});
            first += rows;
        }
    }
    return heads;
}

// Rows of each table, in all heads.
inline uint64_t rows_of_table(const ModelConfig& c) {
    if (c.ngram.empty()) return 0;
    NgramHead last = ngram_heads(c).back();
    return last.first + last.rows;
}

// The number of elements in all the rows of a table that one token looks up.
inline int ngram_inputs(const ModelConfig& c) {
    return ngram_head_count(c) * c.ngram_width;
}

// ----------------------------------------------------------------------------
// the sublayers of a block, and their widths

enum class SublayerKind { attention, filtered_attention, mlp, ngram_memory };

// Sublayers side by side: all read the same norm of the residual stream, and each adds its output to the
// stream.
using SublayerGroup = std::vector<SublayerKind>;

struct LayerKind {
    int window;                         // the attention window; 0: none
    bool has_table;                     // n-gram rows are looked up before the first group
    std::vector<SublayerGroup> groups;  // one after another, each with its own norm
};

// The kind of a layer, counted from 0. All layers have the same number of groups.
inline LayerKind layer_kind(const ModelConfig& c, int layer) {
    SublayerKind attention = c.local_filter ? SublayerKind::filtered_attention : SublayerKind::attention;
    LayerKind kind = {window_of_layer(c, layer), has_table(c, layer), {{attention}, {SublayerKind::mlp}}};
    if (c.block == BlockKind::parallel) kind.groups = {{attention, SublayerKind::mlp}};
    return kind;
}

// Outputs of the matrix product that computes queries, keys and values.
inline int qkv_width(const ModelConfig& c) {
    return (c.heads + 2 * c.kv_heads) * c.head_size;
}

// Returns whether that product has a bias, by its own option or by that of all products.
inline bool has_qkv_bias(const ModelConfig& c) {
    return c.bias || c.qkv_bias;
}

// Outputs of the first product of the MLP: SwiGLU has a gate beside each value.
inline int fc_width(const ModelConfig& c) {
    return c.mlp == MlpKind::swiglu ? 2 * c.mlp_width : c.mlp_width;
}

// Channels between the two convolutions of the local filter.
inline int filter_width(const ModelConfig& c) {
    return c.channels / 2;
}

// ----------------------------------------------------------------------------
// the parameter tensors, one row each: name, shape, initial values, weight decay, sharding

// A model is a chain of units: the embedding, each block, and the head if it has its own matrix. Any other
// tensors after the last block belong to that block's unit, ahead of the block's own tensors: sending these
// few elements as a separate message would take as long as sending many.
enum class Unit { embedding, last_block, block, head };

// How a tensor is sharded over tensor ranks.
enum class Shard {
    replicated,  // each rank has all of it, and a partial gradient; the gradient is the sum over the ranks
    rows,        // each rank has a part of the rows of each section
    columns      // each rank has an equal part of the columns
};

// Rows that are divided separately: the queries of attention, for example, or its keys.
struct Section {
    size_t rows;
    // The most pieces the rows can be divided into; 0: any number. With more tensor ranks than pieces,
    // neighboring ranks each hold a copy of the same piece, and its gradient is the sum of theirs.
    int pieces = 0;
    const char* name = "";
    const char* option = "";  // the option that sets its rows or pieces
    bool has_copies = false;  // pieces may be copied if there are more ranks than pieces
    bool apart = false;  // a product of its own, because its input differs from that of the rows before it
};

// The kinds of tensors that training treats differently.
enum class TensorKind { matrix, vector, embedding, head };
constexpr int tensor_kinds = 4;

struct TensorRow {
    int id;
    Unit unit;
    const char* name;       // in files; the tensors of block 3 are "layers.3." + name
    size_t rows, cols;      // cols 0: a vector
    float mean, deviation;  // initial values are normal, or uniform within mean +- deviation
    bool decay;             // weight decay: matrices only
    Shard shard = Shard::replicated;
    std::vector<Section> sections = {};  // a division of the rows; empty: one section
    size_t pad_to = 1;  // each rank's rows are padded to a multiple of this, with zeros that files omit
    bool uniform = false;
    std::vector<bool> layers = {};  // for each layer, whether it has this tensor; empty: all do

    bool is_in(int layer) const { return layers.empty() || layers[layer]; }
    std::vector<int64_t> shape() const {
        return cols ? std::vector<int64_t>{(int64_t)rows, (int64_t)cols}
                    : std::vector<int64_t>{(int64_t)rows};
    }
    size_t width() const { return std::max<size_t>(cols, 1); }
    size_t size() const { return rows * width(); }
    bool is_block_matrix() const { return kind() == TensorKind::matrix; }
    // A vector is a bias or the weight of a norm, in any unit.
    TensorKind kind() const {
        return cols == 0                 ? TensorKind::vector
               : unit == Unit::embedding ? TensorKind::embedding
               : unit == Unit::head      ? TensorKind::head
                                         : TensorKind::matrix;
    }
    size_t section_count() const { return std::max<size_t>(sections.size(), 1); }
    // Returns at least one section.
    std::vector<Section> all_sections() const {
        return sections.empty() ? std::vector<Section>{{rows}} : sections;
    }
};

// clang-format off
enum Tensor {
    // embedding
    wte, wpe,
    // block
    ngramnormw, ngramw,
    norm1w, norm1b, filter1w, filter1b, filter2w, filter2b, filternormw, qkvw, qkvb, qnormw, knormw,
    attprojw, attprojb, norm2w, norm2b, fcw, fcb, fcprojw, fcprojb,
    // last block
    normfw, normfb,
    // head
    headw,
    tensor_count
};
// clang-format on

constexpr int vocab_multiple = 128;  // the vocabulary is padded to a multiple of this; odd sizes are slow

// Initial values follow GPT-2: normal(0, 0.02), with the two projections back to the residual stream scaled
// by 1/sqrt(2 layers). Those of the local filter follow Yuan 2.0: uniform within 1/sqrt(fan-in). The rows of
// its convolution matrices are two taps, first the previous token's, then the token's own.
//
// Each tensor rank has a part of the heads, of the MLP and of the vocabulary (Shoeybi et al., "Megatron-LM",
// 2019): rows of the matrices that read the residual stream, columns of those that write to it. Norms, and
// the biases of the matrices that write to it, are applied to each rank's own part of the tokens (Korthikanti
// et al., "Reducing activation recomputation in large transformer models", 2022), so their gradients are
// summed over the tensor ranks.
inline std::vector<TensorRow> tensor_table(const ModelConfig& c) {
    size_t C = c.channels, V = c.vocab_size, P = c.context, HS = c.head_size, A = c.heads * HS,
           KV = c.kv_heads * HS, F = c.mlp_width, F1 = fc_width(c);
    float in = 0.02f, out = 0.02f / std::sqrt(2.0f * c.layers);
    size_t H = filter_width(c);
    float filter1 = 1 / std::sqrt(2.0f * C), filter2 = 1 / std::sqrt(2.0f * H);
    bool bias = c.bias, norm_bias = bias && c.norm == NormKind::layernorm,
         two_norms = layer_kind(c, 0).groups.size() > 1, filter = c.local_filter, uniform = true;
    std::vector<Section> hidden = {{F, 0, "", "--mlp-width"}},
                         heads = {{A, c.heads, "queries", "--heads"},
                                  {KV, c.kv_heads, "keys", "--kv-heads", true},
                                  {KV, c.kv_heads, "values", "--kv-heads", true, filter}};
    if (F1 > F) hidden = {{F, 0, "gates", "--mlp-width"}, {F, 0, "values", "--mlp-width"}};
    auto taps = [](size_t rows) {
        const char* width = "the width of the local filter (half of --channels):";
        return std::vector<Section>{{rows, 0, "before", width}, {rows, 0, "own", width}};
    };
    std::vector<TensorRow> table;
    auto add = [&](bool present, TensorRow row) {
        if (present) table.push_back(row);
    };
    using enum Unit;
    using enum Shard;
    add(true, {wte, embedding, "wte", V, C, 0, in, true, rows, {}, vocab_multiple});
    add(c.position == PositionKind::learned, {wpe, embedding, "wpe", P, C, 0, in, true, replicated});
    if (!c.ngram.empty()) {
        std::vector<Section> parts = {{C, 0, "keys"}, {C, 0, "values"}};
        if (!c.ngram_gate) parts = {};
        TensorRow norm = {ngramnormw, block, "ngram.norm.weight", C, 0, 1, 0, false, replicated};
        TensorRow weight = {
            ngramw, block,   "ngram.weight", c.ngram_gate ? 2 * C : C, (size_t)ngram_inputs(c), 0, in,
            true,   columns, parts};
        norm.layers = weight.layers = layers_with_table(c);
        add(c.ngram_gate, norm);
        add(true, weight);
    }
    add(true, {norm1w, block, "norm1.weight", C, 0, 1, 0, false, replicated});
    add(norm_bias, {norm1b, block, "norm1.bias", C, 0, 0, 0, false, replicated});
    add(filter, {filter1w, block, "filter1.weight", 2 * H, C, 0, filter1, true, rows, taps(H), 1, uniform});
    add(filter, {filter1b, block, "filter1.bias", H, 0, 0, filter1, false, rows, {}, 1, uniform});
    add(filter,
        {filter2w, block, "filter2.weight", 2 * C, H, 0, filter2, true, columns, taps(C), 1, uniform});
    add(filter, {filter2b, block, "filter2.bias", C, 0, 0, filter2, false, replicated, {}, 1, uniform});
    add(filter, {filternormw, block, "filternorm.weight", C, 0, 1, 0, false, replicated});
    add(true, {qkvw, block, "qkv.weight", A + 2 * KV, C, 0, in, true, rows, heads});
    add(has_qkv_bias(c), {qkvb, block, "qkv.bias", A + 2 * KV, 0, 0, 0, false, rows, heads});
    add(c.qk_norm, {qnormw, block, "qnorm.weight", HS, 0, 1, 0, false, replicated});
    add(c.qk_norm, {knormw, block, "knorm.weight", HS, 0, 1, 0, false, replicated});
    add(true, {attprojw, block, "attproj.weight", C, A, 0, out, true, columns});
    add(bias, {attprojb, block, "attproj.bias", C, 0, 0, 0, false, replicated});
    add(two_norms, {norm2w, block, "norm2.weight", C, 0, 1, 0, false, replicated});
    add(two_norms && norm_bias, {norm2b, block, "norm2.bias", C, 0, 0, 0, false, replicated});
    add(true, {fcw, block, "fc.weight", F1, C, 0, in, true, rows, hidden});
    add(bias, {fcb, block, "fc.bias", F1, 0, 0, 0, false, rows, hidden});
    add(true, {fcprojw, block, "fcproj.weight", C, F, 0, out, true, columns});
    add(bias, {fcprojb, block, "fcproj.bias", C, 0, 0, 0, false, replicated});
    add(true, {normfw, last_block, "normf.weight", C, 0, 1, 0, false, replicated});
    add(norm_bias, {normfb, last_block, "normf.bias", C, 0, 0, 0, false, replicated});
    add(!c.tie_embeddings, {headw, head, "head.weight", V, C, 0, in, true, rows, {}, vocab_multiple});
    return table;
}

// A matrix product of a block, as one tensor rank computes it.
struct LocalProduct {
    const char* name;  // the matrix's name
    size_t inputs, outputs;
};

// All matrix products of a block. With several context ranks, keys and values have a separate product.
inline std::vector<LocalProduct> local_products(const ModelConfig& c, int tp, int contexts = 1) {
    std::vector<LocalProduct> products;
    for (const TensorRow& row : tensor_table(c)) {
        if (!row.is_block_matrix()) continue;
        products.push_back({row.name, row.shard == Shard::columns ? row.cols / tp : row.cols, 0});
        const std::vector<Section> sections = row.all_sections();
        for (const Section& section : sections) {
            int parts = section.pieces > 0 ? std::min(section.pieces, tp) : tp;
            bool of_keys = row.id == qkvw && &section == &sections[1];
            if (section.apart || (of_keys && contexts > 1 && !c.local_filter))
                products.push_back({row.name, products.back().inputs, 0});
            products.back().outputs += row.shard == Shard::rows ? section.rows / parts : section.rows;
        }
    }
    return products;
}

// The number of copies of a tensor in a model: one for each layer that has it, or 1 outside blocks.
inline int count_of(const TensorRow& row, const ModelConfig& c) {
    return row.unit != Unit::block ? 1
           : row.layers.empty()    ? c.layers
                                   : (int)std::ranges::count(row.layers, true);
}

// Parameters of a completed config, without the rows of n-gram tables; a tied output matrix counts once.
inline int64_t parameter_count(const ModelConfig& c) {
    int64_t count = 0;
    for (const TensorRow& row : tensor_table(c)) count += (int64_t)row.size() * count_of(row, c);
    return count;
}

// The parameters of one block, on average.
inline int64_t block_parameters(const ModelConfig& c) {
    int64_t count = 0;
    for (const TensorRow& row : tensor_table(c)) {
        if (row.unit == Unit::block) count += (int64_t)row.size() * count_of(row, c);
    }
    return count / c.layers;
}

// ----------------------------------------------------------------------------
// limits of a model

constexpr int most_head_size = 256;  // the attention kernels support no larger ones

// Fills in the zeros and refuses an invalid model. Each field must already be within its limits in the table
// of options.
inline void complete(ModelConfig& c) {
    if (c.head_size == 0) {
        if (c.channels % c.heads) {
            fail("--heads %d: does not divide --channels %d; change either, or give --head-size", c.heads,
                 c.channels);
        }
        c.head_size = c.channels / c.heads;
    }
    if (c.head_size > most_head_size) {
        fail("--head-size %d: attention supports heads up to %d; use more heads or a smaller --head-size",
             c.head_size, most_head_size);
    }
    if (c.kv_heads == 0) c.kv_heads = c.heads;
    if (c.heads % c.kv_heads) {
        fail("--kv-heads %d: does not divide --heads %d; give a divisor of it", c.kv_heads, c.heads);
    }
    if (c.mlp_width == 0) c.mlp_width = 4 * c.channels;
    if (c.bias && c.qkv_bias)
        fail("--qkv-bias on: --bias on includes these biases; leave it out, or give --bias off");
    if (c.local_filter && c.channels % 2) {
        fail("--local-filter on: --channels %d is odd, but is halved inside the filter; give an even number",
             c.channels);
    }
    if (!c.ngram_layers.empty() && c.ngram.empty()) {
        fail("--ngram-layers %s: there are no n-grams to look up there; give --ngram too, or leave this out",
             printable(c.ngram_layers).c_str());
    }
    if (!c.ngram.empty()) {
        if (c.ngram_layers.empty()) c.ngram_layers = std::to_string(std::min(1, c.layers - 1));
        if (c.ngram_width % 8)
            fail("--ngram-width %d: not a multiple of 8; give %d", c.ngram_width, c.ngram_width / 8 * 8 + 8);
        parse_ascending("--ngram-layers", c.ngram_layers, 0, c.layers - 1);
        ngram_heads(c);
    }
    if (!c.window_pattern.empty()) {
        parse_window_pattern(c.window_pattern);
        if (c.window == 0)
            fail("--window-pattern %s: no layer has a window; give --window too, or --window-pattern ''",
                 c.window_pattern.c_str());
    }

    if (c.position == PositionKind::rope) {
        if (c.rope_dims == 0) c.rope_dims = c.head_size;
        if (c.rope_dims > c.head_size || c.rope_dims % 2) {
            fail("--rope-dims %d: RoPE rotates pairs within a head of %d; give an even number up to that",
                 c.rope_dims, c.head_size);
        }
        if (c.rope_scaling > 1 && !(c.rope_high_frequency > c.rope_low_frequency)) {
            fail("--rope-high-frequency %g: not above --rope-low-frequency %g; raise it",
                 c.rope_high_frequency, c.rope_low_frequency);
        }
    }

    // The count for one layer is below 2^51, but times --layers it may overflow: check it as a double.
    ModelConfig one_layer = c;
    one_layer.layers = 1;
    constexpr double most_parameters = 1e15;
    if ((double)parameter_count(one_layer) * c.layers > most_parameters) {
        fail("model of %g parameters: too large; lower --layers, --channels, --mlp-width or --vocab-size",
             (double)parameter_count(one_layer) * c.layers);
    }
}
