/*
doctest's main for suites of several ranks: the suite runs on every rank of mpirun, or alone. Rank 0 prints
its report, another rank prints only when something failed on it; all ranks end with 1 if something failed
on any.
*/
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <sstream>
#include <unistd.h>

#include "test/ranks.h"

int main(int argc, char** argv) {
    // A rank that waits for ever for another is ended by the system, and mpirun then ends the others.
    alarm(900);
    World world(&argc, &argv);
    world_of_tests = &world;
    choose_device(world);
    doctest::Context context(argc, argv);
    context.setOption("no-colors", true);  // mpirun gives its ranks a terminal
    std::ostringstream report;
    if (!world.is_root()) context.setCout(&report);
    int failed = context.run();
    if (failed && !world.is_root()) fprintf(stderr, "rank %d:\n%s\n", world.rank(), report.str().c_str());
    return world.largest(failed != 0);
}
