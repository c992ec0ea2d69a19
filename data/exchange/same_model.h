/*
A model is written for another program only where that program reads the same model. So a switch that the
other one does not have is refused by its option, whatever the switch is.
*/
#pragma once

#include <string>

#include "data/base/error.h"
#include "data/options/model_config.h"
#include "data/options/values.h"

// The options of a model, without values that have no effect in it.
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

// Refuses ours, of which `theirs` is what the other program reads, by the first option in which they differ.
// Theirs may be incomplete. `who` has no such models, and `remedy` says what to do.
inline void check_same_model(const ModelConfig& ours, ModelConfig theirs, const std::string& who,
                             const char* remedy) {
    // so that a width that is no multiple of the heads is refused here
    if (theirs.head_size == 0) theirs.head_size = theirs.channels / theirs.heads;
    complete(theirs);
    Options own = effective_options(ours), other = effective_options(theirs);
    // a kind before a size, which may follow from it
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
