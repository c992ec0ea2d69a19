/*
The export and import commands: from a checkpoint to a model in the format of another program, and back.
*/
#pragma once

#include <cstdio>
#include <filesystem>
#include <string>
#include <unistd.h>

#include "data/checkpoint/files.h"
#include "data/launch/find_checkpoint.h"
#include "data/exchange/hf_export.h"
#include "data/exchange/hf_import.h"
#include "data/exchange/llmc_import.h"
#include "data/exchange/llmc_model.h"
#include "data/options/rules.h"

// own: the dtype of the model's parameters.
inline Dtype exported_dtype(ExportDtype dtype, Dtype own) {
    switch (dtype) {
    case ExportDtype::stored:
        return own;
    case ExportDtype::fp32:
        return Dtype::fp32;
    case ExportDtype::bf16:
        return Dtype::bf16;
    }
    __builtin_unreachable();
}

inline void export_model(const ExportOptions& command) {
    CheckpointReader reader(newest_checkpoint(command.run));
    StoredRun run = stored_run(reader);
    Options model = stored_options(run.options, run.checkpoint);
    Dtype own = *reader.index().tensors.at(0).dtype(Slot::weight);
    Dtype dtype = exported_dtype(command.dtype, own);
    bool has_file = kind_of<TokenizerKind>(model.tokenizer) == TokenizerKind::file;
    if (command.format == ExportFormat::llmc)
        export_llmc(reader, model, command.output, dtype);
    else
        export_hf(reader, model, has_file ? run.tokenizer : "", command.output, dtype,
                  command.dtype == ExportDtype::stored);
    print("%s: the weights of %s in %s\n", command.output.c_str(), reader.folder().c_str(),
          dtype_name(dtype));
    bool needs_code = command.format == ExportFormat::hf && model.local_filter;  // Yuan 2.0
    if (needs_code && access((command.output + "/yuan_hf_model.py").c_str(), F_OK) != 0)
        print("%s: copy configuration_yuan.py and yuan_hf_model.py of a published model there, which "
              "transformers needs\n",
              command.output.c_str());
}

// A folder is imported as a Hugging Face model, and a file as an llm.c model.
inline void import_model(const ImportOptions& command, const ImportedRun::TensorsOf& tensors_of) {
    const char *source = command.source.c_str(), *run = command.output.c_str();
    std::string next = text("train --init %s", run);
    std::error_code not_there;
    std::vector<std::string> remarks;
    if (std::filesystem::is_directory(command.source, not_there)) {
        remarks = import_hf(command.source, command.output, command.overwrite, tensors_of);
    } else {
        std::filesystem::path file = command.source;
        bool is_hf = file.filename() == "config.json" || file.extension() == ".safetensors" ||
                     command.source.ends_with(".safetensors.index.json");
        if (is_hf && std::filesystem::exists(file, not_there))
            fail("%s: a file of a Hugging Face model; name its folder", printable(command.source).c_str());
        LlmcImport made = import_llmc(command.source, command.output, command.overwrite, tensors_of);
        remarks = std::move(made.remarks);
        if (made.goes_on) next = text("train --resume %s --steps N --train-data FILES", run);
    }
    for (const std::string& remark : remarks) print("%s\n", remark.c_str());
    print("%s: imported from %s; next: train_gpt sample %s, train_gpt %s\n", run, source, run, next.c_str());
}
