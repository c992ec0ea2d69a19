/*
The functions of the program's kernels/ptx_hopper.cuh on the simulated device; they are described there.
Inlined, so that reports name the line of the kernel.
*/
#ifndef KERNELS_PTX_HOPPER_CUH
#define KERNELS_PTX_HOPPER_CUH

#include "test/simt/cuda.h"
#include "test/simt/simt.h"

#define INLINED [[gnu::always_inline]] inline

constexpr bool is_hopper = true;

template <typename T>
T* swizzled_shared() {
    return static_cast<T*>(simt::dynamic_shared());
}

enum class Major { k, mn };
enum class Swizzle : uint64_t { bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

INLINED uint64_t matrix_descriptor(const void* start, Swizzle swizzle, int leading, int stride) {
    return simt::matrix_descriptor(start, (uint64_t)swizzle, leading, stride);
}
INLINED uint64_t advance(uint64_t descriptor, int bytes) {
    return descriptor + (bytes >> 4);
}

INLINED void wgmma_fence() {
    simt::wgmma_fence();
}
INLINED void wgmma_commit() {
    simt::wgmma_commit();
}
template <int pending>
INLINED void wgmma_wait() {
    simt::wgmma_wait(pending);
}
template <int count>
INLINED void pin(float (&)[count]) {}

template <Major a_major, Major b_major, int count>
INLINED void wgmma(float (&d)[count], uint64_t a, uint64_t b, bool keep) {
    simt::wgmma(d, count, a, a_major == Major::mn, b, b_major == Major::mn, keep);
}
template <Major b_major, int count>
INLINED void wgmma(float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool keep) {
    simt::wgmma(d, count, a, b, b_major == Major::mn, keep);
}

using Mbarrier = uint64_t;

INLINED void mbarrier_init(Mbarrier* barrier, int arrivals) {
    simt::mbarrier_init(barrier, arrivals);
}
inline void fence_mbarrier_init() {}
INLINED void mbarrier_arrive(Mbarrier* barrier) {
    simt::mbarrier_arrive(barrier, 0);
}
INLINED void mbarrier_arrive_expect(Mbarrier* barrier, int bytes) {
    simt::mbarrier_arrive(barrier, bytes);
}
INLINED void mbarrier_wait(Mbarrier* barrier, int phase) {
    simt::mbarrier_wait(barrier, phase);
}
INLINED void named_barrier_sync(int id, int threads) {
    simt::named_barrier(id, threads, true);
}
INLINED void named_barrier_arrive(int id, int threads) {
    simt::named_barrier(id, threads, false);
}
INLINED void fence_async() {
    simt::fence_async();
}
inline void fence_async_global() {}
template <int registers>
INLINED void give_registers_up() {
    simt::set_registers(registers, false);
}
template <int registers>
INLINED void take_registers() {
    simt::set_registers(registers, true);
}

inline void prefetch_tensor_map(const CUtensorMap&) {}
INLINED void copy_box(void* to, const CUtensorMap& map, int x, int y, int z, int w, Mbarrier* barrier) {
    simt::copy_box(to, &map, {x, y, z, w}, barrier);
}
INLINED void bulk_load(void* to_shared, const void* from, int bytes, Mbarrier* barrier) {
    simt::bulk_load(to_shared, from, bytes, barrier);
}
INLINED void bulk_store(void* to, const void* from_shared, int bytes) {
    simt::bulk_store(to, from_shared, bytes, false);
}
INLINED void bulk_add(float* to, const float* from_shared, int bytes) {
    simt::bulk_store(to, from_shared, bytes, true);
}
INLINED void bulk_commit() {
    simt::bulk_commit();
}
template <int pending>
INLINED void bulk_wait_read() {
    simt::bulk_wait(pending, true);
}
template <int pending>
INLINED void bulk_wait() {
    simt::bulk_wait(pending, false);
}

#undef INLINED

#endif
