/*
Changes to a text before it is cut into words: the "normalizer" of a tokenizer.json, a list of steps.
*/
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/json.h"
#include "data/tokenizer/normal_form.h"
#include "data/tokenizer/pre_tokenizer.h"

class Normalizer {
public:
    Normalizer(const nlohmann::json& settings, const std::string& file) : where_(file + ": normalizer") {
        if (!settings.is_null()) add(settings);
    }

    bool changes_nothing() const { return steps_.empty(); }

    std::string apply(std::string_view text) const {
        GrowthLimit limit(text, where_);
        std::string result(text);
        for (const auto& step : steps_) {
            result = step(result, limit);
            limit.check(result);
        }
        return result;
    }

private:
    void add(const nlohmann::json& settings) {
        JsonObject object(settings, where_);
        std::string type = object.string("type");
        if (type == "Sequence") {
            for (const auto& step : object.array("normalizers")) add(step);
        } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
            auto form = std::make_shared<const NormalForm>(type);
            steps_.push_back(
                [form](const std::string& text, const GrowthLimit&) { return form->apply(text); });
        } else if (type == "Prepend") {
            std::string with = object.string("prepend");
            steps_.push_back([with](const std::string& text, const GrowthLimit&) {
                return text.empty() ? text : with + text;
            });
        } else if (type == "Replace") {
            std::string what = read_replaced(object), with = object.string("content");
            steps_.push_back([what, with](const std::string& text, const GrowthLimit& limit) {
                return limit.replaced(text, what, with);
            });
        } else {
            fail("%s: %s is not supported; use NFC, NFD, NFKC, NFKD, Prepend, Replace or a Sequence of them",
                 where_.c_str(), printable(type).c_str());
        }
        object.done(unsupported_remedy);
        check_steps(steps_.size(), where_);
    }

    std::string where_;
    std::vector<std::function<std::string(const std::string&, const GrowthLimit&)>> steps_;

public:
    // Reads the text that a Replace searches for.
    static std::string read_replaced(JsonObject& object) {
        JsonObject pattern = object.child("pattern");
        if (!pattern.get("Regex").is_null())
            fail("%s: Replace with a Regex is not supported; use one with a String", object.what().c_str());
        std::string what = pattern.string("String");
        if (what.empty()) fail("%s: Replace has an empty String; give it some text", object.what().c_str());
        pattern.done(unsupported_remedy);
        return what;
    }
};
