#include "services/engine/model/random_weights.h"

#include <xxhash.h>

#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <sstream>

#include "services/base/status.h"

namespace spl::engine {
namespace {

using kernels::DType;

struct Shape {
  const char* name;
  const char* config;
};

// The fields of the published config.json that decide shape and arithmetic.
constexpr Shape kShapes[] = {
    {"llama-3.1-8b", R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
      "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
      "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192},
      "tie_word_embeddings": false, "torch_dtype": "bfloat16", "eos_token_id": [128001, 128008, 128009]})"},
    {"llama-3.3-70b", R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
      "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
      "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192},
      "tie_word_embeddings": false, "torch_dtype": "bfloat16", "eos_token_id": [128001, 128008, 128009]})"},
    {"qwen3-8b", R"({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
      "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
      "tie_word_embeddings": false, "torch_dtype": "bfloat16", "eos_token_id": 151645})"},
    {"qwen3-32b", R"({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 25600,
      "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
      "tie_word_embeddings": false, "torch_dtype": "bfloat16", "eos_token_id": 151645})"},
    {"qwen3-30b-a3b", R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
      "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
      "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
      "decoder_sparse_step": 1, "mlp_only_layers": [],
      "tie_word_embeddings": false, "torch_dtype": "bfloat16", "eos_token_id": 151645})"},
};

absl::StatusOr<ModelConfig> ReadConfigFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || !std::filesystem::is_regular_file(path))
    return InvalidArgument("random weights: '{}' is neither a known shape ({}) nor a config.json that can be read",
                           path, fmt::join(RandomShapeNames(), ", "));
  std::ostringstream text;
  text << in.rdbuf();
  SPLICE_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text.str(), path));
  const std::filesystem::path full = std::filesystem::weakly_canonical(path);
  config.name = (full.filename() == "config.json" ? full.parent_path().filename() : full.stem()).string();
  return config;
}

absl::StatusOr<ModelConfig> ShapeConfig(const std::string& name) {
  for (const Shape& shape : kShapes) {
    if (name != shape.name) continue;
    SPLICE_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(shape.config, name));
    config.name = name;
    return config;
  }
  return ReadConfigFile(name);
}

bool IsNorm(const std::string& name) { return name.ends_with("norm.weight"); }

int64_t Count(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

class RandomSource final : public WeightSource {
 public:
  RandomSource(const RandomModel& model, const kernels::Backend& backend, std::unique_ptr<kernels::Session> session)
      : dtype_(model.config.dtype), seed_(model.seed), backend_(backend), session_(std::move(session)) {}

  bool Contains(const std::string&) const override { return false; }  // no optional tensors

  absl::StatusOr<MatrixType> TypeOf(const std::string&, const std::vector<int64_t>&) const override {
    return MatrixType{.dtype = dtype_};
  }

  absl::Status Write(const MatrixPart& part, void* device, MatrixScales&) override {
    kernels::FillRandomArgs args{.out = device,
                                 .dtype = dtype_,
                                 .count = part.count(),
                                 .stream = RandomStream(seed_, part.name),
                                 .first_index = part.rows.begin * part.width + part.columns.begin};
    if (part.columns.size() != part.width) {
      args.row_length = part.columns.size();
      args.row_stride = part.width;
    }
    SPLICE_RETURN_IF_ERROR(backend_.FillRandom(session_->context(), args));
    return session_->Synchronize();
  }

  absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) override {
    std::vector<float> values(static_cast<size_t>(Count(shape)), 1.0f);
    if (IsNorm(name)) return values;
    const kernels::FillRandomArgs defaults;
    const uint64_t stream = RandomStream(seed_, name);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = std::ldexp(static_cast<float>(kernels::RandomStep(stream, i)), defaults.step_exponent);
    return values;
  }

 private:
  const DType dtype_;
  const uint64_t seed_;
  const kernels::Backend& backend_;
  const std::unique_ptr<kernels::Session> session_;
};

}  // namespace

std::vector<std::string> RandomShapeNames() {
  std::vector<std::string> names;
  for (const Shape& shape : kShapes) names.emplace_back(shape.name);
  return names;
}

absl::StatusOr<RandomModel> ParseRandomModel(const std::string& spec) {
  RandomModel model;
  std::string shape = spec;
  // A path may contain a colon itself, so that only digits up to the end are a seed.
  if (const size_t colon = spec.rfind(':'); colon != std::string::npos) {
    const char* end = spec.data() + spec.size();
    const auto [stop, error] = std::from_chars(spec.data() + colon + 1, end, model.seed);
    if (error == std::errc() && stop == end)
      shape = spec.substr(0, colon);
    else if (!std::filesystem::exists(spec))
      return InvalidArgument("random weights: '{}' is not SHAPE:SEED with a seed in [0, 2^64)", spec);
  }
  SPLICE_ASSIGN_OR_RETURN(model.config, ShapeConfig(shape));
  return model;
}

uint64_t RandomStream(uint64_t seed, std::string_view tensor_name) {
  return XXH3_64bits_withSeed(tensor_name.data(), tensor_name.size(), seed);
}

absl::StatusOr<std::unique_ptr<WeightSource>> MakeRandomSource(const RandomModel& model,
                                                               const kernels::Backend& backend) {
  SPLICE_ASSIGN_OR_RETURN(
      auto session,
      backend.NewSession(
          {.max_rows = 1, .max_sequences = 1, .num_layers = 1, .num_kv_heads = 1, .max_pages_per_stream = 1}));
  return std::make_unique<RandomSource>(model, backend, std::move(session));
}

}  // namespace spl::engine
