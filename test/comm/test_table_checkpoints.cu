/*
Tables of n-gram memory in checkpoints: a base and the changes since then, rows that change while they are
saved, and tables on disk that are reset to a checkpoint.
*/
// devices: cpu
// ranks: 3 1
// seconds: 3
#include "comm/checkpoint_loader.h"
#include "comm/checkpoint_saver.h"
#include "comm/ngram_checkpoint.h"
#include "data/checkpoint/verification.h"
#include "test/comm/checkpoint_testing.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

constexpr int T = 16;

ModelConfig config_of_test() {
    ModelConfig c;
    c.layers = 3, c.channels = 8, c.heads = 1, c.vocab_size = 997, c.context = T;
    c.ngram = "1,2", c.ngram_rows = 2000, c.ngram_width = 8, c.ngram_heads = 2, c.ngram_layers = "0,2";
    complete(c);
    return c;
}

// A folder that all ranks share.
struct Folder {
    TemporaryFolder own;
    std::string path = test_world().all_gather(own.path)[0];
    ~Folder() { test_world().barrier(); }
};

void on_root(const std::function<void()>& work) {
    test_world().barrier();
    if (test_world().is_root()) work();
    test_world().barrier();
}

using Rows = std::vector<std::pair<std::vector<float>, std::vector<float>>>;  // for each table

// Tables without a model: a step's gradients depend only on its number.
struct Tables {
    ModelConfig config = config_of_test();
    MeshShape shape = {.dp = test_world().size(), .stage_group = true, .tables = true};
    Mesh mesh{test_world(), shape, test_stream()};
    Layout layout = {.mesh = shape};
    Stage stage{config, layout, mesh.position, true};
    Arena memory;
    std::unique_ptr<NgramTables> tables;
    std::unique_ptr<NgramCheckpoint> contributor;
    std::unique_ptr<CheckpointSaver> saver;

    Tables(const std::string& folder, TablePlace place, bool in_background = true,
           RowDtype dtype = RowDtype::automatic, bool is_new = true) {
        ZeroSettings settings = {.table_place = place,
                                 .table_dtype = dtype,
                                 .table_cache = 300 * 200,
                                 .table_dir = folder + "/tables",
                                 .staging = in_background};
        Workload workload = {.B = 1, .T = T, .training = true, .recompute = Recompute::none, .loss_chunk = 8};
        tables =
            std::make_unique<NgramTables>(memory, config, workload, settings, mesh, stage, test_stream());
        contributor = std::make_unique<NgramCheckpoint>(*tables, layout);
        saver = std::make_unique<CheckpointSaver>(Contributors{contributor.get()}, test_world(), folder,
                                                  Retention{.newest = 0}, in_background);
        if (is_new) tables->own().forget();
        tables->set_hash(5, folded_tokens(nullptr, config.vocab_size));
    }

    // few: every step looks up the same few rows.
    void step(int number, bool few = false) {
        std::vector<int> tokens(T);
        for (int t = 0; t < T; t++)
            tokens[t] = few ? t % 2 : (int)(philox(number * 10 + test_world().rank(), t).at[0] % 997);
        tables->look_up({(uint64_t)number, 1, [&](int) -> std::vector<NgramTokens> {
                             return {{tokens.data(), T}};
                         }});
        for (int layer : tables->sizes().layers)
            fill(tables->grads(layer), 0.1f * (float)number + (float)layer,
                 tables->sizes().distinct() * tables->sizes().W, test_stream());
        tables->sum_gradients();
        Buffer<float> scale(std::vector<float>{0.5f});
        tables->update({0.05f, 1e-8f, number}, scale);
        tables->synchronize();
    }

    // Returns for each table the rows' sums of squares, and the values of rows whose sum is not 0.
    Rows rows() {
        tables->synchronize();
        const TableSizes& sizes = tables->sizes();
        const size_t W = (size_t)sizes.W, of_table = sizes.table_bytes();
        std::vector<uint64_t> numbers(sizes.own_rows());
        std::iota(numbers.begin(), numbers.end(), 0);
        std::vector<char> records(numbers.size() * sizes.record_bytes());
        std::vector<char*> to;
        for (uint64_t row : numbers) to.push_back(&records[row * sizes.record_bytes()]);
        tables->own().begin_copies(false);
        tables->own().copy(numbers, to);
        Rows all(sizes.tables());
        for (size_t table = 0; table < all.size(); table++) {
            for (const char* record : to) {
                float squares;
                std::vector<float> values(W);
                to_floats(sizes.dtype, record + table * of_table, W, values.data());
                memcpy(&squares, record + table * of_table + sizes.row_bytes(), sizeof squares);
                all[table].first.push_back(squares);
                if (squares != 0)
                    all[table].second.insert(all[table].second.end(), values.begin(), values.end());
            }
        }
        return all;
    }

    // Saves, and meanwhile runs a step if one is given. Returns the report.
    SaveReport save(int step_number, int step_meanwhile = 0) {
        saver->save(about_step(step_number));
        if (step_meanwhile) step(step_meanwhile);
        return saver->finish();
    }

    // Loads, and returns the bytes of the checkpoint that this rank read.
    uint64_t load(const std::string& folder) {
        CheckpointReader reader(folder);
        CheckpointLoader loader({contributor.get()}, test_world(), reader);
        loader.load(false);
        saver->loaded(reader);
        return loader.bytes_read();
    }
};

// The numbers of the parts of the first table in a checkpoint.
std::vector<int> parts_of(const std::string& folder) {
    CheckpointReader reader(folder);
    std::vector<int> parts;
    for (const CheckpointTensor& tensor : reader.index().tensors) {
        int number = 0;
        bool is_first = tensor.name.starts_with("layers.0.table.") && tensor.name.ends_with(".ids");
        if (!is_first) continue;
        sscanf(tensor.name.c_str(), "layers.0.table.changes.%d", &number);
        parts.push_back(number);
    }
    return parts;
}

bool same(const Rows& a, const Rows& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (!same_bits(a[i].first, b[i].first) || !same_bits(a[i].second, b[i].second)) return false;
    return a.size() == b.size();
}

TEST_CASE("each save comes back in any place, and so does what a step changed meanwhile") {
    for (auto [from, in_background] : {std::pair{TablePlace::host, true},
                                       {TablePlace::host, false},
                                       {TablePlace::device, true},
                                       {TablePlace::device, false}}) {
        Folder folder;
        std::map<int, Rows> saved;
        {
            Tables run(folder.path, from, in_background);
            for (int number = 1; number <= 12; number++) {
                run.step(number);
                if (number % 3) continue;
                saved[number] = run.rows();
                CHECK(run.save(number, number + 1).error == "");
                number++;
            }
        }
        CHECK(saved.size() >= 3);
        for (TablePlace place : {TablePlace::disk, TablePlace::device, TablePlace::host, TablePlace::disk}) {
            Tables run(folder.path, place);
            for (auto& [number, rows] : saved) {
                CAPTURE(number);
                run.step(100);
                run.load(checkpoint_folder(folder.path, number));
                CHECK(same(run.rows(), rows));
            }
            run.step(7);
            CHECK(run.save(50).error == "");
            Rows rows = run.rows();
            run.load(checkpoint_folder(folder.path, 50));
            CHECK(same(run.rows(), rows));
            on_root([&] { remove_checkpoint(folder.path, 50); });
        }
    }
}

// Rows loaded into fp32 keep their bf16 values; rows loaded into bf16 are rounded.
TEST_CASE("rows are converted to the format of the run that loads them") {
    for (TablePlace place : {TablePlace::device, TablePlace::host, TablePlace::disk}) {
        Folder folder;
        auto in = [&](RowDtype dtype, bool is_new = false) {
            return std::make_unique<Tables>(folder.path, place, true, dtype, is_new);
        };
        auto save = [&](Tables& run, int number) {
            Rows rows = run.rows();
            CHECK(run.save(number).error == "");
            return rows;
        };
        auto load = [&](Tables& run, int number) {
            run.load(checkpoint_folder(folder.path, number));
            return run.rows();
        };
        auto rounded = [](Rows rows) {
            for (auto& [squares, values] : rows)
                for (float& value : values) value = bf16_to_float(float_to_bf16(value));
            return rows;
        };
        auto run = in(RowDtype::fp32, true);
        for (int number = 1; number <= 4; number++) run->step(number);
        Rows exact = save(*run, 4);
        run.reset();
        run = in(RowDtype::bf16);
        CHECK(same(load(*run, 4), rounded(exact)));
        CHECK_FALSE(same(rounded(exact), exact));
        run->step(5);
        Rows changed = save(*run, 5);
        CHECK(parts_of(checkpoint_folder(folder.path, 5)) == std::vector<int>{0});  // all rows, in bf16
        run.reset();
        run = in(RowDtype::fp32);
        CHECK(same(load(*run, 5), changed));
    }
}

TEST_CASE("a save writes what changed, now and then all that changed since the base, or a new base") {
    Folder folder;
    Tables run(folder.path, TablePlace::disk);
    for (int number = 1; number <= 6; number++) run.step(number);
    std::vector<size_t> parts;
    std::vector<uint64_t> bytes;
    std::vector<Rows> rows;
    for (int save = 1; save <= 20; save++) {
        rows.push_back(run.rows());
        SaveReport report = run.save(save);
        CHECK(report.error == "");
        parts.push_back(parts_of(report.folder).size());
        bytes.push_back(report.bytes);
        run.step(50 + save, true);
    }
    CHECK(parts[0] == 1);
    for (size_t i = 1; i <= 16; i++) CHECK(parts[i] == i + 1);
    CHECK(parts[17] == 2);  // the changes of 17 saves are in one part
    CHECK(parts[18] == 3);
    CHECK(bytes[1] < bytes[0] / 4);
    for (int save : {1, 2, 17, 18, 20}) {
        run.load(checkpoint_folder(folder.path, save));
        CHECK(same(run.rows(), rows[(size_t)save - 1]));
        CHECK_NOTHROW(verify_checkpoint(CheckpointReader(checkpoint_folder(folder.path, save)),
                                        [](const std::string&) {}));
    }
    for (int number = 100; number <= 140; number++) {
        run.step(number);
        if (number % 4 == 0) CHECK(run.save(number).error == "");
    }
    CHECK(parts_of(checkpoint_folder(folder.path, 140)).size() < 10);  // there was a new base
}

TEST_CASE("a table on disk returns to the last checkpoint, reading only what has changed since") {
    Folder folder;
    Rows saved, later;
    uint64_t written = 0;
    {
        Tables run(folder.path, TablePlace::disk);
        for (int number = 1; number <= 60; number++) run.step(number);
        CHECK(run.save(1).error == "");
        for (int number = 61; number <= 63; number++) run.step(number);
        saved = run.rows();
        CHECK(run.save(2).error == "");
        for (int number = 64; number <= 66; number++) run.step(number);
        run.tables->synchronize();
        CHECK(run.tables->own().file()->bytes_written() > 0);
        later = run.rows();
    }
    std::string last = checkpoint_folder(folder.path, 2);
    CheckpointReader reader(last);
    for (uint64_t size : reader.index().file_bytes) written += size;
    auto resumed = [&](const std::function<void(Tables&)>& check) {
        // a new process would do this; Tables made for disk would clear the file
        Tables run(folder.path, TablePlace::host);
        ZeroSettings settings = run.tables->settings();
        settings.table_place = TablePlace::disk;
        Arena memory;
        Workload workload = {.B = 1, .T = T, .training = true, .recompute = Recompute::none, .loss_chunk = 8};
        run.contributor.reset(), run.saver.reset();
        run.tables = std::make_unique<NgramTables>(memory, run.config, workload, settings, run.mesh,
                                                   run.stage, test_stream());
        run.contributor = std::make_unique<NgramCheckpoint>(*run.tables, run.layout);
        run.saver = std::make_unique<CheckpointSaver>(Contributors{run.contributor.get()}, test_world(),
                                                      folder.path, Retention{.newest = 0}, true);
        check(run);
        run.contributor.reset(), run.saver.reset(), run.tables.reset();
    };
    resumed([&](Tables& run) {
        uint64_t bytes = run.load(last);
        CHECK(same(run.rows(), saved));
        CHECK(bytes < written / (uint64_t)test_world().size() / 3);
        for (int number = 64; number <= 66; number++) run.step(number);
        CHECK(same(run.rows(), later));
    });
    // once more, with the files of that run
    resumed([&](Tables& run) {
        CHECK(run.load(last) < written / (uint64_t)test_world().size() / 3);
        CHECK(same(run.rows(), saved));
    });
    // one rank's undo log is damaged: all ranks read the checkpoint
    if (int rank = test_world().rank(); rank == test_world().size() - 1)
        for (const auto& entry : fs::directory_iterator(folder.path + "/tables"))
            if (entry.path().filename().string().starts_with(text("stage-00-owner-%05d.undo", rank)))
                std::ofstream(entry.path(), std::ios::app) << "?";
    test_world().barrier();
    resumed([&](Tables& run) {
        run.load(last);
        CHECK(same(run.rows(), saved));
        run.step(64);
    });
}

TEST_CASE("weights that are saved alone change nothing about the next save") {
    Folder folder;
    Tables run(folder.path, TablePlace::disk);
    for (int number = 1; number <= 20; number++) run.step(number);
    const uint64_t base = run.save(1).bytes;
    run.step(21, true);
    {
        CheckpointSaver alone({run.contributor.get()}, test_world(), folder.path, {}, false, true);
        alone.save(about_step(2));
        CHECK(alone.finish().error == "");
    }
    CHECK(run.save(3).bytes < base / 4);
    CHECK(parts_of(checkpoint_folder(folder.path, 3)) == std::vector<int>{0, 1});
}

TEST_CASE("rows that a save could not write are written by the next") {
    Folder folder;
    Tables run(folder.path, TablePlace::disk);
    for (int number = 1; number <= 20; number++) run.step(number);
    CHECK(run.save(1).error == "");
    run.step(21);
    std::string aside = folder.path + "/aside";
    on_root([&] {
        fs::rename(checkpoints_folder(folder.path), aside);
        write_file(checkpoints_folder(folder.path), "not a folder");
    });
    CHECK(run.save(2).error.find("cannot make it") != std::string::npos);
    on_root([&] {
        fs::remove(checkpoints_folder(folder.path));
        fs::rename(aside, checkpoints_folder(folder.path));
    });
    run.step(22);
    Rows rows = run.rows();
    CHECK(run.save(3).error == "");
    CHECK(parts_of(checkpoint_folder(folder.path, 3)) == std::vector<int>{0, 1});
    Tables other(folder.path + "/other", TablePlace::host);
    other.load(checkpoint_folder(folder.path, 3));
    CHECK(same(other.rows(), rows));
}

}  // namespace
