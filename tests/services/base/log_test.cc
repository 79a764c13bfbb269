#include "services/base/log.h"

#include <gtest/gtest.h>

#include "services/base/status.h"

namespace spl {
namespace {

std::string Captured(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Log, WritesOneLineWithFields) {
  log::SetLevel(log::Level::kInfo);
  const std::string out = Captured([] {
    log::Info("test.event", log::F("n", 3), log::F("text", std::string("a b")), log::F("plain", "x"),
              log::F("status", InvalidArgument("bad\n\"{}\"", 1)));
  });
  EXPECT_NE(out.find("Z info test.event n=3 text=\"a b\" plain=x status=\"INVALID_ARGUMENT: bad\\n\\\"1\\\"\"\n"),
            std::string::npos)
      << out;
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1);
}

TEST(Log, ObeysItsLevel) {
  ASSERT_TRUE(log::SetLevel("warning").ok());
  const std::string out = Captured([] {
    log::Info("test.quiet");
    log::Warning("test.loud");
  });
  EXPECT_EQ(out.find("test.quiet"), std::string::npos);
  EXPECT_NE(out.find("warning test.loud"), std::string::npos);
  EXPECT_EQ(log::SetLevel("verbose").code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spl
