// The PTX instructions of the tensor-core kernels, one thin wrapper each (PTX ISA 8.0 and later).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace spl::kernels::cuda {

__device__ inline uint32_t SmemAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 2^x, flushing denormals; 2^-inf = 0 and 2^0 = 1 exactly.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, 1 ulp off, flushing denormals; 1 / inf = 0.
__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to bf16 pairs, lo in the low half.
__device__ inline uint32_t PackBf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// ---- sm_80 ----------------------------------------------------------------------------------------------------------
// Copies 16 bytes from global to shared memory. !valid: writes zeros and reads nothing.
__device__ inline void CpAsync16(uint32_t smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
// Copies the first `bytes` of 4 bytes; the others become zeros.
__device__ inline void CpAsync4(uint32_t smem, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}
__device__ inline uint32_t LoadShared1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline void StoreShared1(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ inline uint32_t LoadShared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ inline uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ inline void StoreShared16(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ inline void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups that CpAsyncCommit closed but the last kPending. A copy that no group has is not waited for.
template <int kPending>
__device__ inline void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits for all copies of this thread, in a group or not.
__device__ inline void CpAsyncWaitAll() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline void LdMatrix4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}
__device__ inline void LdMatrix4Trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements, one row fragment per lane quad, transposed.
__device__ inline uint32_t TransposeMatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c[16x8] += a[16x16] b[16x8].
__device__ inline void Mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of f16.
__device__ inline void Mma16816Half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of kRowBytes-byte rows, XOR-swizzled so that eight
// rows of one chunk column lie in eight different bank groups.
template <int kRowBytes>
__device__ inline uint32_t Swizzled(int row, int chunk) {
  static_assert(kRowBytes >= 128 && kRowBytes % 128 == 0);
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) * 16));
}

// The quad of lanes that shares a row of an mma accumulator holds, per 8-column block, 2 columns (one packed word) per
// lane. In: x[j] is this lane's word of block j. Out: the four words of block (lane % 4): 16 contiguous bytes.
__device__ inline uint4 QuadTranspose(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  const int t = threadIdx.x & 3;
  // Rotate so that slot r holds block (t ^ r), exchange with lane t ^ r, then undo.
  const bool b0 = t & 1, b1 = t & 2;
  uint32_t s0 = b0 ? x1 : x0, s1 = b0 ? x0 : x1, s2 = b0 ? x3 : x2, s3 = b0 ? x2 : x3;
  uint32_t u0 = b1 ? s2 : s0, u1 = b1 ? s3 : s1, u2 = b1 ? s0 : s2, u3 = b1 ? s1 : s3;
  u1 = __shfl_xor_sync(0xffffffffu, u1, 1);
  u2 = __shfl_xor_sync(0xffffffffu, u2, 2);
  u3 = __shfl_xor_sync(0xffffffffu, u3, 3);
  // u_r now is the word that lane t ^ r held of block t, i.e. word t ^ r of the block.
  s0 = b0 ? u1 : u0, s1 = b0 ? u0 : u1, s2 = b0 ? u3 : u2, s3 = b0 ? u2 : u3;
  return uint4{b1 ? s2 : s0, b1 ? s3 : s1, b1 ? s0 : s2, b1 ? s1 : s3};
}

// ---- sm_90 ----------------------------------------------------------------------------------------------------------
// Position in a ring of stages; the phase flips with every turn.
template <int kLength>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ int Before() const { return stage == 0 ? kLength - 1 : stage - 1; }
  __device__ void Advance() {
    if (++stage == kLength) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ inline void MbarrierInit(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void MbarrierArrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives at the barrier of block `block` of the cluster that stands where `bar` stands in this one. Orders this
// thread's reads before; no write is published (release at cluster scope takes a fence of the whole device).
__device__ inline void MbarrierArriveAt(uint32_t bar, int block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(bar),
      "r"(block)
      : "memory");
}
__device__ inline void MbarrierArriveExpect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline void MbarrierWait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ inline void MbarrierInitFence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void FenceProxyAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts as `threads` threads of NamedBarrierSync do, without waiting.
__device__ inline void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// One box of a 3-D tensor map; coordinates past the tensor give zeros.
__device__ inline void TmaLoad3(uint32_t smem, const void* map, uint32_t bar, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(smem),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
// One box of a 2-D tensor map; coordinates past the tensor give zeros.
__device__ inline void TmaLoad2(uint32_t smem, const void* map, uint32_t bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(smem),
      "l"(map), "r"(bar), "r"(c0), "r"(c1)
      : "memory");
}
// The same into the blocks of the cluster whose bit in `blocks` is set: to the same place of each, and each one's own
// barrier counts the bytes.
__device__ inline void TmaLoad2Multicast(uint32_t smem, const void* map, uint32_t bar, int c0, int c1,
                                         uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "h"(blocks)
      : "memory");
}
// `bytes` (a multiple of 16) from global to shared memory, both 16-byte aligned.
__device__ inline void BulkLoad(uint32_t smem, const void* global, int bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(global), "r"(bytes), "r"(bar)
               : "memory");
}
__device__ inline void PrefetchTensorMap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <int kRegisters>
__device__ inline void SetMaxRegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void SetMaxRegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Shared-memory matrix descriptor for 128-byte swizzled tiles: 8-row groups of 128-byte rows, `stride` bytes apart;
// `leading` is the distance of 64-element column blocks (transposed operands only).
__device__ inline uint64_t WgmmaDescriptor(uint32_t smem, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (uint64_t{1} << 62);
}
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of an accumulator across the fences and waits above.
template <int kN>
__device__ inline void WgmmaPin(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// The same for a left operand that has just been made: its instructions stay in front of the fence.
template <int kM, int kN>
__device__ inline void WgmmaPin(uint32_t (&a)[kM][kN]) {
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) asm volatile("" : "+r"(a[i / kN][i % kN])::"memory");
}

#define SPL_D8(d, i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SPL_D32(d, i) SPL_D8(d, i), SPL_D8(d, i + 8), SPL_D8(d, i + 16), SPL_D8(d, i + 24)
#define SPL_R32                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPL_R48 SPL_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SPL_R64                                                                                                      \
  SPL_R32                                                                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define SPL_R112                                                                                                     \
  SPL_R64                                                                                                            \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, " \
  "%107, %108, %109, %110, %111"

#define SPL_R128                                                                                                       \
  SPL_R64                                                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "   \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "   \
  "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"

// d[64 x N] (+)= a[64 x 16] b[N x 16]^T, a in registers, b K-major in shared memory.
__device__ inline void WgmmaRsK(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, "
      "p, 1, 1, 0;\n}\n"
      : SPL_D8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaRsK(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
      : SPL_D8(d, 0), SPL_D8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaRsK(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SPL_R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : SPL_D32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaRsK(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SPL_R128
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n}\n"
      : SPL_D32(d, 0), SPL_D32(d, 32), SPL_D32(d, 64), SPL_D32(d, 96)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaRsK(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SPL_R64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
      : SPL_D32(d, 0), SPL_D32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// d[64 x N] += a[64 x 16] b[16 x N], a in registers, b row-major (transposed) in shared memory.
__device__ inline void WgmmaRs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SPL_R64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : SPL_D32(d, 0), SPL_D32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaRs(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SPL_R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : SPL_D32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// d[64 x N] (+)= a[64 x 16] b[N x 16]^T, both K-major in shared memory.
__device__ inline void WgmmaSsK(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SPL_R32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : SPL_D32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaSsK(float (&d)[48], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" SPL_R48 "}, %48, %49, p, 1, 1, 0, 0;\n}\n"
      : SPL_D32(d, 0), SPL_D8(d, 32), SPL_D8(d, 40)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaSsK(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SPL_R64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : SPL_D32(d, 0), SPL_D32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaSsK(float (&d)[112], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %114, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 {" SPL_R112 "}, %112, %113, p, 1, 1, 0, 0;\n}\n"
      : SPL_D32(d, 0), SPL_D32(d, 32), SPL_D32(d, 64), SPL_D8(d, 96), SPL_D8(d, 104)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void WgmmaSsK(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SPL_R128 "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
      : SPL_D32(d, 0), SPL_D32(d, 32), SPL_D32(d, 64), SPL_D32(d, 96)
      : "l"(a), "l"(b), "r"(accumulate));
}
#undef SPL_D8
#undef SPL_D32
#undef SPL_R32
#undef SPL_R48
#undef SPL_R64
#undef SPL_R112
#undef SPL_R128

}  // namespace spl::kernels::cuda
