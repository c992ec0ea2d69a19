/*
Byte-pair encoding of one word: it is cut into its smallest tokens (bytes, or characters). Then the adjacent
pair whose merge has the lowest rank is merged, the leftmost one first, until no pair can be merged.

Text repeats its words, so each thread caches the tokens of recent words in a table. Words too long for the
table are first cut at places that no merge can cross; a long part (a line of one letter, for example) is
merged with a heap, in time n log n and 16 bytes of memory per byte.
*/
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/utf8.h"

// A map from 64 bits to 64 bits, built once and then only read.
class FlatMap {
public:
    static constexpr uint64_t none = ~0ull;

    explicit FlatMap(size_t entries = 0) {
        size_t size = 16;
        while (size < 2 * entries) size *= 2;
        slots_.assign(size, {none, none});
    }

    // Neither `key` nor `value` may be `none`. Setting an existing key replaces its value.
    void set(uint64_t key, uint64_t value) { slots_[place(key)] = {key, value}; }
    uint64_t get(uint64_t key) const { return slots_[place(key)].second; }

private:
    size_t place(uint64_t key) const {
        size_t mask = slots_.size() - 1, at = (key * 0x9e3779b97f4a7c15 >> 29) & mask;
        while (slots_[at].first != none && slots_[at].first != key) at = (at + 1) & mask;
        return at;
    }

    std::vector<std::pair<uint64_t, uint64_t>> slots_;
};

struct Merge {
    int left, right, result;  // token ids
};

struct BpeOptions {
    bool ignore_merges = false;  // a word that is itself a token becomes that token, regardless of merges
    bool byte_fallback =
        false;  // smallest tokens are characters, or bytes <0x00> .. <0xFF> for a character without a token
};

class Bpe {
public:
    // tokens: each token's bytes, by id; empty if encoding never produces the id. merges: in order of rank;
    // if two merge the same pair, the later one counts. Every byte must have a token. `owner` names the
    // source in messages.
    Bpe(std::vector<std::string> tokens, const std::vector<Merge>& merges, BpeOptions options,
        const std::string& owner)
        : tokens_(std::move(tokens)), merges_(merges.size()), options_(options), instance_(next_instance()) {
        for (size_t id = 0; id < tokens_.size(); id++) {
            if (!tokens_[id].empty()) id_of_.emplace(tokens_[id], (int)id);
        }
        for (int byte = 0; byte < 256; byte++) {
            auto found =
                id_of_.find(options.byte_fallback ? text("<0x%02X>", byte) : std::string(1, (char)byte));
            if (found == id_of_.end()) {
                fail("%s: the vocabulary has no token for byte 0x%02X, so some text cannot be encoded; use "
                     "a tokenizer with all 256 bytes",
                     owner.c_str(), byte);
            }
            byte_tokens_[(size_t)byte] = found->second;
        }
        std::vector<std::pair<uint64_t, uint64_t>> joined;
        for (size_t rank = 0; rank < merges.size(); rank++) {
            const Merge& merge = merges[rank];
            merges_.set(pair_key(merge.left, merge.right), (uint64_t)rank << 32 | (uint32_t)merge.result);
            int32_t last = last_unit(tokens_[(size_t)merge.left]);
            int32_t first = first_unit(tokens_[(size_t)merge.right]);
            joined.push_back({pair_key(last, first), 1});
        }
        std::sort(joined.begin(), joined.end());
        joined.erase(std::unique(joined.begin(), joined.end()), joined.end());
        joins_ = FlatMap(joined.size());
        for (auto [key, value] : joined) joins_.set(key, value);
        if (options.byte_fallback) map_characters();
    }

    Bpe(Bpe&&) = default;
    Bpe& operator=(Bpe&&) = default;

    // Appends the tokens of one word. Any number of threads may encode at the same time.
    void encode_word(std::string_view word, std::vector<int>& out) const {
        if (word.size() <= Known::longest) return encode_short(word, out);
        if (options_.ignore_merges) {
            if (auto found = id_of_.find(word); found != id_of_.end()) {
                out.push_back(found->second);
                return;
            }
        }
        for_each_part(word, [&](std::string_view part) {
            // If ignore_merges is set, the table's entries are for whole words, and a part is not a word.
            if (part.size() <= Known::longest && !options_.ignore_merges)
                encode_short(part, out);
            else
                merge(part, out);
        });
    }

    const std::vector<std::string>& tokens() const { return tokens_; }

private:
    static uint32_t next_instance() {
        static std::atomic<uint32_t> last{0};
        return ++last;
    }

    static uint64_t pair_key(int left, int right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

    // ------------------------------------------------------------------------
    // cache of recent words

    // An entry of the table: one cache line.
    struct Known {
        static constexpr size_t longest = 23;  // bytes of a word
        static constexpr size_t most = 8;      // tokens of a word
        uint64_t word[3];                      // padded with zeros; the last byte is the length
        uint32_t instance;                     // number of the Bpe that made the entry; 0: empty
        int32_t count;
        int32_t tokens[most];
    };

    static Known* known_words() {
        static thread_local std::unique_ptr<Known[]> table = std::make_unique<Known[]>(table_size);
        return table.get();
    }

    void encode_short(std::string_view word, std::vector<int>& out) const {
        uint64_t key[3] = {};
        memcpy(key, word.data(), word.size());
        key[2] |= (uint64_t)word.size() << 56;
        uint64_t hash = (key[0] ^ instance_) * 0x9e3779b97f4a7c15;
        hash = (hash ^ hash >> 32 ^ key[1]) * 0xd6e8feb86659fd93;
        hash = (hash ^ hash >> 32 ^ key[2]) * 0x9e3779b97f4a7c15;
        Known& known = known_words()[hash >> (64 - table_bits)];
        if (known.instance == instance_ && known.word[0] == key[0] && known.word[1] == key[1] &&
            known.word[2] == key[2]) {
            out.insert(out.end(), known.tokens, known.tokens + known.count);
            return;
        }
        size_t before = out.size();
        if (auto found = id_of_.end(); options_.ignore_merges && (found = id_of_.find(word)) != id_of_.end())
            out.push_back(found->second);
        else
            merge(word, out);
        size_t count = out.size() - before;
        if (count > Known::most) return;
        known.instance = instance_;
        memcpy(known.word, key, sizeof key);
        known.count = (int32_t)count;
        std::copy(out.end() - (ptrdiff_t)count, out.end(), known.tokens);
    }

    // ------------------------------------------------------------------------
    // boundaries that no merge crosses

    // The first unit of a token's text. A unit is a byte, or with byte_fallback a character.
    int32_t first_unit(std::string_view token) const {
        if (token.empty()) return 0;
        const char* at = token.data();
        return options_.byte_fallback ? next_code_point(at, at + token.size()) : (uint8_t)token.front();
    }

    int32_t last_unit(std::string_view token) const {
        if (token.empty()) return 0;
        if (!options_.byte_fallback) return (uint8_t)token.back();
        size_t begin = token.size() - 1;
        while (begin > 0 && (token[begin] & 0xc0) == 0x80) begin--;
        return first_unit(token.substr(begin));
    }

    template <typename F>
    void for_each_part(std::string_view word, F&& part) const {
        const char *at = word.data(), *end = at + word.size(), *begin = at;
        int32_t left = 0;
        while (at < end) {
            const char* here = at;
            int32_t code = options_.byte_fallback ? next_code_point(at, end) : (uint8_t)*at++;
            // A character without a token is encoded as byte tokens, whose text (<0x00>) begins with the unit
            // '<' and ends with '>'.
            bool bytes = options_.byte_fallback && token_of_character(code) < 0;
            int32_t unit = bytes ? '<' : code;
            if (here > begin && joins_.get(pair_key(left, unit)) == FlatMap::none) {
                part(std::string_view(begin, (size_t)(here - begin)));
                begin = here;
            }
            left = bytes ? '>' : code;
        }
        if (begin < end) part(std::string_view(begin, (size_t)(end - begin)));
    }

    // ------------------------------------------------------------------------
    // merging

    int token_of_character(int32_t code) const {
        if (code == invalid_byte) return -1;
        uint64_t found = characters_.get((uint64_t)code);
        return found == FlatMap::none ? -1 : (int)found;
    }

    // Calls add(token) for the smallest tokens of a word.
    template <typename F>
    void for_each_smallest(std::string_view word, F&& add) const {
        if (!options_.byte_fallback) {
            for (char byte : word) add(byte_tokens_[(uint8_t)byte]);
            return;
        }
        const char *at = word.data(), *end = at + word.size();
        while (at < end) {
            const char* begin = at;
            int token = token_of_character(next_code_point(at, end));
            if (token >= 0) {
                add(token);
            } else {
                for (; begin < at; begin++) add(byte_tokens_[(uint8_t)*begin]);
            }
        }
    }

    // Rank in the upper half, resulting token in the lower; FlatMap::none if the pair does not merge.
    uint64_t merge_of(int left, int right) const { return merges_.get(pair_key(left, right)); }

    void merge(std::string_view word, std::vector<int>& out) const {
        if (word.size() <= longest_list)
            merge_list(word, out);
        else
            merge_heap(word, out);
    }

    // Repeatedly scans a list for the lowest rank.
    void merge_list(std::string_view word, std::vector<int>& out) const {
        int tokens[longest_list];
        uint64_t merges[longest_list];  // [i]: of tokens i and i + 1
        int count = 0;
        for_each_smallest(word, [&](int token) { tokens[count++] = token; });
        for (int i = 0; i + 1 < count; i++) merges[i] = merge_of(tokens[i], tokens[i + 1]);
        while (count > 1) {
            // Equal ranks are the same merge, and min_element returns the first, which is the leftmost.
            int lowest = (int)(std::min_element(merges, merges + count - 1) - merges);
            if (merges[lowest] == FlatMap::none) break;
            tokens[lowest] = (int)(uint32_t)merges[lowest];
            count--;
            std::copy(tokens + lowest + 2, tokens + count + 1, tokens + lowest + 1);
            if (lowest + 1 < count) {
                std::copy(merges + lowest + 2, merges + count, merges + lowest + 1);
                merges[lowest] = merge_of(tokens[lowest], tokens[lowest + 1]);
            }
            if (lowest > 0) merges[lowest - 1] = merge_of(tokens[lowest - 1], tokens[lowest]);
        }
        out.insert(out.end(), tokens, tokens + count);
    }

    // A token is stored where the first of its smallest tokens was; its length is stored both there and where
    // the last of them was.
    void merge_heap(std::string_view word, std::vector<int>& out) const {
        if (word.size() > INT32_MAX)
            fail("a word of %zu bytes: is longer than 2 GiB; split the text", word.size());
        constexpr int gone = -1;
        std::vector<int> tokens;
        tokens.reserve(word.size());
        for_each_smallest(word, [&](int token) { tokens.push_back(token); });
        uint32_t count = (uint32_t)tokens.size();
        std::vector<uint32_t> lengths(count, 1);
        std::vector<uint64_t> heap;  // rank, place
        auto look_up = [&](uint32_t place, uint32_t next) {
            uint64_t found = merge_of(tokens[place], tokens[next]);
            if (found == FlatMap::none) return false;
            heap.push_back((found >> 32) << 32 | place);
            return true;
        };
        for (uint32_t i = 0; i + 1 < count; i++) look_up(i, i + 1);
        std::make_heap(heap.begin(), heap.end(), std::greater<>());
        while (!heap.empty()) {
            std::pop_heap(heap.begin(), heap.end(), std::greater<>());
            uint64_t top = heap.back();
            heap.pop_back();
            uint32_t place = (uint32_t)top;
            if (tokens[place] == gone) continue;
            uint32_t next = place + lengths[place];
            if (next >= count) continue;
            uint64_t found = merge_of(tokens[place], tokens[next]);
            if (found == FlatMap::none || found >> 32 != top >> 32)
                continue;  // one of the two has been merged since
            tokens[place] = (int)(uint32_t)found;
            tokens[next] = gone;
            uint32_t length = lengths[place] + lengths[next];
            lengths[place] = lengths[place + length - 1] = length;
            if (place > 0 && look_up(place - lengths[place - 1], place))
                std::push_heap(heap.begin(), heap.end(), std::greater<>());
            if (place + length < count && look_up(place, place + length))
                std::push_heap(heap.begin(), heap.end(), std::greater<>());
        }
        for (uint32_t i = 0; i < count; i += lengths[i]) out.push_back(tokens[i]);
    }

    void map_characters() {
        characters_ = FlatMap(tokens_.size());
        for (size_t id = 0; id < tokens_.size(); id++) {
            const char *at = tokens_[id].data(), *end = at + tokens_[id].size();
            if (at == end) continue;
            int32_t code = next_code_point(at, end);
            if (at == end && code != invalid_byte) characters_.set((uint64_t)code, id);
        }
    }

    static constexpr int table_bits = 14;
    static constexpr size_t table_size = (size_t)1 << table_bits;
    static constexpr size_t longest_list = 64;  // bytes

    struct Hash {
        using is_transparent = void;
        size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
    };

    std::vector<std::string> tokens_;
    std::unordered_map<std::string, int, Hash, std::equal_to<>> id_of_;
    std::array<int, 256> byte_tokens_;
    FlatMap merges_;      // maps a pair of tokens to its merge
    FlatMap joins_;       // pairs of units that are adjacent at the seam of some merge
    FlatMap characters_;  // code point to token, for byte_fallback
    BpeOptions options_;
    uint32_t instance_;  // distinguishes the words of this vocabulary from those of others in the table
};
