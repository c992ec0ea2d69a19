#!/usr/bin/env bash
# Builds and runs the tests in one pool of jobs, and sums up the results. test/README.md describes the tests.
#
#   test/run.sh [test|all|soak]   what `make test`, `make test-all` or `make soak` run
#   test/run.sh list [SUITE]      prints the jobs of the suite, and runs nothing
#   test/run.sh units BUILD       prints the units that run on a build
#
#   UNIT="norm runs"   only test_norm.cu and check_runs.sh, with one program for each unit
#   CASE='*odd*'       only cases whose names match
#   BUILDS="cpu-fp32"  only on these builds; BUILT=yes: they are built already, with one program for each unit;
#                      BUILT=groups: with units in groups
#   JOBS=N             how many jobs run at once, not counting scripts that wait (one more than there are cores, because some
#                      jobs wait for a disk or for ranks)
#   ALLOWED_SKIPS=RE   a skipped case whose reason does not match fails
#   RESULTS=DIR        the folder for the output of jobs (build/test-results)
#
# The last line is "N passed, N failed, N skipped"; the exit code is 1 if anything failed.
cd "$(dirname "$0")/.." || exit 1
unset "${!SLURM_@}" "${!PBS_@}" # tests behave the same inside and outside of a job of Slurm or PBS
. test/support/plan.sh
export RESULTS=${RESULTS:-build/test-results}

mode=run
case $1 in
list | units) mode=$1; shift ;;
esac
if [ "$mode" = units ]; then
    units_of "$1"
    exit
fi
export SUITE=${1:-test}
suite=$SUITE
[ "$suite" = test ] && [ -z "$UNIT" ] || export LONG=yes
read_settings || exit 1
plan "$suite" || exit 1 # fills builds, jobs, waiting and alone
if [ "$mode" = list ]; then
    all_jobs | awk -F'|' '{ printf "%-42s %3d s  %s\n", $2, $1, $3 }'
    exit
fi

# ----------------------------------------------------------------------------------------------------------
# the pool: a makefile with a target for each thing to build, and one for each thing to run

rm -rf "$RESULTS"
mkdir -p "$RESULTS"
pool=$RESULTS/pool.mk

# result NAME    prints the file for the result of a job
result() { echo "$RESULTS/${1//\//.}"; }
longest_first() { sort -t'|' -k1,1nr -s; }

# Build stamps, and objects that several programs share, are made in a separate first pass, `ready`; so is the first
# train_gpt, which builds some of them. Scripts that wait are one more job, which runs them in turn.
write_pool() {
    local target first name need kind arguments goals=()
    printf '.DEFAULT_GOAL := all\n.PHONY: FORCE ready all in-turn\nFORCE:\n'
    for target in "${!builds[@]}"; do # after the first, because all share some files
        printf 'build/%s/ready: FORCE | %s\n' "$target" "$first"
        printf '\t+@test/support/job.sh build %s $(MAKE) -s %s build/%s\n' "$target/ready" "$(build_options "$target")" "$target/ready"
        first=${first:-build/$target/ready}
        goals+=("build/$target/ready")
    done
    printf 'ready: %s\n' "${goals[*]} $(needed_targets | longest_first | grep -om 1 'build/.*/train_gpt$')"
    goals=()
    if [ ${#waiting[@]} -gt 0 ]; then
        printf '%s\n' "${waiting[@]}" | longest_first >"$RESULTS/waiting"
        printf 'in-turn:\n\t+@test/support/in_turn.sh %s\n' "$RESULTS/waiting"
        goals+=(in-turn)
    fi
    while IFS='|' read -r _ target; do
        [ -n "$target" ] || continue
        target=${target#build/}
        printf 'build/%s: FORCE\n\t+@test/support/job.sh build %s $(MAKE) -s %s build/%s\n' \
            "$target" "$target" "$(build_options "${target%%/*}")" "$target$([[ " ${group_of[*]} " != *" build/$target "* ]] || echo .also)"
        goals+=("build/$target")
    done < <(needed_targets | longest_first)
    while IFS='|' read -r _ name need kind arguments; do
        printf '%s: | %s\n\t+@test/support/job.sh %s %s %s\n' "$(result "$name")" "$need" "$kind" "$name" "$arguments"
        goals+=("$(result "$name")")
    done < <(printf '%s\n' "${jobs[@]}" | grep . | longest_first)
    printf 'all: %s\n' "${goals[*]}"
}
write_pool >"$pool"
all_jobs | cut -d'|' -f2 >"$RESULTS/planned"

# run_pool GOAL    makes the goal; false if any part of it failed
run_pool() {
    local at_once=${JOBS:-$(($(nproc) + 1))}
    [ ${#waiting[@]} = 0 ] || at_once=$((at_once + 1))
    make --no-print-directory -k -j"$at_once" -f "$pool" "$1" 2>&1 |
        grep --line-buffered -vE '^make(\[[0-9]+\])?: (\*\*\*|Target)'
    return "${PIPESTATUS[0]}"
}
start=$(date +%s.%N)
[ -n "$BUILT" ] || [ ${#builds[@]} = 0 ] || run_pool ready && run_pool all
# Tests that measure time have the machine to themselves.
while IFS='|' read -r _ name need kind arguments; do
    # shellcheck disable=SC2086  # arguments are words
    [ ! -e "$need" ] || test/support/job.sh "$kind" "$name" $arguments
done < <(printf '%s\n' "${alone[@]}" | grep .)

test/support/summary.sh "$RESULTS" "$(echo "$(date +%s.%N) $start" | awk '{ print $1 - $2 }')"
