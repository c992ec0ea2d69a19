// One reader for the processes of a machine. Runs under `mpirun -np N build/cpu-fp32/test_node_reader`, for
// any N, and without mpirun. All ranks must make the same calls, so no case returns early.
// devices: cpu cuda address
// ranks: 2 1 4
#include "test/support/file_testing.h"

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "comm/batches.h"
#include "test/support/ranks.h"

// A folder that is the same on all ranks.
struct CommonFolder {
    TemporaryFolder mine;
    std::string path = test_world().all_gather(mine.path)[0];
    ~CommonFolder() { test_world().barrier(); }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

static void write_on_root(const std::string& path, const std::vector<uint16_t>& tokens) {
    if (test_world().is_root()) write_file(path, shard_bytes(tokens));
    test_world().barrier();
}

static std::vector<uint16_t> random_tokens(size_t count, uint32_t vocab) {
    std::vector<uint16_t> tokens(count);
    uint64_t key = random_key(1, "tokens");
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)(philox(key, i).at[0] % vocab);
    return tokens;
}

static bool same(const HostBatch& a, const HostBatch& b, const BatchShape& shape) {
    HostBatch want = batch_at(a.tokens, shape.B, shape.T);
    if (shape.document_end < 0) want.doc_start = nullptr;
    return a.targets == want.targets && a.doc_start == want.doc_start && a.positions == want.positions &&
           a.by_token == want.by_token && a.by_position == want.by_position &&
           std::equal(a.tokens, a.tokens + batch_ints(shape.B, shape.T), b.tokens);
}

TEST_CASE("node reader: the batches of a reader for each rank, however ranks lie on machines") {
    CommonFolder folder;
    const World& world = test_world();
    uint64_t ranks = (uint64_t)world.size(), rank = (uint64_t)world.rank();
    write_on_root(folder / "a.bin", random_tokens(6000, 500));
    write_on_root(folder / "b.bin", random_tokens(3000, 500));
    std::string list = "0.75:" + (folder / "a.bin") + ",0.25:" + (folder / "b.bin");
    std::vector<std::string> nodes = {"one", text("of rank %llu", (unsigned long long)rank),
                                      text("odd %d", (int)rank % 2), rank == 0 ? "first" : "others",
                                      rank + 1 == ranks ? "last" : "others"};
    for (const std::string& node : nodes) {
        for (BatchShape shape : {BatchShape{1, 5, -1, false}, {3, 32, 7, true}, {8, 64, 0, false}}) {
            CAPTURE(node);
            CAPTURE(shape.B);
            TokenLoader loader(list, 500, shape.T, SampleOrder::shuffled, 5);
            uint64_t B = (uint64_t)shape.B, stride = ranks * B;
            BatchReader own(loader, shape, stride);
            auto shared = make_batch_source(world, true, loader, shape, stride, node);
            int wrong = 0;
            auto compare = [&](uint64_t first, int count) {
                const HostBatch& batch = shared->load(first, count);
                wrong += !same(batch, own.load(first, count), shape);
            };
            // each rank at its own pace
            for (uint64_t step = 0; step < 20 + 30 * (rank % 3); step++) {
                compare(step * stride + rank * B, shape.B);
                if (step % 7 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(3));
            }
            // all the same samples, as tensor ranks do
            for (uint64_t step = 0; step < 20; step++) compare(step * B, shape.B);
            compare(rank * B, shape.B - 1);
            compare(rank * B + stride, 0);
            compare(rank, shape.B);
            CHECK(wrong == 0);
            world.barrier();
        }
    }
}

// ----------------------------------------------------------------------------
// which process opens what

// The files in a folder that this process has open, which are those it has mapped.
static std::set<std::string> open_files(const std::string& folder) {
    std::set<std::string> files;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (size_t at = line.find(folder + "/"); at != line.npos) files.insert(line.substr(at));
    }
    return files;
}

// Changes the working directory, so that relative paths no longer resolve.
struct OtherFolder {
    const std::string before = std::filesystem::current_path();
    explicit OtherFolder(const std::string& folder) { std::filesystem::current_path(folder); }
    ~OtherFolder() { std::filesystem::current_path(before); }
};

// Writes PREFIX.idx and .bin with one document.
static void write_megatron(const std::string& prefix, const std::vector<uint16_t>& tokens) {
    std::string index("MMIDIDX\0\0", 9);
    auto add = [&](auto number) { index.append((const char*)&number, sizeof number); };
    add((uint64_t)1), add((uint8_t)8), add((uint64_t)1), add((uint64_t)2);
    add((int32_t)tokens.size()), add((int64_t)0), add((int64_t)0), add((int64_t)1);
    write_file(prefix + ".idx", index);
    write_file(prefix + ".bin", std::string((const char*)tokens.data(), 2 * tokens.size()));
}

TEST_CASE("token files: one rank checks all of them, and each opens what it reads") {
    CommonFolder folder;
    TemporaryFolder empty;
    const World& world = test_world();
    constexpr int T = 16, files = 12;
    for (int i = 0; i < files; i++)
        write_on_root(folder / text("s%02d.bin", i), random_tokens((size_t)(200 + 16 * i), 500));
    if (world.is_root()) write_megatron(folder / "m", random_tokens(300, 500));
    world.barrier();
    TokenLoader all("0.8:" + (folder / "s*.bin") + ",0.2:" + (folder / "m.idx"), 500, T,
                    SampleOrder::shuffled, 3);

    OtherFolder here(world.is_root() ? folder.path : empty.path);
    std::unique_ptr<TokenLoader> loader =
        open_token_files(world, "0.8:s*.bin,0.2:m.idx", 500, T, SampleOrder::shuffled, 3);
    CHECK(loader->samples_per_epoch() == all.samples_per_epoch());
    CHECK(loader->summary().size() == 2);
    std::vector<int> sample(2 * T), same_sample(2 * T);
    auto load = [&](const TokenLoader& from, uint64_t number, std::vector<int>& to) {
        from.load(number, to.data(), to.data() + T);
    };
    std::string first = loader->source(loader->place(0).source)[loader->place(0).file].path();
    if (!world.is_root())
        check_error(error_of([&] { load(*loader, 0, sample); }), first.ends_with(".idx") ? "m.bin" : first,
                    "No such file");

    OtherFolder there(folder.path);
    std::set<std::string> read;
    if (world.is_root()) read = open_files(folder.path);
    CHECK(read.size() == (world.is_root() ? 1 : 0));  // the first sample's
    for (uint64_t number = (uint64_t)world.rank(); number < 40; number += (uint64_t)world.size() * 7) {
        load(*loader, number, sample);
        TokenLoader::Place at = loader->place(number);
        std::string name = loader->source(at.source)[at.file].path();
        read.insert(folder / (name.ends_with(".idx") ? "m.bin" : name));
        CHECK(open_files(folder.path) == read);
    }
    uint64_t wrong = 0;
    for (uint64_t number = 0; number < 2 * loader->samples_per_epoch(); number++) {
        load(*loader, number, sample), load(all, number, same_sample);
        wrong += sample != same_sample;
    }
    CHECK(wrong == 0);
    CHECK(open_files(folder.path).size() == files + 1);
}

TEST_CASE("token files: what one rank refuses all refuse, and a file may not change before it is read") {
    CommonFolder folder;
    const World& world = test_world();
    auto refused = [&](const std::string& files) {
        std::string error =
            error_of([&] { open_token_files(world, files, 500, 16, SampleOrder::sequential); });
        world.recover();
        return error;
    };
    check_error(refused(folder / "none*.bin"), folder / "none*.bin", "no such file");
    write_on_root(folder / "a.bin", random_tokens(300, 500));
    write_on_root(folder / "bad.bin", std::vector<uint16_t>(40, 600));
    check_error(refused(folder / "bad.bin"), folder / "bad.bin", "is 600, outside the vocabulary of 500");
    CHECK(refused(folder / "*.bin") == "no error");
    std::unique_ptr<TokenLoader> loader =
        open_token_files(world, folder / "*.bin", 500, 16, SampleOrder::sequential);
    world.barrier();
    write_on_root(folder / "bad.bin", std::vector<uint16_t>(50, 400));
    std::vector<int> sample(32);
    uint64_t last = loader->samples_per_epoch() - 1;
    check_error(error_of([&] { loader->load(last, sample.data(), sample.data() + 16); }), folder / "bad.bin",
                "has 1124 bytes, but had 1104 when it was checked");
    world.barrier();
    write_on_root(folder / "bad.bin", std::vector<uint16_t>(40, 400));
    CHECK(error_of([&] { loader->load(last, sample.data(), sample.data() + 16); }) == "no error");
}

TEST_CASE("node reader: only the process that reads opens files") {
    CommonFolder folder;
    const World& world = test_world();
    for (const char* name : {"a.bin", "b.bin", "c.bin"})
        write_on_root(folder / name, random_tokens(900, 500));
    const BatchShape shape = {2, 32, -1, false};
    std::unique_ptr<TokenLoader> loader =
        open_token_files(world, folder / "*.bin", 500, shape.T, SampleOrder::shuffled);
    auto reader = make_batch_source(world, true, *loader, shape, 2 * (uint64_t)world.size(), "one");
    for (uint64_t step = 0; step < 20; step++)
        reader->load(2 * (step * (uint64_t)world.size() + (uint64_t)world.rank()), shape.B);
    world.barrier();
    CHECK(open_files(folder.path).size() == (world.is_root() ? 3 : 0));
    world.barrier();
}

// ----------------------------------------------------------------------------
// readers of the ranks

TEST_CASE("node reader: a batch is valid until the next call") {
    CommonFolder folder;
    const World& world = test_world();
    write_on_root(folder / "a.bin", random_tokens(9000, 500));
    const BatchShape shape = {4, 32, -1, false};
    TokenLoader loader(folder / "a.bin", 500, shape.T, SampleOrder::shuffled, 5);
    auto reader = make_batch_source(world, true, loader, shape, 4, "one");
    int wrong = 0;
    for (uint64_t first = 0; first < 80; first += 4) {
        const HostBatch& batch = reader->load(first, shape.B);
        std::vector<int> now(batch.tokens, batch.tokens + batch_ints(shape.B, shape.T));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        wrong += !std::equal(now.begin(), now.end(), batch.tokens);
    }
    CHECK(wrong == 0);
    world.barrier();
}

TEST_CASE("node reader: what cannot be read is said to the ranks that need it") {
    CommonFolder folder;
    const World& world = test_world();
    uint64_t ranks = (uint64_t)world.size(), rank = (uint64_t)world.rank(), bad_rank = ranks - 1;
    const BatchShape shape = {2, 8, -1, false};
    const uint64_t steps = 10, stride = 2 * ranks;
    std::vector<uint16_t> tokens(steps * stride * 8 + 1, 3);
    tokens[(4 * stride + 2 * bad_rank) * 8 + 1] = 77;  // read by the last rank in step 4
    write_on_root(folder / "a.bin", tokens);
    TokenLoader loader(folder / "a.bin", 50, shape.T, SampleOrder::sequential);
    auto reader = make_batch_source(world, true, loader, shape, stride, "one");
    for (int round = 0; round < 2; round++) {
        for (uint64_t step = 0; step < steps; step++) {
            CAPTURE(step);
            std::string error = error_of([&] { reader->load(step * stride + 2 * rank, shape.B); });
            if (step == 4 && rank == bad_rank)
                check_error(error, folder / "a.bin", "is 77, outside the vocabulary of 50");
            else
                CHECK(error == "no error");
        }
    }
    CHECK(error_of([&] { reader->load(4 * stride + 2 * rank, 0); }) == "no error");
    world.barrier();
}

TEST_CASE("node reader: ranks do not wait for one that has left") {
    CommonFolder folder;
    const World& world = test_world();
    write_on_root(folder / "a.bin", random_tokens(9000, 500));
    const BatchShape shape = {4, 32, -1, false};
    TokenLoader loader(folder / "a.bin", 500, shape.T, SampleOrder::shuffled, 5);
    auto others = make_batch_source(world, true, loader, shape, 4, "one");
    others->load(0, shape.B);
    world.barrier();
    if (world.rank() + 1 == world.size() && world.size() > 1) others.reset();  // not the rank that reads
    world.barrier();
    if (others) CHECK(error_of([&] { others->load(4, shape.B); }) == "no error");
    world.barrier();
    if (world.is_root()) others.reset();
    world.barrier();
    if (others) {
        // a batch that was read ahead is still available
        error_of([&] { others->load(8, shape.B); });
        for (uint64_t first : {100, 12})
            check_error(error_of([&] { others->load(first, shape.B); }), "--data-reader node", "has ended");
    }
    world.barrier();
}

// ----------------------------------------------------------------------------
// the shared memory, with a process of our own

// A child process that reads for two processes; the test is the second.
struct ReadingProcess {
    pid_t process;
    std::string address;
    ReadingProcess(const std::string& path, const BatchShape& shape) {
        int ends[2];
        REQUIRE(pipe(ends) == 0);
        process = fork();
        if (process == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            serve(path, shape, ends[1]);
            _exit(1);
        }
        char words[64] = "";
        for (size_t at = 0; at + 1 < sizeof words && !strchr(words, '\n'); at++) {
            if (read(ends[0], words + at, 1) != 1) break;
        }
        close(ends[0]), close(ends[1]);
        address = words;
    }
    static void serve(const std::string& path, const BatchShape& shape, int to) {
        try {
            TokenLoader loader(path, 500, shape.T, SampleOrder::sequential);
            NodeMemory memory(2, shape);
            NodeServer server(memory, loader, shape);
            dprintf(to, "%s\n", memory.address().c_str());
            for (;;) pause();
        } catch (const Error& error) {
            dprintf(to, "%s\n", error.what());
        }
    }
    void kill() {
        if (process > 0) ::kill(process, SIGKILL);
        process = 0;  // not reaped: a zombie must count as dead too
    }
    ~ReadingProcess() { kill(); }
};

TEST_CASE("node reader: a wait ends when the reading process is killed") {
    TemporaryFolder folder;
    write_file(folder / "a.bin", shard_bytes(random_tokens(9000, 500)));
    const BatchShape shape = {4, 32, 5, true};
    ReadingProcess other(folder / "a.bin", shape);
    NodeReader reader(std::make_unique<NodeMemory>(other.address, 2, shape), 1, shape, 4, nullptr);
    TokenLoader loader(folder / "a.bin", 500, shape.T, SampleOrder::sequential);
    BatchReader own(loader, shape, 4);
    for (uint64_t first : {0, 4, 8, 40}) CHECK(same(reader.load(first, 4), own.load(first, 4), shape));
    other.kill();
    error_of([&] { reader.load(44, 4); });  // may have been read ahead
    check_error(error_of([&] { reader.load(48, 4); }), "--data-reader node", "has ended");
    check_error(error_of([&] { reader.load(0, 4); }), "--data-reader node", "has ended");
}

TEST_CASE("node reader: memory that cannot be shared") {
    const BatchShape shape = {4, 32, 5, true};
    auto error = [&](const std::string& address, const BatchShape& shape) {
        return error_of([&] { NodeMemory(address, 2, shape); });
    };
    NodeMemory memory(2, shape);
    CHECK(error(memory.address(), shape) == "no error");
    check_error(error(memory.address(), {4, 64, 5, true}), "--data-reader node", "its size differs");
    check_error(error(text("%d 1000", (int)getpid()), shape), "--data-reader node", "No such file");
    check_error(error("", shape), "--data-reader node", "does not name a block of shared memory");
    // a process that may allocate only little shared memory
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    struct rlimit small = {4096, limit.rlim_max};
    auto handler = std::signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::string refused = error_of([&] { NodeMemory(2, shape); });
    std::string too_large = error_of([&] { NodeMemory(2, {1 << 20, 1 << 20, 5, true}); });
    setrlimit(RLIMIT_FSIZE, &limit);
    std::signal(SIGXFSZ, handler);
    check_error(refused, "--data-reader node",
                "bytes of shared memory could not be allocated: File too large");
    check_error(too_large, "--data-reader node",
                "bytes of shared memory could not be allocated: Cannot allocate");
}
