#include "kernels/memory_patterns.cuh"
#include "test/support/testing.h"

namespace {

WrongWords wrong_words(const uint64_t* words, size_t n, MemoryPattern pattern) {
    Buffer<WrongWords> wrong(std::vector<WrongWords>{{}});
    check_pattern(wrong, words, n, pattern, test_stream());
    return wrong.host()[0];
}

}  // namespace

TEST_CASE("patterns are as they are told, and nothing around them is written") {
    constexpr size_t n = 5000;
    for (bool complement : {false, true}) {
        uint64_t flip = complement ? ~uint64_t(0) : 0;
        Buffer<uint64_t> words(n + 2);
        write_pattern(words, n, {MemoryPattern::address, 0, complement}, test_stream());
        std::vector<uint64_t> got = words.host();
        bool same = true;
        for (size_t i = 0; i < n; i++) same &= got[i] == (i ^ flip);
        CHECK(same);
        CHECK(got[n] == ~uint64_t(0));
        write_pattern(words, n, {MemoryPattern::walking, 3, complement}, test_stream());
        got = words.host();
        same = true;
        for (size_t i = 0; i < n; i++)
            same &= (got[i] ^ flip) == (uint64_t)std::ldexp(1.0, (int)((i + 3) % 64));
        CHECK(same);
    }
}

TEST_CASE("in 64 turns of the walking pattern each bit of each word is set once") {
    for (size_t i : {0, 1, 63, 1000}) {
        uint64_t all = 0;
        for (unsigned turn = 0; turn < 64; turn++) {
            uint64_t word = MemoryPattern{MemoryPattern::walking, turn}.word(i);
            CHECK((all & word) == 0);
            all |= word;
        }
        CHECK(all == ~uint64_t(0));
    }
}

TEST_CASE("words that have changed are counted, the first is told, and which bits") {
    constexpr size_t n = 70000;
    MemoryPattern pattern = {MemoryPattern::walking, 7, true};
    Buffer<uint64_t> words(n);
    write_pattern(words, n, pattern, test_stream());
    WrongWords none = wrong_words(words, n, pattern);
    CHECK(none.count == 0);
    CHECK(none.bits == 0);
    for (size_t at : {69999, 12345, 40000}) {
        std::vector<uint64_t> changed = words.host();
        changed[at] ^= uint64_t(1) << at % 64;
        copy_to_device((uint64_t*)words, changed.data(), n, test_stream());
    }
    WrongWords wrong = wrong_words(words, n, pattern);
    CHECK(wrong.count == 3);
    CHECK(wrong.first == 12345);
    CHECK(wrong.bits == (uint64_t(1) << 69999 % 64 | uint64_t(1) << 12345 % 64 | uint64_t(1) << 40000 % 64));
    // two addresses that select the same word: the address pattern reveals it
    write_pattern(words, n, {MemoryPattern::address}, test_stream());
    std::vector<uint64_t> aliased = words.host();
    aliased[100] = aliased[100 + 4096];
    copy_to_device((uint64_t*)words, aliased.data(), n, test_stream());
    CHECK(wrong_words(words, n, {MemoryPattern::address}).count == 1);
}
