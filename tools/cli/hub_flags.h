// The hub that models come from: address, token and CAs, from flags and from Hugging Face's environment variables.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "services/hub/hub_client.h"

namespace spl::cli {

struct HubFlags {
  std::string hub = hub::kDefaultHub;
  std::string token_file;
  std::string ca_file;

  // As without flags: HF_ENDPOINT and SPLICE_CA_FILE.
  static HubFlags FromEnvironment();
  void Register(CLI::App& app);
  // The token is that of --token-file, otherwise HF_TOKEN, otherwise the one that Hugging Face's own command has saved
  // (HF_TOKEN_PATH, HF_HOME/token or ~/.cache/huggingface/token), which goes to https:// hubs alone. HF_TOKEN set to
  // nothing means none. NotFound: --token-file cannot be read.
  absl::StatusOr<hub::HubOptions> ToOptions() const;
};

}  // namespace spl::cli
