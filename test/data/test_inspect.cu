// The inspect subcommand: what it says about a checkpoint, and the damage that it finds.
#include "data/checkpoint/builder.h"
#include "data/commands/inspect.h"
#include "test/support/file_testing.h"

// Two tensors in 6 pieces, in two data files; a third file holds none.
static void save_example(const std::string& run_dir, int64_t step) {
    Options options;
    options.model = "gpt2-124M";
    options.layers = 7;
    options.tp = 2;
    options.learning_rate = 3e-4f;
    options.prompt = "what is it that you want\n\x1b[2J";
    CheckpointIndex index;
    index.save_id = new_save_id();
    index.about = {{"program", "train_gpt 0"},
                   {"step", step},
                   {"samples", 32 * step},
                   {"options", options_to_json(options)}};
    index.tensors = {{"wte", {300, 40}, {Dtype::bf16, Dtype::fp32, {}, {}}},
                     {"norm", {8}, {Dtype::bf16, {}, {}, {}}}};
    NewCheckpoint folder(run_dir, checkpoint_folder(run_dir, step));
    CheckpointDataFile first(folder.folder(), 0, index.save_id), second(folder.folder(), 1, index.save_id),
        empty(folder.folder(), 2, index.save_id);
    std::vector<float> data(12000, 1.5f);
    auto append = [&](CheckpointDataFile& file, CheckpointPiece piece) {
        file.append(piece, data.data(), index.bytes_of(piece));
        index.pieces.push_back(piece);
    };
    append(first, {0, Slot::weight, 0, 0, 0, 20, 0, 6000, 0, 0});
    append(first, {0, Slot::weight, 0, 0, 20, 20, 0, 6000, 0, 0});
    append(first, {1, Slot::weight, 0, 0, 0, 1, 0, 8, 0, 0});
    append(second, {0, Slot::master, 0, 0, 0, 40, 0, 5000, 0, 0});
    append(second, {0, Slot::master, 0, 0, 0, 40, 5000, 5000, 0, 0});
    append(second, {0, Slot::master, 0, 0, 0, 40, 10000, 2000, 0, 0});
    index.file_bytes = {first.finish(), second.finish(), empty.finish()};
    folder.commit(index);
}

// Returns the lines about damage, and then the error.
static std::vector<std::string> damage_of(const std::string& folder) {
    std::vector<std::string> lines;
    std::string error = error_of([&] {
        verify_checkpoint(CheckpointReader(folder, false),
                          [&](const std::string& line) { lines.push_back(line); });
    });
    lines.push_back(error);
    return lines;
}

using Lines = std::vector<std::string>;

TEST_CASE("what is said of a checkpoint") {
    TemporaryFolder run;
    save_example(run.path, 100);
    CheckpointReader reader(newest_checkpoint(run.path));
    CHECK(CheckpointReport(reader).lines() ==
          Lines{"checkpoint   " + run.path + "/checkpoints/step_00000100, written by train_gpt 0",
                "trained      100 steps, 3200 samples", "parameters   12.0k (12008) in 2 tensors",
                "on disk      0.1 MB in 3 data files, 6 pieces",
                "layout       --dp 0  --tp 2  --pp 1  --zero 0  --shard-group 0",
                "options      --model gpt2-124M  --layers 7  --learning-rate 0.0003",
                "             --prompt 'what is it that you want\\n\\x1b[2J'", "",
                "tensor  shape     weight  master  m  v  bytes",
                "wte     300 x 40  bf16    fp32    -  -  72000",
                "norm    8         bf16    -       -  -     16"});
}

TEST_CASE("a checkpoint that is whole") {
    TemporaryFolder run;
    save_example(run.path, 100);
    save_example(run.path, 200);
    CHECK(damage_of(newest_checkpoint(run.path)) == Lines{"no error"});
    CHECK_NOTHROW(inspect_checkpoint({.run = run.path, .verify = false}));
    CHECK_NOTHROW(inspect_checkpoint({.run = run.path, .verify = true}));
    CHECK_NOTHROW(inspect_checkpoint({.run = run / "checkpoints/step_00000100", .verify = true}));
    CHECK_REFUSED(inspect_checkpoint({.run = run / "checkpoints", .verify = true}),
                  "/checkpoints: no checkpoint there; ");
}

TEST_CASE("every damaged piece is named") {
    TemporaryFolder run;
    save_example(run.path, 100);
    std::string folder = newest_checkpoint(run.path), path = folder + "/data_00001.bin";
    std::string good = read_text(path), bytes = good;
    bytes[64 + 5] ^= 1;
    bytes[64 + 40000] ^= 1;  // the first byte of the third piece
    write_file(path, bytes);
    CHECK(
        damage_of(folder) ==
        Lines{path +
                  ": tensor wte, master, elements 0 to 4999, 20000 bytes from byte 64 on: does not match its "
                  "checksum; use another checkpoint",
              path + ": tensor wte, master, elements 10000 to 11999, 8000 bytes from byte 40064 on: does not "
                     "match its checksum; use another checkpoint",
              folder + ": 2 of 6 pieces are damaged; use another checkpoint"});
    CHECK_NOTHROW(inspect_checkpoint({.run = run.path, .verify = false}));
    CHECK_REFUSED(inspect_checkpoint({.run = run.path, .verify = true}), "2 of 6 pieces are damaged; ");

    write_file(path, good.substr(0, 1000));
    CHECK(damage_of(folder) ==
          Lines{path + ": 1000 bytes, but the index says 48064; use another checkpoint",
                folder +
                    ": 3 of 6 pieces are damaged, 1 of 3 data files are unusable; use another checkpoint"});
    CHECK_REFUSED(inspect_checkpoint({.run = run.path, .verify = false}),
                  "1000 bytes, but the index says 48064; ");

    // files that do not belong to it
    write_file(path, good);
    write_file(folder + "/data_00007.bin", good);
    write_file(folder + "/notes\n.txt", "");
    CHECK(damage_of(folder) ==
          Lines{folder + "/data_00007.bin: does not belong to this checkpoint; remove it",
                folder + "/notes\\n.txt: does not belong to this checkpoint; remove it",
                folder + ": 0 of 6 pieces are damaged, and files that do not belong to it: 2; remove them"});
    CHECK_NOTHROW(inspect_checkpoint({.run = run.path, .verify = false}));
    write_file(path, bytes);
    CHECK(damage_of(folder).back() ==
          folder + ": 2 of 6 pieces are damaged, and files that do not belong to it: 2; use another "
                   "checkpoint");
    fs::remove(folder + "/data_00007.bin");
    fs::remove(folder + "/notes\n.txt");

    // also a file without pieces
    fs::remove(folder + "/data_00002.bin");
    write_file(path, good);
    CHECK(damage_of(folder) ==
          Lines{folder + "/data_00002.bin: cannot open it: No such file or directory; check the path",
                folder +
                    ": 0 of 6 pieces are damaged, 1 of 3 data files are unusable; use another checkpoint"});
    CHECK_REFUSED(inspect_checkpoint({.run = run.path, .verify = false}),
                  "data_00002.bin: cannot stat it: No such file");
}
