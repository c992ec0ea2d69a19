/*
An llm.c model -> a run directory with one checkpoint: of its weights only or, if the state of all ranks lies
beside the model, with the moments and master weights of its step, so that training continues from there.
Memory holds small parts of it.
*/
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

#include "data/exchange/imported_run.h"
#include "data/exchange/llmc_model.h"
#include "data/exchange/llmc_state.h"

namespace llmc {

// Checks that the weights are the master weights, rounded up or down: fails for a state of another step, or
// one whose shards would be assembled in the wrong order.
inline void check_master(LlmcModel& model, const LlmcState& state) {
    std::vector<float> weights;
    state.each_part(Slot::master, [&](size_t i, uint64_t first, const std::vector<float>& masters) {
        weights.resize(masters.size());
        model.read_floats(model.tensors()[i].offset + first, weights.size(), weights.data());
        for (size_t k = 0; k < masters.size(); k++) {
            uint32_t master = std::bit_cast<uint32_t>(masters[k]),
                     weight = std::bit_cast<uint32_t>(weights[k]);
            bool rounded = model.dtype() == Dtype::fp32
                               ? master == weight
                               : weight >> 16 == master >> 16 || weight >> 16 == (master >> 16) + 1;
            if (rounded || (std::isnan(masters[k]) && std::isnan(weights[k]))) continue;
            fail("%s: tensor %s: element %llu is %g, but the master weight in its state is %g; they "
                 "are from different saves: copy both again, or only the model to import its weights",
                 model.path().c_str(), model.tensors()[i].name.c_str(), (unsigned long long)(first + k),
                 (double)weights[k], (double)masters[k]);
        }
    });
}

inline void import_weights(LlmcModel& model, const std::vector<int>& numbers, CheckpointBuilder& checkpoint) {
    std::vector<float> values;
    for (size_t i = 0; i < numbers.size(); i++) {
        const LlmcTensor& tensor = model.tensors()[i];
        for (uint64_t first = 0; first < tensor.used; first += values.size()) {
            values.resize(std::min(most_at_once, tensor.used - first));
            model.read_floats(tensor.offset + first, values.size(), values.data());
            checkpoint.append(numbers[i], Slot::weight, first, values.size(), values.data());
        }
    }
}

inline std::vector<std::string> remarks(const LlmcModel& model, const std::optional<LlmcState>& state,
                                        int64_t step) {
    std::vector<std::string> lines;
    if (state) {
        lines.push_back(text("step %lld, with the state of %d ranks", (long long)step, state->ranks()));
        lines.push_back("the data is read from the beginning, because llm.c orders it differently");
        std::filesystem::path done =
            std::filesystem::path(model.path()).parent_path() / text("DONE_%08lld", (long long)step);
        if (access(done.c_str(), F_OK) != 0) {
            lines.push_back(
                done.filename().string() +
                " is missing: llm.c writes it once a save is complete; the file sizes are right, though");
        }
    } else {
        lines.push_back("weights only: there is no state_*.bin of the same step beside the model");
    }
    if (model.config().vocab_size == 50257)
        lines.push_back("no tokenizer is recorded; for GPT-2's, give its tokenizer.json with --tokenizer");
    return lines;
}

}  // namespace llmc

struct LlmcImport {
    bool goes_on;                      // the training state was imported too
    std::vector<std::string> remarks;  // lines for the user
};

// Imports a model, and the state beside it, into a run directory, which may hold a run only with `overwrite`.
inline LlmcImport import_llmc(const std::string& path, const std::string& run_dir, bool overwrite,
                              const ImportedRun::TensorsOf& tensors_of) {
    LlmcModel model(path);
    std::optional<LlmcState> state;
    int64_t step = llmc::step_of_model(path);
    if (step >= 0) {
        std::string folder = std::filesystem::absolute(path).parent_path();
        if (auto files = llmc::state_files(folder, step); !files.empty())
            state.emplace(files, step, model.tensors());
    }
    if (state && state->has_master()) llmc::check_master(model, *state);

    Options options;
    static_cast<ModelConfig&>(options) = model.config();
    options.model = path;
    options.tokenizer = name_of(TokenizerKind::none);
    std::vector<CheckpointTensor> tensors = tensors_of(options);
    std::vector<int> numbers = llmc::numbers(model.tensors(), tensors, path);
    std::vector<Slot> slots;
    if (state) slots = {Slot::m, Slot::v};
    if (state && state->has_master()) slots.push_back(Slot::master);
    for (CheckpointTensor& tensor : tensors) {
        tensor.slots = {model.dtype()};
        for (Slot slot : slots) tensor.slots[(size_t)slot] = Dtype::fp32;
    }

    ImportedRun run(run_dir, options, overwrite, state ? step : 0, tensors);
    llmc::import_weights(model, numbers, run.checkpoint);
    for (Slot slot : slots) {
        state->each_part(slot, [&](size_t i, uint64_t first, const std::vector<float>& values) {
            run.checkpoint.append(numbers[i], slot, first, values.size(), values.data());
        });
    }
    run.commit();
    std::vector<std::string> remarks = llmc::remarks(model, state, step);
    if (std::string damage = run.checkpoint.not_finite(); !damage.empty()) remarks.push_back(damage);
    return {state.has_value(), remarks};
}
