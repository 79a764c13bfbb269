// Scores texts as lm_eval does, through real workers in one process: a prompt's log-probabilities are those with which
// its tokens would have been generated.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "spl/v1/inference.grpc.pb.h"
#include "tests/cluster/local_cluster_fixture.h"
#include "tests/cluster/processes.h"
#include "tests/support/engine_devices.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;

constexpr char kCompletions[] = "/v1/completions";

class PromptLogprobsClusterTest : public LocalClusterTest {
 protected:
  static void SetUpTestSuite() {
    cli::LocalClusterOptions options;
    options.model.dir = kTinyModel;
    options.http_listen = options.grpc_listen = "127.0.0.1:0";
    options.backend = OnGpu() ? "cuda" : "cpu";
    options.kv_bytes = 128 << 20;
    StartCluster(options);
  }

  // The log-probabilities of choice 0.
  json Logprobs(const json& body) {
    const HttpReply reply = HttpPost(cluster_->http_address(), kCompletions, body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body).at("choices").at(0).at("logprobs");
  }
  json Scored(const std::vector<int>& tokens) {
    return Logprobs({{"prompt", tokens}, {"max_tokens", 1}, {"temperature", 0}, {"echo", true}, {"logprobs", 1}});
  }
};

TEST_F(PromptLogprobsClusterTest, AreThoseOfGeneratedTokens) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<int> tokens;
  for (int i = 0; i < 150; ++i) tokens.push_back(static_cast<int>(random() % 4000));
  const json scored = Scored(tokens);
  ASSERT_EQ(scored.at("token_logprobs").size(), tokens.size() + 1);
  EXPECT_EQ(Scored(tokens).at("token_logprobs"), scored.at("token_logprobs")) << "the second time, with its KV cached";
  // The answer is an end token and nothing else.
  json ends = {{"prompt", tokens}, {"max_tokens", 1}, {"echo", true}, {"logprobs", 1}, {"logit_bias", {{"4091", 100}}}};
  const json ended = Logprobs(ends);
  ASSERT_EQ(ended.at("token_logprobs").size(), tokens.size() + 1);
  EXPECT_EQ(ended.at("tokens").back(), "<|im_end|>");
  EXPECT_LT(ended.at("token_logprobs").back().get<double>(), 0);
  EXPECT_EQ(ended.at("top_logprobs").at(149), scored.at("top_logprobs").at(149)) << "before the bias";
  for (const int length : {1, 63, 64, 65, 149}) {
    const json next = Logprobs({{"prompt", std::vector<int>(tokens.begin(), tokens.begin() + length)},
                                {"max_tokens", 1},
                                {"temperature", 0},
                                {"logprobs", 1}});
    EXPECT_EQ(next.at("top_logprobs").at(0), scored.at("top_logprobs").at(length)) << length << " tokens";
  }
}

// The same numbers, whichever API asks.
TEST_F(PromptLogprobsClusterTest, OverGrpcAreThoseOfHttp) {
  constexpr int kTokens = 70;
  std::vector<int> tokens;
  v1::GenerateRequest request;
  for (int i = 0; i < kTokens; ++i) {
    tokens.push_back(100 + 37 * i % 3000);
    request.mutable_prompt()->mutable_tokens()->add_ids(static_cast<uint32_t>(tokens.back()));
  }
  request.mutable_sampling()->set_max_tokens(1);
  request.set_prompt_logprobs(2);
  const HttpReply reply =
      HttpPost(cluster_->http_address(), kCompletions,
               json{{"prompt", tokens}, {"max_tokens", 1}, {"temperature", 0}, {"prompt_logprobs", 2}}.dump());
  ASSERT_EQ(reply.status, 200) << reply.body;
  const json expected = json::parse(reply.body).at("choices").at(0).at("prompt_logprobs");
  const auto stub =
      v1::Inference::NewStub(grpc::CreateChannel(cluster_->grpc_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  std::vector<v1::GenerateResponse::PromptTokens::Token> got;
  while (reader->Read(&response))
    got.insert(got.end(), response.prompt().tokens().begin(), response.prompt().tokens().end());
  const grpc::Status status = reader->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(got.size(), static_cast<size_t>(kTokens));
  EXPECT_FALSE(got[0].has_logprob());
  for (size_t i = 1; i < got.size(); ++i) {
    EXPECT_EQ(got[i].token_id(), static_cast<uint32_t>(tokens[i]));
    const json& entries = expected.at(i);
    const auto expect = [&](uint32_t id, float logprob) {
      EXPECT_NEAR(entries.at(std::to_string(id)).at("logprob").get<double>(), logprob, 1e-5) << i;
    };
    expect(got[i].token_id(), got[i].logprob().logprob());
    ASSERT_EQ(got[i].logprob().top_size(), 2);
    for (const auto& other : got[i].logprob().top()) expect(other.token_id(), other.logprob());
  }
}

}  // namespace
}  // namespace spl::test
