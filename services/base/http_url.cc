#include "services/base/http_url.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl {

absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& text) {
  // A line break in a URL would be one in the request.
  if (std::any_of(text.begin(), text.end(), [](char c) { return c <= ' ' || c > '~'; }))
    return InvalidArgument("a URL has a space, a control character or a letter beyond ASCII");
  HttpUrl url;
  std::string rest = text;
  if (const size_t end = text.find("://"); end != std::string::npos && end < text.find_first_of("/?#")) {
    const std::string scheme = text.substr(0, end);
    if (scheme != "http" && scheme != "https")
      return InvalidArgument("{}: only http:// and https:// are spoken here", text);
    url.https = scheme == "https";
    rest = text.substr(end + 3);
  }
  if (url.https) url.port = "443";
  rest.resize(std::min(rest.size(), rest.find('#')));
  if (const size_t end = rest.find_first_of("/?"); end != std::string::npos) {
    url.path = rest.substr(end);
    if (url.path.front() == '?') url.path = "/" + url.path;
    rest.resize(end);
  }
  if (rest.find('@') != std::string::npos) return InvalidArgument("a URL with a user name or a password is not taken");
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

absl::StatusOr<HttpUrl> ResolveLocation(const HttpUrl& asked, const std::string& location) {
  const size_t scheme = location.find("://");
  if (scheme != std::string::npos && scheme < location.find_first_of("/?#")) return ParseHttpUrl(location);
  if (location.starts_with("//")) return ParseHttpUrl((asked.https ? "https:" : "http:") + location);
  if (location.starts_with("/")) return ParseHttpUrl(asked.Origin() + location);
  const std::string path = asked.path.substr(0, asked.path.find('?'));
  return ParseHttpUrl(asked.Origin() + (path.empty() ? "/" : path.substr(0, path.rfind('/') + 1)) + location);
}

std::string PercentEncode(const std::string& name) {
  std::string out;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '_' || c == '.' || c == '~';
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

}  // namespace spl
