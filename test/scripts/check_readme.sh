#!/usr/bin/env bash
# The README and the pages of the folders as their readers follow them: links lead somewhere, options, presets and functions
# exist, and commands do what the pages show.
#
# Blocks of commands begin with ```sh and are run, page after page, in a folder that has what their reader would have: some
# text. Long runs are shortened. If a ```text block follows directly, each of its lines must begin with a word that also begins a
# line of the commands' output. Commands that this machine cannot run (many machines, downloads) are in blocks that begin with
# ```sh check, and only their options and presets are checked.
#
# needs: cpu-fp32/train_gpt
# seconds: 30
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
program=$PWD/build/cpu-fp32/train_gpt
described="README.md data/checkpoint/README.md data/README.md kernels/README.md comm/README.md comm/STEP.md comm/LAYOUTS.md comm/FAULTS.md comm/PLANNING.md data/supervisor/README.md"
pages="$described test/README.md test/bench/README.md"
# text FILES    prints the files without their blocks
text() { awk 'FNR == 1 { code = 0 } /^ *```/ { code = !code } !code' "$@"; }

# ----------------------------------------------------------------------------------------------------------
# links and names

# Prints the names that GitHub gives to the headings of a page.
anchors() {
    awk '/^ *```/ { code = !code } !code && /^#+ /' "$1" | sed -E 's/^#+ //; s/[^a-zA-Z0-9 _-]//g; s/ /-/g' | tr '[:upper:]' '[:lower:]'
}
links() {
    local page target path anchor rc=0
    for page in $pages; do
        while read -r target; do
            [[ $target == http* ]] && continue
            path=${target%%#*} anchor=
            [[ $target == *#* ]] && anchor=${target#*#}
            path=$([ -n "$path" ] && echo "$(dirname "$page")/$path" || echo "$page")
            [ -e "$path" ] || { echo "$page: $target: no such file"; rc=1; continue; }
            [ -z "$anchor" ] || anchors "$path" | grep -qxF -- "$anchor" || { echo "$page: $target: no such heading"; rc=1; }
        done < <(text "$page" | grep -oE '\]\([^) ]+\)' | sed 's/^](//; s/)$//')
    done
    return $rc
}

# Files and functions that the text names must exist. Functions are words in backquotes with an underscore or "::" in them, and such words
# in the drawings of kernels/ and comm/.
names() {
    local word rc=0
    local all="$work/source"
    git ls-files -co --exclude-standard | grep -v '\.md$' | while read -r file; do [ -f "$file" ] && cat "$file"; done >"$all"
    text $described | grep -oE '`[^`]+`' | tr -d '`' | sort -u >"$work/quoted"
    while read -r word; do
        grep -qaw -- "${word##*::}" "$all" || { echo "$word: not in the source"; rc=1; }
    done < <(grep -xE '[A-Za-z_]+(::[a-z_]+)*' "$work/quoted" | grep -E '_|::'
        awk 'FNR == 1 { drawn = 0 } /^## / { drawn = /One training step|The model|, drawn/ } /^ *```/ { code = !code } code && drawn && !/--|\.\.\./' \
            kernels/README.md comm/STEP.md comm/LAYOUTS.md | grep -oE '\b[A-Za-z]+(::|_)[a-z_]+\b' | sort -u)
    while read -r word; do
        [ -e "$word" ] || { echo "$word: no such file"; rc=1; }
    done < <(grep -xE '(test|comm|data|kernels)/[a-z_/]+(\.[a-z]+)?' "$work/quoted" | grep -vx 'test/gpu_results.md')
    while read -r word; do
        git ls-files -co --exclude-standard | grep -q "/$word\$" || { echo "$word: no such file"; rc=1; }
    done < <(grep -ohE '\b[a-z_]+\.cuh?\b|\b[a-z_]+\.h\b' $described | grep -vx train_gpt.cu | sort -u)
    return $rc
}

# make help lists every target that a user may call
targets() {
    local target rc=0 help
    help=$(make -s help)
    for target in $(sed -nE "s/^\\.PHONY: //p" Makefile test/tests.mk | grep -v BUILD); do
        [[ " all FORCE say_device units " == *" $target "* ]] && continue
        grep -qE "^  make $target( |$)" <<<"$help" || { echo "make help: does not tell of $target"; rc=1; }
    done
    return $rc
}

# ----------------------------------------------------------------------------------------------------------
# commands

# Writes the blocks of the pages to files: 001.run, 002.check, 003.text; 003.text.shows names the block whose output 003.text is.
blocks=$work/blocks
mkdir "$blocks"
awk -v folder="$blocks" '
    FNR == 1 { before = "" }
    /^ *```/ && !inside {
        indent = match($0, /`/) - 1
        info = substr($0, indent + 4)
        kind = info == "sh" ? "run" : info == "sh check" ? "check" : info == "text" ? "text" : "other"
        file = sprintf("%s/%03d.%s", folder, ++number, kind)
        printf "" >file
        if (kind == "text" && before == "run" && FNR <= end + 2) print last >(file ".shows")
        inside = 1
        next
    }
    /^ *```/ { inside = 0; before = kind; end = FNR; last = file; close(file); next }
    inside { print substr($0, indent + 1) >file }' $described test/README.md

# The commands of a block, one a line.
commands() { sed -E ':a; /\\$/ { N; s/ *\\\n */ /; ba }' "$1" | sed -E 's/ +#( |$).*//' | grep -v '^$'; }

for command in $("$program" help | sed -nE 's/^  ([a-z]+) .*/\1/p'); do
    "$program" "$command" --help | grep -oE '^  --[a-z0-9-]+' | tr -d ' ' >"$work/options_$command"
done
# the options and presets with which commands of train_gpt are called exist
options() {
    local line call command option model rc=0
    while read -r line; do
        call=${line#*./train_gpt }
        [ "$call" != "$line" ] || continue
        command=${call%% *}
        [ "$command" = help ] && continue
        [ -e "$work/options_$command" ] || { echo "train_gpt $command: no such command"; rc=1; continue; }
        for option in $(sed "s/'[^']*'//g" <<<"$call" | grep -oE '(^| )--[a-z0-9-]+'); do
            [ "$option" = --help ] || grep -qxF -- "$option" "$work/options_$command" || { echo "train_gpt $command $option: no such option"; rc=1; }
        done
        model=$(grep -oE -- '--model [^ /]+( |$)' <<<"$call" | cut -d' ' -f2)
        [ -z "$model" ] || "$program" train --help presets | tail -n +2 | tr ' ' '\n' | grep -qxF -- "$model" || { echo "--model $model: no such preset"; rc=1; }
    done < <(for block in "$blocks"/*.run "$blocks"/*.check; do commands "$block"; done | sed 's/ -- /\n.\/train_gpt /')
    return $rc
}
# options that the text names belong to some command, or to another program
others=" --hostfile --mca --mpi --ntasks-per-node --bind-to --cpu-bind --signal --quick --full --write --record --pack --help --version "
options_in_text() {
    local option rc=0
    for option in $(text $described | grep -oE -- '--[a-z][a-z0-9-]+' | sort -u); do
        [[ $others == *" $option "* ]] || grep -qxF -- "$option" "$work"/options_* || { echo "$option: no such option"; rc=1; }
    done
    return $rc
}

# A folder as the reader of the first chapter has it.
here=$work/here
mkdir -p "$here/notes"
cp comm/*.h "$here/notes"
cat $described >"$here/notes/pages.md"
cp test/README.md "$here/book.txt"
ln -s "$program" "$here/train_gpt"
mpirun() { command mpirun "${mpirun_options[@]}" "$@"; }
export OMP_NUM_THREADS=2

shorter() {
    [[ $1 =~ ^(.*--steps )([0-9]+)(.*)$ ]] && ((BASH_REMATCH[2] >= 50)) &&
        echo "${BASH_REMATCH[1]}$((BASH_REMATCH[2] / 20))${BASH_REMATCH[3]}" || echo "$1"
}
# run COMMAND FILE    appends what the command prints to FILE, the output of its block
run() {
    (cd "$here" && eval "$(shorter "$1")") >"$work/printed" 2>&1 </dev/null
    local rc=$?
    cat "$work/printed"
    cat "$work/printed" >>"$2"
    return $rc
}
# The first word of each line, with a # for each number.
first_words() { sed -E 's/^[ |]+//; s/[ :].*//; s/[0-9][0-9,]*/#/g' "$1" | grep . | sort -u; }
shown() {
    local missing
    missing=$(comm -23 <(grep -vxF ... "$1" | first_words /dev/stdin) <(first_words "$2"))
    [ -z "$missing" ] || { echo "the page shows lines that begin with: $missing"; return 1; }
}

calls=$(for block in "$blocks"/*.run; do commands "$block"; done | wc -l)
shows=$(ls "$blocks"/*.shows | wc -l)
plan $((5 + calls + shows))
check "links lead to files and headings" links
check "files and functions exist" names
check "make help tells of all targets" targets
check "commands have the options and models that they are called with" options
check "options in the text exist" options_in_text
for block in "$blocks"/*.run; do
    while read -r line; do check "${line:0:100}" run "$line" "$block.out"; done < <(commands "$block")
done
for text in "$blocks"/*.shows; do check "what the commands show: $(head -n 1 "${text%.shows}" | cut -c1-60)" shown "${text%.shows}" "$(<"$text").out"; done
