#!/usr/bin/env bash
# The source as its readers find it: formatted, within 110 columns, and with a README that names targets there are.
# suite: test
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 3

sources=$(git ls-files -co --exclude-standard '*.cu' '*.cuh' '*.h' '*.cc')
formatted() { clang-format --dry-run -Werror $sources 2>&1 | grep -E 'error' | head -5; [ "${PIPESTATUS[0]}" = 0 ]; }
# the JSON in these two is as others wrote it
narrow() { ! grep -nE '^.{111,}' $(grep -vE 'hf_configs|fuzz_json' <<<"$sources"); }
targets() {
    local target rc=0
    for target in $(grep -oE '\bmake [a-z][a-z-]+' README.md | awk '{print $2}' | sort -u); do
        cat Makefile test/tests.mk | grep -qE "^([a-z-]+ )*$target( [a-z-]+)*:" || { echo "README.md: make $target: no such target"; rc=1; }
    done
    return $rc
}

if command -v clang-format >/dev/null; then check "formatted" formatted; else skip "no clang-format here" 1; fi
check "within 110 columns" narrow
check "targets in the README" targets
