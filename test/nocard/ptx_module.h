/*
A module: the PTX text, its kernels, and the table of all instructions. load_ptx() decodes all kernels at
once, so that an instruction missing from the table is an error right away.
*/
#pragma once

#include <mutex>

#include "test/nocard/ptx_convert.h"
#include "test/nocard/ptx_grid.h"

namespace nocard {

namespace ptx {

// Decodes an instruction; the table finds it by the instruction's first word.
using Decoder = void (*)(Decoding&);

inline const std::unordered_map<std::string_view, Decoder>& instruction_table() {
    static const std::unordered_map<std::string_view, Decoder> table = {
        {"abs", decode_arithmetic<Magnitude, 1>},
        {"activemask", decode_activemask},
        {"add", decode_arithmetic<Add, 2>},
        {"and", decode_bits<And>},
        {"atom", decode_atom},
        {"bar", decode_bar},
        {"barrier", decode_bar},
        {"bfe", decode_bfe},
        {"bfi", decode_bfi},
        {"brev", decode_count<ReverseBits>},
        {"clz", decode_count<LeadingZeros>},
        {"cos", decode_function<Cosine>},
        {"cp", decode_cp},
        {"cvt", decode_cvt},
        {"cvta", decode_cvta},
        {"discard", decode_nothing},
        {"div", decode_arithmetic<Divide, 2>},
        {"elect", decode_elect},
        {"ex2", decode_function<Exp2>},
        {"fence", decode_fence},
        {"fma", decode_multiply_add},
        {"griddepcontrol", decode_nothing},
        {"ld", decode_ld},
        {"ldmatrix", decode_matrices},
        {"lg2", decode_function<Log2>},
        {"lop3", decode_lop3},
        {"mad", decode_multiply_add},
        {"max", decode_minimum<Maximum, MaximumOrNaN>},
        {"mbarrier", decode_mbarrier},
        {"membar", decode_fence},
        {"min", decode_minimum<Minimum, MinimumOrNaN>},
        {"mma", decode_mma},
        {"mov", decode_mov},
        {"mul", decode_multiply},
        {"nanosleep", decode_nothing},
        {"neg", decode_arithmetic<Negate, 1>},
        {"not", decode_not},
        {"or", decode_bits<Or>},
        {"popc", decode_count<Population>},
        {"prefetch", decode_prefetch},
        {"prmt", decode_prmt},
        {"rcp", decode_function<Reciprocal>},
        {"red", decode_red},
        {"redux", decode_redux},
        {"rem", decode_integer<Remainder, 2>},
        {"rsqrt", decode_function<InverseRoot>},
        {"selp", decode_selp},
        {"setmaxnreg", decode_setmaxnreg},
        {"setp", decode_setp},
        {"shf", decode_shf},
        {"shfl", decode_shfl},
        {"shl", decode_shift<ShiftLeft>},
        {"shr", decode_shift<ShiftRight>},
        {"sin", decode_function<Sine>},
        {"sqrt", decode_function<SquareRoot>},
        {"st", decode_st},
        {"stmatrix", decode_matrices},
        {"sub", decode_arithmetic<Subtract, 2>},
        {"tanh", decode_function<Tanh>},
        {"trap", decode_trap},
        {"vote", decode_vote},
        {"wgmma", decode_wgmma},
        {"xor", decode_bits<Xor>},
    };
    return table;
}

// ----------------------------------------------------------------------------
// a kernel's head

// ".param .align 64 .b8 name[128]" or ".param .u64 .ptr .global .align 16 name"
inline void parse_parameter(Kernel& kernel, std::string_view text) {
    size_t align = 0, size = 0, count = 1;
    bool of_pointer = false;
    std::string name;
    for (size_t at = 0; at < text.size();) {
        size_t from = text.find_first_not_of(" \t\n\r", at);
        if (from == text.npos) break;
        at = std::min(text.find_first_of(" \t\n\r", from), text.size());
        std::string_view word = text.substr(from, at - from);
        if (word == ".ptr")
            of_pointer = true;
        else if (word == ".align") {
            from = text.find_first_not_of(" \t\n\r", at);
            at = std::min(text.find_first_of(" \t\n\r", from), text.size());
            if (!of_pointer) align = number(text.substr(from, at - from));
        } else if (word[0] != '.') {
            name = word;
        } else if (size == 0 && word != ".param") {
            size = (size_t)bytes_of(word);
        }
    }
    size_t bracket = name.find('[');
    if (bracket != name.npos) {
        count = number(std::string_view(name).substr(bracket + 1, name.find(']') - bracket - 1));
        name.resize(bracket);
    }
    if (!align) align = size;
    size_t offset = (kernel.parameter_bytes + align - 1) / align * align;
    kernel.parameters.push_back({name, size * count, offset});
    kernel.parameter_bytes = offset + size * count;
}

struct SharedVariable {
    std::string name;
    size_t align = 1, bytes = 0;  // 0: dynamic
};

// ".shared .align 4 .b8 name[512]"
inline SharedVariable parse_shared(std::string_view text) {
    SharedVariable variable;
    size_t element = 1, count = 1;
    std::vector<std::string_view> parts;
    for (size_t at = 0; (at = text.find_first_not_of(" \t\n", at)) < text.size();) {
        size_t end = std::min(text.find_first_of(" \t\n", at), text.size());
        parts.push_back(text.substr(at, end - at));
        at = end;
    }
    for (size_t i = 0; i < parts.size(); i++) {
        std::string_view part = parts[i];
        if (part == ".align") {
            variable.align = number(parts[++i]);
        } else if (part[0] != '.') {
            size_t bracket = part.find('[');
            variable.name = part.substr(0, bracket);
            if (bracket == part.npos) continue;
            std::string_view inside = part.substr(bracket + 1, part.find(']') - bracket - 1);
            count = inside.empty() ? 0 : number(inside);
        } else if (part != ".shared" && part != ".extern" && part != ".visible" && part != ".weak") {
            element = (size_t)bytes_of(part);
        }
    }
    variable.bytes = element * count;
    return variable;
}

}  // namespace ptx

// ----------------------------------------------------------------------------

class PtxModule {
public:
    PtxModule(std::string text, std::string name) : text_(std::move(text)), name_(std::move(name)) {
        size_t target = text_.find(".target sm_");
        if (target == text_.npos) throw std::runtime_error("PTX " + name_ + ": has no .target");
        target += 11;
        for (; isdigit(text_[target]); target++) target_ = target_ * 10 + (text_[target] - '0');
        arch_specific_ = text_[target] == 'a';
        find_entries();
        find_files();
    }

    bool has(const std::string& kernel) const { return entries_.count(kernel) != 0; }
    int target() const { return target_; }
    bool arch_specific() const { return arch_specific_; }
    const std::vector<std::string>& kernels() const { return order_; }

    const ptx::Kernel& kernel(const std::string& name) const {
        std::lock_guard lock(mutex_);
        auto& decoded = decoded_[name];
        if (!decoded) {
            auto entry = entries_.find(name);
            if (entry == entries_.end()) throw std::runtime_error("PTX " + name_ + ": has no kernel " + name);
            decoded = decode(name, entry->second);
        }
        return *decoded;
    }

    std::string source_file(int number) const {
        auto found = files_.find(number);
        return found == files_.end() ? "" : found->second;
    }

private:
    struct Entry {
        size_t head, open, body,
            end;        // positions of ".entry name", its parameters, its { and its }
        uint32_t line;  // on which the body begins
    };

    void find_entries() {
        using namespace ptx;
        std::string_view text = text_;
        size_t counted = 0;
        uint32_t line = 1;
        for (size_t at = 0; (at = text.find(".entry ", at)) != text.npos;) {
            Entry entry{at, text.find('(', at), 0, 0, 0};
            size_t next = text.find(".entry ", at + 7);
            // A kernel without parameters has no parentheses.
            entry.body = text.find("\n{", at);
            if (entry.body == text.npos) throw std::runtime_error("PTX " + name_ + ": a kernel has no body");
            if (entry.open > entry.body) entry.open = text.npos;
            entry.body++;
            // Inline PTX may also begin a line with a brace.
            size_t section = text.find(".section", entry.body);
            entry.end = text.rfind("\n}", std::min(next, section));
            if (entry.end == text.npos || entry.end < at)
                throw std::runtime_error("PTX " + name_ + ": no end");
            line += (uint32_t)std::count(text.begin() + (ptrdiff_t)counted,
                                         text.begin() + (ptrdiff_t)entry.body, '\n');
            counted = entry.body;
            entry.line = line;
            std::string name(
                trimmed(text.substr(at + 7, std::min(entry.open, text.find_first_of("(\n", at)) - at - 7)));
            entries_[name] = entry;
            order_.push_back(name);
            at = entry.end;
        }
        // Other variables and functions are refused when a kernel names them.
        size_t first = order_.empty() ? text.size() : entries_[order_[0]].head;
        for (size_t at = 0; at < first;) {
            size_t end = std::min(text.find('\n', at), first);
            std::string_view row = trimmed(text.substr(at, end - at));
            bool shared = row.starts_with(".shared") || row.starts_with(".extern .shared");
            if (shared) shared_.push_back(parse_shared(row.substr(0, row.find(';'))));
            at = end + 1;
        }
    }

    // .file 1 "/home/me/train_gpt/./kernels/norm.cuh"
    void find_files() {
        std::string_view text = text_;
        for (size_t at = 0; (at = text.find(".file", at)) != text.npos; at += 5) {
            if (at && text[at - 1] != '\n' && text[at - 1] != '\t') continue;
            std::string_view row = text.substr(at + 5, text.find('\n', at) - at - 5);
            size_t open = row.find('"'), close = row.find('"', open + 1);
            uint64_t number;
            if (close == row.npos || !ptx::parse_number(ptx::trimmed(row.substr(0, open)), number)) continue;
            std::string_view path = row.substr(open + 1, close - open - 1);
            size_t here = path.find("/./");
            files_[(int)number] = here == path.npos ? path : path.substr(here + 3);
        }
    }

    std::unique_ptr<ptx::Kernel> decode(const std::string& name, const Entry& entry) const {
        using namespace ptx;
        auto kernel = std::make_unique<Kernel>();
        kernel->name = name;
        std::string_view text = text_;
        std::string_view body = text.substr(entry.body + 1, entry.end - entry.body);
        if (entry.open != text.npos) {
            size_t close = text.rfind(')', entry.body);
            for (auto parameter : split_operands(text.substr(entry.open + 1, close - entry.open - 1))) {
                parse_parameter(*kernel, parameter);
            }
        }
        read_limits(*kernel, text.substr(entry.head, entry.body - entry.head));
        place_shared(*kernel, body);
        Assembler assembler(*kernel);
        uint32_t line = entry.line;
        try {
            each_statement(body, entry.line, [&](const Statement& statement) {
                line = statement.line;
                read_statement(*kernel, assembler, statement);
            });
            assembler.resolve_jumps();
            // Lanes that reach the end leave.
            kernel->code.push_back({});
            kernel->code.back().role = Role::leave;
            RegisterPlacement(*kernel).place();
        } catch (const std::runtime_error& error) {
            std::string statement(trimmed(line_of_text(line)).substr(0, 150));
            throw std::runtime_error("PTX " + name_ + ", line " + std::to_string(line) + ", `" + statement +
                                     "`: " + error.what());
        }
        return kernel;
    }

    std::string_view line_of_text(uint32_t line) const {
        size_t at = 0;
        for (uint32_t n = 1; n < line; n++) at = text_.find('\n', at) + 1;
        return std::string_view(text_).substr(at, text_.find('\n', at) - at);
    }

    // .maxntid 128, 1, 1
    static void read_limits(ptx::Kernel& kernel, std::string_view head) {
        auto three = [&](const char* name, std::array<int, 3>& to) {
            size_t at = head.find(name);
            if (at == head.npos) return false;
            at += std::string_view(name).size();
            std::string_view row = head.substr(at, head.find('\n', at) - at);
            to = {1, 1, 1};
            size_t k = 0;
            for (auto part : ptx::split_operands(row)) to[k++] = (int)ptx::number(part);
            return true;
        };
        std::array<int, 3> most{};
        if (three(".maxntid", most)) kernel.max_threads = most[0] * most[1] * most[2];
        three(".reqntid", kernel.required_threads);
    }

    // Places the module's variables that the kernel uses, those of its body, and then dynamic shared memory.
    void place_shared(ptx::Kernel& kernel, std::string_view body) const {
        using namespace ptx;
        std::vector<SharedVariable> variables;
        for (const SharedVariable& variable : shared_) {
            if (body.find(variable.name) != body.npos) variables.push_back(variable);
        }
        for (size_t at = 0; (at = body.find(".shared .align", at)) != body.npos; at += 7) {
            if (at && body[at - 1] != '\t' && body[at - 1] != ' ' && body[at - 1] != '\n') continue;
            variables.push_back(parse_shared(body.substr(at, body.find(';', at) - at)));
        }
        size_t place = shared_begin, dynamic_align = 16;
        for (const SharedVariable& variable : variables) {
            if (!variable.bytes) {
                dynamic_align = std::max(dynamic_align, variable.align);
                continue;
            }
            place = (place + variable.align - 1) / variable.align * variable.align;
            kernel.shared[variable.name] = (uint32_t)place;
            place += variable.bytes;
        }
        kernel.static_shared = place - shared_begin;
        place = (place + dynamic_align - 1) / dynamic_align * dynamic_align;
        kernel.dynamic_shared = (uint32_t)place;
        for (const SharedVariable& variable : variables) {
            if (!variable.bytes) kernel.shared[variable.name] = (uint32_t)place;
        }
    }

    static void read_statement(ptx::Kernel& kernel, ptx::Assembler& assembler,
                               const ptx::Statement& statement) {
        using namespace ptx;
        switch (statement.kind) {
        case Statement::open_scope:
            assembler.open_scope();
            break;
        case Statement::close_scope:
            assembler.close_scope();
            break;
        case Statement::label:
            assembler.label(statement.text);
            break;
        case Statement::source_line:
            read_source_line(kernel, statement.text);
            break;
        case Statement::instruction:
            read_instruction(kernel, assembler, statement);
            break;
        case Statement::directive: {
            std::string_view text = statement.text;
            if (text.starts_with(".reg"))
                assembler.declare_registers(trimmed(text.substr(4)));
            else if (!text.starts_with(".shared") && !text.starts_with(".pragma")) {
                throw std::runtime_error("nobody taught the interpreter this directive");
            }
        }
        }
    }

    // .loc 3 18 5, function_name ...
    static void read_source_line(ptx::Kernel& kernel, std::string_view text) {
        ptx::SourceLine line;
        if (sscanf(std::string(text.substr(0, 60)).c_str(), ".loc %d %d", &line.file, &line.line) == 2) {
            kernel.sources.push_back(line);
        }
    }

    static void read_instruction(ptx::Kernel& kernel, ptx::Assembler& assembler,
                                 const ptx::Statement& statement) {
        using namespace ptx;
        Instruction i;
        i.text = statement.text;
        i.line = statement.line;
        i.source = (uint32_t)kernel.sources.size() - 1;
        std::string_view text = statement.text;
        Decoding x{assembler, i, {}, {}};
        if (text[0] == '@') {
            size_t space = text.find_first_of(" \t");
            std::string_view guard = text.substr(1, space - 1);
            i.guard_negated = guard[0] == '!';
            if (i.guard_negated) guard.remove_prefix(1);
            i.guard = x.source(guard, Width::predicate);
            text = trimmed(text.substr(space));
        }
        size_t space = text.find_first_of(" \t\n");
        x.words = split_words(text.substr(0, space));
        if (space != text.npos) x.operands = split_operands(text.substr(space));
        if (x.words[0] == "bra") {
            i.role = Role::branch;
            assembler.jump_to(x.operand(0));
        } else if (x.words[0] == "ret" || x.words[0] == "exit") {
            i.role = Role::leave;
        } else {
            auto decoder = instruction_table().find(x.words[0]);
            if (decoder == instruction_table().end()) {
                throw std::runtime_error("nobody taught the interpreter this instruction");
            }
            decoder->second(x);
            if (!i.run) x.unknown();
        }
        // The guard was the first in `uses` and moves to the end, because D and A of wgmma must come first.
        if (i.guard != no_operand && kernel.registers[i.guard].set_by_code) {
            std::rotate(i.uses.begin(), i.uses.begin() + 1, i.uses.end());
        }
        kernel.code.push_back(std::move(i));
    }

    std::string text_, name_;
    int target_ = 0;
    bool arch_specific_ = false;
    std::map<std::string, Entry> entries_;
    std::vector<std::string> order_;
    std::vector<ptx::SharedVariable> shared_;
    std::map<int, std::string> files_;
    mutable std::mutex mutex_;
    mutable std::map<std::string, std::unique_ptr<ptx::Kernel>> decoded_;
};

namespace ptx {

inline std::string source_of(const Grid& grid, const Instruction& i) {
    const SourceLine& source = grid.kernel->sources[i.source];
    if (!source.line) return "";
    return format(" (%s:%d)", grid.call->module->source_file(source.file).c_str(), source.line);
}

}  // namespace ptx

inline void decode_all(const PtxModule& module) {
    for (const std::string& kernel : module.kernels()) module.kernel(kernel);
}

}  // namespace nocard
