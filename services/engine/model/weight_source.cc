#include "services/engine/model/weight_source.h"

#include <cstring>

#include "services/base/status.h"
#include "services/engine/model/weight_scales.h"

namespace spl::engine {
namespace {

using kernels::DType;

absl::StatusOr<DType> WeightType(const std::string& name, TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return DType::kF32;
    case TensorType::kBF16:
      return DType::kBF16;
    case TensorType::kF16:
      return DType::kF16;
    case TensorType::kE4M3:
      return DType::kE4M3;
    default:
      return InvalidArgument("tensor '{}' is not a floating-point tensor", name);
  }
}

class CheckpointSource final : public WeightSource {
 public:
  CheckpointSource(const Checkpoint& checkpoint, const WeightQuantization& quantization,
                   const kernels::Backend& backend)
      : checkpoint_(checkpoint), quantization_(quantization), backend_(backend) {}

  bool Contains(const std::string& name) const override { return checkpoint_.Contains(name); }

  absl::StatusOr<MatrixType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const override {
    SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(name, shape));
    SPLICE_ASSIGN_OR_RETURN(const DType dtype, WeightType(name, t.type));
    if (dtype != DType::kE4M3) return MatrixType{.dtype = dtype};
    if (!quantization_.quantized())
      return InvalidArgument("tensor '{}' is in FP8, and config.json has no 'quantization_config'", name);
    return MatrixType{.dtype = dtype, .scale_group = quantization_.blocks() ? kScaleBlock : 0};
  }

  absl::Status Write(const MatrixPart& part, void* device, std::vector<float>& scales) override {
    SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(part.name, part.shape()));
    if (t.type == TensorType::kE4M3) {
      SPLICE_RETURN_IF_ERROR(CheckCodes(part.name, {t.data, t.bytes}));
      SPLICE_RETURN_IF_ERROR(AppendScales(checkpoint_, quantization_, part, scales));
    }
    const size_t element = TensorTypeBytes(t.type);
    const size_t row_bytes = static_cast<size_t>(part.width) * element;
    const std::byte* first = t.data + static_cast<size_t>(part.rows.begin) * row_bytes;
    const size_t part_bytes = static_cast<size_t>(part.columns.size()) * element;
    const size_t num_rows = part.rows.size();
    if (part_bytes == row_bytes) return backend_.Copy(kernels::CopyKind::kUpload, device, first, num_rows * row_bytes);
    // Gathered on the host: a device would need thousands of short copies for each matrix.
    std::vector<std::byte> packed(num_rows * part_bytes);
    first += static_cast<size_t>(part.columns.begin) * element;
    for (size_t row = 0; row < num_rows; ++row)
      std::memcpy(packed.data() + row * part_bytes, first + row * row_bytes, part_bytes);
    return backend_.Copy(kernels::CopyKind::kUpload, device, packed.data(), packed.size());
  }

  absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) override {
    SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(name, shape));
    return WidenTensor(name, t);
  }

 private:
  const Checkpoint& checkpoint_;
  const WeightQuantization quantization_;
  const kernels::Backend& backend_;
};

}  // namespace

// Copies bytes, because a tensor in a mapped file may be unaligned.
float ElementAsFloat(const std::byte* data, DType type, int64_t i) {
  if (type == DType::kF32) {
    float x;
    std::memcpy(&x, data + 4 * i, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, data + 2 * i, 2);
  return type == DType::kBF16 ? kernels::ToFloat(kernels::bf16{bits}) : kernels::HalfToFloat(bits);
}

absl::StatusOr<std::vector<float>> WidenTensor(const std::string& name, const TensorView& tensor) {
  SPLICE_ASSIGN_OR_RETURN(const DType type, WeightType(name, tensor.type));
  if (type == DType::kE4M3) return InvalidArgument("tensor '{}' is in FP8, which only matrices of layers may be", name);
  std::vector<float> values(tensor.bytes / kernels::DTypeBytes(type));
  for (size_t i = 0; i < values.size(); ++i) values[i] = ElementAsFloat(tensor.data, type, static_cast<int64_t>(i));
  return values;
}

std::unique_ptr<WeightSource> MakeCheckpointSource(const Checkpoint& checkpoint, const WeightQuantization& quantization,
                                                   const kernels::Backend& backend) {
  return std::make_unique<CheckpointSource>(checkpoint, quantization, backend);
}

}  // namespace spl::engine
