// A blocking client of the OpenAI-compatible HTTP API, for the tools.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/cli/endpoint.h"

namespace spl::cli {

// One connection at a time; one thread at a time.
class ApiClient {
 public:
  // The URL as ParseHttpUrl takes it. With https:// the server must show a certificate of a CA in `ca_file` (or of the
  // system's) that names the URL's host; calls fail with Unavailable and the reason otherwise. InvalidArgument names
  // the flag: the URL or the CA file cannot be used.
  static absl::StatusOr<std::unique_ptr<ApiClient>> Create(const Endpoint& endpoint);
  ~ApiClient();

  absl::StatusOr<nlohmann::json> Get(const std::string& path);
  // The server's error object becomes the status: its code from the HTTP status, its message as it is.
  absl::StatusOr<nlohmann::json> Post(const std::string& path, const nlohmann::json& body);
  absl::StatusOr<nlohmann::json> Patch(const std::string& path, const nlohmann::json& body);
  absl::StatusOr<nlohmann::json> Delete(const std::string& path);
  // Calls on_event for every "data:" object of the stream until it ends or on_event returns false (then the connection
  // is closed: the server stops the work).
  absl::Status PostStream(const std::string& path, const nlohmann::json& body,
                          const std::function<bool(const nlohmann::json&)>& on_event);

 private:
  ApiClient() = default;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spl::cli
