#!/usr/bin/env bash
# Runs the tests that need a GPU, on a machine with one NVIDIA card, the most important first: that the program starts and
# trains, its self-test of the card, the speed of whole models, the unit tests on the card, checkpoints, several ranks that
# share the card, each kernel's speed, and models in PyTorch. Results are written as they arrive, so that nothing is lost if
# time runs out. The summary comes last; the exit code is 1 if anything failed.
#
#   test/gpu_check.sh [--write] [--sanitize]
#   test/gpu_check.sh --pack FILE
#
#   --write           writes all results to test/gpu_results.md; without it, to build/gpu_results.md
#   --sanitize        also runs the tests of kernels under compute-sanitizer (minutes more)
#   --pack FILE       builds all programs here, which needs no card, and packs them with the libraries they need, Open MPI
#                     among them, into FILE (.tar.xz), for ARCH (90a)
#   BUILT=FILE        takes the programs from a packed FILE, and builds nothing
#   DEPS=DIR          unpacked Debian packages (dpkg -x FILE DIR) that the build needs and the machine lacks:
#                     libcxxopts-dev, nlohmann-json3-dev, libxxhash-dev, libedit-dev, doctest-dev
#   SECONDS_LEFT=N    time for everything (780): fifteen minutes with a card, less the time to get one. Nothing starts after that.
#   COMMIT=NAME       the commit, if the source is not a git clone
#
# Without Open MPI it builds with MPI=off and leaves out the tests of ranks; without an installed NCCL it uses PyTorch's.
cd "$(dirname "$0")/.." || exit 1
. test/support/ranks.sh
. test/support/plan.sh
write='' sanitize='' pack=''
while [ $# -gt 0 ]; do
    case $1 in
    --write) write=yes ;;
    --sanitize) sanitize=yes ;;
    --pack) pack=$2; [ -n "$pack" ] || { echo "gpu_check.sh: --pack: give a file" >&2; exit 1; }; shift ;;
    *) echo "gpu_check.sh: $1: no such option; there are --write, --sanitize and --pack" >&2; exit 1 ;;
    esac
    shift
done
start=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ----------------------------------------------------------------------------------------------------------
# programs, and where they come from

# Ranks that share a card communicate over MPI, because NCCL does not allow it.
programs=(cuda-bf16/{train_gpt,bench_train,bench_kernels,compare_runs,tests/kernels-1}
    cuda-bf16-mpi/tests/program-1 cuda-fp32-mpi/{train_gpt,compare_runs})

# Units are compiled in groups, which takes less CPU time than one by one.
write_groups() { for build in cuda-bf16 cuda-bf16-mpi; do BUILDS=$build test/run.sh list >/dev/null || return; done; }

# build_all OPTIONS...    builds all programs, the slowest first
build_all() {
    local program build
    write_groups || return
    for program in "${programs[@]}"; do
        build=${program%%/*}
        # shellcheck disable=SC2046  # options are words
        echo "$(seconds_to_compile "build/$program") make --no-print-directory $(build_options "$build") $* build/$program"
    done | sort -rn | cut -d' ' -f2- | xargs -P "${JOBS:-$(nproc)}" -d '\n' -n 1 bash -c
}

nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
if [ -n "$pack" ]; then
    [ -n "$nvcc" ] || { echo "gpu_check.sh: no nvcc here; install the CUDA Toolkit" >&2; exit 1; }
    build_all GPU_ARCH="${ARCH:-90a}" NVCC="$nvcc" CXXFLAGS=-O1 >"$work/build" 2>&1 || { tail -20 "$work/build"; exit 1; }
    mkdir -p "$work/packed/lib"
    for program in "${programs[@]}"; do
        mkdir -p "$work/packed/$(dirname "$program")"
        strip -o "$work/packed/$program" "build/$program"
        [ ! -e "build/$program.cu" ] || cp "build/$program.cu" "$work/packed/$program.cu"
    done
    # needed_by FOLDER FILES...    copies the libraries that the files need, except CUDA's and those that every system has
    needed_by() {
        ldd "${@:2}" 2>/dev/null | awk '$3 ~ /^\// { print $3 }' | sort -u |
            grep -vE '/(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|gcc_s|stdc\+\+|gomp|cuda.*|cublas.*|nccl.*|nvidia.*))\.so' |
            xargs -I{} cp -L {} "$1"
    }
    needed_by "$work/packed/lib" "${programs[@]/#/$work/packed/}"
    # Open MPI and its libraries are in a separate folder, because a machine with its own Open MPI uses that.
    mpi=$(realpath "$(command -v mpirun)") mpi_library=$(ldconfig -p | awk '/libmpi.so.40/ { print $NF; exit }')
    folder=$(dirname "$mpi_library") target=$work/packed/mpi/lib
    mkdir -p "$work/packed/mpi/bin" "$work/packed/mpi/share" "$target"
    cp -L "$mpi" "$work/packed/mpi/bin/mpirun"
    cp -L "$(dirname "$mpi")/orted" "$work/packed/mpi/bin/"
    needed_by "$target" "$mpi" "$mpi_library" "$folder"/openmpi/lib/openmpi3/*.so "$folder"/pmix2/lib/pmix/*.so
    cp -L "$mpi_library" "$target"
    for library in "$target"/*; do rm -f "$work/packed/lib/$(basename "$library")"; done
    mkdir -p "$target/$(basename "$folder")"
    for part in openmpi pmix2; do
        [ ! -d "$folder/$part" ] || cp -r "$folder/$part" "$target/$(basename "$folder")/"
        [ ! -d "/usr/share/${part%2}" ] || cp -rL "/usr/share/${part%2}" "$work/packed/mpi/share/"
    done
    rm -rf "$target"/*/openmpi/include
    git describe --always --dirty >"$work/packed/commit" 2>/dev/null
    tar -C "$work/packed" -cf - . | xz -T0 -6 >"$pack"
    echo "$pack: $(du -h "$pack" | cut -f1), for sm_${ARCH:-90a}; BUILT=$pack test/gpu_check.sh takes it"
    exit
fi

query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }
card=$(query name)
[ -n "$card" ] || { echo "gpu_check.sh: nvidia-smi finds no GPU here" >&2; exit 1; }
arch=$(query compute_cap | tr -d .)
[ "$arch" = 90 ] && arch=90a
cuda=$([ -z "$nvcc" ] || "$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
commit=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
results=$([ -n "$write" ] && echo test/gpu_results.md || echo build/gpu_results.md)
mkdir -p build

# PyTorch's libraries are found last.
wheels=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
[ -z "$nvcc" ] || cuda_lib=$(dirname "$(dirname "$(realpath "$nvcc")")")/lib64
add_libraries() { [ ! -d "$1" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$1"; }
if [ -n "$BUILT" ]; then
    unpacked=build/packed
    rm -rf "$unpacked"
    mkdir -p "$unpacked" && tar -C "$unpacked" -xJf "$BUILT" || exit 1
    for program in "${programs[@]}"; do
        mkdir -p "build/$(dirname "$program")"
        cp "$unpacked/$program"* "build/$(dirname "$program")/" || exit 1
    done
    [ -n "$COMMIT" ] || commit=$(cat "$unpacked/commit")
    add_libraries "$PWD/$unpacked/lib"
    if ! command -v mpirun >/dev/null; then
        export OPAL_PREFIX=$PWD/$unpacked/mpi PMIX_INSTALL_PREFIX=$PWD/$unpacked/mpi PATH=$PWD/$unpacked/mpi/bin:$PATH
        export PMIX_MCA_pcompress_base_silence_warning=1
        add_libraries "$PWD/$unpacked/mpi/lib"
    fi
    chmod -R u+w "$unpacked"
else
    [ -n "$nvcc" ] || { echo "gpu_check.sh: no nvcc here; install the CUDA Toolkit, or give BUILT" >&2; exit 1; }
fi
add_libraries "$cuda_lib"
add_libraries "${wheels:+$wheels/lib}"
mpi=$(command -v mpirun)

# ----------------------------------------------------------------------------------------------------------
# checks, whose output is written to the results as it arrives

failed=0
heading() { echo "$card, driver $(query driver_version)${cuda:+, CUDA $cuda}, commit $commit, $(date -u +%Y-%m-%d)"; }
printf '# Measured on a GPU\n\nBy test/gpu_check.sh: %s.\n\n```\n' "$(heading)" >"$results"
trap 'rm -rf "$work"; echo "\`\`\`" >>"$results"' EXIT
say() { echo "$*" | tee -a "$results"; }
# check NAME COMMAND...    ok if the command succeeds
check() {
    local name=$1
    shift
    if "$@"; then say "ok $name"; else say "FAILED $name"; failed=$((failed + 1)); fi
}
left() { echo $((${SECONDS_LEFT:-780} - SECONDS + start)); }
# phase NAME SECONDS    true if there is time for it
phase() {
    if [ "$(left)" -lt "$2" ]; then
        say "left out for want of time: $1"
        return 1
    fi
    say "---- $1 ($((SECONDS - start)) s)"
}
# shown LIMIT COMMAND...    writes the command's output to the results too; returns its exit code
shown() {
    timeout "$1" "${@:2}" 2>&1 | tee -a "$results"
    return "${PIPESTATUS[0]}"
}

program=build/cuda-bf16/train_gpt

# Runs commands that need no card, such as those that a new user tries first.
starts() {
    local command
    "$program" --version && "$program" --help >"$work/help" || return
    for command in $(sed -n 's/^  \([a-z]*\) .*/\1/p' "$work/help"); do
        "$program" "$command" --help >"$work/help-$command" || return
    done
    "$program" plan --model gpt2-124M --machine h100 --gpus 8 --format json >"$work/plan" &&
        "$program" tokenize kernels data comm train_gpt.cu --output "$work/text" --val-fraction 0.1 >"$work/tokens"
}

# train NAME OPTIONS...    trains `tiny` on the source of this program
train() {
    "$program" train --model tiny --train-data "$work/text_train_*.bin" --val-data "$work/text_val_*.bin" \
        --run-dir "$work/$1" --steps 300 --micro-batch 16 --learning-rate 3e-3 --val-every 300 --log-every 100 \
        "${@:2}" >"$work/$1.out" 2>&1 && return
    tail -5 "$work/$1.out"
    return 1
}
steps() { grep -oE '"(loss|grad_norm)":[^,]*' "$work/$1/log.jsonl"; }
same_steps() { [ -n "$(steps bf16)" ] && diff <(steps bf16) <(steps "$1"); }
# loses NAME STEP    removes the checkpoint of this step, as if the run had been killed before it
loses() { mv "$work/$1/checkpoints/step_$2" "$work/lost"; }
val_loss() { sed -n 's/.*"val_loss":\([0-9.]\{1,6\}\).*/\1/p' "$work/$1/log.jsonl" | tail -1; }
learnt() { awk -v loss="$(val_loss "$1")" 'BEGIN { exit !(loss > 0 && loss < 3) }'; } # random bytes: 5.5
# the run's last validation loss is within 5% of the bf16 run's
same_end() { awk -v a="$(val_loss bf16)" -v b="$(val_loss "$1")" 'BEGIN { d = a - b; exit !(a > 0 && b > 0 && d * d < (0.05 * a) ^ 2) }'; }

# train_ranks NAME RANKS OPTIONS...    trains in fp32, 24 sequences a step on any number of ranks; uses mpirun for one rank too
train_ranks() {
    RANKS_TIMEOUT=60 ranks "$2" build/cuda-fp32-mpi/train_gpt train --model tiny --train-data "$work/text_train_*.bin" --run-dir "$work/$1" \
        --steps 20 --global-batch 6144 --learning-rate 1e-3 --adam-eps 1e-5 "${@:3}" >"$work/$1.out" 2>&1 && return
    tail -5 "$work/$1.out"
    return 1
}
compare() { build/cuda-fp32-mpi/compare_runs "$work/$1" "$work/$2" "${@:3}"; }

# unit_tests BUILD FOLDERS...    runs the units of these folders
unit_tests() {
    local units
    units=$(for folder in "${@:2}"; do basename -a -s .cu test/"$folder"/test_*.cu; done | tr '\n' ' ')
    JOBS=${JOBS:-5} BUILT=groups RESULTS=$work/results-$1 BUILDS=$1 OMP_NUM_THREADS=2 UNIT=$units shown "$(left)" test/run.sh
}
sanitized() {
    timeout 300 compute-sanitizer --error-exitcode 1 build/cuda-bf16/tests/kernels-1 "--source-file=*test_$1.cu" >"$work/sanitizer" 2>&1 && return
    tail -40 "$work/sanitizer"
    return 1
}

say "$(nproc) cores; clocks of $(query clocks.max.sm) at most, now $(query clocks.sm); power limit $(query power.limit)"

if [ -z "$BUILT" ]; then
    phase "building for sm_$arch" 0
    has_header() { echo "#include <$1>" | g++ -E -x c++ -I"$(dirname "$nvcc")/../include" - >/dev/null 2>&1; }
    includes=() links=() options=(GPU_ARCH="$arch" NVCC="$nvcc")
    use_library() { [ ! -d "$1" ] || links+=(-L"$1" -Xlinker -rpath="$1"); }
    use_library "$cuda_lib"
    if [ -n "$DEPS" ]; then
        deps=$(realpath "$DEPS") || exit 1
        includes+=(-isystem "$deps/usr/include")
        use_library "$deps/usr/lib/$(uname -m)-linux-gnu"
    fi
    [ -n "$mpi" ] || options+=(MPI=off)
    if ! has_header nccl.h; then
        [ -n "$wheels" ] || { echo "gpu_check.sh: no nccl.h here; install libnccl-dev, or PyTorch" >&2; exit 1; }
        includes+=(-isystem "$wheels/include")
        use_library "$wheels/lib"
        options+=(NCCL=-l:libnccl.so.2) # the wheel has no libnccl.so
    fi
    [ -n "$mpi" ] || programs=("${programs[@]/cuda-*-mpi\/*/}")
    build() {
        build_all "${options[@]}" CPPFLAGS="'${includes[*]}'" LDFLAGS="'${links[*]}'" >"$work/build" 2>&1 && return
        grep -E 'error|Error|missing|undefined' "$work/build" | head -20
        return 1
    }
    check "builds" build
fi

if phase "first steps" 20; then
    check "starts" starts
    check "trains tiny in bf16" train bf16
    grep -E '^(device|memory|rate|products|step)' "$work/bf16.out" | tee -a "$results"
    check "validation loss in bf16: $(val_loss bf16)" learnt bf16
    # Algorithms chosen by timing may differ between runs, and with them the bits.
    chosen=(--matmul-tuning "$work/bf16/matmul_algorithms.json")
    check "trains tiny in bf16 again" train again "${chosen[@]}"
    check "the same run twice gives the same losses and gradients, bit for bit" same_steps again
    if [ "${arch%a}" -ge 89 ]; then
        check "trains tiny in fp8" train fp8 --matmul-dtype fp8
        check "validation loss in fp8: $(val_loss fp8), as in bf16" same_end fp8
    fi
fi
phase "the card" 20 && check "tests itself" shown 60 "$program" selftest --seconds 10
phase "speed of whole models" 60 &&
    check "trains whole models" shown "$(left)" env PARTS=ours test/bench/bench_train.sh build/cuda-bf16
phase "unit tests of kernels" 20 && check "units of kernels" unit_tests cuda-bf16 kernels
if [ -n "$sanitize" ]; then
    for unit in adamw attention classifier embedding gelu hash known_numbers lamb matmul memory_patterns muon norm qk_norm elementwise rope causal_conv; do
        check "compute-sanitizer: test_$unit" sanitized $unit
    done
fi
if phase "checkpoints" 20; then
    check "saves while it trains" train resumed --save-every 150 --keep 0 "${chosen[@]}"
    loses resumed 00000300
    check "goes on from a checkpoint" train resumed --resume auto "${chosen[@]}"
    check "with the same losses and gradients, bit for bit" same_steps resumed
    check "to the same weights and moments, bit for bit" build/cuda-bf16/compare_runs "$work/resumed" "$work/bf16" --bitwise
    check "whose checkpoint is whole" "$program" inspect "$work/resumed" --verify
    check "samples from it" "$program" sample "$work/bf16" --tokens 40 --prompt 'inline '
fi
if [ -z "$mpi" ]; then
    say "left out: ranks, for Open MPI is not here"
elif phase "ranks that share the card" 60; then
    check "trains in one rank over MPI" train_ranks one 1 --micro-batch 8
    for zero in 0 1 2 3; do
        check "trains in 2 ranks on one card, ZeRO $zero" train_ranks zero$zero 2 --micro-batch 4 --zero $zero
        # here the order of a product's sums depends on the batch, because the library chooses kernels by size
        check "with the losses of one process" compare zero$zero one --losses 1e-4 --weights 1e-2 --moments 1e-2
    done
    check "without overlap" train_ranks serial 2 --micro-batch 4 --zero 3 --overlap off --prefetch 0
    check "the same bits" compare serial zero3 --bitwise
    check "with offload" train_ranks offload 2 --micro-batch 4 --zero 3 --offload optimizer
    check "the losses without" compare offload zero3 --losses 1e-5 --weights 1e-4 --moments 1e-4
    for layout in "2 --tp 2" "2 --pp 2" "2 --pp 2 --pp-schedule zero-bubble" "4 --tp 2 --pp 2 --pp-schedule interleaved"; do
        read -r n of_layout <<<"$layout"
        # shellcheck disable=SC2086  # options are words
        check "in $n ranks $of_layout" train_ranks cut "$n" --overwrite --micro-batch 4 $of_layout
        check "with the losses of one process too" compare cut one --losses 1e-4 --weights 1e-2 --moments 1e-2
    done
    for optimizer in lamb muon; do
        check "$optimizer in one rank" train_ranks $optimizer 1 --micro-batch 8 --optimizer $optimizer
        check "$optimizer in 2 ranks, ZeRO 2" train_ranks cut 2 --overwrite --micro-batch 4 --zero 2 --optimizer $optimizer
        check "$optimizer with the losses of one rank" compare cut $optimizer --losses 1e-4 --weights 1e-2 --moments 1e-2
    done
    check "hybrid, in 4 ranks" train_ranks hybrid 4 --micro-batch 2 --zero 3 --shard-group 2
    check "also with the losses of one process" compare hybrid one --losses 1e-4 --weights 1e-2 --moments 1e-2
fi
[ -z "$mpi" ] || ! phase "unit tests of ranks, and of whole models" 60 ||
    check "units of ranks, and of whole models" unit_tests cuda-bf16-mpi comm program
if phase "kernels on the shapes of models, against references" 30; then
    check "kernels are right" shown "$(left)" build/cuda-bf16/bench_kernels
fi
if phase "the same models in PyTorch" 40; then
    shown "$(left)" env PARTS=pytorch PYTORCH_SECONDS=$(($(left) / 2)) test/bench/bench_train.sh build/cuda-bf16 ||
        say "PyTorch: not measured to the end"
fi

say "---- $((SECONDS - start)) s, $(grep -c '^ok' "$results") checks passed, $failed failed"
grep '^FAILED' "$results"
[ "$failed" = 0 ]
