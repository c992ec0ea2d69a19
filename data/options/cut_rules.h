/*
Splits a run over its processes: fills in --dp, --shard-group, --global-batch, --tp-overlap and --pp-chunks,
and refuses a layout that does not fit the number of processes, the model or the batch. A refusal names the
two nearest layouts that fit the processes and the model. They are found by exhaustive search, because a
number has few factorizations into four factors.
*/
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // counted
#include "data/options/schedule.h"
#include "data/options/table.h"
#include "data/options/values.h"
#include "data/base/strings.h"

// ----------------------------------------------------------------------------
// parts into which a model can be cut

// Returns the number of chunks of layers on each of `pp` stages.
inline int chunks_of(const Options& options, int pp) {
    if (options.pp_chunks > 0) return options.pp_chunks;
    return options.pp_schedule == PipelineSchedule::interleaved && pp > 1 ? 2 : 1;
}

// The number of tokens in each context rank's piece of a sequence is a multiple of this.
constexpr int context_tile = 64;

// Returns why sequences cannot be cut over cp context ranks, or an empty string.
inline std::string context_refusal(const Options& o, int cp) {
    if (cp == 1) return "";
    long long unit = 2LL * cp * context_tile, T = o.sequence_length, below = T / unit * unit;
    if (T % unit == 0) return "";
    return text("--cp %d: --sequence-length %lld is not a multiple of %lld (%d * cp), unlike %s%lld", cp, T,
                unit, 2 * context_tile, below ? text("%lld or ", below).c_str() : "", below + unit);
}

// Returns why a completed model and its sequences cannot be cut over tp * cp * pp ranks, or an empty string
// if they can.
inline std::string cut_refusal(const Options& model, int tp, int cp, int pp) {
    if (std::string refusal = context_refusal(model, cp); !refusal.empty()) return refusal;
    for (const TensorRow& row : tensor_table(model)) {
        if (row.unit != Unit::block || row.shard != Shard::rows) continue;
        for (const Section& section : row.sections) {
            int size = section.pieces > 0 ? section.pieces : (int)section.rows;
            if (size % tp == 0) continue;
            if (!section.has_copies) return text("--tp %d: does not divide %s %d", tp, section.option, size);
            if (tp % size)
                return text("--tp %d: neither divides %s %d nor is a multiple of it", tp, section.option,
                            size);
        }
    }
    // The activations between the matrices are divided as well, by rows or by channels.
    if (model.channels % tp) return text("--tp %d: does not divide --channels %d", tp, model.channels);
    if (model.sequence_length / cp % tp)
        return text("--tp %d: does not divide --sequence-length %d%s", tp, model.sequence_length,
                    cp > 1 ? text(" / --cp %d", cp).c_str() : "");
    if (int heads = ngram_head_count(model); heads % tp)
        return text("--tp %d: does not divide the %d heads of --ngram", tp, heads);
    if (model.vocab_size < tp) return text("--tp %d: more parts than --vocab-size %d", tp, model.vocab_size);
    if (model.layers < pp) return text("--pp %d: more stages than --layers %d", pp, model.layers);
    if (int chunks = chunks_of(model, pp); model.layers < (long long)pp * chunks) {
        return text("--pp %d: with --pp-chunks %d, more parts than --layers %d", pp, chunks, model.layers);
    }
    return "";
}

// ----------------------------------------------------------------------------
// layouts that fit

inline bool fits(const Cut& cut, int processes) {
    return cut.dp == 0 ? processes % cut.ranks() == 0 : processes == cut.ranks();
}

// Returns the first layout that fits all processes and the model, searching down from `from`: first fewer
// stages, then fewer context and tensor ranks, but not fewer than in `least`. Returns `from` if none fits.
inline Cut lowered_layout(const Options& model, const Cut& from, const Cut& least, int processes) {
    Cut cut = from;
    for (cut.tp = from.tp; cut.tp >= least.tp; cut.tp--) {
        for (cut.cp = from.cp; cut.cp >= least.cp; cut.cp--) {
            for (cut.pp = from.pp; cut.pp >= least.pp; cut.pp--)
                if (fits(cut, processes) && cut_refusal(model, cut.tp, cut.cp, cut.pp).empty()) return cut;
        }
    }
    return from;
}

// Returns the options that turn one layout into another, such as "--tp 2 --dp 4".
inline std::string layout_changes(const Cut& from, const Cut& to) {
    std::string changes;
    auto add = [&](const char* option, int value) {
        append_item(changes, text("%s %d", option, value), " ");
    };
    if (to.tp != from.tp) add("--tp", to.tp);
    if (to.cp != from.cp) add("--cp", to.cp);
    if (to.pp != from.pp) add("--pp", to.pp);
    if (from.dp && to.dp != from.dp) add("--dp", to.dp);
    return changes;
}

// Proposes the two layouts of all processes that fit the model and are nearest to the one asked for: those
// that change the fewest options and, among these, those that change --tp, --cp and --pp least, because --dp
// follows from them. A kind of parallelism that was not asked for is not proposed.
inline std::string nearest_layouts(const Options& model, const Cut& asked, int processes) {
    struct Candidate {
        std::array<int, 5> distance;
        std::string changes;
        auto operator<=>(const Candidate&) const = default;
    };
    std::vector<Candidate> candidates;
    for (int tp = 1; tp <= processes; tp++) {
        if (processes % tp || (tp > 1 && asked.tp == 1)) continue;
        for (int cp = 1; cp <= processes / tp; cp++) {
            if (processes / tp % cp || (cp > 1 && asked.cp == 1)) continue;
            for (int pp = 1; pp <= processes / tp / cp; pp++) {
                if (processes / tp / cp % pp || (pp > 1 && asked.pp == 1)) continue;
                if (!cut_refusal(model, tp, cp, pp).empty()) continue;
                Cut layout = {.tp = tp, .cp = cp, .pp = pp, .dp = processes / tp / cp / pp};
                int changed = (tp != asked.tp) + (cp != asked.cp) + (pp != asked.pp) +
                              (asked.dp && layout.dp != asked.dp);
                int by = std::abs(tp - asked.tp) + std::abs(cp - asked.cp) + std::abs(pp - asked.pp);
                candidates.push_back({{changed, by, tp, cp, pp}, layout_changes(asked, layout)});
            }
        }
    }
    std::sort(candidates.begin(), candidates.end());
    std::vector<std::string> nearest;
    for (size_t i = 0; i < std::min<size_t>(2, candidates.size()); i++) {
        nearest.push_back(candidates[i].changes);
    }
    return alternatives(nearest);
}

// Returns the divisors of `number` nearest to `to`, which does not divide it, as in "2 or 4". The larger one
// is left out if it exceeds `most`.
inline std::string nearest_divisors(int to, int number, int most) {
    int below = std::min(to, number), above = to;
    while (number % below) below--;
    while (above <= most && number % above) above++;
    return text("%d%s", below, above <= most ? text(" or %d", above).c_str() : "");
}

// ----------------------------------------------------------------------------
// layers of each part of a pipeline

// Parses "3,4,4,3", the layers of each part: `parts` numbers with the sum `layers`.
inline std::vector<int> parse_split(const std::string& list, int layers, int parts) {
    std::vector<int> split;
    long long sum = 0;
    for (const std::string& item : comma_separated(list)) {
        int number = 0;
        const char* end = item.data() + item.size();
        auto [rest, error] = std::from_chars(item.data(), end, number);
        if (error != std::errc() || rest != end || number < 1) {
            fail("--pp-layers %s: '%s' is not a number of layers; give time, memory or a list like 3,4,4,3",
                 printable(list).c_str(), printable(item).c_str());
        }
        split.push_back(number);
        sum += number;
    }
    if (split.size() != (size_t)parts) {
        fail("--pp-layers %s: %s, but --pp with --pp-chunks makes %s; give one for each part",
             printable(list).c_str(), counted(split.size(), "number").c_str(),
             counted(parts, "part").c_str());
    }
    if (sum != layers) {
        fail("--pp-layers %s: adds up to %lld layers, but the model has %d; change the list or --layers",
             printable(list).c_str(), sum, layers);
    }
    return split;
}

// ----------------------------------------------------------------------------
// filling in

inline void complete_ranks(Options& options, int processes) {
    const Cut asked = options;
    long long parts = options.ranks_of_data();
    if (std::string refusal = cut_refusal(options, options.tp, options.cp, options.pp); !refusal.empty()) {
        int chunks = chunks_of(options, options.pp), most = options.layers / options.pp;
        std::string fewer = chunks > 1 && most > 0 && most < chunks ? text(", or --pp-chunks %d", most) : "";
        fail("%s; give %s%s", refusal.c_str(), nearest_layouts(options, asked, processes).c_str(),
             fewer.c_str());
    }
    if (options.dp == 0 && processes % parts) {
        long long below = processes / parts * parts, above = below + parts;
        std::string product =
            layout_changes(Cut(), Cut{.tp = options.tp, .cp = options.cp, .pp = options.pp});
        fail("%s: a multiple of %lld processes is needed and this run has %d; give %s, or start %s%lld "
             "(mpirun -np %lld)",
             product.c_str(), parts, processes, nearest_layouts(options, asked, processes).c_str(),
             below ? text("%lld or ", below).c_str() : "", above, below ? below : above);
    }
    if (options.dp == 0) options.dp = (int)(processes / parts);
    // The product does not overflow: each factor is at most 2^20.
    if (parts * options.dp != processes) {
        std::string others =
            options.cp > 1 ? text("--tp %d, --cp %d", options.tp, options.cp) : text("--tp %d", options.tp);
        fail("--dp %d: with %s and --pp %d needs %lld processes, but this run has %d; give %s, or "
             "start %lld (mpirun -np %lld)",
             options.dp, others.c_str(), options.pp, parts * options.dp, processes,
             nearest_layouts(options, asked, processes).c_str(), parts * options.dp, parts * options.dp);
    }
}

// Refuses options that no number of stages would make valid.
inline void check_pipeline_options(const Options& options) {
    if (options.pp_chunks > 1 && options.pp_schedule != PipelineSchedule::interleaved) {
        fail("--pp-chunks %d: with --pp-schedule %s each stage has only one chunk; add --pp-schedule "
             "interleaved, or leave --pp-chunks out",
             options.pp_chunks, name_of(options.pp_schedule));
    }
    if (options.pp_chunks > options.layers) {
        fail("--pp-chunks %d: more parts than --layers %d; lower it", options.pp_chunks, options.layers);
    }
}

inline void complete_pipeline(Options& options) {
    options.pp_chunks = chunks_of(options, options.pp);
    if (kind_of<PipelineLayers>(options.pp_layers) == PipelineLayers::list)
        parse_split(options.pp_layers, options.layers, options.pp * options.pp_chunks);
}

inline void complete_tensor_overlap(Options& options) {
    if (options.tp == 1) {
        options.tp_overlap = 1;  // nothing is sent
        return;
    }
    int own = options.own_tokens(), rows = options.micro_batch * own / options.tp;
    if (options.tp_overlap == 0) {
        options.tp_overlap = 4;
        while (rows % options.tp_overlap) options.tp_overlap--;
    }
    if (rows % options.tp_overlap) {
        int most = (int)find_option("--tp-overlap")->limits.high;
        fail("--tp-overlap %d: does not divide the %d rows of a rank, %d sequences * %d tokens / %d tensor "
             "ranks; give %s",
             options.tp_overlap, rows, options.micro_batch, own, options.tp,
             nearest_divisors(options.tp_overlap, rows, most).c_str());
    }
}

inline void complete_shard_group(Options& options) {
    if (options.zero == 0) {
        if (options.shard_group > 1) {
            fail(
                "--shard-group %d: with --zero 0 every rank keeps everything; add --zero 1, 2 or 3, or leave "
                "--shard-group out",
                options.shard_group);
        }
        options.shard_group = 1;
        return;
    }
    if (options.shard_group == 0) options.shard_group = options.dp;  // until it is chosen
    if (options.dp % options.shard_group) {
        fail("--shard-group %d: does not divide the %s; give %s", options.shard_group,
             counted(options.dp, "data rank").c_str(),
             nearest_divisors(options.shard_group, options.dp, options.dp).c_str());
    }
}

// The first steps need whole micro-batches of `tokens` tokens, and at least one for each data rank.
inline void complete_batch_ramp(Options& options, long long tokens) {
    BatchRamp ramp = parse_batch_ramp(options.batch_ramp);
    const char* given = options.batch_ramp.c_str();
    if (options.global_batch == 0) options.global_batch = ramp.last;
    if (options.global_batch != ramp.last) {
        fail("--batch-ramp %s: ends with %lld tokens, but --global-batch is %lld; make them equal", given,
             ramp.last, options.global_batch);
    }
    if (ramp.first % tokens || ramp.first / tokens < options.dp) {
        fail("--batch-ramp %s: begins with %lld tokens, but must begin with a multiple of %lld (a "
             "micro-batch) that is at least %lld (one per data rank); give one, or a smaller --micro-batch",
             given, ramp.first, tokens, tokens * options.dp);
    }
}

// Micro-batches of a step are dealt out to data ranks in turn (comm/layout.h), so there must be at least one
// for each.
inline void complete_global_batch(Options& options) {
    long long tokens = (long long)options.sequence_length * options.micro_batch, least = tokens * options.dp;
    if (!options.batch_ramp.empty()) complete_batch_ramp(options, tokens);
    // Stages of an interleaved pipeline idle least if the number of a rank's micro-batches is a multiple of
    // the number of stages.
    int round = options.pp_schedule == PipelineSchedule::interleaved ? options.pp : 1;
    if (options.global_batch == 0) options.global_batch = least * round;
    bool too_small = options.dp > 1 && options.global_batch < least;
    if (options.global_batch % tokens || too_small) {
        long long below = options.global_batch / tokens * tokens, above = std::max(below + tokens, least);
        auto takes = [&](int sequences) {
            long long smaller = (long long)options.sequence_length * sequences;
            return options.global_batch % smaller == 0 && options.global_batch / smaller >= options.dp;
        };
        int smaller = options.micro_batch - 1;
        while (smaller > 0 && !takes(smaller)) smaller--;
        std::string reason = too_small
                                 ? text("less than a micro-batch for each of %d data ranks,", options.dp)
                                 : "not a multiple of the micro-batch of";
        fail("--global-batch %lld: %s %d sequences * %d tokens%s = %lld; give %s%lld%s", options.global_batch,
             reason.c_str(), options.micro_batch, options.sequence_length,
             too_small ? text(" * %d", options.dp).c_str() : "", too_small ? least : tokens,
             below >= least ? text("%lld or ", below).c_str() : "", above,
             smaller ? text(", or --micro-batch %d", smaller).c_str() : "");
    }
    if (options.global_batch / tokens > INT32_MAX) {
        fail("--global-batch %lld: more than 2^31 micro-batches of %lld tokens; lower it or raise "
             "--micro-batch",
             options.global_batch, tokens);
    }
    const OptionRow& row = *find_option("--global-batch");
    check_limits(row, row.get(options));
}

// Chooses values for options that are not given. These functions are passed in, because code that estimates
// the speed of layouts or reads token files is in higher layers.
struct LayoutChoices {
    // Completes the cut of a run whose --tp or --pp is auto.
    std::function<void(Options& options, int processes)> cut = [](Options&, int) {
        fail("--tp auto: the layout is only chosen when a run starts; give --tp and --pp");
    };
    // Returns the number of ranks that share the state, for a layout that is otherwise complete.
    std::function<int(const Options& options)> shard_group = [](const Options& o) { return o.dp; };
    // Returns the number of tokens in one pass over the data.
    std::function<double(const Options& options)> tokens_of_epoch = [](const Options&) -> double {
        fail("--epochs: tokens are only counted when a run starts; give --steps");
    };
};

// Completes the layout; all other options must be complete. Nothing is allocated yet, so a refusal costs no
// memory.
inline void complete_layout(Options& options, int processes, const LayoutChoices& choose = {}) {
    if (options.tp == 0 || options.pp == 0) choose.cut(options, processes);
    bool chooses_group = options.zero > 0 && options.shard_group == 0;
    check_pipeline_options(options);
    complete_ranks(options, processes);
    complete_shard_group(options);
    complete_global_batch(options);
    complete_tensor_overlap(options);
    complete_pipeline(options);
    if (chooses_group) options.shard_group = choose.shard_group(options);
}
