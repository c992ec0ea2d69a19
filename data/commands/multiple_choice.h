/*
Multiple-choice questions, to test what a model has learned: each has a context, several continuations and the
number of the right one. The model answers with the choice that it considers likeliest (as in HellaSwag).

Two kinds of files are read.

1. JSON lines, one object per line; blank lines and other fields are ignored:

       {"context": "The sky is", "choices": ["blue.", "made of cheese."], "answer": 0}

   "answer" counts from 0, and may be a string such as "1", as in HellaSwag, whose own names "ctx", "endings"
   and "label" are accepted too. The context and each choice are encoded separately, the choice with a space
   before it unless it begins with white space. An empty context becomes the token that ends a text.

2. The evaluation files of llm.c: a header of 256 int32 (20240522; version 1; number of examples; bytes of the
   longest), then each example in uint16:

       65535, bytes of the example, its number from 0, answer, number of choices,
       tokens in the context, those tokens, and for each choice: its number of tokens, those tokens

A choice is scored by the sum of the logarithms of its tokens' likelihoods, which favors short choices, and by
their mean. Files are read strictly: one with any invalid field is refused.
*/
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/tokenizer/tokenizer.h"
#include "data/base/utf8.h"
#include "data/base/strings.h"

struct ChoiceExample {
    std::vector<int> context;               // not empty
    std::vector<std::vector<int>> choices;  // two or more, none empty
    int answer;                             // index of the right one
    std::string place;                      // "FILE:LINE" or "FILE: example NUMBER", for messages
};

// ----------------------------------------------------------------------------
// JSON lines

// Returns the text that is encoded for a choice. If the tokenizer itself adds a space before every text, none
// is added here.
inline std::string choice_text(const std::string& choice, const Tokenizer& tokenizer) {
    const char* at = choice.data();
    bool spaced = is_white_space(next_code_point(at, choice.data() + choice.size()));
    std::string with_space = spaced ? choice : " " + choice;
    bool own_space = tokenizer.adds_space() && with_space[0] == ' ';
    return own_space ? with_space.substr(1) : with_space;
}

// `place` is FILE:LINE.
inline ChoiceExample parse_choices(const nlohmann::json& value, const Tokenizer& tokenizer,
                                   const std::string& place) {
    JsonObject object(value, place);
    bool hellaswag = !value.contains("context") && value.contains("ctx");
    const char* choices_name = hellaswag ? "endings" : "choices";
    ChoiceExample example;
    example.place = place;

    example.context = tokenizer.encode_prompt(object.string(hellaswag ? "ctx" : "context"));
    if (example.context.empty()) {
        if (tokenizer.end_of_text() < 0) {
            fail("%s: the context is empty, and the tokenizer has no end-of-text token to take its place; "
                 "give some context",
                 place.c_str());
        }
        example.context = {tokenizer.end_of_text()};
    }

    const nlohmann::json& choices = object.array(choices_name);
    if (choices.size() < 2)
        fail("%s: %s has length %zu; give two or more choices", place.c_str(), choices_name, choices.size());
    for (const nlohmann::json& choice : choices) {
        size_t number = example.choices.size();
        if (!choice.is_string()) {
            fail("%s: %s[%zu] is %s; it must be a string", place.c_str(), choices_name, number,
                 json_text(choice).c_str());
        }
        const std::string& words = choice.get_ref<const std::string&>();
        if (words.empty()) {
            fail("%s: %s[%zu] is empty; each choice must have some text", place.c_str(), choices_name,
                 number);
        }
        std::vector<int>& tokens =
            example.choices.emplace_back(tokenizer.encode(choice_text(words, tokenizer)));
        if (tokens.empty()) {
            fail("%s: %s[%zu] has no tokens; give it some text, or use another tokenizer", place.c_str(),
                 choices_name, number);
        }
    }
    const char* answer_name = hellaswag ? "label" : "answer";
    nlohmann::json answer = object.get(answer_name);
    if (answer.is_string()) {
        // a string that does not hold a number stays a string, and is refused as one
        auto number = nlohmann::json::parse(answer.get_ref<const std::string&>(), nullptr, false);
        if (number.is_number_integer()) answer = number;
    }
    if (answer.is_null()) fail("%s is missing; say which choice is right", object.where(answer_name).c_str());
    example.answer =
        (int)json_integer(answer, 0, (int64_t)example.choices.size() - 1, object.where(answer_name));
    return example;
}

inline std::vector<ChoiceExample> parse_choice_lines(std::string_view content, const Tokenizer& tokenizer,
                                                     const std::string& path) {
    std::vector<ChoiceExample> examples;
    each_json_object(content, path, [&](const nlohmann::json& value, const std::string& place) {
        examples.push_back(parse_choices(value, tokenizer, place));
    });
    return examples;
}

// ----------------------------------------------------------------------------
// llm.c

constexpr int32_t choice_file_magic = 20240522;

// Parses the bytes of an evaluation file, and checks all of them.
class ChoiceFileParser {
public:
    ChoiceFileParser(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

    std::vector<ChoiceExample> parse() {
        check_header();
        std::vector<ChoiceExample> examples;
        for (int i = 0; i < count_; i++) examples.push_back(next_example(i));
        if (at_ != bytes_.size()) {
            fail("%s: is too long: %zu bytes follow the %d examples of its header; copy it again",
                 path_.c_str(), bytes_.size() - at_, count_);
        }
        if (longest_seen_ != longest_) {
            fail("%s: its header says that the longest example has %d bytes, but the longest has %d; the "
                 "file is damaged: copy it again",
                 path_.c_str(), longest_, longest_seen_);
        }
        return examples;
    }

private:
    static constexpr size_t header_bytes = 1024;
    static constexpr int mark = 65535;

    void check_header() {
        const char* path = path_.c_str();
        if (bytes_.size() < header_bytes) {
            fail("%s: is truncated: %zu bytes, too few for the header of an evaluation file (1024); copy it "
                 "again",
                 path, bytes_.size());
        }
        int32_t header[4];
        memcpy(header, bytes_.data(), sizeof header);
        if (header[0] != choice_file_magic) {
            fail("%s: is not an evaluation file (it begins with %d, not %d); make one with llm.c's scripts, "
                 "or use JSON lines",
                 path, header[0], choice_file_magic);
        }
        if (header[1] != 1)
            fail("%s: has version %d, but only version 1 is supported; make it again", path, header[1]);
        count_ = header[2];
        longest_ = header[3];
        // An example's number is stored in 16 bits.
        if (count_ < 1 || count_ > 65536)
            fail("%s: its header counts %d examples (1 .. 65536 are possible); make it again", path, count_);
        if (longest_ < 2 || longest_ > 65535) {
            fail("%s: its header says that the longest example has %d bytes (at most 65535 are possible); "
                 "the file is damaged: copy it again",
                 path, longest_);
        }
        at_ = header_bytes;
    }

    ChoiceExample next_example(int number) {
        ChoiceExample example;
        example.place = text("%s: example %d", path_.c_str(), number);
        place_ = example.place.c_str();
        begin_ = at_;
        end_ = bytes_.size();
        if (int found = next(); found != mark) damaged(text("begins with %d, not with 65535", found));
        int size = next();
        if (size % 2 != 0 || (size_t)size > bytes_.size() - begin_)
            damaged(text("has %d bytes by its own count, but %zu are left", size, bytes_.size() - begin_));
        if (size > longest_)
            damaged(text("has %d bytes, more than the longest in the header (%d)", size, longest_));
        longest_seen_ = std::max(longest_seen_, size);
        end_ = begin_ + (size_t)size;
        if (int found = next(); found != number) damaged(text("is numbered %d", found));
        example.answer = next();
        int choices = next();
        if (choices < 2) damaged(text("has %d choices; two or more are needed", choices));
        if (example.answer >= choices)
            damaged(text("has answer %d, but its choices are numbered 0 to %d", example.answer, choices - 1));
        example.context = next_tokens("the context");
        for (int i = 0; i < choices; i++)
            example.choices.push_back(next_tokens(text("choice %d", i).c_str()));
        if (at_ != end_) damaged(text("has %zu bytes after its last choice", end_ - at_));
        return example;
    }

    int next() {
        if (end_ - std::min(at_, end_) < 2) damaged("ends too early");
        uint16_t value;
        memcpy(&value, bytes_.data() + at_, sizeof value);
        at_ += sizeof value;
        return value;
    }

    std::vector<int> next_tokens(const char* what) {
        int count = next();
        if (count == 0) damaged(text("has no tokens in %s", what));
        if ((size_t)count > (end_ - at_) / 2)
            damaged(text("claims %d tokens in %s, but ends before that", count, what));
        std::vector<int> tokens;
        for (int i = 0; i < count; i++) tokens.push_back(next());
        if (std::find(tokens.begin(), tokens.end(), mark) != tokens.end())
            damaged(text("has the mark 65535 among the tokens of %s", what));
        return tokens;
    }

    [[noreturn]] void damaged(const std::string& how) const {
        fail("%s %s; the file is damaged: copy it again, or make it again", place_, how.c_str());
    }

    std::string_view bytes_;
    const std::string& path_;
    const char* place_ = "";
    size_t at_ = 0, begin_ = 0, end_ = 0;  // end_: of the example
    int32_t count_ = 0, longest_ = 0, longest_seen_ = 0;
};

// ----------------------------------------------------------------------------

// Returns whether these are the first bytes of an evaluation file of llm.c, in either byte order.
inline bool begins_choice_file(std::string_view bytes) {
    uint32_t magic = 0;
    if (bytes.size() < sizeof magic) return false;
    memcpy(&magic, bytes.data(), sizeof magic);
    return magic == (uint32_t)choice_file_magic || magic == __builtin_bswap32((uint32_t)choice_file_magic);
}

// Returns the examples of a file of either kind, at least one, with tokens below `vocab`. The tokenizer is
// for JSON lines; a file of llm.c is already encoded, and does not say with which tokenizer.
inline std::vector<ChoiceExample> parse_choice_file(std::string_view content, const std::string& path,
                                                    const Tokenizer* tokenizer, int vocab) {
    std::vector<ChoiceExample> examples;
    if (begins_choice_file(content)) {
        examples = ChoiceFileParser(content, path).parse();
    } else {
        if (!tokenizer) {
            fail("%s: is not an llm.c evaluation file, and JSON lines need a tokenizer; name one",
                 path.c_str());
        }
        examples = parse_choice_lines(content, *tokenizer, path);
    }
    if (examples.empty()) fail("%s: has no examples; give some, one a line", path.c_str());
    for (const ChoiceExample& example : examples) {
        auto check = [&](const std::vector<int>& tokens) {
            for (int token : tokens) {
                if (token < vocab) continue;
                fail("%s: token %d is outside the vocabulary of %d; use the tokenizer that the model was "
                     "trained with",
                     example.place.c_str(), token, vocab);
            }
        };
        check(example.context);
        for (const auto& choice : example.choices) check(choice);
    }
    return examples;
}

inline std::vector<ChoiceExample> read_choices(const std::string& path, const Tokenizer* tokenizer,
                                               int vocab) {
    return parse_choice_file(read_text(path), path, tokenizer, vocab);
}

// Refuses a choice that is longer than T, the number of tokens that the model sees.
inline void check_choice_fits(const ChoiceExample& example, size_t number, int T) {
    size_t tokens = example.choices[number].size();
    if (tokens <= (size_t)T) return;
    fail("%s: choice %zu has %zu tokens, but the model sees %d; leave the example out, or use a model with a "
         "longer context",
         example.place.c_str(), number, tokens, T);
}

// Fills the row of a batch in which a choice is scored: inputs (T), and targets (T), which are -1 except at
// the tokens of the choice. A row that would be longer than T loses the beginning of the context.
inline void choice_row(const ChoiceExample& example, size_t number, int T, int* inputs, int* targets) {
    check_choice_fits(example, number, T);
    const std::vector<int>& choice = example.choices[number];
    size_t room = (size_t)T + 1 - choice.size();  // for the context; its last token predicts the first target
    size_t kept = std::min(example.context.size(), room);
    std::vector<int> tokens(example.context.end() - (ptrdiff_t)kept, example.context.end());
    tokens.insert(tokens.end(), choice.begin(), choice.end());
    for (size_t t = 0; t < (size_t)T; t++) {
        bool scored = t + 1 >= kept && t + 1 < tokens.size();
        inputs[t] = t < tokens.size() ? tokens[t] : 0;
        targets[t] = scored ? tokens[t + 1] : -1;
    }
}

// The number of questions that the model answered right. Scores of separate parts can be added up.
struct ChoiceScore {
    int64_t examples = 0;
    int64_t right_by_sum = 0;   // the choice with the largest sum is the answer
    int64_t right_by_mean = 0;  // the choice with the largest mean over its tokens is the answer

    // log_likelihoods: for each choice of an example, the sum over its tokens. In a tie, the first choice
    // wins.
    void add(const ChoiceExample& example, const std::vector<double>& log_likelihoods) {
        if (log_likelihoods.size() != example.choices.size()) {
            fail("%s: has %zu choices and %zu scores; score each once", example.place.c_str(),
                 example.choices.size(), log_likelihoods.size());
        }
        size_t by_sum = 0, by_mean = 0;
        auto mean = [&](size_t i) { return log_likelihoods[i] / (double)example.choices[i].size(); };
        for (size_t i = 0; i < log_likelihoods.size(); i++) {
            if (std::isnan(log_likelihoods[i])) {
                fail("%s: the likelihood of choice %zu is not a number; check the weights of the model",
                     example.place.c_str(), i);
            }
            if (log_likelihoods[i] > log_likelihoods[by_sum]) by_sum = i;
            if (mean(i) > mean(by_mean)) by_mean = i;
        }
        examples++;
        right_by_sum += (int)by_sum == example.answer;
        right_by_mean += (int)by_mean == example.answer;
    }

    // Fractions of the examples, 0 .. 1; 0 if there are none.
    double accuracy() const { return share(right_by_sum); }
    double accuracy_by_mean() const { return share(right_by_mean); }

    // Returns the standard error of an accuracy, for this number of examples.
    double standard_error(double accuracy) const {
        return examples > 1 ? std::sqrt(accuracy * (1 - accuracy) / (double)(examples - 1)) : 0;
    }

private:
    double share(int64_t right) const { return examples ? (double)right / (double)examples : 0; }
};
