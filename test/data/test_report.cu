// The report of runs: thinned curves, logs in any state, the page, CSV, and event files of TensorBoard.
// test/scripts/check_report.sh checks the page in a browser.
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "data/report/report.h"
#include "test/support/file_testing.h"

namespace {

// A run directory with a log of these lines.
std::string run_with(const TemporaryFolder& folder, const std::string& name, const std::string& log) {
    fs::create_directories(folder / name);
    write_file(folder / name + "/log.jsonl", log);
    return folder / name;
}

std::string step_line(int step, double loss) {
    return "{\"step\":" + std::to_string(step) + ",\"loss\":" + std::to_string(loss) +
           ",\"grad_norm\":1.5,\"lr\":0.001,\"tokens\":" + std::to_string(step * 100) +
           ",\"tokens_per_s\":1000,\"mfu\":null,\"ms\":100,\"time\":\"2026-01-31T23:59:59.500Z\"}\n";
}

std::string notes_of(const RunHistory& run) {
    std::string all;
    for (const std::string& note : run.notes()) all += note + "\n";
    return all;
}

bool holds_text(const std::string& all, const std::string& words) {
    return all.find(words) != std::string::npos;
}

// Returns the data of a page, as a browser takes it from the first script.
nlohmann::json data_of(const std::string& page) {
    const std::string begin = "<script id=\"data\" type=\"application/json\">";
    size_t from = page.find(begin);
    REQUIRE(from != page.npos);
    from += begin.size();
    return nlohmann::json::parse(page.substr(from, page.find("</script", from) - from));
}

void report(const std::vector<std::string>& runs, const std::string& output = "",
            ReportFormat format = ReportFormat::html) {
    ReportOptions o;
    o.runs = runs, o.output = output, o.format = format;
    complete_options(o);
    report_runs(o);
}

}  // namespace

// ----------------------------------------------------------------------------
// thinning

TEST_CASE("a million points become a thousand buckets, which keep every extreme") {
    constexpr int steps = 1000000, peak = 654321, dip = 77;
    auto value = [](int step) {
        return step == peak ? 50.0 : step == dip ? -50.0 : 3 + std::sin(step * 0.7) + 1000.0 / (step + 100);
    };
    Series series;
    for (int step = 1; step <= steps; step++) series.add(step, value(step));
    const auto& buckets = series.buckets();
    CHECK(buckets.size() <= Series::most_buckets);
    CHECK(buckets.size() > Series::most_buckets / 3);
    CHECK(series.points() == steps);
    int step = 1;
    for (size_t i = 0; i < buckets.size(); i++) {
        int end = i + 1 < buckets.size() ? (int)buckets[i + 1].first : steps + 1;
        double low = INFINITY, high = -INFINITY, sum = 0;
        REQUIRE(buckets[i].first == step);
        for (; step < end; step++) {
            low = std::min(low, value(step)), high = std::max(high, value(step));
            sum += value(step);
        }
        REQUIRE(buckets[i].low == low);
        REQUIRE(buckets[i].high == high);
        REQUIRE(buckets[i].mean() == doctest::Approx(sum / (double)buckets[i].count));
    }
    CHECK(step == steps + 1);
}

TEST_CASE("few points stay as they are; those that are no number are counted, and steps may go back") {
    Series series;
    for (int step : {1, 2, 5, 3, 4}) series.add(step, step * 10.0);
    series.add(6, NAN);
    series.add(7, INFINITY);
    series.add(4, 35, 40, 60, 9);
    REQUIRE(series.buckets().size() == 5);
    for (size_t i = 0; i < 5; i++) CHECK(series.buckets()[i].first == (int64_t)i + 1);
    CHECK(series.width() == 1);
    CHECK(series.not_finite() == 2);
    CHECK(series.without_number() == std::vector<int64_t>{6, 7});
    const Series::Bucket& twice = series.buckets()[3];
    CHECK(twice.low == 35);
    CHECK(twice.high == 60);
    CHECK(twice.who == 9);
    CHECK(twice.mean() == 40);

    Series far;  // a damaged log may name any step
    for (int64_t step = 1; step < (int64_t)1 << 52; step *= 2) far.add(step, 1);
    for (int i = 0; i < 5000; i++) far.add(i * 900000000000, i);
    CHECK(far.buckets().size() <= Series::most_buckets);
}

TEST_CASE("of long lists the last items stay, or the first, the last and some in between") {
    LastOf<int> last(3);
    SpreadOf<int> spread(10);
    for (int i = 0; i < 1000; i++) {
        last.add(i), spread.add(i);
        REQUIRE(spread.items().size() <= 10);
        REQUIRE(spread.items().front() == 0);
        REQUIRE(spread.items().back() == i);
    }
    CHECK(std::vector<int>(last.items().begin(), last.items().end()) == std::vector<int>{997, 998, 999});
    CHECK(last.count() == 1000);
    CHECK(spread.count() == 1000);
    int widest = 0;
    for (size_t i = 1; i < spread.items().size(); i++)
        widest = std::max(widest, spread.items()[i] - spread.items()[i - 1]);
    CHECK(widest <= 1000 / 4);
    CHECK(spread.items().size() >= 5);
}

// ----------------------------------------------------------------------------
// logs

TEST_CASE("a log that is damaged is read as far as it goes, and the notes say what is not") {
    TemporaryFolder folder;
    std::string log =
        step_line(1, 5) + "\n{\"step\":2,\"loss\":NaN,\"grad_norm\":-Infinity,\"text\":\"NaN \\\"\"}\n" +
        "no JSON at all\n[1,2]\n" + step_line(3, 4.5) + "{\"step\":4,\"val_loss\":null}\n" +
        "{\"step\":\"five\",\"loss\":\"much\"}\n" + "{\"step\":4,\"dropped_lines\":7}\n" + "{\"step\":4,\"lo";
    RunHistory run(run_with(folder, "run", log));
    CAPTURE(notes_of(run));
    CHECK(holds_text(notes_of(run), "options.json: is missing"));
    CHECK(holds_text(notes_of(run), "log.jsonl: 2 lines of 9 could not be read; the first is line 4\n"));
    CHECK(holds_text(notes_of(run), "log.jsonl: the last line is cut short after 13 bytes"));
    CHECK(holds_text(notes_of(run), "log.jsonl: a NaN or an infinity in 1 line"));
    CHECK(holds_text(notes_of(run), "log.jsonl: 7 lines could never be written"));
    CHECK(holds_text(notes_of(run), "loss is not a finite number at 2 steps, first at step 2\n"));
    CHECK(run.series("loss").points() == 2);
    CHECK(run.series("loss").last() == 4.5);
    CHECK(run.series("mfu").not_finite() == 0);  // null if no peak rate is known

    // cut at any byte, it is still a run
    for (size_t bytes = 0; bytes < log.size(); bytes += 13) {
        std::string cut = run_with(folder, "cut", log.substr(0, bytes));
        CHECK(data_of(page_with(report_json({RunHistory(cut)}, "2026-02-01T00:00:00.000Z")))["runs"].size() ==
              1);
    }
    std::string path = run_with(folder, "empty", "");
    for (const char* file : {"/ranks.jsonl", "/incidents.jsonl"}) write_file(path + file, "");
    std::string notes = notes_of(RunHistory(path));
    CHECK(holds_text(notes, "log.jsonl: holds no record yet"));
    CHECK(holds_text(notes, "ranks.jsonl: holds no record yet"));
    CHECK_FALSE(holds_text(notes, "incidents.jsonl"));
}

TEST_CASE("a line that is nested deep is no record") {
    TemporaryFolder folder;
    const std::string deep = "{\"eval\":" + std::string(200000, '[') + std::string(200000, ']') + "}\n";
    std::string path = run_with(folder, "run", step_line(1, 5) + deep);
    for (const char* file : {"/ranks.jsonl", "/incidents.jsonl"}) write_file(path + file, deep);
    std::string notes = notes_of(RunHistory(path));
    CAPTURE(notes);
    CHECK(holds_text(notes, "log.jsonl: 1 line of 2 could not be read"));
    CHECK(holds_text(notes, "incidents.jsonl: 1 line of 1 could not be read"));
    report({path});
}

TEST_CASE("numbers that no integer can hold are as if they were not there") {
    TemporaryFolder folder;
    std::string path =
        run_with(folder, "run",
                 "{\"step\":1,\"time\":\"-2147483648-1-1T1:1:1\",\"timings\":{\"ms\":{\"forward\":"
                 "[1,2,3,1e300]},\"waited\":[1,2,3,9e12]}}\n");
    write_file(path + "/ranks.jsonl",
               "{\"start\":{\"hosts\":[\"a\"],\"places\":[[1e300,2]]}}\n"
               "{\"pipeline\":{\"measured\":[{\"stage\":0,\"actions\":[[\"f\",1e300,-1e300,0,1]]}]}}\n"
               "{\"step\":1,\"steps\":8e15,\"ms\":{\"forward\":[1]}}\n");
    RunHistory run(path);
    CHECK(run.phases()[0].second.buckets()[0].who == -1);
    CHECK(run.waited().buckets()[0].who == -1);
    CHECK(run.ranks().place(0) == std::vector<int64_t>{-1, 2});
    CHECK(run.ranks().summed_steps() == INT32_MAX);
    CHECK(run_json(run, 0)["pipeline"]["measured"][0]["passes"][0][1] == -1);
    CHECK(std::isnan(seconds_of("-2147483648-1-1T1:1:1")));
}

TEST_CASE("any type in any field is read without harm") {
    TemporaryFolder folder;
    const char* names[] = {"start",    "loss",    "val_loss", "sample",  "checkpoint", "weights",
                           "eval",     "timings", "slow",     "skipped", "ms",         "health",
                           "pipeline", "time",    "step",     "memory",  "tokens",     "planned_ms"};
    const char* values[] = {"null",
                            "1e999",
                            "-1",
                            "\"x\"",
                            "[]",
                            "{}",
                            "[[]]",
                            "{\"ms\":{\"a\":[1,\"b\"]}}",
                            "[{\"rank\":\"x\",\"phase\":7}]",
                            "{\"measured\":[1,{\"actions\":[[1],[]]}],\"ideal\":3}"};
    std::string log;
    for (const char* name : names) {
        for (const char* value : values) {
            log += std::string("{\"") + name + "\":" + value + "}\n";
            log += std::string("{\"step\":3,\"loss\":2,\"start\":{\"") + name + "\":" + value + "},\"" +
                   name + "x\":" + value + "}\n";
        }
    }
    std::string run = run_with(folder, "run", log);
    for (const char* file : {"/ranks.jsonl", "/incidents.jsonl"}) write_file(run + file, log);
    for (const char* value : values) {
        write_file(run + "/options.json", std::string("{\"model\":") + value + ",\"steps\":" + value + "}");
        write_file(run + "/supervisor.json", std::string("{\"began\":") + value + ",\"time\":" + value +
                                                 ",\"effective_training_time\":" + value + "}");
        for (ReportFormat format : {ReportFormat::html, ReportFormat::csv, ReportFormat::tensorboard})
            report({run}, "", format);
        CHECK(data_of(contents(run + "/report.html"))["runs"][0]["name"] == run);
    }
}

TEST_CASE("a supervised run tells its effective training time") {
    TemporaryFolder folder;
    std::string run = run_with(folder, "run", "{\"step\":1,\"loss\":2}\n");
    auto told = [&] {
        report({run}, "", ReportFormat::html);
        const nlohmann::json data = data_of(contents(run + "/report.html"));
        for (const auto& fact : data["runs"][0]["facts"])
            if (fact[0] == "effective training time") return fact[1].get<std::string>();
        return std::string();
    };
    CHECK(told() == "");
    write_file(run + "/supervisor.json", "{\"began\":1795598940,\"time\":\"2026-11-25T10:29:00.000Z\","
                                         "\"effective_training_time\":0.9731}");
    CHECK(told() == "97.3% of " + duration(1795602540.0 - 1795598940));
}

TEST_CASE("a phase that a step did not have took it no time") {
    TemporaryFolder folder;
    RunHistory run(run_with(folder, "a",
                            "{\"step\":1,\"timings\":{\"ms\":{\"forward\":[1,2,3,0],\"save\":[7,8,9,1]}}}\n"
                            "{\"step\":2,\"timings\":{\"ms\":{\"forward\":[1,2,3,0]}}}\n"));
    REQUIRE(run.phases().size() == 2);
    for (auto& [phase, series] : run.phases()) {
        CHECK(series.points() == 2);
        CHECK(series.last() == (phase == "save" ? 0 : 2));
    }
}

TEST_CASE("a run is complete, runs while its log is locked, and is cut short when nobody writes on") {
    TemporaryFolder folder;
    std::string place = folder / "run";
    double later = seconds_of("2026-02-01T01:00:00.000Z");
    CHECK(later == 1769907600);
    {
        RunLog log(place, RunFolder::fresh);
        log.begin({{"steps", 3}}, 0);
        for (int step = 1; step <= 2; step++)
            log.write({{"step", step}, {"loss", 2.5}, {"ms", 1000}, {"time", "2026-02-01T00:58:00.000Z"}});
        CHECK(RunHistory(place).state(later) == RunState::running);
        CHECK(state_words(RunHistory(place), later) == "running: step 2 of 3");
    }
    CHECK(RunHistory(place).state(later) == RunState::cut_short);
    CHECK(RunHistory(place).state(later - 60) == RunState::recent);
    CHECK(state_words(RunHistory(place), later) == "stopped after step 2 of 3");
    std::ofstream(place + "/log.jsonl", std::ios::app) << R"({"step":2,"stopped":"as asked"})"
                                                          "\n"
                                                          R"({"step":2,"eval":[]})"
                                                          "\n";
    CHECK(state_words(RunHistory(place), later - 60) == "stopped as asked after step 2 of 3");
    std::ofstream(place + "/log.jsonl", std::ios::app) << R"({"step":2,"start":{}})"
                                                          "\n";
    CHECK(RunHistory(place).state(later) == RunState::cut_short);
    write_file(place + "/options.json", "{\"steps\":2}");
    CHECK(RunHistory(place).state(later) == RunState::complete);
    write_file(place + "/options.json", "{\"st");
    CHECK(RunHistory(place).state(later) == RunState::unknown);
    CHECK(holds_text(notes_of(RunHistory(place)), "options.json: not valid JSON"));
}

TEST_CASE("what is no run is refused, and an output that cannot be written") {
    TemporaryFolder folder;
    CHECK_REFUSED(report({}), "report: nothing to report on; name run directories");
    CHECK_REFUSED(report({folder / "none"}), "/none: cannot open it: No such file");
    CHECK_REFUSED(report({folder.path}), ": has no log.jsonl; name the directory of a run");
    write_file(folder / "file", "x");
    CHECK_REFUSED(report({folder / "file"}), "/file: is not a directory;");
    std::string run = run_with(folder, "run", step_line(1, 5));
    CHECK_REFUSED(report({run}, folder / "none/page.html"), "/none/page.html: cannot create it");
    CHECK_REFUSED(report({run}, folder / "file", ReportFormat::tensorboard), "/file: cannot ");
    CHECK(folder.files() == std::vector<std::string>{"file", "run"});
}

// ----------------------------------------------------------------------------
// the page

TEST_CASE("texts of a run cannot end the script that they are in") {
    TemporaryFolder folder;
    const std::string text = "</script><script>alert(1)</script><!-- \u2028 \"\\ \x01 ]]>";
    std::string run =
        run_with(folder, "a <b> & c",
                 nlohmann::json({{"step", 1}, {"sample", text}, {"time", "<img>"}}).dump() + "\n");
    report({run});
    std::string page = contents(run + "/report.html");
    nlohmann::json data = data_of(page);
    CHECK(data["runs"][0]["samples"]["rows"][0]["text"] == text);
    CHECK(data["runs"][0]["name"] == run);
    auto count = [&](const std::string& words) {
        size_t found = 0;
        for (size_t at = 0; (at = page.find(words, at)) != page.npos; at++) found++;
        return found;
    };
    CHECK(count("<script") == 2);
    CHECK(count("</script") == 2);
    CHECK(count("http:") + count("https:") == 1);  // the namespace of SVG, which is never fetched
}

TEST_CASE("several runs go into one page, with the options that tell them apart") {
    TemporaryFolder folder;
    Options options;
    options.steps = 100;
    std::vector<std::string> runs;
    for (const char* name : {"a", "b"}) {
        runs.push_back(run_with(folder, name, step_line(1, 5)));
        options.run_dir = name;
        options.learning_rate = *name == 'a' ? 6e-4f : 1e-3f;
        write_run_options(runs.back(), options_to_json(options));
    }
    report(runs);
    CHECK(!fs::exists(runs[1] + "/report.html"));
    nlohmann::json data = data_of(contents(runs[0] + "/report.html"));
    REQUIRE(data["runs"].size() == 2);
    std::vector<std::string> differ, unusual;
    for (const auto& row : data["options"])
        (row["differs"] == true ? differ : unusual).push_back(row["name"]);
    CHECK(differ == std::vector<std::string>{"--learning-rate"});
    for (const auto& row : data["options"]) {
        if (row["name"] == "--learning-rate") {
            CHECK(row["runs"] == nlohmann::json({"0.0006", "0.001"}));
            CHECK(row["usual"] == "0.0006");
        }
    }
    CHECK(std::find(unusual.begin(), unusual.end(), "--steps") != unusual.end());
    CHECK(std::find(unusual.begin(), unusual.end(), "--run-dir") == unusual.end());
}

TEST_CASE("validation losses of other tokens are not laid over each other without a word") {
    TemporaryFolder folder;
    auto run = [&](const char* name, std::vector<std::string> contents, int batch) {
        std::string lines, val_loss = R"({"step":2,"val_loss":4})"
                                      "\n";
        for (const std::string& content : contents)
            lines += R"({"step":1,"start":{"validation":{"tokens":64,"content":")" + content + "\"}}}\n";
        std::string run = run_with(folder, name, lines + step_line(1, 5) + val_loss);
        nlohmann::ordered_json options = options_to_json(Options());
        options.erase("val_tokens");  // older records have val_batches instead
        options["val_batches"] = 2, options["global_batch"] = batch;
        write_run_options(run, options);
        return run;
    };
    auto notes = [](const std::vector<std::string>& runs) {
        report(runs);
        nlohmann::json notes = data_of(contents(runs[0] + "/report.html"))["runs"].back()["notes"];
        return notes.empty() ? "" : notes.back().get<std::string>();
    };
    const std::string a = run("a", {"1f"}, 8), b = run("b", {"1f"}, 16), c = run("c", {"2e"}, 8),
                      d = run("d", {}, 8), e = run("e", {}, 16), changes = run("f", {"2e", "1f"}, 8);
    auto differ = [&](const std::string& other) {
        return "its validation loss is computed on different tokens from that of " + other +
               ": the two cannot be compared";
    };
    CHECK(notes({a, b}) == "");
    CHECK(notes({a, c}) == differ(a));
    CHECK(notes({a, d}) == "");
    CHECK(notes({d, e}) == differ(d));
    CHECK(notes({changes}) == "its validation loss is computed on different tokens from step 1 on");
}

TEST_CASE("validation sets are compared by name, and by their tokens where one has no name") {
    nlohmann::json a = {{"tokens", 64}, {"content", "1f"}}, b = {{"tokens", 64}, {"content", "2e"}};
    nlohmann::json web = {{"web", a}}, both = {{"web", a}, {"code", b}}, other = {{"web", b}},
                   code = {{"code", b}};
    CHECK(are_comparable(a, a));
    CHECK_FALSE(are_comparable(a, b));
    CHECK(are_comparable(web, both));
    CHECK(are_comparable(both, code));
    CHECK_FALSE(are_comparable(web, other));
    CHECK_FALSE(are_comparable(other, both));
    CHECK_FALSE(are_comparable(web, code));
    CHECK(are_comparable(a, both));
    CHECK(are_comparable(web, a));
    CHECK_FALSE(are_comparable(b, web));
}

TEST_CASE("each validation set has a curve, and a fact") {
    TemporaryFolder folder;
    std::string lines = step_line(1, 5);
    for (int step : {2, 4})
        for (const char* set : {"web", "code"})
            lines += text("{\"step\":%d,\"val_loss/%s\":%g}\n", step, set, (*set == 'w' ? 3.0 : 2.0) + step);
    std::string run = run_with(folder, "run", lines + "{\"step\":6,\"val_loss/web\":null}\n");
    nlohmann::json data = nlohmann::json::parse(run_json(RunHistory(run), 0).dump());
    CHECK(data["curves"]["val_loss/web"]["x"] == nlohmann::json({2, 4}));
    CHECK(data["curves"].contains("val_loss/code"));
    CHECK_FALSE(data["curves"].contains("val_loss"));
    CHECK(
        holds_text(data["facts"].dump(), R"(["validation loss of web","7.0000 at step 4, at best 5.0000"])"));
    CHECK(holds_text(data["notes"].dump(), "val_loss/web is not a finite number at 1 step"));
}

TEST_CASE("of thousands of ranks the slowest of each cell stays, and those the run calls slow have names") {
    TemporaryFolder folder;
    std::string run = run_with(folder, "run", step_line(20, 5));
    constexpr int ranks = 3000, slow = 1234;
    nlohmann::json start, times;
    for (int rank = 0; rank < ranks; rank++) {
        start["hosts"].push_back("node" + std::to_string(rank / 8));
        start["places"].push_back({rank % 8, rank / 8, 0, 0});
        times["forward"].push_back(rank == slow ? 131.0 : 100.0 + rank * 1e-4);
    }
    times["forward"][slow + 1] = nullptr;  // a rank that did not report
    nlohmann::json record = {{"step", 20}, {"steps", 20}, {"ms", times}, {"step_ms", times["forward"]}};
    record["slow"] = {{{"rank", slow}, {"phase", "forward"}, {"ratio", 1.31}}};
    nlohmann::json next = record;
    next["step"] = 40;
    next["slow"][0]["ratio"] = 1.25;
    write_file(run + "/ranks.jsonl", nlohmann::json({{"start", start}}).dump() + "\n" + record.dump() + "\n" +
                                         next.dump() + "\n{\"step");
    nlohmann::json data = nlohmann::json::parse(run_json(RunHistory(run), 0).dump());
    const nlohmann::json& heat = data["heat"];
    CHECK(heat["per_cell"] == 3);
    const nlohmann::json& forward = heat["last"]["phases"][0];
    CHECK(forward["name"] == "forward");
    CHECK(forward["ms"].size() == 1000);
    CHECK(forward["ms"][slow / 3] == 131.0);
    CHECK(forward["rank"][slow / 3] == slow);
    CHECK(forward["rank"][5] == 17);
    CHECK(heat["who"]["1234"] == nlohmann::json({"node154", {2, 154, 0, 0}}));
    CHECK(heat["mean"]["steps"] == 40);
    REQUIRE(data["slow"].size() == 1);
    CHECK(data["slow"][0]["rank"] == slow);
    CHECK(data["slow"][0]["host"] == "node154");
    CHECK(data["slow"][0]["ratio"] == 1.25);
    CHECK(data["slow"][0]["worst"] == 1.31);
    CHECK(data["slow"][0]["count"] == 2);
    CHECK(holds_text(data["notes"].dump(), "ranks.jsonl: the last line is cut short"));
}

// ----------------------------------------------------------------------------
// other formats

TEST_CASE("a table has a row for each step, and what is no number says so") {
    TemporaryFolder folder;
    std::string log = "{\"step\":0,\"val_loss\":7.5}\n"
                      "{\"step\":1,\"loss\":5.25,\"grad_norm\":1,\"time\":\"T\"}\n"
                      "{\"step\":1,\"val_loss\":6}\n"
                      "{\"step\":1,\"timings\":{\"ms\":{\"forward\":[1,2,3,7]}}}\n"
                      "{\"step\":1,\"sample\":\"a,b\"}\n"
                      "{\"step\":2,\"loss\":null,\"grad_norm\":null,\"mfu\":null,\"sent_bytes\":9}\n"
                      "{\"step\":2,\"checkpoint\":\"x\",\"bytes\":5,\"stall_ms\":1}\n"
                      "{\"step\":3,\"lo";
    std::string a = run_with(folder, "a", log), b = run_with(folder, "b,\"c\"", step_line(9, 1));
    report({a, b}, folder / "table.csv", ReportFormat::csv);
    std::string quoted = "\"" + (folder / "b,\"\"c\"\"") + "\"";
    CHECK(contents(folder / "table.csv") ==
          "run,step,time,loss,val_loss,grad_norm,lr,tokens,tokens_per_s,mfu,gemm_share,ms,forward_ms_min,"
          "forward_ms_median,forward_ms_max,forward_ms_rank,sent_bytes\n" +
              a + ",0,,,7.5,,,,,,,,,,,,\n" + a + ",1,T,5.25,6,1,,,,,,,1,2,3,7,\n" + a +
              ",2,,nan,,nan,,,,,,,,,,,9\n" + quoted +
              ",9,2026-01-31T23:59:59.500Z,1,,1.5,0.001,900,1000,,,100,,,,,\n");
}

TEST_CASE(
    "a step whose timings come after the next steps has one row, and steps that are made again have two") {
    TemporaryFolder folder;
    auto timings = [](int step) {
        return "{\"step\":" + std::to_string(step) + ",\"timings\":{\"waited\":[" + std::to_string(step) +
               "]}}\n";
    };
    auto loss = [](int step, int value) {
        return "{\"step\":" + std::to_string(step) + ",\"loss\":" + std::to_string(value) + "}\n";
    };
    auto table = [&](const std::string& log) {
        report({run_with(folder, "run", log)}, folder / "table.csv", ReportFormat::csv);
        std::istringstream file(contents(folder / "table.csv"));
        std::string rows, line;
        std::getline(file, line);
        while (std::getline(file, line)) {
            std::vector<std::string> fields;
            std::istringstream row(line + ";");
            for (std::string field; std::getline(row, field, ',');) fields.push_back(field);
            rows += fields[1] + ":" + fields[3] + "," + fields.back();
        }
        return rows;
    };
    std::string start = "{\"step\":4,\"start\":{}}\n",
                save = "{\"step\":1,\"checkpoint\":\"x\",\"bytes\":5}\n";
    std::string first = loss(1, 9) + loss(2, 8) + timings(1) + loss(3, 7) + timings(2) + loss(4, 6) +
                        loss(5, 5) + save + timings(3) + timings(4);
    CHECK(table(first + timings(5)) == "1:9,1;2:8,2;3:7,3;4:6,4;5:5,5;");
    // the process ends without the timings of step 5, which is made again
    CHECK(table(first + start + loss(5, 3) + loss(6, 2) + timings(5) + timings(6)) ==
          "1:9,1;2:8,2;3:7,3;4:6,4;5:5,;5:3,5;6:2,6;");
    CHECK(table(first + loss(1, 3) + loss(2, 2) + timings(1) + timings(2)) ==
          "1:9,1;2:8,2;3:7,3;4:6,4;5:5,;1:3,1;2:2,2;");
    CHECK(table(loss(1, 9) + loss(9, 1) + loss(10, 1)) == "1:9,;9:1,;10:1,;");
}

TEST_CASE("a log of many names makes no table that is much larger than itself") {
    TemporaryFolder folder;
    std::string log;
    for (int i = 0; i < 300; i++) log += "{\"step\":1,\"n" + std::to_string(i) + "\":1}\n";
    std::string path = run_with(folder, "run", log);
    check_error(error_of([&] { report({path}, "", ReportFormat::csv); }), path + "/log.jsonl",
                "has more than 300 different fields");
    CHECK_FALSE(exists(path + "/report.csv"));
}

TEST_CASE("checksums of records are CRC-32C, masked as TensorFlow has them") {
    CHECK(crc32c("123456789") == 0xe3069283);
    CHECK(crc32c(std::string(32, '\0')) == 0x8a9136aa);  // RFC 3720, B.4
    CHECK(crc32c(std::string(32, '\xff')) == 0x62a8ab43);
    // Every event file of TensorFlow begins so: the length of its first record, 24, and that length's
    // checksum.
    const char head[] = "\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22";
    TemporaryFolder folder;
    std::string run = run_with(folder, "run", step_line(1, 5));
    report({run}, "", ReportFormat::tensorboard);
    std::string file = contents(run + "/tensorboard/events.out.tfevents.0.train_gpt");
    CHECK(file.substr(0, 12) == std::string(head, 12));
    CHECK(file[12] == 0x09);  // wall_time, eight bytes
    CHECK(file.substr(21, 15) == "\x1a\x0d"
                                 "brain.Event:2");
}

TEST_CASE("events hold every number of a step, at its time") {
    TemporaryFolder folder;
    std::string run =
        run_with(folder, "run",
                 step_line(300, 5) + "{\"step\":300,\"loss\":null}\n{\"step\":300,\"sample\":\"a\\nb\"}\n");
    report({run}, folder / "events", ReportFormat::tensorboard);
    std::string file = contents(folder / "events/events.out.tfevents.0.train_gpt");
    std::vector<std::string> records;
    for (size_t at = 0; at < file.size();) {
        uint64_t length;
        memcpy(&length, file.data() + at, 8);
        REQUIRE(at + 16 + length <= file.size());
        records.push_back(file.substr(at + 12, length));
        at += 16 + length;
    }
    REQUIRE(records.size() == 4);
    double time;
    memcpy(&time, records[1].data() + 1, 8);
    CHECK(time == 1769903999.5);
    CHECK(records[1].substr(9, 3) == "\x10\xac\x02");  // step 300 in base 128
    auto value = [&](const std::string& record, const std::string& tag) {
        // Summary.Value: tag is field 1, and the float after it is field 2
        size_t at = record.find("\x0a" + std::string(1, (char)tag.size()) + tag + "\x15");
        REQUIRE(at != record.npos);
        float result;
        memcpy(&result, record.data() + at + tag.size() + 3, 4);
        return result;
    };
    CHECK(value(records[1], "loss") == 5);
    CHECK(value(records[1], "grad_norm") == 1.5f);
    CHECK(value(records[1], "tokens") == 30000);
    CHECK(std::isnan(value(records[2], "loss")));
    CHECK(!holds_text(records[1], "mfu"));
    CHECK(holds_text(records[3], "    a\n    b"));
}
