// Parsers of JSON text: one for requests, one for files of a model folder.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl {

inline constexpr int kMaxJsonDepth = 32;

// Parses one JSON value from an untrusted text. Members keep their order: a chat template prints the tools of a request
// in the client's order. InvalidArgument: not JSON (with the byte offset), nested deeper than kMaxJsonDepth, a number
// that no double can hold, or an object that has a name twice (two readers could take different ones). Never throws.
// Cost: linear in the text, whatever its shape.
absl::StatusOr<nlohmann::ordered_json> ParseJson(std::string_view text);

// Parses the JSON object of a file. If a name stands twice, the last member counts. InvalidArgument begins with
// `source`, the file's name. Never throws.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& source);

}  // namespace spl
