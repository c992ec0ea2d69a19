#!/usr/bin/env bash
# Models to Hugging Face transformers and back (test/tools/transformers_round_trip.py). Needs a Python with PyTorch and
# transformers, which PYTHON may name; without one all checks are skipped.
#
#   test/scripts/check_transformers.sh [FAMILY...]
# seconds: 60
# needs: cpu-fp32/train_gpt cpu-fp32/token_likelihoods
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 101
. test/support/python.sh 101
OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 "$python" test/tools/transformers_round_trip.py build/cpu-fp32/train_gpt build/cpu-fp32/token_likelihoods \
    test/golden/tokenizers/qwen.json "$@"
