// The typed API over fake workers.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "services/base/grpc_status.h"
#include "spl/v1/inference.grpc.pb.h"
#include "tests/support/fake_cluster.h"

namespace spl::router {
namespace {

using testing::FakeCluster;
using testing::FakePrefill;

class GrpcApiTest : public ::testing::Test {
 protected:
  GrpcApiTest() : cluster_(1, 1) {
    cluster_.options.dispatch.admission.max_queue = 0;
    cluster_.StartRouter();
    stub_ = v1::Inference::NewStub(
        grpc::CreateChannel(cluster_.router->grpc_address(), grpc::InsecureChannelCredentials()));
  }

  static v1::GenerateRequest Request(uint32_t max_tokens) {
    v1::GenerateRequest request;
    request.mutable_prompt()->set_text("the typed interface");
    request.mutable_sampling()->set_max_tokens(max_tokens);
    return request;
  }
  struct Result {
    grpc::Status status;
    std::string text;
    std::vector<uint32_t> ids;
    v1::FinishReason reason = v1::FINISH_REASON_UNSPECIFIED;
    v1::GenerateResponse::Final final;
    bool final_is_last = false;
    std::vector<v1::GenerateResponse::PromptTokens::Token> prompt;
    int prompt_messages = 0;
    size_t largest_bytes = 0;
  };
  Result Generate(const v1::GenerateRequest& request, grpc::ClientContext* context) {
    Result result;
    auto reader = stub_->Generate(context, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      result.final_is_last = response.has_final();
      if (response.has_final()) result.final = response.final();
      result.largest_bytes = std::max(result.largest_bytes, response.ByteSizeLong());
      if (response.has_prompt()) {
        EXPECT_TRUE(result.text.empty() && result.ids.empty()) << "the prompt comes first";
        result.prompt_messages += 1;
        result.prompt.insert(result.prompt.end(), response.prompt().tokens().begin(), response.prompt().tokens().end());
      }
      if (!response.has_delta()) continue;
      result.text += response.delta().text();
      result.ids.insert(result.ids.end(), response.delta().token_ids().begin(), response.delta().token_ids().end());
      if (response.delta().finish_reason() != 0) result.reason = response.delta().finish_reason();
    }
    result.status = reader->Finish();
    return result;
  }
  Result Generate(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    return Generate(request, &context);
  }

  FakeCluster cluster_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(GrpcApiTest, StreamsTokensTextAndReceipt) {
  const Result result = Generate(Request(12));
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  EXPECT_EQ(result.ids.size(), 12u);
  EXPECT_FALSE(result.text.empty());
  EXPECT_EQ(result.reason, v1::FINISH_REASON_LENGTH);
  EXPECT_TRUE(result.final_is_last);
  EXPECT_EQ(result.final.completion_tokens(), 12u);
  EXPECT_EQ(result.final.receipt().decode_worker(), "d0");
  EXPECT_GT(result.final.receipt().ttft_seconds(), 0);
}

// The fields of the proto, not those of the HTTP API.
TEST_F(GrpcApiTest, InvalidArgumentNamesTheField) {
  const auto expect = [&](const std::string& begin, const std::function<void(v1::GenerateRequest&)>& change) {
    v1::GenerateRequest request = Request(4);
    change(request);
    const grpc::Status status = Generate(request).status;
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << begin;
    EXPECT_THAT(status.error_message(), ::testing::StartsWith(begin));
  };
  expect("sampling.temperature: must be", [](auto& r) { r.mutable_sampling()->set_temperature(-1); });
  expect("sampling.stop_token_ids: 4000000000 is",
         [](auto& r) { r.mutable_sampling()->add_stop_token_ids(4'000'000'000); });
  expect("reuse.policy: \"zz\" is not served", [](auto& r) { r.mutable_reuse()->set_policy("zz"); });
  expect("reuse.decode: \"zz\" is not served", [](auto& r) { r.mutable_reuse()->set_decode("zz"); });
  expect("reuse.heads.ffn_mass: must be", [](auto& r) {
    r.mutable_reuse()->set_policy("splice");
    r.mutable_reuse()->mutable_heads()->set_ffn_mass(2);
  });
  expect("prompt_logprobs: at most 20", [](auto& r) { r.set_prompt_logprobs(21); });
  expect("prompt_logprobs: log-probabilities of prompts are those of exact prefill", [](auto& r) {
    r.set_prompt_logprobs(1);
    r.mutable_reuse()->set_policy("sparsex");
  });
  expect("echo: is served for prompts of text, parts or tokens", [](auto& r) {
    r.mutable_prompt()->mutable_chat()->add_messages()->set_role("user");
    r.set_echo(true);
  });
  expect("namespace_name: may have", [](auto& r) { r.set_namespace_name(std::string(300, 'x')); });
  expect("prompt.tokens.segments: [2, 1) must be", [](auto& r) {
    auto& tokens = *r.mutable_prompt()->mutable_tokens();
    tokens.add_ids(5);
    tokens.add_ids(6);
    tokens.add_segments()->set_begin(2);
    tokens.mutable_segments(0)->set_end(1);
  });
  expect("prompt.chat.messages: ", [](auto& r) {
    auto& message = *r.mutable_prompt()->mutable_chat()->add_messages();
    message.set_role("user");
    for (int i = 0; i < 20'000; ++i) message.mutable_content()->append("word and ");
  });
}

v1::GenerateRequest TokensRequest(uint32_t num_tokens, uint32_t max_tokens) {
  v1::GenerateRequest request;
  for (uint32_t i = 0; i < num_tokens; ++i) request.mutable_prompt()->mutable_tokens()->add_ids(10 + i % 100);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  return request;
}

// The fake worker gives token i of a prompt -i, and alternative j of it, token j + 1, -j.
TEST_F(GrpcApiTest, LogProbabilitiesOfAPrompt) {
  v1::GenerateRequest request = TokensRequest(4, 2);
  request.set_prompt_logprobs(2);
  request.mutable_sampling()->set_n(3);
  const Result result = Generate(request);
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  ASSERT_EQ(result.prompt.size(), 4u) << "once for all continuations";
  EXPECT_EQ(result.prompt_messages, 1);
  EXPECT_FALSE(result.prompt[0].has_logprob());
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(result.prompt[i].token_id(), 10 + i);
  for (int i = 1; i < 4; ++i) {
    const v1::TokenLogprob& logprob = result.prompt[i].logprob();
    EXPECT_EQ(logprob.logprob(), static_cast<float>(-i));
    ASSERT_EQ(logprob.top_size(), 2);
    EXPECT_EQ(logprob.top(1).token_id(), 2u);
    EXPECT_EQ(logprob.top(1).logprob(), -1);
  }
  EXPECT_EQ(result.ids.size(), 6u);
  EXPECT_EQ(result.final.completion_tokens(), 6u);
  request.clear_prompt_logprobs();
  EXPECT_EQ(Generate(request).prompt_messages, 0) << "nobody asked for them";
}

// A client of gRPC refuses messages of more than 4 MB.
TEST_F(GrpcApiTest, LogProbabilitiesOfALongPromptComeInPieces) {
  v1::GenerateRequest request = TokensRequest(3000, 1);
  request.set_prompt_logprobs(20);
  const Result result = Generate(request);
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  EXPECT_GT(result.prompt_messages, 1);
  EXPECT_LT(result.largest_bytes, 256u << 10);
  ASSERT_EQ(result.prompt.size(), 3000u);
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(result.prompt[i].token_id(), static_cast<uint32_t>(10 + i % 100));
    ASSERT_EQ(result.prompt[i].logprob().logprob(), static_cast<float>(-i)) << i;
  }
}

TEST_F(GrpcApiTest, AnEchoIsInFrontOfEveryContinuation) {
  v1::GenerateRequest request = Request(3);
  const std::string plain = Generate(request).text;
  request.set_echo(true);
  EXPECT_EQ(Generate(request).text, "the typed interface" + plain);
  request.mutable_sampling()->set_n(2);
  const std::string both = Generate(request).text;
  EXPECT_NE(both.find("the typed interface"), both.rfind("the typed interface")) << both;
}

// As over HTTP: with log-probabilities the echo has those of the prompt, too.
TEST_F(GrpcApiTest, AnEchoWithLogProbabilitiesHasThoseOfThePrompt) {
  v1::GenerateRequest request = TokensRequest(4, 1);
  request.set_echo(true);
  request.mutable_sampling()->set_logprobs(1);
  Result result = Generate(request);
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  ASSERT_EQ(result.prompt.size(), 4u);
  EXPECT_EQ(result.prompt[3].logprob().top_size(), 1);
  request.set_prompt_logprobs(3);
  result = Generate(request);
  ASSERT_EQ(result.prompt.size(), 4u);
  EXPECT_EQ(result.prompt[3].logprob().top_size(), 3);
}

TEST_F(GrpcApiTest, EmptyPromptUnknownModelAndPolicy) {
  EXPECT_EQ(Generate(v1::GenerateRequest()).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::GenerateRequest request = Request(4);
  request.set_model("gpt-9");
  EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::NOT_FOUND);
  request = Request(4);
  request.mutable_reuse()->set_policy("magic");
  EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(GrpcApiTest, FullClusterHasARetryAfterTrailer) {
  cluster_.decode[0]->SetFull(true);
  grpc::ClientContext context;
  const Result result = Generate(Request(4), &context);
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GE(RetryAfterOf(context).value_or(std::chrono::milliseconds(0)).count(), 1000);
}

TEST_F(GrpcApiTest, DeadlineFreesBothSides) {
  cluster_.prefill[0]->Hold(true);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  EXPECT_EQ(Generate(Request(4), &context).status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(cluster_.decode[0]->WaitIdle());
  EXPECT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.waiting == 0; }));
}

TEST_F(GrpcApiTest, CancelFreesBothSides) {
  cluster_.decode[0]->SetGate(5);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request(100));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  context.TryCancel();
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(cluster_.decode[0]->WaitIdle());
}

TEST_F(GrpcApiTest, SlowReaderPausesTheDecodeStreamAndLosesNothing) {
  v1::GenerateRequest request = Request(3000);
  request.mutable_sampling()->set_logprobs(20);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, request);
  v1::GenerateResponse response;
  size_t tokens = 0;
  while (reader->Read(&response)) {
    tokens += static_cast<size_t>(response.delta().token_ids_size());
    if (tokens < 50) std::this_thread::yield();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, 3000u);
}

// What a chat has beside roles and texts reaches the template. That of splice-tiny has no place for tools, and says so.
TEST_F(GrpcApiTest, FurtherMembersOfAChat) {
  const auto count = [this](const v1::Chat& chat, v1::CountTokensResponse* response) {
    v1::CountTokensRequest request;
    *request.mutable_prompt()->mutable_chat() = chat;
    request.set_return_ids(true);
    grpc::ClientContext context;
    return stub_->CountTokens(&context, request, response);
  };
  v1::Chat chat;
  chat.add_messages()->set_role("user");
  chat.mutable_messages(0)->set_content("a");
  v1::ChatMessage& answer = *chat.add_messages();
  answer.set_role("assistant");
  answer.set_content("the answer is");
  answer.set_reasoning_content("because");
  v1::CountTokensResponse whole, continued, refused;
  ASSERT_TRUE(count(chat, &whole).ok());
  chat.set_continue_final_message(true);
  ASSERT_TRUE(count(chat, &continued).ok());
  ASSERT_LT(continued.num_tokens(), whole.num_tokens());
  EXPECT_TRUE(std::equal(continued.ids().begin(), continued.ids().end(), whole.ids().begin()));

  chat.add_tools()->set_name("f");
  grpc::Status status = count(chat, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "tools: the model's chat template has no place for tools");
  chat.mutable_tools(0)->set_parameters_json("[1]");
  EXPECT_THAT(count(chat, &refused).error_message(), ::testing::HasSubstr("prompt.chat.tools.parameters_json"));
  chat.clear_tools();
  chat.set_template_variables_json(R"({"messages": []})");
  EXPECT_THAT(count(chat, &refused).error_message(), ::testing::HasSubstr("chat_template_kwargs.messages"));
  chat.clear_template_variables_json();
  answer.add_tool_calls()->set_name("f");
  EXPECT_THAT(count(chat, &refused).error_message(), ::testing::HasSubstr("has no place for calls of tools"));
}

TEST_F(GrpcApiTest, CountTokensAndModels) {
  v1::CountTokensRequest request;
  auto* message = request.mutable_prompt()->mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("count");
  request.set_return_ids(true);
  v1::CountTokensResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->CountTokens(&context, request, &response).ok());
  EXPECT_EQ(static_cast<int>(response.num_tokens()), response.ids_size());
  EXPECT_EQ(response.max_context(), 16384u);
  v1::ListModelsResponse models;
  grpc::ClientContext models_context;
  ASSERT_TRUE(stub_->ListModels(&models_context, {}, &models).ok());
  EXPECT_EQ(models.models(0).name(), "splice-tiny");
  EXPECT_EQ(models.models(0).fingerprint().size(), 32u);
  EXPECT_EQ(models.default_sampling().temperature(), 0) << "splice-tiny's generation_config.json says do_sample: false";
}

}  // namespace
}  // namespace spl::router
