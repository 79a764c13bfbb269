// FP8 matrices of a checkpoint: their scales in the form that kernels take, and checks of codes and scales.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/weight_quantization.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

// Appends the scales of an FP8 matrix's part to `scales`: one for each row and group of kScaleBlock columns with
// blocks, else one for each row (gemm.h, WeightView). InvalidArgument and NotFound name the tensor: it is missing, has
// another shape, has a scale that is no positive number, or the part begins inside a block.
absl::Status AppendScales(const Checkpoint& checkpoint, const WeightQuantization& quantization, const MatrixPart& part,
                          std::vector<float>& scales);

// InvalidArgument names the tensor: one of its codes is NaN.
absl::Status CheckCodes(const std::string& name, std::span<const std::byte> codes);

}  // namespace spl::engine
