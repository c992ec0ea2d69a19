/*
Named lists of files: --val-data web=web_*.bin --val-data code=code_*.bin. Records store all lists as one
string, separated by semicolons. A single list needs no name.
*/
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"

struct NamedList {
    std::string name;  // may be empty if it is the only list
    std::string list;

    // For messages: the name, or the files if it has none.
    const std::string& title() const { return name.empty() ? list : name; }
};

// Splits `given` into lists. An existing file is always one list, even if its name contains ; or =. option:
// for messages.
inline std::vector<NamedList> named_lists(const char* option, const std::string& given) {
    if (access(given.c_str(), F_OK) == 0) return {{"", given}};
    std::vector<NamedList> lists;
    auto is_name = [](std::string_view text) {
        auto fits = [](unsigned char c) { return isalnum(c) || c == '_' || c == '-' || c == '.'; };
        return !text.empty() && std::ranges::all_of(text, fits);
    };
    for (size_t at = 0; at < given.size();) {
        size_t end = std::min(given.find(';', at), given.size());
        std::string one = given.substr(at, end - at);
        at = end + 1;
        size_t equals = one.find('=');
        bool named = equals != std::string::npos && is_name(one.substr(0, equals));
        lists.push_back(named ? NamedList{one.substr(0, equals), one.substr(equals + 1)}
                              : NamedList{"", one});
    }
    for (const NamedList& one : lists) {
        if (one.list.empty()) fail("%s %s: names no files; give some", option, printable(given).c_str());
        if (lists.size() > 1 && one.name.empty())
            fail("%s %s: with several lists, each needs a name; write NAME=%s, or put all files in one "
                 "list, separated by commas",
                 option, printable(one.list).c_str(), printable(one.list).c_str());
        if (std::ranges::count(lists, one.name, &NamedList::name) > 1)
            fail("%s: two lists are named %s; give each its own name", option, one.name.c_str());
    }
    return lists;
}
