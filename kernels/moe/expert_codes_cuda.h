// Device code: how each type of experts' weights lies in shared memory, and becomes operands of an mma.
//
// A stage has kColumns columns: rows of x (bf16), rows of the weight, and for each of kGroups scale groups the factors
// of its features. A step is kColumns / kSteps columns. Lanes are those of an mma: of an operand's feature lane / 4,
// of a sum's features 2 (lane % 4) and the next.
#pragma once

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/int4_gemm_device.h"

namespace spl::kernels::cuda {

// The 16 rows of x from `row` on, 16 columns from piece 2 * step on.
template <int kRowBytes>
__device__ __forceinline__ void LoadExpertRows(uint32_t (&a)[4], uint32_t x, int row, int step, int lane) {
  LdMatrix4(a, x + Swizzled<kRowBytes>(row + lane % 16, step * 2 + lane / 16));
}

struct Bf16Experts {
  static constexpr int kColumns = 64, kSteps = 4, kWeightRow = 128, kBits = 16;  // kWeightRow: bytes
  static constexpr int kGroups = 0, kFactorBytes = 0;
  struct Zeros {};

  __device__ static uint32_t XOffset(int row, int piece) { return Swizzled<kColumns * 2>(row, piece); }
  __device__ static uint32_t WeightOffset(int row, int piece) { return Swizzled<kWeightRow>(row, piece); }

  template <int kRowTiles, int kFeatureTiles>
  __device__ __forceinline__ static void Multiply(uint32_t x, uint32_t w, int row, int feature, int step, int lane,
                                                  const Zeros*, float (&sums)[kRowTiles][kFeatureTiles][4]) {
    static_assert(kFeatureTiles % 2 == 0);
    uint32_t b[kFeatureTiles / 2][4];
#pragma unroll
    for (int i = 0; i < kFeatureTiles / 2; ++i)  // two tiles of features at a time
      LdMatrix4(b[i], w + WeightOffset(feature + i * 16 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      uint32_t a[4];
      LoadExpertRows<kColumns * 2>(a, x, row + m * 16, step, lane);
#pragma unroll
      for (int j = 0; j < kFeatureTiles; ++j) Mma16816(sums[m][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
};

// Codes are arranged (ArrangeFp8Codes); a factor is a scale.
struct Fp8Experts {
  static constexpr int kColumns = 128, kSteps = 8, kWeightRow = 128, kBits = 8;
  static constexpr int kGroups = 1, kFactorBytes = 4;
  struct Zeros {};

  __device__ static uint32_t XOffset(int row, int piece) { return Swizzled<kColumns * 2>(row, piece); }
  __device__ static uint32_t WeightOffset(int row, int piece) { return Swizzled<kWeightRow>(row, piece); }
  __device__ static Zeros ZerosOf(const char* /*factors*/, int /*feature*/) { return {}; }
  __device__ static float2 ScalesOf(const char* factors, int feature) {
    return *reinterpret_cast<const float2*>(factors + feature * kFactorBytes);
  }

  template <int kRowTiles, int kFeatureTiles>
  __device__ __forceinline__ static void Multiply(uint32_t x, uint32_t w, int row, int feature, int step, int lane,
                                                  const Zeros*, float (&sums)[kRowTiles][kFeatureTiles][4]) {
    uint32_t b[kFeatureTiles][2];
#pragma unroll
    for (int j = 0; j < kFeatureTiles; ++j) {
      const uint32_t word = LoadShared4(w + WeightOffset(feature + j * 8 + lane / 4, step) + 4 * (lane % 4));
      WidenFp8Word(word, b[j][0], b[j][1]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      uint32_t a[4];
      LoadExpertRows<kColumns * 2>(a, x, row + m * 16, step, lane);
#pragma unroll
      for (int j = 0; j < kFeatureTiles; ++j) Mma16816(sums[m][j], a, b[j][0], b[j][1]);
    }
  }
};

// Codes are arranged (ArrangeInt4Codes). A factor is a scale and an Int4Zero. kGroupsOfStage: 1, 2 or 4 scale groups in
// 128 columns. A lane has the same eight columns of x and of a feature, in the order of the codes: the order of columns
// inside a product of the tensor cores is free.
template <int kGroupsOfStage>
struct Int4Experts {
  static constexpr int kColumns = 128, kSteps = 4, kWeightRow = 64, kBits = 4;
  static constexpr int kGroups = kGroupsOfStage, kFactorBytes = 8;
  struct Zeros {
    uint32_t zero;
  };

  __device__ static uint32_t XOffset(int row, int piece) { return Int4RowOffset(row, piece); }
  __device__ static uint32_t WeightOffset(int row, int piece) { return Int4CodeOffset(row, piece); }
  __device__ static Zeros ZerosOf(const char* factors, int feature) {
    return {*reinterpret_cast<const uint32_t*>(factors + feature * kFactorBytes + 4)};
  }
  __device__ static float2 ScalesOf(const char* factors, int feature) {
    const uint4 two = *reinterpret_cast<const uint4*>(factors + feature * kFactorBytes);
    return {__uint_as_float(two.x), __uint_as_float(two.z)};
  }

  template <int kRowTiles, int kFeatureTiles>
  __device__ __forceinline__ static void Multiply(uint32_t x, uint32_t w, int row, int feature, int step, int lane,
                                                  const Zeros* zeros, float (&sums)[kRowTiles][kFeatureTiles][4]) {
    uint32_t b[kFeatureTiles][4];
#pragma unroll
    for (int j = 0; j < kFeatureTiles; ++j) {
      const uint32_t word = LoadShared4(w + WeightOffset(feature + j * 8 + lane / 4, step) + 4 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[j][i] = WidenInt4Pair(word, i, zeros[j].zero);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int at = row + m * 16 + lane / 4, piece = 4 * step + lane % 4;
      const uint4 low = LoadShared16(x + XOffset(at, piece)), high = LoadShared16(x + XOffset(at + 8, piece));
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int j = 0; j < kFeatureTiles; ++j) {
        Mma16816(sums[m][j], first, b[j][0], b[j][1]);
        Mma16816(sums[m][j], second, b[j][2], b[j][3]);
      }
    }
  }
};

}  // namespace spl::kernels::cuda
