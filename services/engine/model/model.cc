#include "services/engine/model/model.h"

#include <cmath>
#include <filesystem>
#include <string>
#include <thread>

#include "kernels/common/kv_rows.h"
#include "services/base/status.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/load_progress.h"
#include "services/engine/model/model_identity.h"
#include "services/engine/model/quantizing_source.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {
namespace {

// `option` is a path, "none", or "auto": the file of that name in the folder, if it is there.
std::string FileBeside(const std::string& model_dir, const char* name, const std::string& option) {
  if (option != "auto") return option;
  std::string path = (std::filesystem::path(model_dir) / name).string();
  return std::filesystem::exists(path) ? path : "none";
}

}  // namespace

using kernels::DType;

namespace {

// A type of weights, as messages say it.
std::string_view TypeName(DType dtype) { return dtype == DType::kE4M3 ? "FP8" : kernels::DTypeName(dtype); }

}  // namespace

// Builds one rank's part of a model, tensor by tensor. For one use.
class ModelLoader {
 public:
  // `config` is the whole model's: shapes of tensors follow from it.
  ModelLoader(const ModelConfig& config, ModelShard& model, WeightSource& source)
      : config_(config), model_(model), source_(source) {}

  absl::Status Load() {
    const ModelConfig& c = config_;
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
    SPLICE_ASSIGN_OR_RETURN(model_.lm_head_,
                            Linear({MatrixPart::Rows(head, c.vocab_size, c.hidden_size, model_.vocab_)}));
    return BuildRope();
  }

 private:
  absl::Status LoadEmbedding() {
    const ModelConfig& c = config_;
    const std::string name = "model.embed_tokens.weight";
    const MatrixPart whole = MatrixPart::Whole(name, c.vocab_size, c.hidden_size);
    SPLICE_ASSIGN_OR_RETURN(const MatrixType type, source_.TypeOf(name, whole.shape()));
    if (kernels::IsQuantizedType(type.dtype))
      return InvalidArgument("tensor '{}': an embedding in {} is not supported", name, TypeName(type.dtype));
    model_.embedding_dtype_ = type.dtype;
    SPLICE_ASSIGN_OR_RETURN(model_.embedding_, model_.backend_->Allocate(kernels::DTypeBytes(model_.embedding_dtype_) *
                                                                         c.vocab_size * c.hidden_size));
    MatrixScales no_scales;
    return source_.Write(whole, model_.embedding_->data(), no_scales);
  }

  absl::Status LoadAttention(const std::string& prefix, LayerWeights& layer) {
    const ModelConfig& c = config_;
    const std::string attention = prefix + "self_attn.";
    const Range q_rows = model_.shard_.PartOf(c.q_size()), kv_rows = model_.shard_.PartOf(c.kv_size());
    SPLICE_ASSIGN_OR_RETURN(layer.attention_norm, Vector(prefix + "input_layernorm.weight", c.hidden_size));
    SPLICE_ASSIGN_OR_RETURN(
        layer.qkv, Linear({MatrixPart::Rows(attention + "q_proj.weight", c.q_size(), c.hidden_size, q_rows),
                           MatrixPart::Rows(attention + "k_proj.weight", c.kv_size(), c.hidden_size, kv_rows),
                           MatrixPart::Rows(attention + "v_proj.weight", c.kv_size(), c.hidden_size, kv_rows)}));
    if (c.attention_bias) {
      SPLICE_ASSIGN_OR_RETURN(layer.qkv_bias, Vectors({{attention + "q_proj.bias", c.q_size(), q_rows},
                                                       {attention + "k_proj.bias", c.kv_size(), kv_rows},
                                                       {attention + "v_proj.bias", c.kv_size(), kv_rows}}));
    }
    SPLICE_RETURN_IF_ERROR(RefuseBias(attention + "o_proj.bias", c.hidden_size));
    if (c.qk_norm) {
      SPLICE_ASSIGN_OR_RETURN(layer.q_norm, Vector(attention + "q_norm.weight", c.head_dim));
      SPLICE_ASSIGN_OR_RETURN(layer.k_norm, Vector(attention + "k_norm.weight", c.head_dim));
    }
    SPLICE_ASSIGN_OR_RETURN(
        layer.o, Linear({MatrixPart::Columns(attention + "o_proj.weight", c.hidden_size, c.q_size(), q_rows)}));
    return absl::OkStatus();
  }

  absl::Status LoadFeedForward(const std::string& mlp, LayerWeights& layer) {
    const ModelConfig& c = config_;
    const int64_t width = c.intermediate_size;
    const Range part = model_.shard_.PartOf(width);
    SPLICE_ASSIGN_OR_RETURN(layer.gate_up,
                            Linear({MatrixPart::Rows(mlp + "gate_proj.weight", width, c.hidden_size, part),
                                    MatrixPart::Rows(mlp + "up_proj.weight", width, c.hidden_size, part)}));
    SPLICE_ASSIGN_OR_RETURN(layer.down,
                            Linear({MatrixPart::Columns(mlp + "down_proj.weight", c.hidden_size, width, part)}));
    SPLICE_RETURN_IF_ERROR(RefuseBias(mlp + "gate_proj.bias", width));
    SPLICE_RETURN_IF_ERROR(RefuseBias(mlp + "up_proj.bias", width));
    return RefuseBias(mlp + "down_proj.bias", c.hidden_size);
  }

  // Folders of GPTQ have biases of zeros beside matrices that have none.
  absl::Status RefuseBias(const std::string& name, int64_t size) {
    if (!source_.Contains(name)) return absl::OkStatus();
    SPLICE_ASSIGN_OR_RETURN(const std::vector<float> values, source_.Floats(name, {size}));
    for (const float value : values) {
      if (value != 0) return InvalidArgument("tensor '{}': a bias of this projection is not supported", name);
    }
    return absl::OkStatus();
  }

  absl::Status LoadExperts(const std::string& mlp, LayerWeights& layer) {
    const ModelConfig& c = config_;
    const int64_t width = c.moe.intermediate_size;
    SPLICE_ASSIGN_OR_RETURN(layer.router, Router(mlp + "gate.weight"));
    const Range part = model_.shard_.PartOf(width);
    std::vector<MatrixPart> gate_up, down;
    for (int32_t e = 0; e < c.moe.num_experts; ++e) {
      const std::string expert = fmt::format("{}experts.{}.", mlp, e);
      for (const char* name : {"gate_proj.weight", "up_proj.weight"})
        gate_up.push_back(MatrixPart::Rows(expert + name, width, c.hidden_size, part));
      down.push_back(MatrixPart::Columns(expert + "down_proj.weight", c.hidden_size, width, part));
    }
    SPLICE_ASSIGN_OR_RETURN(layer.expert_gate_up, Grouped(gate_up));
    SPLICE_ASSIGN_OR_RETURN(layer.expert_down, Grouped(down));
    return absl::OkStatus();
  }

  // With f32 activations the router's weight is widened too: the rounding of a 16-bit product must not decide which
  // experts a row goes to.
  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> Router(const std::string& name) {
    const ModelConfig& c = config_;
    if (model_.backend_->activation_dtype(c.dtype) != DType::kF32)
      return Linear({MatrixPart::Whole(name, c.moe.num_experts, c.hidden_size)});
    SPLICE_ASSIGN_OR_RETURN(const std::vector<float> values, source_.Floats(name, {c.moe.num_experts, c.hidden_size}));
    SPLICE_ASSIGN_OR_RETURN(auto buffer, FloatBuffer(values));
    return model_.backend_->AdoptLinear(
        std::move(buffer), {.dtype = DType::kF32, .out_features = c.moe.num_experts, .in_features = c.hidden_size});
  }

  // Puts parts of one width and type into device memory, one behind the other.
  struct Stacked {
    std::unique_ptr<kernels::Buffer> data;
    MatrixType type;
    MatrixScales scales;
    int64_t rows = 0;
    int64_t width = 0;

    const float* scales_or_null() const { return scales.scales.empty() ? nullptr : scales.scales.data(); }
    const uint8_t* zeros_or_null() const { return scales.zeros.empty() ? nullptr : scales.zeros.data(); }
    const int32_t* order_or_null() const { return scales.column_order.empty() ? nullptr : scales.column_order.data(); }
  };
  absl::StatusOr<Stacked> Stack(const std::vector<MatrixPart>& parts) {
    Stacked stacked{.width = parts[0].columns.size()};
    for (const MatrixPart& part : parts) {
      SPLICE_ASSIGN_OR_RETURN(const MatrixType type, source_.TypeOf(part.name, part.shape()));
      if (&part != &parts[0] && type != stacked.type)
        return InvalidArgument("tensors '{}' and '{}' differ in type", parts[0].name, part.name);
      stacked.type = type;
      stacked.rows += part.rows.size();
    }
    const int64_t row_bytes = kernels::DTypeRowBytes(stacked.type.dtype, stacked.width);
    SPLICE_ASSIGN_OR_RETURN(stacked.data, model_.backend_->Allocate(stacked.rows * row_bytes));
    auto* to = static_cast<std::byte*>(stacked.data->data());
    for (const MatrixPart& part : parts) {
      const std::vector<int32_t> order = std::move(stacked.scales.column_order);
      SPLICE_RETURN_IF_ERROR(source_.Write(part, to, stacked.scales));
      if (&part != &parts[0] && stacked.scales.column_order != order)
        return InvalidArgument("tensors '{}' and '{}' differ in the order of their columns (g_idx)", parts[0].name,
                               part.name);
      to += part.rows.size() * row_bytes;
    }
    return stacked;
  }

  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> Linear(const std::vector<MatrixPart>& parts) {
    SPLICE_ASSIGN_OR_RETURN(Stacked stacked, Stack(parts));
    return Named(parts[0].name,
                 model_.backend_->AdoptLinear(std::move(stacked.data), {.dtype = stacked.type.dtype,
                                                                        .out_features = stacked.rows,
                                                                        .in_features = stacked.width,
                                                                        .scales = stacked.scales_or_null(),
                                                                        .scale_group = stacked.type.scale_group,
                                                                        .zeros = stacked.zeros_or_null(),
                                                                        .column_order = stacked.order_or_null()}));
  }

  // A backend's refusal says the shape; this says the tensor.
  template <typename Weight>
  static absl::StatusOr<std::unique_ptr<Weight>> Named(const std::string& tensor,
                                                       absl::StatusOr<std::unique_ptr<Weight>> weight) {
    if (weight.ok()) return weight;
    return Errorf(weight.status().code(), "tensor '{}': {}", tensor, std::string(weight.status().message()));
  }

  // Every expert has the same number of tensors, all of one shape.
  absl::StatusOr<std::unique_ptr<kernels::GroupedWeight>> Grouped(const std::vector<MatrixPart>& parts) {
    SPLICE_ASSIGN_OR_RETURN(Stacked stacked, Stack(parts));
    if (stacked.order_or_null() != nullptr)
      return Errorf(absl::StatusCode::kUnimplemented, "tensor '{}': experts with act-order (g_idx) are not supported",
                    parts[0].name);
    return Named(parts[0].name, model_.backend_->AdoptGrouped(std::move(stacked.data),
                                                              {.dtype = stacked.type.dtype,
                                                               .num_experts = config_.moe.num_experts,
                                                               .out_features = stacked.rows / config_.moe.num_experts,
                                                               .in_features = stacked.width,
                                                               .scales = stacked.scales_or_null(),
                                                               .scale_group = stacked.type.scale_group,
                                                               .zeros = stacked.zeros_or_null()}));
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Vector(const std::string& name, int64_t size) {
    return Vectors({{name, size, {0, size}}});
  }

  struct VectorPart {
    std::string name;
    int64_t size = 0;
    Range part;
  };
  // One-dimensional tensors, concatenated and widened to f32.
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Vectors(const std::vector<VectorPart>& vectors) {
    std::vector<float> values;
    for (const VectorPart& vector : vectors) {
      SPLICE_ASSIGN_OR_RETURN(const std::vector<float> all, source_.Floats(vector.name, {vector.size}));
      values.insert(values.end(), all.begin() + vector.part.begin, all.begin() + vector.part.end);
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
    const ModelConfig& c = config_;
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

  const ModelConfig& config_;
  ModelShard& model_;
  WeightSource& source_;
};

absl::StatusOr<std::shared_ptr<Model>> Model::Build(ModelConfig config, const MakeSource& make_source,
                                                    const Devices& devices, const ModelOptions& options,
                                                    LoadProgress* progress) {
  auto model = std::shared_ptr<Model>(new Model);
  model->config_ = std::move(config);
  const ModelConfig& c = model->config_;
  model->kv_dtype_ = options.kv_dtype.value_or(c.dtype == DType::kF32 ? DType::kF32 : DType::kBF16);
  if (!kernels::IsKvType(model->kv_dtype_))
    return InvalidArgument("kv_dtype {} is not supported (f32, bf16, fp8)", kernels::DTypeName(model->kv_dtype_));
  const bool at_load = options.quantize != QuantizeTo::kNone;
  const bool int4 = at_load ? options.quantize == QuantizeTo::kInt4 : c.quantization.is_int4();
  model->weight_dtype_ = int4 ? DType::kInt4 : at_load || c.quantization.quantized() ? DType::kE4M3 : c.dtype;
  model->quantizes_activations_ = options.quantize_activations;
  model->weights_name_ = at_load ? QuantizedWeightsName(options.quantize) : c.weights_name();
  if (kernels::IsQuantizedType(model->weight_dtype_) && !devices[0]->host_memory() &&
      devices[0]->activation_dtype(c.dtype) != DType::kBF16)
    return Errorf(absl::StatusCode::kUnimplemented, "model '{}': {} weights beside {} need bf16 activations on {}",
                  c.name, TypeName(model->weight_dtype_), kernels::DTypeName(c.dtype), devices[0]->name());
  const int num_ranks = static_cast<int>(devices.size());
  SPLICE_RETURN_IF_ERROR(ValidateNumRanks(c, num_ranks));
  for (int r = 0; r < num_ranks; ++r)
    model->ranks_.push_back(std::unique_ptr<ModelShard>(new ModelShard({r, num_ranks}, c, devices[r])));
  // All ranks load at the same time: they share no state while they read, pack and copy.
  std::vector<absl::Status> loaded(num_ranks);
  const auto load = [&](int r) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(auto source, make_source(*devices[r]));
    if (at_load) source = MakeQuantizingSource(std::move(source), *devices[r], options.quantize);
    if (progress != nullptr) source = progress->Count(std::move(source));
    return ModelLoader(c, *model->ranks_[r], *source).Load();
  };
  std::vector<std::thread> threads;
  for (int r = 1; r < num_ranks; ++r) threads.emplace_back([&, r] { loaded[r] = load(r); });
  loaded[0] = load(0);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : loaded) SPLICE_RETURN_IF_ERROR(status);
  model->layout_digest_ = LayoutDigest(c, model->kv_dtype_);
  return model;
}

absl::StatusOr<std::shared_ptr<const Model>> Model::Load(const std::string& model_dir,
                                                         std::shared_ptr<const kernels::Backend> backend,
                                                         const ModelOptions& options) {
  return Load(model_dir, Devices{std::move(backend)}, options);
}

absl::StatusOr<std::shared_ptr<const Model>> Model::Load(const std::string& model_dir, const Devices& devices,
                                                         const ModelOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(model_dir));
  if (options.quantize != QuantizeTo::kNone && config.quantization.quantized())
    return InvalidArgument("{}: --quantize, but the weights are quantized already ({})", model_dir,
                           config.quantization.method);
  SPLICE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(model_dir));
  const auto make_source = [&](const kernels::Backend& backend) -> absl::StatusOr<std::unique_ptr<WeightSource>> {
    return MakeCheckpointSource(checkpoint, config.quantization, backend);
  };
  std::optional<LoadProgress> progress;
  if (options.on_progress) progress.emplace(checkpoint, static_cast<int>(devices.size()), options.on_progress);
  SPLICE_ASSIGN_OR_RETURN(auto model, Build(config, make_source, devices, options, progress ? &*progress : nullptr));
  if (progress) progress->Finish();
  model->fingerprint_ = FolderFingerprint(model->config_, checkpoint);
  // Both name the weights as the folder has them.
  SPLICE_RETURN_IF_ERROR(model->LoadHeadClasses(FileBeside(model_dir, "head_classes.json", options.head_classes)));
  SPLICE_RETURN_IF_ERROR(model->LoadRecoveryProfile(FileBeside(model_dir, "recovery.json", options.recovery_profile)));
  model->fingerprint_ = QuantizedFingerprint(model->fingerprint_, options.quantize);
  model->kv_fingerprint_ = KvFingerprint(model->fingerprint_, model->kv_dtype_);
  return std::shared_ptr<const Model>(std::move(model));
}

absl::StatusOr<std::shared_ptr<const Model>> Model::LoadRandom(const RandomModel& random,
                                                               std::shared_ptr<const kernels::Backend> backend,
                                                               const ModelOptions& options) {
  return LoadRandom(random, Devices{std::move(backend)}, options);
}

absl::StatusOr<std::shared_ptr<const Model>> Model::LoadRandom(const RandomModel& random, const Devices& devices,
                                                               const ModelOptions& options) {
  if (random.config.quantization.quantized())
    return InvalidArgument("random weights: '{}' has a quantization_config; take it out, and ask for --quantize",
                           random.config.name);
  const auto make_source = [&](const kernels::Backend& backend) { return MakeRandomSource(random, backend); };
  SPLICE_ASSIGN_OR_RETURN(auto model, Build(random.config, make_source, devices, options, nullptr));
  model->fingerprint_ = RandomFingerprint(random);
  if (const auto preset = FindHeadPreset(options.head_classes); preset.ok()) {
    model->head_classes_ = std::make_shared<const HeadClassMap>(
        HeadClassMap::Spread(random.config.num_layers, random.config.num_kv_heads, *preset));
  } else {
    SPLICE_RETURN_IF_ERROR(model->LoadHeadClasses(options.head_classes == "auto" ? "none" : options.head_classes));
  }
  SPLICE_RETURN_IF_ERROR(
      model->LoadRecoveryProfile(options.recovery_profile == "auto" ? "none" : options.recovery_profile));
  model->fingerprint_ = QuantizedFingerprint(model->fingerprint_, options.quantize);
  model->kv_fingerprint_ = KvFingerprint(model->fingerprint_, model->kv_dtype_);
  return std::shared_ptr<const Model>(std::move(model));
}

absl::Status Model::LoadRecoveryProfile(const std::string& path) {
  if (path == "none") return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(recovery_profile_, RecoveryProfile::Load(path));
  const absl::Status fits = recovery_profile_->CheckModel(config_.num_layers, fingerprint_);
  return fits.ok() ? fits : Annotate(fits, path);
}

absl::Status Model::LoadHeadClasses(const std::string& path) {
  if (path == "none") return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(HeadClassMap map, HeadClassMap::Load(path));
  if (const absl::Status fits = map.CheckModel(config_.num_layers, config_.num_kv_heads, fingerprint_); !fits.ok())
    return Annotate(fits, path);
  head_classes_ = std::make_shared<const HeadClassMap>(std::move(map));
  return absl::OkStatus();
}

std::vector<const kernels::Backend*> Model::backends() const {
  std::vector<const kernels::Backend*> backends;
  for (const auto& rank : ranks_) backends.push_back(&rank->backend());
  return backends;
}

size_t Model::page_bytes() const { return kernels::KvPageBytes(kv_dtype_, config_.head_dim); }

kernels::RopeTable ModelShard::rope() const {
  return {static_cast<const float*>(rope_cos_->data()), static_cast<const float*>(rope_sin_->data()),
          config_.max_positions};
}

}  // namespace spl::engine
