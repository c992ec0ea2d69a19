#!/usr/bin/env python3
"""
Compares the speed of encoding a text with that of Hugging Face's `tokenizers` (pip install tokenizers), with the same
tokenizer file and number of threads:

    test/bench/bench_tokenizer.py build/cpu-fp32/bench_tokenizer TOKENIZER TEXT [THREADS]
"""

import os
import subprocess
import sys
import time

program, tokenizer_path, text_path = sys.argv[1:4]
threads = sys.argv[4] if len(sys.argv) > 4 else "1"
os.environ["RAYON_NUM_THREADS"] = threads
os.environ["TOKENIZERS_PARALLELISM"] = "true"

from tokenizers import Tokenizer  # noqa: E402, after the number of threads

text = open(text_path, "rb").read()
documents = []
while text:
    end = text.find(b"\n", 100000) + 1
    end = end if end > 0 else len(text)
    documents.append(text[:end].decode())
    text = text[end:]

tokenizer = Tokenizer.from_file(tokenizer_path)
best = 1e9
for _ in range(3):
    begin = time.perf_counter()
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    best = min(best, time.perf_counter() - begin)
size = os.path.getsize(text_path)
print(f"library: {size / best / 1e6:.1f} MB/s, {sum(map(len, encodings))} tokens, {threads} threads")
ours = subprocess.run([program, tokenizer_path, text_path, threads], stdout=subprocess.PIPE, text=True, check=True).stdout
print("ours:    " + ours, end="")
print(f"ratio:   {float(ours.split()[0]) / (size / best / 1e6):.1f}")
