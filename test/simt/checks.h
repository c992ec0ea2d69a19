/*
Part of simt.cc: what is checked at each memory access of a kernel, and the hooks through which the compiler tells of them.
*/
#pragma once

namespace simt {
namespace {

const char* verb(Access access) {
    return access == Access::read ? "reads" : access == Access::write ? "writes" : "updates atomically";
}

[[noreturn, gnu::noinline]] void fail_access(Kind kind, const Thread& thread, Access access, uintptr_t at, size_t bytes,
                                             const std::string& what, const void* where) {
    fail(kind, name(thread) + format(" %s %zu bytes at 0x%zx", verb(access), bytes, at) + what, where);
}

[[noreturn, gnu::noinline]] void fail_shared(const Thread& thread, Access access, const Byte& byte, Finding finding,
                                             Stamp me, uintptr_t at, size_t bytes, const void* where) {
    std::string place = dynamic_space.holds(at) ? format(" (dynamic shared memory + %zu)", at - dynamic_begin)
                                                : " (static shared memory)";
    if (finding == Finding::unwritten) {
        fail_access(Kind::unwritten, thread, access, at, bytes, place + ", which no thread of the block wrote", where);
    }
    if (finding == Finding::pending) {
        fail_access(Kind::unwritten, thread, access, at, bytes, place + ", before a cp.async to it was waited for", where);
    }
    bool was_read = finding == Finding::race_with_read;
    const Thread& other = threads[(was_read ? byte.racing_read(me) : byte.write) & thread_bits];
    fail_access(Kind::race, thread, access, at, bytes,
                place + ", which " + name(other) + (was_read ? " read" : " wrote") + " since the last barrier: a race",
                where);
}

Stamp stamp(const Thread& thread) { return make_stamp(block.interval, thread.warp->epoch, thread.number); }

[[gnu::always_inline]] inline void check_shared(Byte* byte, const Thread& thread, uintptr_t at, size_t bytes,
                                                Access access, const void* where, Stamp flags = 0) {
    Stamp me = stamp(thread) | flags | (access == Access::atomic ? atomic_bit : 0);
    for (size_t i = 0; i < bytes; i++) {
        Finding finding = Finding::none;
        if (access != Access::write) finding = byte[i].note_read(me, block.first_interval);
        if (access != Access::read && finding == Finding::none) finding = byte[i].note_write(me);
        if (finding != Finding::none) [[unlikely]]
            fail_shared(thread, access, byte[i], finding, me, at, bytes, where);
    }
}

// The shadow of `bytes` bytes of shared memory; null if `at` is not in it.
[[gnu::always_inline]] inline Byte* shared_bytes(const Thread& thread, uintptr_t at, size_t bytes, Access access,
                                                 const void* where) {
    if (dynamic_space.holds(at)) {
        size_t offset = at - dynamic_begin;
        if (offset + bytes > dynamic_size || offset > dynamic_size) [[unlikely]] {
            fail_access(Kind::out_of_bounds, thread, access, at, bytes,
                        format(", outside of dynamic shared memory (byte %td of %zu)", offset, dynamic_size), where);
        }
        return &dynamic_bytes[offset];
    }
    if (program.thread_locals.holds(at) && program.thread_locals.holds(at + bytes - 1)) {
        return &static_bytes[at - program.thread_locals.begin];
    }
    return nullptr;
}

[[gnu::always_inline]] inline void check(const Thread& thread, const void* pointer, size_t bytes, size_t alignment,
                                         Access access, const void* where) {
    auto at = (uintptr_t)pointer;
    if (stacks.region().holds(at) || bytes == 0) return;
    if (at % alignment) [[unlikely]]
        fail_access(Kind::misaligned, thread, access, at, bytes, format(", which is not a multiple of %zu", alignment), where);
    if (device_memory.holds(at)) {
        if (!device_memory.alive(at, bytes)) [[unlikely]]
            fail_access(Kind::out_of_bounds, thread, access, at, bytes, ", outside of all device memory in use", where);
    } else if (Byte* byte = shared_bytes(thread, at, bytes, access, where)) {
        check_shared(byte, thread, at, bytes, access, where);
    } else if (!program.image.holds(at)) [[unlikely]] {
        fail_access(Kind::out_of_bounds, thread, access, at, bytes, ", which is not memory of the device", where);
    }
}

bool in_kernel() { return stacks.region().holds((uintptr_t)__builtin_frame_address(0)); }

}  // namespace
}  // namespace simt

// ----------------------------------------------------------------------------
// the compiler's hooks

#define CHECK_HERE(at, bytes, alignment, access)                                                                 \
    if (simt::in_kernel())                                                                                       \
    simt::check(*simt::running, at, bytes, alignment, simt::Access::access, __builtin_return_address(0))

#define SIZED_HOOKS(bytes)                                                                                       \
    void __tsan_read##bytes(void* at) { CHECK_HERE(at, bytes, bytes, read); }                                    \
    void __tsan_write##bytes(void* at) { CHECK_HERE(at, bytes, bytes, write); }                                  \
    void __tsan_unaligned_read##bytes(void* at) { CHECK_HERE(at, bytes, 1, read); }                              \
    void __tsan_unaligned_write##bytes(void* at) { CHECK_HERE(at, bytes, 1, write); }

#define ATOMIC_CHANGE(bits, name)                                                                                \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile void* at, uint##bits##_t value, int) {                  \
        CHECK_HERE((void*)at, bits / 8, bits / 8, atomic);                                                       \
        return __atomic_##name((volatile uint##bits##_t*)at, value, __ATOMIC_SEQ_CST);                           \
    }

#define ATOMIC_COMPARE(bits, strength)                                                                           \
    int __tsan_atomic##bits##_compare_exchange_##strength(volatile void* at, void* expected,                     \
                                                          uint##bits##_t value, int, int) {                      \
        CHECK_HERE((void*)at, bits / 8, bits / 8, atomic);                                                       \
        return __atomic_compare_exchange_n((volatile uint##bits##_t*)at, (uint##bits##_t*)expected, value, false, \
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                                  \
    }

#define ATOMIC_HOOKS(bits)                                                                                       \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile void* at, int) {                                    \
        CHECK_HERE((void*)at, bits / 8, bits / 8, atomic);                                                       \
        return __atomic_load_n((const volatile uint##bits##_t*)at, __ATOMIC_SEQ_CST);                            \
    }                                                                                                            \
    void __tsan_atomic##bits##_store(volatile void* at, uint##bits##_t value, int) {                             \
        CHECK_HERE((void*)at, bits / 8, bits / 8, atomic);                                                       \
        __atomic_store_n((volatile uint##bits##_t*)at, value, __ATOMIC_SEQ_CST);                                 \
    }                                                                                                            \
    uint##bits##_t __tsan_atomic##bits##_exchange(volatile void* at, uint##bits##_t value, int) {                \
        CHECK_HERE((void*)at, bits / 8, bits / 8, atomic);                                                       \
        return __atomic_exchange_n((volatile uint##bits##_t*)at, value, __ATOMIC_SEQ_CST);                       \
    }                                                                                                            \
    ATOMIC_CHANGE(bits, fetch_add)                                                                               \
    ATOMIC_CHANGE(bits, fetch_sub)                                                                               \
    ATOMIC_CHANGE(bits, fetch_and)                                                                               \
    ATOMIC_CHANGE(bits, fetch_or)                                                                                \
    ATOMIC_CHANGE(bits, fetch_xor)                                                                               \
    ATOMIC_CHANGE(bits, fetch_nand)                                                                              \
    ATOMIC_COMPARE(bits, strong)                                                                                 \
    ATOMIC_COMPARE(bits, weak)

extern "C" {

SIZED_HOOKS(1)
SIZED_HOOKS(2)
SIZED_HOOKS(4)
SIZED_HOOKS(8)
SIZED_HOOKS(16)

void __tsan_read_range(void* at, size_t bytes) { CHECK_HERE(at, bytes, 1, read); }
void __tsan_write_range(void* at, size_t bytes) { CHECK_HERE(at, bytes, 1, write); }

ATOMIC_HOOKS(8)
ATOMIC_HOOKS(16)
ATOMIC_HOOKS(32)
ATOMIC_HOOKS(64)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
