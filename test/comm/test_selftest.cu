// How a selftest decides which ranks are suspect, how it pairs ranks, and each test of a single rank.
// devices: cpu simt-bf16 nocard
#include <filesystem>
#include <set>

#include "comm/watchdog.h"
#include "comm/selftest.h"
#include "test/support/file_testing.h"
#include "test/support/testing.h"

namespace {

std::vector<RankFindings> healthy_ranks(int count, int on_host) {
    std::vector<RankFindings> ranks((size_t)count);
    for (int rank = 0; rank < count; rank++) {
        RankFindings& one = ranks[(size_t)rank];
        one.host = text("node%d", rank / on_host);
        one.place = text("rank %d on %s", rank, one.host.c_str());
        one.device = "card";
        one.bits = "1234";
        for (int rate = 0; rate < rate_count; rate++) {
            if (rate == rate_node || rate == rate_network) continue;
            // a spread of one percent
            one.rates[rate] =
                1e9 * (1 + 0.01 * random_symmetric(random_key(9, "healthy"), rank * 100 + rate));
        }
    }
    std::vector<std::string> hosts;
    for (const RankFindings& one : ranks) hosts.push_back(one.host);
    for (const PairRound& round : pair_rounds(hosts)) {
        for (int rank = 0; rank < count; rank++) {
            int partner = round.partner[(size_t)rank];
            if (partner >= 0) ranks[(size_t)rank].pairs.push_back({round.rate, partner, 1e9});
        }
    }
    return ranks;
}

// Slows all messages of a rank, or those to and from one other, by a factor, as measured at both ends.
void slow_messages(std::vector<RankFindings>& ranks, int rank, double times, int with = -1) {
    for (size_t one = 0; one < ranks.size(); one++) {
        for (PairFinding& pair : ranks[one].pairs) {
            bool mine = (int)one == rank && (with < 0 || pair.partner == with);
            bool theirs = pair.partner == rank && (with < 0 || (int)one == with);
            if (mine || theirs) pair.bytes_per_second /= times;
        }
    }
}

std::vector<int> suspected(const std::vector<RankFindings>& ranks, bool gpus = true) {
    std::vector<int> found;
    SelftestVerdict verdict(ranks, gpus);
    for (const Suspect& one : verdict.suspects()) found.push_back(one.rank);
    return found;
}

}  // namespace

TEST_CASE("nobody is far from the others where all are equal, or differ as healthy ones do") {
    for (int ranks : {1, 2, 3, 8, 64}) {
        CAPTURE(ranks);
        CHECK(suspected(healthy_ranks(ranks, 4)).empty());
    }
    // a wide spread is no reason to suspect a rank: from 1 to 2.6, evenly filled
    std::vector<double> wide;
    for (int i = 0; i < 32; i++) wide.push_back(1 + 0.05 * i);
    CHECK(rate_bounds(wide, 1.15).least < 1);
}

TEST_CASE("a slow rank is suspect among two as among many, and its figure is told against the median") {
    for (int ranks : {2, 3, 4, 5, 64}) {
        for (int rate = 0; rate < rate_count; rate++) {
            if (rate == rate_node || rate == rate_network) continue;
            CAPTURE(ranks);
            CAPTURE(selftest_rates[rate].name);
            std::vector<RankFindings> all = healthy_ranks(ranks, 4);
            all[1].rates[rate] = 1e9 / (1.1 * selftest_rates[rate].gpu_times);
            CHECK(suspected(all) == std::vector{1});
            Suspect suspect = SelftestVerdict(all, true).suspects()[0];
            CHECK(suspect.what == selftest_rates[rate].what);
            CHECK(suspect.words.starts_with("rank 1 on node0: " + suspect.what));
            CHECK(suspect.median == doctest::Approx(1e9).epsilon(0.011));
            CHECK(suspected(all, false).empty());  // ranks that share cores are usually slower
        }
    }
}

TEST_CASE("two slow ranks of four are both suspect, and one whose rate is zero") {
    std::vector<RankFindings> all = healthy_ranks(4, 4);
    all[0].rates[rate_memory] /= 3, all[2].rates[rate_memory] /= 10;
    CHECK(suspected(all) == std::vector{0, 2});
    all = healthy_ranks(4, 4);
    all[3].rates[rate_disk_write] = 0;
    CHECK(suspected(all, false) == std::vector{3});
}

TEST_CASE("devices are compared with those of their kind") {
    std::vector<RankFindings> all = healthy_ranks(8, 4);
    for (int rank : {4, 5, 6, 7}) {
        all[(size_t)rank].device = "old card";
        for (auto& [rate, value] : all[(size_t)rank].rates) value /= 20;
    }
    CHECK(suspected(all).empty());
    all[6].rates[rate_products] /= 2;
    CHECK(suspected(all) == std::vector{6});
}

TEST_CASE("faults and other bits make a rank suspect, whatever its rates") {
    std::vector<RankFindings> all = healthy_ranks(4, 4);
    all[2].faults.push_back("2 uncorrected memory errors");
    all[3].bits = "5678";
    CHECK(suspected(all) == std::vector{2, 3});
    all = healthy_ranks(2, 2);
    all[1].bits = "5678";  // it is unknown which of two is right
    CHECK(suspected(all).empty());
}

TEST_CASE("in log2 rounds all ranks of a node meet, and nodes, each rank one other at a time") {
    auto hosts = [](std::vector<int> of_node) {
        std::vector<std::string> names;
        for (size_t node = 0; node < of_node.size(); node++)
            for (int i = 0; i < of_node[node]; i++) names.push_back(text("node%zu", node));
        return names;
    };
    CHECK(pair_rounds(hosts({1})).empty());
    CHECK(pair_rounds(hosts({8})).size() == 3);
    CHECK(pair_rounds(hosts({8, 8, 8, 8})).size() == 3 + 2);
    for (const std::vector<int>& shape : {std::vector{8}, {3}, {4, 4}, {2, 2, 2}, {3, 1, 2}}) {
        std::vector<std::string> names = hosts(shape);
        std::vector<int> meetings(names.size());
        for (const PairRound& round : pair_rounds(names)) {
            bool right = true;
            for (size_t rank = 0; rank < names.size(); rank++) {
                int partner = round.partner[rank];
                if (partner < 0) continue;
                meetings[rank]++;
                right &= round.partner[(size_t)partner] == (int)rank && partner != (int)rank;
                right &= (names[rank] == names[(size_t)partner]) == (round.rate == rate_node);
            }
            CHECK(right);
        }
        CHECK(*std::ranges::min_element(meetings) >= 1);
    }
}

TEST_CASE("of slow messages the rank is suspect that is slow with all, else the link") {
    std::vector<RankFindings> all = healthy_ranks(8, 8);
    slow_messages(all, 5, 4);
    CHECK(suspected(all) == std::vector{5});
    all = healthy_ranks(8, 8);
    slow_messages(all, 2, 4, 3);
    CHECK(suspected(all) == std::vector{2});
    Suspect link = SelftestVerdict(all, true).suspects()[0];
    CHECK(link.other == 3);
    CHECK(link.words.starts_with("rank 2 on node0 and rank 3 on node0: messages between them 250MB/s"));
    // if each of four nodes has two ranks, a rank has only one partner in its node
    all = healthy_ranks(8, 2);
    for (RankFindings& one : all)
        for (PairFinding& pair : one.pairs)
            if (pair.rate == rate_node && (pair.partner == 4 || pair.partner == 5))
                pair.bytes_per_second /= 9;
    CHECK(suspected(all) == std::vector{4});
    CHECK(SelftestVerdict(all, true).suspects()[0].other == 5);
}

TEST_CASE("what is found travels as JSON, and the verdict's JSON names the suspects") {
    std::vector<RankFindings> all = healthy_ranks(4, 2);
    all[1].faults.push_back("a fault");
    std::vector<RankFindings> travelled;
    for (const RankFindings& one : all)
        travelled.push_back(nlohmann::json::parse(nlohmann::json(one).dump()).get<RankFindings>());
    CHECK(nlohmann::json(travelled) == nlohmann::json(all));
    auto json = verdict_to_json(SelftestVerdict(travelled, true), 3);
    CHECK(json["healthy"] == false);
    CHECK(json["suspects"].size() == 1);
    CHECK(json["suspects"][0]["rank"] == 1);
    CHECK(json["suspects"][0]["host"] == "node0");
    CHECK(json["rates"]["products"]["by_rank"].size() == 4);
    CHECK(json["links"].size() == 2 + 2);
}

TEST_CASE("the sums of a product's rows and columns tell a single bit that is wrong, and where") {
    constexpr int N = 40, C = 24, OC = 32;
    KnownSums sums(1, 2, N, C, OC);
    std::vector<float> out((size_t)OC * C);
    for (int o = 0; o < OC; o++)
        for (int c = 0; c < C; c++)
            for (int n = 0; n < N; n++)
                out[(size_t)o * C + c] +=
                    (float)(known_number(2, (uint64_t)n * OC + o) * known_number(1, (uint64_t)n * C + c));
    CHECK(sums.differences(out).empty());
    for (int bit : {0, 5, 12, 22, 25, 30, 31}) {
        CAPTURE(bit);
        std::vector<float> broken = out;
        uint32_t bits = std::bit_cast<uint32_t>(broken[7 * C + 11]) ^ 1u << bit;
        broken[7 * C + 11] = std::bit_cast<float>(bits);
        std::string words = sums.differences(broken);
        CHECK(words.find("wrong in 1 of its 32 rows and 1 of its 24 columns") != words.npos);
        CHECK(words.find("row 7 and column 11") != words.npos);
    }
    out[3] = NAN;
    CHECK(!sums.differences(out).empty());
}

TEST_CASE("a healthy rank finds nothing wrong with itself, and measures all that it has") {
    TemporaryFolder folder;
    World world(nullptr, nullptr, watch_ranks);
    SelftestSizes sizes = {64, 64, 1 << 16, 1 << 16, 1 << 16, 1 << 16, 0.01};
    std::vector<RankFindings> found = Selftest(world, sizes, folder.path).run();
    REQUIRE(found.size() == 1);
    CHECK(found[0].faults == std::vector<std::string>());
    CHECK(found[0].bits.size() == 16);
    CHECK(found[0].tested["products"] >= 9);
    CHECK(found[0].tested["memory_patterns"] >= 4);
    for (int rate : {rate_products, rate_memory, rate_to_device, rate_from_device, rate_disk_write})
        CHECK(found[0].rates[rate] > 0);
    CHECK(std::filesystem::is_empty(folder.path));  // no files are left
}

TEST_CASE("a device is measured for plans, at any size") {
    const World world(nullptr, nullptr, watch_ranks);
    MeasuredSizes sizes = {.product = 64,
                           .stream = 4096,
                           .host = 4096,
                           .message = 1024,
                           .tokens = 64,
                           .heads = 1,
                           .seconds = 1e-6};
    Machine machine = measured_machine(world, sizes);
    CHECK(machine.measured);
    CHECK(machine.element_bytes == sizeof(floatX));
    for (double rate :
         {machine.gemm_flops, machine.memory_bandwidth, machine.attention_forward, machine.attention_backward,
          machine.host_link, machine.host_bandwidth, machine.launch, machine.memory}) {
        CHECK(rate > 0);
        CHECK(std::isfinite(rate));
    }
}
