// A second contributor to checkpoints, besides the model: a table whose number of rows is not known in
// advance, whose rows are owned by hash and change while they are saved, in files that checkpoints share.
// devices: cpu
// ranks: 4 3 1
#include <sys/stat.h>

#include "data/checkpoint/verification.h"
#include "test/comm/hash_table.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

// A folder that all ranks share, and a run in it.
struct Folder {
    TemporaryFolder own;
    std::string path = test_world().all_gather(own.path)[0];
    ~Folder() { test_world().barrier(); }
};
struct Run : Folder, TableRun {
    explicit Run(bool in_background, int keep = 0)
        : TableRun(test_world(), Folder::path, keep, in_background) {}

    std::string folder(int64_t of) const { return checkpoint_folder(path, of); }
};

int names_of(const std::string& folder, uint32_t file) {
    struct stat status;
    REQUIRE(stat((folder + "/" + data_file_name((int)file)).c_str(), &status) == 0);
    return (int)status.st_nlink;
}

// A contributor that has no data, and cannot begin a save.
struct Unwilling : Stateful {
    uint64_t bytes_to_write(bool) const override { return 0; }
    void begin_save(const SaveScope&) override { fail("unwilling; try it without"); }
    SavePlan plan() override { return {}; }
    void write(const WritePiece&) override {}
    bool has(const std::string&) const override { return false; }
    std::vector<PieceBatch> begin_load(const CheckpointReader&, bool) override { return {}; }
    Messages take(const PieceBatch&, const char*) override { return {}; }
    void receive(std::string_view) override {}
    void settle() override {}
    std::string end_load() override { return ""; }
};

void on_root(const std::function<void()>& work) {
    test_world().barrier();
    if (test_world().is_root()) work();
    test_world().barrier();
}

size_t tensors_of_table(const std::string& folder) {
    CheckpointReader reader(folder);
    return (size_t)std::ranges::count_if(reader.index().tensors, [](const CheckpointTensor& tensor) {
        return tensor.name.starts_with("table.");
    });
}

}  // namespace

TEST_CASE("all contributors come back, also to an earlier step, and go on from there") {
    for (bool in_background : {true, false}) {
        CAPTURE(in_background);
        Run run(in_background);
        run.train();
        for (int save = 0; save < 6; save++) CHECK(run.save().error == "");
        std::vector<int64_t> steps = checkpoint_steps(run.path);
        REQUIRE(steps.size() == 6);
        for (int64_t step : steps) {
            CAPTURE(step);
            run.load(run.folder(step));
            CHECK(run.step() == step);
            CHECK(run.wrong() == 0);
        }
        run.train(2);
        CHECK(run.save().error == "");
        run.load(run.folder(3));
        CHECK(run.wrong() == 0);
    }
}

TEST_CASE("a save writes what has changed, and shares the rest with the checkpoint before") {
    Run run(true, 2);
    run.train();
    std::vector<uint64_t> bytes;
    std::vector<size_t> tensors;
    for (int save = 1; save <= 6; save++) {
        SaveReport report = run.save();
        CHECK(report.error == "");
        bytes.push_back(report.bytes);
        tensors.push_back(tensors_of_table(report.folder));
    }
    CHECK(tensors == std::vector<size_t>{2, 4, 6, 8, 2, 4});  // a base, three deltas, a base, a delta
    CHECK(bytes[4] > bytes[3]);                               // all rows, whose number grows each time
    CHECK(bytes[5] < bytes[4]);
    test_world().barrier();
    CheckpointReader last(run.folder(6));
    size_t shared = last.index().shared.size(), n = (size_t)test_world().size();
    CHECK(shared == n);
    for (auto [file, origin] : last.index().shared) {
        CHECK(names_of(run.folder(6), file) == 2);
        CHECK(origin.number == file - n);  // files of the model, files of the delta, files of the base
        CHECK(origin.save_id == CheckpointReader(run.folder(5)).index().save_id);
    }
    // files of older checkpoints are removed with the last checkpoint that needs them
    CHECK(checkpoint_steps(run.path) == std::vector<int64_t>{6, 5});
    on_root([&] { remove_checkpoint(run.path, 5); });
    for (auto [file, origin] : last.index().shared) CHECK(names_of(run.folder(6), file) == 1);
    run.load(run.folder(6));
    CHECK(run.wrong() == 0);
    CHECK_NOTHROW(verify_checkpoint(CheckpointReader(run.folder(6)), [](const std::string&) {}));
}

TEST_CASE("a checkpoint that shares files can be copied, and its run goes on without the one before") {
    Run run(false);
    run.train();
    for (int save = 0; save < 3; save++) CHECK(run.save().error == "");
    std::string copy = run.path + "/copy/step_00000003";
    on_root([&] {
        fs::create_directories(copy);
        fs::copy(run.folder(3), copy);
        fs::remove_all(checkpoints_folder(run.path));
    });
    run.load(copy);
    CHECK(run.wrong() == 0);
    run.train();
    CHECK(run.save().error == "");  // shared with the copy
    CHECK(tensors_of_table(run.folder(4)) == 8);
    on_root([&] { fs::remove_all(checkpoints_folder(run.path)); });
    run.train();
    CHECK(run.save().error == "");  // the last checkpoint is gone
    CHECK(tensors_of_table(run.folder(6)) == 2);
    run.load(run.folder(6));
    CHECK(run.wrong() == 0);
}

TEST_CASE("what a save that failed would have written is written by the next") {
    Run run(true);
    run.train();
    CHECK(run.save().error == "");
    std::string aside = run.path + "/aside";
    on_root([&] {
        fs::rename(checkpoints_folder(run.path), aside);
        write_file(checkpoints_folder(run.path), "not a folder");
    });
    CHECK(run.save().error.find("cannot make it") != std::string::npos);
    on_root([&] {
        fs::remove(checkpoints_folder(run.path));
        fs::rename(aside, checkpoints_folder(run.path));
    });
    run.train();
    CHECK(run.save().error == "");
    CHECK(tensors_of_table(run.folder(4)) == 4);
    run.load(run.folder(4));
    CHECK(run.wrong() == 0);
}

TEST_CASE("where one contributor cannot begin a save, nothing of the others is lost") {
    Run run(true);
    run.train();
    CHECK(run.save().error == "");
    Unwilling unwilling;
    {
        CheckpointSaver saver({run.parts()[0], run.parts()[1], &unwilling}, test_world(), run.path, {}, true);
        CHECK_THROWS_AS(saver.save(about_step(2)), Error);
        CHECK(!saver.under_way());
    }
    run.train();
    CHECK(run.save().error == "");
    run.load(run.folder(3));
    CHECK(run.wrong() == 0);
}

TEST_CASE("tensors that no contributor knows are refused, and those that are wanting") {
    Run run(false);
    run.train();
    CHECK(run.save().error == "");
    CheckpointReader reader(run.folder(1));
    CHECK_REFUSED(load_checkpoint({run.parts()[0]}, test_world(), reader, false),
                  "contains tensor table.1.ids, which this model does not have; ");
    test_world().recover();
    CHECK_REFUSED(CheckpointReader(run.folder(1))
                      .read_floats(reader.index().find("table.1.ids"), Slot::data, 0, 1, nullptr),
                  "tensor table.1.ids holds integers; ");
}
