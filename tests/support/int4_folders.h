// Writes small models in the published int4 layouts, and their dequantized twins in f32. Codes, scales, zero points and
// groups are drawn, so that nothing of the product's quantization is used; words are packed here by the definitions of
// the formats.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/fp8_folders.h"

namespace spl::test {

enum class Int4Format {
  kPacked,          // compressed-tensors, symmetric, groups of 128, scales in bf16
  kPackedChannel,   // a scale per output channel
  kPackedZeros,     // zero points, groups of 32
  kPackedOrdered,   // zero points and weight_g_idx, groups of 64
  kGptq,            // sym, groups of 128, no act-order
  kGptqChannel,     // group_size -1
  kGptqOrdered,     // desc_act, zero points less one, groups of 32
  kGptqV2,          // zero points as they are, groups of 64
  kAwq,             // groups of 128
  kAwqSmallGroups,  // groups of 32
};

inline constexpr Int4Format kInt4Formats[] = {
    Int4Format::kPacked, Int4Format::kPackedChannel, Int4Format::kPackedZeros, Int4Format::kPackedOrdered,
    Int4Format::kGptq,   Int4Format::kGptqChannel,   Int4Format::kGptqOrdered, Int4Format::kGptqV2,
    Int4Format::kAwq,    Int4Format::kAwqSmallGroups};

inline const char* Int4FormatName(Int4Format format) {
  constexpr const char* kNames[] = {"packed", "packed_channel",  "packed_zeros", "packed_ordered",
                                    "gptq",   "gptq_channel",    "gptq_ordered", "gptq_v2",
                                    "awq",    "awq_small_groups"};
  return kNames[static_cast<int>(format)];
}
inline bool IsPacked(Int4Format format) { return format <= Int4Format::kPackedOrdered; }
inline bool IsAwq(Int4Format format) { return format >= Int4Format::kAwq; }
inline bool IsOrdered(Int4Format format) {
  return format == Int4Format::kPackedOrdered || format == Int4Format::kGptqOrdered;
}
inline bool HasZeros(Int4Format format) {
  return format == Int4Format::kPackedZeros || format >= Int4Format::kGptqOrdered ||
         format == Int4Format::kPackedOrdered;
}
inline int64_t GroupOf(Int4Format format) {  // 0: a row
  constexpr int64_t kGroups[] = {128, 0, 32, 64, 128, 0, 32, 64, 128, 32};
  return kGroups[static_cast<int>(format)];
}

// f16 bits of a value that is exact in bf16 and below 65,504.
inline uint16_t HalfBits(float value) {
  const float magnitude = std::fabs(value);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  const int exponent = std::ilogb(magnitude);
  const auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent))) - 1024;
  return static_cast<uint16_t>(sign | ((exponent + 15) << 10 | mantissa));
}
inline float HalfValue(uint16_t bits) { return kernels::HalfToFloat(bits); }

inline Fp8Tensor HalfTensor(std::vector<int64_t> shape, const std::vector<float>& values) {
  Fp8Tensor tensor{engine::TensorType::kF16, std::move(shape), {}};
  for (const float value : values) {
    const uint16_t bits = HalfBits(value);
    const auto* from = reinterpret_cast<const std::byte*>(&bits);
    tensor.bytes.insert(tensor.bytes.end(), from, from + 2);
  }
  return tensor;
}
template <typename T>  // uint32_t, int32_t: I32; int64_t: I64
Fp8Tensor IntTensor(std::vector<int64_t> shape, const std::vector<T>& values) {
  Fp8Tensor tensor{sizeof(T) == 8 ? engine::TensorType::kI64 : engine::TensorType::kI32, std::move(shape), {}};
  const auto* from = reinterpret_cast<const std::byte*>(values.data());
  tensor.bytes.assign(from, from + values.size() * sizeof(T));
  return tensor;
}

// A model of two layers, one dense and one of experts (two dense ones with act-order).
class Int4Folders {
 public:
  Int4Folders(std::string dir, Int4Format format, uint32_t seed)
      : dir_(std::move(dir)), format_(format), random_(seed) {
    std::filesystem::create_directories(int4());
    std::filesystem::create_directories(plain());
    MakeTensors();
    MakeConfig();
    Write();
  }

  std::string int4() const { return dir_ + "/int4"; }
  std::string plain() const { return dir_ + "/plain"; }  // f32
  Fp8Tensors& tensors() { return int4_; }
  nlohmann::json& config() { return config_; }
  // Writes both again, after a test has changed the int4 one.
  void Write() {
    WriteTensors(int4(), int4_);
    WriteTensors(plain(), plain_);
    std::ofstream(int4() + "/config.json") << config_.dump();
    nlohmann::json plain_config = config_;
    plain_config.erase("quantization_config");
    plain_config["torch_dtype"] = "float32";
    std::ofstream(plain() + "/config.json") << plain_config.dump();
  }
  // Makes the matrix `name` of both folders anew, in int4.
  void Quantized(const std::string& name, int64_t rows, int64_t columns) {
    const int64_t group = GroupOf(format_) == 0 ? columns : GroupOf(format_), groups = columns / group;
    std::vector<int32_t> group_of(static_cast<size_t>(columns));
    for (int64_t k = 0; k < columns; ++k) group_of[k] = static_cast<int32_t>(k / group);
    // All matrices that read the same x have one order, as act-order makes them.
    if (IsOrdered(format_)) {
      std::mt19937 order(static_cast<uint32_t>(columns));
      std::shuffle(group_of.begin(), group_of.end(), order);
    }
    std::vector<int> codes(static_cast<size_t>(rows * columns)), zeros(static_cast<size_t>(rows * groups), 8);
    std::vector<float> scales, values;
    for (int& code : codes) code = static_cast<int>(random_() % 16);
    for (int& zero : zeros) zero = HasZeros(format_) ? static_cast<int>(random_() % 16) : 8;
    for (int64_t i = 0; i < rows * groups; ++i)
      scales.push_back(kernels::ToFloat(kernels::ToBf16(0.004f * (1.0f + std::fabs(Normal())))));
    for (int64_t i = 0; i < rows * columns; ++i) {
      const int64_t at = i / columns * groups + group_of[i % columns];
      values.push_back(static_cast<float>(codes[i] - zeros[at]) * scales[at]);
    }
    int4_.erase(name);
    plain_[name] = FloatTensor({rows, columns}, values);
    if (IsPacked(format_)) {
      AddPacked(name, rows, columns, groups, codes, zeros, scales, group_of);
    } else {
      AddTransposed(name.substr(0, name.size() - 7), rows, columns, groups, codes, zeros, scales, group_of);
    }
  }

  static constexpr int64_t kHidden = 256, kWidth = 384, kExpertWidth = 128, kVocab = 304, kQ = 256, kKv = 128;

 private:
  float Normal() { return std::normal_distribution<float>()(random_); }

  void Plain(const std::string& name, std::vector<int64_t> shape, float mean, float deviation) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = kernels::ToFloat(kernels::ToBf16(mean + deviation * Normal()));
      if (!IsPacked(format_)) value = HalfValue(HalfBits(value));
    }
    int4_[name] = IsPacked(format_) ? FloatTensor(shape, values, /*as_bf16=*/true) : HalfTensor(shape, values);
    plain_[name] = FloatTensor(shape, values);
  }

  // Eight codes a word; code(i) is the one at bits 4 i.
  template <typename Code>
  static uint32_t Word(const Code& code) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(code(i)) << (4 * i);
    return word;
  }

  void AddPacked(const std::string& name, int64_t rows, int64_t columns, int64_t groups, const std::vector<int>& codes,
                 const std::vector<int>& zeros, const std::vector<float>& scales,
                 const std::vector<int32_t>& group_of) {
    std::vector<uint32_t> words, zero_words;
    for (int64_t w = 0; w < rows * columns / 8; ++w) words.push_back(Word([&](int i) { return codes[8 * w + i]; }));
    for (int64_t n = 0; n < rows; n += 8) {
      for (int64_t g = 0; g < groups; ++g)
        zero_words.push_back(Word([&](int i) { return zeros[(n + i) * groups + g]; }));
    }
    int4_[name + "_packed"] = IntTensor({rows, columns / 8}, words);
    int4_[name + "_scale"] = FloatTensor({rows, groups}, scales, /*as_bf16=*/true);
    int4_[name + "_shape"] = IntTensor<int64_t>({2}, {rows, columns});
    if (HasZeros(format_)) int4_[name + "_zero_point"] = IntTensor({rows / 8, groups}, zero_words);
    if (IsOrdered(format_)) int4_[name + "_g_idx"] = IntTensor({columns}, group_of);
  }

  void AddTransposed(const std::string& module, int64_t rows, int64_t columns, int64_t groups,
                     const std::vector<int>& codes, const std::vector<int>& zeros, const std::vector<float>& scales,
                     const std::vector<int32_t>& group_of) {
    constexpr int kAwqOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
    const int less = IsAwq(format_) || format_ == Int4Format::kGptqV2 ? 0 : 1;
    const auto place = [&](int i) { return IsAwq(format_) ? kAwqOrder[i] : i; };
    std::vector<uint32_t> words, zero_words;
    if (IsAwq(format_)) {
      for (int64_t k = 0; k < columns; ++k) {
        for (int64_t n = 0; n < rows; n += 8)
          words.push_back(Word([&](int i) { return codes[(n + place(i)) * columns + k]; }));
      }
    } else {
      for (int64_t k = 0; k < columns; k += 8) {
        for (int64_t n = 0; n < rows; ++n) words.push_back(Word([&](int i) { return codes[n * columns + k + i]; }));
      }
    }
    std::vector<float> transposed;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < rows; ++n) transposed.push_back(scales[n * groups + g]);
      for (int64_t n = 0; n < rows; n += 8)
        zero_words.push_back(Word([&](int i) { return (zeros[(n + place(i)) * groups + g] + 16 - less) % 16; }));
    }
    int4_[module + ".qweight"] = IntTensor(
        IsAwq(format_) ? std::vector<int64_t>{columns, rows / 8} : std::vector<int64_t>{columns / 8, rows}, words);
    int4_[module + ".scales"] = HalfTensor({groups, rows}, transposed);
    int4_[module + ".qzeros"] = IntTensor({groups, rows / 8}, zero_words);
    if (!IsAwq(format_)) int4_[module + ".g_idx"] = IntTensor({columns}, group_of);
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
      if (layer == 0 || IsOrdered(format_)) {
        FeedForward(prefix + "mlp.", kWidth);
        continue;
      }
      Plain(prefix + "mlp.gate.weight", {4, kHidden}, 0, 0.2f);
      for (int e = 0; e < 4; ++e) FeedForward(prefix + "mlp.experts." + std::to_string(e) + ".", kExpertWidth);
    }
  }

  void MakeConfig() {
    config_ = nlohmann::json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256,
      "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      "head_dim": 64, "vocab_size": 304, "max_position_embeddings": 512, "torch_dtype": "bfloat16", "num_experts": 4,
      "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": true, "mlp_only_layers": [0],
      "tie_word_embeddings": false})");
    if (IsOrdered(format_)) config_["mlp_only_layers"] = {0, 1};
    const int64_t group = GroupOf(format_) == 0 ? -1 : GroupOf(format_);
    if (!IsPacked(format_)) config_["torch_dtype"] = "float16";
    if (IsAwq(format_)) {
      config_["quantization_config"] = {
          {"quant_method", "awq"}, {"bits", 4},
          {"group_size", group},   {"version", "gemm"},
          {"zero_point", true},    {"modules_to_not_convert", {"lm_head", "model.layers.1.mlp.gate"}}};
      return;
    }
    if (!IsPacked(format_)) {
      config_["quantization_config"] = {{"quant_method", "gptq"},
                                        {"bits", 4},
                                        {"group_size", group},
                                        {"desc_act", IsOrdered(format_)},
                                        {"sym", !HasZeros(format_)}};
      if (format_ == Int4Format::kGptqV2) config_["quantization_config"]["checkpoint_format"] = "gptq_v2";
      return;
    }
    nlohmann::json weights = {{"num_bits", 4},
                              {"type", "int"},
                              {"symmetric", !HasZeros(format_)},
                              {"dynamic", false},
                              {"strategy", group == -1 ? "channel" : "group"},
                              {"group_size", nullptr}};
    if (group != -1) weights["group_size"] = group;
    if (IsOrdered(format_)) weights["actorder"] = "group";
    config_["quantization_config"] = {
        {"quant_method", "compressed-tensors"},
        {"format", "pack-quantized"},
        {"ignore", {"lm_head", "re:.*mlp.gate$"}},
        {"config_groups",
         {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", nullptr}}}}}};
  }

  const std::string dir_;
  const Int4Format format_;
  std::mt19937 random_;
  Fp8Tensors int4_, plain_;
  nlohmann::json config_;
};

}  // namespace spl::test
