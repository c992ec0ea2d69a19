#!/usr/bin/env bash
# The program under the address and undefined-behavior sanitizers and, with EVERY=yes, under the thread sanitizer, for which
# it is built here: it tokenizes, trains on one rank and on several, resumes, inspects, samples and refuses bad input. (Units
# run under all of them: test/run.sh.) OpenMP is off for the thread sanitizer: its library is not instrumented, and the
# program's own threads are those of the streams and the loader.
# needs: address/train_gpt
# seconds: 60
# soak: EVERY=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/sanitizers.sh
checks=8
[ -z "$EVERY" ] || checks=12
plan $checks
export OMP_NUM_THREADS=2
# launch N COMMAND...    runs the command on N ranks, with mpirun if N > 1
launch() { if [ "$1" = 1 ]; then "${@:2}"; else OMP_NUM_THREADS=1 ASAN_OPTIONS=$whole_stacks ranks "$@"; fi; }

# tokens PROGRAM    makes the tokens that the runs train on
tokens() { "$1" tokenize kernels --output "$work/text" --val-fraction 0.2 --overwrite; }

# train PROGRAM N OPTIONS...    a short training run with validation, samples and checkpoints; it is resumed, and its
# weights are sampled from
train() {
    local program=$1 n=$2
    local run=("$program" train --layers 2 --channels 32 --heads 4 --kv-heads 2 --mlp-width 48 --context 48 --qk-norm
        --warmup-steps 1 --train-data "$work/text_train_*.bin" --val-data "$work/text_val_*.bin" --val-every 2
        --val-batches 2 --sample-every 4 --sample-tokens 8 --save-every 2 --run-dir "$work/run" --micro-batch 2 "${@:3}")
    launch "$n" "${run[@]}" --steps 4 --overwrite && launch "$n" "${run[@]}" --steps 6 --resume auto &&
        "$program" inspect "$work/run" --verify on && "$program" sample "$work/run" --tokens 8
}
# bad_input PROGRAM    as many checks as planned, and none failed
bad_input() {
    PROGRAM=$PWD/$1 test/scripts/check_bad_input.sh >"$work/bad_input"
    ! grep FAILED "$work/bad_input" && [ "$(grep -cE '^(ok|skipped:)' "$work/bad_input")" = "$(sed -n 's/^plan //p' "$work/bad_input")" ]
}
accumulate=(--global-batch 768) # for 4 ranks: two micro-batches

program=build/address/train_gpt
check "tokenizing under address and undefined" tokens $program
check "bad input under address and undefined" bad_input $program
check "training under address and undefined" train $program 1 --recompute block
for zero in 1 3; do
    check "training on 2 ranks under address and undefined, ZeRO $zero" train $program 2 --zero $zero
done
check "training on 2 tensor ranks under address and undefined" train $program 2 --tp 2 --recompute block
check "training on 2 stages under address and undefined" train $program 2 --pp 2 --pp-schedule zero-bubble --global-batch 288 --recompute mlp
check "training with offload under address and undefined" train $program 2 --zero 3 --offload optimizer --recompute mlp

[ -n "$EVERY" ] || exit 0
make -s SANITIZE=thread DEVICE=cpu PRECISION=fp32 build/thread/train_gpt || exit 1
export OMP_NUM_THREADS=1
program=build/thread/train_gpt
check "training under thread" train $program 1 --recompute block
check "training on 4 ranks under thread, ZeRO 3" train $program 4 "${accumulate[@]}" --zero 3
check "training on 4 ranks under thread, hybrid, with offload" \
    train $program 4 "${accumulate[@]}" --zero 2 --shard-group 2 --offload optimizer
check "training on 4 ranks under thread, tensor x pipeline, zero-bubble" \
    train $program 4 "${accumulate[@]}" --tp 2 --pp 2 --pp-schedule zero-bubble --recompute block --offload optimizer
