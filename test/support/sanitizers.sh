# shellcheck shell=bash
# How programs that are built with SANITIZE=address or thread are run; sourced by the scripts here.
#
# Leaks in Open MPI are suppressed by library (lsan.supp), which must appear in their stacks: with ranks, stacks are therefore
# unwound in full. Open MPI is not instrumented: what it does under its own locks would look like races.
export LSAN_OPTIONS=suppressions=$PWD/test/support/lsan.supp:print_suppressions=0
export TSAN_OPTIONS=ignore_noninstrumented_modules=1
whole_stacks=fast_unwind_on_malloc=0
