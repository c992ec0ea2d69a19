// Rows of tables on disk: sets and snapshots of rows, undo logs, files of pages, and the cache in front of
// them. Each is compared with a plain array or map, also after damage and on a full disk.
// devices: cpu address
// seconds: 2
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "data/tables/row_cache.h"
#include "data/tables/row_set.h"
#include "data/tables/row_snapshot.h"
#include "test/data/failing_calls.h"
#include "test/support/file_testing.h"

// Files whose paths contain this are on a disk with `room_left` free bytes. Empty: no file is.
static std::string full_disk_of;
static size_t room_left = 0;
static std::mutex room_mutex;

extern "C" ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
    std::lock_guard lock(room_mutex);
    char path[4096] = {};
    bool known = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path - 1) > 0;
    if (!full_disk_of.empty() && known && std::string(path).find(full_disk_of) != std::string::npos) {
        bytes = std::min(bytes, room_left);
        room_left -= bytes;
        if (bytes == 0) return errno = ENOSPC, -1;
    }
    return syscall(SYS_pwrite64, file, data, bytes, offset);
}

static std::string error_on_full_disk(const std::string& name, size_t room, std::function<void()> work) {
    full_disk_of = name, room_left = room;
    std::string error = error_of(work);
    full_disk_of.clear();
    return error;
}

static void flip_bit(const std::string& path, size_t at) {
    std::string bytes = contents(path);
    bytes[at] = (char)(bytes[at] ^ 4);
    write_file(path, bytes);
}

using Rows = std::vector<uint64_t>;

TEST_CASE("a set has the rows that were inserted, at the borders of words too") {
    for (uint64_t table : {1, 63, 64, 65, 128, 200}) {
        CAPTURE(table);
        std::vector<uint64_t> words(RowSet::words_of(table)), more_words(words.size());
        RowSet rows(words.data(), table), more(more_words.data(), table);
        std::set<uint64_t> wanted;
        auto check = [&] {
            CHECK(rows.size() == wanted.size());
            for (uint64_t row = 0; row < table; row++) {
                CHECK(rows.has(row) == wanted.contains(row));
                auto next = wanted.lower_bound(row);
                CHECK(rows.next(row) == (next == wanted.end() ? table : *next));
            }
            CHECK(rows.next(table) == table);
        };
        for (uint64_t row : {0, 63, 64, 65, 127, 128, 199, 63})
            if (row < table) rows.insert(row), wanted.insert(row), check();
        for (uint64_t row : {0, 62, 64, 126, 198})
            if (row < table) more.insert(row), wanted.insert(row);
        for (int i = 0; i < 2; i++) rows.insert(more), check();
        rows.clear(), wanted.clear(), check();
        rows.insert(table - 1), wanted.insert(table - 1), check();
    }
}

// A table of numbers, and a save of some of its rows.
struct TestSnapshot {
    const size_t table, most;
    Rows values = Rows(table), words = Rows(RowSet::words_of(table)), copies = Rows(most);
    RowSet rows{words.data(), table};
    RowSnapshot snapshot{(char*)copies.data(), most, sizeof(uint64_t)};

    void change(const Rows& changed) {
        snapshot.before_change(changed.data(), changed.size(), [&](size_t i, char* to) {
            memcpy(to, &values[changed[i]], sizeof(uint64_t));
        });
        for (uint64_t row : changed) values[row] += 1 + row;
    }
    // Adds the next rows of the save to a map.
    size_t read(size_t most, std::map<uint64_t, uint64_t>& saved) {
        Rows got, records(most);
        size_t count = snapshot.next(most, got, (char*)records.data(), [&](const Rows& from, auto& to) {
            for (size_t i = 0; i < from.size(); i++) memcpy(to[i], &values[from[i]], sizeof(uint64_t));
        });
        for (size_t i = 0; i < count; i++) CHECK(saved.emplace(got[i], records[i]).second);
        return count;
    }
};

TEST_CASE("a save reads rows as they were; changes wait for room, until it reads or ends") {
    // Threads may begin late on a busy machine; the test is then repeated with longer waits.
    double stalled = 0, wait = 0.00125;
    while (stalled < wait && wait < 10) {
        wait *= 4;
        TestSnapshot test{100, 2};
        auto a_while = [&] { std::this_thread::sleep_for(std::chrono::duration<double>(wait)); };
        std::map<uint64_t, uint64_t> saved;
        test.change({5});  // no save has begun
        for (uint64_t row : {1, 5, 64, 99}) test.rows.insert(row);
        test.snapshot.begin(test.rows);
        test.change({64, 64, 7, 99});  // 7 is not to be saved, and takes no room
        CHECK(test.snapshot.stalled() == 0);
        std::atomic<int> changes = 0;
        std::thread training([&] {
            test.change({5}), changes++;
            test.change({1, 5}), changes++;  // both have been read by then
        });
        a_while();
        CHECK(test.read(1, saved) == 1);
        a_while();
        CHECK(changes == 0);
        CHECK(test.read(1, saved) == 1);
        training.join();
        stalled = test.snapshot.stalled();
        CHECK(test.read(9, saved) == 2);
        CHECK(test.read(9, saved) == 0);
        CHECK(saved == std::map<uint64_t, uint64_t>{{1, 0}, {5, 6}, {64, 0}, {99, 0}});
        test.snapshot.end();
        test.snapshot.begin(test.rows);
        test.change({1, 99});
        std::thread more([&] { test.change({5, 64}), changes++; });
        a_while();
        CHECK(changes == 2);
        test.snapshot.end();
        more.join();
        CHECK(changes == 3);
    }
    CHECK(stalled >= wait);
}

TEST_CASE("a thread changes rows at random while a save reads them") {
    TestSnapshot test{3000, 20};
    std::mt19937_64 random(1);
    for (int round = 0; round < 10; round++) {
        test.rows.clear();
        for (int i = 0; i < 1500; i++) test.rows.insert(random() % 3000);
        std::map<uint64_t, uint64_t> wanted, saved;
        for (uint64_t row = 0; row < 3000; row++)
            if (test.rows.has(row)) wanted[row] = test.values[row];
        test.snapshot.begin(test.rows);
        std::atomic<bool> ended = false;
        std::thread training([&, seed = random()] {
            std::mt19937_64 drawn(seed);
            while (!ended) {
                Rows rows(1 + drawn() % 30);  // at times more than there is room for
                for (uint64_t& row : rows) row = drawn() % 3000;
                test.change(rows);
            }
        });
        while (test.read(1 + random() % 50, saved) > 0) std::this_thread::yield();
        test.snapshot.end();
        ended = true;
        training.join();
        CHECK(saved == wanted);
    }
}

TEST_CASE("an undo log gives back its pages; any flipped bit and any cut is noticed") {
    TemporaryFolder folder;
    const std::string path = folder / "log", a(16, 'a'), b(16, 'b'), c(16, 'c');
    {
        UndoLog log(path, {.number = 7, .save_id = 8, .identity = 9, .page_bytes = 16});
        log.append({3, 4}, {a.data(), b.data()});
        log.append({1}, {c.data()});
    }
    std::map<uint64_t, std::string> got;
    auto whole = [&] {
        got.clear();
        return UndoLog::each_batch(path, 16, [&](const Rows& numbers, const char* pages) {
            for (size_t i = 0; i < numbers.size(); i++) got[numbers[i]] = std::string(pages + 16 * i, 16);
        });
    };
    CHECK(whole());
    CHECK(got == std::map<uint64_t, std::string>{{1, c}, {3, a}, {4, b}});
    auto preamble = UndoLog::preamble_of(path);
    REQUIRE(preamble);
    CHECK((preamble->number == 7 && preamble->save_id == 8 && preamble->identity == 9));
    CHECK_FALSE(UndoLog::preamble_of(folder / "none"));
    const std::string good = contents(path);
    const size_t second = 64 + 24 + 2 * (8 + 16);
    for (size_t at = 0; at < good.size(); at++) {
        CAPTURE(at);
        flip_bit(path, at);
        CHECK(UndoLog::preamble_of(path).has_value() == (at >= 64));
        CHECK(whole() == (at < 64));
        write_file(path, good.substr(0, at));
        CHECK(UndoLog::preamble_of(path).has_value() == (at >= 64));
        CHECK(whole() == (at <= 64 || at == second));  // these cuts leave whole batches
        write_file(path, good);
    }
}

constexpr uint64_t page_count = 100;
constexpr size_t page_bytes = 4096;
using Fills = std::vector<int>;  // the byte that fills each page

static void fill_pages(PageFile& file, const Rows& numbers, int fill) {
    PageBuffer pages(numbers.size() * page_bytes);
    file.read(numbers, pages.data());
    file.log_pages(numbers, pages.data());
    memset(pages.data(), fill, numbers.size() * page_bytes);
    file.write(numbers, pages.data());
}
static Fills fills_of(PageFile& file, uint64_t pages = page_count) {
    Rows numbers(pages);
    Fills fills;
    for (uint64_t i = 0; i < pages; i++) numbers[i] = i;
    PageBuffer all(pages * page_bytes);
    file.read(numbers, all.data());
    for (uint64_t i = 0; i < pages; i++) {
        const char* page = all.data() + i * page_bytes;
        bool same = std::count(page, page + PageFile::payload(page_bytes), *page) == page_bytes - 8;
        fills.push_back(same ? *page : -1);
    }
    return fills;
}
// Fills random pages, some of them adjacent, and updates `fills`.
static void fill_some(PageFile& file, std::mt19937_64& random, Fills& fills) {
    std::set<uint64_t> numbers;
    for (int i = 0; i < 4; i++) {
        uint64_t first = random() % page_count, count = 1 + random() % 70;  // a run of more than 64 is split

        for (uint64_t at = first; at < std::min(first + count, page_count); at++) numbers.insert(at);
    }
    int fill = 1 + (int)(random() % 100);
    fill_pages(file, Rows(numbers.begin(), numbers.end()), fill);
    for (uint64_t number : numbers) fills[number] = fill;
}

struct TestFile {
    const uint64_t count = page_count;
    const size_t bytes = page_bytes;
    TemporaryFolder folder = {};
    std::string name = folder / "here/rows", pages = name + ".pages";
    std::unique_ptr<PageFile> file = std::make_unique<PageFile>(name, count, bytes, 5);

    PageFile& open(uint64_t identity = 5) {
        file.reset();
        file = std::make_unique<PageFile>(name, count, bytes, identity);
        return *file;
    }
    std::string log(int number) const { return name + ".undo." + std::to_string(number); }
};
static TestFile file_for(uint64_t rows, size_t record) {
    return {RowCache::pages_for(rows, record), RowCache::page_bytes_for(record)};
}

TEST_CASE("pages are zeros that take no disk, until they are written") {
    TestFile test;
    Fills fills(page_count);
    CHECK(fills_of(*test.file) == fills);
    struct stat status;
    CHECK((stat(test.pages.c_str(), &status) == 0 && status.st_blocks == 0));
    CHECK((uint64_t)status.st_size == page_count * page_bytes);
    std::mt19937_64 random(2);
    for (int i = 0; i < 10; i++) fill_some(*test.file, random, fills);
    CHECK(fills_of(*test.file) == fills);
    CHECK_REFUSED(PageFile(test.name, page_count, page_bytes, 5), test.pages + ": another run is using it; ");
    fill_pages(*test.file, {3, 4, 77}, 9);
    for (uint64_t at : {0, 4087, 4095}) {
        flip_bit(test.pages, 77 * page_bytes + at);
        CHECK_REFUSED(fills_of(*test.file), test.pages + ": page 77 does not match its checksum; ");
        flip_bit(test.pages, 77 * page_bytes + at);
    }
    std::string bytes = contents(test.pages), page_4 = bytes.substr(4 * page_bytes, page_bytes);
    write_file(test.pages, bytes.replace(5 * page_bytes, page_bytes, page_4));
    CHECK_REFUSED(fills_of(*test.file), "page 5 does not match");
    fs::resize_file(test.pages, 10 * page_bytes);
    CHECK_REFUSED(fills_of(*test.file), test.pages + ": ");
}

TEST_CASE("a file returns to its marks, one or several back, and after it was closed") {
    TestFile test;
    std::mt19937_64 random(3);
    Fills fills(page_count);
    std::map<uint64_t, Fills> marked;  // by save id, which ascends here
    for (uint64_t save = 1; save <= 12; save++) {
        test.file->mark(save);
        marked[save] = fills;
        for (uint64_t i = random() % 3; i > 0; i--) fill_some(*test.file, random, fills);
        bool reopened = random() % 2;
        if (reopened) test.open();
        for (uint64_t id = 0; id <= save + 1; id++)
            CHECK(test.file->can_return_to(id) == marked.contains(id));
        CHECK(fills_of(*test.file) == fills);
        if (!reopened && random() % 3) continue;
        auto wanted = std::next(marked.begin(), (long)(random() % marked.size()));
        REQUIRE(test.file->return_to(wanted->first));
        fills = wanted->second;
        marked.erase(std::next(wanted), marked.end());
        CHECK(fills_of(*test.file) == fills);
        fill_some(*test.file, random, fills);  // this is logged, too
        if (marked.size() < 4) continue;
        test.file->forget_before(100);  // no such mark: nothing is forgotten
        test.file->forget_before(std::next(marked.begin())->first);
        marked.erase(marked.begin());
    }
    test.file->clear();
    CHECK(fills_of(*test.file) == Fills(page_count));
    CHECK(std::distance(fs::directory_iterator(test.folder / "here"), {}) == 1);
}

TEST_CASE("a return reads the pages that have changed, not the file") {
    TemporaryFolder folder;
    PageFile file(folder / "rows", 1 << 20, page_bytes, 5);
    file.mark(1);
    fill_pages(file, {3, 4, 5, (1 << 20) - 1}, 1);
    file.mark(2);
    for (int fill : {2, 3}) fill_pages(file, {4, 1000}, fill);  // a page is logged once for each mark
    uint64_t read = file.bytes_read();
    CHECK(file.return_to(1));
    CHECK(file.bytes_read() - read == (4 + 2) * page_bytes);
    CHECK(fills_of(file, 1100) == Fills(1100));
}

TEST_CASE("marks of failed saves are forgotten, and add to the log before them only what it lacks") {
    TemporaryFolder folder;
    PageFile file(folder / "rows", page_count, page_bytes, 5);
    file.mark(1);
    fill_pages(file, {3, 4}, 1);
    for (uint64_t save : {2, 3, 4}) {
        file.mark(save);
        fill_pages(file, {4, 10 + save}, (int)save);
        file.forget_newest(save + 1);  // no such mark: nothing is forgotten
        CHECK(file.can_return_to(save));
        file.forget_newest(save);
        CHECK_FALSE(file.can_return_to(save));
        fill_pages(file, {3, 20}, (int)save + 1);
    }
    uint64_t read = file.bytes_read();
    REQUIRE(file.return_to(1));
    CHECK(file.bytes_read() - read == 6 * page_bytes);  // pages 3, 4, 12, 13, 14 and 20
    CHECK(fills_of(file) == Fills(page_count));
    file.mark(5);
    fill_pages(file, {7}, 1);
    file.mark(6);
    file.forget_before(6);
    file.forget_newest(6);  // published: it stays
    CHECK(file.can_return_to(6));
}

TEST_CASE("what others left makes a file empty: other pages, another size, damaged logs") {
    TestFile test;
    auto prepare = [&] {
        test.file->clear();
        for (int save : {1, 2, 3}) test.file->mark((uint64_t)save), fill_pages(*test.file, {7, 8}, save);
    };
    auto empty = [&] {
        for (uint64_t save : {1, 2, 3}) CHECK_FALSE(test.file->can_return_to(save));
        CHECK(fills_of(*test.file) == Fills(page_count));
    };
    prepare(), test.open(6), empty();
    prepare(), fs::resize_file(test.pages, 20 * page_bytes), test.open(6), empty();
    prepare(), fs::resize_file(test.pages, (page_count + 1) * page_bytes), test.open(6), empty();
    prepare(), flip_bit(test.log(2), 20), test.open(6), empty();
    prepare();
    for (int save : {1, 2, 3}) fs::remove(test.log(save));
    test.open(6), empty();

    // the return from 3 to 1 ends at a damaged log; then the file no longer offers 2 or 3
    prepare(), flip_bit(test.log(1), 5000);
    CHECK_FALSE(test.file->return_to(1));
    test.open(6);
    CHECK_FALSE((test.file->can_return_to(2) || test.file->can_return_to(3)));
    CHECK_FALSE(test.file->return_to(1));
    test.file->clear(), empty();

    // two slashes in the path, and a FIFO with the name of a log
    prepare(), test.name = test.folder / "here//rows", test.open(6);
    CHECK(test.file->can_return_to(2));
    REQUIRE(mkfifo(test.log(9).c_str(), 0600) == 0);
    CHECK_REFUSED(test.open(6), ".undo.9: cannot read it: ");
}

TEST_CASE("pages on a full disk") {
    TestFile test;
    Fills marked(page_count);
    for (const char* name : {".pages", ".undo."}) {
        for (size_t room : {(size_t)0, page_bytes, 5 * page_bytes}) {
            for (bool retried : {false, true}) {
                test.file->clear(), test.file->mark(1);
                fill_pages(*test.file, {7, 8}, 1);
                std::string path = name[1] == 'p' ? test.pages : test.log(1);
                auto fill = [&] { fill_pages(*test.file, {6, 7, 8, 9, 20, 21, 30, 31}, 2); };
                check_error(error_on_full_disk(name, room, fill), path, "No space left on device");
                if (retried) fill_pages(*test.file, {6, 9}, 3), fill();
                test.open();
                REQUIRE(test.file->can_return_to(1));
                CHECK(test.file->return_to(1));
                CHECK(fills_of(*test.file) == marked);
            }
        }
    }
    // without room for another mark, the log of the previous one also gets the later changes
    for (size_t room : {0, 10}) {
        fill_pages(*test.file, {7}, 4);
        auto mark = [&] { test.file->mark(2); };
        check_error(error_on_full_disk(".undo.2", room, mark), test.log(2), "No space left on device");
        fill_pages(*test.file, {7, 50}, 5);
        test.open();
        REQUIRE(test.file->can_return_to(1));
        CHECK(test.file->return_to(1));
        CHECK(fills_of(*test.file) == marked);
    }
}

using Records = std::map<uint64_t, std::string>;  // rows without a record are zeros

// A cache with its memory.
struct TestCache {
    PageFile& file;
    const std::vector<size_t> bytes;  // of each field
    const uint64_t table;             // rows
    const size_t slots, indices = SlotNotes::indices_for(slots);
    const size_t record_bytes = std::accumulate(bytes.begin(), bytes.end(), (size_t)0);
    std::vector<std::string> arrays = {};
    Rows rows = Rows(slots), last = {}, last_slots = {};
    std::vector<uint32_t> turns = std::vector<uint32_t>(slots), index = std::vector<uint32_t>(indices);
    std::vector<uint8_t> uses = std::vector<uint8_t>(slots);
    std::unique_ptr<bool[]> changed = std::make_unique<bool[]>(slots);
    const std::vector<RowField> of_slot = fields();
    RowCache cache{
        file, of_slot, {rows.data(), turns.data(), uses.data(), changed.get(), index.data(), slots, indices}};
    std::mt19937_64 random{4};
    uint32_t turn = 0;

    std::vector<RowField> fields() {
        std::vector<RowField> result;
        for (size_t size : bytes) arrays.emplace_back(slots * size, 'x');
        for (size_t i = 0; i < bytes.size(); i++) result.push_back({arrays[i].data(), bytes[i]});
        return result;
    }
    Rows hold(const Rows& held) {
        Rows slots(held.size());
        cache.hold(held.data(), held.size(), slots.data(), turn);
        return slots;
    }
    void change(const Rows& held, Records& records) {
        Rows slots(held.size());
        cache.change(held.data(), held.size(), slots.data());
        for (size_t i = 0; i < held.size(); i++) {
            std::string record;
            for (size_t f = 0; f < bytes.size(); f++)
                for (size_t at = slots[i] * bytes[f]; at < (slots[i] + 1) * bytes[f]; at++)
                    record += arrays[f][at] = (char)random();
            records[held[i]] = record;
        }
    }
    Rows reported() const {
        Rows result;
        cache.each_changed([&](uint64_t row) { result.push_back(row); });
        std::sort(result.begin(), result.end());
        return result;
    }
    std::string wanted(uint64_t row, const Records& records) const {
        auto found = records.find(row);
        return found == records.end() ? std::string(record_bytes, '\0') : found->second;
    }

    // Checks all rows, in memory and on disk.
    void check(const Records& records) {
        std::string all(table * record_bytes, '?'), right;
        Rows numbers;
        std::vector<char*> to;
        for (uint64_t row = 0; row < table; row++) {
            numbers.push_back(row), to.push_back(&all[row * record_bytes]);
            right += wanted(row, records);
        }
        cache.copy(numbers, to);
        CHECK((all == right));
    }
    // Plays turns. Each turn holds rows, some of which recur often, and changes half of them.
    void play(size_t turns_to_play, size_t count, Records& records) {
        bool right = true, stayed = true;
        for (size_t i = 0; i < turns_to_play; i++) {
            turn++;
            Rows held(count);
            for (uint64_t& row : held) row = random() % table;
            for (size_t j = 0; j < count; j += 3) held[j] %= table / 20 + 1;
            Rows slots = hold(held);
            std::string record(record_bytes, '\0');
            for (size_t j = 0; j < count; j++) {
                copy_record(of_slot, slots[j], record.data());
                right &= rows[slots[j]] == held[j] + 1 && record == wanted(held[j], records);
            }
            for (size_t j = 0; j < last.size(); j++) stayed &= rows[last_slots[j]] == last[j] + 1;
            last = held, last_slots = slots;
            held.resize(count / 2);
            change(held, records);
        }
        CHECK(right);
        CHECK(stayed);
    }
};

TEST_CASE("a cache holds what a map holds, whatever lies in memory") {
    struct {
        std::vector<size_t> fields;
        uint64_t table;
        size_t slots, indices, turns, count;
    } cases[] = {{{3, 8, 1, 5}, 480, 100, SlotNotes::indices_for(100), 500, 8},
                 {{16}, 500, 63, 64, 1500, 8},  // nearly all indices are taken
                 {{5000, 17}, 40, 12, SlotNotes::indices_for(12), 25, 4},
                 {{4088}, 40, 9, SlotNotes::indices_for(9), 25, 3}};
    for (const auto& [fields, table, slots, indices, turns, count] : cases) {
        CAPTURE(table);
        TestFile test = file_for(table, std::accumulate(fields.begin(), fields.end(), (size_t)0));
        TestCache cache{*test.file, fields, table, slots, indices};
        Records records;
        cache.play(turns, count, records);
        cache.check(records);
        CHECK(cache.cache.missed() > turns);
        cache.cache.flush();
        CHECK(cache.reported().empty());
        test.file->mark(1);
        TestCache{test.open(), fields, table, slots}.check(records);
    }
    CHECK(RowCache::page_bytes_for(4088) == 4096);
    CHECK(RowCache::page_bytes_for(4089) == 8192);
    CHECK(RowCache::pages_for(481, 17) == 3);  // 240 rows per page
}

TEST_CASE("a cache reports what has changed, and loses it if it forgets") {
    TestFile test = file_for(9000, 17);
    TestCache cache{*test.file, {17}, 9000, 8000};
    Records records, written;
    Rows all(5000);
    for (uint64_t i = 0; i < all.size(); i++) all[i] = i * 7919 % 9000;
    cache.hold(all);
    CHECK(cache.cache.missed() == 5000);
    cache.change({4 * 7919 % 9000, 7919}, records);
    CHECK(cache.reported() == Rows{4 * 7919 % 9000, 7919});
    cache.change(all, records);
    CHECK(cache.reported().size() == 5000);
    cache.cache.flush();
    CHECK(cache.reported().empty());
    written = records;
    cache.change({7919, 0}, records);
    CHECK(cache.reported() == Rows{0, 7919});
    cache.check(records);
    cache.cache.forget();
    CHECK(cache.reported().empty());
    cache.check(written);
}

TEST_CASE("a cache that is too small for two steps says so, and loses nothing") {
    TestFile test = file_for(100, 17);
    TestCache cache{*test.file, {17}, 100, 16};
    Records records;
    Rows old = {0, 1, 2, 3, 4, 5}, pinned = {20, 21, 22, 23, 24, 25, 26, 27},
         more = {50, 51, 52, 53, 54, 55, 56, 57, 58};
    cache.turn = 1, cache.hold(old), cache.change(old, records);
    cache.turn = 3, cache.hold(pinned), cache.change(pinned, records);
    cache.turn = 4;
    CHECK_REFUSED(cache.hold(more), "--ngram-cache: two steps need more rows than the 16 that it holds; ");
    cache.check(records);
    more.pop_back();
    cache.hold(more);
    cache.check(records);
}

TEST_CASE("rows return to those of a mark, and a full disk harms nothing") {
    TestFile test = file_for(3000, 17);
    using Fields = std::vector<size_t>;
    auto cache = std::make_unique<TestCache>(*test.file, Fields{9, 8}, 3000, 100);
    Records records;
    std::map<uint64_t, Records> marked;
    for (uint64_t save = 1; save <= 4; save++) {
        cache->play(12, 10, records);
        cache->cache.flush();
        test.file->mark(save);
        marked[save] = records;
        if (save < 3) continue;
        const std::string name = save == 3 ? ".pages" : ".undo.4";
        auto fill = [&] { cache->play(12, 10, records), cache->cache.flush(); };
        check_error(error_on_full_disk(name, page_bytes, fill), test.name + name, "No space left on device");
        cache->last.clear();  // a turn failed, so they may leave in the next
        cache->check(records);
    }
    cache->play(12, 10, records);
    CHECK(test.file->return_to(4));
    cache->cache.forget(), cache->last.clear();
    cache->check(marked[4]);
    cache->play(12, 10, records = marked[4]);
    CHECK(test.file->return_to(3));
    cache->cache.forget(), cache->last.clear();
    cache->check(marked[3]);
    cache->play(12, 10, records = marked[3]);
    cache.reset(), test.open();
    REQUIRE(test.file->return_to(2));
    cache = std::make_unique<TestCache>(*test.file, Fields{9, 8}, 3000, 100);
    cache->check(marked[2]);
    cache->play(12, 10, records = marked[2]);
    cache->check(records);
}
