#!/usr/bin/env python3
"""Compares optimizers and models on the same tokens and schedule, each with the same grid of learning rates.

    test/bench/compare_optimizers.py PROGRAM FOLDER [TEXT...]

Trains `tiny` on text (/usr/include), and prints for each contestant the validation loss at the best learning rate of the
grid: the mean over seeds and their range. Then it prints Muon's loss after a part of the tokens. Runs that are complete in
FOLDER are not repeated, so an interrupted comparison resumes. Each core trains one run at a time.
"""
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

TOKENS = 1 << 20  # per run
BATCH = 2048  # tokens per step, in the smallest batch
RATES = [5e-4, 2e-3, 8e-3, 32e-3, 128e-3]
SEEDS = [1, 2, 3]
EMBEDDINGS = ["--optimizer", "adamw", "--embedding-lr", "8"]  # they learn faster than matrices do
# name, options, batch in multiples of the smallest
CONTESTANTS = [
    ("adamw", ["--optimizer", "adamw"], 1),
    ("adamw, embeddings", EMBEDDINGS, 1),
    ("lamb", ["--optimizer", "lamb"], 1),
    ("muon", ["--optimizer", "muon"], 1),
    ("adamw", ["--optimizer", "adamw"], 4),
    ("lamb", ["--optimizer", "lamb"], 4),
    ("adamw", ["--optimizer", "adamw"], 8),
    ("lamb", ["--optimizer", "lamb"], 8),
    ("local filter", [*EMBEDDINGS, "--local-filter", "on"], 1),
    ("n-gram memory", [*EMBEDDINGS, "--ngram", "2,3", "--ngram-rows", "256k"], 1),
    ("n-grams, no gate", [*EMBEDDINGS, "--ngram", "2,3", "--ngram-rows", "256k", "--ngram-gate", "off"], 1),
    # to within 0.1%, has as many weights in products, hence FLOPs, as the contestants with a local filter and n-gram memory
    ("wider MLP", [*EMBEDDINGS, "--mlp-width", "469"], 1),
]
SHARES = [0.3, 0.5, 0.8]  # of the tokens; only Muon is trained on these

program, folder, *text = sys.argv[1:]
folder = pathlib.Path(folder)


def tokenize():
    if list(folder.glob("text_val_*.bin")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([program, "tokenize", *(text or ["/usr/include"]), "--output", folder / "text", "--train-tokenizer",
                    "2048", "--val-fraction", "0.02", "--overwrite"], check=True, stdout=subprocess.DEVNULL)


def loss_of(contestant, rate, seed, share=1.0):
    """The validation loss after a run, over the same tokens for every batch size."""
    name, options, batch = contestant
    steps = int(TOKENS * share) // (BATCH * batch)
    run = folder / f"{name.replace(',', '').replace(' ', '_')}_{batch}x_{rate:g}_seed{seed}_{share:g}"
    log = run / "log.jsonl"

    def result():
        try:
            lines = [json.loads(line) for line in log.read_text().splitlines()]
        except (OSError, json.JSONDecodeError):  # not begun, or interrupted
            return None
        return next((line["val_loss"] for line in reversed(lines) if line["step"] == steps and "val_loss" in line), None)

    if result() is None:
        subprocess.run([program, "train", "--model", "tiny", "--tokenizer", folder / "text_tokenizer.json", "--train-data",
                        f"{folder}/text_train_*.bin", "--val-data", f"{folder}/text_val_*.bin", "--run-dir", run, "--overwrite",
                        *options, "--learning-rate", f"{rate:g}", "--seed", str(seed), "--steps", str(steps),
                        "--micro-batch", "8", "--sequence-length", "256", "--global-batch", str(BATCH * batch),
                        "--val-every", str(steps), "--val-batches", str(32 // batch), "--save-every", "0"],
                       check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        shutil.rmtree(run / "checkpoints")  # only the log is read
        print(f"  {run.name} {result():.4f}", flush=True, file=sys.stderr)
    return result()


def summary(losses):
    return f"{sum(losses) / len(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


def main(pool):
    def losses_of(runs):
        return list(pool.map(lambda run: loss_of(*run), runs))

    grid = losses_of([(contestant, rate, SEEDS[0]) for contestant in CONTESTANTS for rate in RATES])
    by_rate = [dict(zip(RATES, grid[i : i + len(RATES)])) for i in range(0, len(grid), len(RATES))]
    best = [min(losses, key=losses.get) for losses in by_rate]
    losses = losses_of([(contestant, rate, seed) for contestant, rate in zip(CONTESTANTS, best) for seed in SEEDS])
    print(f"{'contestant':<18}{'batch':>6}  {'best rate':>9}  {'validation loss':<24} by learning rate, one seed")
    for i, (name, _, batch) in enumerate(CONTESTANTS):
        edge = " (at the edge of the grid)" if best[i] in (RATES[0], RATES[-1]) else ""
        of_rates = "  ".join(f"{rate:g}: {loss:.3f}" for rate, loss in by_rate[i].items())
        of_seeds = summary(losses[i * len(SEEDS) : (i + 1) * len(SEEDS)])
        print(f"{name:<18}{batch:>5}x  {best[i]:>9g}  {of_seeds:<24} {of_rates}{edge}", flush=True)

    def mean(name):
        first = [name for name, _, _ in CONTESTANTS].index(name) * len(SEEDS)
        return sum(losses[first : first + len(SEEDS)]) / len(SEEDS)

    muon = [name for name, _, _ in CONTESTANTS].index("muon")
    sooner = losses_of([(CONTESTANTS[muon], best[muon], SEEDS[0], share) for share in SHARES])
    for share, loss in zip(SHARES, sooner):
        print(f"muon with {share:.0%} of the tokens: {loss:.3f}")
    print(f"with all of them: adamw {mean('adamw'):.3f}, adamw, embeddings {mean('adamw, embeddings'):.3f}")


tokenize()
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    main(pool)
