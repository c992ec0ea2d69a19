/*
A kernel as the interpreter holds it: instructions, each with the function that runs it, and the layout of a
warp's register file.

A register has a lane for each thread of the warp: 32 words of 4 bytes (for 16-bit registers, too), 32 of 8
bytes, or a mask of 32 bits for a predicate. Constants, addresses of variables and special registers such as
%tid.x are registers that no instruction sets. During decoding, an operand is the number of a register;
RegisterPlacement (ptx_registers.h) replaces it with an offset in the file, where registers that are not live
at the same time share space.
*/
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "test/nocard/kernels.h"

namespace nocard::ptx {

struct Warp;
struct Instruction;

// Runs an instruction for these lanes of a warp.
using Execute = void (*)(Warp&, const Instruction&, uint32_t lanes);

constexpr uint32_t all_lanes = ~0u, no_operand = ~0u;

enum class Role : uint8_t {
    plain,
    branch,
    leave,
    meet,    // run together by the lanes that its mask names
    aligned  // run together by all lanes of the warp
};

enum class Space : uint8_t { generic, global, shared, parameter };

enum class Width : uint8_t { predicate = 0, word = 4, wide = 8 };

struct Instruction {
    Execute run = nullptr;
    Role role = Role::plain;
    Space space = Space::generic;
    bool guard_negated = false;
    uint8_t vector = 1;        // how many numbers a load or store moves
    uint8_t access_bytes = 0;  // bytes of each of them
    bool strong = false;       // relaxed, acquire, release or volatile: does not race with other such ones
    bool acquires = false, releases = false;
    bool wide_address = false;  // the address register has 64 bits
    uint32_t guard = no_operand;
    uint32_t d = no_operand, a = no_operand, b = no_operand, c = no_operand;
    uint32_t second = no_operand;       // a further result, such as the predicate of shfl
    uint32_t members = no_operand;      // the lane mask of Role::meet
    int64_t offset = 0;                 // added to an address
    int64_t value = 0;                  // a number from the instruction's text
    int32_t target = -1;                // a branch target
    std::vector<uint32_t> list, list2;  // registers in braces
    std::vector<Width> widths;          // widths of the registers in `list`
    std::vector<uint32_t> uses, sets;   // numbers of registers, also after operands have become offsets
    uint32_t line = 0;                  // line in the PTX
    uint32_t source = 0;                // index into Kernel::sources
    std::string_view text;
};

struct Parameter {
    std::string name;
    size_t bytes, offset;
};

struct Register {
    Width width;
    uint32_t place = no_operand;
    bool set_by_code = true;       // false: constants and special registers
    bool maybe_undefined = false;  // some path reads it before it is set
};

struct SourceLine {
    int file = 0, line = 0;
};

struct Kernel {
    std::string name;
    std::vector<Parameter> parameters;
    size_t parameter_bytes = 0;
    std::vector<Instruction> code;
    std::vector<Register> registers;
    std::vector<std::pair<uint32_t, uint64_t>> constants;    // register number and value
    std::vector<std::pair<uint32_t, std::string>> specials;  // register number and name, such as %tid.x
    std::map<std::string, uint32_t> shared;                  // addresses of variables
    size_t file_bytes = 0;                                   // bytes of a warp's registers
    size_t static_shared = 0;
    uint32_t dynamic_shared = 0;  // the address at which it begins
    int max_threads = 0;
    std::array<int, 3> required_threads{};
    std::vector<SourceLine> sources{{}};
    bool has_products = false;  // wgmma
    int shared_grain = 4;       // bytes of the smallest access to shared memory
};

// Shared memory begins at this address, so that a null address is never valid.
constexpr uint32_t shared_begin = 1024;

// Generic addresses of shared memory and of parameters are offsets in these windows, which contain no host
// memory.
constexpr uint64_t shared_window = 1ull << 56, parameter_window = 1ull << 57;

}  // namespace nocard::ptx
