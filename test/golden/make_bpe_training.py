#!/usr/bin/env python3
"""
Writes bpe_training.json beside this script: what the BpeTrainer of Hugging Face tokenizers learns from short
texts, for our trainer to reproduce.

    pip install tokenizers          (nothing else is downloaded)
    python3 test/golden/make_bpe_training.py

Each case has the text, the words that the pre-tokenizer of GPT-2 makes of it, with their counts, the settings,
the tokens by id, and the merges as pairs of ids. Words and tokens are the hexadecimal digits of their bytes.
Running the script again gives the same bytes.
"""

import collections
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ENGLISH = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be
in want of a wife. However little known the feelings or views of such a man may be on his first entering a
neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as
the rightful property of some one or other of their daughters. "My dear Mr. Bennet," said his lady to him one
day, "have you heard that Netherfield Park is let at last?" Mr. Bennet replied that he hadn't.
"""
CHINESE = "道可道,非常道。名可名,非常名。無名天地之始;有名萬物之母。故常無欲,以觀其妙;常有欲,以觀其徼。\n"
ARABIC = "كان يا ما كان في قديم الزمان، كان هناك ملك عظيم يحكم مدينة كبيرة، وكان الملك يحب مدينته.\n"
CODE = """for (int i = 0; i < n; i++) {
    for (int j = 0; j < n; j++) {
        sum[i] += matrix[i * n + j] * vector[j];  // ======== row times column ========
    }
}
\t\tif (sum[0] == 0x7fff) return sum[1] == 0x7fff;\r\n\r\n
"""
EMOJI = "🙂🙂🙃 👩‍👩‍👧‍👦👩‍👩‍👧 naïve café: ½ + ¼ = ¾ ｆｕｌｌ\u3000ｗｉｄｔｈ 🇩🇪🇫🇷\n"
RUNS = " ".join("ab" * n + "a" * n + "=" * n for n in range(1, 14))

CASES = {
    "english": (ENGLISH, 400, 0),
    "english, at least twice": (ENGLISH, 100000, 2),
    "to the end": (CHINESE + ARABIC + EMOJI, 100000, 0),
    "mixed": (ENGLISH + CHINESE * 2 + ARABIC + CODE + EMOJI, 500, 0),
    "runs": (RUNS, 100000, 0),
}


def alphabet():
    """Characters of the byte-level pre-tokenizer to the bytes that they stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def hexadecimal(word, byte_of=alphabet()):
    return bytes(byte_of[character] for character in word).hex()


def train(text, vocab_size, min_frequency):
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=min_frequency, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizer.alphabet()))
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    words = collections.Counter(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
    return dict(text=text, vocab_size=vocab_size, min_frequency=min_frequency,
                words=[[hexadecimal(word), count] for word, count in words.items()],
                tokens=[hexadecimal(token) for token in sorted(vocab, key=vocab.get)],
                merges=[[vocab[left], vocab[right]] for left, right in model["merges"]])


def main():
    path = Path(__file__).with_name("bpe_training.json")
    cases = {name: train(*case) for name, case in CASES.items()}
    compact = lambda value: json.dumps(value, separators=(",", ":"))
    path.write_text("{" + ",\n".join(f"{compact(name)}:{compact(case)}" for name, case in cases.items()) + "}\n")
    for name, case in cases.items():
        print(f"{name}: {len(case['words'])} words, {len(case['tokens'])} tokens")


if __name__ == "__main__":
    main()
