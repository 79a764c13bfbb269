// Quantizes the matrices of another source to FP8 while a model is loaded (--quantize fp8).
#pragma once

#include <memory>

#include "kernels/backend/backend.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

// The result has a scale for each row of the whole matrix, so that the number of ranks changes no value. Quantizes on
// the host, on all of its cores. `backend` must outlive the source. InvalidArgument from TypeOf: the inner matrix is
// FP8 already.
std::unique_ptr<WeightSource> MakeQuantizingSource(std::unique_ptr<WeightSource> inner,
                                                   const kernels::Backend& backend);

}  // namespace spl::engine
