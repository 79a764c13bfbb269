// http://HOST:PORT[/BASE], as every --endpoint flag takes it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl::cli {

struct HttpUrl {
  std::string host;
  std::string port = "80";
  std::string base;  // "" or "/prefix", without a slash at the end

  std::string HostHeader() const { return host + ":" + port; }
};

// InvalidArgument says what is wrong; https is refused (a proxy in front of the cluster speaks it).
absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& text);

}  // namespace spl::cli
