// Checkpoints on disk: what is written is read back, completely or not at all, and any damage gives a
// one-line error.
#include <cmath>
#include <csignal>
#include <thread>

#include <sys/resource.h>

#include "data/checkpoint/builder.h"
#include "data/checkpoint/folder.h"
#include "data/checkpoint/retention.h"
#include "test/data/failing_calls.h"
#include "test/support/file_testing.h"
#include "test/data/forged_checkpoint.h"

static nlohmann::ordered_json about(int64_t step) {
    return {{"program", "train_gpt 0"}, {"step", step}, {"samples", 96}, {"options", {{"layers", 2}}}};
}

// A number for each element of each tensor and slot that is exact in bf16, too.
static float element(int tensor, Slot slot, uint64_t at) {
    return (float)((at * 7 + (uint64_t)tensor * 31 + (uint64_t)slot * 57) % 251) - 125;
}

static std::vector<CheckpointTensor> example_tensors() {
    return {{"wte", {7, 5}, {Dtype::fp32, {}, Dtype::fp32, {}}},
            {"norm", {6}, {Dtype::bf16, Dtype::fp32, {}, {}}}};
}

// Builds a checkpoint with one data file.
static void build_example(const std::string& run_dir, int64_t step) {
    CheckpointBuilder builder(run_dir, step, about(step), example_tensors());
    auto append = [&](int tensor, Slot slot, uint64_t first, uint64_t count) {
        std::vector<float> values;
        for (uint64_t i = 0; i < count; i++) values.push_back(element(tensor, slot, first + i));
        builder.append(tensor, slot, first, count, values.data());
    };
    append(0, Slot::weight, 0, 20);
    append(0, Slot::weight, 20, 15);
    append(1, Slot::weight, 0, 6);
    append(0, Slot::m, 30, 5);
    append(0, Slot::m, 0, 30);
    append(1, Slot::master, 0, 6);
    builder.commit();
}

// Saves as several ranks do: tensors are cut into boxes and small pieces, which are dealt to `files` files.
// If `work`, which runs before the commit, throws, nothing is left.
template <typename Work>
void save_example(const std::string& run_dir, int64_t step, std::vector<CheckpointTensor> tensors, int files,
                  uint64_t piece, Work&& work) {
    NewCheckpoint folder(run_dir, checkpoint_folder(run_dir, step));
    CheckpointIndex index;
    index.save_id = new_save_id();
    index.about = about(step);
    index.tensors = std::move(tensors);
    std::vector<std::unique_ptr<CheckpointDataFile>> ranks;
    for (int rank = 0; rank < files; rank++)
        ranks.push_back(std::make_unique<CheckpointDataFile>(folder.folder(), rank, index.save_id));
    size_t turn = 0;
    for (uint32_t t = 0; t < index.tensors.size(); t++) {
        const CheckpointTensor& tensor = index.tensors[t];
        for (uint32_t s = 0; s < slot_count; s++) {
            if (!tensor.slots[s]) continue;
            uint64_t box = (tensor.width() + 2) / 3;
            for (uint64_t column = 0; column < tensor.width(); column += box) {
                uint64_t columns = std::min(box, tensor.width() - column), size = tensor.rows() * columns;
                for (uint64_t begin = 0; begin < size; begin += piece) {
                    CheckpointPiece next = {
                        t, (Slot)s, 0, 0, column, columns, begin, std::min(piece, size - begin), 0, 0};
                    std::vector<float> values;
                    next.run().each_run(tensor.width(), [&](uint64_t first, uint64_t n, uint64_t) {
                        for (uint64_t i = 0; i < n; i++)
                            values.push_back(element((int)t, (Slot)s, first + i));
                    });
                    std::vector<uint16_t> narrow(values.size());
                    std::transform(values.begin(), values.end(), narrow.begin(), float_to_bf16);
                    bool wide = *tensor.slots[s] == Dtype::fp32;
                    ranks[turn++ % ranks.size()]->append(
                        next, wide ? (void*)values.data() : (void*)narrow.data(), index.bytes_of(next));
                    index.pieces.push_back(next);
                }
            }
        }
    }
    for (auto& rank : ranks) index.file_bytes.push_back(rank->finish());
    work(folder.folder());
    folder.commit(index);
}

static void save_example(const std::string& run_dir, int64_t step, int files = 3) {
    save_example(run_dir, step, example_tensors(), files, 4, [](const std::string&) {});
}

// Reads a whole checkpoint, through read() and read_floats().
static void check_all(const std::string& folder, uint64_t at_once = 1000) {
    CheckpointReader reader(folder);
    std::vector<char> bytes(1 << 20);
    for (const CheckpointPiece& piece : reader.index().pieces) reader.read(piece, bytes.data());
    for (int t = 0; t < (int)reader.index().tensors.size(); t++) {
        const CheckpointTensor& tensor = reader.index().tensors[(size_t)t];
        for (uint32_t s = 0; s < slot_count; s++) {
            if (!tensor.slots[s]) continue;
            std::vector<float> got(at_once);
            bool right = true;
            for (uint64_t first = 0; first < tensor.size(); first += at_once) {
                uint64_t n = std::min(at_once, tensor.size() - first);
                reader.read_floats(t, (Slot)s, first, n, got.data());
                for (uint64_t i = 0; i < n; i++) right &= got[i] == element(t, (Slot)s, first + i);
            }
            CHECK(right);
        }
    }
}

static std::vector<std::string> names(const std::string& folder) {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder)) result.push_back(entry.path().filename());
    std::sort(result.begin(), result.end());
    return result;
}

using Names = std::vector<std::string>;

// ----------------------------------------------------------------------------
// written files are read back

TEST_CASE("bf16 is rounded to the nearest, ties to even") {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float value = bf16_to_float((uint16_t)bits);
        if (std::isnan(value)) {
            CHECK(std::isnan(bf16_to_float(float_to_bf16(value))));
            continue;
        }
        CHECK(float_to_bf16(value) == bits);
        if (std::isinf(value)) continue;
        uint32_t next = bits + 1;  // away from 0; infinity comes after the largest
        auto between = [&](uint32_t low) { return float_to_bf16(std::bit_cast<float>(bits << 16 | low)); };
        CHECK(between(0x7fff) == bits);
        CHECK(between(0x8000) == (bits % 2 ? next : bits));
        CHECK(between(0x8001) == next);
    }
    for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
        CHECK(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(bits)))));
}

TEST_CASE("arrays of both types are floats, and back, wherever they lie") {
    std::vector<float> values = {1, -2.5f, 0, 1e-30f, 1.00390625f, INFINITY}, got(values.size());
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
        std::vector<char> stored(values.size() * dtype_size(dtype) + 1);
        from_floats(dtype, values.data(), values.size(), stored.data() + 1);
        to_floats(dtype, stored.data() + 1, got.size(), got.data());
        for (size_t i = 0; i < values.size(); i++) {
            float want = dtype == Dtype::fp32 ? values[i] : bf16_to_float(float_to_bf16(values[i]));
            CHECK(got[i] == want);
        }
    }
}

TEST_CASE("what one process builds is read back") {
    TemporaryFolder run;
    build_example(run.path, 3);
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});
    CHECK(names(checkpoint_folder(run.path, 3)) == Names{"data_00000.bin", "index.bin"});
    CheckpointReader reader(newest_checkpoint(run.path));
    CHECK(reader.index().step() == 3);
    CHECK(reader.index().pieces.size() == 5);  // adjacent pieces are merged
    for (uint64_t at_once : {1, 3, 35}) check_all(reader.folder(), at_once);
    float got[6];
    CHECK_REFUSED(reader.read_floats(0, Slot::v, 0, 1, got),
                  "tensor wte: v of elements 0 to 1 is not stored");
    CHECK_REFUSED(reader.read_floats(1, Slot::weight, 2, 5, got),
                  "tensor norm: weight of elements 2 to 7 is");
    CHECK_REFUSED(reader.read_floats(1, Slot::weight, UINT64_MAX, 2, got), "is not stored; ");
}

TEST_CASE("large tensors are cut into pieces") {
    TemporaryFolder run;
    int64_t rows = 2 * (int64_t)largest_piece / 1000 + 1;
    {
        CheckpointBuilder builder(run.path, 0, about(0), {{"w", {rows, 1000}, {Dtype::bf16, {}, {}, {}}}});
        std::vector<float> values(1000);
        for (int64_t row = 0; row < rows; row++) {
            for (uint64_t i = 0; i < 1000; i++)
                values[i] = element(0, Slot::weight, (uint64_t)row * 1000 + i);
            builder.append(0, Slot::weight, (uint64_t)row * 1000, 1000, values.data());
        }
        builder.commit();
    }
    CheckpointReader reader(newest_checkpoint(run.path));
    CHECK(reader.index().pieces.size() == 3);
    std::vector<float> got((size_t)rows * 1000);
    reader.read_floats(0, Slot::weight, 0, got.size(), got.data());
    bool right = true;
    for (uint64_t i = 0; i < got.size(); i++) right &= got[i] == element(0, Slot::weight, i);
    CHECK(right);
}

TEST_CASE("boxes of columns in many files") {
    TemporaryFolder run;
    for (int files : {1, 2, 5}) {
        for (uint64_t piece : {1, 4, 1000}) {
            CAPTURE(files);
            CAPTURE(piece);
            save_example(run.path, 3, example_tensors(), files, piece, [](const std::string&) {});
            CHECK(names(checkpoint_folder(run.path, 3)).size() == (size_t)files + 1);
            for (uint64_t at_once : {1, 4, 35}) check_all(newest_checkpoint(run.path), at_once);
        }
    }
}

TEST_CASE("reading on and on reads each piece once") {
    TemporaryFolder run;
    save_example(run.path, 3, example_tensors(), 1, 1000, [](const std::string&) {});
    std::string folder = newest_checkpoint(run.path);
    CheckpointReader reader(folder);
    std::vector<float> got(5);
    reader.read_floats(0, Slot::m, 0, 5, got.data());  // row 0 is in every box, so all pieces are read
    fs::resize_file(folder + "/data_00000.bin", 64);
    for (uint64_t row = 1; row < 7; row++) {
        reader.read_floats(0, Slot::m, row * 5, 5, got.data());
        CHECK(got[4] == element(0, Slot::m, row * 5 + 4));
    }
    CHECK_REFUSED(reader.read_floats(0, Slot::weight, 0, 5, got.data()), "the file was truncated; ");
    CHECK_REFUSED(reader.read_floats(0, Slot::m, 0, 5, got.data()), "the file was truncated; ");
}

TEST_CASE("more data files than may be open, and several threads") {
    TemporaryFolder run;
    save_example(run.path, 3, {{"w", {400, 3}, {Dtype::fp32, {}, {}, {}}}}, 150, 4,
                 [](const std::string&) {});
    rlimit old_limit, small_limit;
    getrlimit(RLIMIT_NOFILE, &old_limit);
    small_limit = old_limit;
    small_limit.rlim_cur = 100;
    setrlimit(RLIMIT_NOFILE, &small_limit);
    CheckpointReader reader(newest_checkpoint(run.path));
    std::vector<std::string> troubles(4);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < troubles.size(); t++) {
        threads.emplace_back([&, t] {
            float values[4];
            const auto& pieces = reader.index().pieces;
            note_error(troubles[t], [&] {
                for (size_t p = 0; p < pieces.size(); p++)
                    reader.read(pieces[(p + t * 77) % pieces.size()], values);
            });
        });
    }
    for (std::thread& thread : threads) thread.join();
    setrlimit(RLIMIT_NOFILE, &old_limit);
    for (const std::string& trouble : troubles) CHECK(trouble == "");
}

TEST_CASE("the bytes of a data file are those of the description") {
    TemporaryFolder folder;
    CheckpointDataFile file(folder.path, 3, 0x0807060504030201);
    CheckpointPiece piece = {};
    file.append(piece, "abc", 3);
    CHECK(piece.file == 3);
    CHECK(piece.offset == 64);
    CHECK(piece.hash == XXH3_64bits("abc", 3));
    file.append(piece, "defg", 4);
    CHECK(piece.offset == 67);
    CHECK(contents(folder / "data_00003.bin").substr(0, 64) == std::string(64, '\0'));
    CHECK(file.finish() == 71);
    std::string bytes = contents(folder / "data_00003.bin");
    std::string wanted("\x89TGDT\r\n\x1a\1\0\0\0\3\0\0\0\1\2\3\4\5\6\7\10\x47\0\0\0\0\0\0\0", 32);
    wanted.resize(56);
    uint64_t hash = XXH3_64bits(wanted.data(), 56);
    wanted.append((const char*)&hash, 8);
    CHECK(bytes == wanted + "abcdefg");
    CHECK_REFUSED(CheckpointDataFile(folder.path, 3, 0), "data_00003.bin: cannot create it: File exists; ");
    CHECK_REFUSED(CheckpointDataFile(folder / "none", 3, 0),
                  "none/data_00003.bin: cannot create it: No such");
}

TEST_CASE("a data file that is given up goes at once") {
    TemporaryFolder folder;
    {
        CheckpointDataFile file(folder.path, 3, 0);
        CheckpointPiece piece = {};
        file.append(piece, "abc", 3);
        CHECK(names(folder.path) == Names{"data_00003.bin"});
    }
    CHECK(names(folder.path).empty());
    CheckpointDataFile(folder.path, 3, 0).finish();
    CHECK(names(folder.path) == Names{"data_00003.bin"});
}

// ----------------------------------------------------------------------------
// damage

TEST_CASE("any flipped, missing or added byte of any file is noticed") {
    TemporaryFolder run;
    save_example(run.path, 3);
    std::string folder = newest_checkpoint(run.path);
    for (const std::string& name : names(folder)) {
        std::string path = folder + "/" + name, good = contents(path);
        CAPTURE(name);
        auto check = [&](const std::string& bytes) {
            write_file(path, bytes);
            check_error(error_of([&] { check_all(folder); }), path, "");
        };
        for (size_t at = 0; at < good.size(); at++) {
            std::string bytes = good;
            bytes[at] = (char)(bytes[at] ^ 0x10);
            check(bytes);
        }
        for (size_t size = 0; size < good.size(); size++) check(good.substr(0, size));
        check(good + '\0');
        check(good + good);
        fs::remove(path);
        CHECK_REFUSED(check_all(folder), name + ": cannot ");
        fs::create_directory(path);
        CHECK_REFUSED(check_all(folder), name + ": ");
        fs::remove(path);
        write_file(path, good);
    }
    check_all(folder);
}

TEST_CASE("damage is named") {
    TemporaryFolder run;
    save_example(run.path, 3, 1);
    std::string folder = newest_checkpoint(run.path), path = folder + "/data_00000.bin";
    const CheckpointIndex index = CheckpointReader(folder).index();
    for (const CheckpointPiece& piece : index.pieces) {
        std::string good = contents(path), bytes = good;
        bytes[piece.offset] = (char)(bytes[piece.offset] + 1);
        write_file(path, bytes);
        CheckpointReader reader(folder);
        char values[16];
        const CheckpointTensor& tensor = index.tensors[piece.tensor];
        CHECK_REFUSED(reader.read(piece, values), path + ": tensor " + tensor.name + ", " +
                                                      slot_name(piece.slot) + ", elements " +
                                                      std::to_string(piece.begin) + " to ");
        CHECK_REFUSED(reader.read(piece, values),
                      " from byte " + std::to_string(piece.offset) + " on: does not match its checksum; ");
        write_file(path, good);
    }
    CheckpointReader reader(folder);
    CHECK(reader.name_of(index.pieces[1]) ==
          path + ": tensor wte, weight, elements 4 to 7 of columns 0 to 1, 16 bytes from byte 80 on");
    CHECK(reader.name_of(index.pieces.back()) ==
          path + ": tensor norm, master, elements 4 to 5, 8 bytes from byte " +
              std::to_string(index.pieces.back().offset) + " on");
}

TEST_CASE("files that belong elsewhere") {
    TemporaryFolder run, other;
    save_example(run.path, 3, 2);
    save_example(other.path, 3, 2);  // has the same sizes
    std::string folder = newest_checkpoint(run.path), another = newest_checkpoint(other.path);
    std::string first = contents(folder + "/data_00000.bin"), second = contents(folder + "/data_00001.bin");
    REQUIRE(contents(another + "/data_00000.bin").size() == first.size());
    const char* mixed_up = "belongs to another save, or was renamed; ";

    write_file(folder + "/data_00000.bin", contents(another + "/data_00000.bin"));
    CHECK_REFUSED(check_all(folder), std::string("data_00000.bin: ") + mixed_up);
    write_file(folder + "/data_00000.bin", second);
    write_file(folder + "/data_00001.bin", first);
    CHECK_REFUSED(check_all(folder), "data_0000");
    write_file(folder + "/data_00000.bin", first);
    write_file(folder + "/data_00001.bin", second);
    check_all(folder);
    write_file(folder + "/data_00002.bin", second);  // an extra file is ignored
    check_all(folder);
    write_file(folder + "/index.bin", contents(another + "/index.bin"));
    CHECK_REFUSED(check_all(folder), mixed_up);

    // a checkpoint under the name of another step
    fs::rename(another, checkpoint_folder(other.path, 4));
    CHECK_REFUSED(check_all(newest_checkpoint(other.path)), "step_00000004: holds a checkpoint of step 3; ");
    CHECK_REFUSED(check_all(newest_checkpoint(other.path) + "/"), "holds a checkpoint of step 3; ");
    fs::rename(checkpoint_folder(other.path, 4), other / "best");
    check_all(other / "best");
}

TEST_CASE("an index that is too long is not read") {
    TemporaryFolder folder;
    write_file(folder / "index.bin", "");
    fs::resize_file(folder / "index.bin", checkpoint_format::largest_index + 1);
    CHECK_REFUSED(CheckpointReader(folder.path), "too long for the index of a checkpoint; ");
}

// ----------------------------------------------------------------------------
// folders

TEST_CASE("names of checkpoints") {
    CHECK(checkpoint_folder("run", 100) == "run/checkpoints/step_00000100");
    CHECK(checkpoint_folder("run", 1234567890123) == "run/checkpoints/step_1234567890123");
    for (int64_t step : {0ll, 1ll, 99999999ll, 100000000ll, (long long)INT64_MAX})
        CHECK(step_of_name(checkpoint_name(step)) == step);
    for (const char* name :
         {"", "step_", "step_1", "step_000000001", "step_00000001.partial", "step_-0000001", "step_ 0000001",
          "step_+0000001", "step_00000001 ", "Step_00000001", "step_0000000a", "step_99999999999999999999",
          "step_00000001.aside"})
        CHECK(step_of_name(name) == -1);
}

TEST_CASE("checkpoints of a run") {
    TemporaryFolder run;
    CHECK(checkpoint_steps(run.path).empty());
    CHECK_REFUSED(newest_checkpoint(run.path), run.path + ": no checkpoint there; ");
    CHECK_REFUSED(newest_checkpoint(run / "none"), "/none: no checkpoint there; ");
    CHECK_REFUSED(newest_checkpoint(std::string(5000, 'a')), "cannot list it: File name too long; ");
    write_file(run / "file", "");
    CHECK_REFUSED(newest_checkpoint(run / "file"), "/file: no checkpoint there; ");
    for (int64_t step : {5, 100, 20}) build_example(run.path, step);
    fs::create_directory(run / "checkpoints/step_7");
    fs::create_directory(run / "checkpoints/step_00000200.partial");
    fs::create_directory(run / "checkpoints/notes.partial");
    fs::create_symlink("nowhere", run / "checkpoints/step_00000300");
    write_file(run / "checkpoints/step_00000400", "");
    CHECK(checkpoint_steps(run.path) == std::vector<int64_t>{100, 20, 5});
    CHECK(newest_checkpoint(run.path) == run / "checkpoints/step_00000100");
    CHECK(newest_checkpoint(run / "checkpoints/step_00000020") == run / "checkpoints/step_00000020");

    remove_unfinished(run.path);
    CHECK(names(run / "checkpoints") == Names{"notes.partial", "step_00000005", "step_00000020",
                                              "step_00000100", "step_00000300", "step_00000400", "step_7"});
    CHECK(set_aside_newer(run.path, 5) == std::vector<int64_t>{100, 20});
    CHECK(checkpoint_steps(run.path) == std::vector<int64_t>{5});
    check_all(newest_checkpoint(run.path));
    fs::remove(checkpoint_folder(run.path, 20) + ".aside/index.bin");
    build_example(run.path, 20);
    CHECK(set_aside_newer(run.path, 5) == std::vector<int64_t>{20});  // replaces the one set aside before
    CHECK(fs::exists(checkpoint_folder(run.path, 20) + ".aside/index.bin"));
    CHECK(set_aside_newer(run.path, 5).empty());
    CHECK_REFUSED(remove_checkpoint(run.path, 6), "step_00000006: cannot rename it: No such file");
}

TEST_CASE("old checkpoints go") {
    TemporaryFolder run;
    auto kept = [&](int keep, int64_t keep_every, std::vector<int64_t> best = {}) {
        for (int64_t step = 0; step <= 50; step += 10)
            fs::create_directories(checkpoint_folder(run.path, step) + "/inside");
        fs::create_directories(checkpoint_folder(run.path, 10) + ".partial");  // in the way
        BestCheckpoints of_steps;
        for (int64_t step : best) of_steps.losses.emplace_back(step, 1);
        remove_old_checkpoints(run.path, {keep, keep_every}, of_steps);
        return checkpoint_steps(run.path);
    };
    using Steps = std::vector<int64_t>;
    CHECK(kept(0, 0) == Steps{50, 40, 30, 20, 10, 0});
    CHECK(kept(2, 0) == Steps{50, 40});
    CHECK(kept(1, 20) == Steps{50, 40, 20, 0});
    CHECK(kept(9, 0) == Steps{50, 40, 30, 20, 10, 0});
    CHECK(kept(2, 0, {10, 40, 99}) == Steps{50, 40, 30, 10});
    CHECK(kept(1, 0) == Steps{50});
    CHECK(names(run / "checkpoints") == Names{"step_00000050"});
}

TEST_CASE("the best checkpoints are those of the lowest losses, the earliest of equals") {
    BestCheckpoints best;
    using Losses = std::vector<std::pair<int64_t, double>>;
    CHECK_FALSE(best.begin("", "1f"));
    CHECK(best.add(10, 5, 2));
    CHECK(best.add(20, 4, 2));
    CHECK_FALSE(best.add(30, 5, 2));
    CHECK_FALSE(best.add(35, NAN, 2));
    CHECK(best.losses == Losses{{20, 4}, {10, 5}});
    CHECK(best.words() == "step 20: 4.0000, step 10: 5.0000");
    CHECK(best.add(40, 4.5, 2));
    CHECK(best.losses == Losses{{20, 4}, {40, 4.5}});
    nlohmann::json header = {{best_key, to_json(best)}};
    CHECK(best_checkpoints(header, "here").losses == best.losses);
    CHECK(best_checkpoints(nlohmann::json::object(), "here").losses.empty());
    CHECK_REFUSED(best_checkpoints({{best_key, {1, 2}}}, "here"), "here: best is malformed");
    // a run that went back to a step has not reached the later ones; another validation set starts anew
    CHECK(best.add(20, 4.7, 2));
    CHECK(best.losses == Losses{{20, 4.7}});
    CHECK_FALSE(best.begin("", "1f"));
    CHECK(best.begin("", "2e"));
    CHECK(best.losses.empty());
    CHECK_FALSE(best.begin("web", "2e"));
    CHECK(best.add(30, 9, 2));
    CHECK(best.words() == "step 30: 9.0000 of web");
    CHECK(best.begin("code", "2e"));
}

TEST_CASE("a checkpoint is there when it is whole") {
    TemporaryFolder run;
    save_example(run.path, 3, example_tensors(), 2, 4, [&](const std::string& folder) {
        CHECK(folder == checkpoint_folder(run.path, 3) + ".partial");
        CHECK(names(run / "checkpoints") == Names{"step_00000003.partial"});
        CHECK(checkpoint_steps(run.path).empty());
    });
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});
    std::string before = contents(checkpoint_folder(run.path, 3) + "/index.bin");

    // a save that is given up leaves the older checkpoint of its step alone
    CHECK_REFUSED(save_example(run.path, 3, example_tensors(), 2, 4,
                               [&](const std::string&) { fail("save: stopped; try again"); }),
                  "save: stopped; ");
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});
    CHECK(contents(checkpoint_folder(run.path, 3) + "/index.bin") == before);

    // leftovers of a killed save do no harm
    fs::create_directories(checkpoint_folder(run.path, 3) + ".partial/data_00000.bin");
    fs::create_directories(checkpoint_folder(run.path, 3) + ".aside");
    save_example(run.path, 3);
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});
    CHECK(contents(checkpoint_folder(run.path, 3) + "/index.bin") != before);
    check_all(newest_checkpoint(run.path));

    // at no time is the older checkpoint under a name that a cleanup removes
    std::string final = checkpoint_folder(run.path, 3);
    fail_next_rename_to = final;
    CHECK_REFUSED(save_example(run.path, 3), "step_00000003.partial: cannot rename it: Input/output error; ");
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});
    check_all(newest_checkpoint(run.path));
    before = contents(final + "/index.bin");
    fail_next_sync_of = run / "checkpoints";
    CHECK_REFUSED(save_example(run.path, 3), "/checkpoints: cannot write it: Input/output error; ");
    CHECK(names(run / "checkpoints") == Names{"step_00000003", "step_00000003.aside"});
    CHECK(contents(final + "/index.bin") != before);  // the new one is in place, but may not be on disk
    CHECK(contents(final + ".aside/index.bin") == before);
    save_example(run.path, 3);
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});

    // data files that other machines wrote to another file system
    CHECK_REFUSED(save_example(run.path, 4, example_tensors(), 2, 4,
                               [&](const std::string& folder) { fs::remove(folder + "/data_00001.bin"); }),
                  "data_00001.bin: another process wrote it, but it is not visible here; ");
    CHECK_REFUSED(
        save_example(run.path, 4, example_tensors(), 2, 4,
                     [&](const std::string& folder) { write_file(folder + "/data_00001.bin", ""); }),
        "data_00001.bin: another process wrote it, but it is not visible here; ");
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});

    // a checkpoint to which not everything was appended
    {
        CheckpointBuilder builder(run.path, 5, about(5), example_tensors());
        CHECK_REFUSED(builder.commit(), "overlap or leave a hole; ");
    }
    CHECK(names(run / "checkpoints") == Names{"step_00000003"});
}

TEST_CASE("places that cannot be written") {
    TemporaryFolder run;
    write_file(run / "file", "");
    CHECK_REFUSED(build_example(run / "file", 3), "/file/checkpoints: cannot make it: Not a directory; ");
    std::vector<CheckpointTensor> vast = {{"w", {1 << 30, 1 << 20}, {Dtype::fp32, Dtype::fp32, {}, {}}}};
    CHECK_REFUSED(CheckpointBuilder(run.path, 3, about(3), vast), "needs 9007199254.7 MB, but ");
    CHECK(names(run / "checkpoints").empty());

    // A limit on the size of files stands in for a disk that fills up while writing.
    build_example(run.path, 2);
    rlimit old_limit, small_limit;
    getrlimit(RLIMIT_FSIZE, &old_limit);
    auto* old_handler = signal(SIGXFSZ, SIG_IGN);
    for (rlim_t limit : {0, 50, 63, 64, 100, 300, 400, 600}) {
        small_limit = old_limit;
        small_limit.rlim_cur = limit;
        setrlimit(RLIMIT_FSIZE, &small_limit);
        std::string message = error_of([&] { build_example(run.path, 3); });
        setrlimit(RLIMIT_FSIZE, &old_limit);
        check_error(message, message.substr(0, message.find(':')), "cannot write it: File too large; ");
        CHECK(names(run / "checkpoints") == Names{"step_00000002"});
    }
    signal(SIGXFSZ, old_handler);
    check_all(newest_checkpoint(run.path));
}

TEST_CASE("full disk") {
    SmallDisk disk("256k");
    if (!disk.mounted) SKIP("a small tmpfs cannot be mounted here");
    std::vector<CheckpointTensor> tensors = {{"w", {32 * 1024}, {Dtype::fp32, {}, {}, {}}}};
    std::vector<float> values(32 * 1024);
    {
        CheckpointBuilder builder(disk.folder.path, 3, about(3), tensors);
        write_file(disk.folder / "other", std::string(160 * 1024, 'x'));  // fills the disk after the check
        builder.append(0, Slot::weight, 0, values.size(), values.data());
        CHECK_REFUSED(builder.commit(), "data_00000.bin: cannot write it: No space left on device; ");
    }
    CHECK(names(disk.folder / "checkpoints").empty());
    CHECK_REFUSED(CheckpointBuilder(disk.folder.path, 3, about(3), tensors), "needs 0.1 MB, but ");
    CHECK(names(disk.folder / "checkpoints").empty());

    // a single data file, as one of several processes writes it
    fs::remove(disk.folder / "other");
    CheckpointPiece piece = {};
    auto write_all = [&] {
        CheckpointDataFile file(disk.folder.path, 0, 0);
        for (int i = 0; i < 3; i++) file.append(piece, values.data(), values.size() * sizeof(float));
        file.finish();
    };
    CHECK_REFUSED(write_all(), "data_00000.bin: cannot write it: No space left on device; ");
    CHECK(names(disk.folder.path) == Names{"checkpoints"});
    write_file(disk.folder / "other", std::string(240 * 1024, 'x'));
}
