// The vector layer of the CPU variants. A file named *_isa.cc is compiled once per instruction set (SPLICE_ISA is
// portable, avx2 or avx512; see kernels/CMakeLists.txt) and puts its code into the namespace of that name, so an
// algorithm is written once against the names below.
//
// Rule for *_isa.cc: leaf code on raw pointers only. Use nothing of the standard library that the linker may merge with
// the copy of another file: it could keep the AVX-512 copy and run it on a machine without AVX-512.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/e4m3.h"

#ifndef SPLICE_ISA
#error "simd.h is for *_isa.cc files"
#endif

#define SPLICE_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define SPLICE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SPLICE_UNROLL _Pragma("GCC unroll 16")  // for loops with a constant count: their arrays become registers
#endif

#if defined(__AVX512F__)
#include "kernels/common/simd_avx512.h"
#elif defined(__AVX2__)
#include "kernels/common/simd_avx2.h"
#else
#include "kernels/common/simd_portable.h"
#endif

namespace spl::kernels::cpu::SPLICE_ISA {

// 2^x to about 1e-7 relative; exactly 1 at 0; x is clamped to [-126, 126]. NaN in gives NaN or a clamped value out.
SPLICE_INLINE F Exp2(F x) {
  // 2^x = 2^n · 2^f with n = round(x), |f| <= 1/2, 2^f = 1 + f·poly(f): near-minimax, relative error 2e-9.
  x = Max(Min(x, Set1(126.0f)), Set1(-126.0f));
  const F n = Round(x);
  const F f = Sub(x, n);
  F p = Set1(0.000153533605f);
  p = Fma(p, f, Set1(0.00133988739f));
  p = Fma(p, f, Set1(0.00961843692f));
  p = Fma(p, f, Set1(0.0555033237f));
  p = Fma(p, f, Set1(0.240226477f));
  p = Fma(p, f, Set1(0.693147182f));
  return ScaleByPowerOfTwo(Fma(p, f, Set1(1.0f)), n);
}

// Loads n in [1, kLanes] elements of a tensor of any type, widened; lanes past n are 0 and not read.
SPLICE_INLINE F LoadAs(const void* p, DType dtype, int64_t at, int n) {
  switch (dtype) {
    case DType::kF32:
      return LoadPartial(static_cast<const float*>(p) + at, n);
    case DType::kBF16:
      return LoadBf16(static_cast<const bf16*>(p) + at, n);
    case DType::kF16:
    case DType::kE4M3:  // never an activation
    case DType::kInt4:
      break;
  }
  return LoadF16(static_cast<const uint16_t*>(p) + at, n);
}

}  // namespace spl::kernels::cpu::SPLICE_ISA
