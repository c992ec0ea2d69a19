/*
CUDA graphs around work that is given to a stream again and again: the host gives a whole graph at once,
where it would otherwise need a few microseconds for each kernel, which is longer than small kernels run.

A graph is fixed: the same kernels on the same memory with the same sizes. So each has a key, of all that the
work is made from; work with a new key runs as it is, the second time it is captured, and from then on its
graph is launched. The first run is also what makes libraries load their code, choose their algorithms and
take their memory, which none of them may do in a capture. The kernels are the same and in the same order, so
the bits are too.

The work must be on one stream, or on others that wait for it and that it waits for, and what the host does
besides must not matter when it is left out.
*/
#pragma once

#include <cstring>
#include <map>
#include <span>
#include <string>

#include "kernels/common.cuh"

// The bytes of numbers, pointers, and lists of such without padding.
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

    // Work of other sizes will come: the graphs until now, once the stream has done them, are of no more use.
    void clear(cudaStream_t stream) {
        if (graphs_.empty()) return;
        cudaCheck(cudaStreamSynchronize(stream));
        destroy();
    }

    // Puts work() on the stream, or what it would put there. key(): the key of the work.
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
            cudaStreamEndCapture(stream, &graph);  // the stream runs again, for those who save what they can
            if (graph) cudaGraphDestroy(graph);
            throw;
        }
        cudaCheck(cudaStreamEndCapture(stream, &graph));
        cudaCheck(cudaGraphInstantiate(&executable, graph, 0));
        cudaCheck(cudaGraphDestroy(graph));
        return executable;
    }

    std::map<std::string, cudaGraphExec_t> graphs_;  // null: run once
    size_t launched_ = 0;
};
