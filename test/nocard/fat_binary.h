/*
The device code that nvcc embeds in a program: a container of machine code (cubins) and PTX for several
architectures, from which a driver picks what suits its card.
*/
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace nocard {

// The resources of a multiprocessor that a kernel needs, as ptxas recorded them in a cubin.
struct KernelCode {
    int registers = 0;  // per thread
    size_t static_shared = 0;
};

struct CodeEntry {
    bool is_ptx;
    int architecture;                           // such as 90
    bool specific;                              // the a of 90a: for this architecture only
    bool compressed;                            // and therefore not readable here
    std::string text;                           // the PTX
    std::map<std::string, KernelCode> kernels;  // those of a cubin
};

// Reads the entries of a container. The wrapper that __cudaRegisterFatBinary receives points to one.
std::vector<CodeEntry> read_fat_binary(const void* container);

// Reads the kernels of a cubin, which is an ELF file.
std::map<std::string, KernelCode> read_cubin(const char* elf, size_t bytes);

// The code that a driver runs on a card of this compute capability (such as 90): machine code if there is any
// for it, otherwise the PTX that the driver compiles. Null pointers if neither fits.
struct Image {
    const CodeEntry* cubin = nullptr;
    const CodeEntry* ptx = nullptr;  // the source of the cubin, or what has to be compiled
};
Image choose_image(const std::vector<CodeEntry>& entries, int capability);

}  // namespace nocard
