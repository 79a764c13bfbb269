// Blocking client of the OpenAI-compatible HTTP API, for the tools.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/cli/endpoint.h"

namespace spl::cli {

// One connection at a time; one thread at a time, but for Cancel.
class ApiClient {
 public:
  // `endpoint.url`: in the form of ParseApiUrl. With https://, the server must show a certificate for the URL's host
  // from a CA in `ca_file` (empty: from the system's CAs); otherwise calls fail with Unavailable and the reason.
  // InvalidArgument names the flag: the URL or the CA file cannot be used.
  static absl::StatusOr<std::unique_ptr<ApiClient>> Create(const Endpoint& endpoint);
  ~ApiClient();

  absl::StatusOr<nlohmann::json> Get(const std::string& path);
  // Errors of the server: the code is that of the HTTP status, the message that of the server's error object.
  absl::StatusOr<nlohmann::json> Post(const std::string& path, const nlohmann::json& body);
  absl::StatusOr<nlohmann::json> Patch(const std::string& path, const nlohmann::json& body);
  absl::StatusOr<nlohmann::json> Delete(const std::string& path);
  // Calls on_event for every "data:" object of the stream, until the stream ends or on_event returns false. In that
  // case the connection is closed, and the server stops the work.
  absl::Status PostStream(const std::string& path, const nlohmann::json& body,
                          const std::function<bool(const nlohmann::json&)>& on_event);
  // Any thread: ends what runs, and all later calls, with Cancelled.
  void Cancel();

 private:
  ApiClient() = default;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spl::cli
