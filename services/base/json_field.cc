#include "services/base/json_field.h"

#include <cmath>
#include <utility>

#include "services/base/field_error.h"
#include "services/base/status.h"

namespace spl {
namespace {

std::string Join(std::string_view path, std::string_view name) {
  const bool first = path.empty() || path.ends_with(": ");
  return fmt::format("{}{}{}", path, first ? "" : ".", name);
}

// The integer of a JSON number, when it has one that the type holds.
template <typename Json>
std::optional<uint64_t> AsUnsigned(const Json& value) {
  if (value.is_number_unsigned()) return value.template get<uint64_t>();
  if (!value.is_number_float()) return std::nullopt;  // other integers are negative
  const double v = value.template get<double>();
  if (v >= 0 && v < 9007199254740992.0 && v == std::floor(v)) return static_cast<uint64_t>(v);
  return std::nullopt;
}

template <typename Json>
std::optional<int64_t> AsSigned(const Json& value) {
  if (const std::optional<uint64_t> v = AsUnsigned(value)) {
    return *v <= INT64_MAX ? std::optional<int64_t>(static_cast<int64_t>(*v)) : std::nullopt;
  }
  if (value.is_number_integer()) return value.template get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double v = value.template get<double>();
  if (v > -9007199254740992.0 && v < 0 && v == std::ceil(v)) return static_cast<int64_t>(v);
  return std::nullopt;
}

}  // namespace

template <typename Json>
std::string DescribeJson(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return "a string";
    default:
      return value.dump();
  }
}

template <typename Json>
BasicJsonField<Json> BasicJsonField<Json>::At(size_t idx) const {
  return {&(*value)[idx], fmt::format("{}[{}]", path, idx)};
}

template <typename Json>
std::optional<BasicJsonField<Json>> BasicJsonField<Json>::Find(std::string_view name) const {
  const auto it = value->find(std::string(name));
  if (it == value->end() || it->is_null()) return std::nullopt;
  return BasicJsonField{&*it, Join(path, name)};
}

template <typename Json>
absl::Status BasicJsonField<Json>::Wrong(std::string_view expected) const {
  return FieldError(path, fmt::format("must be {}, got {}", expected, DescribeJson(*value)));
}

template <typename Json>
absl::Status BasicJsonField<Json>::CheckObject() const {
  return value->is_object() ? absl::OkStatus() : Wrong("an object");
}

template <typename Json>
absl::Status BasicJsonField<Json>::CheckList() const {
  return value->is_array() ? absl::OkStatus() : Wrong("a list");
}

template <typename Json>
absl::StatusOr<bool> BasicJsonField<Json>::Bool() const {
  if (!value->is_boolean()) return Wrong("true or false");
  return value->template get<bool>();
}

template <typename Json>
absl::StatusOr<std::string> BasicJsonField<Json>::String() const {
  if (!value->is_string()) return Wrong("a string");
  return value->template get<std::string>();
}

template <typename Json>
absl::StatusOr<int64_t> BasicJsonField<Json>::Int(int64_t low, int64_t high) const {
  const std::optional<int64_t> number = AsSigned(*value);
  if (number.has_value() && *number >= low && *number <= high) return *number;
  if (low == INT64_MIN && high == INT64_MAX) return Wrong("an integer of 64 bits");
  return Wrong(fmt::format("an integer between {} and {}", low, high));
}

template <typename Json>
absl::StatusOr<uint64_t> BasicJsonField<Json>::Uint(uint64_t max) const {
  const std::optional<uint64_t> number = AsUnsigned(*value);
  if (!number.has_value() || *number > max) return Wrong(fmt::format("an integer between 0 and {}", max));
  return *number;
}

template <typename Json>
absl::StatusOr<double> BasicJsonField<Json>::Number() const {
  if (!value->is_number()) return Wrong("a number");
  return value->template get<double>();
}

template <typename Json>
absl::StatusOr<std::vector<uint32_t>> BasicJsonField<Json>::TokenIds() const {
  if (!value->is_array()) return Wrong("a list of token ids");
  std::vector<uint32_t> ids;
  ids.reserve(value->size());
  for (const Json& item : *value) {
    const std::optional<uint64_t> id = AsUnsigned(item);
    if (!id.has_value() || *id > static_cast<uint64_t>(INT32_MAX)) {
      return FieldError(path, fmt::format("item {} must be a token id, got {}", ids.size(), DescribeJson(item)));
    }
    ids.push_back(static_cast<uint32_t>(*id));
  }
  return ids;
}

template <typename Json>
absl::StatusOr<BasicJsonField<Json>> BasicJsonField<Json>::Require(std::string_view name) const {
  SPLICE_RETURN_IF_ERROR(CheckObject());
  std::optional<BasicJsonField> member = Find(name);
  if (!member.has_value()) return FieldError(Join(path, name), "is missing");
  return *std::move(member);
}

template <typename Json>
absl::StatusOr<std::string> BasicJsonField<Json>::RequireString(std::string_view name) const {
  SPLICE_ASSIGN_OR_RETURN(const BasicJsonField member, Require(name));
  return member.String();
}

template <typename Json>
absl::StatusOr<std::string> BasicJsonField<Json>::StringOr(std::string_view name, std::string fallback) const {
  SPLICE_RETURN_IF_ERROR(CheckObject());
  const std::optional<BasicJsonField> member = Find(name);
  return member.has_value() ? member->String() : fallback;
}

template <typename Json>
absl::StatusOr<bool> BasicJsonField<Json>::BoolOr(std::string_view name, bool fallback) const {
  SPLICE_RETURN_IF_ERROR(CheckObject());
  const std::optional<BasicJsonField> member = Find(name);
  return member.has_value() ? member->Bool() : fallback;
}

template <typename Json>
absl::StatusOr<int64_t> BasicJsonField<Json>::IntOr(std::string_view name, int64_t fallback) const {
  SPLICE_RETURN_IF_ERROR(CheckObject());
  const std::optional<BasicJsonField> member = Find(name);
  return member.has_value() ? member->Int(INT64_MIN, INT64_MAX) : fallback;
}

template std::string DescribeJson(const nlohmann::json& value);
template std::string DescribeJson(const nlohmann::ordered_json& value);
template struct BasicJsonField<nlohmann::json>;
template struct BasicJsonField<nlohmann::ordered_json>;

}  // namespace spl
