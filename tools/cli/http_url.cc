#include "tools/cli/http_url.h"

#include "services/base/status.h"

namespace spl::cli {

absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& text) {
  HttpUrl url;
  std::string rest = text;
  if (const size_t end = text.find("://"); end != std::string::npos) {
    const std::string scheme = text.substr(0, end);
    if (scheme != "http" && scheme != "https")
      return InvalidArgument("{}: only http:// and https:// are spoken here", text);
    url.https = scheme == "https";
    rest = text.substr(end + 3);
  }
  if (url.https) url.port = "443";
  const size_t slash = rest.find('/');
  if (slash != std::string::npos) {
    url.base = rest.substr(slash);
    rest.resize(slash);
    while (!url.base.empty() && url.base.back() == '/') url.base.pop_back();
  }
  // People paste "/v1" from client settings, but it belongs to the paths of the API.
  if (url.base.size() >= 3 && url.base.compare(url.base.size() - 3, 3, "/v1") == 0)
    url.base.resize(url.base.size() - 3);
  const size_t colon = rest.rfind(':');
  const bool has_port = colon != std::string::npos && rest.find(']', colon) == std::string::npos;
  url.host = has_port ? rest.substr(0, colon) : rest;
  if (has_port) url.port = rest.substr(colon + 1);
  if (url.host.size() > 2 && url.host.front() == '[') url.host = url.host.substr(1, url.host.size() - 2);
  const bool port_ok = !url.port.empty() && url.port.size() <= 5 &&
                       url.port.find_first_not_of("0123456789") == std::string::npos && std::stoi(url.port) <= 65535;
  if (url.host.empty() || !port_ok) return InvalidArgument("{}: not of the form http[s]://HOST:PORT", text);
  return url;
}

}  // namespace spl::cli
