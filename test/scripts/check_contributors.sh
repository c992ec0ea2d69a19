#!/usr/bin/env bash
# 4 ranks save a model and a table (test/comm/hash_table.h) together, and one rank is killed at a call to the file system: the
# checkpoint that is there is intact, including shared files, loads on 3 ranks, and the run resumes from it.
#
#   EVERY=yes    kills at every call of ranks 0 and 2; without it, at some. Also checks that a program from before there
#                were contributors refuses their checkpoints in one line, and writes nothing.
# needs: cpu-fp32/reshard cpu-fp32/fault_injection.so
# seconds: 20
# soak: EVERY=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
reshard=$PWD/build/cpu-fp32/reshard faults=$PWD/build/cpu-fp32/fault_injection.so
cd "$work" || exit 1
command -v mpirun >/dev/null || { plan 1; skip "no mpirun here" 1; exit; }

# go_on RANKS RUN STEP    trains up to this step, and saves after each
go_on() { ranks "$1" "$reshard" table "$2" "$3" >>"$2.out" 2>&1; }

# struck K RANK POINT    kills this rank at its K-th call, in steps that write deltas and a new base
struck() {
    local run=run-$2-$1 k=$1 rank=$2
    cp -r begun "$run"
    if LD_PRELOAD=$faults FAULT=kill FAULT_AT=$k FAULT_RANK=$rank go_on 4 "$run" 6; then
        echo "FAILED rank $rank is not killed at call $k"
    elif ! go_on 3 "$run" 8 || [ "$(grep -c '^ok .* is at step 8$' "$run.out")" != 1 ]; then
        echo "FAILED killed before call $k of rank $rank: $(tail -2 "$run.out" | xargs -0)"
    else
        echo "ok killed before call $k of rank $rank, $3, and loaded on 3"
    fi
    rm -rf "$run"
}

go_on 4 begun 2 || echo "FAILED to begin: $(cat begun.out)"
cp -r begun listed
for rank in 0 2; do
    FAULT_LIST=$work/points-$rank LD_PRELOAD=$faults FAULT=none FAULT_RANK=$rank go_on 4 listed 6 || echo "FAILED to list calls"
    rm -rf listed
    cp -r begun listed
    # Some: every fifth of the calls that are of another kind than the call before.
    mapfile -t points < <(awk -v every="$EVERY" \
        'every || $2 != before && n++ % 5 == 0 { print } { before = $2 }' points-$rank)
    links=$(grep -c '^[0-9]* link ' points-$rank)
    plan $((1 + ${#points[@]}))
    if [ $rank = 0 ] && [ "$links" -lt 20 ]; then echo "FAILED only $links calls share a file"; else echo "ok rank $rank makes ${#points[@]} calls"; fi
    for point in "${points[@]}"; do
        read -r k call file <<<"$point"
        at_once struck "$k" $rank "$call $file"
    done
    wait
done
[ -n "$EVERY" ] || exit 0

# refuses NAME COMMAND...    the earlier program ends with one line about the index, and leaves the run as it is
refuses() {
    local name=$1 before after
    shift
    before=$(find begun -printf '%p %i %s %T@\n' | sort)
    "$@" >earlier.out 2>earlier.err
    local code=$?
    after=$(find begun -printf '%p %i %s %T@\n' | sort)
    if [ $code = 1 ] && [ "$(wc -l <earlier.err)" = 1 ] && grep -q 'index.bin: .* use another checkpoint$' earlier.err && [ "$before" = "$after" ]; then
        echo "ok an earlier program refuses to $name"
    else
        echo "FAILED to refuse to $name: exit code $code: $(cat earlier.err)"
    fi
}
plan 4
if ! git -C "$OLDPWD" archive 715f427 2>/dev/null | { mkdir earlier && tar -x -C earlier 2>/dev/null; }; then
    skip "no history here" 4
    exit
fi
make -C earlier >make.out 2>&1 || { echo "FAILED to build 715f427"; tail -2 make.out; }
refuses inspect earlier/train_gpt inspect begun --verify on
refuses resume earlier/train_gpt train --model tiny --run-dir begun --resume auto --train-data 'begun_*.bin'
refuses sample earlier/train_gpt sample begun
refuses export earlier/train_gpt export begun --format hf --output exported
