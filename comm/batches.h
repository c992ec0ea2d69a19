/*
The micro-batches of a run, from its token files to the device: one process checks the files for all; one
reader serves all ranks of a machine, or each rank has its own; and the device works on one micro-batch while
the host reads the next.
*/
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <memory>
#include <new>
#include <numeric>
#include <nlohmann/json.hpp>
#include <optional>
#include <poll.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/agreement.h"       // check_same_tokens
#include "comm/memory.h"          // DeviceArray, HostArray
#include "comm/mesh.h"            // Mesh
#include "comm/recorder.h"        // HostSpan
#include "comm/world.h"           // World
#include "data/base/deadlines.h"  // WorksOn
#include "data/base/error.h"      // note_error
#include "data/base/file.h"
#include "data/base/this_machine.h"         // boot_id
#include "data/commands/multiple_choice.h"  // ChoiceExample, parse_choice_file
#include "data/tokens/batch_reader.h"       // BatchSource, BatchArrays
#include "data/tokens/token_loader.h"       // TokenLoader, check_sources

// ----------------------------------------------------------------------------
// the token files
//
// One process checks the token files of a run for all: if each of 10,000 ranks opened 10,000 shards, the file
// system would get 100 million requests. The first rank opens every file, walks the indexes, and sends the
// others the number and the places of the tokens. The others open a file when they first read from it, so a
// rank whose batches are read by another opens none.

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TokenArray, first_byte, count, width, is_signed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckedFile, path, tokens_path, tokens)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckedList, list, files)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckedSource, tokens, weight)

// For all ranks: makes a TokenLoader with these arguments. All ranks throw if it refuses them, or if a token
// of the first sample is not in the vocabulary.
inline std::unique_ptr<TokenLoader> open_token_files(const World& world, const std::string& list, int vocab,
                                                     int T, SampleOrder order, uint64_t seed = 0) {
    std::unique_ptr<TokenLoader> loader;
    std::vector<CheckedSource> sources;
    auto open = [&] { loader = std::make_unique<TokenLoader>(sources, vocab, T, order, seed); };
    std::string message = text_from_root(world, [&] {
        sources = check_sources(list);
        open();
        loader->check_first_sample();
        // In CBOR, because paths that are not UTF-8 cannot be JSON text.
        std::string message;
        nlohmann::json::to_cbor(nlohmann::json(sources), message);
        return message;
    });
    if (!loader) {
        sources = nlohmann::json::from_cbor(message);
        open();
    }
    if (world.on_several_hosts()) {
        std::vector<CheckedFile> files;
        for (const CheckedSource& source : sources)
            files.insert(files.end(), source.tokens.files.begin(), source.tokens.files.end());
        check_same_tokens(world, files, world.local_rank() == 0);
    }
    return loader;
}

// For all ranks: returns the multiple-choice questions of a file, which the first rank reads.
inline std::vector<ChoiceExample> read_questions(const std::string& path, const Options& o,
                                                 const Tokenizer* tokenizer, const World& world) {
    std::string content = text_from_root(world, [&] { return read_text(path); });
    std::vector<ChoiceExample> questions;
    world.on_all_ranks([&] {
        questions = parse_choice_file(content, path, tokenizer, o.vocab_size);
        for (const ChoiceExample& question : questions)
            for (size_t i = 0; i < question.choices.size(); i++)
                check_choice_fits(question, i, o.sequence_length);
    });
    return questions;
}

// ----------------------------------------------------------------------------
// one reader for a machine
//
// --data-reader node: one process of each machine reads the batches of all processes on it, so that a file
// system shared by many machines has one reader on each. Ranks keep their own pace: each leaves its request
// in a mailbox in shared memory, and receives its batch in shared memory too.
//
// The shared memory is unnamed: processes open it through a descriptor of the first one, so nothing remains
// of it, however they end. A process that waits sleeps on a word of a mailbox (futex), which needs no lock
// that a dead process could hold; the wait ends if the reading process ends.

using SharedWord = std::atomic<uint32_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == sizeof(uint32_t));

// Sleeps while the word is `value`, for at most a second.
inline void wait_while(SharedWord& word, uint32_t value) {
    struct timespec second = {1, 0};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &second, nullptr, 0);
}

inline void wake_all(SharedWord& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// ----------------------------------------------------------------------------
// the shared memory

// The mailbox of one process, which writes a request while the state is not `asked`. The reader writes the
// answer while it is `asked`.
struct Mailbox {
    enum State : uint32_t { idle, asked, answered };
    alignas(64) SharedWord state;
    BatchRequest request;
    int block;         // the process's block to read into
    int exit_code;     // the error's
    char error[4096];  // truncated to this length; empty: no error
};

class NodeMemory {
public:
    // Creates the memory for `processes` processes; called by the one that reads.
    NodeMemory(int processes, const BatchShape& shape)
        : descriptor_(memfd_create("train_gpt batches", MFD_CLOEXEC)) {
        if (!descriptor_) fail_with_errno("--data-reader node: shared memory", "create it");
        lay_out(processes, shape);
        // The limit is half of the machine's memory: allocating the last of it would not fail here, but would
        // trigger the OOM killer.
        size_t most = (size_t)sysconf(_SC_PHYS_PAGES) / 2 * (size_t)sysconf(_SC_PAGESIZE);
        int error = bytes_ > most ? ENOMEM : posix_fallocate(descriptor_.get(), 0, (off_t)bytes_);
        if (error) {
            fail("--data-reader node: %zu bytes of shared memory could not be allocated: %s; free some, "
                 "choose a smaller --micro-batch, or use --data-reader rank",
                 bytes_, strerror(error));
        }
        map();
        new (&header()) Header{};
        for (int i = 0; i < processes; i++) new (&mailbox(i)) Mailbox{};
        address_ = text("%d %d", (int)getpid(), descriptor_.get());
    }

    // Opens the memory at another process's address().
    NodeMemory(const std::string& address, int processes, const BatchShape& shape) : address_(address) {
        int descriptor = -1;
        if (sscanf(address.c_str(), "%d %d", &process_, &descriptor) != 2)
            fail("--data-reader node: '%s' does not name a block of shared memory; use --data-reader rank",
                 address.c_str());
        std::string path = text("/proc/%d/fd/%d", process_, descriptor);
        descriptor_ = FileHandle(open(path.c_str(), O_RDWR | O_CLOEXEC));
        lay_out(processes, shape);
        struct stat status;
        if (!descriptor_ || fstat(descriptor_.get(), &status) != 0 || status.st_size != (off_t)bytes_) {
            fail("--data-reader node: process %d cannot use the shared memory of process %d (%s); use "
                 "--data-reader rank",
                 (int)getpid(), process_, descriptor_ ? "its size differs" : strerror(errno));
        }
        map();
        // Older kernels do not have pidfd_open; then only the launcher notices that the process has died.
        watch_ = FileHandle((int)syscall(SYS_pidfd_open, process_, 0));
    }

    NodeMemory(const NodeMemory&) = delete;
    NodeMemory& operator=(const NodeMemory&) = delete;
    ~NodeMemory() {
        if (memory_) munmap(memory_, bytes_);
    }

    // Other processes of this machine find the memory at this address while this object exists.
    const std::string& address() const { return address_; }
    int processes() const { return processes_; }
    Mailbox& mailbox(int process) const {
        return *(Mailbox*)(memory_ + sizeof(Header) + sizeof(Mailbox) * process);
    }
    int* block(int process, int number) const {
        return (int*)(memory_ + blocks_) + ((size_t)process * BatchSource::blocks + (size_t)number) * stride_;
    }

    SharedWord& requests() const { return header().requests; }  // counts requests
    // After this, no more requests are answered.
    void end() const { header().ended = 1; }
    bool reader_ended() const {
        if (header().ended) return true;
        struct pollfd process = {watch_.get(), POLLIN, 0};
        return watch_ && poll(&process, 1, 0) > 0;
    }

private:
    struct Header {
        alignas(64) SharedWord requests;
        SharedWord ended;
    };

    void lay_out(int processes, const BatchShape& shape) {
        constexpr size_t line = 64 / sizeof(int);
        processes_ = processes;
        stride_ = ceil_div(shape.ints(), line) * line;
        blocks_ = sizeof(Header) + sizeof(Mailbox) * (size_t)processes;
        bytes_ = blocks_ + (size_t)processes * BatchSource::blocks * stride_ * sizeof(int);
    }

    void map() {
        void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
        if (address == MAP_FAILED) fail_with_errno("--data-reader node: shared memory", "map it");
        memory_ = (char*)address;
    }

    Header& header() const { return *(Header*)memory_; }

    FileHandle descriptor_, watch_;
    std::string address_;
    int process_ = 0, processes_ = 0;
    size_t stride_ = 0;  // ints from one block to the next
    size_t blocks_ = 0;  // bytes before the blocks
    size_t bytes_ = 0;
    char* memory_ = nullptr;
};

// ----------------------------------------------------------------------------
// the reading process

// Answers the requests in the mailboxes, in its own thread.
class NodeServer {
public:
    NodeServer(const NodeMemory& memory, const TokenLoader& loader, const BatchShape& shape)
        : memory_(memory), loader_(loader), shape_(shape), thread_([this] { run(); }) {}

    // Requests that are still unanswered fail.
    ~NodeServer() {
        memory_.end();
        memory_.requests()++;
        wake_all(memory_.requests());
        thread_.join();
        for (int i = 0; i < memory_.processes(); i++) wake_all(memory_.mailbox(i).state);
    }

private:
    void run() {
        for (;;) {
            uint32_t seen = memory_.requests();
            if (memory_.reader_ended()) return;
            bool found = false;
            for (int i = 0; i < memory_.processes() && !memory_.reader_ended(); i++) {
                if (memory_.mailbox(i).state != Mailbox::asked) continue;
                answer(i);
                found = true;
            }
            if (!found) wait_while(memory_.requests(), seen);
        }
    }

    // Answers a process, and all later ones with an equal request, such as the tensor ranks and stages of a
    // data rank. Only this thread writes blocks, so `batch` stays as it is.
    void answer(int process) {
        const BatchRequest request = memory_.mailbox(process).request;
        const int* batch = nullptr;
        NotedError error;
        for (int i = process; i < memory_.processes(); i++) {
            Mailbox& box = memory_.mailbox(i);
            if (box.state != Mailbox::asked || box.request != request) continue;
            int* block = memory_.block(i, box.block);
            if (batch)
                std::copy_n(batch, shape_.ints(), block);
            else
                try_read_batch(loader_, shape_, request, block, error);
            batch = block;
            snprintf(box.error, sizeof box.error, "%s", error.message.c_str());
            box.exit_code = error.exit_code;
            box.state = Mailbox::answered;
            wake_all(box.state);
        }
    }

    const NodeMemory& memory_;
    const TokenLoader& loader_;
    const BatchShape shape_;
    std::thread thread_;
};

// ----------------------------------------------------------------------------
// the reader of a rank

class NodeReader final : public BatchSource {
public:
    // The reader of process number `process` of a machine. The reader that is given a loader, which must
    // outlive it, reads for all processes; once that reader is destroyed, load() throws on the others.
    NodeReader(std::unique_ptr<NodeMemory> memory, int process, const BatchShape& shape, uint64_t stride,
               const TokenLoader* loader)
        : BatchSource(shape, stride), memory_(std::move(memory)), process_(process) {
        if (loader) server_ = std::make_unique<NodeServer>(*memory_, *loader, shape);
    }

protected:
    const int* block(int number) const override { return memory_->block(process_, number); }

    void start(int block, BatchRequest request) override {
        Mailbox& box = memory_->mailbox(process_);
        box.request = request;
        box.block = block;
        box.state = Mailbox::asked;
        memory_->requests()++;
        wake_all(memory_->requests());
    }

    void finish() override {
        Mailbox& box = memory_->mailbox(process_);
        while (box.state == Mailbox::asked) {
            if (memory_->reader_ended() && box.state == Mailbox::asked) {
                fail("--data-reader node: the process that reads for this machine has ended; see its "
                     "messages");
            }
            wait_while(box.state, Mailbox::asked);
        }
        if (box.error[0]) throw Error(box.error, box.exit_code);
    }

private:
    std::unique_ptr<NodeMemory> memory_;
    int process_;
    std::unique_ptr<NodeServer> server_;
};

// ----------------------------------------------------------------------------
// choosing a rank's reader

// Returns a string that is equal for processes that can open each other's memory: those with the same PID
// namespace, on a machine that has not rebooted in between. (Each container may have its own namespace.)
inline std::string this_node() {
    char processes[64] = "";
    if (readlink("/proc/self/ns/pid", processes, sizeof processes - 1) < 0) processes[0] = '\0';
    return boot_id() + " " + processes;
}

// For all ranks: makes the reader of this rank's batches: its own, or (per_node) one shared with the others
// on its machine.
inline std::unique_ptr<BatchSource> make_batch_source(const World& world, bool per_node,
                                                      const TokenLoader& loader, const BatchShape& shape,
                                                      uint64_t stride,
                                                      const std::string& node = this_node()) {
    auto own = [&] { return std::make_unique<BatchReader>(loader, shape, stride); };
    if (!per_node || world.size() == 1) return own();
    std::vector<std::string> nodes = world.all_gather(node);
    auto first = (size_t)(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
    auto process = (int)std::count(nodes.begin(), nodes.begin() + world.rank(), node);
    auto processes = (int)std::count(nodes.begin(), nodes.end(), node);
    std::unique_ptr<NodeMemory> memory;
    world.on_all_ranks([&] {
        if (process == 0 && processes > 1) memory = std::make_unique<NodeMemory>(processes, shape);
    });
    std::vector<std::string> addresses = world.all_gather(memory ? memory->address() : "");
    world.on_all_ranks([&] {
        if (process > 0) memory = std::make_unique<NodeMemory>(addresses[first], processes, shape);
    });
    if (processes == 1) return own();
    return std::make_unique<NodeReader>(std::move(memory), process, shape, stride,
                                        process == 0 ? &loader : nullptr);
}

// ----------------------------------------------------------------------------
// on the device
//
// While the device works on a micro-batch, the host prepares the next: a BatchSource reads it ahead, and two
// blocks of pinned memory alternate, so that no copy waits for another.

// One micro-batch on the device.
struct Batch : BatchArrays<const int> {
    int B, T;  // sequences, and tokens of each on this context rank
    // (B) on the device: the number of tokens before each sequence that are in the key/value cache. Negative:
    // the sequence is left out. Null: the cache is not read.
    const int* past = nullptr;
    int row = 0;             // the first sequence's row of the cache; -1: nothing is kept
    int last = 0;            // index of each sequence's last token; padding may follow
    bool whole = false;      // every context rank has the whole sequences
    PlacesOfRows rows = {};  // for models with tables (comm/ngram_tables.h)
};

// Returns the Batch for a host batch that was copied to `memory` on the device.
inline Batch batch_on_device(const int* memory, const HostBatch& host, int B, int T, int contexts = 1) {
    Batch batch = {batch_at(memory, B, T, contexts), B, T / contexts};
    if (!host.doc_start) batch.doc_start = nullptr;
    return batch;
}

// Copies micro-batches to the device. If one cannot be read, `error` receives the reason, and the step
// continues with a batch without targets, because a single rank cannot leave the step.
class DeviceBatches {
public:
    // slots: the number of batches on the device at the same time.
    DeviceBatches(std::unique_ptr<BatchSource> source, cudaStream_t stream, const Mesh& mesh,
                  NotedError& error, int slots = 1)
        : source_(std::move(source)),
          stream_(stream),
          mesh_(mesh),
          error_(error),
          size_(source_->shape().ints()),
          device_(size_ * slots),
          empty_(size_) {
        write_empty_batch(source_->shape(), empty_.data);
    }

    ~DeviceBatches() { drain(stream_); }  // the stream may still copy from the slots

    // Returns the bytes of host memory that a rank uses for batches of this size: the blocks they are read
    // into (shared memory if one process reads for a machine), the pinned blocks they are copied from, and
    // the whole batch that is cut over context ranks.
    static size_t host_bytes(int B, int T, int contexts = 1) {
        size_t whole = contexts > 1 ? batch_ints(B, T) : 0;
        return ((BatchSource::blocks + pinned_slots + 1) * batch_ints(B, T, contexts) + whole) * sizeof(int);
    }

    // Loads samples first, first + 1, ... in the order of the run; rows from `count` on have no targets. The
    // batch replaces what this slot held on the device. next: the first sample of the batch to read ahead. A
    // batch of no rows does not disturb what is being read ahead.
    Batch load(uint64_t first, int count, int slot_on_device = 0, std::optional<uint64_t> next = {}) {
        int* device = device_.data + slot_on_device * size_;
        if (error_.empty()) error_ = std::exchange(error_ahead_, {});
        if (count == 0) return copy(empty_.data, device);
        Slot& slot = slots_[next_++ % pinned_slots];
        wait_for(slot.copied, mesh_);  // its memory is free once the last copy from it is done
        const HostBatch* batch = read(first, count, next, error_);
        if (!batch) return copy(empty_.data, device);
        if (source_->shape().contexts > 1 && mesh_.world().rank() == 0) {
            std::vector<double> seen = keys_seen(*batch, source_->shape());
            seen_.resize(seen.size());
            for (size_t rank = 0; rank < seen.size(); rank++) seen_[rank] += seen[rank];
        }
        std::copy_n(batch->tokens, size_, slot.host.data);  // the other arrays follow the tokens
        Batch copied = copy(slot.host.data, device);
        slot.copied.record(stream_);
        return copied;
    }

    // Returns the samples of a micro-batch.
    using Request = std::function<BatchRequest(int micro_batch)>;

    // Returns the function with which passes load a micro-batch, given its number and its slot.
    std::function<Batch(int, int)> loads(const Request& request) {
        return [this, request](int micro, int slot) {
            BatchRequest batch = request(micro);
            return load(batch.first, batch.count, slot, request(micro + 1).first);
        };
    }
    // Returns the table lookups for `count` micro-batches. ahead: the step may never run, so an error is
    // reported only when the step loads its batches.
    Lookups lookups(int count, const Request& request, bool ahead = false) {
        return {request(0).first, count,
                [this, count, request, ahead](int micro) {
                    BatchRequest wanted = request(micro);
                    const BatchShape& shape = source_->shape();
                    uint64_t next = request((micro + 1) % count).first;
                    const HostBatch* batch = wanted.count > 0 ? read(wanted.first, wanted.count, next,
                                                                     ahead ? error_ahead_ : error_)
                                                              : nullptr;
                    return rows_of(batch ? *batch : host_batch(empty_.data, shape), shape.B,
                                   shape.cut(shape.context));
                },
                this};
    }

    // Returns how many keys the queries of the busiest context rank saw since the last call, relative to the
    // mean. NaN: there are no context ranks, no batch was loaded, or this is not the first rank of all.
    float take_imbalance() {
        std::vector<double> seen = std::exchange(seen_, {});
        if (seen.empty()) return NAN;
        double all = std::accumulate(seen.begin(), seen.end(), 0.0);
        return (float)(std::ranges::max(seen) * (double)seen.size() / all);
    }

private:
    // Returns a batch on the host, valid until the next one is read. Null if it could not be read.
    const HostBatch* read(uint64_t first, int count, std::optional<uint64_t> next, NotedError& error) {
        const HostBatch* batch = nullptr;
        note_error(error, [&] {
            WorksOn work("reading the next micro-batch");
            HostSpan wait(Operation::data);
            batch = &source_->load(first, count, next);
        });
        return batch;
    }

    Batch copy(const int* host, int* device) {
        copy_async(device, host, size_, stream_);
        const BatchShape& shape = source_->shape();
        return batch_on_device(device, host_batch(host, shape), shape.B, shape.T, shape.contexts);
    }

    struct Slot {
        HostArray<int> host;
        Event copied;
        explicit Slot(size_t size) : host(size) {}
    };

    std::unique_ptr<BatchSource> source_;
    cudaStream_t stream_;
    const Mesh& mesh_;
    NotedError& error_;
    NotedError error_ahead_;
    std::vector<double> seen_;  // keys that each context rank's queries see
    const size_t size_;         // ints
    DeviceArray<int> device_;
    HostArray<int> empty_;  // a batch of no rows
    static constexpr int pinned_slots = 2;
    Slot slots_[pinned_slots] = {Slot(size_), Slot(size_)};
    size_t next_ = 0;
};
