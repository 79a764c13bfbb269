#include "services/base/listen_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace spl {
namespace {

using ::testing::HasSubstr;

std::string Message(const std::string& address, absl::StatusCode code) {
  const absl::Status status = CheckCanListen("--http", address);
  EXPECT_EQ(status.code(), code) << address;
  return std::string(status.message());
}

TEST(ListenCheckTest, SaysWhyAndWhereNot) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size), 0);
  const std::string taken = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  EXPECT_THAT(Message(taken, absl::StatusCode::kUnavailable),
              HasSubstr("--http " + taken + ": another program listens there"));
  ::close(listener);
  EXPECT_EQ(CheckCanListen("--http", taken), absl::OkStatus());
  EXPECT_EQ(CheckCanListen("--http", taken), absl::OkStatus()) << "leaves nothing behind";
  EXPECT_EQ(CheckCanListen("--http", "localhost:0"), absl::OkStatus());
}

TEST(ListenCheckTest, AddressesThatAreNone) {
  EXPECT_THAT(Message("127.0.0.1", absl::StatusCode::kInvalidArgument), HasSubstr("--http"));
  EXPECT_THAT(Message("127.0.0.1:99999", absl::StatusCode::kInvalidArgument), HasSubstr("99999"));
  EXPECT_THAT(Message("192.0.2.1:8000", absl::StatusCode::kUnavailable), HasSubstr("no such address"));
  EXPECT_THAT(Message("no-such-host.invalid:8000", absl::StatusCode::kUnavailable), HasSubstr("no-such-host.invalid"));
}

}  // namespace
}  // namespace spl
