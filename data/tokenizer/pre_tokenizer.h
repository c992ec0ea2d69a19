/*
Cuts a text into the words that byte-pair encoding works on: the "pre_tokenizer" of a tokenizer.json. It is a
list of steps, each of which cuts the pieces that the previous one made.
*/
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/json.h"
#include "data/tokenizer/limits.h"
#include "data/tokenizer/pattern.h"

// How matches of a pattern are treated.
enum class SplitBehavior {
    isolated,              // a separate piece
    removed,               // left out
    merged_with_previous,  // joined to the piece before it
    merged_with_next,
    contiguous  // joined to other matches next to it
};

inline constexpr const char* gpt2_pattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

inline constexpr std::string_view metaspace = "\u2581";  // stands for a space

// The remedy in messages that refuse an unknown field of tokenizer.json, or one with an unsupported effect.
constexpr const char* unsupported_remedy = "use a tokenizer without it";

class PreTokenizer {
public:
    PreTokenizer(const nlohmann::json& settings, const std::string& file) : file_(file) {
        if (!settings.is_null()) add(settings, file + ": pre_tokenizer");
    }

    // Returns whether the resulting words are in the byte alphabet.
    bool byte_level() const { return byte_level_; }

    // Returns whether a step may prepend a space to the text.
    bool adds_space() const {
        return std::any_of(steps_.begin(), steps_.end(),
                           [](const Step& step) { return step.kind != Step::split; });
    }

    // Calls word(piece) for each word of a text, in order. `leading`: the text is at the beginning of the
    // whole input.
    template <typename F>
    void split(std::string_view text, bool leading, F&& word) const {
        if (!text.empty()) run(0, text, leading, word);
    }

private:
    struct Step {
        enum Kind { split, prefix_space, to_metaspace } kind;
        std::optional<Pattern> pattern;  // used by split
        SplitBehavior behavior = SplitBehavior::isolated;
        bool invert = false;                                   // the pattern matches pieces, not separators
        enum Prefix { never, first, always } prefix = always;  // used by to_metaspace
    };

    void add(const nlohmann::json& settings, const std::string& what) {
        JsonObject object(settings, what);
        std::string type = object.string("type");
        if (byte_level_)
            fail("%s: %s after ByteLevel is not supported; put ByteLevel last", what.c_str(),
                 printable(type).c_str());
        if (type == "Sequence") {
            for (const auto& step : object.array("pretokenizers")) add(step, what);
        } else if (type == "ByteLevel") {
            if (object.boolean("add_prefix_space", true)) steps_.push_back({Step::prefix_space, {}});
            if (object.boolean("use_regex", true)) add_split(gpt2_pattern, SplitBehavior::isolated);
            object.ignore("trim_offsets");
            byte_level_ = true;
        } else if (type == "Split") {
            add_split(read_pattern(object), read_behavior(object), object.boolean("invert", false));
        } else if (type == "Digits") {
            // The library uses Rust's digits here, which follow Unicode 17.
            add_split("[\\p{N}\\x{11de0}-\\x{11de9}\\x{16ff4}-\\x{16ff6}]",
                      object.boolean("individual_digits", false) ? SplitBehavior::isolated
                                                                 : SplitBehavior::contiguous);
        } else if (type == "Metaspace") {
            add_metaspace(object);
        } else {
            fail("%s: %s is not supported; use ByteLevel, Split, Digits, Metaspace or a Sequence of them",
                 what.c_str(), printable(type).c_str());
        }
        object.done(unsupported_remedy);
        check_steps(steps_.size(), what);
    }

    void add_split(std::string_view pattern, SplitBehavior behavior, bool invert = false) {
        Step step{Step::split, Pattern(pattern, file_)};
        step.behavior = behavior;
        step.invert = invert;
        steps_.push_back(std::move(step));
    }

    void add_metaspace(JsonObject& object) {
        if (object.string("replacement") != metaspace) {
            fail("%s: the replacement %s is not supported; it must be U+2581", object.what().c_str(),
                 json_text(object.get("replacement")).c_str());
        }
        Step step{Step::to_metaspace, {}};
        const nlohmann::json& scheme = object.get("prepend_scheme");
        if (scheme == "first" || scheme == "never")
            step.prefix = scheme == "first" ? Step::first : Step::never;
        else if (!scheme.is_null() && scheme != "always")
            fail("%s: prepend_scheme is %s; it must be always, first or never", object.what().c_str(),
                 json_text(scheme).c_str());
        bool add_prefix_space = object.boolean("add_prefix_space", step.prefix != Step::never);
        if (add_prefix_space != (step.prefix != Step::never)) {
            fail("%s: add_prefix_space and prepend_scheme disagree; leave one out", object.what().c_str());
        }
        steps_.push_back(std::move(step));
        if (object.boolean("split", true))
            add_split(Pattern::quoted(metaspace), SplitBehavior::merged_with_next);
    }

    std::string read_pattern(JsonObject& object) {
        JsonObject pattern = object.child("pattern");
        const nlohmann::json& literal = pattern.get("String");
        std::string result =
            literal.is_string() ? Pattern::quoted(pattern.string("String")) : pattern.string("Regex");
        pattern.done(unsupported_remedy);
        return result;
    }

    SplitBehavior read_behavior(JsonObject& object) {
        static constexpr const char* names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext",
                                                "Contiguous"};
        std::string name = object.string("behavior");
        for (size_t i = 0; i < std::size(names); i++) {
            if (name == names[i]) return (SplitBehavior)i;
        }
        fail("%s: behavior is %s; it must be one of Isolated, Removed, MergedWithPrevious, MergedWithNext, "
             "Contiguous",
             object.what().c_str(), printable(name).c_str());
    }

    template <typename F>
    void run(size_t index, std::string_view text, bool leading, F& word) const {
        if (index == steps_.size()) return word(text);
        const Step& step = steps_[index];
        if (step.kind == Step::prefix_space) {
            if (text.front() == ' ') return run(index + 1, text, leading, word);
            return run(index + 1, ' ' + std::string(text), leading, word);
        }
        if (step.kind == Step::to_metaspace) {
            std::string changed = GrowthLimit(text, file_).replaced(text, " ", metaspace);
            bool wanted = step.prefix == Step::always || (step.prefix == Step::first && leading);
            if (wanted && !changed.starts_with(metaspace)) changed.insert(0, metaspace);
            return run(index + 1, changed, leading, word);
        }
        split_step(step, text, [&](size_t begin, size_t end) {
            run(index + 1, text.substr(begin, end - begin), leading && begin == 0, word);
        });
    }

    template <typename F>
    void split_step(const Step& step, std::string_view text, F&& piece) const {
        if (step.behavior == SplitBehavior::isolated)
            return step.pattern->split(text, [&](size_t begin, size_t end, bool) { piece(begin, end); });
        size_t held_begin = 0, held_end = 0;  // a piece that may still grow
        bool before = false;                  // the last piece was a match
        auto flush = [&] {
            if (held_begin < held_end) piece(held_begin, held_end);
        };
        step.pattern->split(text, [&](size_t begin, size_t end, bool matched) {
            matched ^= step.invert;
            bool join = false;
            switch (step.behavior) {
            case SplitBehavior::removed:
                if (matched) {
                    fail("%s: the pattern \"%s\" drops text (\"%s\"), which could not be restored; "
                         "use a tokenizer that keeps all text",
                         file_.c_str(), printable(step.pattern->source()).c_str(),
                         printable(text.substr(begin, end - begin)).c_str());
                }
                break;
            case SplitBehavior::merged_with_previous:
                join = matched && !before;
                break;
            case SplitBehavior::merged_with_next:
                join = !matched && before;
                break;
            case SplitBehavior::contiguous:
                join = matched == before;
                break;
            case SplitBehavior::isolated:
                break;
            }
            if (!join) {
                flush();
                held_begin = begin;
            }
            held_end = end;
            before = matched;
        });
        flush();
    }

    std::string file_;
    std::vector<Step> steps_;
    bool byte_level_ = false;
};
