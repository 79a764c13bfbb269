// "HOST:PORT" strings, the form of every --listen flag and every peer address.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl {

struct HostPort {
  std::string host;  // without the brackets of an IPv6 literal
  uint16_t port = 0;

  std::string ToString() const;  // with brackets where the host has a colon
};

// "127.0.0.1:8000", "localhost:0", "[::1]:80". InvalidArgument names the text and what is wrong with it.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);

// True if only this machine can reach a listener at `address`: 127.x.y.z, ::1 or localhost.
bool IsLoopback(std::string_view address);

// `address`, a valid HOST:PORT, with its host replaced by `host`: the address to advertise. Empty `host`: unchanged.
std::string WithHost(const std::string& address, const std::string& host);

}  // namespace spl
