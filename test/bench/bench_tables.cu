/*
Measures the cost of a table on disk: pairs of steps of gpt2-124M at 1 x 1024, one without a table, and one
with a table of rows of 64 elements, all of them on disk and few of them in memory.

    bench_tables FOLDER GB TOKENS    where to write a table, its size, token files with GPT-2's vocabulary

Rows are written as by a load from a checkpoint, and reads bypass the system's cache. The same run measures
the rate at which the disk reads pages of 4 KB at random, with the same number of threads.
*/
#include <atomic>
#include <filesystem>
#include <thread>

#include "data/options/presets.h"
#include "test/bench/bench.h"

namespace {

constexpr int T = 1024, pairs = 5;
constexpr size_t cache = (size_t)1 << 30;

// The micro-batches of a step: real text, or random tokens, which hardly look up any row twice.
class Batches {
public:
    Batches(const TokenLoader* text, int vocab) : text_(text), vocab_(vocab) {}

    Lookups lookups(uint64_t step) {
        std::vector<int>& values = values_[step % 2];
        values.resize(batch_ints(1, T));
        BatchArrays<int> rows = batch_at(values.data(), 1, T);
        if (text_) text_->load(step, rows.tokens, rows.targets);
        for (int t = 0; t < T; t++) {
            rows.positions[t] = t;
            if (!text_) rows.tokens[t] = rows.targets[t] = (int)(philox(step, t).at[0] % vocab_);
        }
        sort_by_token(rows.by_token, rows.tokens, T);
        sort_by_position(rows.by_position, rows.positions, T);
        return {step, 1, [&values](int) -> std::vector<NgramTokens> {
                    return {{batch_at(values.data(), 1, T).tokens, T}};
                }};
    }
    Batch load(Gpt& g, uint64_t step) {
        const std::vector<int>& values = values_[step % 2];
        if (!device_) device_.emplace(values.size());
        copy_to_device(device_->data, values.data(), values.size(), g.stream);
        Batch batch = {batch_at<const int>(device_->data, 1, T), 1, T};
        batch.doc_start = nullptr;
        return batch;
    }

private:
    const TokenLoader* text_;
    int vocab_;
    std::vector<int> values_[2];  // two steps: this one and the next
    std::optional<DeviceArray<int>> device_;
};

// Runs a step as train does, including the fetch of rows for the next step; returns its seconds.
double step_time(Gpt& g, Batches& batches, uint64_t step) {
    double start = seconds_now();
    zero_gradients(g);
    g.tables.look_up(batches.lookups(step));
    Batch batch = batches.load(g, step);
    accumulate_gradients(
        g, 1,
        [&](int, int slot) {
            Batch one = batch;
            one.rows = g.tables.places(0, slot);
            return one;
        },
        1.0f / T);
    g.tables.sum_gradients();
    g.state.update(g.stats.data, adamw_optimizer({3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, (int)step, false}, 0),
                   1.0f);
    if (g.tables.any()) g.tables.look_ahead(batches.lookups(step + 1));
    g.tables.update({0.02f, 1e-8f, (int)step}, &g.stats.data->scale);
    g.products.weights_changed(g.graphs.on);
    if (!read_result(g, T).finite)
        fail("bench: a loss or gradient was not finite; this is a bug in the kernels");
    return seconds_now() - start;
}

// Measures how many pages of 4 KB a second can be read at random.
double random_reads(const std::string& path) {
    constexpr int threads = 16, page = PageBuffer::alignment;
    const uint64_t pages = std::filesystem::file_size(path) / page;
    FileHandle file = open_file(path, O_RDONLY | O_DIRECT);
    if (!file) fail_with_errno(path, "open it");
    std::atomic<uint64_t> done = 0;
    const double start = seconds_now(), end = start + 5;
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; thread++)
        all.emplace_back([&, thread] {
            PageBuffer buffer(page);
            for (int i = 0; seconds_now() < end; i++, done++) {
                Random4 random = philox(77 + thread, i);
                uint64_t at = ((uint64_t)random.at[0] << 32 | random.at[1]) % pages;
                if (!read_at(file, path, at * page, buffer.data(), page)) break;
            }
        });
    for (std::thread& thread : all) thread.join();
    return (double)done / (seconds_now() - start);
}

void bench_tables(const std::string& folder, double gigabytes, const std::string& tokens) {
    ModelConfig plain = find_preset("gpt2-124M")->config, with = plain;
    with.ngram = "2,3", with.ngram_width = 64, with.ngram_layers = "1";
    const double room = (double)free_space(folder + "/") / 1e9 - 4;
    if (room < gigabytes)
        printf("the disk has room for only %.1f of the %.1f GB requested; using that\n", room, gigabytes);
    const double bytes = std::min(room, gigabytes) * 1e9;
    const size_t record = 64 * sizeof(floatX) + sizeof(float), of_page = PageFile::payload(4096) / record;
    with.ngram_rows = (long long)(bytes / 4096 * (double)of_page / 2);
    complete(plain), complete(with);

    Workload w = {.B = 1, .T = T, .training = true, .recompute = Recompute::none, .loss_chunk = T};
    ZeroSettings settings = {.keep_master = sizeof(floatX) < sizeof(float)}, on_disk = settings;
    on_disk.table_place = TablePlace::disk, on_disk.table_dir = folder, on_disk.table_cache = cache;
    Gpt without(plain, w, settings), g(with, w, on_disk);
    for (Gpt* one : {&without, &g}) initialize(one->state, 5);
    g.tables.set_hash(5, folded_tokens(nullptr, with.vocab_size));

    const uint64_t rows = g.tables.sizes().own_rows(), some = 1 << 16;
    std::vector<uint64_t> numbers(some);
    std::vector<float> squares(some, 1e-6f);
    std::vector<floatX> values(some * 64, floatX(0.01f));
    double start = seconds_now();
    for (uint64_t begin = 0, n; begin < rows; begin += n) {
        n = std::min(some, rows - begin);
        std::iota(numbers.begin(), numbers.begin() + (ptrdiff_t)n, begin);
        g.tables.own().put(0, numbers.data(), (char*)values.data(), squares.data(), (int)n);
        if (begin / some % 64 == 0)
            fprintf(stderr, "\rwriting rows: %.0f%%, %.0f s left ", 100.0 * (double)begin / (double)rows,
                    (seconds_now() - start) * ((double)rows / (double)std::max(begin, some) - 1));
    }
    g.tables.own().cache()->flush();
    fprintf(stderr, "\r%40s\r", "");
    const double written = (double)g.tables.own().file()->bytes_written();
    printf("table       %.3g rows of 64 %s, %.3g rows in memory; %.1f GB written in %.0f s\n", (double)rows,
           floatX_name, (double)g.tables.sizes().rows_in_memory(on_disk), written / 1e9,
           seconds_now() - start);
    const double rate = random_reads(text("%s/stage-00-owner-00000.pages", folder.c_str()));
    printf("disk        %.0f pages of 4 KB a second, read at random by 16 threads\n", rate);

    const TokenLoader text_files(tokens, plain.vocab_size, T, SampleOrder::sequential);
    for (const TokenLoader* text : {&text_files, (const TokenLoader*)nullptr}) {
        Batches of_plain(text, plain.vocab_size), of_tables(text, plain.vocab_size);
        std::vector<double> ratios, times, missing;
        double late = 0;
        for (int pair = 0; pair <= pairs; pair++) {
            const uint64_t step = 1 + (uint64_t)pair;
            double one = step_time(without, of_plain, step);
            uint64_t before = g.tables.own().cache()->missed();
            double other = step_time(g, of_tables, step);
            g.tables.synchronize();
            if (pair == 0) continue;  // nothing was fetched ahead for the first
            ratios.push_back(other / one), times.push_back(other);
            missing.push_back((double)(g.tables.own().cache()->missed() - before));
            late = (double)g.tables.waited_for() / (double)g.tables.sent();
        }
        printf("%-11s a step takes %.3f times as long as one without (median of %d pairs; %.3f s); %.0f rows "
               "are read for a "
               "step, which the disk reads in %.3f s; %.0f%% of a step's rows wait for an update\n",
               text ? "real text" : "all rows distinct", median(ratios), pairs, median(times),
               median(missing), median(missing) / rate, 100 * late);
    }
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 4) fail("usage: bench_tables FOLDER GB TOKENS");
    bench_tables(argv[1], atof(argv[2]), argv[3]);
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "bench_tables: %s\n", error.what());
    return 1;
}
