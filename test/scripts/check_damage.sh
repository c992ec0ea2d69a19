#!/usr/bin/env bash
# Checkpoints that are damaged on disk. Whatever the damage, `inspect --verify on` names the file, and --resume auto names it
# too, resumes from the checkpoint before, and reaches the bits of an undisturbed run.
#
#   SEED=N    repeats the random places of an earlier run, which printed it; FLIPS=N how many bits are flipped (40)
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs cpu-fp32/forge_checkpoint cpu-fp32/fault_injection.so
# seconds: 100
# soak: FLIPS=2000
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
. test/support/seed.sh
flips=${FLIPS:-40}
plan $((65 + flips))
cpu=$PWD/build/cpu-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs forge=$PWD/build/cpu-fp32/forge_checkpoint
faults=$PWD/build/cpu-fp32/fault_injection.so
cd "$work" || exit 1
export OMP_NUM_THREADS=1

"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
tiny=(train --model tiny --layers 1 --channels 32 --heads 2 --mlp-width 48 --context 48 --micro-batch 2 --global-batch 384
    --warmup-steps 0 --train-data 'text_train_*.bin' --steps 6 --save-every 2 --keep 0)

# train NAME OPTIONS...    with the ranks of the run that NAME is a copy of
train() {
    local launch=()
    [[ $1 != four* ]] || launch=(ranks 4)
    "${launch[@]}" "$cpu" "${tiny[@]}" --run-dir "$@" >>"$1.out" 2>>"$1.err"
}
steps_of() { find "$1/checkpoints" -maxdepth 1 -regex '.*/step_[0-9]+' -printf '%f\n' | sort | xargs; }
agrees() { "$compare" "$1" "$2" --bitwise >"$1.compared" 2>&1; }
said() { cat "$1.out" "$1.err" | grep -qE "$2"; }

# report LABEL TROUBLE NAME    prints one line for the check; if there is trouble, the run's messages too
report() {
    if [ -z "$2" ]; then
        echo "ok $1"
    else
        echo "FAILED $1: $2: $(cat "$3.inspected" "$3.out" "$3.err" 2>/dev/null | grep -E 'resume|train_gpt:|step_' | tail -3 | xargs -0)"
    fi
    rm -rf "$3" "$3".*
}
# survives LABEL FILE NAME [STEP]    FILE in the run's newest checkpoint, that of STEP (6), is damaged
survives() {
    local label=$1 name=$3 step=${4:-6} trouble="" named code
    named="step_0000000$step/?$2"
    "$cpu" inspect "$name/checkpoints/step_0000000$step" --verify on >"$name.inspected" 2>&1
    code=$?
    if [ $code != 1 ]; then
        trouble="inspect's exit code is $code"
    elif ! grep -qE "$named" "$name.inspected"; then
        trouble="inspect does not name $2"
    elif ! train "$name" --resume auto; then
        trouble="cannot be resumed"
    elif ! said "$name" "$named"; then
        trouble="--resume does not name $2"
    elif ! said "$name" "after step $((step == 6 ? 4 : 6))"; then
        trouble="does not go on from the checkpoint before"
    elif ! agrees "$name" "${name%%-*}"; then
        trouble=$(<"$name.compared")
    fi
    report "$label" "$trouble" "$name"
}

# damaged LABEL FILE COMMAND...    the command damages the newest checkpoint, in whose folder it is run
number=0
damaged() {
    number=$((number + 1))
    local name=${base:-one}-$number
    cp -r "${base:-one}" "$name"
    (cd "$name/checkpoints/step_00000006" && "${@:3}") || echo "FAILED to damage: $*"
    at_once survives "$1" "$2" "$name"
}

train one || echo "FAILED to run one"
size() { stat -c %s "one/checkpoints/step_00000006/$1"; }
index=$(size index.bin) data=$(size data_00000.bin)

# ----------------------------------------------------------------------------------------------------------
# files

for file in index.bin data_00000.bin; do
    bytes=$(size $file)
    damaged "$file is missing" "($file|: no checkpoint)" rm $file
    damaged "$file is empty" $file truncate -s 0 $file
    for left in 1 63 64 $((bytes / 2)) $((bytes - 1)); do
        damaged "$file is cut after $left of $bytes bytes" $file truncate -s "$left" $file
    done
    damaged "$file has a byte more" $file truncate -s +1 $file
    damaged "$file is zeros" $file dd if=/dev/zero of=$file bs="$bytes" count=1 conv=notrunc status=none
    damaged "$file is noise" $file dd if=/dev/urandom of=$file bs="$bytes" count=1 conv=notrunc status=none
    damaged "$file is a folder" $file sh -c "rm $file && mkdir $file"
    damaged "$file is a pipe" $file sh -c "rm $file && mkfifo $file"
    damaged "$file is its own checkpoint's other one" "(index|data_00000).bin" \
        sh -c "cp index.bin i && cp data_00000.bin d && cp $([ $file = index.bin ] && echo d || echo i) $file && rm i d"
done
damaged "data of an older checkpoint" data_00000.bin cp ../step_00000004/data_00000.bin .
damaged "the index of an older checkpoint" "(index.bin|: holds)" cp ../step_00000004/index.bin .
damaged "nothing in the folder" "(index.bin|: no checkpoint)" rm index.bin data_00000.bin

flip() { # FILE BYTE BIT
    local byte
    byte=$(od -An -tu1 -j"$2" -N1 "$1")
    printf "\\x$(printf %02x $((byte ^ 1 << $3)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}
for ((i = 0; i < flips; i++)); do
    if ((i % 2)); then file=index.bin bytes=$index; else file=data_00000.bin bytes=$data; fi
    at=$(((RANDOM * 32768 + RANDOM) % bytes)) bit=$((RANDOM % 8))
    damaged "bit $bit of byte $at of $file is flipped" $file flip $file $at $bit
done

# ----------------------------------------------------------------------------------------------------------
# an index that is wrong although its checksums are right

for fault in $("$forge" 2>&1 | sed 's/.*faults: //'); do
    damaged "forged: $fault" index.bin "$forge" . "$fault"
done

# ----------------------------------------------------------------------------------------------------------
# folders that are not checkpoints of this run

# stale LABEL COMMAND...    runs the command in a copy of `checkpoints`; the run has ended, and must stay as it is
stale() {
    local name=one-stale trouble=
    cp -r one $name
    (cd $name/checkpoints && "${@:2}")
    train $name --resume auto || trouble="cannot be resumed"
    said $name 'after step 6' || trouble="goes on from elsewhere"
    agrees $name one || trouble=$(<$name.compared)
    report "$1" "$trouble" $name
}
wait
stale "a save that was interrupted" cp -r step_00000004 step_00000008.partial
stale "one that was interrupted before its index" sh -c 'mkdir step_00000008.partial && touch step_00000008.partial/data_00000.bin'
stale "a checkpoint that was set aside" cp -r step_00000004 step_00000008.aside
stale "other names" sh -c 'cp -r step_00000006 step_9 && cp -r step_00000006 step_00000009.bak && cp -r step_00000006 old && touch step_00000008'

cp -r one one-empty && mkdir one-empty/checkpoints/step_00000008
survives "an empty folder with the name of a newer one" "(index.bin|: no checkpoint)" one-empty 8

# a damaged checkpoint, and before it one of another run
train second --seed 5
cp -r one one-mixed
rm -r one-mixed/checkpoints/step_00000004
cp -r second/checkpoints/step_00000004 one-mixed/checkpoints
flip one-mixed/checkpoints/step_00000006/data_00000.bin 5000 0
trouble=
train one-mixed --resume auto || trouble="cannot be resumed"
said one-mixed 'passed over: --seed 1337: the checkpoint .*/step_00000004 was made with 5; ' || trouble="the other run's is not named"
said one-mixed 'after step 2' || trouble="does not go on from the run's own"
agrees one-mixed one || trouble=$(<one-mixed.compared)
report "a checkpoint of another run behind a damaged one" "$trouble" one-mixed

# killed NAME OPTIONS...    a run that is killed in its first save, before there is an index
killed() {
    { LD_PRELOAD=$faults FAULT=kill FAULT_AT=2 FAULT_CALLS=create train "$@"; } 2>/dev/null
    [ $? = 137 ]
}

# a new run in the directory of an older one with later checkpoints
train two --steps 8
trouble=
killed two --overwrite || trouble="not killed"
[ -z "$(steps_of two)" ] || trouble="$(steps_of two) of the older run are still there"
train two --resume auto || trouble="cannot be resumed"
agrees two one || trouble=$(<two.compared)
report "checkpoints of an older run in the same directory" "$trouble" two

# a run that is resumed from an earlier step
cp -r one one-back
trouble=
killed one-back --resume one-back/checkpoints/step_00000002 || trouble="not killed"
[ "$(steps_of one-back)" = step_00000002 ] || trouble="$(steps_of one-back) are there"
train one-back --resume auto || trouble="cannot be resumed"
said one-back 'after step 2' || trouble="goes on from elsewhere"
agrees one-back one || trouble=$(<one-back.compared)
report "checkpoints of later steps than the one that a run went on from" "$trouble" one-back

# another model's checkpoint is refused by the option that differs
train other --channels 16 --steps 8
cp -r one one-foreign && cp -r other/checkpoints/step_00000008 one-foreign/checkpoints
trouble=
train one-foreign --resume auto && trouble="is taken"
said one-foreign '^train_gpt: --channels 32: .*step_00000008.* 16' || trouble="is not refused by name"
[ "$(steps_of one-foreign)" = "step_00000002 step_00000004 step_00000006 step_00000008" ] || trouble="leaves $(steps_of one-foreign)"
report "a checkpoint of another model" "$trouble" one-foreign

# no checkpoint is whole: no new run starts in their place
cp -r one one-none
for step in 2 4 6; do truncate -s -1 one-none/checkpoints/step_0000000$step/data_00000.bin; done
trouble=
train one-none --resume auto && trouble="begins anew"
said one-none '^train_gpt: .*step_00000006/data_00000.bin' || trouble="is not refused by name"
[ "$(steps_of one-none)" = "step_00000002 step_00000004 step_00000006" ] || trouble="leaves $(steps_of one-none)"
report "no checkpoint that is whole" "$trouble" one-none

# ----------------------------------------------------------------------------------------------------------
# a disk on which reads fail

cp -r one one-list
LD_PRELOAD=$faults FAULT_CALLS=read FAULT_LIST=$work/reads train one-list --resume auto
calls=$(wc -l <reads)
plan "$calls"
[ "$calls" -ge 5 ] && echo "ok resuming makes $calls reads" || echo "FAILED resuming makes $calls reads"
unread() {
    local name=one-read$1 trouble=
    cp -r one "$name"
    LD_PRELOAD=$faults FAULT_CALLS=read FAULT=EIO FAULT_AT=$1 train "$name" --resume auto || trouble="cannot be resumed"
    said "$name" 'step_0000000.*Input/output error' || trouble="nothing is said"
    agrees "$name" one || trouble=$(<"$name.compared")
    report "read $1 fails" "$trouble" "$name"
}
for ((k = 1; k <= calls; k++)); do at_once unread $k; done
wait

# ----------------------------------------------------------------------------------------------------------
# several ranks: if one finds damage, all pass over the checkpoint

command -v mpirun >/dev/null || { skip "no mpirun here" 8; exit; }
tiny+=(--zero 1)
base=four
train four || echo "FAILED to run four"
swap() { mv "$1" swapped && mv "$2" "$1" && mv swapped "$2"; }
damaged "four ranks: one file is missing" data_00002.bin rm data_00002.bin
damaged "four ranks: two files are swapped" 'data_0000[13].bin' swap data_00001.bin data_00003.bin
damaged "four ranks: a file is another's twice" data_00001.bin cp data_00000.bin data_00001.bin
damaged "four ranks: a file is that of an older checkpoint" data_00003.bin cp ../step_00000004/data_00003.bin .
for file in 0 1 2 3; do
    bytes=$(stat -c %s four/checkpoints/step_00000006/data_0000$file.bin)
    at=$(((RANDOM * 32768 + RANDOM) % bytes)) bit=$((RANDOM % 8))
    damaged "four ranks: bit $bit of byte $at of data_0000$file.bin is flipped" data_0000$file.bin flip data_0000$file.bin $at $bit
done
wait
