// One set of tensors over all safetensors files of a model folder.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/model/safetensors.h"

namespace spl::engine {

// Owns the open files. Immutable; any thread.
class Checkpoint {
 public:
  // Opens model.safetensors, or the shards that model.safetensors.index.json lists. Every tensor must be in the shard
  // that the index names.
  static absl::StatusOr<Checkpoint> Open(const std::string& model_dir);

  // NotFound: no file has the tensor; the message names the folder. InvalidArgument: the tensor has another shape.
  absl::StatusOr<TensorView> Find(const std::string& name, const std::vector<int64_t>& shape) const;
  absl::StatusOr<TensorView> Find(const std::string& name) const;  // accepts any shape
  bool Contains(const std::string& name) const;
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

 private:
  std::string dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
};

}  // namespace spl::engine
