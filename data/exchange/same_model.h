/*
A model is exported for another program only if that program reads the same model. Any option that the other
program cannot express is therefore refused by name.
*/
#pragma once

#include <string>

#include "data/base/error.h"
#include "data/options/model_config.h"
#include "data/options/values.h"

// Returns the options of a model, with defaults for values that have no effect on it.
inline Options effective_options(ModelConfig c) {
    const ModelConfig usual;
    bool rope = c.position == PositionKind::rope, scaled = rope && c.rope_scaling != 1;
    if (!rope) c.rope_theta = usual.rope_theta, c.rope_dims = 0, c.rope_scaling = 1;
    if (!scaled) {
        c.rope_low_frequency = usual.rope_low_frequency, c.rope_high_frequency = usual.rope_high_frequency;
        c.rope_original_context = usual.rope_original_context;
    }
    c.window_pattern = effective_window_pattern(c);
    Options options;
    static_cast<ModelConfig&>(options) = c;
    return options;
}

// Refuses `ours` if it differs from `theirs`, the model that the other program reads, and names the first
// option that differs. `theirs` may be incomplete. who: the other program; remedy: what to do.
inline void check_same_model(const ModelConfig& ours, ModelConfig theirs, const std::string& who,
                             const char* remedy) {
    // so that a width that is not a multiple of the heads is refused here
    if (theirs.head_size == 0) theirs.head_size = theirs.channels / theirs.heads;
    complete(theirs);
    Options own = effective_options(ours), other = effective_options(theirs);
    // kinds are compared before sizes, which may follow from them
    for (bool sizes : {false, true}) {
        for (const OptionRow& row : option_table()) {
            if (row.resume != Resume::shape || is_number(row) != sizes) continue;
            std::string value = value_text(row, own), only = value_text(row, other);
            if (value != only)
                fail("%s %s: %s has only %s; %s", option_name(row).c_str(), value.c_str(), who.c_str(),
                     only.empty() ? "none" : only.c_str(), remedy);
        }
    }
}
