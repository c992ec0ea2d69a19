/*
The code for cards that nvcc puts into a program: a container of machine code (cubins) and PTX for several
architectures, from which a driver takes what suits its card.
*/
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace nocard {

// A kernel needs this of a multiprocessor, as ptxas has written it into a cubin.
struct KernelCode {
    int registers = 0;  // a thread's
    size_t static_shared = 0;
};

struct CodeEntry {
    bool is_ptx;
    int architecture;                           // such as 90
    bool specific;                              // the a of 90a: for this card alone
    bool compressed;                            // and so not readable here
    std::string text;                           // the PTX
    std::map<std::string, KernelCode> kernels;  // those of a cubin
};

// The entries of a container, as __cudaRegisterFatBinary is given it.
std::vector<CodeEntry> read_fat_binary(const void* container);

// The kernels of a cubin, which is an ELF file.
std::map<std::string, KernelCode> read_cubin(const char* elf, size_t bytes);

// The code that a driver runs on a card of this capability (such as 90): machine code if some was made for
// it, or else what it compiles from PTX. Null pointers: there is none.
struct Image {
    const CodeEntry* cubin = nullptr;
    const CodeEntry* ptx = nullptr;  // the cubin was made from it, or it has to be compiled
};
Image choose_image(const std::vector<CodeEntry>& entries, int capability);

}  // namespace nocard
