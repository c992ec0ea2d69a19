// compare_runs: what the proofs of layouts rest on sees a planted difference of each kind, just beyond the
// limit.
#define TESTING
#include "test/compare_runs.cu"

#include "test/file_testing.h"

namespace {

using Logs = std::vector<std::string>;

const Logs good_log = {
    R"({"step":1,"loss":4.0,"grad_norm":2.0,"lr":0.1,"tokens":96,"ms":3.5})",
    R"({"step":2,"loss":3.0,"grad_norm":1.0,"lr":0.2,"tokens":192,"ms":3.5})",
    R"({"step":2,"val_loss":3.5})",
    R"({"step":2,"sample":"text"})",
};

const std::vector<float> good_wte = {0.5f, -8.0f, 0.25f, 0.0f}, good_norm = {1.0f, 1.0f};

// A run directory whose log has `replacement` for line `at`.
struct Run {
    TemporaryFolder folder;
    explicit Run(size_t at = 0, const std::string& replacement = good_log[0]) {
        Logs log = good_log;
        log[at] = replacement;
        std::string content;
        for (const std::string& line : log) content += line + "\n";
        write_file(folder / "log.jsonl", content);
        write_weights(good_wte, good_norm);
    }

    void write_weights(const std::vector<float>& wte, const std::vector<float>& norm,
                       const char* second = "norm") {
        WeightsWriter writer(folder / "weights.bin", nlohmann::ordered_json::object(),
                             {{"wte", {(int64_t)wte.size()}}, {second, {(int64_t)norm.size()}}});
        writer.write_at("wte", 0, wte.data(), wte.size() * sizeof(float));
        writer.write_at(second, 0, norm.data(), norm.size() * sizeof(float));
        writer.commit();
    }
};

bool agree(const Run& run, RunLimits limits = {}) {
    static const Run reference;
    std::string line;
    bool good = compare_runs(run.folder.path, reference.folder.path, limits, &line);
    CAPTURE(line);
    CHECK(line.ends_with(good ? "they agree" : "they differ"));
    CHECK(good == (line.find("limit") == std::string::npos));
    return good;
}

constexpr RunLimits bitwise = {.bitwise = true};

}  // namespace

TEST_CASE("equal runs agree, also bit for bit") {
    CHECK(agree(Run()));
    CHECK(agree(Run(), bitwise));
}

TEST_CASE("what takes time is not compared") {
    CHECK(agree(Run(0, R"({"step":1,"loss":4.0,"grad_norm":2.0,"lr":0.1,"tokens":96,"ms":99})"), bitwise));
}

TEST_CASE("losses, norms and validation: within the limit, and just beyond it") {
    struct Case {
        size_t line;
        const char* within;
        const char* beyond;
    };
    for (const Case& c : {
             Case{0, R"({"step":1,"loss":4.00003,"grad_norm":2.0,"lr":0.1,"tokens":96})",
                  R"({"step":1,"loss":4.00005,"grad_norm":2.0,"lr":0.1,"tokens":96})"},
             Case{1, R"({"step":2,"loss":3.0,"grad_norm":0.999991,"lr":0.2,"tokens":192})",
                  R"({"step":2,"loss":3.0,"grad_norm":0.999989,"lr":0.2,"tokens":192})"},
             Case{2, R"({"step":2,"val_loss":3.50003})", R"({"step":2,"val_loss":3.50004})"},
         }) {
        CAPTURE(c.line);
        CHECK(agree(Run(c.line, c.within)));
        CHECK_FALSE(agree(Run(c.line, c.within), bitwise));
        CHECK_FALSE(agree(Run(c.line, c.beyond)));
        CHECK(agree(Run(c.line, c.beyond), {.losses = 2e-5}));
    }
}

TEST_CASE("learning rate and tokens must be equal") {
    CHECK_FALSE(agree(Run(0, R"({"step":1,"loss":4.0,"grad_norm":2.0,"lr":0.1000001,"tokens":96})")));
    CHECK_FALSE(agree(Run(0, R"({"step":1,"loss":4.0,"grad_norm":2.0,"lr":0.1,"tokens":97})")));
}

TEST_CASE("a loss that is not a number never agrees") {
    Run run(0, R"({"step":1,"loss":null,"grad_norm":2.0,"lr":0.1,"tokens":96})");
    CHECK_FALSE(agree(run));
    std::string line;
    CHECK_FALSE(compare_runs(run.folder.path, run.folder.path, {}, &line));
}

TEST_CASE("steps and fields that one run lacks") {
    CHECK_THROWS_WITH(agree(Run(1, R"({"step":3,"loss":3.0})")), doctest::Contains("only one of the runs"));
    CHECK_THROWS_WITH(agree(Run(2, R"({"step":2,"sample":"text"})")),
                      doctest::Contains("only one of the runs has val_loss"));
    CHECK_THROWS_WITH(agree(Run(1, good_log[0])), doctest::Contains("two values"));
    Run run;
    write_file(run.folder / "log.jsonl", "");
    CHECK_THROWS_WITH(agree(run), doctest::Contains("no steps"));
    fs::remove(run.folder / "log.jsonl");
    CHECK_THROWS_WITH(agree(run), doctest::Contains("cannot open"));
}

TEST_CASE("weights: relative to the largest element of the tensor") {
    auto with_wte = [](float second_to_last) {
        Run run;
        run.write_weights({0.5f, -8.0f, second_to_last, 0.0f}, good_norm);
        return run;
    };
    CHECK(agree(with_wte(0.25f + 7e-5f)));
    CHECK_FALSE(agree(with_wte(0.25f + 9e-5f)));
    CHECK_FALSE(agree(with_wte(0.25f + 1e-7f), bitwise));
    CHECK(agree(with_wte(0.25f + 9e-5f), {.weights = 2e-5}));
    CHECK_FALSE(agree(with_wte(NAN)));
    Run norm;
    norm.write_weights(good_wte, {1.0f, 1.0f + 2e-5f});
    CHECK_FALSE(agree(norm));
}

TEST_CASE("the sign of zero is a difference of bits only") {
    Run run;
    run.write_weights({0.5f, -8.0f, 0.25f, -0.0f}, good_norm);
    CHECK(agree(run));
    CHECK_FALSE(agree(run, bitwise));
}

TEST_CASE("weights of another model") {
    Run shape, name;
    shape.write_weights({0.5f, -8.0f, 0.25f}, good_norm);
    CHECK_THROWS_WITH(agree(shape), doctest::Contains("tensor wte has two shapes"));
    name.write_weights(good_wte, good_norm, "bias");
    CHECK_THROWS_WITH(agree(name), doctest::Contains("tensor norm is missing"));
    fs::remove(name.folder / "weights.bin");
    CHECK_THROWS_AS(agree(name), Error);
}

TEST_CASE("limits on the command line") {
    auto limits = [](std::vector<std::string> words) {
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        return parse_limits((int)argv.size(), argv.data());
    };
    CHECK(limits({"", "a", "b", "--losses", "1e-3", "--bitwise"}).losses == 1e-3);
    CHECK(limits({"", "a", "b", "--weights", "0.5"}).weights == 0.5);
    CHECK_THROWS_AS(limits({"", "a", "b", "--losses"}), Error);
    CHECK_THROWS_AS(limits({"", "a", "b", "--losses", "x"}), Error);
    CHECK_THROWS_AS(limits({"", "a", "b", "--weights", "nan"}), Error);
    CHECK_THROWS_AS(limits({"", "a", "b", "--other", "1"}), Error);
}
