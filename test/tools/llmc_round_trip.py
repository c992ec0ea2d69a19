#!/usr/bin/env python3
"""
Continues training that llm.c began. PyTorch stands in for llm.c: it trains a small GPT-2 for some steps, and
its weights and moments are written as llm.c's ranks write them, whole or sharded by ZeRO 1. Then:

    export    importing and exporting reproduces the model file to the bit
    resume    further steps of AdamW on the same tokens, here and in PyTorch, give the same weights

    llmc_round_trip.py TRAIN_GPT

prints a line for each, beginning with "ok" or "FAILED". test/scripts/check_llmc.sh runs it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

PROGRAM = str(Path(sys.argv[1]).resolve())
LAYERS, CHANNELS, HEADS, CONTEXT, VOCABULARY, PADDED = 3, 32, 4, 16, 300, 384
BEFORE, AFTER = 5, 7  # steps
RATE, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
CLOSE = 1e-6  # largest difference of weights

# llm.c's tensors: the name in transformers, whether each layer has one, and whether it is transposed
TENSORS = [("wte.weight", False, False), ("wpe.weight", False, False), ("ln_1.weight", True, False),
           ("ln_1.bias", True, False), ("attn.c_attn.weight", True, True), ("attn.c_attn.bias", True, False),
           ("attn.c_proj.weight", True, True), ("attn.c_proj.bias", True, False),
           ("ln_2.weight", True, False), ("ln_2.bias", True, False), ("mlp.c_fc.weight", True, True),
           ("mlp.c_fc.bias", True, False), ("mlp.c_proj.weight", True, True),
           ("mlp.c_proj.bias", True, False), ("ln_f.weight", False, False), ("ln_f.bias", False, False)]


def parts(values):
    """Each tensor of each layer in llm.c's order, flat, the vocabulary padded."""
    for name, layered, transposed in TENSORS:
        for layer in range(LAYERS if layered else 1):
            tensor = values["transformer." + (f"h.{layer}." if layered else "") + name].detach()
            if name == "wte.weight":
                tensor = F.pad(tensor, (0, 0, 0, PADDED - VOCABULARY))
            yield (tensor.T if transposed else tensor).reshape(-1).numpy()


def header(*numbers):
    return np.array(numbers + (0,) * (256 - len(numbers)), dtype=np.int32).tobytes()


def share(part, rank, ranks):
    return part[rank * part.size // ranks:(rank + 1) * part.size // ranks]


def write(folder, weights, moments, ranks, zero):
    model = folder / f"model_{BEFORE:08}.bin"
    model.write_bytes(header(20240326, 3, CONTEXT, VOCABULARY, LAYERS, HEADS, CHANNELS, PADDED)
                      + np.concatenate(list(parts(weights))).tobytes())
    for rank in range(ranks):
        state = [header(20240527, 1, ranks, rank, 1, 0, 0, 0, 0, 0, BEFORE)]
        for values in (*moments, weights):
            state += [(share(part, rank, ranks) if zero else part).tobytes() for part in parts(values)]
        (folder / f"state_{BEFORE:08}_{rank:05}.bin").write_bytes(b"".join(state))
    (folder / f"DONE_{BEFORE:08}").touch()
    return model


def run(*command):
    result = subprocess.run([PROGRAM, *map(str, command)], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"FAILED {command[0]}: {result.stderr.strip()}")


def main():
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=CHANNELS, n_layer=LAYERS, n_head=HEADS,
                                       n_positions=CONTEXT, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
                                       bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, VOCABULARY, (CONTEXT + 1,))  # one sample, so that its order is known
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.dim() == 2]
    others = [p for p in named.values() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:]).backward()
            torch.nn.utils.clip_grad_norm_(named.values(), CLIP)
            optimizer.step()

    train(BEFORE)
    weights = {name: p.detach().clone() for name, p in named.items()}
    moments = [{name: optimizer.state[p][key].clone() for name, p in named.items()}
               for key in ("exp_avg", "exp_avg_sq")]
    train(AFTER - BEFORE)
    wanted = np.concatenate(list(parts(named)))

    for ranks, zero in ((1, False), (2, False), (2, True), (4, True), (8, True)):
        what = f"{ranks} ranks" + (", ZeRO 1" if zero else "")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            source = write(folder, weights, moments, ranks, zero)
            (folder / "tokens.bin").write_bytes(header(20240520, 1, len(tokens))
                                                + tokens.numpy().astype(np.uint16).tobytes())
            run("import", source, "--output", folder / "run")
            run("export", folder / "run", "--format", "llmc", "--output", folder / "again.bin")
            same = (folder / "again.bin").read_bytes() == source.read_bytes()
            print("ok" if same else "FAILED", "llm.c export", what)
            run("train", "--resume", folder / "run", "--steps", AFTER, "--train-data", folder / "tokens.bin",
                "--micro-batch", 1, "--global-batch", CONTEXT, "--val-every", 0, "--schedule", "constant",
                "--warmup-steps", 0, "--learning-rate", RATE, "--beta1", BETAS[0], "--beta2", BETAS[1],
                "--adam-eps", EPS, "--weight-decay", DECAY, "--gradient-clip", CLIP)
            run("export", folder / "run", "--format", "llmc", "--output", folder / "after.bin")
            ours = np.fromfile(folder / "after.bin", dtype=np.float32)[256:]
            worst = np.abs(ours - wanted).max()
            good = "ok" if worst < CLOSE else "FAILED"
            print(good, "llm.c resume", what, f"(weights differ by {worst:.1e})")


main()
