/*
Writes a timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing, in Chrome's Trace Event
Format, as JSON compressed with gzip. In the format's terms, a rank is a process, and each of its streams is a
thread. Spans lie on threads, arrows connect spans, and counters are numbers of a process over time.

The file is written incrementally under a temporary name, and renamed once it is complete.
*/
#pragma once

#include <zlib.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"

class TraceFile {
public:
    explicit TraceFile(const std::string& path) : file_(path) {
        if (deflateInit2(&zip_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, gzip, 8, Z_DEFAULT_STRATEGY) != Z_OK)
            fail("%s: zlib cannot be initialized; check that there is memory left", path.c_str());
        write("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n");
    }
    ~TraceFile() { deflateEnd(&zip_); }
    TraceFile(const TraceFile&) = delete;
    TraceFile& operator=(const TraceFile&) = delete;

    void name_rank(int rank, const std::string& name) {
        add({{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", name}}}});
        add({{"ph", "M"}, {"name", "process_sort_index"}, {"pid", rank}, {"args", {{"sort_index", rank}}}});
    }
    void name_track(int rank, int track, const std::string& name) {
        add({{"ph", "M"},
             {"name", "thread_name"},
             {"pid", rank},
             {"tid", track},
             {"args", {{"name", name}}}});
        add({{"ph", "M"},
             {"name", "thread_sort_index"},
             {"pid", rank},
             {"tid", track},
             {"args", {{"sort_index", track}}}});
    }

    // Times are in seconds.
    void add_span(int rank, int track, const std::string& name, const char* kind, double begin, double end,
                  nlohmann::ordered_json details) {
        add({{"ph", "X"},
             {"name", name},
             {"cat", kind},
             {"pid", rank},
             {"tid", track},
             {"ts", microseconds(begin)},
             {"dur", microseconds(end - begin)},
             {"args", std::move(details)}});
    }

    // The two ends of an arrow have the same name; each lies in a span.
    void begin_arrow(int rank, int track, const std::string& name, double time) {
        add(arrow("s", rank, track, name, time));
    }
    void end_arrow(int rank, int track, const std::string& name, double time) {
        nlohmann::ordered_json end = arrow("f", rank, track, name, time);
        end["bp"] = "e";  // binds to the enclosing span
        add(end);
    }

    void add_counter(int rank, const std::string& name, double time, nlohmann::ordered_json values) {
        add({{"ph", "C"},
             {"name", name},
             {"pid", rank},
             {"ts", microseconds(time)},
             {"args", std::move(values)}});
    }

    // Completes the file. about: its metadata.
    void commit(const nlohmann::ordered_json& about) {
        std::string rest = json_line(about);
        rest.pop_back();
        write("\n], \"otherData\": " + rest + "}\n");
        deflate_all("", Z_FINISH);
        file_.commit();
    }

private:
    static constexpr int gzip = 15 + 16;  // zlib's window bits, plus 16 for a gzip header

    static double microseconds(double seconds) { return std::round(seconds * 1e9) / 1e3; }

    static nlohmann::ordered_json arrow(const char* kind, int rank, int track, const std::string& name,
                                        double time) {
        return {{"ph", kind},  {"name", "message"}, {"cat", "message"},        {"id", name},
                {"pid", rank}, {"tid", track},      {"ts", microseconds(time)}};
    }

    void add(const nlohmann::ordered_json& event) {
        std::string line = json_line(event);
        line.pop_back();
        write(first_ ? line : ",\n" + line);
        first_ = false;
    }

    void write(const std::string& text) { deflate_all(text, Z_NO_FLUSH); }

    void deflate_all(const std::string& text, int flush) {
        char packed[1 << 14];
        zip_.next_in = (Bytef*)text.data(), zip_.avail_in = (uInt)text.size();
        do {
            zip_.next_out = (Bytef*)packed, zip_.avail_out = sizeof packed;
            deflate(&zip_, flush);
            file_.write(packed, sizeof packed - zip_.avail_out);
        } while (zip_.avail_out == 0);
    }

    NewFile file_;
    z_stream zip_ = {};
    bool first_ = true;
};
