/*
Reads PTX text: splits it into statements and operands.
*/
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace nocard::ptx {

inline std::string_view trimmed(std::string_view text) {
    size_t from = text.find_first_not_of(" \t\n\r"), to = text.find_last_not_of(" \t\n\r");
    return from == text.npos ? std::string_view() : text.substr(from, to - from + 1);
}

// Splits at the commas outside of braces and brackets.
inline std::vector<std::string_view> split_operands(std::string_view text) {
    std::vector<std::string_view> parts;
    int depth = 0;
    size_t from = 0;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '{' || text[i] == '[' || text[i] == '(') depth++;
        if (text[i] == '}' || text[i] == ']' || text[i] == ')') depth--;
        if (text[i] == ',' && depth == 0) parts.push_back(trimmed(text.substr(from, i - from))), from = i + 1;
    }
    std::string_view last = trimmed(text.substr(from));
    if (!last.empty()) parts.push_back(last);
    return parts;
}

// Splits "mul.wide.s32" into mul, wide and s32; "shared::cta" is one word.
inline std::vector<std::string_view> split_words(std::string_view opcode) {
    std::vector<std::string_view> words;
    size_t from = 0;
    for (size_t dot; (dot = opcode.find('.', from)) != opcode.npos; from = dot + 1) {
        words.push_back(opcode.substr(from, dot - from));
    }
    words.push_back(opcode.substr(from));
    return words;
}

// Splits "{a, b}" into its members; without braces there is one.
inline std::vector<std::string_view> members(std::string_view operand) {
    operand = trimmed(operand);
    if (operand.size() >= 2 && operand[0] == '{') operand = operand.substr(1, operand.size() - 2);
    return split_operands(operand);
}

// Returns the operand within the brackets of "[a]".
inline std::string_view bracketed(std::string_view operand) {
    if (operand.size() < 2 || operand.front() != '[' || operand.back() != ']') {
        throw std::runtime_error("an address in brackets is expected, not " + std::string(operand));
    }
    return trimmed(operand.substr(1, operand.size() - 2));
}

// 12, -3, 0x1f, 0f3F800000 (bits of a float), 0d3FF0000000000000 (of a double).
inline bool parse_number(std::string_view text, uint64_t& value) {
    bool negative = !text.empty() && text[0] == '-';
    if (negative) text.remove_prefix(1);
    if (text.empty() || text[0] < '0' || text[0] > '9') return false;
    int base = 10;
    if (text.size() > 2 && text[0] == '0') {
        char kind = text[1];
        if (kind == 'x' || kind == 'X' || kind == 'f' || kind == 'F' || kind == 'd' || kind == 'D') {
            base = 16;
            text.remove_prefix(2);
        } else if (kind == 'b' || kind == 'B') {
            base = 2;
            text.remove_prefix(2);
        }
    }
    if (text.size() > 1 && text.back() == 'U') text.remove_suffix(1);
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || end != text.data() + text.size()) return false;
    if (negative) value = -value;
    return true;
}

inline uint64_t number(std::string_view text) {
    uint64_t value;
    if (!parse_number(text, value))
        throw std::runtime_error("a number is expected, not " + std::string(text));
    return value;
}

// A statement of a kernel's body, as each_statement() finds it.
struct Statement {
    enum Kind { instruction, label, open_scope, close_scope, directive, source_line } kind;
    std::string_view text;
    uint32_t line;
};

template <typename Take>
void each_statement(std::string_view body, uint32_t line, Take take) {
    size_t at = 0;
    auto skip_line = [&] { at = std::min(body.find('\n', at), body.size()); };
    while (at < body.size()) {
        char c = body[at];
        if (c == '\n') line++;
        if (c == '\n' || c == ' ' || c == '\t' || c == '\r' || c == ';') {
            at++;
        } else if (c == '/' && body.substr(at, 2) == "//") {
            skip_line();
        } else if (c == '/' && body.substr(at, 2) == "/*") {
            size_t end = body.find("*/", at);
            for (; at < body.size() && at < end + 2; at++) line += body[at] == '\n';
        } else if (c == '{' || c == '}') {
            take(Statement{c == '{' ? Statement::open_scope : Statement::close_scope, {}, line});
            at++;
        } else if (body.substr(at, 4) == ".loc") {
            size_t from = at;
            skip_line();
            take(Statement{Statement::source_line, body.substr(from, at - from), line});
        } else {
            // A label, or everything up to the semicolon, in which braces enclose operands.
            size_t from = at, first = line;
            while (at < body.size() && body[at] != ';') {
                if (body[at] == '\n') line++;
                if (body[at] == ':' && body.substr(at, 2) != "::" && (at == from || body[at - 1] != ':'))
                    break;
                at++;
            }
            Statement::Kind kind = body[at] == ':'     ? Statement::label
                                   : body[from] == '.' ? Statement::directive
                                                       : Statement::instruction;
            take(Statement{kind, trimmed(body.substr(from, at - from)), (uint32_t)first});
            at++;
        }
    }
}

}  // namespace nocard::ptx
