#!/usr/bin/env bash
# Runs the scripts that wait, one after another, each once the programs that it needs have been built. They are one job of the
# pool of test/run.sh, and its first: make comes back to a target that could not begin only when it has been through all others.
#
#   in_turn.sh FILE    lines SECONDS|NAME|PROGRAMS|KIND|ARGUMENTS for job.sh
cd "$(dirname "$0")/../.." || exit 1

# built PROGRAM    waits until the pool has built it; false if it does not build
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
