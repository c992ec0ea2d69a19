#!/usr/bin/env bash
# The program with which mpirun starts its daemons (--mca plm_rsh_agent), for tests with several hosts on one machine:
# fake_rsh.sh HOST COMMAND... runs the command here, as ssh would run it there.
#
#     $FAKE_HOSTS/HOST.down     the host does not answer
#     $FAKE_HOSTS/HOST.once     it does not answer the first time
#     $FAKE_HOSTS/HOST.apart    it has a file system of its own: `ls` finds nothing there
#     $FAKE_HOSTS/HOST.tmp      its folder for temporary files: daemons of two hosts spoil each other's files in a common one
#     $FAKE_HOSTS/HOST.pids     processes that were started there; each leads a session, which includes all its descendants
host=$1
shift
[ ! -e "$FAKE_HOSTS/$host.down" ] || exit 255
if [ -e "$FAKE_HOSTS/$host.once" ]; then
    rm "$FAKE_HOSTS/$host.once"
    exit 255
fi
[ ! -e "$FAKE_HOSTS/$host.apart" ] || PATH="$FAKE_HOSTS/apart:$PATH"
echo $$ >>"$FAKE_HOSTS/$host.pids"
export TMPDIR=$FAKE_HOSTS/$host.tmp
mkdir -p "$TMPDIR"
exec setsid -w bash -c "exec $*"
