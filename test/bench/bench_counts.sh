#!/usr/bin/env bash
# Counts, without a GPU, how much work kernels give to each unit of a card: in one step of one-layer models, from the PTX of
# the program that nvcc made (test/nocard/). A row has the least microseconds that each unit needs for all launches of a kernel.
#
#   bench_counts.sh PROGRAM [OPTIONS OF TRAIN...]    build/nocard/train_gpt, which make builds; options replace the models
#                                                    below. NOCARD=a100 selects an A100 instead of an H100.
cd "$(dirname "$0")/../.." || exit 1
program=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NOCARD_CHECKS=off NOCARD_MOST_PRODUCT=1e15 # compute products of any size
"$program" tokenize kernels --output "$work/text" --val-fraction 0 >/dev/null || exit 1

# counted OPTIONS...    prints the table of one step
counted() {
    NOCARD_COUNTS=$work/counts "$program" train --train-data "$work/text_train_*.bin" --run-dir "$work/run" --overwrite --layers 1 \
        --steps 1 --save-every 0 --matmul-tuning off --cuda-graphs off "$@" >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
    echo "$*"
    cat "$work/counts"
    echo
}

if [ $# -gt 0 ]; then
    counted "$@"
else
    counted --model gpt2-124M --vocab-size 16384 --micro-batch 2 --sequence-length 1024 --global-batch 2048
    counted --model llama3-8B --vocab-size 16384 --channels 2048 --heads 16 --kv-heads 4 --mlp-width 7168 --micro-batch 1 \
        --sequence-length 2048 --global-batch 2048
fi
