// http:// and https:// URLs: host, port, and the path with its query.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl {

struct HttpUrl {
  bool https = false;
  std::string host;  // a name or an address, without the brackets of IPv6
  std::string port = "80";
  std::string path;  // "" or "/path?query"; a fragment is dropped

  // HOST:PORT, with brackets around an IPv6 address.
  std::string HostHeader() const {
    return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
  }
  // Scheme, host and port: two URLs of one origin are answered by one server.
  std::string Origin() const { return (https ? "https://" : "http://") + HostHeader(); }
};

// Parses a URL. Without a scheme it is http. InvalidArgument names the mistake; a URL with a user name is one.
absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& text);

// The URL that a Location header names, seen from the URL that was asked.
absl::StatusOr<HttpUrl> ResolveLocation(const HttpUrl& asked, const std::string& location);

// Encodes a name as one part of a URL's path.
std::string PercentEncode(const std::string& name);

}  // namespace spl
