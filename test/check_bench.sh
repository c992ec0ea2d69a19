#!/usr/bin/env bash
# The benchmarks run, where nobody looks at their times: every kernel's check on the simulated device, and training steps.
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# check NAME COMMAND...
check() {
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then echo "ok $name"; else
        tail -20 "$work/log"
        echo "FAILED $name"
    fi
}
refuses() { ! "$@"; }

build() { make --no-print-directory "$@"; }
check "bench_kernels builds for the simulated device" build DEVICE=simt PRECISION=bf16 build/simt-bf16/bench_kernels
# not as fast as it could be: nobody looks at its times here
check "bench_train builds" build DEVICE=cpu BUILD=build/bench CXXFLAGS=-O1 build/bench/bench_train
check "kernels in bf16, simulated" build/simt-bf16/bench_kernels
check "a group that is not there is refused" refuses build/simt-bf16/bench_kernels softmax
check "training steps" build/bench/bench_train --records "$work/records" tiny:2x32x2 gpt2-124M:1x8
check "each leaves a record" grep -c . "$work/records"
check "a model that is not there is refused" refuses build/bench/bench_train gpt9:1x8
