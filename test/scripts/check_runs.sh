#!/usr/bin/env bash
# Whole runs of the program: memory options do not change a bit, no end of a run loses its training, and memory use stays within
# the report.
# suite: test
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs
# seconds: 15
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
cpu=$PWD/build/cpu-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs
plan 50
cd "$work" || exit 1

# field NAME DIR    the values of a field of log.jsonl, one a line
field() { sed -nE "s/.*\"$1\":([-+.0-9e]+|null).*/\1/p" "$2/log.jsonl"; }

# close A B LIMIT    the losses of two runs agree to LIMIT (relative)
close() {
    [ -s "$1/log.jsonl" ] && [ "$(field loss "$1" | wc -l)" = "$(field loss "$2" | wc -l)" ] &&
        paste <(field loss "$1") <(field loss "$2") |
        awk -v limit="$3" '{ d = $1 - $2; if (d < 0) d = -d; if (!(d <= limit * $2)) bad = 1; n++ } END { exit bad || !n }'
}

same_losses() { [ -n "$(field loss "$1")" ] && diff <(field loss "$1") <(field loss "$2") >/dev/null; }

mkdir data
"$cpu" tokenize "$text" --output data/text --val-fraction 0.2 >tokenize.out || echo "FAILED tokenize"
tiny=(train --model tiny --layers 2 --channels 32 --heads 2 --kv-heads 1 --mlp-width 48 --context 48
    --train-data 'data/text_train_*.bin' --steps 6 --micro-batch 2 --learning-rate 1e-2 --warmup-steps 2)

# run NAME PROGRAM OPTIONS...
run() {
    local name=$1 program=$2
    shift 2
    "$program" "${tiny[@]}" --run-dir "$name" "$@" >"$name.out" 2>&1 || { echo "FAILED to run $name"; cat "$name.out"; }
}

run plain "$cpu" --overwrite
check "the loss falls" awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < first) }' <(field loss plain)

rm -rf first && cp -r plain first
run plain "$cpu" --overwrite
check "a run repeated gives the same weights and moments, bit for bit" "$compare" first plain --bitwise
for mode in elementwise mlp block; do
    run "recompute-$mode" "$cpu" --recompute $mode
    check "recompute $mode gives the same losses, bit for bit" same_losses "recompute-$mode" plain
done
run accumulated "$cpu" --micro-batch 1 --global-batch 96
check "accumulation gives the losses of one batch" close accumulated plain 1e-5
run seed "$cpu" --seed 5
check "another seed gives another run" test "$(field loss seed | head -1)" != "$(field loss plain | head -1)"

# options in a file
"$cpu" train --config seed/options.json --run-dir recorded --print-config >printed.conf
"$cpu" train --config printed.conf --print-config >again.conf
check "options that were printed are read back the same, and no run begins" eval \
    'grep -qx "seed = 5" printed.conf && cmp printed.conf again.conf && [ ! -e recorded ]'
"$cpu" train --config printed.conf --overwrite >recorded.out 2>&1
check "a run of another's record is the same run, bit for bit" same_losses recorded seed
check "ranks that share a file have its options, and those of the command line" grep -qx 'micro-batch = 1' \
    <(ranks 2 "$cpu" train --config printed.conf --micro-batch 1 --print-config)

tenth=$("$cpu" "${tiny[@]/--steps/--keep}" --run-dir tenth --epochs 0.1 --print-config | sed -n 's/^steps = //p')
ranks 2 "$cpu" "${tiny[@]/--steps/--keep}" --run-dir tenth --epochs 0.1 --global-batch 96 --micro-batch 1 --log-every 1000 >tenth.out 2>&1
check "--epochs 0.1 is a tenth of the data, in the same steps on two ranks" grep -q "^run .* $tenth steps of 96 tokens .* 0.10 epochs" tenth.out

# --save-every with a time saves while the run continues.
"$cpu" "${tiny[@]}" --run-dir timed --steps 1000000 --save-every 1s --log-every 100 >timed.out 2>&1 &
timed=$!
for _ in {1..300}; do grep -qs '^checkpoint after step' timed.out && break; sleep 0.1; done
kill -USR1 $timed && wait $timed
check "--save-every 1s saves while the run goes on, and when it is stopped" test "$(grep -c '^checkpoint after step' timed.out)" -ge 2
run auto "$cpu" --save-every auto
check "--save-every auto says what it begins with" \
    grep -q -- '--save-every auto: every 10m00s: no save has been measured yet, a failure every 2110 days on 1 device' auto.out

check "log.jsonl has every field" grep -qE \
    '"step":1,"loss":[0-9.]+,"grad_norm":[0-9.]+,"lr":[0-9.e-]+,"tokens":96,"tokens_per_s":[0-9.]+,"mfu":(null|[0-9.]+),"gemm_share":[0-9.e-]+,"ms":[0-9.]+,"time":"20[0-9-]+T[0-9:.]+Z"' plain/log.jsonl
check "and says how the run was started" grep -qE \
    '^\{"step":0,"start":\{"time":"20[0-9-]+T[0-9:.]+Z","host":"[^"]+","device":"[^"]+","version":"train_gpt [^"]+","communication":"[^"]+","processes":1,"layout":\{"dp":1,"tp":1,"cp":1,"pp":1,"zero":[0-9]\},"from":null,"changes":\[\],"memory":\[\{"class":"parameters","bytes":[0-9]+,"host":false\},.*\]\}\}$' plain/log.jsonl

run long "$cpu" --steps 60 --val-data 'data/text_val_*.bin' --val-every 30 --val-batches 8 --sample-every 60 --sample-tokens 40
check "validation loss falls" awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(NR == 3 && last < first - 1) }' <(field val_loss long)
check "a sample is shown and logged" grep -q '"sample"' long/log.jsonl
"$cpu" sample long --prompt "#include" --tokens 50 --seed 3 >sample1.out 2>/dev/null && "$cpu" sample long --prompt "#include" --tokens 50 --seed 3 >sample2.out 2>/dev/null
check "a sample begins with its prompt" grep -qa '^#include' sample1.out
check "a sample repeated is the same" cmp -s sample1.out sample2.out
# named validation sets, questions, and the checkpoints with the lowest losses of one set
printf '{"context": "inline", "choices": [" void", " x"], "answer": 0}\n' >questions.jsonl
sets=(--tokenizer bytes --val-data 'web=data/text_val_*.bin' --val-data code=data/text_train_000000.bin --val-tokens 480 --val-every 3
    --choices questions.jsonl --choices-every 6 --keep-best 2 --best-set code --save-every 0 --keep 1)
run sets "$cpu" "${sets[@]}" --steps 12 --learning-rate 3e-2
check "each validation set has its losses" test "$(grep -c val_loss/web sets/log.jsonl) $(grep -c val_loss/code sets/log.jsonl)" = "5 5"
check "questions are answered between steps" test "$(grep -c '"eval":{"choices":"questions.jsonl","right":' sets/log.jsonl)" = 3
# best_stay RUN    its checkpoints are those after which the loss of `code` was lowest, and the newest other one
best_stay() {
    local best other
    best=$(sed -nE 's|.*"step":([0-9]+),"val_loss/code":([0-9.]+).*|\2 \1|p' "$1/log.jsonl" | sort -s -k1,1g | head -2 | awk '{print $2}')
    other=$(sed -nE 's|.*"step":([0-9]+),"checkpoint".*|\1|p' "$1/log.jsonl" | grep -vxF "$best" | tail -1)
    diff <(printf '%s\n' $best "$other" | sort -n) <(ls "$1/checkpoints" | sed 's/step_0*//; s/^$/0/' | sort -n)
}
check "the checkpoints of the lowest losses stay" best_stay sets
ranks 2 "$cpu" train --resume sets --steps 18 --learning-rate 1e-3 --micro-batch 1 >again.out 2>&1
check "and when the run goes on, on two ranks" best_stay sets
check "help names options, ranges and presets" grep -q 'gpt2-124M' <("$cpu" train --help)

# planned and measured
ranks 2 "$cpu" plan --measure machine.json >measure.out 2>&1
check "two ranks measure their machine" grep -q '"node": 2' machine.json
check "and say what they have measured" grep -qE '^links +[0-9.]+[kMGT]B/s, ' measure.out
"$cpu" plan --model tiny --machine machine.json --gpus 2 >plan.out 2>&1
check "a plan can be made for it" grep -q 'mpirun -np 2 ./train_gpt train --model tiny' plan.out
check "which says that its rates were measured" grep -q 'with rates that --measure wrote to machine.json' plan.out
ranks 2 "$cpu" "${tiny[@]}" --run-dir planned --steps 12 --tp 2 --kv-heads 2 --machine machine.json >planned.out 2>&1
check "a run compares its steps with the plan" grep -q '"step":11,"planned_ms":.*"measured_ms":' planned/log.jsonl

ranks 2 "$cpu" "${tiny[@]}" --run-dir chosen --kv-heads 2 --tp auto --pp auto --global-batch 384 --machine machine.json >chosen.out 2>&1
check "and takes the layout of a plan" grep -qE '"layout":\{("dp":2,"tp":1,"cp":1,"pp":1|"dp":1,"tp":2,"cp":1,"pp":1|"dp":1,"tp":1,"cp":1,"pp":2),' chosen/log.jsonl

# output
run wide "$cpu" --vocab-size 2000 --sample-every 6 --sample-tokens 40
check "a vocabulary wider than the tokenizer's can be sampled" test -e wide/checkpoints/*/index.bin
"$cpu" sample long --tokens 5 >/dev/full 2>full.err
check "output that is lost is not passed over" test $? = 1 -a "$(wc -l <full.err)" = 1
"$cpu" "${tiny[@]}" --run-dir closed --steps 100000 2>closed.err | head -1 >/dev/null
codes=${PIPESTATUS[0]}
check "a closed pipe ends the run as asked, with a checkpoint" eval \
    '[ $codes = 0 ] && grep -q "^train_gpt: nobody reads the output any more: stopped after step [0-9]*; the checkpoint is closed/checkpoints/step_" closed.err && "$cpu" sample closed --tokens 1'

# a run that is asked to stop
"$cpu" "${tiny[@]}" --run-dir stopped --steps 100000 >stopped.out 2>&1 &
pid=$!
wait_for 60 has_steps stopped 5
"$cpu" "${tiny[@]}" --run-dir stopped --overwrite >/dev/null 2>busy.err
check "two runs do not share a directory" grep -q 'stopped: another process is training there; ' busy.err
kill -INT $pid
wait $pid
check "Ctrl-C ends with exit code 0" test $? = 0
check "Ctrl-C leaves the weights" "$cpu" sample stopped --tokens 1
check "Ctrl-C leaves a whole log" test "$(grep -c '}$' stopped/log.jsonl)" = "$(wc -l <stopped/log.jsonl)"

# a run whose time has elapsed, on a slow machine perhaps after one step
limited=("${tiny[@]}" --steps 100000000 --max-time 2s --log-every 100000 --micro-batch 1)
"$cpu" "${limited[@]}" --run-dir limited1 >limited1.out 2>&1 &
pid=$!
ranks 2 "$cpu" "${limited[@]}" --run-dir limited2 >limited2.out 2>&1
codes=$?
wait $pid
codes+=" $?"
for n in 1 2; do
    check "--max-time 2s ends a run of -np $n as one that is asked to stop" eval \
        '[ "$codes" = "0 0" ] && step=$(sed -nE "s/^--max-time: stopping after step ([0-9]+), then saving$/\1/p" limited$n.out) &&
        grep -q "^stopped as asked after step $step; " limited$n.out && "$cpu" sample limited$n --tokens 1'
done

# data that turns out to be bad: one token is not in the vocabulary
cp data/text_train_000000.bin bad.bin
printf '\xff\xff' | dd of=bad.bin bs=1 seek=$(($(stat -c %s bad.bin) - 2000)) conv=notrunc status=none
"$cpu" "${tiny[@]/data\/text_train_*.bin/bad.bin}" --run-dir bad --steps 100000 >bad.out 2>bad.err
check "a token outside the vocabulary ends the run with exit code 1" test $? = 1 -a "$(wc -l <bad.err)" = 1
check "and names the file and the checkpoint" grep -qE '^train_gpt: bad.bin: token .* vocabulary .*; the run up to step [0-9]+ is saved in bad/checkpoints/' bad.err
check "and leaves the weights" "$cpu" sample bad --tokens 1

# a step that is not finite
"$cpu" "${tiny[@]}" --run-dir diverged --steps 100 --learning-rate 10 --weight-decay 1 --warmup-steps 0 --schedule constant >diverged.out 2>diverged.err
check "a step that is not finite ends the run with exit code 70" test $? = 70
check "and says what was seen" grep -qE 'step [0-9]+: loss .* gradient norm .* not finite' diverged.err
# Their logits may not be finite any more, which sample reports.
check "and leaves whole weights" grep -qE 'tokens/s|: the logit of token [0-9]+ is |: all logits are -inf' <("$cpu" sample diverged --tokens 1 2>&1)

# the memory report
"$cpu" "${tiny[@]}" --run-dir memory --layers 6 --channels 512 --heads 8 --context 256 --micro-batch 8 --steps 1 --warmup-steps 0 >memory.out 2>&1 &
pid=$!
peak=0
while kill -0 $pid 2>/dev/null; do
    now=$(sed -nE 's/VmHWM:[[:space:]]*([0-9]+) kB/\1/p' /proc/$pid/status 2>/dev/null)
    [ "${now:-0}" -gt "$peak" ] && peak=$now
    sleep 0.02
done
promised=$(sed -nE 's/^memory .* ([0-9.]+) MiB in all.*/\1/p' memory.out)
# the program itself, its libraries, their buffers and the product that measures the GEMM rate need up to 150 MiB
check "memory stays within the report (peak $((peak / 1024)) MiB, report $promised MiB)" \
    awk -v peak="$peak" -v promised="$promised" 'BEGIN { exit !(promised > 0 && peak > 0 && peak / 1024 < promised + 150) }'

# several processes
if command -v mpirun >/dev/null; then
    check "mpirun -np 1 trains" ranks 1 "$cpu" "${tiny[@]}" --run-dir one
    ranks 2 "$cpu" inspect one >two.out 2>&1
    check "inspecting in two processes is refused, once" test $? != 0 -a "$(grep -c 'runs in a single process' two.out)" = 1
else
    skip "no mpirun here" 2
fi

# A model that is imported, trained, resumed and exported keeps the config that it was published with.
published_stays() {
    "$cpu" export plain --output made &&
        sed -i 's/"eos_token_id": 256/"eos_token_id": [\n    256,\n    7\n  ],\n  "nobody_knows": 3/' made/config.json &&
        grep -q nobody_knows made/config.json &&
        "$cpu" tokenize "$text" --output data/made --tokenizer made &&
        "$cpu" import made --output imported && "$cpu" train --init imported --run-dir tuned "${few[@]}" --steps 1 &&
        "$cpu" train --resume tuned --run-dir tuned "${few[@]}" --steps 2 && "$cpu" export tuned --output again &&
        diff made/config.json again/config.json && diff made/tokenizer_config.json again/tokenizer_config.json
} >published.out 2>&1
few=(--train-data 'data/made_train_*.bin' --micro-batch 2)
check "an imported model goes out with the config that it came with" published_stays

# Weights get a longer context, which is exported with them.
longer() {
    "$cpu" train --init plain --run-dir longer --train-data 'data/text_train_*.bin' --micro-batch 2 --context 96 --rope-scaling 2 \
        --steps 2 && "$cpu" export longer --output stretched && grep -q '"max_position_embeddings": 96,' stretched/config.json &&
        tr -d ' \n' <stretched/config.json | grep -q '"factor":2.0,.*"original_max_position_embeddings":48}' &&
        "$cpu" import stretched --output back &&
        "$cpu" inspect back | grep -A 9 '^options' | tr -s ' \n' ' ' | grep -q -- '--context 96 .*--rope-original-context 48 '
} >longer.out 2>&1
check "--init gives a model with RoPE a longer context, for which it is scaled" longer
