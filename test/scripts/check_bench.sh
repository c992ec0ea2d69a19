#!/usr/bin/env bash
# The benchmark of kernels runs on the simulated device, where its times mean nothing: each kernel's check must pass.
# needs: simt-bf16/bench_kernels
# seconds: 15
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 2
refuses() { ! "$@"; }

check "kernels in bf16, simulated" build/simt-bf16/bench_kernels
check "a group that is not there is refused" refuses build/simt-bf16/bench_kernels softmax
