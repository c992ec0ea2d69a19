/*
Compares two run directories: what log.jsonl says of each step, and each tensor of the newest checkpoints,
with its moments.

Losses, gradient norms and validation losses are compared relative to the reference; a tensor by the largest
difference of its elements, relative to the reference's largest element; a moment relative to the largest
element of this moment in any tensor. Neither the pieces into which a checkpoint is cut nor the order of a
table's rows matter. With `bitwise` all limits are 0, and tensors must have the same bits.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/checkpoint/folder.h"
#include "data/base/error.h"
#include "data/base/json.h"
#include "data/run/run_log.h"

struct RunLimits {
    double losses = 1e-5, weights = 1e-5, moments = 1e-5;
    bool bitwise = false;
};

// The largest difference of a kind so far. NaN counts as infinite, even if both runs have it: such runs prove
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

// Fields of a log by step; a null field is NaN.
using LogFields = std::map<int64_t, std::map<std::string, double>>;

inline LogFields read_log(const std::string& run) {
    std::string path = run + "/log.jsonl";
    std::ifstream file(path);
    if (!file) fail("%s: cannot open it; name a run directory", path.c_str());
    LogFields fields;
    for (std::string line; std::getline(file, line);) {
        nlohmann::json object = parse_json(line, path);
        int64_t step = json_integer(object.value("step", nlohmann::json()), 0, INT64_MAX, path + ": step");
        for (const auto& [name, value] : object.items()) {
            if (name != "loss" && name != "grad_norm" && name != "lr" && name != "tokens" &&
                !is_validation_loss(name))
                continue;
            bool first = fields[step].emplace(name, value.is_number() ? value.get<double>() : NAN).second;
            if (!first)
                fail("%s: step %lld has two values of %s", path.c_str(), (long long)step, name.c_str());
        }
    }
    if (fields.empty()) fail("%s: no steps; the run has not begun", path.c_str());
    return fields;
}

// Returns the largest difference of each field. Both runs must have the same fields in the same steps.
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
// checkpoints

// How much a tensor differs in one slot, and its largest element.
struct TensorDifference {
    std::string name;
    double largest = 1e-30, difference = 0;
};

// bitwise: bits that differ count even if the values are equal.
inline TensorDifference compare_tensor(const std::string& name, const std::vector<float>& values,
                                       const std::vector<float>& want, bool bitwise) {
    TensorDifference result = {name};
    for (size_t i = 0; i < want.size(); i++) {
        double element = std::abs((double)values[i] - want[i]);
        result.difference = std::isnan(element) ? INFINITY : std::max(result.difference, element);
        result.largest = std::max(result.largest, (double)std::abs(want[i]));
    }
    bool same_bits = memcmp(values.data(), want.data(), want.size() * sizeof(float)) == 0;
    if (bitwise && !same_bits) result.difference = std::max(result.difference, 1e-45);
    return result;
}

// Reads a tensor of integers.
inline std::vector<uint64_t> read_numbers(const CheckpointReader& reader, int tensor) {
    const CheckpointIndex& index = reader.index();
    std::vector<uint64_t> numbers(index.tensors[(size_t)tensor].size());
    for (const CheckpointPiece& piece : index.pieces)
        if (piece.tensor == (uint32_t)tensor) reader.read(piece, (char*)&numbers[piece.begin]);
    return numbers;
}

// The tensors of a checkpoint by name. Parts of a table that several saves wrote (comm/ngram_checkpoint.h)
// share a name, and are in the order of the saves.
using TensorParts = std::map<std::string, std::map<int, int>>;  // maps a part's number to its tensor's
inline TensorParts tensor_parts(const CheckpointIndex& index) {
    TensorParts parts;
    for (size_t i = 0; i < index.tensors.size(); i++) {
        std::string name = index.tensors[i].name;
        int number = 0;
        if (size_t at = name.find(".changes."); at != name.npos) {
            size_t digits = at + strlen(".changes."), end = name.find('.', digits);
            number = std::stoi(name.substr(digits, end - digits));
            name.erase(at, end - at);
        }
        parts[name][number] = (int)i;
    }
    return parts;
}

// Reads the rows of a tensor in an order that all layouts share: those of a table by row number, each as last
// saved.
inline std::vector<float> read_in_order(CheckpointReader& reader, const std::map<int, int>& parts,
                                        Slot slot) {
    std::map<uint64_t, std::vector<float>> rows;
    for (auto [number, tensor] : parts) {
        const CheckpointTensor& of = reader.index().tensors[(size_t)tensor];
        std::vector<float> values(of.size());
        if (slot != Slot::data) {
            reader.read_floats(tensor, slot, 0, values.size(), values.data());
        } else {
            std::ranges::copy(read_numbers(reader, tensor), values.begin());
        }
        int ids = reader.index().find(of.name.substr(0, of.name.rfind('.')) + ".ids");
        if (ids < 0) return values;
        const float* row = values.data();
        for (uint64_t id : read_numbers(reader, ids)) {
            rows[id].assign(row, row + of.width());
            row += of.width();
        }
    }
    std::vector<float> in_order;
    for (auto& [id, row] : rows) in_order.insert(in_order.end(), row.begin(), row.end());
    return in_order;
}

// Fails unless both checkpoints are of the same step and model.
inline void check_comparable(const CheckpointIndex& a, const CheckpointIndex& b) {
    if (a.step() != b.step() || a.samples() != b.samples()) {
        fail("newest checkpoints of step %lld, sample %lld, and of step %lld, sample %lld; not runs of one "
             "length",
             (long long)a.step(), (long long)a.samples(), (long long)b.step(), (long long)b.samples());
    }
    TensorParts of_a = tensor_parts(a), of_b = tensor_parts(b);
    if (of_a.size() != of_b.size())
        fail("%zu tensors and %zu; not runs of one model", of_a.size(), of_b.size());
    for (const auto& [name, parts] : of_b) {
        if (!of_a.contains(name))
            fail("only one of the runs has tensor %s; not runs of one model", name.c_str());
        const CheckpointTensor &one = a.tensors[(size_t)of_a[name].begin()->second],
                               &other = b.tensors[(size_t)parts.begin()->second];
        bool same_shape =
            name.find(".table.") != name.npos ? one.width() == other.width() : one.shape == other.shape;
        if (!same_shape || one.slots != other.slots)
            fail("tensor %s has two shapes or types; not runs of one model", name.c_str());
    }
}

// Returns the largest difference of any tensor in each slot of the newest checkpoints.
inline std::map<Slot, Largest> compare_checkpoints(const std::string& run, const std::string& reference,
                                                   bool bitwise) {
    CheckpointReader a(newest_checkpoint(run)), b(newest_checkpoint(reference));
    check_comparable(a.index(), b.index());
    std::map<Slot, std::vector<TensorDifference>> tensors;
    TensorParts of_a = tensor_parts(a.index());
    for (const auto& [name, parts] : tensor_parts(b.index())) {
        for (int slot = 0; slot < slot_count; slot++) {
            if (!b.index().tensors[(size_t)parts.begin()->second].slots[(size_t)slot]) continue;
            std::vector<float> values = read_in_order(a, of_a[name], (Slot)slot),
                               want = read_in_order(b, parts, (Slot)slot);
            if (values.size() != want.size())
                fail("tensor %s has %zu elements and %zu; not runs of one model", name.c_str(), values.size(),
                     want.size());
            tensors[(Slot)slot].push_back(compare_tensor(name, values, want, bitwise));
        }
    }
    std::map<Slot, Largest> largest;
    for (const auto& [slot, differences] : tensors) {
        // Some tensors have gradients that are zero except for rounding, so their moments have no scale of
        // their own.
        bool moment = is_of_optimizer(slot);
        double scale = 1e-30;
        for (const TensorDifference& tensor : differences) scale = std::max(scale, tensor.largest);
        for (const TensorDifference& tensor : differences)
            largest[slot].add(tensor.difference / (moment ? scale : tensor.largest), tensor.name);
    }
    return largest;
}

// ----------------------------------------------------------------------------
// both

// Returns true if the runs agree; `line` receives how well.
inline bool compare_runs(const std::string& run, const std::string& reference, RunLimits limits,
                         std::string* line) {
    if (limits.bitwise) limits.losses = limits.weights = limits.moments = 0;
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
    for (const auto& [slot, largest] : compare_checkpoints(run, reference, limits.bitwise)) {
        bool moment = is_of_optimizer(slot);
        judge(slot_name(slot), largest, moment ? limits.moments : limits.weights);
    }
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
                        : option == "--moments" ? &limits.moments
                                                : nullptr;
        char* end = nullptr;
        if (limit && i + 1 < argc) *limit = strtod(argv[++i], &end);
        if (!end || *end || end == argv[i] || !(*limit >= 0))
            fail("%s: no such option or no limit after it; there are --losses, --weights, --moments and "
                 "--bitwise",
                 argv[i]);
    }
    return limits;
}
