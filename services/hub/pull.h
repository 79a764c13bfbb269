// Brings a model from a hub into a folder: config.json, tokenizer, chat template and safetensors, nothing else.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/hub/hub_client.h"

namespace spl::hub {

struct PullProgress {
  enum class Stage { kListing, kWaiting, kChecking, kFetching, kDone };  // kWaiting: for another pull of this folder
  struct File {
    std::string name;
    uint64_t size = 0, done = 0;
    bool complete = false;
  };
  Stage stage = Stage::kListing;
  std::vector<File> files;      // that are fetched
  uint64_t size = 0, done = 0;  // sums over `files`
  double seconds = 0;           // since fetching began
};

struct PullOptions {
  ModelName name;
  std::string dir;  // folder that is filled
  HubOptions hub;
  int parallel = 4;                            // files at a time
  int max_tries = 5;                           // in a row that bring no byte of a file
  std::chrono::milliseconds first_pause{500};  // between tries; doubles
  std::chrono::seconds lock_timeout{3600};     // how long another pull of the folder may take
  uint64_t spare_bytes = 64 << 20;             // that must be left on the disk
  // Called on the calling thread about five times a second, and at the end. May be null.
  std::function<void(const PullProgress&)> on_progress;
  // Asked once, when the commit is known; true: another folder has it, nothing is fetched. May be null.
  std::function<bool(const std::string& commit)> is_elsewhere;
  // Asked as often as progress is told; true ends the pull with Cancelled. May be null.
  std::function<bool()> stopped;
};

struct PullResult {
  std::string commit;
  std::vector<HubFile> files;  // all that the model needs
  uint64_t fetched_bytes = 0;  // 0: everything was there
  double seconds = 0;
};

// The files of a listing that Splice needs. `index` is the content of model.safetensors.index.json, empty if the
// listing has none. FailedPrecondition: no config.json, no safetensors, or weights that the index names are missing;
// the message says what is there instead.
absl::StatusOr<std::vector<HubFile>> NeededFiles(const ModelName& name, const HubListing& listing,
                                                 const std::string& index);

// Files are fetched beside the model's and moved in place together once all are there and have the right digests: a
// folder that holds an older commit stays usable until then, also if the pull fails. A failed pull keeps the bytes that
// came, for the next one. Two pulls of one folder, also of two processes, go one behind the other.
//
// Errors: HubClient's and DownloadFile's. ResourceExhausted: not enough room on the disk (before any weights are
// fetched). DeadlineExceeded: another pull held the folder longer than lock_timeout. Cancelled. FailedPrecondition: see
// NeededFiles, or the folder cannot be written.
absl::StatusOr<PullResult> PullModel(const PullOptions& options);

}  // namespace spl::hub
