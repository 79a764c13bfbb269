// The int4 formats that folders declare in "quantization_config": compressed-tensors "pack-quantized", gptq and awq.
// int4_matrix.h has their layouts.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "services/engine/model/weight_quantization.h"

namespace spl::engine {

// Each fills `q` from the value of "quantization_config". InvalidArgument names the field; Unimplemented names the
// format and those that are supported.
absl::Status ParsePackQuantized(const nlohmann::json& config, const std::string& source, WeightQuantization& q);
absl::Status ParseGptq(const nlohmann::json& config, const std::string& source, WeightQuantization& q);
absl::Status ParseAwq(const nlohmann::json& config, const std::string& source, WeightQuantization& q);

}  // namespace spl::engine
