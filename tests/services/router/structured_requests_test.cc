// Which workers a request with structured output may go to. The fake workers ignore it, as workers from before it do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "services/grammar/grammar_plugin.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using testing::FakeDecode;
using testing::FakePrefill;
using ::testing::HasSubstr;
using testing::TestResponse;

class StructuredRequestsTest : public ::testing::Test {
 protected:
  StructuredRequestsTest() : cluster_(1, 2) {}
  void SetUp() override {
    if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
  }
  TestResponse Ask(bool structured) {
    json body = {{"prompt", "x"}, {"max_tokens", 2}};
    if (structured) body["guided_regex"] = "[a-z]+";
    return Call(cluster_.http(), "POST", "/v1/completions", body.dump());
  }

  FakeCluster cluster_;
};

TEST_F(StructuredRequestsTest, AreRefusedWhereNoWorkerKeepsToThem) {
  cluster_.StartRouter();
  const TestResponse refused = Ask(true);
  EXPECT_EQ(refused.status, 501) << refused.body;
  const json error = json::parse(refused.body, nullptr, false).value("error", json::object());
  EXPECT_EQ(error.value("code", ""), "structured_output_unavailable") << refused.body;
  EXPECT_EQ(error.value("param", ""), "guided_regex");
  EXPECT_THAT(error.value("message", ""), HasSubstr("libsplice_xgrammar.so"));
  for (const auto& worker : cluster_.decode) EXPECT_EQ(worker->counters().reserves, 0);
  EXPECT_EQ(Ask(false).status, 200);
}

TEST_F(StructuredRequestsTest, GoOnlyToWorkersThatKeepToThem) {
  cluster_.prefill[0] = std::make_unique<FakePrefill>(cluster_.fabric, FakePrefill::Options{.structured_output = true});
  cluster_.decode[1] =
      std::make_unique<FakeDecode>(cluster_.fabric, FakeDecode::Options{.worker_id = "d1", .structured_output = true});
  cluster_.StartRouter();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(Ask(true).status, 200);
  EXPECT_EQ(cluster_.decode[0]->counters().reserves, 0);
  EXPECT_EQ(cluster_.decode[1]->counters().reserves, 8);
  EXPECT_EQ(cluster_.decode[1]->last_reserve().sampling().structured_output().regex(), "[a-z]+");
}

}  // namespace
}  // namespace spl::router
