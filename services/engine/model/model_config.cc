#include "services/engine/model/model_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <sstream>

#include "services/base/status.h"

namespace spl::engine {
namespace {

using nlohmann::json;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// Typed access to one JSON object; the first error sticks, so that callers read every field and check once.
class Fields {
 public:
  Fields(const json& object, std::string source) : object_(object), source_(std::move(source)) {}

  int32_t Int(const char* field, int64_t low, int64_t high, std::optional<int64_t> fallback = std::nullopt) {
    const auto it = object_.find(field);
    if (it == object_.end() || it->is_null()) {
      if (!fallback) Fail(field, "is missing");
      return static_cast<int32_t>(fallback.value_or(low));
    }
    if (!it->is_number_integer()) return Fail(field, "is not an integer"), static_cast<int32_t>(low);
    const int64_t value = it->is_number_unsigned() && it->get<uint64_t>() > INT64_MAX ? INT64_MAX : it->get<int64_t>();
    if (value < low || value > high)
      return Fail(field, fmt::format("is {}, not in [{}, {}]", value, low, high)), static_cast<int32_t>(low);
    return static_cast<int32_t>(value);
  }
  double Double(const char* field, double fallback) {
    const auto it = object_.find(field);
    if (it == object_.end() || it->is_null()) return fallback;
    if (!it->is_number()) return Fail(field, "is not a number"), fallback;
    const double value = it->get<double>();
    if (!std::isfinite(value) || value <= 0) return Fail(field, "is not a positive number"), fallback;
    return value;
  }
  bool Bool(const char* field, bool fallback) {
    const auto it = object_.find(field);
    if (it == object_.end() || it->is_null()) return fallback;
    if (!it->is_boolean()) return Fail(field, "is not true or false"), fallback;
    return it->get<bool>();
  }
  std::string String(const char* field, const std::string& fallback) {
    const auto it = object_.find(field);
    if (it == object_.end() || it->is_null()) return fallback;
    if (!it->is_string()) return Fail(field, "is not a string"), fallback;
    return it->get<std::string>();
  }
  const json* Object(const char* field) {
    const auto it = object_.find(field);
    if (it == object_.end() || it->is_null()) return nullptr;
    if (!it->is_object()) return Fail(field, "is not an object"), nullptr;
    return &*it;
  }
  void Fail(const char* field, const std::string& why) {
    if (status_.ok()) status_ = InvalidArgument("{}: '{}' {}", source_, field, why);
  }
  const absl::Status& status() const { return status_; }
  const std::string& source() const { return source_; }

 private:
  const json& object_;
  std::string source_;
  absl::Status status_;
};

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

absl::StatusOr<RopeConfig> ParseRope(Fields& config) {
  RopeConfig rope;
  rope.theta = config.Double("rope_theta", 10000.0);
  const json* scaling = config.Object("rope_scaling");
  // Newer folders keep theta and scaling together under "rope_parameters".
  if (const json* parameters = config.Object("rope_parameters")) {
    Fields fields(*parameters, config.source() + " rope_parameters");
    rope.theta = fields.Double("rope_theta", rope.theta);
    SPLICE_RETURN_IF_ERROR(fields.status());
    scaling = parameters;
  }
  if (scaling == nullptr) return rope;
  Fields fields(*scaling, config.source() + " rope_scaling");
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
  } else {
    return Errorf(absl::StatusCode::kUnimplemented, "{}: rope_type '{}' is not supported (default, linear, llama3)",
                  config.source(), type);
  }
  SPLICE_RETURN_IF_ERROR(fields.status());
  return rope;
}

absl::StatusOr<kernels::DType> ParseDType(Fields& config) {
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
  if (name != "LlamaForCausalLM")
    return Errorf(absl::StatusCode::kUnimplemented, "{}: architecture '{}' is not supported (LlamaForCausalLM)", source,
                  name);
  return name;
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json, const std::string& source_name) {
  const json root = json::parse(config_json, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object()) return InvalidArgument("{}: not a JSON object", source_name);
  ModelConfig c;
  SPLICE_ASSIGN_OR_RETURN(c.architecture, ParseArchitecture(root, source_name));
  Fields f(root, source_name);
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
  c.attention_bias = f.Bool("attention_bias", false);
  if (c.num_qo_heads % c.num_kv_heads != 0) f.Fail("num_key_value_heads", "does not divide num_attention_heads");
  if (c.head_dim % 8 != 0) f.Fail("head_dim", "is not a multiple of 8");
  if (f.Bool("mlp_bias", false)) f.Fail("mlp_bias", "true is not supported");
  if (const std::string act = f.String("hidden_act", "silu"); act != "silu")
    f.Fail("hidden_act", "'" + act + "' is not supported (silu)");
  SPLICE_RETURN_IF_ERROR(f.status());
  SPLICE_ASSIGN_OR_RETURN(c.rope, ParseRope(f));
  SPLICE_ASSIGN_OR_RETURN(c.dtype, ParseDType(f));
  if (const auto eos = root.find("eos_token_id"); eos != root.end() && !eos->is_null()) {
    const auto ids = ParseIds(*eos);
    if (!ids) return InvalidArgument("{}: 'eos_token_id' is not an id or a list of ids", source_name);
    c.eos_ids = *ids;
  }
  SPLICE_RETURN_IF_ERROR(f.status());
  return c;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir) {
  const std::string path = model_dir + "/config.json";
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  SPLICE_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text, path));
  config.name = std::filesystem::weakly_canonical(model_dir).filename().string();
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

std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t head_dim) {
  std::vector<float> frequencies(head_dim / 2);
  for (int32_t i = 0; i < head_dim / 2; ++i) {
    double f = 1.0 / std::pow(rope.theta, 2.0 * i / head_dim);
    if (rope.scaling == RopeScaling::kLinear) f /= rope.factor;
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
