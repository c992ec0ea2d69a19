/*
CUDA graphs for work that is put on a stream repeatedly: the host launches a whole graph at once instead of
spending a few microseconds on each kernel, which is longer than small kernels run.

A graph is fixed: the same kernels on the same memory with the same sizes. So each has a key made of
everything that the work depends on. Work with a new key runs normally; the second time it is captured, and
from then on its graph is launched. The first run also makes libraries load their code, choose their
algorithms and allocate their memory, none of which is allowed during a capture. The kernels and their order
are the same as in a normal run, so the results are bit-identical.

The work must be on one stream, or on others that fork from it and join it by events. Anything else that the
host does in it must not matter, because it is skipped when the graph is launched.
*/
#pragma once

#include <cstring>
#include <map>
#include <span>
#include <string>

#include "kernels/common.cuh"

// Returns the bytes of the values: numbers, pointers, and lists of these, without padding.
template <typename... Values>
std::string graph_key(const Values&... values) {
    std::string key;
    auto add = [&]<typename T>(const T& value) {
        if constexpr (requires { value.data(); }) {
            auto bytes = std::as_bytes(std::span(value));
            key.append((const char*)bytes.data(), bytes.size());
        } else {
            static_assert(std::is_scalar_v<T>);
            key.append((const char*)&value, sizeof value);
        }
    };
    (add(values), ...);
    return key;
}

class Graphs {
public:
    bool on = false;

    Graphs() = default;
    Graphs(const Graphs&) = delete;
    Graphs& operator=(const Graphs&) = delete;
    ~Graphs() { destroy(); }

    // For a change of sizes: destroys all graphs, once the stream has finished with them.
    void clear(cudaStream_t stream) {
        if (graphs_.empty()) return;
        cudaCheck(cudaStreamSynchronize(stream));
        destroy();
    }

    // Runs work(), or launches a graph of what it puts on the stream. key() returns the key of the work.
    template <typename Key, typename Work>
    void run(Key&& key, cudaStream_t stream, Work&& work) {
        if (!on) return work();
        if (ledger) return ledger->once(key(), work);
        auto [place, is_new] = graphs_.try_emplace(key(), nullptr);
        if (is_new) return work();
        if (!place->second) place->second = capture(stream, work);
        cudaCheck(cudaGraphLaunch(place->second, stream));
        launched_++;
    }

    size_t count() const { return graphs_.size(); }
    size_t launched() const { return launched_; }

private:
    void destroy() {
        for (auto& [key, graph] : graphs_)
            if (graph) cudaGraphExecDestroy(graph);
        graphs_.clear();
    }

    template <typename Work>
    static cudaGraphExec_t capture(cudaStream_t stream, Work&& work) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable;
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        try {
            work();
        } catch (...) {
            cudaStreamEndCapture(stream, &graph);  // so that handlers can use the stream to save state
            if (graph) cudaGraphDestroy(graph);
            throw;
        }
        cudaCheck(cudaStreamEndCapture(stream, &graph));
        cudaCheck(cudaGraphInstantiate(&executable, graph, 0));
        cudaCheck(cudaGraphDestroy(graph));
        return executable;
    }

    std::map<std::string, cudaGraphExec_t> graphs_;  // null: has run once, not captured yet
    size_t launched_ = 0;
};
