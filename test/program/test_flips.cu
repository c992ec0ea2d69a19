// Single bits that flip in a rank's memory or results: what --check-replicas and --check-replay detect, and
// which rank they name. FLIPS=100 in the environment makes that many flips of each kind, and prints a table.
// devices: cpu
// ranks: 4
// seconds: 8
// soak: FLIPS=100
#include <cstdio>
#include <random>

#include "test/program/model_testing.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"

namespace {

struct FlipCase {
    const char* name;
    MeshShape mesh;
    ZeroSettings settings;
};
const FlipCase cuts[] = {{"4 replicas", {.dp = 4}, {.level = 0}},
                         {"ZeRO 2 on 2, 2 replicas", {.dp = 4, .shard = 2}, {.level = 2}},
                         {"ZeRO 1 on 4", {.dp = 4, .shard = 4}, {.level = 1}}};

int flips() {
    const char* given = getenv("FLIPS");
    return given ? atoi(given) : 5;
}

// All ranks draw the same numbers.
struct Draws {
    std::mt19937 random{25};
    size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }
};

struct Flip {
    char* byte = nullptr;
    int bit = 0;

    void now() const {
        if (!byte) return;
        char value;
        cudaCheck(cudaMemcpy(&value, byte, 1, cudaMemcpyDefault));
        value = (char)(value ^ 1 << bit);
        cudaCheck(cudaMemcpy(byte, &value, 1, cudaMemcpyDefault));
    }
};

Flip flip_in(Draws& draws, const void* array, size_t bytes, bool here) {
    size_t at = draws.below(bytes);
    int bit = (int)draws.below(8);
    return here ? Flip{(char*)array + at, bit} : Flip();
}

// How often a check found something, and how often it named the rank (with at most one other).
struct Found {
    int tried = 0, found = 0, named = 0;

    void add(const std::string& line, int victim) {
        int others = 0;
        bool is_in = false;
        for (int rank = 0; rank < 4; rank++) {
            bool there = line.find(text("rank %d of 4", rank)) != line.npos;
            (rank == victim ? is_in : there) = there;
            others += rank != victim && there;
        }
        tried++, found += !line.empty(), named += is_in && others <= 1;
    }
};

class Flipped {
public:
    explicit Flipped(const FlipCase& cut)
        : mesh_(test_world(), cut.mesh, test_stream()),
          g_(small_config(), {B, T, true, Recompute::none, B * T}, settings_of(cut), mesh_, layout_of(cut)),
          replicas_(g_.state, parts_, test_world()),
          replay_(g_.state, test_world()) {
        initialize(g_.state, 5);
        for (int step = 0; step < 2; step++) make_step([] {});
    }

    std::string find_replicas() {
        g_.state.synchronize();
        return replicas_.find();
    }
    std::string find_replay() {
        g_.state.synchronize();
        return replay_.find([&](int data_rank) { make_gradients(data_rank, false); });
    }

    // Runs a step on all ranks. spoil() runs once the gradients are sums over the ranks.
    template <typename Spoil>
    void make_step(Spoil&& spoil) {
        make_gradients(g_.mesh.data_rank(), true);
        g_.state.synchronize();
        spoil();
        AdamW settings = {1e-2, 0.9, 0.95, 1e-8, 0.1, ++step_, false};
        g_.state.update(g_.stats.data, adamw_optimizer(settings, 0), 1.0f);
        g_.state.synchronize();
    }

    // Saves the replicated memory, and restores it on destruction.
    class Kept {
    public:
        explicit Kept(Flipped& of) : of_(of) {
            for (const ReplicatedPiece& piece : of.contributor_.replicated(false)) {
                bytes_.emplace_back(piece.bytes);
                cudaCheck(cudaMemcpy(bytes_.back().data(), piece.begin, piece.bytes, cudaMemcpyDefault));
            }
        }
        ~Kept() {
            of_.g_.state.synchronize();
            size_t i = 0;
            for (const ReplicatedPiece& piece : of_.contributor_.replicated(false)) {
                cudaMemcpy((void*)piece.begin, bytes_[i].data(), piece.bytes, cudaMemcpyDefault);
                i++;
            }
        }

    private:
        Flipped& of_;
        std::vector<std::vector<char>> bytes_;
    };

    ZeroState& state() { return g_.state; }
    const Contributors& parts() const { return parts_; }

    // Flips a bit of one weight. Returns the name of its tensor.
    std::string flip_one_weight(Draws& draws, int victim) {
        int unit = draw_unit(draws);
        const ParameterLayout& layout = g_.state.layout();
        std::vector<TensorPart> parts = layout.parts(unit, 0, layout.unit_size(unit));
        const TensorPart& part = parts[draws.below(parts.size())];
        flip_in(draws, g_.state.params(unit) + part.at, part.count * sizeof(floatX), here(victim)).now();
        return part.name;
    }

    void flip_weights(Draws& draws, int victim, Found& by_replicas, Found& by_replay) {
        Kept kept(*this);
        std::string name = flip_one_weight(draws, victim), line = find_replicas();
        by_replicas.add(line, victim);
        CHECK(line.find(name) != line.npos);
        by_replay.add(find_replay(), victim);
    }

    void flip_master(Draws& draws, int victim, Found& by_replicas, Found& by_replay) {
        Kept kept(*this);
        int unit = draw_unit(draws);
        size_t bytes = g_.state.part_size(unit) * sizeof(float);
        flip_in(draws, g_.state.owned_master(unit), bytes, here(victim)).now();
        by_replicas.add(find_replicas(), victim);
        by_replay.add(find_replay(), victim);
    }

    void flip_gradients(Draws& draws, int victim, Found& by_replicas, Found& by_replay) {
        int unit = draw_unit(draws), pass = (int)draws.below(2), passes = 0;
        {
            Kept kept(*this);
            size_t bytes = g_.state.part_size(unit) * sizeof(float);
            make_step([&] { flip_in(draws, g_.state.owned_grads(unit), bytes, here(victim)).now(); });
            by_replicas.add(find_replicas(), victim);
        }
        size_t bytes = g_.state.layout().unit_size(unit) * sizeof(float);
        Flip flip = flip_in(draws, nullptr, bytes, false);
        size_t at = draws.below(bytes);
        replay_.before_hash = [&](int made) {
            if (made != unit || passes++ != pass || !here(victim)) return;
            g_.state.synchronize();
            flip = {(char*)g_.state.grads(unit) + at, 3};
            flip.now();
        };
        by_replay.add(find_replay(), victim);
        replay_.before_hash = nullptr;
    }

    // Flips a bit of what the first block keeps for its backward pass, after the last block's backward pass.
    void flip_activations(Draws& draws, int victim, Found& by_replicas, Found& by_replay) {
        const Activations& a = g_.acts[0];
        Dims d(g_.config, 1, B, T);
        const std::pair<const floatX*, size_t> kept_ones[] = {{a.qkv, (size_t)d.N * d.QKV},
                                                              {a.att, (size_t)d.N * d.A},
                                                              {a.fc, (size_t)d.N * d.F1},
                                                              {a.norm1, (size_t)d.N * d.C},
                                                              {a.norm2, (size_t)d.N * d.C}};
        auto [array, count] = kept_ones[draws.below(5)];
        Flip flip = flip_in(draws, array, count * sizeof(floatX), here(victim));
        int pass = (int)draws.below(2), passes = 0;
        auto spoil = [&](int unit) {
            if (unit != g_.config.layers || passes++ != pass) return;
            cudaCheck(cudaStreamSynchronize(g_.stream));
            flip.now();
        };
        {
            Kept kept(*this);
            pass = 0;
            g_.state.watch_gradients(spoil);
            make_gradients(g_.mesh.data_rank(), true);
            g_.state.watch_gradients(nullptr);
            g_.state.update(g_.stats.data, adamw_optimizer({1e-2, 0.9, 0.95, 1e-8, 0.1, step_ + 1, false}, 0),
                            1.0f);
            by_replicas.add(find_replicas(), victim);
        }
        passes = 0;
        replay_.before_hash = spoil;
        by_replay.add(find_replay(), victim);
        replay_.before_hash = nullptr;
    }

private:
    static constexpr int B = 2, T = 16;

    static ZeroSettings settings_of(const FlipCase& cut) {
        ZeroSettings settings = cut.settings;
        settings.keep_master = settings.checks = true;
        return settings;
    }
    static Layout layout_of(const FlipCase& cut) {
        Layout layout;
        layout.mesh = cut.mesh;
        return layout;
    }
    static bool here(int victim) { return test_world().rank() == victim; }
    int draw_unit(Draws& draws) const {
        const std::vector<int>& held = g_.state.layout().held();
        return held[draws.below(held.size())];
    }

    void make_gradients(int data_rank, bool ends_step) {
        std::vector<int> tokens(B * T), targets(B * T);
        for (int i = 0; i < B * T; i++) {
            Random4 random = philox(random_key(7, "flips"), (uint64_t)(data_rank * B * T + i));
            tokens[(size_t)i] = random.at[0] % g_.config.vocab_size;
            targets[(size_t)i] = random.at[1] % g_.config.vocab_size;
        }
        TestBatch batch(B, T, tokens, targets);
        zero_gradients(g_);
        accumulate_gradients(g_, *batch, 1.0f / (B * T), ends_step);
        g_.state.synchronize();
    }

    Mesh mesh_;
    Gpt g_;
    ZeroCheckpoint contributor_{g_.state, [this](const MeshPosition&) { return g_.state.layout(); }};
    Contributors parts_ = {&contributor_};
    ReplicaCheck replicas_;
    ReplayCheck replay_;
    int step_ = 0;
};

void tell(const FlipCase& cut, const char* kind, const Found& replicas, const Found& replay) {
    if (!test_world().is_root()) return;
    printf("| %s | %s | %d | %d | %d | %d | %d |\n", kind, cut.name, replicas.tried, replicas.found,
           replicas.named, replay.found, replay.named);
}

}  // namespace

TEST_CASE("flipped bits are found, and the rank named") {
    if (test_world().is_root())
        printf("| flipped in | layout | flips | check-replicas found | and named | check-replay found | and "
               "named |\n");
    for (const FlipCase& cut : cuts) {
        CAPTURE(std::string(cut.name));
        Flipped run(cut);
        Draws draws;
        CHECK(run.find_replicas() == "");
        CHECK(run.find_replay() == "");
        const struct {
            const char* name;
            void (Flipped::*flip)(Draws&, int, Found&, Found&);
        } kinds[] = {{"weights", &Flipped::flip_weights},
                     {"gradients", &Flipped::flip_gradients},
                     {"activations", &Flipped::flip_activations},
                     {"master weights", &Flipped::flip_master}};
        bool has_replicas = cut.mesh.replicas() > 1;
        for (auto& [name, flip] : kinds) {
            CAPTURE(std::string(name));
            std::string kind = name;
            Found replicas, replay;
            int n = flips();
            for (int i = 0; i < n; i++) (run.*flip)(draws, (int)draws.below(4), replicas, replay);
            tell(cut, name, replicas, replay);
            CHECK(replay.named == replay.found);
            if (kind != "gradients") CHECK(replicas.named == replicas.found);
            if (kind == "weights") {
                CHECK(replicas.found == n);
                CHECK(10 * replay.found >= 6 * n);
            } else if (kind == "gradients") {
                CHECK(replay.found == n);
                // flips in padding, or in a low bit that rounding drops, do no harm
                if (has_replicas) CHECK(2 * replicas.found >= n);
            } else if (kind == "activations") {
                CHECK(replicas.found == 0);  // all ranks hold the same wrong weights
                CHECK(10 * replay.found >= 6 * n);
            } else {
                CHECK(replicas.found == (has_replicas ? n : 0));
                CHECK(replay.found == 0);
            }
        }
        CHECK(run.find_replicas() == "");
    }
}

TEST_CASE("a run that fails a check ends with 75, names the rank, and saves nothing") {
    Flipped run(cuts[0]);
    Draws draws;
    Options o;
    o.check_replicas = 10;
    TemporaryFolder folder;
    o.run_dir = test_world().all_gather(folder.path)[0];
    RunCheckpoints checkpoints(
        run.parts(), false, o, test_world(), [] {}, [](const SaveReport&) {});
    FaultChecks checks(o, run.state(), test_world(), checkpoints);
    auto no_gradients = [](int) {};
    RunPosition at;
    std::string message;
    try {
        checkpoints.rescue_from_errors(at, [&] {
            checks.run(10, false, no_gradients);
            at.step = 13;
            Flipped::Kept kept(run);
            run.flip_one_weight(draws, 2);
            checks.run(13, false, no_gradients);  // not due
            checks.run(13, true, no_gradients);   // due before a checkpoint
        });
    } catch (const CommonError& error) {
        message = error.what();
        CHECK(error.exit_code == exit_failed_part);
    }
    test_world().recover();
    CHECK(message.starts_with("--check-replicas 10, after step 13: rank 2 of 4 on "));
    CHECK(message.find("differ from those of 3 ranks in ") != message.npos);
    CHECK(message.find("all was well after step 10, and nothing is saved") != message.npos);
    CHECK(checkpoint_steps(o.run_dir).empty());
}
