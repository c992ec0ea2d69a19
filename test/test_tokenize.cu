// The byte tokenizer and the tokenize subcommand.
#include "test/file_testing.h"

#include <cmath>
#include <set>

#include "data/tokenize.h"
#include "data/tokenizer.h"

TEST_CASE("tokenizer: any bytes come back") {
    std::string bytes(10000, '\0');
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = (char)philox(2, i).at[0];
    std::vector<int> tokens = ByteTokenizer::encode(bytes);
    CHECK(tokens.size() == bytes.size());
    CHECK(*std::min_element(tokens.begin(), tokens.end()) == 0);
    CHECK(*std::max_element(tokens.begin(), tokens.end()) == 255);
    CHECK(ByteTokenizer::decode(tokens) == bytes);
    CHECK(ByteTokenizer::encode("Aé") == std::vector<int>{65, 0xc3, 0xa9});
    CHECK(ByteTokenizer::decode({72, 105, 256}) == "Hi<|endoftext|>");
    CHECK(ByteTokenizer::encode("<|endoftext|>").size() == 13);  // text cannot end a document
    check_error(error_of([] { ByteTokenizer::decode(257); }), "token 257", "outside the vocabulary");
    check_error(error_of([] { ByteTokenizer::decode(-1); }), "token -1", "outside the vocabulary");
}

// The documents of all shards of a split, and a check of how the shards are filled.
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
    fs::create_symlink(folder / "in/a.txt", folder / "in/b/again");     // the same file a second time
    fs::create_symlink("nowhere", folder / "in/b/broken");
    REQUIRE(mkfifo((folder / "in/pipe").c_str(), 0600) == 0);
    TokenizeOptions options;
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

    // Nothing is overwritten unasked; asked, the result is the same, and a longer older series does not
    // survive.
    check_error(error_of([&] { tokenize(options); }), folder / "out_train_000000.bin", "exists already");
    write_file(folder / "out_train_000099.bin", "left from before");
    write_file(folder / "out_val_000001.bin.partial", "left from before");
    write_file(folder / "out_train_mine.bin", "of another kind");
    options.overwrite = true;
    options.inputs.push_back(folder / "out_train_000000.bin");  // its own output is no input
    tokenize(options);
    CHECK(documents_of(folder / "out_train_0*.bin", options.shard_tokens) == train);
    CHECK(documents_of(folder / "out_val_*.bin", options.shard_tokens) == val);
    CHECK(!fs::exists(folder / "out_train_000099.bin"));
    CHECK(!fs::exists(folder / "out_val_000001.bin.partial"));
    CHECK(fs::exists(folder / "out_train_mine.bin"));

    // What an interrupted run left is no result that could be lost.
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
        std::vector<bool> choice = choose_validation(documents, fraction, seed);
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
    // More documents leave the earlier choices as they are.
    std::vector<bool> few = choose_validation(500, 0.1, 3), many = choose_validation(1000, 0.1, 3);
    CHECK(std::equal(few.begin(), few.end(), many.begin()));
}

TEST_CASE("tokenize: a single document is cut") {
    TemporaryFolder folder;
    write_file(folder / "text", "0123456789");
    TokenizeOptions options;
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
    CHECK(!fs::exists(folder / "out_val_000000.bin"));  // not left from before

    options.val_fraction = 0.5;
    write_file(folder / "text", "0");
    check_error(error_of([&] { tokenize(options); }), folder / "text", "too short to split");
}

TEST_CASE("tokenize: bad inputs are one line and leave nothing") {
    TemporaryFolder folder;
    fs::create_directory(folder / "in");
    fs::create_directory(folder / "out");
    write_file(folder / "empty", "");
    write_file(folder / "text", "some text");
    TokenizeOptions options;
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
    for (double fraction : {-0.1, 1.0, (double)NAN}) {
        options.val_fraction = fraction;
        CHECK(error({folder / "text"}).starts_with("--val-fraction"));
    }
    options.val_fraction = 0.1;
    for (int64_t size : {int64_t(0), int64_t(-1), int64_t(1) << 31}) {
        options.shard_tokens = size;
        CHECK(error({folder / "text"}).starts_with("--shard-tokens"));
    }
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
    if (!disk.mounted) return;
    TemporaryFolder folder;
    for (int i = 0; i < 20; i++) write_file(folder / text("%d.txt", i), std::string(20000, 'x'));
    TokenizeOptions options;
    options.inputs = {folder.path};
    options.output = disk.folder / "out";
    options.shard_tokens = 10000;
    std::string error = error_of([&] { tokenize(options); });
    CHECK(error.starts_with(disk.folder / "out_"));
    CHECK(error.find("No space left") != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
    CHECK(disk.folder.files().empty());
}
