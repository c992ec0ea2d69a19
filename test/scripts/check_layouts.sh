#!/usr/bin/env bash
# Layout does not change the run: every way of cutting a step over ranks and micro-batches gives the losses, gradient
# norms, validation losses and final weights of one process that takes the step at once. Choices of memory and overlap
# do not change a bit.
#
#   test/scripts/check_layouts.sh [WORD]    only rows that hold the word; with EVERY=yes also more rows like the others
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs simt-fp32/train_gpt
# seconds: 120
# soak: EVERY=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
checks=66
[ -z "$EVERY" ] || checks=112
plan $checks
cpu=$PWD/build/cpu-fp32/train_gpt simt=$PWD/build/simt-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs
# one that does not change: with some texts differences grow ten times as large within the steps
text=$PWD/test/golden/bpe_training.json
only=$1
command -v mpirun >/dev/null || { skip "no mpirun here" $checks; exit; }
cd "$work" || exit 1

# One thread a rank, the reference too: then a product is summed in the same order whatever the batch.
export OMP_NUM_THREADS=1
"$cpu" tokenize "$text" --output text --val-fraction 0.2 >tokenize.out || echo "FAILED tokenize"

# Steps of 24 sequences: divided by 1, 2, 3, 4 and 8 ranks, and by micro-batches of 1, 2 and 3; in the last rows 3 ranks
# have 8 micro-batches. Every step is clipped.
# --adam-eps: some gradients are zero but for rounding (those of key biases: softmax does not see them), and with a
# small one AdamW would make updates of that noise.
common=(--context 24 --steps 10 --global-batch 576 --gradient-clip 0.5 --warmup-steps 2 --adam-eps 1e-5
    --val-every 5 --val-batches 2 --sample-every 10 --sample-tokens 4 --train-data 'text_train_*.bin' --val-data 'text_val_*.bin' --model tiny)
# Sizes that divide by little: what is cut into shards, stages or vocabularies leaves a remainder.
declare -A shapes=(
    [gpt2]="--vocab-size 257 --layers 5 --channels 60 --heads 4 --norm layernorm --position learned --mlp gelu
        --bias on --tie-embeddings on"
    [llama]="--vocab-size 259 --layers 6 --channels 56 --heads 4 --kv-heads 2 --mlp-width 52 --norm rmsnorm
        --position rope --mlp swiglu --bias off --tie-embeddings off"
    [parallel]="--vocab-size 263 --layers 4 --channels 28 --heads 2 --kv-heads 1 --mlp-width 38 --norm layernorm
        --position rope --mlp gelu --bias on --tie-embeddings off --block parallel --qk-norm on --window 7 --window-pattern 2:1"
)
shapes[filter]="--vocab-size 261 --layers 4 --channels 48 --heads 4 --mlp-width 52 --norm rmsnorm --position rope --mlp swiglu
    --bias off --tie-embeddings on --local-filter on"
shapes[parallel-filter]="${shapes[parallel]} --local-filter on"

# train NAME RANKS PROGRAM OPTIONS...    without mpirun where there is one rank
train() {
    local name=$1 n=$2 program=$3 launch=()
    shift 3
    [ "$n" = 1 ] || launch=(ranks "$n")
    RANKS_TIMEOUT=120 "${launch[@]}" "$program" train "${common[@]}" --run-dir "$name" "$@" >"$name.out" 2>&1 && return
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

layouts='
gpt2      1 --micro-batch 2 --recompute block --zero 3 --offload optimizer
llama     1 --micro-batch 4 --pp-schedule interleaved --pp-chunks 3
gpt2      2 --micro-batch 6 --zero 2 --offload optimizer
gpt2      2 --micro-batch 4 --zero 3
llama     2 --micro-batch 6 --zero 1 --recompute mlp --optimizer lamb
llama     2 --micro-batch 2 --zero 3 --recompute block --optimizer muon
gpt2      3 --micro-batch 2 --zero 3 --prefetch 3 --optimizer lamb
parallel  3 --micro-batch 1 --zero 3 --offload optimizer
gpt2      4 --micro-batch 2 --zero 1 --shard-group 2
llama     4 --micro-batch 2 --zero 3 --shard-group 2 --recompute block --offload optimizer --optimizer muon
gpt2      2 --tp 2 --micro-batch 3 --tp-overlap 1 --recompute block
parallel  2 --tp 2 --micro-batch 6 --recompute block --offload optimizer
gpt2      4 --tp 2 --micro-batch 2 --zero 3 --optimizer muon
gpt2      2 --pp 2 --micro-batch 2 --pp-schedule zero-bubble
llama     2 --pp 2 --micro-batch 6 --pp-schedule interleaved --pp-chunks 3
gpt2      3 --pp 3 --micro-batch 4 --pp-layers 1,3,1
gpt2      4 --pp 2 --micro-batch 3 --zero 3 --pp-schedule zero-bubble
gpt2      4 --tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble --recompute mlp --optimizer muon
llama     6 --tp 2 --pp 3 --micro-batch 3 --pp-layers 3,1,2
llama     8 --tp 2 --pp 2 --zero 2 --micro-batch 2 --pp-layers memory --optimizer muon
parallel  8 --tp 2 --pp 2 --zero 1 --offload optimizer --pp-schedule zero-bubble --micro-batch 2 --optimizer muon
filter    2 --tp 2 --micro-batch 4 --recompute block
filter    3 --micro-batch 2 --zero 3 --offload optimizer --optimizer muon
filter    4 --tp 2 --pp 2 --micro-batch 6 --pp-schedule zero-bubble --optimizer muon
parallel-filter 2 --tp 2 --micro-batch 6 --recompute block
parallel-filter 4 --tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble --zero 1
'
more_layouts='
gpt2      8 --micro-batch 3 --zero 3
llama     2 --tp 2 --micro-batch 6 --recompute elementwise
llama     2 --pp 2 --micro-batch 3 --pp-schedule gpipe
parallel  2 --pp 2 --micro-batch 2 --pp-schedule zero-bubble --recompute block
llama     4 --pp 2 --micro-batch 2 --zero 2 --pp-schedule interleaved
llama     3 --micro-batch 3 --zero 3 --offload optimizer
gpt2      1 --micro-batch 4 --pp-schedule zero-bubble
llama     1 --micro-batch 1 --zero 2
llama     2 --micro-batch 3
llama     3 --micro-batch 4 --zero 2 --overlap off
llama     4 --micro-batch 3 --zero 3 --prefetch 0
llama     8 --micro-batch 1 --zero 3 --shard-group 4 --recompute mlp
parallel  8 --micro-batch 3 --zero 3 --shard-group 2
gpt2      2 --tp 2 --micro-batch 8
parallel  2 --tp 2 --micro-batch 4
llama     4 --tp 4 --micro-batch 8 --optimizer lamb
llama     4 --tp 2 --micro-batch 3 --zero 2
gpt2      2 --pp 2 --micro-batch 4 --optimizer lamb
gpt2      4 --pp 4 --micro-batch 2
gpt2      4 --pp 2 --micro-batch 2 --zero 1
gpt2      4 --tp 2 --pp 2 --micro-batch 4
llama     4 --tp 2 --pp 2 --micro-batch 2 --pp-schedule interleaved
parallel  4 --tp 2 --pp 2 --micro-batch 6 --pp-schedule zero-bubble
gpt2      8 --tp 2 --pp 2 --zero 1 --micro-batch 2 --optimizer lamb
gpt2      8 --tp 2 --pp 2 --zero 3 --micro-batch 1 --pp-schedule interleaved --recompute block
gpt2      8 --pp 4 --zero 1 --micro-batch 2 --pp-schedule gpipe --offload optimizer --optimizer lamb
llama     8 --tp 4 --pp 2 --micro-batch 4 --pp-schedule zero-bubble
llama     8 --tp 2 --zero 3 --shard-group 2 --micro-batch 1
parallel  8 --tp 2 --pp 4 --micro-batch 3
filter    4 --tp 4 --micro-batch 8 --recompute mlp --optimizer lamb
filter    8 --tp 2 --pp 2 --zero 2 --micro-batch 2 --pp-layers 3,1
gpt2      6 --pp 2 --micro-batch 3 --zero 2 --pp-schedule interleaved
'
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
        train "$reference" 1 "$cpu" "${of_shape[@]}" --micro-batch 24 --optimizer "$optimizer" ||
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
# a batch that rises, also where a run goes on in the middle of that on other ranks

if wanted ramp; then
    read -ra of_shape <<<"${shapes[llama]//$'\n'/ } --batch-ramp 144:576:7 --optimizer muon --save-every 5 --keep 0"
    train ramp 1 "$cpu" "${of_shape[@]}" --micro-batch 6 || echo "FAILED to run a ramp"
    rows=$(grep '"loss"' ramp/log.jsonl | grep -oE '"tokens":[0-9]+' | cut -d: -f2 | tr '\n' ' ')
    if [ "$rows" = "144 288 432 720 1008 1440 1872 2448 3024 3600 " ]; then echo "ok tokens of a batch that rises"; else echo "FAILED tokens of a batch that rises: $rows"; fi
    for options in "--tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble" "--tp 2 --zero 3 --micro-batch 1"; do
        read -ra of_row <<<"$options"
        number=$((number + 1))
        mkdir "ramp$number" && cp -r ramp/* "ramp$number" && rm -r "ramp$number/checkpoints/step_00000010"
        if RANKS_TIMEOUT=120 ranks 4 "$cpu" train --resume "ramp$number" "${of_row[@]}" >"ramp$number.out" 2>&1; then
            agree "a batch that rises, resumed on 4 $options" "ramp$number" ramp --losses 1e-6 --weights 1e-5
        else
            tail -3 "ramp$number.out"
            echo "FAILED to resume a ramp on 4 $options"
        fi
    done
fi

# ----------------------------------------------------------------------------------------------------------
# choices that change no bit

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

if wanted simt; then
    for shape in gpt2 llama; do
        read -ra of_shape <<<"${shapes[$shape]//$'\n'/ } --layers 2 --steps 4 --global-batch 96 --val-batches 1"
        number=$((number + 1))
        train "on_cpu$number" 1 "$cpu" "${of_shape[@]}" --micro-batch 4 || echo "FAILED to run simt's reference"
        if train "simt$number" 1 "$simt" "${of_shape[@]}" --micro-batch 4; then
            agree "simt on 1, $shape" "simt$number" "on_cpu$number" --losses 1e-5 --weights 1e-4
        else
            echo "FAILED to run simt on 1, $shape"
        fi
    done
    small=(--layers 2 --channels 20 --heads 2 --kv-heads 1 --mlp-width 24 --vocab-size 257 --context 16 --steps 4
        --global-batch 64 --val-batches 1)
    train on_cpu 1 "$cpu" "${small[@]}" --micro-batch 4 || echo "FAILED to run simt's reference"
    train on_cpu_filter 1 "$cpu" "${small[@]}" --micro-batch 4 --local-filter on || echo "FAILED to run simt's reference"
    for options in "--zero 1" "--zero 3" "--zero 3 --micro-batch 1 --recompute block --offload optimizer" \
        "--tp 2" "--tp 2 --local-filter on" "--pp 2" "--pp 2 --micro-batch 1 --pp-schedule zero-bubble"; do
        read -ra of_row <<<"$options"
        reference=on_cpu
        [[ $options != *local-filter* ]] || reference=on_cpu_filter
        number=$((number + 1))
        if train "simt$number" 2 "$simt" "${small[@]}" --micro-batch 2 "${of_row[@]}"; then
            agree "simt on 2 $options" "simt$number" $reference --losses 1e-6 --weights 1e-5
        else
            echo "FAILED to run simt on 2 $options"
        fi
    done
fi
