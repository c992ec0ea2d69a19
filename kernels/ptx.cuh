/*
The PTX instructions that have no CUDA C++ spelling, or none that is as short, with one thin wrapper each:
tensor-core products, the matrix loads that feed them, asynchronous copies to shared memory, sums in global
memory, and some arithmetic. Compute capability 8.0 is enough for all of them.

Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With group = lane / 4 and pair = lane % 4, a
register holds two bf16 of adjacent columns, the lower column in the lower half:

    A (16 x 16, row major)   a[0]: row group,     columns 2 pair, 2 pair + 1
                             a[1]: row group + 8, the same columns
                             a[2]: row group,     columns 2 pair + 8, 2 pair + 9
                             a[3]: row group + 8, the same columns as a[2]
    B (16 x 8)               b[0]: rows 2 pair, 2 pair + 1 of column group
                             b[1]: rows 2 pair + 8, 2 pair + 9 of column group
    D (16 x 8, float)        d[0], d[1]: row group,     columns 2 pair, 2 pair + 1
                             d[2], d[3]: row group + 8, the same columns

ldmatrix reads 8 x 8 matrices of 16-bit elements. Lane 8 m + r passes the address of row r (16 bytes, 16-byte
aligned) of matrix m, and register m of each lane receives columns 2 pair and 2 pair + 1 of row group. So x4
on the four quarters of a row-major tile, in the order top left, bottom left, top right, bottom right, fills
A; x2 on rows that are columns of B fills B; and the _trans forms, which transpose each 8 x 8 matrix, do the
same from memory with the opposite layout.
*/
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#ifndef KERNELS_PTX_CUH  // a runtime other than NVIDIA's defines these functions itself
#define KERNELS_PTX_CUH

#include <cstdint>

// The dynamic shared memory of the block, 128-byte aligned.
template <typename T>
__device__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
}

// Returns the number and hides its value from the compiler, which therefore cannot keep values computed from
// it in registers from one iteration of a loop to the next.
__device__ inline int pinned(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

__device__ inline uint32_t shared_address(const void* shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// ----------------------------------------------------------------------------
// tensor cores

// d += a @ b: bf16 products, float sums. All 32 lanes of the warp take part.
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices; `row` is this lane's row address.
__device__ inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Two 8 x 8 matrices; the addresses of lanes 16 to 31 are not used.
__device__ inline void ldmatrix_x2(uint32_t (&out)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void ldmatrix_x2_trans(uint32_t (&out)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// ----------------------------------------------------------------------------
// stores to global memory that the compiler cannot split: 16 or 8 bytes, aligned to their size

__device__ inline void store_global(void* to, uint4 words) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ inline void store_global(void* to, uint2 words) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
}

// ----------------------------------------------------------------------------
// sums in global memory, and counters by which blocks take turns

// *sum += value, without returning the old value.
__device__ inline void add_global(float* sum, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(value) : "memory");
}

// Reads a counter in global memory. By itself this orders nothing.
__device__ inline unsigned counter_now(const unsigned* counter) {
    unsigned now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter));
    return now;
}

// Waits until a counter has this value. Everything that the setting thread did or saw before its counter_set
// happens before anything that this thread does after the wait; with barriers on either side, this extends to
// the other threads of both blocks. `seen` is an earlier result of counter_now.
__device__ inline void counter_wait(const unsigned* counter, unsigned value, unsigned seen) {
    while (seen != value) seen = counter_now(counter);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ inline void counter_wait(const unsigned* counter, unsigned value) {
    counter_wait(counter, value, counter_now(counter));
}

__device__ inline void counter_set(unsigned* counter, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// ----------------------------------------------------------------------------
// asynchronous copies from global to shared memory

// Starts a copy of 16 bytes (both addresses 16-byte aligned). This thread may read the bytes after
// cp_async_wait, and the other threads of the block after a __syncthreads that follows it.
__device__ inline void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
                 : "memory");
}

// Copies if `valid`; otherwise writes 16 zero bytes and does not read `global`.
__device__ inline void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// Closes the group of copies that this thread started since the last commit.
__device__ inline void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the `pending` most recent groups of this thread are still in flight.
template <int pending>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ----------------------------------------------------------------------------
// arithmetic: one instruction each, to 2 ulp; denormals are flushed to 0

__device__ inline float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ inline float inverse_approx(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Returns two numbers rounded to bf16, as fragments hold them.
__device__ inline uint32_t bf16_pair(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return __bfloat16_as_ushort(pair.x) | (uint32_t)__bfloat16_as_ushort(pair.y) << 16;
}

// ----------------------------------------------------------------------------
// caches

// Starts fetching the line at this address of global memory into the second-level cache.
__device__ inline void prefetch_to_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

#endif
