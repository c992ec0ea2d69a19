# shellcheck shell=bash
# Supervised runs in the background, for tests that disturb them; for scripts that have sourced checks.sh and jobs.sh, and
# are in $work. Hosts are imaginary: fake_rsh.sh runs their commands on this machine.
export FAKE_HOSTS=$work/hosts.d
mkdir -p "$FAKE_HOSTS/apart"
printf '#!/bin/sh\nexit 2\n' >"$FAKE_HOSTS/apart/ls"
chmod +x "$FAKE_HOSTS/apart/ls"
on_one_machine="mpirun ${mpirun_options[*]}"
# Ranks of different hosts must not find each other in shared memory, whose names are only unique on a host.
on_hosts="mpirun --mca plm_rsh_agent $PWD/test/support/fake_rsh.sh --bind-to none --mca mpi_yield_when_idle 1
    --mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include lo"

# launch NAME OPTIONS... -- JOB...    starts a supervisor in the background, with --run-dir; its process is $supervisor
launch() {
    local name=$1
    shift
    "$cpu" launch "$@" --run-dir "$work/$name" >>"$name.out" 2>>"$name.err" </dev/null &
    supervisor=$!
}
# launched NAME SECONDS    true if the supervisor ends by then; its exit code is in $code. Prints what it
# said, which a check shows if it fails.
launched() {
    local late=0
    wait_for "$2" supervisor_is_over || late=1
    [ $late = 0 ] || { kill -9 "$supervisor"; kill_job "$1"; }
    wait "$supervisor" 2>/dev/null
    code=$?
    cat "$1.err"
    grep '^launch ' "$1.out" | cut -c 1-300 | tail -n 12
    echo "exit code $code"
    return $late
}
supervisor_is_over() { ! kill -0 "$supervisor" 2>/dev/null; }
# The ranks of a run are those processes whose command is train.
ranks_of() { pgrep -f "^$cpu train .*--run-dir $work/$1( |\$)"; }
# its launcher; for a single rank, this is the rank itself
launcher_of() { sed -nE 's/.*"launcher":\{"id":([0-9]+).*/\1/p' "$1/job.json"; }
last_step() { grep -oE '^\{"step":[0-9]+,"loss"' "$1/log.jsonl" 2>/dev/null | tail -1 | grep -oE '[0-9]+'; }
# is_past RUN STEP    true if the last logged step is a later one
is_past() {
    local step
    step=$(last_step "$1")
    [ "${step:-0}" -gt "$2" ]
}
starts_of() { grep -c '^launch  *start [0-9]*: ' "$1.out"; }

# host_down HOST    takes the host down, with everything that runs on it; host_up HOST brings it back
host_down() {
    local pids
    touch "$FAKE_HOSTS/$1.down"
    [ -s "$FAKE_HOSTS/$1.pids" ] || return 0
    pids=$(xargs <"$FAKE_HOSTS/$1.pids" | tr ' ' ,)
    # Each leads a session; or its child does, because setsid forks if its caller leads a process group.
    pids=$pids,$(pgrep -d, -P "$pids")
    # shellcheck disable=SC2046
    kill -9 $(pgrep -s "${pids%,}") 2>/dev/null
    rm -f "$FAKE_HOSTS/$1.pids"
}
host_up() { rm -f "$FAKE_HOSTS/$1.down"; }

# same_losses RUN REFERENCE    every step is in both, with losses that differ by at most 1e-5 of the reference
same_losses() {
    local run
    for run in "$1" "$2"; do
        grep -oE '^\{"step":[0-9]+,"loss":[^,]*' "$run/log.jsonl" | sed -E 's/[^0-9]*([0-9]+),"loss":(.*)/\1 \2/' >"$run.losses"
    done
    awk 'NR == FNR { want[$1] = $2; n++; next }
        { d = ($2 - want[$1]) / want[$1]; if (d < 0) d = -d; if (d > most) most = d; if ($1 in want) n-- }
        END { print "largest difference of a loss: " most; exit !(n == 0 && FNR > 0 && most <= 1e-5) }' "$2.losses" "$1.losses"
}
