#!/usr/bin/env bash
# Two supervised runs of 8 ranks on four and three hosts (simulated: all are this machine), in which random failures strike one
# after another, and nobody intervenes. The run that keeps its layout ends with the bits of a run without failures; the other lacks
# hosts for a while, and ends with losses that differ by at most 1e-5.
#
#   SEED=N    repeats the random events of an earlier run, which printed it; EVENTS=N how many (10)
#
# The events, and the expected outcome of each:
#     kill      a rank is killed                                a restart
#     stop      a rank is stopped, and no longer answers        a restart
#     full      the disk is full while checkpoints are due      the run continues, and saves when there is room again
#     host      a host goes down with its ranks, and comes      a spare takes over
#               back once the run has continued
#     fewer     all hosts but one do so at the same time; if    fewer ranks continue
#               the run is on one host, that host is among them
#     damage    the newest checkpoint is damaged, and a rank    a restart from the one before
#               is killed
#     orphan    the supervisor is killed, and a new one starts  nothing is lost
# Every forty steps the data is a spike (random tokens), whose update is skipped with and without failures.
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs cpu-fp32/plant_spikes
# waits: yes
# seconds: 100
# soak: EVENTS=100
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
. test/support/seed.sh
. test/support/jobs.sh
. test/support/launches.sh
events=${EVENTS:-10}
plan $((events + 8))
cpu=$PWD/build/cpu-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs plant=$PWD/build/cpu-fp32/plant_spikes
command -v mpirun >/dev/null || { skip "no mpirun here" $((events + 8)); exit; }
at_end() {
    kill -9 "$supervisor" 2>/dev/null
    # shellcheck disable=SC2046  # a list of numbers
    kill -9 $(pgrep -f "^($cpu|mpirun) .*--run-dir $work/") 2>/dev/null
    umount "$work/disk" 2>/dev/null
}
cd "$work" || exit 1
export OMP_NUM_THREADS=1
"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
# questions for evaluations between steps
printf '{"context": "a", "choices": ["b", "cd", "e"], "answer": 0}\n' >questions.jsonl
model=(train --model tiny --layers 1 --channels 32 --heads 2 --mlp-width 48 --context 48 --micro-batch 1 --global-batch 384
    --warmup-steps 0 --learning-rate 1e-3 --log-every 100000 --train-data "$work/text_train_*.bin" --seed 1337
    --tokenizer bytes --val-data "$work/text_train_000000.bin" --val-tokens 384 --val-every 7 --choices "$work/questions.jsonl" --choices-every 5)
# Spikes stand out once the loss has stopped falling fast.
"$cpu" "${model[@]}" --steps 300 --run-dir begun >begun.out 2>&1 || echo "FAILED to begin"
# a step has 8 samples of 48 tokens
# shellcheck disable=SC2046  # a list of numbers
"$plant" text_train_000000.bin 48 1337 $(for step in $(seq 70 40 $((events * 13 + 70))); do seq $((8 * step - 8)) $((8 * step - 1)); done) ||
    echo "FAILED to plant spikes"
# Losses of two layouts agree to 1e-5 only while training is smooth (check_launch.sh).
tiny=("${model[@]}" --learning-rate 3e-4 --init "$work/begun" --zero 1 --spike-sigma 6
    --throttle-link 0.0012) # about 100 ms a step, during which processors are mostly idle

# Each half of the events strikes its own run: one that keeps its layout, and one that may continue with fewer ranks.
kinds_same=(kill stop full host damage orphan)
kinds_changed=(kill fewer orphan)
every=25 # steps from one event to the next, roughly: each event strikes after all steps that ran before it

# ----------------------------------------------------------------------------------------------------------
# events: each function returns when its event has struck; $struck is then the run's last step

victim() { ranks_of "$run" | shuf -n 1 --random-source=<(yes $RANDOM); }
strike_kill() { kill -9 "$(victim)"; }
strike_stop() { kill -STOP "$(victim)"; }
strike_damage() {
    local newest file
    newest=$(find "$run/checkpoints" -maxdepth 1 -regex '.*/step_[0-9]+' | sort | tail -1)
    file=$(find "$newest" -name 'data_*.bin' | sort | head -1)
    [ -z "$file" ] || printf 'damage' | dd of="$file" bs=1 seek=200 conv=notrunc status=none
    strike_kill
}
# The run is on a small tmpfs if one can be mounted; otherwise no disk can be filled, and the event is a kill.
strike_full() {
    if mountpoint -q disk; then
        head -c 100M /dev/zero >disk/filler 2>/dev/null
        sleep 1
        rm -f disk/filler
    else
        strike_kill
    fi
}
strike_orphan() {
    kill -9 "$supervisor"
    wait "$supervisor" 2>/dev/null
    supervise
}
# Prints the hosts that have ranks of the run, in random order.
taking_part() { sed -n '/"hosts"/,/"aside"/p' "$run/supervisor.json" | sed -nE 's/.*"name": "(.*)".*/\1/p' | shuf --random-source=<(yes $RANDOM); }
down=()
strike_host() {
    down=("$(taking_part | head -1)")
    host_down "${down[0]}"
}
strike_fewer() {
    local host left
    left=$(taking_part | head -1)
    # A run that is already on a single host has to move.
    [ "$(taking_part | wc -l)" -gt 1 ] || left=$(grep -v "^$left " "hosts_$run" | shuf -n 1 --random-source=<(yes $RANDOM) | cut -d' ' -f1)
    for host in $(grep -v "^$left " "hosts_$run" | cut -d' ' -f1); do
        down+=("$host")
        host_down "$host"
    done
}

# ----------------------------------------------------------------------------------------------------------
# a run

supervise() {
    launch "$run" --hosts "hosts_$run" --ranks 8 "${spares[@]}" --launcher "$on_hosts" --check-timeout 60 --backoff 0.1 --grace 2 \
        --hang-timeout 4 --max-restarts 1000 -- "${tiny[@]}" --steps "$steps" --save-every 10
}
now() { date +%s.%N; }
spikes_of() { grep '"skipped":true' "$1/log.jsonl" | grep -oE '^\{"step":[0-9]+'; }
same_spikes() { [ "$(spikes_of "$1" | wc -l)" -gt 0 ] && diff <(spikes_of "$1") <(spikes_of "$2"); }
goes_on() { is_past "$run" "$struck"; }

# disturb    strikes $count times with events of $kinds, and checks after each that the run continues
disturb() {
    local i kind begun
    for ((i = 0; i < count; i++)); do
        kind=${kinds[RANDOM % ${#kinds[@]}]}
        # Each kind comes once before any comes twice.
        [ $i -ge ${#kinds[@]} ] || kind=${kinds[i]}
        wait_for 300 is_past "$run" $(((i + 1) * every + RANDOM % 8)) || { echo "FAILED event $i, $kind: the run is not there"; tail -3 "$run.out"; continue; }
        struck=$(last_step "$run")
        begun=$(now)
        "strike_$kind"
        struck=$(last_step "$run")
        [ "$kind" != full ] || begun=$(now)
        if wait_for 300 goes_on; then
            echo "ok event $i of $run: $kind after step $struck"
            echo "$kind $begun $(now)" >>times
        else
            echo "FAILED event $i of $run: $kind after step $struck"
            tail -5 "$run.out"
        fi
        for host in "${down[@]}"; do host_up "$host"; done
        down=()
    done
}

# whole NAME KINDS...    a run from start to end, with events of these kinds
whole() {
    run=$1
    shift
    kinds=("$@")
    steps=$(((count + 1) * every + 20))
    RANKS_TIMEOUT=300 ranks 8 "$cpu" "${tiny[@]}" --throttle-link 0 --steps $steps --run-dir "plain_$run" >"plain_$run.out" 2>&1 || echo "FAILED to run plain_$run"
    supervise
    disturb
    check "$run: nobody looked after it, and it is done" eval 'launched "$run" 120 && [ "$code" = 0 ]'
    check "$run: the same spikes were left out as without failures" same_spikes "$run" "plain_$run"
    check "$run: every restart was told of" eval '[ "$(wc -l <"$run/incidents.jsonl")" -ge 1 ] && grep -q "of .* in training" "$run.out"'
}

mkdir disk
mount -t tmpfs -o size=24m tmpfs disk 2>/dev/null
mkdir -p disk/same && ln -s disk/same same
printf '%s slots=4\n' alpha beta gamma delta >hosts_same
printf '%s slots=4\n' alpha beta gamma >hosts_changed
count=$(((events + 1) / 2)) spares=(--spares 2)
whole same "${kinds_same[@]}"
check "same: the bits of a run without failures" "$compare" same plain_same --bitwise
count=$((events - count)) spares=(--spares 1)
whole changed "${kinds_changed[@]}"
check "changed: the losses of a run without failures" same_losses changed plain_changed

# Seconds from an event to the next step.
echo "kind       events   median    worst"
for kind in kill stop full host fewer damage orphan; do
    awk -v kind=$kind '$1 == kind { print $3 - $2 }' times | sort -n | awk -v kind=$kind '
        { value[NR] = $1 }
        END { if (NR) printf "%-10s %6d %8.2f %8.2f\n", kind, NR, value[int((NR + 1) / 2)], value[NR] }'
done
