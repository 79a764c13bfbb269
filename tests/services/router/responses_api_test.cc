// OpenAI's /v1/responses over fake workers that answer with the prompt.
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

constexpr char kResponses[] = "/v1/responses";
constexpr char kEcho[] = "{# tools tool_calls <tool_call> \"arguments\" <think> #}{{ messages[0].content }}";
constexpr char kAll[] = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";

std::string PathOf(const json& response) {
  return std::string(kResponses) + "/" + response.at("id").get<std::string>();
}

json Ask(const std::string& input) {
  return {{"model", "echo"},
          {"input", input},
          {"tools", json::array({{{"type", "function"}, {"name", "f"}, {"parameters", {{"type", "object"}}}}})}};
}

TEST(ResponsesApiTest, WholeAndStreamed) {
  EchoCluster cluster;
  cluster.Start(kEcho);
  const std::string text = R"(<think>Hm.</think>Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>)";
  json body = Ask(text);
  body.update({{"temperature", 0.7}, {"metadata", {{"a", "b"}}}, {"store", false}});
  const json response = cluster.Posted(kResponses, body);
  EXPECT_THAT(response.at("id").get<std::string>(), StartsWith("resp_"));
  EXPECT_EQ(response.at("object"), "response");
  EXPECT_EQ(response.at("status"), "completed");
  EXPECT_EQ(response.at("model"), "echo");
  EXPECT_EQ(response.at("temperature"), 0.7);
  EXPECT_EQ(response.at("metadata"), json({{"a", "b"}}));
  EXPECT_EQ(response.at("tools"), body.at("tools"));
  EXPECT_EQ(response.at("store"), false);
  ASSERT_EQ(response.at("output").size(), 3u);
  EXPECT_EQ(response["output"][0].at("content").at(0).at("text"), "Hm.");
  EXPECT_EQ(response["output"][1].at("content").at(0).at("text"), "Look:");
  EXPECT_EQ(response["output"][2].at("arguments"), R"({"a": 1})");
  EXPECT_GT(response.at("usage").at("output_tokens_details").at("reasoning_tokens"), 0);
  EXPECT_EQ(response.at("splice").at("reuse"), "exact");

  const std::vector<NamedEvent> events = cluster.Events(kResponses, body);
  ASSERT_GT(events.size(), 10u);
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].data.at("sequence_number"), i);
  EXPECT_EQ(events[0].name, "response.created");
  EXPECT_EQ(events[1].name, "response.in_progress");
  EXPECT_EQ(events.back().name, "response.completed");
  const json& streamed = events.back().data.at("response");
  EXPECT_EQ(streamed.at("usage"), response.at("usage"));
  ASSERT_EQ(streamed.at("output").size(), 3u);
  EXPECT_EQ(streamed["output"][1].at("content"), response["output"][1].at("content"));
  EXPECT_NE(streamed.at("id"), response.at("id"));
}

// The next request gets the whole conversation, of which it says its own part only.
TEST(ResponsesApiTest, PreviousResponse) {
  EchoCluster cluster;
  cluster.Start(kAll);
  cluster.fabric.answer_tokens = 3;
  const json first = cluster.Posted(kResponses, {{"input", "one"}, {"instructions", "Be brief."}});
  EXPECT_EQ(first.at("store"), true);
  EXPECT_EQ(cluster.prefill[0]->last_run().session(), "");
  const std::string answer = first.at("output").at(0).at("content").at(0).at("text");
  cluster.fabric.answer_tokens = 0;
  const std::string history = "user:one;assistant:" + answer + ";user:two;";
  // As a stream, whose response is kept, too. Instructions are not carried over.
  const auto events = cluster.Events(kResponses, {{"input", "two"}, {"previous_response_id", first.at("id")}});
  const json second = events.back().data.at("response");
  EXPECT_EQ(second.at("output").at(0).at("content").at(0).at("text"), history);
  EXPECT_EQ(second.at("previous_response_id"), first.at("id"));
  EXPECT_EQ(cluster.prefill[0]->last_run().session(), first.at("id"));
  const std::string longer =
      "system:New.;" + history.substr(0, history.size()) + "assistant:" + history + ";user:three;";
  const json third = cluster.Posted(
      kResponses, {{"input", "three"}, {"previous_response_id", second.at("id")}, {"instructions", "New."}});
  EXPECT_EQ(third.at("output").at(0).at("content").at(0).at("text"), longer);
  EXPECT_EQ(cluster.prefill[0]->last_run().session(), first.at("id")) << "one conversation";
  // Another turn behind the first response.
  const std::string other = "user:one;assistant:" + answer + ";user:2;";
  const json branch = cluster.Posted(kResponses, {{"input", "2"}, {"previous_response_id", first.at("id")}});
  EXPECT_EQ(branch.at("output").at(0).at("content").at(0).at("text"), other);
  // One item of it, by its id.
  const std::string alone = "assistant:" + answer + ";user:x;";
  const json items = json::array(
      {{{"type", "item_reference"}, {"id", first["output"][0].at("id")}}, {{"role", "user"}, {"content", "x"}}});
  EXPECT_EQ(cluster.Posted(kResponses, {{"input", items}}).at("output").at(0).at("content").at(0).at("text"), alone);
}

TEST(ResponsesApiTest, KeptResponsesAreReadAndDeleted) {
  EchoCluster cluster;
  cluster.Start(kAll);
  const json kept = cluster.Posted(kResponses, {{"input", "one"}, {"max_output_tokens", 3}});
  EXPECT_EQ(kept.at("status"), "incomplete");
  const TestResponse read = Call(cluster.http(), "GET", PathOf(kept));
  EXPECT_EQ(read.status, 200);
  EXPECT_EQ(json::parse(read.body), kept);
  EXPECT_EQ(Call(cluster.http(), "GET", PathOf(kept) + "?stream=true").status, 400);
  EXPECT_EQ(Call(cluster.http(), "POST", PathOf(kept), "{}").status, 405);
  const TestResponse deleted = Call(cluster.http(), "DELETE", PathOf(kept));
  EXPECT_EQ(deleted.status, 200);
  EXPECT_EQ(json::parse(deleted.body), json({{"id", kept.at("id")}, {"object", "response"}, {"deleted", true}}));
  const json not_kept = cluster.Posted(kResponses, {{"input", "one"}, {"max_output_tokens", 3}, {"store", false}});
  for (const json& gone : {kept, not_kept}) {
    EXPECT_EQ(Call(cluster.http(), "GET", PathOf(gone)).status, 404);
    EXPECT_EQ(Call(cluster.http(), "DELETE", PathOf(gone)).status, 404);
    const TestResponse next = cluster.Post(kResponses, {{"input", "two"}, {"previous_response_id", gone.at("id")}});
    EXPECT_EQ(next.status, 404);
    EXPECT_EQ(ErrorOf(next).at("param"), "previous_response_id");
    EXPECT_EQ(ErrorOf(next).at("code"), "previous_response_not_found");
    // It may be another router's.
    EXPECT_THAT(ErrorOf(next).at("message").get<std::string>(), HasSubstr("all of a conversation to one router"));
  }
}

TEST(ResponsesApiTest, NothingIsKeptWithoutRoom) {
  EchoCluster cluster;
  cluster.options.stored_responses.max_bytes = 0;
  cluster.Start(kAll);
  const json response = cluster.Posted(kResponses, {{"input", "one"}, {"max_output_tokens", 3}});
  EXPECT_EQ(response.at("store"), false);
  const TestResponse missing = Call(cluster.http(), "GET", PathOf(response));
  EXPECT_EQ(missing.status, 404);
  EXPECT_THAT(missing.body, HasSubstr("--stored-responses-bytes is 0"));
}

// A conversation that began at another router: the error says what to do, and the metrics that it happens.
TEST(ResponsesApiTest, AnotherRoutersResponseIsMissed) {
  EchoCluster one, other;
  one.Start(kAll);
  other.Start(kAll);
  const json kept = one.Posted(kResponses, {{"input", "one"}, {"max_output_tokens", 3}});
  const TestResponse next = other.Post(kResponses, {{"input", "two"}, {"previous_response_id", kept.at("id")}});
  EXPECT_EQ(next.status, 404);
  EXPECT_THAT(ErrorOf(next).at("message").get<std::string>(), HasSubstr("other routers do not have it"));
  EXPECT_THAT(Call(one.http(), "GET", "/metrics").body, HasSubstr("\nsplice_router_stored_responses 1\n"));
  const std::string metrics = Call(other.http(), "GET", "/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("\nsplice_router_stored_responses 0\n"));
  EXPECT_THAT(metrics, HasSubstr("\nsplice_router_stored_responses_missed_total 1\n"));
}

TEST(ResponsesApiTest, OfEachKeyItsOwn) {
  EchoCluster cluster;
  std::ofstream(cluster.dir.path() + "/keys") << "key-a alice\nkey-b bob\n";
  cluster.options.api_keys_file = cluster.dir.path() + "/keys";
  cluster.Start(kAll);
  const std::vector<std::string> alice = {"authorization: Bearer key-a"}, bob = {"authorization: Bearer key-b"};
  const json kept = json::parse(cluster.Post(kResponses, {{"input", "one"}, {"max_output_tokens", 3}}, alice).body);
  const json next = {{"input", "two"}, {"max_output_tokens", 3}, {"previous_response_id", kept.at("id")}};
  EXPECT_EQ(cluster.Post(kResponses, next, bob).status, 404);
  EXPECT_EQ(Call(cluster.http(), "GET", PathOf(kept), "", bob).status, 404);
  EXPECT_EQ(Call(cluster.http(), "DELETE", PathOf(kept), "", bob).status, 404);
  EXPECT_EQ(Call(cluster.http(), "GET", PathOf(kept)).status, 401);
  EXPECT_EQ(Call(cluster.http(), "DELETE", PathOf(kept)).status, 401);
  const json reference = {{"input", json::array({{{"type", "item_reference"}, {"id", kept["output"][0].at("id")}}})}};
  EXPECT_EQ(cluster.Post(kResponses, reference, bob).status, 404);
  EXPECT_EQ(cluster.Post(kResponses, next, alice).status, 200);
}

TEST(ResponsesApiTest, ErrorsNameItsFields) {
  EchoCluster cluster;
  cluster.Start(kAll);
  const struct {
    json body;
    int status;
    std::string param;
  } cases[] = {
      {{{"input", json::array({{{"type", "computer_call"}}})}}, 400, "input[0].type"},
      {{{"input", "x"}, {"max_output_tokens", 0}}, 400, "max_output_tokens"},
      {{{"input", "x"}, {"model", "other"}}, 404, "model"},
      // Found when the prompt has been made.
      {{{"input", std::string(100'000, 'x')}}, 400, "input"},
      {{{"input", "x"}, {"tools", json::array({{{"type", "function"}, {"name", "f"}}})}}, 400, "tools"},
  };
  for (const auto& c : cases) {
    const TestResponse response = cluster.Post(kResponses, c.body);
    EXPECT_EQ(response.status, c.status) << response.body;
    EXPECT_EQ(ErrorOf(response).at("param"), c.param) << response.body;
  }
}

TEST(ResponsesApiTest, FieldsWithoutEffectAreNamed) {
  EchoCluster cluster;
  cluster.Start(kAll);
  const TestResponse response = cluster.Post(
      kResponses,
      {{"input", "x"}, {"max_output_tokens", 1}, {"reasoning", {{"effort", "low"}}}, {"user", "u"}, {"foo", 1}});
  EXPECT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(response.headers.at("x-splice-ignored"), "foo,reasoning.effort");
}

TEST(ResponsesApiTest, AStreamThatFailsSaysSo) {
  EchoCluster cluster;
  cluster.Start(kAll);
  cluster.decode[0]->SetGate(3);
  const std::vector<NamedEvent> events =
      cluster.Events(kResponses, {{"input", "one two three four five six"}}, {"x-request-timeout-ms: 400"});
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back().name, "response.failed");
  const json& response = events.back().data.at("response");
  EXPECT_EQ(response.at("status"), "failed");
  EXPECT_EQ(response.at("error").at("code"), "server_error");
  EXPECT_EQ(Call(cluster.http(), "GET", PathOf(response)).status, 404);
}

}  // namespace
}  // namespace spl::router
