/*
The container's format is not published; this description follows what nvcc 12 and 13 write, and agrees with
the output of cuobjdump.

    container   magic, version, bytes of this header (2 each), bytes of all entries (8)
    entry       kind (1: PTX, 2: cubin), version, bytes of this header, bytes of the code ...

A cubin is an ELF file. Its section .nv.info lists attributes, among them the registers of each kernel, which
is identified by its index in the symbol table. The section .nv.shared.KERNEL is as large as the kernel's
static shared memory; if there is a section .nv.shared.reserved.0, 1 KiB of that is the system's.
*/
#include "test/nocard/fat_binary.h"

#include <cstdint>
#include <cstring>
#include <elf.h>

#include "test/nocard/cards.h"
#include "test/nocard/fault.h"

namespace nocard {
namespace {

struct ContainerHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

struct EntryHeader {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, options;
    uint16_t minor, major;
    uint32_t architecture, name_offset, name_bytes;
    uint64_t flags, zero, uncompressed_bytes;
};
static_assert(sizeof(EntryHeader) == 64);

constexpr uint32_t container_magic = 0xba55ed50;
constexpr uint16_t kind_ptx = 1, kind_cubin = 2;
constexpr uint64_t flag_specific = 0x100000, flags_compressed = 0x2000 | 0x8000;

template <typename T>
T read(const char* at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

struct Elf {
    const char* begin;
    size_t bytes;
    Elf64_Ehdr header;

    Elf64_Shdr section(size_t i) const {
        return read<Elf64_Shdr>(begin + header.e_shoff + i * header.e_shentsize);
    }
    std::string name(const Elf64_Shdr& section) const {
        return begin + this->section(header.e_shstrndx).sh_offset + section.sh_name;
    }
    // Returns the name of a symbol in the table that a section is linked to.
    std::string symbol(const Elf64_Shdr& user, uint32_t number) const {
        Elf64_Shdr table = section(user.sh_link), names = section(table.sh_link);
        auto symbol = read<Elf64_Sym>(begin + table.sh_offset + number * sizeof(Elf64_Sym));
        return begin + names.sh_offset + symbol.st_name;
    }
};

// An attribute is two bytes, then two bytes that hold its value or the number of bytes that follow.
void read_registers(const Elf& elf, const Elf64_Shdr& info, std::map<std::string, KernelCode>& kernels) {
    constexpr uint8_t form_of_many_bytes = 4, attribute_registers = 0x2f;
    const char *at = elf.begin + info.sh_offset, *end = at + info.sh_size;
    while (at + 4 <= end) {
        auto form = read<uint8_t>(at), attribute = read<uint8_t>(at + 1);
        auto bytes = read<uint16_t>(at + 2);
        at += 4;
        if (form != form_of_many_bytes) continue;
        if (attribute == attribute_registers)
            kernels[elf.symbol(info, read<uint32_t>(at))].registers = (int)read<uint32_t>(at + 4);
        at += bytes;
    }
}

}  // namespace

std::map<std::string, KernelCode> read_cubin(const char* begin, size_t bytes) {
    std::map<std::string, KernelCode> kernels;
    Elf elf = {begin, bytes, read<Elf64_Ehdr>(begin)};
    if (memcmp(elf.header.e_ident, ELFMAG, SELFMAG) != 0) fault("fat binary", "a cubin that is no ELF file");
    const std::string prefix = ".nv.shared.";
    bool reserved = false;
    for (size_t i = 0; i < elf.header.e_shnum; i++) {
        Elf64_Shdr section = elf.section(i);
        std::string name = elf.name(section);
        if (name == ".nv.info") read_registers(elf, section, kernels);
        if (name.starts_with(prefix + "reserved"))
            reserved = true;
        else if (name.starts_with(prefix))
            kernels[name.substr(prefix.size())].static_shared = section.sh_size;
    }
    for (auto& [name, code] : kernels) {
        if (reserved && code.static_shared >= shared_of_system) code.static_shared -= shared_of_system;
    }
    return kernels;
}

std::vector<CodeEntry> read_fat_binary(const void* container) {
    auto begin = (const char*)container;
    auto header = read<ContainerHeader>(begin);
    if (header.magic != container_magic) fault("fat binary", "of a format that is not known here");
    std::vector<CodeEntry> entries;
    const char *at = begin + header.header_bytes, *end = at + header.bytes;
    while (at < end) {
        auto entry = read<EntryHeader>(at);
        const char* code = at + entry.header_bytes;
        CodeEntry& read = entries.emplace_back();
        read.is_ptx = entry.kind == kind_ptx;
        read.architecture = (int)entry.architecture;
        read.specific = entry.flags & flag_specific;
        read.compressed = entry.flags & flags_compressed;
        if (!read.compressed && read.is_ptx) read.text = std::string(code, strnlen(code, entry.bytes));
        if (!read.compressed && entry.kind == kind_cubin) read.kernels = read_cubin(code, entry.bytes);
        at = code + entry.bytes;
    }
    return entries;
}

Image choose_image(const std::vector<CodeEntry>& entries, int capability) {
    auto runs = [&](const CodeEntry& entry) {
        if (entry.specific) return entry.architecture == capability;
        bool same_major = entry.architecture / 10 == capability / 10;
        return entry.architecture <= capability && (entry.is_ptx || same_major);
    };
    auto better = [](const CodeEntry& entry, const CodeEntry* than) {
        if (!than || entry.architecture != than->architecture)
            return !than || entry.architecture > than->architecture;
        return entry.specific && !than->specific;
    };
    Image image;
    for (const CodeEntry& entry : entries)
        if (!entry.is_ptx && runs(entry) && better(entry, image.cubin)) image.cubin = &entry;
    for (const CodeEntry& entry : entries) {
        if (!entry.is_ptx || !runs(entry)) continue;
        if (!image.cubin) {
            if (better(entry, image.ptx)) image.ptx = &entry;
        } else if (entry.architecture == image.cubin->architecture &&
                   entry.specific == image.cubin->specific) {
            image.ptx = &entry;
        }
    }
    return image;
}

}  // namespace nocard
