/*
A model that a file describes must be one that options could describe too.
*/
#pragma once

#include "data/model_config.h"
#include "data/option_values.h"

// Refuses what the command line would refuse. What follows from the rest is filled in.
inline ModelConfig checked_model(const ModelConfig& model) {
    Options options;
    static_cast<ModelConfig&>(options) = model;
    for (const OptionRow& row : option_table()) {
        if (row.commands & command_train) check_limits(row, options);
    }
    complete(static_cast<ModelConfig&>(options));
    return options;
}
