#include "tools/cli/hub_flags.h"

#include <cstdlib>
#include <fstream>

#include "services/base/status.h"
#include "tools/cli/endpoint.h"

namespace spl::cli {
namespace {

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The first word of a file; empty: it cannot be read.
std::string FirstWord(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

std::string SavedTokenPath() {
  if (const std::string path = Environment("HF_TOKEN_PATH"); !path.empty()) return path;
  if (const std::string home = Environment("HF_HOME"); !home.empty()) return home + "/token";
  if (const std::string cache = Environment("XDG_CACHE_HOME"); !cache.empty()) return cache + "/huggingface/token";
  return Environment("HOME") + "/.cache/huggingface/token";
}

}  // namespace

HubFlags HubFlags::FromEnvironment() {
  HubFlags flags;
  if (const std::string hub = Environment("HF_ENDPOINT"); !hub.empty()) flags.hub = hub;
  flags.ca_file = Environment("SPLICE_CA_FILE");
  return flags;
}

void HubFlags::Register(CLI::App& app) {
  app.add_option("--hub", hub, "address of the hub or of a mirror; also from HF_ENDPOINT")
      ->envname("HF_ENDPOINT")
      ->capture_default_str()
      ->type_name("URL");
  app.add_option("--token-file", token_file,
                 "file with a token of the hub, for gated and private models (default: HF_TOKEN, otherwise the token "
                 "that Hugging Face's own command has saved)")
      ->type_name("FILE");
  AddCaFlag(app, ca_file);
}

absl::StatusOr<hub::HubOptions> HubFlags::ToOptions() const {
  hub::HubOptions options{.url = hub, .ca_file = ca_file, .ca_flag = kCaFlag};
  if (options.url.find("://") == std::string::npos)
    return InvalidArgument("--hub {}: write http:// or https:// in front", hub);
  while (options.url.ends_with('/')) options.url.pop_back();
  if (!token_file.empty()) {
    options.token = FirstWord(token_file);
    if (options.token.empty())
      return Errorf(absl::StatusCode::kNotFound, "--token-file {}: cannot be read, or is empty", token_file);
  } else if (const char* const token = std::getenv("HF_TOKEN"); token != nullptr) {
    options.token = token;
  } else if (options.url.starts_with("https://")) {
    options.token = FirstWord(SavedTokenPath());
  }
  return options;
}

}  // namespace spl::cli
