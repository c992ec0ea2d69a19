/*
What is done to a text before it is cut into words: the "normalizer" of a tokenizer.json, a list of changes.
*/
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/base/json.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "data/tokenizer/unicode_nfc.h"

class Normalizer {
public:
    Normalizer(const nlohmann::json& settings, const std::string& file) {
        if (!settings.is_null()) add(settings, file + ": normalizer");
    }

    bool changes_nothing() const { return steps_.empty(); }

    std::string apply(std::string_view text) const {
        std::string result(text);
        for (const Step& step : steps_) {
            if (step.kind == Step::nfc)
                result = to_nfc(result);
            else if (step.kind == Step::prepend)
                result = result.empty() ? result : step.with + result;
            else
                result = replaced(result, step.what, step.with);
        }
        return result;
    }

private:
    struct Step {
        enum Kind { nfc, prepend, replace } kind;
        std::string what, with;
    };

    void add(const nlohmann::json& settings, const std::string& where) {
        JsonObject object(settings, where);
        std::string type = object.string("type");
        if (type == "Sequence") {
            for (const auto& step : object.array("normalizers")) add(step, where);
        } else if (type == "NFC") {
            steps_.push_back({Step::nfc, "", ""});
        } else if (type == "Prepend") {
            steps_.push_back({Step::prepend, "", object.string("prepend")});
        } else if (type == "Replace") {
            std::string what = read_replaced(object);
            steps_.push_back({Step::replace, what, object.string("content")});
        } else {
            fail("%s: %s is not supported; use NFC, Prepend, Replace or a Sequence of them", where.c_str(),
                 printable(type).c_str());
        }
        object.done(unsupported_remedy);
    }

    std::vector<Step> steps_;

public:
    // The text that a Replace looks for.
    static std::string read_replaced(JsonObject& object) {
        JsonObject pattern = object.child("pattern");
        if (!pattern.get("Regex").is_null())
            fail("%s: Replace with a Regex is not supported; use one with a String", object.what().c_str());
        std::string what = pattern.string("String");
        if (what.empty()) fail("%s: Replace of \"\" is not supported; name a text", object.what().c_str());
        pattern.done(unsupported_remedy);
        return what;
    }
};
