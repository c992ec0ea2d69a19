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
passed=0 failed=0

# count NAME PASSED FAILED OUTPUT
count() {
    printf '%-38s %4d passed, %d failed%s\n' "$1" "$2" "$3" "$4"
    passed=$((passed + $2)) failed=$((failed + $3))
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
    [ "$bad" = 0 ] || echo "$out"
    [ $rc != 124 ] && [ $rc != 137 ] || echo "$name: killed, it did not end"
    count "$name" "$good" "$bad" ", $((SECONDS - start)) s"
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
        run_unit "${unit#build/} x $n" ranks "$n" "$unit"
    done
}

run_script() {
    local out start=$SECONDS
    out=$("$1" 2>&1)
    local rc=$? good bad
    good=$(grep -c '^ok' <<<"$out")
    bad=$(grep -c '^FAILED' <<<"$out")
    if [ $rc != 0 ] && [ "$bad" = 0 ]; then bad=1; fi
    if [ "$bad" = 0 ]; then out=$(grep '^skipped' <<<"$out"); else out=$(grep -v '^ok' <<<"$out"); fi
    count "$1" "$good" "$bad" ", $((SECONDS - start)) s${out:+$'\n'$out}"
    echo "$good $bad" >"$2"
}

# Scripts wait for ranks and disks more than they compute, so several run at once. Each leaves its figures in a file.
figures=$(mktemp -d)
trap 'rm -rf "$figures"' EXIT
started=0
start_script() {
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    run_script "$1" "$figures/$started" &
    started=$((started + 1))
}

for suite in "$@" $EXTRA; do
    case $suite in
    *.sh) start_script "$suite" ;;
    *)
        for unit in $(find "build/$suite" -maxdepth 1 -name 'test_*' -type f -executable | sort); do
            if [ -e "$unit.ranks" ]; then run_unit_with_ranks "$unit"; else run_unit "${unit#build/}" "$unit"; fi
        done
        ;;
    esac
done
wait
for ((i = 0; i < started; i++)); do
    read -r good bad <"$figures/$i" && passed=$((passed + good)) failed=$((failed + bad)) || failed=$((failed + 1))
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
