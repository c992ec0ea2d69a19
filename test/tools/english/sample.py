#!/usr/bin/env python3
"""Draws comments and messages of the program at random, for readers who judge their English (INSTRUCTION.md).

    test/tools/english/sample.py SEED [COUNT]     from the top of the repository; 200 unless COUNT is given

Three in four are comments: lines of `//` that follow each other, or a paragraph of a block. The others are string
literals of four words or more: messages, and help texts. Each is printed below its number, file and line.
"""
import pathlib
import random
import re
import sys

SHARE_OF_COMMENTS = 0.75
FOLDERS = ["kernels", "comm", "data"]
LITERAL = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+')


def sources():
    yield pathlib.Path("train_gpt.cu")
    for folder in FOLDERS:
        yield from sorted(path for path in pathlib.Path(folder).rglob("*") if path.suffix in {".h", ".cuh", ".cu"})


def is_prose(text):
    return len(re.findall(r"\b[A-Za-z]{2,}\b", text)) >= 4 and len(text.split()) >= 4


def comments(lines):
    """(line number, text) of each comment that has a line of its own, and of each that follows code."""
    block, start, in_block = [], 0, False
    for number, line in enumerate([*lines, ""], 1):
        bare = line.strip()
        if bare.startswith("/*"):
            in_block = True
        own = in_block or bare.startswith("//")
        text = bare.strip("/* ") if own and not re.fullmatch(r"[-/ ]*", bare) else ""
        if own and text:
            start = start if block else number
            block.append(text)
        elif block:
            yield start, " ".join(block)
            block = []
        if in_block and bare.endswith("*/"):
            in_block = False
        if not own and (behind := re.search(r"[;{,)]\s+// (.+)", line)) and "#include" not in line:
            yield number, behind[1]


def messages(source):
    for found in LITERAL.finditer(re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), source)):
        text = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))
        yield source.count("\n", 0, found.start()) + 1, text


def main():
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    kinds = {"comment": [], "message": []}
    for path in sources():
        source = path.read_text()
        for kind, found in [("comment", comments(source.splitlines())), ("message", messages(source))]:
            kinds[kind] += [(path, line, text) for line, text in found if is_prose(text)]
    chance = random.Random(seed)
    of_comments = round(count * SHARE_OF_COMMENTS)
    drawn = chance.sample(kinds["comment"], of_comments) + chance.sample(kinds["message"], count - of_comments)
    print(f"seed {seed}: {of_comments} of {len(kinds['comment'])} comments, {count - of_comments} of {len(kinds['message'])} messages\n")
    for number, (path, line, text) in enumerate(drawn, 1):
        print(f"{number}. {path}:{line}\n   {text}\n")


main()
