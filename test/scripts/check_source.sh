#!/usr/bin/env bash
# The source as its readers find it: formatted, within 110 columns, in rooms (folders) whose arrows (includes) point down, and
# pages that name only existing targets.
# suite: test
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 15

sources=$(git ls-files -co --exclude-standard '*.cu' '*.cuh' '*.h' '*.cc')
formatted() { clang-format --dry-run -Werror $sources 2>&1 | grep -E 'error' | head -5; [ "${PIPESTATUS[0]}" = 0 ]; }
# these two files contain JSON from elsewhere, which is kept as it was written
narrow() { ! grep -nE '^.{111,}' $(grep -vE 'hf_configs|fuzz_json' <<<"$sources"); }

# The rooms of the program, from the ground up, each with the rooms that its files may include. A new arrow needs a reason in
# its commit.
rooms='
kernels
data/base       kernels
data/options    data/base
data/tokenizer  data/base data/options
data/tokens     data/base data/options data/tokenizer kernels
data/text       data/base data/options data/tokenizer data/tokens kernels
data/checkpoint data/base
data/tables    data/base
data/run        data/base data/checkpoint data/options data/tokens kernels
data/report     data/base data/options data/run
data/exchange   data/base data/checkpoint data/options data/run data/tokenizer
data/launch     data/base data/checkpoint data/exchange data/options data/run data/tokenizer
data/supervisor data/base data/checkpoint data/launch data/options data/run
data/commands   data/base data/checkpoint data/exchange data/launch data/options data/report data/run data/supervisor data/text data/tokenizer data/tokens kernels
comm            data/base data/checkpoint data/commands data/launch data/options data/run data/tables data/tokenizer data/tokens kernels
train_gpt.cu    comm data/base data/commands data/run data/tokens kernels
'
# The most lines of code (no blanks, no comments) in all rooms. Raising it needs a reason in the commit, too.
most=48384
files=$(git ls-files -co --exclude-standard train_gpt.cu comm data kernels | sort -u | grep -vE '\.(html|png|md)$' | while read -r file; do [ -f "$file" ] && echo "$file"; done)
# "FILE INCLUDED" for each file of the program that one of them includes
includes=$(grep -HoE '^ *# *include "(comm|data|kernels)/[^"]+"' $files | sed -E 's/: *# *include "/ /; s/"$//')
room_of='function room(path, part) { split(path, part, "/"); return part[1] == "data" ? part[1] "/" part[2] : part[1] }'
lines=$(awk '
    FNR == 1 { comment = 0 }
    /^\/\*/ { comment = 1 }
    !comment && NF && !/^ *\/\// { lines++ }
    /\*\/ *$/ { comment = 0 }
    END { print lines }' $files data/report/page.html)
arrows() {
    awk "$room_of"'
        NR == FNR { for (i = 2; i <= NF; i++) may[$1, $i] = 1; next }
        { from = room($1); to = room($2) }
        from != to && !may[from, to] { print $1 ": includes " $2 ", which " from " may not"; bad = 1 }
        END { exit bad }' <(echo "$rooms") <(echo "$includes")
}
# a ladder: each room is listed after those that it includes
ladder() {
    awk '{ for (i = 2; i <= NF; i++) if (!seen[$i]) { print $1 ": above it stands " $i; bad = 1 } seen[$1] = 1 }
        END { exit bad }' <<<"$rooms"
}
# The rest of comm/ includes only one file of the planner.
door() { ! awk '$1 ~ /^comm\// && $1 !~ /^comm\/plan_/ && $2 ~ /^comm\/plan_/ && $2 != "comm/plan_choice.h"' <<<"$includes" | grep .; }
no_rings() { ! tsort <<<"$includes" 2>&1 >/dev/null | grep .; }

# The page of comm/ lists each of its files once, after all files that it includes; no file is more than 12 includes from the ground.
index() {
    awk 'NR == FNR { if (split($2, part, "/") == 2 && part[1] == "comm" && $1 ~ /^comm\//) includes[$1] = includes[$1] " " part[2]; next }
        FNR == 1 { source++ }
        source == 1 { there[$1]; next }
        /^## / { ours = /What is in comm/ } /^```/ { block = !block }
        ours && block {
            while (match($0, /[a-z_0-9]+\.h/)) {
                name = substr($0, RSTART, RLENGTH); $0 = substr($0, RSTART + RLENGTH)
                if (seen[name]++ || !(("comm/" name) in there)) { print name ": twice, or no such file"; bad = 1 }
                n = split(includes["comm/" name], words, " ")
                for (i = 1; i <= n; i++) {
                    if (!seen[words[i]]) { print name ": stands before " words[i] ", which it includes"; bad = 1 }
                    if (depth[words[i]] > depth[name]) depth[name] = depth[words[i]]
                }
                if (++depth[name] > 12) { print name ": " depth[name] " includes from the ground"; bad = 1 }
            }
        }
        END { for (file in there) if (!seen[substr(file, 6)]) { print file ": is not there"; bad = 1 } exit bad }' \
        <(echo "$includes") <(ls comm/*.h) comm/README.md
}

# The page of a report and its script stay short enough for one person to read.
page() { [ "$(wc -l <data/report/page.html)" -le 700 ]; }

# A comment is a sentence, or a noun phrase: fewer than 20 begin with one of these words, which promise a subject and give none.
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

# One word for one thing: the field's terms (many are in the glossary of comm/STEP.md) replace these names.
given_up='largest_element|LargestElement|TapRows|keep_taps|MatrixHomes|HomedMatrix|HeldAlike|GivesWork|Occupied|RecordedTogether'
given_up+='|RecordedOnHost|NotRecorded|gather_again|gathered_again|spoil_loss|know_stream_gradient|activation_again|take_numbers'
given_up+='|TextWriter|write_texts|PipelineRoom|MemoryRoom|has_twin|StepParts|PlannedCut|LayoutChoice'
words() { ! grep -nwE "$given_up" $sources comm/*.md kernels/README.md data/README.md; }

# CUDA's calls for copies, fills and events appear only in streams.cuh, through which the model makes them, in host_*.h, which
# implement them on a CPU, in the recorder, and in the substitute for NCCL over MPI.
one_place() {
    ! grep -nE 'cudaMem(cpy(2D)?|set)(Async)?\(|cudaEvent[A-Za-z]+\(|cudaStreamWaitEvent\(' $(grep -vE \
        '^kernels/(streams.cuh|host_[a-z]+.h)$|^comm/(recorder|nccl_over_mpi).h$' <<<"$files")
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
check "$lines lines of code, of $most" test "$lines" -le "$most"
check "arrows between rooms" arrows
check "arrows point down" ladder
check "no file includes its includer" no_rings
check "one door to the planner" door
check "the page of comm has its files, from the ground up" index
check "at most 700 lines in the page of a report" page
check "comments have subjects" subjects
check "names that were given up stay out" words
check "copies, fills and events are asked for in one place" one_place
check "targets that pages name" targets
check "at most 12 KB in the first page" short
few_unsteady() { [ "$(grep -c '^| check_\|^| [a-z0-9-]*/' test/unsteady.md)" -le 3 ]; }
check "at most three unsteady tests" few_unsteady
