#!/usr/bin/env bash
# The source as its readers find it: formatted, within 110 columns, in rooms whose arrows point down, and with pages
# that name targets there are.
# suite: test
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 11

sources=$(git ls-files -co --exclude-standard '*.cu' '*.cuh' '*.h' '*.cc')
formatted() { clang-format --dry-run -Werror $sources 2>&1 | grep -E 'error' | head -5; [ "${PIPESTATUS[0]}" = 0 ]; }
# the JSON in these two is as others wrote it
narrow() { ! grep -nE '^.{111,}' $(grep -vE 'hf_configs|fuzz_json' <<<"$sources"); }

# The rooms of the program, from the ground up: the lines of code (no blanks, no comments) that each may have, and the
# rooms that its files may include. A number that is raised, or an arrow that is added, takes a reason in its commit.
rooms='
kernels         7449
data/base       1685  kernels
data/options    2595  data/base
data/tokenizer  2650  data/base data/options
data/tokens     1303  data/base data/tokenizer kernels
data/text       1020  data/base data/options data/tokenizer data/tokens kernels
data/checkpoint 1012  data/base
data/run        1859  data/base data/checkpoint data/options data/tokens
data/report     1377  data/base data/options data/run
data/exchange   2294  data/base data/checkpoint data/options data/run data/tokenizer
data/launch      749  data/base data/checkpoint data/exchange data/options data/run data/tokenizer
data/supervisor 1843  data/base data/checkpoint data/launch data/options data/run
data/commands   1416  data/base data/checkpoint data/exchange data/launch data/options data/report data/run data/supervisor data/text data/tokenizer data/tokens kernels
comm            14004  data/base data/checkpoint data/launch data/options data/run data/tokenizer data/tokens kernels
train_gpt.cu    1072  comm data/base data/commands data/run data/tokens kernels
'
files=$(git ls-files -co --exclude-standard train_gpt.cu comm data kernels | sort -u | grep -vE '\.(html|png|md)$' | while read -r file; do [ -f "$file" ] && echo "$file"; done)
# "FILE INCLUDED" for each file of the program that one of them includes
includes=$(grep -HoE '^ *# *include "(comm|data|kernels)/[^"]+"' $files | sed -E 's/: *# *include "/ /; s/"$//')
room_of='function room(path, part) { split(path, part, "/"); return part[1] == "data" ? part[1] "/" part[2] : part[1] }'
lines_of_code() {
    awk "$room_of"'
        NR == FNR { if (NF) most[$1] = $2; next }
        FNR == 1 { comment = 0 }
        /^\/\*/ { comment = 1 }
        !comment && NF && !/^ *\/\// { lines[room(FILENAME)]++ }
        /\*\/ *$/ { comment = 0 }
        END {
            for (name in lines) {
                if (lines[name] <= most[name]) continue
                printf "%s: %d lines of code, and %d are allowed\n", name, lines[name], most[name]
                bad = 1
            }
            exit bad
        }' <(echo "$rooms") $files
}
arrows() {
    awk "$room_of"'
        NR == FNR { for (i = 3; i <= NF; i++) may[$1, $i] = 1; next }
        { from = room($1); to = room($2) }
        from != to && !may[from, to] { print $1 ": includes " $2 ", which " from " may not"; bad = 1 }
        END { exit bad }' <(echo "$rooms") <(echo "$includes")
}
# a ladder: each room stands above those that it includes
ladder() {
    awk '{ for (i = 3; i <= NF; i++) if (!seen[$i]) { print $1 ": above it stands " $i; bad = 1 } seen[$1] = 1 }
        END { exit bad }' <<<"$rooms"
}
no_rings() { ! tsort <<<"$includes" 2>&1 >/dev/null | grep .; }

# The page of a report and its script stay as small as one person reads.
page() { [ "$(wc -l <data/report/page.html)" -le 700 ]; }

# A comment is a sentence, or a noun phrase: few begin with one of these words, which promise a subject and bring none.
subjects() {
    awk 'FNR == 1 { in_comment = 0 }
        {
            begins = /^ *(\/\/|\/\*|#)/
            if (begins ? !in_comment : /[;,{}()] *\/\//) {
                words = tolower($0)
                if (begins) sub(/^ *[\/*#]+ */, "", words); else sub(/.*\/\/ */, "", words)
                if (words ~ /^(what|of|whether|that|where|from|with|as|the same)[ ,:]/) lines[++n] = FILENAME ":" FNR ": " words
            }
            in_comment = begins && !/^ *(\/\/|#) ?--/
        }
        END { if (n >= 20) for (i = 1; i <= n; i++) print lines[i]; exit n >= 20 }' \
        $sources $(git ls-files '*.sh' '*.mk' '*.py' Makefile .ci/run)
}

targets() {
    local target rc=0
    for target in $(git ls-files -co --exclude-standard '*.md' | xargs grep -ohE '(`|^)make [a-z][a-z-]+' | awk '{print $2}' | sort -u); do
        cat Makefile test/tests.mk | grep -qE "^([a-z-]+ )*$target( [a-z-]+)*:" || { echo "make $target: no such target"; rc=1; }
    done
    return $rc
}
short() { [ "$(wc -c <README.md)" -le 12288 ] || { echo "README.md: $(wc -c <README.md) bytes; what is no task of its readers belongs to the page of a folder"; return 1; }; }

if command -v clang-format >/dev/null; then check "formatted" formatted; else skip "no clang-format here" 1; fi
check "within 110 columns" narrow
check "lines of code in each room" lines_of_code
check "arrows between rooms" arrows
check "arrows point down" ladder
check "no file includes its includer" no_rings
check "at most 700 lines in the page of a report" page
check "comments have subjects" subjects
check "targets that pages name" targets
check "at most 12 KB in the first page" short
few_unsteady() { [ "$(grep -c '^| check_\|^| [a-z0-9-]*/' test/unsteady.md)" -le 3 ]; }
check "at most three unsteady tests" few_unsteady
