/*
Prompts that a person types, or that another program sends. On a terminal a line can be edited, and arrow keys
bring earlier lines back.
*/
#pragma once

#include <clocale>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <unistd.h>
#include <utility>

// The header declares an unrelated Tokenizer.
#define Tokenizer LibeditTokenizer
#include <histedit.h>
#undef Tokenizer

#include "data/base/error.h"
#include "data/base/stop_signals.h"

class PromptReader {
public:
    // alone: no other process would continue the answer, so Ctrl-C ends only the answer, not the program.
    // draws_seed: the first line of a session on a terminal is a command that sets a random seed.
    PromptReader(bool alone, bool draws_seed) : alone_(alone), draws_seed_(draws_seed) {}

    // Returns the next line that is not empty; empty at the end of input. A line that begins with a slash is
    // a command if typed on a terminal; from other input it gets another slash, which makes it a prompt.
    std::string next() {
        if (isatty(STDIN_FILENO)) return edited_line();
        std::string line;
        while (line.empty()) {
            if (!std::getline(std::cin, line)) return "";
            if (line.ends_with('\r')) line.pop_back();
        }
        return (line.starts_with('/') ? "/" : "") + line;
    }

private:
    // Ctrl-C is an ordinary key while a line is edited; at other times it is a signal.
    std::string edited_line() {
        if (!editor_) open_editor();
        if (std::exchange(draws_seed_, false)) return text("/seed %u", std::random_device()() % 1000000);
        std::string line;
        std::signal(SIGINT, SIG_DFL);
        while (line.empty()) {
            int bytes = 0;
            const char* typed = el_gets(editor_.get(), &bytes);
            if (!typed) {
                fputc('\n', screen_);
                return "";
            }
            line = typed;
            while (line.ends_with('\n') || line.ends_with('\r')) line.pop_back();
        }
        HistEvent event;
        history(history_.get(), &event, H_ENTER, line.c_str());
        if (alone_) stop_on_interrupt();
        return line;
    }

    // Prompts are UTF-8, even if the user's locale has another encoding.
    void open_editor() {
        if (!setlocale(LC_CTYPE, "C.UTF-8")) setlocale(LC_CTYPE, "");
        HistEvent event;
        history_.reset(history_init());
        history(history_.get(), &event, H_SETSIZE, 1000);
        history(history_.get(), &event, H_SETUNIQUE, 1);
        editor_.reset(el_init("train_gpt", stdin, screen_, stderr));
        EditLine* editor = editor_.get();
        el_set(editor, EL_SIGNAL, 1);
        el_set(editor, EL_EDITOR, "emacs");
        el_set(editor, EL_HIST, history, history_.get());
        el_set(
            editor, EL_PROMPT, +[](EditLine*) {
                static char prompt[] = "> ";
                return prompt;
            });
        el_set(editor, EL_SETTY, "-d", "-intr", nullptr);
        el_set(editor, EL_ADDFN, "drop-line", "Drops the line", drop_line);
        el_set(editor, EL_BIND, "^C", "drop-line", nullptr);
    }

    static unsigned char drop_line(EditLine* editor, int) {
        const LineInfoW* line = el_wline(editor);
        auto length = (int)(line->lastchar - line->buffer);
        if (length == 0) return CC_REFRESH;
        el_cursor(editor, length);
        el_deletestr(editor, length);
        return CC_REFRESH;
    }

    const bool alone_;
    bool draws_seed_;
    FILE* const screen_ = isatty(STDOUT_FILENO) ? stdout : stderr;
    std::unique_ptr<History, void (*)(History*)> history_{nullptr, history_end};
    std::unique_ptr<EditLine, void (*)(EditLine*)> editor_{nullptr, el_end};
};
