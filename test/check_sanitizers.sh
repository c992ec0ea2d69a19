#!/usr/bin/env bash
# The cpu tests and a training run under the address and undefined-behaviour sanitizers, and the streams and a training
# run under the thread sanitizer. OpenMP is off there: its library is not instrumented, and threads of ours are in the
# streams and the loader.
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=2

# build NAME SANITIZERS FLAGS TARGETS...    FLAGS are for the compiler only
build() {
    local name=$1 sanitizers=-fsanitize=$2 flags=$3
    shift 3
    # not STRICT: with sanitizers GCC warns of what it does not understand
    make --no-print-directory -j"$(nproc)" STRICT= DEVICE=cpu BUILD="build/$name" CXXFLAGS="-O1 $sanitizers $flags" \
        LDFLAGS="$sanitizers" "$@" \
        >"$work/$name.log" 2>&1 || { grep -E 'error|Error' "$work/$name.log" | head -20; echo "FAILED $name: does not build"; exit 1; }
}

# check NAME COMMAND...
check() {
    local name=$1
    shift
    if "$@" >"$work/out" 2>&1; then echo "ok $name"; else tail -40 "$work/out"; echo "FAILED $name"; fi
}

# train NAME PROGRAM    tokens, a short training run with validation and samples, and sampling from its weights
train() {
    local dir=$work/$1
    mkdir -p "$dir"
    "$2" tokenize kernels --output "$dir/text" --val-fraction 0.2 &&
        "$2" train --layers 2 --channels 32 --heads 4 --kv-heads 2 --mlp-width 48 --context 48 --steps 4 --qk-norm \
            --warmup-steps 1 --train-data "$dir/text_train_*.bin" --val-data "$dir/text_val_*.bin" --val-every 2 \
            --val-batches 2 --sample-every 4 --sample-tokens 8 --run-dir "$dir/run" --recompute block &&
        "$2" sample "$dir/run" --tokens 8
}

build asan address,undefined -fno-sanitize-recover=undefined units build/asan/train_gpt
for unit in build/asan/test_*; do
    [ -x "$unit" ] && [ -f "$unit" ] && [ "${unit%.*}" = "$unit" ] && check "$unit" "$unit"
done
check "training under address and undefined" train asan build/asan/train_gpt

build tsan thread "-fno-openmp -Wno-unknown-pragmas" build/tsan/test_host_cuda build/tsan/train_gpt
export OMP_NUM_THREADS=1
check "streams under thread" build/tsan/test_host_cuda
check "training under thread" train tsan build/tsan/train_gpt
