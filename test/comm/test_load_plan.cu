// Simulates the work of one of 12,288 ranks before it loads gpt3-175B: it parses the index that all ranks
// would have written, and plans what to read, on the layout that wrote the checkpoint and on others.
// devices: cpu
// seconds: 5
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "comm/checkpoint_places.h"
#include "comm/stage.h"
#include "test/comm/checkpoint_testing.h"
#include "data/options/presets.h"

namespace {

// A model partitioned over simulated ranks.
struct PaperRun {
    ModelConfig config = find_preset("gpt3-175B")->config;
    MeshShape shape;
    std::vector<ParameterLayout> layouts;  // by pipeline and tensor rank

    explicit PaperRun(const MeshShape& mesh) : shape(mesh) {
        complete(config);
        Layout layout = {.mesh = mesh,
                         .pipeline = {PipelineSchedule::one_f_one_b, mesh.pp, mesh.pp},
                         .split = std::vector<int>((size_t)mesh.pp, config.layers / mesh.pp)};
        for (int pipeline = 0; pipeline < mesh.pp; pipeline++) {
            for (int tensor = 0; tensor < mesh.tp; tensor++) {
                Stage stage(config, layout, first_of_stage(pipeline).with(Axis::tensor, tensor), true);
                layouts.push_back(parameter_layout(config, mesh.shard, stage.units()));
            }
        }
    }

    const ParameterLayout& layout_at(const MeshPosition& position) const {
        return layouts[(size_t)(position[Axis::pipeline] * shape.tp + position[Axis::tensor])];
    }

    TensorPlaces places(const CheckpointIndex& index) const {
        return {shape, [this](const MeshPosition& position) { return layout_at(position); }, index};
    }

    // The index of a checkpoint written by all ranks.
    CheckpointIndex index() const {
        const ZeroSettings settings = {.level = 1, .keep_master = true};
        const TensorNumbers numbers = tensor_numbers(layouts[0]);
        CheckpointIndex index = {1, about_step(1), checkpoint_tensors(layouts[0], settings), {}, {}};
        for (int rank = 0; rank < shape.ranks(); rank++) {
            MeshPosition position = position_of(rank, shape);
            uint64_t end = 64;
            for (OwnPiece& own : pieces_to_write(layout_at(position), numbers, shape, position, settings)) {
                own.piece.file = (uint32_t)index.file_bytes.size();
                own.piece.offset = end;
                own.piece.hash = 0;
                end += index.bytes_of(own.piece);
                index.pieces.push_back(own.piece);
            }
            if (end > 64) index.file_bytes.push_back(end);
        }
        return index;
    }
};

// CPU time of this process, which is up to four times as long if the CPU runs other work too.
template <typename Work>
double seconds_of(Work&& work) {
    clock_t start = clock();
    work();
    return (double)(clock() - start) / CLOCKS_PER_SEC;
}

struct LoadPlan {
    double seconds;
    uint64_t elements = 0;
    size_t pieces = 0;
    std::vector<PieceBatch> batches;

    LoadPlan(const PaperRun& run, const CheckpointIndex& index, int rank) {
        seconds = seconds_of(
            [&] { batches = pieces_to_read(run.places(index), index, rank, [](Slot) { return true; }); });
        for (const PieceBatch& batch : batches) elements += batch.elements, pieces += batch.pieces.size();
    }
};

// The most that any rank reads, relative to the mean.
double imbalance(const PaperRun& run, const CheckpointIndex& index) {
    TensorPlaces places = run.places(index);
    PieceReaders readers(places);
    std::vector<uint64_t> elements((size_t)run.shape.ranks());
    uint64_t all = 0;
    for (const CheckpointPiece& piece : index.pieces) {
        elements[(size_t)readers.take(piece)] += piece.count;
        all += piece.count;
    }
    return (double)std::ranges::max(elements) * run.shape.ranks() / (double)all;
}

}  // namespace

TEST_CASE("on paper: 12,288 ranks plan to load gpt3-175B, each in less than a second of processor time") {
    const MeshShape shape = {.tp = 8, .pp = 8, .dp = 192, .shard = 192};
    PaperRun written(shape);
    CheckpointIndex index = written.index();
    CHECK(index.file_bytes.size() == 12288);
    if (dtype_of(Slot::weight) == Dtype::fp32) CHECK(index.pieces.size() == 624580);
    std::string bytes = checkpoint_index_bytes(index);
    CHECK(bytes.size() > 40.2e6);
    CHECK(bytes.size() < 40.4e6);
    double parsed = seconds_of([&] { index = parse_checkpoint_index(bytes, "index.bin"); }), slowest = 0;
    CHECK(parsed < 3);  // 0.3 s on an idle machine

    for (int rank : {0, 6149, 12287}) {
        LoadPlan plan(written, index, rank);
        slowest = std::max(slowest, plan.seconds);
        size_t others = 0, own = 0;
        for (const CheckpointPiece& piece : index.pieces) own += (int)piece.file == rank;
        for (const PieceBatch& batch : plan.batches) {
            for (const CheckpointPiece* piece : batch.pieces) others += (int)piece->file != rank;
        }
        CHECK(others == 0);
        CHECK(plan.pieces == own);
        CHECK(plan.pieces < 600);
    }
    CHECK(imbalance(written, index) < 1.1);
    for (MeshShape other : {MeshShape{.tp = 8, .pp = 16, .dp = 96, .shard = 96},
                            {.tp = 4, .pp = 8, .dp = 384, .shard = 64},
                            {.tp = 8, .dp = 1536, .shard = 64}}) {
        PaperRun run(other);
        double mean = (double)parameter_count(written.config) * 4 / other.ranks();
        for (int rank : {0, other.ranks() / 2 + 5}) {
            LoadPlan plan(run, index, rank);
            slowest = std::max(slowest, plan.seconds);
            CHECK(plan.elements < 2 * mean);
        }
    }
    printf("index.bin is parsed in %.2f s; a rank plans in %.2f s at most\n", parsed, slowest);
    CHECK(slowest < 1);  // 0.15 s on an idle machine
}
