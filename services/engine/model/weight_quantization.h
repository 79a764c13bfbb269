// The quantization of a checkpoint, as its folder declares it: published FP8 and int4 formats by name.
//
//   compressed-tensors  "float-quantized": e4m3, scales per tensor, per channel, or for blocks of 128 x 128
//   modelopt            "FP8" (per tensor), "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO" (blocks)
//   fp8                 e4m3, blocks of 128 x 128 (DeepSeek, Qwen), or per tensor
//   compressed-tensors  "pack-quantized": int4 weights, strategy "group" or "channel" (int4_formats.h)
//   gptq, awq           int4 weights
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl::engine {

inline constexpr int64_t kScaleBlock = 128;  // rows and columns of a block that has one scale

// The weights that have one scale together.
enum class ScaleSharing : uint8_t { kTensor, kChannel, kBlock };

// How a folder packs int4 weights (int4_matrix.h).
enum class Int4Layout : uint8_t { kNone, kPacked, kGptq, kAwq };

struct WeightQuantization {
  std::string method;  // "compressed-tensors", "modelopt", "fp8", "gptq", "awq"; empty: float weights
  // FP8.
  std::string scale_suffix;                      // name of a matrix + suffix = name of its scales
  ScaleSharing sharing = ScaleSharing::kTensor;  // kTensor and kChannel: what is meant; each is read where it is found
  bool static_activations = false;               // the folder has scales of activations, which are checked and not used

  // int4. kNone: weights are FP8.
  Int4Layout int4 = Int4Layout::kNone;
  int64_t group = 0;            // columns that have one scale; 0: a whole row
  bool zero_points = false;     // the folder has zero points; false: all are 8
  bool zeros_less_one = false;  // they are stored as one less

  bool quantized() const { return !method.empty(); }
  bool is_int4() const { return int4 != Int4Layout::kNone; }
  bool blocks() const { return sharing == ScaleSharing::kBlock; }
};

// The type of FP8 weights for people and programs: "fp8-e4m3-tensor", "fp8-e4m3-channel" or "fp8-e4m3-block".
std::string Fp8WeightsName(ScaleSharing sharing);
// The same for int4: "int4-group128", or "int4-channel" for group 0.
std::string Int4WeightsName(int64_t group);

// Types that weights are quantized to while a model is loaded, or by splice quantize.
enum class QuantizeTo : uint8_t { kNone, kFp8, kInt4 };
inline constexpr int64_t kInt4Group = 128;  // columns that have one scale in weights that are quantized here

// "none", "fp8", "int4". REQUIRES: one of them.
QuantizeTo QuantizeToFromName(std::string_view name);
// Weights that are quantized here, as above: "fp8-e4m3-channel", "int4-group128". REQUIRES: not kNone.
std::string QuantizedWeightsName(QuantizeTo to);

// Unimplemented: names the format and those that are supported.
absl::Status QuantizationNotSupported(const std::string& source, const std::string& format);

// `config` is the value of "quantization_config" in config.json, or of "quantization" in hf_quant_config.json
// (ModelOpt). InvalidArgument names the field. Unimplemented names the format and those that are supported.
absl::StatusOr<WeightQuantization> ParseWeightQuantization(const nlohmann::json& config, const std::string& source);
absl::StatusOr<WeightQuantization> ParseModelOptFile(const std::string& text, const std::string& source);

}  // namespace spl::engine
