// Parameters partitioned over tensor ranks, stages and shards: every element of every tensor is counted once,
// is in its place, and is summed with its copies where required.
// devices: cpu
#include <doctest/doctest.h>

#include <map>
#include <set>

#include "comm/parameters.h"
#include "test/support/file_testing.h"

namespace {

struct Model {
    const char* name;
    std::vector<TensorRow> rows;
    int layers;
    bool tied;
    int kv_heads, mlp_width;
};

enum Toy { wte, wpe, norm, qkvw, qkvb, projw, projb, scale, fcw, fcdown, tablew, tableb, normf, headw };

// 12 heads of 2, a vocabulary of 97, and biases; nothing divides evenly by chance. Two of five layers have
// tensors that the others lack.
Model gpt2_like() {
    size_t C = 24, V = 97, F = 48;
    std::vector<Section> heads(3, Section{24, 12});
    std::vector<bool> in_two = {false, true, false, false, true};
    using enum Unit;
    return {"like GPT-2",
            {{wte, embedding, "wte", V, C, 0, 1, true, Shard::rows, {}, 16},
             {wpe, embedding, "wpe", 13, C, 0, 1, true, Shard::replicated},
             {norm, block, "norm", C, 0, 1, 0, false, Shard::replicated},
             {qkvw, block, "qkv.weight", 3 * C, C, 0, 1, true, Shard::rows, heads},
             {qkvb, block, "qkv.bias", 3 * C, 0, 0, 0, false, Shard::rows, heads},
             {scale, block, "scale", 5, 0, 1, 0, false},
             {projw, block, "proj.weight", C, C, 0, 1, true, Shard::columns},
             {projb, block, "proj.bias", C, 0, 0, 0, false, Shard::replicated},
             {fcw, block, "fc.weight", F, C, 0, 1, true, Shard::rows},
             {fcdown, block, "fcproj.weight", C, F, 0, 1, true, Shard::columns},
             {tablew, block, "table.weight", F, C, 0, 1, true, Shard::rows, {}, 1, false, in_two},
             {tableb, block, "table.bias", 7, 0, 0, 1, false, Shard::replicated, {}, 1, false, in_two},
             {normf, last_block, "normf", C, 0, 1, 0, false, Shard::replicated}},
            5,
            true,
            12,
            (int)F};
}

// 12 query heads of 4, `kv_heads` heads for keys and values, SwiGLU, an untied head.
Model llama_like(int kv_heads) {
    size_t C = 20, V = 50, A = 48, KV = 4 * kv_heads, F = 36;
    std::vector<Section> heads = {{A, 12}, {KV, kv_heads}, {KV, kv_heads}};
    using enum Unit;
    return {"like LLaMA",
            {{wte, embedding, "wte", V, C, 0, 1, true, Shard::rows, {}, 8},
             {norm, block, "norm", C, 0, 1, 0, false, Shard::replicated},
             {qkvw, block, "qkv.weight", A + 2 * KV, C, 0, 1, true, Shard::rows, heads},
             {qkvb, block, "qkv.bias", A + 2 * KV, 0, 0, 0, false, Shard::rows, heads},
             {projw, block, "proj.weight", C, A, 0, 1, true, Shard::columns},
             {fcw, block, "fc.weight", 2 * F, C, 0, 1, true, Shard::rows, {{F, 0}, {F, 0}}},
             {fcdown, block, "fcproj.weight", C, F, 0, 1, true, Shard::columns},
             {normf, last_block, "normf", C, 0, 1, 0, false, Shard::replicated},
             {headw, head, "head", V, C, 0, 1, true, Shard::rows, {}, 8}},
            5,
            false,
            kv_heads,
            (int)F};
}

std::vector<Model> models() {
    return {gpt2_like(), llama_like(1), llama_like(2), llama_like(12)};
}

using Stages = std::vector<std::vector<int>>;
const Stages splits[] = {{{}},
                         {{0, 1, 2, 3}, {4, 5, 6}},
                         {{0}, {1, 2, 3, 4, 5}, {6}},
                         {{0, 1, 4}, {2, 5}, {3, 6}}};  // two parts per stage

// The places of all tensor ranks of all stages.
std::vector<StageUnits> places_of(const Model& model, int tp, const Stages& stages) {
    std::vector<StageUnits> places;
    for (size_t stage = 0; stage < stages.size(); stage++) {
        StageUnits place = {.tp = tp, .units = stages[stage]};
        if (model.tied && stage > 0 && stage == stages.size() - 1) {
            place.units.insert(place.units.begin(), 0);
            place.embedding_copy = true;
        }
        for (place.tensor = 0; place.tensor < tp; place.tensor++) places.push_back(place);
    }
    return places;
}

ParameterLayout layout_of(const Model& model, int shards, const StageUnits& place = {}) {
    return ParameterLayout(model.rows, model.layers, model.tied, shards, place);
}

// Calls visit(model, tp, places) for every possible combination of model, tp and split into stages.
template <typename Visit>
void each_cut(Visit&& visit) {
    for (const Model& model : models()) {
        for (int tp : {1, 2, 3, 4, 6, 12}) {
            for (const Stages& stages : splits) {
                bool fits = model.kv_heads % tp == 0 || tp % model.kv_heads == 0;
                if (!fits || model.mlp_width % tp) continue;
                CAPTURE(text("%s, %d kv heads, tp %d, %zu stages", model.name, model.kv_heads, tp,
                             stages.size()));
                visit(model, tp, places_of(model, tp, stages));
            }
        }
    }
}

// The part of a tensor that rank `tensor` holds, by the definition of its partition: the indices of its
// elements in the whole tensor, in order, and for each the number of ranks that hold it.
struct Expected {
    std::vector<size_t> element;
    std::vector<int> copies;
};

Expected expected_part(const TensorRow& row, int tp, int tensor) {
    Expected expected;
    size_t width = std::max<size_t>(row.cols, 1);
    auto add_row = [&](size_t number, size_t from, size_t to, int copies) {
        for (size_t col = from; col < to; col++) {
            expected.element.push_back(number * width + col);
            expected.copies.push_back(copies);
        }
    };
    auto sections = row.sections;
    if (sections.empty()) sections = {{row.rows, 0}};
    size_t begin = 0;
    for (Section section : sections) {
        int cuts = section.pieces > 0 && section.pieces < tp ? section.pieces : tp, copies = tp / cuts;
        for (size_t i = 0; i < section.rows; i++) {
            switch (row.shard) {
            case Shard::rows: {
                size_t mine = tensor / copies;
                if (i >= section.rows * mine / cuts && i < section.rows * (mine + 1) / cuts)
                    add_row(begin + i, 0, width, copies);
                break;
            }
            case Shard::columns:
                add_row(begin + i, width / tp * tensor, width / tp * (tensor + 1), 1);
                break;
            default:
                add_row(begin + i, 0, width, tp);
            }
        }
        begin += section.rows;
    }
    return expected;
}

constexpr size_t padding = SIZE_MAX;

// Returns for each element of a unit its index in the whole tensor, or `padding`.
std::vector<size_t> filled(const ParameterLayout& layout, int unit) {
    std::vector<size_t> image(layout.unit_size(unit), padding);
    for (const TensorPart& part : layout.parts(unit, 0, image.size())) {
        part.each_run([&](size_t first, size_t count, size_t offset) {
            for (size_t i = 0; i < count; i++) image.at(part.at + offset + i) = first + i;
        });
    }
    return image;
}

template <typename Visit>
void each_tensor(const Model& model, int unit, Visit&& visit) {
    Unit kind = unit == 0 ? Unit::embedding : unit <= model.layers ? Unit::block : Unit::head;
    for (const TensorRow& row : model.rows) {
        bool is_there = row.unit != Unit::block || row.layers.empty() || row.layers[unit - 1];
        if (row.unit == Unit::last_block ? unit == model.layers : row.unit == kind && is_there) visit(row);
    }
}

}  // namespace

TEST_CASE("each rank has what the cut says, where tensors() says") {
    each_cut([](const Model& model, int tp, const std::vector<StageUnits>& places) {
        for (const StageUnits& place : places) {
            ParameterLayout layout = layout_of(model, 2, place);
            for (int unit : layout.held()) {
                std::vector<size_t> image = filled(layout, unit);
                auto tensors = layout.tensors(unit, image.data());
                size_t filled_elements = 0;
                each_tensor(model, unit, [&](const TensorRow& row) {
                    CAPTURE(row.name);
                    Expected want = expected_part(row, tp, place.tensor);
                    LocalShape shape = layout.here(row.id);
                    REQUIRE(tensors[row.id]);
                    CHECK((tensors[row.id] - image.data()) % 64 == 0);
                    CHECK(std::equal(want.element.begin(), want.element.end(), tensors[row.id]));
                    CHECK(shape.rows * std::max<size_t>(shape.cols, 1) == want.element.size());
                    CHECK(shape.padded_rows % row.pad_to == 0);
                    CHECK(shape.padded_size() >= want.element.size());
                    if (row.shard == Shard::rows && row.sections.empty())
                        CHECK(shape.first_row * std::max<size_t>(row.cols, 1) == want.element.at(0));
                    filled_elements += want.element.size();
                });
                CHECK(image.size() - std::count(image.begin(), image.end(), padding) == filled_elements);
            }
        }
    });
}

TEST_CASE("all ranks of a replica count every element once, and number it alike") {
    each_cut([](const Model& model, int, const std::vector<StageUnits>& places) {
        for (int shards : {1, 3}) {
            std::map<std::string, std::vector<int>> counts;
            std::map<std::string, std::vector<size_t>> numbers;
            layout_of(model, 1).each_of_model([&](const TensorRow& row, const std::string& name) {
                counts[name].assign(row.size(), 0);
                numbers[name].assign(row.size(), padding);
            });
            for (const StageUnits& place : places) {
                ParameterLayout layout = layout_of(model, shards, place);
                for (int unit : layout.held()) {
                    size_t part_size = layout.unit_size(unit) / shards;
                    CHECK(part_size * shards == layout.unit_size(unit));
                    CHECK(part_size % 8 == 0);
                    for (int shard = 0; shard < shards; shard++) {
                        size_t begin = shard * part_size, end = begin + part_size;
                        for (const TensorPart& part : layout.parts(unit, begin, end)) {
                            if (!part.counts) continue;
                            CHECK(part.at >= begin);
                            CHECK(part.at + part.count <= end);
                            part.each_run([&](size_t first, size_t count, size_t) {
                                for (size_t i = 0; i < count; i++) counts.at(part.name).at(first + i)++;
                            });
                        }
                        for (const TensorPart& part : layout.parts(unit, begin, end)) {
                            size_t wrong = 0;
                            part.each_run([&](size_t first, size_t count, size_t offset) {
                                for (size_t i = 0; i < count; i++) {
                                    size_t& number = numbers.at(part.name).at(first + i);
                                    size_t here = part.first + offset + i;
                                    wrong += number != padding && number != here;
                                    wrong += part.row->shard != Shard::columns && here != first + i;
                                    number = here;
                                }
                            });
                            CHECK(wrong == 0);
                        }
                    }
                }
            }
            for (auto& [name, count] : counts) {
                CAPTURE(name);
                CHECK(std::count(count.begin(), count.end(), 1) == (int64_t)count.size());
                std::set<size_t> distinct(numbers[name].begin(), numbers[name].end());
                CHECK(distinct.size() == count.size());
                CHECK(*distinct.rbegin() == count.size() - 1);
            }
        }
    });
}

TEST_CASE("what is counted comes in few ranges, of copies only the first") {
    each_cut([](const Model& model, int tp, const std::vector<StageUnits>& places) {
        for (const StageUnits& place : places) {
            ParameterLayout layout = layout_of(model, 1, place);
            for (int unit = 0; unit < layout.units(); unit++) {
                std::vector<UnitRange> ranges = layout.counted(unit);
                if (!layout.has(unit) || (unit == 0 && place.embedding_copy)) {
                    CHECK(ranges.empty());
                } else if (place.tensor == 0) {
                    CHECK(ranges == std::vector<UnitRange>{{0, layout.unit_size(unit)}});
                } else {
                    CHECK(ranges.size() <= 3);
                }
                std::vector<int> counted(layout.unit_size(unit), 0);
                size_t end = 0;
                for (UnitRange range : ranges) {
                    CHECK(range.begin < range.end);
                    CHECK((end == 0 || range.begin > end));
                    end = range.end;
                    for (size_t i = range.begin; i < end; i++) counted.at(i) = 1;
                }
                auto tensors = layout.tensors(unit, counted.data());
                if (!layout.has(unit)) {
                    for (const TensorRow& row : model.rows) CHECK(tensors[row.id] == nullptr);
                    continue;
                }
                each_tensor(model, unit, [&](const TensorRow& row) {
                    CAPTURE(row.name);
                    Expected want = expected_part(row, tp, place.tensor);
                    bool original = unit > 0 || !place.embedding_copy;
                    size_t wrong = 0;
                    for (size_t i = 0; i < want.copies.size(); i++)
                        wrong += tensors[row.id][i] != (original && place.tensor % want.copies[i] == 0);
                    CHECK(wrong == 0);
                });
            }
        }
    });
}

TEST_CASE("what must be summed over tensor ranks") {
    each_cut([](const Model& model, int tp, const std::vector<StageUnits>& places) {
        for (const StageUnits& place : places) {
            ParameterLayout layout = layout_of(model, 1, place);
            for (int unit = 0; unit < layout.units(); unit++) {
                std::vector<GradientSum> sums = layout.sums(unit);
                std::vector<int> ranks(layout.unit_size(unit), 1);
                size_t end = 0;
                for (GradientSum sum : sums) {
                    CHECK(sum.count > 0);
                    CHECK(sum.begin >= end);
                    end = sum.begin + sum.count;
                    CHECK(sum.ranks > 1);
                    CHECK(tp % sum.ranks == 0);
                    for (size_t i = sum.begin; i < end; i++) ranks.at(i) = sum.ranks;
                }
                CHECK(sums.size() <= 3);
                if (!layout.has(unit)) continue;
                auto tensors = layout.tensors(unit, ranks.data());
                each_tensor(model, unit, [&](const TensorRow& row) {
                    CAPTURE(row.name);
                    Expected want = expected_part(row, tp, place.tensor);
                    size_t wrong = 0;
                    for (size_t i = 0; i < want.copies.size(); i++) {
                        bool summed = row.shard == Shard::replicated || row.shard == Shard::rows;
                        wrong += tensors[row.id][i] != (summed ? want.copies[i] : 1);
                    }
                    CHECK(wrong == 0);
                });
                // the ranks of a sum hold the same elements there
                StageUnits leader = place;
                for (GradientSum sum : sums) {
                    leader.tensor = place.tensor / sum.ranks * sum.ranks;
                    std::vector<size_t> mine = filled(layout, unit),
                                        theirs = filled(layout_of(model, 1, leader), unit);
                    CHECK(std::equal(&mine[sum.begin], &mine[sum.begin] + sum.count, &theirs[sum.begin]));
                    CHECK(layout_of(model, 1, leader).sums(unit) == sums);
                }
            }
        }
    });
}

TEST_CASE("an example by hand") {
    // 4 tensor ranks, 12 query heads of 4, 2 key and 2 value heads, 20 channels
    Model model = llama_like(2);
    ParameterLayout layout = layout_of(model, 1, {.tp = 4, .tensor = 3});
    // norm (20), then the bias of query, key and value rows (12 + 4 + 4), and their weights of 20 each
    size_t bias = 64, weight = bias + 64;
    CHECK(layout.before_matrices(1) == weight);
    CHECK(layout.sums(1) ==
          std::vector<GradientSum>{{0, 20, 4}, {bias + 12, 8, 2}, {weight + 12 * 20, 8 * 20, 2}});
    CHECK(layout.counted(1) == std::vector<UnitRange>{{bias, bias + 12},
                                                      {weight, weight + 12 * 20},
                                                      {weight + 448, layout.unit_size(1)}});
    // in the last block, the final norm precedes these
    CHECK(layout.before_matrices(5) == 64 + weight);
    CHECK(layout.sums(5) == std::vector<GradientSum>{
                                {0, 64 + 20, 4}, {64 + bias + 12, 8, 2}, {64 + weight + 12 * 20, 8 * 20, 2}});
    CHECK(layout.parts(5, 0, 65)[0].name == "normf");
    CHECK(layout.parts(5, 0, 65)[1].name == "layers.4.norm");
    auto parts = layout.parts(1, weight, weight + 448);
    REQUIRE(parts.size() == 3);
    CHECK(parts[0].name == "layers.0.qkv.weight");
    CHECK(parts[0].first == 36 * 20);
    CHECK(parts[1].first == (48 + 4) * 20);
    CHECK(parts[2].first == (48 + 8 + 4) * 20);
    CHECK(parts[2].at == weight + 16 * 20);
    // 50 tokens: 12, 13, 12, 13
    CHECK(layout.here(Toy::wte).first_row == 37);
    CHECK(layout.here(Toy::wte).rows == 13);
    CHECK(layout.here(Toy::wte).padded_rows == 16);
    CHECK(layout.here(fcdown).cols == 9);
}

TEST_CASE("a unit has the same size on all tensor ranks, and none where it is not") {
    each_cut([](const Model& model, int, const std::vector<StageUnits>& places) {
        for (int shards : {1, 3, 8}) {
            std::vector<size_t> size(model.layers + 2, 0);
            for (const StageUnits& place : places) {
                ParameterLayout layout = layout_of(model, shards, place);
                size_t total = 0;
                for (int unit = 0; unit < layout.units(); unit++) {
                    bool held =
                        place.units.empty() || std::count(place.units.begin(), place.units.end(), unit) > 0;
                    if (model.tied && unit == layout.last_unit()) held = false;  // it has no tensors
                    CHECK(layout.has(unit) == held);
                    CHECK(layout.unit_offset(unit) == total);
                    total += layout.unit_size(unit);
                    CHECK(layout.unit_size(unit) % (8 * shards) == 0);
                    CHECK(layout.unit_size(unit) % 64 == 0);
                    if (!held) continue;
                    if (size[unit] == 0) size[unit] = layout.unit_size(unit);
                    CHECK(layout.unit_size(unit) == size[unit]);
                }
                CHECK(layout.size() == total);
                CHECK(layout.parameter_count() == layout_of(model, 1).parameter_count());
                size_t tensors = 0;
                layout.each([&](const TensorRow&, const std::string&, size_t offset) {
                    CHECK(offset < total);
                    tensors++;
                });
                size_t expected = 0;
                for (int unit : layout.held())
                    each_tensor(model, unit, [&](const TensorRow&) { expected++; });
                CHECK(tensors == expected);
            }
        }
    });
}

TEST_CASE("one rank has every tensor whole, padded to 64 elements") {
    // and units padded so that they split into multiples of 8 elements
    for (auto [shards, multiple] : {std::pair{1, 64}, {4, 64}, {48, 384}, {64, 512}})
        for (const Model& model : models()) {
            ParameterLayout layout = layout_of(model, shards);
            size_t total = 0, parameters = 0;
            for (int unit = 0; unit < layout.units(); unit++) {
                size_t size = 0, tensors = 0;
                each_tensor(model, unit, [&](const TensorRow& row) {
                    size_t rows = ceil_div(row.rows, row.pad_to) * row.pad_to;
                    size += ceil_div(rows * std::max<size_t>(row.cols, 1), 64) * 64;
                    parameters += row.size();
                    tensors++;
                });
                size = ceil_div(size, (size_t)multiple) * multiple;
                CHECK(layout.unit_size(unit) == size);
                CHECK(layout.sums(unit).empty());
                CHECK(layout.parts(unit, 0, size).size() == tensors);
                total += size;
            }
            CHECK(layout.size() == total);
            CHECK(layout.parameter_count() == parameters);
        }
}

TEST_CASE("the order in memory is the same however the model is cut") {
    for (const Model& model : models()) {
        std::vector<std::string> want;
        layout_of(model, 1).each(
            [&](const TensorRow&, const std::string& name, size_t) { want.push_back(name); });
        for (int tp : {1, 2, 4}) {
            std::vector<std::string> got, here;
            size_t last = 0;
            ParameterLayout layout = layout_of(model, 3, {.tp = tp, .tensor = tp - 1});
            layout.each_of_model([&](const TensorRow&, const std::string& name) { got.push_back(name); });
            layout.each([&](const TensorRow&, const std::string& name, size_t offset) {
                CHECK((here.empty() || offset > last));
                last = offset;
                here.push_back(name);
            });
            CHECK(got == want);
            CHECK(here == want);
        }
    }
}

TEST_CASE("slices of a part are the part") {
    Model model = gpt2_like();
    ParameterLayout layout = layout_of(model, 1, {.tp = 4, .tensor = 2});
    for (int unit : layout.held()) {
        std::vector<size_t> want = filled(layout, unit), got(want.size(), padding);
        for (size_t begin = 0; begin < want.size(); begin += 173) {  // across rows, sections and tensors
            for (const TensorPart& part : layout.parts(unit, begin, std::min(begin + 173, want.size()))) {
                for (size_t done = 0; done < part.count; done += 7) {
                    TensorPart slice = part.slice(done, std::min<size_t>(7, part.count - done));
                    size_t visited = 0;
                    slice.each_run([&](size_t first, size_t count, size_t offset) {
                        CHECK(offset == visited);
                        for (size_t i = 0; i < count; i++) got.at(slice.at + offset + i) = first + i;
                        visited += count;
                    });
                    CHECK(visited == slice.count);
                }
            }
        }
        CHECK((got == want));
    }
}

TEST_CASE("cuts that do not come out even are refused") {
    auto refused = [](TensorRow row, int tp) {
        CHECK_REFUSED(ParameterLayout({row}, 1, false, 1, {.tp = tp}),
                      text("--tp %d: tensor x cannot be cut that many ways; ", tp).c_str());
        CHECK_NOTHROW(ParameterLayout({row}, 1, false, 1));
    };
    using enum Unit;
    refused({0, block, "x", 8, 6, 0, 1, true, Shard::columns}, 4);
    refused({0, block, "x", 12, 6, 0, 1, true, Shard::rows, {{12, 6}}}, 4);
    refused({0, block, "x", 12, 6, 0, 1, true, Shard::rows, {{6, 0}, {6, 0}}}, 4);
    CHECK_REFUSED(
        ParameterLayout({{0, block, "x", 12, 6, 0, 1, true, Shard::rows, {{6, 0}}}}, 1, false, 1, {.tp = 2}),
        "tensor x: 12 rows, but 6 in its sections; ");
}

TEST_CASE("places for units in use") {
    Model tied = gpt2_like(), untied = llama_like(2);
    auto places = [](const Model& model, std::vector<int> units, int for_blocks) {
        return UnitBuffers(layout_of(model, 1, {.units = std::move(units)}), for_blocks);
    };
    UnitBuffers all = places(tied, {}, 2);
    CHECK(all.count() == 3);  // two for blocks, one for the embedding
    CHECK(all.place(1) != all.place(2));
    CHECK(all.place(1) == all.place(3));
    CHECK(all.place(6) == -1);
    CHECK(places(untied, {}, 2).count() == 3);
    CHECK(places(untied, {}, 2).place(0) == places(untied, {}, 2).place(6));

    // a stage with two parts: consecutive units, also across the parts, have different places
    UnitBuffers parts = places(untied, {2, 4, 5}, 2);
    CHECK(parts.count() == 2);
    CHECK(parts.place(2) != parts.place(4));
    CHECK(parts.place(4) != parts.place(5));
    // the last block's place has room for the last norm too
    size_t block = layout_of(untied, 1).unit_size(1), last_block = layout_of(untied, 1).unit_size(5);
    CHECK(last_block == block + 64);
    CHECK(parts.size() == block + last_block);
    CHECK(parts.offset(parts.place(4)) == last_block);
    CHECK(places(untied, {0, 1}, 2).count() == 2);
    CHECK(places(untied, {6}, 2).count() == 1);
    CHECK(places(untied, {6}, 2).size() == layout_of(untied, 1).unit_size(6));
    CHECK(places(tied, {0, 5, 6}, 2).count() == 2);  // includes a copy of the embedding

    for (const Stages& stages : splits) {
        for (const Model& model : {tied, untied}) {
            for (const StageUnits& place : places_of(model, 2, stages)) {
                ParameterLayout layout = layout_of(model, 1, place);
                for (int for_blocks : {1, 2, 9}) {
                    UnitBuffers buffers(layout, for_blocks);
                    for (int unit : layout.held()) {
                        int at = buffers.place(unit);
                        REQUIRE(at >= 0);
                        REQUIRE(at < buffers.count());
                        size_t end = at + 1 < buffers.count() ? buffers.offset(at + 1) : buffers.size();
                        CHECK(buffers.offset(at) + layout.unit_size(unit) <= end);
                    }
                }
            }
        }
    }
}
