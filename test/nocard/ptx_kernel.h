/*
A kernel as the interpreter holds it: instructions, each with the function that runs it, and the file of
registers that a warp has.

A register has a lane for each thread of the warp: 32 words of 4 bytes (16-bit registers, too), 32 of 8 bytes,
or a mask of 32 bits for a predicate. Constants, addresses of variables and special registers such as %tid.x
are registers that nobody sets. While a kernel is decoded an operand is the number of a register;
place_registers() (ptx_registers.h) makes it the place in the file, where registers that are not alive
together share room.
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
    meet,    // the lanes that its mask names run it together
    aligned  // all lanes of the warp do
};

enum class Space : uint8_t { generic, global, shared, parameter };

enum class Width : uint8_t { predicate = 0, word = 4, wide = 8 };

struct Instruction {
    Execute run = nullptr;
    Role role = Role::plain;
    Space space = Space::generic;
    bool guard_negated = false;
    uint8_t vector = 1;        // how many numbers a load or store moves
    uint8_t access_bytes = 0;  // bytes of one of them
    bool strong = false;       // relaxed, acquire, release or volatile: it races with no other such access
    bool acquires = false, releases = false;
    bool wide_address = false;  // the register of the address has 64 bits
    uint32_t guard = no_operand;
    uint32_t d = no_operand, a = no_operand, b = no_operand, c = no_operand;
    uint32_t second = no_operand;       // a further result: the predicate of shfl
    uint32_t members = no_operand;      // the mask of lanes of Role::meet
    int64_t offset = 0;                 // added to an address
    int64_t value = 0;                  // a number that the instruction's text has
    int32_t target = -1;                // a branch's
    std::vector<uint32_t> list, list2;  // registers in braces
    std::vector<Width> widths;          // widths of those in `list`
    std::vector<uint32_t> uses, sets;   // numbers of registers, whatever the operands have become
    uint32_t line = 0;                  // in the PTX
    uint32_t source = 0;                // in Kernel::sources
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
    bool maybe_undefined = false;  // some path reads it before anybody set it
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
    std::vector<std::pair<uint32_t, std::string>> specials;  // register number and name, as %tid.x
    std::map<std::string, uint32_t> shared;                  // addresses of variables
    size_t file_bytes = 0;                                   // bytes of a warp's registers
    size_t static_shared = 0;
    uint32_t dynamic_shared = 0;  // the place at which that begins
    int max_threads = 0;
    std::array<int, 3> required_threads{};
    std::vector<SourceLine> sources{{}};
    bool has_products = false;  // wgmma
    int shared_grain = 4;       // bytes of the smallest access to shared memory
};

// Shared memory begins at this address, so that null is none.
constexpr uint32_t shared_begin = 1024;

// Generic addresses of shared memory and of parameters are offsets in these windows, where no host memory is.
constexpr uint64_t shared_window = 1ull << 56, parameter_window = 1ull << 57;

}  // namespace nocard::ptx
