// Files of a model folder that the tokenizer and the chat template share.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/json_field.h"

namespace spl::tokenizer {

// Reads DIR/NAME as a JSON object. An empty object: the folder has no such file.
absl::StatusOr<nlohmann::json> ReadOptionalJson(const std::string& model_dir, const std::string& name);

// Content of a token that is given as a string or as {"content": …} (tokenizer_config.json and special_tokens_map.json
// have both forms). nullopt: absent or null.
absl::StatusOr<std::optional<std::string>> TokenContent(const JsonField& root, std::string_view key);

}  // namespace spl::tokenizer
