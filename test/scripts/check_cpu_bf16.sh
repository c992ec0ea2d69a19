#!/usr/bin/env bash
# Products in bf16 on a CPU (--matmul-dtype bf16): a run's losses stay close to those in fp32, and it has the same bits when
# repeated or resumed; resuming keeps the option or changes it; a processor without such products refuses it, and one with a
# matrix unit takes it by itself.
# suite: test
# needs: cpu-fp32/train_gpt
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 10
cpu=$PWD/build/cpu-fp32/train_gpt
cp test/golden/earlier_run/text_train_*.bin "$work"
cd "$work" || exit 1
export OMP_NUM_THREADS=1
unset ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA

# run NAME OPTIONS...
run() {
    local name=$1
    shift
    "$cpu" train --model tiny --layers 2 --channels 48 --heads 4 --context 32 --vocab-size 320 --document-end 319 \
        --train-data 'text_train_*.bin' --tokenizer none --micro-batch 4 --steps 12 --schedule constant --warmup-steps 2 \
        --learning-rate 3e-3 --run-dir "$name" "$@" >"$name.out" 2>&1
}
losses() { grep -o '"step":[0-9]*,"loss":[^,]*,"grad_norm":[^,]*' "$1/log.jsonl"; }
same() { [ "$(losses "$1" | wc -l)" = 12 ] && cmp <(losses "$1") <(losses "$2"); }
# The mean difference between two runs' losses is not 0, and small compared with the drop of the loss.
beside() {
    paste -d, <(losses "$1") <(losses "$2") | tr ':' ',' | awk -F, '
        { d = $4 - $10; sum += d < 0 ? -d : d; if (NR == 1) first = $4; last = $4 }
        END { print sum / NR, first - last; exit !(NR == 12 && sum > 0 && sum / NR < 0.01 && first - last > 0.1) }'
}
refused() {
    ! DNNL_MAX_CPU_ISA=AVX2 run refused --matmul-dtype bf16 && [ ! -e refused ] &&
        grep -qx 'train_gpt: --matmul-dtype bf16: this processor does not multiply in bf16; use .*, or give --matmul-dtype auto' refused.out
}
goes_on() {
    run half --matmul-dtype bf16 --steps 6 && run half --resume auto && same half bf16
}
changes() {
    run bf16 --resume auto --steps 13 --matmul-dtype fp32 && grep -q 'matmul-dtype fp32: the checkpoint had bf16' bf16.out
}
chosen() {
    run auto && grep -q -- '--matmul-dtype auto: products are in bf16' auto.out && same auto bf16
}
# A machine is measured with the products of training, and a plan for it is one in bf16.
measured() {
    "$cpu" plan --measure bf16.json && "$cpu" plan --measure fp32.json --matmul-dtype fp32 && grep -q '"bf16_products": true' bf16.json &&
        ! grep -q bf16_products fp32.json && "$cpu" plan --model tiny --vocab-size 320 --gpus 1 --machine bf16.json --matmul-dtype bf16
}
# products in bf16 as on a processor that has no matrix unit
dots() {
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 run dots --matmul-dtype bf16 && beside fp32 dots && ! same dots bf16
}
not_chosen() {
    ! grep -q 'products are in bf16' fp32.out && ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 run none &&
        ! grep -q 'products are in bf16' none.out && same none fp32
}

check "refused where there are none" refused
if grep -q avx512_bf16 /proc/cpuinfo; then
    run fp32 --matmul-dtype fp32
    run bf16 --matmul-dtype bf16
    run again --matmul-dtype bf16
    check "shown in the header" grep -q 'matmul-dtype=bf16' bf16.out
    check "beside fp32" beside fp32 bf16
    check "the same bits again" same bf16 again
    check "the same bits from a checkpoint on" goes_on
    check "auto takes fp32 without a matrix unit" not_chosen
    if grep -q amx_bf16 /proc/cpuinfo; then
        check "auto takes bf16 with a matrix unit" chosen
        check "a machine is measured in bf16" measured
        check "beside fp32 with dot products" dots
    else
        skip "no products in bf16 on this processor" 3 "no matrix unit"
    fi
    check "changed when it goes on" changes
else
    skip "no products in bf16 on this processor" 9
fi
