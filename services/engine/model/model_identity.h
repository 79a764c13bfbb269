// Digests that tell models and their pages apart. They are parts of the keys of stored chunks: a change of what goes
// into one makes every stored chunk unreadable.
#pragma once

#include <nlohmann/json.hpp>

#include "kernels/common/dtype.h"
#include "services/base/json_object_reader.h"
#include "services/chunk/chunk.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/random_weights.h"

namespace spl::engine {

// Over the parts of the configuration that change results, and every weight file. Reads all of them (10 GB/s).
chunk::Digest FolderFingerprint(const ModelConfig& config, const Checkpoint& checkpoint);
// Over the configuration and the seed.
chunk::Digest RandomFingerprint(const RandomModel& random);
// Fingerprint of a model whose weights are quantized at load, from that of the weights as they are; kNone: the same.
chunk::Digest QuantizedFingerprint(const chunk::Digest& of_weights, QuantizeTo to);
// Fingerprint of K and V: one of its own for kE4M3, else that of the model.
chunk::Digest KvFingerprint(const chunk::Digest& of_model, kernels::DType kv_dtype);
// Reads member `model_fingerprint` of a file that was measured on a model: 64 hexadecimal digits. All zero: absent, or
// wrong, which is an error of `fields`.
chunk::Digest ReadModelFingerprint(JsonObjectReader<nlohmann::json>& fields);
// Over everything that gives a page's bytes their meaning.
chunk::Digest LayoutDigest(const ModelConfig& config, kernels::DType kv_dtype);

}  // namespace spl::engine
