// Reads the JSON files of a model folder.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace spl::engine {

// NotFound names the path.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Typed access to one JSON object. The first error is kept, so that callers read all fields and check status() once. A
// null field counts as missing. Borrows the object. One thread at a time.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string source) : object_(object), source_(std::move(source)) {}

  int32_t Int(const char* field, int64_t low, int64_t high, std::optional<int64_t> fallback = std::nullopt);
  double Double(const char* field, double fallback);  // positive
  bool Bool(const char* field, bool fallback);
  std::string String(const char* field, const std::string& fallback);
  bool Has(const char* field) const;
  const nlohmann::json* Array(const char* field);   // null: it is missing, or it is no list, which is an error
  const nlohmann::json* Object(const char* field);  // the same
  void Fail(const char* field, const std::string& why);

  const absl::Status& status() const { return status_; }  // InvalidArgument: "SOURCE: 'FIELD' WHY"
  const std::string& source() const { return source_; }

 private:
  const nlohmann::json& object_;
  std::string source_;
  absl::Status status_;
};

}  // namespace spl::engine
