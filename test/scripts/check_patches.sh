#!/usr/bin/env bash
# A new axis of the mesh, or a new group of ranks, takes a few rows, and a new sublayer takes one struct and its rows. Patches to the
# program add an outermost axis (island), and a group whose size divides the data ranks (experts), each with a collective on it:
# runs with size 2 along them give the results of runs without them, and their header, logs and checkpoints include them. A third patch
# adds a gated sublayer beside the MLP, which gives the same results on any layout.
#
#   EVERY=yes    builds the program once for each patch, which takes minutes
# devices: cpu
# soak: EVERY=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/layouts.sh
plan 21
for patch in island experts sublayer; do
    check "the patch $patch applies" patch -s -p1 --dry-run --fuzz=0 -i "test/patches/$patch.patch"
done
[ -n "$EVERY" ] || { skip "make soak builds patched programs, which takes minutes" 18; exit; }
repo=$PWD build=build/cpu-fp32
make -s DEVICE=cpu PRECISION=fp32 $build/train_gpt $build/compare_runs || exit 1
copy_sources "$work/patched" || exit 1
cd "$work" || exit 1
"$repo/$build/train_gpt" tokenize "$repo/test/golden/bpe_training.json" --output text --val-fraction 0.2 >tokenize.out || exit 1

# run PROGRAM NAME RANKS OPTIONS...
run() {
    # shellcheck disable=SC2086  # the shape is words
    ranks "$3" "$1" train "${common[@]}" ${shapes[gpt2]} --run-dir "$2" --overwrite "${@:4}" >"$2.out" 2>&1 </dev/null || { tail -3 "$2.out"; return 1; }
}
# same NAME HOW -- RANKS OPTIONS... -- RANKS OPTIONS...    compares the patched program on the first layout with the program on the second
same() {
    local patched=() plain=() how=$2
    shift 3
    while [ "$1" != -- ]; do patched+=("$1") && shift; done
    plain=("${@:2}")
    run "$work/patched/$build/train_gpt" patched_run "${patched[@]}" && run "$repo/$build/train_gpt" plain_run "${plain[@]}" &&
        # shellcheck disable=SC2086
        "$repo/$build/compare_runs" patched_run plain_run $how
}
begin() {
    patch -s -p1 --no-backup-if-mismatch -d patched <"$repo/test/patches/$1.patch" && make -s -C patched DEVICE=cpu PRECISION=fp32 $build/train_gpt
}
end() { patch -s -R -p1 --no-backup-if-mismatch -d patched <"$repo/test/patches/$1.patch"; }

check "the program builds with an axis outside" begin island
check "2 islands are data ranks" same island --bitwise -- 2 --islands 2 --micro-batch 2 -- 2 --micro-batch 2
check "2 islands of 2 pipeline stages" same island --bitwise -- 4 --pp 2 --islands 2 --micro-batch 2 \
    -- 4 --pp 2 --micro-batch 2
check "2 islands of 2 shards" same island "" -- 4 --islands 2 --zero 2 --shard-group 2 --micro-batch 2 \
    -- 4 --zero 2 --shard-group 2 --micro-batch 2
check "the header draws them" grep -q '^  island     {0 2} {1 3}$' patched_run.out
check "the log names them" grep -q '"axes":\["tensor","context","shard","replica","pipeline","island"\]' patched_run/ranks.jsonl
end island

check "the program builds with another group" begin experts
check "2 groups of 2 data ranks, as a shard group" same experts "" -- 4 --ep 2 --zero 2 --shard-group 2 --micro-batch 2 \
    -- 4 --zero 2 --shard-group 2 --micro-batch 2
check "2 groups of 2 data ranks, within a shard group" same experts "" -- 4 --ep 2 --zero 2 --micro-batch 2 -- 4 --zero 2 --micro-batch 2
check "a group of 2 data ranks on each stage" same experts "" -- 4 --ep 2 --pp 2 --micro-batch 2 -- 4 --pp 2 --micro-batch 2
end experts

check "the program builds with a gated sublayer" begin sublayer
gated() { run "$work/patched/$build/train_gpt" "$1" "$2" --gate-width 24 --micro-batch 2 "${@:3}"; }
check "it trains" gated one 1
# on RANKS OPTIONS...    a run with the results of the one above
on() { gated other "$@" && "$repo/$build/compare_runs" one other $how; }
how="" check "on 2 tensor ranks of 2 stages, with ZeRO 3" on 8 --tp 2 --pp 2 --zero 3 --save-every 5 --keep 0
resumed() {
    rm -r other/checkpoints/step_00000010 &&
        ranks 2 "$work/patched/$build/train_gpt" train --resume other --tp 1 --pp 2 --zero 0 >other.out 2>&1 </dev/null &&
        "$repo/$build/compare_runs" one other
}
check "and resumed on another layout" resumed
how="" check "with its weights' gradients made later" on 4 --tp 2 --pp 2 --pp-schedule zero-bubble
how=--bitwise check "recomputed" on 1 --recompute mlp
how=--bitwise check "recomputed with all of its block" on 1 --recompute block
planned() { "$work/patched/$build/train_gpt" plan --model gpt2-124M --gpus 8 --machine h100 --format json "$@" | grep -oE '"seconds":[0-9.]+' | head -1; }
check "the plan has it" [ "$(planned --gate-width 4096)" != "$(planned)" ]
end sublayer

few=yes
for patch in "$repo"/test/patches/*.patch; do
    most=8
    [[ $patch != *sublayer* ]] || most=5
    (($(grep -c '^diff ' "$patch") <= most)) || few=
done
check "each patch touches few files" [ -n "$few" ]
check "and leaves the program as it was" diff -r "$repo/comm" patched/comm
