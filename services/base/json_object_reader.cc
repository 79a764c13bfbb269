#include "services/base/json_object_reader.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/cord.h"
#include "services/base/field_error.h"
#include "services/base/status.h"

namespace spl {
namespace {

constexpr double kMaxNumber = 1e30;

template <typename Json>
const Json* Member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

}  // namespace

template <typename Json>
JsonObjectReader<Json>::JsonObjectReader(const Json& object, std::string prefix)
    : object_(object), prefix_(std::move(prefix)) {
  if (object_.is_object()) return;
  if (prefix_.empty()) {
    Fail(InvalidArgument("the body must be a JSON object, got {}", DescribeJson(object_)));
  } else {
    Fail(BasicJsonField<Json>{&object_, prefix_}.Wrong("an object"));
  }
}

template <typename Json>
const Json* JsonObjectReader<Json>::Raw(const char* name) {
  known_.insert(name);
  return Member(object_, name);
}

template <typename Json>
std::optional<BasicJsonField<Json>> JsonObjectReader<Json>::Field(const char* name) {
  const Json* const value = Raw(name);
  if (value == nullptr) return std::nullopt;
  return BasicJsonField<Json>{value, prefix_ + name};
}

template <typename Json>
template <typename T, typename Out>
void JsonObjectReader<Json>::Keep(absl::StatusOr<T> value, Out* out) {
  if (!value.ok()) return Fail(value.status());
  *out = *std::move(value);
}

template <typename Json>
bool JsonObjectReader<Json>::Has(const char* name) const {
  return Member(object_, name) != nullptr;
}

template <typename Json>
void JsonObjectReader<Json>::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

template <typename Json>
void JsonObjectReader<Json>::Fail(const char* name, std::string_view message) {
  Fail(FieldError(prefix_ + name, message));
}

template <typename Json>
void JsonObjectReader<Json>::Bool(const char* name, bool* out) {
  if (const auto field = Field(name)) Keep(field->Bool(), out);
}

template <typename Json>
void JsonObjectReader<Json>::Bool(const char* name, std::optional<bool>* out) {
  if (const auto field = Field(name)) Keep(field->Bool(), out);
}

template <typename Json>
void JsonObjectReader<Json>::String(const char* name, std::string* out) {
  if (const auto field = Field(name)) Keep(field->String(), out);
}

template <typename Json>
void JsonObjectReader<Json>::Uint(const char* name, uint64_t max, std::optional<uint64_t>* out) {
  if (const auto field = Field(name)) Keep(field->Uint(max), out);
}

template <typename Json>
void JsonObjectReader<Json>::Uint64(const char* name, uint64_t* out) {
  if (const auto field = Field(name)) Keep(field->Uint(std::numeric_limits<uint64_t>::max()), out);
}

template <typename Json>
void JsonObjectReader<Json>::Uint32(const char* name, uint32_t* out) {
  if (const auto field = Field(name)) Keep(field->Uint(std::numeric_limits<uint32_t>::max()), out);
}

template <typename Json>
void JsonObjectReader<Json>::Uint32(const char* name, std::optional<uint32_t>* out) {
  if (const auto field = Field(name)) Keep(field->Uint(std::numeric_limits<uint32_t>::max()), out);
}

template <typename Json>
void JsonObjectReader<Json>::Float(const char* name, float* out) {
  std::optional<double> number;
  Number(name, &number);
  if (number.has_value()) *out = static_cast<float>(*number);
}

template <typename Json>
void JsonObjectReader<Json>::Number(const char* name, std::optional<double>* out) {
  const auto field = Field(name);
  if (!field.has_value()) return;
  const absl::StatusOr<double> number = field->Number();
  if (!number.ok()) return Fail(number.status());
  if (!(std::abs(*number) <= kMaxNumber)) return Fail(field->Wrong("a number between -1e30 and 1e30"));
  *out = *number;
}

template <typename Json>
void JsonObjectReader<Json>::Seed(const char* name, std::optional<uint64_t>* out) {
  const auto field = Field(name);
  if (!field.has_value()) return;
  if (!field->value->is_number_integer()) return Fail(field->Wrong("an integer of 64 bits"));
  *out = field->value->template get<uint64_t>();
}

template <typename Json>
void JsonObjectReader<Json>::TokenIds(const char* name, std::vector<uint32_t>* out) {
  if (const auto field = Field(name)) Keep(field->TokenIds(), out);
}

template <typename Json>
void JsonObjectReader<Json>::StringOrList(const char* name, std::vector<std::string>* out) {
  const auto field = Field(name);
  if (!field.has_value()) return;
  out->clear();
  const Json& value = *field->value;
  if (value.is_string()) {
    out->push_back(value.template get<std::string>());
    return;
  }
  if (!value.is_array()) return Fail(field->Wrong("a string or a list of strings"));
  for (const Json& item : value) {
    if (!item.is_string())
      return Fail(name, fmt::format("must be a string or a list of strings, got {} in the list", DescribeJson(item)));
    out->push_back(item.template get<std::string>());
  }
}

template <typename Json>
bool JsonObjectReader<Json>::BoolOr(const char* name, bool fallback) {
  Bool(name, &fallback);
  return fallback;
}

template <typename Json>
std::string JsonObjectReader<Json>::StringOr(const char* name, std::string fallback) {
  String(name, &fallback);
  return fallback;
}

template <typename Json>
double JsonObjectReader<Json>::PositiveOr(const char* name, double fallback) {
  const auto field = Field(name);
  if (!field.has_value()) return fallback;
  const absl::StatusOr<double> number = field->Number();
  if (number.ok() && std::isfinite(*number) && *number > 0) return *number;
  Fail(field->Wrong("a positive number"));
  return fallback;
}

template <typename Json>
int32_t JsonObjectReader<Json>::IntOr(const char* name, int64_t low, int64_t high, int32_t fallback) {
  const auto field = Field(name);
  if (!field.has_value()) return fallback;
  int64_t value = low;
  Keep(field->Int(low, high), &value);
  return static_cast<int32_t>(value);
}

template <typename Json>
int32_t JsonObjectReader<Json>::RequireInt(const char* name, int64_t low, int64_t high) {
  if (!Has(name)) Fail(name, "is missing");
  return IntOr(name, low, high, static_cast<int32_t>(low));
}

template <typename Json>
const Json* JsonObjectReader<Json>::List(const char* name) {
  const auto field = Field(name);
  if (!field.has_value()) return nullptr;
  Fail(field->CheckList());
  return field->value->is_array() ? field->value : nullptr;
}

template <typename Json>
const Json* JsonObjectReader<Json>::Object(const char* name) {
  const auto field = Field(name);
  if (!field.has_value()) return nullptr;
  Fail(field->CheckObject());
  return field->value->is_object() ? field->value : nullptr;
}

template <typename Json>
void JsonObjectReader<Json>::Ignore(std::initializer_list<const char*> names) {
  for (const char* name : names) known_.insert(name);
}

template <typename Json>
void JsonObjectReader<Json>::Refuse(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const Json* const value = Raw(name);
    if (value == nullptr) continue;
    const bool is_false = value->is_boolean() && !value->template get<bool>();
    if (!is_false && !(value->is_structured() && value->empty())) Fail(name, "is not served by this build");
  }
}

template <typename Json>
void JsonObjectReader<Json>::RefuseAny(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (Raw(name) != nullptr) Fail(name, "is not served by this build");
  }
}

template <typename Json>
absl::Status JsonObjectReader<Json>::FinishIgnoring(std::vector<std::string>* ignored) const {
  if (!status_.ok() || !object_.is_object() || ignored == nullptr) return status_;
  for (const auto& item : object_.items()) {
    if (!item.value().is_null() && known_.find(item.key()) == known_.end()) ignored->push_back(prefix_ + item.key());
  }
  return absl::OkStatus();
}

template <typename Json>
absl::Status JsonObjectReader<Json>::Finish() const {
  if (!status_.ok() || !object_.is_object()) return status_;
  for (const auto& item : object_.items()) {
    if (known_.find(item.key()) != known_.end()) continue;
    absl::Status unknown = FieldError(prefix_ + item.key(), "is not a known field");
    unknown.SetPayload(kErrorCodePayload, absl::Cord("unknown_field"));
    return unknown;
  }
  return absl::OkStatus();
}

template class JsonObjectReader<nlohmann::json>;
template class JsonObjectReader<nlohmann::ordered_json>;

}  // namespace spl
