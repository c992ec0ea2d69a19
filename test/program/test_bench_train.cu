// The benchmark of whole models runs; its times are not checked. test/scripts/check_bench.sh runs the
// benchmark of kernels.
// devices: cpu
// suite: all
#include "test/bench/bench_train.h"
#include "test/support/file_testing.h"

TEST_CASE("training steps are measured, and each model leaves a record") {
    TemporaryFolder folder;
    bench_train({"--records", folder / "records", "tiny:2x32x2", "gpt2-124M:1x8"});
    std::ifstream file(folder / "records");
    int records = 0;
    for (std::string line; std::getline(file, line); records++) {
        auto record = nlohmann::json::parse(line);
        CHECK(record["tokens_per_s"] > 0);
    }
    CHECK(records == 2);
}

TEST_CASE("a model that is not there is refused") {
    CHECK(error_of([] { bench_train({"gpt9:1x8"}); }).find("gpt9: no such preset") != std::string::npos);
}
