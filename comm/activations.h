/*
How long activations are kept, and where. A table has one row for each; a row is in memory as often as its
values are needed at the same time, which follows from the pipeline's schedule. While a piece of work of the
schedule runs, each layer sees the instances that are its own through a struct of pointers, the View.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "comm/memory.h"           // Arena
#include "comm/pipeline.h"         // PipelineTask
#include "comm/stage.h"            // Stage
#include "data/options/options.h"  // Recompute
#include "kernels/fp8_matmul.cuh"  // fp8_fast_gradients

// ----------------------------------------------------------------------------
// requirements of a model

// Sizes that the activations depend on.
struct Workload {
    int B, T;       // sequences and tokens of each, in a micro-batch
    bool training;  // false: forward only, nothing is kept
    Recompute recompute = Recompute::none;
    int loss_chunk;  // tokens whose logits exist at the same time
    // Texts that are written at once, and the tokens of each whose keys and values are kept. 0: none.
    int cache_rows = 0, cache_length = 0;
    bool fp8 = false;                          // products of the blocks
    size_t number_bytes = sizeof(floatX);      // another size in plans for other builds than this one
    bool fast_gradients = fp8_fast_gradients;  // likewise

    int positions() const { return std::max(T, cache_length); }
};

// Elements of the key/value cache of one text, in one layer.
inline size_t cache_row_size(const ModelConfig& c, int length) {
    return (size_t)length * 2 * c.kv_heads * c.head_size;
}

// ----------------------------------------------------------------------------
// the table

enum class Lifetime {
    shared,  // one for all layers
    layer,   // for each layer and micro-batch between its forward and its backward pass
    inner,   // likewise, but for the first layer of a part, which reads what it was sent
    // for each layer and micro-batch between its input gradient and its weight gradient; and one more,
    // which only what the forward pass writes and the backward pass recomputes makes use of
    pending,
    head  // for each micro-batch between its forward and its backward pass
};

struct ActivationRow {
    const char* name;
    size_t size;  // bytes of one instance
    Lifetime lifetime;
    void (*point)(void* view, void* memory);  // the field of the view that has the name
    char* memory = nullptr;

    size_t stride() const { return ceil_div(size, 256) * 256; }
    size_t instances(const Stage& stage) const {
        switch (lifetime) {
        case Lifetime::shared:
            return 1;
        case Lifetime::layer:
            return stage.layer_slots;
        case Lifetime::inner:
            return stage.inner_slots;
        case Lifetime::pending:
            return first_pending(stage, stage.chunks(), 0);
        case Lifetime::head:
            return stage.room.kept.back();
        }
        __builtin_unreachable();
    }
    void bind(void* view, size_t instance) const { point(view, memory + instance * stride()); }

    // The first instance for the layers of this chunk, of the micro-batch in this slot.
    static size_t first_pending(const Stage& stage, int chunk, int slot) {
        std::vector<int> layers = stage.layers(0);
        size_t instance = 1;  // 0 is what the forward pass writes
        for (int before = 0; before < chunk; before++)
            instance += stage.room.pending[before] * layers[before];
        return slot == 0 ? instance : instance + slot * layers[chunk];
    }
};

// Takes memory for all instances of all rows.
struct ActivationArrays {
    std::vector<ActivationRow> table;

    ActivationArrays(Arena& memory, std::vector<ActivationRow> rows, const Stage& stage)
        : table(std::move(rows)) {
        memory.of("activations");
        for (ActivationRow& row : table) row.memory = memory.take<char>(row.stride() * row.instances(stage));
    }
};

// Adds up the bytes that one layer keeps of one micro-batch until its backward pass.
inline size_t layer_bytes(const std::vector<ActivationRow>& table) {
    size_t bytes = 0;
    for (const ActivationRow& row : table) {
        if (row.lifetime == Lifetime::layer || row.lifetime == Lifetime::inner) bytes += row.stride();
    }
    return bytes;
}

// The rows of a table, of which each layer sees its own.
template <typename View>
class ActivationMemory {
public:
    // layers: of the whole model, for each has a view. The memory must outlive this.
    ActivationMemory(Arena& memory, std::vector<ActivationRow> table, const Stage& stage, int layers)
        : views(layers),
          table_(ActivationArrays(memory, std::move(table), stage).table),
          stage_(stage),
          layer_slots_(stage.layers(0)),
          inner_slots_(stage.layers(1)) {
        for (const ActivationRow& row : table_) {
            for (View& view : views) row.bind(&view, 0);
        }
    }

    std::vector<View> views;  // one for each layer, for the piece of work bound last

    // has_backward: or else nothing is kept from one piece of work to the next.
    void begin_run(bool has_backward) {
        for (ActivationSlots* slots : {&layer_slots_, &inner_slots_}) slots->begin_run(has_backward);
    }

    // Points the views of the task's layers to what is kept for it. Tasks come in the order of their list.
    void bind(const PipelineTask& task) {
        PipelineAction action = {task.work, task.micro_batch, task.chunk};
        std::vector<int> slots = layer_slots_.enter(action), inner = inner_slots_.enter(action);
        int begin = stage_.first_layer(task.chunk), end = stage_.end_layer(task.chunk);
        size_t pending = ActivationRow::first_pending(stage_, task.chunk, task.pending_slot);
        for (const ActivationRow& row : table_) {
            switch (row.lifetime) {
            case Lifetime::shared:  // always in the same place
                break;
            case Lifetime::layer:
                for (int i = begin; i < end; i++) row.bind(&views[i], slots[i - begin]);
                break;
            case Lifetime::inner:
                for (int i = begin + 1; i < end; i++) row.bind(&views[i], inner[i - begin - 1]);
                break;
            case Lifetime::pending:
                for (int i = begin; i < end; i++)
                    row.bind(&views[i], task.work == PipelineWork::forward ? 0 : pending + (i - begin));
                break;
            case Lifetime::head:
                for (View& view : views) {
                    if (task.part == stage_.last_part()) row.bind(&view, task.slot);
                }
            }
        }
    }

private:
    std::vector<ActivationRow> table_;
    const Stage& stage_;
    ActivationSlots layer_slots_, inner_slots_;
};
