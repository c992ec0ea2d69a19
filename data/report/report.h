/*
The report subcommand: what runs did, as one HTML page that needs no network, as CSV, or for TensorBoard. It
only reads run directories, so it works on any machine, and while a run is active.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/figures.h"
#include "data/options/options.h"
#include "data/report/report_data.h"
#include "data/report/run_history.h"
#include "data/report/scalars.h"
#include "report_page.h"  // report_page: data/report/page.html as a text, made by the Makefile

// Returns the page with its data in place of null. In JSON "<" occurs only in strings, where it is escaped so
// that HTML cannot take it for the end of the script.
inline std::string page_with(const OrderedJson& data) {
    constexpr std::string_view page = report_page, place = ">null</script>";
    const size_t at = page.find(place);
    std::string json = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    std::string result(page.substr(0, at + 1));
    for (char c : json) {
        if (c == '<')
            result += "\\u003c";
        else
            result += c;
    }
    return result.append(page.substr(at + place.find('<')));
}

inline void write_page(const std::vector<std::string>& places, const std::string& path) {
    std::vector<RunHistory> runs;
    for (const std::string& place : places) {
        RunHistory run(place);
        if (!runs.empty()) run.compare_validation(runs[0]);
        runs.push_back(std::move(run));
    }
    std::string made = utc_time();
    std::string page = page_with(report_json(runs, made));
    write_whole(path, page);
    for (const RunHistory& run : runs) {
        print("%s: %s\n", run.run_dir().c_str(), state_words(run, seconds_of(made)).c_str());
        for (const std::string& note : run.notes()) print("  %s\n", note.c_str());
    }
    print("report: %s (%sB)\n", path.c_str(), human((double)page.size()).c_str());
}

// Writes the events of each run to its own folder: TensorBoard distinguishes runs by their folders.
inline void write_event_files(const ReportOptions& o) {
    for (size_t i = 0; i < o.runs.size(); i++) {
        std::filesystem::path folder = std::filesystem::path(o.runs[i]) / "tensorboard";
        if (!o.output.empty()) {
            folder = o.output;
            if (o.runs.size() > 1) {
                std::filesystem::path name = (std::filesystem::path(o.runs[i]) / "").parent_path().filename();
                folder /= std::to_string(i) + "_" + name.string();
            }
        }
        make_folder(folder, "check the path or name another with --output");
        if (o.output.empty()) check_folder_of_run(folder);
        // The name is fixed, so newer events replace older ones.
        std::string path = folder / "events.out.tfevents.0.train_gpt";
        write_events(o.runs[i], path);
        print("report: %s\n", path.c_str());
    }
}

inline void report_runs(const ReportOptions& o) {
    for (const std::string& run : o.runs) check_run_log(run);
    auto path = [&](const char* name) { return o.output.empty() ? o.runs[0] + "/" + name : o.output; };
    switch (o.format) {
    case ReportFormat::html:
        write_page(o.runs, path("report.html"));
        return;
    case ReportFormat::csv:
        write_csv(o.runs, path("report.csv"));
        print("report: %s\n", path("report.csv").c_str());
        return;
    case ReportFormat::tensorboard:
        write_event_files(o);
        return;
    }
}
