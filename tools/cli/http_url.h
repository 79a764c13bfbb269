// http[s]://HOST[:PORT][/BASE], as every --endpoint and --url flag takes it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl::cli {

struct HttpUrl {
  bool https = false;
  std::string host;  // a name or an address, without the brackets of IPv6
  std::string port = "80";
  std::string base;  // "" or "/prefix", without a slash at the end

  std::string HostHeader() const {
    return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
  }
};

// The scheme may be left out: http. InvalidArgument says what is wrong.
absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& text);

}  // namespace spl::cli
