#!/usr/bin/env bash
# A checkpoint loads on any layout: a checkpoint of each of these layouts is loaded on every other, compared with what was saved,
# and saved again there; then the tensors of both checkpoints are compared byte for byte. Most of the numbers of ranks do not
# divide one another, and 9 replicas read in turns.
# needs: cpu-fp32/reshard
# seconds: 10
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
reshard=$PWD/build/cpu-fp32/reshard
plan 156
command -v mpirun >/dev/null || { skip "no mpirun here" 156; exit; }
cd "$work" || exit 1

# ranks, layout
layouts=(
    1 dp=1
    2 tp=2
    3 dp=3,shard=3,zero=3
    4 tp=4,copies=2
    4 tp=2,pp=2
    5 dp=5,shard=5,zero=1,offload=1
    5 pp=5
    6 pp=3,dp=2,zero=2
    6 dp=6,shard=3,zero=3
    7 dp=7
    9 dp=9
    8 tp=2,pp=2,dp=2,shard=2,zero=2
    8 tp=8,copies=4
)
for ((i = 0; i < ${#layouts[@]}; i += 2)); do
    ranks "${layouts[i]}" "$reshard" fill "${layouts[i + 1]}" "${layouts[i + 1]}" || echo "FAILED fill ${layouts[i + 1]}"
done
for ((i = 0; i < ${#layouts[@]}; i += 2)); do
    sources=()
    for ((j = 0; j < ${#layouts[@]}; j += 2)); do [ $i = $j ] || sources+=("${layouts[j + 1]}"); done
    ranks "${layouts[i]}" "$reshard" move "${layouts[i + 1]}" moved "${sources[@]}" ||
        echo "FAILED move to ${layouts[i + 1]}"
done
