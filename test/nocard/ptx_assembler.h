/*
Turns the text of a kernel into instructions: registers and their scopes, labels, and variables in shared
memory. The meaning of each instruction is with the functions that run it; see the table in ptx_module.h.
*/
#pragma once

#include <algorithm>
#include <charconv>
#include <functional>
#include <unordered_map>

#include "test/nocard/ptx_kernel.h"
#include "test/nocard/ptx_text.h"

namespace nocard::ptx {

inline Width width_of(std::string_view type) {
    if (type == "pred") return Width::predicate;
    return type.size() >= 2 && type.substr(type.size() - 2) == "64" ? Width::wide : Width::word;
}

class Assembler;

// One instruction during decoding: its words and operands, and the Instruction that is filled in.
struct Decoding {
    Assembler& assembler;
    Instruction& to;
    std::vector<std::string_view> words, operands;

    std::string_view type() const { return words.back(); }
    std::string_view word(size_t i) const { return i < words.size() ? words[i] : std::string_view(); }
    bool has(std::string_view word) const {
        return std::find(words.begin(), words.end(), word) != words.end();
    }
    std::string_view operand(size_t i) const {
        if (i >= operands.size()) throw std::runtime_error("has too few operands");
        return operands[i];
    }

    // Operand i as a source of this width, or as a register to set.
    uint32_t source(size_t i, Width width = Width::word) { return source(operand(i), width); }
    uint32_t result(size_t i) { return result(operand(i)); }
    uint32_t source(std::string_view text, Width width);
    uint32_t result(std::string_view text);
    // An operand that is read and set, such as the accumulator of a product.
    uint32_t source_and_result(std::string_view text);
    Width width(uint32_t register_number) const;

    // "[%r1+16]": sets a, offset, space and wide_address.
    void address(std::string_view operand, Space space);
    // Returns the register of "[%r1]" or "[%r1+16]", and the number that is added to it.
    std::pair<uint32_t, int64_t> place(std::string_view operand, Space space);

    [[noreturn]] void unknown() const { throw std::runtime_error("nobody taught the interpreter this form"); }
};

class Assembler {
public:
    explicit Assembler(Kernel& kernel) : kernel_(kernel) {}

    // Declares the registers of ".b32 %r<12>", or of a type and single names.
    void declare_registers(std::string_view declaration) {
        size_t space = declaration.find_first_of(" \t");
        Width width = width_of(declaration.substr(0, space).substr(1));
        for (std::string_view name : split_operands(declaration.substr(space))) {
            size_t bracket = name.find('<');
            if (bracket == name.npos) {
                scopes_.back().registers[std::string(name)] = new_register(width);
                continue;
            }
            uint32_t count =
                (uint32_t)number(trimmed(name.substr(bracket + 1, name.find('>') - bracket - 1)));
            ranges_[std::string(trimmed(name.substr(0, bracket)))] = {(uint32_t)kernel_.registers.size(),
                                                                      count};
            for (uint32_t i = 0; i < count; i++) new_register(width);
        }
    }

    void open_scope() { scopes_.push_back({{}, scopes_made_++}); }
    void close_scope() {
        if (scopes_.size() == 1) throw std::runtime_error("a brace too many");
        scopes_.pop_back();
    }

    void label(std::string_view name) {
        labels_[scoped(name, scopes_.back().number)] = (int)kernel_.code.size();
    }

    void jump_to(std::string_view name) {
        std::vector<int> scopes;
        for (const Scope& scope : scopes_) scopes.insert(scopes.begin(), scope.number);
        jumps_.push_back({kernel_.code.size(), std::string(name), scopes});
    }

    // Called after the last instruction.
    void resolve_jumps() {
        for (const Jump& jump : jumps_) {
            Instruction& from = kernel_.code[jump.from];
            for (int scope : jump.scopes) {
                auto found = labels_.find(scoped(jump.label, scope));
                if (found != labels_.end() && from.target < 0) from.target = found->second;
            }
            if (from.target < 0) throw std::runtime_error("there is no label " + jump.label);
        }
    }

    bool find_register(std::string_view name, uint32_t& number_) const {
        for (size_t i = scopes_.size(); i-- > 0;) {
            auto found = scopes_[i].registers.find(std::string(name));
            if (found != scopes_[i].registers.end()) return number_ = found->second, true;
        }
        size_t digits = name.find_last_not_of("0123456789") + 1;
        if (digits == name.size() || name.empty() || name[0] != '%') return false;
        auto range = ranges_.find(std::string(name.substr(0, digits)));
        if (range == ranges_.end()) return false;
        uint32_t index = (uint32_t)number(name.substr(digits));
        if (index >= range->second.second) return false;
        number_ = range->second.first + index;
        return true;
    }

    uint32_t constant(uint64_t value, Width width) {
        if (width == Width::word) value &= 0xffffffff;
        auto [found, is_new] = constants_.try_emplace({value, width}, 0);
        if (!is_new) return found->second;
        uint32_t made = new_register(width);
        kernel_.registers[made].set_by_code = false;
        kernel_.constants.push_back({made, value});
        return found->second = made;
    }

    // Returns the register of a name, a number, a special register, or the address of a variable or
    // parameter.
    uint32_t operand(std::string_view text, Width width) {
        uint32_t found;
        if (find_register(text, found)) return found;
        uint64_t value;
        if (parse_number(text, value)) return constant(width == Width::predicate ? value != 0 : value, width);
        if (text[0] == '%') return special(std::string(text));
        auto variable = kernel_.shared.find(std::string(text));
        if (variable != kernel_.shared.end()) return constant(variable->second, width);
        for (const Parameter& p : kernel_.parameters) {
            if (p.name == text) return constant(p.offset, width);
        }
        throw std::runtime_error("nothing is called " + std::string(text));
    }

    Kernel& kernel() { return kernel_; }

private:
    struct Scope {
        std::unordered_map<std::string, uint32_t> registers;
        int number;
    };
    struct Jump {
        size_t from;
        std::string label;
        std::vector<int> scopes;  // innermost first
    };

    static std::string scoped(std::string_view label, int scope) {
        return std::string(label) + "#" + std::to_string(scope);
    }

    uint32_t new_register(Width width) {
        kernel_.registers.push_back({width});
        return (uint32_t)kernel_.registers.size() - 1;
    }

    uint32_t special(const std::string& name) {
        auto [found, is_new] = specials_.try_emplace(name, 0);
        if (!is_new) return found->second;
        bool wide = name == "%clock64" || name == "%globaltimer";
        uint32_t made = new_register(wide ? Width::wide : Width::word);
        kernel_.registers[made].set_by_code = false;
        kernel_.specials.push_back({made, name});
        return found->second = made;
    }

    Kernel& kernel_;
    std::vector<Scope> scopes_{{{}, 0}};
    int scopes_made_ = 1;
    std::unordered_map<std::string, std::pair<uint32_t, uint32_t>> ranges_;  // "%r": first register, count
    std::map<std::pair<uint64_t, Width>, uint32_t> constants_;
    std::unordered_map<std::string, uint32_t> specials_;
    std::unordered_map<std::string, int> labels_;
    std::vector<Jump> jumps_;
};

inline uint32_t Decoding::source(std::string_view text, Width width) {
    uint32_t found = assembler.operand(text, width);
    if (this->width(found) != width) {
        // A 32-bit special register or shared address, read as 64 bits, would read beyond its lanes.
        throw std::runtime_error("operand " + std::string(text) + " has another width");
    }
    if (assembler.kernel().registers[found].set_by_code) to.uses.push_back(found);
    return found;
}

inline uint32_t Decoding::result(std::string_view text) {
    uint32_t found;
    if (!assembler.find_register(text, found)) throw std::runtime_error("no register " + std::string(text));
    to.sets.push_back(found);
    return found;
}

inline uint32_t Decoding::source_and_result(std::string_view text) {
    uint32_t found = result(text);
    to.uses.push_back(found);
    return found;
}

inline Width Decoding::width(uint32_t register_number) const {
    return assembler.kernel().registers[register_number].width;
}

inline std::pair<uint32_t, int64_t> Decoding::place(std::string_view operand, Space space) {
    std::string_view inner = bracketed(operand);
    size_t plus = inner.find('+');
    std::string_view base = trimmed(inner.substr(0, plus));
    int64_t offset = plus == inner.npos ? 0 : (int64_t)number(trimmed(inner.substr(plus + 1)));
    uint32_t found;
    Width width = space == Space::shared ? Width::word : Width::wide;
    if (assembler.find_register(base, found)) width = this->width(found);
    return {source(base, width), offset};
}

inline void Decoding::address(std::string_view operand, Space space) {
    to.space = space;
    std::tie(to.a, to.offset) = place(operand, space);
    to.wide_address = width(to.a) == Width::wide;
}

}  // namespace nocard::ptx
