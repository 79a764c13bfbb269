// Limits of API keys and priorities, through the front doors.
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"

namespace spl::testing {
namespace {

constexpr char kBody[] = R"({"prompt":"x","max_tokens":1})";

std::string HeaderOf(const TestResponse& response, const std::string& name) {
  const auto it = response.headers.find(name);
  return it == response.headers.end() ? "" : it->second;
}

class LimitsTest : public ::testing::Test {
 protected:
  LimitsTest() : cluster_(1, 1) {
    WriteKeys("key-a alice rpm=2\nkey-b bob tpm=100000\n");
    cluster_.options.api_keys_file = path();
    cluster_.StartRouter();
  }
  std::string path() const { return dir_.path() + "/keys"; }
  void WriteKeys(const std::string& text) { std::ofstream(path()) << text; }
  TestResponse Ask(const std::string& key, const std::string& body = kBody) {
    return Call(cluster_.http(), "POST", "/v1/completions", body, {"authorization: Bearer " + key});
  }

  TempDir dir_;
  FakeCluster cluster_;
};

TEST_F(LimitsTest, RefusalsAre429WithRetryAfterAndTheLimitsName) {
  EXPECT_EQ(Ask("key-a").status, 200);
  const TestResponse second = Ask("key-a");
  EXPECT_EQ(second.status, 200);
  EXPECT_EQ(HeaderOf(second, "x-ratelimit-limit-requests"), "2");
  EXPECT_EQ(HeaderOf(second, "x-ratelimit-remaining-requests"), "0");
  const TestResponse third = Ask("key-a");
  EXPECT_EQ(third.status, 429);
  EXPECT_NE(third.body.find("2 requests per minute"), std::string::npos) << third.body;
  EXPECT_NE(third.body.find("\"code\":\"rate_limit_exceeded\""), std::string::npos) << third.body;
  EXPECT_FALSE(HeaderOf(third, "retry-after").empty());
  const TestResponse other = Ask("key-b");
  EXPECT_EQ(other.status, 200) << "another key";
  EXPECT_EQ(HeaderOf(other, "x-ratelimit-limit-requests"), "");
  EXPECT_EQ(HeaderOf(other, "x-ratelimit-limit-tokens"), "100000");
  EXPECT_NE(Call(cluster_.http(), "GET", "/metrics").body.find("splice_rate_limited_total 1"), std::string::npos);
}

TEST_F(LimitsTest, AChangedFileAppliesWithoutARestart) {
  WriteKeys("key-c carol\n");
  EXPECT_TRUE(test::Eventually([&] { return Ask("key-c").status == 200; }));
  EXPECT_EQ(Ask("key-b").status, 401);
  // A file that cannot be read leaves what is.
  WriteKeys("key-d dora rpm=none\n");
  EXPECT_TRUE(test::Eventually([&] {
    return Call(cluster_.http(), "GET", "/metrics").body.find("api_keys_reloads_total{result=\"refused\"} 1") !=
           std::string::npos;
  }));
  EXPECT_EQ(Ask("key-c").status, 200);
  EXPECT_EQ(Ask("key-d").status, 401);
}

TEST_F(LimitsTest, PriorityIsAnIntegerInRange) {
  EXPECT_EQ(Ask("key-b", R"({"prompt":"x","max_tokens":1,"priority":-3})").status, 200);
  EXPECT_EQ(Ask("key-b", R"({"prompt":"x","max_tokens":1,"priority":1001})").status, 400);
  const TestResponse half = Ask("key-b", R"({"prompt":"x","max_tokens":1,"priority":0.5})");
  EXPECT_EQ(half.status, 400);
  EXPECT_NE(half.body.find("\"param\":\"priority\""), std::string::npos) << half.body;
}

}  // namespace
}  // namespace spl::testing
