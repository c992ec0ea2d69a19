#!/usr/bin/env bash
# The program compiles and links for GPUs without a warning, and no kernel of it spills registers or has arrays
# in local memory, as ptxas counts them. No GPU is needed.
cd "$(dirname "$0")/.." || exit 1
if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "skipped: compiling for GPUs (no nvcc here)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# spills MOST    kernels that put more bytes than that into local memory
spills() {
    awk -v most="$1" -F"'" '
        /Compiling entry function/ { kernel = $2; arch = $4 }
        /bytes stack frame/ { split($0, words, " "); if (words[1] > most || words[5] > most) print words[1], "bytes in local memory:", kernel, arch }
    ' "$work/log" | c++filt
}

# build NAME SPILLED VARIABLES AND TARGETS...    SPILLED: bytes that a kernel may put into local memory
build() {
    local name=$1 most=$2
    shift 2
    if ! make --no-print-directory DEVICE=cuda STRICT=1 "$@" >"$work/log" 2>&1; then
        grep -vE '^(/[^ ]*/)?(nvcc|g\+\+)|^ptxas info|bytes stack frame' "$work/log" | c++filt | tail -30
        echo "FAILED $name"
    elif ! grep -q 'bytes stack frame' "$work/log"; then
        echo "FAILED $name: ptxas says nothing of registers"
    elif [ -n "$(spills "$most")" ]; then
        spills "$most"
        echo "FAILED $name: kernels spill"
    else
        echo "ok $name"
    fi
}

build "sm_80 and sm_90a in bf16" 0 PRECISION=bf16 build/cuda-bf16/train_gpt
# fp32 is for comparisons: attention to heads of 256 keeps two addresses there that it needs once a tile
build "sm_80 in fp32, ranks that talk over MPI" 32 PRECISION=fp32 GPU_ARCH=80 COMM=mpi build/cuda-fp32-mpi/train_gpt
