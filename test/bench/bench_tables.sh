#!/usr/bin/env bash
# What tables on disk cost a step on this machine.
#
#   test/bench/bench_tables.sh BUILD    the folder of a build (make bench-tables gives it)
#   FOLDER=path                       on which disk (that of build/)
#   GB=30                             what is written there
#   TOKENS=pattern                    token files with GPT-2's vocabulary; otherwise the program's sources are tokenized
cd "$(dirname "$0")/../.." || exit 1
folder=$(mktemp -d -p "${FOLDER:-build}") || exit 1
trap 'rm -rf "$folder"' EXIT
tokens=$TOKENS
if [ -z "$tokens" ]; then
    "$1/train_gpt" tokenize comm data kernels --train-tokenizer 8192 --output "$folder/text" >/dev/null || exit 1
    tokens="$folder/text_train_*.bin"
fi
"$1/bench_tables" "$folder" "${GB:-30}" "$tokens"
