#!/usr/bin/env bash
# Training that llm.c began goes on here (test/llmc_round_trip.py). Needs a Python that has PyTorch and
# transformers, and does nothing without: PYTHON names it.
cd "$(dirname "$0")/.." || exit 1
against=llm.c
. test/python.sh
make --no-print-directory DEVICE=cpu PRECISION=fp32 build/cpu-fp32/train_gpt >/dev/null ||
    { echo "FAILED llm.c: does not build"; exit 1; }
OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 "$python" test/llmc_round_trip.py build/cpu-fp32/train_gpt
