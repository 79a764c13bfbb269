// Structured output through real workers: whatever the model would rather say, an answer that ends is what was asked
// for. The weights are random, so that nothing but the grammar makes it so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "services/grammar/grammar_plugin.h"
#include "tests/cluster/local_cluster_fixture.h"
#include "tests/cluster/processes.h"
#include "tests/cluster/random_model.h"
#include "tests/support/json_schemas.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tools/cli/local_cluster.h"

namespace spl::test {
namespace {

using nlohmann::json;
using ::spl::testing::IsValid;
using ::testing::HasSubstr;

constexpr char kChat[] = "/v1/chat/completions";

const char* const kSchemas[] = {
    R"({"type":"object","properties":{"ok":{"type":"boolean"}},"required":["ok"],"additionalProperties":false})",
    R"({"type":"object","properties":{"age":{"type":"integer","minimum":0,"maximum":150}},"required":["age"],"additionalProperties":false})",
    R"({"type":"object","properties":{"name":{"type":"string","pattern":"^[A-Z][a-z]{2,6}$"}},"required":["name"],"additionalProperties":false})",
    R"({"enum":["red","green",3,null,true]})",
    R"({"const":{"a":[1,2]}})",
    R"({"type":"array","items":{"enum":[1,2,3]},"minItems":2,"maxItems":5})",
    R"({"type":"array","items":{"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":3},"minItems":1,"maxItems":3})",
    R"({"anyOf":[{"type":"boolean"},{"type":"null"},{"enum":["x"]}]})",
    R"({"type":"integer","minimum":-20,"maximum":20})",
    R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"boolean"}},"required":["b"],"additionalProperties":false})",
    R"({"type":"object","properties":{"kind":{"const":"circle"},"r":{"type":"integer","minimum":1,"maximum":9}},"required":["kind","r"],"additionalProperties":false})",
    R"({"type":"object","properties":{"p":{"type":"object","properties":{"q":{"type":"object","properties":{"r":{"enum":["deep"]}},"required":["r"],"additionalProperties":false}},"required":["q"],"additionalProperties":false}},"required":["p"],"additionalProperties":false})",
    R"({"$defs":{"color":{"enum":["red","blue"]}},"type":"array","items":{"$ref":"#/$defs/color"},"minItems":1,"maxItems":4})",
    R"({"$defs":{"node":{"type":"object","properties":{"leaf":{"type":"boolean"}},"required":["leaf"],"additionalProperties":false}},"$ref":"#/$defs/node"})",
    R"({"type":"object","properties":{"when":{"type":"string","pattern":"^[0-9]{4}-[0-9]{2}$"},"n":{"type":"integer","minimum":10,"maximum":99}},"required":["when","n"],"additionalProperties":false})",
    R"({"oneOf":[{"type":"object","properties":{"t":{"const":1}},"required":["t"],"additionalProperties":false},{"type":"object","properties":{"t":{"const":2}},"required":["t"],"additionalProperties":false}]})",
    R"({"type":"string","pattern":"^(yes|no|maybe)$"})",
    R"({"type":"object","properties":{},"additionalProperties":false})",
    R"({"type":"object","properties":{"tags":{"type":"array","items":{"enum":["a","b","ü","世"]},"maxItems":3}},"required":["tags"],"additionalProperties":false})",
    R"({"type":"object","properties":{"w \"x\"":{"type":"boolean"},"é":{"enum":["\n","\\"]}},"required":["w \"x\"","é"],"additionalProperties":false})",
};

json Body(const std::string& content) {
  return {
      {"messages", json::array({{{"role", "user"}, {"content", content}}})}, {"max_tokens", 400}, {"temperature", 1}};
}

json SchemaFormat(const char* schema, bool strict = true) {
  return {{"type", "json_schema"},
          {"json_schema", {{"name", "answer"}, {"strict", strict}, {"schema", json::parse(schema)}}}};
}

class StructuredOutputTest : public LocalClusterTest {
 protected:
  static void SetUpTestSuite() {
    if (!grammar::HaveGrammarPlugin()) return;
    StartCluster(RandomModelOptions(folder_.path()));
  }
  void SetUp() override {
    if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(cluster_, nullptr);
  }

  HttpReply Post(const json& body) { return HttpPost(cluster_->http_address(), kChat, body.dump()); }
  json Choices(const json& body) {
    const HttpReply reply = Post(body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body, nullptr, false).value("choices", json::array());
  }
  // The text of an answer that has ended; fails the test if it has not.
  std::string Ended(const json& body) {
    const json choices = Choices(body);
    if (choices.empty()) return "";
    EXPECT_EQ(choices[0]["finish_reason"], "stop") << choices[0];
    return choices[0]["message"].value("content", "");
  }

  static inline ::spl::testing::TempDir folder_;
};

TEST_F(StructuredOutputTest, EveryAnswerValidates) {
  int ended = 0, all = 0;
  for (const char* text : kSchemas) {
    const json schema = json::parse(text);
    for (int seed = 0; seed < 2; ++seed) {
      json body = Body("Answer.");
      body["seed"] = seed;
      body["response_format"] = SchemaFormat(text, seed == 0);
      const json choices = Choices(body);
      ASSERT_EQ(choices.size(), 1u);
      ++all;
      if (choices[0]["finish_reason"] != "stop") continue;
      ++ended;
      const std::string answer = choices[0]["message"]["content"];
      const json value = json::parse(answer, nullptr, false);
      EXPECT_FALSE(value.is_discarded()) << answer;
      EXPECT_TRUE(IsValid(value, schema, schema)) << text << "\n" << answer;
    }
  }
  std::printf("%d of %d answers ended, and validate\n", ended, all);
  EXPECT_GT(ended, all * 3 / 4);
}

TEST_F(StructuredOutputTest, RegexChoiceGrammarUnderBothNames) {
  const std::string regex = "[A-Z]{2}[0-9]{3}", grammar = "root ::= \"<\" [a-c]{1,4} \">\"";
  const json choice = {"left", "right", "straight \"on\""};
  for (const bool guided : {false, true}) {
    const auto with = [&](const char* kind, const json& value) {
      json body = Body("Where?");
      if (guided)
        body[std::string("guided_") + kind] = value;
      else
        body["structured_outputs"] = {{kind, value}};
      return Ended(body);
    };
    EXPECT_TRUE(std::regex_match(with("regex", regex), std::regex(regex)));
    EXPECT_TRUE(std::regex_match(with("grammar", grammar), std::regex("<[a-c]{1,4}>")));
    const std::string chosen = with("choice", choice);
    EXPECT_NE(std::find(choice.begin(), choice.end(), chosen), choice.end()) << chosen;
    EXPECT_TRUE(json::parse(with("json", json::parse(kSchemas[0])), nullptr, false).contains("ok"));
  }
  json completion = {{"prompt", "x"}, {"max_tokens", 50}, {"temperature", 1}, {"guided_regex", regex}};
  const HttpReply reply = HttpPost(cluster_->http_address(), "/v1/completions", completion.dump());
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_TRUE(std::regex_match(json::parse(reply.body)["choices"][0]["text"].get<std::string>(), std::regex(regex)));
}

TEST_F(StructuredOutputTest, GoesWithOtherFields) {
  const json schema = json::parse(kSchemas[5]);
  json body = Body("Numbers.");
  body["response_format"] = SchemaFormat(kSchemas[5]);
  body["n"] = 4;
  body["logprobs"] = true;
  body["top_logprobs"] = 2;
  body["min_tokens"] = 200;  // more than any of these answers has
  body["frequency_penalty"] = 0.5;
  body["top_p"] = 0.9;
  const json choices = Choices(body);
  ASSERT_EQ(choices.size(), 4u);
  for (const json& one : choices) {
    EXPECT_EQ(one["finish_reason"], "stop") << one;
    EXPECT_TRUE(IsValid(json::parse(one["message"]["content"].get<std::string>(), nullptr, false), schema, schema))
        << one;
    EXPECT_FALSE(one["logprobs"]["content"].empty());
  }
  body = Body("Numbers.");
  body["response_format"] = SchemaFormat(kSchemas[5]);
  body["temperature"] = 0;
  const std::string greedy = Ended(body);
  EXPECT_TRUE(IsValid(json::parse(greedy, nullptr, false), schema, schema)) << greedy;
  EXPECT_EQ(Ended(body), greedy);
}

TEST_F(StructuredOutputTest, AStreamIsTheWholeAnswer) {
  for (int seed = 0; seed < 3; ++seed) {
    json body = Body("Say.");
    body["seed"] = seed;
    body["response_format"] = SchemaFormat(kSchemas[14]);
    const std::string whole = Ended(body);
    body["stream"] = true;
    SseStream stream(cluster_->http_address(), kChat, body.dump());
    std::string streamed;
    for (std::string event = stream.Next(); !event.empty() && event != "[DONE]"; event = stream.Next()) {
      const json data = json::parse(event);
      ASSERT_FALSE(data.contains("error")) << event;
      if (!data["choices"].empty()) streamed += data["choices"][0]["delta"].value("content", "");
    }
    EXPECT_EQ(streamed, whole);
  }
}

TEST_F(StructuredOutputTest, ConflictsAndWhatIsNotSupportedAreRefusedByName) {
  struct Case {
    json more;
    std::string param, reason;
  };
  const Case cases[] = {
      {{{"response_format", {{"type", "json_object"}}}, {"guided_regex", "a"}}, "guided_regex", "exclude"},
      {{{"structured_outputs", {{"regex", "a"}, {"json", json::object()}}}}, "structured_outputs.regex", "exclude"},
      {{{"structured_outputs", {{"lark", "a"}}}}, "structured_outputs.lark", ""},
      {{{"guided_regex", "a"}, {"ignore_eos", true}}, "ignore_eos", "guided_regex"},
      {{{"guided_regex", "((("}}, "guided_regex", "parenthesis"},
      {{{"guided_grammar", "root ::= ("}}, "guided_grammar", "EBNF"},
      {{{"guided_choice", json::array()}}, "guided_choice", "empty"},
      {{{"guided_choice", "a"}}, "guided_choice", "list"},
      {{{"guided_json", {{"not", {{"type", "string"}}}}}}, "guided_json", "not"},
      {{{"response_format", SchemaFormat(R"({"type":"array","uniqueItems":true})")}},
       "response_format.json_schema.schema",
       "uniqueItems"},
      {{{"response_format", {{"type", "json_schema"}}}}, "response_format.json_schema", "required"},
      {{{"response_format", {{"type", "xml"}}}}, "response_format.type", "json_schema"},
  };
  for (const Case& c : cases) {
    json body = Body("x");
    body.update(c.more);
    const HttpReply reply = Post(body);
    EXPECT_EQ(reply.status, 400) << c.more << reply.body;
    const json error = json::parse(reply.body, nullptr, false).value("error", json::object());
    EXPECT_EQ(error.value("param", ""), c.param) << reply.body;
    EXPECT_THAT(error.value("message", ""), HasSubstr(c.reason));
  }
}

// Texts that take a compiler long, or that are too much, while another caller's answer goes on.
TEST_F(StructuredOutputTest, HostileSchemasHarmNobodyElse) {
  json deep = {{"type", "string"}};
  for (int i = 0; i < 24; ++i) deep = {{"anyOf", json::array({deep, {{"type", "integer"}}})}};
  std::string nested = std::string(60, '(') + "a";
  for (int i = 0; i < 60; ++i) nested += "?)*";
  json doubling = {{"$defs", {{"d0", {{"type", "string"}}}}}, {"$ref", "#/$defs/d30"}};
  for (int i = 1; i <= 30; ++i) {
    const json ref = {{"$ref", "#/$defs/d" + std::to_string(i - 1)}};
    doubling["$defs"]["d" + std::to_string(i)] = {{"type", "object"}, {"properties", {{"a", ref}, {"b", ref}}}};
  }
  const json hostile[] = {{{"guided_json", deep}},
                          {{"guided_json", doubling}},
                          {{"guided_json", std::string(10 << 20, '[')}},
                          {{"guided_json", R"({"type":"string","maxLength":1000000})"}},
                          {{"guided_regex", "(a{1000}){1000}"}},
                          {{"guided_regex", R"((\w|\d|.){1,500}x(\w|\d|.){1,500})"}},
                          {{"guided_regex", nested}},
                          {{"guided_grammar", "root ::= \"a\" | root root root"}},
                          {{"guided_grammar", "root ::= x{1,1000}\nx ::= y{1,1000}\ny ::= [a-z]{1,1000}"}}};
  std::atomic<bool> done{false};
  std::atomic<int> answers{0};
  double longest_s = 0;
  std::thread other([&] {
    do {
      json body = Body("Go on.");
      body["max_tokens"] = 20;
      const auto start = std::chrono::steady_clock::now();
      const HttpReply reply = Post(body);
      EXPECT_EQ(reply.status, 200) << reply.body;
      longest_s = std::max(longest_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      ++answers;
    } while (!done);
  });
  for (const json& more : hostile) {
    json body = Body("x");
    body["max_tokens"] = 8;
    body.update(more);
    const HttpReply reply = Post(body);
    EXPECT_TRUE(reply.status == 200 || reply.status == 400 || reply.status == 413) << reply.status << reply.body;
  }
  done = true;
  other.join();
  EXPECT_GE(answers, 2);
  std::printf("%d answers of others, the longest took %.2f s\n", answers.load(), longest_s);
  EXPECT_LT(longest_s, 20);
  EXPECT_EQ(Ended([] {
              json body = Body("x");
              body["guided_choice"] = {"fine"};
              return body;
            }()),
            "fine");
}

json Tools() {
  const json weather = {{"type", "object"},
                        {"properties",
                         {{"city", {{"enum", {"Bern", "Zürich", "St. \"Gallen\""}}}},
                          {"days", {{"type", "integer"}, {"minimum", 1}, {"maximum", 9}}}}},
                        {"required", {"city", "days"}},
                        {"additionalProperties", false}};
  const json stop = {{"type", "object"}, {"properties", json::object()}, {"additionalProperties", false}};
  return json::array({{{"type", "function"}, {"function", {{"name", "weather"}, {"parameters", weather}}}},
                      {{"type", "function"}, {"function", {{"name", "stop_all"}, {"parameters", stop}}}}});
}

// Fails the test unless the message consists of valid calls of Tools(). Returns the number of calls.
size_t CheckCalls(const json& choice) {
  EXPECT_EQ(choice["finish_reason"], "tool_calls") << choice;
  const json& message = choice["message"];
  EXPECT_TRUE(message["content"].is_null()) << choice;
  const json calls = message.value("tool_calls", json::array());
  for (const json& call : calls) {
    bool known = false;
    for (const json& tool : Tools()) {
      if (tool["function"]["name"] != call["function"]["name"]) continue;
      known = true;
      const json& parameters = tool["function"]["parameters"];
      const json arguments = json::parse(call["function"]["arguments"].get<std::string>(), nullptr, false);
      EXPECT_TRUE(IsValid(arguments, parameters, parameters)) << call;
    }
    EXPECT_TRUE(known) << call;
  }
  return calls.size();
}

// SPLICE_FORCED_CALLS: how many answers instead of 24.
TEST_F(StructuredOutputTest, AForcedToolIsCalledEveryTime) {
  const char* const asked = std::getenv("SPLICE_FORCED_CALLS");
  const int num_answers = asked == nullptr ? 24 : std::atoi(asked);
  int good = 0;
  for (int seed = 0; seed < num_answers; ++seed) {
    json body = Body("Rain?");
    body["seed"] = seed;
    body["tools"] = Tools();
    body["parallel_tool_calls"] = false;
    const bool named = seed % 2 == 0;
    body["tool_choice"] = named ? json{{"type", "function"}, {"function", {{"name", "weather"}}}} : json("required");
    const json choices = Choices(body);
    ASSERT_EQ(choices.size(), 1u);
    const bool was_good = !HasFailure();
    EXPECT_EQ(CheckCalls(choices[0]), 1u) << choices[0];
    if (named && !HasFailure()) {
      EXPECT_EQ(choices[0]["message"]["tool_calls"][0]["function"]["name"], "weather");
    }
    good += was_good && !HasFailure();
  }
  std::printf("%d of %d forced calls are valid\n", good, num_answers);
  EXPECT_EQ(good, num_answers);
}

// Streams `body` and expects the calls of the answer as a whole.
void ExpectStreamedAlike(const std::string& address, json body, const json& whole) {
  body["stream"] = true;
  SseStream stream(address, kChat, body.dump());
  json calls = json::array();
  for (std::string event = stream.Next(); !event.empty() && event != "[DONE]"; event = stream.Next()) {
    const json data = json::parse(event);
    ASSERT_FALSE(data.contains("error")) << event;
    if (data["choices"].empty()) continue;
    for (const json& call : data["choices"][0]["delta"].value("tool_calls", json::array())) {
      if (call.contains("id")) calls.push_back({{"name", call["function"]["name"]}, {"arguments", ""}});
      ASSERT_EQ(call["index"], calls.size() - 1) << event;
      calls.back()["arguments"] =
          calls.back()["arguments"].get<std::string>() + call["function"].value("arguments", "");
    }
  }
  ASSERT_EQ(calls.size(), whole.size());
  for (size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i], whole[i]["function"]);
}

TEST_F(StructuredOutputTest, AStreamedForcedCallIsTheWholeOne) {
  json body = Body("Rain?");
  body["tools"] = Tools();
  body["tool_choice"] = "required";
  body["parallel_tool_calls"] = false;
  for (int seed = 0; seed < 4; ++seed) {
    body["seed"] = seed;
    body["stream"] = false;
    ExpectStreamedAlike(cluster_->http_address(), body, Choices(body).at(0)["message"]["tool_calls"]);
  }
}

TEST_F(StructuredOutputTest, CallsThatCannotBeForcedAreRefused) {
  json body = Body("Rain?");
  body["tools"] = Tools();
  body["tool_choice"] = {{"type", "function"}, {"function", {{"name", "nothing"}}}};
  HttpReply reply = Post(body);
  EXPECT_EQ(reply.status, 400);
  EXPECT_THAT(reply.body, HasSubstr("there is no tool"));
  body["tool_choice"] = "required";
  body["response_format"] = {{"type", "json_object"}};
  reply = Post(body);
  EXPECT_EQ(reply.status, 400);
  EXPECT_THAT(reply.body, HasSubstr("tool_choice"));
}

struct CallFormat {
  const char* name;
  std::vector<std::string> special;  // tags that are special tokens of the model
};

class CallFormatTest : public ::testing::TestWithParam<CallFormat> {};

// A cluster of a random model that writes calls in a format. SPLICE_FORCED_CALLS: how many answers instead of 6.
TEST_P(CallFormatTest, ARandomModelCallsAForcedToolEveryTime) {
  if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
  const ::spl::testing::TempDir folder;
  cli::LocalClusterOptions options = RandomModelOptions(folder.path());
  RenameSpecialTokens(folder.path(), GetParam().special);
  options.output_format.tools = GetParam().name;
  auto cluster = cli::LocalCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const char* const asked = std::getenv("SPLICE_FORCED_CALLS");
  const int num_answers = asked == nullptr ? 6 : std::atoi(asked);
  int num_ended = 0;
  for (int seed = 0; seed < num_answers && !HasFailure(); ++seed) {
    json body = Body("Rain?");
    body["seed"] = seed;
    body["tools"] = Tools();
    body["tool_choice"] = "required";
    const bool one = seed % 3 != 0;
    body["parallel_tool_calls"] = !one;
    const HttpReply reply = HttpPost((*cluster)->http_address(), kChat, body.dump());
    ASSERT_EQ(reply.status, 200) << reply.body;
    const json choice = json::parse(reply.body)["choices"][0];
    if (choice["finish_reason"] == "length") continue;  // calls of a random model need not end
    ++num_ended;
    const size_t num_calls = CheckCalls(choice);
    EXPECT_TRUE(one ? num_calls == 1 : num_calls >= 1) << choice;
    if (seed < 6) ExpectStreamedAlike((*cluster)->http_address(), body, choice["message"]["tool_calls"]);
  }
  std::printf("%d of %d answers ended, with valid calls\n", num_ended, num_answers);
  EXPECT_GE(num_ended, num_answers * 2 / 3) << "one call ends";
  (*cluster)->Stop();
}

INSTANTIATE_TEST_SUITE_P(
    Formats, CallFormatTest,
    ::testing::Values(CallFormat{"json", {}}, CallFormat{"llama3_json", {}}, CallFormat{"mistral", {"[TOOL_CALLS]"}},
                      CallFormat{"mistral", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}},
                      CallFormat{"deepseek",
                                 {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
                                  "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"}},
                      CallFormat{"harmony", {"<|channel|>", "<|constrain|>", "<|message|>"}},
                      CallFormat{"pythonic", {}}, CallFormat{"qwen3_coder", {}},
                      CallFormat{"glm4", {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}}),
    [](const auto& info) { return std::string(info.param.name) + "_" + std::to_string(info.index); });

TEST(StructuredOutputClusterTest, AnAnswerWhoseWorkerDiesValidates) {
  if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel, .num_decode = 2});
  ASSERT_NE(cluster, nullptr);
  const json schema = {
      {"type", "array"}, {"items", {{"enum", {"north", "south", "east", "west"}}}}, {"minItems", 40}, {"maxItems", 40}};
  json body = Body("Which way?");
  body["seed"] = 3;
  body["guided_json"] = schema;
  const HttpReply undisturbed = HttpPost(cluster->http(), kChat, body.dump());
  ASSERT_EQ(undisturbed.status, 200) << undisturbed.body;
  body["stream"] = true;
  SseStream stream(cluster->http(), kChat, body.dump());
  std::string text, finish;
  int events = 0;
  for (std::string event = stream.Next(); !event.empty() && event != "[DONE]"; event = stream.Next()) {
    const json data = json::parse(event);
    ASSERT_FALSE(data.contains("error")) << event;
    if (data["choices"].empty()) continue;
    text += data["choices"][0]["delta"].value("content", "");
    if (!data["choices"][0]["finish_reason"].is_null()) finish = data["choices"][0]["finish_reason"];
    if (++events != 20) continue;
    const bool first_is_busy =
        MetricValue(HttpGet(cluster->decode[0]->ready("metrics"), "/metrics").body, "splice_num_requests_running") > 0;
    cluster->decode[first_is_busy ? 0 : 1]->Signal(SIGKILL);
  }
  EXPECT_GT(events, 20);
  EXPECT_EQ(finish, "stop");
  EXPECT_TRUE(IsValid(json::parse(text, nullptr, false), schema, schema)) << text;
  EXPECT_EQ(text, json::parse(undisturbed.body)["choices"][0]["message"]["content"]) << "the same seed";
}

// A build whose source of xgrammar could not be fetched.
TEST(StructuredOutputClusterTest, WithoutThePlugInRequestsAreRefused) {
  ::setenv("SPLICE_XGRAMMAR_PLUGIN", "/there/is/no/libsplice_xgrammar.so", 1);
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel});
  ::unsetenv("SPLICE_XGRAMMAR_PLUGIN");
  ASSERT_NE(cluster, nullptr);
  json body = Body("x");
  body["max_tokens"] = 4;
  EXPECT_EQ(HttpPost(cluster->http(), kChat, body.dump()).status, 200);
  body["response_format"] = SchemaFormat(kSchemas[0]);
  const HttpReply refused = HttpPost(cluster->http(), kChat, body.dump());
  EXPECT_EQ(refused.status, 501) << refused.body;
  const json error = json::parse(refused.body, nullptr, false).value("error", json::object());
  EXPECT_EQ(error.value("code", ""), "structured_output_unavailable") << refused.body;
  EXPECT_THAT(error.value("message", ""), HasSubstr("./dev build"));
}

}  // namespace
}  // namespace spl::test
