// Log-probabilities of prompts over HTTP, as lm_eval asks for them, with fake workers: token i of a prompt has -i, and
// alternative j of it has -j.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using ::testing::HasSubstr;
using testing::HttpTestClient;

constexpr char kCompletions[] = "/v1/completions";

class PromptLogprobsApiTest : public ::testing::Test {
 protected:
  PromptLogprobsApiTest() : cluster_(1, 1) { cluster_.StartRouter(); }

  json Post(const json& body) {
    const auto response = Call(cluster_.http(), "POST", kCompletions, body.dump());
    EXPECT_EQ(response.status, 200) << response.body;
    return json::parse(response.body, nullptr, false);
  }

  FakeCluster cluster_;
};

TEST_F(PromptLogprobsApiTest, EchoWithLogprobs) {
  const json body = {{"prompt", {10, 11, 12, 13}}, {"max_tokens", 1}, {"echo", true}, {"logprobs", 2}};
  const json logprobs = Post(body).at("choices").at(0).at("logprobs");
  ASSERT_EQ(logprobs.at("token_logprobs").size(), 5u) << "the prompt, and the answer";
  EXPECT_TRUE(logprobs.at("token_logprobs").at(0).is_null());
  EXPECT_TRUE(logprobs.at("top_logprobs").at(0).is_null());
  for (int i = 1; i < 4; ++i) {
    EXPECT_EQ(logprobs.at("token_logprobs").at(i), -i);
    EXPECT_EQ(logprobs.at("top_logprobs").at(i).size(), 2u);
  }
  for (const char* list : {"tokens", "top_logprobs", "text_offset"}) EXPECT_EQ(logprobs.at(list).size(), 5u) << list;
  EXPECT_EQ(logprobs.at("text_offset").at(0), 0);
  EXPECT_EQ(logprobs.at("text_offset").at(1), logprobs.at("tokens").at(0).get<std::string>().size());
  EXPECT_EQ(cluster_.prefill[0]->last_run().prompt_logprobs(), 2u);
  EXPECT_FALSE(Post(body).at("choices").at(0).contains("prompt_logprobs"));
}

TEST_F(PromptLogprobsApiTest, AChatHasThemBesideItsChoices) {
  const json body = {
      {"messages", {{{"role", "user"}, {"content", "ab"}}}}, {"max_tokens", 1}, {"n", 2}, {"prompt_logprobs", 1}};
  const auto response = Call(cluster_.http(), "POST", "/v1/chat/completions", body.dump());
  ASSERT_EQ(response.status, 200) << response.body;
  const json answer = json::parse(response.body);
  const json& list = answer.at("prompt_logprobs");
  ASSERT_EQ(list.size(), answer.at("usage").at("prompt_tokens"));
  EXPECT_TRUE(list.at(0).is_null());
  EXPECT_THAT(list.at(1).dump(), HasSubstr(R"("logprob":-1.0)"));
  EXPECT_EQ(answer.at("choices").size(), 2u);
  EXPECT_FALSE(answer.at("choices").at(0).contains("prompt_logprobs"));
}

// lm_eval leaves out the last entry, that of the one token it asks for: also an end token has one.
TEST_F(PromptLogprobsApiTest, AnEndTokenHasAnEntry) {
  cluster_.fabric.answer_tokens = 1;
  json body = {{"prompt", {10, 11}}, {"max_tokens", 8}, {"echo", true}, {"logprobs", 1}};
  const json choice = Post(body).at("choices").at(0);
  EXPECT_EQ(choice.at("finish_reason"), "stop");
  EXPECT_EQ(choice.at("logprobs").at("token_logprobs").size(), 4u) << "the prompt, a token, the end";
  body.erase("echo");
  EXPECT_EQ(Post(body).at("choices").at(0).at("logprobs").at("token_logprobs").size(), 1u);
}

TEST_F(PromptLogprobsApiTest, EveryPromptAndContinuationHasItsOwn) {
  const json choices =
      Post({{"prompt", {{10, 11}, {10, 11, 12}}}, {"max_tokens", 2}, {"n", 2}, {"echo", true}, {"logprobs", 0}})
          .at("choices");
  ASSERT_EQ(choices.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const size_t length = i < 2 ? 2 : 3;
    EXPECT_EQ(choices.at(i).at("logprobs").at("token_logprobs").size(), length + 2);
    EXPECT_EQ(choices.at(i).at("logprobs").at("token_logprobs").at(length - 1), -static_cast<int>(length - 1));
  }
}

TEST_F(PromptLogprobsApiTest, AStreamHasThemInFront) {
  const json body = {{"prompt", {10, 11, 12}}, {"max_tokens", 3}, {"echo", true}, {"logprobs", 1}, {"stream", true}};
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", kCompletions, body.dump());
  EXPECT_EQ(client.ReadHead().status, 200);
  std::vector<json> logprobs;
  while (auto event = client.NextEvent()) {
    if (*event == "[DONE]") continue;
    const json choice = json::parse(*event).at("choices").at(0);
    if (choice.at("logprobs").is_null()) continue;
    for (const json& value : choice.at("logprobs").at("token_logprobs")) logprobs.push_back(value);
  }
  ASSERT_EQ(logprobs.size(), 6u);
  EXPECT_TRUE(logprobs[0].is_null());
  EXPECT_EQ(logprobs[1], -1);
  EXPECT_EQ(logprobs[2], -2);
}

TEST_F(PromptLogprobsApiTest, AsVllmNamesThem) {
  const json choice = Post({{"prompt", {10, 2, 12}}, {"max_tokens", 1}, {"prompt_logprobs", 2}}).at("choices").at(0);
  EXPECT_TRUE(choice.at("logprobs").is_null());
  const json& list = choice.at("prompt_logprobs");
  ASSERT_EQ(list.size(), 3u);
  EXPECT_TRUE(list.at(0).is_null());
  EXPECT_EQ(list.at(1).size(), 2u) << "token 2 is an alternative itself";
  EXPECT_EQ(list.at(1).at("1").at("rank"), 1);
  EXPECT_EQ(list.at(1).at("2").at("rank"), 2);
  EXPECT_EQ(list.at(2).size(), 3u);
  EXPECT_EQ(list.at(2).at("12").at("logprob"), -2);
  EXPECT_TRUE(list.at(2).at("12").at("rank").is_null());
  EXPECT_TRUE(list.at(2).at("12").at("decoded_token").is_string());
}

// A worker that takes over computes them, too.
TEST(PromptLogprobsRetryTest, AnotherTryAsksAgain) {
  FakeCluster cluster(2, 1);
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->FailRuns(grpc::Status(grpc::StatusCode::UNAVAILABLE, "device lost"), 1);
  const json body = {{"prompt", {10, 11}}, {"max_tokens", 1}, {"echo", true}, {"logprobs", 0}};
  const auto response = Call(cluster.http(), "POST", kCompletions, body.dump());
  ASSERT_EQ(response.status, 200) << response.body;
  const json answer = json::parse(response.body);
  EXPECT_EQ(answer.at("choices").at(0).at("logprobs").at("token_logprobs").at(1), -1);
  EXPECT_EQ(answer.at("splice").at("attempts"), 3);
}

TEST_F(PromptLogprobsApiTest, AWorkerThatDoesNotComputeThemFailsTheRequest) {
  cluster_.prefill[0]->IgnorePromptLogprobs();
  const auto response = Call(cluster_.http(), "POST", kCompletions,
                             json{{"prompt", {10, 11}}, {"max_tokens", 1}, {"echo", true}, {"logprobs", 0}}.dump());
  EXPECT_GE(response.status, 400);
  EXPECT_THAT(response.body, HasSubstr("upgrade it"));
}

}  // namespace
}  // namespace spl::router
