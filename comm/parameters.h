/*
The layout of a model's parameters in memory. Tensors that are used together form a unit (the embedding, each
block, the head), and a unit is one flat buffer, padded so that the ranks of a shard group cut it into equal
parts. Gradients and optimizer state are laid out in the same way.

A rank holds the units of its pipeline stage, and its tensor rank's part of each tensor. With 2 tensor ranks:

    Shard        the tensor         rank 0       rank 1
    replicated   a b c d            a b c d      a b c d     the gradient is the sum of both
    rows         a b                a b          c d
                 c d
                 e f                e f          g h         (another section, cut like the first)
                 g h
    columns      a b                a            b
                 c d                c            d

A unit has the same size on all tensor ranks. The replicated tensors are first in it, then those that are cut;
the matrices of a block, which are all cut, are at the end. In the last block's unit, tensors that other
blocks do not have come before those that all blocks have. UnitBuffers is memory for whole units where ZeRO
keeps only parts.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "data/base/error.h"            // fail, text
#include "data/checkpoint/box.h"        // BoxRun
#include "data/options/model_config.h"  // TensorRow, tensor_table
#include "kernels/common.cuh"           // ceil_div

// The part of a model that a rank holds: the units of its stage, and its tensor rank's part of each tensor.
struct StageUnits {
    int tp = 1, tensor = 0;       // tensor ranks, and which of them this is
    std::vector<int> units = {};  // this stage's, ascending; empty: all
    // The embedding is only a copy for the tied classifier: the one that counts is elsewhere.
    bool embedding_copy = false;
};

// The tensors of one unit in a buffer of parameters, gradients or moments. Null for tensors not in the unit.
template <typename T>
struct UnitTensors {
    static constexpr int most = 32;
    static_assert((int)tensor_count <= most);
    T* at[most] = {};
    T* operator[](int id) const { return at[id]; }
};

// A rank's part of a tensor. first_row: its first row in the whole tensor, if rows are cut as one section.
struct LocalShape {
    size_t first_row, rows, padded_rows, cols;
    Shard shard;
    size_t padded_size() const { return padded_rows * std::max<size_t>(cols, 1); }
};

// Consecutive elements of one tensor in a unit. May span several sections of the model; see section_parts().
struct TensorPart : BoxRun {
    const TensorRow* row;
    std::string name;
    // The number of the first element, for random numbers. It counts elements of the whole tensor or, if
    // columns are cut, of all ranks' columns, one rank after another. Copies have the same numbers.
    size_t first;
    size_t at;  // the first element's offset in the unit
    // Set if these elements count when those of all ranks are combined, as in the norm of the gradients and
    // in files. Tensor ranks, and the two ends of a pipeline, may have copies: only the first one counts.
    bool counts;

    // Calls visit(first, count, offset) for each run of elements that is contiguous here: [first, first +
    // count) of the whole tensor, row-major, at `offset` elements from the beginning of this part.
    template <typename Visit>
    void each_run(Visit&& visit) const {
        BoxRun::each_run(row->width(), visit);
    }

    // Elements [from, from + n) of this part.
    TensorPart slice(size_t from, size_t n) const {
        TensorPart part = *this;
        part.begin += from, part.first += from, part.at += from, part.count = n;
        return part;
    }
};

// Elements of one section.
struct SectionPart : TensorPart {
    int section;   // its number in the model
    size_t rows;   // rows in the section
    size_t start;  // the section's first element in the tensor, or in the box of columns

    bool of_block_matrix() const { return row->is_block_matrix(); }
};

// A matrix or vector of the model: a tensor, or one of its sections.
struct ModelSection {
    const TensorRow* row;
    std::string name;  // the tensor's, followed by the section's if it has one
    size_t rows;
};

// Calls visit(piece) for all parts in order, each cut into pieces of at most `most` elements.
template <typename Visit>
void each_piece(const std::vector<TensorPart>& parts, size_t most, Visit&& visit) {
    for (const TensorPart& part : parts) {
        for (size_t done = 0; done < part.count; done += most)
            visit(part.slice(done, std::min(most, part.count - done)));
    }
}

// Parts of a unit begin at multiples of this many elements: 16 bytes of the narrowest type, which vector
// loads and NCCL access at once.
constexpr size_t part_alignment = 8;

// Elements [begin, end) of a unit.
struct UnitRange {
    size_t begin, end;
    bool operator==(const UnitRange&) const = default;
};

// Elements of a unit whose gradient is the sum over `ranks` neighboring tensor ranks: tensor rank r is in
// group r / ranks.
struct GradientSum {
    size_t begin, count;
    int ranks;
    bool operator==(const GradientSum&) const = default;
};

class ParameterLayout {
public:
    // Each unit can be cut into `shards` parts. tied: the head shares the embedding's parameters and
    // gradient.
    ParameterLayout(std::vector<TensorRow> rows, int layers_, bool tied_, int shards, StageUnits place_ = {})
        : layers(layers_),
          tied(tied_),
          place(std::move(place_)),
          rows_(std::move(rows)),
          held_(place.units),
          shards_(shards) {
        std::stable_sort(rows_.begin(), rows_.end(),
                         [](const TensorRow& a, const TensorRow& b) { return turn(a) < turn(b); });
        for (const TensorRow& row : rows_) local_[row.id] = local_part(row);
        if (held_.empty()) {
            for (int unit = 0; unit < units(); unit++) held_.push_back(unit);
        }
        unit_size_.resize(units());
        const size_t divides = std::lcm(alignment, part_alignment * (size_t)shards);
        auto nothing = [](const TensorRow&, size_t) {};
        for (int unit : held_) unit_size_[unit] = round_up(each_row(unit, nothing), divides);
        std::erase_if(held_, [&](int unit) { return !has(unit); });
        unit_offset_.push_back(0);
        for (size_t unit_size : unit_size_) unit_offset_.push_back(unit_offset_.back() + unit_size);
        first_section_.push_back(0);
        for (int unit = 0; unit < units(); unit++)
            first_section_.push_back(first_section_.back() + sections_before(nullptr, unit));
    }

    // The layout of the same units on another tensor rank.
    ParameterLayout of_tensor_rank(int tensor) const {
        StageUnits there = place;
        there.tensor = tensor;
        return {rows_, layers, tied, shards_, there};
    }

    // Units have the same numbers on all stages. A head without tensors is on no stage.
    int units() const { return layers + 2; }
    int last_unit() const { return layers + 1; }
    const std::vector<int>& held() const { return held_; }  // the units of this stage
    bool has(int unit) const { return unit_size_[unit] > 0; }

    // Returns whether both units have the same tensors.
    bool are_alike(int unit, int other) const {
        return std::ranges::all_of(
            rows_, [&](const TensorRow& row) { return is_in(row, unit) == is_in(row, other); });
    }

    size_t unit_size(int unit) const { return unit_size_[unit]; }  // 0: it is not here
    size_t unit_offset(int unit) const { return unit_offset_[unit]; }
    // The number of elements of a unit before the matrices of its block; all if it has none.
    size_t before_matrices(int unit) const {
        size_t before = unit_size(unit);
        each_row(unit, [&](const TensorRow& row, size_t at) {
            if (row.is_block_matrix()) before = std::min(before, at);
        });
        return before;
    }
    size_t size() const { return unit_offset_.back(); }

    // Counts the parameters of the whole model.
    size_t parameter_count() const {
        size_t count = 0;
        each_of_model([&](const TensorRow& row, const std::string&) { count += row.size(); });
        return count;
    }

    LocalShape here(int id) const { return local_[id].shape; }

    template <typename T>
    UnitTensors<T> tensors(int unit, T* memory) const {
        UnitTensors<T> tensors;
        if (!has(unit)) return tensors;
        each_row(unit, [&](const TensorRow& row, size_t at) { tensors.at[row.id] = memory + at; });
        return tensors;
    }

    // Calls visit(row, full name, offset) for each tensor that is here, in the order of memory. The offset is
    // from the beginning of the first unit.
    template <typename Visit>
    void each(Visit&& visit) const {
        for (int unit : held_)
            each_row(unit, [&](const TensorRow& row, size_t at) {
                visit(row, full_name(row, unit), unit_offset(unit) + at);
            });
    }

    // Calls visit(row, full name) for each tensor of the model, in the same order on all ranks: the order of
    // memory in a layout that holds the whole model.
    template <typename Visit>
    void each_of_model(Visit&& visit) const {
        for (int unit = 0; unit < units(); unit++)
            each_row(unit, [&](const TensorRow& row, size_t) { visit(row, full_name(row, unit)); });
    }

    // The parts of tensors in elements [begin, end) of a unit, without padding.
    std::vector<TensorPart> parts(int unit, size_t begin, size_t end) const {
        std::vector<TensorPart> parts;
        if (!has(unit)) return parts;
        each_section(unit, [&](const TensorRow& row, size_t start, const LocalSection& section) {
            const Local& local = local_[row.id];
            size_t from = std::max(begin, start), to = std::min(end, start + section.count);
            if (from >= to) return;
            size_t first = section.number + from - start;
            BoxRun run = {0, row.width(), first, to - from};
            if (local.columns_cut)
                run = {place.tensor * local.shape.cols, local.shape.cols, from - start, to - from};
            parts.push_back({run, &row, full_name(row, unit), first, from, counts(unit, section)});
        });
        return parts;
    }

    // The elements of a unit that count, in as few ranges as possible. Padding in them is zero.
    std::vector<UnitRange> counted(int unit) const {
        std::vector<UnitRange> ranges;
        if (!has(unit)) return ranges;
        bool before = false;
        each_section(unit, [&](const TensorRow&, size_t at, const LocalSection& section) {
            bool now = counts(unit, section);
            if (now && !before) ranges.push_back({at, unit_size(unit)});
            if (!now && before) ranges.back().end = at;
            before = now;
        });
        return ranges;
    }

    int sections() const { return first_section_.back(); }
    // The sections of the whole model, in the order of their numbers.
    std::vector<ModelSection> sections_of_model() const {
        std::vector<ModelSection> all;
        each_of_model([&](const TensorRow& row, const std::string& name) {
            for (const Section& section : row.all_sections())
                all.push_back({&row, name + (*section.name ? "." : "") + section.name, section.rows});
        });
        return all;
    }

    // Cuts parts of a unit where sections begin.
    std::vector<SectionPart> section_parts(int unit, const std::vector<TensorPart>& parts) const {
        std::vector<SectionPart> result;
        for (const TensorPart& part : parts) {
            size_t begin = 0, done = 0;
            int number = first_section_[unit] + sections_before(part.row, unit);
            for (const Section& section : part.row->all_sections()) {
                size_t end = begin + section.rows * part.columns;
                size_t from = part.begin + done, to = std::min(part.begin + part.count, end);
                if (from >= begin && from < to) {
                    result.push_back({part.slice(done, to - from), number, section.rows, begin});
                    done += to - from;
                }
                begin = end, number++;
            }
        }
        return result;
    }

    // Counts the section_parts() of a whole unit.
    size_t section_parts(int unit) const {
        size_t count = 0;
        each_row(unit, [&](const TensorRow& row, size_t) {
            if (row.shard != Shard::rows || place.tp == 1)
                count += row.section_count();
            else
                for (const LocalSection& section : local_[row.id].sections) count += section.count > 0;
        });
        return count;
    }

    // The ranges of a unit whose gradients are partial sums, to be summed over tensor ranks.
    std::vector<GradientSum> sums(int unit) const {
        std::vector<GradientSum> sums;
        if (place.tp == 1 || !has(unit)) return sums;
        each_section(unit, [&](const TensorRow& row, size_t at, const LocalSection& section) {
            if (section.copies == 1 || section.count == 0) return;
            // replicated tensors and the padding between them form one range
            bool goes_on = !sums.empty() && sums.back().ranks == section.copies &&
                           (row.shard == Shard::replicated || sums.back().begin + sums.back().count == at);
            if (!goes_on) sums.push_back({at, 0, section.copies});
            sums.back().count = at + section.count - sums.back().begin;
        });
        return sums;
    }

    const int layers;
    const bool tied;
    const StageUnits place;

private:
    static constexpr size_t alignment = 64;  // a tensor begins at a multiple of this many elements

    // In elements. A tensor whose rows are not cut is one section.
    struct LocalSection {
        size_t number;  // its first element's number
        size_t local;   // its first element in the local tensor
        size_t count;
        int copies;  // neighboring tensor ranks with the same elements
    };
    struct Local {
        LocalShape shape = {};
        bool columns_cut = false;
        std::vector<LocalSection> sections = {};
    };

    // The sort key of tensors: by unit, then by their order in it.
    static int turn(const TensorRow& row) {
        return (int)row.unit * 3 + (row.shard != Shard::replicated) + row.is_block_matrix();
    }

    Local local_part(const TensorRow& row) const {
        Local local;
        size_t tp = place.tp, tensor = place.tensor;
        local.columns_cut = row.shard == Shard::columns && tp > 1;
        if (row.shard != Shard::rows || tp == 1) {
            size_t cols = local.columns_cut ? row.cols / tp : row.cols;
            if (local.columns_cut && cols * tp != row.cols) refuse(row);
            local.shape = {0, row.rows, round_up(row.rows, row.pad_to), cols, row.shard};
            size_t size = row.rows * std::max<size_t>(cols, 1);
            local.sections = {
                {local.columns_cut ? tensor * size : 0, 0, size, local.columns_cut ? 1 : place.tp}};
            return local;
        }
        std::vector<Section> sections = row.all_sections();
        size_t begin = 0, here = 0, most = 0;  // rows
        for (const Section& section : sections) {
            size_t rows = section.rows, pieces = section.pieces,
                   cuts = pieces > 0 ? std::min(pieces, tp) : tp;
            // unequal parts would shift the sections after them
            if (tp % cuts || (pieces > 0 && pieces % cuts) || (sections.size() > 1 && rows % cuts))
                refuse(row);
            size_t copies = tp / cuts, part = tensor / copies;
            size_t from = rows * part / cuts, to = rows * (part + 1) / cuts;
            local.sections.push_back(
                {(begin + from) * row.width(), here * row.width(), (to - from) * row.width(), (int)copies});
            if (begin == 0) local.shape.first_row = from;
            begin += rows;
            here += to - from;
            most += ceil_div(rows, cuts);
        }
        if (begin != row.rows) {
            fail("tensor %s: %zu rows, but %zu in its sections; each row must be in one", row.name, row.rows,
                 begin);
        }
        local.shape.rows = here;
        local.shape.padded_rows = round_up(most, row.pad_to);
        local.shape.cols = row.cols;
        local.shape.shard = row.shard;
        return local;
    }

    [[noreturn]] void refuse(const TensorRow& row) const {
        fail("--tp %d: tensor %s cannot be cut that many ways; choose a --tp that divides the heads and the "
             "widths of the MLP and of the local filter",
             place.tp, row.name);
    }

    Unit kind(int unit) const {
        return unit == 0 ? Unit::embedding : unit <= layers ? Unit::block : Unit::head;
    }

    bool is_in(const TensorRow& row, int unit) const {
        bool among_last = row.unit == Unit::last_block && unit == layers;
        return among_last || (row.unit == kind(unit) && (row.unit != Unit::block || row.is_in(unit - 1)));
    }

    bool counts(int unit, const LocalSection& section) const {
        return place.tensor % section.copies == 0 && !(unit == 0 && place.embedding_copy);
    }

    // Calls visit(row, its first element in the unit) for each tensor of a unit, in the order of memory.
    // Returns the end of the last.
    template <typename Visit>
    size_t each_row(int unit, Visit&& visit) const {
        size_t at = 0;
        for (const TensorRow& row : rows_) {
            if (!is_in(row, unit)) continue;
            visit(row, at);
            at += round_up(local_[row.id].shape.padded_size(), alignment);
        }
        return at;
    }

    // Calls visit(row, the section's first element in the unit, section) for each section, in the same order.
    template <typename Visit>
    void each_section(int unit, Visit&& visit) const {
        each_row(unit, [&](const TensorRow& row, size_t at) {
            for (const LocalSection& section : local_[row.id].sections)
                visit(row, at + section.local, section);
        });
    }

    // Counts the sections of a unit that come before those of a row; null: all.
    int sections_before(const TensorRow* row, int unit) const {
        int count = 0;
        for (const TensorRow& before : rows_) {
            if (row && before.id == row->id) break;
            if (is_in(before, unit)) count += (int)before.section_count();
        }
        return count;
    }

    std::string full_name(const TensorRow& row, int unit) const {
        return row.unit == Unit::block ? "layers." + std::to_string(unit - 1) + "." + row.name : row.name;
    }

    std::vector<TensorRow> rows_;  // in the order of memory
    std::vector<int> held_;
    Local local_[UnitTensors<float>::most];
    int shards_;
    std::vector<size_t> unit_size_, unit_offset_;
    std::vector<int> first_section_;  // (units + 1) its number in the model; at the end, the count of all
};

// Rows of the vocabulary on each of `tp` ranks, padded.
inline int padded_vocab(const ModelConfig& c, int tp = 1) {
    return ceil_div(ceil_div(c.vocab_size, tp), vocab_multiple) * vocab_multiple;
}

// Returns the layout of the parameters of a model, for a shard group of `shards` ranks.
inline ParameterLayout parameter_layout(const ModelConfig& config, int shards = 1, StageUnits place = {}) {
    return ParameterLayout(tensor_table(config), config.layers, config.tie_embeddings, shards, place);
}

// ----------------------------------------------------------------------------
// units in use

// Memory for whole units where a rank keeps only parts: the units in use, and those being gathered. Blocks
// take turns in a few buffers. The embedding and the head share one, unless they are used together.
class UnitBuffers {
public:
    UnitBuffers(const ParameterLayout& layout, int for_blocks) : place_(layout.units(), -1) {
        int last_unit = layout.last_unit();
        std::vector<int> blocks;
        for (int unit : layout.held()) {
            if (unit > 0 && unit < last_unit) blocks.push_back(unit);
        }
        size_t turns = std::min((size_t)for_blocks, blocks.size());
        std::vector<size_t> largest(turns);  // the last block is larger than others
        for (size_t i = 0; i < blocks.size(); i++) {
            place_[blocks[i]] = (int)(i % turns);
            largest[i % turns] = std::max(largest[i % turns], layout.unit_size(blocks[i]));
        }
        for (size_t size : largest) add(size);

        size_t first = layout.unit_size(0), last = layout.unit_size(last_unit);
        bool one_place = !layout.tied && first > 0 && last > 0;
        if (first > 0) place_[0] = add(one_place ? std::max(first, last) : first);
        if (last > 0) place_[last_unit] = one_place ? place_[0] : add(last);
    }

    int count() const { return (int)offsets_.size(); }
    size_t size() const { return size_; }
    size_t offset(int place) const { return offsets_[place]; }
    int place(int unit) const { return place_[unit]; }  // the buffer of a unit that is held here

private:
    int add(size_t elements) {
        offsets_.push_back(size_);
        size_ += elements;
        return count() - 1;
    }

    std::vector<int> place_;  // by unit; -1: it is not held here
    std::vector<size_t> offsets_;
    size_t size_ = 0;
};
