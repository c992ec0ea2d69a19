/*
Finds the fastest algorithm for each product of a model, by timing:

    noted = note_products(step)          every kind of product in it, with operands
    tuned = time_products(noted, stream)

Products are timed on the operands that the step has left in memory: on real numbers at real addresses, and if
they accumulate, on the real destination. The only condition is that their outputs are no longer needed, as is
true of activations and gradients before a step begins. The caches are cold, and the candidates take turns, so
that a card that warms up does so for all of them; the median of several rounds counts.

The candidates are what the library proposes, with little workspace and with more. If a separate kernel can do
the epilogue, another candidate is the best product without it, followed by that kernel. The choice that would
be made without timing is kept unless another is faster by more than the noise.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/matmul.cuh"

constexpr int timing_rounds = 5;
constexpr double clearly_faster = 0.99;  // at most this fraction of the other's time

using NotedProducts = std::map<ProductKind, Operands>;

template <typename Step>
NotedProducts note_products(Step&& step) {
    NotedProducts noted;
    cublas().noted = &noted;
    step();
    cublas().noted = nullptr;
    return noted;
}

struct TunedProduct {
    std::string kind, algorithm;   // see AlgorithmChoices
    double seconds, seconds_once;  // seconds: of this algorithm; seconds_once: of the one used before
    bool changed;
};

// Times work on a stream, while its operands are not in the caches.
class ColdClock {
public:
    explicit ColdClock(cudaStream_t stream)
        : stream_(stream), timer_(stream), bytes_(2 * (size_t)device_properties().l2CacheSize) {
        // If the run has left too little memory, only a part of the cache is flushed.
        cudaError_t error;
        while ((error = cudaMalloc(&other_memory_, bytes_)) == cudaErrorMemoryAllocation && bytes_ > 1)
            bytes_ /= 2;
        cudaCheck(error);
    }
    ~ColdClock() { cudaFree(other_memory_); }
    ColdClock(const ColdClock&) = delete;
    ColdClock& operator=(const ColdClock&) = delete;

    // Returns the time of what work() puts on the stream, or INFINITY if work() returns false because it
    // could not start. While the card overwrites its caches, the host runs ahead, so that the time excludes
    // launching.
    double seconds(const std::function<bool()>& work) {
        zero_async((char*)other_memory_, bytes_, stream_);
        timer_.start();
        bool started = work();
        timer_.stop();
        double seconds = timer_.seconds();
        return started ? seconds : INFINITY;
    }

    // Returns the median time of each candidate.
    std::vector<double> compare(const std::vector<std::function<bool()>>& candidates) {
        std::vector<std::vector<double>> times(candidates.size());
        for (const auto& candidate : candidates) seconds(candidate);  // warm-up: libraries load their code
        for (int round = 0; round < timing_rounds; round++) {
            for (size_t i = 0; i < candidates.size(); i++) times[i].push_back(seconds(candidates[i]));
        }
        std::vector<double> medians;
        for (auto& of_one : times) {
            std::sort(of_one.begin(), of_one.end());
            medians.push_back(of_one[timing_rounds / 2]);
        }
        return medians;
    }

private:
    cudaStream_t stream_;
    StreamTimer timer_;
    size_t bytes_;
    void* other_memory_;
};

// Returns the candidates that the library proposes, followed by some that may use more memory.
inline std::vector<Algorithm> candidate_algorithms(const ProductKind& kind, const ProductPlan& plan) {
    std::vector<Algorithm> candidates;
    int most = most_candidates;
    for (size_t limit : cublas().workspaces.limits) {
        for (const Algorithm& algorithm : proposed_algorithms(kind, plan, most, limit)) {
            auto same = [&](const Algorithm& other) { return other.bytes() == algorithm.bytes(); };
            if (std::none_of(candidates.begin(), candidates.end(), same)) candidates.push_back(algorithm);
        }
        most = most_candidates / 2;
    }
    return candidates;
}

inline TunedProduct tune_product(const ProductKind& kind, const Operands& operands, ColdClock& clock,
                                 cudaStream_t stream) {
    ProductPlan& plan = find_plan(kind.product, operands);
    std::vector<Algorithm> algorithms = candidate_algorithms(kind, plan);
    std::vector<std::function<bool()>> candidates;
    for (const Algorithm& algorithm : algorithms) {
        candidates.push_back([&] {
            return multiply_fused(kind.product, plan, algorithm, operands, stream) == CUBLAS_STATUS_SUCCESS;
        });
    }
    if (can_be_unfused(kind.product.epilogue)) {
        candidates.push_back([&] {
            multiply_unfused(kind.product, operands, stream);
            return true;
        });
    }
    std::vector<double> times = clock.compare(candidates);
    size_t usual = plan.unfused ? candidates.size() - 1 : 0;
    size_t best = (size_t)(std::min_element(times.begin(), times.end()) - times.begin());
    if (times[best] > clearly_faster * times[usual]) best = usual;

    plan.unfused = best == algorithms.size();
    if (!plan.unfused) plan.algorithm = algorithms[best];
    plan.chosen = true;
    return {kind_text(kind), plan.unfused ? "" : plan.algorithm.bytes(), times[best], times[usual],
            best != usual};
}

// Times the kinds of noted products for which no algorithm is chosen yet.
inline std::vector<TunedProduct> time_products(NotedProducts products, cudaStream_t stream) {
    std::erase_if(products, [](auto& noted) { return find_plan(noted.first.product, noted.second).chosen; });
    for (auto& [kind, operands] : NotedProducts(products)) {
        auto [in_front, without] = product_in_front(kind.product, operands);
        products.emplace(ProductKind(in_front, without), without);
    }
    ColdClock clock(stream);
    std::vector<TunedProduct> tuned;
    for (bool unfused : {false, true}) {  // first the products that unfused ones may begin with
        for (auto& [kind, operands] : products) {
            if (can_be_unfused(kind.product.epilogue) == unfused && !find_plan(kind.product, operands).chosen)
                tuned.push_back(tune_product(kind, operands, clock, stream));
        }
    }
    return tuned;
}
