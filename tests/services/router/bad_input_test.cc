// What bad input gets: every row of the table in docs/api.md, over a real socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr char kChat[] = "/v1/chat/completions";
constexpr char kCompletions[] = "/v1/completions";

struct BadBody {
  const char* path;
  const char* body;
  int status;
  const char* param;    // "" for null
  const char* message;  // a part of it
};

void ExpectError(const TestResponse& response, int status, const std::string& param, const std::string& message) {
  EXPECT_EQ(response.status, status) << response.body;
  const json body = json::parse(response.body, nullptr, false);
  ASSERT_TRUE(body.is_object() && body.contains("error")) << response.body;
  const json& error = body.at("error");
  EXPECT_TRUE(error.contains("type") && error.contains("code"));
  EXPECT_EQ(error.at("param").is_null() ? "" : error.at("param").get<std::string>(), param);
  EXPECT_THAT(error.at("message").get<std::string>(), ::testing::HasSubstr(message));
}

class BadInputTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new FakeCluster(1, 1);
    cluster_->options.http.max_body_bytes = 1 << 20;
    cluster_->StartRouter();
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  void TearDown() override {
    // Whatever came before, the next request is served and nothing is left.
    EXPECT_EQ(Call(cluster_->http(), "POST", kCompletions, R"({"prompt":"ok","max_tokens":2})").status, 200);
    EXPECT_TRUE(cluster_->decode[0]->WaitIdle());
  }
  static FakeCluster* cluster_;
};
FakeCluster* BadInputTest::cluster_ = nullptr;

TEST_F(BadInputTest, EveryBadBodyNamesItsField) {
  const std::vector<BadBody> rows = {
      {kChat, "", 400, "", "not valid JSON"},
      {kChat, "{", 400, "", "not valid JSON"},
      {kChat, "[1,2]", 400, "", "must be a JSON object"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1e999})", 400, "", "number out of range"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"model":"a","model":"b"})", 400, "model", "twice"},
      {kChat, R"({})", 400, "messages", "required"},
      {kChat, R"({"messages":[]})", 400, "messages", "at least one"},
      {kChat, R"({"messages":"hi"})", 400, "messages", "must be a list, got a string"},
      {kChat, R"({"messages":[7]})", 400, "messages[0]", "must be an object"},
      {kChat, R"({"messages":[{"role":"robot","content":"x"}]})", 400, "messages[0].role", "robot"},
      {kChat, R"({"messages":[{"role":"user"}]})", 400, "messages[0].content", "required"},
      {kChat, R"({"messages":[{"role":"user","content":5}]})", 400, "messages[0].content", "string or a list of parts"},
      {kChat, R"({"messages":[{"role":"user","content":[{"type":"segment","namespace":"x"}]}]})", 400,
       "messages[0].content[0].text", "required"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"segments":[{"begin":0,"end":1}]}})", 400,
       "splice.segments", "token ids"},
      {kCompletions, R"({"prompt":"x","splice":{"segments":[{"begin":0,"end":1}]}})", 400, "splice.segments",
       "token ids"},
      {kCompletions, R"({"prompt":[5,6,7],"splice":{"segments":[{"begin":1,"end":4}]}})", 400, "splice.segments",
       "[1, 4)"},
      {kCompletions, R"({"prompt":[5,6,7],"splice":{"segments":[{"begin":1,"end":2},{"begin":1,"end":3}]}})", 400,
       "splice.segments", "disjoint"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"recompute_share":1.5}})", 400,
       "splice.recompute_share", "1.5"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"session":5}})", 400, "splice.session",
       "must be a string"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"quality":"best"}})", 400, "splice.quality",
       "best"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"quality":1.5}})", 400, "splice.quality", "1.5"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"quality":0}})", 400, "splice.quality",
       "a number above 0"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"quality":"0.9x"}})", 400, "splice.quality",
       "0.9x"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"reuse":5}})", 400, "splice.reuse",
       "must be a string"},
      {kChat, R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]})", 400,
       "messages[0].content[0].type", "image_url"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"temperature":"hot"})", 400, "temperature",
       "must be a number"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"temperature":2.5})", 400, "temperature",
       "between 0 and 2"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"top_p":0})", 400, "top_p", "greater than 0"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"top_p":1.5})", 400, "top_p", "between"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"top_k":-5})", 400, "top_k", "between"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"min_p":-0.1})", 400, "min_p", "between"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"repetition_penalty":0})", 400, "repetition_penalty",
       "between"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"presence_penalty":3})", 400, "presence_penalty",
       "between"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"frequency_penalty":-3})", 400, "frequency_penalty",
       "between"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_tokens":0})", 400, "max_tokens", "at least 1"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_tokens":-1})", 400, "max_tokens", "between 0"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1.5})", 400, "max_tokens", "integer"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0})", 400, "max_completion_tokens",
       "at least 1"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_tokens":2,"min_tokens":3})", 400, "min_tokens",
       "max_tokens is 2"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"n":0})", 400, "n", "between 1"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"n":1000})", 400, "n", "between 1"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stop":""})", 400, "stop", "empty"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stop":[1]})", 400, "stop", "list of strings"},
      {kChat,
       R"({"messages":[{"role":"user","content":"x"}],"stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]})",
       400, "stop", "at most 16"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"seed":"a"})", 400, "seed", "integer"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"a":1}})", 400, "logit_bias",
       "not a token id"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"5":101}})", 400, "logit_bias",
       "between -100"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"99999":1}})", 400, "logit_bias", "4096"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stop_token_ids":[99999]})", 400, "stop_token_ids",
       "4096"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"top_logprobs":2})", 400, "top_logprobs",
       "logprobs is true"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":21})", 400, "top_logprobs",
       "20"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stream":"yes"})", 400, "stream", "true or false"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stream_options":{"include_usage":true}})", 400,
       "stream_options", "stream is true"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]})", 400, "tools[0].function",
       "required"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"custom"}]})", 400, "tools[0].type",
       "custom"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":""}}]})", 400,
       "tools[0].function.name", "1 to"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tools":{"a":1}})", 400, "tools", "must be a list"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"f"}}]})", 400, "tools",
       "no place for tools"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"documents":[{"text":"d"}]})", 400, "documents",
       "no place for documents"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"documents":["d"]})", 400, "documents[0]", "an object"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tool_choice":"required"})", 400, "tool_choice",
       "there are no tools"},
      {kChat,
       R"({"messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"function","function":{"name":"f"}}})", 400,
       "tool_choice", "there are no tools"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tool_choice":"always"})", 400, "tool_choice", "required"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"function"}})", 400,
       "tool_choice.function.name", "a string"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"tool_choice":"required","guided_regex":"a"})", 400,
       "tool_choice", "guided_regex"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"guided_json":5})", 400, "guided_json", "a JSON schema"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"structured_outputs":{"lark":"x"}})", 400,
       "structured_outputs.lark", ""},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"messages":[]}})", 400,
       "chat_template_kwargs.messages", "field of the body"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":5})", 400, "chat_template_kwargs",
       "an object"},
      {kChat,
       R"({"messages":[{"role":"user","content":"x"}],"continue_final_message":true,"add_generation_prompt":true})",
       400, "continue_final_message", "exclude"},
      {kChat, R"({"messages":[{"role":"user","content":"x","tool_calls":[{"function":{"name":"f"}}]}]})", 400,
       "messages[0].tool_calls", "of the assistant"},
      {kChat, R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"{}"}}]}]})", 400,
       "messages[0].tool_calls[0].function.name", "1 to"},
      {kChat, R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":5}}]}]})", 400,
       "messages[0].tool_calls[0].function.arguments", "a string or an object"},
      {kChat, R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}]})", 400,
       "messages[0].tool_calls", "no place for calls of tools"},
      {kChat, R"({"messages":[{"role":"tool","content":"x","tool_call_id":5}]})", 400, "messages[0].tool_call_id",
       "a string"},
      {kChat, R"({"messages":[{"role":"user","content":"x","function_call":{"name":"f"}}]})", 400,
       "messages[0].function_call", "not served"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"response_format":{"type":"xml"}})", 400,
       "response_format.type", "json_object"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"reuse":"magic"}})", 400, "splice.reuse",
       "magic"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"decode":"guess"}})", 400, "splice.decode",
       "quest"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":{"zap":1}})", 400, "splice.zap", "not a known"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"splice":7})", 400, "splice", "must be an object"},
      {kChat, R"({"model":"gpt-4o","messages":[{"role":"user","content":"x"}]})", 404, "model", "gpt-4o"},
      {kCompletions, R"({})", 400, "prompt", "required"},
      {kCompletions, R"({"prompt":[]})", 400, "prompt", "empty"},
      {kCompletions, R"({"prompt":["a",5]})", 400, "prompt[1]", "a string or a list of token ids"},
      {kCompletions, R"({"prompt":["a",[]]})", 400, "prompt[1]", "empty"},
      {kCompletions, R"({"prompt":["a","b"],"splice":{"session":"s"}})", 400, "splice.session", "2"},
      {kCompletions, R"({"prompt":"a","tools":[{"function":{"name":"f"}}]})", 400, "tools", "not served"},
      {kCompletions, R"({"prompt":[1,-2]})", 400, "prompt", "item 1"},
      {kCompletions, R"({"prompt":[1,999999]})", 400, "prompt", "999999"},
      {kCompletions, R"({"prompt":{"a":1}})", 400, "prompt", "a string, a list"},
      {kCompletions, R"({"prompt":"x","best_of":3})", 400, "best_of", "equal to n"},
      {kCompletions, R"({"prompt":"x","suffix":"y"})", 400, "suffix", "not served"},
      {kCompletions, R"({"prompt":"x","prompt_logprobs":21})", 400, "prompt_logprobs", "20"},
      {kCompletions, R"({"prompt":"x","prompt_logprobs":1,"stream":true})", 400, "prompt_logprobs", "without stream"},
      {kCompletions, R"({"prompt":"x","echo":true,"logprobs":1,"splice":{"reuse":"sparsex"}})", 400, "echo", "exact"},
      {"/tokenize", R"({})", 400, "prompt", "required"},
      {"/tokenize", R"({"prompt":"x","messages":[]})", 400, "prompt", "exclude"},
      {"/detokenize", R"({})", 400, "tokens", "required"},
      {"/detokenize", R"({"tokens":[123456]})", 400, "tokens", "123456"},
      {"/detokenize", R"({"tokens":"x"})", 400, "tokens", "list of token ids"},
  };
  for (const BadBody& row : rows) {
    SCOPED_TRACE(std::string(row.path) + " " + row.body);
    ExpectError(Call(cluster_->http(), "POST", row.path, row.body), row.status, row.param, row.message);
  }
}

TEST_F(BadInputTest, EmptyPromptWithoutBeginTokenHasNoTokens) {
  ExpectError(Call(cluster_->http(), "POST", kCompletions, R"({"prompt":"","add_special_tokens":false})"), 400,
              "prompt", "no tokens");
}

TEST_F(BadInputTest, PromptBeyondTheContextNamesBothNumbers) {
  const json body = {{"prompt", std::vector<int>(20000, 5)}};
  const TestResponse response = Call(cluster_->http(), "POST", kCompletions, body.dump());
  ExpectError(response, 400, "prompt", "20000");
  ExpectError(response, 400, "prompt", "16384");
  EXPECT_EQ(json::parse(response.body).at("error").at("code"), "context_length_exceeded");
}

TEST_F(BadInputTest, NotUtf8IsRefused) {
  ExpectError(Call(cluster_->http(), "POST", kCompletions, "{\"prompt\":\"\xff\xfe\"}"), 400, "", "JSON");
}

TEST_F(BadInputTest, DeepNestingIsRefused) {
  const std::string deep = R"({"prompt":)" + std::string(100000, '[') + std::string(100000, ']') + "}";
  ExpectError(Call(cluster_->http(), "POST", kCompletions, deep), 400, "", "nested deeper");
}

TEST_F(BadInputTest, BodyOverTheLimitIs413) {
  const std::string body = R"({"prompt":")" + std::string(2 << 20, 'x') + "\"}";
  ExpectError(Call(cluster_->http(), "POST", kCompletions, body), 413, "", "larger than 1048576 bytes");
}

TEST_F(BadInputTest, ChunkedBodyOverTheLimitIs413) {
  HttpTestClient client(cluster_->http());
  client.Send("POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n");
  const std::string chunk = "10000\r\n" + std::string(0x10000, 'x') + "\r\n";
  for (int i = 0; i < 20; ++i) client.Send(chunk);
  ExpectError(client.Read(), 413, "", "larger");
}

TEST_F(BadInputTest, HeaderOverTheLimitIs431) {
  HttpTestClient client(cluster_->http());
  client.Send("GET /healthz HTTP/1.1\r\nhost: t\r\nx-big: " + std::string(64 << 10, 'a') + "\r\n\r\n");
  EXPECT_EQ(client.Read().status, 431);
}

TEST_F(BadInputTest, GarbageIs400AndClosed) {
  HttpTestClient client(cluster_->http());
  client.Send("\x16\x03\x01\x02 this is not http\r\n\r\n");
  EXPECT_EQ(client.Read().status, 400);
  EXPECT_TRUE(client.AtEnd());
}

TEST_F(BadInputTest, UnknownPathAndMethod) {
  ExpectError(Call(cluster_->http(), "GET", "/nope"), 404, "", "/nope");
  const TestResponse response = Call(cluster_->http(), "GET", kChat);
  EXPECT_EQ(response.status, 405);
  EXPECT_EQ(response.headers.at("allow"), "POST");
}

TEST_F(BadInputTest, BadTimeoutHeaderIs400) {
  ExpectError(Call(cluster_->http(), "POST", kCompletions, R"({"prompt":"x"})", {"x-request-timeout-ms: soon"}), 400,
              "x-request-timeout-ms", "soon");
}

TEST(BadInputLimitsTest, PromptBeyondThePoolNamesBothNumbers) {
  FakeCluster cluster(0, 1);
  cluster.prefill.push_back(std::make_unique<testing::FakePrefill>(
      cluster.fabric, testing::FakePrefill::Options{.worker_id = "p0", .max_prompt_tokens = 1000}));
  cluster.StartRouter();
  const TestResponse response =
      Call(cluster.http(), "POST", kCompletions, json({{"prompt", std::vector<int>(1500, 5)}}).dump());
  ExpectError(response, 400, "prompt", "1500");
  ExpectError(response, 400, "prompt", "1000");
}

TEST(BadInputLimitsTest, TooManyConnectionsAre503) {
  FakeCluster cluster(1, 1);
  cluster.options.http.max_connections = 2;
  cluster.options.http.eviction_age = std::chrono::hours(1);
  cluster.StartRouter();
  HttpTestClient first(cluster.http());
  HttpTestClient second(cluster.http());
  EXPECT_EQ(first.Call("GET", "/healthz").status, 200);
  EXPECT_EQ(second.Call("GET", "/healthz").status, 200);
  HttpTestClient third(cluster.http());
  EXPECT_EQ(third.Read().status, 503);
}

TEST(BadInputLimitsTest, HalfARequestIsClosedAfterTheReadTimeout) {
  FakeCluster cluster(1, 1);
  cluster.options.http.read_timeout = std::chrono::milliseconds(50);
  cluster.StartRouter();
  HttpTestClient client(cluster.http());
  client.Send("POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{\"pro");
  EXPECT_TRUE(client.AtEnd());
}

TEST(BadInputLimitsTest, IdleConnectionIsClosed) {
  FakeCluster cluster(1, 1);
  cluster.options.http.idle_timeout = std::chrono::milliseconds(50);
  cluster.StartRouter();
  HttpTestClient client(cluster.http());
  EXPECT_EQ(client.Call("GET", "/healthz").status, 200);
  EXPECT_TRUE(client.AtEnd());
}

TEST(BadInputLimitsTest, ApiKeysAreAskedFor) {
  FakeCluster cluster(1, 1);
  const std::string path = std::filesystem::temp_directory_path() / ("splice-keys-" + std::to_string(getpid()));
  std::ofstream(path) << "# keys\nsecret-one alice\nsecret-two\n";
  cluster.options.api_keys_file = path;
  cluster.StartRouter();
  const std::string body = R"({"prompt":"x","max_tokens":1})";
  ExpectError(Call(cluster.http(), "POST", kCompletions, body), 401, "", "API key is required");
  ExpectError(Call(cluster.http(), "POST", kCompletions, body, {"authorization: Bearer wrong"}), 401, "", "not valid");
  EXPECT_EQ(Call(cluster.http(), "GET", "/v1/models").status, 401);
  EXPECT_EQ(Call(cluster.http(), "GET", "/healthz").status, 200);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, body, {"authorization: Bearer secret-one"}).status, 200);
  const std::string alice = cluster.prefill[0]->last_run().namespace_key();
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, body, {"authorization: Bearer secret-two"}).status, 200);
  EXPECT_NE(cluster.prefill[0]->last_run().namespace_key(), alice);
  // A conversation is its caller's.
  const std::string turn = R"({"prompt":"x","max_tokens":1,"splice":{"session":"talk"}})";
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, turn, {"authorization: Bearer secret-one"}).status, 200);
  EXPECT_EQ(cluster.prefill[0]->last_run().session(), "talk");
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, turn, {"authorization: Bearer secret-one"}).status, 200);
  const v1::PrefillRequest of_alice = cluster.prefill[0]->last_run();
  EXPECT_EQ(of_alice.session_owner().size(), 32u);
  // Another caller may use the name, and nothing tells that it is in use.
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, turn, {"authorization: Bearer secret-two"}).status, 200);
  EXPECT_EQ(cluster.prefill[0]->last_run().session(), "talk");
  EXPECT_NE(cluster.prefill[0]->last_run().namespace_key(), of_alice.namespace_key());
  EXPECT_NE(cluster.prefill[0]->last_run().session_owner(), of_alice.session_owner());
  std::filesystem::remove(path);
}

TEST(BadInputLimitsTest, WrongModelFolderNamesTheFile) {
  RouterOptions options;
  options.model_dir = "models/does-not-exist";
  options.http.listen = options.grpc_listen = "127.0.0.1:0";
  const auto server = RouterServer::Start(options);
  ASSERT_FALSE(server.ok());
  EXPECT_THAT(server.status().ToString(), ::testing::HasSubstr("models/does-not-exist"));
}

TEST(BadInputLimitsTest, TakenPortIsUnavailable) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  RouterOptions options;
  options.model_dir = testing::kTinyModel;
  options.http.listen = cluster.http();
  options.grpc_listen = "127.0.0.1:0";
  EXPECT_EQ(RouterServer::Start(options).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace spl::router
