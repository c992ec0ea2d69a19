#!/usr/bin/env bash
# train_gpt selftest: healthy ranks are not suspected, whatever else the machine does, and faults are named: wrong bits in a
# product, a disk that fails, a disk that is slow. Faults are injected from outside the program (fault_injection.cc).
#
#   HEALTHY=N    how often healthy ranks are tested while other programs load the machine (2)
# needs: cpu-fp32/train_gpt cpu-fp32/fault_injection.so
# seconds: 20
# soak: HEALTHY=20
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
healthy=${HEALTHY:-2}
plan $((10 + healthy))
cpu=$PWD/build/cpu-fp32/train_gpt faults=$PWD/build/cpu-fp32/fault_injection.so
cd "$work" || exit 1
mkdir checkpoints # the faults strike below a folder of this name
export OMP_NUM_THREADS=1

# tested RANKS [VAR=VALUE...] -- OPTIONS...    runs the self-test with output in `out` and `err`, and sets `code`
tested() {
    local n=$1 launch=() settings=()
    shift
    while [ "$1" != -- ]; do settings+=("$1"); shift; done
    shift
    [ "$n" = 1 ] || launch=(ranks "$n")
    [ ${#settings[@]} = 0 ] || settings=(env LD_PRELOAD="$faults" FAULT_RANK=1 FAULT_AT=1 "${settings[@]}")
    RANKS_TIMEOUT=100 "${launch[@]}" "${settings[@]}" "$cpu" selftest --seconds 0.5 "$@" >out 2>err
    code=$?
}
is_healthy() { [ "$code" = 0 ] && grep -q "^$1" out || { cat out err; return 1; }; }
# suspects WORDS    only rank 1 is named, with these words
suspects() {
    [ "$code" = 75 ] && [ "$(grep -c '^train_gpt: suspect:' err)" = 1 ] && grep -q "^train_gpt: suspect: rank 1 .*$1" err && return
    cat out err
    return 1
}
refused() {
    ! "$cpu" selftest "${@:2}" >out 2>err && [ "$(wc -l <err)" = 1 ] && grep -q "$1" err || { cat out err; return 1; }
}

tested 1 --
check "one process is healthy by itself" is_healthy 'healthy, by itself'
if command -v mpirun >/dev/null; then
    tested 2 -- --format json --measure machine.json --run-dir checkpoints
    check "two ranks, as JSON" eval '[ $code = 0 ] && python3 -c "
import json
found = json.load(open(\"out\"))
assert found[\"healthy\"] and found[\"suspects\"] == [] and len(found[\"ranks\"]) == 2 and len(found[\"links\"]) == 1, found"'
    check "the machine that they measured can be planned for" "$cpu" plan --model gpt2-124M --machine machine.json --gpus 2 --global-batch 64k
    check "nothing is left on the disk" eval '[ -z "$(ls checkpoints)" ]'

    tested 4 FAULT=flip FAULT_CALLS=product --
    check "a wrong bit in a product" suspects 'a matrix product is wrong in 1 of its 512 rows and 1 of its 512 columns'
    tested 4 FAULT=flip FAULT_CALLS=product FAULT_AT=5 FAULT_LASTING=1 --
    check "wrong bits in products later on" suspects 'matrix products differ from the first one'
    tested 4 FAULT=EIO FAULT_CALLS=sync FAULT_LASTING=1 -- --run-dir checkpoints
    check "a disk that fails" suspects 'selftest.*: cannot bring it to disk\|selftest.*Input/output error'
    for seconds in 4 16; do # on a busy machine healthy disks are slow, too
        tested 4 FAULT=stall FAULT_CALLS=sync FAULT_LASTING=1 FAULT_SECONDS=$seconds -- --run-dir checkpoints
        ! suspects 'writing to disk' >/dev/null || break
    done
    check "a slow disk" suspects 'writing to disk'

    # Other processes compete for the cores: two endless loops for each.
    loads=()
    for ((i = 0; i < 2 * $(nproc); i++)); do
        (while :; do :; done) &
        loads+=($!)
    done
    for ((i = 1; i <= healthy; i++)); do
        tested 4 --
        check "four ranks are healthy under load, try $i" is_healthy 'healthy: all bits are right'
    done
    kill "${loads[@]}" 2>/dev/null
else
    skip "no mpirun here" $((7 + healthy))
fi

check "a folder that is not there" refused 'nowhere.*No such file' --run-dir nowhere
check "a name that no machine file has" refused 'not the name of a .json file' --measure machine.txt
