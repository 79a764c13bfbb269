#include "tools/cli/kb_documents.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "services/base/read_file.h"
#include "services/base/status.h"

namespace spl::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

absl::StatusOr<std::vector<KbFile>> ReadFolder(const std::string& dir) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(dir, error); !error && it != fs::end(it); it.increment(error)) {
    const bool hidden = it->path().filename().string().starts_with(".");
    if (it->is_directory() && hidden) it.disable_recursion_pending();
    if (it->is_regular_file() && !hidden) paths.push_back(it->path());
  }
  if (error) return Errorf(absl::StatusCode::kNotFound, "{}: {}", dir, error.message());
  std::sort(paths.begin(), paths.end());
  std::vector<KbFile> documents;
  for (const fs::path& path : paths) {
    SPLICE_ASSIGN_OR_RETURN(std::string text, ReadFile(path.string()));
    documents.push_back({path.lexically_relative(dir).generic_string(), std::move(text)});
  }
  return documents;
}

absl::StatusOr<std::vector<KbFile>> ReadLines(const std::string& path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  std::vector<KbFile> documents;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const json item = json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto is_text = [&](const char* name) {
      return item.is_object() && item.contains(name) && item[name].is_string();
    };
    if (!is_text("id") || !is_text("text")) {
      return InvalidArgument("{}:{}: is no JSON object with the strings \"id\" and \"text\"", path, number);
    }
    documents.push_back({item["id"].get<std::string>(), item["text"].get<std::string>()});
  }
  return documents;
}

}  // namespace

absl::StatusOr<std::vector<KbFile>> ReadDocuments(const std::string& path) {
  std::error_code error;
  SPLICE_ASSIGN_OR_RETURN(std::vector<KbFile> documents,
                          fs::is_directory(path, error) ? ReadFolder(path) : ReadLines(path));
  if (documents.empty()) return InvalidArgument("{}: holds no document", path);
  return documents;
}

absl::StatusOr<std::string> ReadFileOrText(const std::string& file_or_text) {
  std::error_code error;
  if (!fs::is_regular_file(file_or_text, error)) return file_or_text;
  return ReadFile(file_or_text);
}

}  // namespace spl::cli
