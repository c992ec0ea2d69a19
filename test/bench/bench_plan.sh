#!/usr/bin/env bash
# Planned and measured steps, side by side: a table of twelve layouts on 2, 4 and 8 ranks whose layers sleep, and a table of
# layouts on one and two ranks whose layers compute.
#
#   test/bench/bench_plan.sh BUILD    the folder of a build (make bench-plan passes it)
cd "$(dirname "$0")/../.." || exit 1
. test/support/ranks.sh
export RANKS_TIMEOUT=600
program=$1/bench_plan

# table TITLE    prints the rows that it reads, "NAME PLANNED ms MEASURED ms ERROR%", and a summary of them
table() {
    awk -v title="$1" '
        function size(x) { return x < 0 ? -x : x }
        BEGIN { printf "%-44s %13s %13s %8s\n", title, "planned", "measured", "error" }
        { print; fflush() }
        $(NF - 1) == "ms" && $(NF - 3) == "ms" {
            planned[++n] = $(NF - 4); measured[n] = $(NF - 2); error[n] = size(planned[n] / measured[n] - 1)
            if (!best || planned[n] < planned[best]) best = n
        }
        END {
            if (!n) exit 1
            place = 1
            for (i = 1; i <= n; i++) place += measured[i] < measured[best]
            for (i = 1; i <= n; i++)
                for (j = i; j > 1 && error[j] < error[j - 1]; j--) { t = error[j]; error[j] = error[j - 1]; error[j - 1] = t }
            printf "%-44s median error %.1f%%; the fastest plan is number %d of %d that were measured\n\n", "",
                100 * error[int(n / 2) + 1], place, n
        }'
}

set -o pipefail
for n in 2 4 8; do
    ranks "$n" "$program" sleep || exit 1
done | table "layers that sleep" || exit 1
{ "$program" compute && ranks 2 "$program" compute; } | table "layers that compute"
