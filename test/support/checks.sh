# shellcheck shell=bash
# Functions for the scripts that check whole programs: sourced by each, in the top folder. A script prints a line for each
# check: "ok NAME", "FAILED NAME" or "skipped: REASON: NAME"; and "plan N", by itself or in parts: how many there must be.
#
# Sets `work`, an empty folder for the script, gone at its end (KEEP=yes: it stays, and is named).
. test/support/ranks.sh
work=$(mktemp -d)
at_end() { :; } # a script may define its own
trap 'at_end; if [ -n "$KEEP" ]; then echo "$work"; else rm -rf "$work"; fi' EXIT

# plan N    this script, or the part that begins here, makes N checks
plan() { echo "plan $1"; }

# check NAME COMMAND...    ok if the command succeeds; if not, the end of what it printed is shown
check() {
    local name=$1 said=$work/.checked.$BASHPID # here, for a command that is forked has another number
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

# copy_sources FOLDER    to be changed there: all files but those that git ignores
copy_sources() { mkdir "$1" && git ls-files -zco --exclude-standard | tar --null -T - -c | tar -x -C "$1"; }

# at_once COMMAND...    in the background, as many at a time as there are cores
at_once() {
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    "$@" &
}

# wait_for SECONDS COMMAND...    until the command succeeds
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}
# has_steps RUN N    its log has as many steps
has_steps() {
    local steps
    steps=$(grep -c '"loss"' "$1/log.jsonl" 2>/dev/null)
    [ "${steps:-0}" -ge "$2" ]
}
