/*
How processes are started: the words of --launcher, with their placeholders for the hosts and the number of
ranks filled in. mpirun and srun are known by name, and get the options that the user's words omit; any other
program gets only what its command line has placeholders for.
*/
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"
#include "data/base/this_machine.h"
#include "data/supervisor/hosts.h"

using Words = std::vector<std::string>;

// Splits a command line into words as a shell does: quotes and backslashes keep spaces together; nothing else
// is special.
inline Words shell_words(std::string_view line, const char* option) {
    Words words;
    std::string word;
    bool begun = false;
    char quote = 0;
    for (size_t i = 0; i < line.size(); i++) {
        char c = line[i];
        bool escapes = c == '\\' && quote != '\'' && i + 1 < line.size();
        if (escapes) {
            word += line[++i], begun = true;
        } else if (quote) {
            if (c == quote)
                quote = 0;
            else
                word += c;
        } else if (c == '\'' || c == '"') {
            quote = c, begun = true;
        } else if (isspace((unsigned char)c)) {
            if (begun) words.push_back(word);
            word.clear(), begun = false;
        } else {
            word += c, begun = true;
        }
    }
    if (quote) fail("%s: unmatched %c in %s; close the quote", option, quote, printable(line).c_str());
    if (begun) words.push_back(word);
    return words;
}

class Launcher {
public:
    // `on_hosts`: hosts are named, by the user or by a scheduler.
    Launcher(const std::string& line, bool on_hosts) {
        words_ = shell_words(line, "--launcher");
        if (words_.empty()) fail("--launcher: empty; give mpirun, srun or a command line");
        // At most one rank per slot: with these options, each host in turn gets as many ranks as it has
        // slots, and the trainer chooses the cores itself.
        if (is_mpirun(words_[0])) {
            bool is_allowed = getenv("OMPI_ALLOW_RUN_AS_ROOT") && getenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
            bool as_root = geteuid() == 0 && !is_allowed;
            if (as_root && !has_word("--allow-run-as-root")) {
                if (in_container())
                    add({"--allow-run-as-root"});
                else
                    refusal_ = text("--launcher %s: Open MPI refuses to run as root; run as another user, or "
                                    "give --launcher '%s --allow-run-as-root'",
                                    printable(line).c_str(), printable(line).c_str());
            }
            if (on_hosts && !mentions("{hosts}")) add({"--hostfile", "{hosts}"});
            if (!has_word("--map-by")) add({"--map-by", "slot"});
            if (!has_word("--bind-to")) add({"--bind-to", "none"});
            if (!mentions("{ranks}")) add({"-n", "{ranks}"});
        } else if (words_[0].substr(words_[0].rfind('/') + 1) == "srun") {
            if (!has_word("--mpi")) add({"--mpi=pmix"});
            if (!has_word("--kill-on-bad-exit")) add({"--kill-on-bad-exit=1"});
            if (!has_word("--overlap")) add({"--overlap"});
            if (on_hosts && !mentions("{names}") && !mentions("{hosts}"))
                add({"--nodes={nodes}", "--nodelist={names}"});
            if (!mentions("{ranks}")) add({"--ntasks={ranks}"});
        } else if (!mentions("{ranks}") || (on_hosts && !mentions("{hosts}") && !mentions("{names}"))) {
            fail("--launcher %s: does not say where the %s go; write {ranks}%s in it, as in "
                 "`mpirun --hostfile {hosts} --map-by slot --bind-to none -n {ranks}`",
                 printable(line).c_str(), mentions("{ranks}") ? "hosts" : "ranks",
                 on_hosts ? " and {hosts} (a hostfile) or {names}" : "");
        }
    }

    // Returns the command that starts `command` on these hosts; `file` lists them (hosts_file_text).
    Words start(const std::vector<HostRanks>& places, const std::string& file, const Words& command) const {
        if (!refusal_.empty()) fail("%s", refusal_.c_str());
        Words result;
        std::string names;
        for (const HostRanks& place : places) append_item(names, place.name, ",");
        for (std::string word : words_) {
            replace(word, "{hosts}", file);
            replace(word, "{names}", names);
            replace(word, "{nodes}", std::to_string(places.size()));
            replace(word, "{ranks}", std::to_string(ranks_of(places)));
            result.push_back(word);
        }
        result.insert(result.end(), command.begin(), command.end());
        return result;
    }

private:
    bool mentions(std::string_view what) const {
        for (const std::string& word : words_) {
            if (word.find(what) != word.npos) return true;
        }
        return false;
    }
    bool has_word(const std::string& option) const {
        for (const std::string& word : words_) {
            if (word == option || word == option.substr(1) || word.starts_with(option + "=")) return true;
        }
        return false;
    }
    void add(const Words& words) { words_.insert(words_.end(), words.begin(), words.end()); }

    static void replace(std::string& word, std::string_view from, const std::string& to) {
        for (size_t at = word.find(from); at != word.npos; at = word.find(from, at + to.size()))
            word.replace(at, from.size(), to);
    }

    Words words_;
    std::string refusal_;  // why nothing can be started; empty: it can
};
