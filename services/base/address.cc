#include "services/base/address.h"

#include <charconv>

#include "services/base/status.h"

namespace spl {

std::string HostPort::ToString() const {
  if (host.find(':') != std::string::npos) return fmt::format("[{}]:{}", host, port);
  return fmt::format("{}:{}", host, port);
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return InvalidArgument("address '{}' is not HOST:PORT", text);
  std::string_view host = text.substr(0, colon);
  const std::string_view port_text = text.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return InvalidArgument("address '{}': an IPv6 host needs brackets, as in [::1]:80", text);
  }
  if (host.empty()) return InvalidArgument("address '{}' has no host", text);
  HostPort result{std::string(host), 0};
  const char* const end = port_text.data() + port_text.size();
  const auto [parsed_to, error] = std::from_chars(port_text.data(), end, result.port);
  if (error != std::errc() || parsed_to != end || port_text.empty()) {
    return InvalidArgument("address '{}': port '{}' is not a number from 0 to 65535", text, port_text);
  }
  return result;
}

bool IsLoopback(std::string_view address) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  return parsed.ok() && (parsed->host == "localhost" || parsed->host == "::1" || parsed->host.starts_with("127."));
}

std::string WithHost(const std::string& address, const std::string& host) {
  if (host.empty()) return address;
  const auto parsed = ParseHostPort(address);
  return parsed.ok() ? HostPort{host, parsed->port}.ToString() : address;
}

}  // namespace spl
