#!/usr/bin/env python3
"""
Writes the golden runs beside this script: what PyTorch computes for nine tiny models, for our trainer to
reproduce.

    pip install torch transformers numpy          (CPU builds suffice; nothing else is downloaded)
    python3 test/golden/make_golden.py [model ...]

gpt2, llama, llama3, qwen2 and qwen are the models of Hugging Face transformers. parallel and yuan, which have no
counterpart there, are written below with PyTorch's own layers; yuan after the formulas of "YUAN 2.0: A
Large Language Model with Localized Filtering-based Attention", with the tensors of the published files,
and on rows of several documents. ngram is a llama of transformers with n-gram memory before some of its
layers, on rows of several documents too; the memory, its hashes and its tables are written below after the
comments of kernels/ngram_gate.cuh, kernels/table_rows.cuh and data/tokens/ngrams.h. Each model is trained for
ten steps by torch.optim.AdamW with clip_grad_norm_; muon, a small llama, by torch.optim.Muon, whose
Newton-Schulz steps are then in float64 like everything else; and the rows of tables by row-wise AdaGrad.
Everything is computed in float64 from weights that are exact in float32, and stored as float32
(transformers computes the angles of RoPE in float32, whatever the model). Running the script again gives
the same bytes.

A file is: 8 bytes "GOLDEN\\0\\0", the length of the JSON (u64, little endian), the JSON, padded with spaces
so that the data begins at a multiple of 64 bytes, and the data. The JSON holds the config (fields of
ModelConfig), the optimizer settings, the loss and the unclipped gradient norm of every step, and a table of
tensors by kind: `weight` (initial), `gradient` (step 1, unclipped), `final` (after the last step), `logits`
(step 1), `tokens` and `targets` (all steps; -1 is ignored by the loss). For yuan also `doc_start` (the
position at which each token's document begins), `whole_logits` (step 1, each row one document) and
`published` (the initial weights under the names, and in the order, of the published files); for ngram
`doc_start` and `whole_logits`, `lookups` (all steps: the rows that each token looks up), `rows` (the
numbers of those that occur, the same in all tables), and for each table these rows' `row_gradient` (step 1,
unclipped), `row_values` and `row_squares` (both after the last step). Offsets are bytes from the start of
the data. Names and layouts are ours: linear weights are (out, in); qkv is the rows of [query heads | key
heads | value heads], and fc of a SwiGLU is the rows of [gate | up].

A caution for comparisons: the gradient of GPT-2's key biases is zero in exact arithmetic (softmax ignores a
constant), so there AdamW divides rounding noise by itself, and `final` means nothing beyond learning_rate *
steps.
"""

import functools
import json
import struct
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

BATCH, TIME, STEPS, SEED = 2, 12, 10, 1
MUON = dict(momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")  # as large as AdamW's updates
NGRAM = dict(ngram_lr=0.02, seed=2**40 + 7)  # more than 32 bits
OPTIMIZER = dict(learning_rate=2e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

# The fields of ModelConfig; each model states what differs.
CONFIG = dict(layers=2, channels=24, heads=4, kv_heads=4, head_size=6, mlp_width=50, vocab_size=61,
              context=16, norm="layernorm", norm_eps=1e-5, position="learned", rope_theta=10000.0,
              rope_dims=0, rope_scaling=1.0, rope_low_frequency=1.0, rope_high_frequency=4.0,
              rope_original_context=8192, mlp="gelu", bias=True, window=0, block="sequential",
              tie_embeddings=True, qk_norm=False)

CONFIGS = {
    "gpt2": CONFIG,
    "llama": CONFIG | dict(channels=32, kv_heads=2, head_size=8, mlp_width=44, norm="rmsnorm",
                           position="rope", rope_dims=8, mlp="swiglu", bias=False, tie_embeddings=False),
    "qwen": CONFIG | dict(kv_heads=2, head_size=16, mlp_width=40, norm="rmsnorm", norm_eps=1e-6,
                          position="rope", rope_theta=1e6, rope_dims=16, mlp="swiglu", bias=False,
                          qk_norm=True),
    # Slower waves would leave key biases a gradient that is hardly more than rounding.
    "qwen2": CONFIG | dict(channels=16, kv_heads=2, head_size=4, mlp_width=20, vocab_size=31, norm="rmsnorm",
                           norm_eps=1e-6, position="rope", rope_theta=30.0, rope_dims=4, mlp="swiglu",
                           bias=False, qkv_bias=True),
    "parallel": CONFIG | dict(heads=3, kv_heads=1, head_size=8, mlp_width=52, position="rope", rope_dims=4,
                              mlp="gelu-exact", bias=False, window=5, block="parallel"),
    "muon": CONFIG | dict(layers=1, channels=8, heads=2, kv_heads=1, head_size=4, mlp_width=10,
                          vocab_size=23, norm="rmsnorm", position="rope", rope_dims=4, mlp="swiglu",
                          bias=False),
    "yuan": CONFIG | dict(channels=8, heads=2, kv_heads=2, head_size=4, mlp_width=12, vocab_size=31,
                          norm="rmsnorm", norm_eps=1e-6, position="rope", rope_dims=4, mlp="swiglu",
                          bias=False, local_filter=True),
    "ngram": CONFIG | dict(layers=3, channels=16, heads=2, kv_heads=1, head_size=8, mlp_width=20,
                           vocab_size=31, norm="rmsnorm", position="rope", rope_dims=8, mlp="swiglu",
                           bias=False, ngram="2,3", ngram_heads=2, ngram_width=8, ngram_rows=211,
                           ngram_layers="0,2"),
}
# These settings keep, blend, divide and divide the four frequencies of a head.
CONFIGS["llama3"] = CONFIGS["llama"] | dict(context=256, rope_scaling=4.0, rope_original_context=128)
# Between the gradient norms of a run, so that some of its steps are clipped.
GRADIENT_CLIP = {"gpt2": 2.8, "llama": 6.3, "llama3": 5.4, "qwen": 4.2, "qwen2": 2.9, "parallel": 2.9,
                 "muon": 1.35, "yuan": 1.9, "ngram": 2.9}
IGNORED_TARGETS = {"llama3": 0.25}  # share of the targets
DOCUMENT_ENDS = {"yuan": 0.2, "ngram": 0.2}  # share of the tokens that end one


# A model is a function from a config to (module, names), where names maps each of our tensors to the module's
# parameters that make it, stacked by rows, or by a function that follows them. Modules return logits, or an
# object that has them.


def gpt2(c):
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=c["layers"], n_embd=c["channels"], n_head=c["heads"], n_inner=c["mlp_width"],
        vocab_size=c["vocab_size"], n_positions=c["context"], layer_norm_epsilon=c["norm_eps"],
        activation_function="gelu_new", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        bos_token_id=None, eos_token_id=None))
    ours = {"ln_1": "norm1", "attn.c_attn": "qkv", "attn.c_proj": "attproj", "ln_2": "norm2",
            "mlp.c_fc": "fc", "mlp.c_proj": "fcproj"}
    names = {"wte": ["transformer.wte.weight"], "wpe": ["transformer.wpe.weight"]}
    for l in range(c["layers"]):
        for theirs, name in ours.items():
            for part in "weight", "bias":
                names[f"layers.{l}.{name}.{part}"] = [f"transformer.h.{l}.{theirs}.{part}"]
    for part in "weight", "bias":
        names[f"normf.{part}"] = [f"transformer.ln_f.{part}"]
    return model, names


def llama(c):
    return like_llama(c, LlamaConfig, LlamaForCausalLM)


def qwen2(c):
    return like_llama(c, Qwen2Config, Qwen2ForCausalLM)


def qwen(c):
    return like_llama(c, Qwen3Config, Qwen3ForCausalLM)


def like_llama(c, config_class, model_class):
    rope = dict(rope_type="default", rope_theta=c["rope_theta"])
    if c["rope_scaling"] != 1:
        rope |= dict(rope_type="llama3", factor=c["rope_scaling"], low_freq_factor=c["rope_low_frequency"],
                     high_freq_factor=c["rope_high_frequency"],
                     original_max_position_embeddings=c["rope_original_context"])
    model = model_class(config_class(
        num_hidden_layers=c["layers"], hidden_size=c["channels"], num_attention_heads=c["heads"],
        num_key_value_heads=c["kv_heads"], head_dim=c["head_size"], intermediate_size=c["mlp_width"],
        vocab_size=c["vocab_size"], max_position_embeddings=c["context"], rms_norm_eps=c["norm_eps"],
        tie_word_embeddings=c["tie_embeddings"], rope_parameters=rope, use_cache=False,
        bos_token_id=None, eos_token_id=None))
    names = {"wte": ["model.embed_tokens.weight"], "normf.weight": ["model.norm.weight"]}
    if not c["tie_embeddings"]:
        names["head.weight"] = ["lm_head.weight"]
    ours = {"norm1": ["input_layernorm"], "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attproj": ["self_attn.o_proj"], "norm2": ["post_attention_layernorm"],
            "fc": ["mlp.gate_proj", "mlp.up_proj"], "fcproj": ["mlp.down_proj"]}
    if c["qk_norm"]:
        ours |= {"qnorm": ["self_attn.q_norm"], "knorm": ["self_attn.k_norm"]}
    for l in range(c["layers"]):
        for name, theirs in ours.items():
            names[f"layers.{l}.{name}.weight"] = [f"model.layers.{l}.{t}.weight" for t in theirs]
        if c.get("qkv_bias"):
            names[f"layers.{l}.qkv.bias"] = [f"model.layers.{l}.{t}.bias" for t in ours["qkv"]]
    return model, names


def rms_norm(self, x):
    """The forward of transformers' RMSNorms, which would round to float32."""
    return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


LlamaRMSNorm.forward = Qwen2RMSNorm.forward = Qwen3RMSNorm.forward = rms_norm


def window_mask(time, window):
    """(T, T) of bool: position i sees j where max(0, i - window + 1) <= j <= i."""
    return torch.ones(time, time, dtype=torch.bool).tril().triu(1 - window)


class ParallelBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_size = c["heads"], c["kv_heads"], c["head_size"]
        self.window, self.rope_dims, self.rope_theta = c["window"], c["rope_dims"], c["rope_theta"]
        C, qkv_rows = c["channels"], (self.heads + 2 * self.kv_heads) * self.head_size
        self.norm1 = nn.LayerNorm(C, eps=c["norm_eps"], bias=False)
        self.qkv = nn.Linear(C, qkv_rows, bias=False)
        self.attproj = nn.Linear(self.heads * self.head_size, C, bias=False)
        self.fc = nn.Linear(C, c["mlp_width"], bias=False)
        self.fcproj = nn.Linear(c["mlp_width"], C, bias=False)

    def attention(self, x):
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_size).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        frequency = self.rope_theta ** (-torch.arange(0, self.rope_dims, 2).double() / self.rope_dims)
        angle = torch.outer(torch.arange(T).double(), frequency).repeat(1, 2)[None]
        q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=window_mask(T, self.window), enable_gqa=True)
        return self.attproj(out.transpose(1, 2).reshape(B, T, -1))

    def forward(self, x):
        n = self.norm1(x)
        return x + self.attention(n) + self.fcproj(F.gelu(self.fc(n)))


class Parallel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c["vocab_size"], c["channels"])
        self.layers = nn.ModuleList(ParallelBlock(c) for _ in range(c["layers"]))
        self.normf = nn.LayerNorm(c["channels"], eps=c["norm_eps"], bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.layers:
            x = block(x)
        return self.normf(x) @ self.wte.weight.T


def parallel(c):
    model = Parallel(c)
    return model, {name.replace("wte.weight", "wte"): [name] for name, _ in model.named_parameters()}


class RMSNorm(nn.Module):
    def __init__(self, C, eps):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(C)), eps

    forward = rms_norm


class LocalFilter(nn.Module):
    """c[t] = A0 x[t-1] + A1 x[t] + a, y[t] = B0 c[t-1] + B1 c[t] + b, and the norm of y + x, from which
    queries and keys are computed. Before the first token of a document, x and c are zero."""

    def __init__(self, c):
        super().__init__()
        C = c["channels"]
        self.conv1 = nn.Conv2d(C, C // 2, (2, 1))
        self.conv2 = nn.Conv2d(C // 2, C, (2, 1))
        self.output_layernorm = RMSNorm(C, c["norm_eps"])

    @staticmethod
    def convolution(layer, x, first):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1].masked_fill(first[..., None], 0)
        tap0, tap1 = layer.weight[:, :, 0, 0], layer.weight[:, :, 1, 0]
        out = before @ tap0.T + x @ tap1.T + layer.bias
        if not first[:, 1:].any():  # then it is PyTorch's own convolution
            padded = F.pad(x, (0, 0, 1, 0)).transpose(1, 2)[..., None]
            assert torch.allclose(layer(padded)[..., 0].transpose(1, 2), out)
        return out

    def forward(self, x, first):
        c = self.convolution(self.conv1, x, first)
        return self.output_layernorm(self.convolution(self.conv2, c, first) + x)


class YuanAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.head_size, self.rope_theta = c["heads"], c["head_size"], c["rope_theta"]
        C, A = c["channels"], self.heads * self.head_size
        self.lf_gate = LocalFilter(c)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, A, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(A, C, bias=False)

    def forward(self, x, doc_start):
        B, T, _ = x.shape
        position = torch.arange(T)
        z = self.lf_gate(x, position == doc_start)
        # the rows of both make one matrix, which has the query of each head with its key
        qk = torch.cat([self.q_proj(z), self.k_proj(z)], -1).view(B, T, self.heads, 2, self.head_size)
        q, k, v = (x.transpose(1, 2) for x in (*qk.unbind(3), self.v_proj(x).view(B, T, self.heads, -1)))
        frequency = self.rope_theta ** (-torch.arange(0, self.head_size, 2).double() / self.head_size)
        angle = torch.outer(position.double(), frequency).repeat(1, 2)[None]
        q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
        seen = (position[None] <= position[:, None]) & (position >= doc_start[..., None])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class YuanMlp(nn.Module):
    """up_proj is passed through SiLU: in the published files the two names are swapped."""

    def __init__(self, c):
        super().__init__()
        C, F = c["channels"], c["mlp_width"]
        self.up_proj, self.gate_proj = (nn.Linear(C, F, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(F, C, bias=False)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * F.silu(self.up_proj(x)))


class YuanBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c["channels"], c["norm_eps"])
        self.self_attn = YuanAttention(c)
        self.post_attention_layernorm = RMSNorm(c["channels"], c["norm_eps"])
        self.mlp = YuanMlp(c)

    def forward(self, x, doc_start):
        x = x + self.self_attn(self.input_layernorm(x), doc_start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Yuan(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["channels"])
        self.model.layers = nn.ModuleList(YuanBlock(c) for _ in range(c["layers"]))
        self.model.norm = RMSNorm(c["channels"], c["norm_eps"])

    def forward(self, tokens, doc_start):
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, doc_start)
        return self.model.norm(x) @ self.model.embed_tokens.weight.T


def yuan(c):
    def taps(weight):
        return torch.cat([weight[:, :, 0, 0], weight[:, :, 1, 0]])

    def queries_keys_values(rows):
        qk, v = rows.split([2 * c["channels"], c["channels"]])
        q, k = qk.view(c["heads"], 2, c["head_size"], -1).unbind(1)
        return torch.cat([q.flatten(0, 1), k.flatten(0, 1), v])

    ours = {"norm1.weight": ["input_layernorm.weight"],
            "filter1.weight": ["self_attn.lf_gate.conv1.weight", taps],
            "filter1.bias": ["self_attn.lf_gate.conv1.bias"],
            "filter2.weight": ["self_attn.lf_gate.conv2.weight", taps],
            "filter2.bias": ["self_attn.lf_gate.conv2.bias"],
            "filternorm.weight": ["self_attn.lf_gate.output_layernorm.weight"],
            "qkv.weight": [*(f"self_attn.{x}_proj.weight" for x in "qkv"), queries_keys_values],
            "attproj.weight": ["self_attn.o_proj.weight"],
            "norm2.weight": ["post_attention_layernorm.weight"],
            "fc.weight": ["mlp.up_proj.weight", "mlp.gate_proj.weight"],
            "fcproj.weight": ["mlp.down_proj.weight"]}
    names = {"wte": ["model.embed_tokens.weight"], "normf.weight": ["model.norm.weight"]}
    for l in range(c["layers"]):
        for name, theirs in ours.items():
            names[f"layers.{l}.{name}"] = [t if callable(t) else f"model.layers.{l}.{t}" for t in theirs]
    return Yuan(c), names


def philox(key, counter):
    """The four numbers of 32 bits of Philox4x32-10."""
    x, k = [counter & 0xffffffff, counter >> 32, 0, 0], [key & 0xffffffff, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k[0], b & 0xffffffff, a >> 32 ^ x[3] ^ k[1], a & 0xffffffff]
        k = [k[0] + 0x9E3779B9 & 0xffffffff, k[1] + 0xBB67AE85 & 0xffffffff]
    return x


# The authors publish these numbers for a key and a counter of zeros.
assert philox(0, 0) == [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]


def random_key(seed, name):
    fnv = 0xcbf29ce484222325
    for byte in name.encode():
        fnv = (fnv ^ byte) * 0x100000001b3 % 2**64
    high, low, *_ = philox(seed, fnv)
    return high << 32 | low


class NgramHash:
    def __init__(self, c, seed):
        primes = (n for n in range(c["ngram_rows"] // c["ngram_heads"], 1, -1)
                  if all(n % divisor for divisor in range(2, n)))
        self.heads, self.rows = [], 0  # heads: tokens, first row, rows, and the factor of each token
        for tokens in map(int, c["ngram"].split(",")):
            for _ in range(c["ngram_heads"]):
                factors = [random_key(seed, f"n-gram head {len(self.heads)} token {back}") | 1
                           for back in range(tokens)]
                self.heads.append((tokens, self.rows, next(primes), factors))
                self.rows += self.heads[-1][2]

    def look_up(self, tokens, doc_start):
        """(B, T, heads): the rows of each token."""
        rows = np.empty((*tokens.shape, len(self.heads)), "<i4")
        for b, t in np.ndindex(*tokens.shape):
            document = tokens[b, doc_start[b, t]:t + 1].tolist()
            for head, (length, first, count, factors) in enumerate(self.heads):
                mix = 0
                for token, factor in zip(reversed(document[-length:]), factors):
                    mix ^= (token + 1) * factor % 2**64
                mix = (mix ^ mix >> 33) * 0xff51afd7ed558ccd % 2**64
                rows[b, t, head] = first + (mix ^ mix >> 33) % count
        return rows


def new_table(rows, W, key):
    """(rows, W): uniform numbers with a standard deviation of 0.02, like the normal initial values of other weights."""
    bits = np.array([philox(key, block) for block in range(-(-rows * W // 4))]).flatten()[:rows * W]
    symmetric = 2 * ((bits >> 8) * 2.0**-24) - 1  # exact in float32
    values = np.float32(0.02) * np.float32(1.7320508) * symmetric.astype(np.float32)
    return torch.from_numpy(values.reshape(rows, W)).double().requires_grad_()


class NgramMemory(nn.Module):
    """Adds the looked-up values to x, each gated by how well its key agrees with x."""

    def __init__(self, c):
        super().__init__()
        inputs = len(c["ngram"].split(",")) * c["ngram_heads"] * c["ngram_width"]
        self.norm = RMSNorm(c["channels"], c["norm_eps"])
        self.kv = nn.Linear(inputs, 2 * c["channels"], bias=False)

    def forward(self, x, found):
        key, value = self.kv(found.flatten(2)).chunk(2, -1)
        key = F.rms_norm(key, key.shape[-1:], eps=self.norm.variance_epsilon)
        score = (self.norm(x) * key).sum(-1, keepdim=True) / key.shape[-1] ** 0.5
        return x + score.sigmoid() * value


class NgramLlama(nn.Module):
    """Its tables are not parameters: `tables` maps the name of each to all its rows."""

    def __init__(self, c):
        super().__init__()
        self.llama, self.names = llama(c)
        self.hash = NgramHash(c, NGRAM["seed"])
        self.memory = nn.ModuleDict({layer: NgramMemory(c) for layer in c["ngram_layers"].split(",")})
        self.tables = {}
        for layer, memory in self.memory.items():
            name = f"layers.{layer}.ngram"
            self.tables[name] = new_table(self.hash.rows, c["ngram_width"], random_key(NGRAM["seed"], name))
            hook = functools.partial(self.remember, memory, self.tables[name])
            self.llama.model.layers[int(layer)].register_forward_pre_hook(hook)

    def remember(self, memory, table, _, args):
        x, *others = args
        return memory(x, table[self.looked_up]), *others

    def forward(self, tokens, doc_start):
        self.looked_up = torch.from_numpy(self.hash.look_up(tokens.numpy(), doc_start.int().numpy())).long()
        position = torch.arange(tokens.shape[1])
        seen = (position[None] <= position[:, None]) & (position >= doc_start[..., None])
        return self.llama(tokens, attention_mask=seen[:, None])


def ngram(c):
    model = NgramLlama(c)
    names = {name: [f"llama.{part}" for part in parts] for name, parts in model.names.items()}
    for layer in model.memory:
        names[f"layers.{layer}.ngram.norm.weight"] = [f"memory.{layer}.norm.weight"]
        names[f"layers.{layer}.ngram.weight"] = [f"memory.{layer}.kv.weight"]
    return model, names


class RowwiseAdaGrad(torch.optim.Optimizer):
    def __init__(self, tables, lr, eps):
        super().__init__(tables, dict(lr=lr, eps=eps))
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table] = torch.zeros(len(table)).double()  # of each row, the sum of squares

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table] += table.grad.square().mean(-1)
                root = self.state[table].sqrt()[:, None]
                table -= group["lr"] * table.grad / (root + group["eps"])


MODELS = {"gpt2": gpt2, "llama": llama, "llama3": llama, "qwen": qwen, "qwen2": qwen2, "parallel": parallel,
          "muon": llama, "yuan": yuan, "ngram": ngram}


def randomize(model, random):
    """Weights that no layer could ignore unnoticed: biases are not 0 and norm weights are not 1."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean, deviation = (0, 0.2) if p.dim() >= 2 else (0, 0.1) if name.endswith("bias") else (1, 0.2)
            values = (mean + deviation * random.standard_normal(tuple(p.shape))).astype(np.float32)
            p.copy_(torch.from_numpy(values))


def collect(model, names, read):
    """Our tensors, made from read(parameter) of the module's parameters."""
    transposed = isinstance(model, GPT2LMHeadModel)  # its linear layers are Conv1D, with (in, out) weights
    tensors = {}
    for name, parts in names.items():
        *parts, arrange = parts if callable(parts[-1]) else [*parts, lambda rows: rows]
        rows = arrange(torch.cat([read(model.get_parameter(part)).detach() for part in parts]))
        is_linear = rows.dim() == 2 and name.startswith("layers.")
        tensors[name] = (rows.T if transposed and is_linear else rows).numpy().astype("<f4")
    return tensors


def run(name):
    config = CONFIGS[name]
    random = np.random.default_rng([SEED, *name.encode()])
    model, names = MODELS[name](config)
    model.double().eval()
    randomize(model, random)
    used = [part for parts in names.values() for part in parts if isinstance(part, str)]
    assert len(used) == len(list(model.parameters()))

    # The square makes some tokens frequent, and leaves others out.
    stream = (random.random((STEPS, BATCH, TIME + 1)) ** 2 * config["vocab_size"]).astype("<i4")
    tokens, targets = stream[..., :-1].copy(), stream[..., 1:].copy()
    targets[random.random(targets.shape) < IGNORED_TARGETS.get(name, 0)] = -1
    documents = {}
    if name in DOCUMENT_ENDS:
        ends = random.random(tokens.shape)[..., 1:] < DOCUMENT_ENDS[name]
        starts = np.pad(ends * np.arange(1, TIME), ((0, 0), (0, 0), (1, 0)))
        documents = {"doc_start": {"doc_start": np.maximum.accumulate(starts, -1).astype("<i4")}}

    o = OPTIMIZER | dict(gradient_clip=GRADIENT_CLIP[name])
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers = []
    if name == "muon":
        of_blocks = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
        matrices = [p for p in matrices if all(p is not other for other in of_blocks)]
        optimizers.append(torch.optim.Muon(of_blocks, lr=o["learning_rate"],
                                           weight_decay=o["weight_decay"], **MUON))
        o["kind"] = "muon"
    tables = getattr(model, "tables", {})
    if tables:
        o |= NGRAM
        adagrad = RowwiseAdaGrad(tables.values(), o["ngram_lr"], o["eps"])
        optimizers.append(adagrad)
        starts = documents["doc_start"]["doc_start"]
        lookups = [model.hash.look_up(tokens[step], starts[step]) for step in range(STEPS)]
        rows = np.unique(lookups)
    optimizers.append(torch.optim.AdamW([dict(params=matrices, weight_decay=o["weight_decay"]),
                                         dict(params=vectors, weight_decay=0)],
                                        lr=o["learning_rate"], betas=(o["beta1"], o["beta2"]), eps=o["eps"]))
    kinds = {"weight": collect(model, names, lambda p: p)} | documents
    if documents:
        whole = model(torch.from_numpy(tokens[0]).long(), torch.zeros(tokens[0].shape))
        whole = getattr(whole, "logits", whole)
        kinds["whole_logits"] = {"logits": whole.detach().numpy().astype("<f4")}
    if name == "yuan":
        published = {name: [name] for name, _ in model.named_parameters()}
        kinds["published"] = collect(model, published, lambda p: p)
    of_rows = lambda read: {name: read(table).detach().numpy()[rows].astype("<f4")
                            for name, table in tables.items()}
    losses, gradient_norms = [], []
    for step in range(STEPS):
        out = model(torch.from_numpy(tokens[step]).long(),
                    *(torch.from_numpy(starts["doc_start"][step]) for starts in documents.values()))
        logits = getattr(out, "logits", out)
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets[step]).long().flatten(),
                               ignore_index=-1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if step == 0:
            kinds["gradient"] = collect(model, names, lambda p: p.grad)
            kinds["logits"] = {"logits": logits.detach().numpy().astype("<f4")}
            if tables:
                kinds["row_gradient"] = of_rows(lambda table: table.grad)
        losses.append(loss.item())
        trained = [*model.parameters(), *tables.values()]
        gradient_norms.append(nn.utils.clip_grad_norm_(trained, o["gradient_clip"]).item())
        with mock.patch.object(torch, "bfloat16", torch.float64):  # which Muon would round to
            for optimizer in optimizers:
                optimizer.step()
    kinds |= {"final": collect(model, names, lambda p: p), "tokens": {"tokens": tokens},
              "targets": {"targets": targets}}
    if tables:
        kinds |= {"lookups": {"lookups": np.array(lookups)}, "rows": {"rows": rows.astype("<i4")},
                  "row_values": of_rows(lambda table: table),
                  "row_squares": of_rows(lambda table: adagrad.state[table])}
    return config, o, losses, gradient_norms, kinds


def write(path, config, optimizer, losses, gradient_norms, kinds):
    table, data = [], b""
    for kind, tensors in kinds.items():
        for name, array in tensors.items():
            table.append(dict(name=name, kind=kind, dtype={"f": "f32", "i": "i32"}[array.dtype.kind],
                              shape=array.shape, offset=len(data)))
            data += array.tobytes()
    digits = lambda values: [float(f"{v:.10g}") for v in values]
    header = json.dumps(dict(config=config, batch=BATCH, time=TIME, steps=STEPS, optimizer=optimizer,
                             losses=digits(losses), gradient_norms=digits(gradient_norms), tensors=table))
    header += " " * (-(16 + len(header)) % 64)
    path.write_bytes(b"GOLDEN\0\0" + struct.pack("<Q", len(header)) + header.encode() + data)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[1:] or MODELS:
        config, optimizer, losses, gradient_norms, kinds = run(name)
        path = Path(__file__).with_name(name + ".bin")
        write(path, config, optimizer, losses, gradient_norms, kinds)
        print(f"{path.name}: {path.stat().st_size} bytes, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
              f"{sum(n > optimizer['gradient_clip'] for n in gradient_norms)} of {STEPS} steps clipped")


if __name__ == "__main__":
    main()
