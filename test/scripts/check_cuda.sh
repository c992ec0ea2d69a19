#!/usr/bin/env bash
# The program compiles and links for GPUs without a warning, and no kernel of it spills registers, has arrays in local
# memory or waits within products that should overlap, as ptxas says in its notes. No GPU is needed. Code of the host,
# which is tested elsewhere, is optimised less.
# seconds: 200
# limit: 1800
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 2
if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    skip "no nvcc here" 2
    exit
fi

# kernels that put bytes into local memory
spills() {
    awk -F"'" '
        /Compiling entry function/ { kernel = $2; arch = $4 }
        /bytes stack frame/ { split($0, words, " "); if (words[1] || words[5]) print words[1], "bytes in local memory:", kernel, arch }
    ' "$work/log" | c++filt
}

# C7508 and its neighbours: products of a warpgroup made one after another, or registers that are not given out
slowed() { grep -E 'C75[0-9][0-9]|Potential Performance Loss|setmaxnreg.*ignored' "$work/log" | c++filt; }

# build NAME VARIABLES AND TARGETS...
build() {
    local name=$1
    shift
    if ! make --no-print-directory DEVICE=cuda STRICT=1 CXXFLAGS=-O0 "$@" >"$work/log" 2>&1; then
        grep -vE '^(/[^ ]*/)?(nvcc|g\+\+)|^ptxas info|bytes stack frame' "$work/log" | c++filt | tail -30
        echo "FAILED $name"
    elif ! grep -q 'bytes stack frame' "$work/log"; then
        echo "FAILED $name: ptxas says nothing of registers"
    elif [ -n "$(spills)" ]; then
        spills
        echo "FAILED $name: kernels spill"
    elif [ -n "$(slowed)" ]; then
        slowed
        echo "FAILED $name: ptxas makes products wait"
    else
        echo "ok $name"
    fi
}

build "sm_80 and sm_90a in bf16" PRECISION=bf16 build/cuda-bf16/train_gpt
build "sm_80 and sm_90a in fp32, ranks that talk over MPI" PRECISION=fp32 COMM=mpi build/cuda-fp32-mpi/train_gpt
