// A model that is ready to run on one device or several: configuration, packed weights, rotary table, identity.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "services/chunk/chunk.h"
#include "services/engine/model/head_classes.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/random_weights.h"
#include "services/engine/model/recovery_profile.h"
#include "services/engine/model/shard.h"

namespace spl::engine {

class LoadProgress;

struct LayerWeights {
  std::unique_ptr<kernels::Buffer> attention_norm;  // f32 [hidden]
  std::unique_ptr<kernels::LinearWeight> qkv;       // [(Hq + 2 Hk) d, hidden]: q, k, v stacked
  std::unique_ptr<kernels::Buffer> qkv_bias;        // f32 [(Hq + 2 Hk) d], or null
  std::unique_ptr<kernels::LinearWeight> o;         // [hidden, Hq d]
  std::unique_ptr<kernels::Buffer> q_norm, k_norm;  // f32 [head_dim], or null
  std::unique_ptr<kernels::Buffer> ffn_norm;        // f32 [hidden]
  // Dense feed-forward; null in a layer of experts.
  std::unique_ptr<kernels::LinearWeight> gate_up;  // [2 ffn, hidden]: gate, up stacked
  std::unique_ptr<kernels::LinearWeight> down;     // [hidden, ffn]
  // Mixture of experts; null in a dense layer.
  std::unique_ptr<kernels::LinearWeight> router;           // [experts, hidden]
  std::unique_ptr<kernels::GroupedWeight> expert_gate_up;  // [experts, 2 expert ffn, hidden]
  std::unique_ptr<kernels::GroupedWeight> expert_down;     // [experts, hidden, expert ffn]

  bool has_experts() const { return router != nullptr; }
};

struct ModelOptions {
  // Type of cached K and V: kF32, kBF16 or kE4M3. Default: kF32 for float32 weights, bf16 for 16-bit weights.
  std::optional<kernels::DType> kv_dtype;
  // Path of a head_classes.json; "auto": the file beside the model, if there is one; "none". For random weights: a
  // path, or the name of a preset, whose global heads are spread evenly; "auto" is "none".
  std::string head_classes = "auto";
  // Path of a recovery.json; "auto": the file beside the model, if there is one; "none".
  std::string recovery_profile = "auto";
  // Quantizes the matrices of the layers while they are loaded (quantizing_source.h).
  QuantizeTo quantize = QuantizeTo::kNone;
  // Inputs of products with FP8 weights may be rounded to e4m3, where that is faster (LinearWeight::PrefersE4M3).
  bool quantize_activations = true;
  // Called while a checkpoint is read, and quantized: bytes that are done, and those of all its tensors
  // (load_progress.h). On the threads of the ranks, one call at a time; must return soon. Random weights: not called.
  // May be null.
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> on_progress = nullptr;
};

// The devices that a model runs on, one per rank, all of one kind. More than one means tensor parallelism (shard.h).
using Devices = std::vector<std::shared_ptr<const kernels::Backend>>;

// One rank's part of a model, in the memory of its device. Immutable; any thread.
class ModelShard {
 public:
  const Shard& shard() const { return shard_; }
  // Configuration of this rank: numbers of heads and inner widths are its own.
  const ModelConfig& config() const { return config_; }
  int32_t first_kv_head() const { return config_.num_kv_heads * shard_.rank; }
  const Range& vocab() const { return vocab_; }  // ids whose logits this rank computes
  const kernels::Backend& backend() const { return *backend_; }

  const LayerWeights& layer(int32_t i) const { return layers_[i]; }
  const void* embedding() const { return embedding_->data(); }  // [vocab, hidden], embedding_dtype()
  kernels::DType embedding_dtype() const { return embedding_dtype_; }
  const float* final_norm() const { return static_cast<const float*>(final_norm_->data()); }
  const kernels::LinearWeight& lm_head() const { return *lm_head_; }  // [vocab().size(), hidden]
  kernels::RopeTable rope() const;

 private:
  friend class Model;
  friend class ModelLoader;
  ModelShard(const Shard& shard, const ModelConfig& config, std::shared_ptr<const kernels::Backend> backend)
      : shard_(shard),
        config_(shard.LocalConfig(config)),
        vocab_(shard.VocabPart(config.vocab_size)),
        backend_(std::move(backend)) {}

  const Shard shard_;
  const ModelConfig config_;
  const Range vocab_;
  const std::shared_ptr<const kernels::Backend> backend_;
  std::vector<LayerWeights> layers_;
  std::unique_ptr<kernels::Buffer> embedding_;
  kernels::DType embedding_dtype_ = kernels::DType::kBF16;
  std::unique_ptr<kernels::Buffer> final_norm_;
  std::unique_ptr<kernels::LinearWeight> lm_head_;
  std::unique_ptr<kernels::Buffer> rope_cos_, rope_sin_;  // f32 [max_positions, head_dim / 2]
};

// Immutable after Load; any thread. Prefill and decode engines of one process share one copy.
class Model {
 public:
  // Like the overloads below, but split over the devices. The number of devices changes only the rounding of sums.
  // InvalidArgument: ValidateNumRanks.
  static absl::StatusOr<std::shared_ptr<const Model>> Load(const std::string& model_dir, const Devices& devices,
                                                           const ModelOptions& options = {});
  static absl::StatusOr<std::shared_ptr<const Model>> LoadRandom(const RandomModel& random, const Devices& devices,
                                                                 const ModelOptions& options = {});

  // Reads config.json, and model.safetensors or the shards of model.safetensors.index.json. InvalidArgument, NotFound
  // and Unimplemented name the file and the tensor or field.
  static absl::StatusOr<std::shared_ptr<const Model>> Load(const std::string& model_dir,
                                                           std::shared_ptr<const kernels::Backend> backend,
                                                           const ModelOptions& options = {});

  // Makes a model without a checkpoint (random_weights.h). Its fingerprint follows from configuration and seed.
  static absl::StatusOr<std::shared_ptr<const Model>> LoadRandom(const RandomModel& random,
                                                                 std::shared_ptr<const kernels::Backend> backend,
                                                                 const ModelOptions& options = {});

  const ModelConfig& config() const { return config_; }
  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  const ModelShard& rank(int r) const { return *ranks_[r]; }
  // The backend of rank 0. All devices are of one kind, so that its properties are those of all.
  const kernels::Backend& backend() const { return ranks_[0]->backend(); }
  std::vector<const kernels::Backend*> backends() const;  // [num_ranks()]
  // Type of the matrices of the layers: that of the configuration, kE4M3 or kInt4.
  kernels::DType weight_dtype() const { return weight_dtype_; }
  // The same with what shares a scale, as ModelConfig::weights_name; for --quantize: QuantizedWeightsName.
  const std::string& weights_name() const { return weights_name_; }
  bool quantizes_activations() const { return quantizes_activations_; }  // ModelOptions::quantize_activations
  kernels::DType kv_dtype() const { return kv_dtype_; }
  size_t page_bytes() const;

  // Null: there is no map, and methods that need one cannot run.
  const std::shared_ptr<const HeadClassMap>& head_classes() const { return head_classes_; }

  // Null: there is none, and `sparsex` chooses rows by its defaults.
  const RecoveryProfile* recovery_profile() const { return recovery_profile_ ? &*recovery_profile_ : nullptr; }

  // SHA-256 over the parts of the configuration that change results, and over every weight file (or the seed).
  const chunk::Digest& fingerprint() const { return fingerprint_; }
  // The same, and that K and V are kE4M3 if they are. Part of every chunk key, so that workers of both types may share
  // a store, and the identity of a worker.
  const chunk::Digest& kv_fingerprint() const { return kv_fingerprint_; }
  // SHA-256 over everything that gives a page's bytes their meaning: layers, KV heads, head_dim, dtype, page size.
  const chunk::Digest& layout_digest() const { return layout_digest_; }

 private:
  Model() = default;
  using MakeSource = std::function<absl::StatusOr<std::unique_ptr<WeightSource>>(const kernels::Backend& backend)>;
  static absl::StatusOr<std::shared_ptr<Model>> Build(ModelConfig config, const MakeSource& make_source,
                                                      const Devices& devices, const ModelOptions& options,
                                                      LoadProgress* progress);
  absl::Status LoadHeadClasses(const std::string& path);
  absl::Status LoadRecoveryProfile(const std::string& path);

  ModelConfig config_;
  kernels::DType weight_dtype_ = kernels::DType::kBF16;
  bool quantizes_activations_ = true;
  std::string weights_name_;
  kernels::DType kv_dtype_ = kernels::DType::kBF16;
  std::vector<std::unique_ptr<ModelShard>> ranks_;
  chunk::Digest kv_fingerprint_{};
  chunk::Digest fingerprint_{};
  chunk::Digest layout_digest_{};
  std::shared_ptr<const HeadClassMap> head_classes_;
  std::optional<RecoveryProfile> recovery_profile_;
};

}  // namespace spl::engine
