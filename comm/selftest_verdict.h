/*
The findings of the ranks in a selftest, and which ranks are suspect. There are two kinds of findings:

    faults    wrong bits, or errors that a device has counted: no other rank is needed to judge them.
    rates     judged by the rates of other ranks, among devices of the same kind.

A rank is suspect if its rate is unusually far below the median. The usual deviation is measured on the ranks
themselves, by the median distance from the median (MAD), which a few bad ranks hardly change. Rates differ by
ratios, so all of this is done with their logarithms:

    times = median / rate,   suspect if log times > max(log usual, 5 * 1.4826 * MAD of the logarithms)

For normally distributed numbers, 1.4826 * MAD is their standard deviation. `usual`, the ratio by which
healthy ranks may differ, is for equal devices, whose MAD is close to zero. With an even number of rates, the
median is the faster of the two in the middle, and the MAD is the smaller of the two distances in the middle:
so the slower of two ranks can be suspect, and so can two of four.

A message has two ends. A rank that is slow with all of several partners is itself suspect; otherwise the link
between the two ranks is.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // human
#include "data/base/strings.h"  // append_item

// ----------------------------------------------------------------------------
// measurements

// A kind of rate. gpu_times, cpu_times: factors by which healthy ranks may be slower than the median, on GPUs
// and on hosts whose cores are shared with unknown programs
struct SelftestRate {
    const char* name;  // in tables and JSON
    const char* what;  // "the rank's ... at 3 GB/s", in sentences
    const char* unit;
    double gpu_times, cpu_times;
};

enum RateNumber {
    rate_products,
    rate_memory,
    rate_to_device,
    rate_from_device,
    rate_node,
    rate_network,
    rate_disk_write,
    rate_disk_read,
    rate_clock,
    rate_count
};

constexpr SelftestRate selftest_rates[rate_count] = {
    {"products", "matrix products", "FLOP/s", 1.15, 15},
    {"memory", "memory", "B/s", 1.15, 15},
    {"to_device", "copies to the device", "B/s", 1.5, 25},
    {"from_device", "copies from the device", "B/s", 1.5, 25},
    {"node", "messages within the node", "B/s", 1.4, 50},
    {"network", "messages to other nodes", "B/s", 1.5, 50},
    {"disk_write", "writing to disk", "B/s", 8, 25},
    {"disk_read", "reading from disk", "B/s", 8, 50},
    {"clock", "the clock under load", "Hz", 1.1, 3},
};

// ----------------------------------------------------------------------------
// partners in messages

// A round in which each rank exchanges messages with one other, or with none (-1).
struct PairRound {
    RateNumber rate;
    std::vector<int> partner;  // by rank
};

// Returns the rounds. In round k, partners are ranks of a node whose numbers in the node differ only in bit
// k. In the rounds after these, partners have the same number in two nodes, whose numbers differ only in bit
// k. So n ranks of a node need log2(n) rounds, as do n nodes, and in each, all links of a kind are busy at
// once.
inline std::vector<PairRound> pair_rounds(const std::vector<std::string>& hosts) {
    std::vector<std::string> nodes;           // in the order of their first ranks
    std::vector<std::vector<int>> ranks_of;   // by node
    std::vector<std::pair<int, int>> places;  // node and number there, by rank
    for (size_t rank = 0; rank < hosts.size(); rank++) {
        size_t node = (size_t)(std::ranges::find(nodes, hosts[rank]) - nodes.begin());
        if (node == nodes.size()) nodes.push_back(hosts[rank]), ranks_of.emplace_back();
        places.push_back({(int)node, (int)ranks_of[node].size()});
        ranks_of[node].push_back((int)rank);
    }
    auto rank_at = [&](int node, int number) {
        bool is_there = node < (int)ranks_of.size() && number < (int)ranks_of[(size_t)node].size();
        return is_there ? ranks_of[(size_t)node][(size_t)number] : -1;
    };
    std::vector<PairRound> rounds;
    for (RateNumber rate : {rate_node, rate_network}) {
        size_t largest = rate == rate_node ? std::ranges::max(ranks_of, {}, &std::vector<int>::size).size()
                                           : ranks_of.size();
        for (int bit = 1; bit < (int)largest; bit *= 2) {
            PairRound round = {rate, {}};
            for (auto [node, number] : places)
                round.partner.push_back(rate == rate_node ? rank_at(node, number ^ bit)
                                                          : rank_at(node ^ bit, number));
            rounds.push_back(std::move(round));
        }
    }
    return rounds;
}

// ----------------------------------------------------------------------------
// results of a rank

// The rate of one round of messages with a partner.
struct PairFinding {
    int rate, partner;
    double bytes_per_second;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PairFinding, rate, partner, bytes_per_second)

struct RankFindings {
    std::string place;  // "rank 2 of 4 on HOST, GPU 3 (0000:1b:00.0)"
    std::string host;
    std::string device;           // its kind
    std::map<int, double> rates;  // by RateNumber, if measured
    std::vector<PairFinding> pairs;
    std::vector<std::string> faults;
    std::string bits;                      // hash of the product, the same on all healthy ranks
    std::map<std::string, double> tested;  // how much: products, bytes of memory ...
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankFindings, place, host, device, rates, pairs, faults, bits, tested)

// ----------------------------------------------------------------------------
// the rule

// The bounds that rates are judged by: their median, and the least rate that is not suspect.
struct RateBounds {
    double median, least;
};

// usual: factor by which healthy ranks may be slower
inline RateBounds rate_bounds(const std::vector<double>& rates, double usual) {
    constexpr double deviations = 5, of_normal = 1.4826;
    constexpr double almost_none = 1e-30;  // has a logarithm
    const size_t n = rates.size();
    std::vector<double> logarithms, distances;
    for (double rate : rates) logarithms.push_back(std::log(std::max(rate, almost_none)));
    double median = value_at(logarithms, n / 2);
    for (double one : logarithms) distances.push_back(std::fabs(one - median));
    double spread = of_normal * value_at(distances, (n - 1) / 2);
    return {std::exp(median), std::exp(median - std::max(std::log(usual), deviations * spread))};
}

// ----------------------------------------------------------------------------
// the verdict

struct Suspect {
    int rank;
    int other = -1;  // the far end of a link
    std::string what;
    double rate = 0, median = 0;  // the slow part's rate, and the median
    std::string words;            // a sentence that names the place
};

// A rate over all ranks.
struct RateRow {
    RateNumber rate;
    double median, least, most;
    int slowest, fastest;  // ranks
};

class SelftestVerdict {
public:
    // findings: of all ranks, in rank order. gpus: true if the ranks have GPUs
    SelftestVerdict(std::vector<RankFindings> findings, bool gpus)
        : findings_(std::move(findings)), gpus_(gpus) {
        for (size_t rank = 0; rank < findings_.size(); rank++) judge_faults((int)rank);
        judge_bits();
        take_best_of_pairs();
        for (int rate = 0; rate < rate_count; rate++) judge_rate((RateNumber)rate);
        judge_links();
        std::ranges::stable_sort(suspects_, {}, &Suspect::rank);
    }

    const std::vector<RankFindings>& findings() const { return findings_; }
    const std::vector<Suspect>& suspects() const { return suspects_; }
    bool healthy() const { return suspects_.empty(); }

    // Returns the rates that were measured, in the order of the table.
    std::vector<RateRow> rows() const {
        std::vector<RateRow> rows;
        for (int rate = 0; rate < rate_count; rate++) {
            std::vector<double> values;
            RateRow row = {(RateNumber)rate, 0, std::numeric_limits<double>::infinity(), 0, 0, 0};
            for (size_t rank = 0; rank < findings_.size(); rank++) {
                std::optional<double> value = rate_of((int)rank, rate);
                if (!value) continue;
                values.push_back(*value);
                if (*value < row.least) row.least = *value, row.slowest = (int)rank;
                if (*value > row.most) row.most = *value, row.fastest = (int)rank;
            }
            if (values.empty()) continue;
            row.median = value_at(values, values.size() / 2);
            rows.push_back(row);
        }
        return rows;
    }

    std::optional<double> rate_of(int rank, int rate) const {
        const auto& rates = findings_[(size_t)rank].rates;
        auto found = rates.find(rate);
        return found == rates.end() ? std::nullopt : std::optional(found->second);
    }

private:
    double usual(int rate) const {
        return gpus_ ? selftest_rates[rate].gpu_times : selftest_rates[rate].cpu_times;
    }
    const std::string& place(int rank) const { return findings_[(size_t)rank].place; }

    void judge_faults(int rank) {
        for (const std::string& fault : findings_[(size_t)rank].faults)
            suspects_.push_back({rank, -1, fault, 0, 0, place(rank) + ": " + fault});
    }

    // Marks ranks as suspect if their bits differ from those of the majority. Each rank has already checked
    // its own product.
    void judge_bits() {
        std::map<std::string, size_t> ranks_with;
        for (const RankFindings& one : findings_) ranks_with[one.bits]++;
        auto most = std::ranges::max_element(ranks_with, {}, [](auto& one) { return one.second; });
        if (most->second * 2 <= findings_.size()) return;
        for (size_t rank = 0; rank < findings_.size(); rank++) {
            if (findings_[rank].bits == most->first || !findings_[rank].faults.empty()) continue;
            std::string what = "its matrix products differ from those of the other ranks";
            suspects_.push_back({(int)rank, -1, what, 0, 0, place((int)rank) + ": " + what});
        }
    }

    // Sets the rate of a rank's messages to that with its fastest partner.
    void take_best_of_pairs() {
        for (RankFindings& one : findings_) {
            for (const PairFinding& pair : one.pairs)
                one.rates[pair.rate] = std::max(one.rates[pair.rate], pair.bytes_per_second);
        }
    }

    size_t partners(size_t rank, int rate) const {
        return (size_t)std::ranges::count(findings_[rank].pairs, rate, &PairFinding::rate);
    }

    void judge_rate(RateNumber rate) {
        bool of_pairs = rate == rate_node || rate == rate_network;
        std::map<std::string, std::vector<int>> kinds;  // ranks by device
        for (size_t rank = 0; rank < findings_.size(); rank++) {
            bool counts = of_pairs ? partners(rank, rate) > 1 : rate_of((int)rank, rate).has_value();
            if (counts) kinds[findings_[rank].device].push_back((int)rank);
        }
        for (auto& [device, ranks] : kinds) {
            std::vector<double> values;
            for (int rank : ranks) values.push_back(*rate_of(rank, rate));
            RateBounds bounds = rate_bounds(values, usual(rate));
            for (size_t i = 0; i < ranks.size(); i++) {
                if (values[i] < bounds.least) add_slow(ranks[i], -1, rate, values[i], bounds.median);
            }
        }
    }

    // Adds links that are slow although neither end is suspect by itself.
    void judge_links() {
        struct Link {
            int rank, other;
            double rate;
        };
        for (RateNumber rate : {rate_node, rate_network}) {
            std::vector<Link> links;
            std::vector<double> values;
            for (size_t rank = 0; rank < findings_.size(); rank++) {
                for (const PairFinding& pair : findings_[rank].pairs) {
                    if (pair.rate != rate || pair.partner < (int)rank) continue;
                    links.push_back({(int)rank, pair.partner, pair.bytes_per_second});
                    values.push_back(pair.bytes_per_second);
                }
            }
            if (links.empty()) continue;
            RateBounds bounds = rate_bounds(values, usual(rate));
            auto suspected = [&](int rank) {
                return std::ranges::any_of(suspects_, [&](const Suspect& one) {
                    return one.rank == rank && one.other < 0 && one.what == selftest_rates[rate].what;
                });
            };
            for (const Link& link : links) {
                if (link.rate < bounds.least && !suspected(link.rank) && !suspected(link.other))
                    add_slow(link.rank, link.other, rate, link.rate, bounds.median);
            }
        }
    }

    void add_slow(int rank, int other, RateNumber number, double rate, double median) {
        const SelftestRate& row = selftest_rates[number];
        std::string who = place(rank) + (other < 0 ? "" : " and " + place(other));
        suspects_.push_back(
            {rank, other, row.what, rate, median,
             text("%s: %s %s%s, %.3g times slower than the median of %s%s", who.c_str(),
                  other < 0 ? row.what : "messages between them", human(rate).c_str(), row.unit,
                  median / std::max(rate, 1e-30), human(median).c_str(), row.unit)});
    }

    std::vector<RankFindings> findings_;
    const bool gpus_;
    std::vector<Suspect> suspects_;
};

// ----------------------------------------------------------------------------
// for people and programs

inline std::string findings_place(const SelftestVerdict& verdict) {
    std::map<std::string, int> hosts, devices;
    for (const RankFindings& one : verdict.findings()) hosts[one.host]++, devices[one.device]++;
    std::string kinds;
    for (auto& [device, count] : devices)
        append_item(kinds, (devices.size() > 1 ? text("%d ", count) : "") + device);
    return text("%s on %s (%s)", counted(verdict.findings().size(), "rank").c_str(),
                counted(hosts.size(), "host").c_str(), kinds.c_str());
}

inline std::string verdict_text(const SelftestVerdict& verdict) {
    std::string result = text("%-12s  %12s  %s\n", "", "median", "slowest and fastest rank");
    for (const RateRow& row : verdict.rows()) {
        const SelftestRate& rate = selftest_rates[row.rate];
        auto with_unit = [&](double value) { return human(value) + rate.unit; };
        result += text("%-12s  %12s", rate.name, with_unit(row.median).c_str());
        if (verdict.findings().size() > 1)
            result += text("  %s (%d) to %s (%d)", with_unit(row.least).c_str(), row.slowest,
                           with_unit(row.most).c_str(), row.fastest);
        result += "\n";
    }
    return result;
}

inline nlohmann::ordered_json verdict_to_json(const SelftestVerdict& verdict, double seconds) {
    nlohmann::ordered_json ranks = nlohmann::ordered_json::array(), rates, suspects = ranks, links = ranks;
    for (const RankFindings& one : verdict.findings())
        ranks.push_back({{"host", one.host},
                         {"device", one.device},
                         {"place", one.place},
                         {"tested", one.tested},
                         {"product_hash", one.bits}});
    for (const RateRow& row : verdict.rows()) {
        nlohmann::ordered_json by_rank = nlohmann::ordered_json::array();
        for (size_t rank = 0; rank < verdict.findings().size(); rank++) {
            std::optional<double> value = verdict.rate_of((int)rank, row.rate);
            by_rank.push_back(value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json());
        }
        const SelftestRate& rate = selftest_rates[row.rate];
        rates[rate.name] = {{"unit", rate.unit}, {"median", row.median}, {"by_rank", by_rank}};
    }
    for (size_t rank = 0; rank < verdict.findings().size(); rank++) {
        for (const PairFinding& pair : verdict.findings()[rank].pairs) {
            if (pair.partner < (int)rank) continue;
            links.push_back({{"ranks", {rank, pair.partner}},
                             {"kind", selftest_rates[pair.rate].name},
                             {"bytes_per_s", pair.bytes_per_second}});
        }
    }
    for (const Suspect& one : verdict.suspects()) {
        nlohmann::ordered_json suspect = {{"rank", one.rank},
                                          {"host", verdict.findings()[(size_t)one.rank].host},
                                          {"what", one.what},
                                          {"words", one.words}};
        if (one.other >= 0) suspect["other_rank"] = one.other;
        if (one.median > 0) suspect["rate"] = one.rate, suspect["median"] = one.median;
        suspects.push_back(suspect);
    }
    return {{"healthy", verdict.healthy()},
            {"seconds", seconds},
            {"suspects", suspects},
            {"rates", rates},
            {"links", links},
            {"ranks", ranks}};
}
