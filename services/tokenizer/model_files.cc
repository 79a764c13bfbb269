#include "services/tokenizer/model_files.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "services/base/status.h"

namespace spl::tokenizer {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    const int error = errno;
    const auto code = error == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kInvalidArgument;
    return Errorf(code, "cannot open {}: {}", path, std::strerror(error));
  }
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return Errorf(absl::StatusCode::kInvalidArgument, "cannot read {}", path);
  return text;
}

absl::StatusOr<Json> ReadOptionalJson(const std::string& model_dir, const std::string& name) {
  const std::string path = model_dir + "/" + name;
  absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return Json::object();
  if (!text.ok()) return text.status();
  SPLICE_ASSIGN_OR_RETURN(Json document, ParseJson(*text, path));
  if (!document.is_object()) return InvalidArgument("{} must be an object, it is {}", path, document.type_name());
  return document;
}

absl::StatusOr<std::optional<std::string>> TokenContent(const JsonField& root, std::string_view key) {
  const std::optional<JsonField> member = root.Find(key);
  if (!member) return std::optional<std::string>();
  if (member->value->is_string()) return std::optional<std::string>(member->value->get<std::string>());
  if (!member->value->is_object()) return WrongType(*member, "a string or an object with \"content\"");
  SPLICE_ASSIGN_OR_RETURN(std::string content, RequireString(*member, "content"));
  return std::optional<std::string>(std::move(content));
}

}  // namespace spl::tokenizer
