#!/usr/bin/env bash
# Runs one job of test/run.sh within its time limit, and writes into $RESULTS how it ended: NAME.result has the line
# "KIND NAME SECONDS CPU_SECONDS PASSED FAILED", NAME.log what it printed, NAME.skipped what it skipped. For a build,
# NAME.built has "build NAME SECONDS CPU_SECONDS EXIT_CODE".
#
#   job.sh build NAME COMMAND...                               builds a program
#   job.sh unit NAME LIMIT PROGRAM FILE RANKS [VAR=VALUE...]   the cases of the unit FILE; RANKS 0: without mpirun
#   job.sh alone ...                                           the same, but those of doctest's suite "alone"; those of the
#                                                              suite "long" run only with LONG=yes
#   job.sh script NAME LIMIT SCRIPT [VAR=VALUE...]             a script: see test/support/checks.sh
cd "$(dirname "$0")/../.." || exit 1
. test/support/ranks.sh
given=("$@")
kind=$1 name=$2
shift 2
file=$RESULTS/${name//\//.}
export OMP_WAIT_POLICY=passive
TIMEFORMAT='%R %U %S'

# bounded LIMIT COMMAND...    runs it, and ends it after LIMIT seconds; sets seconds, cpu and code
bounded() {
    local user system
    { time timeout -k 10 "$@" >"$file.log" 2>&1 </dev/null; } 2>"$file.time"
    code=$?
    read -r seconds user system <"$file.time"
    rm "$file.time"
    cpu=$(awk "BEGIN { print $user + $system }")
    if [ $code = 124 ] || [ $code = 137 ]; then
        echo "$name: stuck: it was ended after $1 s; above stands what it had printed last" >>"$file.log"
    fi
}

# ended PASSED FAILED [LINES]    writes the result and prints it; if something failed, prints the end of the log first
ended() {
    local skips=0
    if [ "$2" != 0 ] && [ -z "$REPEATED" ] && [ "$SUITE" != soak ] && grep -q "^| $name |" test/unsteady.md; then
        tail -n "${3:-60}" "$file.log"
        echo "$name failed, and is in test/unsteady.md: it is run again"
        mv "$file.log" "$file.failed.log"
        REPEATED=yes exec test/support/job.sh "${given[@]}"
    fi
    [ ! -s "$file.skipped" ] || skips=$(wc -l <"$file.skipped")
    [ "$2" = 0 ] || tail -n "${3:-60}" "$file.log"
    echo "$kind $name $seconds $cpu $1 $2" >"$file.result"
    printf '[%3d of %d] %-40s %4d passed, %d failed%s, %.0f s\n' "$(find "$RESULTS" -name '*.result' | wc -l)" \
        "$(wc -l <"$RESULTS/planned")" "$name" "$1" "$2" "$([ "$skips" = 0 ] || echo ", $skips skipped")" "$seconds"
}

case $kind in
build)
    [ ! -e "$file.built" ] || exit "$(cut -d" " -f5 "$file.built")" # built in the previous pass
    { time "$@" >"$file.log" 2>&1; } 2>"$file.time"
    code=$?
    read -r seconds user system <"$file.time"
    echo "build $name $seconds $(awk "BEGIN { print $user + $system }") $code" >"$file.built"
    rm "$file.time"
    [ $code = 0 ] || { grep -v '^make' "$file.log" | head -n 60; echo "$name does not build"; }
    exit $code
    ;;

unit | alone)
    limit=$1 program=$2 source=$3 n=$4
    shift 4
    [ $# = 0 ] || export "$@"
    options=(--source-file="*$source" ${CASE:+--test-case="$CASE"})
    if [ "$kind" = alone ]; then
        options+=(--test-suite=alone)
    else
        options+=(--test-suite-exclude="alone$([ "$LONG" = yes ] || echo ,long)")
    fi
    launch=()
    [[ $program != build/address/* && $program != build/thread/* ]] || . test/support/sanitizers.sh
    if [ "$n" != 0 ]; then
        export ASAN_OPTIONS=$whole_stacks
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        launch=(mpirun "${mpirun_options[@]}" -np "$n")
    fi
    # NCCL wants a GPU for each rank
    gpus=$n
    [[ $n = 0 || $program != build/cuda-* || $program == build/cuda-*-mpi/* ]] || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    reason=
    [ "$n" -le "$gpus" ] || reason="$gpus GPUs here"
    [ "$n" = 0 ] || command -v mpirun >/dev/null || reason="no mpirun here"
    if [ -n "$reason" ]; then
        echo "$reason: all of $name" >"$file.skipped"
        seconds=0 cpu=0
        ended 0 0
        exit
    fi
    bounded "$limit" "${launch[@]}" "$program" "${options[@]}"
    grep -a '^skipped: ' "$file.log" | sed 's/^skipped: //' >"$file.skipped"
    read -r passed failed < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, [0-9]+ skipped$/\1 \2/p' "$file.log" | tail -n 1)
    # A program that died, or whose exit code is not 0 although no case failed, counts as one failure.
    if [ -z "$failed" ] || { [ $code != 0 ] && [ "$failed" = 0 ]; }; then
        echo "$name: exit code $code" >>"$file.log"
        failed=1
    elif [ "$passed$failed" = 00 ] && [ ! -s "$file.skipped" ] && [ -z "$CASE" ]; then
        echo "$name: no case was run" >>"$file.log"
        failed=1
    fi
    ended "${passed:-0}" "$failed"
    ;;

script)
    limit=$1 script=$2
    shift 2
    bounded "$limit" env "$@" "$script"
    passed=$(grep -ac '^ok' "$file.log")
    failed=$(grep -ac '^FAILED' "$file.log")
    grep -a '^skipped: ' "$file.log" | sed 's/^skipped: //' >"$file.skipped"
    planned=$(awk '/^plan [0-9]+$/ { n += $2 } END { print n + 0 }' "$file.log")
    made=$((passed + failed + $(wc -l <"$file.skipped")))
    if [ "$planned" != "$made" ]; then
        echo "$name: $made checks were made, $planned were planned" >>"$file.log"
        failed=$((failed + 1))
    elif [ $code != 0 ] && [ "$failed" = 0 ]; then
        echo "$name: exit code $code" >>"$file.log"
        failed=1
    fi
    ended "$passed" "$failed" 120
    ;;
esac
