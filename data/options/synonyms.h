/*
Names of options in other trainers (llm.c, nanoGPT, Megatron-LM, torchtitan, transformers), for messages that
refuse an unknown option.
*/
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"  // nearest_name
#include "data/options/help.h"  // command_name
#include "data/options/values.h"

struct Synonym {
    std::string_view names;  // each between spaces
    const char* option;      // the option of this program; null: none
    const char* note = "";   // how it differs; or why there is no such option
};

constexpr Synonym synonyms[] = {
    {" lr max-lr peak-lr ", "--learning-rate"},
    {" min-lr lr-end ", "--final-learning-rate", ", a fraction of --learning-rate"},
    {" lr-schedule lr-scheduler lr-scheduler-type lr-decay-style ", "--schedule"},
    {" warmup warmup-iters lr-warmup-iters lr-warmup-steps warmup-ratio ", "--warmup-steps",
     ", a number of steps"},
    {" grad-clip clip-grad max-grad-norm ", "--gradient-clip"},
    {" adam-beta1 ", "--beta1"},
    {" adam-beta2 ", "--beta2"},
    {" adam-epsilon eps epsilon ", "--adam-eps"},
    {" optim optimizer-type ", "--optimizer"},
    {" lr-decay-iters lr-decay-steps max-lr-steps ", nullptr,
     "the learning rate decays until the last of --steps"},
    {" wd ", "--weight-decay"},
    {" batch-size micro-batch-size local-batch-size per-device-train-batch-size ", "--micro-batch",
     ", the sequences of one pass on a rank; --global-batch is for the whole step, in tokens"},
    {" global-batch-size total-batch-size train-batch-size ", "--global-batch", ", in tokens"},
    {" gradient-accumulation-steps grad-accum-steps accumulate ", "--global-batch",
     ", in tokens per step, which sets the number of micro-batches"},
    {" max-steps max-iters train-iters num-iterations num-steps iterations ", "--steps"},
    {" num-epochs num-train-epochs max-epochs ", "--epochs"},
    {" seq-len seq-length block-size max-seq-len max-length max-seq-length ", "--sequence-length"},
    {" n-layer n-layers num-layers num-hidden-layers depth ", "--layers"},
    {" n-embd d-model hidden-size hidden-dim dim embed-dim ", "--channels"},
    {" n-head n-heads num-heads num-attention-heads ", "--heads"},
    {" n-kv-heads num-kv-heads num-key-value-heads num-query-groups ", "--kv-heads"},
    {" ffn-hidden-size intermediate-size ffn-dim ", "--mlp-width"},
    {" max-position-embeddings n-ctx ", "--context"},
    {" activation hidden-act act-fn activation-function ", "--mlp"},
    {" rope-base rotary-base ", "--rope-theta"},
    {" dataset data-path data-dir train-files input-bin ", "--train-data"},
    {" val-file valid-data eval-data ", "--val-data"},
    {" output-dir out-dir save-dir checkpoint-dir save ", "--run-dir"},
    {" eval-interval eval-every eval-steps val-loss-every val-interval ", "--val-every"},
    {" save-interval save-steps checkpoint-every checkpoint-interval ", "--save-every"},
    {" log-interval logging-steps print-every ", "--log-every"},
    {" load load-checkpoint resume-from-checkpoint ", "--resume"},
    {" init-from pretrained from-pretrained finetune ", "--init"},
    {" precision bf16 fp16 fp8 amp mixed-precision dtype ", "--matmul-dtype",
     "; make PRECISION=bf16|fp32 chooses all other formats"},
    {" gradient-checkpointing activation-checkpointing recompute-activations ", "--recompute"},
    {" tensor-parallel tensor-parallel-size tensor-model-parallel-size ", "--tp"},
    {" context-parallel context-parallel-size context-parallel-degree ", "--cp"},
    {" pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size ", "--pp"},
    {" data-parallel data-parallel-size ", "--dp"},
    {" zero-stage ", "--zero"},
    {" fsdp ", "--zero", " 3"},
    {" sharding-strategy ", "--zero", ", with --shard-group for hybrid sharding"},
    {" temp ", "--temperature"},
    {" max-new-tokens max-tokens num-tokens ", "--tokens"},
    {" num-samples ", "--samples"},
    {" repeat-penalty ", "--repetition-penalty"},
    {" dropout attention-dropout hidden-dropout resid-dropout ", nullptr, "there is no dropout"},
    {" device cpu cuda ", nullptr, "make DEVICE=cpu|cuda chooses the device"},
    {" nproc nproc-per-node num-gpus devices num-processes ", nullptr,
     "mpirun -np N or train_gpt launch --ranks N starts N processes"},
    {" nnodes num-nodes ", nullptr, "mpirun --hostfile and train_gpt launch --hosts name the nodes"},
    {" num-workers dataloader-num-workers ", nullptr, "one thread reads ahead, which is enough"},
    {" wandb report-to tensorboard tensorboard-dir ", nullptr,
     "a run writes log.jsonl, and train_gpt report makes a page of it"},
    {" compile flash-attn use-flash-attn ", nullptr, "kernels are always compiled, with flash attention"},
};

// Finds the row of a name such as --batch_size; null if there is none.
inline const Synonym* find_synonym(std::string name) {
    std::ranges::replace(name, '_', '-');
    if (!name.starts_with("--")) return nullptr;
    name = " " + name.substr(2) + " ";
    auto row =
        std::ranges::find_if(synonyms, [&](const Synonym& s) { return s.names.find(name) != s.names.npos; });
    return row == std::end(synonyms) ? nullptr : row;
}

// Refuses an option that the command does not have. `argument` may include "=VALUE".
[[noreturn]] inline void refuse_unknown(const std::string& argument, Command command) {
    std::string name = argument.substr(0, argument.find('='));
    const Synonym* synonym = find_synonym(name);
    if (synonym && (!synonym->option || find_option(synonym->option, command))) {
        std::string meant = synonym->option ? "it is " + std::string(synonym->option) + " here" : "";
        fail("%s: no such option, %s%s; see train_gpt %s --help", name.c_str(), meant.c_str(), synonym->note,
             command_name(command));
    }
    if (const OptionRow* row = find_option(name); row && !row->belongs_to(command)) {
        fail("%s: not an option of train_gpt %s; see train_gpt %s --help", name.c_str(),
             command_name(command), command_name(command));
    }
    std::vector<std::string> names;
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(command) && !row.positional) names.push_back(option_name(row));
    }
    fail("%s: no such option%s; see train_gpt %s --help", printable(name).c_str(),
         nearest_name(name, names).c_str(), command_name(command));
}
