#!/usr/bin/env bash
# Layout does not change the run: every way of dividing a step among ranks and micro-batches gives the losses, gradient norms,
# validation losses and final weights of one process that runs each step in one micro-batch. Options for memory and overlap
# do not change a bit.
#
#   test/scripts/check_layouts.sh [WORD]    only rows that contain the word; EVERY=yes adds more rows like the others
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs simt-bf16/train_gpt
# seconds: 120
# soak: EVERY=yes
# limit: 7200
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/layouts.sh
. test/support/text.sh
checks=79
[ -z "$EVERY" ] || checks=149
plan $checks
cpu=$PWD/build/cpu-fp32/train_gpt simt=$PWD/build/simt-bf16/train_gpt compare=$PWD/build/cpu-fp32/compare_runs
# a fixed text: with some texts differences grow tenfold within these steps
text=$PWD/test/golden/bpe_training.json
only=$1
command -v mpirun >/dev/null || { skip "no mpirun here" $checks; exit; }
cd "$work" || exit 1

# One thread a rank, also in the reference, so that a product is summed in the same order whatever the batch.
export OMP_NUM_THREADS=1
"$cpu" tokenize "$text" --output text --val-fraction 0.2 >tokenize.out || echo "FAILED tokenize"

# train NAME RANKS PROGRAM OPTIONS...    without mpirun if there is one rank
train() {
    local name=$1 n=$2 program=$3 launch=()
    shift 3
    [ "$n" = 1 ] || launch=(ranks "$n")
    "${launch[@]}" "$program" train "${common[@]}" --run-dir "$name" "$@" >"$name.out" 2>&1 && return
    tail -5 "$name.out"
    return 1
}

# agree LABEL RUN REFERENCE LIMITS...
agree() {
    local label=$1 line
    shift
    if line=$("$compare" "$@" 2>&1); then echo "ok $label:${line#*:}"; else echo "FAILED $label: $line"; fi
}

wanted() { [[ -z $only || $* == *"$only"* ]]; }

# ----------------------------------------------------------------------------------------------------------
# layouts against one process

declare -A referenced
number=0
while read -r shape n options; do
    [ -n "$shape" ] && wanted "$shape $n $options" || continue
    read -ra of_shape <<<"${shapes[$shape]//$'\n'/ }"
    optimizer=adamw
    [[ $options != *--optimizer* ]] || optimizer=${options##*--optimizer }
    reference=$shape-$optimizer
    if [ -z "${referenced[$reference]}" ]; then
        referenced[$reference]=yes
        train "$reference" 1 "$cpu" --micro-batch 24 "${of_shape[@]}" --optimizer "$optimizer" ||
            { echo "FAILED to run $reference"; continue; }
        clipped=$(grep -oE '"grad_norm":[0-9.]+' "$reference/log.jsonl" | awk -F: '$2 > 0.6 { n++ } END { print n + 0 }')
        if [ "$clipped" = 10 ]; then echo "ok every step of $reference is clipped"; else echo "FAILED $reference: $clipped of 10 steps clipped"; fi
    fi
    number=$((number + 1))
    read -ra of_row <<<"$options"
    if train "row$number" "$n" "$cpu" "${of_shape[@]}" "${of_row[@]}" </dev/null; then
        agree "$shape on $n $options" "row$number" "$reference" --losses 1e-6 --weights 1e-5
    else
        echo "FAILED to run $shape on $n $options"
    fi
done <<<"$layouts${EVERY:+$more_layouts}"

# ----------------------------------------------------------------------------------------------------------
# one long sequence

if [ -n "$EVERY" ] && wanted 131072; then
    mkdir pages && cat seeded/*.txt | split -b 1500 -a 4 --additional-suffix=.txt - pages/
    "$cpu" tokenize pages --output long --val-fraction 0 >long.out || echo "FAILED tokenize"
    long=(train --model tiny --heads 16 --kv-heads 4 --context 131072 --micro-batch 1 --global-batch 131072 --steps 20 --train-data 'long_train_*.bin')
    OMP_NUM_THREADS=2 "$cpu" "${long[@]}" --run-dir long1 >long1.out 2>&1 || tail -3 long1.out
    RANKS_TIMEOUT=3000 ranks 8 "$cpu" "${long[@]}" --cp 8 --run-dir long8 >long8.out 2>&1 || tail -3 long8.out
    agree "131072 tokens on 8 --cp 8" long8 long1 --losses 1e-5
fi

# ----------------------------------------------------------------------------------------------------------
# a batch that rises, also when a run is resumed on other ranks in the middle of the rise

if wanted ramp; then
    read -ra of_shape <<<"${shapes[llama]//$'\n'/ } --batch-ramp 144:576:7 --optimizer muon --save-every 5 --keep 0"
    train ramp 1 "$cpu" "${of_shape[@]}" --micro-batch 6 || echo "FAILED to run a ramp"
    rows=$(grep '"loss"' ramp/log.jsonl | grep -oE '"tokens":[0-9]+' | cut -d: -f2 | tr '\n' ' ')
    if [ "$rows" = "144 288 432 720 1008 1440 1872 2448 3024 3600 " ]; then echo "ok tokens of a batch that rises"; else echo "FAILED tokens of a batch that rises: $rows"; fi
    for options in "--tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble" "--tp 2 --zero 3 --micro-batch 1"; do
        read -ra of_row <<<"$options"
        number=$((number + 1))
        mkdir "ramp$number" && cp -r ramp/* "ramp$number" && rm -r "ramp$number/checkpoints/step_00000010"
        if ranks 4 "$cpu" train --resume "ramp$number" "${of_row[@]}" >"ramp$number.out" 2>&1; then
            agree "a batch that rises, resumed on 4 $options" "ramp$number" ramp --losses 1e-6 --weights 1e-5
        else
            tail -3 "ramp$number.out"
            echo "FAILED to resume a ramp on 4 $options"
        fi
    done
fi

# ----------------------------------------------------------------------------------------------------------
# options that change no bit

# Options of both | options of the second
neutral='
--zero 0                   | --overlap off
--zero 2                   | --offload optimizer
--zero 2                   | --recompute mlp
--zero 3                   | --overlap off
--zero 3                   | --prefetch 0
--zero 2 --optimizer muon  | --overlap off --offload optimizer
--zero 3 --shard-group 2   | --overlap off --prefetch 0 --recompute mlp --offload optimizer
--tp 2                     | --overlap off
--tp 2                     | --recompute mlp --offload optimizer
--pp 2                     | --overlap off
--pp 2                     | --pp-schedule zero-bubble --recompute mlp --overlap off
--tp 2 --pp 2              |
--tp 2 --pp 2              | --overlap off --recompute block --pp-schedule zero-bubble
--pp 2 --zero 3            | --overlap off --prefetch 0
--pp 2 --pp-schedule interleaved | --overlap off --recompute block
--zero 2                   | --check-replicas 2 --check-replay 3
--pp 2 --zero 3            | --check-replicas 1 --check-replay 2 --overlap off
--pp 2 --zero 1            | --check-replay 2 --pp-schedule zero-bubble
--zero 1 --ngram 1,2 --ngram-rows 99 --ngram-width 8 | --ngram-place disk --recompute block --check-replay 3
--cp 2 --context 256 --global-batch 1536 --zero 2 | --overlap off --recompute block --offload optimizer
'
more_neutral='
--zero 0                   | --offload optimizer
--zero 1                   | --overlap off
--zero 1                   | --recompute block
--zero 1                   | --offload optimizer
--zero 2                   | --overlap off
--zero 3                   | --prefetch 3
--zero 3                   | --offload optimizer
--zero 3                   | --recompute block
--tp 2                     | --recompute block
--pp 2                     | --pp-schedule gpipe
--pp 2                     | --pp-schedule zero-bubble
--tp 2 --optimizer lamb    | --overlap off --offload optimizer
--pp 2 --ngram 1,2 --ngram-rows 99 --ngram-width 8 --ngram-place host | --overlap off --ngram-prefetch 0
--zero 3 --shard-group 2   |
'
declare -A first_run
number=0
read -ra of_shape <<<"${shapes[gpt2]//$'\n'/ } --micro-batch 3 --steps 6"
while IFS='|' read -r both second; do
    [ -n "$both" ] && wanted "neutral $both $second" || continue
    read -ra of_both <<<"$both"
    read -ra of_second <<<"$second"
    n=2
    [[ $both != *shard-group* && $both != *tp*pp* && $both != *pp*zero* ]] || n=4
    number=$((number + 1))
    label="${of_both[*]} on $n: the same bits ${of_second[*]:-again}"
    if [ -z "${first_run[$both]}" ]; then
        first_run[$both]=first$number
        train "first$number" $n "$cpu" "${of_shape[@]}" "${of_both[@]}" </dev/null || echo "FAILED to run $both"
    fi
    if train "second$number" $n "$cpu" "${of_shape[@]}" "${of_both[@]}" "${of_second[@]}" </dev/null; then
        agree "$label" "second$number" "${first_run[$both]}" --bitwise
    else
        echo "FAILED to run $label"
    fi
done <<<"$neutral${EVERY:+$more_neutral}"

# ----------------------------------------------------------------------------------------------------------
# the CUDA kernels, run by the shim

small="--layers 2 --channels 20 --heads 2 --kv-heads 1 --mlp-width 24 --vocab-size 257 --context 16 --steps 4 --global-batch 64
    --val-batches 1 --micro-batch 2 --matmul-tuning off"
declare -A small_shapes=([small]=$small [filter]="$small --local-filter on"
    [long]="$small --local-filter on --context 256 --global-batch 512 --steps 2 --micro-batch 1")
# Two ranks, compared with one rank of the same program. same: sums are the same, so the limits are strict in bf16 too. split: sums
# are divided over the ranks, and so rounded differently.
simt_rows='
small  same  --zero 1
small  same  --zero 3
small  same  --zero 3 --micro-batch 1 --recompute block --offload optimizer
small  same  --pp 2
small  same  --pp 2 --micro-batch 1 --pp-schedule zero-bubble
small  split --tp 2
filter split --tp 2
long   split --cp 2 --zero 3
'
# simulated PROGRAM NAME LIMITS...    the limits of rows whose sums are split
simulated() {
    local program=$1 name=$2 shape sums options of_row limits
    shift 2
    for shape in "${!small_shapes[@]}"; do
        read -ra of_row <<<"${small_shapes[$shape]//$'\n'/ }"
        train "$name-$shape" 1 "$program" "${of_row[@]}" || echo "FAILED to run $name-$shape"
    done
    while read -r shape sums options; do
        [ -n "$shape" ] || continue
        read -ra of_row <<<"${small_shapes[$shape]//$'\n'/ } $options"
        limits=("$@")
        [ "$sums" = split ] || limits=(--losses 1e-6 --weights 1e-5)
        number=$((number + 1))
        if train "$name$number" 2 "$program" "${of_row[@]}" </dev/null; then
            agree "$name on 2, $shape $options" "$name$number" "$name-$shape" "${limits[@]}"
        else
            echo "FAILED to run $name on 2, $shape $options"
        fi
    done <<<"$simt_rows"
}
if wanted simt; then
    simulated "$simt" simt-bf16 --losses 1e-3 --weights 0.02 --moments 0.01
fi
if [ -n "$EVERY" ] && wanted simt; then
    simt=${simt/simt-bf16/simt-fp32}
    make -s -C "${simt%/build/*}" DEVICE=simt PRECISION=fp32 "${simt#"${simt%/build/*}"/}" || echo "FAILED to build it in fp32"
    for shape in gpt2 llama; do
        read -ra of_shape <<<"${shapes[$shape]//$'\n'/ } --layers 2 --steps 4 --global-batch 96 --val-batches 1"
        train "on_cpu-$shape" 1 "$cpu" "${of_shape[@]}" --micro-batch 4 || echo "FAILED to run simt's reference"
        if train "simt-$shape" 1 "$simt" "${of_shape[@]}" --micro-batch 4; then
            agree "simt-fp32 on 1, $shape" "simt-$shape" "on_cpu-$shape" --losses 1e-5 --weights 1e-4
        else
            echo "FAILED to run simt-fp32 on 1, $shape"
        fi
    done
    simulated "$simt" simt-fp32 --losses 1e-6 --weights 1e-5
fi
