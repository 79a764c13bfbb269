// The quantization of a checkpoint, as its folder declares it: published FP8 formats by name.
//
//   compressed-tensors  "float-quantized": e4m3, scales per tensor, per channel, or for blocks of 128 x 128
//   modelopt            "FP8" (per tensor), "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO" (blocks)
//   fp8                 e4m3, blocks of 128 x 128 (DeepSeek, Qwen), or per tensor
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace spl::engine {

inline constexpr int64_t kScaleBlock = 128;  // rows and columns of a block that has one scale

// The weights that have one scale together.
enum class ScaleSharing : uint8_t { kTensor, kChannel, kBlock };

struct WeightQuantization {
  std::string method;                            // "compressed-tensors", "modelopt", "fp8"; empty: float weights
  std::string scale_suffix;                      // name of a matrix + suffix = name of its scales
  ScaleSharing sharing = ScaleSharing::kTensor;  // kTensor and kChannel: what is meant; each is read where it is found
  bool static_activations = false;               // the folder has scales of activations, which are checked and not used

  bool quantized() const { return !method.empty(); }
  bool blocks() const { return sharing == ScaleSharing::kBlock; }
};

// The type of FP8 weights for people and programs: "fp8-e4m3-tensor", "fp8-e4m3-channel" or "fp8-e4m3-block".
std::string Fp8WeightsName(ScaleSharing sharing);

// `config` is the value of "quantization_config" in config.json, or of "quantization" in hf_quant_config.json
// (ModelOpt). InvalidArgument names the field. Unimplemented names the format and those that are supported.
absl::StatusOr<WeightQuantization> ParseWeightQuantization(const nlohmann::json& config, const std::string& source);
absl::StatusOr<WeightQuantization> ParseModelOptFile(const std::string& text, const std::string& source);

}  // namespace spl::engine
