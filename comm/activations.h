/*
How long activations are kept, and where. A table has one row for each; a row is in memory as often as its
values are needed at the same time, which follows from the pipeline's schedule.
*/
#pragma once

#include <cstddef>
#include <cstring>

#include "comm/stage.h"  // Share

enum class Keep {
    shared,   // one for all layers
    layer,    // for each layer and micro-batch between its forward and its backward pass
    inner,    // likewise, but for the first layer of a part, which reads what it was sent
    pending,  // for each layer and micro-batch between its input gradient and its weight gradient
    remade,   // likewise, and one that the forward pass writes to, for the backward pass makes it again
    head      // for each micro-batch between its forward and its backward pass
};

struct ActivationRow {
    const char* name;
    size_t field;  // where the pointer is in the struct of all pointers
    size_t element_size;
    size_t elements;
    Keep keep;
    char* memory = nullptr;

    size_t bytes() const { return ceil_div(elements * element_size, 256) * 256; }
    // How often it is there.
    size_t instances(const Share& share) const {
        switch (keep) {
        case Keep::shared:
            return 1;
        case Keep::layer:
            return share.layer_places;
        case Keep::inner:
            return share.inner_places;
        case Keep::pending:
        case Keep::remade:
            return first_pending(share, share.chunks(), 0);
        default:
            return share.room.kept.back();
        }
    }
    // In the struct of pointers.
    void point(void* view, size_t instance) const {
        char* at = memory + instance * bytes();
        memcpy((char*)view + field, &at, sizeof at);
    }

    // Of what is pending: the first instance for the layers of this chunk, of the micro-batch in this slot.
    size_t first_pending(const Share& share, int chunk, int slot) const {
        std::vector<int> layers = share.layers(0);
        size_t instance = keep == Keep::remade;
        for (int before = 0; before < chunk; before++)
            instance += share.room.pending[before] * layers[before];
        return slot == 0 ? instance : instance + slot * layers[chunk];
    }
};
