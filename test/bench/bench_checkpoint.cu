/*
Measures the cost of checkpoints, and in the same run what the disk and memory need to move the same bytes.

    mpirun -np N bench_checkpoint MODEL FOLDER         saves, verifies and loads with N ranks (ZeRO 3 if
                                                       several), and leaves a checkpoint in FOLDER/N
    mpirun -np N bench_checkpoint MODEL FOLDER FROM    loads the one that FROM ranks left in FOLDER/FROM

The state is the model's with AdamW's moments. The stall is the time for which a save blocks the caller; in a
run its copy overlaps the passes of a step, and delays the next update only if they are shorter. A save is
measured from the call until the checkpoint is on disk under its name and the previous one is deleted. For a
raw write, each rank writes a file from memory, 16 MiB at a time, calls fsync and deletes it. Before each read
the system is asked to drop the files from the page cache (a virtual machine's host may still cache them). A
raw read reads the same files, 16 MiB at a time. Because the speed of a disk varies, the measurements are
repeated in turn, and the medians are reported.
*/
#include "comm/watchdog.h"
#include "comm/checkpoint_loader.h"
#include "comm/checkpoint_saver.h"
#include "comm/placement.h"
#include "comm/zero_checkpoint.h"
#include "data/commands/inspect.h"
#include "test/bench/bench.h"

constexpr int repeats = 3;
constexpr size_t raw_chunk = (size_t)16 << 20;

// Incompressible bytes.
inline std::vector<char> random_bytes(size_t count) {
    std::vector<char> bytes(count);
    for (size_t i = 0; i < count; i += sizeof(Random4)) {
        Random4 random = philox(1, i);
        memcpy(&bytes[i], &random, std::min(sizeof random, count - i));
    }
    return bytes;
}

inline double gigabytes_per_second(uint64_t bytes, const std::vector<double>& seconds) {
    return (double)bytes / median(seconds) / 1e9;
}

class CheckpointBench {
public:
    CheckpointBench(const World& world, const ModelConfig& config, const std::string& folder)
        : world_(world),
          folder_(folder),
          mesh_(world, {.dp = world.size(), .shard = world.size()}, nullptr),
          layout_(parameter_layout(config, world.size())),
          state_(memory_, layout_, mesh_, settings(world), stream_.stream),
          chunk_(random_bytes(raw_chunk)) {}

    void save() {
        fill_state();
        std::vector<double> stalls, behind, saves, writes, copies;
        uint64_t bytes = 0;
        {
            CheckpointSaver saver({&contributor_}, world_, run_of(world_.size()), {1}, true);
            for (int step = 1; step <= repeats; step++) {
                saver.save({{"program", "bench_checkpoint"},
                            {"step", step},
                            {"samples", 0},
                            {"options", nlohmann::ordered_json::object()}});
                behind.push_back(seconds_of_all([&] { state_.wait_for_copies(); }));
                SaveReport report = finish_beside_work(saver);
                if (!report.error.empty()) throw CommonError(report.error);
                bytes = report.bytes;
                stalls.push_back(world_.largest((int)(report.stalled * 1e6)) / 1e6);
                saves.push_back(report.seconds);
                writes.push_back(raw_write(bytes / world_.size()));
            }
        }
        for (int i = 0; i < repeats; i++) copies.push_back(copy_in_memory());
        printf("  %.2f GB from %d rank%s\n", (double)bytes / 1e9, world_.size(),
               world_.size() == 1 ? "" : "s");
        printf("  stall      %6.3f s      its copy, which the next update waits for, %.3f s; memory copy "
               "%.3f s\n",
               median(stalls), median(behind), median(copies));
        row("save", bytes, saves, "raw write", writes);
    }

    // Measures loading a checkpoint that `from` ranks left, and verifying it if it is this job's own.
    void load(int from) {
        std::string folder;
        world_.on_all_ranks([&] { folder = newest_checkpoint(run_of(from)); });
        CheckpointReader reader(folder);
        std::vector<double> loads, verifications, reads;
        uint64_t bytes = 0;
        for (uint64_t of_file : reader.index().file_bytes) bytes += of_file;
        for (int i = 0; i < repeats; i++) {
            drop_cache(reader);
            reads.push_back(seconds_of_all([&] { raw_read(reader); }));
            drop_cache(reader);
            loads.push_back(seconds_of_all([&] {
                CheckpointReader fresh(folder);
                load_checkpoint({&contributor_}, world_, fresh, false);
            }));
            if (from != world_.size()) continue;
            drop_cache(reader);
            verifications.push_back(seconds_of_all([&] { verify(folder); }));
        }
        if (from != world_.size())
            return row(text("%d -> %d", from, world_.size()), bytes, loads, "raw read", reads);
        row("load", bytes, loads, "raw read", reads);
        row("verify", bytes, verifications, "raw read", reads);
    }

private:
    static ZeroSettings settings(const World& world) {
        return {.level = world.size() > 1 ? 3 : 0, .keep_master = sizeof(floatX) < sizeof(float)};
    }

    std::string run_of(int ranks) const { return folder_ + "/" + std::to_string(ranks); }

    static void row(const std::string& what, uint64_t bytes, const std::vector<double>& seconds,
                    const char* raw, const std::vector<double>& raw_seconds) {
        double rate = gigabytes_per_second(bytes, seconds),
               raw_rate = gigabytes_per_second(bytes, raw_seconds);
        printf("  %-10s %6.2f GB/s   %-12s %6.2f GB/s   %3.0f%%\n", what.c_str(), rate, raw, raw_rate,
               100 * rate / raw_rate);
        fflush(stdout);
    }

    // Seconds that the slowest rank needs for work().
    template <typename Work>
    double seconds_of_all(Work&& work) const {
        world_.barrier();
        double start = seconds_now();
        world_.on_all_ranks(work);
        return world_.largest((int)((seconds_now() - start) * 1e6)) / 1e6;
    }

    // Finishes a save as a run does between its steps: only once no rank would wait for background work.
    SaveReport finish_beside_work(CheckpointSaver& saver) const {
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (!world_.largest(!saver.is_ready())) return saver.finish();
        }
    }

    void fill_state() {
        std::vector<float> values(1 << 20);
        for (size_t i = 0; i < values.size(); i++) values[i] = (float)philox(2, i).at[0];
        for (int unit : layout_.held()) {
            size_t part = state_.part_size(unit);
            for (Slot slot : slots_of(settings(world_))) {
                for (size_t at = 0; at < part; at += values.size())
                    state_.copy_in(slot, unit, at, std::min(values.size(), part - at), values.data());
            }
        }
        state_.synchronize();
    }

    // raw speed of the disk and of memory

    double raw_write(uint64_t bytes) const {
        std::string path = text("%s/raw_%d.bin", folder_.c_str(), world_.rank());
        double seconds = seconds_of_all([&] {
            FileHandle file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
            if (!file) fail_with_errno(path, "create it");
            for (uint64_t done = 0; done < bytes;) {
                ssize_t written =
                    write(file.get(), chunk_.data(), std::min<uint64_t>(chunk_.size(), bytes - done));
                if (written < 0) fail_with_errno(path, "write it");
                done += (uint64_t)written;
            }
            sync_file(file, path);
            if (unlink(path.c_str()) != 0) fail_with_errno(path, "delete it");
        });
        return seconds;
    }

    // Copies this rank's part of the state to memory that is already paged in.
    double copy_in_memory() const {
        size_t bytes = staging_bytes(layout_, mesh_.shape, settings(world_));
        char* to;
        allocate(to, bytes, true);
        memset(to, 1, bytes);
        double seconds = seconds_of_all([&] {
            char* next = to;
            for (int unit : layout_.held()) {
                for (Slot slot : slots_of(settings(world_))) {
                    state_.copy_out(slot, unit, 0, state_.part_size(unit), next);
                    next += state_.part_size(unit) * dtype_size(dtype_of(slot));
                }
            }
            state_.synchronize();
        });
        cudaFreeHost(to);
        return seconds;
    }

    template <typename Visit>
    static void each_file(const CheckpointReader& reader, Visit&& visit) {
        for (size_t number = 0; number < reader.index().file_bytes.size(); number++) {
            std::string path = reader.folder() + "/" + data_file_name((int)number);
            struct stat status;
            FileHandle file = open_regular(path, &status);
            visit(file, path, (uint64_t)status.st_size);
        }
    }

    void drop_cache(const CheckpointReader& reader) const {
        world_.barrier();
        each_file(reader, [](const FileHandle& file, const std::string& path, uint64_t) {
            if (posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED) != 0)
                fail_with_errno(path, "drop its cache");
        });
    }

    // Each rank reads an equal share of the bytes of all files.
    void raw_read(const CheckpointReader& reader) {
        uint64_t all = 0, before = 0;
        for (uint64_t bytes : reader.index().file_bytes) all += bytes;
        uint64_t begin = all / world_.size() * world_.rank();
        uint64_t end = world_.rank() == world_.size() - 1 ? all : begin + all / world_.size();
        each_file(reader, [&](const FileHandle& file, const std::string& path, uint64_t bytes) {
            uint64_t stop = std::min(end, before + bytes);
            for (uint64_t at = std::max(begin, before), n; at < stop; at += n) {
                n = std::min<uint64_t>(chunk_.size(), stop - at);
                if (!read_at(file, path, at - before, chunk_.data(), n)) fail_with_errno(path, "read it");
            }
            before += bytes;
        });
    }

    // Verifies as `train_gpt inspect DIR --verify on` does, in one process.
    void verify(const std::string& folder) const {
        if (world_.is_root()) verify_checkpoint(CheckpointReader(folder), [](const std::string&) {});
    }

    const World& world_;
    const std::string folder_;
    ComputeStream stream_;
    const Mesh mesh_;
    const ParameterLayout layout_;
    Arena memory_;
    ZeroState state_;
    ZeroCheckpoint contributor_{state_, [this](const MeshPosition&) { return layout_; }};
    std::vector<char> chunk_;
};

int main(int argc, char** argv) try {
    World world(&argc, &argv, watch_ranks);
    choose_device(world);
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail("/dev/null: cannot be opened");
    const Preset* preset = argc == 3 || argc == 4 ? find_preset(argv[1]) : nullptr;
    if (!preset)
        fail("bench_checkpoint: give a preset, a folder and, to load, how many ranks have saved there");
    ModelConfig config = preset->config;
    complete(config);
    CheckpointBench bench(world, config, argv[2]);
    int from = argc == 4 ? atoi(argv[3]) : world.size();
    if (argc == 3) bench.save();
    bench.load(from);
    return 0;
} catch (const std::exception& error) {
    fprintf(stderr, "train_gpt: %s\n", message_of(error).c_str());
    return 1;
}
