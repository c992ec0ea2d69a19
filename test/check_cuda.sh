#!/usr/bin/env bash
# The program and the kernel tests compile and link for GPUs without a warning. No GPU is needed.
cd "$(dirname "$0")/.." || exit 1
if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "skipped: compiling for GPUs (no nvcc here)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build NAME VARIABLES AND TARGETS...
build() {
    local name=$1
    shift
    if make --no-print-directory DEVICE=cuda STRICT=1 "$@" >"$work/log" 2>&1; then
        echo "ok $name"
    else
        grep -vE '^(/[^ ]*/)?(nvcc|g\+\+)' "$work/log" | tail -30
        echo "FAILED $name"
    fi
}

build "sm_80 and sm_90a in bf16" PRECISION=bf16 build/cuda-bf16/train_gpt
build "sm_80 in fp32, ranks that talk over MPI" PRECISION=fp32 GPU_ARCH=80 COMM=mpi build/cuda-fp32-mpi/train_gpt
