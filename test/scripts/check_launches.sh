#!/usr/bin/env bash
# Kernel launches and products that fail in the middle of training: the run ends with one line and exit code 75, its steps so
# far are saved, and resuming gives the bits of an undisturbed run.
# needs: cpu-fp32/train_gpt cpu-fp32/fault_injection.so cpu-fp32/compare_runs simt-bf16/train_gpt
# seconds: 60
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
cpu=$PWD/build/cpu-fp32/train_gpt simt=$PWD/build/simt-bf16/train_gpt compare=$PWD/build/cpu-fp32/compare_runs
faults=$PWD/build/cpu-fp32/fault_injection.so
plan 27
command -v mpirun >/dev/null || { skip "no mpirun here" 27; exit; }
cd "$work" || exit 1
export OMP_NUM_THREADS=1
"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
tiny=(train --model tiny --layers 2 --channels 16 --heads 2 --mlp-width 16 --vocab-size 257 --context 16 --global-batch 64
    --micro-batch 2 --steps 6 --learning-rate 1e-2 --warmup-steps 0 --cuda-graphs off
    --matmul-tuning off --train-data 'text_train_*.bin')

# train NAME RANKS PROGRAM OPTIONS...
train() {
    local name=$1 launch=()
    [ "$2" = 1 ] || launch=(ranks "$2")
    "${launch[@]}" "$3" "${tiny[@]}" --run-dir "$name" "${@:4}" </dev/null >"$name.out" 2>"$name.err"
}
saved_step() { sed -nE 's/^train_gpt: .*; the run up to step ([0-9]+) is saved in .*/\1/p' "$1.err"; }
# fails NAME CODE WORDS    this exit code, and one line of the program with these words
fails() { [ "$code" = "$2" ] && [ "$(grep -c '^train_gpt: ' "$1.err")" = 1 ] && grep -qE "^train_gpt: .*$3" "$1.err"; }

# goes_on NAME RANKS PROGRAM WORDS OPTIONS...    checks and resumes a run that was struck in its fourth step
goes_on() {
    local name=$1 ranks=$2 program=$3 words=$4
    shift 4
    check "$name: one line and exit code 75" fails "$name" 75 "$words"
    check "$name: all steps before are saved" test "$(saved_step "$name")" = 3
    check "$name: goes on" train "$name" "$ranks" "$program" --resume auto "$@"
    check "$name: gives the same bits" "$compare" "$name" "whole-$name" --bitwise
}

# launches NAME RANKS OPTIONS...    runs whole-NAME, and prints how many launches its last rank makes
launches() {
    SIMT_RANK=$([ "$2" = 1 ] || echo $(($2 - 1))) SIMT_LAUNCHES=$work/launches train "whole-$1" "$2" "$simt" "${@:3}" ||
        echo "FAILED to run whole-$1" >&2
    cat launches
}
# strike NAME RANKS LAUNCH OPTIONS...    launch number LAUNCH of the last rank fails
strike() {
    SIMT_RANK=$([ "$2" = 1 ] || echo $(($2 - 1))) SIMT_FAIL_LAUNCH=$3 train "$1" "$2" "$simt" "${@:4}"
    code=$?
}

# ----------------------------------------------------------------------------------------------------------
# launches that fail on the simulated device, where every step makes the same number

number=0
while read -r ranks options; do
    name=simt$number
    read -ra options <<<"$options"
    all=$(launches $name "$ranks" "${options[@]}")
    strike $name "$ranks" $((all * 7 / 12)) "${options[@]}" # in the middle of the fourth step
    goes_on $name "$ranks" "$simt" 'cudaLaunchKernelEx.* failed: too many resources' "${options[@]}"
    number=$((number + 1))
done <<'END'
1
2 --zero 3
2 --tp 2
2 --pp 2
END

# The last launch of a step changes weights, after other launches have changed some.
for ranks in 1 2; do
    name=update$ranks
    strike $name $ranks $(($(launches $name $ranks) * 4 / 6))
    check "$name: one line and exit code 75" fails $name 75 'failed: too many resources.*; what was trained since the last checkpoint is lost'
    check "$name: weights of two steps are not saved" test ! -e $name/checkpoints/step_00000003 -a ! -e $name/checkpoints/step_00000004
done

SIMT_ARCHITECTURE=0 train no-image 1 "$simt"
code=$?
check "a card that has no kernels here" fails no-image 1 'does not run the kernels of this program \(no kernel image.*make GPU_ARCH=90'

# ----------------------------------------------------------------------------------------------------------
# products that fail on the CPU, in a stream's thread

# struck NAME RANKS PRODUCT    product number PRODUCT of the last rank fails
struck() {
    LD_PRELOAD=$faults FAULT_CALLS=product FAULT=EIO FAULT_AT=$3 FAULT_RANK=$([ "$2" = 1 ] || echo $(($2 - 1))) \
        FAULT_LIST=$work/$1.products train "$1" "$2" "$cpu"
    code=$?
}
struck whole-cpu 1 0
products=$(wc -l <whole-cpu.products)
struck cpu 1 $((products * 7 / 12))
goes_on cpu 1 "$cpu" 'failed: dnnl_sgemm failed'
struck cpu2 2 $((products * 7 / 24))
check "cpu2: one line and exit code 75" fails cpu2 75 'rank 1 of 2 .*failed: dnnl_sgemm failed.*; what was trained since the last checkpoint is lost'
check "cpu2: the line names the rank once" test "$(grep '^train_gpt: ' cpu2.err | grep -o 'rank 1 of 2 on ' | wc -l)" = 1
