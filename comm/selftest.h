/*
The selftest checks each rank's device, memory, links and disk before a run depends on them. Broken parts of a
large machine often still work, but slowly or with an occasional wrong bit, and a single broken part makes
thousands of others wait, or makes their results wrong. comm/selftest_verdict.h judges the findings.

    products    of known numbers (kernels/known_numbers.cuh), large enough that each SM computes many tiles of
                each. The first one is checked against sums that the host computes (Huang & Abraham,
                "Algorithm-based fault tolerance for matrix operations", 1984), all others against its hash.
    memory      patterns over most of the free memory (kernels/memory_patterns.cuh)
    copies      between pinned host memory and the device: rates and bits
    messages    with one other rank at a time, in log2 rounds: rates and bits
    disk        a file is written, synced to disk and read back
    health      clocks under load, and errors that the driver has counted by then

All ranks run the same test at the same time, as in a run, so the ranks of a host share its resources. If the
host takes part in a rate, the best of a few tries counts: other load makes single tries slow, a broken part
makes all of them slow. For a rate that depends only on the device, the median counts, because an overheating
device becomes slow only once it is hot.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/collectives.h"  // grouped
#include "data/run/device_health.h"
#include "comm/machine.h"  // measured_machine
#include "comm/memory.h"   // DeviceArray, HostArray
#include "comm/mesh.h"
#include "comm/placement.h"   // bus_of_device, process_place
#include "comm/run_device.h"  // choose_automatic_dtype
#include "comm/selftest_verdict.h"
#include "comm/world.h"
#include "data/base/file.h"
#include "data/base/figures.h"
#include "data/base/json.h"
#include "data/options/options.h"
#include "kernels/hash.cuh"
#include "kernels/known_numbers.cuh"
#include "kernels/matmul.cuh"
#include "kernels/memory_patterns.cuh"
#include "kernels/streams.cuh"  // StreamTimer

// How much is tested at once, and for how long in all.
struct SelftestSizes {
    int product, sums;           // columns and rows of the output, and terms of each of its sums
    size_t memory;               // bytes, at most
    size_t copy, message, disk;  // bytes of each
    double seconds;
};

// seconds: 0 for the default
inline SelftestSizes selftest_sizes(double seconds) {
    constexpr size_t MiB = 1 << 20;
    if (has_own_memory)
        return {8192, most_known_sums, SIZE_MAX, 256 * MiB, 64 * MiB, 64 * MiB, seconds > 0 ? seconds : 60};
    return {512, 512, 32 * MiB, 16 * MiB, 4 * MiB, 4 * MiB, seconds > 0 ? seconds : 2};
}

// ----------------------------------------------------------------------------
// products

// The sums of rows and columns that a product of known numbers must have, which the host computes from sums
// of the operands: for out = dout^T inp, column c of out adds up to the sum over n of inp[n, c] times the sum
// of row n of dout.
struct KnownSums {
    std::vector<int64_t> of_rows, of_columns;

    // out (OC, C), of inp (N, C) and dout (N, OC)
    KnownSums(uint64_t inp_key, uint64_t dout_key, int N, int C, int OC)
        : of_rows((size_t)OC), of_columns((size_t)C) {
        std::vector<floatX> inp((size_t)N * C), dout((size_t)N * OC);
        known_numbers_on_host(inp, inp_key);
        known_numbers_on_host(dout, dout_key);
        for (int n = 0; n < N; n++) {
            const floatX *inp_row = &inp[(size_t)n * C], *dout_row = &dout[(size_t)n * OC];
            int64_t inp_sum = 0, dout_sum = 0;
            for (int c = 0; c < C; c++) inp_sum += (int)(float)inp_row[c];
            for (int o = 0; o < OC; o++) dout_sum += (int)(float)dout_row[o];
            for (int c = 0; c < C; c++) of_columns[(size_t)c] += dout_sum * (int)(float)inp_row[c];
            for (int o = 0; o < OC; o++) of_rows[(size_t)o] += inp_sum * (int)(float)dout_row[o];
        }
    }

    // Describes what is wrong with out (OC, C); empty if nothing is.
    std::string differences(const std::vector<float>& out) const {
        const size_t OC = of_rows.size(), C = of_columns.size();
        std::vector<int64_t> columns(C);
        std::vector<size_t> bad_rows, bad_columns;
        for (size_t o = 0; o < OC; o++) {
            int64_t row = 0;
            for (size_t c = 0; c < C; c++) {
                float value = out[o * C + c];
                // a broken value may be anything; INT32_MAX makes the sums differ if it is not a whole number
                auto whole = std::fabs(value) <= 0x1p24f ? (int64_t)value : 0;
                if ((float)whole != value) whole += INT32_MAX;
                row += whole, columns[c] += whole;
            }
            if (row != of_rows[o]) bad_rows.push_back(o);
        }
        for (size_t c = 0; c < C; c++) {
            if (columns[c] != of_columns[c]) bad_columns.push_back(c);
        }
        if (bad_rows.empty() && bad_columns.empty()) return "";
        auto first = [](const std::vector<size_t>& bad) { return bad.empty() ? -1 : (long)bad[0]; };
        return text("a matrix product is wrong in %zu of its %zu rows and %zu of its %zu columns, the first "
                    "being row %ld and column %ld",
                    bad_rows.size(), OC, bad_columns.size(), C, first(bad_rows), first(bad_columns));
    }

private:
    static void known_numbers_on_host(std::vector<floatX>& out, uint64_t key) {
        known_numbers_cpu(out.data(), key, out.size());
    }
};

// ----------------------------------------------------------------------------
// disk

// A file that is removed with this object, or when the process ends.
class ScratchFile {
public:
    // folder: if empty, the folder for temporary files
    explicit ScratchFile(const std::string& folder, int rank)
        : path_((folder.empty() ? temporary_folder() : folder) +
                text("/selftest.%d.%d", rank, (int)getpid())),
          file_(open_to_write(path_, O_RDWR | O_CREAT | O_EXCL)) {
        if (!file_) fail_with_errno(path_, "create it");
        unlink(path_.c_str());
    }

    void write(const std::vector<char>& data) {
        write_at(file_, path_, 0, data.data(), data.size());
        sync_file(file_, path_);
    }

    // Evicts the file from the page cache, so that it must be read from disk. Returns false if it stays
    // there, as in file systems that keep files in memory.
    bool forget(size_t bytes) const {
        posix_fadvise(file_.get(), 0, 0, POSIX_FADV_DONTNEED);
        void* map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file_.get(), 0);
        if (map == MAP_FAILED) return false;
        auto page = (size_t)sysconf(_SC_PAGESIZE);
        std::vector<unsigned char> cached(ceil_div(bytes, page));
        bool known = mincore(map, bytes, cached.data()) == 0;
        munmap(map, bytes);
        auto kept = std::ranges::count_if(cached, [](unsigned char one) { return one & 1; });
        return known && (size_t)kept * 16 < cached.size();
    }

    void read(std::vector<char>& data) const {
        if (!read_at(file_, path_, 0, data.data(), data.size()))
            fail_part("%s: was truncated while being read; check the disk", path_.c_str());
    }

private:
    std::string path_;
    FileHandle file_;
};

// ----------------------------------------------------------------------------
// the tests

class Selftest {
public:
    // For all ranks. run_dir: the folder whose disk is tested; if empty, the folder for temporary files.
    Selftest(const World& world, const SelftestSizes& sizes, std::string run_dir)
        : world_(world),
          sizes_(sizes),
          run_dir_(std::move(run_dir)),
          mesh_(world, {.tp = 1, .pp = 1, .dp = world.size(), .shard = world.size()}, work_.stream),
          health_(bus_of_device()) {
        findings_.place = world.size() > 1 ? process_place() : "this process on " + world.host();
        findings_.host = world.host();
        findings_.device = device_properties().name;
    }

    // For all ranks: runs all tests. On the first rank, returns the findings of all ranks; on the others,
    // nothing.
    std::vector<RankFindings> run() {
        in_step("products", [&] { test_products(); });
        in_step("memory", [&] { test_memory(); });
        in_step("copies", [&] { test_copies(); });
        test_messages();
        in_step("disk", [&] { test_disk(); });
        in_step("health", [&] { look_at_health(); });
        std::vector<RankFindings> all;
        for (const std::string& one : world_.gather(nlohmann::json(findings_).dump()))
            all.push_back(nlohmann::json::parse(one).get<RankFindings>());
        return all;
    }

private:
    static constexpr int tries = 3;

    // Ranks begin each test together.
    template <typename Step>
    void in_step(const char* name, Step&& step) {
        world_.barrier();
        Phase phase(name);
        step();
    }

    cudaStream_t stream() const { return work_.stream; }
    void await_work() { wait_for(stream(), mesh_); }
    void found_fault(const std::string& words) { findings_.faults.push_back(words); }

    template <typename T>
    std::vector<T> on_host(const T* data, size_t count) {
        std::vector<T> values(count);
        copy_to_host(values.data(), data, count, stream(), mesh_);
        return values;
    }

    // Returns the rate that represents a list of rates: the median for devices with their own memory, else
    // the best.
    static double rate_of_device(std::vector<double> rates) {
        if (has_own_memory) return value_at(rates, rates.size() / 2);
        return *std::ranges::max_element(rates);
    }

    void test_products() {
        constexpr size_t at_once = 8;  // products between two looks at the clock
        const int OC = sizes_.product, C = sizes_.product, N = sizes_.sums;
        const uint64_t inp_key = random_key(0, "selftest inp"), dout_key = random_key(0, "selftest dout");
        const size_t count = (size_t)OC * C;
        DeviceArray<floatX> inp((size_t)N * C), dout((size_t)N * OC);
        DeviceArray<float> out(count);
        DeviceArray<uint64_t> hashes(at_once);
        known_numbers(inp.data, inp_key, (size_t)N * C, stream());
        known_numbers(dout.data, dout_key, (size_t)N * OC, stream());
        std::vector<std::unique_ptr<StreamTimer>> timers;
        for (size_t i = 0; i < at_once; i++) timers.push_back(std::make_unique<StreamTimer>(stream()));
        auto multiply = [&](size_t i) {
            zero_async(out.data, count, stream());
            timers[i]->start();
            matmul_backward_weight(out.data, dout.data, inp.data, N, C, OC, stream());
            timers[i]->stop();
            hash_bytes(hashes.data + i, out.data, count * sizeof(float), stream());
        };
        multiply(0);
        const std::string first =
            KnownSums(inp_key, dout_key, N, C, OC).differences(on_host(out.data, count));
        if (!first.empty()) found_fault(first);
        const uint64_t right = on_host(hashes.data, 1)[0];
        std::vector<double> rates;
        size_t products = 1, wrong = 0;
        const double end = seconds_now() + 0.5 * sizes_.seconds;
        do {
            for (size_t i = 0; i < at_once; i++) multiply(i);
            if (rates.empty()) note_clock();
            for (uint64_t hash : on_host(hashes.data, at_once)) wrong += hash != right;
            for (auto& timer : timers) rates.push_back(2.0 * (double)count * N / timer->seconds());
            products += at_once;
        } while (seconds_now() < end);
        if (wrong > 0 && first.empty())
            found_fault(text("%zu of %zu matrix products differ from the first one", wrong, products));
        findings_.bits = text("%016llx", (unsigned long long)right);
        findings_.rates[rate_products] = rate_of_device(rates);
        findings_.tested["products"] = (double)products;
    }

    void test_memory() {
        const size_t free_bytes = available_memory(ranks_sharing_device(world_));
        const size_t bytes = std::min(sizes_.memory, free_bytes / 100 * 85) / 16 * 16;
        const size_t words = bytes / sizeof(uint64_t);
        DeviceArray<uint64_t> memory(words);
        DeviceArray<WrongWords> wrong(1);
        const WrongWords none;
        copy_to_device(wrong.data, &none, 1, stream());
        std::vector<double> rates;
        StreamTimer timer(stream());
        int passes = 0;
        const double end = seconds_now() + 0.2 * sizes_.seconds;
        for (unsigned turn = 0; turn < 64 && (turn == 0 || seconds_now() < end); turn++) {
            for (auto kind : {MemoryPattern::walking, MemoryPattern::address}) {
                if (kind == MemoryPattern::address && turn > 0) continue;  // it does not depend on the turn
                for (bool complement : {false, true}) {
                    MemoryPattern pattern = {kind, turn, complement};
                    timer.start();
                    write_pattern(memory.data, words, pattern, stream());
                    check_pattern(wrong.data, memory.data, words, pattern, stream());
                    timer.stop();
                    await_work();
                    rates.push_back(2 * (double)bytes / timer.seconds());
                    passes++;
                }
            }
        }
        if (WrongWords found = on_host(wrong.data, 1)[0]; found.count > 0)
            found_fault(text("%llu of %zu words of memory have changed in %d patterns, the first being word "
                             "%llu, in bits %016llx",
                             found.count, words, passes, found.first, found.bits));
        findings_.rates[rate_memory] = rate_of_device(rates);
        findings_.tested["memory_bytes"] = (double)bytes;
        findings_.tested["memory_patterns"] = passes;
    }

    void test_copies() {
        const size_t bytes = sizes_.copy, count = bytes / sizeof(floatX);
        HostArray<floatX> sent(count), received(count);
        DeviceArray<floatX> device(count);
        DeviceArray<uint64_t> hash(1);
        known_numbers_cpu(sent.data, random_key(1, "selftest copies"), count);
        const uint64_t right = hash_of_bytes_cpu((const uint8_t*)sent.data, bytes, 0);
        StreamTimer there(stream()), back(stream());
        bool right_there = true, right_back = true;
        for (int i = 0; i < tries; i++) {
            memset((void*)received.data, 0xff, bytes);
            there.start();
            copy_async(device.data, sent.data, count, stream());
            there.stop();
            hash_bytes(hash.data, device.data, bytes, stream());
            back.start();
            copy_async(received.data, device.data, count, stream());
            back.stop();
            right_there &= on_host(hash.data, 1)[0] == right;
            right_back &= memcmp(received.data, sent.data, bytes) == 0;
            take_best(rate_to_device, (double)bytes / there.seconds());
            take_best(rate_from_device, (double)bytes / back.seconds());
        }
        if (!right_there)
            found_fault("copies to the device arrive corrupted");
        else if (!right_back)
            found_fault("copies from the device arrive corrupted");
    }

    void take_best(RateNumber rate, double value) {
        double& best = findings_.rates[rate];
        best = std::max(best, value);
    }

    // For all ranks.
    void test_messages() {
        if (world_.size() == 1) return;
        Phase phase("messages");
        std::vector<std::string> hosts;
        for (int rank = 0; rank < world_.size(); rank++) hosts.push_back(world_.host(rank));
        const size_t bytes = sizes_.message, count = bytes / sizeof(floatX);
        DeviceArray<floatX> sent(count), received(count), expected(count);
        DeviceArray<uint64_t> hashes(2);
        auto key_of = [](int rank) { return random_key((uint64_t)rank, "selftest messages"); };
        known_numbers(sent.data, key_of(world_.rank()), count, stream());
        const Communicator& all = mesh_.shard();
        StreamTimer timer(stream());
        for (const PairRound& round : pair_rounds(hosts)) {
            const int partner = round.partner[(size_t)world_.rank()];
            double best = 0;
            for (int i = 0; i <= tries; i++) {  // the first try connects them
                world_.barrier();
                if (partner < 0) continue;
                timer.start();
                grouped({all}, [&] {
                    all.send(sent.data, count, partner, Traffic::weights, stream());
                    all.receive(received.data, count, partner, stream(), Traffic::weights);
                });
                timer.stop();
                await_work();
                if (i > 0) best = std::max(best, (double)bytes / timer.seconds());
            }
            if (partner < 0) continue;
            known_numbers(expected.data, key_of(partner), count, stream());
            hash_bytes(hashes.data, received.data, bytes, stream());
            hash_bytes(hashes.data + 1, expected.data, bytes, stream());
            std::vector<uint64_t> both = on_host(hashes.data, 2);
            if (both[0] != both[1]) found_fault(text("messages from rank %d arrive corrupted", partner));
            findings_.pairs.push_back({round.rate, partner, best});
        }
    }

    void test_disk() {
        std::vector<char> written(sizes_.disk), found(sizes_.disk);
        uint64_t key = random_key((uint64_t)world_.rank(), "selftest disk");
        for (size_t i = 0; i + 16 <= written.size(); i += 16) {
            Random4 random = philox(key, i / 16);
            memcpy(&written[i], random.at, 16);
        }
        auto seconds_of = [](auto&& work) {
            double start = seconds_now();
            work();
            return std::max(seconds_now() - start, 1e-9);
        };
        std::string error;
        note_error(error, [&] {
            for (int i = 0; i < tries; i++) {
                ScratchFile file(run_dir_, world_.rank());
                double seconds = seconds_of([&] { file.write(written); });
                take_best(rate_disk_write, (double)written.size() / seconds);
                bool from_disk = file.forget(written.size());
                std::ranges::fill(found, 0);
                seconds = seconds_of([&] { file.read(found); });
                if (from_disk) take_best(rate_disk_read, (double)found.size() / seconds);
                if (found == written) continue;
                found_fault("data written to disk is read back corrupted");
                break;
            }
        });
        if (!error.empty()) found_fault(error);
        findings_.tested["disk_bytes"] = (double)sizes_.disk * tries;
    }

    // Called while the device is busy.
    void note_clock() {
        nlohmann::ordered_json now = health_.read();
        for (const char* clock : {"sm_clock_mhz", "cpu_clock_mhz"}) {
            if (now.contains(clock) && !findings_.rates.contains(rate_clock))
                findings_.rates[rate_clock] = 1e6 * now[clock].get<double>();
        }
    }

    void look_at_health() {
        nlohmann::ordered_json now = health_.read();
        // A card at its power limit is healthy; one that is throttled for any other reason is not.
        if (now.value("throttled", "") == "power cap") now.erase("throttled");
        std::string alarm = DeviceHealth::alarm({}, now);
        if (!alarm.empty()) found_fault(alarm);
    }

    const World& world_;
    const SelftestSizes sizes_;
    const std::string run_dir_;
    ComputeStream work_;
    Mesh mesh_;
    DeviceHealth health_;
    RankFindings findings_;
};

// ----------------------------------------------------------------------------
// the command

// Returns the bytes/s that the ranks of a node together write to disk, measured on the first node.
inline double storage_of_node(const SelftestVerdict& verdict) {
    double sum = 0;
    for (size_t rank = 0; rank < verdict.findings().size(); rank++) {
        bool there = verdict.findings()[rank].host == verdict.findings()[0].host;
        if (there) sum += verdict.rate_of((int)rank, rate_disk_write).value_or(0);
    }
    return sum;
}

// For all ranks: writes the machine's file, including what the selftest measured.
inline void write_tested_machine(const SelftestVerdict* verdict, const std::string& path,
                                 const World& world) {
    choose_automatic_dtype(Options(), world);  // multiplies as training does
    Machine machine = measured_machine(world);
    if (world.is_root()) {
        double storage = storage_of_node(*verdict);
        if (storage > 0) machine.storage = storage;
    }
    write_machine(machine, path, world);
}

inline std::string tested_text(const RankFindings& one) {
    auto number = [&](const char* name) {
        auto found = one.tested.find(name);
        return found == one.tested.end() ? 0.0 : found->second;
    };
    return text("each rank tested %.0f products, %s of memory in %.0f patterns, and %s on disk",
                number("products"), size_text((size_t)number("memory_bytes")).c_str(),
                number("memory_patterns"), size_text((size_t)number("disk_bytes")).c_str());
}

// For all ranks.
inline void selftest(const SelftestOptions& o, const World& world) {
    const bool text_form = o.format == SelftestFormat::text;
    if (!o.measure.empty()) check_measure(o.measure, world);
    world.on_all_ranks([&] { ScratchFile(o.run_dir, world.rank()); });
    SelftestSizes sizes = selftest_sizes(o.seconds);
    if (text_form) {
        print_text(text("testing for about %s\n", rough_duration(sizes.seconds).c_str()));
        fflush(stdout);
    }
    const double start = seconds_now();
    std::vector<RankFindings> findings = Selftest(world, sizes, o.run_dir).run();
    std::unique_ptr<SelftestVerdict> verdict;
    if (world.is_root()) verdict = std::make_unique<SelftestVerdict>(std::move(findings), has_own_memory);
    const bool healthy = !world.largest(verdict && !verdict->healthy());
    if (healthy && !o.measure.empty()) write_tested_machine(verdict.get(), o.measure, world);
    int suspects = 0;
    if (world.is_root()) {
        const double seconds = seconds_now() - start;
        if (text_form)
            print_text(findings_place(*verdict) + "\n" + verdict_text(*verdict) +
                       tested_text(verdict->findings()[0]) + text("; %s\n", duration(seconds).c_str()));
        else
            print_text(json_line(verdict_to_json(*verdict, seconds)));
        if (text_form && healthy)
            print_text(world.size() == 1
                           ? "healthy, by itself: there is no other rank to compare it with\n"
                           : "healthy: all bits are right, and no rank is much slower than the others\n");
        if (text_form && healthy && !o.measure.empty())
            print_text(text("train_gpt plan --machine %s ...\n", o.measure.c_str()));
        fflush(stdout);
        for (const Suspect& one : verdict->suspects()) print_error("suspect: " + one.words);
        suspects = (int)verdict->suspects().size();
    }
    suspects = world.largest(suspects);
    if (suspects > 0)
        world.fail_on_all(text("selftest: %s; check what is named above, or leave it out of runs%s",
                               counted(suspects, "suspect").c_str(),
                               o.measure.empty() ? "" : "; --measure wrote nothing"),
                          exit_failed_part);
}
