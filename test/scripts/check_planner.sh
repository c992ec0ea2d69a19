#!/usr/bin/env bash
# The planner: a program makes the same plans whatever device it is built for; and refitted, the planner predicts published step
# times, both when fitted on all of them and each publication when fitted on the others.
#
#   FIT=yes    fits, which takes minutes
# needs: cpu-fp32/train_gpt simt-bf16/train_gpt
# soak: FIT=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 8

plan_of() {
    # shellcheck disable=SC2086
    "build/$2/train_gpt" plan --format json --model $1
}
plans_alike() {
    plan_of "$1" cpu-fp32 | grep -q '"seconds":' && cmp <(plan_of "$1" cpu-fp32) <(plan_of "$1" simt-bf16)
}
while read -r line; do
    check "a build for CPUs and one for cards plan the same: $line" plans_alike "$line"
done <<'L'
gpt2-124M --gpus 8 --machine h100
gpt2-124M --gpus 4 --machine cpu
llama3-8B --gpus 32 --machine h100 --tp 4 --matmul-dtype fp8
llama3-8B --gpus 16 --machine h200 --optimizer muon
gpt2-1558M --gpus 128 --machine b200 --zero 1 --offload optimizer
yuan2-2B --gpus 16 --machine a100 --tp 2 --pp 2 --pp-schedule zero-bubble
llama3-8B --gpus 32 --machine h100 --save-every 100
L

[ -n "$FIT" ] || { skip "make soak fits the planner, which takes minutes" 1; exit; }
make -s DEVICE=cpu PRECISION=fp32 build/cpu-fp32/calibrate_planner || exit 1 # here, so that other scripts need not wait for it
build/cpu-fp32/calibrate_planner >"$work/fit.out" 2>&1
fitted=$?
tail -25 "$work/fit.out"
check "published steps are within their bounds, those of publications that were left out too" [ $fitted = 0 ]
