// One raw HTTP exchange over a blocking socket: what a probe or a scraper sends.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "services/base/address.h"

namespace spl::testing {

// Connected to a numeric IPv4 HOST:PORT, or -1.
inline int ConnectTo(const std::string& address) {
  const auto parsed = ParseHostPort(address);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(parsed->port);
  inet_pton(AF_INET, parsed->host.c_str(), &to.sin_addr);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0) return fd;
  close(fd);
  return -1;
}

// Sends `request` and returns everything until the server closes; "" when it cannot connect.
inline std::string Exchange(const std::string& address, const std::string& request) {
  const int fd = ConnectTo(address);
  if (fd < 0) return "";
  std::string reply;
  char buffer[4096];
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
    ssize_t received;
    while ((received = recv(fd, buffer, sizeof(buffer), 0)) > 0) reply.append(buffer, static_cast<size_t>(received));
  }
  close(fd);
  return reply;
}

inline std::string HttpGet(const std::string& address, const std::string& path) {
  return Exchange(address, "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
}

// Value of a series, written as in the exposition with all of its labels, at /metrics of `address`; -1: there is none.
inline double MetricAt(const std::string& address, const std::string& series) {
  const std::string text = HttpGet(address, "/metrics");
  const size_t at = text.find("\n" + series + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
}

}  // namespace spl::testing
