#include "services/engine/model/weight_scales.h"

#include <cmath>

#include "kernels/common/ceil_div.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

using kernels::CeilDiv;

// Shapes are compared without dimensions of 1: a scale per tensor is [] or [1], one per channel [n] or [n, 1].
std::vector<int64_t> Squeezed(const std::vector<int64_t>& shape) {
  std::vector<int64_t> squeezed;
  for (const int64_t dim : shape) {
    if (dim != 1) squeezed.push_back(dim);
  }
  return squeezed;
}

absl::Status CheckScales(const std::string& name, const std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]) || values[i] <= 0)
      return InvalidArgument("tensor '{}': scale {} is {}, not a positive number", name, i, values[i]);
  }
  return absl::OkStatus();
}

// Scales of the activations in front of a matrix are not used, but a damaged one means a damaged folder.
absl::Status CheckActivationScale(const Checkpoint& checkpoint, const std::string& weight) {
  constexpr std::string_view kWeight = "weight";
  const std::string name = weight.substr(0, weight.size() - kWeight.size()) + "input_scale";
  if (!weight.ends_with(kWeight) || !checkpoint.Contains(name)) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint.Find(name));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> values, WidenTensor(name, tensor));
  return CheckScales(name, values);
}

}  // namespace

absl::Status AppendScales(const Checkpoint& checkpoint, const WeightQuantization& quantization, const MatrixPart& part,
                          std::vector<float>& scales) {
  SPLICE_RETURN_IF_ERROR(CheckActivationScale(checkpoint, part.name));
  const std::string name = part.name + quantization.scale_suffix;
  SPLICE_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint.Find(name));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> values, WidenTensor(name, tensor));
  SPLICE_RETURN_IF_ERROR(CheckScales(name, values));
  const std::vector<int64_t> shape = Squeezed(tensor.shape);
  if (quantization.blocks()) {
    const int64_t block_rows = CeilDiv(part.num_rows, kScaleBlock), block_columns = CeilDiv(part.width, kScaleBlock);
    if (shape != Squeezed({block_rows, block_columns}))
      return InvalidArgument("tensor '{}' has shape [{}], {} x {} blocks of '{}' need [{}, {}]", name,
                             fmt::join(tensor.shape, ", "), kScaleBlock, kScaleBlock, part.name, block_rows,
                             block_columns);
    if (part.columns.begin % kScaleBlock != 0 ||
        (part.columns.end % kScaleBlock != 0 && part.columns.end != part.width))
      return InvalidArgument(
          "tensor '{}': a rank's columns [{}, {}) cut a block of {} that has one scale; use fewer ranks (--tp)",
          part.name, part.columns.begin, part.columns.end, kScaleBlock);
    for (int64_t row = part.rows.begin; row < part.rows.end; ++row) {
      const float* of_row = values.data() + row / kScaleBlock * block_columns;
      scales.insert(scales.end(), of_row + part.columns.begin / kScaleBlock,
                    of_row + CeilDiv(part.columns.end, kScaleBlock));
    }
    return absl::OkStatus();
  }
  if (values.size() == 1) {
    scales.insert(scales.end(), static_cast<size_t>(part.rows.size()), values[0]);
    return absl::OkStatus();
  }
  if (shape != std::vector<int64_t>{part.num_rows})
    return InvalidArgument("tensor '{}' has shape [{}], '{}' needs one scale, or one for each of {} rows", name,
                           fmt::join(tensor.shape, ", "), part.name, part.num_rows);
  scales.insert(scales.end(), values.begin() + part.rows.begin, values.begin() + part.rows.end);
  return absl::OkStatus();
}

absl::Status CheckCodes(const std::string& name, std::span<const std::byte> codes) {
  bool nan = false;
  for (const std::byte code : codes) nan |= (code & std::byte{0x7f}) == std::byte{0x7f};
  if (nan) return InvalidArgument("tensor '{}' has a NaN in FP8", name);
  return absl::OkStatus();
}

}  // namespace spl::engine
