// The index of a checkpoint: what is written is read back, and pieces that do not make up the tensors and the
// files exactly are refused.
#include <ctime>
#include <random>
#include <set>

#include "data/checkpoint/index.h"
#include "test/support/thread_time.h"
#include "test/support/file_testing.h"
#include "test/data/forged_checkpoint.h"

using Pieces = std::vector<CheckpointPiece>;

static CheckpointIndex parse(const std::string& bytes) {
    return parse_checkpoint_index(bytes, "index.bin");
}

// Tensors cut into boxes and pieces of all sizes, which are placed in several files in random order.
static CheckpointIndex random_index(uint32_t seed, int tensors = 5, uint64_t most_rows = 20, int files = 3) {
    std::mt19937 random(seed);
    auto draw = [&](uint64_t low, uint64_t high) { return low + random() % (high - low + 1); };
    CheckpointIndex index;
    index.save_id = seed;
    index.about = {{"program", "train_gpt 0"}, {"step", 3}, {"samples", 96}, {"options", {{"layers", 2}}}};
    for (int t = 0; t < tensors; t++) {
        CheckpointTensor tensor;
        tensor.name = "tensor" + std::to_string(t);
        tensor.shape = {(int64_t)draw(1, most_rows)};
        if (draw(0, 2)) tensor.shape.push_back((int64_t)draw(1, 12));
        for (uint32_t s = 0; s < slot_count; s++) {
            if (s > 0 && draw(0, 1)) continue;
            if (s == common_slots && seed % 2) continue;  // without this slot, the header does not list slots
            tensor.slots[s] = s == common_slots      ? Dtype::uint64
                              : s == 0 && draw(0, 1) ? Dtype::bf16
                                                     : Dtype::fp32;
            for (uint64_t column = 0, columns; column < tensor.width(); column += columns) {
                columns = draw(1, tensor.width() - column);
                uint64_t size = tensor.rows() * columns;
                for (uint64_t begin = 0, count; begin < size; begin += count) {
                    count = draw(1, std::min<uint64_t>(size - begin, 8));
                    index.pieces.push_back(
                        {(uint32_t)t, (Slot)s, 0, 0, column, columns, begin, count, 0, random()});
                }
            }
        }
        index.tensors.push_back(tensor);
    }
    std::shuffle(index.pieces.begin(), index.pieces.end(), random);
    index.file_bytes.assign((size_t)files, 64);
    for (CheckpointPiece& piece : index.pieces) {
        piece.file = (uint32_t)draw(0, (uint64_t)files - 1);
        piece.offset = index.file_bytes[piece.file];
        index.file_bytes[piece.file] += index.bytes_of(piece);
    }
    std::shuffle(index.pieces.begin(), index.pieces.end(), random);
    return index;
}

TEST_CASE("what is written is read back") {
    for (uint32_t seed = 0; seed < 50; seed++) {
        CAPTURE(seed);
        CheckpointIndex index = random_index(seed);
        std::string bytes = checkpoint_index_bytes(index);
        CheckpointIndex again = parse(bytes);
        CHECK(again.save_id == seed);
        CHECK(again.about["options"].dump() == R"({"layers":2})");
        CHECK(again.about.size() == 4);
        CHECK(again.step() == 3);
        CHECK(again.samples() == 96);
        CHECK(again.file_bytes == index.file_bytes);
        REQUIRE(again.tensors.size() == index.tensors.size());
        for (size_t t = 0; t < index.tensors.size(); t++) {
            CHECK(again.tensors[t].name == index.tensors[t].name);
            CHECK(again.tensors[t].shape == index.tensors[t].shape);
            CHECK(again.tensors[t].slots == index.tensors[t].slots);
        }
        CHECK(again.find("tensor3") == 3);
        CHECK(again.find("tensor33") == -1);
        REQUIRE(again.pieces.size() == index.pieces.size());
        CHECK(memcmp(again.pieces.data(), index.pieces.data(), 64 * index.pieces.size()) == 0);
    }
}

TEST_CASE("the bytes are those of the description") {
    CheckpointIndex index;
    index.save_id = 0x0807060504030201;
    index.about = {{"program", "train_gpt 0"}, {"step", 1}, {"samples", 2}, {"options", {{"a", 1}}}};
    index.tensors = {{"w", {2, 3}, {Dtype::bf16, {}, Dtype::fp32, {}}}};
    index.file_bytes = {64 + 6 * 2, 64 + 4 * 4 + 2 * 4};
    index.pieces = {{0, Slot::weight, 0, 0, 0, 3, 0, 6, 64, 7},
                    {0, Slot::m, 1, 0, 0, 2, 0, 4, 64, 8},
                    {0, Slot::m, 1, 0, 2, 1, 0, 2, 80, 9}};
    std::string bytes = checkpoint_index_bytes(index);
    auto number = [&](size_t at) {
        uint64_t value;
        memcpy(&value, bytes.data() + at, 8);
        return value;
    };
    CHECK(bytes.substr(0, 8) == "\x89TGIX\r\n\x1a");
    CHECK(number(8) == 1);  // version, and zero
    CHECK(bytes.substr(16, 8) == "\1\2\3\4\5\6\7\10");
    uint64_t header_bytes = number(24);
    CHECK(header_bytes % 64 == 0);
    CHECK(bytes.size() == 64 + header_bytes + 3 * 64);
    CHECK(number(32) == XXH3_64bits(bytes.data() + 64, header_bytes));
    CHECK(number(40) == 3);
    CHECK(number(48) == XXH3_64bits(bytes.data() + 64 + header_bytes, 3 * 64));
    CHECK(number(56) == XXH3_64bits(bytes.data(), 56));
    std::string header = bytes.substr(64, header_bytes);
    CHECK(header.substr(0, header.find_last_not_of(' ') + 1) ==
          R"({"program":"train_gpt 0","step":1,"samples":2,"options":{"a":1},)"
          R"("tensors":[{"name":"w","shape":[2,3],"weight":"bf16","m":"fp32"}],"files":[76,88]})");
    size_t last = 64 + header_bytes + 2 * 64;
    CHECK(number(last) == (uint64_t)2 << 32);  // tensor 0, slot 2
    CHECK(number(last + 8) == 1);              // file 1, zero
    for (int i = 0; i < 6; i++) CHECK(number(last + 16 + 8 * i) == std::vector{2, 1, 0, 2, 80, 9}[i]);
}

TEST_CASE("slots have names, files may be of an earlier save, and a tensor may have no rows") {
    CheckpointIndex index;
    index.save_id = 5;
    index.about = {{"program", "train_gpt 0"}, {"step", 1}, {"samples", 2}, {"options", {{"a", 1}}}};
    CheckpointTensor ids = {"ids", {2}, {}}, rows = {"rows", {0, 3}, {}};
    ids.slots[(size_t)Slot::data] = Dtype::uint64, rows.slots[(size_t)Slot::weight] = Dtype::fp32;
    index.tensors = {ids, rows};
    index.file_bytes = {64 + 2 * 8};
    index.pieces = {{0, Slot::data, 0, 0, 0, 1, 0, 2, 64, 7}};
    index.shared[0] = {9, UINT64_MAX};
    std::string bytes = checkpoint_index_bytes(index);
    CHECK(bytes.find(R"("tensors":[{"name":"ids","shape":[2],"data":"uint64"},)"
                     R"({"name":"rows","shape":[0,3],"weight":"fp32"}],)"
                     R"("slots":["weight","master","m","v","data"],)"
                     R"("files":[{"bytes":80,"number":9,"save":18446744073709551615}]})") != bytes.npos);
    CheckpointIndex again = parse(bytes);
    CHECK(again.pieces[0].slot == Slot::data);
    CHECK(again.origin_of(0).number == 9);
    CHECK(again.origin_of(0).save_id == UINT64_MAX);
    CHECK(again.tensors[1].shape == std::vector<int64_t>{0, 3});
    CHECK(again.about.size() == 4);

    uint64_t header_bytes;
    memcpy(&header_bytes, bytes.data() + 24, 8);
    auto with = [&](const std::string& old, const std::string& text) {
        std::string header = bytes.substr(64, header_bytes);
        header.replace(header.find(old), old.size(), text);
        return forged_index(header, index.pieces);
    };
    CHECK_NOTHROW(parse(with("ids", "ids")));
    CHECK_REFUSED(parse(with(R"("v","data")", R"("v","outer")")),
                  "slot \"outer\", which this program does not know; use the program that wrote it");
    CHECK_REFUSED(parse(with(R"("v","data")", R"("v","v")")), "slot \"v\", which this program");
    CHECK_REFUSED(parse(with(R"("data"],)", R"(5],)")), "slot 5, which this program");
    CHECK_REFUSED(parse(with(R"(,"data"])", "]")), "piece 0 refers to a tensor, slot, ");
    CHECK_REFUSED(parse(with(R"("number":9)", R"("number":-9)")), "data file 0: number is -9; ");
    CHECK_REFUSED(parse(with(R"("save":1)", R"("save":-1)")), "data file 0: save is ");
    CHECK_REFUSED(parse(with(R"("bytes":80)", R"("bytes":8)")), "bytes of data file 0 is 8; ");
    CHECK_REFUSED(parse(with(R"("data":"uint64")", R"("data":"fp32")")), "tensor ids: data is stored as ");
    CHECK_REFUSED(parse(with(R"("weight":"fp32")", R"("weight":"uint64")")), "tensor rows: weight is stored");
}

TEST_CASE("runs of a piece") {
    for (uint32_t seed = 0; seed < 50; seed++) {
        CheckpointIndex index = random_index(seed);
        for (uint32_t t = 0; t < index.tensors.size(); t++) {
            uint64_t width = index.tensors[t].width();
            std::vector<int> visits(index.tensors[t].size());
            for (const CheckpointPiece& piece : index.pieces) {
                if (piece.tensor != t || piece.slot != Slot::weight) continue;
                uint64_t next = 0, end = 0, runs = 0;
                piece.run().each_run(width, [&](uint64_t first, uint64_t n, uint64_t at) {
                    CHECK(at == next);
                    CHECK((runs == 0 || first > end));
                    for (uint64_t i = 0; i < n; i++) {
                        uint64_t element = piece.begin + at + i;  // index within the box
                        visits[first + i]++;
                        CHECK(first + i ==
                              element / piece.columns * width + piece.column + element % piece.columns);
                    }
                    next = at + n;
                    end = first + n;
                    runs++;
                });
                CHECK(next == piece.count);
                if (piece.columns == width) CHECK(runs == 1);
            }
            CHECK(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
        }
    }
}

TEST_CASE("what two runs of boxes have in common") {
    std::minstd_rand random(1);
    auto below = [&](uint64_t n) { return random() % n; };
    for (int i = 0; i < 2000; i++) {
        uint64_t rows = 1 + below(5), width = 1 + below(6);
        auto draw = [&] {
            BoxRun run = {below(width), 0, 0, 0};
            run.columns = 1 + below(width - run.column);
            run.begin = below(rows * run.columns);
            run.count = 1 + below(rows * run.columns - run.begin);
            return run;
        };
        auto element = [&](const BoxRun& run, uint64_t at) {
            uint64_t in_box = run.begin + at;
            return in_box / run.columns * width + run.column + in_box % run.columns;
        };
        BoxRun a = draw(), b = draw();
        std::set<std::pair<uint64_t, uint64_t>> want, got;
        for (uint64_t at = 0; at < a.count; at++) {
            for (uint64_t there = 0; there < b.count; there++) {
                if (element(a, at) == element(b, there)) want.insert({at, there});
            }
        }
        a.each_common(b, width, [&](uint64_t at, uint64_t there, uint64_t n) {
            for (uint64_t k = 0; k < n; k++) CHECK(got.insert({at + k, there + k}).second);
        });
        CHECK(got == want);

        BoxRun::Extent extent = a.extent_in(b);
        bool covers = a.column <= b.column && a.column + a.columns >= b.column + b.columns;
        uint64_t least = UINT64_MAX, end = 0, outside = 0;
        for (auto [at, there] : want) {
            least = std::min(least, there), end = std::max(end, there + 1);
            outside += there < extent.begin || there >= extent.end;
        }
        CHECK(outside == 0);
        CHECK(extent.end <= b.count);
        if (covers) CHECK(extent.empty() == want.empty());
        if (covers && !want.empty()) CHECK((extent.begin == least && extent.end == end));
    }
}

TEST_CASE("no number of a piece can be another") {
    for (uint32_t seed = 0; seed < 10; seed++) {
        CheckpointIndex good = random_index(seed, 3);
        std::string header = checkpoint_index_bytes(good);
        uint64_t header_bytes;
        memcpy(&header_bytes, header.data() + 24, 8);
        header = header.substr(64, header_bytes);
        auto check_refused = [&](const Pieces& pieces) {
            CHECK_REFUSED(parse(forged_index(header, pieces)), "index.bin: ");
        };
        CHECK_NOTHROW(parse(forged_index(header, good.pieces)));
        for (size_t p = 0; p < good.pieces.size(); p++) {
            CAPTURE(p);
            for (uint64_t change : {1ull, 2ull, 64ull, 1ull << 31, ~0ull, ~63ull}) {
                CAPTURE(change);
                Pieces pieces = good.pieces;
                for (uint32_t* field :
                     {&pieces[p].tensor, (uint32_t*)&pieces[p].slot, &pieces[p].file, &pieces[p].zero}) {
                    *field += (uint32_t)change;
                    check_refused(pieces);
                    *field -= (uint32_t)change;
                }
                for (uint64_t* field : {&pieces[p].column, &pieces[p].columns, &pieces[p].begin,
                                        &pieces[p].count, &pieces[p].offset}) {
                    *field += change;
                    check_refused(pieces);
                    *field -= change;
                }
            }
            Pieces fewer = good.pieces, more = good.pieces;
            fewer.erase(fewer.begin() + (long)p);
            check_refused(fewer);
            more.push_back(good.pieces[p]);
            check_refused(more);
        }
    }
}

TEST_CASE("pieces that overlap or leave holes, or do not fill the files") {
    const std::string tensors = R"({"name": "a", "shape": [4, 6], "weight": "fp32"})";
    auto at = [](uint64_t column, uint64_t columns, uint64_t begin, uint64_t count, uint64_t offset) {
        return CheckpointPiece{0, Slot::weight, 0, 0, column, columns, begin, count, offset, 0};
    };
    auto check = [&](const Pieces& pieces, const char* words, const char* files = "160") {
        CHECK_REFUSED(parse(forged_index(forged_header(tensors, files), pieces)), words);
    };
    const char* hole = "index.bin: tensor a: pieces of its weight overlap or leave a hole; ";
    const char* file_hole = "index.bin: pieces in data file 0 overlap or leave a hole; ";
    CHECK_NOTHROW(parse(forged_index(forged_header(tensors, "160"), {at(0, 6, 0, 24, 64)})));
    CHECK_NOTHROW(
        parse(forged_index(forged_header(tensors, "160,64"), {at(4, 2, 0, 8, 64), at(0, 4, 0, 16, 96)})));
    check({}, hole);
    check({at(0, 6, 0, 23, 64)}, hole, "156");
    check({at(0, 6, 1, 23, 64)}, hole, "156");
    check({at(0, 6, 0, 12, 64), at(0, 6, 11, 13, 112)}, hole, "164");
    check({at(0, 6, 0, 24, 64), at(0, 6, 0, 24, 160)}, hole, "256");
    check({at(0, 4, 0, 16, 64)}, hole, "128");                        // columns 4 and 5 are missing
    check({at(0, 4, 0, 16, 64), at(3, 3, 0, 12, 128)}, hole, "176");  // column 3 twice
    check({at(0, 4, 0, 16, 64), at(0, 6, 0, 24, 128)}, hole, "224");  // a box within another
    check({at(0, 6, 0, 12, 64), at(0, 3, 6, 6, 112)}, hole, "136");   // half as rows, half as columns
    check({at(0, 6, 0, 24, 64)}, file_hole, "161");
    check({at(0, 6, 0, 24, 68)}, file_hole, "164");
    check({at(0, 6, 0, 24, 64)}, "data file 1 overlap or leave a hole; ", "160,65");
    check({at(0, 6, 0, 12, 64), at(0, 6, 12, 12, 64)}, file_hole);
    const char* nowhere = "index.bin: piece 0 refers to a tensor, slot, range or file that does not exist; ";
    check({at(0, 6, 0, 24, 64)}, nowhere, "159");
    check({at(0, 6, 0, 24, 64)}, nowhere, "");
    check({at(0, 6, 0, 25, 64)}, nowhere, "164");
    check({at(0, 0, 0, 24, 64)}, nowhere);
    check({at(0, 6, 0, 0, 64)}, nowhere);
    check({at(6, UINT64_MAX - 5, 0, 24, 64)}, nowhere);
    check({at(UINT64_MAX, 2, 0, 24, 64)}, nowhere);
    check({at(0, 6, UINT64_MAX, 2, 64)}, nowhere);
    check({at(0, 6, 0, 24, UINT64_MAX - 90)}, nowhere);
}

TEST_CASE("a piece has at most 2^22 elements") {
    const std::string tensors = R"({"name": "a", "shape": [4194305], "weight": "bf16"})";
    CheckpointPiece all = {0, Slot::weight, 0, 0, 0, 1, 0, largest_piece + 1, 64, 0};
    std::string header = forged_header(tensors, std::to_string(64 + 2 * all.count));
    CHECK_REFUSED(parse(forged_index(header, {all})), "range or file that does not exist; ");
    CheckpointPiece one = {0, Slot::weight, 0, 0, 0, 1, largest_piece, 1, 64 + 2 * largest_piece, 0};
    all.count--;
    CHECK_NOTHROW(parse(forged_index(header, {one, all})));
}

TEST_CASE("hostile headers with right checksums") {
    auto check = [&](const std::string& header, const char* words) {
        CHECK_REFUSED(parse(forged_index(header, {})), words);
    };
    auto tensor = [&](const std::string& row, const char* words) { check(forged_header(row, "64"), words); };
    check("", "not valid JSON at byte ");
    check("[]", "header is an array; it must be an object");
    check(std::string(100000, '['), "nested more than 32 deep; ");
    check(std::string(100, '\0'), "not valid JSON at byte ");
    check("{}", "header: program is missing; ");
    check(R"({"program": 7})", "header: program is 7; it must be a string");
    check(R"({"program": "", "step": -1})", "header: step is -1; ");
    check(R"({"program": "", "step": 1.5})", "header: step is 1.5; ");
    check(R"({"program": "", "step": 1})", "header: samples is missing; ");
    check(R"({"program": "", "step": 1, "samples": 9223372036854775807})",
          "header: samples is 9223372036854775807; ");
    check(R"({"program": "", "step": 1, "samples": 1})", "header has no options; ");
    check(R"({"program": "", "step": 1, "samples": 1, "options": []})", "header has no options; ");
    check(R"({"program": "", "step": 1, "samples": 1, "options": {}})", "header: tensors is missing; ");
    check(R"({"program": "", "step": 1, "samples": 1, "options": {}, "tensors": []})",
          "header: files is missing; ");
    check(forged_header("", ""), "index.bin: header has no tensors; ");
    check(forged_header("", "63"), "bytes of data file 0 is 63; ");
    check(forged_header("", "64, -1"), "bytes of data file 1 is -1; ");
    check(forged_header("", "64, 18446744073709551615"), "bytes of data file 1 is 18446744073709551615; ");
    check(forged_header("", "64, \"64\""), "bytes of data file 1 is \"64\"; ");
    tensor("7", "tensor 0 is 7; it must be an object");
    tensor("{}", "tensor 0: name is missing; ");
    tensor(R"({"name": "a"})", "tensor 0: shape is missing; ");
    tensor(R"({"name": "a", "shape": 4})", "tensor 0: shape is 4; ");
    tensor(R"({"name": "a", "shape": []})", "tensor a: 0 dimensions; ");
    tensor(R"({"name": "a", "shape": [1, 1, 1]})", "tensor a: 3 dimensions; ");
    tensor(R"({"name": "a", "shape": [1, 0]})", "tensor a: shape is 0; ");
    tensor(R"({"name": "a", "shape": [4, -1]})", "tensor a: shape is -1; ");
    tensor(R"({"name": "a", "shape": [4294967296, 4294967296]})", "tensor a: shape is 4294967296; ");
    tensor(R"({"name": "a", "shape": [9223372036854775807]})", "tensor a: shape is 9223372036854775807; ");
    tensor(R"({"name": "a", "shape": [4]})", "tensor a: no weight; ");
    tensor(R"({"name": "a", "shape": [4], "m": "fp32"})", "tensor a: no weight; ");
    tensor(R"({"name": "a", "shape": [4], "weight": "fp8"})", "tensor a: weight is stored as \"fp8\"; ");
    tensor(R"({"name": "a", "shape": [4], "weight": 4})", "tensor a: weight is stored as 4; ");
    tensor(R"({"name": "a", "shape": [4], "weight": "fp32", "m": "bf16"})", "tensor a: m is stored as ");
    tensor(R"({"name": "a\n\u001b[2J", "shape": []})", "tensor a\\u000a\\u001b[2J: ");
    tensor(R"({"name": "a", "shape": [4], "weight": "fp32"}, {"name": "a", "shape": [4], "weight": "fp32"})",
           "tensor a appears twice; ");
    tensor(R"({"name": "a", "shape": [4], "weight": "fp32"})", "tensor a: pieces of its weight overlap or");
}

TEST_CASE("files of another kind") {
    CHECK_REFUSED(parse(""), "index.bin: too short for the index of a checkpoint; ");
    CHECK_REFUSED(parse(std::string(1000, 'x')), "not the index of a checkpoint (wrong magic); ");
    std::string bytes = checkpoint_index_bytes(random_index(1));
    std::string newer = bytes;
    newer[8] = 2;
    CHECK_REFUSED(parse(newer), "checkpoint format 2, but this program reads format 1; ");
    CHECK_REFUSED(parse(bytes + bytes), "bytes, but its first 64 bytes say ");
    // absurd sizes, with a correct checksum
    for (size_t field : {24, 40}) {
        for (uint64_t size : {UINT64_MAX, UINT64_MAX / 64 * 64, (uint64_t)1 << 58, (uint64_t)1 << 32}) {
            std::string hostile = bytes;
            memcpy(hostile.data() + field, &size, 8);
            uint64_t hash = XXH3_64bits(hostile.data(), 56);
            memcpy(hostile.data() + 56, &hash, 8);
            CHECK_REFUSED(parse(hostile), "damaged in its first 64 bytes; ");
        }
    }
}

TEST_CASE("any flipped, missing or added byte is noticed") {
    std::string bytes = checkpoint_index_bytes(random_index(2, 2));
    for (size_t at = 0; at < bytes.size(); at++) {
        std::string copy = bytes;
        copy[at] = (char)(copy[at] ^ 0x10);
        CHECK_REFUSED(parse(copy), "index.bin: ");
    }
    for (size_t size = 0; size < bytes.size(); size++)
        CHECK_REFUSED(parse(bytes.substr(0, size)), "index.bin: ");
    CHECK_REFUSED(parse(bytes + '\0'), "index.bin: ");
}

TEST_CASE("an index that would be refused is not written") {
    CheckpointIndex index = random_index(3);
    index.pieces.pop_back();
    CHECK_REFUSED(checkpoint_index_bytes(index), "overlap or leave a hole; ");
    index = random_index(3);
    index.about.erase("samples");
    CHECK_REFUSED(checkpoint_index_bytes(index), "samples is missing; ");
}

// Returns the seconds to parse an index of this many tensors, in about 120 pieces each.
static double seconds_to_parse(int tensors) {
    CheckpointIndex index = random_index(4, tensors, 120, 64);
    std::string bytes = checkpoint_index_bytes(index);
    return least_thread_seconds(5, [&] { CHECK(parse(bytes).pieces.size() == index.pieces.size()); });
}

TEST_CASE("four times as many pieces take about four times as long, and not sixteen times") {
    double few = seconds_to_parse(250), many = seconds_to_parse(1000);
    CAPTURE(few);
    CHECK(many < 10 * few);
}
