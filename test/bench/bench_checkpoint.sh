#!/usr/bin/env bash
# The cost of saving and loading checkpoints on this machine.
#
#   test/bench/bench_checkpoint.sh BUILD    the folder of a build (make bench-checkpoint gives it)
#   FOLDER=path                       on which disk (that of build/); three times the bytes of a checkpoint are needed there, 13 GB
#                                     for gpt2-350M, and 10 GB of memory
#   MODELS="gpt2-124M gpt2-350M"      which
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
