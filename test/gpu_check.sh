#!/usr/bin/env bash
# Tests that need a GPU, on a machine with one NVIDIA card: the unit tests on the card in bf16 and fp32, short
# training runs, several ranks that share the card, the speed of each kernel, and of whole models beside PyTorch. It
# takes less than 9 minutes where there are 16 cores to compile on. The summary comes last; the exit code is 1 if
# anything failed.
#
#   test/gpu_check.sh [--write] [--sanitize]
#
#   --write       writes all results to test/gpu_results.md
#   --sanitize    also runs the tests of kernels under compute-sanitizer (minutes more)
#   DEPS=DIR      unpacked Debian packages (dpkg -x FILE DIR) of what the machine lacks: libcxxopts-dev,
#                 nlohmann-json3-dev, libxxhash-dev, doctest-dev
#   SECONDS_LEFT=N    in all (530); what is measured last, PyTorch's models, gets what is left of them
#   COMMIT=NAME       where the source is no git clone
#
# Without Open MPI it builds with MPI=off and leaves out the ranks; without an installed NCCL it takes the one that PyTorch brings.
cd "$(dirname "$0")/.." || exit 1
. test/support/ranks.sh
write='' sanitize=''
for option in "$@"; do
    case $option in
    --write) write=yes ;;
    --sanitize) sanitize=yes ;;
    *) echo "gpu_check.sh: $option: no such option; there are --write and --sanitize" >&2; exit 1 ;;
    esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ----------------------------------------------------------------------------------------------------------
# detection

nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
[ -n "$nvcc" ] || { echo "gpu_check.sh: no nvcc here; install the CUDA Toolkit" >&2; exit 1; }
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }
card=$(query name)
[ -n "$card" ] || { echo "gpu_check.sh: nvidia-smi finds no GPU here" >&2; exit 1; }
arch=$(query compute_cap | tr -d .)
[ "$arch" = 90 ] && arch=90a
cuda=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
commit=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}

has_header() { echo "#include <$1>" | g++ -E -x c++ -I"$(dirname "$nvcc")/../include" - >/dev/null 2>&1; }
includes=() links=()
use_library() { [ ! -d "$1" ] || links+=(-L"$1" -Xlinker -rpath="$1"); }
use_library "$(dirname "$(dirname "$(realpath "$nvcc")")")/lib64"
if [ -n "$DEPS" ]; then
    deps=$(realpath "$DEPS") || exit 1
    includes+=(-isystem "$deps/usr/include")
    use_library "$deps/usr/lib/$(uname -m)-linux-gnu"
fi
options=(DEVICE=cuda GPU_ARCH="$arch" NVCC="$nvcc")
mpi=yes
command -v mpicxx >/dev/null && command -v mpirun >/dev/null || mpi='' options+=(MPI=off)
if ! has_header nccl.h; then
    nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
    [ -n "$nccl" ] || { echo "gpu_check.sh: no nccl.h here; install libnccl-dev, or PyTorch" >&2; exit 1; }
    includes+=(-isystem "$nccl/include")
    use_library "$nccl/lib"
    options+=(NCCL=-l:libnccl.so.2)  # the wheel has no libnccl.so
fi
options+=(CPPFLAGS="${includes[*]}" LDFLAGS="${links[*]}")

# ----------------------------------------------------------------------------------------------------------
# checks; what they say is also the summary

summary=$work/summary
failed=0
say() { echo "$*" | tee -a "$summary"; }
# check NAME COMMAND...    ok if the command succeeds
check() {
    local name=$1
    shift
    if "$@"; then say "ok $name"; else say "FAILED $name"; failed=$((failed + 1)); fi
}

# build PRECISION TARGETS...    as much of it as can be built, what takes longest first
build() {
    make --no-print-directory -k -j"$(nproc)" "${options[@]}" PRECISION="$1" "${@:2}" units \
        >"$work/build-$1" 2>&1 && return
    grep -E 'error|Error|missing|undefined' "$work/build-$1" | head -20
    return 1
}

# Several ranks on one card cannot talk over NCCL.
of_ranks=(collectives transport mesh zero tensor_parallel pipeline product_tuning)
build_ranks() {
    local build=build/cuda-$1-mpi
    make --no-print-directory -k -j"$(nproc)" "${options[@]}" COMM=mpi PRECISION="$1" "${of_ranks[@]/#/$build/test_}" \
        "$build"/{train_gpt,compare_runs} >"$work/build-$1-mpi" 2>&1 && return
    grep -E 'error|Error|missing|undefined' "$work/build-$1-mpi" | head -20
    return 1
}

program() { echo "build/cuda-$1/train_gpt"; }

# train NAME PRECISION OPTIONS...    trains `tiny` on the source of this program
train() {
    "$(program "$2")" train --model tiny --train-data "$work/text_train_*.bin" --val-data "$work/text_val_*.bin" \
        --run-dir "$work/$1" --steps 300 --micro-batch 16 --learning-rate 3e-3 --val-every 300 --log-every 100 \
        "${@:3}" >"$work/$1.out" 2>&1 && grep -E '^(memory|rate|step)' "$work/$1.out" && return
    tail -5 "$work/$1.out"
    return 1
}

val_loss() { sed -n 's/.*"val_loss":\([0-9.]\{1,6\}\).*/\1/p' "$work/$1/log.jsonl" | tail -1; }
# a bf16 run ends where the fp32 run does, to 5%
same_end() {
    awk -v a="$(val_loss bf16)" -v b="$(val_loss fp32)" 'BEGIN { d = a - b; exit !(a > 0 && b > 0 && d * d < (0.05 * b) ^ 2) }'
}
steps() { grep -oE '"(loss|grad_norm)":[^,]*' "$work/$1/log.jsonl"; }
same_steps() { [ -n "$(steps bf16)" ] && diff <(steps bf16) <(steps "$1"); }
# loses NAME STEP    what came after a checkpoint, as if the run had been killed
loses() { mv "$work/$1/checkpoints/step_$2" "$work/lost"; }
learnt() { awk -v loss="$(val_loss "$1")" 'BEGIN { exit !(loss > 0 && loss < 3) }'; }  # bytes at random: 5.5

# train_ranks NAME RANKS PROGRAM OPTIONS...    steps of 24 sequences, whatever the ranks; with mpirun also for one rank
train_ranks() {
    ranks "$2" "$3" train --model tiny --train-data "$work/text_train_*.bin" --run-dir "$work/$1" --steps 20 \
        --global-batch 6144 --learning-rate 1e-3 --adam-eps 1e-5 "${@:4}" >"$work/$1.out" 2>&1 && return
    tail -5 "$work/$1.out"
    return 1
}
compare() { build/cuda-fp32-mpi/compare_runs "$work/$1" "$work/$2" "${@:3}"; }

sanitized() { timeout 300 compute-sanitizer --error-exitcode 1 "$1" >"$work/sanitizer" 2>&1 || { tail -40 "$work/sanitizer"; return 1; }; }

start=$SECONDS
phase() { echo "---- $1 ($((SECONDS - start)) s)"; }
left() { echo $((${SECONDS_LEFT:-530} - SECONDS + start)); }

# unit_tests PRECISION    the last line of what it writes adds up. Only the tests of another precision share the card.
unit_tests() {
    JOBS=1 BUILT=yes RESULTS=$work/results-$1 BUILDS=cuda-$1 timeout 300 test/run.sh >"$work/tests-$1" 2>&1
    [ -z "$mpi" ] || JOBS=1 BUILT=yes RESULTS=$work/results-$1-mpi BUILDS=cuda-$1-mpi UNIT=${of_ranks[*]} timeout 300 \
        test/run.sh >"$work/tests-$1-mpi" 2>&1
}
add_up() { sed -s -n '$p' "$work"/tests-* | awk '{ passed += $1; failed += $3 } END { print passed + 0 " passed, " failed + 0 " failed" }'; }
all_passed() { [[ $tests == *" 0 failed" ]] && ! sed -s -n '$p' "$work"/tests-* | grep -vq ' passed, '; }

# Prints for each kernel the shape with the smallest share of what the card can do.
slowest() {
    awk 'NR <= 3 { print }
         NR > 3 && /%/ { name = substr($0, 1, 26); share = $NF + 0
                         if (!(name in least)) order[n++] = name
                         if (!(name in least) || share < least[name]) { least[name] = share; line[name] = $0 } }
         /WRONG/ { print }
         END { for (i = 0; i < n; i++) print line[order[i]] }' "$work/kernels"
}

phase "building for sm_$arch: ${options[*]}"
build fp32 "$(program fp32)" &
fp32_build=$!
check "builds in bf16" build bf16 "$(program bf16)" build/cuda-bf16/{bench_train,bench_kernels,compare_runs}
check "builds in fp32" wait $fp32_build
if [ -n "$mpi" ]; then
    check "builds in bf16 for ranks over MPI" build_ranks bf16
    check "builds in fp32 for ranks over MPI" build_ranks fp32
fi

phase "unit tests"
unit_tests bf16 &
bf16_tests=$!
unit_tests fp32
wait $bf16_tests
cat "$work"/tests-*
tests=$(add_up)
check "unit tests: $tests" all_passed
if [ -n "$sanitize" ]; then
    for unit in adamw attention classifier embedding gelu hash known_numbers lamb matmul memory_patterns muon norm qk_norm elementwise rope tap_sum; do
        check "compute-sanitizer: test_$unit" sanitized build/cuda-bf16/test_$unit
    done
fi

phase "the card"
check "tests itself" "$(program bf16)" selftest --seconds 20

phase "training"
check "tokens of the source" "$(program bf16)" tokenize kernels data comm train_gpt.cu --output "$work/text" --val-fraction 0.1
check "trains tiny in bf16" train bf16 bf16
check "trains tiny in fp32" train fp32 fp32
check "trains tiny in bf16 again" train again bf16
check "validation loss in bf16: $(val_loss bf16)" learnt bf16
check "validation loss in fp32: $(val_loss fp32), as in bf16" same_end
check "the same run twice gives the same losses and gradients, bit for bit" same_steps again
check "saves while it trains" train resumed bf16 --save-every 150 --keep 0
loses resumed 00000300
check "goes on from a checkpoint" train resumed bf16 --resume auto
check "with the same losses and gradients, bit for bit" same_steps resumed
check "to the same weights and moments, bit for bit" build/cuda-bf16/compare_runs "$work/resumed" "$work/bf16" --bitwise
check "whose checkpoint is whole" "$(program bf16)" inspect "$work/resumed" --verify

if [ -n "$mpi" ]; then
    phase "ranks"
    shared=build/cuda-fp32-mpi/train_gpt
    check "trains in one rank over NCCL" train_ranks nccl 1 "$(program fp32)" --micro-batch 8
    check "trains in one rank over MPI" train_ranks one 1 "$shared" --micro-batch 8
    check "with the same bits" compare nccl one --bitwise
    for zero in 0 1 2 3; do
        check "trains in 2 ranks on one card, ZeRO $zero" train_ranks zero$zero 2 "$shared" --micro-batch 4 --zero $zero
        # the sums of a product depend on the batch here, as the library chooses its kernels by size
        check "with the losses of one process" compare zero$zero one --losses 1e-4 --weights 1e-2 --moments 1e-2
    done
    check "without overlap" train_ranks serial 2 "$shared" --micro-batch 4 --zero 3 --overlap off --prefetch 0
    check "the same bits" compare serial zero3 --bitwise
    check "with offload" train_ranks offload 2 "$shared" --micro-batch 4 --zero 3 --offload optimizer
    check "the losses without" compare offload zero3 --losses 1e-5 --weights 1e-4 --moments 1e-4
    for layout in "2 --tp 2" "2 --pp 2" "2 --pp 2 --pp-schedule zero-bubble" "4 --tp 2 --pp 2 --pp-schedule interleaved"; do
        read -r n of_layout <<<"$layout"
        # shellcheck disable=SC2086  # options are words
        check "in $n ranks $of_layout" train_ranks cut "$n" "$shared" --overwrite --micro-batch 4 $of_layout
        check "with the losses of one process too" compare cut one --losses 1e-4 --weights 1e-2 --moments 1e-2
    done
    for optimizer in lamb muon; do
        check "$optimizer in one rank" train_ranks $optimizer 1 "$shared" --micro-batch 8 --optimizer $optimizer
        check "$optimizer in 2 ranks, ZeRO 2" train_ranks cut 2 "$shared" --overwrite --micro-batch 4 --zero 2 --optimizer $optimizer
        check "$optimizer with the losses of one rank" compare cut $optimizer --losses 1e-4 --weights 1e-2 --moments 1e-2
    done
    check "hybrid, in 4 ranks" train_ranks hybrid 4 "$shared" --micro-batch 2 --zero 3 --shard-group 2
    check "also with the losses of one process" compare hybrid one --losses 1e-4 --weights 1e-2 --moments 1e-2
else
    say "skipped: ranks (Open MPI is not here)"
fi

phase "speed"
# to a file and to the screen, with the exit code of the first
measure() { timeout "$2" "${@:3}" 2>&1 | tee "$work/$1"; return "${PIPESTATUS[0]}"; }
check "kernels on the shapes of models, against references" measure kernels 120 build/cuda-bf16/bench_kernels
check "trains whole models" measure models 200 env PARTS=ours test/bench/bench_train.sh build/cuda-bf16
phase "PyTorch ($(left) s left)"
if [ "$(left)" -gt 20 ]; then
    measure pytorch "$(left)" env PARTS=pytorch test/bench/bench_train.sh build/cuda-bf16 || say "PyTorch: not measured to the end"
else
    echo "PyTorch: left out, no time" | tee "$work/pytorch"
fi

# ----------------------------------------------------------------------------------------------------------
# the summary

heading() { echo "$card, driver $(query driver_version), CUDA $cuda, commit $commit, $(date -u +%Y-%m-%d)"; }
report() {
    printf '# Measured on a GPU\n\nBy test/gpu_check.sh: %s.\n' "$(heading)"
    local part
    for part in models pytorch kernels summary; do printf '\n```\n%s\n```\n' "$(cat "$work/$part")"; done
}
[ -z "$write" ] || report >test/gpu_results.md
phase "summary"
heading
grep -v '^ok' "$summary"
slowest
cat "$work/models" "$work/pytorch"
echo "$((SECONDS - start)) s, $(grep -c '^ok' "$summary") checks passed, $failed failed"
[ "$failed" = 0 ]
