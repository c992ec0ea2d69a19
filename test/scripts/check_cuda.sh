#!/usr/bin/env bash
# The program compiles and links for GPUs without a warning, and according to ptxas's notes none of its kernels spills
# registers, has arrays in local memory or waits within products that should overlap; nor do they on a newer card, whose
# driver compiles their PTX. test/tools/check_sass.py checks further properties of their machine code. No GPU is needed. Host
# code, which is tested elsewhere, is optimized less. Then the program runs on the PTX of its own kernels (test/nocard/).
# EVERY=yes also compiles the kernels in fp32, the program for all cards, and the program in fp32 for ranks that communicate
# over MPI, and makes more runs, on more cards.
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs cpu-fp32/compare_ledger simt-bf16/train_gpt
# seconds: 260
# soak: EVERY=yes
# limit: 14400
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/nocard.sh
checks=$((8 + nocard_checks))
[ -z "$EVERY" ] || checks=$((checks + 6 + nocard_soak_checks))
plan $checks
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
    skip "no nvcc here" $checks
    exit
fi

# prints the kernels that put bytes into local memory, except those that may
may_spill=
spills() {
    [ -z "$may_spill" ] || return 0
    awk -F"'" '
        /Compiling entry function/ { kernel = $2; arch = $4 }
        /bytes stack frame/ { split($0, words, " "); if (words[1] || words[5]) print words[1], "bytes in local memory:", kernel, arch }
    ' "$work/log" | c++filt | grep -vE "${may_spill_on:-^$}"
}

# C7508 and its neighbors: a warpgroup's products are serialized, or setmaxnreg is ignored
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

# Code for cards is compiled without the code that launches it (Makefile), so each kernel that is launched must be in it.
launched_kernels() {
    local object=build/nocard/train_gpt.o
    strings -a "$object" | sed -n 's/.*\.entry \(_Z[A-Za-z0-9_]*\).*/\1/p' | sort -u >"$work/compiled"
    # _Z33__device_stub__Z11fill_kernelPffm... is the stub of _Z11fill_kernelPffm: 33 is the length of both together
    nm "$object" | awk '$2 ~ /^[tT]$/ && sub(/^_ZL?/, "", $3) && $3 ~ /^[0-9]+__device_stub__Z/ {
        length_of_both = $3 + 0
        sub(/^[0-9]+__device_stub_/, "", $3)
        print substr($3, 1, length_of_both - 14)
    }' | sort -u >"$work/launched"
    comm -23 "$work/launched" "$work/compiled" | sed 's/^/not compiled for cards: /' | c++filt >"$work/missing"
    cat "$work/missing"
    [ -s "$work/launched" ] && [ -s "$work/compiled" ] && [ ! -s "$work/missing" ]
}

# The object that is the same for all devices was already built for the CPU.
strict=(make --no-print-directory DEVICE=cuda CPU_ARCH=native STRICT=1 CXXFLAGS=-O0 -o build/shared/commands.o)
# kernels NAME OPTIONS...    compiles the program for cards only, without the host's code, in a fifth of the time
kernels() { build "$1" "$nvcc" -std=c++20 -O3 -Xcompiler -O0 --expt-relaxed-constexpr --extended-lambda -I. "${@:2}" \
    -Xptxas -v -fatbin build/shared/program.cu -o "$work/kernels.fatbin"; }
rm -f build/nocard/train_gpt.o # to be compiled again, for ptxas's notes
build "the program for sm_90a in bf16" "${strict[@]}" nocard_cards="${EVERY:+80 }90a" build/nocard/train_gpt
check "each kernel that the program launches is compiled for cards" launched_kernels
# On sm_100 one kernel of attention's backward pass spills 64 bytes.
may_spill_on=attention_backward_kernel.*sm_100 kernels "kernels for sm_80 in bf16, and for sm_100 from their PTX" -DPRECISION_BF16 \
    -gencode "arch=compute_80,code=[sm_80,sm_100]"
# The disassemblers are in the folder SASS_TOOLS, on the PATH or in CUDA's folder.
PATH="${SASS_TOOLS:+$SASS_TOOLS:}$PATH:/usr/local/cuda/bin"
if [ "$(command -v cuobjdump nvdisasm c++filt python3 | wc -l)" = 4 ]; then
    check "machine code of sm_90a in bf16" test/tools/check_sass.py build/nocard/train_gpt.o
else
    skip "no cuobjdump and nvdisasm here" 1 "machine code of sm_90a in bf16"
fi
# Other versions of ptxas, each of which orders products of warpgroups differently, compile the PTX of the kernels that use such
# products, with the PTX's version lowered to theirs. PTXAS_TOOLS has a folder for each version; .ci/run downloads them from
# PyPI. 12.6 is not supported: it keeps the products in flight, but spills 40 bytes in one kernel.
printf '#include "kernels/attention_hopper%s.cuh"\n' '' _backward >"$work/hopper.cu"
of_version() {
    local ptxas=$PTXAS_TOOLS/$1/ptxas
    sed "s/^\.version .*/.version $2/" "$work/hopper.ptx" >"$work/lowered.ptx"
    build "products in flight with ptxas $1" "$ptxas" -arch sm_90a -v -o "$work/kernels.cubin" "$work/lowered.ptx"
}
if [ -d "$PTXAS_TOOLS" ]; then
    "$nvcc" -std=c++20 -O3 -Xcompiler -O0 --expt-relaxed-constexpr --extended-lambda -I. -DPRECISION_BF16 \
        -gencode arch=compute_90a,code=compute_90a -ptx "$work/hopper.cu" -o "$work/hopper.ptx"
    may_spill=yes of_version 12.6 8.5
    of_version 12.8 8.7
    of_version 12.9 8.8
    of_version newest 9.0
else
    skip "no other ptxas here" 4 "products in flight"
fi
nocard_runs
if [ -n "$EVERY" ]; then
    nocard_soak
    # These cards run short of registers elsewhere. The program's code for them comes from the PTX of sm_80, which spills less.
    for arch in 89 100a 120; do
        may_spill=yes kernels "kernels for sm_$arch in bf16" -DPRECISION_BF16 -gencode "arch=compute_$arch,code=sm_$arch"
    done
    kernels "kernels for sm_80 in fp32" -gencode arch=compute_80,code=sm_80
    build "the program for sm_80 and sm_90a in bf16" "${strict[@]}" PRECISION=bf16 build/cuda-bf16/train_gpt
    build "the program for sm_80 in fp32, ranks that talk over MPI" "${strict[@]}" PRECISION=fp32 COMM=mpi GPU_ARCH=80 \
        build/cuda-fp32-mpi/train_gpt
fi
