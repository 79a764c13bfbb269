#include "kernels/selection/sparcas/select_tokens_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kTile = 64;
constexpr int kVectors = kTile / kLanes;
// Columns and heads at a time: 4 x 4 sums, 4 keys and a query fit 32 registers, 2 x 4 the 16 of AVX2.
constexpr int kColumns = kLanes == 16 ? 4 : 2;
constexpr int kHeads = 4;
static_assert(kVectors % kColumns == 0);

template <bool kWide>
SPLICE_INLINE F LoadKeys(const void* keys, int64_t at) {
  if (kWide) return Load(static_cast<const float*>(keys) + at);
  return LoadBf16(static_cast<const bf16*>(keys) + at, kLanes);
}

template <bool kWide, int n>
SPLICE_INLINE void ScoreHeads(const CompactTiles& t, int64_t tile, int head) {
  constexpr int kAhead = 4;  // tiles: a few hundred ns of reading at memory speed
  const int64_t keys = tile * t.num_dims * kTile;
  const float* q = t.q + static_cast<int64_t>(head) * t.num_dims;
  for (int v = 0; v < kVectors; v += kColumns) {
    F sums[n][kColumns];
    SPLICE_UNROLL
    for (int h = 0; h < n; ++h) {
      SPLICE_UNROLL
      for (int i = 0; i < kColumns; ++i) sums[h][i] = Zero();
    }
    for (int d = 0; d < t.num_dims; ++d) {
      const int64_t at = keys + d * kTile + v * kLanes;
      if (head == 0 && v == 0)
        Prefetch(static_cast<const char*>(t.keys) +
                 (at + static_cast<int64_t>(kAhead) * t.num_dims * kTile) * (kWide ? 4 : 2));
      F k[kColumns];
      SPLICE_UNROLL
      for (int i = 0; i < kColumns; ++i) k[i] = LoadKeys<kWide>(t.keys, at + i * kLanes);
      SPLICE_UNROLL
      for (int h = 0; h < n; ++h) {
        const F x = Set1(q[h * t.num_dims + d]);
        SPLICE_UNROLL
        for (int i = 0; i < kColumns; ++i) sums[h][i] = Fma(x, k[i], sums[h][i]);
      }
    }
    SPLICE_UNROLL
    for (int h = 0; h < n; ++h) {
      SPLICE_UNROLL
      for (int i = 0; i < kColumns; ++i)
        Store(t.scores + (head + h) * t.score_stride + tile * kTile + (v + i) * kLanes, sums[h][i]);
    }
  }
}

template <bool kWide, int n>
SPLICE_INLINE void ScoreTile(const CompactTiles& t, int64_t tile, int head) {
  for (; head + n <= t.num_heads; head += n) ScoreHeads<kWide, n>(t, tile, head);
  if constexpr (n > 1) {
    if (head < t.num_heads) ScoreTile<kWide, n - 1>(t, tile, head);
  }
}

void ScoreTiles(const CompactTiles& t) {
  for (int64_t tile = 0; tile < t.num_tiles; ++tile) {
    if (t.dtype == DType::kF32) {
      ScoreTile<true, kHeads>(t, tile, 0);
    } else {
      ScoreTile<false, kHeads>(t, tile, 0);
    }
  }
}

float ExpSum(float* scores, int64_t num_tiles) {
  F top = Set1(-__builtin_inff());
  for (int64_t i = 0; i < num_tiles * kVectors; ++i) top = Max(top, Load(scores + i * kLanes));
  const F max = Set1(ReduceMax(top));
  F sums[kVectors];
  SPLICE_UNROLL
  for (int v = 0; v < kVectors; ++v) sums[v] = Zero();
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    SPLICE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + tile * kTile + v * kLanes;
      const F x = Exp2(Sub(Load(at), max));
      Store(at, x);
      sums[v] = Add(sums[v], x);
    }
  }
  F total = sums[0];
  SPLICE_UNROLL
  for (int v = 1; v < kVectors; ++v) total = Add(total, sums[v]);
  return ReduceAdd(total);
}

void AddHeads(const float* weights, int64_t stride, const float* factors, int32_t num_heads, int64_t num_tiles,
              float* out) {
  for (int64_t i = 0; i < num_tiles * kVectors; ++i) {
    F sum = Mul(Set1(factors[0]), Load(weights + i * kLanes));
    for (int h = 1; h < num_heads; ++h) sum = Add(sum, Mul(Set1(factors[h]), Load(weights + h * stride + i * kLanes)));
    Store(out + i * kLanes, sum);
  }
}

}  // namespace

extern const SelectTokensKernels kSelectTokens;
const SelectTokensKernels kSelectTokens = {ScoreTiles, ExpSum, AddHeads};

}  // namespace spl::kernels::cpu::SPLICE_ISA
