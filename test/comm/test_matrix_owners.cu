// ranks: 4 2 1
#include <map>
#include <sstream>

#include "comm/matrix_owners.h"
#include "comm/mesh.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

ModelConfig config_of(bool llama) {
    ModelConfig config;
    config.layers = 3, config.channels = 24, config.heads = 4, config.kv_heads = 2, config.head_size = 4;
    config.mlp_width = 20, config.vocab_size = 37, config.context = 16;
    if (llama) config.mlp = MlpKind::swiglu, config.bias = false, config.local_filter = true;
    complete(config);
    return config;
}

// Element i of a section's matrix, before and after the transform: integers that are exact in bf16.
float update_at(int section, size_t i) {
    return (float)(section * 3 + i % 61) - 60;
}
float transformed_at(int section, size_t i) {
    return update_at(section, i) + 1;
}

// Calls visit(i, its index in the section's matrix) for each element i of a part.
template <typename Visit>
void each_element(const SectionPart& part, Visit&& visit) {
    size_t width = part.row->width();
    bool cut = part.columns != width;
    for (size_t i = 0; i < part.count; i++) {
        size_t e = part.begin - part.start + i;
        visit(i, e / part.columns * width + (cut ? part.column : 0) + e % part.columns);
    }
}

// Returns the section with these values, which are stored with no more rows than columns, or -1.
int section_of(const std::vector<double>& values, const std::vector<ModelSection>& sections, int rows,
               int cols) {
    for (int number = 0; number < (int)sections.size(); number++) {
        size_t height = sections[number].rows, width = sections[number].row->cols;
        bool tall = height > width;
        if (!sections[number].row->is_block_matrix() ||
            std::minmax(height, width) != std::minmax((size_t)rows, (size_t)cols))
            continue;
        bool is_it = true;
        for (size_t i = 0; i < values.size() && is_it; i++) {
            size_t at = tall ? i % height * width + i / height : i;
            is_it = values[i] == update_at(number, at);
        }
        if (is_it) return number;
    }
    return -1;
}

size_t no_scratch(size_t, size_t, size_t) {
    return 0;
}

}  // namespace

TEST_CASE("every matrix is whole at one owner, and its parts come back") {
    int n = test_world().size();
    std::vector<MeshShape> shapes = {{.dp = n, .shard = n}, {.tp = n, .copies = n / 2}, {.dp = n}};
    if (n == 4) {
        shapes.push_back({.tp = 2, .dp = 2, .shard = 2});
        shapes.push_back({.tp = 2, .dp = 2, .shard = 1});
        shapes.push_back({.dp = 4, .shard = 2});
        shapes.push_back({.tp = 2, .pp = 2});
    }
    for (MeshShape shape : shapes) {
        for (bool llama : {false, true}) {
            CAPTURE(text("tp %d, pp %d, dp %d, shard %d, llama %d", shape.tp, shape.pp, shape.dp, shape.shard,
                         llama));
            shape.copies = std::max(1, shape.copies);
            shape.stage_group = true;
            ModelConfig config = config_of(llama);
            Mesh mesh(test_world(), shape, test_stream());
            StageUnits place = {.tp = shape.tp, .tensor = mesh.position[Axis::tensor]};
            if (shape.pp == 2)
                place.units = mesh.position[Axis::pipeline] ? std::vector{2, 3, 4} : std::vector{0, 1};
            ParameterLayout layout = parameter_layout(config, shape.shard, place);
            const std::vector<ModelSection> sections = layout.sections_of_model();
            auto own_parts = [&](int unit) {
                size_t size = layout.unit_size(unit) / shape.shard, begin = mesh.position[Axis::shard] * size;
                return std::pair(begin, layout.section_parts(unit, layout.parts(unit, begin, begin + size)));
            };
            std::map<int, std::unique_ptr<Buffer<float>>> grads;
            for (int unit : layout.held()) {
                auto [begin, parts] = own_parts(unit);
                std::vector<float> values(layout.unit_size(unit) / shape.shard, -7);
                for (const SectionPart& part : parts) {
                    each_element(part, [&](size_t i, size_t at) {
                        values[part.at - begin + i] = update_at(part.section, at);
                    });
                }
                grads[unit] = std::make_unique<Buffer<float>>(values);
            }
            Arena memory;
            MatrixOwners owners(memory, layout, mesh.shape, mesh.position, mesh.stage(), no_scratch,
                                test_stream());
            std::string seen;
            for (const MatrixRound& round : owners.rounds()) {
                auto transform = [&](floatX* matrix, int rows, int cols, floatX*, cudaStream_t stream) {
                    cudaCheck(cudaStreamSynchronize(stream));
                    std::vector<floatX> values((size_t)rows * cols);
                    cudaCheck(cudaMemcpy(values.data(), matrix, values.size() * sizeof(floatX),
                                         cudaMemcpyDeviceToHost));
                    CHECK(rows <= cols);
                    int section = section_of(to_doubles(values), sections, rows, cols);
                    CHECK(section >= 0);
                    seen += std::to_string(section) + " ";
                    for (floatX& value : values) value = floatX((float)value + 1);
                    cudaCheck(cudaMemcpy(matrix, values.data(), values.size() * sizeof(floatX),
                                         cudaMemcpyHostToDevice));
                };
                owners.transform_at_owners(
                    round, [&](int unit) { return (float*)*grads[unit]; }, nullptr, transform);
            }
            std::map<int, std::vector<float>> after;
            for (int unit : layout.held()) {
                auto [begin, parts] = own_parts(unit);
                std::vector<float> got = grads[unit]->host(), want(got.size(), -7);
                for (const SectionPart& part : parts) {
                    each_element(part, [&](size_t i, size_t at) {
                        auto value = part.of_block_matrix() ? transformed_at : update_at;
                        want[part.at - begin + i] = value(part.section, at);
                    });
                }
                CHECK(got == want);
                after[unit] = got;
            }
            // a skipped step does not change them
            Buffer<float> nan(std::vector<float>{NAN});
            for (const MatrixRound& round : owners.rounds()) {
                owners.transform_at_owners(
                    round, [&](int unit) { return (float*)*grads[unit]; }, nan,
                    [&](floatX* matrix, int rows, int cols, floatX*, cudaStream_t stream) {
                        cudaCheck(cudaMemsetAsync(matrix, 0, rows * cols * sizeof(floatX), stream));
                    });
            }
            for (int unit : layout.held()) CHECK(grads[unit]->host() == after[unit]);
            // each matrix has one owner, and no rank is idle
            std::map<int, int> homes_of;
            for (const std::string& mine : test_world().all_gather(seen)) {
                CHECK(!mine.empty());
                std::istringstream words(mine);
                for (int section; words >> section;) homes_of[section]++;
            }
            for (int number = 0; number < (int)sections.size(); number++) {
                bool is_matrix = sections[number].row->is_block_matrix();
                CHECK(homes_of[number] == (is_matrix ? 1 : 0));
            }
        }
    }
}

TEST_CASE("an arena that counts finds the memory of a rank's matrices") {
    ModelConfig config = config_of(true);
    int n = test_world().size();
    MeshShape shape = {.dp = n, .shard = n, .stage_group = true};
    Mesh mesh(test_world(), shape, test_stream());
    ParameterLayout layout = parameter_layout(config, n);
    auto scratch = [](size_t rows, size_t cols, size_t) { return rows * cols + 3; };
    Arena memory, counted(Arena::counts);
    MatrixOwners owners(memory, layout, mesh.shape, mesh.position, mesh.stage(), scratch, test_stream());
    MatrixArrays(counted, layout, shape, scratch);
    CHECK(memory.bytes() == counted.bytes());
    // a matrix and its scratch, and own and received parts of a round: a fair share or, if larger, a matrix
    size_t largest = 24 * 20, of_block = 24 * (16 + 2 * 8 + 16 + 3 * 20);
    CHECK(memory.bytes() >= (2 * largest + 3) * sizeof(floatX));
    CHECK(memory.bytes() <= (2 * largest + 3 + 4 * std::max(of_block / n, largest)) * sizeof(floatX));
    Arena none;
    MatrixOwners without(none, layout, mesh.shape, mesh.position, mesh.stage(), nullptr, test_stream());
    CHECK(without.rounds().empty());
    CHECK(none.bytes() == 0);
}
