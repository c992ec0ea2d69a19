#!/usr/bin/env bash
# Builds and runs the tests, in one pool of jobs, and adds up how they ended. test/README.md says what there is.
#
#   test/run.sh [test|all|soak]   what `make test`, `make test-all` or `make soak` run
#   test/run.sh list [SUITE]      prints the jobs of the suite, and runs nothing
#   test/run.sh units BUILD       prints the units that run on a build
#
#   UNIT="norm runs"   only test_norm.cu and check_runs.sh, with one program for each unit
#   CASE='*odd*'       only the cases with such names
#   BUILDS="cpu-fp32"  only on these builds; BUILT=yes: they have been built, with one program for each unit
#   JOBS=N             how many jobs run at once: one more than there are cores, for some wait for a disk or for ranks
#   ALLOWED_SKIPS=RE   a skipped case whose reason does not match fails
#   RESULTS=DIR        where what jobs print goes: build/test-results
#
# The last line is "N passed, N failed, N skipped"; the exit code is 1 if anything failed.
cd "$(dirname "$0")/.." || exit 1
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
suite=${1:-test}
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

# result NAME    the file that the result of a job goes to
result() { echo "$RESULTS/${1//\//.}"; }
longest_first() { sort -t'|' -k1,1nr -s; }

# write_jobs [in-turn]    rules for lines of jobs; adds their targets to the caller's `goals`. In turn: one after another.
write_jobs() {
    local name need kind arguments target after=
    while IFS='|' read -r _ name need kind arguments; do
        target=$(result "$name")
        printf '%s: | %s %s\n\t+@test/support/job.sh %s %s %s\n' "$target" "$need" "$after" "$kind" "$name" "$arguments"
        goals+=("$target")
        [ -z "$1" ] || after=$target
    done
}

# A build's stamps, and objects that several programs share, are made before the programs that need them.
write_pool() {
    local target options first goals=()
    printf '.DEFAULT_GOAL := all\n.PHONY: FORCE\nFORCE:\n'
    first=
    for target in "${!builds[@]}"; do # one after another: some of it is the same for all
        printf 'build/%s/ready: FORCE %s\n' "$target" "$first"
        first=build/$target/ready
        printf '\t+@test/support/job.sh build %s $(MAKE) -s %s %s\n' "$target/ready" "$(build_options "$target")" "$first"
    done
    write_jobs in-turn < <(printf '%s\n' "${waiting[@]}" | grep . | longest_first)
    while IFS='|' read -r _ target; do
        [ -n "$target" ] || continue
        options=${target#build/}
        first=build/${options%%/*}/ready
        printf '%s: FORCE | %s\n\t+@test/support/job.sh build %s $(MAKE) -s %s %s\n' \
            "$target" "$first" "${target#build/}" "$(build_options "${options%%/*}")" "$target"
        goals+=("$target")
    done < <(needed_targets | longest_first)
    write_jobs < <(printf '%s\n' "${jobs[@]}" | grep . | longest_first)
    printf 'all: %s\n' "${goals[*]}"
}
write_pool >"$pool"
all_jobs | cut -d'|' -f2 >"$RESULTS/planned"

start=$(date +%s.%N)
make --no-print-directory -k -j"${JOBS:-$(($(nproc) + 1))}" -f "$pool" 2>&1 |
    grep --line-buffered -vE '^make(\[[0-9]+\])?: (\*\*\*|Target)'
# Tests that measure time have the machine to themselves.
while IFS='|' read -r _ name need kind arguments; do
    # shellcheck disable=SC2086  # arguments are words
    [ ! -e "$need" ] || test/support/job.sh "$kind" "$name" $arguments
done < <(printf '%s\n' "${alone[@]}" | grep .)

test/support/summary.sh "$RESULTS" "$(echo "$(date +%s.%N) $start" | awk '{ print $1 - $2 }')"
