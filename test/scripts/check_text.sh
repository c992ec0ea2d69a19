#!/usr/bin/env bash
# The README's way from text to text: training a tokenizer, tokenizing a folder, tokenizers and data of other programs, a blend,
# samples and evaluations.
# suite: test
# needs: cpu-fp32/train_gpt cpu-fp32/fault_injection.so
# seconds: 15
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
program=$PWD/build/cpu-fp32/train_gpt faults=$PWD/build/cpu-fp32/fault_injection.so llama3=$PWD/test/golden/tokenizers/llama3.json
plan 49
cd "$work" || exit 1
export OMP_NUM_THREADS=2

# run NAME COMMAND...    runs the command with output in NAME.out and NAME.err
run() {
    local name=$1
    shift
    "$@" >"$name.out" 2>"$name.err" || { echo "FAILED to run $name"; cat "$name.err"; }
}

tokens_of() { sed -nE 's/.* ([0-9,]+) tokens.*/\1/p' "$1" | head -1; }
field() { sed -nE "s/.*\"$1\":([-+.0-9e]+|null).*/\1/p" "$2/log.jsonl"; }

# ----------------------------------------------------------------------------------------------------------
# tokens

mkdir text tokens
cp "$text"/[01]*.txt text
cat "$text"/2*.txt | gzip >text/more.txt.gz
mkdir short
cat "$text"/3*.txt | tr -d '"\\\t' | sed 's/.*/{"text": "&"}/' >short/lines.jsonl
printf '{"id": 1, "text": "one line\\nand another"}\n{"text": "\\u00e9t\\u00e9", "id": 2}\n' >text/lines.jsonl
run train-tokenizer "$program" tokenize text --output tokens/mine --train-tokenizer 600 --val-fraction 0.2
check "a tokenizer is trained" grep -q '"merges"' tokens/mine_tokenizer.json
run data "$program" data 'tokens/mine_*.bin' --tokenizer tokens/mine_tokenizer.json
check "every document is there: files, lines of JSON" test \
    "$(sed -nE 's/^ *documents +([0-9,]+) .*/\1/p' data.out | tail -1)" = $(($(ls text/??.txt | wc -l) + 3))
mkdir text/.git && echo hidden >text/.git/config && cp tokens/mine_val_000000.bin text
run again "$program" tokenize text --output tokens/again --tokenizer tokens/mine_tokenizer.json --val-fraction 0.2 --threads 1
check "what is skipped is named by kind" grep -qE '^tokenize: skipped, (hidden: 1 \(text/.git\)|tokens or tokenizer: 1 \(text/mine_val_000000.bin\))$' again.out
check "the trained tokenizer used as a file gives the same tokens, on one thread too" \
    cmp tokens/again_train_000000.bin tokens/mine_train_000000.bin
run short "$program" tokenize short --output tokens/short --tokenizer tokens/mine_tokenizer.json --val-fraction 0
run llama3 "$program" tokenize text/??.txt --output tokens/llama3 --tokenizer "$llama3" --val-fraction 0
check "a tokenizer of Hugging Face" test -s tokens/llama3_train_000000.bin

run replaced "$program" tokenize text/??.txt --output tokens/replaced --train-tokenizer 300
check "tokens beside another tokenizer are refused" bash -c "! '$program' tokenize text/??.txt --output tokens/replaced --tokenizer bytes"
run replaced "$program" tokenize text/??.txt --output tokens/replaced --tokenizer bytes --overwrite
check "or take the place of its tokens, and the tokenizer stays" eval \
    'test -s tokens/replaced_tokenizer.json && grep -q "\"tokenizer\":\"bytes\"" tokens/replaced.json && grep -q "replaced_tokenizer.json was not used" replaced.out'
"$program" train --model tiny --train-data tokens/replaced_train_000000.bin --tokenizer tokens/replaced_tokenizer.json >refused.out 2>&1
check "a run with another tokenizer refuses tokens" grep -q '^train_gpt: tokens/replaced_train_000000.bin: was made with the tokenizer bytes, ' refused.out

# A run that is interrupted leaves nothing.
head -c 100000000 /dev/zero | tr '\0' 'a ' | fold -w 97 >long.txt
mkfifo endless
{ cat long.txt && sleep 600; } >endless &
feeder=$!
"$program" tokenize - --output tokens/interrupted --tokenizer tokens/mine_tokenizer.json <endless >/dev/null 2>interrupted.err &
pid=$!
wait_for 60 compgen -G 'tokens/interrupted*'
kill -INT $pid
wait $pid
check "an interrupted run leaves nothing" test $? = 1 -a -z "$(ls tokens | grep interrupted)" -a "$(wc -l <interrupted.err)" = 1
pkill -P $feeder
rm long.txt

# little BYTES NUMBER    prints the number in BYTES bytes, lowest first
little() {
    local i
    for ((i = 0; i < $1; i++)); do printf "\\x$(printf %02x $(($2 >> (8 * i) & 255)))"; done
}
# A Megatron data set of one document, from a token shard.
tail -c +1025 tokens/mine_train_000000.bin >tokens/megatron.bin
length=$(($(stat -c %s tokens/megatron.bin) / 2))
{
    printf 'MMIDIDX\0\0'
    little 8 1; little 1 8; little 8 1; little 8 2
    little 4 $length; little 8 0; little 8 0; little 8 1
} >tokens/megatron.idx

# ----------------------------------------------------------------------------------------------------------
# training

train=(train --model tiny --layers 2 --channels 32 --heads 2 --mlp-width 48 --context 48 --steps 30 --micro-batch 4
    --learning-rate 1e-2 --warmup-steps 2 --tokenizer tokens/mine_tokenizer.json)
run plain "$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --val-data 'tokens/mine_val_*.bin' \
    --val-every 30 --val-batches 100000 --sample-every 30 --sample-tokens 10 --run-dir plain
check "the vocabulary is that of the tokenizer" grep -q '"vocab_size": *600' plain/options.json
check "the run keeps the tokenizer" test -s plain/tokenizer.json
run megatron "$program" "${train[@]}" --train-data tokens/megatron.idx --run-dir megatron
check "a Megatron data set trains as the shard with its tokens" cmp <(field loss megatron) <(field loss plain)
run blend "$program" "${train[@]}" --train-data '0.7:tokens/mine_train_*.bin,0.3:tokens/megatron.idx' --run-dir blend
check "a blend says what it is made of" grep -q '30%.*megatron.idx' blend.out
check "a blend trains" test "$(field loss blend | wc -l)" = 30
run learned "$program" "${train[@]}" --train-data 'tokens/short_train_*.bin' --position learned --run-dir learned
run reset "$program" "${train[@]}" --train-data 'tokens/short_train_*.bin' --position learned --reset-positions --run-dir reset
check "positions that begin anew are others" test "$(field loss reset)" != "$(field loss learned)"
if command -v mpirun >/dev/null; then
    for reader in rank node; do
        run $reader ranks 2 "$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --data-reader $reader --run-dir $reader
    done
    check "one reader for two ranks reads what each would read" cmp <(field loss rank) <(field loss node)
else
    skip "no mpirun here" 1
fi

# ----------------------------------------------------------------------------------------------------------
# samples

sample=("$program" sample plain --tokens 30 --seed 4)
run prompt "${sample[@]}" --prompt 'bin zonene '
check "tokens per second are printed, apart from the text" grep -qE '^[0-9]+ tokens in .* tokens/s$' prompt.err
printf 'bin zonene ' >prompt.txt
run file "${sample[@]}" --prompt-file prompt.txt
check "a prompt from a file" cmp file.out prompt.out
"${sample[@]}" --prompt-file - <prompt.txt >stdin.out 2>/dev/null
check "a prompt from the standard input" cmp stdin.out prompt.out
run no-cache "${sample[@]}" --prompt 'bin zonene ' --cache off
check "the same text without the cache" cmp no-cache.out prompt.out
run long "${sample[@]}" --prompt 'bin zonene ' --tokens 200 --temperature 0
run long-no-cache "${sample[@]}" --prompt 'bin zonene ' --tokens 200 --temperature 0 --cache off
check "the same text beyond the context" cmp long.out long-no-cache.out
run filtered "$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --local-filter on --run-dir filtered
for cache in on off; do
    run "filtered-$cache" "$program" sample filtered --tokens 200 --samples 2 --seed 4 --prompt 'bin zonene ' --cache $cache
done
check "the same texts of a model with a local filter, also beyond the context" cmp filtered-on.out filtered-off.out
run three "${sample[@]}" --prompt 'bin zonene ' --samples 3
check "several samples, the first as alone" test "$(sed '/^----$/,$d' three.out)" = "$(cat prompt.out)" -a "$(grep -c '^----$' three.out)" = 2
(cd plain/checkpoints && "$program" sample step_* --prompt 'bin zonene ' --tokens 30 --seed 4) >inside.out 2>/dev/null
check "a checkpoint has its tokenizer beside it" cmp inside.out prompt.out
printf 'ab\0cd' >zero.txt
run zero "${sample[@]}" --prompt-file zero.txt --samples 2
check "zero bytes are text too" test "$(head -c 5 zero.out | od -An -c)" = "$(od -An -c zero.txt)"
sed -E 's/"normalizer": ?null/"normalizer":{"type":"Replace","pattern":{"String":"a"},"content":""}/' plain/tokenizer.json >nothing.json
"${sample[@]}" --tokenizer nothing.json --prompt aaa >nothing.out 2>&1
check "a prompt of no tokens is refused" grep -q '^train_gpt: --prompt: has no tokens' nothing.out
# Two letters of the generated text, which may be anything: `made` keeps the newlines at its end by an x behind them.
made=$(tail -c +12 prompt.out | tr '\0' ' ' && echo x)
stop=$(grep -aoE '[[:alnum:]_]{2}' <<<"${made%?x}" | tail -1)
run stop "${sample[@]}" --prompt 'bin zonene ' --stop "$stop" --stop 'something else'
check "a sample ends before a stop text" \
    test "$(tr '\0' ' ' <stop.out && echo x)" = "bin zonene ${made%%"$stop"*}"$'\n'x
run sampler "${sample[@]}" --prompt 'bin zonene ' --top-k 20 --top-p 0.8 --min-p 0.02 --repetition-penalty 1.3 --temperature 1.2
check "the sampler's options change the text" test "$(cat sampler.out)" != "$(cat prompt.out)"
printf 'bin zonene \n\nfarin\n' | "$program" sample plain --interactive --tokens 30 --seed 4 >interactive.out 2>/dev/null
check "prompts line by line" test "$(head -c "$(stat -c %s prompt.out)" interactive.out)" = "$(cat prompt.out)" -a "$(grep -c farin interactive.out)" -ge 1

# A run stops when its model's logits are not finite, and keeps the weights.
"$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --run-dir broken --norm rmsnorm --tie-embeddings off --weight-decay 10 \
    --learning-rate 10 --schedule constant --warmup-steps 0 --micro-batch 1 --sequence-length 2 --sample-every 1 >broken.out 2>broken.err
check "a sample that cannot be made ends the run in one line" test "$(wc -l <broken.err)" = 1
check "and leaves the weights" test -e broken/checkpoints/*/index.bin

# ----------------------------------------------------------------------------------------------------------
# evaluation

run eval "$program" eval plain --data 'tokens/mine_val_*.bin' --micro-batch 4
# gives RUN OUT    the loss that eval printed is the last validation loss of the run
gives() { awk -v want="$(field val_loss "$1" | tail -1)" '{ d = $2 - want; exit !(d < 2e-4 && d > -2e-4) }' "$2"; }
check "eval gives the validation loss of the run" gives plain eval.out
# A size of micro-batches that leaves rows of the last one without samples.
samples=$(sed -nE 's/.* in ([0-9]+) samples.*/\1/p' eval.out)
for micro in 3 5 7 11; do [ $((samples % micro)) = 0 ] || break; done
run odd "$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --val-data 'tokens/mine_val_*.bin' --steps 1 \
    --val-every 1 --val-batches 100000 --micro-batch $micro --warmup-steps 0 --run-dir odd
check "no warning about other data" eval '! grep -q "^ *warning" odd.out'
for batch in 96 288; do
    run set$batch "$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --val-data 'tokens/mine_val_*.bin' --steps 1 \
        --val-every 1 --val-tokens 1000 --micro-batch 2 --global-batch $batch --learning-rate 0 --warmup-steps 0 --run-dir set$batch
done
same_set() { grep -q '"validation":{"tokens":960,' set96/log.jsonl && [ "$(field val_loss set96)" = "$(field val_loss set288)" ]; }
check "validation is on the same tokens whatever the batch is" same_set
# Tables that are larger than memory, here the 2.5 GB that a process may have.
run rows "$program" "${train[@]}" --train-data 'tokens/mine_train_*.bin' --val-data 'tokens/mine_val_*.bin' --val-every 30 \
    --val-batches 100000 --ngram 2 --ngram-rows 100M --ngram-width 8 --ngram-place disk --ngram-cache 1M --run-dir rows
small() { (ulimit -v 2500000 && TMPDIR=$work/temporary "$@"); }
mkdir temporary
run eval-rows small "$program" eval rows --data 'tokens/mine_val_*.bin' --micro-batch 4
check "eval reads tables that are larger than memory from a file" gives rows eval-rows.out
check "and says so" grep -qx "tables do not fit into memory: their rows go to temporary files in $work/temporary" eval-rows.err
(ulimit -v 2500000 && TMPDIR=$work/nowhere "$program" eval rows --data 'tokens/mine_val_*.bin') >nowhere.out 2>&1
check "a folder that is not there is refused" test \
    "$(tail -n +2 nowhere.out)" = "train_gpt: $work/nowhere: no temporary file for tables can be created there: No such file or directory; set TMPDIR to another folder"
run sample-rows small "$program" sample rows --tokens 20 --seed 4 --prompt 'bin'
run sample-memory "$program" sample rows --tokens 20 --seed 4 --prompt 'bin'
check "a sample is the same with rows in memory" cmp sample-rows.out sample-memory.out
faulty() { LD_PRELOAD=$faults FAULT_BELOW=temporary FAULT_CALLS=read small "$program" eval rows --data 'tokens/mine_val_*.bin' --micro-batch 4; }
FAULT=none FAULT_AT=0 FAULT_LIST=$work/reads faulty >faulty.out 2>&1
FAULT=EIO FAULT_AT=$(wc -l <reads) faulty >faulty.out 2>faulty.err
check "no result is printed of rows that could not be read" eval \
    "[ $? = 75 ] && [ ! -s faulty.out ] && grep -q '^train_gpt: $work/temporary/stage-.*: Input/output error' faulty.err"
check "nothing is left of the file" test -z "$(ls temporary)"
run same "$program" "${train[@]}" --train-data 'tokens/mine_*.bin' --val-data 'tokens/mine_val_*.bin' --steps 1 --warmup-steps 0 --run-dir same
check "validation on what is trained on is a warning" grep -q '^ *warning: tokens/mine_val_000000.bin is also in --train-data' same.out
run eval-odd "$program" eval odd --data 'tokens/mine_val_*.bin' --micro-batch 1
check "samples that are no multiple of a micro-batch are validated each once" gives odd eval-odd.out
for n in 4 1; do run eval$n "$program" eval plain --data 'tokens/mine_val_*.bin' --limit 5 --micro-batch $n; done
check "five samples are five, four at a time or one" cmp eval4.out eval1.out
check "and perplexity and bits per byte" grep -qE 'perplexity [0-9.]+  bits per byte [0-9.]+' eval.out
"$program" eval plain --data tokens/replaced_train_000000.bin >refused.out 2>&1
check "eval refuses tokens of another tokenizer" grep -q '^train_gpt: tokens/replaced_train_000000.bin: was made with the tokenizer bytes, ' refused.out
printf '{"context": "bin", "choices": [" zonene", "qqqqqqqq"], "answer": 0}\n' >questions.jsonl
run choices "$program" eval plain --choices questions.jsonl
cp -r plain logged
cp -r plain/checkpoints/step_* alone
run logs "$program" eval logged --data 'tokens/mine_val_*.bin' --limit 5 --choices questions.jsonl --log on
check "eval --log adds a line for each result to the log" grep -cE \
    '^\{"step":[1-9][0-9]*,"eval":\{("data":"[^"]+","loss":[0-9.]+,"perplexity":[0-9.]+,"tokens":[0-9]+,"samples":5,"bits_per_byte":[0-9.]+|"choices":"[^"]+","right":1.0,"right_by_mean":[0-9.]+,"questions":1),"time":"[^"]+"\}\}$' logged/log.jsonl
check "two results, and what was there" eval 'test "$(tail -n 2 logged/log.jsonl | grep -c "\"eval\"")" = 2 && cmp <(head -n -2 logged/log.jsonl) plain/log.jsonl'
"$program" eval alone --choices questions.jsonl --tokenizer bytes --log on >wants.out 2>&1
check "--log wants a run" grep -q '^train_gpt: --log: alone is not in a run directory; ' wants.out
check "eval answers questions" grep -q '^right 100.0%' choices.out
