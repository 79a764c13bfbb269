#include "services/engine/model/weight_quantization.h"

#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"
#include "services/base/status.h"
#include "services/engine/model/int4_formats.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using Fields = JsonObjectReader<json>;

bool IsScaleBlock(const json& block) {
  return block.is_array() && block.size() == 2 && block[0] == kScaleBlock && block[1] == kScaleBlock;
}

// One entry of "config_groups".
absl::Status ParseGroup(const std::string& name, const json& group, const std::string& source, bool first,
                        WeightQuantization& q) {
  const json weights = group.is_object() ? group.value("weights", json()) : json();
  if (!weights.is_object()) return InvalidArgument("{}: '{}' has no object 'weights'", source, name);
  Fields f(weights, fmt::format("{}: config_groups.{}.weights.", source, name));
  const int32_t bits = f.RequireInt("num_bits", 1, 64);
  const std::string type = f.StringOr("type", "int"), strategy = f.StringOr("strategy", "tensor");
  const bool dynamic = f.BoolOr("dynamic", false);
  SPLICE_RETURN_IF_ERROR(f.status());
  if (bits != 8 || type != "float" || dynamic)
    return QuantizationNotSupported(source,
                                    fmt::format("compressed-tensors {}{}{}", dynamic ? "dynamic " : "", type, bits));
  if (strategy != "tensor" && strategy != "channel" && strategy != "block")
    return QuantizationNotSupported(source, "compressed-tensors strategy " + strategy);
  const ScaleSharing sharing = strategy == "block"     ? ScaleSharing::kBlock
                               : strategy == "channel" ? ScaleSharing::kChannel
                                                       : ScaleSharing::kTensor;
  const bool blocks = sharing == ScaleSharing::kBlock;
  if (blocks && !IsScaleBlock(weights.value("block_structure", json())))
    return QuantizationNotSupported(source,
                                    "compressed-tensors blocks of " + weights.value("block_structure", json()).dump());
  if (!first && blocks != q.blocks())
    return QuantizationNotSupported(source, "compressed-tensors groups with and without blocks");
  if (first || sharing == ScaleSharing::kTensor) q.sharing = sharing;  // of groups that differ, the coarser
  const json activations = group.value("input_activations", json());
  if (activations.is_object() && activations.value("dynamic", json(false)) == json(false)) q.static_activations = true;
  return absl::OkStatus();
}

absl::Status ParseCompressedTensors(const json& config, const std::string& source, WeightQuantization& q) {
  Fields f(config, source + ": quantization_config.");
  const std::string format = f.StringOr("format", "");
  SPLICE_RETURN_IF_ERROR(f.status());
  if (format == "pack-quantized") return ParsePackQuantized(config, source, q);
  if (format != "float-quantized" && format != "naive-quantized")
    return QuantizationNotSupported(source, "compressed-tensors " + format);
  if (const json sparsity = config.value("sparsity_config", json()); sparsity.is_object() && !sparsity.empty()) {
    const json sparse_format = sparsity.value("format", json());
    if (sparse_format != "dense")
      return QuantizationNotSupported(source, "compressed-tensors sparsity " + sparse_format.dump());
  }
  const json* groups = f.Object("config_groups");
  if (groups == nullptr || groups->empty())
    return InvalidArgument("{}: 'config_groups' is not an object with entries", source);
  bool first = true;
  for (const auto& [name, group] : groups->items()) {
    SPLICE_RETURN_IF_ERROR(ParseGroup(name, group, source, first, q));
    first = false;
  }
  q.scale_suffix = "_scale";
  return absl::OkStatus();
}

// `name`: of `config` in its file.
absl::Status ParseModelOpt(const json& config, const std::string& source, const char* name, WeightQuantization& q) {
  Fields f(config, fmt::format("{}: {}.", source, name));
  const std::string algorithm = f.StringOr("quant_algo", "");
  SPLICE_RETURN_IF_ERROR(f.status());
  if (algorithm != "FP8" && algorithm != "FP8_PER_CHANNEL_PER_TOKEN" && algorithm != "FP8_PB_WO")
    return QuantizationNotSupported(source, "modelopt " + algorithm);
  q.static_activations = algorithm == "FP8";
  q.sharing = algorithm == "FP8_PB_WO" ? ScaleSharing::kBlock
              : algorithm == "FP8"     ? ScaleSharing::kTensor
                                       : ScaleSharing::kChannel;
  q.scale_suffix = "_scale";
  return absl::OkStatus();
}

absl::Status ParseFp8(const json& config, const std::string& source, WeightQuantization& q) {
  Fields f(config, source + ": quantization_config.");
  const std::string element = f.StringOr("fmt", "e4m3");
  q.static_activations = f.StringOr("activation_scheme", "dynamic") == "static";
  const json* block = f.List("weight_block_size");
  SPLICE_RETURN_IF_ERROR(f.status());
  if (element != "e4m3") return QuantizationNotSupported(source, "fp8 " + element);
  if (block != nullptr && !IsScaleBlock(*block))
    return QuantizationNotSupported(source, "fp8 blocks of " + block->dump());
  q.sharing = block != nullptr ? ScaleSharing::kBlock : ScaleSharing::kTensor;
  q.scale_suffix = q.blocks() ? "_scale_inv" : "_scale";
  return absl::OkStatus();
}

}  // namespace

absl::Status QuantizationNotSupported(const std::string& source, const std::string& format) {
  return Errorf(
      absl::StatusCode::kUnimplemented,
      "{}: quantization '{}' is not supported (FP8 e4m3 weights of compressed-tensors, modelopt and fp8, with "
      "scales per tensor, per channel or for blocks of {} x {}; int4 weights of compressed-tensors pack-quantized, "
      "gptq and awq gemm, with scales per channel or for groups of a multiple of 32 columns)",
      source, format, kScaleBlock, kScaleBlock);
}

std::string Int4WeightsName(int64_t group) { return group == 0 ? "int4-channel" : fmt::format("int4-group{}", group); }

QuantizeTo QuantizeToFromName(std::string_view name) {
  if (name == "fp8") return QuantizeTo::kFp8;
  return name == "int4" ? QuantizeTo::kInt4 : QuantizeTo::kNone;
}

std::string QuantizedWeightsName(QuantizeTo to) {
  return to == QuantizeTo::kInt4 ? Int4WeightsName(kInt4Group) : Fp8WeightsName(ScaleSharing::kChannel);
}

std::string Fp8WeightsName(ScaleSharing sharing) {
  switch (sharing) {
    case ScaleSharing::kTensor:
      return "fp8-e4m3-tensor";
    case ScaleSharing::kChannel:
      return "fp8-e4m3-channel";
    case ScaleSharing::kBlock:
      return "fp8-e4m3-block";
  }
  return "?";
}

absl::StatusOr<WeightQuantization> ParseWeightQuantization(const json& config, const std::string& source) {
  if (!config.is_object()) return InvalidArgument("{}: 'quantization_config' is not an object", source);
  Fields f(config, source + ": quantization_config.");
  WeightQuantization q{.method = f.StringOr("quant_method", "")};
  SPLICE_RETURN_IF_ERROR(f.status());
  if (q.method == "compressed-tensors") {
    SPLICE_RETURN_IF_ERROR(ParseCompressedTensors(config, source, q));
  } else if (q.method == "modelopt") {
    SPLICE_RETURN_IF_ERROR(ParseModelOpt(config, source, "quantization_config", q));
  } else if (q.method == "fp8") {
    SPLICE_RETURN_IF_ERROR(ParseFp8(config, source, q));
  } else if (q.method == "gptq") {
    SPLICE_RETURN_IF_ERROR(ParseGptq(config, source, q));
  } else if (q.method == "awq") {
    SPLICE_RETURN_IF_ERROR(ParseAwq(config, source, q));
  } else {
    return QuantizationNotSupported(source, q.method);
  }
  return q;
}

absl::StatusOr<WeightQuantization> ParseModelOptFile(const std::string& text, const std::string& source) {
  SPLICE_ASSIGN_OR_RETURN(const json root, ParseJsonObject(text, source));
  Fields f(root, source + ": ");
  const json* config = f.Object("quantization");
  SPLICE_RETURN_IF_ERROR(f.status());
  if (config == nullptr) return InvalidArgument("{}: 'quantization' is missing", source);
  WeightQuantization q{.method = "modelopt"};
  SPLICE_RETURN_IF_ERROR(ParseModelOpt(*config, source, "quantization", q));
  return q;
}

}  // namespace spl::engine
