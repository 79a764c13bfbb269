#include "services/engine/model/model.h"

#include <openssl/sha.h>
#include <xxhash.h>

#include <cmath>
#include <cstring>
#include <string>

#include "services/base/status.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {
namespace {

using kernels::DType;

// The parts of the configuration that change what the model computes, spelled unambiguously.
std::string ConfigIdentity(const ModelConfig& c) {
  std::string identity = fmt::format("{}|{}|{}|{}|{}|{}|{}|{}|{:.9g}|{}|{}|rope:{}:{:.17g}:{:.17g}:{:.17g}:{:.17g}:{}",
                                     c.architecture, c.hidden_size, c.intermediate_size, c.num_layers, c.num_qo_heads,
                                     c.num_kv_heads, c.head_dim, c.vocab_size, c.rms_norm_eps, c.tie_word_embeddings,
                                     c.attention_bias, static_cast<int>(c.rope.scaling), c.rope.theta, c.rope.factor,
                                     c.rope.low_freq_factor, c.rope.high_freq_factor, c.rope.original_max_positions);
  // What came later is spelled only where it is used, so that stored chunks of older models keep their keys.
  if (c.rope.scaling == RopeScaling::kYarn)
    identity += fmt::format("|yarn:{:.17g}:{:.17g}:{}:{:.17g}", c.rope.beta_fast, c.rope.beta_slow, c.rope.truncate,
                            c.rope.attention_factor);
  if (c.qk_norm) identity += "|qk_norm";
  if (!c.sliding_windows.empty()) identity += fmt::format("|windows:{}", fmt::join(c.sliding_windows, ","));
  if (c.moe.num_experts > 0)
    identity +=
        fmt::format("|moe:{}:{}:{}:{}:{}:{}", c.moe.num_experts, c.moe.num_experts_per_token, c.moe.intermediate_size,
                    c.moe.renormalize, c.moe.sparse_step, fmt::join(c.moe.dense_layers, ","));
  return identity;
}

chunk::Digest Sha256(const std::string& text) {
  chunk::Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

// Weight files are gigabytes and read by their owner: a 128-bit XXH3 of each (10 GB/s) is folded into the SHA-256.
chunk::Digest Fingerprint(const ModelConfig& config, const Checkpoint& checkpoint) {
  std::string identity = "splice-model-1|" + ConfigIdentity(config);
  for (const auto& file : checkpoint.files()) {
    const XXH128_hash_t hash = XXH3_128bits(file->bytes().data(), file->bytes().size());
    identity += fmt::format("|{}:{:016x}{:016x}", file->bytes().size(), hash.high64, hash.low64);
  }
  return Sha256(identity);
}

chunk::Digest LayoutDigest(const ModelConfig& c, DType kv_dtype) {
  return Sha256(fmt::format("splice-layout-1|{}|{}|{}|{}|{}", c.num_layers, c.num_kv_heads, c.head_dim,
                            kernels::DTypeName(kv_dtype), kernels::kPageTokens));
}

}  // namespace

// Builds a Model tensor by tensor; one use.
class ModelLoader {
 public:
  ModelLoader(Model& model, WeightSource& source) : model_(model), source_(source) {}

  absl::Status Load() {
    const ModelConfig& c = model_.config_;
    SPLICE_RETURN_IF_ERROR(LoadEmbedding());
    SPLICE_ASSIGN_OR_RETURN(model_.final_norm_, Vector("model.norm.weight", c.hidden_size));
    for (int32_t i = 0; i < c.num_layers; ++i) {
      LayerWeights layer;
      const std::string prefix = fmt::format("model.layers.{}.", i);
      SPLICE_RETURN_IF_ERROR(LoadAttention(prefix, layer));
      SPLICE_ASSIGN_OR_RETURN(layer.ffn_norm, Vector(prefix + "post_attention_layernorm.weight", c.hidden_size));
      SPLICE_RETURN_IF_ERROR(c.is_moe_layer(i) ? LoadExperts(prefix + "mlp.", layer)
                                               : LoadFeedForward(prefix + "mlp.", layer));
      model_.layers_.push_back(std::move(layer));
    }
    const std::string head = c.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
    SPLICE_ASSIGN_OR_RETURN(model_.lm_head_, Linear({head}, {c.vocab_size}, c.hidden_size));
    return BuildRope();
  }

 private:
  absl::Status LoadEmbedding() {
    const ModelConfig& c = model_.config_;
    const std::string name = "model.embed_tokens.weight";
    const std::vector<int64_t> shape = {c.vocab_size, c.hidden_size};
    SPLICE_ASSIGN_OR_RETURN(model_.embedding_dtype_, source_.TypeOf(name, shape));
    SPLICE_ASSIGN_OR_RETURN(model_.embedding_, model_.backend_->Allocate(kernels::DTypeBytes(model_.embedding_dtype_) *
                                                                         c.vocab_size * c.hidden_size));
    return source_.Write(name, shape, model_.embedding_->data());
  }

  absl::Status LoadAttention(const std::string& prefix, LayerWeights& layer) {
    const ModelConfig& c = model_.config_;
    const std::string attention = prefix + "self_attn.";
    const std::vector<int64_t> qkv_rows = {c.q_size(), c.kv_size(), c.kv_size()};
    SPLICE_ASSIGN_OR_RETURN(layer.attention_norm, Vector(prefix + "input_layernorm.weight", c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(
        layer.qkv, Linear({attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"},
                          qkv_rows, c.hidden_size));
    if (c.attention_bias) {
      SPLICE_ASSIGN_OR_RETURN(
          layer.qkv_bias,
          Bias({attention + "q_proj.bias", attention + "k_proj.bias", attention + "v_proj.bias"}, qkv_rows));
      if (source_.Contains(attention + "o_proj.bias"))
        return InvalidArgument("tensor '{}o_proj.bias': a bias of the output projection is not supported", attention);
    }
    if (c.qk_norm) {
      SPLICE_ASSIGN_OR_RETURN(layer.q_norm, Vector(attention + "q_norm.weight", c.head_dim));
      SPLICE_ASSIGN_OR_RETURN(layer.k_norm, Vector(attention + "k_norm.weight", c.head_dim));
    }
    SPLICE_ASSIGN_OR_RETURN(layer.o, Linear({attention + "o_proj.weight"}, {c.hidden_size}, c.q_size()));
    return absl::OkStatus();
  }

  absl::Status LoadFeedForward(const std::string& mlp, LayerWeights& layer) {
    const ModelConfig& c = model_.config_;
    SPLICE_ASSIGN_OR_RETURN(layer.gate_up, Linear({mlp + "gate_proj.weight", mlp + "up_proj.weight"},
                                                  {c.intermediate_size, c.intermediate_size}, c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(layer.down, Linear({mlp + "down_proj.weight"}, {c.hidden_size}, c.intermediate_size));
    return absl::OkStatus();
  }

  absl::Status LoadExperts(const std::string& mlp, LayerWeights& layer) {
    const ModelConfig& c = model_.config_;
    const int64_t width = c.moe.intermediate_size;
    SPLICE_ASSIGN_OR_RETURN(layer.router, Router(mlp + "gate.weight"));
    std::vector<std::string> gate_up, down;
    for (int32_t e = 0; e < c.moe.num_experts; ++e) {
      const std::string expert = fmt::format("{}experts.{}.", mlp, e);
      gate_up.insert(gate_up.end(), {expert + "gate_proj.weight", expert + "up_proj.weight"});
      down.push_back(expert + "down_proj.weight");
    }
    SPLICE_ASSIGN_OR_RETURN(layer.expert_gate_up, Grouped(gate_up, width, c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(layer.expert_down, Grouped(down, c.hidden_size, width));
    return absl::OkStatus();
  }

  // Where activations are f32 the router's weight is widened too: which experts a row goes to shall not hang on the
  // rounding of a 16-bit product.
  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> Router(const std::string& name) {
    const ModelConfig& c = model_.config_;
    if (model_.backend_->activation_dtype(c.dtype) != DType::kF32)
      return Linear({name}, {c.moe.num_experts}, c.hidden_size);
    SPLICE_ASSIGN_OR_RETURN(const std::vector<float> values, source_.Floats(name, {c.moe.num_experts, c.hidden_size}));
    SPLICE_ASSIGN_OR_RETURN(auto buffer, FloatBuffer(values));
    return model_.backend_->AdoptLinear(
        std::move(buffer), {.dtype = DType::kF32, .out_features = c.moe.num_experts, .in_features = c.hidden_size});
  }

  // Tensors of one width and type in device memory, one behind the other.
  struct Stacked {
    std::unique_ptr<kernels::Buffer> data;
    DType dtype = DType::kF32;
    int64_t rows = 0;
  };
  absl::StatusOr<Stacked> Stack(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                                int64_t width) {
    Stacked stacked;
    for (size_t i = 0; i < names.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(const DType type, source_.TypeOf(names[i], {rows[i], width}));
      if (i > 0 && type != stacked.dtype)
        return InvalidArgument("tensors '{}' and '{}' differ in type", names[0], names[i]);
      stacked.dtype = type;
      stacked.rows += rows[i];
    }
    const int64_t row_bytes = width * static_cast<int64_t>(kernels::DTypeBytes(stacked.dtype));
    SPLICE_ASSIGN_OR_RETURN(stacked.data, model_.backend_->Allocate(stacked.rows * row_bytes));
    auto* to = static_cast<std::byte*>(stacked.data->data());
    for (size_t i = 0; i < names.size(); ++i) {
      SPLICE_RETURN_IF_ERROR(source_.Write(names[i], {rows[i], width}, to));
      to += rows[i] * row_bytes;
    }
    return stacked;
  }

  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> Linear(const std::vector<std::string>& names,
                                                                const std::vector<int64_t>& rows, int64_t width) {
    SPLICE_ASSIGN_OR_RETURN(Stacked stacked, Stack(names, rows, width));
    return model_.backend_->AdoptLinear(std::move(stacked.data),
                                        {.dtype = stacked.dtype, .out_features = stacked.rows, .in_features = width});
  }

  // The same number of tensors of every expert, each of `rows` rows.
  absl::StatusOr<std::unique_ptr<kernels::GroupedWeight>> Grouped(const std::vector<std::string>& names, int64_t rows,
                                                                  int64_t width) {
    SPLICE_ASSIGN_OR_RETURN(Stacked stacked, Stack(names, std::vector<int64_t>(names.size(), rows), width));
    const int32_t experts = model_.config_.moe.num_experts;
    return model_.backend_->AdoptGrouped(
        std::move(stacked.data),
        {.dtype = stacked.dtype, .num_experts = experts, .out_features = stacked.rows / experts, .in_features = width});
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Vector(const std::string& name, int64_t size) {
    return Bias({name}, {size});
  }

  // One-dimensional tensors, concatenated and widened to f32.
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Bias(const std::vector<std::string>& names,
                                                        const std::vector<int64_t>& sizes) {
    std::vector<float> values;
    for (size_t i = 0; i < names.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(const std::vector<float> part, source_.Floats(names[i], {sizes[i]}));
      values.insert(values.end(), part.begin(), part.end());
    }
    return FloatBuffer(values);
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> FloatBuffer(const std::vector<float>& values) {
    SPLICE_ASSIGN_OR_RETURN(auto buffer, model_.backend_->Allocate(values.size() * sizeof(float)));
    SPLICE_RETURN_IF_ERROR(model_.backend_->Copy(kernels::CopyKind::kUpload, buffer->data(), values.data(),
                                                 values.size() * sizeof(float)));
    return buffer;
  }

  absl::Status BuildRope() {
    const ModelConfig& c = model_.config_;
    const std::vector<float> frequencies = InverseFrequencies(c.rope, c.head_dim);
    const auto scale = static_cast<float>(c.rope.attention_factor);  // 1 but for YaRN
    std::vector<float> cosines, sines;
    cosines.reserve(static_cast<size_t>(c.max_positions) * frequencies.size());
    sines.reserve(cosines.capacity());
    for (int32_t position = 0; position < c.max_positions; ++position) {
      for (float f : frequencies) {
        const float angle = static_cast<float>(position) * f;  // float32, as the reference implementation
        cosines.push_back(std::cos(angle) * scale);
        sines.push_back(std::sin(angle) * scale);
      }
    }
    SPLICE_ASSIGN_OR_RETURN(model_.rope_cos_, FloatBuffer(cosines));
    SPLICE_ASSIGN_OR_RETURN(model_.rope_sin_, FloatBuffer(sines));
    return absl::OkStatus();
  }

  Model& model_;
  WeightSource& source_;
};

absl::StatusOr<std::shared_ptr<Model>> Model::Build(ModelConfig config, WeightSource& source,
                                                    std::shared_ptr<const kernels::Backend> backend,
                                                    const ModelOptions& options) {
  auto model = std::shared_ptr<Model>(new Model);
  model->config_ = std::move(config);
  model->backend_ = std::move(backend);
  model->kv_dtype_ = options.kv_dtype.value_or(model->config_.dtype == DType::kF32 ? DType::kF32 : DType::kBF16);
  if (model->kv_dtype_ == DType::kF16) return InvalidArgument("kv_dtype f16 is not supported (f32, bf16)");
  SPLICE_RETURN_IF_ERROR(ModelLoader(*model, source).Load());
  model->layout_digest_ = LayoutDigest(model->config_, model->kv_dtype_);
  return model;
}

absl::StatusOr<std::shared_ptr<const Model>> Model::Load(const std::string& model_dir,
                                                         std::shared_ptr<const kernels::Backend> backend,
                                                         const ModelOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(model_dir));
  SPLICE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(model_dir));
  const auto source = MakeCheckpointSource(checkpoint, *backend);
  SPLICE_ASSIGN_OR_RETURN(auto model, Build(std::move(config), *source, std::move(backend), options));
  model->fingerprint_ = Fingerprint(model->config_, checkpoint);
  return std::shared_ptr<const Model>(std::move(model));
}

absl::StatusOr<std::shared_ptr<const Model>> Model::LoadRandom(const RandomModel& random,
                                                               std::shared_ptr<const kernels::Backend> backend,
                                                               const ModelOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(const auto source, MakeRandomSource(random, *backend));
  SPLICE_ASSIGN_OR_RETURN(auto model, Build(random.config, *source, std::move(backend), options));
  model->fingerprint_ = Sha256(fmt::format("splice-random-model-1|{}|{}|{}", ConfigIdentity(random.config), random.seed,
                                           kernels::DTypeName(random.config.dtype)));
  return std::shared_ptr<const Model>(std::move(model));
}

size_t Model::page_bytes() const {
  return 2ull * kernels::kPageTokens * config_.head_dim * kernels::DTypeBytes(kv_dtype_);
}

kernels::RopeTable Model::rope() const {
  return {static_cast<const float*>(rope_cos_->data()), static_cast<const float*>(rope_sin_->data()),
          config_.max_positions};
}

}  // namespace spl::engine
