# shellcheck shell=bash
# The program that nvcc makes, run without a card (test/nocard/): sourced by check_cuda.sh, which has built it. Losses are compared
# with those of the simulated device, which runs the same kernels from their source, and with those of one rank.

nocard=build/nocard/train_gpt
cpu=build/cpu-fp32/train_gpt
compare=build/cpu-fp32/compare_runs

# Commands that need no device print the same whatever the program was built for, here as on a node without a card.
same_words() {
    local command a b
    local -x NOCARD_GPUS=0
    "$nocard" --help >"$work/help" || return
    for command in $(sed -n 's/^  \([a-z]*\) .*/\1/p' "$work/help"); do
        cmp <("$nocard" "$command" --help 2>&1) <("$cpu" "$command" --help 2>&1) || return
    done
    while read -r line; do
        # shellcheck disable=SC2086  # options are words
        a=$("$nocard" $line 2>&1) b=$("$cpu" $line 2>&1)
        [ -n "$a" ] && [ "$a" = "$b" ] && continue
        printf '%s\n' "$line: differs" "$a" "$b"
        return 1
    done <<'L'
plan --gpus 8 --machine h100 --model gpt2-124M
plan --gpus 64 --machine a100 --model llama3-8B --format json
plan --gpus 8 --machine h200 --model llama3-8B --matmul-dtype fp8 --master-weights off --stochastic-rounding on
plan --gpus 8 --machine h100 --model gpt2-1558M --zero 1 --tp 2 --explain
plan --gpus 8 --machine cpu --model tiny
plan --gpus 8 --model tiny
plan --gpus 1 --machine 4090 --model llama3-8B
train --stepz 3
inspect nowhere
report nowhere
data nowhere
L
}

# run_on PROGRAM RANKS NAME OPTIONS...    three steps of eight short sequences, on any number of ranks
usual=(--model tiny --layers 2 --channels 64 --heads 2 --context 64 --steps 3 --global-batch 512 --micro-batch 2
    --learning-rate 1e-3 --adam-eps 1e-5 --log-every 1 --matmul-tuning off)
run_on() {
    local program=$1 ranks=$2 name=$3 launch=()
    shift 3
    [ "$ranks" = 1 ] || launch=(mpirun "${mpirun_options[@]}" -np "$ranks")
    OMP_NUM_THREADS=1 timeout 1200 "${launch[@]}" "$program" train "${usual[@]}" --train-data "$work/text_train_*.bin" \
        --run-dir "$work/$name" "$@"
}
# same_ledger RANKS OPTIONS...    the calls that a step puts on streams are those of its ledger, one by one, on every rank
same_ledger() {
    local ranks=$1 rank capability=90
    shift
    [ "${NOCARD:-}" != a100 ] || capability=80
    NOCARD_CHECKS=off NOCARD_RECORD=$work/record run_on "$nocard" "$ranks" recorded --overwrite --cuda-graphs off "$@" || return
    for ((rank = 0; rank < ranks; rank++)); do
        build/cpu-fp32/compare_ledger "$work/record.$rank" $capability "$rank" "$ranks" "${usual[@]}" --train-data "$work/text_train_*.bin" \
            --cuda-graphs off "$@" || return
    done
}
losses_of() { "$compare" "$work/$1" "$work/$2" --losses "$3" --weights "$4" --moments "$4"; }
# checked_run NAME RANKS OTHER LIMIT OPTIONS...    it trains, with the losses of the run OTHER to within LIMIT
checked_run() {
    check "trains: $1${5:+ (${*:5})}" run_on "$nocard" "$2" "$1" "${@:5}"
    check "$1 has the losses of $3" losses_of "$1" "$3" "$4" 0.2
}

# Reads lines of RANKS OPTIONS...
same_ledgers() {
    local line
    while read -r line; do
        # shellcheck disable=SC2086  # options are words
        check "${NOCARD:-h100}: a step is what its ledger says: $line" same_ledger $line </dev/null
    done
}

# plant FROM TO    makes a program in which TO replaces FROM in the PTX of all kernels
plant() {
    FROM=$1 TO=$2 perl -pe 's/\Q$ENV{FROM}\E/$ENV{TO} . " " x (length($ENV{FROM}) - length($ENV{TO}))/ge' "$nocard" >"$work/planted_program"
    chmod +x "$work/planted_program"
    ! cmp -s "$nocard" "$work/planted_program"
}
# planted FROM TO WORDS    the changed program ends with an error that has these words
planted() {
    plant "$1" "$2" || return
    ! run_on "$work/planted_program" 1 planted --overwrite --context 512 --global-batch 1024 --steps 1 >"$work/planted.out" 2>&1 || return
    grep "^nocard: .*$3" "$work/planted.out"
}
# planted_numbers FROM TO OPTIONS...    the changed program has other losses, or ends with an error
planted_numbers() {
    plant "$1" "$2" || return
    if run_on "$work/planted_program" 1 planted --overwrite "${@:3}" >"$work/planted.out" 2>&1; then
        ! losses_of planted simt 1e-3
    else
        grep -E '^nocard: |not finite' "$work/planted.out"
    fi
}
checked_numbers() { check "a defect shows: $1 -> ${2:-nothing}" planted_numbers "$@"; }
checked_defect() { check "a defect is named: $1 -> ${2:-nothing}" planted "$@"; }

text_of_numbers() { seq 4000 >"$work/numbers.txt" && "$cpu" tokenize "$work/numbers.txt" --output "$work/text"; }

interpreter_units() {
    local unit
    for unit in machine faults counts triton; do
        make -s --no-print-directory DEVICE=cuda CPU_ARCH=native "build/nocard/test_ptx_$unit" && "build/nocard/test_ptx_$unit" || return
    done
}

options_unit() {
    make -s --no-print-directory DEVICE=cuda CPU_ARCH=native nocard_cards=90a build/nocard/host/test_options &&
        build/nocard/host/test_options --test-suite-exclude=long
}

nocard_checks=26
# The runs of CI: one with Hopper's kernels, captured in graphs, and others that are compared with it.
nocard_runs() {
    check "the interpreter of PTX, by hand-written kernels and Triton's" interpreter_units
    check "commands that need no device say what they say on a CPU" same_words
    check "options, presets and configs, by their unit" options_unit
    check "text to train on" text_of_numbers
    check "the simulated device trains" run_on build/simt-bf16/train_gpt 1 simt
    checked_run one 1 simt 1e-3
    check "the same bits in another order of streams, blocks and copies" eval \
        "NOCARD_SEED=5 run_on $nocard 1 seed && $compare $work/seed $work/one --bitwise"
    checked_run fp8 1 one 5e-3 --matmul-dtype fp8
    checked_run zero 2 one 1e-4 --zero 2 --recompute block --cuda-graphs off
    checked_run cut 4 one 1e-3 --tp 2 --pp 2
    same_ledgers <<'L'
1 --recompute none
2 --recompute block --zero 3
4 --recompute none --tp 2 --pp 2
L
    check "saves" run_on "$nocard" 1 whole --save-every 2 --keep 0
    rm -rf "$work/whole/checkpoints/step_00000003"
    check "resumes in another layout" run_on "$nocard" 2 whole --save-every 2 --keep 0 --resume auto --zero 3
    check "with the losses of a run that was not interrupted" losses_of whole one 1e-4 0.2
    check "samples" "$nocard" sample "$work/one" --tokens 8 --prompt "the "
    check "samples on two ranks" ranks 2 "$nocard" sample "$work/one" --tokens 4 --tp 2 --prompt "the " --prompt a
    check "evaluates" "$nocard" eval "$work/one" --data "$work/text_train_*.bin" --limit 2
    checked_defect 'wgmma.wait_group.sync.aligned 0;' 'wgmma.wait_group.sync.aligned 1;' 'product'
    checked_defect 'cp.async.bulk.wait_group.read 0;' 'cp.async.bulk.wait_group.read 1;' 'bulk store'
    checked_defect 'fence.proxy.async.shared::cta;' '' 'no fence.proxy.async since'
}

nocard_soak_checks=157
# The runs of `make soak`: an Ampere card too, every recomputation and optimizer, shapes of other models, schedules. The
# program's own test of a card is left to real cards: its products and its memory are too large here.
nocard_soak() {
    local card
    for card in h100 a100; do
        export NOCARD=$card
        checked_run "$card-one" 1 one 1e-3
        checked_run "$card-plain" 1 "$card-one" 1e-5 --cuda-graphs off
        for recompute in none elementwise mlp block; do
            checked_run "$card-$recompute" 1 "$card-one" 1e-5 --recompute $recompute
        done
        checked_run "$card-offload" 1 "$card-one" 1e-5 --offload optimizer
        for optimizer in lamb muon; do
            check "$card: $optimizer in one rank" run_on "$nocard" 1 "$card-$optimizer" --optimizer $optimizer
            checked_run "$card-$optimizer-2" 2 "$card-$optimizer" 1e-3 --optimizer $optimizer --zero 3
        done
        checked_run "$card-zero3" 2 "$card-one" 1e-4 --zero 3 --prefetch 2
        check "$card: four layers in one rank" run_on "$nocard" 1 "$card-four" --layers 4
        checked_run "$card-interleaved" 2 "$card-four" 1e-4 --layers 4 --pp 2 --pp-schedule interleaved --pp-chunks 2 --micro-batch 1
        for schedule in gpipe 1f1b; do
            checked_run "$card-$schedule" 2 "$card-one" 1e-4 --pp 2 --pp-schedule $schedule --micro-batch 1
        done
        checked_run "$card-bubble" 2 "$card-one" 1e-4 --pp 2 --pp-schedule zero-bubble --micro-batch 1
        checked_run "$card-eight" 8 "$card-one" 1e-3 --tp 2 --pp 2 --zero 1 --micro-batch 1
        local tables=(--ngram 2,3 --ngram-rows 301 --ngram-width 16)
        check "$card: long sequences in one rank" run_on "$nocard" 1 "$card-long" --context 256 --micro-batch 1
        checked_run "$card-contexts" 2 "$card-long" 1e-3 --context 256 --micro-batch 1 --cp 2 --zero 1
        check "$card: n-gram memory" run_on "$nocard" 1 "$card-tables" "${tables[@]}"
        checked_run "$card-tables-2" 2 "$card-tables" 1e-4 "${tables[@]}" --ngram-place host --zero 1
        check "$card: local filter" run_on "$nocard" 1 "$card-filter" --local-filter on
        check "$card: a GPT-2's block" run_on "$nocard" 1 "$card-gpt2" --norm layernorm --position learned --mlp gelu --bias on
        check "$card: a Qwen3's block" run_on "$nocard" 1 "$card-qwen3" --head-size 64 --kv-heads 1 --qk-norm on
        check "$card: documents" run_on "$nocard" 1 "$card-documents" --document-end 10
        check "$card: windows, one key head, heads of 128" run_on "$nocard" 1 "$card-heads" --channels 256 --kv-heads 1 --window 20
        check "$card: products are timed" run_on "$nocard" 1 "$card-tuned" --matmul-tuning on
        check "$card evaluates" "$nocard" eval "$work/one" --data "$work/text_train_*.bin" --limit 2
        check "$card evaluates on two ranks" ranks 2 "$nocard" eval "$work/one" --data "$work/text_train_*.bin" --limit 4 --tp 2
        same_ledgers <<'L'
1 --recompute elementwise
1 --recompute block --norm layernorm --position learned --mlp gelu --bias on
1 --recompute mlp --local-filter on --window-pattern 1:1 --window 32
1 --recompute none --optimizer muon
2 --recompute none --zero 2
2 --recompute elementwise --zero 3 --prefetch 2
2 --recompute none --zero 1 --offload optimizer
2 --recompute none --zero 2 --overlap off
2 --recompute none --zero 1 --optimizer lamb
4 --recompute none --zero 2 --shard-group 2 --reduce-dtype bf16
2 --recompute none --layers 4 --pp 2 --pp-schedule interleaved
2 --recompute elementwise --layers 4 --pp 2 --pp-schedule zero-bubble
2 --recompute none --tp 2 --block parallel --qk-norm on --kv-heads 1
4 --recompute none --tp 2 --pp 2
4 --recompute mlp --tp 2 --zero 1 --optimizer muon
4 --recompute block --cp 2 --tp 2 --context 256 --global-batch 512 --micro-batch 1 --local-filter on
4 --recompute none --cp 4 --context 512 --global-batch 512 --micro-batch 1 --window 60 --qk-norm on --zero 3
1 --recompute none --context 320 --channels 192 --global-batch 640
1 --recompute block --context 320 --channels 80 --global-batch 640 --window 100 --bias on --mlp gelu --norm layernorm
1 --recompute none --context 160 --channels 384 --kv-heads 1 --global-batch 640
1 --recompute none --ngram 2,3 --ngram-rows 301 --ngram-width 16
2 --recompute none --ngram 2,3 --ngram-rows 301 --ngram-width 16 --zero 1
2 --recompute block --ngram 2,3 --ngram-rows 301 --ngram-width 16 --ngram-place host --tp 2
L
    done
    unset NOCARD
    checked_run h100-contexts-fp8 2 h100-long 5e-3 --context 256 --micro-batch 1 --cp 2 --zero 1 --matmul-dtype fp8
    checked_defect 'wgmma.fence.sync.aligned;' '' 'no wgmma.fence since'
    checked_defect 'fence.acq_rel.gpu;' '' 'race'
    checked_defect 'st.release.gpu.global.u32' 'st.relaxed.gpu.global.u32' 'race'
    checked_defect 'cp.async.bulk.wait_group 0;' 'cp.async.bulk.wait_group 1;' 'race'
    checked_defect 'bar.sync 0;' '' 'race'
    checked_defect 'fence.proxy.async.global;' '' 'race|fence.proxy.async.global'
    checked_numbers ', p, 1, 1, 1, 1;' ', p, 1, 1, 0, 1;'
    checked_numbers 'setp.ne.b32 p,' 'setp.eq.b32 p,'
    checked_numbers 'm64n64k16.f32.bf16.bf16' 'm64n64k16.f32.f16.f16'
    checked_numbers 'setmaxnreg.inc.sync.aligned.u32 232;' 'setmaxnreg.inc.sync.aligned.u32 248;'
    checked_numbers 'fence.mbarrier_init.release.cluster;' ''
    checked_numbers 'ex2.approx.ftz.f32' 'lg2.approx.ftz.f32'
    checked_numbers 'x4.trans.shared.b16' 'x4.shared.b16' --attention mma
    checked_numbers 'cp.async.wait_group 0;' 'cp.async.wait_group 1;' --attention mma
    checked_numbers 'row.col.f32.bf16.bf16.f32' 'row.col.f32.f16.f16.f32' --attention mma
}
