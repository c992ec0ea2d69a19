#!/usr/bin/env bash
# Checks that a change of the source changes no bit: builds another commit beside this tree, makes the same runs and plans with both
# programs, and compares the runs bit for bit and the plans byte for byte.
#
#   test/tools/same_as.sh COMMIT [WORD]    WORD: only runs and plans that contain it
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/layouts.sh
commit=${1:?a commit} only=$2 other=$PWD/build/other
wanted() { [[ -z $only || $* == *"$only"* ]]; }

rm -rf "$other/source" && mkdir -p "$other/source" && git archive "$commit" | tar -x -C "$other/source" || exit 1
for options in "DEVICE=cpu PRECISION=fp32" "DEVICE=simt PRECISION=bf16"; do
    build=$(sed -E 's/DEVICE=(.*) PRECISION=(.*)/\1-\2/' <<<"$options")
    for source in . "$other/source"; do
        # shellcheck disable=SC2086  # options are words
        make -s -C "$source" $options "build/$build/train_gpt" || exit 1
    done
done
make -s DEVICE=cpu build/cpu-fp32/compare_runs || exit 1
compare=$PWD/build/cpu-fp32/compare_runs here=$PWD/build there=$other/source/build

cd "$work" || exit 1
export OMP_NUM_THREADS=1
"$here/cpu-fp32/train_gpt" tokenize "$OLDPWD/test/golden/bpe_training.json" --output text --val-fraction 0.2 >/dev/null || exit 1

# run PROGRAM NAME RANKS OPTIONS...
run() {
    local program=$1 name=$2 launch=()
    [ "$3" = 1 ] || launch=(ranks "$3")
    "${launch[@]}" "$program" train "${common[@]}" --run-dir "$name" --overwrite "${@:4}" >"$name.out" 2>&1 </dev/null
}
# both BUILD RANKS OPTIONS...    makes a run with each program; fails unless the two are the same
both() {
    local source
    for source in here there; do
        run "${!source}/$1/train_gpt" $source "${@:2}" || { tail -3 $source.out; return 1; }
    done
    "$compare" here there --bitwise
}
runs=0 plans=0
while read -r shape n options; do
    [ -n "$shape" ] && wanted "$shape $n $options" || continue
    runs=$((runs + 1))
    # shellcheck disable=SC2086
    check "$shape on $n $options" both cpu-fp32 "$n" ${shapes[$shape]} $options
done <<<"$layouts$more_layouts"
while read -r n options; do
    wanted "simt $n $options" || continue
    runs=$((runs + 1))
    # shellcheck disable=SC2086
    check "simulated on $n $options" both simt-bf16 "$n" --layers 2 --channels 64 --heads 2 --context 32 --steps 3 --global-batch 256 \
        --matmul-tuning off $options
done <<'L'
1 --micro-batch 4
1 --micro-batch 4 --recompute block --optimizer muon
2 --micro-batch 2 --zero 3
2 --micro-batch 2 --tp 2
2 --micro-batch 2 --pp 2
1 --micro-batch 4 --matmul-dtype fp8 --recompute mlp --mlp swiglu --qk-norm on
2 --micro-batch 4 --matmul-dtype fp8 --tp 2 --recompute elementwise --position rope
2 --micro-batch 4 --matmul-dtype fp8 --tp 2 --recompute block --block parallel --local-filter on
L
resumed() {
    local source
    for source in here there; do
        run "${!source}/cpu-fp32/train_gpt" $source 2 ${shapes[llama]} --micro-batch 3 --save-every 5 --keep 0 --zero 1 &&
            rm -r $source/checkpoints/step_00000010 &&
            ranks 4 "${!source}/cpu-fp32/train_gpt" train --resume $source --tp 2 --zero 3 >$source.out 2>&1 || return 1
    done
    "$compare" here there --bitwise
}
! wanted resume || check "a resume on another layout" resumed

same_plan() {
    # shellcheck disable=SC2086
    cmp <("$here/cpu-fp32/train_gpt" plan --format json $1 2>&1) <("$there/cpu-fp32/train_gpt" plan --format json $1 2>&1)
}
for model in gpt2-124M gpt2-1558M llama3-8B llama3-70B gpt3-175B; do
    for options in "--gpus 8 --machine h100" "--gpus 64 --machine a100" "--gpus 16 --machine h200 --optimizer muon" \
        "--gpus 512 --machine h100 --global-batch 4M --tokens 300G" "--gpus 32 --machine h100 --tp 4 --matmul-dtype fp8" \
        "--gpus 128 --machine b200 --zero 1 --offload optimizer"; do
        wanted "plan $model $options" || continue
        plans=$((plans + 1))
        check "plan $model $options" same_plan "--model $model $options"
    done
done
echo "$runs runs and $plans plans, beside those of $commit"
