#include "services/engine/model/weight_source.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "kernels/common/thread_pool.h"
#include "services/base/status.h"
#include "services/engine/model/int4_matrix.h"
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
    if (HasInt4Matrix(checkpoint_, quantization_, name)) return Int4MatrixType(checkpoint_, quantization_, name, shape);
    SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(name, shape));
    SPLICE_ASSIGN_OR_RETURN(const DType dtype, WeightType(name, t.type));
    if (dtype == DType::kF16 && quantization_.is_int4()) return MatrixType{.dtype = DType::kBF16};
    if (dtype != DType::kE4M3) return MatrixType{.dtype = dtype};
    if (!quantization_.quantized() || quantization_.is_int4())
      return InvalidArgument("tensor '{}' is in FP8, and config.json has no 'quantization_config' that says so", name);
    return MatrixType{.dtype = dtype, .scale_group = quantization_.blocks() ? kScaleBlock : 0};
  }

  absl::Status Write(const MatrixPart& part, void* device, MatrixScales& scales) override {
    if (HasInt4Matrix(checkpoint_, quantization_, part.name)) return WriteInt4(part, device, scales);
    SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(part.name, part.shape()));
    if (t.type == TensorType::kE4M3) {
      SPLICE_RETURN_IF_ERROR(CheckCodes(part.name, {t.data, t.bytes}));
      SPLICE_RETURN_IF_ERROR(AppendScales(checkpoint_, quantization_, part, scales.scales));
    }
    if (t.type == TensorType::kF16 && quantization_.is_int4()) return WriteRounded(part, t, device);
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
  absl::Status WriteInt4(const MatrixPart& part, void* device, MatrixScales& scales) {
    if (pool_ == nullptr)
      pool_ = std::make_unique<kernels::ThreadPool>(std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
    std::vector<uint8_t> codes(static_cast<size_t>(part.count() / 2));
    SPLICE_RETURN_IF_ERROR(ReadInt4Matrix(*pool_, checkpoint_, quantization_, part, codes.data(), scales));
    return backend_.Copy(kernels::CopyKind::kUpload, device, codes.data(), codes.size());
  }

  absl::Status WriteRounded(const MatrixPart& part, const TensorView& t, void* device) {
    std::vector<kernels::bf16> rounded;
    rounded.reserve(static_cast<size_t>(part.count()));
    for (int64_t row = part.rows.begin; row < part.rows.end; ++row) {
      for (int64_t column = part.columns.begin; column < part.columns.end; ++column)
        rounded.push_back(kernels::ToBf16(ElementAsFloat(t.data, DType::kF16, row * part.width + column)));
    }
    return backend_.Copy(kernels::CopyKind::kUpload, device, rounded.data(), rounded.size() * sizeof(kernels::bf16));
  }

  const Checkpoint& checkpoint_;
  const WeightQuantization quantization_;
  const kernels::Backend& backend_;
  std::unique_ptr<kernels::ThreadPool> pool_;  // made for the first int4 matrix
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
