/*
A folder of Hugging Face transformers -> a run directory with the weights as a checkpoint of step 0. A folder
whose names or values show that it is unsuitable is refused before the directory is made. Memory holds small
parts of the weights; a tensor whose order differs from ours is held whole, one at a time.
*/
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/exchange/hf_config.h"
#include "data/exchange/hf_tensors.h"
#include "data/exchange/imported_run.h"
#include "data/exchange/published.h"
#include "data/options/values.h"
#include "data/options/options.h"
#include "data/exchange/safetensors.h"
#include "data/tokenizer/tokenizer.h"
#include "data/base/strings.h"

namespace hf {

// The weights of a folder, as the table of their family describes them.
class Source {
public:
    Source(const std::string& folder, std::vector<HfTensor> table)
        : files_(folder), table_(std::move(table)) {
        for (HfTensor& theirs : table_) find(theirs);
        std::erase_if(table_, [](const HfTensor& theirs) { return theirs.name.empty(); });
        refuse_unknown();
    }

    const std::vector<HfTensor>& table() const { return table_; }

    // Returns bf16 if that loses nothing, else fp32.
    Dtype dtype() const {
        for (const HfTensor& theirs : table_) {
            if (files_.find(theirs.name)->dtype != "BF16") return Dtype::fp32;
        }
        return Dtype::bf16;
    }

    // Calls take(row, rows, values) for all rows, in parts.
    template <typename Take>
    void each_part(const HfTensor& theirs, Take&& take) {
        std::vector<float> part;
        theirs.each_part([&](uint64_t row, uint64_t rows) {
            part.resize(rows * theirs.columns());
            files_.read_floats(theirs.name, row * theirs.columns(), part.size(), part.data());
            take(row, rows, part);
        });
    }

    void check_zero(const HfTensor& theirs) {
        each_part(theirs, [&](uint64_t, uint64_t, const std::vector<float>& values) {
            for (float value : values) {
                if (value != 0)
                    fail("%s: tensor %s is not zero; --bias off has no such tensor, so only models whose "
                         "biases are all zero can be imported",
                         files_.folder().c_str(), theirs.name.c_str());
            }
        });
    }

    // Checks that a tensor equals the one that it copies.
    void check_copy(const HfTensor& theirs) {
        auto holds = [&](const HfTensor& row) {
            return row.role == HfRole::holds && row.ours == theirs.ours;
        };
        const HfTensor& held = *std::find_if(table_.begin(), table_.end(), holds);
        std::vector<float> other;
        each_part(theirs, [&](uint64_t row, uint64_t, const std::vector<float>& values) {
            other.resize(values.size());
            files_.read_floats(held.name, row * held.columns(), other.size(), other.data());
            if (values == other) return;
            const char* remedy =
                theirs.role == HfRole::may_copy
                    ? "--tie-embeddings on has one tensor for both; if the model has two, set "
                      "\"tie_word_embeddings\": false in config.json"
                    : "--block parallel has one norm for attention and MLP, so this model cannot be "
                      "expressed; "
                      "import one whose two norms are the same, or that has use_parallel_residual false";
            fail("%s: tensor %s is not the same as %s; %s", files_.folder().c_str(), theirs.name.c_str(),
                 held.name.c_str(), remedy);
        });
    }

private:
    // Finds a tensor under one of its names, and keeps that name. If an optional tensor is missing, clears
    // its name.
    void find(HfTensor& theirs) {
        const SafeTensor* found = files_.find(theirs.name);
        if (!found && !theirs.other_name.empty()) {
            found = files_.find(theirs.other_name);
            if (found) theirs.name = theirs.other_name;
        }
        if (!found && theirs.role == HfRole::may_copy) {
            theirs.name.clear();
        } else if (!found) {
            fail("%s: tensor %s is missing; the weights do not match config.json", files_.folder().c_str(),
                 theirs.name.c_str());
        } else if (found->shape != theirs.shape) {
            fail("%s: tensor %s has shape %s, but config.json says %s; the weights do not match "
                 "config.json",
                 files_.folder().c_str(), theirs.name.c_str(), shape_text(found->shape).c_str(),
                 shape_text(theirs.shape).c_str());
        }
    }

    void refuse_unknown() const {
        std::set<std::string> known;
        for (const HfTensor& theirs : table_) known.insert(theirs.name);
        for (const std::string& name : files_.names()) {
            if (known.contains(name) || hf_recomputes(name)) continue;
            fail("%s: tensor %s does not exist in a model of this kind; the weights do not match "
                 "config.json",
                 files_.folder().c_str(), printable(name).c_str());
        }
    }

    SafetensorsFolder files_;
    std::vector<HfTensor> table_;
};

inline void import_tensor(Source& source, const HfTensor& theirs, int number, CheckpointBuilder& checkpoint) {
    bool reorders = theirs.order != HfOrder::straight;
    std::vector<float> held(reorders ? theirs.our_size() : 0);
    source.each_part(theirs, [&](uint64_t row, uint64_t rows, const std::vector<float>& part) {
        if (reorders) {
            theirs.each_element(row, rows, [&](uint64_t from, uint64_t to) { held[to] = part[from]; });
        } else {
            uint64_t first = theirs.our_first() + row * theirs.columns();
            checkpoint.append(number, Slot::weight, first, part.size(), part.data());
        }
    });
    if (!reorders) return;
    theirs.each_run([&](uint64_t first, uint64_t count) {
        checkpoint.append(number, Slot::weight, theirs.our_first() + first, count, held.data() + first);
    });
}

// Returns null if there is no tokenizer, or one of an unsupported kind: the weights are useful without it.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& path, std::vector<std::string>& remarks) {
    std::error_code not_there;
    if (!std::filesystem::exists(path, not_there)) return nullptr;
    nlohmann::json file = parse_json(read_text(path), path), model = JsonObject(file, path).get("model");
    nlohmann::json kind = model.is_object() ? model.value("type", nlohmann::json()) : nlohmann::json();
    if (!kind.is_string() || kind == "BPE") return Tokenizer::load_if_any(path);
    remarks.push_back(text("%s: of type %s, but only BPE is supported: the run has no tokenizer; make token "
                           "files such as llm.c's .bin with Python's tokenizers, and train on them",
                           path.c_str(), json_text(kind).c_str()));
    return nullptr;
}

// Returns the options of a run of the model. Its tokenizer is the copy that the run directory will hold.
inline Options imported_options(const std::string& folder, const std::string& run_dir,
                                const Tokenizer* tokenizer, std::vector<std::string>& remarks) {
    std::string path = folder + "/config.json";
    nlohmann::json config = read_hf_json(path);
    Options options;
    static_cast<ModelConfig&>(options) = checked_model(hf_model(config, path, remarks));
    options.model = folder;
    options.tokenizer = name_of(TokenizerKind::none);
    std::vector<int> ends = hf_ends_of_text(HfConfig::Json(config), options.vocab_size);
    options.document_end = ends.empty() ? -1 : ends[0];
    if (!tokenizer) return options;
    options.tokenizer = tokenizer_path(run_dir);
    // The config of a chat model may name the token that ends a turn; `tokenize` asks the tokenizer.
    if (int end = tokenizer->end_of_text(); end >= 0) options.document_end = end;
    if (tokenizer->vocab_size() > options.vocab_size)
        fail("%s: has %d tokens, but the model has only %d; replace it with the model's own tokenizer",
             tokenizer->file().c_str(), tokenizer->vocab_size(), options.vocab_size);
    return options;
}

}  // namespace hf

// Imports a folder into a run directory, which may hold a run only with `overwrite`. Returns remarks for the
// user.
inline std::vector<std::string> import_hf(const std::string& folder, const std::string& run_dir,
                                          bool overwrite, const ImportedRun::TensorsOf& tensors_of) {
    std::vector<std::string> remarks;
    std::unique_ptr<Tokenizer> tokenizer = hf::find_tokenizer(folder + "/tokenizer.json", remarks);
    Options options = hf::imported_options(folder, run_dir, tokenizer.get(), remarks);
    PublishedFiles published(folder, remarks);
    if (tokenizer) published.set_tokenizer(tokenizer->json());
    hf::Source source(folder, hf_tensors(options));
    std::vector<CheckpointTensor> tensors = tensors_of(options);
    for (CheckpointTensor& tensor : tensors) tensor.slots = {source.dtype()};
    auto numbers = match_hf_tensors(source.table(), tensors, folder);
    for (const HfTensor& theirs : source.table()) {
        if (theirs.role == HfRole::zero) source.check_zero(theirs);
        if (theirs.role == HfRole::copies || theirs.role == HfRole::may_copy) source.check_copy(theirs);
    }

    ImportedRun run(run_dir, options, overwrite, 0, tensors, published.to_json());
    for (const HfTensor& theirs : source.table()) {
        if (theirs.role == HfRole::holds)
            hf::import_tensor(source, theirs, numbers.at(theirs.ours), run.checkpoint);
    }
    run.commit(tokenizer.get());
    if (std::string damage = run.checkpoint.not_finite(); !damage.empty()) remarks.push_back(damage);
    return remarks;
}
