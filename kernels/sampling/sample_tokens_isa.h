// The leaf code of CPU sampling, compiled once per instruction set (sample_tokens_isa.cc). Its results are bit for bit
// those of sampling_math.h.
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// Bins of the histogram over exponents: bin 0 has the largest y, the last bin every logit without weight.
inline constexpr int kExponentBins = 2048;

struct SampleTokensKernels {
  // The largest of those of n logits that are numbers; -inf if there are none.
  float (*max)(const float* y, int64_t n);
  // weights[i] = 2^exponent of y[i]: a sampling weight is floor(weights[i] · 2^kWeightBits).
  void (*weigh)(const float* y, int64_t n, float max, float scale, float* weights);
  // bins[i] in [0, kExponentBins), not falling when y falls. Stored as whole floats above 2^23, whose low 23 bits are
  // the bin.
  void (*bin)(const float* y, int64_t n, float max, float scale, float* bins);
  // The sum of floor(weights[i] · 2^kWeightBits) over those with y[i] >= y_min and weights[i] >= min. n <= 4096.
  uint64_t (*sum)(const float* y, const float* weights, int64_t n, float y_min, float min);
};

SPLICE_DECLARE_ISA_TABLES(SampleTokensKernels, kSampleTokens)

}  // namespace spl::kernels::cpu
