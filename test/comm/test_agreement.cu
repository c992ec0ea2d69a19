// Ranks compare their inputs. Runs under `mpirun -np N build/cpu-fp32/test_agreement`, for any N, and without
// mpirun.
// devices: cpu
// ranks: 2 1 4
#include "test/support/file_testing.h"

#include "comm/agreement.h"
#include "test/support/ranks.h"

namespace {

const World& world() {
    return test_world();
}
bool is_last() {
    return world().rank() == world().size() - 1;
}

// Called on all ranks: returns the error that all of them throw, or an empty string.
template <typename Check>
std::string refusal(Check&& check) {
    std::string message;
    try {
        check();
    } catch (const CommonError& error) {
        CHECK(error.exit_code == exit_bad_input);
        message = error.what();
        world().recover();
    }
    for (const std::string& other : world().all_gather(message)) CHECK(other == message);
    return message;
}

std::string last_rank() {
    return text("rank %d of %d on %s", world().size() - 1, world().size(), world().host().c_str());
}

}  // namespace

TEST_CASE("the same facts, and one rank with another value") {
    RankFacts facts = {{"--seed", "1337"}, {"--steps", "20"}, {"path", "no \xff UTF-8"}};
    CHECK(refusal([&] { check_same(world(), facts, "mend it"); }) == "");
    if (world().size() == 1) return;
    if (is_last()) facts[1].second = "30";
    std::string message = refusal([&] { check_same(world(), facts, "mend it"); });
    CHECK(message.starts_with("--steps: ranks differ: 20 on "));
    CHECK(message.ends_with(", 30 on " + last_rank() + "; mend it"));
    if (is_last()) facts[2].second = "";
    CHECK(refusal([&] { check_same(world(), facts, "mend it"); }).ends_with(" (and path); mend it"));
    if (!world().is_root()) facts.clear();  // the other ranks have nothing to compare
    CHECK(refusal([&] { check_same(world(), facts, "mend it"); }) == "");
}

TEST_CASE("every option that ranks must have alike is compared, and no other") {
    if (world().size() == 1) SKIP("one rank has no other");
    int own = 0;
    for (const OptionRow& row : option_table()) {
        if (!row.belongs_to(command_train)) continue;
        CAPTURE(row.field);
        Options o;
        // another value of the same type, valid or not
        OptionValue value = row.get(o);
        std::visit(
            [](auto& v) {
                using Value = std::decay_t<decltype(v)>;
                if constexpr (std::is_same_v<Value, bool>)
                    v = !v;
                else if constexpr (std::is_arithmetic_v<Value>)
                    v = v + 1;
                else if constexpr (std::is_same_v<Value, Choice>)
                    v.value = v.value == 0;
                else if constexpr (std::is_same_v<Value, std::string>)
                    v += "x";
                else if constexpr (std::is_same_v<Value, std::vector<std::string>>)
                    v.push_back("x");
                else
                    v.count++;
            },
            value);
        if (is_last()) row.set(o, value);
        std::string message = refusal([&] { check_same_options(world(), o); });
        own += row.ranks == Ranks::own;
        CHECK(message.substr(0, message.find(": ranks differ: ")) ==
              (row.ranks == Ranks::own ? "" : option_name(row)));
    }
    CHECK(own == 5);
}

TEST_CASE("programs of other sources, and other commands") {
    auto check = [](const char* source, const char* command) {
        return refusal(
            [&] { check_same_program(world(), is_last() ? source : "1234", is_last() ? command : "train"); });
    };
    CHECK(check("1234", "train") == "");
    if (world().size() == 1) return;
    CHECK(check("5678", "train").starts_with("its source: ranks differ: 1234 on "));
    CHECK(check("1234", "selftest").starts_with("command: ranks differ: train on "));
}

TEST_CASE("token files that differ in content alone") {
    TemporaryFolder folder;  // a separate one on each rank
    std::vector<uint16_t> tokens(100000);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = (uint16_t)(i % 500);
    auto files = [&](size_t changed) {
        std::vector<uint16_t> mine = tokens;
        if (is_last() && changed < mine.size()) mine[changed]++;
        write_file(folder / "a.bin", shard_bytes(mine));
        CheckedFile file = check_token_file(folder / "a.bin");
        file.path = "a.bin";
        return std::vector<CheckedFile>{file};
    };
    auto check = [&](size_t changed, bool reads) {
        return refusal([&] { check_same_tokens(world(), files(changed), reads); });
    };
    CHECK(check(tokens.size(), true) == "");
    if (world().size() == 1) return;
    for (size_t changed : {0, 1000, 99000}) {  // the 64 blocks of 4 KiB that are compared cover it
        CHECK(check(changed, true).starts_with("a.bin: ranks differ: content "));
        CHECK(check(changed, world().is_root()) == "");
    }
}

TEST_CASE("a folder that others do not share") {
    TemporaryFolder mine;
    std::string common = world().all_gather(mine.path)[0];
    CHECK(refusal([&] { check_shared_folder(world(), common, true); }) == "");
    CHECK(std::filesystem::is_empty(mine.path));
    if (world().size() == 1) return;
    std::string message = refusal([&] { check_shared_folder(world(), mine.path, true, 0); });
    CHECK(message.find("the first rank's node writes there, but this node does not see the file; name a "
                       "folder on a file system that all nodes share") != std::string::npos);
    CHECK(std::filesystem::is_empty(mine.path));
    CHECK(refusal([&] { check_shared_folder(world(), mine.path, world().is_root(), 0); }) == "");
}
