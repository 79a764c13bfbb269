#include "kernels/attention/attention_isa_parts.h"
#include "kernels/attention/decode_codes_isa.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kBlock = 2 * kLanes;  // head dimensions per step: for bf16 one register of words is two of floats
template <DType kType>
constexpr int kBytes = kType == DType::kF32    ? 4
                       : kType == DType::kBF16 ? 2
                                               : 1;
constexpr int kSlotsPerStep = 4;  // number of sums that ReduceAdd4 makes scores of at once
// Heads per step of either pass, so that the sums (4 per head for scores, 2 for values), two halves of a row and a
// factor fit the registers (32 with AVX-512, 16 otherwise).
constexpr int kScoreHeads = kLanes == 16 ? 5 : 2;
constexpr int kValueHeads = kLanes == 16 ? 8 : 4;

struct Pair {
  F a, b;
};

// Dimensions [c, c + kBlock) of one key or value row, in the order of attention.h's DecodePage.
template <DType kType>
SPLICE_INLINE Pair LoadPair(const void* row, int c, int head_dim) {
  const int left = head_dim - c;
  if constexpr (kType == DType::kF32) {
    const float* p = static_cast<const float*>(row) + c;
    if (left >= kBlock) return {Load(p), Load(p + kLanes)};
    if (left <= kLanes) return {LoadPartial(p, left), Zero()};
    return {Load(p), LoadPartial(p + kLanes, left - kLanes)};
  } else if constexpr (kType == DType::kBF16) {
    const uint16_t* p = static_cast<const uint16_t*>(row) + c;
    const F words = left >= kBlock ? Load(reinterpret_cast<const float*>(p)) : LoadWords(p, left / 2);
    return {LowBf16(words), HighBf16(words)};
  } else {
    const uint8_t* p = static_cast<const uint8_t*>(row) + c;
    uint8_t padded[kBlock] = {};
    if (left < kBlock) {
      __builtin_memcpy(padded, p, static_cast<size_t>(left));
      p = padded;
    }
    Pair pair;
    LoadCodePairs(p, pair.a, pair.b);
    return pair;
  }
}

SPLICE_INLINE void PrefetchRows(const DecodePage& p, const void* base, int first, int64_t row_bytes) {
  if (base == nullptr) return;
  if (p.next_rows == nullptr) {
    const char* from = static_cast<const char*>(base) + first * row_bytes;
    for (int64_t b = 0; b < kSlotsPerStep * row_bytes; b += 64) Prefetch(from + b);
    return;
  }
  for (int i = first; i < first + kSlotsPerStep && i < p.num_next; ++i) {
    const char* row = static_cast<const char*>(base) + p.next_rows[i];
    for (int64_t b = 0; b < row_bytes; b += 64) Prefetch(row + b);
  }
}

SPLICE_INLINE const void* Row(const DecodePage& p, const void* base, int i) {
  return static_cast<const char*>(base) + p.rows[i];
}

// Scores of four slots for n heads.
template <DType kType, int n>
SPLICE_INLINE void ScoreSlots(const DecodePage& p, int head, const void* const (&rows)[kSlotsPerStep], int at) {
  F sums[n][kSlotsPerStep];
  SPLICE_UNROLL
  for (int h = 0; h < n; ++h) {
    SPLICE_UNROLL
    for (int t = 0; t < kSlotsPerStep; ++t) sums[h][t] = Zero();
  }
  const float* q = p.q + static_cast<int64_t>(head) * p.padded_dim;
  for (int c = 0; c < p.head_dim; c += kBlock) {
    SPLICE_UNROLL
    for (int t = 0; t < kSlotsPerStep; ++t) {
      const Pair key = LoadPair<kType>(rows[t], c, p.head_dim);
      SPLICE_UNROLL
      for (int h = 0; h < n; ++h) {
        sums[h][t] = Fma(Load(q + h * p.padded_dim + c), key.a, sums[h][t]);
        sums[h][t] = Fma(Load(q + h * p.padded_dim + c + kLanes), key.b, sums[h][t]);
      }
    }
  }
  SPLICE_UNROLL
  for (int h = 0; h < n; ++h) ReduceAdd4(sums[h], p.scores + (head + h) * kPage + at);
}

// Runs the heads from `head` on, n at a time, then the rest with a smaller n.
template <DType kType, int n>
SPLICE_INLINE void ScoreHeads(const DecodePage& p, int head, const void* const (&rows)[kSlotsPerStep], int at) {
  for (; head + n <= p.num_heads; head += n) ScoreSlots<kType, n>(p, head, rows, at);
  if constexpr (n > 1) {
    if (head < p.num_heads) ScoreHeads<kType, n - 1>(p, head, rows, at);
  }
}

template <DType kType>
void Scores(const DecodePage& p) {
  const int64_t row_bytes = static_cast<int64_t>(p.head_dim) * kBytes<kType>;
  for (int at = 0; at < p.num_slots; at += kSlotsPerStep) {
    PrefetchRows(p, p.next_keys, at, row_bytes);
    const void* rows[kSlotsPerStep];
    for (int t = 0; t < kSlotsPerStep; ++t) {  // past the end: the last slot again; its score is not used
      rows[t] = Row(p, p.keys, at + t < p.num_slots ? at + t : p.num_slots - 1);
    }
    ScoreHeads<kType, kScoreHeads>(p, 0, rows, at);
  }
}

// out = out · factor + Σ_t weight_t · value_t over kBlock dimensions of n heads.
template <DType kType, int n>
SPLICE_INLINE void AccumulateBlock(const DecodePage& p, int head, int c, const float* factors, bool prefetch) {
  const int64_t row_bytes = static_cast<int64_t>(p.head_dim) * kBytes<kType>;
  F sums[n][2];
  float* out = p.out + static_cast<int64_t>(head) * p.padded_dim + c;
  SPLICE_UNROLL
  for (int h = 0; h < n; ++h) {
    SPLICE_UNROLL
    for (int i = 0; i < 2; ++i) sums[h][i] = Mul(Load(out + h * p.padded_dim + i * kLanes), Set1(factors[head + h]));
  }
  for (int t = 0; t < p.num_slots; ++t) {
    if (prefetch && t % kSlotsPerStep == 0) PrefetchRows(p, p.next_values, t, row_bytes);
    const Pair value = LoadPair<kType>(Row(p, p.values, t), c, p.head_dim);
    SPLICE_UNROLL
    for (int h = 0; h < n; ++h) {
      const F weight = Set1(p.scores[(head + h) * kPage + t]);
      sums[h][0] = Fma(weight, value.a, sums[h][0]);
      sums[h][1] = Fma(weight, value.b, sums[h][1]);
    }
  }
  SPLICE_UNROLL
  for (int h = 0; h < n; ++h) {
    SPLICE_UNROLL
    for (int i = 0; i < 2; ++i) Store(out + h * p.padded_dim + i * kLanes, sums[h][i]);
  }
}

template <DType kType, int n>
SPLICE_INLINE void AccumulateHeads(const DecodePage& p, int head, int c, const float* factors) {
  for (; head + n <= p.num_heads; head += n) AccumulateBlock<kType, n>(p, head, c, factors, c == 0 && head == 0);
  if constexpr (n > 1) {
    if (head < p.num_heads) AccumulateHeads<kType, n - 1>(p, head, c, factors);
  }
}

template <DType kType>
void Accumulate(const DecodePage& p, const float* factors) {
  for (int c = 0; c < p.head_dim; c += kBlock) AccumulateHeads<kType, kValueHeads>(p, 0, c, factors);
}

// x [64] times the scales of as many rows of codes.
SPLICE_INLINE void MultiplyPage(float* x, const float* scales) {
  const F factor = Set1(kCodeFactor);
  SPLICE_UNROLL
  for (int i = 0; i < kPageVectors; ++i)
    Store(x + i * kLanes, Mul(Load(x + i * kLanes), Mul(Load(scales + i * kLanes), factor)));
}

template <DType kType>
void Attend(const DecodePage& p) {
  constexpr int kHeadsAtOnce = 64;  // bounds the factors on the stack
  const uint64_t visible = p.num_slots == kPage ? ~uint64_t{0} : (uint64_t{1} << p.num_slots) - 1;
  for (int first = 0; first < p.num_heads; first += kHeadsAtOnce) {
    DecodePage part = p;
    part.num_heads = p.num_heads - first < kHeadsAtOnce ? p.num_heads - first : kHeadsAtOnce;
    part.q += static_cast<int64_t>(first) * p.padded_dim;
    part.out += static_cast<int64_t>(first) * p.padded_dim;
    part.max += first;
    part.sum += first;
    Scores<kType>(part);
    float factors[kHeadsAtOnce];
    for (int h = 0; h < part.num_heads; ++h) {
      float* const scores = part.scores + h * kPage;
      if constexpr (kType == DType::kE4M3) MultiplyPage(scores, p.key_scales);
      factors[h] = Weigh<true>(visible, scores, part.max + h, part.sum + h);
      if constexpr (kType == DType::kE4M3) MultiplyPage(scores, p.value_scales);
    }
    Accumulate<kType>(part, factors);
  }
}

}  // namespace

void AttendDecodePage(const DecodePage& p) {
  switch (p.dtype) {
    case DType::kF32:
      return Attend<DType::kF32>(p);
    case DType::kE4M3:
      return Attend<DType::kE4M3>(p);
    default:
      return Attend<DType::kBF16>(p);
  }
}

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {kLanes, TransposeKeys, WidenValues, AttendPrefillPage, AttendDecodePage};

}  // namespace spl::kernels::cpu::SPLICE_ISA
