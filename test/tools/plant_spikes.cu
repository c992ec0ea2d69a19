/*
Overwrites some samples of an llm.c token file with random tokens, at the places that a run's order gives
them, for test/scripts/check_spikes.sh: steps that train on them are spikes.

    plant_spikes FILE TOKENS_OF_A_SAMPLE SEED SAMPLE...
*/
#include "data/tokens/token_loader.h"
#include "kernels/random.cuh"  // philox

int main(int argc, char** argv) try {
    if (argc < 5) fail("usage: plant_spikes FILE TOKENS_OF_A_SAMPLE SEED SAMPLE...");
    constexpr int vocabulary = 256;
    const int T = atoi(argv[2]);
    std::vector<int64_t> places;
    {
        TokenLoader loader(argv[1], 65536, T, SampleOrder::shuffled, (uint64_t)atoll(argv[3]));
        for (int i = 4; i < argc; i++) places.push_back(loader.place((uint64_t)atoll(argv[i])).token);
    }
    FileHandle file = open_file(argv[1], O_WRONLY);
    for (int64_t place : places) {
        std::vector<uint16_t> tokens((size_t)T);
        for (int t = 0; t < T; t++)
            tokens[(size_t)t] =
                (uint16_t)(philox(random_key(7, "spikes"), (uint64_t)(place + t)).at[0] % vocabulary);
        write_at(file, argv[1], shard_header_bytes + (uint64_t)place * sizeof(uint16_t), tokens.data(),
                 tokens.size() * sizeof(uint16_t));
    }
    return 0;
} catch (const std::exception& error) {
    fprintf(stderr, "plant_spikes: %s\n", error.what());
    return 1;
}
