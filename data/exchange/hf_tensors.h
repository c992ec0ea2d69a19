/*
Maps the tensors of Hugging Face models to ours. A family's table has a row for each of their tensors, and
both export and import iterate over it. Each of their tensors holds rows of one of ours, from `first_row` on:

    straight      in our order
    transposed    as columns: GPT-2's Conv1D multiplies from the other side
    by_head       queries, keys and values of the first head, then those of the second ... (GPT-NeoX); ours
                  are all queries, then all keys, then all values
    interleaved   in each head, elements 2i and 2i + 1 form a pair that RoPE rotates (GPT-J); ours are i and
                  i + R/2 (kernels/rope.cuh)
    paired        queries and keys of the first head, then those of the second ...; one tensor has the first
                  half of all these rows, another the second (Yuan 2.0)
    taps          a convolution (OC, C, 2, 1): both taps of a weight side by side (Yuan 2.0); ours are two
                  matrices, one below the other
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/checkpoint/index.h"
#include "data/base/error.h"
#include "data/exchange/hf_config.h"  // hf_family
#include "data/options/model_config.h"

enum class HfRole {
    holds,     // it holds one of ours, or a section of one
    copies,    // it repeats the tensor of another row; an import requires both to be equal
    may_copy,  // like copies, but it may be missing, and is not exported
    zero,      // our models have no such tensor; an import requires zeros
};

struct HfTensor {
    std::string name;
    std::string other_name;  // in files of some versions; empty: none
    std::vector<uint64_t> shape;
    HfRole role = HfRole::holds;
    std::string ours;  // empty for `zero`
    uint64_t first_row = 0;
    HfOrder order = HfOrder::straight;
    uint64_t heads = 0, head_size = 0, rope_dims = 0;  // the rows are ordered by heads of this size
    uint64_t before = 0;                               // paired: rows of the tensor before this one

    uint64_t rows() const { return shape[0]; }
    uint64_t columns() const {
        uint64_t columns = 1;
        for (size_t i = 1; i < shape.size(); i++) columns *= shape[i];
        return columns;
    }
    uint64_t size() const { return rows() * columns(); }

    // Returns the width of the rows of our tensor.
    uint64_t our_width() const {
        return order == HfOrder::transposed ? rows() : order == HfOrder::taps ? columns() / 2 : columns();
    }

    // The range of our tensor in which the elements of this one lie: its first element, and its length.
    uint64_t our_first() const { return first_row * our_width(); }
    uint64_t our_size() const { return order == HfOrder::paired ? 2 * size() : size(); }

    // Calls visit(theirs, ours) for each element of rows [row, row + count): `theirs` is its index within
    // these rows, and `ours` its index in our tensor, counted from our_first().
    template <typename Visit>
    void each_element(uint64_t row, uint64_t count, Visit&& visit) const {
        bool transposed = order == HfOrder::transposed, taps = order == HfOrder::taps;
        uint64_t theirs = 0, width = columns(), stride = transposed ? rows() : 1, tap = size() / 2;
        for (uint64_t end = row + count; row < end; row++) {
            uint64_t begin = transposed ? row : our_row(row) * our_width();
            for (uint64_t c = 0; c < width; c++)
                visit(theirs++, begin + (taps ? c % 2 * tap + c / 2 : c * stride));
        }
    }

    // Calls visit(first, count) for each run of consecutive elements of ours that it holds; `first` is
    // counted from our_first().
    template <typename Visit>
    void each_run(Visit&& visit) const {
        if (order != HfOrder::paired) return visit(uint64_t(0), size());
        for (uint64_t row = 0; row < rows(); row += head_size)
            visit(our_row(row) * columns(), head_size * columns());
    }

    // Calls visit(row, rows) for parts that are small enough for memory.
    template <typename Visit>
    void each_part(Visit&& visit) const {
        constexpr uint64_t most = 1 << 22;  // elements
        uint64_t step = std::max<uint64_t>(1, most / columns());
        for (uint64_t row = 0; row < rows(); row += step) visit(row, std::min(step, rows() - row));
    }

private:
    uint64_t our_row(uint64_t row) const {
        row += before;
        uint64_t head = row / head_rows(), in_head = row % head_rows();
        switch (order) {
        case HfOrder::by_head:
        case HfOrder::paired:
            return (in_head / head_size * heads + head) * head_size + in_head % head_size;
        case HfOrder::interleaved:
            if (in_head < rope_dims) in_head = in_head % 2 * (rope_dims / 2) + in_head / 2;
            return head * head_size + in_head;
        case HfOrder::straight:
        case HfOrder::transposed:
        case HfOrder::taps:
            return row;
        }
        __builtin_unreachable();
    }

    uint64_t head_rows() const {
        return order == HfOrder::by_head       ? 3 * head_size
               : order == HfOrder::paired      ? 2 * head_size
               : order == HfOrder::interleaved ? head_size
                                               : 1;
    }
};

// Returns the table of a completed config; refuses one that no family expresses.
inline std::vector<HfTensor> hf_tensors(const ModelConfig& c) {
    const HfFamily& family = hf_family(c);
    const std::vector<TensorRow> ours = tensor_table(c);
    std::vector<HfTensor> table;
    auto find = [&](const std::string& name) {
        auto row = std::find_if(ours.begin(), ours.end(), [&](auto& row) { return row.name == name; });
        return row == ours.end() ? nullptr : &*row;
    };
    auto add = [&](const std::string& name, const std::string& other_name, std::vector<uint64_t> shape,
                   HfRole role, const std::string& held) -> HfTensor& {
        table.push_back({name, other_name, std::move(shape), role, held, 0, HfOrder::straight,
                         (uint64_t)c.heads, (uint64_t)c.head_size, (uint64_t)c.rope_dims});
        return table.back();
    };
    // Adds one of their weights or biases if it is in this unit; in a block, with the prefixes of its names.
    auto add_row = [&](const HfRow& row, const std::string& ending, Unit unit, const std::string& their_block,
                       const std::string& our_block) {
        // wte and wpe have no ending
        auto full = [&](const char* name) {
            return find(name) && ending == ".weight" ? name : name + ending;
        };
        bool copied = row.copies && !find(full(row.ours));
        std::string name = full(copied ? row.copies : row.ours), theirs = their_block + row.theirs + ending;
        const TensorRow *held = find(name), *weight = find(std::string(row.ours) + ".weight");
        if (!held && ending == ".bias" && row.has_bias && weight->unit == unit)
            add(family.prefix + theirs, theirs, {weight->rows}, HfRole::zero, "");
        if (!held || held->unit != unit) return;
        bool transposed = row.order == HfOrder::transposed, matrix = held->cols > 0;
        std::vector<uint64_t> shape = {row.section < 0 ? held->rows : held->sections[row.section].rows};
        if (matrix) shape.push_back(held->cols);
        if (matrix && row.order == HfOrder::taps) shape = {held->rows / 2, held->cols, 2, 1};
        if (transposed) std::reverse(shape.begin(), shape.end());
        HfTensor& tensor = add(family.prefix + theirs, theirs, shape, copied ? HfRole::copies : HfRole::holds,
                               our_block + name);
        bool of_matrices = transposed || row.order == HfOrder::taps;
        if (matrix || !of_matrices) tensor.order = row.order;
        uint64_t& before = row.order == HfOrder::paired ? tensor.before : tensor.first_row;
        for (int s = 0; s < row.section; s++) before += held->sections[s].rows;
    };
    auto add_rows = [&](Unit unit, const std::string& their_block, const std::string& our_block) {
        for (const HfRow& row : family.rows) {
            for (const char* ending : {".weight", ".bias"})
                add_row(row, ending, unit, their_block, our_block);
        }
    };
    add_rows(Unit::embedding, "", "");
    for (int l = 0; l < c.layers; l++) {
        std::string number = std::to_string(l) + ".";
        add_rows(Unit::block, family.block + number, "layers." + number);
    }
    add_rows(Unit::last_block, "", "");
    uint64_t V = (uint64_t)c.vocab_size, C = (uint64_t)c.channels;
    bool own_head = find("head.weight");
    add(family.head, family.other_head, {V, C}, own_head ? HfRole::holds : HfRole::may_copy,
        own_head ? "head.weight" : "wte");
    if (family.head_has_bias) add("lm_head.bias", "", {V}, HfRole::zero, "");
    return table;
}

// Returns the numbers of our tensors by name, for a model that the table describes; refuses any other. `what`
// is the source of our tensors, for messages.
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
            fail("%s: tensor %s is missing or its shape does not match the options; use another checkpoint",
                 what.c_str(), theirs.ours.c_str());
        if (theirs.role == HfRole::holds) held[theirs.ours] += theirs.size();
    }
    for (const CheckpointTensor& tensor : tensors) {
        if (held[tensor.name] != tensor.size())
            fail("%s: tensor %s has a shape that does not match the options; use another checkpoint",
                 what.c_str(), printable(tensor.name).c_str());
    }
    return numbers;
}

// Returns whether this is the name of a tensor that older versions stored, although loading a model
// recomputes it: a mask, or the frequencies of RoPE.
inline bool hf_recomputes(const std::string& name) {
    for (const char* end : {".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
                            ".rotary_emb.inv_freq"}) {
        if (name.ends_with(end)) return true;
    }
    return false;
}
