"""
Trains the models of bench_train in PyTorch, on the same device, and compares both.

    bench_train.py RECORDS [--seconds N]

RECORDS is the file that bench_train --records wrote. The same shapes are trained as PyTorch recommends: with scaled dot
product attention, torch.compile, the fused AdamW, and autocast to bf16 if there are fp32 weights too. Models of up to 12
layers are compiled as a whole, larger ones block by block, because compiling those whole takes minutes. A micro-batch that
does not fit is halved; if even one sequence does not fit, blocks are recomputed. --seconds: start no model after N seconds.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WHOLE = 12  # models of up to this many layers are compiled as a whole


def norm_layer(row):
    if row["norm"] == "rmsnorm":
        return nn.RMSNorm(row["channels"], eps=row["norm_eps"])
    return nn.LayerNorm(row["channels"], eps=row["norm_eps"], bias=row["bias"])


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.heads, self.kv_heads, self.head_size = row["heads"], row["kv_heads"], row["head_size"]
        channels, width, bias = row["channels"], row["mlp_width"], row["bias"]
        self.swiglu, self.rope = row["mlp"] == "swiglu", row["position"] == "rope"
        self.norm1, self.norm2 = norm_layer(row), norm_layer(row)
        self.qkv = nn.Linear(channels, (self.heads + 2 * self.kv_heads) * self.head_size, bias=bias)
        self.attproj = nn.Linear(self.heads * self.head_size, channels, bias=bias)
        self.fc = nn.Linear(channels, 2 * width if self.swiglu else width, bias=bias)
        self.fcproj = nn.Linear(width, channels, bias=bias)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, -1, self.head_size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.rope:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        grouped = {"enable_gqa": True} if self.kv_heads < self.heads else {}
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, -1))
        hidden = self.fc(self.norm2(x))
        if self.swiglu:
            gate, up = hidden.chunk(2, dim=-1)
            return x + self.fcproj(F.silu(gate) * up)
        return x + self.fcproj(F.gelu(hidden, approximate="tanh"))


class Model(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.wte = nn.Embedding(row["vocab"], row["channels"])
        self.wpe = nn.Embedding(row["tokens"], row["channels"]) if row["position"] == "learned" else None
        self.blocks = nn.ModuleList(Block(row) for _ in range(row["layers"]))
        self.normf = norm_layer(row)
        self.head = nn.Linear(row["channels"], row["vocab"], bias=False)
        if row["tie_embeddings"]:
            self.head.weight = self.wte.weight
        self.twice = False  # blocks are computed again in the backward pass
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        half = torch.arange(0, row["head_size"], 2).float() / row["head_size"]
        angles = torch.outer(torch.arange(row["tokens"]).float(), row["rope_theta"] ** -half).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def loss(self, x, targets):
        logits = self.head(self.normf(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.twice else block(x, cos, sin)
        return self.loss(x, targets)


def median_step(row, device, batch, micro_batches, twice):
    """Seconds of a step: the median after the steps that compile."""
    cuda = device == "cuda"
    bf16 = row["dtype"] != "fp32"
    weights = torch.float32 if row["master"] or not bf16 else torch.bfloat16
    torch.manual_seed(1)
    with torch.device(device):
        torch.set_default_dtype(weights)
        model = Model(row)
        torch.set_default_dtype(torch.float32)
        tokens, targets = torch.randint(row["vocab"], (2, batch, row["tokens"]))
    model.twice = twice
    if row["layers"] <= WHOLE:
        step_loss = torch.compile(model)
    else:
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
        step_loss = model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    cast = torch.autocast(device, torch.bfloat16) if bf16 and row["master"] else contextlib.nullcontext()

    def step():
        start = time.perf_counter()
        for _ in range(micro_batches):
            with cast:
                loss = step_loss(tokens, targets) / micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        if not loss.isfinite():
            raise RuntimeError(f"{row['model']}: the loss is not finite")
        return time.perf_counter() - start

    for _ in range(2):
        step()
    times, begin = [], time.perf_counter()
    while len(times) < 3 or (len(times) < 9 and time.perf_counter() - begin < 4):
        times.append(step())
    return statistics.median(times)


def forget():
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(row, device):
    """(tokens per second, the setup that was measured), with the largest micro-batch that fits."""
    whole = row["batch"] * row["micro_batches"]
    sizes = [row["batch"] >> i for i in range(row["batch"].bit_length())]
    for batch, twice in [(size, False) for size in sizes] + [(size, True) for size in sizes]:
        micro_batches = -(-whole // batch)
        try:
            seconds = median_step(row, device, batch, micro_batches, twice)
        except torch.OutOfMemoryError:
            seconds = None
        if seconds is not None:
            tokens = batch * micro_batches * row["tokens"]
            return tokens / seconds, f"{batch}x{row['tokens']}x{micro_batches}" + (", twice" if twice else "")
        forget()
    return None, "does not fit"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("records")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    with open(options.records, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    print(f"PyTorch {torch.__version__} on the same device")
    print(f"{'model':12} {'B x T x M':>18} {'tokens/s':>10} {'MFU':>7} {'train_gpt is':>13} in")
    measured = {}  # PyTorch trains in bf16 for our rows in fp8 too
    for row in rows:
        if time.perf_counter() - start > options.seconds:
            print(f"{row['model']:12} left out: no time")
            continue
        key = (row["model"], row["tokens"], row["dtype"] == "fp32")
        if key not in measured:
            measured[key] = measure(row, device)
            forget()
        rate, shape = measured[key]
        if rate is None:
            print(f"{row['model']:12} {shape}")
            continue
        mfu = f"{100 * rate * row['flops_per_token'] / row['peak']:.1f}%" if row["peak"] else "-"
        ratio = f"{row['tokens_per_s'] / rate:.2f}x"
        print(f"{row['model']:12} {shape:>18} {rate:10.0f} {mfu:>7} {ratio:>13} {row['dtype']}", flush=True)


if __name__ == "__main__":
    main()
