// The safetensors files of one model folder as one set of tensors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/model/safetensors.h"

namespace spl::engine {

// Owns the open files. Immutable.
class Checkpoint {
 public:
  // model.safetensors, or the shards that model.safetensors.index.json lists. Every tensor that the index places in a
  // shard must be there.
  static absl::StatusOr<Checkpoint> Open(const std::string& model_dir);

  // NotFound names the folder when no file has the tensor; InvalidArgument when the shape differs from `shape`.
  absl::StatusOr<TensorView> Find(const std::string& name, const std::vector<int64_t>& shape) const;
  bool Contains(const std::string& name) const;
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

 private:
  std::string dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
};

}  // namespace spl::engine
