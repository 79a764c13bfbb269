#include "services/tokenizer/json_fields.h"

#include <utility>

#include "services/base/status.h"

namespace spl::tokenizer {

std::optional<JsonField> JsonField::Find(std::string_view key) const {
  const auto it = value->find(std::string(key));
  if (it == value->end() || it->is_null()) return std::nullopt;
  return JsonField{&*it, where.ends_with(": ") ? where + std::string(key) : where + "." + std::string(key)};
}

JsonField JsonField::At(size_t idx) const { return {&(*value)[idx], where + "[" + std::to_string(idx) + "]"}; }

absl::Status WrongType(const JsonField& field, std::string_view what) {
  return InvalidArgument("{} must be {}, it is {}", field.where, what, field.value->type_name());
}

absl::StatusOr<Json> ParseJson(std::string_view text, const std::string& name) {
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument("{} is not JSON: {}", name, error.what());
  }
}

absl::Status RequireObject(const JsonField& field) {
  return field.value->is_object() ? absl::OkStatus() : WrongType(field, "an object");
}

absl::Status RequireArray(const JsonField& field) {
  return field.value->is_array() ? absl::OkStatus() : WrongType(field, "an array");
}

absl::StatusOr<JsonField> RequireMember(const JsonField& object, std::string_view key) {
  SPLICE_RETURN_IF_ERROR(RequireObject(object));
  std::optional<JsonField> member = object.Find(key);
  if (!member) return InvalidArgument("{} has no \"{}\"", object.where, key);
  return *std::move(member);
}

absl::StatusOr<std::string> RequireString(const JsonField& object, std::string_view key) {
  SPLICE_ASSIGN_OR_RETURN(const JsonField member, RequireMember(object, key));
  if (!member.value->is_string()) return WrongType(member, "a string");
  return member.value->get<std::string>();
}

absl::StatusOr<std::string> StringOr(const JsonField& object, std::string_view key, std::string fallback) {
  const std::optional<JsonField> member = object.Find(key);
  if (!member) return fallback;
  if (!member->value->is_string()) return WrongType(*member, "a string");
  return member->value->get<std::string>();
}

absl::StatusOr<bool> BoolOr(const JsonField& object, std::string_view key, bool fallback) {
  const std::optional<JsonField> member = object.Find(key);
  if (!member) return fallback;
  if (!member->value->is_boolean()) return WrongType(*member, "true or false");
  return member->value->get<bool>();
}

absl::StatusOr<int64_t> IntOr(const JsonField& object, std::string_view key, int64_t fallback) {
  const std::optional<JsonField> member = object.Find(key);
  if (!member) return fallback;
  if (!member->value->is_number_integer()) return WrongType(*member, "an integer");
  return member->value->get<int64_t>();
}

absl::StatusOr<std::string> TypeOf(const JsonField& component) { return RequireString(component, "type"); }

}  // namespace spl::tokenizer
