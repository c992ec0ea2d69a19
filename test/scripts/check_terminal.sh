#!/usr/bin/env bash
# A run on a terminal, in tmux: its status line stays last while others scroll above it, fits any width, and leaves nothing
# behind; without a terminal there is none. Then prompts that are typed there.
# suite: test
# needs: cpu-fp32/train_gpt
# seconds: 15
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 35
program=$PWD/build/cpu-fp32/train_gpt mpirun_here=$(command -v mpirun)
command -v tmux >/dev/null || { skip "no tmux here" 35; exit 0; }
session() { tmux -S "$work/tmux" -f /dev/null "$@"; }
at_end() { session kill-server 2>/dev/null; }
cd "$work" || exit 1

{ printf '\x88\xd8\x34\x01\x01\x00\x00\x00\x20\x4e\x00\x00'; head -c 1012 /dev/zero; head -c 40000 /dev/zero; } >tokens.bin # 20,000 tokens
# train STEPS OPTIONS...    the command line of a run in which a step takes some tens of milliseconds
train() {
    local steps=$1
    shift
    echo "$program train --model tiny --layers 1 --channels 32 --heads 2 --context 32 --micro-batch 4 --global-batch 1024" \
        "--train-data tokens.bin --warmup-steps 0 --overwrite --steps $steps $*"
}

# Types in the terminal, whose prompt (ready>) begins no other line.
type_line() { session send-keys -t 0 -l "$1" && session send-keys -t 0 Enter; }
screen() { session capture-pane -p -t 0; }
# prints the screen with its colors: dim is 2, yellow 33
coloured() { session capture-pane -e -p -t 0; }
shows() { screen | grep -qE -- "$1"; }
last_line() { screen | grep -v '^$' | tail -1; }
status='^step [0-9]+/[0-9]+  '
stays() { last_line | grep -qE "$status(micro-batch|validation)"; }
prompt_is_back() { last_line | grep -q '^ready>$'; }
# Neither the status line nor a part of it is left on the screen.
clean() { ! screen | grep -E "micro-batch [0-9]+/|validation [0-9]+/|checkpoint in|\[=*>"; }
# resized COLUMNS WORDS    resizes the terminal; the status is soon there again, on one line that matches WORDS
resized() {
    session resize-window -t 0 -x "$1" -y 30
    wait_for 60 fits "$1" "$2"
}
fits() {
    sleep 0.3
    local line rest
    line=$(last_line)
    rest=$(screen | grep -cE "micro-batch [0-9]|left  checkpoint|\[=*>")
    [ "${#line}" -lt "$1" ] && [ "$rest" -le 1 ] && [[ $line =~ $2 ]]
}

env -u NO_COLOR PS1= TERM=xterm tmux -S "$work/tmux" -f /dev/null new-session -d -x 80 -y 30 "bash --norc --noprofile"
type_line "PS1='ready>'; unset PROMPT_COMMAND; export OMP_NUM_THREADS=1; clear"
wait_for 60 prompt_is_back || echo "FAILED the terminal does not start"

# ----------------------------------------------------------------------------------------------------------
# while it runs

type_line "$(train 100000 --run-dir a --log-every 4 --save-every 1000 --val-data tokens.bin --val-every 1000 --val-batches 4)"
check "a last line says where the run is" wait_for 60 stays
check "in 80 columns, with all that fits" wait_for 60 fits 80 '^step [0-9]+/100000  micro-batch [1-8]/8  \[[=> ]+\]  [0-9a-z ]+ left  checkpoint in [0-9]+ steps?$'
moved() { [ "$(last_line)" != "$before" ]; }
before=$(last_line)
check "it moves" wait_for 60 moved
check "lines scroll above it" wait_for 60 shows '^step +[0-9]+[048]/100000  loss '
check "with the slowest step of those that they stand for" wait_for 60 shows 'slowest [0-9.]+ ms at step [0-9]+'
dim() { coloured | grep -v '^$' | tail -1 | grep -q $'\033\[2m'; }
check "it is dim" wait_for 60 dim
check "50 columns: it leaves out what is less important" resized 50 '^step [0-9]+/100000  micro-batch [1-8]/8  .* left$'
check "120 columns: it is whole again" resized 120 'left  checkpoint in [0-9]+ steps$'
check "20 columns: the step alone" resized 20 '^step [0-9]+/100000$'
session resize-window -t 0 -x 80 -y 30
session send-keys -t 0 C-c
check "Ctrl-C says what it does" wait_for 60 shows '^stopping after step [0-9]+, then saving \(Ctrl-C again: quit now without saving\)$'
check "and ends the run" wait_for 60 prompt_is_back
check "with a clean screen" clean
check "and its last line" shows '^stopped as asked after step [0-9]+; the checkpoint is a/checkpoints/'

type_line "clear; $(train 100000 --run-dir b --val-data tokens.bin --val-every 1 --val-batches 400 --log-every 1000)"
validates() { last_line | grep -qE '^step [0-9]+/100000  validation [0-9]+/[0-9]+'; }
check "also while it validates" wait_for 60 validates
session send-keys -t 0 C-c
wait_for 60 shows '^stopping after step'
sleep 0.5
session send-keys -t 0 C-c
check "a second Ctrl-C ends it at once" wait_for 60 prompt_is_back
check "and leaves a clean screen too" clean

# ----------------------------------------------------------------------------------------------------------
# ends

type_line "clear; $(train 1000 --run-dir c --learning-rate 10 --weight-decay 1 --schedule constant)"
check "an error is the last line" wait_for 60 shows '^train_gpt: step [0-9]+: loss'
wait_for 60 prompt_is_back
check "on a clean screen" clean
type_line "clear; NO_COLOR=1 $(train 100000 --run-dir d --log-every 100)"
wait_for 60 stays
check "NO_COLOR: the line is there, and has no colour" eval 'stays && ! coloured | grep -q "\[[0-9;]*[23]m\|\[33m"'
session send-keys -t 0 C-c
wait_for 60 prompt_is_back
type_line "clear; $(train 40 --run-dir e --quiet)"
wait_for 60 shows '^done after'
check "--quiet shows the last line alone" test "$(screen | grep -v '^$\|^ready>\|run-dir e --quiet')" = "done after step 40; the checkpoint is e/checkpoints/step_00000040"
check "and the log has every step" has_steps e 40
TERM=xterm $(train 40 --run-dir f --log-every 10) >piped.out 2>&1
check "nothing of it where output is no terminal" test "$(tr -dc '\033\r' <piped.out | wc -c)" = 0 -a "$(grep -c '^step' piped.out)" = 5

# ----------------------------------------------------------------------------------------------------------
# prompts

prompts() { type_line "clear; $program sample e --tokenizer bytes --interactive --tokens 10 $*; echo code \$?"; }
asks() { [ "$(last_line)" = ">" ]; }
writes() { ! last_line | grep -q '^>'; }
typed() { [ "$(last_line)" = "> $1" ]; }
# ask LINE    types it at an empty prompt; anything typed earlier would be shown twice
ask() { wait_for 60 asks && session send-keys -t 0 -l "$1" && wait_for 60 typed "$1" && session send-keys -t 0 Enter; }
# sees WORDS    the screen soon shows the words; otherwise prints the screen
sees() { wait_for 60 shows "$1" || { screen | grep .; return 1; }; }
prompts
check "a session has a seed, and tells it" sees '^seed [0-9]+$'
ask "some words"
check "a prompt is answered" sees '^[0-9]+ tokens in ' # a sampled text may end early
wait_for 60 asks
session send-keys -t 0 Up
check "an arrow key brings the last line back" wait_for 60 typed "some words"
session send-keys -t 0 C-c
check "Ctrl-C drops the line" wait_for 60 asks
ask "/temprature 0"
check "a misspelt command is refused" sees '^train_gpt: /temprature: no such command, the nearest is /temperature; '
ask "/temperature 0"
for answer in 1 2; do ask "aü"; done
wait_for 60 asks
check "two answers are alike at /temperature 0" test "$(screen | grep '^aü' | uniq -c | awk '{ print $1 }')" = 2
ask "/tokens 16777216"
ask "long" && wait_for 60 writes
session send-keys -t 0 C-c
check "Ctrl-C ends a long answer" wait_for 60 asks
ask "/tokens 7"
ask "next"
check "and the next prompt is answered" sees '^7 tokens in '
wait_for 60 asks
session send-keys -t 0 C-d
check "Ctrl-D ends the session" sees '^code 0$'
prompts --seed 5
wait_for 60 asks
session send-keys -t 0 C-c
session send-keys -t 0 C-d
check "Ctrl-C at an empty prompt changes nothing; a --seed stays" eval "wait_for 60 shows '^code 0$' && ! shows '^seed'"

# ----------------------------------------------------------------------------------------------------------
# under mpirun

if [ -n "$mpirun_here" ]; then
    local_ranks="mpirun --allow-run-as-root --oversubscribe -np 2"
    type_line "clear; $local_ranks $(train 100000 --run-dir g --log-every 4 --save-every 1000)"
    check "mpirun on a terminal shows it too" wait_for 120 fits 80 '^step [0-9]+/100000  micro-batch [1-4]/4 '
    session send-keys -t 0 C-c
    wait_for 120 prompt_is_back
    type_line "clear; $local_ranks --tag-output $(train 40 --run-dir i --log-every 20)"
    wait_for 120 prompt_is_back
    check "but not between the lines that mpirun marks" eval "shows '1,0.<stdout>:done after step 40' && clean"
    type_line "clear; $local_ranks $(train 12 --run-dir h) | tee tee.out >/dev/null"
    wait_for 120 grep -q '^done after' tee.out
    check "and one whose output goes elsewhere does not" test "$(tr -dc '\033' <tee.out | wc -c)" = 0 -a "$(grep -c '^step' tee.out)" = 12
else
    skip "no mpirun here" 3
fi
