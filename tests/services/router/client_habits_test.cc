// What clients of other servers send, and expect, over fake workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using ::testing::HasSubstr;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr char kChat[] = "/v1/chat/completions";
constexpr char kCompletions[] = "/v1/completions";

class ClientHabitsTest : public ::testing::Test {
 protected:
  ClientHabitsTest() : cluster_(1, 1) {}

  TestResponse Post(const std::string& path, const json& body, const std::vector<std::string>& headers = {}) {
    return Call(cluster_.http(), "POST", path, body.dump(), headers);
  }
  json Posted(const std::string& path, const json& body) {
    const TestResponse response = Post(path, body);
    EXPECT_EQ(response.status, 200) << response.body;
    return json::parse(response.body, nullptr, false);
  }
  std::vector<json> Stream(const std::string& path, json body) {
    body["stream"] = true;
    HttpTestClient client(cluster_.http());
    client.SendRequest("POST", path, body.dump());
    EXPECT_EQ(client.ReadHead().status, 200);
    std::vector<json> events;
    std::string last;
    while (auto event = client.NextEvent()) {
      last = *event;
      if (last != "[DONE]") events.push_back(json::parse(last));
    }
    EXPECT_EQ(last, "[DONE]");
    return events;
  }

  FakeCluster cluster_;
};

json Hello(json more = json::object()) {
  more["messages"] = json::array({{{"role", "user"}, {"content", "Hello"}}});
  more["max_tokens"] = 2;
  return more;
}

std::string Header(const TestResponse& response, const std::string& name) {
  const auto found = response.headers.find(name);
  return found == response.headers.end() ? "" : found->second;
}

TEST_F(ClientHabitsTest, FieldsWithoutEffectAreNamed) {
  cluster_.StartRouter();
  const TestResponse plain = Post(kChat, Hello({{"user", "u"}, {"store", true}, {"metadata", {{"a", "b"}}}}));
  EXPECT_EQ(plain.status, 200) << plain.body;
  EXPECT_FALSE(plain.headers.contains("x-splice-ignored"));
  const TestResponse named = Post(kChat, Hello({{"foo", 1}, {"bar", nullptr}, {"a\r\nb: c", 2}}));
  EXPECT_EQ(named.status, 200) << named.body;
  EXPECT_EQ(Header(named, "x-splice-ignored"), "?,foo");
  // The template of splice-tiny knows neither.
  const TestResponse variables =
      Post(kChat, Hello({{"reasoning_effort", "low"}, {"chat_template_kwargs", {{"enable_thinking", false}}}}));
  EXPECT_EQ(variables.status, 200) << variables.body;
  EXPECT_EQ(Header(variables, "x-splice-ignored"), "enable_thinking,reasoning_effort");
  json many = Hello();
  for (int i = 0; i < 40; ++i) many["field" + std::to_string(i)] = i;
  EXPECT_THAT(Header(Post(kChat, many), "x-splice-ignored"), ::testing::EndsWith(",..."));
  EXPECT_EQ(Header(Post("/tokenize", {{"prompt", "x"}, {"foo", 1}}), "x-splice-ignored"), "foo");
  EXPECT_EQ(Header(Post("/detokenize", {{"tokens", {5}}, {"foo", 1}}), "x-splice-ignored"), "foo");

  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", kChat, Hello({{"foo", 1}, {"stream", true}, {"stream_options", {{"bar", 1}}}}).dump());
  EXPECT_EQ(Header(client.ReadHead(), "x-splice-ignored"), "stream_options.bar,foo");
}

TEST_F(ClientHabitsTest, StrictRequestsRefuseThem) {
  cluster_.options.strict_requests = true;
  cluster_.StartRouter();
  EXPECT_EQ(Post(kChat, Hello({{"user", "u"}, {"bar", nullptr}})).status, 200);
  for (const json& body : {Hello({{"foo", 1}}), Hello({{"chat_template_kwargs", {{"foo", 1}}}})}) {
    const TestResponse refused = Post(kChat, body);
    EXPECT_EQ(refused.status, 400);
    EXPECT_EQ(json::parse(refused.body).at("error").at("param"), "foo");
    EXPECT_EQ(json::parse(refused.body).at("error").at("code"), "unknown_field");
  }
  EXPECT_EQ(Post("/tokenize", {{"prompt", "x"}, {"foo", 1}}).status, 400);
  EXPECT_EQ(Post("/detokenize", {{"tokens", {5}}, {"foo", 1}}).status, 400);
}

// As the clients of OpenAI and LiteLLM append an answer to the conversation.
TEST_F(ClientHabitsTest, AnswersComeBackAsTheyWere) {
  cluster_.StartRouter();
  json body = Hello();
  body["messages"].push_back({{"role", "assistant"},
                              {"content", "Hi."},
                              {"refusal", nullptr},
                              {"annotations", nullptr},
                              {"audio", nullptr},
                              {"function_call", nullptr},
                              {"tool_calls", nullptr},
                              {"provider_specific_fields", {{"a", 1}}}});
  body["messages"].push_back({{"role", "user"},
                              {"name", "bob"},
                              {"content", {{{"type", "text"}, {"text", "And?"}, {"cache_control", {{"x", 1}}}}}}});
  EXPECT_EQ(Post(kChat, body).status, 200);
  EXPECT_EQ(Header(Post(kChat, body), "x-splice-ignored"), "");
}

TEST_F(ClientHabitsTest, SeveralPromptsAreOneAnswer) {
  cluster_.StartRouter();
  const json body = {
      {"prompt", {"one two three", "four five", "six"}}, {"max_tokens", 4}, {"n", 2}, {"echo", true}, {"seed", 3}};
  const json answer = Posted(kCompletions, body);
  ASSERT_EQ(answer.at("choices").size(), 6u);
  uint32_t prompt_tokens = 0;
  for (size_t prompt = 0; prompt < 3; ++prompt) {
    json single = body;
    single["prompt"] = body["prompt"][prompt];
    const json alone = Posted(kCompletions, single);
    prompt_tokens += alone.at("usage").at("prompt_tokens").get<uint32_t>();
    for (size_t i = 0; i < 2; ++i) {
      const json& choice = answer.at("choices").at(prompt * 2 + i);
      EXPECT_EQ(choice.at("index"), prompt * 2 + i);
      EXPECT_EQ(choice.at("text"), alone.at("choices").at(i).at("text"));
      EXPECT_THAT(choice.at("text").get<std::string>(), ::testing::StartsWith(single["prompt"].get<std::string>()));
    }
  }
  EXPECT_EQ(answer.at("usage").at("prompt_tokens"), prompt_tokens);
  EXPECT_EQ(answer.at("usage").at("completion_tokens"), 24);
  ASSERT_EQ(answer.at("splice").size(), 3u);
  EXPECT_TRUE(answer.at("splice").at(2).contains("reuse"));

  json streamed = body;
  streamed["stream_options"] = {{"include_usage", true}};
  std::vector<std::string> texts(6);
  std::vector<int> ends(6, 0);
  const std::vector<json> events = Stream(kCompletions, streamed);
  for (const json& event : events) {
    for (const json& choice : event.at("choices")) {
      texts.at(choice.at("index")) += choice.at("text").get<std::string>();
      ends.at(choice.at("index")) += choice.at("finish_reason").is_null() ? 0 : 1;
    }
  }
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(texts[i], answer.at("choices").at(i).at("text")) << i;
  EXPECT_EQ(ends, std::vector<int>(6, 1));
  EXPECT_EQ(events.back().at("usage").at("completion_tokens"), 24);
  EXPECT_EQ(events.back().at("splice").size(), 3u);
}

// One bad prompt ends the whole request, with its own error, and nothing is left running.
TEST_F(ClientHabitsTest, OnePromptOfSeveralIsBad) {
  cluster_.StartRouter();
  const TestResponse refused =
      Post(kCompletions, {{"prompt", {"fine", json::array({1, 99999}), "fine"}}, {"max_tokens", 500}});
  EXPECT_EQ(refused.status, 400);
  EXPECT_THAT(refused.body, HasSubstr("99999"));
  const auto deadline = std::chrono::steady_clock::now() + testing::kLongWait;
  while (cluster_.router->dispatcher().num_active() > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_EQ(cluster_.router->dispatcher().num_active(), 0u);
}

TEST_F(ClientHabitsTest, TooManyPrompts) {
  cluster_.StartRouter();
  EXPECT_EQ(Post(kCompletions, {{"prompt", std::vector<std::string>(129, "a")}}).status, 400);
  const TestResponse times = Post(kCompletions, {{"prompt", std::vector<std::string>(100, "a")}, {"n", 20}});
  EXPECT_EQ(times.status, 400);
  EXPECT_EQ(json::parse(times.body).at("error").at("param"), "n");
}

TEST_F(ClientHabitsTest, EveryEventHasTheUsageSoFar) {
  cluster_.StartRouter();
  const std::vector<json> events =
      Stream(kChat, {{"messages", json::array({{{"role", "user"}, {"content", "one two three four"}}})},
                     {"max_tokens", 5},
                     {"stream_options", {{"include_usage", true}, {"continuous_usage_stats", true}}}});
  const uint32_t prompt_tokens = events.back().at("usage").at("prompt_tokens");
  uint32_t completion_tokens = 0;
  for (const json& event : events) {
    const json& usage = event.at("usage");
    EXPECT_EQ(usage.at("prompt_tokens"), prompt_tokens);
    EXPECT_GE(usage.at("completion_tokens").get<uint32_t>(), completion_tokens);
    completion_tokens = usage.at("completion_tokens");
  }
  EXPECT_EQ(completion_tokens, 5u);
  EXPECT_GT(events.size(), 3u);
}

// OpenAI's client sends a request that ran into its deadline twice more, unless it is told not to.
TEST_F(ClientHabitsTest, ADeadlineIsNotRetried) {
  cluster_.decode[0]->SetGate(1);
  cluster_.StartRouter();
  json body = Hello();
  body["max_tokens"] = 50;
  const TestResponse late = Post(kChat, body, {"content-type: application/json", "x-request-timeout-ms: 50"});
  EXPECT_EQ(late.status, 504) << late.body;
  EXPECT_EQ(Header(late, "x-should-retry"), "false");
  EXPECT_EQ(Header(Post(kChat, {{"messages", 5}}), "x-should-retry"), "");
}

TEST_F(ClientHabitsTest, PathsOfOtherServers) {
  cluster_.StartRouter();
  EXPECT_EQ(Call(cluster_.http(), "GET", "/health").body, "ok\n");
  EXPECT_EQ(Call(cluster_.http(), "GET", "/v1/models/").status, 200);
  EXPECT_EQ(Post("/v1/tokenize", {{"prompt", "a b"}}).body, Post("/tokenize", {{"prompt", "a b"}}).body);
  EXPECT_EQ(Post("/v1/detokenize/", {{"tokens", {5, 6}}}).body, Post("/detokenize", {{"tokens", {5, 6}}}).body);
  const TestResponse root = Call(cluster_.http(), "GET", "/");
  EXPECT_EQ(root.status, 302);
  EXPECT_EQ(Header(root, "location"), "/ui");
}

TEST_F(ClientHabitsTest, PackedBodiesAreRefusedAtOnce) {
  cluster_.StartRouter();
  const TestResponse packed = Call(cluster_.http(), "POST", kChat, "\x1f\x8b junk",
                                   {"content-type: application/json", "content-encoding: gzip"});
  EXPECT_EQ(packed.status, 415);
  EXPECT_THAT(packed.body, HasSubstr("content-encoding"));
  EXPECT_EQ(Post(kChat, Hello(), {"content-type: application/json", "content-encoding: identity"}).status, 200);
}

TEST_F(ClientHabitsTest, PagesOfOtherOriginsAreLetInByName) {
  cluster_.options.cors_origins = {"https://app.example", "http://localhost:5173"};
  cluster_.StartRouter();
  const std::vector<std::string> page = {"content-type: application/json", "origin: https://app.example"};
  const TestResponse asked = Call(cluster_.http(), "OPTIONS", kChat, "",
                                  {"origin: https://app.example", "access-control-request-method: POST",
                                   "access-control-request-headers: authorization,x-stainless-os"});
  EXPECT_EQ(asked.status, 204);
  EXPECT_EQ(Header(asked, "access-control-allow-origin"), "https://app.example");
  EXPECT_EQ(Header(asked, "access-control-allow-headers"), "authorization,x-stainless-os");
  EXPECT_EQ(Header(asked, "vary"), "origin");
  const TestResponse answer = Post(kChat, Hello(), page);
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(Header(answer, "access-control-allow-origin"), "https://app.example");
  EXPECT_THAT(Header(answer, "access-control-expose-headers"), HasSubstr("x-splice-ignored"));
  EXPECT_EQ(Header(Post(kChat, {{"messages", 5}}, page), "access-control-allow-origin"), "https://app.example");
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", kChat, Hello({{"stream", true}}).dump(), page);
  EXPECT_EQ(Header(client.ReadHead(), "access-control-allow-origin"), "https://app.example");

  const std::vector<std::string> other = {"content-type: application/json", "origin: https://evil.example"};
  EXPECT_FALSE(Post(kChat, Hello(), other).headers.contains("access-control-allow-origin"));
  EXPECT_EQ(Call(cluster_.http(), "OPTIONS", kChat, "", other).status, 405);
  // The routes that operate the cluster stay closed to pages.
  for (const char* path : {"/control/v1/status", "/admin/v1/knowledge-bases"}) {
    EXPECT_FALSE(Call(cluster_.http(), "OPTIONS", path, "", page).headers.contains("access-control-allow-origin"));
    EXPECT_EQ(Call(cluster_.http(), "GET", path, "", page).status, 403) << path;
  }
}

TEST_F(ClientHabitsTest, PagesOfAllOrigins) {
  const testing::TempDir dir;
  std::ofstream(dir.path() + "/keys") << "key-a alice\n";
  cluster_.options.api_keys_file = dir.path() + "/keys";
  cluster_.options.cors_origins = {"*"};
  cluster_.StartRouter();
  EXPECT_EQ(Call(cluster_.http(), "OPTIONS", kChat, "", {"origin: https://a.example"}).status, 204);
  // Refused before its body is read: the page sees why.
  const TestResponse no_key = Post(kChat, Hello(), {"content-type: application/json", "origin: https://a.example"});
  EXPECT_EQ(no_key.status, 401);
  EXPECT_EQ(Header(no_key, "access-control-allow-origin"), "*");
}

TEST_F(ClientHabitsTest, NoPagesUnlessAskedFor) {
  cluster_.StartRouter();
  const std::vector<std::string> page = {"content-type: application/json", "origin: https://app.example"};
  EXPECT_FALSE(Post(kChat, Hello(), page).headers.contains("access-control-allow-origin"));
  EXPECT_EQ(Call(cluster_.http(), "OPTIONS", kChat, "", page).status, 405);
  for (const char* origin : {"app.example", "https://", "https://a.example/path", "https://a b"}) {
    RouterOptions options = cluster_.options;
    options.cors_origins = {origin};
    EXPECT_THAT(RouterServer::Start(options).status().ToString(), HasSubstr("--cors-origins")) << origin;
  }
}

}  // namespace
}  // namespace spl::router
