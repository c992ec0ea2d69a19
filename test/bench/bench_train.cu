// Training speed of whole models on this device: see test/bench/bench_train.h.
#include "test/bench/bench_train.h"

int main(int argc, char** argv) try {
    bench_train({argv + 1, argv + argc});
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
