/*
A model's view of a text: for every position, the log-likelihood of each token that could come next.

    token_likelihoods RUN TOKEN...    a line for each position
*/
#include "test/support/program.h"

int main(int argc, char** argv) try {
    if (argc < 3) fail("token_likelihoods: nothing to look at; give a run directory and tokens");
    World world(&argc, &argv, watch_ranks);
    TrainedModel model(argv[1], "");
    int V = model.options.vocab_size, T = argc - 2;
    // a row for each token of the vocabulary: the same text, with that token as the target everywhere
    std::vector<int> memory(batch_ints(V, T));
    BatchArrays<int> rows = batch_at(memory.data(), V, T);
    for (int n = 0; n < V * T; n++) {
        rows.tokens[n] = atoi(argv[2 + n % T]);
        rows.targets[n] = n / T;
        rows.positions[n] = n % T;
    }
    auto shape = [&](Options& o) -> Workload {
        o.micro_batch = V, o.sequence_length = T;
        return {V, T, false, Recompute::none, chosen_loss_chunk(o, V * T)};
    };
    CutModel cut(model, {}, world, shape, load_model);
    HostBatch batch = {.tokens = rows.tokens, .targets = rows.targets, .positions = rows.positions};
    std::vector<float> losses;
    BatchLosses(*cut.passes, world)
        .each(
            1, [&](uint64_t) { return batch; },
            [&](uint64_t, const auto&, const auto& found) { losses = found; });
    for (int t = 0; t < T; t++) {
        for (int v = 0; v < V; v++) printf("%.9g ", -losses[(size_t)v * T + t]);
        printf("\n");
    }
    return 0;
} catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
}
