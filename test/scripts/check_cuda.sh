#!/usr/bin/env bash
# The program compiles and links for GPUs without a warning, and no kernel of it spills registers, has arrays in local
# memory or waits within products that should overlap, as ptxas says in its notes; and nor do they on a newer card,
# whose driver compiles their PTX. What else their machine code must be like is in test/tools/check_sass.py. No GPU is
# needed. Code of the host, which is tested elsewhere, is optimised less. With EVERY=yes the kernels are also compiled in
# fp32, and the program for all cards, and in fp32 for ranks that talk over MPI.
# seconds: 200
# soak: EVERY=yes
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
checks=4
[ -z "$EVERY" ] || checks=7
plan $checks
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
    skip "no nvcc here" $checks
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

# build NAME COMMAND...
build() {
    local name=$1
    shift
    if ! "$@" >"$work/log" 2>&1; then
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

strict=(make --no-print-directory DEVICE=cuda STRICT=1 CXXFLAGS=-O0)
# kernels NAME OPTIONS...    the kernels that kernels.cu includes, without the program around them, which takes a fifth of the time
kernels() { build "$1" "$nvcc" -std=c++20 -O3 -Xcompiler -O0 --expt-relaxed-constexpr --extended-lambda -I. "${@:2}" \
    -Xptxas -v -cubin "$work/kernels.cu" -o "$work/kernels.cubin"; }
printf '#include "%s"\n' kernels/*.cuh >"$work/kernels.cu"
build "the program for sm_90a in bf16" "${strict[@]}" PRECISION=bf16 GPU_ARCH=90a build/cuda-bf16/train_gpt
kernels "kernels for sm_80 in bf16" -DPRECISION_BF16 -gencode arch=compute_80,code=sm_80
# All but two: those for Hopper do nothing on other cards, and of the backward pass of attention one kernel spills 64 bytes.
printf '#include "%s"\n' $(ls kernels/*.cuh | grep -vE 'attention(_mma_backward|_hopper.*|)\.cuh') >"$work/kernels.cu"
kernels "kernels for sm_100 from the PTX of sm_80" -DPRECISION_BF16 -gencode arch=compute_80,code=sm_100
# These programs are in the folder SASS_TOOLS, on the PATH or where CUDA is.
PATH="${SASS_TOOLS:+$SASS_TOOLS:}$PATH:/usr/local/cuda/bin"
if [ "$(command -v cuobjdump nvdisasm c++filt python3 | wc -l)" = 4 ]; then
    check "machine code of sm_90a in bf16" test/tools/check_sass.py build/cuda-bf16/train_gpt.o
else
    skip "no cuobjdump and nvdisasm here" 1 "machine code of sm_90a in bf16"
fi
if [ -n "$EVERY" ]; then
    printf '#include "%s"\n' $(ls kernels/*.cuh | grep -vE 'attention_(mma|hopper)') >"$work/kernels.cu" # those are for bf16
    kernels "kernels for sm_80 in fp32" -gencode arch=compute_80,code=sm_80
    build "the program for sm_80 and sm_90a in bf16" "${strict[@]}" PRECISION=bf16 build/cuda-bf16/train_gpt
    build "the program for sm_80 in fp32, ranks that talk over MPI" "${strict[@]}" PRECISION=fp32 COMM=mpi GPU_ARCH=80 \
        build/cuda-fp32-mpi/train_gpt
fi
