/*
The PTX instructions of Hopper (compute capability 9.0a) that have no CUDA C++ spelling, with one thin wrapper
each: tensor-core products by four warps, copies of whole tiles by the copy engine, and the barriers for such
copies and for the roles of a block.

A warpgroup is four consecutive warps, the first a multiple of four. wgmma multiplies A (64, 16) by B (16, N)
and adds to D (64, N). Warp w holds row 16 w + r of D as mma.m16n8k16 holds row r (see ptx.cuh): in the n-th
group of 8 columns, d[4 n] and d[4 n + 1] are columns 2 pair and 2 pair + 1 of row group, d[4 n + 2] and d[4 n
+ 3] those of row group + 8. A, if in registers, is divided in the same way, into the four registers of a 16 x
16 fragment.

A matrix in shared memory is passed as a descriptor. Its rows are cut into pieces of one swizzle width (32, 64
or 128 bytes). Eight such pieces, one below the other, form an atom, aligned to its size. "Rows" run along k
(Major::k) or along m or n (Major::mn). Inside an atom the 16-byte units of each 128 bytes are permuted:
address bits from 4 up are XORed with those from 7 up (1, 2 or 3 bits for a width of 32, 64 or 128 bytes). The
copy engine does the same when it stores a tile with that swizzle.

    Major::k    atoms of 8 rows m (or n): `stride` bytes from one to the next; a step along k moves the start
                within the first row. `leading` is not used.
    Major::mn   atoms of 8 rows k: `stride` bytes to the next 8 values of k, `leading` bytes to the next piece
                along m (or n).

Products are asynchronous: between wgmma and the wgmma_wait that covers it, neither D nor the registers of A
may be touched, nor the operands in shared memory overwritten. wgmma_fence must precede the first product on
registers that were touched since. Shared memory written by ordinary stores needs fence_async, by each thread
that wrote, and then a barrier before a product or a copy reads it.
*/
#include <cuda.h>
#include <cuda_runtime.h>

#ifndef KERNELS_PTX_HOPPER_CUH  // a runtime other than NVIDIA's defines these functions itself
#define KERNELS_PTX_HOPPER_CUH

#include <cstdint>

#include "kernels/ptx.cuh"

// True if this is compiled for a GPU that has the instructions. A kernel that uses them does so in one branch
// of `if constexpr (is_hopper)`, and traps in the other.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool is_hopper = true;
#else
constexpr bool is_hopper = false;
#endif

// The dynamic shared memory of the block, aligned for every swizzle.
template <typename T>
__device__ T* swizzled_shared() {
    extern __shared__ __align__(1024) unsigned char swizzled_shared_bytes[];
    return reinterpret_cast<T*>(swizzled_shared_bytes);
}

// ----------------------------------------------------------------------------
// tensor cores

enum class Major { k, mn };
enum class Swizzle : uint64_t { bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// `start` points into the first row of an atom.
__device__ inline uint64_t matrix_descriptor(const void* start, Swizzle swizzle, int leading, int stride) {
    return (uint64_t)(shared_address(start) & 0x3ffff) >> 4 | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}

// Returns the descriptor of the matrix `bytes` further on.
__device__ inline uint64_t advance(uint64_t descriptor, int bytes) {
    return descriptor + (bytes >> 4);
}

__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of products that this warpgroup started since the last commit.
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the `pending` most recent groups are still in flight.
template <int pending>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving work across this point: the registers have been computed before it, and are
// used after it. Needed before a product that uses registers, after the wait that releases them, and after
// work that is to be done while products run. Emits no instruction.
template <int count>
__device__ void pin(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

#define WGMMA_REGISTERS_32                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_48                                                                                   \
    WGMMA_REGISTERS_32 ", "                                                                                  \
                       "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_REGISTERS_64                                                                                   \
    WGMMA_REGISTERS_48 ", "                                                                                  \
                       "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_FLOATS_8(i)                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),              \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_FLOATS_32 WGMMA_FLOATS_8(0), WGMMA_FLOATS_8(8), WGMMA_FLOATS_8(16), WGMMA_FLOATS_8(24)
#define WGMMA_FLOATS_48 WGMMA_FLOATS_32, WGMMA_FLOATS_8(32), WGMMA_FLOATS_8(40)
#define WGMMA_FLOATS_64 WGMMA_FLOATS_48, WGMMA_FLOATS_8(48), WGMMA_FLOATS_8(56)
// The operands after D are numbered from `count`, the number of floats of D in a thread.
#define WGMMA(n, count, a, transposed, accumulate, ...)                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #accumulate ", 0; "                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_REGISTERS_##count        \
                 "}, " a ", p, 1, 1, " transposed "; }"                                                      \
                 : WGMMA_FLOATS_##count                                                                      \
                 : __VA_ARGS__, "r"((int)keep))

// d = a @ b, plus d if `keep`: bf16 products, float sums, by all threads of the warpgroup.
template <Major a_major, Major b_major, int count>
__device__ void wgmma(float (&d)[count], uint64_t a, uint64_t b, bool keep) {
    constexpr int ta = a_major == Major::mn, tb = b_major == Major::mn;
    static_assert(count == 32 || count == 64, "N is 64 or 128");
    if constexpr (count == 32)
        WGMMA(64, 32, "%32, %33", "%34, %35", 36, "l"(a), "l"(b), "n"(ta), "n"(tb));
    else
        WGMMA(128, 64, "%64, %65", "%66, %67", 68, "l"(a), "l"(b), "n"(ta), "n"(tb));
}

template <Major b_major, int count>
__device__ void wgmma(float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool keep) {
    constexpr int tb = b_major == Major::mn;
    static_assert(count == 32 || count == 48 || count == 64, "N is 64, 96 or 128");
    if constexpr (count == 32)
        WGMMA(64, 32, "{%32, %33, %34, %35}, %36", "%37", 38, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
              "l"(b), "n"(tb));
    else if constexpr (count == 48)
        WGMMA(96, 48, "{%48, %49, %50, %51}, %52", "%53", 54, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
              "l"(b), "n"(tb));
    else
        WGMMA(128, 64, "{%64, %65, %66, %67}, %68", "%69", 70, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
              "l"(b), "n"(tb));
}

#undef WGMMA
#undef WGMMA_REGISTERS_32
#undef WGMMA_REGISTERS_48
#undef WGMMA_REGISTERS_64
#undef WGMMA_FLOATS_8
#undef WGMMA_FLOATS_32
#undef WGMMA_FLOATS_48
#undef WGMMA_FLOATS_64

// ----------------------------------------------------------------------------
// barriers

// An mbarrier is in shared memory. A phase of it ends when `arrivals` threads have arrived and all bytes that
// were announced have been copied; then the next phase begins.
using Mbarrier = uint64_t;

__device__ inline void mbarrier_init(Mbarrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

// Makes the barriers that this thread initialized visible to the copy engine. The other threads need a
// __syncthreads after it.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(Mbarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that copies will transfer.
__device__ inline void mbarrier_arrive_expect(Mbarrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits for the end of a phase, given by its parity: 0 for the first, third, ... and 1 for the others.
// Waiting for phase 1 of a new barrier returns at once.
__device__ inline void mbarrier_wait(Mbarrier* barrier, int phase) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)),
                 "r"(phase)
                 : "memory");
}

// Barrier `id` (1 to 15; __syncthreads uses 0) of `threads` threads, a multiple of 32, counting those that
// wait at it and those that only arrive.
__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes this thread's writes to shared memory visible to products and bulk copies that start later.
__device__ inline void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders this thread's earlier accesses to global memory, by bulk copies and by ordinary instructions, before
// its later ones.
__device__ inline void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// A warpgroup gives up registers, or takes some that others gave up: from here on each of its threads has
// `registers`.
template <int registers>
__device__ void give_registers_up() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ----------------------------------------------------------------------------
// the copy engine

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box that begins at element (x, y, z, w) of its tensor, x running fastest, to `to` (aligned
// to 128 bytes), with zeros for elements outside the tensor; `barrier` counts the bytes.
__device__ inline void copy_box(void* to, const CUtensorMap& map, int x, int y, int z, int w,
                                Mbarrier* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
                 : "memory");
}

// Copy consecutive bytes; addresses and sizes are multiples of 16.
__device__ inline void bulk_load(void* to_shared, const void* from, int bytes, Mbarrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to_shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ inline void bulk_store(void* to, const void* from_shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from_shared)), "r"(bytes)
                 : "memory");
}

// to[i] += from_shared[i]
__device__ inline void bulk_add(float* to, const float* from_shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from_shared)), "r"(bytes)
                 : "memory");
}

// These are to this thread's bulk stores and additions what cp_async_commit and cp_async_wait are to copies:
// bulk_wait_read waits until the source has been read, bulk_wait until the results are in memory.
__device__ inline void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int pending>
__device__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

template <int pending>
__device__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

#endif
