// Writes small models in the published FP8 layouts, and their dequantized twins in f32. Codes and scales are drawn, so
// that nothing of the product's quantization is used.
#pragma once

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"
#include "services/engine/model/safetensors.h"

namespace spl::test {

enum class Fp8Format {
  kTensor,            // compressed-tensors, dynamic activations, a scale per tensor
  kChannel,           // compressed-tensors, static activations, a scale per output channel in bf16
  kCompressedBlocks,  // compressed-tensors, strategy "block"
  kModelOpt,          // hf_quant_config.json, quant_algo FP8
  kBlocks,            // DeepSeek and Qwen: weight_scale_inv
};

inline const char* Fp8FormatName(Fp8Format format) {
  constexpr const char* kNames[] = {"tensor", "channel", "compressed_blocks", "modelopt", "blocks"};
  return kNames[static_cast<int>(format)];
}
inline bool HasBlocks(Fp8Format format) {
  return format == Fp8Format::kCompressedBlocks || format == Fp8Format::kBlocks;
}

// Value of a code, from the definition of e4m3.
inline double Fp8Value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code < 128 ? value : -value;
}

struct Fp8Tensor {
  engine::TensorType type = engine::TensorType::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};
using Fp8Tensors = std::map<std::string, Fp8Tensor>;

inline Fp8Tensor FloatTensor(std::vector<int64_t> shape, const std::vector<float>& values, bool as_bf16 = false) {
  Fp8Tensor tensor{as_bf16 ? engine::TensorType::kBF16 : engine::TensorType::kF32, std::move(shape), {}};
  for (const float value : values) {
    const kernels::bf16 narrow = kernels::ToBf16(value);
    const auto* from =
        as_bf16 ? reinterpret_cast<const std::byte*>(&narrow) : reinterpret_cast<const std::byte*>(&value);
    tensor.bytes.insert(tensor.bytes.end(), from, from + (as_bf16 ? 2 : 4));
  }
  return tensor;
}

inline void WriteTensors(const std::string& dir, const Fp8Tensors& tensors) {
  std::vector<engine::NamedTensor> named;
  for (const auto& [name, tensor] : tensors) named.push_back({name, tensor.type, tensor.shape, tensor.bytes.data()});
  if (!engine::WriteSafetensors(dir + "/model.safetensors", named).ok()) std::abort();
}

// A model of two layers, one of experts and one dense, whose inner widths are no multiples of a block.
class Fp8Folders {
 public:
  // `power_of_two`: scales are powers of two, so that scale times code is exact in bf16.
  Fp8Folders(std::string dir, Fp8Format format, uint32_t seed, bool power_of_two = false)
      : dir_(std::move(dir)), format_(format), random_(seed), power_of_two_(power_of_two) {
    std::filesystem::create_directories(dir_ + "/fp8");
    std::filesystem::create_directories(dir_ + "/plain");
    MakeTensors();
    MakeConfig();
    Write();
  }

  std::string fp8() const { return dir_ + "/fp8"; }
  std::string plain() const { return dir_ + "/plain"; }  // f32; bf16 with power_of_two
  Fp8Tensors& tensors() { return fp8_; }
  nlohmann::json& config() { return config_; }
  // Writes both again, after a test has changed the FP8 one.
  void Write() {
    WriteTensors(fp8(), fp8_);
    WriteTensors(plain(), plain_);
    std::ofstream(fp8() + "/config.json") << config_.dump();
    nlohmann::json plain_config = config_;
    plain_config.erase("quantization_config");
    plain_config["torch_dtype"] = power_of_two_ ? "bfloat16" : "float32";
    std::ofstream(plain() + "/config.json") << plain_config.dump();
    if (format_ == Fp8Format::kModelOpt) {
      std::ofstream(fp8() + "/hf_quant_config.json")
          << R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null,)"
          << R"( "exclude_modules": ["lm_head"]}})";
    }
  }

  static constexpr int64_t kHidden = 256, kWidth = 320, kExpertWidth = 160, kVocab = 300, kQ = 256, kKv = 128;

 private:
  float Normal() { return std::normal_distribution<float>()(random_); }

  void Plain(const std::string& name, std::vector<int64_t> shape, float mean, float deviation) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = kernels::ToFloat(kernels::ToBf16(mean + deviation * Normal()));
    fp8_[name] = FloatTensor(shape, values, /*as_bf16=*/true);
    plain_[name] = FloatTensor(shape, values, power_of_two_);
  }

  float Scale() { return power_of_two_ ? 0x1p-11f : 0.0004f * (1.0f + std::fabs(Normal())); }

  // The scales as the format stores them, and the one of each element.
  std::vector<float> Scales(int64_t rows, int64_t columns, const std::string& name) {
    const int64_t block_rows = (rows + 127) / 128, block_columns = (columns + 127) / 128;
    const std::string suffix = format_ == Fp8Format::kBlocks ? "_scale_inv" : "_scale";
    std::vector<float> scales;
    if (HasBlocks(format_)) {
      for (int64_t i = 0; i < block_rows * block_columns; ++i) scales.push_back(Scale());
      fp8_[name + suffix] = FloatTensor({block_rows, block_columns}, scales);
    } else if (format_ == Fp8Format::kChannel) {
      for (int64_t i = 0; i < rows; ++i) scales.push_back(kernels::ToFloat(kernels::ToBf16(Scale())));
      fp8_[name + suffix] = FloatTensor({rows, 1}, scales, /*as_bf16=*/true);
    } else {
      scales.push_back(Scale());
      fp8_[name + suffix] =
          FloatTensor(format_ == Fp8Format::kModelOpt ? std::vector<int64_t>{} : std::vector<int64_t>{1}, scales);
    }
    std::vector<float> of_element(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j)
        of_element[i * columns + j] =
            HasBlocks(format_) ? scales[i / 128 * block_columns + j / 128] : scales[scales.size() == 1 ? 0 : i];
    }
    return of_element;
  }

  void Quantized(const std::string& name, int64_t rows, int64_t columns) {
    Fp8Tensor codes{engine::TensorType::kE4M3, {rows, columns}, {}};
    const std::vector<float> scales = Scales(rows, columns, name);
    std::vector<float> values;
    for (int64_t i = 0; i < rows * columns; ++i) {
      auto code = static_cast<uint8_t>(random_() % 0x78);  // up to 128: few values are large
      if (random_() % 2 == 0) code |= 0x80;
      codes.bytes.push_back(std::byte{code});
      values.push_back(static_cast<float>(Fp8Value(code) * scales[i]));
    }
    fp8_[name] = std::move(codes);
    plain_[name] = FloatTensor({rows, columns}, values, power_of_two_);
    if (format_ == Fp8Format::kModelOpt || format_ == Fp8Format::kChannel)
      fp8_[name.substr(0, name.size() - 6) + "input_scale"] = FloatTensor({1}, {0.02f});
  }

  void FeedForward(const std::string& prefix, int64_t width) {
    Quantized(prefix + "gate_proj.weight", width, kHidden);
    Quantized(prefix + "up_proj.weight", width, kHidden);
    Quantized(prefix + "down_proj.weight", kHidden, width);
  }

  void MakeTensors() {
    Plain("model.embed_tokens.weight", {kVocab, kHidden}, 0, 1);
    Plain("model.norm.weight", {kHidden}, 1, 0.1f);
    Plain("lm_head.weight", {kVocab, kHidden}, 0, 0.05f);
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".", attention = prefix + "self_attn.";
      Plain(prefix + "input_layernorm.weight", {kHidden}, 1, 0.1f);
      Plain(prefix + "post_attention_layernorm.weight", {kHidden}, 1, 0.1f);
      Plain(attention + "q_norm.weight", {64}, 1, 0.1f);
      Plain(attention + "k_norm.weight", {64}, 1, 0.1f);
      Quantized(attention + "q_proj.weight", kQ, kHidden);
      Quantized(attention + "k_proj.weight", kKv, kHidden);
      Quantized(attention + "v_proj.weight", kKv, kHidden);
      Quantized(attention + "o_proj.weight", kHidden, kQ);
      if (layer == 0) {
        FeedForward(prefix + "mlp.", kWidth);
        continue;
      }
      Plain(prefix + "mlp.gate.weight", {4, kHidden}, 0, 0.2f);
      for (int e = 0; e < 4; ++e) FeedForward(prefix + "mlp.experts." + std::to_string(e) + ".", kExpertWidth);
    }
  }

  void MakeConfig() {
    config_ = nlohmann::json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256,
      "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 512, "torch_dtype": "bfloat16", "num_experts": 4,
      "num_experts_per_tok": 2, "moe_intermediate_size": 160, "norm_topk_prob": true, "mlp_only_layers": [0],
      "tie_word_embeddings": false})");
    nlohmann::json weights = {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"dynamic", false}};
    nlohmann::json activations = {{"num_bits", 8}, {"type", "float"}, {"dynamic", format_ != Fp8Format::kChannel}};
    if (format_ == Fp8Format::kModelOpt) return;  // hf_quant_config.json says it
    if (format_ == Fp8Format::kBlocks) {
      config_["quantization_config"] = {{"quant_method", "fp8"},
                                        {"fmt", "e4m3"},
                                        {"activation_scheme", "dynamic"},
                                        {"weight_block_size", {128, 128}},
                                        {"modules_to_not_convert", {"lm_head", "model.layers.1.mlp.gate"}}};
      return;
    }
    weights["strategy"] = format_ == Fp8Format::kTensor ? "tensor" : HasBlocks(format_) ? "block" : "channel";
    if (HasBlocks(format_)) weights["block_structure"] = {128, 128};
    config_["quantization_config"] = {
        {"quant_method", "compressed-tensors"},
        {"format", "float-quantized"},
        {"ignore", {"lm_head", "re:.*mlp.gate$"}},
        {"config_groups",
         {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", activations}}}}}};
  }

  const std::string dir_;
  const Fp8Format format_;
  std::mt19937 random_;
  const bool power_of_two_;
  Fp8Tensors fp8_, plain_;
  nlohmann::json config_;
};

}  // namespace spl::test
