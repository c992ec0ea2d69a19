/*
Compares a rank's step according to its ledger (kernels/ledger.h) with the work that the program, compiled by
nvcc, put on streams (NOCARD_RECORD, test/nocard/record.h). Each stream must have the same kernels, products
(their shapes too), fills, copies and NCCL calls (their bytes too) in the same order, and the same waits for
other streams. For each launcher, the bytes of memory that its kernels read and write must be within 2% of
those that the PTX interpreter counted. Single numbers and transfers to and from the host are left out. So
are, for a run with tables, all bytes of fills, copies and NCCL calls, and those of kernels that read or write
rows: many depend on how many rows its tokens look up.

    compare_ledger RECORD CAPABILITY RANK RANKS OPTIONS...

CAPABILITY is the compute capability of the recorded card, such as 90; RANKS and OPTIONS are those of the run.
Prints the first difference and exits with 1; otherwise prints how much is the same.
*/
#include <fstream>
#include <iostream>
#include <sstream>

#include "test/support/program.h"
#include "data/launch/parse_command_line.h"

namespace {

// The work of a stream, in order.
using Lines = std::vector<std::string>;

struct Bytes {
    double read = 0, written = 0;
    int launches = 0;
};
struct Step {
    std::vector<Lines> streams = {};
    std::map<std::string, Bytes> touched = {};  // by launcher
};

// Reduces the lines of either side to those of one step: from the clip_scale with this number to the next.
// Streams are numbered in the order of their first line there, and positions on a stream count from the start
// of the step. with_bytes: lines of fills, copies and messages have their bytes.
class StepOfLines {
public:
    StepOfLines(int step, bool with_bytes) : steps_(1 - step), with_bytes_(with_bytes) {}

    void add(int stream, const std::string& what) {
        if (what == "kernel clip_scale") steps_++;
        size_t& line = lines_[stream];
        line++;
        if (steps_ != 1) {
            if (steps_ < 1) before_[stream] = line;
            return;
        }
        bool kernel = what.starts_with("kernel ");
        if (kernel) kernels_[{stream, line}] = what.substr(strlen("kernel "));
        at(stream).push_back(kernel || with_bytes_ ? what : what.substr(0, what.find(' ')));
    }
    // Waits until the other stream has done `lines` lines. Waits for work from before the step are left out.
    void wait(int stream, int other, size_t lines) {
        if (steps_ == 1 && lines > before_[other])
            at(stream).push_back(text("wait %d %zu", number(other), lines - before_[other]));
    }
    // Counts the bytes of the kernel on this line of a stream, or on its last line if `line` is 0.
    void touch(int stream, size_t line, double read, double written) {
        auto kernel = kernels_.find({stream, line ? line : lines_[stream]});
        if (kernel == kernels_.end()) return;
        Bytes& bytes = step_.touched[kernel->second];
        bytes.read += read, bytes.written += written, bytes.launches++;
    }
    const Step& step() const { return step_; }

private:
    int number(int stream) { return numbers_.try_emplace(stream, (int)numbers_.size()).first->second; }
    Lines& at(int stream) {
        size_t place = (size_t)number(stream);
        if (step_.streams.size() <= place) step_.streams.resize(place + 1);
        return step_.streams[place];
    }

    int steps_;
    bool with_bytes_;
    std::map<int, int> numbers_;
    std::map<int, size_t> lines_, before_;
    std::map<std::pair<int, size_t>, std::string> kernels_;
    Step step_;
};

Step recorded_step(const std::string& path, bool with_bytes) {
    std::ifstream file(path);
    if (!file) fail("%s: cannot be read; give a record of NOCARD_RECORD", path.c_str());
    StepOfLines lines(1, with_bytes);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        int stream;
        std::string what, rest;
        words >> stream >> what;
        std::getline(words >> std::ws, rest);
        if (what == "wait") {
            int other;
            size_t place;
            std::istringstream(rest) >> other >> place;
            lines.wait(stream, other, place);
        } else if (what == "touched") {
            size_t at, read, written;
            std::istringstream(rest) >> at >> read >> written;
            lines.touch(stream, at, (double)read, (double)written);
        } else {
            lines.add(stream, what + " " + rest);
        }
    }
    return lines.step();
}

// Adds a call under NCCL's name for it. ranks: of the whole group; a message is between two of them
void add_call(StepOfLines& lines, int stream, const GroupCall& call, int ranks) {
    auto whole = (size_t)call.bytes, part = whole / (size_t)ranks;
    auto add = [&](const char* name, size_t bytes) {
        lines.add(stream, text("%s %zu %d", name, bytes, ranks));
    };
    switch ((Operation)call.operation) {
    case Operation::all_reduce:
        return add("ncclAllReduce", whole);
    case Operation::reduce_scatter:
        return add("ncclReduceScatter", part);
    case Operation::all_gather:
        return add("ncclAllGather", part);
    case Operation::send:
        return add("ncclSend", whole);
    case Operation::receive:
        return add("ncclRecv", whole);
    case Operation::all_to_all:
        for (int other = 1; other < ranks; other++) add("ncclSend", part), add("ncclRecv", part);
        return;
    default:
        fail("compare_ledger: a call of kind %d has no name here", call.operation);
    }
}

Step ledger_step(const Options& o, int capability, int rank) {
    Workload w = training_workload(o, o.recompute, 2);
    Layout layout = training_layout(o, w);
    Ledger book({2, capability}, w.T, o.vocab_size);
    const MeshPosition position = position_of(rank, layout.mesh);
    record_steps(o, w, zero_settings(o, 2), make_optimizer(o, 0), layout, position,
                 {micro_batches_of_rank(o, 0), micro_batches_of_rank(o, 0)});
    StepOfLines lines(2, o.ngram.empty());  // the first update has no rows, because none were looked up
    std::map<const void*, int> streams;
    std::map<const void*, std::pair<int, size_t>> events;
    std::map<int, size_t> count;
    auto add = [&](int stream, const std::string& what) { lines.add(stream, what), count[stream]++; };
    book.each([&](const LedgerEntry& entry) {
        int stream = streams.try_emplace(entry.stream, (int)streams.size()).first->second;
        switch (entry.kind) {
        case LedgerEntry::launch: {
            const LaunchCost& cost = entry.cost;
            if (cost.place != LaunchCost::card) break;
            std::string what = entry.launcher
                                   ? text("kernel %s", entry.launcher)
                                   : text("%s %.0f", cost.read > 0 ? "copy" : "fill", cost.written);
            if (const ProductShape& p = cost.product; p.sums > 0)
                what += text(" %.0f x %.0f x %.0f%s%s", p.rows, p.columns, p.sums, p.fp8 ? " fp8" : "",
                             p.gelu ? " gelu" : "");
            for (int i = 0; i < cost.launches; i++) {
                add(stream, what);
                if (cost.product.sums == 0)
                    lines.touch(stream, 0, cost.read / cost.launches, cost.written / cost.launches);
            }
            break;
        }
        case LedgerEntry::call: {
            const GroupCall& call = entry.call_of;
            bool of_each = call.operation == (int)Operation::all_to_all;
            auto group = (size_t)call.group.number;
            int ranks = group < mesh_groups.size() ? line_of(group, position, layout.mesh).ranks : 2;
            add_call(lines, stream, call, ranks);
            count[stream] += of_each ? 2 * (size_t)(call.group.ranks - 1) : 1;
            break;
        }
        case LedgerEntry::record:
            events[entry.event] = {stream, count[stream]};
            break;
        case LedgerEntry::hold:
            if (auto known = events.find(entry.event); known != events.end() && known->second.first != stream)
                lines.wait(stream, known->second.first, known->second.second);
            break;
        default:
            break;
        }
    });
    return lines.step();
}

bool same_bytes(const Step& step, const Step& by_ledger, bool has_tables) {
    constexpr double within = 0.02, single_numbers = 512;  // bytes per launch
    bool same = !step.touched.empty();
    if (!same) printf("the record has no kernel whose bytes were counted\n");
    for (auto& [launcher, says] : by_ledger.touched) {
        if (step.touched.contains(launcher)) continue;
        printf("%s: its ledger has kernels that read %.0f bytes, the program has none\n", launcher.c_str(),
               says.read);
        same = false;
    }
    for (auto& [launcher, was] : step.touched) {
        // a ledger assumes that all tokens differ, and so do the rows of tables
        bool of_rows = has_tables && (launcher.ends_with("_rows") || launcher == "sums_of_squares");
        if (launcher.starts_with("embedding_") || of_rows) continue;
        auto found = by_ledger.touched.find(launcher);
        const Bytes says = found == by_ledger.touched.end() ? Bytes() : found->second;
        auto close = [&](double bytes, double want) {
            return std::abs(bytes - want) <= within * want + single_numbers * was.launches;
        };
        if (close(says.read, was.read) && close(says.written, was.written)) continue;
        printf("%s, %d kernels: read %.0f bytes and wrote %.0f; its ledger has %.0f and %.0f\n",
               launcher.c_str(), was.launches, was.read, was.written, says.read, says.written);
        same = false;
    }
    return same;
}

int compare(const Step& record_step, const Step& ledger_step, bool has_tables) {
    const std::vector<Lines>&record = record_step.streams, &ledger = ledger_step.streams;
    size_t all = 0;
    for (size_t stream = 0; stream < std::max(record.size(), ledger.size()); stream++) {
        const Lines none, &a = stream < record.size() ? record[stream] : none,
                          &b = stream < ledger.size() ? ledger[stream] : none;
        for (size_t i = 0; i < std::max(a.size(), b.size()); i++, all++) {
            std::string of_record = i < a.size() ? a[i] : "nothing",
                        of_ledger = i < b.size() ? b[i] : "nothing";
            if (of_record == of_ledger) continue;
            printf("stream %zu, line %zu of %zu: the program has \"%s\", its ledger \"%s\"\n", stream, i,
                   a.size(), of_record.c_str(), of_ledger.c_str());
            for (size_t j = i > 4 ? i - 4 : 0; j < i + 8; j++)
                printf("    %-50s %s\n", j < a.size() ? a[j].c_str() : "", j < b.size() ? b[j].c_str() : "");
            return 1;
        }
    }
    printf("%zu streams with %zu pieces of work are alike, and kernels of %zu launchers\n", record.size(),
           all, record_step.touched.size());
    return same_bytes(record_step, ledger_step, has_tables) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc < 6)
        fail("compare_ledger: give a record, a capability, a rank, their number and the options of the run");
    std::vector<std::string> words = {"train"};
    words.insert(words.end(), argv + 5, argv + argc);
    Options o = parse_training(read_arguments(command_train, words), atoi(argv[4])).options;
    const bool has_tables = !o.ngram.empty();
    return compare(recorded_step(argv[1], !has_tables), ledger_step(o, atoi(argv[2]), atoi(argv[3])),
                   has_tables);
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
