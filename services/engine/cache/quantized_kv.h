// K and V in four bits per value, for recovery, which recomputes the tokens that matter and needs the rest of a copy
// only roughly. A row of a page is split into groups of at most 64 values. Each group has a minimum and a step, both
// bf16, and a value is the nearest of 16 levels from the minimum on (asymmetric, per token: KIVI's choice for V, arXiv
// 2402.02750 section 3; CacheGen, arXiv 2310.07240, sends KV quantized). Keys are quantized as they are in the page,
// rotated by their positions. docs/data-formats.md has the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/dtype.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// Number of values in a group: the largest even divisor of head_dim up to 64.
int32_t QuantizedGroup(int32_t head_dim);

// Bytes of a quantized page, K and V, of 64 tokens of one head stream: 28 % of a page of bf16 for head_dim 64 or 128.
size_t QuantizedPageBytes(int32_t head_dim);
// Bytes of all quantized pages of 64 tokens in layers [first_layer, num_layers).
size_t QuantizedChunkBytes(const ModelConfig& config, int32_t first_layer);

// `page`: K then V, each [64, head_dim] of `dtype` (kF32, kBF16 or kE4M3 with its scales), all finite. Writes
// QuantizedPageBytes to `to`.
// Error of a value: at most half a step, plus the bf16 rounding of the group's minimum and step.
void QuantizePage(std::span<const std::byte> page, kernels::DType dtype, int32_t head_dim, std::byte* to);
// The reverse; any bytes give a page. kE4M3: the values are rounded once more, to codes. Cost: about a nanosecond for
// three values of f32 or bf16, on one core.
void DequantizePage(std::span<const std::byte> quantized, kernels::DType dtype, int32_t head_dim, std::byte* page);

}  // namespace spl::engine
