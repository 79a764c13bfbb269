// One file from a hub to the disk: goes on where an earlier try ended, checks it, and tries again.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "services/hub/hub_client.h"

namespace spl::hub {

struct DownloadOptions {
  std::string repository, commit;
  std::string folder;                          // where partial and finished files are
  int max_tries = 5;                           // in a row that bring no byte
  std::chrono::milliseconds first_pause{500};  // before the second try; doubles each time, 8 s at most
};

// Name of a file's content in the folder: its digest. A file whose digest is not known goes by its name.
std::string StagedName(const HubFile& file);

// Fetches `file` into FOLDER/StagedName, with ".part" behind it until it is complete and its digest is right. Bytes of
// a .part that an earlier call left are kept where the digest is known: content that changed has another name. `done`
// is the number of bytes that are there. Fills in size and digest of `file` where the hub tells them only now.
//
// Errors leave the .part for a later call, but DataLoss: the content was wrong twice. ResourceExhausted: the disk is
// full. Others: those of HubClient::Fetch.
absl::Status DownloadFile(HubClient& client, const DownloadOptions& options, HubFile& file,
                          std::atomic<uint64_t>& done);

}  // namespace spl::hub
