#!/usr/bin/env bash
# What several processes cost and hide on this machine.
#
#   test/bench_parallel.sh BUILD    the folder of a build (make bench-parallel gives it)
cd "$(dirname "$0")/.." || exit 1
. test/ranks.sh
export RANKS_TIMEOUT=3600
program=$1/bench_parallel
echo "building the groups of a mesh"
printf '%8s %8s %10s\n' ranks groups ms
for n in 2 4 8 16 32; do
    ranks "$n" "$program" groups || exit 1
done
echo
echo "overlap of communication and computation (a core for each rank)"
for ((n = 2; n <= $(nproc); n *= 2)); do
    ranks "$n" "$program" overlap || exit 1
done
