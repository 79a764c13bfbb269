// Anthropic's /v1/messages over fake workers that answer with the prompt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/echo_cluster.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::EchoCluster;
using testing::ErrorOf;
using ::testing::HasSubstr;
using testing::NamedEvent;
using ::testing::StartsWith;
using testing::TestResponse;

constexpr char kMessages[] = "/v1/messages";
constexpr char kCount[] = "/v1/messages/count_tokens";
// The answer is the first message. The comment makes it a template of the formats.
constexpr char kEcho[] = "{# tools tool_calls <tool_call> \"arguments\" <think> #}{{ messages[0].content }}";
// The answer is the conversation.
constexpr char kAll[] =
    "{# tools tool_calls <tool_call> \"arguments\" #}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}";

json Ask(const std::string& content) {
  return {{"model", "echo"},
          {"max_tokens", 200},
          {"messages", json::array({{{"role", "user"}, {"content", content}}})},
          {"tools", json::array({{{"name", "f"}, {"input_schema", {{"type", "object"}}}}})}};
}

std::string Header(const TestResponse& response, const std::string& name) {
  const auto found = response.headers.find(name);
  return found == response.headers.end() ? "" : found->second;
}

TEST(MessagesApiTest, WholeAndStreamed) {
  EchoCluster cluster;
  cluster.Start(kEcho);
  const std::string text = R"(<think>Hm.</think>Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>)";
  const TestResponse response =
      cluster.Post(kMessages, Ask(text), {"x-request-id: req-7", "anthropic-version: 2023-06-01"});
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(Header(response, "request-id"), "req-7");
  const json message = json::parse(response.body);
  EXPECT_EQ(message.at("id"), "msg_req-7");
  EXPECT_EQ(message.at("type"), "message");
  EXPECT_EQ(message.at("model"), "echo");
  ASSERT_EQ(message.at("content").size(), 3u);
  EXPECT_EQ(message["content"][0].at("thinking"), "Hm.");
  EXPECT_EQ(message["content"][1], json({{"type", "text"}, {"text", "Look:"}}));
  EXPECT_EQ(message["content"][2].at("input"), json({{"a", 1}}));
  EXPECT_THAT(message["content"][2].at("id").get<std::string>(), StartsWith("toolu_"));
  EXPECT_EQ(message.at("stop_reason"), "tool_use");
  EXPECT_EQ(message.at("splice").at("reuse"), "exact");
  const json& usage = message.at("usage");
  EXPECT_EQ(usage.at("input_tokens").get<int>() + usage.at("cache_read_input_tokens").get<int>(),
            cluster.Posted(kCount, Ask(text)).at("input_tokens"));

  std::vector<std::string> names, kinds;
  json last_delta;
  for (const NamedEvent& event : cluster.Events(kMessages, Ask(text))) {
    if (event.name == "content_block_start") kinds.push_back(event.data.at("content_block").at("type"));
    if (event.name == "message_delta") last_delta = event.data;
    if (names.empty() || names.back() != event.name) names.push_back(event.name);
  }
  const std::vector<std::string> block = {"content_block_start", "content_block_delta", "content_block_stop"};
  std::vector<std::string> expected = {"message_start", "ping"};
  for (int i = 0; i < 3; ++i) expected.insert(expected.end(), block.begin(), block.end());
  expected.insert(expected.end(), {"message_delta", "message_stop"});
  EXPECT_EQ(names, expected);
  EXPECT_EQ(kinds, (std::vector<std::string>{"thinking", "text", "tool_use"}));
  EXPECT_EQ(last_delta.at("delta").at("stop_reason"), "tool_use");
  EXPECT_EQ(last_delta.at("usage"), usage);
}

TEST(MessagesApiTest, TheConversationReachesTheTemplate) {
  EchoCluster cluster;
  cluster.Start(kAll);
  json body = Ask("q");
  body.erase("tools");
  body["system"] = json::array({{{"type", "text"}, {"text", "Be "}}, {{"type", "text"}, {"text", "brief."}}});
  body["messages"].push_back(
      {{"role", "assistant"},
       {"content", json::array({{{"type", "text"}, {"text", "a"}},
                                {{"type", "tool_use"}, {"id", "1"}, {"name", "f"}, {"input", {{"x", 1}}}}})}});
  body["messages"].push_back(
      {{"role", "user"},
       {"content", json::array({{{"type", "tool_result"}, {"tool_use_id", "1"}, {"content", "r"}}})}});
  const std::string prompt = "system:Be brief.;user:q;assistant:af{\"x\": 1};tool:r;assistant:";
  EXPECT_EQ(cluster.Posted(kMessages, body).at("content").at(0).at("text"), prompt);
  // The last answer is continued.
  body["messages"].push_back({{"role", "assistant"}, {"content", "The best"}});
  const std::string continued = "system:Be brief.;user:q;assistant:af{\"x\": 1};tool:r;assistant:The best";
  EXPECT_EQ(cluster.Posted(kMessages, body).at("content").at(0).at("text"), continued);
}

TEST(MessagesApiTest, WhyAnAnswerEnds) {
  EchoCluster cluster;
  cluster.Start(kEcho);
  json body = Ask("one two three four");
  body["stop_sequences"] = {"zzz", " three"};
  const json stopped = cluster.Posted(kMessages, body);
  EXPECT_EQ(stopped.at("stop_reason"), "stop_sequence");
  EXPECT_EQ(stopped.at("stop_sequence"), " three");
  EXPECT_EQ(stopped.at("content").at(0).at("text"), "one two");
  const json delta = cluster.Events(kMessages, body).end()[-2].data.at("delta");
  EXPECT_EQ(delta, json({{"stop_reason", "stop_sequence"}, {"stop_sequence", " three"}}));
  body.erase("stop_sequences");
  body["max_tokens"] = 2;
  EXPECT_EQ(cluster.Posted(kMessages, body).at("stop_reason"), "max_tokens");
}

TEST(MessagesApiTest, ErrorsHaveItsShape) {
  EchoCluster cluster;
  cluster.options.http.max_body_bytes = 4096;
  cluster.Start(kEcho);
  const auto expect = [&](const TestResponse& response, int status, const std::string& type, const std::string& text) {
    SCOPED_TRACE(response.body);
    EXPECT_EQ(response.status, status);
    const json body = json::parse(response.body, nullptr, false);
    EXPECT_EQ(body.at("type"), "error");
    EXPECT_EQ(body.at("error").at("type"), type);
    EXPECT_THAT(body.at("error").at("message").get<std::string>(), HasSubstr(text));
    EXPECT_TRUE(body.contains("request_id"));
  };
  json body = Ask("x");
  body["messages"][0]["content"] = json::array({{{"type", "image"}}});
  expect(cluster.Post(kMessages, body), 400, "invalid_request_error", "messages[0].content[0].type: ");
  expect(cluster.Post(kCount, body), 400, "invalid_request_error", "messages[0].content[0].type: ");
  expect(Call(cluster.http(), "POST", kMessages, "{"), 400, "invalid_request_error", "JSON");
  body = Ask("x");
  body["model"] = "other";
  expect(cluster.Post(kMessages, body), 404, "not_found_error", "other");
  expect(cluster.Post(kCount, body), 404, "not_found_error", "other");
  expect(Call(cluster.http(), "GET", kMessages), 405, "invalid_request_error", "POST");
  expect(cluster.Post(std::string(kMessages) + "/batches", body), 404, "not_found_error", "/v1/messages/batches");
  expect(cluster.Post(kMessages, Ask(std::string(5000, 'x'))), 413, "request_too_large", "4096");
  const TestResponse id = cluster.Post(kMessages, body, {"x-request-id: r1"});
  EXPECT_EQ(json::parse(id.body).at("request_id"), "r1");
  EXPECT_EQ(Header(id, "request-id"), "r1");
  // Other paths keep OpenAI's.
  EXPECT_TRUE(ErrorOf(cluster.Post("/v1/chat/completions", body)).contains("param"));
  EXPECT_TRUE(ErrorOf(cluster.Post("/v1/messages-and-more", body)).contains("param"));
}

TEST(MessagesApiTest, FieldsWithoutEffectAreNamed) {
  EchoCluster cluster;
  cluster.Start(kEcho);
  json body = Ask("x");
  body.update(
      {{"thinking", {{"type", "enabled"}, {"budget_tokens", 1024}}}, {"metadata", {{"user_id", "u"}}}, {"foo", 1}});
  const TestResponse response = cluster.Post(kMessages, body);
  EXPECT_EQ(response.status, 200) << response.body;
  // The template has no switch for thinking.
  EXPECT_EQ(Header(response, "x-splice-ignored"), "thinking.budget_tokens,foo,thinking");
  EXPECT_EQ(Header(cluster.Post(kCount, body), "x-splice-ignored"), "thinking.budget_tokens,foo");
}

TEST(MessagesApiTest, KeysComeInEitherHeader) {
  EchoCluster cluster;
  std::ofstream(cluster.dir.path() + "/keys") << "key-a alice\n";
  cluster.options.api_keys_file = cluster.dir.path() + "/keys";
  cluster.Start(kEcho);
  const auto post = [&](const char* path, const std::vector<std::string>& headers) {
    return cluster.Post(path, Ask("x"), headers);
  };
  const TestResponse none = post(kMessages, {});
  EXPECT_EQ(none.status, 401);
  EXPECT_EQ(json::parse(none.body).at("error").at("type"), "authentication_error");
  EXPECT_EQ(post(kMessages, {"x-api-key: wrong"}).status, 401);
  EXPECT_EQ(post(kMessages, {"x-api-key: key-a"}).status, 200);
  EXPECT_EQ(post(kCount, {"x-api-key: key-a"}).status, 200);
  EXPECT_EQ(post(kMessages, {"authorization: Bearer key-a"}).status, 200);
  EXPECT_EQ(Call(cluster.http(), "GET", "/v1/models", "", {"x-api-key: key-a"}).status, 200);
  // The older header decides where both are given.
  EXPECT_EQ(post(kMessages, {"authorization: Bearer wrong", "x-api-key: key-a"}).status, 401);
}

TEST(MessagesApiTest, AStreamThatFailsEndsWithAnErrorEvent) {
  EchoCluster cluster;
  cluster.Start(kEcho);
  cluster.decode[0]->SetGate(3);
  const std::vector<NamedEvent> events =
      cluster.Events(kMessages, Ask("one two three four five six"), {"x-request-timeout-ms: 400"});
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.front().name, "message_start");
  EXPECT_EQ(events.back().name, "error");
  EXPECT_EQ(events.back().data.at("type"), "error");
  EXPECT_EQ(events.back().data.at("error").at("type"), "timeout_error");
}

}  // namespace
}  // namespace spl::router
