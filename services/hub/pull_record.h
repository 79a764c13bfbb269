// A note of `splice pull` in a model folder that all files are there: FOLDER/.splice-pull/record.json.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/hub/file_digest.h"
#include "services/hub/model_name.h"

namespace spl::hub {

// Folder within a model folder: the record, the lock, and files that are not complete.
inline constexpr char kPullFolder[] = ".splice-pull";

struct HubFile {
  std::string name;
  uint64_t size = 0;
  FileDigest digest;
};

struct PullRecord {
  ModelName name;
  std::string commit;
  std::vector<HubFile> files;
};

// NotFound: none is there. InvalidArgument: it is damaged.
absl::StatusOr<PullRecord> ReadPullRecord(const std::string& model_dir);
// Replaces the record at once. Unavailable: it cannot be written.
absl::Status WritePullRecord(const std::string& model_dir, const PullRecord& record);
void RemovePullRecord(const std::string& model_dir);

// True if every file of the record is there in its size.
bool HasFilesOf(const std::string& model_dir, const PullRecord& record);

}  // namespace spl::hub
