#!/usr/bin/env bash
# Costs that grow with the number of ranks: messages of the control plane, which Open MPI counts below its collectives, and
# the start of a run.
#
#   RANKS=N    number of ranks (24); EVERY=yes: all calls
# needs: cpu-fp32/train_gpt cpu-fp32/count_messages
# seconds: 20
# soak: RANKS=64 EVERY=yes
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
n=${RANKS:-24}
program=$PWD/build/cpu-fp32/train_gpt count=$PWD/build/cpu-fp32/count_messages text=$PWD/test/golden/bpe_training.json
turns=0 # rounds of a barrier
while [ $((1 << turns)) -lt "$n" ]; do turns=$((turns + 1)); done
# each CALL and the most messages that it may send, from comm/control_plane.h
calls="gather $((n - 1))
exchange $((n + n * turns))"
[ -z "$EVERY" ] || calls+="
broadcast $((n - 1))
broadcast_text $((n - 1))
all_gather $((3 * n))
agree $((2 * n))
largest $((2 * n))
barrier $((n * turns))"
plan $(($(wc -l <<<"$calls") + 2))
command -v mpirun >/dev/null || { skip "no mpirun here" $(($(wc -l <<<"$calls") + 2)); exit; }
cd "$work" || exit 1

# sent CALL TIMES    prints how many messages all ranks send in a run with TIMES calls
sent() {
    rm -f sent.*.prof
    (
        mpirun_options=("${mpirun_options[@]/#ob1/ob1,monitoring}" --mca pml_monitoring_enable 2
            --mca pml_monitoring_enable_output 3 --mca pml_monitoring_filename "$work/sent")
        ranks "$n" "$count" "$@" >sent.out 2>&1
    ) || { tail -3 sent.out >&2; return 1; }
    cat sent.*.prof | sed -nE 's/^[EI]\t.*\t([0-9]+) msgs sent.*/\1/p' | awk '{ all += $1 } END { print all + 0 }'
}

times=10
without=$(sent barrier 0)
while read -r call most; do
    with=$(sent "$call" $times </dev/null)
    each=$(((${with:-0} - ${without:-0}) / times))
    if [ $each -gt 0 ] && [ $each -le "$most" ]; then
        echo "ok $call on $n ranks: $each messages, at most $most"
    else
        echo "FAILED $call on $n ranks: $each messages, at most $most ($without without it, $with with $times)"
    fi
done <<<"$calls"

"$program" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
# Tensor ranks, stages, shards and replicas, so that groups of every kind are made.
start() {
    RANKS_TIMEOUT=600 ranks "$n" "$program" train --model tiny --layers 2 --channels 32 --heads 4 --mlp-width 48 --context 48 \
        --tp 2 --pp 2 --zero 2 --shard-group 2 --micro-batch 1 --global-batch $((n / 4 * 48)) --steps 1 \
        --train-data 'text_train_*.bin' --run-dir run --communication-timeout 300
}
check "a run of $n ranks starts, and ends after a step" start
check "its checkpoint is whole" "$program" inspect run --verify on
