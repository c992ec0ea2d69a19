#!/usr/bin/env bash
# The readers of files that others wrote, a while each under libFuzzer with the address and undefined-behaviour
# sanitizers. Needs clang and its run-time library (Debian: clang libclang-rt-14-dev). SECONDS_EACH says how long.
cd "$(dirname "$0")/.." || exit 1
seconds=${SECONDS_EACH:-10}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sanitizers=fuzzer,address,undefined
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$work/probe.cc"
if ! clang++ -fsanitize=$sanitizers "$work/probe.cc" -o "$work/probe" 2>/dev/null; then
    echo "skipped: fuzzers (no clang++ with libFuzzer here; apt-get install clang libclang-rt-14-dev)"
    exit 0
fi

fuzz() {
    local name=$1 corpus=$work/$1.corpus
    mkdir -p "$corpus"
    if ! clang++ -std=c++20 -g -O1 -fsanitize=$sanitizers -fno-sanitize-recover=undefined -DDEVICE_CPU -Wno-unknown-pragmas \
        -I. "test/$name.cc" -o "$work/$name" -lxxhash -lpcre2-8 -lutf8proc -lz >"$work/$name.log" 2>&1; then
        head -20 "$work/$name.log"
        echo "FAILED $name: does not build"
    elif (cd "$work" && "./$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 "$corpus") >"$work/$name.log" 2>&1; then
        echo "ok $name: $(grep -oE 'Done [0-9]+ runs' "$work/$name.log")"
    else
        tail -40 "$work/$name.log"
        echo "FAILED $name"
    fi
}

for source in test/fuzz_*.cc; do
    while [ "$(jobs -rp | wc -l)" -ge $((2 * $(nproc))) ]; do wait -n; done
    fuzz "$(basename "$source" .cc)" &
done
wait
