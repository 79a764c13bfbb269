#include "services/engine/model/int4_formats.h"

#include <algorithm>
#include <cctype>

#include "kernels/gemm/gemm.h"
#include "services/base/json_object_reader.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using Fields = JsonObjectReader<json>;

absl::Status CheckBits(int32_t bits, const std::string& source, const std::string& method) {
  if (bits == 4) return absl::OkStatus();
  return QuantizationNotSupported(source, fmt::format("{} of {} bits", method, bits));
}

// `group`: -1 is a whole row. Returns WeightQuantization::group.
absl::StatusOr<int64_t> ParseGroupSize(int32_t group, const std::string& source, const std::string& method) {
  if (group == -1) return 0;
  if (group <= 0 || group % kernels::kScaleGroupStep != 0)
    return QuantizationNotSupported(source, fmt::format("{} in groups of {}", method, group));
  return group;
}

std::string LowerCase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// One entry of "config_groups".
absl::Status ParseGroup(const std::string& name, const json& group, const std::string& source, WeightQuantization& q) {
  const std::string method = "compressed-tensors pack-quantized";
  const json weights = group.is_object() ? group.value("weights", json()) : json();
  if (!weights.is_object()) return InvalidArgument("{}: '{}' has no object 'weights'", source, name);
  Fields f(weights, fmt::format("{}: config_groups.{}.weights.", source, name));
  const int32_t bits = f.RequireInt("num_bits", 1, 64);
  const std::string type = f.StringOr("type", "int"), strategy = f.StringOr("strategy", "tensor");
  const bool symmetric = f.BoolOr("symmetric", true), dynamic = f.BoolOr("dynamic", false);
  const int32_t size = f.Has("group_size") ? f.IntOr("group_size", -1, 1 << 24, -1) : -1;
  SPLICE_RETURN_IF_ERROR(f.status());
  if (type != "int" || dynamic)
    return QuantizationNotSupported(source, fmt::format("{} {}{}{}", method, dynamic ? "dynamic " : "", type, bits));
  SPLICE_RETURN_IF_ERROR(CheckBits(bits, source, method));
  if (strategy != "group" && strategy != "channel")
    return QuantizationNotSupported(source, fmt::format("{} strategy {}", method, strategy));
  if (group.value("input_activations", json()).is_object())
    return QuantizationNotSupported(source, method + " with quantized activations");
  SPLICE_ASSIGN_OR_RETURN(q.group, ParseGroupSize(strategy == "channel" ? -1 : size, source, method));
  q.zero_points = !symmetric;
  return absl::OkStatus();
}

}  // namespace

absl::Status ParsePackQuantized(const json& config, const std::string& source, WeightQuantization& q) {
  Fields f(config, source + ": quantization_config.");
  const json* groups = f.Object("config_groups");
  if (groups == nullptr || groups->empty())
    return InvalidArgument("{}: 'config_groups' is not an object with entries", source);
  q.int4 = Int4Layout::kPacked;
  bool first = true;
  for (const auto& [name, group] : groups->items()) {
    WeightQuantization of_group;
    SPLICE_RETURN_IF_ERROR(ParseGroup(name, group, source, of_group));
    if (!first && (of_group.group != q.group || of_group.zero_points != q.zero_points))
      return QuantizationNotSupported(source, "compressed-tensors pack-quantized with groups that differ");
    q.group = of_group.group;
    q.zero_points = of_group.zero_points;
    first = false;
  }
  return absl::OkStatus();
}

absl::Status ParseGptq(const json& config, const std::string& source, WeightQuantization& q) {
  Fields f(config, source + ": quantization_config.");
  const int32_t bits = f.RequireInt("bits", 1, 64), size = f.RequireInt("group_size", -1, 1 << 24);
  const std::string format = LowerCase(f.StringOr("checkpoint_format", "gptq"));
  const bool marlin = f.BoolOr("is_marlin_format", false);
  SPLICE_RETURN_IF_ERROR(f.status());
  SPLICE_RETURN_IF_ERROR(CheckBits(bits, source, "gptq"));
  if (marlin || (format != "gptq" && format != "gptq_v2"))
    return QuantizationNotSupported(source, "gptq checkpoint_format " + (marlin ? "marlin" : format));
  SPLICE_ASSIGN_OR_RETURN(q.group, ParseGroupSize(size, source, "gptq"));
  q.int4 = Int4Layout::kGptq;
  q.zero_points = true;  // also where they are all 8 ("sym")
  q.zeros_less_one = format == "gptq";
  return absl::OkStatus();
}

absl::Status ParseAwq(const json& config, const std::string& source, WeightQuantization& q) {
  Fields f(config, source + ": quantization_config.");
  const int32_t bits = f.RequireInt("bits", 1, 64), size = f.RequireInt("group_size", -1, 1 << 24);
  const std::string version = LowerCase(f.StringOr("version", "gemm")), backend = f.StringOr("backend", "autoawq");
  const bool zero_point = f.BoolOr("zero_point", true);
  SPLICE_RETURN_IF_ERROR(f.status());
  SPLICE_RETURN_IF_ERROR(CheckBits(bits, source, "awq"));
  if (version != "gemm") return QuantizationNotSupported(source, "awq version " + version);
  if (backend != "autoawq") return QuantizationNotSupported(source, "awq backend " + backend);
  if (!zero_point) return QuantizationNotSupported(source, "awq without zero points");
  SPLICE_ASSIGN_OR_RETURN(q.group, ParseGroupSize(size, source, "awq"));
  q.int4 = Int4Layout::kAwq;
  q.zero_points = true;
  return absl::OkStatus();
}

}  // namespace spl::engine
