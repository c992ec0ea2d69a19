// compare_runs, on which the proofs of layouts rest, detects a planted difference of each kind, just beyond
// its limit.
#include "data/checkpoint/builder.h"
#include "test/support/file_testing.h"
#include "test/tools/compare_runs.h"

namespace {

using Logs = std::vector<std::string>;

const Logs good_log = {
    R"({"step":1,"loss":4.0,"grad_norm":2.0,"lr":0.1,"tokens":96,"ms":3.5})",
    R"({"step":2,"loss":3.0,"grad_norm":1.0,"lr":0.2,"tokens":192,"ms":3.5})",
    R"({"step":2,"val_loss":3.5})",
    R"({"step":2,"sample":"text"})",
};

using Tensors = std::map<std::string, std::vector<float>>;

const Tensors good_tensors = {{"norm", {1.0f, 1.0f}}, {"wte", {0.5f, -8.0f, 0.25f, 0.0f}}};
const Tensors good_moments = {{"norm", {1e-6f, 0.0f}}, {"wte", {0.5f, -2.0f, 0.25f, 0.0f}}};

// A run directory whose log has `replacement` for line `at`.
struct Run {
    TemporaryFolder folder;
    explicit Run(size_t at = 0, const std::string& replacement = good_log[0]) {
        Logs log = good_log;
        log[at] = replacement;
        std::string content;
        for (const std::string& line : log) content += line + "\n";
        write_file(folder / "log.jsonl", content);
        write_checkpoint(good_tensors, good_moments);
    }

    void write_checkpoint(const Tensors& weights, const Tensors& moments, int64_t step = 2,
                          int64_t samples = 6) {
        std::vector<CheckpointTensor> table;
        for (const auto& [name, values] : weights) {
            table.push_back({name, {(int64_t)values.size()}, {Dtype::fp32}});
            if (moments.contains(name)) table.back().slots[(size_t)Slot::m] = Dtype::fp32;
        }
        nlohmann::ordered_json about = {{"program", "test"}, {"step", step}, {"samples", samples}};
        about["options"] = nlohmann::ordered_json::object();
        CheckpointBuilder builder(folder.path, step, about, table);
        for (int i = 0; i < (int)table.size(); i++) {
            const std::string& name = table[(size_t)i].name;
            builder.append(i, Slot::weight, 0, weights.at(name).size(), weights.at(name).data());
            if (moments.contains(name))
                builder.append(i, Slot::m, 0, moments.at(name).size(), moments.at(name).data());
        }
        builder.commit();
    }
};

// Replaces one element.
Tensors with(Tensors tensors, const char* name, size_t element, float value) {
    tensors[name][element] = value;
    return tensors;
}

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
    auto with_weight = [](const char* name, size_t element, float value) {
        Run run;
        run.write_checkpoint(with(good_tensors, name, element, value), good_moments);
        return run;
    };
    CHECK(agree(with_weight("wte", 2, 0.25f + 7e-5f)));
    CHECK_FALSE(agree(with_weight("wte", 2, 0.25f + 9e-5f)));
    CHECK_FALSE(agree(with_weight("wte", 2, 0.25f + 1e-7f), bitwise));
    CHECK(agree(with_weight("wte", 2, 0.25f + 9e-5f), {.weights = 2e-5}));
    CHECK_FALSE(agree(with_weight("wte", 2, NAN)));
    CHECK_FALSE(agree(with_weight("norm", 1, 1.0f + 2e-5f)));
}

TEST_CASE("moments: relative to the largest element of any tensor") {
    auto with_moment = [](const char* name, size_t element, float value) {
        Run run;
        run.write_checkpoint(good_tensors, with(good_moments, name, element, value));
        return run;
    };
    CHECK(agree(with_moment("norm", 0, 1e-6f + 1.9e-5f)));
    CHECK_FALSE(agree(with_moment("norm", 0, 1e-6f + 2.1e-5f)));
    CHECK(agree(with_moment("norm", 0, 1e-6f + 2.1e-5f), {.moments = 2e-5}));
    CHECK_FALSE(agree(with_moment("norm", 0, 1.0001e-6f), bitwise));
    CHECK_FALSE(agree(with_moment("wte", 3, NAN)));
}

TEST_CASE("the sign of zero is a difference of bits only") {
    Run run;
    run.write_checkpoint(with(good_tensors, "wte", 3, -0.0f), good_moments);
    CHECK(agree(run));
    CHECK_FALSE(agree(run, bitwise));
}

TEST_CASE("the newest checkpoint counts") {
    Run run;
    run.write_checkpoint(with(good_tensors, "wte", 0, 7), good_moments, 1);
    CHECK(agree(run, bitwise));
    run.write_checkpoint(good_tensors, good_moments, 3);
    CHECK_THROWS_WITH(agree(run), doctest::Contains("step 3, sample 6, and of step 2"));
    run.write_checkpoint(good_tensors, good_moments, 2, 7);
    remove_checkpoint(run.folder.path, 3);
    CHECK_THROWS_WITH(agree(run), doctest::Contains("step 2, sample 7, and of step 2, sample 6"));
}

TEST_CASE("checkpoints of another model") {
    Run shape, name, slots;
    Tensors shorter = good_tensors, renamed = good_tensors;
    shorter["wte"].pop_back();
    shape.write_checkpoint(shorter, shorter);
    CHECK_THROWS_WITH(agree(shape), doctest::Contains("tensor wte has two shapes"));
    auto norm = renamed.extract("norm");
    norm.key() = "bias";
    renamed.insert(std::move(norm));
    name.write_checkpoint(renamed, renamed);
    CHECK_THROWS_WITH(agree(name), doctest::Contains("only one of the runs has tensor norm"));
    slots.write_checkpoint(good_tensors, {});
    CHECK_THROWS_WITH(agree(slots), doctest::Contains("has two shapes or types"));
    fs::remove_all(checkpoints_folder(name.folder.path));
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
    CHECK(limits({"", "a", "b", "--moments", "0.5"}).moments == 0.5);
    CHECK_THROWS_AS(limits({"", "a", "b", "--losses"}), Error);
    CHECK_THROWS_AS(limits({"", "a", "b", "--losses", "x"}), Error);
    CHECK_THROWS_AS(limits({"", "a", "b", "--weights", "nan"}), Error);
    CHECK_THROWS_AS(limits({"", "a", "b", "--other", "1"}), Error);
}
