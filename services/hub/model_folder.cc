#include "services/hub/model_folder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "services/base/status.h"
#include "services/hub/pull_record.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;

// The command that fills the folder; the name is known of folders that were pulled.
std::string PullCommand(const std::string& dir) {
  const auto record = ReadPullRecord(dir);
  return fmt::format("splice pull {} --to {}", record.ok() ? record->name.ToString() : "ORG/NAME", dir);
}

absl::Status CheckFile(const std::string& dir, const std::string& file) {
  const std::string path = dir + "/" + file;
  std::error_code error;
  if (!fs::is_regular_file(path, error))
    return Errorf(absl::StatusCode::kNotFound, "{}: missing; to fetch the model's files: {}", path, PullCommand(dir));
  std::ifstream in(path, std::ios::binary);
  char head[64] = {};
  in.read(head, sizeof(head));
  if (!IsLfsPointer({head, static_cast<size_t>(in.gcount())})) return absl::OkStatus();
  return Errorf(absl::StatusCode::kFailedPrecondition,
                "{}: a Git LFS pointer, not the file itself; to fetch it: {}, or git lfs pull in {}", path,
                PullCommand(dir), dir);
}

absl::Status CheckWeights(const std::string& dir) {
  std::error_code error;
  if (!fs::exists(dir + "/" + kIndexFile, error)) return CheckFile(dir, kWeightsFile);
  SPLICE_RETURN_IF_ERROR(CheckFile(dir, kIndexFile));
  std::ifstream in(dir + "/" + kIndexFile, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  SPLICE_ASSIGN_OR_RETURN(const auto files, WeightFilesOfIndex(text, dir + "/" + kIndexFile));
  for (const std::string& file : files) SPLICE_RETURN_IF_ERROR(CheckFile(dir, file));
  return absl::OkStatus();
}

}  // namespace

const std::vector<std::string>& SideFiles() {
  static const std::vector<std::string> files = {
      kConfigFile,
      "generation_config.json",
      "tokenizer.json",
      "tokenizer_config.json",
      "special_tokens_map.json",
      "chat_template.jinja",
      "head_classes.json",
      "recovery.json",
  };
  return files;
}

absl::StatusOr<std::vector<std::string>> WeightFilesOfIndex(const std::string& text, const std::string& where) {
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto map = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || map == root.end() || !map->is_object() || map->empty())
    return InvalidArgument("{}: no JSON object with entries in 'weight_map'", where);
  std::set<std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
    });
    if (!plain || name.starts_with('.') || !name.ends_with(".safetensors"))
      return InvalidArgument("{}: the file of '{}' is not the plain name of a .safetensors file", where, tensor);
    files.insert(name);
  }
  return std::vector<std::string>(files.begin(), files.end());
}

bool IsLfsPointer(std::string_view bytes) { return bytes.starts_with("version https://git-lfs.github.com/spec/"); }

absl::Status CheckModelFolder(const std::string& dir, FolderUse use) {
  if (use == FolderUse::kModel) SPLICE_RETURN_IF_ERROR(CheckFile(dir, kConfigFile));
  std::error_code error;
  for (const std::string& file : SideFiles()) {
    if (fs::exists(dir + "/" + file, error)) SPLICE_RETURN_IF_ERROR(CheckFile(dir, file));
  }
  return use == FolderUse::kModel ? CheckWeights(dir) : absl::OkStatus();
}

}  // namespace spl::hub
