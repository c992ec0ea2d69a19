// The tokenize subcommand: text to token shards.
// seconds: 10
#include "test/support/file_testing.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "data/text/tokenize.h"
#include "test/data/gzip_testing.h"

static TokenizeOptions usual_options() {
    TokenizeOptions options;
    options.tokenizer = "bytes";
    return options;
}

// Returns the documents of all shards of a split, and checks how the shards are filled.
static std::vector<std::string> documents_of(const std::string& pattern, int64_t shard_tokens) {
    std::vector<int> tokens;
    std::vector<std::string> files = files_named(pattern), documents(1);
    for (size_t i = 0; i < files.size(); i++) {
        std::vector<int> shard = all_tokens(files[i], 257);
        if (i + 1 < files.size()) CHECK((int64_t)shard.size() == shard_tokens);
        CHECK((int64_t)shard.size() <= shard_tokens);
        tokens.insert(tokens.end(), shard.begin(), shard.end());
    }
    REQUIRE(tokens.back() == 256);
    tokens.pop_back();
    for (int token : tokens) {
        if (token == 256)
            documents.emplace_back();
        else
            documents.back() += (char)token;
    }
    return documents;
}

TEST_CASE("tokenize: files and folders, split by document") {
    TemporaryFolder folder;
    fs::create_directories(folder / "in/b/deep");
    std::set<std::string> all;
    auto add = [&](const std::string& name, const std::string& content) {
        write_file(folder / name, content);
        all.insert(content);
    };
    for (int i = 0; i < 40; i++)
        add(text("in/b/deep/%02d.txt", i), text("document %d", i) + std::string((size_t)i, '.'));
    add("in/a.txt", "first");
    add("in/z.bin", std::string("\0\xff\x80", 3));
    add("in/large", std::string((3 << 20) + 17, 'q'));  // several pieces
    add("alone.txt", "named by itself");
    write_file(folder / "in/empty", "");
    fs::create_directory_symlink(folder / "in", folder / "in/b/loop");  // a cycle
    fs::create_symlink(folder / "in/a.txt", folder / "in/b/again");     // names the same file a second time
    fs::create_symlink("nowhere", folder / "in/b/broken");
    REQUIRE(mkfifo((folder / "in/pipe").c_str(), 0600) == 0);
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "in", folder / "alone.txt", folder / "in/a.txt"};
    options.output = folder / "out";
    options.val_fraction = 0.2;
    options.shard_tokens = 1 << 20;
    tokenize(options);

    std::vector<std::string> train = documents_of(folder / "out_train_*.bin", options.shard_tokens);
    std::vector<std::string> val = documents_of(folder / "out_val_*.bin", options.shard_tokens);
    CHECK((val.size() >= 3 && val.size() <= 18));
    std::set<std::string> both(train.begin(), train.end());
    both.insert(val.begin(), val.end());
    CHECK(both == all);
    CHECK(train.size() + val.size() == all.size());
    CHECK(std::find(train.begin(), train.end(), "document 7.......") <
          std::find(train.begin(), train.end(), "document 9........."));
    for (const std::string& name : folder.files()) CHECK(name.find("partial") == std::string::npos);

    // Nothing is overwritten without --overwrite; with it, the result is the same, and a longer older series
    // does not survive.
    check_error(error_of([&] { tokenize(options); }), folder / "out_train_000000.bin", "already exists");
    write_file(folder / "out_train_000099.bin", "left from before");
    write_file(folder / "out_val_000001.bin.partial", "left from before");
    write_file(folder / "out_train_mine.bin", "of another kind");
    options.overwrite = true;
    options.inputs.push_back(folder / "out_train_000000.bin");  // its own output is not an input
    tokenize(options);
    CHECK(documents_of(folder / "out_train_0*.bin", options.shard_tokens) == train);
    CHECK(documents_of(folder / "out_val_*.bin", options.shard_tokens) == val);
    CHECK(!fs::exists(folder / "out_train_000099.bin"));
    CHECK(!fs::exists(folder / "out_val_000001.bin.partial"));
    CHECK(fs::exists(folder / "out_train_mine.bin"));

    // The files of an interrupted run do not count as a result that could be lost.
    options.overwrite = false;
    options.output = folder / "interrupted";
    write_file(folder / "interrupted_train_000099.bin.partial", "left from before");
    tokenize(options);
    CHECK(!fs::exists(folder / "interrupted_train_000099.bin.partial"));

    options.inputs.pop_back();
    options.seed++;
    options.output = folder / "other";
    tokenize(options);
    CHECK(documents_of(folder / "other_val_*.bin", options.shard_tokens) != val);
}

TEST_CASE("tokenize: the split") {
    auto chosen = [](size_t documents, double fraction, uint64_t seed) {
        std::vector<bool> choice = choose_validation(std::vector<uint64_t>(documents, 9), fraction, seed);
        return std::count(choice.begin(), choice.end(), true);
    };
    for (uint64_t seed = 0; seed < 20; seed++) {
        CHECK(chosen(10, 0, seed) == 0);
        for (double fraction : {1e-9, 0.5, 0.999999}) {
            for (size_t documents : {2, 3, 10}) {
                CHECK(chosen(documents, fraction, seed) >= 1);
                CHECK(chosen(documents, fraction, seed) < (long)documents);
            }
        }
        CHECK(std::abs(chosen(20000, 0.1, seed) - 2000) < 250);
    }
    // A document that is forced into validation is a small one, and one forced into training a large one.
    for (uint64_t seed = 0; seed < 20; seed++) {
        CHECK(choose_validation({1000, 10, 500}, 1e-9, seed) == std::vector<bool>{false, true, false});
        CHECK(choose_validation({10, 1000, 500}, 0.999999, seed) == std::vector<bool>{true, false, true});
    }
    // More documents do not change the earlier choices.
    std::vector<bool> few = choose_validation(std::vector<uint64_t>(500, 9), 0.1, 3),
                      many = choose_validation(std::vector<uint64_t>(1000, 9), 0.1, 3);
    CHECK(std::equal(few.begin(), few.end(), many.begin()));
}

TEST_CASE("tokenize: a single document is cut") {
    TemporaryFolder folder;
    write_file(folder / "text", "0123456789");
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "text"};
    options.output = folder / "out";
    options.val_fraction = 0.3;
    tokenize(options);
    CHECK(documents_of(folder / "out_train_*.bin", 100) == std::vector<std::string>{"0123456"});
    CHECK(documents_of(folder / "out_val_*.bin", 100) == std::vector<std::string>{"789"});

    options.overwrite = true;
    options.val_fraction = 1e-6;
    tokenize(options);
    CHECK(documents_of(folder / "out_val_*.bin", 100) == std::vector<std::string>{"9"});

    options.val_fraction = 0;
    tokenize(options);
    CHECK(documents_of(folder / "out_train_*.bin", 100) == std::vector<std::string>{"0123456789"});
    CHECK(!fs::exists(folder / "out_val_000000.bin"));  // the older one is gone

    options.val_fraction = 0.5;
    write_file(folder / "text", "0");
    check_error(error_of([&] { tokenize(options); }), folder / "text", "too short to split");
}

TEST_CASE("tokenize: a fraction of 1 makes a validation set alone") {
    TemporaryFolder folder;
    write_file(folder / "a.txt", "first");
    write_file(folder / "b.jsonl", "{\"text\": \"second\"}\n{\"text\": \"third\"}\n");
    write_file(folder / "c.txt.gz", gzip("fourth"));
    std::vector<std::string> all = {"first", "second", "third", "fourth"};
    TokenizeOptions options = usual_options();
    options.output = folder / "out";
    options.val_fraction = 1;
    options.overwrite = true;
    write_file(folder / "out_train_000000.bin", "left from before");
    for (const std::vector<size_t>& taken : {std::vector<size_t>{0, 1, 2, 3}, {1, 2}, {0}, {3}}) {
        std::set<std::string> inputs;
        std::vector<std::string> wanted;
        for (size_t i : taken) {
            inputs.insert(folder / std::vector<std::string>{"a.txt", "b.jsonl", "b.jsonl", "c.txt.gz"}[i]);
            wanted.push_back(all[i]);
        }
        options.inputs.assign(inputs.begin(), inputs.end());
        tokenize(options);
        CHECK(documents_of(folder / "out_val_*.bin", 100) == wanted);
        CHECK(!fs::exists(folder / "out_train_000000.bin"));
        TokenRecord record = read_token_record(folder / "out.json").value();
        CHECK(record.train_tokens == 0);
        CHECK(record.documents == wanted.size());
    }
    for (uint64_t i = 0; i < 1000; i++) CHECK(validation_draw(1, i) < 1);
}

TEST_CASE("tokenize: bad inputs are one line and leave nothing") {
    TemporaryFolder folder;
    fs::create_directory(folder / "in");
    fs::create_directory(folder / "out");
    write_file(folder / "empty", "");
    write_file(folder / "text", "some text");
    TokenizeOptions options = usual_options();
    options.output = folder / "out/x";
    auto error = [&](std::vector<std::string> inputs) {
        options.inputs = std::move(inputs);
        return error_of([&] { tokenize(options); });
    };
    check_error(error({}), "the list of inputs", "has no text");
    check_error(error({folder / "in"}), folder / "in", "has no text");
    check_error(error({folder / "empty"}), folder / "empty", "has no text");
    check_error(error({folder / "text", folder / "none"}), folder / "none", "No such file");
    check_error(error({"/dev/null"}), "/dev/null", "neither a file nor a folder");
    fs::create_symlink("nowhere", folder / "broken");
    check_error(error({folder / "broken"}), folder / "broken", "No such file");
    check_error(error({"/proc/self/mem"}), "/proc/self/mem", "has no text");

    options.output = folder / "no/such/x";
    check_error(error({folder / "text"}), folder / "no/such/", "No such file or directory");
    options.output = folder / "out/x";
    options.shard_tokens = 4;
    if (geteuid() != 0) {
        write_file(folder / "secret", "x");
        fs::permissions(folder / "secret", fs::perms::none);
        check_error(error({folder / "text", folder / "secret"}), folder / "secret", "Permission denied");
        fs::create_directory(folder / "closed");
        fs::permissions(folder / "closed", fs::perms::none);
        check_error(error({folder / "text", folder / "closed"}), folder / "closed", "Permission denied");
        fs::permissions(folder / "closed", fs::perms::owner_all);
    }
    CHECK(fs::is_empty(folder / "out"));
}

TEST_CASE("tokenize: a full disk leaves nothing") {
    SmallDisk disk("256k");
    if (!disk.mounted) SKIP("a small tmpfs cannot be mounted here");
    TemporaryFolder folder;
    for (int i = 0; i < 20; i++) write_file(folder / text("%d.txt", i), std::string(20000, 'x'));
    TokenizeOptions options = usual_options();
    options.inputs = {folder.path};
    options.output = disk.folder / "out";
    options.shard_tokens = 10000;
    std::string error = error_of([&] { tokenize(options); });
    CHECK(error.starts_with(disk.folder / "out_"));
    CHECK(error.find("No space left") != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
    CHECK(disk.folder.files().empty());
}

// ----------------------------------------------------------------------------
// JSON lines, gzip, threads

static std::vector<std::string> sorted(std::vector<std::string> list) {
    std::sort(list.begin(), list.end());
    return list;
}

// Words of a made-up language, some of them frequent.
static std::string babble(const char* name, size_t size, const char* alphabet) {
    uint64_t key = random_key(5, name), at = 0;
    auto draw = [&](size_t bound) { return philox(key, at++).at[0] % bound; };
    std::vector<std::string> words(200);
    for (std::string& word : words) {
        for (size_t n = 1 + draw(8); n > 0; n--) word += alphabet[draw(strlen(alphabet))];
    }
    std::string text;
    while (text.size() < size) {
        text += words[std::min(draw(200), draw(200))];
        text += draw(12) == 0 ? (draw(3) ? ".\n" : ", ") : " ";
    }
    text.resize(size);
    return text;
}

TEST_CASE("tokenize: lines, compressed files and plain ones, the same with any number of threads") {
    TemporaryFolder folder;
    fs::create_directory(folder / "in");
    std::vector<std::string> all;
    auto lines = [&](int from, int to) {
        std::string content;
        for (int i = from; i < to; i++) {
            std::string document =
                i % 50 == 0 ? "" : text("line %d ", i) + babble("line", (size_t)i % 997, "abc");
            if (!document.empty()) all.push_back(document);
            content += nlohmann::json({{"body", document}, {"id", i}}).dump() + (i % 20 ? "\n" : "\r\n\n");
        }
        return content;
    };
    auto plain = [&](const std::string& name, size_t size) {
        all.push_back(babble(name.c_str(), size, "xyz"));
        return all.back();
    };
    write_file(folder / "in/a.jsonl", lines(1, 6000));
    write_file(folder / "in/b.jsonl.gz", gzip(lines(6000, 9000)));
    write_file(folder / "in/c.txt", plain("c", 3 << 20));
    write_file(folder / "in/d.txt.gz", gzip(plain("d", 5 << 20)));
    write_file(folder / "in/e", plain("e", 17));
    write_file(folder / "in/empty.gz", gzip(""));
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "in"};
    options.text_field = "body";
    options.shard_tokens = 2 << 20;
    options.val_fraction = 0.1;
    std::vector<std::string> train, val;
    for (int threads : {1, 2, 5}) {
        CAPTURE(threads);
        options.threads = threads;
        options.output = folder / text("out%d", threads);
        tokenize(options);
        if (threads == 1) {
            train = documents_of(options.output + "_train_*.bin", options.shard_tokens);
            val = documents_of(options.output + "_val_*.bin", options.shard_tokens);
            CHECK(std::abs((double)val.size() - 0.1 * (double)all.size()) < 0.02 * (double)all.size());
            std::vector<std::string> both = train;
            both.insert(both.end(), val.begin(), val.end());
            CHECK((sorted(both) == sorted(all)));
            // documents keep their order within each split
            auto next = all.begin();
            for (const std::string& document : train) {
                next = std::find(next, all.end(), document);
                REQUIRE((next != all.end()));
            }
            continue;
        }
        for (const char* split : {"train", "val"}) {
            std::vector<std::string> files = files_named(options.output + "_" + split + "_*.bin");
            CHECK(files.size() == files_named(folder / ("out1_" + std::string(split) + "_*.bin")).size());
            for (const std::string& file : files) {
                std::string first = folder / ("out1" + file.substr(options.output.size()));
                CHECK((contents(file) == contents(first)));
            }
        }
    }
    CHECK(files_named(folder / "out1_train_*.bin").size() > 2);
}

TEST_CASE("tokenize: damaged lines and cut files leave nothing, and are named whatever the threads") {
    TemporaryFolder folder;
    fs::create_directory(folder / "out");
    std::string content;
    for (int i = 1; i <= 30000; i++) {
        bool bad = i == 12345 || i == 12346 || i == 29000;
        content += bad ? "{\"text\": 1}\n" : "{\"text\": \"" + std::string(100, 'x') + "\"}\n";
    }
    write_file(folder / "x.jsonl", content);
    std::string compressed = gzip(content);
    write_file(folder / "x.jsonl.gz", compressed.substr(0, compressed.size() - 5));
    write_file(folder / "y.gz", compressed.substr(0, compressed.size() - 5));
    write_file(folder / "text", "some text");
    TokenizeOptions options = usual_options();
    options.output = folder / "out/x";
    for (int threads : {1, 4}) {
        options.threads = threads;
        for (int vocabulary : {0, 300}) {
            options.train_tokenizer = vocabulary;
            options.inputs = {folder / "text", folder / "x.jsonl"};
            check_error(error_of([&] { tokenize(options); }), folder / "x.jsonl:12345", "is not a string");
            options.inputs = {folder / "text", folder / "y.gz"};
            check_error(error_of([&] { tokenize(options); }), folder / "y.gz", "cut short");
            options.inputs = {folder / "y.gz"};
            check_error(error_of([&] { tokenize(options); }), folder / "y.gz", "cut short");
            CHECK(fs::is_empty(folder / "out"));
        }
    }
    options.train_tokenizer = 0;
    write_file(folder / "blank.jsonl", "\n \n{\"text\": \"\"}\n");
    options.inputs = {folder / "blank.jsonl"};
    check_error(error_of([&] { tokenize(options); }), folder / "blank.jsonl", "has no text");
    CHECK(fs::is_empty(folder / "out"));
}

// Runs the command and returns all that it prints.
static std::string printed(const TokenizeOptions& options) {
    TemporaryFolder folder;
    fflush(stdout);
    FileHandle before(dup(STDOUT_FILENO)), file = open_file(folder / "printed", O_WRONLY | O_CREAT);
    dup2(file.get(), STDOUT_FILENO);
    std::string error = error_of([&] { tokenize(options); });
    fflush(stdout);
    dup2(before.get(), STDOUT_FILENO);
    return contents(folder / "printed") + error;
}

static bool has(const std::string& text, const std::string& words) {
    CAPTURE(text);
    CAPTURE(words);
    CHECK(text.find(words) != text.npos);
    return text.find(words) != text.npos;
}

TEST_CASE("tokenize: bad lines are skipped, counted and named, whatever the threads") {
    TemporaryFolder folder;
    std::string path = folder / "x.jsonl", good = "good" + std::string(150, '.'), content;
    for (int i = 1; i <= 9000; i++) {
        content += i == 12     ? R"({"text": null})"
                   : i == 77   ? R"({"id": 7, "text": "half)"
                   : i == 3000 ? R"({"id": 7})"
                   : i > 8000  ? R"({"text": "\ud800", "n": NaN})"
                               : "{\"text\": \"" + good + "\", \"n\": -Infinity}";
        content += "\n";
        if (i == 7000) {
            for (int line = 0; line < 300; line++) content += "bad\n";
        }
    }
    write_file(path, content);
    TokenizeOptions options = usual_options();
    options.inputs = {path};
    options.output = folder / "out";
    options.overwrite = true;
    options.val_fraction = 0;
    for (int threads : {1, 4}) {
        options.threads = threads;
        for (auto [allowed, line] : {std::pair(0, 12), {1, 77}, {2, 3000}, {3, 7001}, {52, 7050}}) {
            options.skip_bad = allowed;
            std::string error = error_of([&] { tokenize(options); });
            check_error(error, path + ":" + std::to_string(line),
                        allowed ? text(", or raise --skip-bad %d", allowed) : ", or skip such lines with");
        }
        options.skip_bad = 302;
        CHECK(error_of([&] { tokenize(options); }).starts_with(path + ":7100: "));
        options.skip_bad = 303;
        std::string told = printed(options);
        has(told, "skipped, bad lines: 303 (" + path + ":12: the field \"text\" is not a string, " + path +
                      ":77: is not valid JSON at byte 24 of the line, " + path +
                      ":3000: has no field \"text\", ...)\n");
        has(told, "1000 lone surrogates (");
        has(told, "8997 documents, ");
        std::vector<std::string> documents = documents_of(folder / "out_train_*.bin", options.shard_tokens);
        CHECK(documents.size() == 8997);
        CHECK(documents.front() == good);
        CHECK(documents.back() == "\xef\xbf\xbd");
    }
}

TEST_CASE("tokenize: a usual split that leaves little for validation is told") {
    TemporaryFolder folder;
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "text"};
    options.output = folder / "out";
    options.overwrite = true;
    const char* note = " tokens are for validation, so the loss is noisy; reserve more with a larger --val-";
    write_file(folder / "text", std::string(1999700, 'x'));
    has(printed(options), std::string("note: only 19998") + note);
    write_file(folder / "text", std::string(2000000, 'x'));
    CHECK(printed(options).find(note) == std::string::npos);
    options.val_fraction = 0.001;  // the user asked for it
    CHECK(printed(options).find(note) == std::string::npos);
}

// Calls run() with a pipe as standard input: a thread writes `content`, calls before_end(), and closes it.
static std::string with_input(
    const std::string& content, const std::function<std::string()>& run,
    const std::function<void()>& before_end = [] {}) {
    FileHandle before(dup(STDIN_FILENO));
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    dup2(ends[0], STDIN_FILENO);
    close(ends[0]);
    std::thread writer([&] {
        for (size_t at = 0; at < content.size(); at += 5000) {
            size_t size = std::min<size_t>(5000, content.size() - at);
            if (write(ends[1], content.data() + at, size) != (ssize_t)size) break;
        }
        before_end();
        close(ends[1]);
    });
    std::string result = run();
    dup2(before.get(), STDIN_FILENO);
    writer.join();
    return result;
}

TEST_CASE("tokenize: standard input, plain and compressed, as from files") {
    TemporaryFolder folder;
    fs::create_directory(folder / "out");
    std::string lines, plain = babble("plain", 300000, "abc \n");
    for (int i = 0; i < 3000; i++)
        lines +=
            nlohmann::json({{"text", text("line %d ", i) + babble("x", 100 + i % 7, "xyz")}}).dump() + "\n";
    write_file(folder / "more.txt", "a file beside it");
    TokenizeOptions options = usual_options();
    options.overwrite = true;
    options.threads = 3;
    auto tokens = [&] {
        return contents(options.output + "_train_000000.bin") + contents(options.output + "_val_000000.bin");
    };
    const char* as_lines = "standard input is treated as JSON lines\n";
    const char* as_one = "standard input is treated as one document";
    const struct {
        const char* name;
        std::string content;
        const char* told;
    } rows[] = {{"a.jsonl", lines, as_lines},
                {"a.jsonl.gz", gzip(lines), as_lines},
                {"b.jsonl", "\xef\xbb\xbf { \"text\": \"one\"}\n{\"text\": \"two\"}", as_lines},
                {"c.txt", plain, as_one},
                {"c.txt.gz", gzip(plain), as_one},
                {"d.txt", "{\n \"text\": \"no lines\"\n}", as_one}};
    for (const auto& row : rows) {
        CAPTURE(row.name);
        options.output = folder / "out/x";
        write_file(folder / row.name, row.content);
        options.inputs = {folder / row.name, folder / "more.txt"};
        tokenize(options);
        std::string wanted = tokens();
        options.inputs = {"-", folder / "more.txt", "-"};
        has(with_input(row.content, [&] { return printed(options); }), row.told);
        CHECK((tokens() == wanted));
    }
    // a single document alone is cut, and errors name the input
    options.inputs = {"-"};
    options.val_fraction = 0.3;
    has(with_input("0123456789", [&] { return printed(options); }), "its last 3 tokens are for validation");
    CHECK(documents_of(folder / "out/x_val_*.bin", 100) == std::vector<std::string>{"789"});
    auto error = [&](const std::string& content) {
        return with_input(content, [&] { return error_of([&] { tokenize(options); }); });
    };
    fs::create_directory(folder / "none");
    options.output = folder / "none/x";
    check_error(error(""), "-", "has no text");
    check_error(error("{\"text\": \"a\"}\n{\"text\": 1}"), "standard input:2", "is not a string");
    check_error(error(gzip(plain).substr(0, 50000)), "standard input", "cut short");
    check_error(error("BZh91AY&SY"), "standard input", "is packed with bzip2");
    CHECK(fs::is_empty(folder / "none"));
    // If it is interrupted while it waits for input, or when the input ends, it leaves no files.
    for (bool silent : {true, false}) {
        std::atomic<bool> ended = false;
        auto run = [&] {
            std::string error = error_of([&] { tokenize(options); });
            ended = true;
            return error;
        };
        auto interrupt = [&] {
            kill(getpid(), SIGTERM);
            for (int i = 0; silent && i < 50 && !ended; i++) usleep(100000);
            CHECK(ended >= silent);
        };
        check_error(with_input(lines, run, interrupt), "tokenize", "interrupted");
        stop_requested = 0;
    }
    CHECK(fs::is_empty(folder / "none"));

    ProgressLine known("tokenize", 4e6), unknown("tokenize", 0);
    known.add(1e6), unknown.add(3e6);
    CHECK(known.words(2) == "tokenize:  25% of 4 MB, 0 MB/s, 6 s left");
    CHECK(unknown.words(2) == "tokenize: 3 MB, 2 MB/s");
}

TEST_CASE("tokenize: a single line, or a single compressed file, is cut") {
    TemporaryFolder folder;
    TokenizeOptions options = usual_options();
    options.output = folder / "out";
    options.val_fraction = 0.3;
    options.overwrite = true;
    write_file(folder / "x.jsonl", "\n{\"text\": \"0123456789\"}\n\n");
    write_file(folder / "x.gz", gzip("0123456789"));
    for (const char* name : {"x.jsonl", "x.gz"}) {
        options.inputs = {folder / name};
        tokenize(options);
        CHECK(documents_of(folder / "out_train_*.bin", 100) == std::vector<std::string>{"0123456"});
        CHECK(documents_of(folder / "out_val_*.bin", 100) == std::vector<std::string>{"789"});
    }
    write_file(folder / "x.jsonl", "{\"text\": \"0\"}");
    write_file(folder / "x.gz", gzip("0"));
    for (const char* name : {"x.jsonl", "x.gz"}) {
        options.inputs = {folder / name};
        check_error(error_of([&] { tokenize(options); }), folder / name, "too short to split");
    }
}

// ----------------------------------------------------------------------------
// the split

TEST_CASE("document split: the same for any parts, and both kinds where there are two documents") {
    TemporaryFolder folder;
    uint64_t key = random_key(6, "split"), at = 0;
    auto draw = [&](size_t bound) { return philox(key, at++).at[0] % bound; };
    std::set<size_t> validation_sizes;
    for (int round = 0; round < 100; round++) {
        CAPTURE(round);
        size_t count = 2 + draw(20), most_held = draw(2) ? 1 << 20 : draw(100);
        double fraction = draw(2) ? 0.02 : 0.9;
        std::vector<std::string> documents(count);
        for (size_t i = 0; i < count; i++) documents[i] = text("%zu:", i) + std::string(draw(30), 'x');
        std::vector<std::string> results[2];
        for (int time = 0; time < 2; time++) {
            std::string output = folder / text("%d.%d", round, time);
            DocumentSplitter splitter({output, 257, 256, 1000, fraction, (uint64_t)round, {}, most_held});
            for (const std::string& document : documents) {
                if (draw(3) == 0) splitter.add(nullptr, 0, true);  // an empty one
                std::vector<int> tokens(document.begin(), document.end());
                // The second time in random parts, except with a small memory, which would then fill up
                // elsewhere.
                size_t done = 0;
                while (time == 1 && most_held > 100 && draw(3) && done < tokens.size()) {
                    size_t n = draw(tokens.size() - done);
                    splitter.add(tokens.data() + done, n, false);
                    done += n;
                }
                splitter.add(tokens.data() + done, tokens.size() - done, true);
            }
            CHECK(splitter.documents() == count);
            splitter.finish("x");
            splitter.commit({});
            std::vector<std::string> train = documents_of(output + "_train_*.bin", 1000);
            std::vector<std::string> val = documents_of(output + "_val_*.bin", 1000);
            CHECK(train.size() + val.size() == count);
            std::vector<uint64_t> sizes;
            for (const std::string& document : documents) sizes.push_back(document.size() + 1);
            std::vector<bool> chosen = choose_validation(sizes, fraction, (uint64_t)round);
            size_t in_val = 0, by_hash = 0;
            for (size_t i = 0; i < count; i++) {
                bool is_val = std::find(val.begin(), val.end(), documents[i]) != val.end();
                CHECK(is_val != (std::find(train.begin(), train.end(), documents[i]) != train.end()));
                in_val += is_val;
                by_hash += is_val == (validation_draw((uint64_t)round, i) < fraction);
                if (most_held > 100) CHECK(is_val == chosen[i]);
            }
            CHECK(by_hash + (most_held > 100 ? 1 : 2) >= count);  // one or two move if a split would be empty
            validation_sizes.insert(in_val);
            results[time] = val;
        }
        CHECK(results[0] == results[1]);
    }
    CHECK(validation_sizes.size() > 5);
}

TEST_CASE("document split: a document larger than what is held goes to training at once") {
    TemporaryFolder folder;
    std::vector<int> large(1000, 'a'), small(5, 'b');
    for (bool more : {true, false}) {
        DocumentSplitter splitter({folder / "x", 257, 256, 1 << 20, 0.01, 1, {}, 100});
        for (size_t i = 0; i < large.size(); i += 50)
            splitter.add(large.data() + i, 50, i + 50 == large.size());
        if (more) splitter.add(small.data(), small.size(), true);
        if (!more) {
            check_error(error_of([&] { splitter.finish("file"); }), "file",
                        "single document of more than 100");
            continue;
        }
        splitter.finish("file");
        splitter.commit({});
        CHECK(documents_of(folder / "x_train_*.bin", 1 << 20) ==
              std::vector<std::string>{std::string(1000, 'a')});
        CHECK(documents_of(folder / "x_val_*.bin", 1 << 20) == std::vector<std::string>{"bbbbb"});
    }
}

// ----------------------------------------------------------------------------
// tokenizers

static std::vector<int> tokens_of(const std::string& pattern, int vocab) {
    std::vector<int> tokens;
    for (const std::string& file : files_named(pattern)) {
        std::vector<int> shard = all_tokens(file, vocab);
        tokens.insert(tokens.end(), shard.begin(), shard.end());
    }
    return tokens;
}

TEST_CASE("tokenize: with a tokenizer.json, a long text in parts as in one") {
    TemporaryFolder folder;
    std::string text = babble("long", 5 << 20, "abcdefg  '12\n\t");
    write_file(folder / "text", text);
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "text"};
    options.output = folder / "out";
    options.val_fraction = 0;
    options.overwrite = true;
    options.threads = 3;
    for (const std::string name : {"gpt2", "llama3", "qwen"}) {
        CAPTURE(name);
        options.tokenizer = "test/golden/tokenizers/" + name + ".json";
        Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
        // Qwen's tokenizer has an added token that takes the space before it, so no cut is safe.
        CHECK((tokenizer.cut_place(std::string_view(text).substr(0, 1 << 20)) > 0) == (name != "qwen"));
        tokenize(options);
        std::vector<int> wanted = tokenizer.encode(text);
        wanted.push_back(tokenizer.end_of_text());
        CHECK((tokens_of(folder / "out_train_*.bin", tokenizer.vocab_size()) == wanted));
    }
}

TEST_CASE("tokenize: a tokenizer is trained, written and used") {
    TemporaryFolder folder;
    fs::create_directory(folder / "in");
    std::string lines;
    std::vector<std::string> all;
    for (int i = 0; i < 300; i++) {
        all.push_back(babble(text("%d", i).c_str(), 500, "abcdefghij"));
        lines += nlohmann::json({{"text", all.back()}}).dump() + "\n";
    }
    write_file(folder / "in/x.jsonl", lines);
    all.push_back(babble("plain", 3 << 20, "klmnop<|endoftext|>"));
    all.back() += "<|endoftext|>";  // plain text here, not a special token
    write_file(folder / "in/y.txt", all.back());
    for (auto rules : {PreTokenizerRules::gpt2, PreTokenizerRules::llama3, PreTokenizerRules::qwen}) {
        INFO(name_of(rules));
        TokenizeOptions options = usual_options();
        options.inputs = {folder / "in", folder.path};  // also holds the tokenizer, once it is written
        if (rules != PreTokenizerRules::gpt2) options.inputs.pop_back();
        options.output = folder / name_of(rules);
        options.val_fraction = 0.1;
        options.threads = 2;
        options.train_tokenizer = 1000;
        options.pre_tokenizer = rules;
        tokenize(options);

        std::string file = options.output + "_tokenizer.json";
        Tokenizer tokenizer = Tokenizer::load(file);
        CHECK(tokenizer.vocab_size() == 1000);
        CHECK(tokenizer.end_of_text() == 999);
        CHECK(tokenizer.token_bytes(999) == "<|endoftext|>");
        std::vector<std::string> found;
        size_t count = 0, bytes = 0;
        for (const char* split : {"_train_*.bin", "_val_*.bin"}) {
            std::vector<int> document;
            for (int token : tokens_of(options.output + split, 1000)) {
                document.push_back(token);
                count++;
                if (token != 999) continue;
                document.pop_back();
                found.push_back(tokenizer.decode(document));
                CHECK((tokenizer.encode(found.back()) == document));
                document.clear();
            }
            CHECK(document.empty());
        }
        for (const std::string& document : all) bytes += document.size();
        CHECK((sorted(found) == sorted(all)));
        CHECK(count < bytes / 2);

        // The file itself says how words are cut: used as it is, it gives the same shards.
        std::string json = contents(file), shard = contents(options.output + "_train_000000.bin");
        check_error(error_of([&] { tokenize(options); }), options.output + "_train_000000.bin",
                    "already exists");
        options.train_tokenizer = 0;
        options.tokenizer = file;
        options.overwrite = true;
        tokenize(options);
        CHECK((contents(options.output + "_train_000000.bin") == shard));
        CHECK((contents(file) == json));
        options.train_tokenizer = 1000;
        options.tokenizer = "bytes";
        options.threads = 5;
        tokenize(options);
        CHECK((contents(options.output + "_train_000000.bin") == shard));
        CHECK((contents(file) == json));

        for (const auto& entry : fs::directory_iterator(folder.path)) {
            std::string name = entry.path().filename();
            if (name.find("_train_") != name.npos || name.find("_val_") != name.npos)
                fs::remove(entry.path());
        }
        options.overwrite = false;
        check_error(error_of([&] { tokenize(options); }), file, "already exists");
        CHECK((contents(file) == json));
    }
}

TEST_CASE("tokenize: what is not replaced stays, and what the tokens were made with is recorded") {
    TemporaryFolder folder;
    fs::create_directories(folder / "in");
    for (int i = 0; i < 9; i++) write_file(folder / text("in/%d.txt", i), text("text number %d", i));
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "in"};
    options.output = folder / "in/x";  // so the output is written among the input
    options.train_tokenizer = 300;
    tokenize(options);
    std::string file = folder / "in/x_tokenizer.json", json = contents(file);
    TokenRecord record = read_token_record(folder / "in/x.json").value();
    Tokenizer trained = Tokenizer::load(file);
    CHECK(record.tokenizer == file);
    CHECK(record.fingerprint == tokenizer_fingerprint(trained));
    CHECK(record.document_end == trained.end_of_text());
    CHECK(record.vocab_size == trained.vocab_size());
    CHECK(record.documents == 9);
    CHECK(record.bytes == 9 * 13);
    CHECK(record.train_tokens == all_tokens(folder / "in/x_train_000000.bin", 300).size());
    CHECK(record.val_tokens == all_tokens(folder / "in/x_val_000000.bin", 300).size());

    options.train_tokenizer = 0;  // now the tokens are bytes
    options.overwrite = true;
    tokenize(options);
    CHECK(contents(file) == json);
    record = read_token_record(folder / "in/x.json").value();
    CHECK(record.tokenizer == "bytes");
    CHECK(record.documents == 9);
    CHECK(record.fingerprint == tokenizer_fingerprint(Tokenizer()));

    write_file(folder / "in/x.json", "{\"text\": \"not a record\"}");
    check_error(error_of([&] { tokenize(options); }), folder / "in/x.json", "is not a token record");
    CHECK(contents(folder / "in/x.json").ends_with("not a record\"}"));
}

TEST_CASE("the record of a shard has the beginning of its name") {
    CHECK(record_of_shard("a/b_train_000000.bin") == "a/b.json");
    CHECK(record_of_shard("b_val_12.bin") == "b.json");
    CHECK(record_of_shard("a_train_b_val_000001.bin") == "a_train_b.json");
    for (const char* other :
         {"a/b_train_.bin", "b_test_000000.bin", "000000.bin", "a_train_000000.idx", "", "a.bin"})
        CHECK(record_of_shard(other) == "");
}

TEST_CASE("a tokenizer has one fingerprint, from whichever file it comes") {
    TemporaryFolder folder;
    std::set<std::string> all = {tokenizer_fingerprint(Tokenizer())};
    size_t count = 1;
    for (const auto& entry : fs::directory_iterator("test/golden/tokenizers")) {
        if (entry.path().extension() != ".json" || entry.path().stem() == "ids") continue;
        Tokenizer first = Tokenizer::load(entry.path());
        first.write(folder / "tokenizer.json");
        CHECK(tokenizer_fingerprint(Tokenizer::load(folder.path)) == tokenizer_fingerprint(first));
        all.insert(tokenizer_fingerprint(first));
        count++;
    }
    CHECK(count > 3);
    CHECK(all.size() == count);
    // parts of the file that do not affect the encoding of text make no difference
    nlohmann::json json = nlohmann::json::parse(contents("test/golden/tokenizers/gpt2.json"));
    std::string before = tokenizer_fingerprint(Tokenizer::load("test/golden/tokenizers/gpt2.json"));
    auto changed = [&] {
        write_file(folder / "tokenizer.json", json.dump());
        return tokenizer_fingerprint(Tokenizer::load(folder.path));
    };
    CHECK(changed() == before);
    json["post_processor"] = nullptr;
    CHECK(changed() == before);
    json["model"]["merges"].erase(json["model"]["merges"].size() - 1);
    CHECK(changed() != before);
}

TEST_CASE("characters newer than the Unicode of patterns are counted") {
    std::map<int32_t, uint64_t> unknown;
    count_unknown("plain, \u00e9\u4e2d\U0001f600 \xff\xe4\xb8", unknown);
    count_unknown("\ufffe\ufdd0\U0010ffff", unknown);  // noncharacters, which are never assigned
    CHECK(unknown.empty());
    count_unknown("a\U00050000b\U00050001", unknown);  // plane 5 has no characters
    count_unknown("\U00050000", unknown);
    CHECK(unknown == std::map<int32_t, uint64_t>{{0x50000, 2}, {0x50001, 1}});
}

TEST_CASE("token files are used as they were made") {
    TemporaryFolder folder;
    write_file(folder / "a_train_000000.bin", shard_bytes(std::vector<uint16_t>{1, 2, 256, 3, 4, 256}));
    write_file(folder / "foreign.bin", shard_bytes(std::vector<uint16_t>{1, 2, 3, 4, 5, 6}));
    TokenRecord record = {.tokenizer = "bytes",
                          .fingerprint = tokenizer_fingerprint(Tokenizer()),
                          .vocab_size = 257,
                          .document_end = 256};
    write_file(folder / "a.json", token_record_text(record));
    Tokenizer bytes, other = Tokenizer::load("test/golden/tokenizers/gpt2.json");
    auto check = [&](const char* files, const Tokenizer* tokenizer, int document_end) {
        return check_token_records(TokenLoader(folder / files, 300, 2, SampleOrder::sequential), tokenizer,
                                   document_end);
    };
    CHECK(check("a_train_000000.bin", &bytes, 256).empty());
    CHECK(check("*.bin", nullptr, -1).empty());
    CHECK_REFUSED(check("*.bin", &other, -1), "a_train_000000.bin: was made with the tokenizer bytes, but ");
    TokenRecord of_file = record;
    auto refuses = [&](const std::string& unicode) {
        of_file.fingerprint = tokenizer_fingerprint(other, unicode);
        std::string shard = folder / "a_train_000000.bin", error;
        note_error(error, [&] { check_token_record(shard, of_file, &other, -1); });
        return error.find("used a Unicode version other than") != error.npos;
    };
    CHECK(!refuses(pattern_unicode()));
    CHECK(!refuses(""));  // older records lack it
    CHECK(refuses("9.0.0"));
    REQUIRE(check("*.bin", nullptr, 4).size() == 1);
    CHECK(check("*.bin", nullptr, 4)[0].find(
              "a_train_000000.bin: its documents end with token 256 of the tokenizer bytes") ==
          folder.path.size() + 1);
    // other files are known only by their content
    CHECK(check("foreign.bin", &other, 4).empty());
    REQUIRE(check("foreign.bin", &bytes, 256).size() == 1);
    CHECK(check("foreign.bin", &bytes, 256)[0].find("foreign.bin: token 256, which ends documents, is not") ==
          folder.path.size() + 1);
    write_file(folder / "a.json", "{\"train_gpt_tokens\":2}");
    CHECK_REFUSED(check("a_train_000000.bin", &bytes, 256),
                  "a.json: has version 2, but only 1 is supported; ");
    write_file(folder / "a.json", "{\"train_gpt_tokens\":1}");
    CHECK_REFUSED(check("a_train_000000.bin", &bytes, 256), "a.json: tokenizer: is not a string; ");
    write_file(folder / "a.json", "{}");
    CHECK(check("a_train_000000.bin", &other, -1).empty());
}

TEST_CASE("tokenize: tokenizers that do not serve") {
    TemporaryFolder folder;
    fs::create_directory(folder / "out");
    write_file(folder / "text", babble("text", 10000, "abcdef"));
    TokenizeOptions options = usual_options();
    options.inputs = {folder / "text"};
    options.output = folder / "out/x";
    auto error = [&] { return error_of([&] { tokenize(options); }); };
    for (int size : {1, 256}) {
        options.train_tokenizer = size;
        check_error(error(), text("--train-tokenizer %d", size), "too few");
    }
    options.train_tokenizer = 300;
    options.pre_tokenizer = PreTokenizerRules::gpt2;
    {
        NewFile other(folder / "out/x_tokenizer.json");  // another run is still writing it
        check_error(error(), folder / "out/x_tokenizer.json", "another process");
        CHECK(fs::exists(folder / "out/x_tokenizer.json.partial"));
    }
    CHECK(fs::is_empty(folder / "out"));

    // A tokenizer without an end of text.
    options.train_tokenizer = 0;
    nlohmann::json json = nlohmann::json::parse(contents("test/golden/tokenizers/gpt2.json"));
    for (auto& token : json["added_tokens"]) token["special"] = false;
    write_file(folder / "other.json", json.dump());
    options.tokenizer = folder / "other.json";
    check_error(error(), "--tokenizer " + options.tokenizer, "no token that ends a document");
    options.tokenizer = folder / "absent.json";
    check_error(error(), options.tokenizer, "No such file");
    CHECK(fs::is_empty(folder / "out"));

    // A text with too few pairs gives a smaller vocabulary.
    options.tokenizer = "bytes";
    options.train_tokenizer = 5000;
    write_file(folder / "text", "abab abab");
    tokenize(options);
    Tokenizer tokenizer = Tokenizer::load(folder / "out/x_tokenizer.json");
    CHECK(tokenizer.vocab_size() == 256 + 2 + 1);
    CHECK(tokenizer.end_of_text() == 258);
}

TEST_CASE("tokenizer training: learns from so much text, spread over all of it") {
    TemporaryFolder folder;
    // Each part of the text has letters of its own.
    const char* languages[] = {"abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx"};
    std::string first, lines;
    for (int i = 0; i < 3; i++) first += babble(languages[i], 4 << 20, languages[i]);
    for (int i = 3; i < 5; i++) {
        std::string text = babble(languages[i], 4 << 20, languages[i]);
        for (size_t at = 0; at < text.size(); at += 1000)
            lines +=
                nlohmann::json({{"text", text.substr(at, 1000)}, {"zz", "zzzzzzzzzzzzzzzz"}}).dump() + "\n";
    }
    write_file(folder / "a", first);
    write_file(folder / "b.jsonl", lines);
    write_file(folder / "c.gz", gzip(babble(languages[5], 4 << 20, languages[5])));
    DocumentSearch search;
    search.add(folder.path);
    for (uint64_t most : {300ull << 10, 2ull << 20, 1ull << 40}) {
        CAPTURE(most);
        auto all_words = [](std::string_view text, const std::function<void(std::string_view)>& word) {
            word(text);
        };
        std::vector<FilePart> parts = spread_parts(search.files, most);
        WordCounter words(all_words, 1);
        TokenizerTraining options;
        options.most_text = most;
        TrainingText training(words, options);
        for (const FilePart& part : parts) {
            TextInput input(*part.file);
            training.add(part, input);
        }
        WordCounts counts = words.finish();
        uint64_t letters[6] = {}, bytes = 0, strange = 0;
        for (const WordCounts::Entry& entry : counts.entries()) {
            bytes += entry.count * entry.length;
            for (char c : counts.text_of(entry)) {
                if (c >= 'a' && c <= 'x') letters[(c - 'a') / 4] += entry.count;
                strange += c == 'z' || c == '{';
            }
        }
        CHECK(bytes == training.bytes());
        CHECK(strange == 0);
        if (most > 100 << 20) {
            CHECK(bytes == (24 << 20));
            continue;
        }
        CHECK(bytes <= most);
        CHECK(bytes > most * 6 / 10);
        for (uint64_t language : letters) CHECK(language > bytes / 40);
    }
    // Parts begin at line starts.
    std::string numbered;
    for (int i = 0; i < 300000; i++) numbered += text("line %d\n", i);
    write_file(folder / "numbered", numbered);
    DocumentSearch search_numbered;
    search_numbered.add(folder / "numbered");
    size_t lines_found = 0;
    auto check_line = [&](std::string_view part, const std::function<void(std::string_view)>&) {
        lines_found += part.starts_with("line ");
    };
    WordCounter words(check_line, 1), more_words(check_line, 1);
    TokenizerTraining options;
    options.most_text = 300 << 10;
    TrainingText training(words, options);
    std::vector<FilePart> numbered_parts = spread_parts(search_numbered.files, options.most_text);
    for (const FilePart& part : numbered_parts) {
        TextInput input(*part.file);
        training.add(part, input);
    }
    words.finish();
    CHECK(numbered_parts.size() == 5);
    CHECK(lines_found == numbered_parts.size());
    // Compressed text may expand to much more than expected.
    std::string repeated;
    for (int i = 0; i < 1000000; i++) repeated += "abc\n";
    write_file(folder / "repeated.gz", gzip(repeated));
    DocumentSearch search_repeated;
    search_repeated.add(folder / "repeated.gz");
    TrainingText repeated_training(more_words, options);
    for (const FilePart& part : spread_parts(search_repeated.files, options.most_text)) {
        TextInput input(*part.file);
        repeated_training.add(part, input);
    }
    CHECK(repeated_training.bytes() == options.most_text);
    // Many small files: some are used whole.
    std::vector<TextFile> small(1000, {"x", 5000, false, false});
    std::vector<FilePart> parts = spread_parts(small, 500000);
    CHECK(std::abs((double)parts.size() - 100) < 5);
    CHECK(parts.back().file > &small[950]);
    // A large file: parts of about a megabyte, none beyond its end.
    std::vector<TextFile> large = {{"x", 100ull << 30, false, false}};
    parts = spread_parts(large, 1 << 30);
    CHECK(parts.size() == 1024);
    for (size_t i = 0; i < parts.size(); i++) {
        CHECK(parts[i].begin == i * (100ull << 20));
        CHECK(parts[i].bytes == 1 << 20);
    }
}
