#!/usr/bin/env bash
# What several processes cost and hide, on this machine.
#
#   test/bench_parallel.sh BUILD    the folder of a build (make bench-parallel gives it)
cd "$(dirname "$0")/.." || exit 1
. test/ranks.sh
build=$1
echo "overlap of communication and computation"
for n in 2 4; do
    [ "$n" -gt "$(nproc)" ] || ranks "$n" "$build/bench_parallel" || exit 1
done
