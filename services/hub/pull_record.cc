#include "services/hub/pull_record.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "services/base/status.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string PathOf(const std::string& model_dir) { return model_dir + "/" + kPullFolder + "/record.json"; }

}  // namespace

absl::StatusOr<PullRecord> ReadPullRecord(const std::string& model_dir) {
  const std::string path = PathOf(model_dir);
  std::ifstream in(path, std::ios::binary);
  if (!in) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  const json root = json::parse(in, nullptr, /*allow_exceptions=*/false);
  try {
    PullRecord record;
    record.name = {root.at("repository").get<std::string>(), root.at("revision").get<std::string>()};
    record.commit = root.at("commit").get<std::string>();
    for (const json& file : root.at("files"))
      record.files.push_back({file.at("name").get<std::string>(), file.at("size").get<uint64_t>(),
                              ParseFileDigest(file.at("digest").get<std::string>())});
    return record;
  } catch (const json::exception& error) {
    return InvalidArgument("{}: {}", path, error.what());
  }
}

absl::Status WritePullRecord(const std::string& model_dir, const PullRecord& record) {
  json root = {{"repository", record.name.repository},
               {"revision", record.name.revision},
               {"commit", record.commit},
               {"files", json::array()}};
  for (const HubFile& file : record.files)
    root["files"].push_back({{"name", file.name}, {"size", file.size}, {"digest", file.digest.ToString()}});
  const std::string path = PathOf(model_dir), fresh = path + ".new";
  std::ofstream out(fresh, std::ios::trunc);
  out << root.dump(1) << "\n";
  out.close();
  std::error_code error;
  if (out) fs::rename(fresh, path, error);
  if (!out || error) return Errorf(absl::StatusCode::kUnavailable, "{}: cannot be written", path);
  return absl::OkStatus();
}

void RemovePullRecord(const std::string& model_dir) {
  std::error_code ignored;
  fs::remove(PathOf(model_dir), ignored);
}

bool HasFilesOf(const std::string& model_dir, const PullRecord& record) {
  for (const HubFile& file : record.files) {
    std::error_code error;
    if (fs::file_size(model_dir + "/" + file.name, error) != file.size || error) return false;
  }
  return true;
}

}  // namespace spl::hub
