// The leaf code of CPU sampling, compiled once per instruction set (sample_tokens_isa.cc). Bit for bit what
// sampling_math.h defines.
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// What exponents are sorted into: bin 0 has the largest y, the last one everything that weighs nothing.
inline constexpr int kExponentBins = 2048;

struct SampleTokensKernels {
  // The largest of n logits that are numbers; -inf where there are none.
  float (*max)(const float* y, int64_t n);
  // weights[i] = 2^exponent of y[i]: a sampling weight is floor(weights[i] · 2^kWeightBits).
  void (*weigh)(const float* y, int64_t n, float max, float scale, float* weights);
  // bins[i] in [0, kExponentBins): not falling where y falls. As whole floats above 2^23: the low 23 bits are the bin.
  void (*bin)(const float* y, int64_t n, float max, float scale, float* bins);
  // The sum of floor(weights[i] · 2^kWeightBits) over those with y[i] >= y_min and weights[i] >= min. n <= 4096.
  uint64_t (*sum)(const float* y, const float* weights, int64_t n, float y_min, float min);
};

SPLICE_DECLARE_ISA_TABLES(SampleTokensKernels, kSampleTokens)

}  // namespace spl::kernels::cpu
