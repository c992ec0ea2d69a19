# shellcheck shell=bash
# How programs that are built with SANITIZE=address or thread are run; sourced by the scripts here.
#
# Leaks of Open MPI are known by the library they are in (lsan.supp), so each must be found: with whole stacks, where there
# are ranks. It is not instrumented: what it does under its own locks would look like races.
export LSAN_OPTIONS=suppressions=$PWD/test/support/lsan.supp:print_suppressions=0
export TSAN_OPTIONS=ignore_noninstrumented_modules=1
whole_stacks=fast_unwind_on_malloc=0
