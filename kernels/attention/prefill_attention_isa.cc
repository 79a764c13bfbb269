#include "kernels/attention/attention_isa_parts.h"
#include "kernels/common/e4m3_rows.h"
#include "kernels/common/gemm_tile.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

// scores[r, j] = <q_r, key_j>.
template <int kRows>
SPLICE_INLINE void Scores(const PrefillPage& p, int row, float* scores) {
  for (int j = 0; j < kPage; j += kTileColumns * kLanes) {
    F sums[kRows][kTileColumns];
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SPLICE_UNROLL
      for (int c = 0; c < kTileColumns; ++c) sums[r][c] = Zero();
    }
    MultiplyTile<kRows, kTileColumns>(p.q + static_cast<int64_t>(row) * p.head_dim, p.head_dim, p.keys + j, kPage,
                                      p.head_dim, sums);
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SPLICE_UNROLL
      for (int c = 0; c < kTileColumns; ++c) Store(scores + r * kPage + j + c * kLanes, sums[r][c]);
    }
  }
}

// out[r] = out[r] · factor[r] + Σ_j weight[r, j] · value_j, for kColumns vectors from `column` on.
template <int kRows, int kColumns>
SPLICE_INLINE void Accumulate(const PrefillPage& p, int row, int column, const float* weights, const float* factors) {
  float* out = p.out + static_cast<int64_t>(row) * p.value_stride + column;
  F sums[kRows][kColumns];
  SPLICE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SPLICE_UNROLL
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Mul(Load(out + r * p.value_stride + c * kLanes), Set1(factors[r]));
  }
  MultiplyTile<kRows, kColumns>(weights, kPage, p.values + column, p.value_stride, kPage, sums);
  SPLICE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SPLICE_UNROLL
    for (int c = 0; c < kColumns; ++c) Store(out + r * p.value_stride + c * kLanes, sums[r][c]);
  }
}

template <int kRows>
void AttendRows(const PrefillPage& p, int row) {
  alignas(64) float scores[kRows * kPage];
  float factors[kRows];
  Scores<kRows>(p, row, scores);
  for (int r = 0; r < kRows; ++r) {
    const uint64_t visible = p.visible[row + r];
    float* s = scores + r * kPage;
    factors[r] = visible == ~uint64_t{0} ? Weigh<false>(visible, s, p.max + row + r, p.sum + row + r)
                                         : Weigh<true>(visible, s, p.max + row + r, p.sum + row + r);
  }
  int column = 0;
  for (; column + kTileColumns * kLanes <= p.value_stride; column += kTileColumns * kLanes) {
    Accumulate<kRows, kTileColumns>(p, row, column, scores, factors);
  }
  for (; column < p.value_stride; column += kLanes) Accumulate<kRows, 1>(p, row, column, scores, factors);
}

SPLICE_INLINE void PrefetchRange(const void* base, int64_t begin, int64_t end, int64_t limit) {
  const char* p = static_cast<const char*>(base);
  for (int64_t b = begin; b < end && b < limit; b += 64) PrefetchFar(p + b);
}

SPLICE_INLINE const uint8_t* ScalesOf(const void* half_page, int32_t head_dim) {
  return static_cast<const uint8_t*>(half_page) + static_cast<int64_t>(kPage) * head_dim;
}

// Transposes the 32-bit words of kLanes tokens in registers: write(word, that word of each of them).
template <typename Write>
void TransposeTokens(const uint32_t* rows, int words, int token, int32_t num_tokens, const Write& write) {
  for (int word = 0; word < words; word += kLanes) {
    const int n = words - word < kLanes ? words - word : kLanes;
    F r[kLanes];
    SPLICE_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      r[i] = token + i < num_tokens ? LoadWords(rows + static_cast<int64_t>(token + i) * words + word, n) : Zero();
    }
    Transpose(r);
    SPLICE_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      if (i < n) write(word + i, r[i]);
    }
  }
}

// Words of four codes are transposed, and each is multiplied with the scales of its lanes' tokens.
void TransposeCodes(const void* keys, int32_t head_dim, int32_t num_tokens, float* out) {
  const uint8_t* scales = ScalesOf(keys, head_dim);
  for (int token = 0; token < kPage; token += kLanes) {
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = token + i < num_tokens ? RowScaleValue(scales[token + i]) : 0.0f;
    const F scale = Load(values);
    TransposeTokens(static_cast<const uint32_t*>(keys), head_dim / 4, token, num_tokens, [&](int word, F x) {
      float* const to = out + static_cast<int64_t>(4 * word) * kPage + token;
      SPLICE_UNROLL
      for (int byte = 0; byte < 4; ++byte) Store(to + byte * kPage, Mul(E4M3Byte(x, byte), scale));
    });
  }
}

void WidenCodes(const void* values, int32_t head_dim, int32_t num_tokens, int32_t stride, float* out) {
  const auto* codes = static_cast<const uint8_t*>(values);
  const uint8_t* scales = ScalesOf(values, head_dim);
  for (int token = 0; token < kPage; ++token) {
    const F scale = Set1(token < num_tokens ? RowScaleValue(scales[token]) : 0.0f);
    for (int c = 0; c < stride; c += kLanes) {
      const int n = head_dim - c < kLanes ? head_dim - c : kLanes;
      const F v =
          token < num_tokens ? Mul(LoadE4M3(codes + static_cast<int64_t>(token) * head_dim + c, n), scale) : Zero();
      Store(out + static_cast<int64_t>(token) * stride + c, v);
    }
  }
}

}  // namespace

// Tiles of kTileRows rows; each also asks for its share of the next page, so that the requests spread over the work.
void AttendPrefillPage(const PrefillPage& p) {
  const int num_tiles = p.num_rows / kTileRows;
  const int64_t share = num_tiles > 0 ? (p.page_bytes / num_tiles + 63) / 64 * 64 : 0;
  int row = 0;
  for (int tile = 0; tile < num_tiles; ++tile, row += kTileRows) {
    if (p.next_page != nullptr) PrefetchRange(p.next_page, tile * share, (tile + 1) * share, p.page_bytes);
    AttendRows<kTileRows>(p, row);
  }
  switch (p.num_rows - row) {
    case 5:
      return AttendRows<5>(p, row);
    case 4:
      return AttendRows<4>(p, row);
    case 3:
      return AttendRows<3>(p, row);
    case 2:
      return AttendRows<2>(p, row);
    case 1:
      return AttendRows<1>(p, row);
    default:
      return;
  }
}

// A block of kLanes tokens x kLanes 32-bit words is transposed in registers: bf16 moves as pairs, which halves the
// shuffles, and is widened on the way out.
void TransposeKeys(const void* keys, DType dtype, int32_t head_dim, int32_t num_tokens, float* out) {
  if (dtype == DType::kE4M3) return TransposeCodes(keys, head_dim, num_tokens, out);
  const bool wide = dtype == DType::kF32;
  const auto* rows = static_cast<const uint32_t*>(keys);
  for (int token = 0; token < kPage; token += kLanes) {
    TransposeTokens(rows, wide ? head_dim : head_dim / 2, token, num_tokens, [&](int word, F x) {
      if (wide) {
        Store(out + static_cast<int64_t>(word) * kPage + token, x);
      } else {
        Store(out + static_cast<int64_t>(2 * word) * kPage + token, LowBf16(x));
        Store(out + static_cast<int64_t>(2 * word + 1) * kPage + token, HighBf16(x));
      }
    });
  }
}

void WidenValues(const void* values, DType dtype, int32_t head_dim, int32_t num_tokens, int32_t stride, float* out) {
  if (dtype == DType::kE4M3) return WidenCodes(values, head_dim, num_tokens, stride, out);
  for (int token = 0; token < kPage; ++token) {
    for (int c = 0; c < stride; c += kLanes) {
      const int n = head_dim - c < kLanes ? head_dim - c : kLanes;
      const F v = token < num_tokens ? LoadAs(values, dtype, static_cast<int64_t>(token) * head_dim + c, n) : Zero();
      Store(out + static_cast<int64_t>(token) * stride + c, v);
    }
  }
}

}  // namespace spl::kernels::cpu::SPLICE_ISA
