/*
Helpers for the tests of the interpreter: memory that they declare live, kernels from a few lines of PTX, and
the fault that ends a grid.
*/
#pragma once

#include <doctest/doctest.h>

#include <fstream>
#include <iterator>
#include <list>

#include "test/nocard/kernels.h"
#include "test/nocard/ptx_numbers.h"
#include "test/support/cases.h"

namespace nocard {

namespace testing {

inline std::list<Allocation>& allocations() {
    static std::list<Allocation> all;
    return all;
}

}  // namespace testing

// Replaces the runtime's function; each test file is a program of its own.
const Allocation* find_allocation(const void* address) {
    for (const Allocation& one : testing::allocations()) {
        if (address >= one.begin && address < one.begin + one.bytes) return &one;
    }
    return nullptr;
}

namespace testing {

// Device memory: an array, and its written flags.
template <typename T>
class Memory {
public:
    explicit Memory(size_t size, bool written = true) : values_(size + 64 / sizeof(T)) {
        // Aligned like the runtime's memory, as far as kernels need it.
        size_t misaligned = (uintptr_t)values_.data() % 64;
        begin_ = values_.data() + (misaligned ? (64 - misaligned) / sizeof(T) : 0);
        size_ = size;
        shadow_.assign(size * sizeof(T) / 4 + 1, written ? 15 : 0);
        allocations().push_back({(char*)begin_, size * sizeof(T), true, shadow_.data()});
        own_ = std::prev(allocations().end());
    }
    explicit Memory(const std::vector<T>& values) : Memory(values.size()) {
        std::copy(values.begin(), values.end(), begin_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { allocations().erase(own_); }

    T* data() { return begin_; }
    T& operator[](size_t i) { return begin_[i]; }
    size_t size() const { return size_; }

private:
    std::vector<T> values_;
    std::vector<uint8_t> shadow_;
    T* begin_;
    size_t size_;
    std::list<Allocation>::iterator own_;
};

// A kernel's parameters, one after another, each aligned to its size.
struct Parameters {
    std::vector<uint8_t> bytes;

    template <typename T>
    Parameters& add(const T& value, size_t align = 0) {
        if (!align) align = sizeof(T);
        bytes.resize((bytes.size() + align - 1) / align * align);
        auto* from = reinterpret_cast<const uint8_t*>(&value);
        bytes.insert(bytes.end(), from, from + sizeof(T));
        return *this;
    }
    template <typename... T>
    static Parameters of(const T&... values) {
        Parameters parameters;
        (parameters.add(values), ...);
        return parameters;
    }
};

// An H100.
inline CardLimits hopper() {
    return {132, 9, 0, 228 << 10, 227 << 10, 2048, 65536, 32};
}

// Returns a module with one kernel, `k`, of this body. %rd1 and %rd2 hold the global addresses of "out" and
// "in", and %r1 holds the thread.
inline std::shared_ptr<PtxModule> kernel_of(const std::string& body, const std::string& declarations = "",
                                            const char* limits = "") {
    std::string text =
        ".version 8.5\n.target sm_90a\n.address_size 64\n\n.extern .shared .align 1024 .b8 dynamic[];\n";
    text += ".visible .entry k(\n.param .u64 k_out,\n.param .u64 k_in\n)\n" + std::string(limits) + "\n{\n";
    text += ".reg .pred %p<20>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<300>;\n.reg .f32 %f<300>;\n.reg .b64 "
            "%rd<40>;\n";
    text += declarations + "\n";
    text += "ld.param.u64 %rd1, [k_out];\ncvta.to.global.u64 %rd1, %rd1;\n";
    text += "ld.param.u64 %rd2, [k_in];\ncvta.to.global.u64 %rd2, %rd2;\nmov.u32 %r1, %tid.x;\n";
    text += body + "\nret;\n}\n";
    return load_ptx(text, "test");
}

struct Launch {
    Dim3 grid{}, block{32, 1, 1};
    size_t shared = 0;
    int registers = 0;
    uint64_t seed = 1;
};

inline void run(const PtxModule& module, const std::string& kernel, const Parameters& parameters,
                Launch launch) {
    GridCall call;
    call.module = &module;
    call.kernel = kernel;
    call.grid = launch.grid;
    call.block = launch.block;
    call.dynamic_shared = launch.shared;
    call.parameters = parameters.bytes;
    call.resources.registers = launch.registers;
    call.card = hopper();
    call.seed = launch.seed;
    run_grid(call);
}

// Returns the fault that ends the grid, or "none".
inline std::string fault_of(const PtxModule& module, const Parameters& parameters, Launch launch = {}) {
    try {
        run(module, "k", parameters, launch);
    } catch (const Fault& fault) {
        return fault.what();
    }
    return "none";
}

// Runs the grid with several seeds; returns the first fault, or "none".
inline std::string fault_of_any_seed(const PtxModule& module, const Parameters& parameters,
                                     Launch launch = {}) {
    for (launch.seed = 1; launch.seed <= 10; launch.seed++) {
        std::string fault = fault_of(module, parameters, launch);
        if (fault != "none") return fault;
    }
    return "none";
}

inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    REQUIRE_MESSAGE(in.good(), path);
    return {std::istreambuf_iterator<char>(in), {}};
}

#define CHECK_FAULT(fault, what)                                                                             \
    do {                                                                                                     \
        std::string reported = fault;                                                                        \
        CHECK_MESSAGE(reported.find(what) != std::string::npos, reported);                                   \
    } while (0)

}  // namespace testing
}  // namespace nocard
