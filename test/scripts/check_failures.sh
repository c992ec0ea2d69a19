#!/usr/bin/env bash
# Jobs of several ranks that end badly: whatever happens to one rank, the job ends within seconds, with the reason in one
# line and no process left; and a job that is asked to stop saves.
#
#   SEED=N    repeats the random moments and ranks of an earlier run, which printed it; KILLS=N how many ranks are killed
#             (12), STOPS=N how often one is stopped in each phase of a run (1)
# needs: cpu-fp32/train_gpt cpu-fp32/fault_injection.so
# waits: yes
# seconds: 240
# soak: KILLS=300 STOPS=20
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
. test/support/seed.sh
. test/support/jobs.sh
kills=${KILLS:-12}
stops=${STOPS:-1}
plan $((kills + 81 + 5 * stops))
cpu=$PWD/build/cpu-fp32/train_gpt faults=$PWD/build/cpu-fp32/fault_injection.so
command -v mpirun >/dev/null || { skip "no mpirun here" $((kills + 80 + 5 * stops)); exit; }
command -v pgrep >/dev/null || { echo "FAILED pgrep is not here; install procps"; exit 1; }
at_end() { kill_all; }
cd "$work" || exit 1

"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
tiny=(train --model tiny --layers 2 --channels 32 --heads 2 --mlp-width 48 --context 48 --steps 100000 --micro-batch 2
    --warmup-steps 0 --learning-rate 1e-3 --train-data 'text_train_*.bin')

# start NAME RANKS OPTIONS...    trains in the background, on $data if that is set; its process is $job
start() { start_job "$1" "$2" "$cpu" "${tiny[@]/text_train_*.bin/${data:-text_train_*.bin}}" "${@:3}"; }

# ----------------------------------------------------------------------------------------------------------
# a rank that is killed

layouts=("--zero 0" "--tp 2 --pp 2 --zero 1" "--zero 3" "--tp 2 --zero 2" "--pp 2 --pp-schedule zero-bubble" "--zero 1")
for ((i = 0; i < kills; i++)); do
    name=killed$i victim=$((RANDOM % 4)) delay=$((200 + RANDOM % 2800))
    # half of them while they start or train, half while they train
    since='start' begun=(has_ranks $name 4)
    [ $((i / 4 % 2)) = 0 ] || since='first step' begun=(has_steps $name 1)
    read -ra layout <<<"${layouts[i % ${#layouts[@]}]}"
    label="rank $victim of a run ${layout[*]}, killed $delay ms after its $since"
    start $name 4 "${layout[@]}"
    wait_for 60 "${begun[@]}" || { echo "FAILED $label: does not start"; kill_all; continue; }
    sleep "$(printf '%d.%03d' $((delay / 1000)) $((delay % 1000)))"
    if ! kill -9 "$(rank_pids $name | sed -n "$((victim + 1))p")"; then
        echo "FAILED $label: it has ended before that"
        tail -3 $name.err
    elif ! ended $name 240; then
        echo "FAILED $label: the job goes on"
    elif [ $code = 0 ]; then
        echo "FAILED $label: exit code 0"
    elif ! nothing_left $name; then
        echo "FAILED $label: processes are left"
    else
        echo "ok $label: exit code $code"
    fi
done

start orphans 3 --zero 3
wait_for 60 has_steps orphans 3
kill -9 "$(launcher_pid orphans)"
check "no rank outlives an mpirun that is killed" wait_for 20 nothing_left orphans
wait "$job" 2>/dev/null

# ----------------------------------------------------------------------------------------------------------
# a rank that stops answering

# in a step of one micro-batch, and of thirty, where the host waits in other places
for sequences in 6 180; do
    run=stuck$sequences
    start_stopped step 1 $run 3 "$cpu" "${tiny[@]}" --zero 3 --communication-timeout 3 --global-batch $((sequences * 48))
    check "a rank that stops answering ends the job, $sequences sequences a step" ended $run 240
    check "with exit code 75" test "$code" = 75
    check "and a reason" grep -q '^train_gpt: .*--communication-timeout' $run.err
    check "and leaves no process" nothing_left $run
done

# stopped_in PHASE RANK OPTIONS...    the job ends within its timeout plus 15 s, with a line that names the rank
stopped_in() {
    local phase=$1 victim=$2 name=stopped_$1
    shift 2
    rm -rf "$name"
    [ "$phase" != load ] || cp -r to_load "$name"
    start_stopped "$phase" "$victim" "$name" 3 "$cpu" "${tiny[@]}" --zero 1 --communication-timeout 3 --save-every 5 "$@" &&
        ended "$name" 18 && [ "$code" = 75 ] && nothing_left "$name" &&
        grep -qE "^train_gpt: communication: rank $victim [^;]*(does not answer|is stopped)" "$name.err" && return
    tail -n 5 "$name.err"
    return 1
}
start to_load 3 --zero 1 --steps 3
ended to_load 240
for ((i = 0; i < stops; i++)); do
    for phase in start mesh load step save; do
        victim=$((RANDOM % 3))
        check "rank $victim that stops in the phase $phase ends the job, and is named" stopped_in $phase $victim --resume auto
    done
done

# stalled SECONDS NAME RANKS OPTIONS...    the job's last rank reads its data from a disk that does not answer for SECONDS
stalled() {
    local seconds=$1 name=$2 n=$3
    shift 3
    start_job "$name" "$n" env LD_PRELOAD="$faults" FAULT=stall FAULT_SECONDS="$seconds" FAULT_AT=20 FAULT_CALLS=touch \
        FAULT_MAPPED=text_train FAULT_RANK=$((n - 1)) FAULT_LIST="$work/$name.touched" "$cpu" "${tiny[@]}" "$@"
}
losses() { grep -o '"loss":[^,]*' "$1/log.jsonl"; }
start prompt 2 --steps 60
ended prompt 240
stalled 2 late 2 --steps 60 --communication-timeout 20
check "data that comes late is waited for" ended late 240
check "it was late" test "$(wc -l <late.touched)" -gt 20
check "and the run is the same" cmp <(losses prompt) <(losses late)
stalled 1000 never 2 --communication-timeout 3
check "data that never comes ends the job" ended never 240
check "with an exit code and a reason" eval 'test "$code" != 0 && grep -q "^train_gpt: .*--communication-timeout" never.err'
check "and leaves no process then" nothing_left never

# ----------------------------------------------------------------------------------------------------------
# a device that takes no more work, and a disk that does not answer

# faulty NAME RANKS CALLS AT OPTIONS...    the AT-th of these calls on the last rank never returns, or only after
# $seconds; one rank runs without mpirun
faulty() {
    local name=$1 n=$2 calls=$3 at=$4
    local command=(env LD_PRELOAD="$faults" FAULT=stall FAULT_SECONDS="${seconds:-1000}" FAULT_CALLS="$calls" FAULT_AT="$at"
        FAULT_LIST="$work/$name.listed" FAULT_RANK=$([ "$n" = 1 ] || echo $((n - 1))) "$cpu" "${tiny[@]}" --communication-timeout 3 "${@:5}")
    if [ "$n" = 1 ]; then
        OMP_NUM_THREADS=1 "${command[@]}" --run-dir "$work/$name" >"$name.out" 2>"$name.err" </dev/null &
        job=$!
    else
        start_job "$name" "$n" "${command[@]}"
    fi
}
# blamed NAME WORDS    the job ends in time, with exit code 75 and one line of the program with these words
blamed() { ended "$1" 40 && [ "$code" = 75 ] && one_line "$1" && grep -qE "^train_gpt: $2" "$1.err" && nothing_left "$1"; }

# A micro-batch of 40 layers makes more than 1,024 launches, and a step has three: if a product never ends, the queue after it
# is full before the host has submitted all of them.
faulty full 3 product 8000 --zero 1 --layers 40 --channels 16 --global-batch $((18 * 48))
check "a rank whose device takes no more work ends the job, and is named" \
    blamed full 'communication: rank 2 \([^)]*\) (has not entered [^;]*|is stuck); it is in the [a-z]+ pass of micro-batch [0-9]+(; rank|, in the phase)'
check "in a step" has_steps full 1
for call in create write sync rename mkdir; do
    faulty alone_$call 1 $call 1 --steps 2
    check "a process alone whose disk does not return from $call ends, and names the file" \
        blamed alone_$call "[a-z ]+ $work/alone_$call/checkpoints/step_00000002.partial[^ ]* has taken [0-9.]+ s: .*--communication-timeout"
done
# A process that is itself stopped (Ctrl-Z) for longer than its timeout, in a slow write, continues when it is allowed to.
seconds=6 faulty paused 1 write 1 --steps 2
wait_for 40 test -s paused.listed
kill -STOP "$(rank_pids paused)"
sleep 4
kill -CONT "$(rank_pids paused)"
check "a process that was stopped itself blames nobody for that" eval 'ended paused 240 && test $code = 0'
for call in write sync; do
    faulty disk_$call 3 $call 1 --zero 1 --save-every 2
    check "a rank whose disk does not return from $call ends the job, and is named with the file" \
        blamed disk_$call "communication: rank 2 \([^)]*\) is blocked on a disk: it has been [a-z ]+ $work/disk_$call/checkpoints/step_00000002.partial/data_00002.bin for"
done

# ----------------------------------------------------------------------------------------------------------
# a rank that meets an error

# one token of the data is not in the vocabulary
cp text_train_000000.bin bad.bin
printf '\xff\xff' | dd of=bad.bin bs=1 seek=$(($(stat -c %s bad.bin) - 20000)) conv=notrunc status=none
for zero in 0 3; do
    data=bad.bin start bad$zero 4 --zero $zero
    check "bad data on one rank ends the job, ZeRO $zero" ended bad$zero 240
    check "with exit code 1" test "$code" = 1
    check "and one line that names the file and the checkpoint" eval "one_line bad$zero && grep -q '^train_gpt: .*bad.bin: token .*; .*bad$zero/checkpoints/step_' bad$zero.err"
    check "which can be used" "$cpu" sample bad$zero --tokens 1
    check "and leaves no process" nothing_left bad$zero
done

# a file in use is cut short by an in-place rsync, or by another client of a network file system
for n in 1 3; do
    cp text_train_000000.bin cut.bin
    data=cut.bin start cut$n $n --zero 1
    wait_for 60 has_steps cut$n 3
    truncate -s 5000 cut.bin
    check "a token file that is cut short ends a job of $n, as a fault of a disk" eval "ended cut$n 240 && test \$code = 75"
    check "with one line that names the file and the checkpoint" eval "one_line cut$n && grep -q '^train_gpt: .*cut.bin: was truncated .*; .*cut$n/checkpoints/step_' cut$n.err"
    cp text_train_000000.bin cut.bin
    data=cut.bin start cut$n $n --zero 1 --resume auto --steps $(($(grep -c '"loss"' cut$n/log.jsonl) + 1))
    check "which goes on when the file is back" eval "ended cut$n 240 && test \$code = 0"
done

# waiting would not help: nothing raises the limit meanwhile
(
    ulimit -f 100
    OMP_NUM_THREADS=1 timeout 100 "$cpu" "${tiny[@]/100000/2}" --run-dir limited >limited.out 2>limited.err
    echo $? >limited.code
)
check "a file that may not grow is not waited for" eval '[ "$(cat limited.code)" = 1 ] && one_line limited && grep -q "File too large; raise the size limit" limited.err'
check "and its line is said once" test "$(grep -c 'NOT saved' limited.out)" = "$(grep 'NOT saved' limited.out | sort -u | wc -l)"

start diverged 4 --zero 2 --learning-rate 10 --weight-decay 1 --schedule constant
check "a step that is not finite ends the job" ended diverged 240
check "with exit code 70 and one line" eval "test $code = 70 && one_line diverged && grep -q 'not finite' diverged.err"

# ----------------------------------------------------------------------------------------------------------
# a job that is asked to stop

# mpirun forwards SIGUSR1. It handles SIGTERM and Ctrl-C itself: it waits, sends SIGTERM to the ranks, waits again and kills
# them. Its wait is 1 second by default, too short on a machine that is busy with other tests (and for large models). It does
# not read the ranks' output meanwhile, so they print little.
asked() { # SIGNAL ZERO CODES
    local name=asked$1 signal=$1
    OMPI_MCA_odls_base_sigkill_timeout=4 start $name 4 --zero "$2" --log-every 100000
    wait_for 60 has_steps $name 5
    kill -"$signal" "$(launcher_pid $name)"
    check "SIG$signal to mpirun ends the job, ZeRO $2" ended $name 240
    check "with exit code $3" test "$code" = "$3"
    check "says so" eval "grep -q '^stopped as asked after step' $name.out && tail -n 1 $name/log.jsonl | grep -q '\"stopped\":\"as asked\"'"
    check "leaves a checkpoint" "$cpu" sample $name --tokens 1
    check "leaves no process" nothing_left $name
}
asked USR1 3 0
asked TERM 0 1
asked INT 3 1
start asked_one 4 --zero 1 --log-every 100000
wait_for 60 has_steps asked_one 5
kill -TERM "$(rank_pids asked_one | sed -n 3p)"
check "SIGTERM to one rank stops all of them" ended asked_one 240
check "with exit code 0 and a checkpoint" eval "test $code = 0 && '$cpu' sample asked_one --tokens 1"

# Schedulers signal both mpirun and its ranks, repeatedly. The run says at once after which step it stops, stops there, and
# saves once.
announced() { grep -oE 'stopping after step [0-9]+, then saving.*' "$1.out" | grep -oE '[0-9]+' | uniq; }
stopped() { sed -nE 's/^stopped as asked after step ([0-9]+);.*/\1/p' "$1.out"; }
begun() { grep -q 'stopping after step' "$1.out"; }
saved() {
    ended "$1" 240 || { echo "it is still running"; return 1; }
    echo "exit code $code; announced: $(announced "$1"); stopped: $(stopped "$1")"
    [ "$code" = 0 ] && [ -n "$(stopped "$1")" ] && [ "$(announced "$1")" = "$(stopped "$1")" ] && "$cpu" sample "$1" --tokens 1
}
slow_save() { # NAME RANKS
    start_job "$1" "$2" env LD_PRELOAD="$faults" FAULT=stall FAULT_SECONDS=1 FAULT_CALLS=sync FAULT_AT=1 \
        "$cpu" "${tiny[@]}" --log-every 100000
    wait_for 60 has_steps "$1" 3
}
for signal in TERM USR1 HUP; do
    slow_save again$signal 1
    kill -$signal "$(rank_pids again$signal)"
    wait_for 10 begun again$signal
    kill -$signal "$(rank_pids again$signal)"
    sleep 0.1
    kill -$signal "$(rank_pids again$signal)"
    check "SIG$signal again and again saves once" saved again$signal
done
slow_save everywhere 3
for i in 1 2; do
    # shellcheck disable=SC2046  # a list of numbers
    kill -USR1 "$(launcher_pid everywhere)" $(rank_pids everywhere)
    sleep 0.2
done
check "SIGUSR1 to mpirun and all ranks, twice, saves once" saved everywhere
check "the header says what mpirun does with other signals" grep -q '^stopping  *SIGUSR1 to mpirun .* SIGTERM' everywhere.out
slow_save once 1
kill -INT "$(rank_pids once)"
check "Ctrl-C says what a second one does" wait_for 10 grep -q '^stopping after step .*(Ctrl-C again: quit now without saving)$' once.out
check "and saves" saved once
slow_save quit 1
kill -INT "$(rank_pids quit)"
wait_for 10 begun quit
kill -INT "$(rank_pids quit)"
check "a second Ctrl-C quits" eval 'ended quit 240 && test "$code" != 0 && ! compgen -G "quit/checkpoints/step_????????"'

# ----------------------------------------------------------------------------------------------------------
# bad input is refused in one line by the whole job, and before anything is written

# refused WORDS RANKS OPTIONS...
refused() {
    local words=$1 n=$2
    shift 2
    rm -rf refused
    start refused "$n" "$@"
    ended refused 240 && [ $code = 1 ] && one_line refused && grep -qE "^train_gpt: .*$words.*; " refused.err &&
        [ ! -e refused ] && nothing_left refused && echo "ok refused: $*" && return
    echo "FAILED refused: $*: exit code $code"
    grep '^train_gpt' refused.err
}
refused '--dp 3' 4 --dp 3
refused '--tp 3' 4 --tp 3
refused '--shard-group 3' 4 --zero 1 --shard-group 3
refused '--global-batch' 3 --global-batch 192
data='nothing_*.bin' refused 'nothing' 2
refused '--zero' 2 --zero 4
refused '--laerning-rate' 2 --laerning-rate 1
refused 'memory' 2 --layers 100 --channels 8192 --heads 64
refused_pair() { ! ranks 1 "$cpu" "${tiny[@]}" --run-dir refused --seed 7 : -np 1 "$cpu" "${tiny[@]}" --run-dir refused; }
check "refused: another --seed for one rank" eval 'refused_pair >pair.out 2>pair.err; one_line pair && grep -q "^train_gpt: --seed: ranks differ: 7 on rank 0 of 2 on .*, 1337 on rank 1 of 2 on .*; " pair.err && [ ! -e refused ]'

# A process is refused if it is one of several without MPI between them, or alone in a job of Slurm with room for more.
check "what torchrun starts is refused" \
    eval "! WORLD_SIZE=6 LOCAL_RANK=0 '$cpu' ${tiny[*]@Q} --run-dir torchrun 2>&1 | tee torchrun.err | grep -v '^train_gpt: MPI: 6 processes were started, but this one finds 1; start them with the mpirun' && test -s torchrun.err"
alone() { SLURM_NTASKS=6 "$cpu" "${tiny[@]}" --run-dir slurm >alone.out 2>alone.err </dev/null; [ $? = 1 ]; }
check "a process alone in a job of Slurm with room for six is refused" \
    eval 'alone && one_line alone && grep -q "^train_gpt: SLURM_NTASKS is 6, but this process is alone; " alone.err && [ ! -e slurm ]'
