#!/usr/bin/env bash
# A run reports its own times: phases of every step, all ranks in ranks.jsonl, a timeline, and the flight record.
# needs: cpu-fp32/train_gpt
# seconds: 15
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
cpu=$PWD/build/cpu-fp32/train_gpt
plan 17
cd "$work" || exit 1

"$cpu" tokenize "$text" --output text --val-fraction 0 >tokenize.out || echo "FAILED tokenize"
tiny=(train --model tiny --layers 4 --channels 32 --heads 2 --kv-heads 1 --mlp-width 48 --context 48
    --train-data 'text_train_*.bin' --micro-batch 2 --global-batch 384 --learning-rate 1e-2 --log-every 10)

# lines FIELD RUN [FILE]    lines with that field
lines() { grep -c "\"$1\":" "$2/${3:-log.jsonl}"; }
losses() { sed -nE 's/.*"loss":([-+.0-9e]+).*/\1/p' "$1/log.jsonl"; }
records() { grep -lsa "$work/$1" /dev/shm/train_gpt.* | wc -l; } # counts the records of this run

ranks 4 "$cpu" "${tiny[@]}" --pp 2 --steps 22 --save-every 10 --keep 3 --trace-steps 4:5 --run-dir "$work/on" >on.out 2>&1 ||
    { echo "FAILED to run"; cat on.out; }
check "every step has its phases" test "$(lines timings on)" = 22
check "forward and backward have a rank that is slowest" \
    grep -qE '"timings":\{"ms":\{("data":[^]]*\],)?"forward":\[[0-9.]+,[0-9.]+,[0-9.]+,[0-3]\],"backward":\[' on/log.jsonl
check "ranks.jsonl begins with the places of all ranks" \
    grep -q '"places":\[\[0,0,0,0,0\],\[0,0,0,1,0\],\[0,0,0,0,1\],\[0,0,0,1,1\]\]' <(head -1 on/ranks.jsonl)
check "it has the means of every rank" grep -qE '"ms":\{("data":[^]]*\],)?"forward":\[[0-9.]+,[0-9.]+,[0-9.]+,[0-9.]+\]' on/ranks.jsonl
check "and the pipeline beside the ideal one" grep -q '"pipeline":{"measured":\[{"stage":0,.*"ideal_idle":' on/ranks.jsonl
check "what events cost is told" grep -qE '^timings +[0-9]+ events a step, [0-9.]+ us each' on.out
check "the timeline is whole" grep -q '"clock_error_us"' <(gunzip -c on/trace_000004.json.gz)
for rank in 0 3; do
    check "rank $rank is on the timeline, with both steps" test "$(gunzip -c on/trace_000004.json.gz |
        grep -cE "\"name\":\"step [45]\".*\"pid\":$rank,")" = 2
done
check "the records of a run that has ended are gone" test "$(records on)" = 0

ranks 4 "$cpu" "${tiny[@]}" --pp 2 --steps 22 --timings off --run-dir off >off.out 2>&1
check "with --timings off there are none" test "$(lines timings off)-$(ls off | grep -c ranks.jsonl)" = 0-0
check "and the losses are the same, bit for bit" diff <(losses on) <(losses off)

ranks 4 "$cpu" "${tiny[@]}" --pp 2 --steps 24 --resume on/checkpoints/step_00000010 --run-dir on >resumed.out 2>&1
check "a run that goes on tells of each step once" test "$(lines timings on)" = 24
check "in ranks.jsonl too" test "$(grep -c '"step":20,.*"pipeline"' on/ranks.jsonl)" = 1

# A rank that is frozen for half a second is in the log. If it was frozen between two steps, which no phase counts, it is
# frozen again.
frozen_phases() { # true if a phase took at least half a second
    awk -F'"timings":' '
        NF > 1 { n = split($2, numbers, /[^0-9.]+/); for (i = 1; i <= n; i++) if (numbers[i] >= 500) found = 1 }
        END { exit !found }' "$1/log.jsonl"
}
freeze_until_seen() {
    local try steps
    for try in 1 2 3 4 5; do
        kill -STOP "$run" && sleep 0.6 && steps=$(grep -c '"loss"' freezes/log.jsonl)
        kill -CONT "$run"
        wait_for 30 has_steps freezes $((steps + 3))
        frozen_phases freezes && return
    done
    return 1
}
"$cpu" "${tiny[@]}" --steps 1000000 --save-every 0 --run-dir "$work/freezes" >freezes.out 2>&1 &
run=$!
wait_for 30 has_steps freezes 20
check "a run that is under way has its record in shared memory" test "$(records freezes)" = 1
check "a freeze of half a second is in the log" freeze_until_seen
kill -USR1 $run && wait $run

refused() {
    local steps
    for steps in 0:3 5:4 3: x 1:2:3 99:100 -1; do
        "$cpu" "${tiny[@]}" --steps 50 --run-dir refused --trace-steps "$steps" >refused.out 2>&1 && return 1
        [ "$(grep -c -- '--trace-steps' refused.out)" = 1 ] || return 1
    done
    "$cpu" "${tiny[@]}" --steps 50 --run-dir refused --trace-steps 4 --timings off >refused.out 2>&1 && return 1
    grep -q -- 'nothing is recorded' refused.out
}
check "steps that there are not are refused in a line" refused
