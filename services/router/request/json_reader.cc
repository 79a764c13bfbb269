#include "services/router/request/json_reader.h"

#include <cmath>
#include <limits>
#include <unordered_set>
#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

// Builds the value from parser events, so that depth and duplicate names are seen while reading and not after.
class DomBuilder {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  bool null() { return Add(Json(nullptr)); }
  bool boolean(bool value) { return Add(Json(value)); }
  bool number_integer(number_integer_t value) { return Add(Json(value)); }
  bool number_unsigned(number_unsigned_t value) { return Add(Json(value)); }
  bool number_float(number_float_t value, const string_t&) { return Add(Json(value)); }
  bool string(string_t& value) { return Add(Json(std::move(value))); }
  bool binary(binary_t&) { return false; }
  bool start_object(size_t) { return Open(Json::object()); }
  bool start_array(size_t) { return Open(Json::array()); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool key(string_t& name) {
    if (!names_.back().insert(name).second) {
      status_ = ParamError(name, "stands twice in one object");
      return false;
    }
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) {
    const bool overflow = error.id == 406;  // out_of_range.406: a number that no double holds
    status_ = overflow ? InvalidArgument("the body holds a number out of range near byte {}", position)
                       : InvalidArgument("the body is not valid JSON near byte {}", position);
    return false;
  }

  absl::StatusOr<Json> Take(bool complete) {
    if (!status_.ok()) return status_;
    if (!complete) return InvalidArgument("the body is not valid JSON");
    return std::move(root_);
  }

 private:
  Json* Place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    // Its own insertion looks at all members that it has; that the name is new is known already.
    Json::object_t::Container& members = parent.get_ref<Json::object_t&>();
    return &members.emplace_back(key_, std::move(value)).second;
  }
  bool Add(Json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json value) {
    if (stack_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      status_ = InvalidArgument("the body is nested deeper than {} levels", kMaxJsonDepth);
      return false;
    }
    // Elements of a growing container move, but only the innermost one grows while it is on the stack's top.
    stack_.push_back(Place(std::move(value)));
    names_.emplace_back();
    return true;
  }
  bool Close() {
    stack_.pop_back();
    names_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> stack_;
  std::vector<std::unordered_set<std::string>> names_;  // [stack_]: of the members so far
  std::string key_;
  absl::Status status_;
};

// The integer value of a JSON number, when it has one.
std::optional<uint64_t> AsUnsigned(const Json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  if (value.is_number_integer()) {
    const int64_t v = value.get<int64_t>();
    return v >= 0 ? std::optional<uint64_t>(static_cast<uint64_t>(v)) : std::nullopt;
  }
  if (value.is_number_float()) {
    const double v = value.get<double>();
    if (v >= 0 && v < 9007199254740992.0 && v == std::floor(v)) return static_cast<uint64_t>(v);
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text) {
  DomBuilder builder;
  const bool complete = Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.Take(complete);
}

const char* TypeName(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

absl::StatusOr<std::vector<uint32_t>> ReadTokenIds(const Json& value, const std::string& field) {
  if (!value.is_array()) return ParamError(field, "must be a list of token ids, got {}", TypeName(value));
  std::vector<uint32_t> ids;
  ids.reserve(value.size());
  for (const Json& item : value) {
    const std::optional<uint64_t> id = AsUnsigned(item);
    if (!id.has_value() || *id > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return ParamError(field, "item {} is not a token id", ids.size());
    }
    ids.push_back(static_cast<uint32_t>(*id));
  }
  return ids;
}

ObjectReader::ObjectReader(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (object_.is_object()) return;
  if (path_.empty()) {
    Fail(InvalidArgument("the body must be a JSON object, got {}", TypeName(object_)));
  } else {
    const std::string field = path_.substr(0, path_.size() - 1);  // without the trailing dot
    Fail(ParamError(field, "must be an object, got {}", TypeName(object_)));
  }
}

const Json* ObjectReader::Raw(const char* name) {
  known_.insert(name);
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool ObjectReader::Has(const char* name) const {
  if (!object_.is_object()) return false;
  const auto it = object_.find(name);
  return it != object_.end() && !it->is_null();
}

void ObjectReader::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void ObjectReader::FailType(const char* name, const char* expected, const Json& got) {
  Fail(ParamError(path_ + name, "must be {}, got {}", expected, TypeName(got)));
}

void ObjectReader::Bool(const char* name, bool* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  if (!value->is_boolean()) return FailType(name, "true or false", *value);
  *out = value->get<bool>();
}

void ObjectReader::Bool(const char* name, std::optional<bool>* out) {
  if (Raw(name) == nullptr) return;
  bool value = false;
  Bool(name, &value);
  *out = value;
}

void ObjectReader::String(const char* name, std::string* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  if (!value->is_string()) return FailType(name, "a string", *value);
  *out = value->get<std::string>();
}

void ObjectReader::Uint(const char* name, uint64_t max, std::optional<uint64_t>* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  if (!value->is_number()) return FailType(name, "an integer", *value);
  const std::optional<uint64_t> number = AsUnsigned(*value);
  if (!number.has_value() || *number > max) {
    return Fail(ParamError(path_ + name, "must be an integer between 0 and {}, got {}", max, value->dump()));
  }
  *out = number;
}

void ObjectReader::Uint32(const char* name, uint32_t* out) {
  std::optional<uint64_t> value;
  Uint(name, std::numeric_limits<uint32_t>::max(), &value);
  if (value.has_value()) *out = static_cast<uint32_t>(*value);
}

void ObjectReader::Uint32(const char* name, std::optional<uint32_t>* out) {
  std::optional<uint64_t> value;
  Uint(name, std::numeric_limits<uint32_t>::max(), &value);
  if (value.has_value()) *out = static_cast<uint32_t>(*value);
}

void ObjectReader::Float(const char* name, float* out) {
  std::optional<double> number;
  Number(name, &number);
  if (number.has_value()) *out = static_cast<float>(*number);
}

void ObjectReader::Number(const char* name, std::optional<double>* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  if (!value->is_number()) return FailType(name, "a number", *value);
  const double number = value->get<double>();
  if (!(std::abs(number) <= 1e30)) {
    return Fail(ParamError(path_ + name, "is out of range: {}", value->dump()));
  }
  *out = number;
}

void ObjectReader::Seed(const char* name, std::optional<uint64_t>* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  if (value->is_number_unsigned()) {
    *out = value->get<uint64_t>();
  } else if (value->is_number_integer()) {
    *out = static_cast<uint64_t>(value->get<int64_t>());
  } else {
    FailType(name, "an integer of 64 bits", *value);
  }
}

void ObjectReader::TokenIds(const char* name, std::vector<uint32_t>* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  absl::StatusOr<std::vector<uint32_t>> ids = ReadTokenIds(*value, path_ + name);
  if (!ids.ok()) return Fail(ids.status());
  *out = *std::move(ids);
}

void ObjectReader::StringOrList(const char* name, std::vector<std::string>* out) {
  const Json* value = Raw(name);
  if (value == nullptr) return;
  out->clear();
  if (value->is_string()) {
    out->push_back(value->get<std::string>());
    return;
  }
  if (!value->is_array()) return FailType(name, "a string or a list of strings", *value);
  for (const Json& item : *value) {
    if (!item.is_string()) return FailType(name, "a string or a list of strings", item);
    out->push_back(item.get<std::string>());
  }
}

void ObjectReader::Ignore(std::initializer_list<const char*> names) {
  for (const char* name : names) known_.insert(name);
}

void ObjectReader::Refuse(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const Json* value = Raw(name);
    if (value == nullptr) continue;
    const bool harmless = (value->is_boolean() && !value->get<bool>()) || (value->is_structured() && value->empty());
    if (!harmless) Fail(ParamError(path_ + name, "is not served by this build"));
  }
}

void ObjectReader::RefuseAny(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (Raw(name) != nullptr) Fail(ParamError(path_ + name, "is not served by this build"));
  }
}

absl::Status ObjectReader::FinishIgnoring(std::vector<std::string>* ignored) const {
  if (!status_.ok() || !object_.is_object() || ignored == nullptr) return status_;
  for (const auto& item : object_.items()) {
    if (!item.value().is_null() && known_.find(item.key()) == known_.end()) ignored->push_back(path_ + item.key());
  }
  return absl::OkStatus();
}

absl::Status ObjectReader::Finish() const {
  if (!status_.ok() || !object_.is_object()) return status_;
  for (const auto& item : object_.items()) {
    if (known_.find(item.key()) == known_.end()) {
      return SetErrorCode(ParamError(path_ + item.key(), "is not a known field"), "unknown_field");
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::router
