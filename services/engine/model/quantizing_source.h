// Quantizes the matrices of another source while a model is loaded (--quantize).
#pragma once

#include <memory>

#include "kernels/backend/backend.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

// To FP8: a scale for each row of the whole matrix (fp8_quantization.h). To int4: one for each row and group of columns
// (int4_quantization.h). The number of ranks changes no value. Quantizes on the host, on all of its cores. `backend`
// must outlive the source. InvalidArgument from TypeOf: the inner matrix is quantized already; from Write: with int4, a
// rank's columns cut a group. REQUIRES: `to` is not kNone.
std::unique_ptr<WeightSource> MakeQuantizingSource(std::unique_ptr<WeightSource> inner, const kernels::Backend& backend,
                                                   QuantizeTo to);

}  // namespace spl::engine
