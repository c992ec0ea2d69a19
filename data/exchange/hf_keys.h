/*
Keys of a config.json that none of our model families reads, and what they do to a model.
*/
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/json.h"

namespace hf {

enum class OtherKey {
    none,     // no effect on what a model computes: its origin, how to train it or how to sample from it
    changes,  // it changes what a model computes, unless it is null, false, 0 or empty
    factor    // it multiplies something, so that 1 changes nothing
};

// Keys whose names begin with "_" are transformers' own notes, and are not listed.
// clang-format off
inline const std::map<std::string_view, OtherKey>& other_keys() {
    static const std::map<std::string_view, OtherKey> table = [] {
        std::map<std::string_view, OtherKey> keys;
        for (const char* key : {
            "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
            "attn_pdrop", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
            "cache_implementation", "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id",
            "diversity_penalty", "do_sample", "dropout", "dtype", "early_stopping", "embd_pdrop",
            "encoder_no_repeat_ngram_size", "eod_token", "eod_token_id", "eos_token_id",
            "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
            "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
            "id2label", "initializer_range", "is_decoder", "is_llama_config", "keys_to_ignore_at_inference",
            "label2id", "length_penalty", "mask_token_id", "max_length", "max_new_tokens", "min_length",
            "model_max_length", "n_ctx", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
            "num_return_sequences", "output_attentions", "output_hidden_states", "output_past",
            "output_scores", "pad_token_id", "padding_side", "penalty_alpha", "prefix", "pretraining_tp",
            "problem_type", "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty",
            "reset_attention_mask", "reset_position_ids", "resid_pdrop", "residual_dropout", "return_dict",
            "return_dict_in_generate", "sep_token", "sep_token_id", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
            "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
            "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
            "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
            "use_bfloat16", "use_cache", "use_flash_attention", "use_loss_mask"})
            keys[key] = OtherKey::none;
        for (const char* key : {
            "add_cross_attention", "alibi", "attention_bias", "attention_chunk_size",
            "attn_logit_softcapping", "clip_qkv", "cross_attention_hidden_size", "final_logit_softcapping",
            "full_attention", "is_encoder_decoder", "kv_lora_rank", "layer_types", "mlp_bias", "moe_config",
            "multi_query", "n_routed_experts", "no_rope_layers", "num_experts", "num_experts_per_tok",
            "num_local_experts", "pruned_heads", "q_lora_rank", "qk_layernorm", "quantization_config",
            "query_pre_attn_scalar", "rope_interleaved", "rope_parameters", "rope_scaling", "rope_theta",
            "scale_attn_by_inverse_layer_idx", "sliding_attention", "sliding_window", "use_moe",
            "use_mrope", "use_qk_norm", "use_shareqk", "use_sliding_window"})
            keys[key] = OtherKey::changes;
        for (const char* key : {
            "attention_multiplier", "embedding_multiplier", "logit_scale", "logits_scaling",
            "partial_rotary_factor", "residual_multiplier", "scale_depth", "scale_emb"})
            keys[key] = OtherKey::factor;
        return keys;
    }();
    return table;
}
// clang-format on

// Handles the keys of an object that no family has read: each is refused, ignored, or added to `unknown`.
inline void read_others(JsonObject& object, const char* remedy, std::vector<std::string>& unknown) {
    for (const std::string& key : object.unread()) {
        auto known = other_keys().find(key);
        if (known == other_keys().end()) {
            if (!key.starts_with('_')) unknown.push_back(key);
        } else if (known->second == OtherKey::changes ||
                   (known->second == OtherKey::factor && object.get(key) != 1)) {
            object.without(key, remedy);
        }
    }
}

}  // namespace hf
