// config.json and generation_config.json of a Hugging Face folder, checked and typed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "kernels/common/visibility.h"

namespace spl::engine {

enum class RopeScaling : uint8_t { kNone, kLinear, kLlama3, kYarn };

struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                 // all but kNone
  double low_freq_factor = 1.0;        // kLlama3
  double high_freq_factor = 4.0;       // kLlama3
  int64_t original_max_positions = 0;  // kLlama3, kYarn
  double beta_fast = 32.0;             // kYarn: rotations over the original context above which a pair stays
  double beta_slow = 1.0;              // kYarn: ... below which it is stretched by the whole factor
  bool truncate = true;                // kYarn: the ends of the blend lie on whole pairs
  double attention_factor = 1.0;       // kYarn: what cosine and sine are multiplied by
};

// Mixture of experts (Qwen3-MoE). num_experts 0: every feed-forward layer is dense.
struct MoeConfig {
  int32_t num_experts = 0;
  int32_t num_experts_per_token = 0;
  int32_t intermediate_size = 0;      // of one expert
  bool renormalize = false;           // the chosen experts' weights are scaled to sum 1
  int32_t sparse_step = 1;            // layers sparse_step - 1, 2 · sparse_step - 1, ... have experts
  std::vector<int32_t> dense_layers;  // but these have none
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
  bool attention_bias = false;  // of q, k and v
  bool qk_norm = false;         // RMSNorm of each head's q and k before the rotation (Qwen3)
  RopeConfig rope;
  MoeConfig moe;
  // [num_layers], or empty: every layer sees all. A layer with window w > 0 lets query i see key j iff j <= i and
  // i - j < w; 0 means that it sees all.
  std::vector<int32_t> sliding_windows;
  kernels::DType dtype = kernels::DType::kBF16;  // of the weights
  std::vector<int32_t> eos_ids;                  // generation ends on any of these

  int32_t q_size() const { return num_qo_heads * head_dim; }
  int32_t kv_size() const { return num_kv_heads * head_dim; }
  bool is_moe_layer(int32_t layer) const;
  // What every head of `layer` may see in the model itself: what exact prefill and dense decode use.
  kernels::HeadVisibility visibility(int32_t layer) const;
};

// InvalidArgument names the file and the field; Unimplemented an architecture or option this build does not run.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& config_json, const std::string& source_name);

// Rotary frequencies [head_dim / 2], scaling applied, as Hugging Face computes them (float32 results). YaRN: "YaRN:
// Efficient Context Window Extension of Large Language Models", section 3.2 (NTK-by-parts), with the blend linear in
// the pair's index between the pairs that make beta_fast and beta_slow rotations, as its published code has it.
std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t head_dim);

}  // namespace spl::engine
