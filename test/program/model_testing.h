/*
What the tests of the whole model share: the program without its main, small models, and batches of given
tokens.
*/
#pragma once

#include "test/support/program.h"

#include "test/support/testing.h"

constexpr bool exact = std::is_same_v<floatX, float>;

// The micro-batch of given tokens and targets, on the device.
class TestBatch {
public:
    TestBatch(int B, int T, const std::vector<int>& tokens, const std::vector<int>& targets)
        : tokens_(tokens), targets_(targets), by_token_(tokens.size()) {
        std::vector<int> by_token(tokens.size());
        sort_by_token(by_token.data(), tokens.data(), (int)tokens.size());
        copy_to_device<int>(by_token_, by_token.data(), by_token.size(), test_stream());
        batch_ = {B, T, tokens_, targets_, by_token_};
        valid_ = (int)std::count_if(targets.begin(), targets.end(), [](int target) { return target >= 0; });
    }

    const Batch& operator*() const { return batch_; }
    int valid() const { return valid_; }

private:
    Buffer<int> tokens_, targets_, by_token_;
    Batch batch_;
    int valid_;
};

inline const ZeroSettings with_master = {.keep_master = !exact}, inference = {.training = false};

template <typename T>
std::vector<T> from_device(const T* pointer, size_t count) {
    std::vector<T> values(count);
    cudaCheck(cudaMemcpy(values.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

inline std::vector<double> gradient_of(const Gpt& g, size_t offset, size_t count) {
    cudaCheck(cudaStreamSynchronize(g.stream));
    return to_doubles(from_device(g.state.grads(0) + offset, count));
}

inline ModelConfig small_config() {
    ModelConfig c;
    c.layers = 2, c.channels = 20, c.heads = 4, c.head_size = 6, c.mlp_width = 28, c.vocab_size = 37,
    c.context = 16;
    complete(c);
    return c;
}
