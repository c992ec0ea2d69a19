#!/usr/bin/env bash
# Runs the scripts that wait, one after another, each as soon as the programs that it needs have been built. They are one job
# of test/run.sh's pool, and its first, because make returns to a target that could not start only after trying all others.
#
#   in_turn.sh FILE    lines SECONDS|NAME|PROGRAMS|KIND|ARGUMENTS for job.sh
cd "$(dirname "$0")/../.." || exit 1

# built PROGRAM    waits until the pool has built it; false if the build fails
built() {
    local name=${1#build/} result code
    result=$RESULTS/${name//\//.}.built
    until [ -s "$result" ]; do sleep 0.2; done
    read -r _ _ _ _ code <"$result"
    [ "$code" = 0 ]
}

while IFS='|' read -r _ name programs kind arguments <&3; do
    for program in $programs; do
        [ -n "$BUILT" ] || built "$program" || continue 2
    done
    # shellcheck disable=SC2086  # arguments are words
    test/support/job.sh "$kind" "$name" $arguments
done 3<"$1"
