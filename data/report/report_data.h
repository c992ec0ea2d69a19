/*
The content of a report, as one JSON object: for each run its facts, its curves thinned (series.h), its ranks
in at most a thousand cells, and its tables limited to their newest rows. data/report/page.html draws it, and
calculates only what drawing needs.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/base/program_version.h"
#include "data/base/strings.h"  // joined
#include "data/options/rules.h"
#include "data/options/values.h"
#include "data/report/run_history.h"

using OrderedJson = nlohmann::ordered_json;

// ----------------------------------------------------------------------------
// curves and ranks

// x: the first step of each bucket. If every bucket is one point, lo and hi are left out.
inline OrderedJson curve_json(const Series& series) {
    OrderedJson x = OrderedJson::array(), mid = x, lo = x, hi = x, who = x;
    bool ranges = false, named = false;
    for (const Series::Bucket& bucket : series.buckets()) {
        x.push_back(bucket.first);
        mid.push_back(number_or_null(bucket.mean()));
        lo.push_back(number_or_null(bucket.low));
        hi.push_back(number_or_null(bucket.high));
        who.push_back(bucket.who);
        ranges = ranges || bucket.low != bucket.high;
        named = named || bucket.who >= 0;
    }
    OrderedJson json = {{"points", series.points()}, {"every", series.width()}, {"x", x}, {"mid", mid}};
    if (ranges) json["lo"] = lo, json["hi"] = hi;
    if (named) json["who"] = who;
    if (series.not_finite() > 0) {
        json["bad_count"] = series.not_finite();
        json["bad"] = series.without_number();
    }
    return json;
}

// Uses the least value of each bucket, for quantities that only grow.
inline OrderedJson clock_json(const Series& series) {
    OrderedJson x = OrderedJson::array(), y = x;
    for (const Series::Bucket& bucket : series.buckets()) {
        x.push_back(bucket.first);
        y.push_back(number_or_null(bucket.low));
    }
    return {{"x", x}, {"y", y}};
}

inline double middle_of_known(std::vector<double> values) {
    std::erase_if(values, [](double value) { return !std::isfinite(value); });
    if (values.empty()) return NAN;
    return value_at(values, values.size() / 2);
}

// Returns a list of cells for each phase; a cell has the largest time of its ranks, and the rank that took
// that long. Adds the ranks that cells name to `told`.
inline OrderedJson cells_json(const PhaseMeans& times, size_t per_cell, std::set<size_t>& told) {
    OrderedJson phases = OrderedJson::array();
    for (const auto& [phase, of_ranks] : times) {
        OrderedJson ms = OrderedJson::array(), ranks = ms;
        for (size_t begin = 0; begin < of_ranks.size(); begin += per_cell) {
            size_t most = begin;
            for (size_t rank = begin; rank < std::min(begin + per_cell, of_ranks.size()); rank++) {
                if (of_ranks[rank] > of_ranks[most] || std::isnan(of_ranks[most])) most = rank;
            }
            ms.push_back(number_or_null(of_ranks[most]));
            ranks.push_back(most);
            told.insert(most);
        }
        phases.push_back({{"name", phase},
                          {"median", number_or_null(middle_of_known(of_ranks))},
                          {"ms", ms},
                          {"rank", ranks}});
    }
    return phases;
}

inline OrderedJson heat_json(const RankHistory& history) {
    constexpr size_t most_cells = 1000;
    if (history.ranks() == 0) return nullptr;
    size_t per_cell = (history.ranks() + most_cells - 1) / most_cells;
    std::set<size_t> told;
    OrderedJson json = {
        {"ranks", history.ranks()},
        {"per_cell", per_cell},
        {"records", history.records()},
        {"last",
         {{"step", history.step()},
          {"steps", history.steps()},
          {"phases", cells_json(history.last(), per_cell, told)}}},
        {"mean",
         {{"steps", history.summed_steps()}, {"phases", cells_json(history.mean(), per_cell, told)}}}};
    OrderedJson who = OrderedJson::object();
    for (size_t rank : told) who[std::to_string(rank)] = {history.host(rank), history.place(rank)};
    json["who"] = who;
    json["axes"] = history.axes();
    return json;
}

inline OrderedJson slow_json(const RunHistory& run) {
    OrderedJson list = OrderedJson::array();
    for (const auto& [key, slow] : run.slow().ranks()) {
        std::string host = slow.host.empty() ? run.ranks().host((size_t)key.first) : slow.host;
        list.push_back({{"rank", key.first},
                        {"host", host},
                        {"phase", key.second},
                        {"ratio", number_or_null(slow.last_ratio)},
                        {"worst", number_or_null(slow.worst_ratio)},
                        {"count", slow.count},
                        {"first", slow.first_step},
                        {"last", slow.last_step}});
    }
    std::stable_sort(list.begin(), list.end(),
                     [](const OrderedJson& a, const OrderedJson& b) { return a["count"] > b["count"]; });
    constexpr size_t most = 50;
    while (list.size() > most) list.erase(list.size() - 1);
    return list;
}

// Returns the passes of each stage as [kind, micro-batch, chunk, begin, end]; malformed ones are left out.
inline OrderedJson passes_json(const nlohmann::json& stages, size_t& room) {
    OrderedJson result = OrderedJson::array();
    for (const nlohmann::json& stage : stages) {
        OrderedJson passes = OrderedJson::array();
        for (const nlohmann::json& pass : array_in(stage, "actions")) {
            bool whole = pass.is_array() && pass.size() >= 5 && pass[0].is_string() && room > 0;
            for (size_t i = 1; whole && i < 5; i++) whole = pass[i].is_number();
            if (!whole) continue;
            room--;
            passes.push_back({pass[0].get<std::string>(), integer_of(number_of(pass[1]), -1),
                              integer_of(number_of(pass[2]), -1), number_or_null(number_of(pass[3])),
                              number_or_null(number_of(pass[4]))});
        }
        if (stage.is_object()) result.push_back({{"stage", integer_in(stage, "stage")}, {"passes", passes}});
    }
    return result;
}

inline OrderedJson pipeline_json(const RankHistory& history) {
    const nlohmann::json& pipeline = history.pipeline();
    if (pipeline.empty()) return nullptr;
    size_t room = 20000;  // the most passes that are drawn
    return {{"step", history.pipeline_step()},
            {"measured", passes_json(array_in(pipeline, "measured"), room)},
            {"ideal", passes_json(array_in(pipeline, "ideal"), room)},
            {"measured_idle", number_or_null(number_in(pipeline, "measured_idle"))},
            {"ideal_idle", number_or_null(number_in(pipeline, "ideal_idle"))}};
}

// Returns one sentence for each device with something to report.
inline OrderedJson health_json(const RankHistory& history) {
    constexpr size_t most = 50;
    OrderedJson words = OrderedJson::array();
    std::vector<double> clocks;
    for (const nlohmann::json& device : history.health()) {
        if (device.is_object()) clocks.push_back(number_in(device, "sm_clock_mhz"));
    }
    double usual = middle_of_known(clocks);
    for (const nlohmann::json& device : history.health()) {
        if (!device.is_object() || words.size() >= most) continue;
        std::vector<std::string> told;
        std::string throttled = text_in(device, "throttled");
        if (!throttled.empty() && throttled != "none") told.push_back("throttled by " + throttled);
        double clock = number_in(device, "sm_clock_mhz");
        if (clock < 0.95 * usual) told.push_back(text("%.0f MHz where others run at %.0f", clock, usual));
        if (double celsius = number_in(device, "temperature_c"); celsius >= 85)
            told.push_back(text("%.0f degrees", celsius));
        if (integer_in(device, "ecc_uncorrected") > 0)
            told.push_back(
                text("%lld uncorrected memory errors", (long long)integer_in(device, "ecc_uncorrected")));
        if (integer_in(device, "xid") > 0)
            told.push_back(text("XID %lld", (long long)integer_in(device, "xid")));
        if (integer_in(device, "link_errors") > 0)
            told.push_back(text("%lld link errors", (long long)integer_in(device, "link_errors")));
        if (told.empty()) continue;
        int64_t rank = integer_in(device, "rank", -1);
        std::string host = rank < 0 ? "" : history.host((size_t)rank);
        words.push_back(text("rank %lld%s: ", (long long)rank, host.empty() ? "" : (" on " + host).c_str()) +
                        joined(told));
    }
    return words;
}

// ----------------------------------------------------------------------------
// facts

// Returns the options of a run; nothing if this program cannot read them.
inline std::optional<Options> known_options(const nlohmann::json& json) {
    std::string error;
    std::optional<Options> options;
    note_error(error, [&] { options = options_from_json(json, "options.json"); });
    return options;
}

class Facts {
public:
    Facts(const RunHistory& run, double now) : run_(run), now_(now) {
        model();
        machine();
        course();
        result();
    }

    OrderedJson json() const { return facts_; }

private:
    void add(const std::string& name, const std::string& words) {
        if (!words.empty()) facts_.push_back({name, words});
    }

    void model() {
        const nlohmann::json& options = run_.options();
        std::string words = text_in(options, "model");
        if (std::optional<Options> known = known_options(options))
            words += text(": %s parameters", human((double)parameter_count(*known)).c_str());
        int64_t layers = integer_in(options, "layers");
        if (layers > 0)
            words += text(", %lld layers of %lld channels", (long long)layers,
                          (long long)integer_in(options, "channels"));
        add("model", words);
        int64_t batch = integer_in(options, "global_batch");
        if (batch > 0)
            add("batch", text("%lld tokens a step, in sequences of %lld", (long long)batch,
                              (long long)integer_in(options, "sequence_length")));
    }

    void machine() {
        const nlohmann::json& start = run_.start();
        std::string device = text_in(start, "device"), host = text_in(start, "host");
        add("device", device + (host.empty() || device.empty() ? "" : ", on ") + host);
        int64_t processes = integer_in(start, "processes");
        const nlohmann::json& layout = object_in(start, "layout");
        if (processes > 0) {
            std::string words = std::to_string(processes);
            if (!layout.empty() && processes > 1)
                words += text(": %lld data x %lld context x %lld tensor x %lld pipeline, ZeRO %lld",
                              (long long)integer_in(layout, "dp", 1), (long long)integer_in(layout, "cp", 1),
                              (long long)integer_in(layout, "tp", 1), (long long)integer_in(layout, "pp", 1),
                              (long long)integer_in(layout, "zero"));
            add("processes", words);
        }
        const nlohmann::json& pipeline = object_in(start, "pipeline");
        if (!pipeline.empty()) {
            add("pipeline",
                text("%s, %lld stages of %lld parts, %lld micro-batches, %.0f%% idle by its schedule",
                     text_in(pipeline, "schedule").c_str(), (long long)integer_in(pipeline, "stages"),
                     (long long)integer_in(pipeline, "chunks", 1),
                     (long long)integer_in(pipeline, "micro_batches"), 100 * number_in(pipeline, "idle")));
        }
        add("program", text_in(start, "version"));
    }

    void course() {
        add("started", run_.first_time());
        if (run_.starts() > 1) {
            std::string from = text_in(run_.start(), "from");
            add("starts", text("%llu%s", (unsigned long long)run_.starts(),
                               from.empty() ? "" : (", the last from " + from).c_str()));
        }
        double age = now_ - seconds_of(run_.last_time());
        if (std::isfinite(age))
            add("last line", run_.last_time() + ", " + duration(std::max(age, 0.0)) + " before this page");
        double trained = run_.seconds().last();
        if (std::isfinite(trained)) add("trained", duration(trained) + tokens());
        const nlohmann::json& launch = run_.supervisor();
        double supervised = seconds_of(text_in(launch, "time")) - number_in(launch, "began");
        if (supervised > 0)
            add("effective training time",
                text("%.1f%% of %s", 100 * number_in(launch, "effective_training_time"),
                     duration(supervised).c_str()));
        bool goes_on = run_.state(now_) == RunState::running || run_.state(now_) == RunState::recent;
        if (goes_on && run_.last_step() > 0 && run_.steps() > run_.last_step())
            add("time left", duration(trained / (double)run_.seconds().points() *
                                      (double)(run_.steps() - run_.last_step())));
    }

    std::string tokens() const {
        double count = run_.tokens().last();
        return std::isfinite(count) ? text(", %s tokens", human(count).c_str()) : "";
    }

    void result() {
        if (const Series& loss = run_.series("loss"); loss.points() > 0)
            add("loss", text("%.4f at step %lld", loss.last(), (long long)loss.last_step()));
        for (const std::string& name : run_.validation_losses()) {
            const Series& validation = run_.series(name);
            if (validation.points() == 0) continue;
            double best = INFINITY;
            for (const Series::Bucket& bucket : validation.buckets()) best = std::min(best, bucket.low);
            add("validation loss" + (name == "val_loss" ? "" : " of " + name.substr(name.find('/') + 1)),
                text("%.4f at step %lld, at best %.4f", validation.last(), (long long)validation.last_step(),
                     best));
        }
        if (const Series& speed = run_.series("tokens_per_s"); speed.points() > 0) {
            std::string words = human(speed.last()) + " tokens/s";
            if (const Series& mfu = run_.series("mfu"); mfu.points() > 0)
                words += text(", MFU %.1f%%", 100 * mfu.last());
            if (const Series& share = run_.series("gemm_share"); share.points() > 0)
                words += text(", %.1f%% of the GEMM rate", 100 * share.last());
            add("speed", words);
        }
        double planned =
            number_in(run_.planned().is_object() ? run_.planned() : nlohmann::json::object(), "planned_ms");
        if (std::isfinite(planned))
            add("plan", text("%.4g ms a step planned, %.4g measured", planned,
                             number_in(run_.planned(), "measured_ms")));
    }

    const RunHistory& run_;
    double now_;
    OrderedJson facts_ = OrderedJson::array();
};

inline std::string state_words(const RunHistory& run, double now) {
    std::string step = text("step %lld", (long long)run.last_step());
    if (run.steps() > 0) step += text(" of %lld", (long long)run.steps());
    switch (run.state(now)) {
    case RunState::complete:
        return "complete: " + step;
    case RunState::running:
        return "running: " + step;
    case RunState::recent:
        return "running, or stopped a moment ago: " + step;
    case RunState::stopped:
        return "stopped as asked after " + step;
    case RunState::cut_short:
        return "stopped after " + step;
    case RunState::unknown:
        return step;
    }
    __builtin_unreachable();
}

// ----------------------------------------------------------------------------
// options

// Returns the options that a run would have if only its model, its data and its length were given.
inline OrderedJson usual_options(const nlohmann::json& given, int processes) {
    Options options;
    if (const Preset* preset = find_preset(text_in(given, "model"))) {
        options.model = preset->name;
        static_cast<ModelConfig&>(options) = preset->config;
        options.tokenizer = name_of(preset->tokenizer);
        options.document_end = preset->document_end;
    }
    options.train_data = "-";
    int64_t steps = integer_in(given, "steps");
    if (steps > 0 && steps <= INT32_MAX) options.steps = (int)steps;
    std::string why_not;  // if set, some options were not derived
    note_error(why_not, [&] { complete_options(options, processes); });
    options.train_data.clear();
    options.steps = Options().steps;
    return options_to_json(options);
}

inline std::string option_text(const nlohmann::json& value) {
    if (value.is_boolean()) return name_of(value.get<bool>());
    if (value.is_string()) return value.get<std::string>();
    return value.is_null() ? "" : value.dump();
}

// Returns rows with a name, the usual value and the value of each run, for all options that are unusual in
// some run, or differ between runs.
inline OrderedJson options_json(const std::vector<RunHistory>& runs) {
    OrderedJson rows = OrderedJson::array();
    std::vector<std::string> names;
    std::vector<OrderedJson> usual;
    for (const RunHistory& run : runs) {
        int64_t processes = std::clamp<int64_t>(integer_in(run.start(), "processes", 1), 1, 1 << 20);
        usual.push_back(usual_options(run.options(), (int)processes));
        for (const auto& [name, _] : run.options().items()) {
            if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        }
    }
    std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
        auto place = [&](const std::string& name) {
            auto at = std::find_if(option_table().begin(), option_table().end(),
                                   [&](const OptionRow& row) { return row.field == name; });
            return at - option_table().begin();
        };
        return place(a) < place(b);
    });
    for (const std::string& name : names) {
        if (name == form_of_record || name == "run_dir" || name == "overwrite") continue;
        OrderedJson values = OrderedJson::array();
        bool unusual = false, differs = false;
        for (size_t i = 0; i < runs.size(); i++) {
            const nlohmann::json& options = runs[i].options();
            std::string value = options.contains(name) ? option_text(options[name]) : "";
            bool known = usual[i].contains(name) && options.contains(name);
            unusual = unusual ||
                      (options.contains(name) && (!known || usual[i][name] != OrderedJson(options[name])));
            differs = differs || (i > 0 && values[0] != value);
            values.push_back(value);
        }
        std::string standard = usual[0].contains(name) ? option_text(usual[0][name]) : "";
        if (unusual || differs) {
            std::string option = "--" + name;
            std::replace(option.begin(), option.end(), '_', '-');
            rows.push_back({{"name", option}, {"usual", standard}, {"runs", values}, {"differs", differs}});
        }
    }
    return rows;
}

// ----------------------------------------------------------------------------
// the whole report

template <typename List>
OrderedJson rows_json(const List& list) {
    OrderedJson rows = OrderedJson::array();
    for (const nlohmann::json& row : list.items()) rows.push_back(OrderedJson(row));
    return {{"count", list.count()}, {"rows", rows}};
}

inline OrderedJson samples_json(const RunHistory& run) {
    constexpr size_t longest = 4000;  // bytes
    OrderedJson rows = OrderedJson::array();
    for (const nlohmann::json& line : run.samples().items())
        rows.push_back(
            {{"step", integer_in(line, "step")}, {"text", text_in(line, "sample").substr(0, longest)}});
    return {{"count", run.samples().count()}, {"rows", rows}};
}

inline OrderedJson run_json(const RunHistory& run, double now) {
    OrderedJson curves = OrderedJson::object(), phases = OrderedJson::array();
    std::vector<std::string> names = run.validation_losses();
    names.insert(names.begin(), {"loss", "grad_norm", "lr", "tokens_per_s", "mfu", "gemm_share", "ms"});
    for (const std::string& name : names) {
        const Series& series = run.series(name);
        if (series.points() + series.not_finite() > 0) curves[name] = curve_json(series);
    }
    for (const auto& [name, series] : run.phases()) {
        OrderedJson phase = curve_json(series);
        phase["name"] = name;
        phases.push_back(phase);
    }
    const char* states[] = {"complete", "running", "recent", "stopped", "cut_short", "unknown"};
    return {{"name", run.run_dir()},
            {"state", states[(int)run.state(now)]},
            {"state_words", state_words(run, now)},
            {"step", run.last_step()},
            {"steps", run.steps()},
            {"notes", run.notes()},
            {"facts", Facts(run, now).json()},
            {"curves", curves},
            {"tokens", clock_json(run.tokens())},
            {"seconds", clock_json(run.seconds())},
            {"phases", phases},
            {"waited", curve_json(run.waited())},
            {"memory", OrderedJson(array_in(run.start(), "memory"))},
            {"measured", run.measures_ranks()},
            {"heat", heat_json(run.ranks())},
            {"slow", slow_json(run)},
            {"health", health_json(run.ranks())},
            {"pipeline", pipeline_json(run.ranks())},
            {"skipped", rows_json(run.skipped())},
            {"incidents", rows_json(run.incidents())},
            {"checkpoints", rows_json(run.checkpoints())},
            {"evaluations", rows_json(run.evaluations())},
            {"samples", samples_json(run)}};
}

inline OrderedJson report_json(const std::vector<RunHistory>& runs, const std::string& made) {
    OrderedJson json = {{"made", made}, {"program", program_version}, {"runs", OrderedJson::array()}};
    for (const RunHistory& run : runs) json["runs"].push_back(run_json(run, seconds_of(made)));
    json["options"] = options_json(runs);
    return json;
}
