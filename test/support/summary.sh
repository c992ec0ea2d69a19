#!/usr/bin/env bash
# The end of test/run.sh: what failed and how, what was skipped and why, where the time went, and the sums.
#
#   summary.sh RESULTS SECONDS
cd "$1" || exit 1
clock=$2

missing=0
while read -r name; do
    [ -e "${name//\//.}.result" ] || { echo "FAILED $name: could not be run"; missing=$((missing + 1)); }
done <planned
# For each job that failed, the lines of its log that say how: CI often keeps only the end of the output.
while read -r name bad all; do
    echo "FAILED $name: $bad of $all"
    log=${name//\//.}.log
    said=$(grep -aE '^TEST CASE:|ERROR|^ *(values|logged):|^FAILED|exit code|: stuck:|: no case|checks were made' "$log" | uniq | head -n 12)
    printf '%s\n' "${said:-$(tail -n 5 "$log")}" | cut -c1-300 | sed 's/^/    /'
done < <(cat -- *.result 2>/dev/null | awk '$6 > 0 { print $2, $6, $5 + $6 }')

for log in *.failed.log; do [ ! -e "$log" ] || echo "run a second time: ${log%.failed.log}"; done

# Skipped cases are counted by their reasons; CI says which it allows.
forbidden=0
if cat -- *.skipped 2>/dev/null | grep -q .; then
    echo "skipped:"
    cat -- *.skipped | sed 's/: .*//' | sort | uniq -c
    if [ -n "$ALLOWED_SKIPS" ]; then
        cat -- *.skipped | grep -vE "^($ALLOWED_SKIPS)" | sed 's/^/FAILED must not be skipped here: /'
        forbidden=$(cat -- *.skipped | grep -cvE "^($ALLOWED_SKIPS)")
    fi
fi

cat -- *.result *.built 2>/dev/null | awk -v clock="$clock" '
    $1 == "build" { building += $4 } $1 != "build" { running += $4 }
    END { printf "processor minutes: %.1f, of which %.1f compiling and %.1f running; %d:%02d on the clock\n",
                 (building + running) / 60, building / 60, running / 60, clock / 60, clock % 60 }'
echo "the ten that took longest, in processor seconds:"
cat -- *.result *.built 2>/dev/null | sort -k4,4nr | head -n 10 | awk '{ printf "%7.0f  %s %s\n", $4, $1 == "build" ? "compiling" : "running", $2 }'

skipped=$(cat -- *.skipped 2>/dev/null | wc -l)
read -r passed failed < <(cat -- *.result 2>/dev/null | awk '{ good += $5; bad += $6 } END { print good + 0, bad + 0 }')
failed=$((failed + missing + forbidden))
skipped=$((skipped - forbidden))
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ "$passed" -gt 0 ]
