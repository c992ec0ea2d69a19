#!/usr/bin/env bash
# Files of an earlier version (test/golden/earlier_run, with the script that made them): its run resumes with the options that
# it was started with, and continues as it did then, in one process and in two; its checkpoint, tokens and tokenizer are read.
# suite: test
# needs: cpu-fp32/train_gpt
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 8
cpu=$PWD/build/cpu-fp32/train_gpt
cp -r test/golden/earlier_run/. "$work"
cd "$work" || exit 1
export OMP_NUM_THREADS=1
mapfile -t options < <(tr ' ' '\n' <options)

# Prints the log of steps 5 to 8 as STEP NAME VALUE lines.
logged() {
    grep -E '"step":[5-8],"(loss|val_loss)"' "$1" | sed -E 's/\{"step":([0-9]+),/\1 /' | tr '{}:"' '    ' |
        awk '{ split($0, all, ","); step = $1; for (i in all) { n = split(all[i], word, " "); if (word[n - 1] ~ /^(loss|grad_norm|val_loss|lr|tokens)$/) print step, word[n - 1], word[n] } }' | sort
}
# Rounding differs between processors, and with the layout.
close() {
    [ "$(logged "$1" | wc -l)" = 17 ] && paste -d' ' <(logged "$1") <(logged "$2") |
        awk '{ d = $3 - $6; if (d < 0) d = -d; if ($1 != $4 || $2 != $5 || !(d <= 1e-4 * $6)) { print; bad = 1 } } END { exit bad }'
}
# goes_on NAME RANKS OPTIONS...
goes_on() {
    local name=$1 n=$2 launch=()
    shift 2
    [ "$n" = 1 ] || launch=(ranks "$n")
    cp -r run "$name"
    "${launch[@]}" "$cpu" train "${options[@]}" --run-dir "$name" --resume auto "$@" && close "$name/log.jsonl" later.jsonl
}

check "the run goes on in one process" goes_on one 1
if command -v mpirun >/dev/null; then
    check "in two" goes_on two 2
    check "in two that cut each tensor" goes_on cut 2 --tp 2 --zero 0 --micro-batch 4
else
    skip "no mpirun here" 2
fi
check "its checkpoint is whole" "$cpu" inspect run --verify
check "it can be sampled from" "$cpu" sample run --tokens 5
check "it can be evaluated" "$cpu" eval run --data 'text_val_*.bin'
check "it can be exported" "$cpu" export run --format hf --output exported
tokens() { "$cpu" data 'text_train_*.bin' --tokenizer text_tokenizer.json | grep -qE '17,015'; }
check "all of its tokens are read" tokens
