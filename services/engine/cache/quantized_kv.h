// K and V in four bits a value, for recovery that computes what matters afresh and reads the rest of a copy only
// roughly. A row of a page is groups of at most 64 values; each has its minimum and its step, both bf16, and a value is
// the nearest of 16 levels between them (asymmetric, per token: KIVI's choice for V, arXiv 2402.02750 section 3;
// CacheGen, arXiv 2310.07240, has KV travel quantized). Keys are as they stand in the page, turned by their positions.
// docs/data-formats.md has the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/dtype.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// Values of a group: the largest even divisor of head_dim up to 64.
int32_t QuantizedGroup(int32_t head_dim);

// Of a page, K and V: 64 tokens of one head stream. 28 % of a page of bf16, for head_dim 64 or 128.
size_t QuantizedPageBytes(int32_t head_dim);
// Of the pages of 64 tokens in layers [first_layer, num_layers).
size_t QuantizedChunkBytes(const ModelConfig& config, int32_t first_layer);

// `page`: K then V, [64, head_dim] of `dtype`, kF32 or kBF16, all finite. Writes QuantizedPageBytes.
// The error of a value: half a step and what bf16 rounds off the group's minimum and step.
void QuantizePage(std::span<const std::byte> page, kernels::DType dtype, int32_t head_dim, std::byte* to);
// The other way; any bytes give a page. About a nanosecond for three values, on one core.
void DequantizePage(std::span<const std::byte> quantized, kernels::DType dtype, int32_t head_dim, std::byte* page);

}  // namespace spl::engine
