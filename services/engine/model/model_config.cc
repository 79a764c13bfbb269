#include "services/engine/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "services/base/field_error.h"
#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"
#include "services/base/read_file.h"
#include "services/base/status.h"
#include "services/hub/model_name.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using Fields = JsonObjectReader<json>;

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

void ParseYarn(Fields& fields, int32_t max_positions, RopeConfig& rope) {
  rope.scaling = RopeScaling::kYarn;
  rope.original_max_positions = fields.IntOr("original_max_position_embeddings", 1, INT32_MAX, max_positions);
  if (!fields.Has("factor")) fields.Fail("factor", "is missing");
  rope.factor = fields.PositiveOr("factor", 1.0);
  if (rope.factor < 1.0) fields.Fail("factor", fmt::format("must be at least 1, got {}", rope.factor));
  rope.beta_fast = fields.PositiveOr("beta_fast", 32.0);
  rope.beta_slow = fields.PositiveOr("beta_slow", 1.0);
  rope.truncate = fields.BoolOr("truncate", true);
  if (rope.beta_fast <= rope.beta_slow) fields.Fail("beta_fast", "must be above beta_slow");
  // Some models scale attention differently at both ends of the product; without either the paper's factor holds.
  double scale = YarnScale(rope.factor, 1.0);
  if (fields.Has("mscale") && fields.Has("mscale_all_dim"))
    scale = YarnScale(rope.factor, fields.PositiveOr("mscale", 1.0)) /
            YarnScale(rope.factor, fields.PositiveOr("mscale_all_dim", 1.0));
  rope.attention_factor = fields.PositiveOr("attention_factor", scale);
}

absl::StatusOr<RopeConfig> ParseRope(Fields& config, int32_t max_positions) {
  RopeConfig rope;
  rope.theta = config.PositiveOr("rope_theta", 10000.0);
  const json* scaling = config.Object("rope_scaling");
  // Newer folders keep theta and scaling together under "rope_parameters".
  if (const json* parameters = config.Object("rope_parameters")) {
    for (const auto& [name, value] : parameters->items()) {
      if (value.is_object())
        return Errorf(absl::StatusCode::kUnimplemented,
                      "{}rope_parameters: has an entry for '{}': angles that differ by layer are not supported",
                      config.path(), name);
    }
    Fields fields(*parameters, config.path() + "rope_parameters.");
    rope.theta = fields.PositiveOr("rope_theta", rope.theta);
    SPLICE_RETURN_IF_ERROR(fields.status());
    scaling = parameters;
  }
  SPLICE_RETURN_IF_ERROR(config.status());
  if (scaling == nullptr) return rope;
  Fields fields(*scaling, config.path() + (config.Has("rope_parameters") ? "rope_parameters." : "rope_scaling."));
  if (fields.PositiveOr("partial_rotary_factor", 1.0) != 1.0)
    return Errorf(absl::StatusCode::kUnimplemented, "{}partial_rotary_factor: other than 1 is not supported",
                  fields.path());
  const std::string type = fields.StringOr("rope_type", fields.StringOr("type", "default"));
  if (type == "default") return rope;
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = fields.PositiveOr("factor", 1.0);
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = fields.PositiveOr("factor", 8.0);
    rope.low_freq_factor = fields.PositiveOr("low_freq_factor", 1.0);
    rope.high_freq_factor = fields.PositiveOr("high_freq_factor", 4.0);
    rope.original_max_positions = fields.RequireInt("original_max_position_embeddings", 1, INT32_MAX);
    if (rope.high_freq_factor <= rope.low_freq_factor) fields.Fail("high_freq_factor", "must be above low_freq_factor");
  } else if (type == "yarn") {
    ParseYarn(fields, max_positions, rope);
  } else {
    return Errorf(absl::StatusCode::kUnimplemented, "{}rope_type: must be default, linear, llama3 or yarn, got '{}'",
                  fields.path(), type);
  }
  SPLICE_RETURN_IF_ERROR(fields.status());
  return rope;
}

absl::StatusOr<kernels::DType> ParseDType(Fields& config) {
  const std::string name = config.StringOr("torch_dtype", config.StringOr("dtype", "float32"));
  if (name == "float32") return kernels::DType::kF32;
  if (name == "bfloat16") return kernels::DType::kBF16;
  if (name == "float16") return kernels::DType::kF16;
  return FieldError(config.path() + "torch_dtype", fmt::format("must be float32, bfloat16 or float16, got '{}'", name));
}

absl::StatusOr<std::string> ParseArchitecture(const json& root, const std::string& source) {
  const auto it = root.find("architectures");
  if (it == root.end() || !it->is_array() || it->size() != 1 || !(*it)[0].is_string())
    return FieldError(source + ": architectures", "must be a list of one name");
  const std::string name = (*it)[0].get<std::string>();
  static constexpr std::string_view kKnown[] = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                                                "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"};
  if (std::find(std::begin(kKnown), std::end(kKnown), name) == std::end(kKnown))
    return Errorf(absl::StatusCode::kUnimplemented, "{}: architectures: must be one of {}, got '{}'", source,
                  fmt::join(kKnown, ", "), name);
  return name;
}

// Layers that use `window`: those of "layer_types", else those of the family's rule.
absl::Status PlaceWindows(Fields& f, ModelConfig& c, int32_t window, int32_t first_layer) {
  std::vector<int32_t> windows(c.num_layers, 0);
  if (const json* types = f.List("layer_types")) {
    if (types->size() != windows.size())
      return FieldError(f.path() + "layer_types",
                        fmt::format("must have {} entries (num_hidden_layers), got {}", c.num_layers, types->size()));
    for (size_t i = 0; i < windows.size(); ++i) {
      const std::string type = (*types)[i].is_string() ? (*types)[i].get<std::string>() : (*types)[i].dump();
      if (type != "full_attention" && type != "sliding_attention")
        return Errorf(absl::StatusCode::kUnimplemented,
                      "{}layer_types[{}]: must be full_attention or sliding_attention, got '{}'", f.path(), i, type);
      if (type == "full_attention") continue;
      if (window == 0)
        return FieldError(fmt::format("{}layer_types[{}]", f.path(), i),
                          "must be full_attention, got sliding_attention: no sliding_window is in use");
      windows[i] = window;
    }
  } else if (window > 0) {
    std::fill(windows.begin() + std::clamp(first_layer, 0, c.num_layers), windows.end(), window);
  }
  SPLICE_RETURN_IF_ERROR(f.status());
  if (std::any_of(windows.begin(), windows.end(), [](int32_t w) { return w > 0; })) c.sliding_windows = windows;
  return absl::OkStatus();
}

absl::Status ParseWindows(Fields& f, const json& root, ModelConfig& c) {
  if (c.architecture == "LlamaForCausalLM") return absl::OkStatus();
  if (c.architecture == "MistralForCausalLM") {
    // A folder without the field means the family's default, 4096; null means none.
    const int32_t window = root.contains("sliding_window") ? f.IntOr("sliding_window", 1, INT32_MAX, 0) : 4096;
    return PlaceWindows(f, c, window, 0);
  }
  if (!f.BoolOr("use_sliding_window", false)) return PlaceWindows(f, c, 0, 0);
  if (c.architecture == "Qwen3MoeForCausalLM" && !f.Has("layer_types"))
    return Errorf(absl::StatusCode::kUnimplemented,
                  "{}use_sliding_window: is not supported for a Qwen3-MoE model without layer_types: versions of the "
                  "reference implementation differ on the layers",
                  f.path());
  const int32_t window = f.IntOr("sliding_window", 1, INT32_MAX, root.contains("sliding_window") ? 0 : 4096);
  return PlaceWindows(f, c, window, f.IntOr("max_window_layers", 0, 1 << 20, 28));
}

absl::Status ParseMoe(Fields& f, ModelConfig& c) {
  MoeConfig& moe = c.moe;
  const char* count = f.Has("num_experts") ? "num_experts" : "num_local_experts";
  if (!f.Has(count)) f.Fail("num_experts", "is missing");
  moe.num_experts = f.RequireInt(count, 1, 1024);
  moe.num_experts_per_token = f.RequireInt("num_experts_per_tok", 1, 64);
  moe.intermediate_size = f.RequireInt("moe_intermediate_size", 1, 1 << 24);
  moe.renormalize = f.BoolOr("norm_topk_prob", false);
  moe.sparse_step = f.IntOr("decoder_sparse_step", 1, 1 << 20, 1);
  if (const json* layers = f.List("mlp_only_layers")) {
    const auto ids = ParseIds(*layers);
    if (!ids) return FieldError(f.path() + "mlp_only_layers", "must be a list of layers");
    moe.dense_layers = *ids;
    std::sort(moe.dense_layers.begin(), moe.dense_layers.end());
  }
  if (moe.num_experts_per_token > moe.num_experts)
    f.Fail("num_experts_per_tok",
           fmt::format("must be at most num_experts ({}), got {}", moe.num_experts, moe.num_experts_per_token));
  return f.status();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json, const std::string& source_name) {
  SPLICE_ASSIGN_OR_RETURN(const json root, ParseJsonObject(config_json, source_name));
  ModelConfig c;
  SPLICE_ASSIGN_OR_RETURN(c.architecture, ParseArchitecture(root, source_name));
  Fields f(root, source_name + ": ");
  c.hidden_size = f.RequireInt("hidden_size", 1, 1 << 20);
  c.intermediate_size = f.RequireInt("intermediate_size", 1, 1 << 24);
  c.num_layers = f.RequireInt("num_hidden_layers", 1, 1024);
  c.num_qo_heads = f.RequireInt("num_attention_heads", 1, 1024);
  c.num_kv_heads = f.IntOr("num_key_value_heads", 1, 1024, c.num_qo_heads);
  c.head_dim = f.IntOr("head_dim", 1, 256, c.hidden_size / std::max(c.num_qo_heads, 1));
  c.vocab_size = f.RequireInt("vocab_size", 1, 1 << 24);
  c.max_positions = f.RequireInt("max_position_embeddings", 1, 1 << 24);
  c.rms_norm_eps = static_cast<float>(f.PositiveOr("rms_norm_eps", 1e-6));
  c.tie_word_embeddings = f.BoolOr("tie_word_embeddings", false);
  const bool qwen3 = c.architecture == "Qwen3ForCausalLM" || c.architecture == "Qwen3MoeForCausalLM";
  if (c.architecture == "Qwen2ForCausalLM")
    c.attention_bias = true;  // fixed for the family; its folders have no field for it
  else if (c.architecture != "MistralForCausalLM")
    c.attention_bias = f.BoolOr("attention_bias", false);
  c.qk_norm = qwen3;
  if (f.Has("quantization_config")) {
    SPLICE_ASSIGN_OR_RETURN(c.quantization, ParseWeightQuantization(root["quantization_config"], source_name));
  }
  if (c.num_qo_heads % c.num_kv_heads != 0)
    f.Fail("num_key_value_heads",
           fmt::format("must divide num_attention_heads ({}), got {}", c.num_qo_heads, c.num_kv_heads));
  if (c.head_dim % 8 != 0) f.Fail("head_dim", fmt::format("must be a multiple of 8, got {}", c.head_dim));
  if (f.BoolOr("mlp_bias", false)) f.Fail("mlp_bias", "must be false, got true");
  if (const std::string act = f.StringOr("hidden_act", "silu"); act != "silu")
    f.Fail("hidden_act", fmt::format("must be silu, got '{}'", act));
  SPLICE_RETURN_IF_ERROR(f.status());
  SPLICE_RETURN_IF_ERROR(ParseWindows(f, root, c));
  if (c.architecture == "Qwen3MoeForCausalLM") SPLICE_RETURN_IF_ERROR(ParseMoe(f, c));
  SPLICE_ASSIGN_OR_RETURN(c.rope, ParseRope(f, c.max_positions));
  // A YaRN folder states the context before or after stretching; the model runs up to the longer one.
  if (c.rope.scaling == RopeScaling::kYarn) {
    const double stretched = static_cast<double>(c.rope.original_max_positions) * c.rope.factor;
    if (stretched > (1 << 24))
      f.Fail("rope_scaling",
             fmt::format("must stretch the context to at most {} positions, got {}", 1 << 24, stretched));
    SPLICE_RETURN_IF_ERROR(f.status());
    c.max_positions = std::max(c.max_positions, static_cast<int32_t>(stretched));
  }
  SPLICE_ASSIGN_OR_RETURN(c.dtype, ParseDType(f));
  if (c.quantization.is_int4() && c.dtype == kernels::DType::kF16) c.dtype = kernels::DType::kBF16;
  if (const auto eos = root.find("eos_token_id"); eos != root.end() && !eos->is_null()) {
    const auto ids = ParseIds(*eos);
    if (!ids) return FieldError(source_name + ": eos_token_id", "must be an id or a list of ids");
    c.eos_ids = *ids;
  }
  SPLICE_RETURN_IF_ERROR(f.status());
  return c;
}

std::string ModelConfig::weights_name() const {
  if (quantization.is_int4()) return Int4WeightsName(quantization.group);
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
    SPLICE_ASSIGN_OR_RETURN(const json root, ParseJsonObject(generation, generation_path));
    if (const auto eos = root.find("eos_token_id"); eos != root.end() && !eos->is_null()) {
      const auto ids = ParseIds(*eos);
      if (!ids) return FieldError(generation_path + ": eos_token_id", "must be an id or a list of ids");
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
