// d[64 x N] (+)= a[64 x 16] b[N x 16]^T, both K-major in shared memory, for N of 64, 96 and 128 (more: cuda_ptx.h).
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {

#define SPL_D8(d, i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SPL_D32(d, i) SPL_D8(d, i), SPL_D8(d, i + 8), SPL_D8(d, i + 16), SPL_D8(d, i + 24)
#define SPL_R32                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPL_R48 SPL_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SPL_R64 \
  SPL_R48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

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

#undef SPL_D8
#undef SPL_D32
#undef SPL_R32
#undef SPL_R48
#undef SPL_R64

}  // namespace spl::kernels::cuda
