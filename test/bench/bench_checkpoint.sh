#!/usr/bin/env bash
# The cost of saving and loading checkpoints on this machine.
#
#   test/bench/bench_checkpoint.sh BUILD    the folder of a build (make bench-checkpoint passes it)
#   FOLDER=path                       a folder on the disk to measure (build/). It needs room for three checkpoints: 13 GB for
#                                     gpt2-350M, which also needs 10 GB of memory
#   MODELS="gpt2-124M gpt2-350M"      the models to save and load
cd "$(dirname "$0")/../.." || exit 1
. test/support/ranks.sh
export RANKS_TIMEOUT=3600
program=$1/bench_checkpoint
folder=$(mktemp -d -p "${FOLDER:-build}") || exit 1
trap 'rm -rf "$folder"' EXIT
for model in ${MODELS:-gpt2-124M gpt2-350M}; do
    echo "$model, with AdamW's moments"
    "$program" "$model" "$folder" && ranks 4 "$program" "$model" "$folder" && ranks 4 "$program" "$model" "$folder" 1 &&
        "$program" "$model" "$folder" 4 || exit 1
    rm -rf "${folder:?}"/*
done
