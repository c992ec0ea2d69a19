#include "kernels/hash.cuh"
#include "test/support/testing.h"

namespace {

std::vector<uint8_t> some_bytes(size_t n) {
    std::vector<uint8_t> bytes(n);
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)((i * i + 7 * i + n) % 251);
    return bytes;
}

uint64_t hash_of(const std::vector<uint8_t>& bytes) {
    Buffer<uint8_t> device(bytes);
    Buffer<uint64_t> hash(1);
    hash_bytes(hash, device, bytes.size(), test_stream());
    return hash.host()[0];
}

}  // namespace

TEST_CASE("a hash is that of its formula, computed by Python with integers of any size") {
    // h = lambda b, first: sum of mix(word, first + i), as in kernels/hash.cuh
    const struct {
        size_t n;
        uint64_t at_0, at_5;
    } cases[] = {
        {1, 0x25b775faeca8f520, 0x37cad89b07249c5},     {8, 0xf9053c692196c9a1, 0x6edb46595c83b8b8},
        {13, 0x1539501f1fe65bfc, 0x6b474faff26744ec},   {16, 0xa3040c4dccac5de3, 0xd47d2b4f05a5fd24},
        {1000, 0xaf1540a65add8301, 0xd66c93b978b815cc}, {100003, 0x4cdee285dcf59b2f, 0x6fc1524ca3fc688d}};
    for (auto [n, at_0, at_5] : cases) {
        CAPTURE(n);
        std::vector<uint8_t> bytes = some_bytes(n);
        CHECK(hash_of(bytes) == at_0);
        Buffer<uint8_t> device(bytes);
        Buffer<uint64_t> hash(std::vector<uint64_t>{100});
        add_hash(hash, device, n, 5, test_stream());
        CHECK(hash.host()[0] == at_5 + 100);
    }
    CHECK(hash_of({}) == 0);
}

TEST_CASE("bytes have the same hash wherever they begin, and those around them do not count") {
    std::vector<uint8_t> bytes = some_bytes(4096 + 5);
    uint64_t want = hash_of(bytes);
    for (size_t begin : {1, 2, 4, 7, 8, 16}) {
        CAPTURE(begin);
        std::vector<uint8_t> around(begin, 0xee);
        around.insert(around.end(), bytes.begin(), bytes.end());
        around.insert(around.end(), 20, 0xee);
        Buffer<uint8_t> device(around);
        Buffer<uint64_t> hash(1);
        hash_bytes(hash, device + begin, bytes.size(), test_stream());
        CHECK(hash.host()[0] == want);
    }
}

TEST_CASE("the hash of a whole is the sum of those of its parts, in any order") {
    std::vector<uint8_t> bytes = some_bytes(10000);
    uint64_t want = hash_of(bytes);
    Buffer<uint8_t> device(bytes);
    Buffer<uint64_t> hash(std::vector<uint64_t>{0});
    const size_t ends[] = {0, 8, 800, 808, 7992, 10000};
    for (size_t part : {3, 0, 4, 2, 1})
        add_hash(hash, device + ends[part], ends[part + 1] - ends[part], ends[part] / hash_word,
                 test_stream());
    CHECK(hash.host()[0] == want);
}

TEST_CASE("each single bit changes the hash, and so do words that change places") {
    std::vector<uint8_t> bytes(67, 0);
    std::vector<uint64_t> seen = {hash_of(bytes)};
    for (size_t bit = 0; bit < bytes.size() * 8; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        seen.push_back(hash_of(bytes));
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    std::sort(seen.begin(), seen.end());
    CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
    CHECK(hash_of(bytes) == hash_of(bytes));

    bytes = some_bytes(64);
    uint64_t before = hash_of(bytes);
    std::rotate(bytes.begin(), bytes.begin() + 8, bytes.begin() + 16);
    CHECK(hash_of(bytes) != before);
}
