#!/usr/bin/env bash
# Training speed of whole models on this device, and of the same models in PyTorch if a Python on this machine has it.
#
#   test/bench/bench_train.sh BUILD [MODEL:BxT[xM]]...    the folder of a build (make bench-train passes it)
#   PYTHON=path                                     the Python to try first
#   PARTS="ours pytorch"                            either, or both; pytorch alone compares with our last measurements
#   PYTORCH_SECONDS=N                               starts no model in PyTorch after N seconds
cd "$(dirname "$0")/../.." || exit 1
build=$1
shift
parts=" ${PARTS:-ours pytorch} "
if [[ $parts == *" ours "* ]]; then "$build/bench_train" --records "$build/bench_train.jsonl" "$@" || exit 1; fi
[[ $parts == *" pytorch "* ]] || exit 0
case $build in
*cuda-*) usable='import sys, torch; sys.exit(not torch.cuda.is_available())' ;;
*) usable='import torch' ;;
esac
for python in $PYTHON python3 /opt/*/bin/python3; do
    if "$python" -c "$usable" 2>/dev/null; then
        exec "$python" test/bench/bench_train.py "$build/bench_train.jsonl" ${PYTORCH_SECONDS:+--seconds "$PYTORCH_SECONDS"}
    fi
done
echo "PyTorch: no Python here has it for this device (name one in PYTHON)"
