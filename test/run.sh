#!/usr/bin/env bash
# Runs test suites and adds up their results.
#
#   test/run.sh SUITE...    a suite is a build (cpu-fp32: all of build/cpu-fp32/test_*) or a script
#
# A script prints one line for each check, beginning with "ok" or "FAILED". A unit with a file UNIT.ranks beside it is
# started with mpirun, once for each number of ranks in that file. More suites can come in $EXTRA.
# The last line is "N passed, N failed"; the exit code is 1 if anything failed.
cd "$(dirname "$0")/.." || exit 1
. test/ranks.sh
figures=$(mktemp) # a line for each unit and script that has ended: how many passed and failed
trap 'rm -f "$figures"' EXIT
started=0

# count NAME PASSED FAILED SECONDS OUTPUT    in one piece, for several run at once
count() {
    printf '%s%-38s %4d passed, %d failed, %d s\n' "${5:+$5$'\n'}" "$1" "$2" "$3" "$4"
    echo "$2 $3" >>"$figures"
}

# run_unit NAME COMMAND...
run_unit() {
    local name=$1 out rc start=$SECONDS
    shift
    out=$("$@" 2>&1)
    rc=$?
    local cases
    cases=$(sed -nE 's/.*test cases: *[0-9]+ \| *([0-9]+) passed \| *([0-9]+) failed.*/\1 \2/p' <<<"$out" | tail -1)
    local good=${cases% *} bad=${cases#* }
    # a program that died, or found an error outside a case, failed
    if [ -z "$cases" ] || { [ $rc != 0 ] && [ "$bad" = 0 ]; }; then good=${good:-0} bad=1; fi
    [ "$bad" != 0 ] || out=
    [ $rc != 124 ] && [ $rc != 137 ] || out+=$'\n'"$name: killed, it did not end"
    count "$name" "$good" "$bad" $((SECONDS - start)) "$out"
}

# run_unit_with_ranks UNIT    NCCL wants a GPU for each rank
run_unit_with_ranks() {
    local unit=$1 n most=1000
    case $unit in
    build/cuda-*-mpi/*) ;;
    build/cuda-*) most=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') ;;
    esac
    for n in $(<"$unit.ranks"); do
        if ! command -v mpirun >/dev/null || [ "$n" -gt "$most" ]; then
            echo "skipped: ${unit#build/} with $n ranks: $(command -v mpirun >/dev/null && echo "$most GPUs" || echo no mpirun) here"
            continue
        fi
        started=$((started + 1))
        run_unit "${unit#build/} x $n" ranks "$n" "$unit"
    done
}

run_script() {
    local out rc good bad start=$SECONDS
    out=$("$1" 2>&1)
    rc=$?
    good=$(grep -c '^ok' <<<"$out")
    bad=$(grep -c '^FAILED' <<<"$out")
    if [ $rc != 0 ] && [ "$bad" = 0 ]; then bad=1; fi
    if [ "$bad" = 0 ]; then out=$(grep '^skipped' <<<"$out"); else out=$(grep -v '^ok' <<<"$out"); fi
    count "$1" "$good" "$bad" $((SECONDS - start)) "$out"
}

# start COMMAND...    What has one thread, or waits for a disk or for ranks, leaves cores to others: there is one more at
# work than there are cores. Nothing shares a GPU.
start() {
    local most
    most=$([[ $suite == cuda-* ]] && echo 1 || echo $(($(nproc) + 1)))
    while [ "$(jobs -rp | wc -l)" -ge "$most" ]; do wait -n; done
    started=$((started + 1))
    OMP_WAIT_POLICY=passive "$@" &
}

units() { find "build/$1" -maxdepth 1 -name 'test_*' -type f -executable | sort; }

# Alone, those with ranks: some look at the time.
for suite in "$@" $EXTRA; do
    [[ $suite == *.sh ]] && continue
    for unit in $(units "$suite"); do
        [ ! -e "$unit.ranks" ] || run_unit_with_ranks "$unit"
    done
done
for suite in "$@" $EXTRA; do
    if [[ $suite == *.sh ]]; then
        start run_script "$suite"
        continue
    fi
    for unit in $(units "$suite"); do
        [ -e "$unit.ranks" ] || start run_unit "${unit#build/}" "$unit"
    done
done
wait
read -r passed failed < <(awk -v started="$started" '{ good += $1; bad += $2 } END { print good + 0, bad + started - NR }' "$figures")
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
