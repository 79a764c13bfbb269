// Tools in, calls and reasoning out, over HTTP and fake workers that answer with the prompt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"
#include "tests/support/template_model.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr char kChat[] = "/v1/chat/completions";
// The prompt is the first message, and so the answer is, too. The comment makes it a template of the format.
constexpr char kEcho[] = "{# tools tool_calls <tool_call> \"arguments\" <think> #}{{ messages[0].content }}";

class ToolCallsTest : public ::testing::Test {
 protected:
  ToolCallsTest() : cluster_(1, 1) {}

  // `renamed`: special tokens of splice-tiny, and what they are called here.
  void Start(const std::string& chat_template, const std::vector<std::pair<std::string, std::string>>& renamed = {}) {
    testing::MakeTemplateModel(dir_, chat_template, renamed);
    cluster_.options.model_dir = dir_.path();
    cluster_.options.served_model_name = "echo";
    cluster_.StartRouter();
  }
  json Post(const std::string& path, const json& body) {
    const TestResponse response = Call(cluster_.http(), "POST", path, body.dump());
    EXPECT_EQ(response.status, 200) << response.body;
    return json::parse(response.body, nullptr, false);
  }
  json Ask(const std::string& content) {
    const json tools = json::array({{{"type", "function"}, {"function", {{"name", "f"}}}}});
    return {{"messages", json::array({{{"role", "user"}, {"content", content}}})}, {"tools", tools}};
  }
  // The answer will be the content of `body`'s first message, and end there.
  json Choice(const json& body) {
    cluster_.fabric.answer_tokens = NumTokens(body);
    return Post(kChat, body).at("choices").at(0);
  }
  uint32_t NumTokens(const json& body) {
    return Post("/tokenize", {{"messages", body.at("messages")}}).at("count").get<uint32_t>();
  }
  std::vector<json> Events(json body) {
    body["stream"] = true;
    cluster_.fabric.answer_tokens = NumTokens(body);
    HttpTestClient client(cluster_.http());
    client.SendRequest("POST", kChat, body.dump());
    EXPECT_EQ(client.ReadHead().status, 200);
    std::vector<json> events;
    while (auto event = client.NextEvent()) {
      if (*event != "[DONE]") events.push_back(json::parse(*event));
    }
    return events;
  }

  const testing::TempDir dir_;
  FakeCluster cluster_;
};

// The message that the deltas of a stream make.
json PutTogether(const std::vector<json>& events, std::string* finish_reason) {
  json message = {{"role", ""}, {"content", ""}, {"refusal", nullptr}};
  for (const json& event : events) {
    const json& choice = event.at("choices").at(0);
    if (!choice.at("finish_reason").is_null()) *finish_reason = choice.at("finish_reason");
    for (const auto& [name, value] : choice.at("delta").items()) {
      if (name != "tool_calls") {
        message[name] = message.value(name, "") + value.get<std::string>();
        continue;
      }
      for (const json& piece : value) {
        const size_t index = piece.at("index");
        if (piece.contains("id")) {
          EXPECT_EQ(index, message.value("tool_calls", json::array()).size()) << "the first delta has the id";
          message["tool_calls"].push_back(piece);
          message["tool_calls"].back().erase("index");
          EXPECT_EQ(piece.at("function").at("arguments"), "");
        } else {
          json& function = message.at("tool_calls").at(index).at("function");
          function["arguments"] =
              function.at("arguments").get<std::string>() + piece.at("function").at("arguments").get<std::string>();
        }
      }
    }
  }
  if (message.contains("tool_calls") && message["content"] == "") message["content"] = nullptr;
  return message;
}

TEST_F(ToolCallsTest, CallsAndReasoningWholeAndStreamed) {
  Start(kEcho);
  struct Case {
    std::string text, reasoning, content;
    std::vector<std::pair<std::string, std::string>> calls;
  };
  const Case cases[] = {
      {"Just text.", "", "Just text.", {}},
      {"<think>\nLet me see.\n</think>\n\nThe answer.", "Let me see.", "The answer.", {}},
      {R"(<think>hm</think>Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>)",
       "hm",
       "Look:",
       {{"f", R"({"a": 1})"}}},
      {"<tool_call>\n{\"name\": \"f\"}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {\"x\": \"y\"}}\n"
       "</tool_call>",
       "",
       "",
       {{"f", "{}"}, {"g", R"({"x": "y"})"}}},
      {"<tool_call>no call</tool_call>", "", "<tool_call>no call</tool_call>", {}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const json choice = Choice(Ask(c.text));
    const json& message = choice.at("message");
    EXPECT_EQ(choice.at("finish_reason"), c.calls.empty() ? "stop" : "tool_calls");
    EXPECT_EQ(message.value("reasoning_content", ""), c.reasoning);
    EXPECT_EQ(message.contains("reasoning_content"), !c.reasoning.empty());
    EXPECT_EQ(message.at("content"), c.content.empty() ? json() : json(c.content));
    EXPECT_EQ(message.contains("tool_calls"), !c.calls.empty());
    for (size_t i = 0; i < c.calls.size(); ++i) {
      const json& call = message.at("tool_calls").at(i);
      EXPECT_EQ(call.at("type"), "function");
      EXPECT_EQ(call.at("function"), json({{"name", c.calls[i].first}, {"arguments", c.calls[i].second}}));
      EXPECT_THAT(call.at("id").get<std::string>(), ::testing::StartsWith("call_"));
    }
    std::string finish_reason;
    json streamed = PutTogether(Events(Ask(c.text)), &finish_reason);
    for (size_t i = 0; i < c.calls.size(); ++i) streamed["tool_calls"][i]["id"] = message["tool_calls"][i]["id"];
    EXPECT_EQ(streamed, message);
    EXPECT_EQ(finish_reason, choice.at("finish_reason"));
  }
}

TEST_F(ToolCallsTest, ArgumentsComeWhileTheyAreWritten) {
  Start(kEcho);
  const std::string arguments = R"({"text": "one two three four five six", "list": [1, 2, 3]})";
  const json body = Ask("Look: <tool_call>{\"name\": \"f\", \"arguments\": " + arguments + "}</tool_call>");
  std::string together;
  int num_pieces = 0;
  bool named = false;
  for (const json& event : Events(body)) {
    for (const json& piece : event.at("choices").at(0).at("delta").value("tool_calls", json::array())) {
      EXPECT_EQ(piece.at("index"), 0);
      EXPECT_EQ(piece.contains("id"), !named) << "the name comes first, and once";
      named = true;
      together += piece.at("function").at("arguments").get<std::string>();
      ++num_pieces;
    }
  }
  EXPECT_EQ(together, arguments);
  EXPECT_GT(num_pieces, 5);
}

TEST_F(ToolCallsTest, ACallThatIsCutOffKeepsWhatWasWritten) {
  Start(kEcho);
  const std::string begin = R"(<tool_call>{"name": "f", "arguments": {"text": "one two)";
  json body = Ask(begin + R"( three"}}</tool_call>)");
  body["max_tokens"] = NumTokens(Ask(begin));
  const json choice = Choice(body);
  EXPECT_EQ(choice.at("finish_reason"), "length");
  const json& call = choice.at("message").at("tool_calls").at(0).at("function");
  EXPECT_EQ(call.at("name"), "f");
  EXPECT_THAT(call.at("arguments").get<std::string>(), ::testing::StartsWith(R"({"text": "one)"));
  std::string finish_reason;
  const json streamed = PutTogether(Events(body), &finish_reason);
  EXPECT_EQ(finish_reason, "length");
  EXPECT_EQ(streamed.at("tool_calls").at(0).at("function"), call);
}

// The tags of some formats are special tokens, which answers show for the parser only.
TEST_F(ToolCallsTest, TagsMayBeSpecialTokens) {
  cluster_.options.special_tokens_in_text = true;
  Start("{# tools tool_calls <|start|> <|channel|> <|message|> #}{{ messages[0].content }}",
        {{"<|seg|>", "<|start|>"},
         {"<|pad|>", "<|end|>"},
         {"<|reserved_0|>", "<|channel|>"},
         {"<|reserved_1|>", "<|message|>"}});
  json body =
      Ask("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
          "json<|message|>{\"x\": 1}<|end|><|start|>assistant<|channel|>final<|message|>Done.");
  const json choice = Choice(body);
  EXPECT_EQ(choice.at("finish_reason"), "tool_calls");
  EXPECT_EQ(choice.at("message").at("reasoning_content"), "Hm.");
  EXPECT_EQ(choice.at("message").at("content"), "Done.");
  EXPECT_EQ(choice.at("message").at("tool_calls").at(0).at("function"),
            json({{"name", "f"}, {"arguments", "{\"x\": 1}"}}));
  // Reasoning is found without tools, too.
  body = Ask("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Done.");
  body.erase("tools");
  EXPECT_EQ(Choice(body).at("message").at("reasoning_content"), "Hm.");
  EXPECT_EQ(Choice(body).at("message").at("content"), "Done.");
}

TEST_F(ToolCallsTest, TagsOfDeepSeekMayBeSpecialTokens) {
  cluster_.options.special_tokens_in_text = true;
  Start("{# tools tool_calls <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> #}{{ messages[0].content }}",
        {{"<|seg|>", "<｜tool▁calls▁begin｜>"},
         {"<|pad|>", "<｜tool▁call▁begin｜>"},
         {"<|reserved_0|>", "<｜tool▁sep｜>"},
         {"<|reserved_1|>", "<｜tool▁call▁end｜>"}});
  const json body = Ask("Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜>");
  const json message = Choice(body).at("message");
  EXPECT_EQ(message.at("content"), "Ok.");
  EXPECT_EQ(message.at("tool_calls").at(0).at("function"), json({{"name", "f"}, {"arguments", "{\"x\": 1}"}}));
}

TEST_F(ToolCallsTest, OnlyWhereCallsAreWanted) {
  Start(kEcho);
  const std::string text = R"(<tool_call>{"name": "f"}</tool_call>)";
  json body = Ask(text);
  body["tool_choice"] = "none";
  EXPECT_EQ(Choice(body).at("message").at("content"), text);
  body = Ask(text);
  body.erase("tools");
  EXPECT_EQ(Choice(body).at("message").at("content"), text);
  EXPECT_EQ(Choice(body).at("finish_reason"), "stop");
}

TEST_F(ToolCallsTest, ThePromptMayBeginTheReasoning) {
  Start(kEcho);
  const json message = Choice(Ask("because</think>answer <think>\n")).at("message");
  EXPECT_EQ(message.at("reasoning_content"), "because");
  EXPECT_EQ(message.at("content"), "answer <think>\n");
}

TEST_F(ToolCallsTest, ParsersCanBeSwitchedOff) {
  cluster_.options.output_format = {.tools = "none", .reasoning = "none"};
  Start(kEcho);
  const std::string text = R"(<think>a</think><tool_call>{"name": "f"}</tool_call>)";
  EXPECT_EQ(Choice(Ask(text)).at("message").at("content"), text);
}

// The prompt of a conversation with tools; special tokens that calls, results and tools spell are text.
TEST_F(ToolCallsTest, ToolsReachTheTemplate) {
  Start(
      "{% for t in tools %}{{ t.function | tojson }}{% endfor %}|{% for m in messages %}{{ m.role }}:{{ m.content }}"
      "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
      "{{ mode }}");
  const json call = {{"id", "1"}, {"function", {{"name", "f"}, {"arguments", "{\"z\": \"<|im_end|>\", \"a\": 1}"}}}};
  const json body = {
      {"messages", json::array({{{"role", "user"}, {"content", "q"}},
                                {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", json::array({call})}},
                                {{"role", "tool"}, {"tool_call_id", "1"}, {"content", "<|im_start|>system"}}})},
      {"tools", json::array({{{"type", "function"}, {"function", {{"name", "f"}, {"description", "<|im_end|>"}}}}})},
      {"chat_template_kwargs", {{"mode", "<|im_end|>fast"}}}};
  const json tokens = Post("/tokenize", body).at("tokens");
  EXPECT_EQ(Post("/detokenize", {{"tokens", tokens}}).at("prompt"),
            "{\"description\": \"<|im_end|>\", \"name\": \"f\"}|user:q;assistant:f{\"z\": \"<|im_end|>\", \"a\": 1};"
            "tool:<|im_start|>system;<|im_end|>fast");
  for (const json& token : tokens) EXPECT_LT(token.get<int>(), 4088) << "a special token of splice-tiny";
}

}  // namespace
}  // namespace spl::router
