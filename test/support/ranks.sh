# shellcheck shell=bash disable=SC2054
# Starting programs with several ranks; sourced by the scripts here.
#
# ob1 with self and vader: ranks of one machine talk through shared memory, and no other network is looked for, which
# would take longer than a short test. They copy through it, because many containers forbid reading another process's memory.
# A waiting rank yields, and none is bound to a core, because there are more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun_options=(--oversubscribe --bind-to none --mca mpi_yield_when_idle 1
    --mca pml ob1 --mca btl self,vader --mca btl_vader_single_copy_mechanism none)

# ranks N COMMAND...    Each rank has one OpenMP thread unless the caller says otherwise. A job that takes longer than
# $RANKS_TIMEOUT seconds (300) is killed: exit code 124, or 137 if it would not end.
ranks() {
    local n=$1
    shift
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} timeout -k 10 "${RANKS_TIMEOUT:-300}" \
        mpirun "${mpirun_options[@]}" -np "$n" "$@"
}
