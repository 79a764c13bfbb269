#include "services/tokenizer/model_files.h"

#include <utility>

#include "services/base/json_parser.h"
#include "services/base/read_file.h"
#include "services/base/status.h"

namespace spl::tokenizer {

absl::StatusOr<nlohmann::json> ReadOptionalJson(const std::string& model_dir, const std::string& name) {
  const std::string path = model_dir + "/" + name;
  absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return nlohmann::json::object();
  if (!text.ok()) return text.status();
  return ParseJsonObject(*text, path);
}

absl::StatusOr<std::optional<std::string>> TokenContent(const JsonField& root, std::string_view key) {
  const std::optional<JsonField> member = root.Find(key);
  if (!member) return std::optional<std::string>();
  if (member->value->is_string()) return std::optional<std::string>(member->value->get<std::string>());
  if (!member->value->is_object()) return member->Wrong("a string or an object with \"content\"");
  SPLICE_ASSIGN_OR_RETURN(std::string content, member->RequireString("content"));
  return std::optional<std::string>(std::move(content));
}

}  // namespace spl::tokenizer
