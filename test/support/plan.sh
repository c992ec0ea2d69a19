# shellcheck shell=bash
# The list of everything there is to run, read from the tests themselves; sourced by test/run.sh.
#
# The folder of a unit says on which builds it runs. These lines at the head of a unit or a script say what is special:
#
#   devices: cpu simt-bf16   the builds, in place of its folder's
#   ranks: 3 1 2 4           run it with mpirun, once with each number of ranks; on the simulated device only with the
#                            first, and under sanitizers with two, because it is slow there
#   alone: 4                 cases of doctest's suite "alone" measure time: they run with this many ranks, after all other jobs, not in `make test`
#   waits: yes               a script that leaves processors idle while it waits for stuck ranks or a clock: such scripts run one
#                            after another, as early as possible, beside the compilers (in_turn.sh)
#   seconds: 20              about how long it takes, if that is much: the longest begin first
#   limit: 600               after this many seconds it counts as stuck and is ended
#   needs: cpu-fp32/train_gpt     programs that a script runs
#   suite: test              `make test` runs it, as it runs units by default; all: only `make test-all` does, the default of scripts
#   soak: KILLS=300          with this variable a script runs for long: `make soak`

declare -A setting            # [FILE:KEY]
declare -A builds             # those that are needed
jobs=() waiting=() alone=()   # lines SECONDS|NAME|PROGRAMS THAT IT NEEDS|KIND|ARGUMENTS for job.sh

read_settings() {
    local file key value
    while IFS=$'\t' read -r file key value; do
        setting[$file:$key]=$value
    done < <(grep -HsE '^(//|#) (devices|ranks|alone|waits|seconds|limit|needs|suite|soak): ' \
        test/*/test_*.cu test/scripts/check_*.sh | sed -E 's@:(//|#) ([a-z]+): @\t\2\t@')
    # A unit that names only builds that do not exist would run nowhere.
    for key in "${!setting[@]}"; do
        [[ $key == *:devices ]] || continue
        for value in ${setting[$key]}; do
            [[ $value =~ ^(cpu|simt|cuda|nocard)(-(fp32|bf16))?$|^(address|thread)$ ]] && continue
            echo "test/run.sh: ${key%:*}: devices: $value: there is no such build" >&2
            return 1
        done
    done
}

devices_of() {
    if [ -n "${setting[$1:devices]}" ]; then
        echo "${setting[$1:devices]}"
        return
    fi
    case $1 in
    test/kernels/*) echo cpu simt cuda address nocard ;;
    test/comm/*) echo cpu simt-bf16 cuda address ;;
    test/program/*) echo cpu simt-bf16 cuda ;;
    test/simt/*) echo simt-bf16 ;;
    test/data/*) echo cpu nocard ;;
    test/nocard/*) echo nocard ;;
    *) echo "test/run.sh: $1: no such folder of units; add it to devices_of in test/support/plan.sh" >&2 ;;
    esac
}

runs_on() { # FILE BUILD
    local device
    for device in $(devices_of "$1"); do
        [[ $2 != "$device" && $2 != "$device"-* ]] || return 0
    done
    return 1
}

units_of() { # BUILD    names, the largest first
    local file
    [ ${#setting[@]} -gt 0 ] || read_settings
    for file in $(ls -S test/*/test_*.cu); do
        runs_on "$file" "$1" && basename "$file" .cu
    done
}

# Prints the options of make for a build.
build_options() {
    case $1 in
    address | thread) echo "DEVICE=cpu SANITIZE=$1" ;;
    nocard) echo "DEVICE=cuda CPU_ARCH=native" ;;
    cuda-*-mpi) echo "DEVICE=cuda COMM=mpi PRECISION=$(cut -d- -f2 <<<"$1")" ;;
    *-*) echo "DEVICE=${1%%-*} PRECISION=${1#*-}" ;;
    esac
}

wanted() { # NAME of a unit or script, without test_ or check_
    [ -z "$UNIT" ] || [[ " $UNIT " == *" $1 "* || " $UNIT " == *" test_$1 "* || " $UNIT " == *" check_$1 "* ]]
}

# ----------------------------------------------------------------------------------------------------------
# units are compiled in groups

. test/support/group.sh

# A compiler takes about 60 s for 8000 lines. nvcc takes longer, on machines that have more cores. With few cores, groups are
# larger if there is memory for that, because most of the time for a group is spent on the includes that all groups share.
lines_of_group=8000
lines_of_cuda_group=5000
[ "$(nproc)" -ge 8 ] || [ "$(awk '/^MemTotal:/ { print int($2 / 1e6) }' /proc/meminfo)" -lt 12 ] || lines_of_group=30000

# Folders that share most of what they include are compiled together.
groups_of_folders=(simt kernels "data comm program" nocard)

# Tools and benchmarks include what units do, and are made with them: the first group of program units also acts as the ones that
# scripts need and, in CI, as all others, so that each is compiled. So is train_gpt, in builds where only tests train.
made_with_units=(test/program/train_gpt.cu test/bench/*.cu test/tools/*.cu)
declare -A group_of # [PROGRAM]    the group that it is made with, which jobs need in place of it

# programs_of BUILD    prints their sources
programs_of() {
    local file name
    for file in "${made_with_units[@]}"; do
        name=$(basename "$file" .cu)
        [[ $1 != cpu-* || " train_gpt compare_runs " != *" $name "* ]] || continue # scripts need these first
        [[ $SUITE-$1 == all-cpu-* || " ${jobs[*]} ${waiting[*]} " == *[\ \|]"build/$1/$name"[\ \|]* ]] && echo "$file"
    done
}

# plan_units SUITE BUILD    distributes units to groups of about the same size
plan_units() {
    local build=$2 folders folder file files lines total groups group members most=$lines_of_group
    [[ $build != cuda-* ]] || most=$lines_of_cuda_group
    for folders in "${groups_of_folders[@]}"; do
        folder=${folders##* } files=() lines=() total=0
        # `make test` leaves the program on the simulated device, a quarter of the compiling, to `make test-all`.
        [[ "$1-$build-$folder-$UNIT" != test-simt-*-program- ]] || continue
        for file in $(printf 'test/%s/test_*.cu ' $folders); do
            [ -e "$file" ] && runs_on "$file" "$build" && wanted "$(basename "$file" .cu | cut -c6-)" || continue
            files+=("$file") lines+=("$total")
            total=$((total + $(wc -l <"$file")))
        done
        [ "$total" -gt 0 ] || continue
        if [ -n "$UNIT" ] && [ "$BUILT" != groups ] || [ "$BUILT" = yes ] || [ "$folders" = nocard ]; then
            for file in "${files[@]}"; do plan_unit "$build" "$file" "build/$build/$(basename "$file" .cu)"; done
            continue
        fi
        groups=$(((total + most / 2) / most))
        [ $groups -gt 0 ] || groups=1
        for ((group = 0; group < groups; group++)); do
            members=()
            for ((i = 0; i < ${#files[@]}; i++)); do
                [ $((lines[i] * groups / total)) = $group ] || continue
                members+=("${files[i]}")
                # a unit of another suite is in the group too, so that the group is not compiled again for that suite
                [ "$1" = test ] && [ "${setting[${files[i]}:suite]}" = all ] ||
                    plan_unit "$build" "${files[i]}" "build/$build/tests/$folder-$((group + 1))"
            done
            if [ "$folder-$group" = program-0 ]; then
                for file in $(programs_of "$build"); do
                    members+=("$file")
                    group_of[build/$build/$(basename "$file" .cu)]=build/$build/tests/program-1
                done
            fi
            write_group "build/$build/tests/$folder-$((group + 1)).cu" "${members[@]}"
        done
    done
}

plan_unit() { # BUILD FILE PROGRAM    with $variant in the environment, if there is one
    local build=$1 file=$2 program=$3 name n counts limit
    name=$build/$(basename "$file" .cu | cut -c6-)${variant:+.${variant#*=}}
    limit=${setting[$file:limit]:-1200}
    builds[$build]=1
    read -ra counts <<<"${setting[$file:ranks]:-0}"
    case $build-${counts[0]} in
    simt-*) counts=("${counts[0]}") ;;
    address-[1-9] | thread-[1-9]) counts=(2) ;;
    esac
    for n in "${counts[@]}"; do
        jobs+=("${setting[$file:seconds]:-1}|$name$([ "$n" = 0 ] || echo ".x$n")|$program|unit|$limit $program $file $n${variant:+ $variant}")
    done
    if [ -n "${setting[$file:alone]}" ] && [ "$LONG" = yes ] && [[ $build == cpu-* ]]; then
        alone+=("1|$name.alone|$program|alone|$limit $program $file ${setting[$file:alone]}")
    fi
}

plan_scripts() { # SUITE
    local file name needs need suite=$1 environment line
    for file in test/scripts/check_*.sh; do
        name=$(basename "$file" .sh) environment=
        if [ -z "$UNIT" ]; then
            case $suite in
            test) [ "${setting[$file:suite]}" = test ] || continue ;;
            soak) [ -n "${setting[$file:soak]}" ] || continue ;;
            esac
        fi
        wanted "${name#check_}" || continue
        [ "$suite" != soak ] || environment=${setting[$file:soak]}
        needs=()
        for need in ${setting[$file:needs]}; do
            needs+=("build/$need")
            builds[${need%%/*}]=1
        done
        line="${setting[$file:seconds]:-1}|$name|${needs[*]}|script|${setting[$file:limit]:-2400} $file $environment"
        if [ -n "${setting[$file:waits]}" ]; then waiting+=("$line"); else jobs+=("$line"); fi
    done
}

# plan SUITE    collects all jobs, in no order
plan() {
    local build variant name of_suite variants=''
    case $1 in
    test) of_suite="cpu-fp32 simt-bf16" ;;
    all) of_suite="cpu-fp32 simt-bf16 address thread" ;;
    soak) of_suite="simt-fp32 simt-bf16" variants=$(printf " SIMT_SEED=%d" 2 3 5 7 11) ;; # threads and blocks in other orders
    *) echo "test/run.sh: $1: no such suite; there are test, all and soak" >&2; return 1 ;;
    esac
    [ -n "$BUILDS" ] || plan_scripts "$1"
    for build in ${BUILDS:-$of_suite}; do
        for variant in ${variants:-''}; do plan_units "$1" "$build"; done
    done
    # nvcc compiles the kernels, which run on stand-ins for a card
    if [ "$1" = soak ] && [ -z "$BUILDS" ] && command -v nvcc /usr/local/cuda/bin/nvcc >/dev/null; then
        for variant in NOCARD=h100 NOCARD=a100; do plan_units soak nocard; done
    fi
    for name in "${!group_of[@]}"; do
        jobs=("${jobs[@]//$name/${group_of[$name]}}") waiting=("${waiting[@]//$name/${group_of[$name]}}")
    done
    [ $((${#jobs[@]} + ${#waiting[@]})) -gt 0 ] || { echo "test/run.sh: nothing to run${UNIT:+: no unit or script is called $UNIT}" >&2; return 1; }
}

# Prints the lines of all jobs.
all_jobs() { printf '%s\n' "${jobs[@]}" "${waiting[@]}" "${alone[@]}" | grep .; }

# lines_within FILE    the number of lines of a group's units
lines_within() { sed -n 's/^#include "\(test.*test_.*\.cu\)"/\1/p' "$1" 2>/dev/null | xargs -r cat | wc -l; }

# seconds_to_compile TARGET
seconds_to_compile() {
    case $1 in
    */train_gpt) echo 120 ;;
    */tests/program-*) echo 140 ;;
    *) echo $(($(lines_within "$1.cu") * 60 / 8000)) ;;
    esac
}

# Prints the targets that the jobs need, each once: lines SECONDS|TARGET, with the seconds from the start of its compilation to
# the end of the longest job that waits for it.
needed_targets() {
    local target seconds
    local -A longest
    [ -z "$BUILT" ] || return 0
    while read -r seconds target; do
        [ "${longest[$target]:--1}" -ge "$seconds" ] || longest[$target]=$seconds
    done < <(all_jobs | awk -F'|' '{ n = split($3, needs, " "); for (i = 1; i <= n; i++) print $1, needs[i] }')
    for target in "${!longest[@]}"; do
        echo "$(($(seconds_to_compile "$target") + longest[$target]))|$target"
    done | sort
}
