#include "services/engine/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <sstream>

#include "services/base/status.h"
#include "services/engine/model/json_fields.h"
#include "services/hub/model_name.h"

namespace spl::engine {
namespace {

using nlohmann::json;

// One id or a list of ids.
std::optional<std::vector<int32_t>> ParseIds(const json& value) {
  std::vector<int32_t> ids;
  const json list = value.is_array() ? value : json::array({value});
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(INT32_MAX)) return std::nullopt;
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// m-scale of YaRN, section 3.4: 0.1 · m · ln(factor) + 1, or 1 if nothing is stretched.
double YarnScale(double factor, double m) { return factor <= 1.0 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; }

void ParseYarn(JsonFields& fields, int32_t max_positions, RopeConfig& rope) {
  rope.scaling = RopeScaling::kYarn;
  rope.original_max_positions = fields.Int("original_max_position_embeddings", 1, INT32_MAX, max_positions);
  if (!fields.Has("factor")) fields.Fail("factor", "is missing");
  rope.factor = fields.Double("factor", 1.0);
  if (rope.factor < 1.0) fields.Fail("factor", "is below 1");
  rope.beta_fast = fields.Double("beta_fast", 32.0);
  rope.beta_slow = fields.Double("beta_slow", 1.0);
  rope.truncate = fields.Bool("truncate", true);
  if (rope.beta_fast <= rope.beta_slow) fields.Fail("beta_fast", "must be above beta_slow");
  // Some models scale attention differently at both ends of the product; without either the paper's factor holds.
  double scale = YarnScale(rope.factor, 1.0);
  if (fields.Has("mscale") && fields.Has("mscale_all_dim"))
    scale = YarnScale(rope.factor, fields.Double("mscale", 1.0)) /
            YarnScale(rope.factor, fields.Double("mscale_all_dim", 1.0));
  rope.attention_factor = fields.Double("attention_factor", scale);
}

absl::StatusOr<RopeConfig> ParseRope(JsonFields& config, int32_t max_positions) {
  RopeConfig rope;
  rope.theta = config.Double("rope_theta", 10000.0);
  const json* scaling = config.Object("rope_scaling");
  // Newer folders keep theta and scaling together under "rope_parameters".
  if (const json* parameters = config.Object("rope_parameters")) {
    for (const auto& [name, value] : parameters->items()) {
      if (value.is_object())
        return Errorf(absl::StatusCode::kUnimplemented,
                      "{}: 'rope_parameters' has an entry for '{}': angles that differ by layer are not supported",
                      config.source(), name);
    }
    JsonFields fields(*parameters, config.source() + " rope_parameters");
    rope.theta = fields.Double("rope_theta", rope.theta);
    SPLICE_RETURN_IF_ERROR(fields.status());
    scaling = parameters;
  }
  SPLICE_RETURN_IF_ERROR(config.status());
  if (scaling == nullptr) return rope;
  JsonFields fields(*scaling, config.source() + (config.Has("rope_parameters") ? " rope_parameters" : " rope_scaling"));
  if (fields.Double("partial_rotary_factor", 1.0) != 1.0)
    return Errorf(absl::StatusCode::kUnimplemented, "{}: 'partial_rotary_factor' other than 1 is not supported",
                  fields.source());
  const std::string type = fields.String("rope_type", fields.String("type", "default"));
  if (type == "default") return rope;
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = fields.Double("factor", 1.0);
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = fields.Double("factor", 8.0);
    rope.low_freq_factor = fields.Double("low_freq_factor", 1.0);
    rope.high_freq_factor = fields.Double("high_freq_factor", 4.0);
    rope.original_max_positions = fields.Int("original_max_position_embeddings", 1, INT32_MAX);
    if (rope.high_freq_factor <= rope.low_freq_factor) fields.Fail("high_freq_factor", "must be above low_freq_factor");
  } else if (type == "yarn") {
    ParseYarn(fields, max_positions, rope);
  } else {
    return Errorf(absl::StatusCode::kUnimplemented,
                  "{}: rope_type '{}' is not supported (default, linear, llama3, yarn)", config.source(), type);
  }
  SPLICE_RETURN_IF_ERROR(fields.status());
  return rope;
}

absl::StatusOr<kernels::DType> ParseDType(JsonFields& config) {
  const std::string name = config.String("torch_dtype", config.String("dtype", "float32"));
  if (name == "float32") return kernels::DType::kF32;
  if (name == "bfloat16") return kernels::DType::kBF16;
  if (name == "float16") return kernels::DType::kF16;
  return InvalidArgument("{}: torch_dtype '{}' is not supported (float32, bfloat16, float16)", config.source(), name);
}

absl::StatusOr<std::string> ParseArchitecture(const json& root, const std::string& source) {
  const auto it = root.find("architectures");
  if (it == root.end() || !it->is_array() || it->size() != 1 || !(*it)[0].is_string())
    return InvalidArgument("{}: 'architectures' is not a list of one name", source);
  const std::string name = (*it)[0].get<std::string>();
  static constexpr std::string_view kKnown[] = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                                                "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"};
  if (std::find(std::begin(kKnown), std::end(kKnown), name) == std::end(kKnown))
    return Errorf(absl::StatusCode::kUnimplemented, "{}: architecture '{}' is not supported ({})", source, name,
                  fmt::join(kKnown, ", "));
  return name;
}

// Layers that use `window`: those of "layer_types", else those of the family's rule.
absl::Status PlaceWindows(JsonFields& f, ModelConfig& c, int32_t window, int32_t first_layer) {
  std::vector<int32_t> windows(c.num_layers, 0);
  if (const json* types = f.Array("layer_types")) {
    if (types->size() != windows.size())
      return InvalidArgument("{}: 'layer_types' has {} entries for {} layers", f.source(), types->size(), c.num_layers);
    for (size_t i = 0; i < windows.size(); ++i) {
      const std::string type = (*types)[i].is_string() ? (*types)[i].get<std::string>() : (*types)[i].dump();
      if (type != "full_attention" && type != "sliding_attention")
        return Errorf(absl::StatusCode::kUnimplemented,
                      "{}: 'layer_types' has '{}', which is not supported (full_attention, sliding_attention)",
                      f.source(), type);
      if (type == "full_attention") continue;
      if (window == 0)
        return InvalidArgument("{}: 'layer_types' makes layer {} sliding_attention, but no sliding_window is in use",
                               f.source(), i);
      windows[i] = window;
    }
  } else if (window > 0) {
    std::fill(windows.begin() + std::clamp(first_layer, 0, c.num_layers), windows.end(), window);
  }
  SPLICE_RETURN_IF_ERROR(f.status());
  if (std::any_of(windows.begin(), windows.end(), [](int32_t w) { return w > 0; })) c.sliding_windows = windows;
  return absl::OkStatus();
}

absl::Status ParseWindows(JsonFields& f, const json& root, ModelConfig& c) {
  if (c.architecture == "LlamaForCausalLM") return absl::OkStatus();
  if (c.architecture == "MistralForCausalLM") {
    // A folder without the field means the family's default, 4096; null means none.
    const int32_t window = root.contains("sliding_window") ? f.Int("sliding_window", 1, INT32_MAX, 0) : 4096;
    return PlaceWindows(f, c, window, 0);
  }
  if (!f.Bool("use_sliding_window", false)) return PlaceWindows(f, c, 0, 0);
  if (c.architecture == "Qwen3MoeForCausalLM" && !f.Has("layer_types"))
    return Errorf(
        absl::StatusCode::kUnimplemented,
        "{}: 'use_sliding_window' of a Qwen3-MoE model is not supported without 'layer_types': versions of the "
        "reference implementation differ on the layers",
        f.source());
  const int32_t window = f.Int("sliding_window", 1, INT32_MAX, root.contains("sliding_window") ? 0 : 4096);
  return PlaceWindows(f, c, window, f.Int("max_window_layers", 0, 1 << 20, 28));
}

absl::Status ParseMoe(JsonFields& f, ModelConfig& c) {
  MoeConfig& moe = c.moe;
  const char* count = f.Has("num_experts") ? "num_experts" : "num_local_experts";
  if (!f.Has(count)) f.Fail("num_experts", "is missing");
  moe.num_experts = f.Int(count, 1, 1024);
  moe.num_experts_per_token = f.Int("num_experts_per_tok", 1, 64);
  moe.intermediate_size = f.Int("moe_intermediate_size", 1, 1 << 24);
  moe.renormalize = f.Bool("norm_topk_prob", false);
  moe.sparse_step = f.Int("decoder_sparse_step", 1, 1 << 20, 1);
  if (const json* layers = f.Array("mlp_only_layers")) {
    const auto ids = ParseIds(*layers);
    if (!ids) return InvalidArgument("{}: 'mlp_only_layers' is not a list of layers", f.source());
    moe.dense_layers = *ids;
    std::sort(moe.dense_layers.begin(), moe.dense_layers.end());
  }
  if (moe.num_experts_per_token > moe.num_experts) f.Fail("num_experts_per_tok", "is above num_experts");
  return f.status();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json, const std::string& source_name) {
  const json root = json::parse(config_json, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object()) return InvalidArgument("{}: not a JSON object", source_name);
  ModelConfig c;
  SPLICE_ASSIGN_OR_RETURN(c.architecture, ParseArchitecture(root, source_name));
  JsonFields f(root, source_name);
  c.hidden_size = f.Int("hidden_size", 1, 1 << 20);
  c.intermediate_size = f.Int("intermediate_size", 1, 1 << 24);
  c.num_layers = f.Int("num_hidden_layers", 1, 1024);
  c.num_qo_heads = f.Int("num_attention_heads", 1, 1024);
  c.num_kv_heads = f.Int("num_key_value_heads", 1, 1024, c.num_qo_heads);
  c.head_dim = f.Int("head_dim", 1, 256, c.hidden_size / std::max(c.num_qo_heads, 1));
  c.vocab_size = f.Int("vocab_size", 1, 1 << 24);
  c.max_positions = f.Int("max_position_embeddings", 1, 1 << 24);
  c.rms_norm_eps = static_cast<float>(f.Double("rms_norm_eps", 1e-6));
  c.tie_word_embeddings = f.Bool("tie_word_embeddings", false);
  const bool qwen3 = c.architecture == "Qwen3ForCausalLM" || c.architecture == "Qwen3MoeForCausalLM";
  if (c.architecture == "Qwen2ForCausalLM")
    c.attention_bias = true;  // fixed for the family; its folders have no field for it
  else if (c.architecture != "MistralForCausalLM")
    c.attention_bias = f.Bool("attention_bias", false);
  c.qk_norm = qwen3;
  if (f.Has("quantization_config")) {
    SPLICE_ASSIGN_OR_RETURN(c.quantization, ParseWeightQuantization(root["quantization_config"], source_name));
  }
  if (c.num_qo_heads % c.num_kv_heads != 0) f.Fail("num_key_value_heads", "does not divide num_attention_heads");
  if (c.head_dim % 8 != 0) f.Fail("head_dim", "is not a multiple of 8");
  if (f.Bool("mlp_bias", false)) f.Fail("mlp_bias", "true is not supported");
  if (const std::string act = f.String("hidden_act", "silu"); act != "silu")
    f.Fail("hidden_act", "'" + act + "' is not supported (silu)");
  SPLICE_RETURN_IF_ERROR(f.status());
  SPLICE_RETURN_IF_ERROR(ParseWindows(f, root, c));
  if (c.architecture == "Qwen3MoeForCausalLM") SPLICE_RETURN_IF_ERROR(ParseMoe(f, c));
  SPLICE_ASSIGN_OR_RETURN(c.rope, ParseRope(f, c.max_positions));
  // A YaRN folder states the context before or after stretching; the model runs up to the longer one.
  if (c.rope.scaling == RopeScaling::kYarn) {
    const double stretched = static_cast<double>(c.rope.original_max_positions) * c.rope.factor;
    if (stretched > (1 << 24)) f.Fail("rope_scaling", "stretches the context beyond 16777216 positions");
    SPLICE_RETURN_IF_ERROR(f.status());
    c.max_positions = std::max(c.max_positions, static_cast<int32_t>(stretched));
  }
  SPLICE_ASSIGN_OR_RETURN(c.dtype, ParseDType(f));
  if (const auto eos = root.find("eos_token_id"); eos != root.end() && !eos->is_null()) {
    const auto ids = ParseIds(*eos);
    if (!ids) return InvalidArgument("{}: 'eos_token_id' is not an id or a list of ids", source_name);
    c.eos_ids = *ids;
  }
  SPLICE_RETURN_IF_ERROR(f.status());
  return c;
}

std::string ModelConfig::weights_name() const {
  return quantization.quantized() ? Fp8WeightsName(quantization.sharing) : std::string(kernels::DTypeName(dtype));
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir) {
  const std::string path = model_dir + "/config.json";
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  SPLICE_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text, path));
  config.name = hub::FolderModelName(model_dir);
  // Older folders of ModelOpt declare their quantization there alone.
  const std::string model_opt_path = model_dir + "/hf_quant_config.json";
  if (!config.quantization.quantized() && std::filesystem::exists(model_opt_path)) {
    SPLICE_ASSIGN_OR_RETURN(const std::string model_opt, ReadFile(model_opt_path));
    SPLICE_ASSIGN_OR_RETURN(config.quantization, ParseModelOptFile(model_opt, model_opt_path));
  }
  const std::string generation_path = model_dir + "/generation_config.json";
  if (std::filesystem::exists(generation_path)) {
    SPLICE_ASSIGN_OR_RETURN(const std::string generation, ReadFile(generation_path));
    const json root = json::parse(generation, nullptr, false);
    if (root.is_discarded() || !root.is_object()) return InvalidArgument("{}: not a JSON object", generation_path);
    if (const auto eos = root.find("eos_token_id"); eos != root.end() && !eos->is_null()) {
      const auto ids = ParseIds(*eos);
      if (!ids) return InvalidArgument("{}: 'eos_token_id' is not an id or a list of ids", generation_path);
      config.eos_ids = *ids;
    }
  }
  for (int32_t id : config.eos_ids) {
    if (id >= config.vocab_size)
      return InvalidArgument("{}: eos_token_id {} is outside the vocabulary of {}", path, id, config.vocab_size);
  }
  return config;
}

bool ModelConfig::is_moe_layer(int32_t layer) const {
  return moe.num_experts > 0 && (layer + 1) % moe.sparse_step == 0 &&
         !std::binary_search(moe.dense_layers.begin(), moe.dense_layers.end(), layer);
}

kernels::HeadVisibility ModelConfig::visibility(int32_t layer) const {
  const int32_t window = sliding_windows.empty() ? 0 : sliding_windows[layer];
  if (window == 0) return {};
  return {.rule = kernels::VisibilityRule::kBand, .num_sinks = 0, .window = window};
}

namespace {

// The (fractional) pair that makes `rotations` turns over the original context.
double YarnPair(const RopeConfig& rope, double rotations, int32_t head_dim) {
  return head_dim * std::log(static_cast<double>(rope.original_max_positions) / (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(rope.theta));
}

// Share of pair i's frequency that is stretched: 0 below the pair of beta_fast, 1 above that of beta_slow.
double YarnBlend(const RopeConfig& rope, int32_t head_dim, int32_t i) {
  double low = YarnPair(rope, rope.beta_fast, head_dim), high = YarnPair(rope, rope.beta_slow, head_dim);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high += 0.001;
  return std::clamp((i - low) / (high - low), 0.0, 1.0);
}

}  // namespace

std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t head_dim) {
  std::vector<float> frequencies(head_dim / 2);
  for (int32_t i = 0; i < head_dim / 2; ++i) {
    double f = 1.0 / std::pow(rope.theta, 2.0 * i / head_dim);
    if (rope.scaling == RopeScaling::kLinear) f /= rope.factor;
    if (rope.scaling == RopeScaling::kYarn) {
      const double stretched = YarnBlend(rope, head_dim, i);
      f = (1.0 - stretched) * f + stretched * f / rope.factor;
    }
    if (rope.scaling == RopeScaling::kLlama3) {
      // Llama 3.1: wavelengths above the low-frequency limit are stretched by `factor`, those below the high-frequency
      // limit stay, and the band between blends linearly.
      const double wavelength = 2.0 * std::numbers::pi / f;
      const double low_wavelength = static_cast<double>(rope.original_max_positions) / rope.low_freq_factor;
      const double high_wavelength = static_cast<double>(rope.original_max_positions) / rope.high_freq_factor;
      if (wavelength > low_wavelength) {
        f /= rope.factor;
      } else if (wavelength >= high_wavelength) {
        const double smooth = (static_cast<double>(rope.original_max_positions) / wavelength - rope.low_freq_factor) /
                              (rope.high_freq_factor - rope.low_freq_factor);
        f = (1.0 - smooth) * f / rope.factor + smooth * f;
      }
    }
    frequencies[i] = static_cast<float>(f);
  }
  return frequencies;
}

}  // namespace spl::engine
