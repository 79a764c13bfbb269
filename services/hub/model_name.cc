#include "services/hub/model_name.h"

#include <algorithm>
#include <filesystem>

#include "services/base/status.h"

namespace spl::hub {
namespace {

constexpr std::string_view kCachePrefix = "models--";

bool IsWord(std::string_view text, std::string_view more) {
  constexpr size_t kMaxLength = 96;  // the hub's limit
  const auto is_plain = [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || more.find(c) != more.npos;
  };
  return !text.empty() && text.size() <= kMaxLength && text.front() != '.' && text.front() != '-' &&
         text.front() != '/' && text.find("..") == text.npos && std::all_of(text.begin(), text.end(), is_plain);
}

}  // namespace

std::string ModelName::ToString() const {
  return revision == kDefaultRevision ? repository : repository + "@" + revision;
}

absl::StatusOr<ModelName> ParseModelName(std::string_view text) {
  const size_t at = text.find('@');
  const std::string_view repository = text.substr(0, at);
  const size_t slash = repository.find('/');
  if (slash == repository.npos || !IsWord(repository.substr(0, slash), "-_.") ||
      !IsWord(repository.substr(slash + 1), "-_."))
    return InvalidArgument("'{}' is no name of a model: write ORG/NAME or ORG/NAME@REVISION", text);
  ModelName name;
  name.repository = repository;
  if (at == text.npos) return name;
  name.revision = text.substr(at + 1);
  if (!IsWord(name.revision, "-_./") || name.revision.back() == '/')
    return InvalidArgument("'{}': '{}' is no revision: a branch, a tag or a commit", text, name.revision);
  return name;
}

std::string FolderModelName(const std::string& dir) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path path = fs::absolute(dir, error).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const std::string cached = path.parent_path().parent_path().filename().string();
  if (path.parent_path().filename() != "snapshots" || !cached.starts_with(kCachePrefix))
    return path.filename().string();
  return cached.substr(cached.rfind("--") + 2);
}

}  // namespace spl::hub
