// http[s]://HOST[:PORT][/BASE], the form of every --endpoint and --url flag.
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

// Parses a URL. Without a scheme it is http. InvalidArgument names the mistake.
absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& text);

}  // namespace spl::cli
