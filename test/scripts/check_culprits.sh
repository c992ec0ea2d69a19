#!/usr/bin/env bash
# The rank that keeps eight ranks from making progress is named from the records of all of them: a rank that is stopped, whose
# device hangs, whose messages are lost, whose disk does not answer, or that dies; if two fail at once, either of them. No rank
# is named while ranks are merely slow.
#
#   SEED=N    repeats an earlier run, which printed it; CASES=N how many cases (6), of which one in each twenty
#             may be named wrongly; HEALTHY=N how many runs on a busy machine (1)
# suite: test-all
# needs: cpu-fp32/train_gpt cpu-fp32/fault_injection.so
# waits: yes
# seconds: 60
# soak: CASES=40 HEALTHY=20
# limit: 7200
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
. test/support/seed.sh
. test/support/jobs.sh
cases=${CASES:-6} healthy=${HEALTHY:-1}
plan $((2 + healthy))
cpu=$PWD/build/cpu-fp32/train_gpt faults=$PWD/build/cpu-fp32/fault_injection.so
command -v mpirun >/dev/null || { skip "no mpirun here" $((2 + healthy)); exit; }
command -v pgrep >/dev/null || { echo "FAILED pgrep is not here; install procps"; exit 1; }
at_end() { kill_all; }
cd "$work" || exit 1
export OMP_NUM_THREADS=1
mkfifo quiet && exec 9<>quiet # an input for agents, which never ends

"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
# evaluations run between steps, and hang like them
printf '{"context": "a", "choices": ["b", "cd", "e"], "answer": 0}\n' >questions.jsonl
tiny=(train --model tiny --layers 4 --channels 64 --heads 4 --mlp-width 96 --context 64 --steps 100000 --micro-batch 1
    --global-batch $((16 * 64)) --warmup-steps 0 --learning-rate 1e-3 --train-data 'text_train_*.bin' --communication-timeout 3
    --tokenizer bytes --val-data text_train_000000.bin --val-tokens 256 --val-every 5 --choices questions.jsonl --choices-every 3)
layouts=("--zero 1" "--tp 2 --zero 2" "--pp 4 --zero 1" "--tp 2 --pp 2 --zero 1 --shard-group 1" "--zero 3" "--tp 4 --pp 2"
    "--pp 2 --pp-schedule zero-bubble --zero 1" "--zero 2 --shard-group 4" "--zero 0" "--tp 2 --pp 2 --zero 1 --shard-group 2"
    "--cp 2 --tp 2 --zero 1 --context 256" "--cp 4 --pp 2 --zero 2 --context 512 --global-batch 2048")
kinds=(stopped endless lost write dead two read)

# named WORDS RANK...    the line that ends the job has these words, and one of these ranks
named() {
    local words=$1 line rank
    shift
    line=$(sentence) && [ -n "$line" ] || return 1
    for rank in "$@"; do
        # the line about a link lists a group, too
        if grep -qE "$words" <<<"$line" && grep -qE "(rank $rank \(|[{ ]$rank[,}])" <<<"$line"; then return; fi
    done
    return 1
}
# recorded NAME    at least four ranks have a record, each whole; on a busy machine some do not answer in time
recorded() {
    local files=("$1"/stall-*/rank-*.json)
    [ ${#files[@]} -ge 4 ] && [ "$(cat "${files[@]}" | grep -c '"groups"')" = ${#files[@]} ] && return
    ls "$1"/stall-*; tail -n 3 "$1.err"
    return 1
}
# prints the line that ends the job, without the rank that waited and its phase
sentence() { grep -m 1 -oP '^train_gpt: communication: \K.*(?=[;,] (rank|in the phase) )' "$name.err"; }
signal() { kill -"$1" "$(rank_pids "$name" | sed -n "$(($2 + 1))p")"; }

# one KIND RANK OTHER OPTIONS...    a run with this fault; true if its watchdogs, or the agent, name the rank
one() {
    local kind=$1 victim=$2 other=$3 fault=()
    shift 3
    case $kind in
    endless | two) fault=(FAULT=stall FAULT_CALLS=product FAULT_WHEN="$work/$name.now" FAULT_AT=$((1 + RANDOM % 60))) ;;
    lost) fault=(FAULT=lose FAULT_CALLS=message FAULT_WHEN="$work/$name.now" FAULT_AT=$((1 + RANDOM % 60))) ;;
    write) fault=(FAULT=stall FAULT_CALLS=write FAULT_AT=1) ;;
    read) fault=(FAULT=stall FAULT_CALLS=touch FAULT_MAPPED=text_train FAULT_WHEN="$work/$name.now" FAULT_AT=1) ;;
    esac
    [ $kind != write ] || set -- "$@" --save-every 3
    start_job "$name" 8 env LD_PRELOAD="$faults" FAULT_RANK="$victim" FAULT_SECONDS=1000 FAULT_AT=0 "${fault[@]}" "$cpu" "${tiny[@]}" "$@"
    wait_for 60 has_steps "$name" 2 || { echo "does not start"; return 1; }
    [ $kind != dead ] || { "$cpu" agent --run-dir "$name" --every 0.05 --hang-timeout 2 <&9 >"$name.agent" & agent=$!; sleep 0.3; }
    sleep 0.$((RANDOM % 10))
    touch "$name.now"
    case $kind in
    stopped) signal STOP "$victim" ;;
    dead) signal KILL "$victim" ;;
    two) signal STOP "$other" ;;
    esac
    ended "$name" 40 || { echo "goes on"; return 1; }
    case $kind in
    stopped) named 'is stopped' "$victim" ;;
    endless) named 'has not|is stuck' "$victim" ;;
    lost) named 'look at the links' "$victim" ;;
    write | read) named 'is blocked on a disk' "$victim" ;;
    two) named 'has not|is stuck|is stopped' "$victim" "$other" ;;
    dead)
        kill $agent 2>/dev/null
        wait $agent 2>/dev/null
        grep -m 1 '"verdict":{"kind":"dead"' "$name.agent" | grep -qE "\"ranks\":\[$victim\],\"sentence\""
        ;;
    esac
}

right=0 alone=0
for ((i = 0; i < cases; i++)); do
    name=case$i kind=${kinds[i % ${#kinds[@]}]} victim=$((RANDOM % 8))
    other=$(((victim + 1 + RANDOM % 7) % 8))
    read -ra layout <<<"${layouts[RANDOM % ${#layouts[@]}]}"
    [ "$kind" != two ] || also=" and $other"
    if one "$kind" "$victim" "$other" "${layout[@]}"; then
        right=$((right + 1)) says=right
        [ "$(sentence | grep -oE 'rank [0-9]+ \(' | sort -u | wc -l)" -gt 1 ] || alone=$((alone + 1))
    else
        says=WRONG
        grep '^train_gpt: ' "$name.err" | tail -n 3
    fi
    echo "$says: $kind: rank $victim${also:-} of ${layout[*]}: $(sentence)"
    [ "$kind" != two ] || also=
    kill_job "$name"
    [ $i != 0 ] || [ "$kind" != stopped ] || check "the records are files of the run" recorded "$name"
done
echo "$right of $cases named right, $alone of them alone"
check "no more than one in each twenty is named wrongly" test $((cases - right)) -le $(((cases + 19) / 20))

# accused NAME PATIENCE    runs a job to its end while other processes keep the cores busy; sets code; true if the agent accuses a rank
accused() {
    local name=$1 agent busy=()
    start_job "$name" 8 "$cpu" "${tiny[@]}" "${layout[@]}" --steps 12 --communication-timeout 60 --overwrite
    "$cpu" agent --run-dir "$name" --every 0.1 --hang-timeout "$2" <&9 >"$name.agent" &
    agent=$!
    for core in 1 2 3; do
        timeout 300 sh -c 'while :; do :; done' &
        busy+=($!)
    done
    ended "$name" 280
    kill $agent "${busy[@]}" 2>/dev/null
    grep -q verdict "$name.agent"
}
# stalled NAME SECONDS    one of its steps took this long, so an agent with this patience was right to accuse
stalled() { grep -oP '"ms":\K[0-9.]+' "$1/log.jsonl" | awk -v least="$2" '$1 >= 1000 * least { found = 1 } END { exit !found }'; }
# Every rank gets less CPU time than it could use.
for ((i = 0; i < healthy; i++)); do
    name=healthy$i
    read -ra layout <<<"${layouts[RANDOM % ${#layouts[@]}]}"
    for patience in 2 8 32; do
        accused "$name" $patience && stalled "$name" $patience || break
    done
    check "nobody is accused in a healthy run ${layout[*]}" eval "test $code = 0 && ! grep -q verdict $name.agent && ! grep -q culprit $name.err && grep -q '\"rank\":7' $name.agent"
done
