#!/usr/bin/env bash
# Spikes: one process and eight layouts skip the same steps, go back to the same checkpoint and pass over the same samples, also
# when a run is resumed on other ranks in the middle of that. The spikes are in the data: random tokens in place of
# repetitive text.
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs cpu-fp32/plant_spikes
# seconds: 15
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
checks=24
plan $checks
cpu=$PWD/build/cpu-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs plant=$PWD/build/cpu-fp32/plant_spikes
command -v mpirun >/dev/null || { skip "no mpirun here" $checks; exit; }
cd "$work" || exit 1
export OMP_NUM_THREADS=1

# Steps of 8 samples of 16 tokens. Step 43 and step 46 are spikes; 52, 53 and 54 are three in a row; in all.bin every
# step from 52 on is a spike.
yes 'she sells sea shells by the sea shore; ' | head -c 60000 >text.txt
"$cpu" tokenize text.txt --output text --val-fraction 0 >tokenize.out || echo "FAILED tokenize"
cp text_train_000000.bin some.bin
cp text_train_000000.bin all.bin
of_step() { seq $((8 * ($1 - 1))) $((8 * $1 - 1)); }
"$plant" some.bin 16 1337 $(for step in 43 46 52 53 54; do of_step $step; done) || echo "FAILED to plant spikes"
"$plant" all.bin 16 1337 $(seq 408 900) || echo "FAILED to plant spikes"

shape=(--model tiny --vocab-size 257 --layers 2 --channels 24 --heads 2 --context 16 --seed 1337 --timings off --val-every 0
    --global-batch 128 --steps 64 --warmup-steps 0 --learning-rate 5e-3 --adam-eps 1e-5 --sample-every 0
    --ngram 1,2 --ngram-rows 60 --ngram-width 8 --ngram-heads 2 --ngram-place disk)
watched=(--spike-sigma 6 --save-every 1 --keep 0 --async-save off)

# train NAME RANKS OPTIONS...
train() {
    local name=$1 n=$2 launch=()
    shift 2
    [ "$n" = 1 ] || launch=(ranks "$n")
    "${launch[@]}" "$cpu" train --run-dir "$name" "$@" >"$name.out" 2>&1
}

# skipped NAME    prints the steps with spikes, and where the run went back to
skipped() {
    grep -oE '^spike +step [0-9]+' "$1.out" | grep -oE '[0-9]+$' | tr '\n' ' '
    sed -nE 's/^spikes .* up to step ([0-9]+): back to the checkpoint of step ([0-9]+); samples ([0-9]+) to ([0-9]+) are passed over/\1 > \2: \3-\4/p' "$1.out"
}
expect() {
    [ "$(skipped "$1")" = "$2" ] && return
    echo "$(skipped "$1"), not $2"
    tail -3 "$1.out"
    return 1
}
all_spikes='43 46 52 53 54 54 > 51: 408-431'

# A run that learns the text, and from its step 20 one process that runs each step in one micro-batch.
train clean 1 "${shape[@]}" --train-data text_train_000000.bin --save-every 20 --keep 0 || echo "FAILED to train"
start=(--resume clean/checkpoints/step_00000020 --train-data some.bin)
train one 1 "${start[@]}" "${watched[@]}" --micro-batch 8
check "one process: spikes are left out, and three in a row passed over" expect one "$all_spikes"
check "the log counts what was trained on, and each spike as skipped" awk -F'[:,]' '
    /"skipped":true/ { skipped++ } /"went_back"/ { back++ } /"loss"/ { steps++; for (i = 1; i < NF; i++) if ($i == "\"tokens\"") tokens = $(i + 1) }
    END { exit !(skipped == 2 && back == 1 && steps == 44 && tokens == 64 * 128) }' one/log.jsonl
same_state() { cmp -i 64 "one/checkpoints/step_000000$1/data_00000.bin" "one/checkpoints/step_000000$2/data_00000.bin"; }
check "a spike leaves weights and moments as they were" same_state 42 43
check "other steps do not" eval '! same_state 43 44'

# ----------------------------------------------------------------------------------------------------------
# layouts

number=0
while read -r n options; do
    read -ra of_row <<<"$options"
    number=$((number + 1))
    train "row$number" "$n" "${start[@]}" "${watched[@]}" --micro-batch 2 "${of_row[@]}" </dev/null
    check "the same spikes on $n $options" expect "row$number" "$all_spikes"
    check "the same run on $n $options" "$compare" "row$number" one --losses 1e-5 --weights 1e-4
done <<'END'
2 --zero 0
2 --zero 3
2 --zero 2 --offload optimizer
2 --tp 2
2 --pp 2 --pp-schedule zero-bubble
4 --tp 2 --zero 1
4 --pp 2 --zero 2
4 --zero 1 --shard-group 2
END

# ----------------------------------------------------------------------------------------------------------
# a run resumed between spikes, one without a checkpoint to go back to, and one with spikes to the end

# after the second of three spikes
mkdir half && cp -r one/options.json one/checkpoints half && mv half/checkpoints/step_00000053.aside half/53
rm -r half/checkpoints/step_0000005[2-9]* half/checkpoints/step_0000006* && mv half/53 half/checkpoints/step_00000053
train half 2 --resume half --tp 2 --micro-batch 2
check "resumed on other ranks after the second of three spikes" expect half '54 54 > 51: 408-431'
train none 1 --init clean --train-data some.bin "${shape[@]}" --spike-sigma 6 --save-every 0 --micro-batch 8
check "without a checkpoint from before, the run goes on" grep -q '^spikes .* up to step 54, and no checkpoint from before' none.out
train lost 1 --resume clean/checkpoints/step_00000020 --train-data all.bin "${watched[@]}" --micro-batch 8
code=$?
ends() { [ $code = 70 ] && grep -q '^train_gpt: --spike-sigma 6: after step 51 there were 3 spikes in a row, 4 times; ' lost.out; }
check "spikes without end end the run" ends
at_last() { [ "$(ls lost/checkpoints | grep -E '^step_[0-9]+$' | tail -n 1)" = step_00000051 ] && grep -q 'the run up to step 51 is saved' lost.out; }
check "and its newest checkpoint is the one it went back to" at_last
