#!/usr/bin/env python3
"""
Writes sampler.json beside this script: the probabilities from which `generate` of Hugging Face transformers draws the
next token, for our sampler to reproduce.

    pip install torch transformers          (CPU builds suffice; nothing else is downloaded)
    python3 test/golden/make_sampler_golden.py

Each case has the logits, the tokens seen so far, the settings and the probability of every token (0: filtered out).
transformers itself combines the filters, in its order. Only cases are kept in which a rounding error could not change
which tokens remain. Running the script again gives the same bytes.
"""

import json
import random
from pathlib import Path

import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

VOCABULARY = 40
MODEL = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=4, n_layer=1, n_head=1, n_positions=8))
OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def probabilities(logits, seen, settings, dtype):
    config = GenerationConfig(do_sample=True, **settings)
    tokens = torch.tensor([seen], dtype=torch.long)
    processors = MODEL._get_logits_processor(config, input_ids_seq_length=len(seen))
    return processors(tokens, torch.tensor([logits], dtype=dtype)).softmax(-1)[0].tolist()


def made_at_random(draw):
    step = draw.choice([0.001, 0.001, 0.5])  # 0.5: many equal logits
    logits = [round(draw.gauss(0, 3) / step) * step for _ in range(VOCABULARY)]
    seen = [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 5, 30]))]
    settings = dict(
        temperature=draw.choice([0.2, 0.7, 1.0, 1.5, 4.0]),
        top_k=draw.choice([0, 0, 1, 3, 10, 39, 40, 1000]),
        top_p=draw.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.99]),
        min_p=draw.choice([0.0, 0.0, 0.02, 0.2, 1.0]),
        repetition_penalty=draw.choice([1.0, 1.0, 0.8, 1.3, 3.0]))
    return [round(logit, 3) for logit in logits], seen, settings


def clear(logits, seen, settings):
    """Returns whether the same tokens remain with other arithmetic, and with slightly different settings."""
    def kept(settings, dtype=torch.float64):
        return [p > 0 for p in probabilities(logits, seen, settings, dtype)]
    wanted = kept(settings)
    around = [settings | {name: settings[name] * factor} for name in ("top_p", "min_p") for factor in (1 - 1e-4, 1 + 1e-4)
              if 0 < settings[name] < 1]
    # Which of several equal tokens top-p keeps is chance in transformers.
    penalized = probabilities(logits, seen, OFF | dict(repetition_penalty=settings["repetition_penalty"]), torch.float64)
    groups = {}
    for p, stays in zip(penalized, wanted):
        groups.setdefault(round(p, 12), set()).add(stays)
    return (kept(settings, torch.float32) == wanted and all(kept(other) == wanted for other in around)
            and all(len(group) == 1 for group in groups.values()))


def main():
    draw = random.Random(1)
    candidates = [([round(3 - 0.1 * i, 3) for i in range(VOCABULARY)], [0, 0, 7], OFF | changed) for changed in
                  ({}, dict(temperature=0.5), dict(top_k=5), dict(top_p=0.62), dict(min_p=0.31),
                   dict(repetition_penalty=1.5), dict(top_k=20, top_p=0.77), dict(top_p=0.77, min_p=0.35))]
    candidates += [made_at_random(draw) for _ in range(100)]
    cases = [dict(logits=logits, seen=seen, **settings,
                  probabilities=[float(f"{p:.7g}") for p in probabilities(logits, seen, settings, torch.float64)])
             for logits, seen, settings in candidates if clear(logits, seen, settings)]
    path = Path(__file__).with_name("sampler.json")
    compact = lambda case: json.dumps(case, separators=(",", ":"))
    path.write_text("[" + ",\n".join(map(compact, cases)) + "]\n")
    print(f"{len(cases)} of {len(candidates)} cases are clear")


if __name__ == "__main__":
    main()
