#include "services/base/http_endpoint.h"

#include <gtest/gtest.h>

#include "tests/services/base/http_client.h"

namespace spl {
namespace {

using testing::Exchange;
using testing::HttpGet;

std::unique_ptr<HttpEndpoint> StartOne() {
  auto endpoint = HttpEndpoint::Start("127.0.0.1:0", {{"/x", [] { return HttpReply{.body = "hello"}; }}});
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return std::move(endpoint).value();
}

TEST(HttpEndpoint, AnswersItsPaths) {
  const auto endpoint = StartOne();
  const std::string reply = HttpGet(endpoint->address(), "/x?query=1");
  EXPECT_EQ(reply.rfind("HTTP/1.1 200 OK\r\n", 0), 0u) << reply;
  EXPECT_NE(reply.find("\r\n\r\nhello"), std::string::npos) << reply;
  EXPECT_EQ(HttpGet(endpoint->address(), "/y").rfind("HTTP/1.1 404", 0), 0u);
  endpoint->Stop();
}

TEST(HttpEndpoint, KeepsConnectionsAlive) {
  const auto endpoint = StartOne();
  const std::string reply = Exchange(endpoint->address(),
                                     "GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
                                     "HEAD /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  const size_t second = reply.find("HTTP/1.1 200", 10);
  ASSERT_NE(second, std::string::npos) << reply;
  EXPECT_NE(reply.find("Content-Length: 5", second), std::string::npos) << reply;
  EXPECT_EQ(reply.find("hello", second), std::string::npos) << reply;
}

TEST(HttpEndpoint, SurvivesBadRequests) {
  const auto endpoint = StartOne();
  EXPECT_EQ(Exchange(endpoint->address(), "POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                .rfind("HTTP/1.1 405", 0),
            0u);
  EXPECT_EQ(Exchange(endpoint->address(), "\x16\x03\x01 not http at all\r\n\r\n"), "");
  EXPECT_EQ(Exchange(endpoint->address(), "GET /x HTTP/1.1\r\nA: " + std::string(20000, 'a') + "\r\n\r\n"), "");
  EXPECT_NE(HttpGet(endpoint->address(), "/x").find("hello"), std::string::npos);
}

// S14: probes are answered whoever holds all connections and says nothing.
TEST(HttpEndpoint, SilentConnectionsKeepNoProbeOut) {
  const auto endpoint = StartOne();
  std::vector<int> silent;
  for (int i = 0; i < 64; ++i) silent.push_back(testing::ConnectTo(endpoint->address()));
  EXPECT_NE(HttpGet(endpoint->address(), "/x").find("hello"), std::string::npos);
  char byte;
  EXPECT_EQ(recv(silent.front(), &byte, 1, 0), 0) << "the oldest has made room";
  EXPECT_LT(recv(silent.back(), &byte, 1, MSG_DONTWAIT), 0) << "and no other";
  for (int i = 0; i < 200; ++i) silent.push_back(testing::ConnectTo(endpoint->address()));
  EXPECT_NE(HttpGet(endpoint->address(), "/x").find("hello"), std::string::npos);
  for (const int fd : silent) close(fd);
}

TEST(HttpEndpoint, StopsWithOpenConnectionsAndFreesThePort) {
  auto endpoint = StartOne();
  const std::string address = endpoint->address();
  const int idle = testing::ConnectTo(address);
  endpoint->Stop();
  EXPECT_EQ(HttpGet(address, "/x"), "");
  close(idle);
  auto again = HttpEndpoint::Start(address, {});
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(HttpEndpoint, RefusesBadAddresses) {
  EXPECT_EQ(HttpEndpoint::Start("nonsense", {}).status().code(), absl::StatusCode::kInvalidArgument);
  const auto endpoint = StartOne();
  EXPECT_EQ(HttpEndpoint::Start(endpoint->address(), {}).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace spl
