#include "services/engine/model/model.h"

#include <openssl/sha.h>
#include <xxhash.h>

#include <cmath>
#include <cstring>
#include <string>

#include "services/base/status.h"
#include "services/engine/model/checkpoint.h"

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
    default:
      return InvalidArgument("tensor '{}' is not a floating-point tensor", name);
  }
}

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

// The parts of the configuration that change what the model computes, spelled unambiguously.
std::string ConfigIdentity(const ModelConfig& c) {
  return fmt::format("{}|{}|{}|{}|{}|{}|{}|{}|{:.9g}|{}|{}|rope:{}:{:.17g}:{:.17g}:{:.17g}:{:.17g}:{}", c.architecture,
                     c.hidden_size, c.intermediate_size, c.num_layers, c.num_qo_heads, c.num_kv_heads, c.head_dim,
                     c.vocab_size, c.rms_norm_eps, c.tie_word_embeddings, c.attention_bias,
                     static_cast<int>(c.rope.scaling), c.rope.theta, c.rope.factor, c.rope.low_freq_factor,
                     c.rope.high_freq_factor, c.rope.original_max_positions);
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
  ModelLoader(Model& model, const Checkpoint& checkpoint) : model_(model), checkpoint_(checkpoint) {}

  absl::Status Load() {
    const ModelConfig& c = model_.config_;
    SPLICE_RETURN_IF_ERROR(LoadEmbedding());
    SPLICE_ASSIGN_OR_RETURN(model_.final_norm_, Vector("model.norm.weight", c.hidden_size));
    for (int32_t i = 0; i < c.num_layers; ++i) {
      LayerWeights layer;
      SPLICE_RETURN_IF_ERROR(LoadLayer(fmt::format("model.layers.{}.", i), layer));
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
    SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(name, {c.vocab_size, c.hidden_size}));
    SPLICE_ASSIGN_OR_RETURN(model_.embedding_dtype_, WeightType(name, t.type));
    SPLICE_ASSIGN_OR_RETURN(model_.embedding_, model_.backend_->Allocate(t.bytes));
    return model_.backend_->Copy(kernels::CopyKind::kUpload, model_.embedding_->data(), t.data, t.bytes);
  }

  absl::Status LoadLayer(const std::string& prefix, LayerWeights& layer) {
    const ModelConfig& c = model_.config_;
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    const std::vector<int64_t> qkv_rows = {c.q_size(), c.kv_size(), c.kv_size()};
    SPLICE_ASSIGN_OR_RETURN(layer.attention_norm, Vector(prefix + "input_layernorm.weight", c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(
        layer.qkv, Linear({attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"},
                          qkv_rows, c.hidden_size));
    if (c.attention_bias) {
      SPLICE_ASSIGN_OR_RETURN(
          layer.qkv_bias,
          Bias({attention + "q_proj.bias", attention + "k_proj.bias", attention + "v_proj.bias"}, qkv_rows));
      if (checkpoint_.Contains(attention + "o_proj.bias"))
        return InvalidArgument("tensor '{}o_proj.bias': a bias of the output projection is not supported", attention);
    }
    SPLICE_ASSIGN_OR_RETURN(layer.o, Linear({attention + "o_proj.weight"}, {c.hidden_size}, c.q_size()));
    SPLICE_ASSIGN_OR_RETURN(layer.ffn_norm, Vector(prefix + "post_attention_layernorm.weight", c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(layer.gate_up, Linear({mlp + "gate_proj.weight", mlp + "up_proj.weight"},
                                                  {c.intermediate_size, c.intermediate_size}, c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(layer.down, Linear({mlp + "down_proj.weight"}, {c.hidden_size}, c.intermediate_size));
    return absl::OkStatus();
  }

  // Tensors of one width and type stacked by rows and packed as one weight.
  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> Linear(const std::vector<std::string>& names,
                                                                const std::vector<int64_t>& rows, int64_t width) {
    std::vector<std::byte> stacked;
    kernels::WeightView view{.in_features = width};
    for (size_t i = 0; i < names.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(names[i], {rows[i], width}));
      SPLICE_ASSIGN_OR_RETURN(const DType type, WeightType(names[i], t.type));
      if (i > 0 && type != view.dtype)
        return InvalidArgument("tensors '{}' and '{}' differ in type", names[0], names[i]);
      view.dtype = type;
      view.out_features += rows[i];
      if (names.size() == 1)
        view.data = t.data;
      else
        stacked.insert(stacked.end(), t.data, t.data + t.bytes);
    }
    if (names.size() > 1) view.data = stacked.data();
    return model_.backend_->PackLinear(view);
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Vector(const std::string& name, int64_t size) {
    return Bias({name}, {size});
  }

  // One-dimensional tensors, concatenated and widened to f32.
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Bias(const std::vector<std::string>& names,
                                                        const std::vector<int64_t>& sizes) {
    std::vector<float> values;
    for (size_t i = 0; i < names.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(const TensorView t, checkpoint_.Find(names[i], {sizes[i]}));
      SPLICE_ASSIGN_OR_RETURN(const DType type, WeightType(names[i], t.type));
      for (int64_t j = 0; j < sizes[i]; ++j) values.push_back(ElementAsFloat(t.data, type, j));
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
    std::vector<float> cosines, sines;
    cosines.reserve(static_cast<size_t>(c.max_positions) * frequencies.size());
    sines.reserve(cosines.capacity());
    for (int32_t position = 0; position < c.max_positions; ++position) {
      for (float f : frequencies) {
        const float angle = static_cast<float>(position) * f;  // float32, as the reference implementation
        cosines.push_back(std::cos(angle));
        sines.push_back(std::sin(angle));
      }
    }
    SPLICE_ASSIGN_OR_RETURN(model_.rope_cos_, FloatBuffer(cosines));
    SPLICE_ASSIGN_OR_RETURN(model_.rope_sin_, FloatBuffer(sines));
    return absl::OkStatus();
  }

  Model& model_;
  const Checkpoint& checkpoint_;
};

absl::StatusOr<std::shared_ptr<const Model>> Model::Load(const std::string& model_dir,
                                                         std::shared_ptr<const kernels::Backend> backend,
                                                         const ModelOptions& options) {
  auto model = std::shared_ptr<Model>(new Model);
  SPLICE_ASSIGN_OR_RETURN(model->config_, LoadModelConfig(model_dir));
  SPLICE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(model_dir));
  model->backend_ = std::move(backend);
  model->kv_dtype_ = options.kv_dtype.value_or(model->config_.dtype == DType::kF32 ? DType::kF32 : DType::kBF16);
  if (model->kv_dtype_ == DType::kF16) return InvalidArgument("kv_dtype f16 is not supported (f32, bf16)");
  SPLICE_RETURN_IF_ERROR(ModelLoader(*model, checkpoint).Load());
  model->fingerprint_ = Fingerprint(model->config_, checkpoint);
  model->layout_digest_ = LayoutDigest(model->config_, model->kv_dtype_);
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
