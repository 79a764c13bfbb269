// Typed access to a JSON configuration. Errors name the place: "tokenizer.json: model.merges[3] must be …".
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl::tokenizer {

using Json = nlohmann::json;

// A value and its path for messages. Borrows the value.
struct JsonField {
  const Json* value = nullptr;
  std::string where;

  // The member `key`. REQUIRES: *value is an object. nullopt: the member is absent or null.
  std::optional<JsonField> Find(std::string_view key) const;
  JsonField At(size_t idx) const;  // REQUIRES: an array, idx in range
  bool is_null() const { return value->is_null(); }
};

// InvalidArgument "WHERE must be WHAT, it is TYPE".
absl::Status WrongType(const JsonField& field, std::string_view what);

absl::StatusOr<Json> ParseJson(std::string_view text, const std::string& name);

absl::Status RequireObject(const JsonField& field);
absl::Status RequireArray(const JsonField& field);
absl::StatusOr<JsonField> RequireMember(const JsonField& object, std::string_view key);
absl::StatusOr<std::string> RequireString(const JsonField& object, std::string_view key);

// `fallback` if the member is absent or null.
absl::StatusOr<std::string> StringOr(const JsonField& object, std::string_view key, std::string fallback);
absl::StatusOr<bool> BoolOr(const JsonField& object, std::string_view key, bool fallback);
absl::StatusOr<int64_t> IntOr(const JsonField& object, std::string_view key, int64_t fallback);

// The "type" member of a component. Checks, too, that the component is an object.
absl::StatusOr<std::string> TypeOf(const JsonField& component);

}  // namespace spl::tokenizer
