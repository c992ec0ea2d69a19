#!/usr/bin/env bash
# Training that llm.c began goes on here (test/tools/llmc_round_trip.py). Needs a Python that has PyTorch and
# transformers, and does nothing without: PYTHON names it.
# seconds: 60
# needs: cpu-fp32/train_gpt
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 10
. test/support/python.sh 10
OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 "$python" test/tools/llmc_round_trip.py build/cpu-fp32/train_gpt
