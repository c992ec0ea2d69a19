#!/usr/bin/env python3
"""Optimizers beside each other: the same model, tokens and schedule, and the same grid of learning rates for all.

    test/bench/compare_optimizers.py PROGRAM FOLDER [TEXT...]

Trains `tiny` on text (/usr/include), and prints for each optimizer and batch the validation loss at the best
learning rate of the grid: its mean over seeds and how far they lie apart. Then, how many of AdamW's tokens Muon
takes to AdamW's loss. A run that is in FOLDER already is not made again, so what was interrupted goes on.
"""
import json
import pathlib
import shutil
import subprocess
import sys

TOKENS = 1 << 20  # of a run
BATCH = 2048  # tokens of a step, of the smallest batch
RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3]
SEEDS = [1, 2, 3]
# optimizer, batch in multiples of the smallest
PAIRS = [("adamw", 1), ("lamb", 1), ("muon", 1), ("adamw", 4), ("lamb", 4), ("adamw", 8), ("lamb", 8)]
SHARES = [0.4, 0.5, 0.6, 0.7, 0.8]  # of the tokens, for Muon

program, folder, *text = sys.argv[1:]
folder = pathlib.Path(folder)


def tokenize():
    if list(folder.glob("text_val_*.bin")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([program, "tokenize", *(text or ["/usr/include"]), "--output", folder / "text", "--train-tokenizer",
                    "2048", "--val-fraction", "0.02", "--overwrite"], check=True, stdout=subprocess.DEVNULL)


def loss_of(optimizer, batch, rate, seed, share=1.0):
    """The validation loss after a run, over the same tokens whatever the batch."""
    steps = int(TOKENS * share) // (BATCH * batch)
    run = folder / f"{optimizer}_{batch}x_{rate:g}_seed{seed}_{share:g}"
    log = run / "log.jsonl"

    def result():
        try:
            lines = [json.loads(line) for line in log.read_text().splitlines()]
        except (OSError, json.JSONDecodeError):  # not begun, or interrupted
            return None
        return next((line["val_loss"] for line in reversed(lines) if line["step"] == steps and "val_loss" in line), None)

    if result() is None:
        print(f"  {run.name} ...", end="", flush=True, file=sys.stderr)
        subprocess.run([program, "train", "--model", "tiny", "--tokenizer", folder / "text_tokenizer.json", "--train-data",
                        f"{folder}/text_train_*.bin", "--val-data", f"{folder}/text_val_*.bin", "--run-dir", run, "--overwrite",
                        "--optimizer", optimizer, "--learning-rate", f"{rate:g}", "--seed", str(seed), "--steps", str(steps),
                        "--micro-batch", "8", "--sequence-length", "256", "--global-batch", str(BATCH * batch),
                        "--val-every", str(steps), "--val-batches", str(32 // batch), "--save-every", "0"],
                       check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(run / "checkpoints")  # the log is what is looked at
        print(f" {result():.4f}", file=sys.stderr)
    return result()


def summary(losses):
    return f"{sum(losses) / len(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


tokenize()
best = {}
print(f"{'optimizer':<10}{'batch':>6}  {'best rate':>9}  {'validation loss':<24} by learning rate, one seed")
for optimizer, batch in PAIRS:
    by_rate = {rate: loss_of(optimizer, batch, rate, SEEDS[0]) for rate in RATES}
    rate = min(by_rate, key=by_rate.get)
    losses = [loss_of(optimizer, batch, rate, seed) for seed in SEEDS]
    best[optimizer, batch] = rate, losses
    edge = " (at the edge of the grid)" if rate in (RATES[0], RATES[-1]) else ""
    grid = "  ".join(f"{rate:g}: {loss:.3f}" for rate, loss in by_rate.items())
    print(f"{optimizer:<10}{batch:>5}x  {rate:>9g}  {summary(losses):<24} {grid}{edge}", flush=True)

rate, _ = best["muon", 1]
goal = sum(best["adamw", 1][1]) / len(SEEDS)
for share in SHARES:
    loss = loss_of("muon", 1, rate, SEEDS[0], share)
    print(f"muon with {share:.0%} of the tokens: {loss:.3f}, {'at or below' if loss <= goal else 'above'} AdamW's {goal:.3f}")
