#include "services/base/address.h"

#include <gtest/gtest.h>

namespace spl {
namespace {

TEST(ParseHostPort, AcceptsNamesAndLiterals) {
  const struct {
    const char* text;
    const char* host;
    int port;
  } cases[] = {{"127.0.0.1:8000", "127.0.0.1", 8000},
               {"localhost:0", "localhost", 0},
               {"[::1]:80", "::1", 80},
               {"h:65535", "h", 65535}};
  for (const auto& c : cases) {
    const auto parsed = ParseHostPort(c.text);
    ASSERT_TRUE(parsed.ok()) << c.text << ": " << parsed.status();
    EXPECT_EQ(parsed->host, c.host);
    EXPECT_EQ(parsed->port, c.port);
    EXPECT_EQ(parsed->ToString(), c.text);
  }
}

TEST(ParseHostPort, RefusesAnythingElseAndNamesIt) {
  for (const char* text : {"", "localhost", ":80", "h:", "h:65536", "h:-1", "h:8x", "::1:80", "[]:80", "h:80 "}) {
    const auto parsed = ParseHostPort(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(parsed.status().ToString().find(text), std::string::npos) << parsed.status();
  }
}

TEST(WithHost, ReplacesTheHostOnly) {
  EXPECT_EQ(WithHost("0.0.0.0:7101", ""), "0.0.0.0:7101");
  EXPECT_EQ(WithHost("0.0.0.0:7101", "10.0.0.7"), "10.0.0.7:7101");
  EXPECT_EQ(WithHost("[::]:7101", "fd00::7"), "[fd00::7]:7101");
}

}  // namespace
}  // namespace spl
