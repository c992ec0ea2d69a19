#!/usr/bin/env bash
# Training that llm.c began continues here (test/tools/llmc_round_trip.py). Needs a Python with PyTorch and transformers, which
# PYTHON may name; without one all checks are skipped.
# seconds: 60
# needs: cpu-fp32/train_gpt
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 10
. test/support/python.sh 10
OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 "$python" test/tools/llmc_round_trip.py build/cpu-fp32/train_gpt
