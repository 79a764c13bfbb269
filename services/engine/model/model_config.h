// config.json and generation_config.json of a Hugging Face folder, checked and typed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"

namespace spl::engine {

enum class RopeScaling : uint8_t { kNone, kLinear, kLlama3 };

struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                 // kLinear, kLlama3
  double low_freq_factor = 1.0;        // kLlama3
  double high_freq_factor = 4.0;       // kLlama3
  int64_t original_max_positions = 0;  // kLlama3
};

struct ModelConfig {
  std::string name;          // last component of the folder
  std::string architecture;  // "LlamaForCausalLM"
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_layers = 0;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t vocab_size = 0;
  int32_t max_positions = 0;
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  bool attention_bias = false;
  RopeConfig rope;
  kernels::DType dtype = kernels::DType::kBF16;  // of the weights
  std::vector<int32_t> eos_ids;                  // generation ends on any of these

  int32_t q_size() const { return num_qo_heads * head_dim; }
  int32_t kv_size() const { return num_kv_heads * head_dim; }
};

// InvalidArgument names the file and the field; Unimplemented an architecture or option this build does not run.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json, const std::string& source_name);

// Rotary frequencies [head_dim / 2], scaling applied, as Hugging Face computes them (float32 results).
std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t head_dim);

}  // namespace spl::engine
