// A worker that loads its model tells probes and the log how far it is.
#include "services/worker_flags/load_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "services/base/log.h"
#include "tests/services/base/http_client.h"

namespace spl {
namespace {

using ::testing::HasSubstr;
using testing::HttpGet;
using ::testing::StartsWith;

// An address that was free a moment ago.
std::string FreeAddress() {
  auto endpoint = HttpEndpoint::Start("127.0.0.1:0", {});
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  std::string address = (*endpoint)->address();
  (*endpoint)->Stop();
  return address;
}

TEST(LoadStatusTest, ProbesFailWithThePercentageUntilTheWorkerTakesTheAddress) {
  const std::string address = FreeAddress();
  auto status = LoadStatus::Start(address);
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_THAT(HttpGet(address, "/readyz"), HasSubstr("loading the model\n"));
  const auto report = (*status)->Reporter();
  report(43, 100);
  for (const char* path : {"/healthz", "/readyz"}) {
    const std::string reply = HttpGet(address, path);
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 503")) << path;
    EXPECT_THAT(reply, HasSubstr("loading the model: 43 %\n")) << path;
  }
  EXPECT_EQ(LoadStatus::Start(address).status().code(), absl::StatusCode::kUnavailable) << "the address is taken";
  (*status)->Stop();
  auto own = HttpEndpoint::Start(address, {{"/readyz", [] { return HttpReply{.body = "ready\n"}; }}});
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_THAT(HttpGet(address, "/readyz"), HasSubstr("ready\n"));
  (*own)->Stop();
}

TEST(LoadStatusTest, HasNoEndpointWithoutAnAddressThatIsKnown) {
  for (const char* listen : {"", "127.0.0.1:0"}) {
    auto status = LoadStatus::Start(listen);
    ASSERT_TRUE(status.ok()) << status.status();
    (*status)->Reporter()(1, 2);
    (*status)->Stop();
  }
}

TEST(LoadStatusTest, LogsEveryTenSeconds) {
  log::SetLevel(log::Level::kInfo);
  FakeClock clock;
  auto status = LoadStatus::Start("", clock);
  ASSERT_TRUE(status.ok()) << status.status();
  const auto report = (*status)->Reporter();
  ::testing::internal::CaptureStderr();
  report(1 << 20, 4 << 20);
  clock.Advance(std::chrono::seconds(9));
  report(2 << 20, 4 << 20);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  clock.Advance(std::chrono::seconds(1));
  report(3 << 20, 4 << 20);
  report(4 << 20, 4 << 20);
  const std::string line = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(line, HasSubstr("info model.loading percent=75 done=\"3.0 MiB\" total=\"4.0 MiB\"\n"));
  log::SetLevel(log::Level::kWarning);  // as test_main has it
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
}

}  // namespace
}  // namespace spl
