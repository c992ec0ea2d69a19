/*
Compares two run directories: what log.jsonl says of each step, and each tensor of weights.bin. It prints one
line with the largest differences and where they are; the exit code is 1 if one is beyond its limit, or if the
two are not runs of the same length and model.

    compare_runs RUN REFERENCE [--losses LIMIT] [--weights LIMIT] [--bitwise]

Losses, gradient norms and validation losses are compared relative to the reference; a tensor by the largest
difference of its elements, relative to the largest element of the reference. --bitwise: both limits are 0,
and tensors must have the same bytes.
*/
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "data/error.h"
#include "data/json.h"
#include "data/weights_file.h"

struct RunLimits {
    double losses = 1e-5, weights = 1e-5;
    bool bitwise = false;
};

// The largest difference of a kind so far. NaN counts as infinite, also where both have it: such runs prove
// nothing.
struct Largest {
    double value = 0;
    std::string where;

    void add(double difference, const std::string& place) {
        if (std::isnan(difference)) difference = INFINITY;
        if (difference > value || where.empty()) value = difference, where = place;
    }
};

inline double relative_difference(double a, double b) {
    return a == b ? 0 : std::abs(a - b) / std::max(std::abs(b), 1e-30);
}

// ----------------------------------------------------------------------------
// logs

// Fields of a log by step; a field that is null is NaN.
using LogFields = std::map<int64_t, std::map<std::string, double>>;

inline LogFields read_log(const std::string& run) {
    std::string path = run + "/log.jsonl";
    std::ifstream file(path);
    if (!file) fail("%s: cannot open it; name a run directory", path.c_str());
    LogFields fields;
    for (std::string line; std::getline(file, line);) {
        nlohmann::json object = parse_json(line, path);
        int64_t step = json_integer(object.value("step", nlohmann::json()), 0, INT64_MAX, path + ": step");
        for (const char* name : {"loss", "grad_norm", "lr", "tokens", "val_loss"}) {
            if (!object.contains(name)) continue;
            const nlohmann::json& value = object[name];
            bool first = fields[step].emplace(name, value.is_number() ? value.get<double>() : NAN).second;
            if (!first) fail("%s: step %lld has two values of %s", path.c_str(), (long long)step, name);
        }
    }
    if (fields.empty()) fail("%s: no steps; the run has not begun", path.c_str());
    return fields;
}

// Largest difference of each field. Both runs must have the same fields in the same steps.
inline std::map<std::string, Largest> compare_logs(const std::string& run, const std::string& reference) {
    LogFields a = read_log(run), b = read_log(reference);
    std::map<std::string, Largest> largest;
    for (const LogFields* log : {&a, &b}) {
        for (const auto& [step, fields] : *log) {
            for (const auto& [name, unused] : fields) {
                if (!a[step].contains(name) || !b[step].contains(name))
                    fail("step %lld: only one of the runs has %s", (long long)step, name.c_str());
                largest[name].add(relative_difference(a[step][name], b[step][name]),
                                  "step " + std::to_string(step));
            }
        }
    }
    return largest;
}

// ----------------------------------------------------------------------------
// weights

// The elements of a tensor as float; bf16 is the upper half of fp32.
inline std::vector<float> tensor_values(const WeightsReader& reader, const StoredTensor& tensor,
                                        std::vector<char>& bytes) {
    bytes.resize(tensor.bytes);
    reader.read(tensor, 0, bytes.data(), bytes.size());
    size_t width = dtype_size(tensor.dtype);
    std::vector<float> values(bytes.size() / width);
    for (size_t i = 0; i < values.size(); i++) {
        uint32_t bits = 0;
        memcpy((char*)&bits + sizeof bits - width, &bytes[i * width], width);
        memcpy(&values[i], &bits, sizeof bits);
    }
    return values;
}

// Largest difference of any tensor. With `bitwise`, bytes that differ count even where the values are equal.
inline Largest compare_weights(const std::string& run, const std::string& reference, bool bitwise) {
    WeightsReader a(run + "/weights.bin"), b(reference + "/weights.bin");
    if (a.tensors().size() != b.tensors().size())
        fail("%zu tensors and %zu; not runs of one model", a.tensors().size(), b.tensors().size());
    Largest largest;
    std::vector<char> bytes_a, bytes_b;
    for (const StoredTensor& tensor : b.tensors()) {
        const StoredTensor& other = a.tensor(tensor.name);
        if (other.shape != tensor.shape || other.dtype != tensor.dtype)
            fail("tensor %s has two shapes or types; not runs of one model", tensor.name.c_str());
        std::vector<float> values = tensor_values(a, other, bytes_a),
                           want = tensor_values(b, tensor, bytes_b);
        double scale = 1e-30, difference = 0;
        for (size_t i = 0; i < want.size(); i++) {
            double element = std::abs((double)values[i] - want[i]);
            difference = std::isnan(element) ? INFINITY : std::max(difference, element);
            scale = std::max(scale, (double)std::abs(want[i]));
        }
        if (bitwise && bytes_a != bytes_b) difference = std::max(difference, 1e-45);
        largest.add(difference / scale, tensor.name);
    }
    return largest;
}

// ----------------------------------------------------------------------------
// both

// True if the runs agree; `line` says how well.
inline bool compare_runs(const std::string& run, const std::string& reference, RunLimits limits,
                         std::string* line) {
    if (limits.bitwise) limits.losses = limits.weights = 0;
    bool good = true;
    *line = run + " and " + reference + ":";
    auto judge = [&](const std::string& name, const Largest& largest, double limit) {
        bool beyond = !(largest.value <= limit);
        good = good && !beyond;
        *line += text(" %s %.1e at %s", name.c_str(), largest.value, largest.where.c_str());
        *line += beyond ? text(" (limit %g),", limit) : ",";
    };
    for (const auto& [name, largest] : compare_logs(run, reference)) {
        bool exact = name == "lr" || name == "tokens";
        if (!exact || largest.value > 0) judge(name, largest, exact ? 0 : limits.losses);
    }
    judge("weights", compare_weights(run, reference, limits.bitwise), limits.weights);
    line->back() = ';';
    *line += good ? " they agree" : " they differ";
    return good;
}

inline RunLimits parse_limits(int argc, char** argv) {
    RunLimits limits;
    for (int i = 3; i < argc; i++) {
        std::string option = argv[i];
        if (option == "--bitwise") {
            limits.bitwise = true;
            continue;
        }
        double* limit = option == "--losses"    ? &limits.losses
                        : option == "--weights" ? &limits.weights
                                                : nullptr;
        char* end = nullptr;
        if (limit && i + 1 < argc) *limit = strtod(argv[++i], &end);
        if (!end || *end || end == argv[i] || !(*limit >= 0))
            fail("%s: no such option or no limit after it; there are --losses, --weights and --bitwise",
                 argv[i]);
    }
    return limits;
}

#ifndef TESTING
int main(int argc, char** argv) try {
    if (argc < 3) fail("usage: compare_runs RUN REFERENCE [--losses LIMIT] [--weights LIMIT] [--bitwise]");
    std::string line;
    bool good = compare_runs(argv[1], argv[2], parse_limits(argc, argv), &line);
    printf("%s\n", line.c_str());
    return good ? 0 : 1;
} catch (const std::exception& error) {
    fprintf(stderr, "compare_runs: %s\n", error.what());
    return 1;
}
#endif
