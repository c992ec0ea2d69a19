/*
Blends of several data sets, each with a weight: "0.7:web.bin,0.3:code.idx". The global sample index alone
determines which source a sample of the run is drawn from, and which of that source's samples it is, as with
one source (data/tokens/token_loader.h); so the state to resume from is that one number.

The sources take turns in a round, computed once. Its length is the sum of the smallest integers in the
proportion of the weights, so 10 for 0.7 and 0.3. In the round, the n-th draw of a source must fall between
the points where the source's share of all draws reaches n-1 and n, and the draw with the earliest deadline
goes first. Then after any number of draws, each source has its share to within one draw (Baruah, Cohen,
Plaxton and Varvel, "Proportionate progress", 1996).
*/
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <numeric>
#include <queue>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/permutation.h"
#include "data/base/strings.h"

enum class SampleOrder { shuffled, sequential };

struct BlendSource {
    std::string files;  // patterns for files_named(); only one pattern if there are weights
    uint64_t weight;    // an integer; all are in the proportion of the weights as written
};

// ----------------------------------------------------------------------------
// "WEIGHT:FILES,WEIGHT:FILES"

// A weight as written: digits / 10^decimals.
struct DecimalWeight {
    uint64_t digits;
    size_t decimals;
};

// Splits "0.7:rest"; returns false if the text before the colon does not look like a weight.
inline bool read_weight(std::string_view item, std::string_view* number, std::string_view* rest) {
    size_t colon = item.find(':');
    if (colon == 0 || colon == std::string_view::npos) return false;
    *number = item.substr(0, colon);
    *rest = item.substr(colon + 1);
    return number->find_first_not_of("0123456789.+-eE") == std::string_view::npos &&
           number->find_first_of("0123456789") != std::string_view::npos;
}

inline DecimalWeight decimal_weight(std::string_view number, const std::string& item) {
    size_t point = std::min(number.find('.'), number.size());
    std::string digits(number.substr(0, point));
    std::string decimals(point < number.size() ? number.substr(point + 1) : "");
    while (decimals.ends_with('0')) decimals.pop_back();
    DecimalWeight weight = {0, decimals.size()};
    digits += decimals;
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), weight.digits);
    if (error == std::errc::result_out_of_range) {
        fail("'%s': the weight has too many digits; 0.7 or 12.5 is enough", printable(item).c_str());
    }
    if (error != std::errc() || end != digits.data() + digits.size() || digits.empty())
        fail("'%s': the weight is not a decimal number; write it like 0.7", printable(item).c_str());
    if (weight.digits == 0)
        fail("'%s': the weight must be above 0; raise it, or leave the source out", printable(item).c_str());
    return weight;
}

// Returns the smallest integers in the same proportion.
inline std::vector<uint64_t> whole_weights(const std::vector<DecimalWeight>& weights,
                                           const std::string& list) {
    size_t decimals = 0;
    for (const DecimalWeight& weight : weights) decimals = std::max(decimals, weight.decimals);
    std::vector<uint64_t> whole;
    uint64_t divisor = 0, sum = 0;
    bool overflow = false;
    for (auto [number, at] : weights) {
        for (; at < decimals; at++) overflow |= __builtin_mul_overflow(number, 10, &number);
        overflow |= __builtin_add_overflow(sum, number, &sum);
        whole.push_back(number);
        divisor = std::gcd(divisor, number);
    }
    if (overflow) {
        fail("'%s': the weights together have too many digits; shares like 0.7 and 0.3 are enough",
             printable(list).c_str());
    }
    for (uint64_t& number : whole) number /= divisor;
    return whole;
}

// A list without weights is one source. A file name that looks like "2:a.bin" can be given as "./2:a.bin".
inline std::vector<BlendSource> parse_blend(const std::string& list) {
    std::vector<BlendSource> sources;
    std::vector<DecimalWeight> weights;
    std::string without_weight;
    for (const std::string& item : comma_separated(list)) {
        if (item.empty()) continue;
        std::string_view number, files;
        if (!read_weight(item, &number, &files)) {
            if (without_weight.empty()) without_weight = item;
            continue;
        }
        weights.push_back(decimal_weight(number, item));
        if (files.empty())
            fail("'%s': has no files after the weight; write it like 0.7:data/*.bin", item.c_str());
        sources.push_back({std::string(files), 0});
    }
    if (sources.empty()) return {{list, 1}};
    if (!without_weight.empty()) {
        fail("'%s': has no weight, but other sources do; write it like 0.5:%s",
             printable(without_weight).c_str(), printable(without_weight).c_str());
    }
    std::vector<uint64_t> whole = whole_weights(weights, list);
    for (size_t i = 0; i < sources.size(); i++) sources[i].weight = whole[i];
    return sources;
}

// ----------------------------------------------------------------------------

// Maps each sample of a run to the source that it is drawn from.
class Blend {
public:
    static constexpr uint64_t longest_round = 1 << 20;

    // Weights whose round would be longer than longest_round are rounded to multiples of 2^-20 of their sum.
    explicit Blend(const std::vector<uint64_t>& weights) : share_(weights) {
        uint64_t divisor = 0;
        unsigned __int128 sum = 0;
        for (uint64_t weight : weights) {
            if (weight == 0) fail("blend: a weight is 0; leave the source out");
            divisor = std::gcd(divisor, weight);
            sum += weight;
        }
        if (weights.empty()) fail("blend: has no sources; name at least one");
        for (uint64_t& share : share_) share /= divisor;
        if (sum / divisor > longest_round) round_shares(sum / divisor);
        fill_round();
    }

    struct Draw {
        size_t source;
        uint64_t number;  // earlier draws from this source
    };

    Draw operator()(uint64_t sample) const {
        uint64_t length = round_.size();
        const Turn& turn = round_[sample % length];
        return {turn.source, sample / length * share_[turn.source] + turn.before};
    }

    size_t sources() const { return share_.size(); }
    // A round has round() draws; draws_in_round(source) of them are from that source.
    uint64_t round() const { return round_.size(); }
    uint64_t draws_in_round(size_t source) const { return share_[source]; }

private:
    struct Turn {
        uint32_t source, before;  // before: draws from this source earlier in the round
    };

    // Shares with the largest remainders are rounded up.
    void round_shares(unsigned __int128 sum) {
        std::vector<std::pair<unsigned __int128, size_t>> remainders;
        uint64_t total = 0;
        for (size_t i = 0; i < share_.size(); i++) {
            unsigned __int128 scaled = (unsigned __int128)share_[i] * longest_round;
            share_[i] = (uint64_t)(scaled / sum);
            total += share_[i];
            remainders.push_back({sum - scaled % sum, i});
        }
        std::sort(remainders.begin(), remainders.end());
        for (size_t i = 0; total < longest_round; i++, total++) share_[remainders[i].second]++;
        for (uint64_t share : share_) {
            if (share == 0) {
                fail("blend: a weight is less than a millionth of the sum of all; raise it, or leave the "
                     "source out");
            }
        }
    }

    // The n-th draw of a source (n = 0, 1, ...) must be at a position from floor(n * length / share) on, and
    // before ceil((n+1) * length / share). If several draws are allowed at a position, the one with the
    // earliest deadline is made.
    void fill_round() {
        struct Next {
            uint64_t place;
            uint32_t source;
            bool operator>(const Next& other) const {
                return place != other.place ? place > other.place : source > other.source;
            }
        };
        using Queue = std::priority_queue<Next, std::vector<Next>, std::greater<>>;
        uint64_t length = std::accumulate(share_.begin(), share_.end(), uint64_t(0));
        std::vector<uint32_t> drawn(share_.size());
        Queue waiting, allowed;  // ordered by first position, by deadline
        for (uint32_t source = 0; source < share_.size(); source++) waiting.push({0, source});
        round_.reserve(length);
        for (uint64_t place = 0; place < length; place++) {
            while (!waiting.empty() && waiting.top().place <= place) {
                uint32_t source = waiting.top().source;
                waiting.pop();
                uint64_t share = share_[source];
                allowed.push({((drawn[source] + uint64_t(1)) * length + share - 1) / share, source});
            }
            uint32_t source = allowed.top().source;
            allowed.pop();
            round_.push_back({source, drawn[source]++});
            waiting.push({drawn[source] * length / share_[source], source});
        }
    }

    std::vector<uint64_t> share_;  // draws from each source per round
    std::vector<Turn> round_;
};

// The order of all samples. Each source has its own order and epochs: in an epoch, each of its samples is
// drawn once. Sequential order is the same in every epoch.
class BlendOrder {
public:
    // `sizes`: samples in each source.
    BlendOrder(Blend blend, std::vector<uint64_t> sizes, SampleOrder order, uint64_t seed)
        : blend_(std::move(blend)),
          sizes_(std::move(sizes)),
          order_(order),
          key_(random_key(seed, "data order")) {
        if (sizes_.size() != blend_.sources())
            fail("blend: has %zu sources and %zu sizes; give each a size", blend_.sources(), sizes_.size());
        for (uint64_t size : sizes_) {
            if (size == 0) fail("blend: a source has no samples; leave it out");
        }
    }

    struct Place {
        size_t source;
        uint64_t sample;  // index in the source
        uint64_t epoch;   // earlier passes over the source
    };

    Place operator()(uint64_t sample) const {
        auto [source, number] = blend_(sample);
        uint64_t size = sizes_[source], epoch = number / size, at = number % size;
        if (order_ == SampleOrder::shuffled) {
            Random4 random = philox(key_, epoch, source);
            at = Permutation(size, (uint64_t)random.at[0] << 32 | random.at[1])(at);
        }
        return {source, at, epoch};
    }

    const Blend& blend() const { return blend_; }

private:
    Blend blend_;
    std::vector<uint64_t> sizes_;
    SampleOrder order_;
    uint64_t key_;
};
