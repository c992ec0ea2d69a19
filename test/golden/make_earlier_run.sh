#!/usr/bin/env bash
# Makes test/golden/earlier_run: tokens, a tokenizer and a run of two processes that has saved after 4 of 8 steps, with what
# it logged until its end, and every value that an option may have. Later versions must go on with it
# (test/scripts/check_earlier.sh), so it is made again only to add what this one does not show; what was in it stays readable.
#
#   test/golden/make_earlier_run.sh PROGRAM    a train_gpt built for the CPU
set -e
program=$(realpath "$1")
cd "$(dirname "$0")/../.."
. test/support/ranks.sh
table=$PWD/data/options/table.h text=$PWD/test/golden/bpe_training.json
cd test/golden/earlier_run
find . -mindepth 1 ! -name options -delete
head -c 30000 "$text" >text.txt
"$program" tokenize text.txt --output text --train-tokenizer 320 --val-fraction 0.1
mapfile -t options < <(tr ' ' '\n' <options)
OMP_NUM_THREADS=1 ranks 2 "$program" train "${options[@]}" --run-dir run --keep 0
rm -r text.txt run/checkpoints/step_00000008
mv run/log.jsonl later.jsonl
sed '/"step":5/,$d' later.jsonl >run/log.jsonl
# OPTION VALUE lines, of all options of a run that have a list of values
tr '\n' ' ' <"$table" | grep -oE 'FIELD\([a-z0-9_]+\)[^F]*one_of\(\{[^}]*\}' |
    sed -nE 's/FIELD\(([a-z0-9_]+)\).*one_of\(\{([^}]*)\}/\1 \2/p' | tr -d ',"' |
    while read -r name values; do
        grep -q "\"$name\":" run/options.json || continue
        for value in $values; do echo "$name $value"; done
    done >option_values
du -sb .
