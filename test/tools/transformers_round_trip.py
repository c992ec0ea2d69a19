#!/usr/bin/env python3
"""
Converts models to Hugging Face transformers and back. For a small random model of each family that train_gpt
has (for yuan, which transformers lacks, the model of test/golden/make_golden.py in a folder like the published):

    import    a model that transformers saved gives the same log-likelihoods here
    export    the exported model has the same weights, to the bit
    train     one step of AdamW on the same tokens, here and in PyTorch, gives the same weights, and the model
              that was trained here has the same log-likelihoods in transformers

and for configs as people edit them, a line for import and export.

    transformers_round_trip.py TRAIN_GPT TOKEN_LIKELIHOODS TOKENIZER.json [FAMILY ...]

prints a line for each, beginning with "ok" or "FAILED". test/scripts/check_transformers.sh runs it.
"""

import copy
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers import (AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPTJConfig, GPTNeoXConfig,
                          LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config,
                          SeedOssConfig)

sys.path.append(str(Path(__file__).parent.parent / "golden"))
import make_golden  # noqa: E402

PROGRAM, LIKELIHOODS, TOKENIZER = (str(Path(argument).resolve()) for argument in sys.argv[1:4])
VOCABULARY, BATCH, TIME = 61, 3, 16
RATE, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-5, 0.1, 1.0
LOGITS, WEIGHTS = 1e-4, 1e-5  # largest differences

OPENAI = dict(n_layer=2, n_embd=32, n_head=4, n_positions=64)
OTHERS = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=44,
              max_position_embeddings=64)
LLAMA = OTHERS | dict(num_key_value_heads=2, head_dim=12)
UNEVEN = LLAMA | dict(hidden_size=34, pad_token_id=None)  # transformers does not train a pad token's embedding
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0,
                   high_freq_factor=4.0, original_max_position_embeddings=16)
NEOX_ROPE = dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)

FAMILIES = {
    "gpt2": (GPT2Config, OPENAI | NO_DROPOUT | dict(n_inner=50)),
    "gpt2 untied": (GPT2Config, OPENAI | NO_DROPOUT | dict(activation_function="gelu",
                                                           tie_word_embeddings=False)),
    "llama": (LlamaConfig, LLAMA),
    "llama biased": (LlamaConfig, LLAMA | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
                                               rope_parameters=LLAMA3_ROPE)),
    "mistral": (MistralConfig, LLAMA | dict(sliding_window=5)),
    "qwen2": (Qwen2Config, LLAMA | dict(vocab_size=720, eos_token_id=0, tie_word_embeddings=True)),
    "qwen2 patterned": (Qwen2Config, LLAMA | dict(use_sliding_window=True, sliding_window=5, max_window_layers=0,
                                                  layer_types=["sliding_attention", "full_attention"])),
    "qwen3": (Qwen3Config, LLAMA | dict(vocab_size=720, eos_token_id=0)),
    "qwen3 windowed": (Qwen3Config, LLAMA | dict(use_sliding_window=True, sliding_window=5,
                                                 max_window_layers=0, tie_word_embeddings=True)),
    "qwen3 patterned": (Qwen3Config, LLAMA | dict(use_sliding_window=True, sliding_window=5, max_window_layers=0,
                                                  layer_types=["sliding_attention", "full_attention"])),
    "seed_oss": (SeedOssConfig, UNEVEN),
    "seed_oss biased": (SeedOssConfig, UNEVEN | dict(attention_out_bias=True, mlp_bias=True)),
    "gpt_neox": (GPTNeoXConfig, OTHERS | dict(rope_parameters=NEOX_ROPE)),
    "gpt_neox sequential": (GPTNeoXConfig, OTHERS | dict(use_parallel_residual=False, hidden_act="gelu_new",
                                                         tie_word_embeddings=True)),
    "gptj": (GPTJConfig, OPENAI | dict(rotary_dim=4)),
    "gptj tied": (GPTJConfig, OPENAI | dict(rotary_dim=8, n_inner=40, activation_function="gelu",
                                            tie_word_embeddings=True)),
}


def say(good, name, detail=""):
    print("ok" if good else "FAILED", name, detail, flush=True)


def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:2]))}: {result.stderr.strip() or result.returncode}")
    return result.stdout


def norms_are_one(config):
    """A parallel block has one norm here; transformers' GPT-NeoX has two."""
    return config.model_type == "gpt_neox" and config.use_parallel_residual


def random_model(config):
    """Weights that no layer could ignore unnoticed. Parameters that our model lacks are zero, or equal to another."""
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean = 0 if p.dim() == 2 or name.endswith("bias") else 1
            p.copy_(mean + (0.2 if p.dim() == 2 else 0.1) * torch.randn(p.shape, generator=generator))
            if config.model_type == "gptj" and name.endswith("bias"):
                p.zero_()
        if norms_are_one(config):
            for layer in model.gpt_neox.layers:
                layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    return model


def difference_of_likelihoods(run_dir, model, tokens):
    """The largest difference of log-likelihoods, relative to the largest logit."""
    lines = run(LIKELIHOODS, run_dir, *tokens.tolist()).strip().split("\n")
    ours = torch.tensor([[float(word) for word in line.split()] for line in lines], dtype=torch.float64)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].double()
    return ((ours - logits.log_softmax(-1)).abs().max() / logits.abs().max()).item()


def load(folder):
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    troubles = {what: names for what, names in loading.items() if names}
    if troubles:
        raise RuntimeError(f"{folder}: {troubles}")
    return model.eval()


def largest_difference(model, other):
    weights, others = model.state_dict(), other.state_dict()
    if weights.keys() != others.keys():
        raise RuntimeError(f"other tensors: {weights.keys() ^ others.keys()}")
    return max((weights[name].double() - others[name].double()).abs().max().item() for name in weights)


def train_there(model, samples):
    """One step, in float64."""
    model = copy.deepcopy(model).double()
    if norms_are_one(model.config):
        for layer in model.gpt_neox.layers:
            layer.post_attention_layernorm = layer.input_layernorm
    if model.config.model_type == "gptj":
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith("bias"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([dict(params=[p for p in trained if p.dim() == 2], weight_decay=DECAY),
                                   dict(params=[p for p in trained if p.dim() == 1], weight_decay=0)],
                                  lr=RATE, betas=BETAS, eps=EPS)
    logits = model(samples[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(trained, CLIP)
    optimizer.step()
    return model


def write_tokens(path, tokens):
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens.tolist()))


def train_here(run_dir, trained_dir, tokens, work):
    """The same step: the file holds just the samples of one batch."""
    write_tokens(work / "tokens.bin", tokens)
    run(PROGRAM, "train", "--init", run_dir, "--run-dir", trained_dir, "--train-data", work / "tokens.bin",
        "--steps", 1, "--micro-batch", BATCH, "--sequence-length", TIME, "--schedule", "constant",
        "--warmup-steps", 0, "--learning-rate", RATE, "--beta1", BETAS[0], "--beta2", BETAS[1], "--adam-eps",
        EPS, "--weight-decay", DECAY, "--gradient-clip", CLIP, "--document-end", -1)


def check_tokenizer(folder):
    text = "The cat<|endoftext|> isn't 12345 \n\n a Straße"
    theirs, ours = PreTrainedTokenizerFast(tokenizer_file=TOKENIZER), AutoTokenizer.from_pretrained(folder)
    same = theirs(text)["input_ids"] == ours(text)["input_ids"]
    say(same and ours.eos_token == "<|endoftext|>" and ours.eos_token_id == 0, "tokenizer of an export")


def check(name, work):
    config_class, settings = FAMILIES[name]
    settings = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None) | settings
    model = random_model(config_class(**settings))
    tokens = torch.randint(0, VOCABULARY, (BATCH * TIME + 1,), generator=torch.Generator().manual_seed(2))
    has_tokenizer = settings["eos_token_id"] is not None

    theirs, imported, exported = work / "theirs", work / "imported", work / "exported"
    model.save_pretrained(theirs, max_shard_size="20KB")
    if has_tokenizer:
        shutil.copy(TOKENIZER, theirs / "tokenizer.json")
    run(PROGRAM, "import", theirs, "--output", imported)
    difference = difference_of_likelihoods(imported, model, tokens[:TIME])
    say(difference < LOGITS, f"{name}: import", f"({difference:.1e})")

    run(PROGRAM, "export", imported, "--output", exported, "--dtype", "fp32")
    back = load(exported)
    same = type(back) is type(model) and largest_difference(model, back) == 0
    say(same, f"{name}: export")
    run(PROGRAM, "export", imported, "--output", work / "narrow", "--dtype", "bf16")
    narrow = load(work / "narrow")
    say(narrow.dtype == torch.bfloat16 and largest_difference(copy.deepcopy(model).bfloat16(), narrow) == 0,
        f"{name}: export in bf16")
    if has_tokenizer:
        check_tokenizer(exported)

    trained, trained_exported = work / "trained", work / "trained_exported"
    train_here(imported, trained, tokens, work)
    run(PROGRAM, "export", trained, "--output", trained_exported, "--dtype", "fp32")
    ours = load(trained_exported)
    samples = torch.stack([tokens[i * TIME:(i + 1) * TIME + 1] for i in range(BATCH)])
    difference = largest_difference(train_there(model, samples), ours)
    moved = largest_difference(model, ours)
    say(difference < WEIGHTS and moved > 50 * WEIGHTS, f"{name}: one step",
        f"({difference:.1e} of {moved:.1e})")
    difference = difference_of_likelihoods(trained, ours, tokens[:TIME])
    say(difference < LOGITS, f"{name}: export of what was trained", f"({difference:.1e})")


# Variants of configs found in practice: a family's, with keys added, changed or left out.
LLAMA3_SCALING = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LEFT_OUT = object()
EDITED = {
    "both kinds of RoPE": (LlamaConfig, LLAMA, dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0),
                                                    rope_scaling=dict(rope_type="linear", factor=2.0))),
    "older linear RoPE": (LlamaConfig, LLAMA, dict(rope_parameters=LEFT_OUT, rope_theta=7000.0,
                                                   rope_scaling=dict(type="linear", factor=2.0))),
    "linear RoPE of a part": (GPTNeoXConfig, OTHERS, dict(rope_parameters=dict(
        rope_type="linear", factor=3.0, rope_theta=500.0, partial_rotary_factor=0.5))),
    "original context at the top": (LlamaConfig, LLAMA, dict(
        rope_parameters=LEFT_OUT, rope_scaling=LLAMA3_SCALING, original_max_position_embeddings=16)),
    "no original context": (LlamaConfig, LLAMA, dict(rope_parameters=LEFT_OUT, rope_scaling=LLAMA3_SCALING)),
    "usual window": (MistralConfig, LLAMA, dict(sliding_window=LEFT_OUT, layer_types=["sliding_attention"] * 2)),
    "no window": (MistralConfig, LLAMA, dict(sliding_window=None, hidden_act="swish", eos_token_id=[5, 9],
                                             pad_token_id=3, nobody_knows=3)),
    "uneven width": (MistralConfig, LLAMA | dict(hidden_size=34), dict(sliding_window=None)),
    "gelu_accurate": (GPT2Config, OPENAI | NO_DROPOUT, dict(activation_function="gelu_accurate", _num_labels=1)),
    "gelu_python": (GPT2Config, OPENAI | NO_DROPOUT, dict(activation_function="gelu_python")),
    "gelu_python_tanh": (GPT2Config, OPENAI | NO_DROPOUT, dict(activation_function="gelu_python_tanh")),
    "usual activation": (GPT2Config, OPENAI | NO_DROPOUT, dict(activation_function=LEFT_OUT)),
    "usual sizes of qwen3": (Qwen3Config, LLAMA | dict(num_attention_heads=32, head_dim=128, num_key_value_heads=32),
                             dict.fromkeys(["head_dim", "num_key_value_heads", "rms_norm_eps", "hidden_act"],
                                           LEFT_OUT)),
    "usual sizes of qwen2": (Qwen2Config, OTHERS | dict(hidden_size=64, num_attention_heads=32, num_key_value_heads=32),
                             dict.fromkeys(["num_key_value_heads", "rms_norm_eps", "hidden_act"], LEFT_OUT)
                             | dict(attention_bias=False, use_mrope=False)),
    "usual values of llama": (LlamaConfig, LLAMA | dict(num_key_value_heads=4),
                              dict(num_key_value_heads=None, rms_norm_eps=LEFT_OUT, hidden_act=LEFT_OUT,
                                   layer_types=["sliding_attention"] * 2, sliding_window=3)),
}


def check_edited(name, work):
    """The same log-likelihoods, and the weights and the config come out as they went in."""
    config_class, settings, changes = EDITED[name]
    settings = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None) | settings
    random_model(config_class(**settings)).save_pretrained(work / "theirs")
    path = work / "theirs" / "config.json"
    config = json.loads(path.read_text()) | changes
    config = {key: value for key, value in config.items() if value is not LEFT_OUT}
    path.write_text(json.dumps(config))
    model = load(work / "theirs")
    run(PROGRAM, "import", work / "theirs", "--output", work / "run")
    run(PROGRAM, "export", work / "run", "--output", work / "ours")
    tokens = torch.randint(0, VOCABULARY, (TIME,), generator=torch.Generator().manual_seed(2))
    difference = difference_of_likelihoods(work / "run", model, tokens)
    same = json.loads((work / "ours" / "config.json").read_text()) == config
    back = load(work / "ours")
    same &= type(back) is type(model) and largest_difference(model, back) == 0
    say(difference < LOGITS and same, name, f"({difference:.1e})")


def check_bytes(work):
    """A run that began here, and whose tokens are bytes."""
    text = "A byte is a token: \u00e9\u4e16 \n\n"
    tokens = torch.tensor(list(text.encode()))
    write_tokens(work / "tokens.bin", tokens.repeat(4))
    run(PROGRAM, "train", "--model", "tiny", "--layers", 2, "--channels", 32, "--mlp-width", 40, "--context",
        32, "--steps", 3, "--micro-batch", 2, "--train-data", work / "tokens.bin", "--run-dir", work / "run")
    run(PROGRAM, "export", work / "run", "--output", work / "out")
    model, tokenizer = load(work / "out"), AutoTokenizer.from_pretrained(work / "out")
    difference = difference_of_likelihoods(work / "run", model, tokens)
    say(difference < LOGITS, "bytes: export", f"({difference:.1e})")
    ids = tokenizer(text)["input_ids"]
    say(ids == tokens.tolist() and tokenizer.decode(ids) == text and tokenizer.eos_token_id == 256,
        "bytes: tokenizer")


def check_yuan(work):
    settings = make_golden.CONFIGS["yuan"] | dict(channels=32, heads=4, kv_heads=4, head_size=8, mlp_width=44)
    model = make_golden.Yuan(settings).double().eval()
    make_golden.randomize(model, np.random.default_rng(1))
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    config = dict(model_type="yuan", num_hidden_layers=2, hidden_size=32, num_attention_heads=4,
                  intermediate_size=44, vocab_size=settings["vocab_size"], max_position_embeddings=64,
                  hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=True, causal_mask=True)
    folder, imported, exported = work / "theirs", work / "imported", work / "exported"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    run(PROGRAM, "import", folder, "--output", imported)
    tokens = torch.randint(0, settings["vocab_size"], (TIME,), generator=torch.Generator().manual_seed(2))
    with_logits = lambda tokens: SimpleNamespace(logits=model(tokens, torch.zeros(tokens.shape)))
    difference = difference_of_likelihoods(imported, with_logits, tokens)
    say(difference < LOGITS, "yuan: import", f"({difference:.1e})")
    run(PROGRAM, "export", imported, "--output", exported, "--dtype", "fp32")
    back = safetensors.torch.load_file(exported / "model.safetensors")
    same = back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    written = json.loads((exported / "config.json").read_text())
    say(same and all(written[key] == value for key, value in config.items()), "yuan: export")


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    others = {"bytes": check_bytes, "yuan": check_yuan}
    for name in sys.argv[4:] or [*FAMILIES, *EDITED, *others]:
        with tempfile.TemporaryDirectory() as work:
            try:
                if name in others:
                    others[name](Path(work))
                else:
                    (check_edited if name in EDITED else check)(name, Path(work))
            except (RuntimeError, OSError, ValueError) as error:
                say(False, name, str(error))


if __name__ == "__main__":
    main()
