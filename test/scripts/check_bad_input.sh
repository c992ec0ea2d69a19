#!/usr/bin/env bash
# Bad input of every kind: the exit code is 1, standard error is one line that names the thing, the reason and the
# remedy, and no file is new, changed or gone. PROGRAM=FILE checks another build.
# suite: test
# needs: cpu-fp32/train_gpt
# seconds: 12
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 127
program=${PROGRAM:-$PWD/build/cpu-fp32/train_gpt} golden=$PWD/test/golden/tokenizers
at_end() { umount "$work/full" 2>/dev/null; }
cd "$work" || exit 1

# refuse NAME THING -- ARGUMENTS...    THING (a regular expression) must be in the message
refuse() {
    local name=$1 thing=$2 before after message rc
    shift 3
    before=$(find . -type f ! -name message -exec md5sum {} + | sort)
    timeout 60 "$program" "$@" >/dev/null 2>message </dev/null
    rc=$?
    message=$(<message)
    after=$(find . -type f ! -name message -exec md5sum {} + | sort)
    local why=
    [ $rc = 1 ] || why="exit code $rc"
    [ "$(wc -l <message)" = 1 ] || why="$why; $(wc -l <message) lines"
    [[ $message == "train_gpt: "* ]] || why="$why; does not begin with train_gpt:"
    [[ $message == *:*\;* ]] || why="$why; no remedy after ';'"
    grep -qE -- "$thing" message || why="$why; does not name $thing"
    [ "$before" = "$after" ] || why="$why; files changed: $(diff <(echo "$before") <(echo "$after") | tr '\n' ' ')"
    [ -z "$why" ] && echo "ok $name" || echo "FAILED $name: $why: $message"
}

# le32 NUMBER...    each as four little-endian bytes
le32() {
    local n
    for n in "$@"; do printf "\\x$(printf %02x $((n & 255)))\\x$(printf %02x $((n >> 8 & 255)))\\x$(printf %02x $((n >> 16 & 255)))\\x$(printf %02x $((n >> 24 & 255)))"; done
}

# shard FILE MAGIC VERSION COUNT BYTES    a token file whose header says COUNT, with BYTES bytes of tokens
shard() {
    { le32 "$2" "$3" "$4"; head -c 1012 /dev/zero; head -c "$5" /dev/zero; } >"$1"
}

cp "$golden/gpt2.json" .
head -c 5000 gpt2.json >broken.json
small=(--layers 1 --channels 16 --heads 2 --context 32 --micro-batch 2)
train=(train --model tiny "${small[@]}" --train-data good.bin --run-dir run --steps 2)

shard good.bin 20240520 1 2000 4000
echo some text >text.txt
mkdir empty

# the command line
refuse "unknown command" "trian" -- trian
refuse "unknown option" "--learning-rat" -- "${train[@]}" --learning-rat 1
refuse "one letter" "-z" -- "${train[@]}" -z 3
refuse "an option of another command" "--temperature" -- "${train[@]}" --temperature 1
refuse "no value" "--steps" -- train --train-data good.bin --steps
refuse "a word for a number" "--steps" -- "${train[@]}" --steps many
refuse "trailing letters" "--steps" -- "${train[@]}" --steps 12abc
refuse "a fraction of a step" "--steps" -- "${train[@]}" --steps 1.5
refuse "negative" "--steps" -- "${train[@]}" --steps -3
refuse "zero" "--micro-batch" -- "${train[@]}" --micro-batch 0
refuse "too large for its type" "--steps" -- "${train[@]}" --steps 99999999999999999999
refuse "not a number" "--learning-rate" -- "${train[@]}" --learning-rate nan
refuse "infinite" "--learning-rate" -- "${train[@]}" --learning-rate inf
refuse "out of range" "--beta1" -- "${train[@]}" --beta1 1.5
refuse "no such choice" "--schedule" -- "${train[@]}" --schedule cosin
refuse "not on or off" "maybe" -- "${train[@]}" --bias maybe
refuse "empty value" "--schedule" -- "${train[@]}" --schedule ""
refuse "a stray word" "stray" -- "${train[@]}" stray

# settings that do not go together
refuse "heads do not divide" "--channels|--heads" -- "${train[@]}" --channels 50 --heads 3
refuse "kv-heads do not divide" "--kv-heads" -- "${train[@]}" --heads 4 --kv-heads 3
refuse "odd head for RoPE" "--head-size|--rope" -- "${train[@]}" --head-size 7
refuse "head too wide" "--head-size" -- "${train[@]}" --head-size 512
refuse "sequence beyond the context" "--sequence-length" -- "${train[@]}" --sequence-length 64
refuse "global batch not a multiple" "--global-batch" -- "${train[@]}" --global-batch 65
refuse "more micro-batches than can be counted" "--global-batch" -- "${train[@]}" --micro-batch 1 --sequence-length 1 --global-batch 1000000000000
refuse "layers for other stages" "--pp-layers" -- "${train[@]}" --pp-layers 1,1
refuse "layers that are no numbers" "--pp-layers" -- "${train[@]}" --pp-layers $'tine\nand memory'
refuse "chunks where there are none" "--pp-chunks" -- "${train[@]}" --pp-chunks 2
refuse "more chunks than layers" "--pp-chunks" -- "${train[@]}" --pp-schedule interleaved --pp-chunks 2
refuse "stages without processes" "--pp" -- "${train[@]}" --pp 2 --pp-schedule interleaved
refuse "warm-up longer than the run" "--warmup-steps" -- "${train[@]}" --warmup-steps 5
refuse "prompt without tokenizer" "--prompt" -- "${train[@]}" --tokenizer none --prompt hello
refuse "vocabulary too small for bytes" "--vocab-size" -- "${train[@]}" --vocab-size 100 --document-end -1
refuse "document end outside the vocabulary" "--document-end" -- "${train[@]}" --document-end 300
refuse "parameters beyond counting" "." -- "${train[@]}" --layers 10000 --channels 131072 --heads 1024 --head-size 128
refuse "more memory than there is" "memory" -- "${train[@]}" --micro-batch 200000
refuse "bf16 options in fp32" "give --stochastic-rounding off" -- "${train[@]}" --stochastic-rounding on
refuse "fp8 in fp32" "--matmul-dtype fp8.*PRECISION=bf16" -- "${train[@]}" --matmul-dtype fp8
refuse "algorithms for products that are not timed" "--matmul-tuning here.json" -- "${train[@]}" --matmul-tuning here.json

# models
refuse "unknown preset" "gpt5" -- train --model gpt5 --train-data good.bin --run-dir run
mkdir config && echo '{"model_type": "gpt2", "n_layer": ' >config/config.json
refuse "config cut short" "config.json" -- train --model config --train-data good.bin --run-dir run
echo '{"model_type": "bert"}' >config/config.json
refuse "foreign architecture" "bert" -- train --model config --train-data good.bin --run-dir run
echo '{"model_type":"gpt2","n_layer":2,"n_embd":-4,"n_head":2,"vocab_size":257,"n_positions":32}' >config/config.json
refuse "negative width" "n_embd" -- train --model config --train-data good.bin --run-dir run
printf '[%.0s' {1..100000} >config/config.json
refuse "nested without end" "config.json" -- train --model config --train-data good.bin --run-dir run

# token files
refuse "missing" "absent.bin" -- "${train[@]}" --train-data absent.bin
refuse "pattern without a match" "no\*such" -- "${train[@]}" --train-data 'no*such*.bin'
refuse "no data named" "--train-data" -- train --run-dir run
refuse "a folder" "empty" -- "${train[@]}" --train-data empty
: >zero.bin
refuse "empty file" "zero.bin" -- "${train[@]}" --train-data zero.bin
head -c 500 good.bin >short.bin
refuse "cut in the header" "short.bin" -- "${train[@]}" --train-data short.bin
head -c 3000 good.bin >cut.bin
refuse "cut in the tokens" "cut.bin" -- "${train[@]}" --train-data cut.bin
{ cat good.bin; echo; } >long.bin
refuse "trailing bytes" "long.bin" -- "${train[@]}" --train-data long.bin
shard magic.bin 12345 1 2000 4000
refuse "wrong magic" "magic.bin" -- "${train[@]}" --train-data magic.bin
shard version.bin 20240520 9 2000 4000
refuse "wrong version" "version.bin" -- "${train[@]}" --train-data version.bin
shard none.bin 20240520 1 0 0
refuse "no tokens" "none.bin" -- "${train[@]}" --train-data none.bin
shard negative.bin 20240520 1 -5 4000
refuse "negative count" "negative.bin" -- "${train[@]}" --train-data negative.bin
shard few.bin 20240520 1 20 40
refuse "shorter than a sample" "few.bin" -- "${train[@]}" --train-data few.bin
shard wide.bin 20240801 7 1000 4000
refuse "two widths" "wide.bin|good.bin" -- "${train[@]}" --train-data good.bin,wide.bin
refuse "bad validation data" "zero.bin" -- "${train[@]}" --val-data zero.bin
refuse "validation data shorter than a sample" "few.bin" -- "${train[@]}" --val-data few.bin
refuse "a line break in a name" "absent" -- "${train[@]}" --train-data $'absent\n.bin'
mkfifo pipe
refuse "a pipe" "pipe" -- "${train[@]}" --train-data pipe

# run directories
mkdir -p taken && echo '{}' >taken/log.jsonl
refuse "already holds a run" "taken" -- "${train[@]}" --run-dir taken
refuse "a file in its place" "text.txt" -- "${train[@]}" --run-dir text.txt
refuse "below a file" "text.txt" -- "${train[@]}" --run-dir text.txt/run

# checkpoints
"$program" "${train[@]}" --run-dir made --log-every 2 >/dev/null 2>&1 || echo "FAILED cannot train for the tests of checkpoints"
made=$(echo made/checkpoints/step_*)
# damaged NAME COMMAND    a copy of the run whose checkpoint (in the current folder) the command has changed
damaged() { cp -r made "$1" && (cd "$1"/checkpoints/step_* && eval "$2"); }
refuse "no checkpoint there" "empty" -- sample empty
cp -r made no_log && rm no_log/log.jsonl
refuse "a checkpoint without a log is a run too" "no_log" -- "${train[@]}" --run-dir no_log
refuse "a name too long for the file system" "aaa" -- sample "$(printf 'a%.0s' {1..5000})"
refuse "nothing to sample from" "sample" -- sample
refuse "not a checkpoint" "text.txt" -- sample text.txt
damaged head 'truncate -s 200 index.bin'
refuse "an index cut in the header" "head/checkpoints.*index.bin" -- sample head
damaged short 'truncate -s -64 data_00000.bin'
refuse "a data file cut at the end" "short/checkpoints.*data_00000.bin" -- sample short
damaged long 'echo x >>data_00000.bin'
refuse "a data file with trailing bytes" "long/checkpoints.*data_00000.bin" -- sample long
damaged gone 'rm data_00000.bin'
refuse "a data file that is missing" "gone/checkpoints.*data_00000.bin" -- sample gone
damaged flipped 'printf "\xff" | dd of=data_00000.bin bs=1 seek=200 conv=notrunc status=none'
refuse "a flipped byte of a weight" "flipped/checkpoints.*data_00000.bin" -- sample flipped
refuse "the same, inspected" "flipped/checkpoints" -- inspect flipped --verify
damaged header 'printf X | dd of=index.bin bs=1 seek=100 conv=notrunc status=none'
refuse "a flipped byte of the index" "header/checkpoints.*index.bin" -- sample header
damaged bare "sed -i 's/\"tokenizer\":\"bytes\"/\"tokenizer\":\"x.js\"/' index.bin"
refuse "a header that was changed" "bare/checkpoints.*index.bin" -- sample bare
refuse "a checkpoint under another step's name" "step_00000099" -- sample "$(cp -r "$made" step_00000099 && echo step_00000099)"
refuse "resuming from nowhere" "--resume" -- "${train[@]}" --run-dir fresh --resume empty
refuse "resuming another model" "--layers" -- "${train[@]}" --run-dir made --resume auto --layers 3
refuse "resuming with another seed" "--seed" -- "${train[@]}" --run-dir made --resume auto --seed 8
refuse "resuming and replacing" "--overwrite" -- "${train[@]}" --run-dir made --resume auto --overwrite
refuse "resuming what is done" "--steps" -- "${train[@]}" --run-dir made --resume auto --steps 1
refuse "resuming from a damaged checkpoint" "flipped/checkpoints" -- "${train[@]}" --run-dir flipped --resume auto
refuse "weights from nowhere" "--init" -- "${train[@]}" --run-dir fresh --init empty
refuse "exporting nothing" "export" -- export
refuse "exporting to nowhere" "--output" -- export made
refuse "exporting what llm.c has not" "--" -- export made --format llmc --output out.bin
refuse "importing nothing" "import" -- import
refuse "importing to nowhere" "--output" -- import empty
refuse "importing an empty folder" "empty" -- import empty --output imported
refuse "importing text" "text.txt" -- import text.txt --output imported

# sample
refuse "temperature below zero" "--temperature" -- sample made --temperature -1

refuse "two prompts" "--prompt-file" -- sample made --prompt a --prompt-file text.txt
refuse "a prompt file that is missing" "absent.txt" -- sample made --prompt-file absent.txt
refuse "a tokenizer that the model has no tokens for" "--tokenizer" -- sample made --tokenizer gpt2.json

# eval
refuse "nothing to evaluate" "eval" -- eval
refuse "nothing to evaluate on" "--data" -- eval made
refuse "evaluation data missing" "absent.bin" -- eval made --data absent.bin
refuse "evaluation data cut" "cut.bin" -- eval made --data good.bin,cut.bin
refuse "a sequence longer than the context" "--sequence-length" -- eval made --data good.bin --sequence-length 64
printf '{"context": "a", "choices": ["b", "c"], "answer": 0}\n{"context": "a", "choices": ["b", "c"], "answer": 2}\n' >questions.jsonl
refuse "an answer that is no choice" "questions.jsonl:2" -- eval made --choices questions.jsonl
{ le32 20240522 1 2 60; head -c 1008 /dev/zero; head -c 60 /dev/zero; } >questions.bin
refuse "damaged questions of llm.c" "questions.bin" -- eval made --choices questions.bin

# data
refuse "nothing to look into" "data" -- data
refuse "a damaged file beside a good one" "cut.bin" -- data good.bin cut.bin
{ le32 20240801 7 1; head -c 1012 /dev/zero; le32 999; } >strange.bin
{ le32 20240520 1 2000; head -c 1012 /dev/zero; head -c 4000 /dev/zero | tr '\0' '\377'; } >strange_train.bin
refuse "a token that the tokenizer has not" "strange.bin" -- data strange.bin --tokenizer bytes

# an earlier run is left alone by one that cannot begin
refuse "tokens of another vocabulary beside a run" "strange_train.bin" -- "${train[@]}" --train-data strange_train.bin --run-dir made --overwrite

# tokenize
printf '\x28\xb5\x2f\xfd more' >packed.txt
refuse "text packed in another way" "packed.txt" -- tokenize packed.txt --output out
echo '{"text": 1}' >number.jsonl
refuse "a line whose text is no text" "number.jsonl:1" -- tokenize number.jsonl --output out
printf '{"text": "a"}\n{"text": "b"\n' >cut.jsonl
refuse "a line of JSON that is cut" "cut.jsonl:2" -- tokenize cut.jsonl --output out
gzip <"$program" | head -c 100000 >cut.txt.gz
refuse "gzip that is cut" "cut.txt.gz" -- tokenize cut.txt.gz --output out
refuse "no such tokenizer" "--tokenizer" -- tokenize text.txt --output out --tokenizer byte
echo '{"model": {"type": "WordPiece", "vocab": {}}}' >wordpiece.json
refuse "a tokenizer of another kind" "wordpiece.json" -- tokenize text.txt --output out --tokenizer wordpiece.json
refuse "a tokenizer that is no JSON" "broken.json" -- tokenize text.txt --output out --tokenizer broken.json
refuse "a tokenizer twice" "--train-tokenizer" -- tokenize text.txt --output out --tokenizer bytes --train-tokenizer 300
refuse "a vocabulary smaller than the bytes" "." -- tokenize text.txt --output out --train-tokenizer 100
refuse "nothing to tokenize" "tokenize" -- tokenize --output out
refuse "missing input" "absent.txt" -- tokenize absent.txt --output out
refuse "no output" "--output" -- tokenize text.txt
refuse "an empty folder" "empty" -- tokenize empty --output out
refuse "output folder missing" "nowhere" -- tokenize text.txt --output nowhere/out
refuse "fraction above one" "--val-fraction" -- tokenize text.txt --output out --val-fraction 1.5
echo x >old_train_000000.bin
refuse "output there already" "old_train" -- tokenize text.txt --output old

# a full disk
mkdir full
if mount -t tmpfs -o size=64k tmpfs full 2>/dev/null; then
    head -c 200000 /dev/urandom >large.txt
    refuse "disk full while tokenizing" "full" -- tokenize large.txt --output full/out
    [ -z "$(ls full)" ] && echo "ok nothing left on the full disk" || echo "FAILED left on the full disk: $(ls full)"
    timeout 60 "$program" "${train[@]}" --channels 64 --run-dir full/run >/dev/null 2>message
    rc=$?
    { [ $rc = 1 ] && [ "$(wc -l <message)" = 1 ] && grep -q 'full/run' message && [ -z "$(ls full/run/checkpoints)" ]; } && echo "ok disk full at the end of training" ||
        echo "FAILED disk full at the end of training: exit code $rc: $(<message)"
    umount full
else
    skip "a small tmpfs cannot be mounted here" 3
fi
