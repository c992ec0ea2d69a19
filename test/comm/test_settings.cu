// Settings that comm/settings.h derives from options.
// devices: cpu
#include "comm/settings.h"
#include "test/support/testing.h"

TEST_CASE("chunks of the loss are about equal, and of whole tiles") {
    auto chunk = [](int vocab, int tokens) { return chosen_loss_chunk({.vocab_size = vocab}, tokens); };
    const size_t budget = (sizeof(floatX) == 2 ? 1024 : 256) << 20;
    if (sizeof(floatX) == 4) {
        // 256 MiB hold 1334 rows of 50304 columns, so chunks have at most 1280
        CHECK(chunk(50257, 1334) == 1334);
        CHECK(chunk(50257, 1335) == 768);    // 668 and 667, in tiles
        CHECK(chunk(50257, 65536) == 1280);  // at least 52, of 1261
        CHECK(chunk(50257, 16384) == 1280);  // 13 of 1261
        CHECK(chunk(50257, 10240) == 1280);  // 8 without remainder
        CHECK(chunk(50257, 9000) == 1280);   // 8 of 1125
        CHECK(chunk(50257, 3072) == 1024);   // 3 without remainder
    }
    for (int vocab : {1, 1000, 50257, 151936, 300000, 1 << 21, 1 << 30}) {
        size_t row = padded_vocab(ModelConfig{.vocab_size = vocab}) * sizeof(floatX);
        int most = (int)std::min<size_t>(std::max<size_t>(budget / row, 1), 1 << 30);
        for (int tokens : {1, 255, 1024, 4095, 65536, 131072, 1000003}) {
            CAPTURE(vocab);
            CAPTURE(tokens);
            int size = chunk(vocab, tokens), chunks = ceil_div(tokens, size), tile = most < 256 ? 1 : 256;
            CHECK(size <= std::min(most, tokens));
            if (tokens <= most) {
                CHECK(size == tokens);
                continue;
            }
            CHECK(size % tile == 0);
            CHECK(chunks == ceil_div(tokens, most / tile * tile));  // no more chunks than necessary
            CHECK(chunks * size - tokens < chunks * tile);          // equal except for the tiles
        }
    }
}
