/*
A checkpoint -> a folder that Hugging Face transformers loads: config.json, the weights as safetensors,
generation_config.json and, if there is one, the tokenizer with its settings. Weights pass through memory in
small parts; only tensors whose order differs from ours are held whole, one at a time. No existing file is
overwritten. The files are renamed to their final names at the end, config.json last, so a folder with that
file is complete.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <climits>
#include <map>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/base/dtype.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/exchange/hf_config.h"
#include "data/exchange/hf_tensors.h"
#include "data/exchange/published.h"
#include "data/base/json.h"
#include "data/options/options.h"
#include "data/exchange/safetensors_writer.h"
#include "data/tokenizer/tokenizer.h"

namespace hf {

struct TextFile {
    const char* name;
    std::string content;
};

// Refuses a folder that has one of these files, because files of two models must not be mixed.
inline void refuse_older(const std::string& folder, const std::vector<TextFile>& texts) {
    for (const TextFile& text : texts) {
        std::string path = folder + "/" + text.name;
        if (access(path.c_str(), F_OK) == 0)
            fail("%s: already exists; remove it or name another folder", path.c_str());
    }
}

// Writes a tensor from its most precise copy in the checkpoint.
inline void export_tensor(CheckpointReader& reader, int number, const HfTensor& theirs,
                          SafetensorsWriter& writer) {
    Slot slot = Slot::weight;
    std::vector<float> held, part;
    bool reorders = theirs.order != HfOrder::straight;
    if (theirs.role != HfRole::zero) {
        if (reader.index().tensors[(size_t)number].dtype(Slot::master)) slot = Slot::master;
        if (reorders) held.resize(theirs.our_size());
        if (reorders) reader.read_floats(number, slot, theirs.our_first(), held.size(), held.data());
    }
    theirs.each_part([&](uint64_t row, uint64_t rows) {
        uint64_t first = row * theirs.columns(), count = rows * theirs.columns();
        part.assign(count, 0);
        if (reorders)
            theirs.each_element(row, rows, [&](uint64_t to, uint64_t from) { part[to] = held[from]; });
        else if (theirs.role != HfRole::zero)
            reader.read_floats(number, slot, theirs.our_first() + first, count, part.data());
        writer.append(theirs.name, first, count, part.data());
    });
}

// Returns the tokenizer.json of a tokenizer with one token per byte.
inline std::string byte_tokenizer_json() {
    TokenizerParts parts;
    for (int byte = 0; byte < 256; byte++)
        parts.vocabulary.push_back(to_byte_alphabet(std::string(1, (char)byte)));
    parts.added.push_back({Tokenizer::byte_end_of_text, "<|endoftext|>", false, false, false, true});
    parts.pre_tokenizer = byte_level_settings(false);
    parts.decoder = byte_level_settings(true);
    return tokenizer_json(parts);
}

// Without this file, AutoTokenizer would create the tokenizer of the model's family, but ours may be another.
inline nlohmann::ordered_json tokenizer_config(const std::string& tokenizer, const std::string& path,
                                               const Options& model) {
    nlohmann::ordered_json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                     {"model_max_length", model.context},
                                     {"clean_up_tokenization_spaces", false}};
    nlohmann::json json = parse_json(tokenizer, path);
    for (const auto& value : JsonObject(json, path).array("added_tokens")) {
        JsonObject token(value, path + ": added_tokens");
        if (token.integer("id", 0, INT_MAX) != model.document_end) continue;
        config["bos_token"] = token.string("content");
        config["eos_token"] = token.string("content");
    }
    return config;
}

// Returns the torch name of the weights' dtype. For fp32 weights that an import converted from fp16, this is
// still float16, unless another dtype was requested or they were trained.
inline const char* torch_dtype(const nlohmann::ordered_json& published, Dtype dtype, bool as_stored) {
    if (dtype == Dtype::bf16) return "bfloat16";
    bool half = false;
    for (const char* key : {"torch_dtype", "dtype"})
        half = half || (published.is_object() && published.value(key, nlohmann::ordered_json()) == "float16");
    return half && as_stored ? "float16" : "float32";
}

}  // namespace hf

// Files that the run was imported with are exported unchanged as long as they apply. `tokenizer_file` is the
// tokenizer.json of the run; empty: it has none. `as_stored`: no other dtype was requested.
inline void export_hf(CheckpointReader& reader, const Options& model, const std::string& tokenizer_file,
                      const std::string& folder, Dtype dtype, bool as_stored = false) {
    using Published = PublishedFiles;
    Published published(reader.index().about);
    std::string tokenizer =
        kind_of<TokenizerKind>(model.tokenizer) == TokenizerKind::bytes ? hf::byte_tokenizer_json() : "";
    if (!tokenizer_file.empty()) tokenizer = read_text(tokenizer_file);
    HfConfig::Json theirs = published.json(Published::config),
                   generation = published.json(Published::generation);
    const bool trained = reader.index().step() > 0;
    // An import takes the tokenizer's end of a text, which the config need not name.
    std::vector<int> ends;
    if (!theirs.is_null()) ends = hf_ends_of_text(theirs, INT_MAX);
    int document_end = model.document_end;
    if (!ends.empty() && !tokenizer_file.empty() && published.tell_of(tokenizer) &&
        Tokenizer::load(tokenizer_file).end_of_text() == document_end)
        document_end = ends[0];
    HfConfig::Json config =
        hf_config_json(model, hf::torch_dtype(theirs, dtype, as_stored && !trained), document_end, theirs);
    if (generation.is_null()) {
        generation = HfConfig::Json::object();
        for (const char* key : {"bos_token_id", "eos_token_id"}) {
            if (config.contains(key) && !config[key].is_null()) generation[key] = config[key];
        }
    }
    hf::keep_end(generation, document_end);
    std::vector<hf::TextFile> texts = {{Published::generation, generation.dump(2) + "\n"}};
    if (!tokenizer.empty()) {
        texts.push_back({"tokenizer.json", tokenizer});
        bool its_own = published.tell_of(tokenizer);
        std::string settings = its_own ? published.source(Published::tokenizer) : "";
        if (settings.empty())
            settings = hf::tokenizer_config(tokenizer, tokenizer_file, model).dump(2) + "\n";
        texts.push_back({Published::tokenizer, settings});
        for (const char* name : {"special_tokens_map.json", "chat_template.jinja"}) {
            std::string source = its_own ? published.source(name) : "";
            if (!source.empty()) texts.push_back({name, source});
        }
    }
    texts.push_back({Published::config, config.dump(2) + "\n"});
    hf::refuse_older(folder, texts);

    std::vector<HfTensor> table = hf_tensors(model);
    std::erase_if(table, [](const HfTensor& theirs) { return theirs.role == HfRole::may_copy; });
    std::map<std::string, int> numbers = match_hf_tensors(table, reader.index().tensors, reader.folder());
    std::vector<NamedShape> shapes;
    for (const HfTensor& theirs : table) shapes.push_back({theirs.name, theirs.shape});
    SafetensorsWriter writer(folder, shapes, dtype);
    for (const HfTensor& theirs : table)
        hf::export_tensor(reader, theirs.role == HfRole::zero ? -1 : numbers.at(theirs.ours), theirs, writer);

    // Once everything is on disk, the files are renamed to their final names, in this order.
    std::vector<std::unique_ptr<NewFile>> files;
    for (const hf::TextFile& text : texts) {
        files.push_back(std::make_unique<NewFile>(folder + "/" + text.name));
        files.back()->write(text.content.data(), text.content.size());
        files.back()->finish();
    }
    writer.commit();
    for (auto& file : files) file->commit();
}
