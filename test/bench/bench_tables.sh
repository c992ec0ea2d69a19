#!/usr/bin/env bash
# Measures what tables on disk add to the time of a step on this machine.
#
#   test/bench/bench_tables.sh BUILD    the folder of a build (make bench-tables passes it)
#   FOLDER=path                       a folder on the disk to measure (build/)
#   GB=30                             size of the table's file
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
