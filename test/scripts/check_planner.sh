#!/usr/bin/env bash
# How well the planner predicts published step times, fitted anew: all of them, and each publication from the others.
#
#   FIT=yes    fits, which takes minutes
# soak: FIT=yes
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 2
[ -n "$FIT" ] || { skip "make soak fits the planner, which takes minutes" 2; exit; }
make -s DEVICE=cpu PRECISION=fp32 build/cpu-fp32/calibrate_planner || exit 1 # here, for others need not wait for it
build/cpu-fp32/calibrate_planner >"$work/fit.out" 2>&1
fitted=$?
tail -25 "$work/fit.out"
check "published steps are within their bounds, those of publications that were left out too" [ $fitted = 0 ]
check "the row that cannot be planned is named" grep -q 'left out: 405B 16384 with sequences of 131072' "$work/fit.out"
