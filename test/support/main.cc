/*
The main function of every test program. doctest runs the cases and describes failures; the last lines are for
test/run.sh: why cases were skipped, and "N passed, N failed, N skipped". With several ranks each case counts
once for the whole job: it has failed if it failed on any rank. All ranks exit with 1 if any case failed.
*/
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>
#include <sstream>

#include "test/support/cases.h"

std::string skip_reason;
const RankHooks* rank_hooks = nullptr;

namespace {

std::vector<CaseOutcome> outcomes;

// Records how each case ends.
struct Outcomes : doctest::IReporter {
    explicit Outcomes(const doctest::ContextOptions&) {}
    void test_case_start(const doctest::TestCaseData& data) override {
        outcomes.emplace_back().name = data.m_name;
        skip_reason.clear();
    }
    // A case runs again for each subcase; the checks of all its runs add up.
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_end(const doctest::CurrentTestCaseStats& end) override {
        CaseOutcome& outcome = outcomes.back();
        outcome.checks += end.numAssertsCurrentTest;
        outcome.failed = !end.testCaseSuccess;
        outcome.skipped = skip_reason;
    }
    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("outcomes", 1, Outcomes);

// Prints the last lines; returns the number of failed cases.
int report(const std::vector<CaseOutcome>& cases) {
    int passed = 0, failed = 0, skipped = 0;
    for (const CaseOutcome& c : cases) {
        if (c.failed) {
            failed++;
        } else if (!c.skipped.empty()) {
            skipped++;
            printf("skipped: %s: %s\n", c.skipped.c_str(), c.name.c_str());
        } else if (c.checks == 0) {
            failed++;
            printf("%s: ended without a check, and did not say why; see SKIP\n", c.name.c_str());
        } else {
            passed++;
        }
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed;
}

}  // namespace

int main(int argc, char** argv) {
    std::string name = argv[0];
    for (const OtherProgram& other : other_programs()) {
        if (name.substr(name.rfind('/') + 1) == other.name) return other.run(argc, argv);
    }
    if (rank_hooks) rank_hooks->join(&argc, &argv);
    bool reports = !rank_hooks || rank_hooks->is_root();
    doctest::Context context(argc, argv);
    context.setOption("no-colors", true);  // mpirun gives its ranks a terminal
    context.setOption("no-version", true);
    std::ostringstream unreported;
    if (!reports) context.setCout(&unreported);
    int failed = context.run();
    if (context.shouldExit()) return failed;  // --list-test-cases and the like
    if (failed && !reports) fprintf(stderr, "another rank:\n%s\n", unreported.str().c_str());
    if (rank_hooks) rank_hooks->add_up(outcomes);
    if (reports) {
        fflush(stderr);
        failed = report(outcomes);
        fflush(stdout);
    }
    if (rank_hooks) rank_hooks->leave();
    return failed != 0;
}
