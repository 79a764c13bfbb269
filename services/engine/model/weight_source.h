// Where a model's tensors come from: a checkpoint, or a generator (random_weights.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/backend.h"
#include "services/engine/model/checkpoint.h"

namespace spl::engine {

// Names are those of Hugging Face checkpoints. One thread at a time. A tensor that is missing is NotFound, one of
// another shape or type InvalidArgument, with the tensor's name.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual bool Contains(const std::string& name) const = 0;
  virtual absl::StatusOr<kernels::DType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const = 0;
  // Writes the elements, of the type that TypeOf says, to `device`, memory of the backend.
  virtual absl::Status Write(const std::string& name, const std::vector<int64_t>& shape, void* device) = 0;
  // On the host, widened.
  virtual absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) = 0;
};

// `checkpoint` and `backend` outlive the source.
std::unique_ptr<WeightSource> MakeCheckpointSource(const Checkpoint& checkpoint, const kernels::Backend& backend);

}  // namespace spl::engine
