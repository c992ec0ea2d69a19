# shellcheck shell=bash
# Functions for the scripts that check whole programs: each sources this in the repository's root. A script prints a line for each
# check: "ok NAME", "FAILED NAME" or "skipped: REASON: NAME"; and the number of its checks as "plan N", once or in parts.
#
# Sets `work`, an empty folder for the script, which is removed at its end (KEEP=yes: it stays, and its name is printed).
. test/support/ranks.sh
# --matmul-dtype auto takes fp32 on every processor, so that losses of different builds and layouts can be compared.
export ONEDNN_MAX_CPU_ISA=AVX512_CORE
work=$(mktemp -d)
at_end() { :; } # a script may define its own
trap 'at_end; if [ -n "$KEEP" ]; then echo "$work"; else rm -rf "$work"; fi' EXIT

# plan N    this script, or the part that begins here, makes N checks
plan() { echo "plan $1"; }

# check NAME COMMAND...    ok if the command succeeds; if not, the end of what it printed is shown
check() {
    local name=$1 said=$work/.checked.$BASHPID # expanded here, because a forked command has another BASHPID
    shift
    if "$@" >"$said" 2>&1; then
        echo "ok $name"
    else
        tail -n 20 "$said"
        echo "FAILED $name"
    fi
}

# skip REASON N [WHAT]    N checks are not made here
skip() {
    local i
    for ((i = 0; i < $2; i++)); do echo "skipped: $1${3:+: $3}"; done
}

# copy_sources FOLDER    copies all files that git does not ignore there, so that the script can change them
copy_sources() { mkdir "$1" && git ls-files -zco --exclude-standard | tar --null -T - -c | tar -x -C "$1"; }

# at_once COMMAND...    runs the command in the background, with at most one job per core
at_once() {
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    "$@" &
}

# wait_for SECONDS COMMAND...    waits until the command succeeds; returns 1 if it has not within SECONDS
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}
# has_steps RUN N    true if the log of the run has at least N steps
has_steps() {
    local steps
    steps=$(grep -c '"loss"' "$1/log.jsonl" 2>/dev/null)
    [ "${steps:-0}" -ge "$2" ]
}
