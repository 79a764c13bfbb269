// Quantizes the matrices of another source to FP8 while a model is loaded (--quantize fp8).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/backend/backend.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

// Quantizes `count` values of a row: scale = largest magnitude / 448 (1 for a row of zeros), codes rounded to nearest
// even. Returns the scale. InvalidArgument: a value is NaN or infinite, or the scale is 0 in f32.
absl::StatusOr<float> QuantizeRow(const float* values, int64_t count, uint8_t* codes);

// True for the matrices of attention, feed-forward and experts. Embedding, head and routers keep their type, as in
// published FP8 folders.
bool IsQuantizedMatrix(const std::string& name);

// The result has a scale for each row of the whole matrix, so that the number of ranks changes no value. Quantizes on
// the host, on all of its cores. `backend` must outlive the source. InvalidArgument from TypeOf: the inner matrix is
// FP8 already.
std::unique_ptr<WeightSource> MakeQuantizingSource(std::unique_ptr<WeightSource> inner,
                                                   const kernels::Backend& backend);

}  // namespace spl::engine
