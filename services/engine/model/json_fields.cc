#include "services/engine/model/json_fields.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "services/base/status.h"

namespace spl::engine {

using nlohmann::json;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

int32_t JsonFields::Int(const char* field, int64_t low, int64_t high, std::optional<int64_t> fallback) {
  const auto it = object_.find(field);
  if (it == object_.end() || it->is_null()) {
    if (!fallback) Fail(field, "is missing");
    return static_cast<int32_t>(fallback.value_or(low));
  }
  if (!it->is_number_integer()) return Fail(field, "is not an integer"), static_cast<int32_t>(low);
  const int64_t value = it->is_number_unsigned() && it->get<uint64_t>() > INT64_MAX ? INT64_MAX : it->get<int64_t>();
  if (value < low || value > high)
    return Fail(field, fmt::format("is {}, not in [{}, {}]", value, low, high)), static_cast<int32_t>(low);
  return static_cast<int32_t>(value);
}

double JsonFields::Double(const char* field, double fallback) {
  const auto it = object_.find(field);
  if (it == object_.end() || it->is_null()) return fallback;
  if (!it->is_number()) return Fail(field, "is not a number"), fallback;
  const double value = it->get<double>();
  if (!std::isfinite(value) || value <= 0) return Fail(field, "is not a positive number"), fallback;
  return value;
}

bool JsonFields::Bool(const char* field, bool fallback) {
  const auto it = object_.find(field);
  if (it == object_.end() || it->is_null()) return fallback;
  if (!it->is_boolean()) return Fail(field, "is not true or false"), fallback;
  return it->get<bool>();
}

std::string JsonFields::String(const char* field, const std::string& fallback) {
  const auto it = object_.find(field);
  if (it == object_.end() || it->is_null()) return fallback;
  if (!it->is_string()) return Fail(field, "is not a string"), fallback;
  return it->get<std::string>();
}

bool JsonFields::Has(const char* field) const {
  const auto it = object_.find(field);
  return it != object_.end() && !it->is_null();
}

const json* JsonFields::Array(const char* field) {
  const auto it = object_.find(field);
  if (it == object_.end() || it->is_null()) return nullptr;
  if (!it->is_array()) return Fail(field, "is not a list"), nullptr;
  return &*it;
}

const json* JsonFields::Object(const char* field) {
  const auto it = object_.find(field);
  if (it == object_.end() || it->is_null()) return nullptr;
  if (!it->is_object()) return Fail(field, "is not an object"), nullptr;
  return &*it;
}

void JsonFields::Fail(const char* field, const std::string& why) {
  if (status_.ok()) status_ = InvalidArgument("{}: '{}' {}", source_, field, why);
}

}  // namespace spl::engine
