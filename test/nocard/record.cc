#include "test/nocard/record.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include <nvtx3/nvToolsExt.h>

#include "test/nocard/errors.h"
#include "test/nocard/fault.h"

namespace nocard {
namespace {

thread_local std::vector<std::string> ranges;

int begin_range(const char* name) {
    ranges.push_back(name);
    return (int)ranges.size() - 1;
}
int end_range() {
    if (!ranges.empty()) ranges.pop_back();
    return (int)ranges.size();
}

// NVTX calls this once, and then the functions in its table.
int take_ranges(NvtxGetExportTableFunc_t table_of) {
    auto callbacks = (const NvtxExportTableCallbacks*)table_of(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)begin_range;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)end_range;
    return 1;
}

[[maybe_unused]] const bool injected = (InitializeInjectionNvtx2_fnptr = take_ranges, true);

class Record {
public:
    static Record& record() {
        static Record& record = *new Record;
        return record;
    }

    bool is_on() const { return file_; }
    void add(cudaStream_t stream, const std::string& what, bool counts = true) {
        if (!file_) return;
        std::lock_guard lock(mutex_);
        auto [number, lines] = place(stream);
        lines += counts;
        fprintf(file_, "%d %s\n", number, what.c_str());
        fflush(file_);
    }
    RecordedPlace place_of(cudaStream_t stream) {
        std::lock_guard lock(mutex_);
        return {stream, place(stream).second};
    }
    int number_of(cudaStream_t stream) {
        std::lock_guard lock(mutex_);
        return place(stream).first;
    }

private:
    Record() {
        const char *path = getenv("NOCARD_RECORD"), *rank = getenv("OMPI_COMM_WORLD_RANK");
        if (!path) return;
        std::string name = std::string(path) + "." + (rank ? rank : "0");
        file_ = fopen(name.c_str(), "w");
        if (!file_) fault("NOCARD_RECORD", text("%s cannot be written", name.c_str()));
    }

    std::pair<int, size_t&> place(cudaStream_t stream) {
        auto& [number, lines] =
            streams_.try_emplace(stream, std::pair<int, size_t>((int)streams_.size(), 0)).first->second;
        return {number, lines};
    }

    FILE* file_ = nullptr;
    std::mutex mutex_;
    std::map<cudaStream_t, std::pair<int, size_t>> streams_;  // number, and lines so far
};

}  // namespace

void record(cudaStream_t stream, const std::string& what) {
    Record::record().add(stream, what);
}
RecordedPlace record_kernel(cudaStream_t stream, const std::string& product) {
    Record::record().add(stream, "kernel " + (ranges.empty() ? "-" : ranges[0]) + product);
    return recorded_place(stream);
}
void record_touched(const RecordedPlace& kernel, size_t read, size_t written) {
    Record::record().add(kernel.stream, text("touched %zu %zu %zu", kernel.lines, read, written), false);
}
void record_outside_of_launchers(cudaStream_t stream, const std::string& what) {
    if (ranges.empty()) Record::record().add(stream, what);
}
RecordedPlace recorded_place(cudaStream_t stream) {
    return Record::record().is_on() ? Record::record().place_of(stream) : RecordedPlace{};
}
void record_wait(cudaStream_t stream, const RecordedPlace& place) {
    if (!Record::record().is_on() || place.stream == stream) return;
    std::string what = text("wait %d %zu", Record::record().number_of(place.stream), place.lines);
    Record::record().add(stream, what, false);
}

}  // namespace nocard
