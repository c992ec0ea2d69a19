#!/usr/bin/env bash
# Measures what communication between ranks costs on this machine, and how much of it hides behind computation.
#
#   test/bench/bench_parallel.sh BUILD    the folder of a build (make bench-parallel passes it)
cd "$(dirname "$0")/../.." || exit 1
. test/support/ranks.sh
export RANKS_TIMEOUT=3600
program=$1/bench_parallel
echo "building the groups of a mesh"
printf '%8s %8s %10s\n' ranks groups ms
for n in 2 4 8 16 32; do
    ranks "$n" "$program" groups || exit 1
done
echo
echo "how much of what is sent hides behind computation (a core for each rank)"
for kind in data tensor pipeline; do
    ranks 2 "$program" $kind || exit 1
done
echo
echo "the same model and batch cut in several ways"
for n in 2 4; do
    ranks "$n" "$program" layouts || exit 1
done
