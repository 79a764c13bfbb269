// Typed access to parsed JSON. Every error is InvalidArgument "PATH: must be THIS, got THAT" with the path as a payload
// (FieldError). THAT is a number, true or false; of strings, lists and objects only the type is shown.
//
// A path is "messages[2].role" in a request and "config.json: rope_scaling.factor" in a file: a document has no path or
// "FILE: ". Json is nlohmann::json or nlohmann::ordered_json. A member that is null counts as absent.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl {

// One value and its path. Borrows the value.
template <typename Json>
struct BasicJsonField {
  const Json* value = nullptr;
  std::string path;

  bool is_null() const { return value->is_null(); }
  BasicJsonField At(size_t idx) const;                              // REQUIRES: *value is a list, idx in range
  std::optional<BasicJsonField> Find(std::string_view name) const;  // REQUIRES: *value is an object

  absl::Status Wrong(std::string_view expected) const;  // "PATH: must be EXPECTED, got …"
  absl::Status CheckObject() const;
  absl::Status CheckList() const;
  absl::StatusOr<bool> Bool() const;
  absl::StatusOr<std::string> String() const;
  absl::StatusOr<int64_t> Int(int64_t low, int64_t high) const;  // in [low, high]; 3.0 counts as an integer
  absl::StatusOr<uint64_t> Uint(uint64_t max) const;             // in [0, max]
  absl::StatusOr<double> Number() const;
  absl::StatusOr<std::vector<uint32_t>> TokenIds() const;  // a list of integers in [0, 2^31)

  // Members. The value must be an object, else an error.
  absl::StatusOr<BasicJsonField> Require(std::string_view name) const;
  absl::StatusOr<std::string> RequireString(std::string_view name) const;
  absl::StatusOr<std::string> StringOr(std::string_view name, std::string fallback) const;
  absl::StatusOr<bool> BoolOr(std::string_view name, bool fallback) const;
  absl::StatusOr<int64_t> IntOr(std::string_view name, int64_t fallback) const;
};

using JsonField = BasicJsonField<nlohmann::json>;

// "an object", "a list", "a string", "null"; numbers, true and false as they are written.
template <typename Json>
std::string DescribeJson(const Json& value);

}  // namespace spl
