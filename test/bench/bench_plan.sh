#!/usr/bin/env bash
# Planned and measured steps, side by side.
#
#   test/bench/bench_plan.sh BUILD    the folder of a build (make bench-plan gives it)
cd "$(dirname "$0")/../.." || exit 1
. test/support/ranks.sh
export RANKS_TIMEOUT=600
program=$1/bench_plan
for n in 2 4 8; do
    ranks "$n" "$program" sleep || exit 1
done
"$program" compute || exit 1
ranks 2 "$program" compute || exit 1
