/*
Part of simt.cc: the checks at each memory access of a kernel, and the hooks through which the compiler
reports accesses.
*/
#pragma once

namespace simt {
namespace {

const char* verb(Access access) {
    return access == Access::read ? "reads" : access == Access::write ? "writes" : "updates atomically";
}

[[noreturn, gnu::noinline]] void fail_access(Kind kind, const Thread& thread, Access access, uintptr_t at,
                                             size_t bytes, const char* what, const void* where) {
    fail(kind, where, "%s %s %zu bytes at 0x%zx%s", name(thread).text, verb(access), bytes, at, what);
}

template <Scope scope>
[[noreturn, gnu::noinline]] void fail_order(const Thread& thread, Access access,
                                            const History<scope>& history, Finding finding, Stamp me,
                                            uintptr_t at, size_t bytes, const void* where) {
    char place[64] = " (static shared memory)", what[256];
    if (scope == Scope::grid)
        snprintf(place, sizeof place, " (device memory, byte %zu of its allocation)",
                 device_memory.offset(at));
    else if (dynamic_space.holds(at))
        snprintf(place, sizeof place, " (dynamic shared memory + %zu)", at - dynamic_begin);
    Stamp theirs = finding == Finding::race_with_use ? history.racing_use(access, me) : history.write;
    Name other = name(threads[theirs & thread_bits]);
    const char* did = theirs & atomic_bit                 ? "updated atomically"
                      : finding == Finding::race_with_use ? "read"
                                                          : "wrote";
    if (finding == Finding::unwritten)
        snprintf(what, sizeof what, "%s, which no thread of the block wrote", place);
    else if (finding == Finding::pending)
        snprintf(what, sizeof what, "%s, before a %s of %s to it was waited for", place,
                 theirs & engine_bit ? "bulk copy" : "cp.async", other.text);
    else if (interval_of(theirs) >= block_start)
        snprintf(what, sizeof what, "%s, which %s %s since the last barrier: a race", place, other.text, did);
    else
        snprintf(what, sizeof what, "%s, which %s of block %s %s, and no counter orders the two: a race",
                 place, other.text, name(block_at(grid_order.number(interval_of(theirs)))).text, did);
    bool race = finding == Finding::race_with_use || finding == Finding::race_with_write;
    fail_access(race ? Kind::race : Kind::unwritten, thread, access, at, bytes, what, where);
}

Stamp stamp(const Thread& thread) {
    return make_stamp(block.interval, thread.warp->epoch, thread.number);
}

// take_past() takes over the past that was left at an address, leave_past() leaves one there (order.h).
void take_past(uintptr_t at) {
    grid_order.take(at, stamp(*running));
}
void leave_past(uintptr_t at, bool beside_others) {
    grid_order.leave(at, stamp(*running), beside_others);
    running->warp->epoch++;
}

// `index` counts bytes of the shadow, and has the alignment of the address; `flags` are added to the stamp.
template <Scope scope>
[[gnu::always_inline]] inline void check_order(Shadow<scope>& shadow, size_t index, const Thread& thread,
                                               uintptr_t at, size_t bytes, size_t alignment, Access access,
                                               const void* where, Stamp flags) {
    Stamp me = stamp(thread) | flags | (access == Access::atomic ? atomic_bit : 0);
    History<scope> history;
    Finding finding = shadow.note(index, bytes, alignment, access, me, history);
    if (finding != Finding::none) [[unlikely]]
        fail_order(thread, access, history, finding, me, at, bytes, where);
}

[[gnu::always_inline]] inline void check(const Thread& thread, const void* pointer, size_t bytes,
                                         size_t alignment, Access access, const void* where,
                                         Stamp flags = 0) {
    auto at = (uintptr_t)pointer;
    if (at % alignment) [[unlikely]]
        fail(Kind::misaligned, where, "%s %s %zu bytes at 0x%zx, which is not a multiple of %zu",
             name(thread).text, verb(access), bytes, at, alignment);
    if (device_memory.holds(at)) {
        if (!device_memory.alive(at, bytes)) [[unlikely]]
            fail_access(Kind::out_of_bounds, thread, access, at, bytes,
                        ", outside of all device memory in use", where);
        if (access == Access::atomic && thread.fenced_device) [[unlikely]] {
            take_past(at);
            leave_past(at, true);
        }
        check_order(device_shadow, device_memory.place(at), thread, at, bytes, alignment, access, where,
                    flags);
        if (counts_traffic) [[unlikely]]
            traffic_counter.note(device_memory.place(at), bytes, access);
    } else if (dynamic_space.holds(at)) {
        size_t index = at - dynamic_begin;
        if (index > dynamic_size || index + bytes > dynamic_size) [[unlikely]]
            fail(Kind::out_of_bounds, where,
                 "%s %s %zu bytes outside of dynamic shared memory (byte %td of %zu)", name(thread).text,
                 verb(access), bytes, index, dynamic_size);
        check_order(*shadow, index, thread, at, bytes, alignment, access, where, flags);
    } else if (program.thread_locals.holds(at) && program.thread_locals.holds(at + bytes - 1)) {
        size_t index = max_dynamic_shared + at - program.thread_locals.begin / 16 * 16;
        check_order(*shadow, index, thread, at, bytes, alignment, access, where, flags);
    } else if (!program.image.holds(at)) [[unlikely]] {
        fail_access(Kind::out_of_bounds, thread, access, at, bytes, ", which is not memory of the device",
                    where);
    }
}

// Checks a read by the tensor cores or the copy engine: stores of threads there must be visible to them.
void check_engine_read(const Thread& thread, const void* pointer, size_t bytes, const void* where) {
    check(thread, pointer, bytes, 16, Access::read, where);
    size_t index = (uintptr_t)pointer - dynamic_begin;
    for (size_t at = index, alike; at < index + bytes; at += alike) {
        Stamp write = shadow->last_change(at, alike);
        const Thread& writer = threads[write & thread_bits];
        if (write & engine_bit || write >> epoch_shift < writer.fenced >> epoch_shift) continue;
        fail(Kind::unfenced, where,
             "%s reads 16 bytes at dynamic shared memory + %zu by an asynchronous copy or product, which %s "
             "wrote "
             "and did not fence_async",
             name(thread).text, index, name(writer).text);
    }
}

// Returns whether a hook has anything to check: the code belongs to a kernel, and the memory is not a stack
// of its threads.
[[gnu::always_inline]] inline bool concerns_us(const volatile void* at) {
    return stacks.holds((uintptr_t)__builtin_frame_address(0)) && !stacks.holds((uintptr_t)at);
}

// Not inlined, so that the hooks are short when they have nothing to check.
template <size_t bytes, size_t alignment, Access access>
[[gnu::noinline]] void checked(const volatile void* at, const void* where) {
    check(*running, (const void*)at, bytes, alignment, access, where);
}

[[gnu::noinline]] void checked_range(const void* at, size_t bytes, Access access, const void* where) {
    check(*running, at, bytes, 1, access, where);
}

}  // namespace
}  // namespace simt

// ----------------------------------------------------------------------------
// the compiler's hooks

#define CHECK_HERE(at, bytes, alignment, access)                                                             \
    if (simt::concerns_us(at))                                                                               \
    simt::checked<bytes, alignment, simt::Access::access>(at, __builtin_return_address(0))

#define CHECK_RANGE(at, bytes, access)                                                                       \
    if (bytes && simt::concerns_us(at))                                                                      \
    simt::checked_range(at, bytes, simt::Access::access, __builtin_return_address(0))

#define SIZED_HOOKS(bytes)                                                                                   \
    void __tsan_read##bytes(void* at) {                                                                      \
        CHECK_HERE(at, bytes, bytes, read);                                                                  \
    }                                                                                                        \
    void __tsan_write##bytes(void* at) {                                                                     \
        CHECK_HERE(at, bytes, bytes, write);                                                                 \
    }                                                                                                        \
    void __tsan_unaligned_read##bytes(void* at) {                                                            \
        CHECK_HERE(at, bytes, 1, read);                                                                      \
    }                                                                                                        \
    void __tsan_unaligned_write##bytes(void* at) {                                                           \
        CHECK_HERE(at, bytes, 1, write);                                                                     \
    }

#define ATOMIC_CHANGE(bits, name)                                                                            \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile void* at, uint##bits##_t value, int) {              \
        CHECK_HERE(at, bits / 8, bits / 8, atomic);                                                          \
        return __atomic_##name((volatile uint##bits##_t*)at, value, __ATOMIC_SEQ_CST);                       \
    }

#define ATOMIC_COMPARE(bits, strength)                                                                       \
    int __tsan_atomic##bits##_compare_exchange_##strength(volatile void* at, void* expected,                 \
                                                          uint##bits##_t value, int, int) {                  \
        CHECK_HERE(at, bits / 8, bits / 8, atomic);                                                          \
        return __atomic_compare_exchange_n((volatile uint##bits##_t*)at, (uint##bits##_t*)expected, value,   \
                                           false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                       \
    }

#define ATOMIC_HOOKS(bits)                                                                                   \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile void* at, int) {                                \
        CHECK_HERE(at, bits / 8, bits / 8, atomic);                                                          \
        return __atomic_load_n((const volatile uint##bits##_t*)at, __ATOMIC_SEQ_CST);                        \
    }                                                                                                        \
    void __tsan_atomic##bits##_store(volatile void* at, uint##bits##_t value, int) {                         \
        CHECK_HERE(at, bits / 8, bits / 8, atomic);                                                          \
        __atomic_store_n((volatile uint##bits##_t*)at, value, __ATOMIC_SEQ_CST);                             \
    }                                                                                                        \
    uint##bits##_t __tsan_atomic##bits##_exchange(volatile void* at, uint##bits##_t value, int) {            \
        CHECK_HERE(at, bits / 8, bits / 8, atomic);                                                          \
        return __atomic_exchange_n((volatile uint##bits##_t*)at, value, __ATOMIC_SEQ_CST);                   \
    }                                                                                                        \
    ATOMIC_CHANGE(bits, fetch_add)                                                                           \
    ATOMIC_CHANGE(bits, fetch_sub)                                                                           \
    ATOMIC_CHANGE(bits, fetch_and)                                                                           \
    ATOMIC_CHANGE(bits, fetch_or)                                                                            \
    ATOMIC_CHANGE(bits, fetch_xor)                                                                           \
    ATOMIC_CHANGE(bits, fetch_nand)                                                                          \
    ATOMIC_COMPARE(bits, strong)                                                                             \
    ATOMIC_COMPARE(bits, weak)

extern "C" {

SIZED_HOOKS(1)
SIZED_HOOKS(2)
SIZED_HOOKS(4)
SIZED_HOOKS(8)
SIZED_HOOKS(16)

void __tsan_read_range(void* at, size_t bytes) {
    CHECK_RANGE(at, bytes, read);
}
void __tsan_write_range(void* at, size_t bytes) {
    CHECK_RANGE(at, bytes, write);
}

ATOMIC_HOOKS(8)
ATOMIC_HOOKS(16)
ATOMIC_HOOKS(32)
ATOMIC_HOOKS(64)
void __tsan_atomic_thread_fence(int) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
