#!/usr/bin/env bash
# Runs that are killed, and disks that fail, at any moment: what is in `checkpoints` is intact, and --resume auto reaches the
# bits of an undisturbed run. fault_injection.cc strikes a run at a given call to the file system.
#
#   SEED=N    repeats the random moments of an earlier run, which printed it; KILLS=N how many kills (4)
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs cpu-fp32/fault_injection.so
# seconds: 150
# soak: KILLS=300 EVERY=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
. test/support/seed.sh
. test/support/jobs.sh
kills=${KILLS:-4}
plan $((2 + 5 + 7 + 2 + 2 + kills + 1)) # plus the checks for each call of a save, below
cpu=$PWD/build/cpu-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs faults=$PWD/build/cpu-fp32/fault_injection.so
at_end() {
    kill_all
    umount "$work/small" 2>/dev/null
}
cd "$work" || exit 1
export OMP_NUM_THREADS=1

"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
tiny=(train --model tiny --layers 1 --channels 32 --heads 2 --mlp-width 48 --context 48 --micro-batch 2 --warmup-steps 0
    --train-data 'text_train_*.bin' --ngram 1,2 --ngram-rows 200 --ngram-width 8 --ngram-place disk --ngram-cache 64k)
# Three saves: the first makes the folder, the second deletes the first, and the third is like the second.
saves=(--steps 6 --save-every 2 --keep 1)

# train NAME OPTIONS...    in one process
train() { "$cpu" "${tiny[@]}" "${saves[@]}" --run-dir "$@" >>"$1.out" 2>>"$1.err"; }
# struck FAULT K NAME OPTIONS...    the same, with the fault at its K-th call
struck() { LD_PRELOAD=$faults FAULT=$1 FAULT_AT=$2 train "${@:3}"; }

steps_of() { find "$1/checkpoints" -maxdepth 1 -regex '.*/step_[0-9]+' 2>/dev/null; }
# whole NAME    every checkpoint passes inspection
whole() {
    local folder
    for folder in $(steps_of "$1"); do
        "$cpu" inspect "$folder" --verify on >"$1.inspected" 2>&1 || return 1
    done
}
# holds NAME STEPS    the run's `checkpoints` holds these and nothing else
holds() { [ "$(find "$1/checkpoints" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort | xargs)" = "$2" ]; }
# agrees NAME REFERENCE    to the last bit
agrees() { "$compare" "$1" "$2" --bitwise >"$1.compared" 2>&1; }

# report LABEL TROUBLE NAME    prints one line for the check; if there is trouble, the run's messages too
report() {
    if [ -z "$2" ]; then
        echo "ok $1"
    else
        echo "FAILED $1: $2: $(grep -h '^train_gpt' "$3.err" | tail -2 | xargs -0)"
    fi
    rm -rf "$3" "$3".*
}

train plain || echo "FAILED to run plain"
reference=plain

# ----------------------------------------------------------------------------------------------------------
# killed at every point of a save

# killed FAULT K POINT SAVED OPTIONS...    SAVED: yes if a checkpoint is complete by then
killed() {
    local fault=$1 k=$2 point=$3 saved=$4 name=$1-$2-$6 trouble=
    shift 4
    { struck "$fault" "$k" "$name" "$@"; } 2>/dev/null
    local code=$?
    if [ $code != 137 ]; then
        trouble="exit code $code, not killed"
    elif [ "$saved" = yes ] && [ -z "$(steps_of "$name")" ]; then
        trouble="no checkpoint is left"
    elif ! whole "$name"; then
        trouble="leaves a damaged checkpoint: $(tail -1 "$name.inspected")"
    elif ! train "$name" --resume auto "$@"; then
        trouble="cannot be resumed"
    elif ! agrees "$name" $reference; then
        trouble=$(<"$name.compared")
    elif ! holds "$name" step_00000006; then
        trouble="leaves $(ls -x "$name/checkpoints")"
    elif [ "$fault $k" = "kill $committed" ] && ! grep -q 'resumes after step 2$' "$name.out"; then
        trouble="the checkpoint that lacked only its name is not used"
    fi
    report "$fault before call $k, $point, $*" "$trouble" "$name"
}

# points NAME OPTIONS...    sets `points`, the calls of the first two saves of a run, and `committed`, the call that gives
# the first checkpoint its name
points() {
    FAULT_LIST=$work/$1.points struck none 0 "$@"
    mapfile -t points < <(sed '/mkdir.*step_00000006/,$d' "$1.points")
    committed=$(sed -nE 's/^([0-9]+) rename .*step_00000002$/\1/p' "$1.points" | head -1)
    if [ "${#points[@]}" -ge 20 ] && [ -n "$committed" ]; then
        echo "ok two saves make ${#points[@]} calls${2:+, ${*:2}}"
    else
        echo "FAILED ${#points[@]} calls to the file system in two saves, the first committed by call ${committed:-none}"
    fi
}

# sparse    prints the first and the last of each series of equal calls
sparse() {
    local point before= again=0 i
    for ((i = 0; i < ${#points[@]}; i++)); do
        point=${points[i]#* }
        if [ "$point" = "$before" ]; then again=$((again + 1)); else again=0; fi
        before=$point
        if [ $again = 0 ] || [ "${points[i + 1]#* }" != "$point" ]; then echo "${points[i]}"; fi
    done
}

# number_of CALLS...    how many of the points are such calls
number_of() { printf '%s\n' "${points[@]}" | grep -cE "^[0-9]+ ($1) "; }

points listed --async-save on
[ -n "$EVERY" ] || mapfile -t points < <(sparse)
plan "$(number_of '.*')"
for point in "${points[@]}"; do
    read -r k call file <<<"$point"
    at_once killed kill "$k" "$call $file" "$([ "$k" -gt "${committed:-0}" ] && echo yes)" --async-save on
done
points waited --async-save off
mapfile -t points < <(sparse)
plan $(($(number_of '.*') + $(number_of write)))
for point in "${points[@]}"; do
    read -r k call file <<<"$point"
    saved=$([ "$k" -gt "${committed:-0}" ] && echo yes)
    at_once killed power "$k" "$call $file" "$saved" --async-save off
    [ "$call" != write ] || at_once killed torn "$k" "$call $file" "$saved" --async-save off
done
wait

# ----------------------------------------------------------------------------------------------------------
# tables on disk that are larger than their cache: killed at every call to their files, and calls that fail

# unlucky ERROR WORDS K POINT    the run reports the error; if that ends it, it can be resumed
unlucky() {
    local error=$1 words=$2 k=$3 name=$1-$3-tables point=$4 trouble=
    struck "$error" "$k" "$name"
    local code=$?
    if ! cat "$name.out" "$name.err" | grep -q "$words"; then
        trouble="nothing is said"
    elif [ $code != 0 ] && ! train "$name" --resume auto; then
        trouble="cannot be resumed after exit code $code"
    elif ! agrees "$name" tabled || ! whole "$name"; then
        trouble="the run is another: $(cat "$name.compared" "$name.inspected")"
    fi
    report "$error at call $k, $point" "$trouble" "$name"
}
of_saves=("${points[@]}") small=("${tiny[@]}") reference=tabled committed=
tiny=("${tiny[@]/#200/3000}") tiny=("${tiny[@]/#64k/110k}")
train tabled || echo "FAILED to run tabled"
export FAULT_BELOW=tables
FAULT_LIST=$work/tables.points struck none 0 listed-tables --async-save on
mapfile -t points <tables.points
[ -n "$EVERY" ] || mapfile -t points < <(sparse | awk 'NR % 4 == 1')
plan "$(($(number_of '.*') + $(number_of 'sync|write')))"
for point in "${points[@]}"; do
    read -r k call file <<<"$point"
    at_once killed kill "$k" "$call $file" '' --async-save on
    [ "$call" != write ] || at_once unlucky ENOSPC 'No space left' "$k" "$call $file"
    [ "$call" != sync ] || at_once unlucky EIO 'Input/output error' "$k" "$call $file"
done
wait
unset FAULT_BELOW
points=("${of_saves[@]}") tiny=("${small[@]}") reference=plain

# ----------------------------------------------------------------------------------------------------------
# calls that fail

# failed ERROR WORDS K POINT    the run continues to its end, and reports the error
failed() {
    local error=$1 words=$2 k=$3 name=$1-$3 point=$4 trouble=
    if ! struck "$error" "$k" "$name" --async-save off; then
        trouble="exit code not 0"
    elif ! cat "$name.out" "$name.err" | grep -q "$words"; then
        trouble="nothing is said"
    elif ! agrees "$name" plain || ! whole "$name"; then
        trouble="the run is another: $(cat "$name.compared" "$name.inspected")"
    fi
    report "$error at call $k, $point" "$trouble" "$name"
}
plan $(($(number_of '.*') + $(number_of 'write|create')))
for point in "${points[@]}"; do
    read -r k call file <<<"$point"
    at_once failed EIO 'Input/output error' "$k" "$call $file"
    [[ $call != write && $call != create ]] || at_once failed ENOSPC 'No space left' "$k" "$call $file"
done
wait

# a disk that is full from call K on, for as long as the run lasts
lasting() {
    local k=$1 name=lasting-$1 trouble=
    FAULT_LASTING=1 FAULT_CALLS=$need_space struck ENOSPC "$k" "$name" --disk-wait 0
    local code=$?
    if [ $code != 1 ]; then
        trouble="exit code $code, but the last save failed"
    elif ! has_steps "$name" 6; then
        trouble="did not go on"
    elif [ "$(steps_of "$name")" != "$name/checkpoints/step_00000002" ] || ! whole "$name"; then
        trouble="the first checkpoint is gone"
    elif ! train "$name" --resume auto || ! agrees "$name" plain; then
        trouble="cannot be resumed: $(cat "$name.compared" 2>/dev/null)"
    fi
    report "a disk that is full from call $k on" "$trouble" "$name"
}
need_space=create,write,truncate,sync,mkdir
FAULT_CALLS=$need_space FAULT_LIST=$work/space.points struck none 0 space
second=$(sed -nE 's/^([0-9]+) mkdir .*step_00000004.*/\1/p' space.points)
for k in 0 1 2 3 4; do lasting $((${second:-1} + k)); done

# ----------------------------------------------------------------------------------------------------------
# a disk that is full: there is room for one checkpoint, and not for two

mkdir small
one=$(du -sk plain/checkpoints | cut -f1)
if mount -t tmpfs -o "size=$((one * 3 / 2 + 64))k" tmpfs small 2>/dev/null; then
    "$cpu" "${tiny[@]}" "${saves[@]}" --run-dir small/run --disk-wait 0 >full.out 2>full.err
    code=$?
    trouble=
    if [ $code != 1 ]; then
        trouble="exit code $code, but the last save failed"
    elif ! has_steps small/run 6; then
        trouble="did not go on"
    elif [ "$(cat full.out full.err | grep -c 'step_00000004.* MB are free')" != 1 ]; then
        trouble="nothing is said"
    elif ! grep -q 'each checkpoint takes .*B, and up to 2 are on disk at a time, but there is room for 1; ' full.out; then
        trouble="does not say at its start that there is too little room"
    elif ! holds small/run "step_00000002 step_00000006.weights" || ! whole small/run; then
        trouble="leaves $(ls -x small/run/checkpoints)"
    elif ! grep -q "only its weights are saved, in small/run/checkpoints/step_00000006.weights" full.err; then
        trouble="does not say what is saved"
    elif ! "$cpu" sample small/run/checkpoints/step_00000006.weights --tokens 1 >full.sample 2>&1; then
        trouble="the weights are of no use: $(tail -1 full.sample)"
    elif "$cpu" "${tiny[@]}" --run-dir again --resume small/run/checkpoints/step_00000006.weights >full.again 2>&1; then
        trouble="goes on from weights alone"
    elif ! mount -o remount,size=100m small || ! "$cpu" "${tiny[@]}" "${saves[@]}" --run-dir small/run --resume auto >>full.out 2>&1; then
        trouble="cannot be resumed"
    elif ! agrees small/run plain; then
        trouble=$(<small/run.compared)
    fi
    report "a full disk" "$trouble" full

    written_again() { [ "$(grep -c 'log.jsonl' while.out)" = 2 ]; }
    # full for a while, in a run that writes only its log; it ends when it is asked to, after it has written all lines
    "$cpu" "${tiny[@]}" --steps 1000000 --save-every 0 --run-dir small/while >while.out 2>while.err &
    job=$!
    wait_for 60 has_steps small/while 100
    head -c 200m /dev/zero >small/filler 2>/dev/null
    wait_for 60 grep -q 'log.jsonl: cannot write it: .* log lines are kept in memory' while.out
    sleep 0.2
    rm small/filler
    wait_for 60 written_again
    kill -TERM "$job"
    trouble=
    if ! wait "$job"; then
        trouble="the run has failed"
    elif
        steps=$(sed -nE 's/^stopped as asked after step ([0-9]+).*/\1/p' while.out)
        ! cmp -s <(grep -o '"step":[0-9]*,"loss"' small/while/log.jsonl) <(printf '"step":%d,"loss"\n' $(seq "${steps:-0}"))
    then
        trouble="the log has not all $steps steps: $(grep -c '"loss"' small/while/log.jsonl)"
    elif ! written_again; then
        trouble="says it $(grep -c 'log.jsonl' while.out) times"
    fi
    report "a disk that is full for a while" "$trouble" while

    # The last checkpoint. on_disk SIZE NAME OPTIONS...    a run of three saves, on a disk of SIZE tenths of a checkpoint
    on_disk() {
        umount small && mount -t tmpfs -o "size=$((one * $1 / 10 + 64))k" tmpfs small
        "$cpu" "${tiny[@]}" "${saves[@]}" --run-dir small/run "${@:3}" >"$2.out" 2>"$2.err"
    }
    trouble=
    if ! on_disk 25 oldest --keep 2 --disk-wait 0; then
        trouble="exit code not 0"
    elif ! holds small/run "step_00000004 step_00000006" || ! agrees small/run plain; then
        trouble="leaves $(ls -x small/run/checkpoints)"
    fi
    report "the oldest checkpoint makes room for the last" "$trouble" oldest
    trouble=
    if on_disk 25 stay --keep 0 --disk-wait 0; then
        trouble="exit code 0"
    elif ! holds small/run "step_00000002 step_00000004 step_00000006.weights"; then
        trouble="leaves $(ls -x small/run/checkpoints)"
    fi
    report "no checkpoint that is to stay makes room" "$trouble" stay
    trouble=
    if ! on_disk 15 elsewhere --fallback-dir spare; then
        trouble="exit code not 0"
    elif ! grep -qE 'the checkpoint is /.*/spare/run-[0-9a-f]{8}/checkpoints/step_00000006$' elsewhere.out; then
        trouble="does not say where"
    elif ! mount -o remount,size=100m small || ! "$cpu" "${tiny[@]}" "${saves[@]}" --steps 8 --run-dir small/run \
        --resume auto >>elsewhere.out 2>>elsewhere.err || ! grep -q 'resumes after step 6$' elsewhere.out; then
        trouble="does not go on from there"
    elif ! "$cpu" "${tiny[@]}" "${saves[@]}" --run-dir other --resume auto --fallback-dir spare >>elsewhere.out 2>&1 || ! agrees other plain; then
        trouble="another run takes it"
    fi
    report "a last checkpoint in --fallback-dir" "$trouble" elsewhere

    waits() { grep -q 'checkpoint after step 6: free .*B in small/run/checkpoints; retrying for 10m00s, or until Ctrl-C; then older ones are deleted$' "$1.out"; }
    on_disk 15 freed &
    wait_for 60 waits freed
    mount -o remount,size=100m small
    trouble=
    if ! wait $! || ! holds small/run step_00000006 || ! agrees small/run plain; then trouble="leaves $(ls -x small/run/checkpoints)"; fi
    report "a last checkpoint waits for room" "$trouble" freed
    on_disk 15 given-up &
    wait_for 60 waits given-up
    kill -INT "$(pgrep -f "^$cpu .*--run-dir small/run")"
    trouble=
    if wait $! || ! holds small/run "step_00000002 step_00000006.weights"; then trouble="leaves $(ls -x small/run/checkpoints)"; fi
    report "until Ctrl-C" "$trouble" given-up
else
    skip "a small tmpfs cannot be mounted here" 7
fi

# ----------------------------------------------------------------------------------------------------------
# several ranks

command -v mpirun >/dev/null || { skip "no mpirun here" $((2 + 2 + kills + 1)); exit; }
command -v pgrep >/dev/null || { echo "FAILED pgrep is not here; install procps"; exit 1; }

# one rank's disk fails
for fault in "ENOSPC write" "EIO sync"; do
    read -r error call <<<"$fault"
    name=rank-$error
    start_job "$name" 4 env LD_PRELOAD="$faults" FAULT="$error" FAULT_AT=1 FAULT_CALLS="$call" FAULT_RANK=2 \
        "$cpu" "${tiny[@]}" "${saves[@]}" --zero 1
    trouble=
    if ! ended "$name" 60 || [ "$code" != 0 ]; then
        trouble="exit code $code"
    elif ! cat "$name.out" "$name.err" | grep 'rank 2' | grep -q 'checkpoints/step_00000002.*data_00002.bin'; then
        trouble="rank and file are not named"
    elif ! holds "$name" step_00000006 || ! whole "$name"; then
        trouble="leaves $(ls -x "$name/checkpoints")"
    fi
    report "$error at the first $call of one of four ranks" "$trouble" "$name"
done

# asked to stop while the previous checkpoint is being written in the background, to a slow disk
endless=(--zero 1 --steps 100000 --save-every 10 --schedule constant --log-every 100000 --async-save on)
writes() { compgen -G "$1/checkpoints/*.partial" >/dev/null; }
for n in 1 2; do
    name=asked$n
    OMPI_MCA_odls_base_sigkill_timeout=10 start_job "$name" "$n" env LD_PRELOAD="$faults" FAULT=stall FAULT_SECONDS=1 \
        FAULT_CALLS=sync FAULT_AT=1 "$cpu" "${tiny[@]}" "${endless[@]}"
    wait_for 60 writes "$name"
    kill -TERM "$(rank_pids "$name" | head -n 1)"
    trouble=
    if ! ended "$name" 60 || [ "$code" != 0 ]; then
        trouble="exit code $code"
    elif ! grep -q '^stopped as asked after step' "$name.out"; then
        trouble="does not say that it stops"
    elif ! whole "$name" || writes "$name"; then
        trouble="leaves $(ls -x "$name/checkpoints")"
    fi
    steps=$(($(sed -nE 's/^stopped as asked after step ([0-9]+).*/\1/p' "$name.out") + 5))
    ranks "$n" "$cpu" "${tiny[@]}" "${endless[@]}" --steps $steps --run-dir "$name" --resume auto >>"$name.out" 2>&1
    ranks "$n" "$cpu" "${tiny[@]}" "${endless[@]}" --steps $steps --run-dir straight$n >straight$n.out 2>&1
    [ -n "$trouble" ] || agrees "$name" straight$n || trouble="goes on otherwise: $(<"$name.compared")"
    report "asked to stop while it saves, on $n ranks" "$trouble" "$name"
done

# Killed again and again, and resumed each time from what is there. A run that reaches its end is started again. With
# --ngram-staleness 1 the step after a save misses no update of the tables, so a resumed run has the same bits.
long=(--zero 1 --steps 800 --save-every 4 --keep 2 --log-every 1 --ngram-staleness 1 --ngram-dtype bf16)
ranks 4 "$cpu" "${tiny[@]}" "${long[@]}" --run-dir undisturbed >undisturbed.out 2>undisturbed.err ||
    echo "FAILED to run undisturbed"

steps_log() { grep -o '"step":[0-9]*,"loss":[^,]*,"grad_norm":[^,]*' "$1/log.jsonl" 2>/dev/null; }
# begins_as NAME REFERENCE    the log of NAME is the beginning of REFERENCE's
begins_as() { cmp -s <(steps_log "$1") <(steps_log "$2" | head -n "$(steps_log "$1" | wc -l)"); }
started() { has_ranks chain 4 || job_is_over; }
trains() { grep -q '^step' chain.out || job_is_over; }

# chain    resumes the run that is killed again and again
chain() { start_job chain 4 "$cpu" "${tiny[@]}" "${long[@]}" --resume auto; }
# complete KILLS    deletes a run that has ended, and reports if it differs from a run that was never killed
complete() {
    [ "$code" = 0 ] && agrees chain undisturbed ||
        { different=yes; echo "killed $1 times, a run ends otherwise: exit code $code: $(tail -qn 1 chain.compared chain.err)"; }
    rm -rf chain
}
different=
since_begun=0
for ((i = 0; i < kills; )); do
    chain
    wait_for 60 started
    victim=$((RANDOM % 5)) delay=$((RANDOM % 1000)) since='start'
    # half of them while they start or train, half while they train and save
    [ $((i % 2)) = 0 ] || { since='first step' delay=$((delay / 2)); wait_for 60 trains; }
    sleep "0.$(printf '%03d' $delay)"
    if job_is_over; then
        ended chain 1
        complete $since_begun
        since_begun=0
        continue
    fi
    if [ $victim = 4 ]; then kill_job chain; else kill -9 "$(rank_pids chain | sed -n "$((victim + 1))p")" 2>/dev/null; fi
    label="$([ $victim = 4 ] && echo all ranks || echo "rank $victim of 4"), killed $delay ms after the $since"
    if ! ended chain 20 || ! nothing_left chain; then
        echo "FAILED $label: the job goes on"
    elif ! whole chain; then
        echo "FAILED $label: leaves a damaged checkpoint: $(tail -1 chain.inspected)"
    elif ! begins_as chain undisturbed; then
        echo "FAILED $label: has trained otherwise"
    else
        echo "ok $label"
    fi
    i=$((i + 1)) since_begun=$((since_begun + 1))
done
chain
ended chain 300
complete $since_begun
if [ -z "$different" ]; then echo "ok runs that were killed come to the same end"; else echo "FAILED runs that were killed come to the same end"; fi
