#!/usr/bin/env bash
# Measures the cost of recording when a device does what: pairs of runs with --timings on and off, in alternating order.
# Prints the ratio of the median steps of each pair, then the median of these ratios.
#
#   bench_timings.sh BUILD [PAIRS [OPTIONS OF TRAIN...]]    defaults: 20 pairs, of the tiny model
cd "$(dirname "$0")/../.." || exit 1
program=$1/train_gpt pairs=${2:-20}
shift 2 2>/dev/null || shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$program" tokenize kernels --output "$work/text" --val-fraction 0 >/dev/null || exit 1

# median_ms NAME    prints the median milliseconds of a run's steps, without the first five
median_ms() {
    sed -nE 's/.*"loss":.*"ms":([0-9.]+).*/\1/p' "$work/$1/log.jsonl" | tail -n +6 | sort -n |
        awk '{ ms[NR] = $1 } END { print ms[int((NR + 1) / 2)] }'
}

for ((i = 1; i <= pairs; i++)); do
    modes=(on off)
    ((i % 2)) && modes=(off on)
    for mode in "${modes[@]}"; do
        "$program" train --train-data "$work/text_train_*.bin" --steps 40 --save-every 0 --log-every 100 --run-dir "$work/$mode" \
            --overwrite --timings $mode "$@" >"$work/$mode.out" 2>&1 || { cat "$work/$mode.out"; exit 1; }
    done
    echo "$(median_ms on) $(median_ms off)" | awk -v i=$i '{ printf "pair %2d: %8.3f ms with, %8.3f ms without: %.4f\n", i, $1, $2, $1 / $2 }'
done | tee "$work/pairs"
grep -h '^timings' "$work/on.out"
awk '{ print $NF }' "$work/pairs" | sort -n |
    awk '{ r[NR] = $1 } END { m = NR % 2 ? r[(NR + 1) / 2] : (r[NR / 2] + r[NR / 2 + 1]) / 2; printf "median ratio %.4f: recording costs %.2f%%\n", m, 100 * (m - 1) }'
