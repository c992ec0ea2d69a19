#!/usr/bin/env bash
# The readers of files from elsewhere, each for SECONDS_EACH seconds (2) under libFuzzer with the address and
# undefined-behavior sanitizers. Needs clang and its run-time library (Debian: clang libclang-rt-14-dev).
# seconds: 100
# soak: SECONDS_EACH=300
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/group.sh
seconds=${SECONDS_EACH:-2}
plan 11
sanitizers=fuzzer,address,undefined,float-cast-overflow
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$work/probe.cc"
if ! clang++ -fsanitize=$sanitizers "$work/probe.cc" -o "$work/probe" 2>/dev/null; then
    skip "no clang++ with libFuzzer here (Debian: clang libclang-rt-14-dev)" 11
    exit
fi

# All fuzzers are one program, because they include mostly the same files; FUZZER in the environment selects one.
write_fuzzers() {
    local unit name
    write_group "$work/fuzzers.cc" test/fuzz/fuzz_*.cc
    {
        echo 'extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {'
        echo '    static const std::string fuzzer = getenv("FUZZER");'
        for unit in test/fuzz/fuzz_*.cc; do
            name=$(basename "$unit" .cc)
            echo "    if (fuzzer == \"$name\") return ${name}_source::test_one_input(data, size);"
        done
        printf '    abort();\n}\n'
    } >>"$work/fuzzers.cc"
}
write_fuzzers
if ! clang++ -std=c++20 -gline-tables-only -O1 -fsanitize=$sanitizers -fno-sanitize-recover=all -DDEVICE_CPU -Wno-unknown-pragmas \
    -I. "$work/fuzzers.cc" -o "$work/fuzzers" -lxxhash -lpcre2-8 -lutf8proc -lz >"$work/log" 2>&1; then
    head -20 "$work/log"
fi

fuzz() {
    local name=$1 corpus=$work/$1.corpus
    mkdir -p "$corpus"
    if (cd "$work" && FUZZER=$name ./fuzzers -max_total_time="$seconds" -len_control=10 -timeout=20 -rss_limit_mb=4096 "$corpus") \
        >"$work/$name.log" 2>&1; then
        echo "ok $name: $(grep -oE 'Done [0-9]+ runs' "$work/$name.log")"
    else
        tail -40 "$work/$name.log"
        echo "FAILED $name"
    fi
}

for source in test/fuzz/fuzz_*.cc; do at_once fuzz "$(basename "$source" .cc)"; done
wait
