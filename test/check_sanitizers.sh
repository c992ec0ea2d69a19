#!/usr/bin/env bash
# The cpu tests and training runs under the address and undefined-behaviour sanitizers, and the streams, what ranks send
# each other and training runs under the thread sanitizer; alone, and with several ranks. OpenMP is off for the thread
# sanitizer: its library is not instrumented, and threads of ours are in the streams and the loader.
cd "$(dirname "$0")/.." || exit 1
. test/ranks.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=2
# Leaks of Open MPI are known by the library they are in, so each must be found: whole stacks, and no library unloaded.
export LSAN_OPTIONS=suppressions=$PWD/test/lsan.supp:print_suppressions=0
stacks=fast_unwind_on_malloc=0
echo 'extern "C" int dlclose(void*) { return 0; }' | g++ -x c++ -c - -o "$work/keep_libraries.o"
# Open MPI is not instrumented: what it does under its own locks would look like races.
export TSAN_OPTIONS=ignore_noninstrumented_modules=1

# build NAME SANITIZERS FLAGS LINK TARGETS...    FLAGS are for the compiler only, LINK for the linker only
build() {
    local name=$1 sanitizers=-fsanitize=$2 flags=$3 link=$4
    shift 4
    # not STRICT: with sanitizers GCC warns of what it does not understand
    make --no-print-directory -j"$(nproc)" STRICT= DEVICE=cpu quickly= BUILD="build/$name" CXXFLAGS="-O0 $sanitizers $flags" \
        LDFLAGS="$sanitizers $link" "$@" \
        >"$work/$name.log" 2>&1 || { grep -E 'error|Error' "$work/$name.log" | head -20; echo "FAILED $name: does not build"; exit 1; }
}

# check NAME COMMAND...
check() {
    local name=$1
    shift
    if "$@" >"$work/out" 2>&1; then echo "ok $name"; else tail -60 "$work/out"; echo "FAILED $name"; fi
}

# launch N COMMAND...    with mpirun if there are several
launch() { if [ "$1" = 1 ]; then "${@:2}"; else OMP_NUM_THREADS=1 ASAN_OPTIONS=$stacks ranks "$@"; fi; }

# tokens PROGRAM    for the runs to train on
tokens() { "$1" tokenize kernels --output "$work/text" --val-fraction 0.2 --overwrite; }

# train PROGRAM N OPTIONS...    a short training run with validation, samples and checkpoints; it is resumed, and its
# weights are sampled from
train() {
    local program=$1 n=$2
    local run=("$program" train --layers 2 --channels 32 --heads 4 --kv-heads 2 --mlp-width 48 --context 48 --qk-norm
        --warmup-steps 1 --train-data "$work/text_train_*.bin" --val-data "$work/text_val_*.bin" --val-every 2
        --val-batches 2 --sample-every 4 --sample-tokens 8 --save-every 2 --run-dir "$work/run" --micro-batch 2 "${@:3}")
    launch "$n" "${run[@]}" --steps 4 --overwrite && launch "$n" "${run[@]}" --steps 6 --resume auto &&
        "$program" inspect "$work/run" --verify on && "$program" sample "$work/run" --tokens 8
}
# bad_input PROGRAM    what it prints holds the word where a check of it failed
bad_input() { PROGRAM=$PWD/$1 test/check_bad_input.sh | grep -v ^ok | if grep FAILED; then return 1; fi; }
accumulate=(--global-batch 768) # for 4 ranks: two micro-batches

# The runs below show of whole steps, checkpoints and groups of ranks what those suites would, and bad input of what is
# read from files.
# shellcheck disable=SC2016  # make knows host_only
build asan address,undefined -fno-sanitize-recover=undefined "$work/keep_libraries.o -rdynamic" \
    LEAVE_OUT='$(host_only) test_layouts test_zero test_model test_checkpoints test_mesh' units build/asan/train_gpt
for unit in build/asan/test_*; do
    [ -x "$unit" ] && [ -f "$unit" ] && [ "${unit%.*}" = "$unit" ] || continue
    check "$unit" "$unit"
    [ ! -e "$unit.ranks" ] || check "$unit on 2 ranks" launch 2 "$unit"
done
program=build/asan/train_gpt
check "tokenizing under address and undefined" tokens $program
check "bad input under address and undefined" bad_input $program
check "training under address and undefined" train $program 1 --recompute block
for zero in 1 3; do
    check "training on 2 ranks under address and undefined, ZeRO $zero" train $program 2 --zero $zero
done
check "training on 2 tensor ranks under address and undefined" train $program 2 --tp 2 --recompute block
check "training on 2 stages under address and undefined" train $program 2 --pp 2 --pp-schedule zero-bubble --global-batch 288 --recompute mlp
check "training with offload under address and undefined" train $program 2 --zero 3 --offload optimizer --recompute mlp

build tsan thread "-fno-openmp -Wno-unknown-pragmas" '' build/tsan/{test_host_cuda,test_collectives,test_transport,test_tensor_parallel,train_gpt}
export OMP_NUM_THREADS=1
program=build/tsan/train_gpt
check "streams under thread" build/tsan/test_host_cuda
check "collectives on 2 ranks under thread" launch 2 build/tsan/test_collectives
check "their transport on 2 ranks under thread" launch 2 build/tsan/test_transport
check "rows over 2 tensor ranks under thread" launch 2 build/tsan/test_tensor_parallel
check "training under thread" train $program 1 --recompute block
check "training on 4 ranks under thread, ZeRO 3" train $program 4 "${accumulate[@]}" --zero 3
check "training on 4 ranks under thread, hybrid, with offload" \
    train $program 4 "${accumulate[@]}" --zero 2 --shard-group 2 --offload optimizer
check "training on 4 ranks under thread, tensor x pipeline, zero-bubble" \
    train $program 4 "${accumulate[@]}" --tp 2 --pp 2 --pp-schedule zero-bubble --recompute block --offload optimizer
