// Writes a model folder again with weights in FP8 or int4, in the layouts of compressed-tensors ("float-quantized" with
// a scale for each output channel; "pack-quantized", symmetric, in groups of 128 columns). The values are those that
// --quantize makes while a model is loaded.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/model/weight_quantization.h"

namespace spl::engine {

struct QuantizedFolderProgress {
  int shard = 0;  // from 1 on
  int num_shards = 0;
  uint64_t done_bytes = 0;  // weights that are read
  uint64_t total_bytes = 0;
};

struct QuantizedFolder {
  int num_shards = 0;
  int64_t num_quantized = 0;  // matrices in the new format
  uint64_t bytes_before = 0;  // all tensors of the source
  uint64_t bytes_after = 0;
  std::vector<std::string> copied;  // files beside the weights
};

// Writes as many shards under the same names as `model_dir` has, an index if it has one, config.json with its
// quantization_config, and head_classes.json for the new weights. Copies the other files of the folder itself, but no
// weights in other formats (.bin, .pt, .pth, .gguf, .h5, .msgpack, .onnx).
//
// Writes to OUT_DIR.partial, which becomes `out_dir` when all is there, and is removed after an error. Holds one matrix
// in memory; quantizes on all cores. REQUIRES: `to` is not kNone. `progress` is called behind every tensor that is
// read.
//
// Errors: AlreadyExists: `out_dir` or OUT_DIR.partial. InvalidArgument: the weights are quantized already, no matrix is
// one that is quantized, a weight is NaN or infinite, or a tensor has a type that cannot be written. NotFound and those
// of loading a model: a file is missing or damaged. Internal: it cannot be written.
absl::StatusOr<QuantizedFolder> WriteQuantizedFolder(
    const std::string& model_dir, const std::string& out_dir, QuantizeTo to,
    const std::function<void(const QuantizedFolderProgress&)>& progress = nullptr);

}  // namespace spl::engine
