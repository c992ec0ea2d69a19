/*
A JSON object of a config.json of Hugging Face: read by key, with the type and the range checked. It remembers
which keys were read, so that a key that nobody understands is refused.
*/
#pragma once

#include <cmath>
#include <set>
#include <string>

#include "data/base/error.h"
#include "data/base/json.h"

class HfObject {
public:
    HfObject(const nlohmann::json& object, std::string file) : object_(object), file_(std::move(file)) {
        if (!object.is_object()) fail("%s: not a JSON object; not a model's config", file_.c_str());
    }

    bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

    bool is_null(const char* key) {
        used_.insert(key);
        return object_.contains(key) && object_[key].is_null();
    }

    const nlohmann::json& value(const char* key) {
        used_.insert(key);
        if (!has(key)) fail("%s: %s is missing; is this the model's own config.json?", file_.c_str(), key);
        return object_[key];
    }

    int size(const char* key) { return (int)json_integer(value(key), 1, 1 << 24, where(key)); }

    int size(const char* key, int standard) {
        used_.insert(key);
        return has(key) ? size(key) : standard;
    }

    float real(const char* key) {
        const nlohmann::json& found = value(key);
        float result = found.is_number() ? found.get<float>() : NAN;
        if (!(result > 0 && result < 1e12f)) {
            fail("%s: %s is %s; it must be a number above 0 and below 1e12", file_.c_str(), key,
                 json_text(found).c_str());
        }
        return result;
    }

    float real(const char* key, float standard) {
        used_.insert(key);
        return has(key) ? real(key) : standard;
    }

    // A share of something: above 0, at most 1.
    double fraction(const char* key, double standard) {
        used_.insert(key);
        if (!has(key)) return standard;
        double result = object_[key].is_number() ? object_[key].get<double>() : NAN;
        if (!(result > 0 && result <= 1)) {
            fail("%s: %s is %s; it must be a number above 0 and at most 1", file_.c_str(), key,
                 json_text(object_[key]).c_str());
        }
        return result;
    }

    bool flag(const char* key, bool standard) {
        used_.insert(key);
        if (!has(key)) return standard;
        if (!object_[key].is_boolean()) {
            fail("%s: %s is %s; it must be true or false", file_.c_str(), key,
                 json_text(object_[key]).c_str());
        }
        return object_[key].get<bool>();
    }

    std::string word(const char* key) {
        const nlohmann::json& found = value(key);
        if (!found.is_string()) {
            fail("%s: %s is %s; it must be a string", file_.c_str(), key, json_text(found).c_str());
        }
        return found.get<std::string>();
    }

    void ignore(const char* key) { used_.insert(key); }

    [[noreturn]] void refuse(const char* key, const std::string& value, const char* supported) {
        fail("%s: %s %s is not supported; only %s is", file_.c_str(), key, printable(value).c_str(),
             supported);
    }

    void refuse_unread() const {
        for (const auto& [key, value] : object_.items()) {
            if (!used_.contains(key)) {
                fail("%s: %s is not known for this kind of model; remove it if the model computes the same "
                     "without it",
                     file_.c_str(), printable(key).c_str());
            }
        }
    }

    std::string where(const char* key) const { return file_ + ": " + key; }

private:
    const nlohmann::json& object_;
    std::string file_;
    std::set<std::string, std::less<>> used_;
};
