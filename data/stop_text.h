/*
Ends a text where one of some given texts appears in it. Text comes in pieces, and what may be the beginning
of such a text is held back until it is clear; so nothing of it is ever shown.
*/
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

class StopText {
public:
    explicit StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    // What of the text so far is certain to stay.
    std::string add(std::string_view piece) {
        if (stopped_) return "";
        held_ += piece;
        size_t end = std::string::npos;
        for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
        stopped_ = end != std::string::npos;
        if (!stopped_) end = held_.size() - held_back();
        std::string certain = held_.substr(0, end);
        held_.erase(0, end);
        return certain;
    }

    bool stopped() const { return stopped_; }

    // The rest of a text that has ended by itself.
    std::string finish() { return stopped_ ? "" : std::exchange(held_, {}); }

private:
    // Bytes at the end that begin one of the texts.
    size_t held_back() const {
        size_t longest = 0;
        for (const std::string& stop : stops_) {
            for (size_t n = std::min(stop.size() - 1, held_.size()); n > longest; n--) {
                if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, n))) longest = n;
            }
        }
        return longest;
    }

    std::vector<std::string> stops_;
    std::string held_;
    bool stopped_ = false;
};
