#!/usr/bin/env bash
# `train_gpt launch`: jobs that end in each possible way, a job whose supervisor ends, and hosts that fail. Jobs that train on
# are compared with an undisturbed run.
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs cpu-fp32/fault_injection.so
# waits: yes
# seconds: 75
# limit: 3600
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
. test/support/text.sh
. test/support/jobs.sh
. test/support/launches.sh
plan 46
cpu=$PWD/build/cpu-fp32/train_gpt compare=$PWD/build/cpu-fp32/compare_runs faults=$PWD/build/cpu-fp32/fault_injection.so
command -v mpirun >/dev/null || { skip "no mpirun here" 46; exit; }
at_end() {
    local out
    for out in "$work"/*.out; do
        # shellcheck disable=SC2046  # a list of numbers
        kill -9 $(pgrep -f "^$cpu .*--run-dir $work/$(basename "$out" .out)( |\$)") 2>/dev/null
    done
    kill_all
}
cd "$work" || exit 1
export OMP_NUM_THREADS=1
"$cpu" tokenize "$text" --output text >tokenize.out || echo "FAILED tokenize"
# Losses of two layouts agree to 1e-5 only while training is smooth: at three times this rate the loss jumps on some
# texts, and the jump makes differences of the last bit a thousand times larger.
tiny=(train --model tiny --layers 1 --channels 32 --heads 2 --mlp-width 48 --context 48 --micro-batch 1 --global-batch 192
    --warmup-steps 0 --learning-rate 3e-4 --log-every 100000 --train-data "$work/text_train_*.bin")
steps=200
job=("${tiny[@]}" --steps $steps --save-every 20)
restart=(--backoff 0.1 --grace 2)
slow=(--throttle-link 0.005) # several ranks: about 20 ms a step, during which processors are mostly idle
two=(--ranks 2 --launcher "$on_one_machine" "${restart[@]}")
agrees() { "$compare" "$1" "$2" --bitwise; }
ranks 2 "$cpu" "${job[@]}" --run-dir plain >plain.out 2>&1 || echo "FAILED to run plain"

# ----------------------------------------------------------------------------------------------------------
# refusals at once, in one line

refused() { # WORDS OPTIONS...
    "$cpu" launch "${@:2}" >refused.out 2>refused.err </dev/null
    [ $? = 1 ] && one_line refused && grep -qE "^train_gpt: .*$1.*; " refused.err && [ ! -e refused ]
}
printf 'alpha slots=2\nalpha slots=2\n' >twice
check "no job" refused 'no job' --ranks 2
check "no run directory" refused '--run-dir: missing' -- "${tiny[@]}"
check "a host twice" refused 'twice: line 2: alpha appears twice' --hosts twice -- "${tiny[@]}" --run-dir refused
check "ranks that do not divide" refused '--ranks 3: --tp 2' --ranks 3 -- "${tiny[@]}" --tp 2 --run-dir refused
check "help teaches" eval "'$cpu' launch --help | grep -q 'a host that fails its check'"

# ----------------------------------------------------------------------------------------------------------
# how a job ends, and what the supervisor does

launch killed "${two[@]}" --on-event 'cat >>killed.events; echo no mail here >&2; exit 3' -- "${job[@]}" "${slow[@]}" --max-time 1h
wait_for 60 is_past killed 50
kill -9 "$(ranks_of killed | tail -1)"
check "a job of which a rank is killed is started again" eval 'launched killed 60 && [ $code = 0 ] && [ "$(starts_of killed)" = 2 ]'
check "and ends with the bits of a run without failures" agrees killed plain
check "and has the time that is left" grep -qE '^launch  *start 2: .* --max-time 3[45][0-9][0-9]( |$)' killed.out
check "the incident is told" grep -qE '^\{"time":"[^"]*","what":".*","who":".*","then":"started again","step":[0-9]+,"lost_steps":[0-9]+,"since":[0-9.e+]+,"seconds":[0-9.]+\}$' killed/incidents.jsonl
check "once, and to --on-event with the end" eval '[ "$(wc -l <killed/incidents.jsonl)" = 1 ] && wait_for 5 eval "[ \$(grep -c event killed.events) = 2 ]" && grep -q "\"event\":\"failure\"" killed.events && grep -q "\"what\":\"done\"" killed.events'
check "a command of --on-event that fails is reported, with its last words" eval 'grep -q "^launch  *--on-event ended with exit code 3: no mail here$" killed.out && grep -q "; --on-event ended with exit code 3: no mail here\"" killed/incidents.jsonl'
check "the share of the time that trained is told" eval "grep -qE '^launch  *done; [0-9.]+% of .* in training' killed.out && grep -qE '\"effective_training_time\": 0\.[0-9]' killed/supervisor.json"
check "a report has the incident, and the share" eval "'$cpu' report killed --output killed.html && grep -q '\"started again\"' killed.html && grep -qE '\"effective training time\",\"[0-9.]+% of ' killed.html"

launch limited "${restart[@]}" -- "${tiny[@]}" --steps 100000000 --max-time 1
check "a job whose time is over is done" eval 'launched limited 60 && [ $code = 0 ] && [ "$(starts_of limited)" = 1 ] && grep -q "^launch  *done" limited.out && grep -q "stopped as asked" limited.out'

launch wrong "${restart[@]}" -- "${job[@]/text_train_*.bin/nothing_*.bin}"
check "a user's error is not tried again" eval 'launched wrong 240 && [ $code = 1 ] && [ "$(starts_of wrong)" = 1 ] && grep -q "given up: its input has to be changed: .*nothing_" wrong.out'
launch refusing --ranks 2 --launcher "$on_one_machine --no-such-option" "${restart[@]}" -- "${job[@]}"
check "nor a launcher that starts no rank, whose words are told" eval 'launched refusing 240 && [ $code = 1 ] && [ "$(starts_of refusing)" = 1 ] && grep -q "ended with exit code .*no-such-option" refusing.out && grep -q "no-such-option" refusing/incidents.jsonl'
printf 'here slots=1\nthere slots=1\n' >unheard.hosts
launch unheard --hosts unheard.hosts --launcher "$on_one_machine --no-such-option" "${restart[@]}" -- "${job[@]}"
check "nor one that starts nothing on any host" eval 'launched unheard 240 && [ $code = 1 ] && [ "$(starts_of unheard)" = 0 ] && grep -q "given up: no host is left for 1 rank; here: .*no-such-option" unheard.out && grep -q "no-such-option" unheard/incidents.jsonl'
if [ "$(id -u)" = 0 ]; then
    (unset OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM && export container=test &&
        exec "$cpu" launch --ranks 2 --launcher mpirun\ --oversubscribe "${restart[@]}" -- "${job[@]}" --steps 3 --run-dir "$work/root" >root.out 2>&1)
    check "root in a container is what mpirun is told" eval '[ $? = 0 ] && grep -q "^launch  *done" root.out'
else
    skip "only root is refused by mpirun" 1
fi
launch diverged "${restart[@]}" -- "${job[@]}" --learning-rate 10 --weight-decay 1 --schedule constant --steps 5000
check "numbers that are not finite are tried once more" eval 'launched diverged 240 && [ $code = 70 ] && [ "$(starts_of diverged)" = 2 ]'
check "with the reason" grep -q 'given up: numbers were not finite again by step' diverged.out
# Ten products a sequence are 5120 a step: the fault strikes in the middle of the second step, long after the first was logged.
FAULT=kill FAULT_CALLS=product FAULT_AT=7680 LD_PRELOAD=$faults launch alike "${restart[@]}" -- "${job[@]}" --save-every 0 --global-batch 24576
check "a step that fails twice in the same way ends it" eval 'launched alike 240 && [ $code = 75 ] && [ "$(starts_of alike)" = 2 ] && grep -qE "given up: step 2 failed twice in the same way" alike.out'
FAULT=kill FAULT_CALLS=init FAULT_AT=1 LD_PRELOAD=$faults launch never "${two[@]}" -- "${job[@]}"
check "so do two restarts without progress" eval 'launched never 240 && [ $code = 75 ] && [ "$(starts_of never)" = 3 ] && grep -q "given up: 2 restarts made no progress" never.out'

launch stuck "${two[@]}" --hang-timeout 2 -- "${job[@]}" "${slow[@]}"
wait_for 60 is_past stuck 30
kill -STOP "$(ranks_of stuck | tail -1)"
check "a job that makes no progress is ended and started again" eval 'launched stuck 60 && [ $code = 0 ] && [ "$(starts_of stuck)" = 2 ] && grep -q "no progress for .* rank [01] " stuck.out && grep -q "\"who\":\"rank [01] on" stuck/incidents.jsonl'
check "with the bits of a run without failures" agrees stuck plain

# ----------------------------------------------------------------------------------------------------------
# a supervisor that is asked to stop, or killed

for signal in INT TERM; do
    launch asked$signal "${two[@]}" -- "${tiny[@]}" "${slow[@]}" --steps 100000
    wait_for 60 is_past asked$signal 10
    kill -$signal "$supervisor"
    check "SIG$signal makes the job save, and is the end" eval "launched asked$signal 30 && [ \$code = 0 ] && [ \"\$(starts_of asked$signal)\" = 1 ] && grep -q 'stopped as asked' asked$signal.out && '$cpu' sample asked$signal --tokens 1"
    check "nothing is left of it" wait_for 5 eval "! ranks_of asked$signal"
done
FAULT=stall FAULT_SECONDS=4 FAULT_CALLS=sync FAULT_AT=1 LD_PRELOAD=$faults launch everywhere "${two[@]}" -- "${tiny[@]}" "${slow[@]}" --steps 100000
wait_for 60 is_past everywhere 10
# shellcheck disable=SC2046  # a list of numbers
kill -TERM "$supervisor" "$(launcher_of everywhere)" $(ranks_of everywhere)
check "SIGTERM to all processes leaves time for a long save" eval "launched everywhere 240 && [ \$code = 0 ] && grep -q 'stopped as asked' everywhere.out && '$cpu' sample everywhere --tokens 1"
launch alone "${two[@]}" -- "${tiny[@]}" "${slow[@]}" --steps 100000
wait_for 60 is_past alone 10
kill -TERM "$(launcher_of alone)"
check "SIGTERM to mpirun alone makes the job save and end" eval "launched alone 240 && [ \$code = 0 ] && [ \"\$(starts_of alone)\" = 1 ] && '$cpu' sample alone --tokens 1"
launch orphan "${two[@]}" -- "${job[@]}" "${slow[@]}"
wait_for 60 is_past orphan 30
check "there is one supervisor to a run" eval '! "$cpu" launch "${two[@]}" -- "${job[@]}" --run-dir "$work/orphan" 2>second.err && grep -q "another supervisor manages this run" second.err'
kill -9 "$supervisor"
wait "$supervisor" 2>/dev/null
seen=$(last_step orphan)
check "a job trains on without its supervisor" wait_for 20 is_past orphan "$seen"
launch orphan "${two[@]}" -- "${job[@]}" "${slow[@]}"
check "which takes it up again" eval 'launched orphan 60 && [ $code = 0 ] && [ "$(starts_of orphan)" = 1 ] && grep -qE "takes over start 1, process [0-9]+" orphan.out'
check "with the bits of a run without failures, as ever" agrees orphan plain
launch power "${two[@]}" -- "${job[@]}" "${slow[@]}"
wait_for 60 is_past power 30
{ pkill -9 -f -- "$work/power"; wait "$supervisor"; } 2>/dev/null
launch power "${two[@]}" -- "${job[@]}" "${slow[@]}"
check "a job that ended with its supervisor and its keeper is started again" eval 'launched power 60 && [ $code = 0 ] && grep -q "its keeper ended too" power.out && agrees power plain'
launch orphan "${two[@]}" -- "${job[@]}" "${slow[@]}"
check "a run that is done is done at once" eval 'launched orphan 30 && [ $code = 0 ] && agrees orphan plain'

# ----------------------------------------------------------------------------------------------------------
# hosts

printf 'alpha slots=2\nbeta slots=2\ngamma slots=2  # waits\n' >hosts
four=(--launcher "$on_hosts" --check-timeout 30 "${restart[@]}")
ranks 4 "$cpu" "${job[@]}" --run-dir plain4 >plain4.out 2>&1 || echo "FAILED to run plain4"

launch spare --hosts hosts --ranks 4 --spares 1 "${four[@]}" -- "${job[@]}" "${slow[@]}"
wait_for 60 is_past spare 30
check "ranks are on the first hosts" eval '[ -s hosts.d/alpha.pids ] && [ -s hosts.d/beta.pids ]'
host_down beta
check "a host that is lost is replaced by a spare" eval 'launched spare 60 && [ $code = 0 ] && [ "$(starts_of spare)" = 2 ]'
check "and named" eval "grep -q 'beta is put aside' spare.out && grep -q '\"who\":\"[^\"]*beta\"' spare/incidents.jsonl"
check "with the bits of a run without failures, for the layout stayed" agrees spare plain4
host_up beta

printf 'alpha slots=2\nbeta slots=2\n' >hosts
launch fewer --hosts hosts "${four[@]}" -- "${job[@]}" "${slow[@]}"
wait_for 60 is_past fewer 30
host_down beta
check "without a spare fewer ranks go on" eval 'launched fewer 60 && [ $code = 0 ] && grep -q "continues with 2 of 4 ranks, on alpha" fewer.out'
check "with the losses of a run without failures" same_losses fewer plain4
touch hosts.d/alpha.down
launch none --hosts hosts "${four[@]}" -- "${job[@]}"
check "without any host it is given up" eval 'launched none 30 && [ $code = 75 ] && grep -q "given up: no host is left" none.out'
rm hosts.d/*.down

touch hosts.d/beta.apart hosts.d/alpha.once
launch apart --hosts hosts "${four[@]}" -- "${tiny[@]}" --steps 5
check "a host that does not share the run's directory is named at the start" eval 'launched apart 60 && [ $code = 0 ] && [ "$(grep -c "is not shared with beta: hangs are detected" apart.out)" = 1 ]'
check "a host on which the launcher fails once is not put aside" eval '[ ! -e hosts.d/alpha.once ] && ! grep -q "put aside" apart.out'
rm hosts.d/beta.apart

launch tested --hosts hosts --selftest on "${four[@]}" -- "${tiny[@]}" --steps 5
check "hosts test themselves before the job starts" eval 'launched tested 90 && [ $code = 0 ] && grep -q "each host tests itself" tested.out && ! grep -q "put aside" tested.out'
