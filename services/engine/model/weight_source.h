// Where a model's tensors come from: a checkpoint, or a generator (random_weights.h).
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

namespace spl::engine {

// A matrix [rows, width] of a model and the part of it that a rank has.
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
  std::vector<int64_t> shape() const { return {num_rows, width}; }  // of the whole
  int64_t count() const { return rows.size() * columns.size(); }    // of the part
};

// Names are those of Hugging Face checkpoints. One thread at a time. A tensor that is missing is NotFound, one of
// another shape or type InvalidArgument, with the tensor's name.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual bool Contains(const std::string& name) const = 0;
  virtual absl::StatusOr<kernels::DType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const = 0;
  // Writes the part's elements row by row, of the type that TypeOf says, to `device`, memory of the backend.
  virtual absl::Status Write(const MatrixPart& part, void* device) = 0;
  // On the host, widened.
  virtual absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) = 0;
};

// `checkpoint` and `backend` outlive the source.
std::unique_ptr<WeightSource> MakeCheckpointSource(const Checkpoint& checkpoint, const kernels::Backend& backend);

}  // namespace spl::engine
