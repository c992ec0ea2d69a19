#!/usr/bin/env bash
# How the program refuses bad input of every kind: the exit code is 1, standard error is one line that names the thing, the
# reason and the remedy, and no file is created, changed or deleted. Each code path that refuses input has a row, and each
# command at least two; other refusals take one of these paths, and units check their messages. PROGRAM=FILE checks another
# build for a CPU.
# suite: test
# needs: cpu-fp32/train_gpt
# seconds: 5
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 87
program=${PROGRAM:-$PWD/build/cpu-fp32/train_gpt} golden=$PWD/test/golden/tokenizers
at_end() { umount "$work/full" 2>/dev/null; }
cd "$work" || exit 1

# ----------------------------------------------------------------------------------------------------------
# files

# le32 NUMBER...    each as four little-endian bytes
le32() {
    local n
    for n in "$@"; do printf "\\x$(printf %02x $((n & 255)))\\x$(printf %02x $((n >> 8 & 255)))\\x$(printf %02x $((n >> 16 & 255)))\\x$(printf %02x $((n >> 24 & 255)))"; done
}

# shard FILE COUNT BYTES [BYTE]    a token file whose header says COUNT, with BYTES bytes of tokens
shard() {
    { le32 20240520 1 "$2"; head -c 1012 /dev/zero; head -c "$3" /dev/zero | tr '\0' "${4:-\0}"; } >"$1"
}

# damaged NAME COMMAND    makes a copy of the run, and changes its checkpoint with the command, which runs in its folder
damaged() { cp -r made "$1" && (cd "$1"/checkpoints/step_* && eval "$2"); }

mkdir empty config taken full
shard good.bin 2000 4000
shard cut.bin 2000 3000
shard few.bin 20 40
shard strange.bin 2000 4000 '\377'
echo some text >text.txt
echo '{}' >taken/log.jsonl
echo '{"model_type": "gpt2", "n_layer": ' >config/config.json
head -c 5000 "$golden/gpt2.json" >broken.json
printf '{"context": "a", "choices": ["b", "c"], "answer": 0}\n{"context": "a", "choices": ["b", "c"], "answer": 2}\n' >questions.jsonl
printf '{"text": "a"}\n{"text": 1}\n' >number.jsonl
head -c 200000 /dev/urandom | gzip | head -c 100000 >cut.txt.gz
echo x >old_train_000000.bin
echo '{}' >empty.json
mkdir linked piped && ln -s ../text.txt linked/log.jsonl && mkfifo piped/log.jsonl

small=(--model tiny --layers 1 --channels 16 --heads 2 --context 32 --micro-batch 2)
train="train ${small[*]} --train-data good.bin --run-dir run --steps 2"
broken='absent\n.bin'
# shellcheck disable=SC2086  # words
"$program" $train --run-dir made --log-every 2 >/dev/null 2>&1 &&
    "$program" $train --run-dir large --context 1024 --sequence-length 32 >/dev/null 2>&1 ||
    echo "FAILED cannot train for the tests of checkpoints"
cp good.bin gone.bin
# shellcheck disable=SC2086  # words
"$program" $train --run-dir moved --val-data gone.bin --val-batches 1 >/dev/null 2>&1 || echo "FAILED cannot train on files that go"
rm gone.bin
step=$(cd made && echo checkpoints/step_*)
damaged header 'printf X | dd of=index.bin bs=1 seek=100 conv=notrunc status=none'
damaged short 'truncate -s -64 data_00000.bin'
damaged flipped 'printf "\xff" | dd of=data_00000.bin bs=1 seek=200 conv=notrunc status=none'

# ----------------------------------------------------------------------------------------------------------
# refusals

# all folders, and all files with hashes of their contents, except on the disk that fills up
contents() { find . -path ./full -prune -o -type d -print -o -type f ! -name message ! -name '.*' -exec md5sum {} + | sort; }
before=$(contents)

# refuse NAME WORDS LINE [OUTPUT]    the message must contain the words. LINE is split at blanks; \n in it is a line break.
refuse() {
    local name=$1 words=$2 why= message after rc
    local -a arguments
    read -r -a arguments <<<"$3"
    timeout 300 "$program" "${arguments[@]//'\n'/$'\n'}" >"${4:-/dev/null}" 2>message </dev/null
    rc=$?
    message=$(<message)
    [ $rc = 1 ] || why="exit code $rc"
    [ "$(wc -l <message)" = 1 ] || why="$why; $(wc -l <message) lines"
    [[ $message == "train_gpt: "* ]] || why="$why; does not begin with train_gpt:"
    [[ $message == *:*\;* ]] || why="$why; no remedy after ';'"
    [[ $message == *"$words"* ]] || why="$why; does not say '$words'"
    after=$(contents)
    [ "$before" = "$after" ] || why="$why; files changed: $(diff <(echo "$before") <(echo "$after") | tr '\n' ' ')"
    before=$after
    if [ -z "$why" ]; then echo "ok $name"; else echo "FAILED $name: $why: $message"; fi
}

# Rows are NAME | WORDS | LINE. $train is a run that succeeds; if an option is given twice, the last one counts.
while IFS='|' read -r name words line; do
    [[ -z $name || $name == "#"* ]] && continue
    read -r name <<<"$name"
    read -r words <<<"$words"
    refuse "$name" "$words" "$line"
done <<ROWS
# the command line
an unknown command                   | trian: no such command, the nearest is train;                   | trian
help on an unknown command           | trian: no such command, the nearest is train;                   | trian --help
an unknown section of the help        | --help dta: train_gpt train has no such section, the nearest is | train --help dta
an unknown option                    | --learning-rat: no such option, the nearest is                  | $train --learning-rat 1
an option of another trainer         | --lr: no such option, it is --learning-rate here;               | $train --lr 1
an option of another command         | --resume: not an option of train_gpt eval;                      | eval made --resume made
a value that is missing              | --output: value missing;                                        | tokenize text.txt --output
a word for a number                  | --steps many: not a number;                                     | $train --steps many
a number out of range                | --temperature -1: out of range;                                 | sample made --temperature -1

# options that do not fit together
heads that do not divide             | --heads 3: does not divide --channels 16;                       | $train --heads 3
a filter of odd width                | --local-filter on: --channels 15 is odd,                         | $train --channels 15 --heads 3 --local-filter on
stages without processes             | --pp 2: a multiple of 2 processes is needed and this run has 1; | $train --layers 2 --pp 2
nothing to evaluate on               | eval: nothing to evaluate on;                                   | eval made
a tokenizer twice                    | --tokenizer bytes: --train-tokenizer trains its own;            | tokenize text.txt --output out --tokenizer bytes --train-tokenizer 300

# plans
a plan without devices               | --gpus: missing, or 0;                                          | plan --model llama3-8B --machine h100 --global-batch 4M
a card that there is not             | --machine h101: not a known card, the nearest is h              | plan --model llama3-8B --machine h101 --gpus 8 --global-batch 4M
a machine's file without rates       | empty.json: multiprocessors is missing;                         | plan --model llama3-8B --machine empty.json --gpus 8 --global-batch 4M
a model too large for the devices    | plan: llama3-70B does not fit on 2 devices:                     | plan --model llama3-70B --machine h100 --gpus 2 --global-batch 64k
chunks of another schedule           | --pp-chunks 4: with --pp-schedule 1f1b each stage has only one  | plan --model llama3-8B --machine h100 --gpus 64 --global-batch 4M --pp-schedule 1f1b --pp-chunks 4
a plan in fp8 that moves weights     | --matmul-dtype fp8: weights must stay at one address, and       | plan --model llama3-8B --machine h100 --gpus 64 --global-batch 4M --zero 3 --matmul-dtype fp8
a measurement of no such name        | --measure m.txt: not the name of a .json file,                  | plan --measure m.txt
a measurement over another file      | --measure empty.json: already exists;                           | plan --measure empty.json
a measurement and a plan             | --measure: makes no plan; leave out other options than          | plan --measure m.json --gpus 8
a measurement in fp8                 | --measure times no products in fp8                              | plan --measure m.json --matmul-dtype fp8
a layout for an unknown machine      | --tp auto: --machine is missing,                                | $train --tp auto --global-batch 64k
a layout for steps of unknown size   | --tp auto: --global-batch is missing;                           | $train --pp auto --machine cpu
a machine with other numbers         | --machine h100: for 2-byte numbers, but this program             | $train --machine h100

# options that the program was not built for
rounding of bf16 in fp32             | --stochastic-rounding on: parameters are fp32 here;             | $train --stochastic-rounding on
products in fp8                      | --matmul-dtype fp8: this program does not multiply in fp8       | $train --matmul-dtype fp8
fast sums without fp8                | --fp8-fast-gradients on: needs --matmul-dtype fp8; give         | $train --fp8-fast-gradients on
attention of a GPU                   | --attention wgmma: this program has no kernels                  | $train --attention wgmma
graphs of a GPU                      | --cuda-graphs on: this program has no kernels for GPUs;         | $train --cuda-graphs on
algorithms for products not timed    | --matmul-tuning here.json: products are not timed               | $train --matmul-tuning here.json

# models
a preset that there is not           | --model gpt5: neither a preset nor a config.json;               | $train --model gpt5
a config cut short                   | config/config.json: not valid JSON at byte 36;                  | $train --model config

# token files
a missing file, a line break in it   | absent\\u000a.bin: no such file;                                | ${train/good.bin/$broken}
a file whose name has a comma        | a: no such file (commas separate the files in a list);          | ${train/good.bin/a,b.bin}
a file that is cut                   | cut.bin: is truncated: 4024 bytes,                              | ${train/good.bin/cut.bin}
too little to validate on            | few.bin: has 20 tokens, but a sample needs 33;                  | $train --val-data few.bin
other tokens, in place of a run      | strange.bin: token                                              | ${train/good.bin/strange.bin} --run-dir made --overwrite

# memory
a micro-batch that does not fit      | --micro-batch 1048576: needs                                    | $train --micro-batch 1048576 --context 1024
a model that does not fit            | the model needs                                                 | $train --layers 10000 --channels 131072 --heads 1024 --head-size 128
an evaluation that does not fit      | --micro-batch 1048576: needs                                    | eval large --data good.bin --micro-batch 1048576

# run directories
one that holds a run                 | taken: already holds a run;                                     | $train --run-dir taken
one whose log is a link              | linked/log.jsonl: is a link, and output does not follow links;   | $train --run-dir linked --overwrite
one whose log is a FIFO              | piped/log.jsonl: is not a regular file;                         | $train --run-dir piped
one below a file, a line break in it | text.txt/a\\u000ab: cannot make the folder:                      | $train --run-dir text.txt/a\nb

# checkpoints that a run goes on from
none there                           | --resume empty: no checkpoint there;                            | $train --run-dir fresh --resume empty
a model of another program           | --init config: a Hugging Face model; import it first:           | $train --run-dir fresh --init config
files that are gone                  | moved/$step: was made with files that are missing here; give    | train --resume moved
none that can be used                | header: has 1 checkpoint, but none can be used; the newest:     | $train --run-dir header --resume auto
one of another model                 | --layers 3: the checkpoint made/$step was made with 1;          | $train --run-dir made --resume auto --layers 3
damaged weights                      | flipped/$step/data_00000.bin: tensor wte, weight,               | $train --run-dir flipped --resume auto

# checkpoints that are read
a sample of nothing                  | empty: no checkpoint there;                                     | sample empty
a sample of another program's model  | config: a Hugging Face model; import it first:                  | sample config
a damaged index                      | header/$step/index.bin: header does not match                   | sample header
a data file cut at the end           | short/$step/data_00000.bin: 283392 bytes, but the index         | sample short
a sample of damaged weights          | flipped/$step/data_00000.bin: tensor wte, weight,               | sample flipped
an inspection of a damaged index     | header/$step/index.bin: header does not match                   | inspect header
an inspection of damaged weights     | flipped/$step: 1 of 24 pieces are damaged;                      | inspect flipped --verify
a report on what is no run            | empty: has no log.jsonl; name the directory of a run            | report empty
a report that cannot be written       | none/page.html: cannot create it:                               | report made --output none/page.html
an export of damaged weights         | flipped/$step/data_00000.bin: tensor wte, weight,               | export flipped --output exported
an export of what llm.c has not      | --norm rmsnorm: llm.c has only layernorm;                       | export made --format llmc --output out.bin

# other files that the commands read and write
a prompt that is missing             | absent.txt: cannot open it:                                     | sample made --prompt-file absent.txt
data that is cut                     | cut.bin: is truncated: 4024 bytes,                              | eval made --data good.bin,cut.bin
sequences longer than the context    | --sequence-length 64: longer than the model's                   | eval made --data good.bin --sequence-length 64
an answer that is no choice          | questions.jsonl:2: answer is 2;                                 | eval made --choices questions.jsonl
a report of a file that is cut       | cut.bin: is truncated: 4024 bytes,                              | data good.bin cut.bin
tokens that the tokenizer has not    | strange.bin: has token 65535, outside                           | data strange.bin --tokenizer bytes
an import of an empty folder         | empty/config.json: cannot open it:                              | import empty --output imported
an import of a model's config         | config/config.json: a file of a Hugging Face model; name its      | import config/config.json --output imported
an import of text                    | text.txt: too short for a model of llm.c;                       | import text.txt --output imported
text that is missing                 | absent.txt: cannot read it:                                     | tokenize absent.txt --output out
a line whose text is no text         | number.jsonl:2: the field "text" is not a string;               | tokenize number.jsonl --output out
gzip that is cut                     | cut.txt.gz: is cut short:                                       | tokenize cut.txt.gz --output out
a tokenizer that is cut              | broken.json: not valid JSON at byte 5001;                       | tokenize text.txt --output out --tokenizer broken.json
an output folder that is missing     | nowhere/: cannot list the output folder                         | tokenize text.txt --output nowhere/out
an output that is there already      | old_train_000000.bin: already exists;                           | tokenize text.txt --output old
ROWS
refuse "a report that is not printed" "standard output" "inspect made" /dev/full

"$program" plan --model gpt2-124M --gpus 8 --gpus 4 --machine h100 --format json >plan.json 2>message
check "a remark stays out of what programs read" eval 'grep -q "^train_gpt: --gpus 8: given again as 4, which is used" message && [ "$(head -c 1 plan.json)" = "{" ]'
before=$(contents)

# ----------------------------------------------------------------------------------------------------------
# a full disk

nothing_left() { [ -z "$(ls full)" ] || { ls full; false; }; }
if mount -t tmpfs -o size=64k tmpfs full 2>/dev/null; then
    head -c 200000 /dev/urandom >large.txt
    before=$(contents)
    refuse "a disk that is full while text is tokenized" "full/out_train_000000.bin: cannot write it: No space left" "tokenize large.txt --output full/out"
    check "nothing is left on the full disk" nothing_left
    refuse "no room for a checkpoint" "full/run/checkpoints: needs 0.3 MB, but only 0.1 MB are free;" "$train --run-dir full/run"
    mount -o remount,size=400k full
    refuse "no room for the last checkpoint" "step_00000002.partial: needs 0.3 MB, but only 0.1 MB are free;" "$train --run-dir full/run --save-every 1 --disk-wait 0"
    umount full
else
    skip "a small tmpfs cannot be mounted here" 4
fi

# ----------------------------------------------------------------------------------------------------------
# a limit on the address space (ulimit -v)

# under_limits ARGUMENTS...    raises the limit until the command succeeds; each failure before that must end with one line
under_limits() {
    local kb=60000 rc
    while [ $kb -lt 16000000 ]; do
        (ulimit -v $kb && OMP_NUM_THREADS=2 exec timeout 300 "$program" "$@") >/dev/null 2>message </dev/null
        rc=$?
        [ $rc != 0 ] || { echo "$kb KB are enough"; return 0; }
        # the program and its libraries may not have fitted
        grep -q '^train_gpt: .*; ' message && [ "$(wc -l <message)" = 1 ] && [ $rc = 1 ] ||
            grep -q 'loading shared libraries' message || { echo "$kb KB: exit code $rc"; cat message; return 1; }
        kb=$((kb * 5 / 4))
    done
    echo "16 GB are not enough:"
    cat message
    return 1
}
if [ -n "$PROGRAM" ]; then
    skip "the address sanitizer needs all of the address space" 2
else
    check "a plan under any limit of memory" under_limits plan --model gpt2-124M --gpus 8 --machine h100
    # shellcheck disable=SC2086  # options are words
    check "a run under any limit of memory" under_limits $train --run-dir small --overwrite
fi
