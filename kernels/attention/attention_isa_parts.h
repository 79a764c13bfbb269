// Shared by the *_isa.cc files of attention: the softmax step, and the functions that each file adds to the table of
// its instruction set.
#pragma once

#include "kernels/attention/attention_isa.h"
#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {

void TransposeKeys(const void* keys, DType dtype, int32_t head_dim, int32_t num_tokens, float* out);
void WidenValues(const void* values, DType dtype, int32_t head_dim, int32_t num_tokens, int32_t stride, float* out);
void AttendPrefillPage(const PrefillPage& page);
void AttendDecodePage(const DecodePage& page);

inline constexpr int kPage = 64;
inline constexpr int kPageVectors = kPage / kLanes;

// Turns scores into weights relative to the new maximum; returns the factor by which earlier sums must be multiplied.
template <bool kMasked>
SPLICE_INLINE float Weigh(uint64_t visible, float* scores, float* max, float* sum) {
  constexpr uint32_t kLaneBits = static_cast<uint32_t>((uint64_t{1} << kLanes) - 1);
  F s[kPageVectors];
  F top = Set1(-__builtin_inff());
  SPLICE_UNROLL
  for (int i = 0; i < kPageVectors; ++i) {
    s[i] = Load(scores + i * kLanes);
    if (kMasked)
      s[i] = Select(static_cast<uint32_t>(visible >> (i * kLanes)) & kLaneBits, s[i], Set1(-__builtin_inff()));
    top = Max(top, s[i]);
  }
  const float page_max = ReduceMax(top);
  const float new_max = *max > page_max ? *max : page_max;
  F total = Zero();
  SPLICE_UNROLL
  for (int i = 0; i < kPageVectors; ++i) {
    F w = Exp2(Sub(s[i], Set1(new_max)));
    if (kMasked) w = Select(static_cast<uint32_t>(visible >> (i * kLanes)) & kLaneBits, w, Zero());
    Store(scores + i * kLanes, w);
    total = Add(total, w);
  }
  // The first page has nothing to rescale, and -inf - -inf must not become NaN.
  const float factor = *sum == 0.0f ? 0.0f : FirstLane(Exp2(Set1(*max - new_max)));
  *sum = *sum * factor + ReduceAdd(total);
  *max = new_max;
  return factor;
}

}  // namespace spl::kernels::cpu::SPLICE_ISA
