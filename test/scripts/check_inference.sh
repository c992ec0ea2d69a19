#!/usr/bin/env bash
# Models are sampled and evaluated on any layout: text, losses and scores are those of one process, and each rank holds only its
# share of the weights.
# suite: test-all
# needs: cpu-fp32/train_gpt
# seconds: 18
# soak: EVERY=yes
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/layouts.sh
program=$PWD/build/cpu-fp32/train_gpt text=$PWD/test/golden/bpe_training.json
rows='
gpt2            4 --tp 2 --pp 2
gpt2            2 --zero 3
parallel-filter 4 --tp 2 --zero 3
llama           3
'
[ -z "$EVERY" ] || rows+='
gpt2            4 --tp 4
gpt2            8 --tp 2 --pp 2 --zero 3
gpt2            5 --pp 5
llama           4 --tp 4
llama           8 --tp 2 --pp 2
llama           6 --pp 3 --zero 3
filter          4 --tp 4
filter          4 --tp 2 --pp 2
parallel        2 --tp 2
parallel        4 --pp 4
'
checks=$((2 * $(grep -c '[0-9]' <<<"$rows") + 16))
plan $checks
command -v mpirun >/dev/null || { skip "no mpirun here" $checks; exit; }
cd "$work" || exit 1
export OMP_NUM_THREADS=1

"$program" tokenize "$text" --output text --val-fraction 0.2 >tokenize.out || echo "FAILED tokenize"
# prompts of several lengths, one longer than the context, and two alike
printf '{"prompt": "%s"}\n' 'inline void' a 'the quick brown fox jumps over the lazy dog, and on' a 'a b c d' >prompts.jsonl
printf '{"context": "inline", "choices": [" void", "x", "const int"], "answer": %d}\n{"context": "a", "choices": ["b", "cd"], "answer": 0}\n' 1 2 >questions.jsonl
model() { # model SHAPE    trains the shape once, and samples and evaluates it in one process
    local -a shape
    [ ! -e "$1" ] || return 0
    read -ra shape <<<"${shapes[$1]//$'\n'/ }"
    "$program" train "${common[@]}" --micro-batch 24 "${shape[@]}" --tokenizer bytes --steps 4 --learning-rate 1e-2 --sample-every 0 --run-dir "$1" >"$1.out" 2>&1 ||
        tail -3 "$1.out"
    "$program" sample "$1" "${sample[@]}" >"$1.text" 2>"$1.err"
    "$program" eval "$1" "${eval[@]}" >"$1.json" 2>"$1.err"
}
sample=(--prompt-file prompts.jsonl --tokens 40 --temperature 0)
eval=(--data val=text_val_000000.bin --choices questions.jsonl --limit 13 --micro-batch 2 --format json)
# same_scores A B    the same names and texts, and numbers to 1e-6
same_scores() {
    [ -s "$1" ] && paste -d' ' <(tr -s ' ,' '\n' <"$1") <(tr -s ' ,' '\n' <"$2") |
        awk '$1 != $2 { d = $1 - $2; if ($1 !~ /^[0-9.e+-]+$/ || d * d > 1e-12 * $1 * $1) { print; bad = 1 } } END { exit bad }'
}
# holds PERCENT ERR    no rank holds more of the weights
holds() { sed -nE 's/.*each holds at most ([0-9.]+)% of the .*/\1/p' "$2" | awk -v most="$1" '{ n++; bad = $1 > most } END { exit bad || !n }'; }

while read -r shape n options <&3; do
    [ -n "$shape" ] || continue
    model "$shape"
    read -ra cut <<<"$options"
    ranks "$n" "$program" sample "$shape" "${sample[@]}" "${cut[@]}" >text 2>sample.err
    check "text of $shape on $n ranks $options" cmp text "$shape.text"
    ranks "$n" "$program" eval "$shape" "${eval[@]}" "${cut[@]}" --output scores >eval.out 2>eval.err
    check "scores of $shape on $n ranks $options" same_scores "$shape.json" scores
    cp sample.err "held-$shape-$n"
done 3<<<"$rows"
model long
ranks 4 "$program" eval long "${eval[@]}" --cp 2 --tp 2 --output scores >eval.out 2>eval.err
check "scores of long sequences on context and tensor ranks" same_scores long.json scores
# An interleaved pipeline loads further batches before the losses of one are known.
awk 'BEGIN { for (i = 0; i < 12; i++) { of = of "a "; if (i % 5 == 0) of = "x"; printf "{\"context\": \"%s\", \"choices\": [\"c&\", \" the\", \"d\"], \"answer\": 1}\n", of } }' >many.jsonl
read -ra shape <<<"${shapes[gpt2]//$'\n'/ }"
answers() { grep -oE '"eval":\{"choices":"many.jsonl","right":[0-9.]+,"right_by_mean":[0-9.]+' "$1/log.jsonl"; }
for cut in "1 whole" "2 chunks --pp 2 --pp-schedule interleaved --pp-chunks 2"; do
    read -ra words <<<"$cut"
    ranks "${words[0]}" "$program" train "${common[@]}" "${shape[@]}" --tokenizer bytes --steps 4 --micro-batch 3 --learning-rate 1e-2 --sample-every 0 \
        --choices many.jsonl --choices-every 2 --run-dir "${words[1]}" "${words[@]:2}" >choices.out 2>&1 || tail -3 choices.out
done
check "answers between steps are those of one process, also in an interleaved pipeline" eval '[ "$(answers whole | wc -l)" = 3 ] && diff <(answers whole) <(answers chunks)'
check "a rank of four holds little more than a quarter" holds 40 held-gpt2-4
check "a data rank of --zero 3 holds half" holds 51 held-gpt2-2
check "without it each holds all" eval 'holds 101 held-llama-3 && ! holds 99 held-llama-3'

# ----------------------------------------------------------------------------------------------------------
# several runs, sets and prompts

"$program" eval gpt2 llama --data val=text_val_000000.bin --data train=text_train_000000.bin --limit 5 --micro-batch 2 >both.out
check "several runs and sets, by name" test "$(sed -E 's/, step.*//; s/loss .* of (.*)\)/\1/' both.out | xargs)" = "gpt2 val train llama val train"
"$program" eval gpt2 --data text_val_000000.bin --choices questions.jsonl --limit 5 --output scores.txt >none.out
check "results in a file" eval 'test ! -s none.out && test "$(cut -d" " -f1 scores.txt | xargs)" = "loss right"'
"$program" sample llama --prompt 'inline void' --prompt a --samples 2 --tokens 20 --seed 5 >several.out 2>/dev/null
"$program" sample llama --prompt 'inline void' --tokens 20 --seed 5 >one.out 2>/dev/null
check "each prompt has its samples, the first as alone" eval \
    'test "$(grep -c "^inline void\|^a" several.out)" -ge 4 && test "$(grep -c "^----$" several.out)" = 3 && cmp <(sed "/^----$/,\$d" several.out) one.out'
printf 'inline void\na\n' >lines
ranks 2 "$program" sample llama --interactive --tokens 20 --temperature 0 --tp 2 <lines >lines.out 2>lines.err
"$program" sample llama --prompt 'inline void' --tokens 20 --temperature 0 >line.out 2>/dev/null
check "prompts line by line, on two ranks" eval 'cmp <(head -c "$(stat -c %s line.out)" lines.out) line.out'

# ----------------------------------------------------------------------------------------------------------
# a model that fits on two ranks, and not on one: under a limit on memory (ulimit -v)

"$program" train "${common[@]}" --layers 8 --channels 512 --heads 8 --kv-heads 8 --mlp-width 2048 --steps 1 --micro-batch 1 --global-batch 24 \
    --val-every 0 --sample-every 0 --warmup-steps 0 --run-dir large >large.out 2>&1 || tail -3 large.out
# within KB COMMAND...    on two ranks, each with an address space of at most this size
within() { (ulimit -v "$1" && shift && MALLOC_ARENA_MAX=1 ranks 2 "$@"); }
for low in {300..1500..40}000; do
    within $low "$program" sample large --tokens 4 >low.out 2>low.err
    # MiB that each of two ranks needs for the model, and MiB that were free
    read -r needs free < <(sed -nE 's/.*needs ([0-9]+)\.[0-9]+ MiB of memory, but only ([0-9]+)\.[0-9]+ .*/\1 \2/p' low.err)
    [ "${free:-0}" = 0 ] || break
done
check "refused under a limit on memory, in one line" eval '[ "$(grep -c "^train_gpt: " low.err)" = 1 ] && [ -n "$needs" ]'
within $((low + 1024 * (needs * 3 / 2 - free))) "$program" sample large --tokens 4 >fits.out 2>fits.err
check "where half of it fits, each rank takes half" grep -q '^cut over 2 ranks: --tp 2 ' fits.err

# ----------------------------------------------------------------------------------------------------------
# refusals: one line, on all ranks

# refused WORDS N COMMAND...
refused() {
    local words=$1 n=$2
    shift 2
    ! ranks "$n" "$program" "$@" >refused.out 2>refused.err && [ "$(grep -c '^train_gpt: ' refused.err)" = 1 ] && grep -q "^train_gpt: $words" refused.err
}
check "refused: ranks that do not divide the heads" refused "--tp 3: does not divide --heads 4; give " 3 sample gpt2 --tp 3
check "refused: a layout of more ranks" refused "--pp 2: a multiple of 2 processes is needed and this run has 1" 1 eval gpt2 --data text_val_000000.bin --pp 2
check "refused: --zero 2" refused "--zero 2: shards only training state, and nothing is trained here; " 2 sample gpt2 --zero 2
printf '{"context": "a", "choices": ["b"], "answer": 0}\n' >bad.jsonl
check "refused: a question with one choice" refused "bad.jsonl:1: choices has length 1; give two or more" 2 eval gpt2 --choices bad.jsonl
check "refused: a set without a name beside another" refused "--data text_val_000000.bin: with several lists, each needs a name; write NAME=" 1 eval gpt2 \
    --data text_val_000000.bin --data a=text_train_000000.bin
