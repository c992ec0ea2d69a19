/*
Maps a sample to its tokens, as a function of only (seed, global sample index): not of ranks, micro-batches or
where a run was interrupted. A sample is T inputs and their T successors: T+1 tokens of one file, at stride T,
so each token except a file's first is predicted once per epoch.

The files are one source, or several with weights (data/tokens/blend.h). The first S draws from a source of S
samples give each sample once, as do the next S, and so on; each of these epochs of the source has its own
order.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "data/tokens/blend.h"
#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/tokens/token_source.h"
#include "data/base/strings.h"

// A source of a blend, with checked files.
struct CheckedSource {
    CheckedList tokens;
    uint64_t weight;
};

// `list`: a list for files_named(), or for parse_blend().
inline std::vector<CheckedSource> check_sources(const std::string& list) {
    std::vector<CheckedSource> sources;
    for (const BlendSource& source : parse_blend(list))
        sources.push_back({check_token_files(source.files), source.weight});
    return sources;
}

// Serves samples by global index. Several threads may call any of its functions at the same time.
class TokenLoader {
public:
    // Sequential order is meant for validation.
    TokenLoader(const std::string& list, int vocab, int T, SampleOrder order, uint64_t seed = 0)
        : TokenLoader(check_sources(list), vocab, T, order, seed) {}

    TokenLoader(const std::vector<CheckedSource>& blend, int vocab, int T, SampleOrder order, uint64_t seed)
        : T_(T), sources_(open_sources(blend, vocab, T)), order_(weights(blend), sizes(), order, seed) {
        for (const Source& source : sources_) {
            samples_ += source.samples;
            tokens_ += source.tokens.total_tokens();
        }
    }

    // The sum over all sources. In that many draws, a blend reads some sources more than once and others only
    // in part.
    uint64_t samples_per_epoch() const { return samples_; }
    int64_t total_tokens() const { return tokens_; }

    size_t sources() const { return sources_.size(); }
    const TokenSource& source(size_t i) const { return sources_[i].tokens; }

    // Returns the files that are never read, because they are too short for a sample of T+1 tokens.
    std::vector<std::string> too_short() const {
        std::vector<std::string> paths;
        for (const auto& [tokens, first_sample, samples] : sources_) {
            for (size_t i = 0; i < tokens.size(); i++) {
                uint64_t end = i + 1 < tokens.size() ? first_sample[i + 1] : samples;
                if (first_sample[i] == end) paths.push_back(tokens[i].path());
            }
        }
        return paths;
    }

    // For the header of a run: a line for each source if there are several.
    std::vector<std::string> summary() const {
        std::vector<std::string> lines;
        for (size_t i = 0; i < sources_.size() && sources_.size() > 1; i++) {
            const Source& source = sources_[i];
            double share = (double)order_.blend().draws_in_round(i) / (double)order_.blend().round();
            lines.push_back(text("%7.4g%%  %s: %s, %s tokens of %d bytes, %s samples", 100 * share,
                                 printable(source.tokens.list()).c_str(),
                                 counted(source.tokens.size(), "file").c_str(),
                                 human((double)source.tokens.total_tokens()).c_str(), source.tokens.width(),
                                 human((double)source.samples).c_str()));
        }
        return lines;
    }

    struct Place {
        size_t source, file;  // file: index in the source
        int64_t token;        // the token of the file where the sample begins
        uint64_t epoch;       // earlier passes over the source
    };

    // The place of a sample, by its number in the run.
    Place place(uint64_t sample) const {
        auto [source, at, epoch] = order_(sample);
        const std::vector<uint64_t>& first = sources_[source].first_sample;
        size_t file = (size_t)(std::upper_bound(first.begin(), first.end(), at) - first.begin()) - 1;
        return {source, file, (int64_t)((at - first[file]) * (uint64_t)T_), epoch};
    }

    // Copies a sample. Throws Error if a token is not in the vocabulary.
    void load(uint64_t sample, int* inputs /* (T) */, int* targets /* (T) */) const {
        Place at = place(sample);
        const TokenSource& tokens = sources_[at.source].tokens;
        tokens.copy(at.file, at.token, T_, inputs);
        tokens.copy(at.file, at.token + 1, T_, targets);
    }

    // Throws Error if a token of the first sample is not in the vocabulary.
    void check_first_sample() const {
        std::vector<int> tokens(2 * (size_t)T_);
        load(0, tokens.data(), tokens.data() + T_);
    }

private:
    struct Source {
        TokenSource tokens;
        std::vector<uint64_t> first_sample;  // the first sample of each file, in sequential order
        uint64_t samples;                    // per epoch
    };

    static std::vector<Source> open_sources(const std::vector<CheckedSource>& blend, int vocab, int T) {
        std::vector<Source> sources;
        for (const CheckedSource& part : blend) {
            Source& source = sources.emplace_back(Source{TokenSource(part.tokens, vocab), {}, 0});
            for (size_t i = 0; i < source.tokens.size(); i++) {
                source.first_sample.push_back(source.samples);
                source.samples += (uint64_t)(source.tokens[i].count() - 1) / (uint64_t)T;
            }
            if (source.samples == 0) fail_too_short(source.tokens, T);
        }
        return sources;
    }

    [[noreturn]] static void fail_too_short(const TokenSource& tokens, int T) {
        size_t longest = 0;
        for (size_t i = 0; i < tokens.size(); i++) {
            if (tokens[i].count() > tokens[longest].count()) longest = i;
        }
        fail("%s: has %lld tokens%s, but a sample needs %d; use more text or a shorter --sequence-length",
             tokens[longest].path().c_str(), (long long)tokens[longest].count(),
             tokens.size() > 1 ? ", more than any other file" : "", T + 1);
    }

    static Blend weights(const std::vector<CheckedSource>& blend) {
        std::vector<uint64_t> weights;
        for (const CheckedSource& source : blend) weights.push_back(source.weight);
        return Blend(weights);
    }

    std::vector<uint64_t> sizes() const {
        std::vector<uint64_t> sizes;
        for (const Source& source : sources_) sizes.push_back(source.samples);
        return sizes;
    }

    int T_;
    std::vector<Source> sources_;
    BlendOrder order_;
    uint64_t samples_ = 0;
    int64_t tokens_ = 0;
};
