# shellcheck shell=bash
# Jobs of several ranks in the background, for tests that disturb them; for scripts that have sourced checks.sh, and are in
# $work. The caller has set $cpu, the program; each run NAME has its run directory $work/NAME, its output in NAME.out and NAME.err.

# The processes of a run are those with its folder on their command line: its ranks, and mpirun.
rank_pids() { pgrep -f "^$cpu .*--run-dir $work/$1( |\$)"; }
launcher_pid() { pgrep -f "^mpirun .*--run-dir $work/$1( |\$)"; }
kill_job() {
    # shellcheck disable=SC2046  # a list of numbers
    kill -9 $(launcher_pid "$1") $(rank_pids "$1") 2>/dev/null
}
kill_all() {
    local out
    for out in "$work"/*.out; do kill_job "$(basename "$out" .out)"; done
}

has_ranks() { [ "$(rank_pids "$1" | wc -l)" = "$2" ]; }

# start_job NAME RANKS COMMAND...    starts a job in the background, with --run-dir; its process is $job
start_job() {
    local name=$1 n=$2
    shift 2
    RANKS_TIMEOUT=300 ranks "$n" "$@" --run-dir "$work/$name" >"$name.out" 2>"$name.err" &
    job=$!
}

# ended NAME SECONDS    true if the job ends by then; its exit code is in $code
ended() {
    local late=0
    wait_for "$2" job_is_over || late=1
    [ $late = 0 ] || kill_all
    wait "$job" 2>/dev/null
    code=$?
    return $late
}
job_is_over() { ! kill -0 "$job" 2>/dev/null; }
nothing_left() { wait_for 20 has_ranks "$1" 0 && [ -z "$(launcher_pid "$1")" ]; }
one_line() { [ "$(grep -c '^train_gpt: ' "$1.err")" = 1 ]; }

# start_stopped PHASE RANK NAME RANKS COMMAND...    starts a job in which this rank stops (SIGSTOP) in the named phase: start
# (before it joins the job), mesh (while groups of ranks are made), load (of a checkpoint), step, or save. Returns once it has
# stopped, or returns 1 if it does not within 60 s. `faults` names fault_injection.so.
start_stopped() {
    local phase=$1 rank=$2 at=1 calls
    shift 2
    if [ "$phase" = step ]; then
        start_job "$@"
        wait_for 60 has_steps "$1" 2 && kill -STOP "$(rank_pids "$1" | sed -n "$((rank + 1))p")"
        return
    fi
    case $phase in
    start) calls=init ;;
    mesh) calls=dup at=3 ;;  # after the calls for the watchdogs and for the control plane
    load) calls=read ;;
    save) calls=create ;;
    *) echo "FAILED there is no phase $phase"; return 1 ;;
    esac
    start_job "$1" "$2" env LD_PRELOAD="$faults" FAULT=stop FAULT_AT=$at FAULT_CALLS=$calls FAULT_RANK="$rank" "${@:3}"
    wait_for 60 has_stopped_rank "$1"
}
has_stopped_rank() {
    local pid
    for pid in $(rank_pids "$1"); do ! grep -q '^State:.T' "/proc/$pid/status" || return 0; done
    return 1
}
