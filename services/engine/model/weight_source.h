// Source of a model's tensors: a checkpoint, or a generator (random_weights.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/shard.h"
#include "services/engine/model/weight_quantization.h"

namespace spl::engine {

// A matrix [num_rows, width] of a model, and the part of it that a rank has: rows `rows`, columns `columns`.
struct MatrixPart {
  std::string name;
  int64_t num_rows = 0;
  int64_t width = 0;
  Range rows;
  Range columns;

  static MatrixPart Whole(std::string name, int64_t num_rows, int64_t width) {
    return {std::move(name), num_rows, width, {0, num_rows}, {0, width}};
  }
  static MatrixPart Rows(std::string name, int64_t num_rows, int64_t width, Range rows) {
    return {std::move(name), num_rows, width, rows, {0, width}};
  }
  static MatrixPart Columns(std::string name, int64_t num_rows, int64_t width, Range columns) {
    return {std::move(name), num_rows, width, {0, num_rows}, columns};
  }
  std::vector<int64_t> shape() const { return {num_rows, width}; }  // shape of the whole
  int64_t count() const { return rows.size() * columns.size(); }    // elements of the part
};

// Type of a matrix. FP8 (kE4M3) and int4 have scales: one for each row and `scale_group` columns, or for each row if
// that is 0.
struct MatrixType {
  kernels::DType dtype = kernels::DType::kF32;
  int64_t scale_group = 0;
  bool operator==(const MatrixType&) const = default;
};

// Beside the codes of a quantized part (gemm.h, WeightView).
struct MatrixScales {
  std::vector<float> scales;          // [rows, groups]
  std::vector<uint8_t> zeros;         // int4: [rows, groups]; empty: all are 8
  std::vector<int32_t> column_order;  // int4: [columns]; empty: as they stand
};

// Names are those of Hugging Face checkpoints. One thread at a time. NotFound: there is no such tensor;
// InvalidArgument: it has another shape or type; both name the tensor.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual bool Contains(const std::string& name) const = 0;
  virtual absl::StatusOr<MatrixType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const = 0;
  // Writes the part's elements row by row, in the type that TypeOf returns, to `device`, memory of the backend. Appends
  // the scales and zero points of a quantized part to `scales`, and sets its column order.
  virtual absl::Status Write(const MatrixPart& part, void* device, MatrixScales& scales) = 0;
  // The tensor widened to f32, on the host. InvalidArgument: it is in FP8. NotFound: it is in int4.
  virtual absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) = 0;
};

// Element i of `data`, which may be unaligned, in f32. Not for FP8 and int4.
float ElementAsFloat(const std::byte* data, kernels::DType type, int64_t i);
// A tensor of f32, bf16 or f16 in f32. InvalidArgument names the tensor: it has another type.
absl::StatusOr<std::vector<float>> WidenTensor(const std::string& name, const TensorView& tensor);

// Beside int4, matrices of f16 are rounded to bf16, which products of GPUs take. `checkpoint` and `backend` must
// outlive the source.
std::unique_ptr<WeightSource> MakeCheckpointSource(const Checkpoint& checkpoint, const WeightQuantization& quantization,
                                                   const kernels::Backend& backend);

}  // namespace spl::engine
