/*
Where the parameters of a model lie. A table has one row for each tensor; the tensors that are used together
make a unit (the embedding, each block, the head), and a unit is one flat buffer, padded so that any number of
ranks up to `ranks` that divides it cuts it into equal parts. What is true of parameters is true of their
gradients and of the optimizer's state.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "data/error.h"        // text
#include "kernels/common.cuh"  // ceil_div

// A model is a chain of units: the embedding, each block, and the head.
enum class Unit { embedding, block, head };

struct TensorRow {
    int id;
    Unit unit;
    const char* name;         // in files; the tensors of block 3 are "layers.3." + name
    size_t rows, cols;        // cols 0: a vector
    float mean, deviation;    // initial values are normal
    bool decay;               // weight decay: matrices only
    size_t padding_rows = 0;  // rows in memory beyond `rows`: always zero, not in files

    std::vector<int64_t> shape() const {
        return cols ? std::vector<int64_t>{(int64_t)rows, (int64_t)cols}
                    : std::vector<int64_t>{(int64_t)rows};
    }
    size_t size() const { return rows * std::max<size_t>(cols, 1); }
    size_t padded_size() const { return (rows + padding_rows) * std::max<size_t>(cols, 1); }
};

// The tensors of one unit in a buffer of parameters, gradients or moments. Null where a switch is off.
template <typename T>
struct UnitTensors {
    static constexpr int most = 32;
    T* at[most] = {};
    T* operator[](int id) const { return at[id]; }
};

// A run of elements of one tensor, as a part of a unit holds it.
struct TensorPart {
    const TensorRow* row;
    std::string name;
    size_t first, count;  // elements [first, first + count) of the tensor
    size_t at;            // where the first of them is in the unit
};

class ParameterLayout {
public:
    // Each unit can be cut for any divisor of `ranks`, each part beginning on 256 bytes. tied: the head reads
    // the embedding's parameters, and adds to their gradient.
    ParameterLayout(std::vector<TensorRow> rows, int layers_, bool tied_, int ranks)
        : layers(layers_), tied(tied_), rows_(std::move(rows)) {
        constexpr size_t alignment = 64;  // elements
        auto round_up = [](size_t size, size_t to) { return ceil_div(size, to) * to; };
        for (const TensorRow& row : rows_) {
            size_t& end = unit_size_[(int)row.unit];
            offset_[row.id] = end;
            end += round_up(row.padded_size(), alignment);
        }
        for (size_t& size : unit_size_) size = round_up(size, alignment * ranks);
    }

    int units() const { return layers + 2; }
    int last_unit() const { return layers + 1; }

    size_t unit_size(int unit) const { return unit_size_[(int)kind(unit)]; }

    size_t unit_offset(int unit) const {
        if (unit == 0) return 0;
        return unit_size_[(int)Unit::embedding] + (size_t)(unit - 1) * unit_size_[(int)Unit::block];
    }

    size_t size() const { return unit_offset(last_unit()) + unit_size_[(int)Unit::head]; }

    size_t parameter_count() const {
        size_t count = 0;
        each([&](const TensorRow& row, const std::string&, size_t) { count += row.size(); });
        return count;
    }

    template <typename T>
    UnitTensors<T> tensors(int unit, T* memory) const {
        UnitTensors<T> tensors;
        for (const TensorRow& row : rows_) {
            if (row.unit == kind(unit)) tensors.at[row.id] = memory + offset_[row.id];
        }
        return tensors;
    }

    // Calls visit(row, full name, offset among all units) for each tensor of the model, in the order of
    // memory.
    template <typename Visit>
    void each(Visit&& visit) const {
        for (int unit = 0; unit < units(); unit++) {
            for (const TensorRow& row : rows_) {
                if (row.unit == kind(unit))
                    visit(row, full_name(row, unit), unit_offset(unit) + offset_[row.id]);
            }
        }
    }

    // What elements [begin, end) of a unit hold, padding left out.
    std::vector<TensorPart> parts(int unit, size_t begin, size_t end) const {
        std::vector<TensorPart> parts;
        for (const TensorRow& row : rows_) {
            if (row.unit != kind(unit)) continue;
            size_t start = offset_[row.id];
            size_t from = std::max(begin, start), to = std::min(end, start + row.size());
            if (from < to) parts.push_back({&row, full_name(row, unit), from - start, to - from, from});
        }
        return parts;
    }

    const int layers;
    const bool tied;

private:
    Unit kind(int unit) const {
        return unit == 0 ? Unit::embedding : unit <= layers ? Unit::block : Unit::head;
    }

    std::string full_name(const TensorRow& row, int unit) const {
        return (row.unit == Unit::block ? text("layers.%d.", unit - 1) : "") + row.name;
    }

    std::vector<TensorRow> rows_;
    size_t offset_[UnitTensors<float>::most] = {};
    size_t unit_size_[3] = {};
};
