// Reads config.json, generation_config.json and hf_quant_config.json of a Hugging Face folder, checked and typed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "kernels/common/visibility.h"
#include "services/engine/model/weight_quantization.h"

namespace spl::engine {

enum class RopeScaling : uint8_t { kNone, kLinear, kLlama3, kYarn };

struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                 // all except kNone
  double low_freq_factor = 1.0;        // kLlama3
  double high_freq_factor = 4.0;       // kLlama3
  int64_t original_max_positions = 0;  // kLlama3, kYarn
  double beta_fast = 32.0;             // kYarn: pairs with more rotations over the original context are not stretched
  double beta_slow = 1.0;              // kYarn: pairs with fewer are stretched by the whole factor
  bool truncate = true;                // kYarn: the ends of the blend are rounded to whole pairs
  double attention_factor = 1.0;       // kYarn: factor of cosine and sine
};

// Mixture of experts (Qwen3-MoE). num_experts 0: every feed-forward layer is dense.
struct MoeConfig {
  int32_t num_experts = 0;
  int32_t num_experts_per_token = 0;
  int32_t intermediate_size = 0;      // inner width of one expert
  bool renormalize = false;           // scale the weights of the chosen experts to a sum of 1
  int32_t sparse_step = 1;            // layers sparse_step - 1, 2 · sparse_step - 1, … have experts,
  std::vector<int32_t> dense_layers;  // except these
};

struct ModelConfig {
  std::string name;          // last component of the folder
  std::string architecture;  // "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", …
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
  bool attention_bias = false;  // q, k and v have a bias
  bool qk_norm = false;         // RMSNorm of each head's q and k before the rotation (Qwen3)
  RopeConfig rope;
  MoeConfig moe;
  // [num_layers]: in a layer with window w > 0, query i sees key j iff j <= i and i - j < w. Empty, or 0 for a layer:
  // it sees everything.
  std::vector<int32_t> sliding_windows;
  kernels::DType dtype = kernels::DType::kBF16;  // type of the weights that are not quantized; beside int4 not kF16
  WeightQuantization quantization;
  std::vector<int32_t> eos_ids;  // generation ends at any of these

  int32_t q_size() const { return num_qo_heads * head_dim; }
  int32_t kv_size() const { return num_kv_heads * head_dim; }
  bool is_moe_layer(int32_t layer) const;
  // Type of the layers' matrices in the folder, for people and programs: "bf16", "f16", "f32", Fp8WeightsName or
  // Int4WeightsName.
  std::string weights_name() const;
  // Visibility that the model itself gives every head of `layer`. Exact prefill and dense decode use it.
  kernels::HeadVisibility visibility(int32_t layer) const;
};

// InvalidArgument names the file and the field. Unimplemented names an architecture or option that this build does not
// run.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json, const std::string& source_name);

// Rotary frequencies [head_dim / 2] with scaling applied, as Hugging Face computes them (float32 results). YaRN: "YaRN:
// Efficient Context Window Extension of Large Language Models", section 3.2 (NTK-by-parts). As in its published code,
// the blend is linear in the pair's index, between the pairs that make beta_fast and beta_slow rotations.
std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t head_dim);

}  // namespace spl::engine
