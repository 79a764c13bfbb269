// Bodies of /v1/messages as chats.
#include "services/router/request/messages_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Json Parsed(const std::string& text) {
  const auto json = ParseJson(text);
  EXPECT_TRUE(json.ok()) << json.status() << "\n" << text;
  return json.value_or(Json());
}

absl::StatusOr<TranslatedRequest> Translate(const std::string& body) { return TranslateMessages(Parsed(body)); }

struct Case {
  const char* name;
  std::string body, chat;
};

const Case kCases[] = {
    {"the least", R"({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "model": "m", "max_tokens": 5})"},
    {"sampling, stream and Splice's own",
     R"({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "top_p": 0.9, "top_k": 4,
         "stop_sequences": ["END", "x"], "stream": true, "metadata": {"user_id": "u"}, "service_tier": "auto",
         "cache_control": {"type": "ephemeral"}, "splice": {"reuse": "exact"}, "seed": 3, "priority": -1})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "stream": true, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
         "splice": {"reuse": "exact"}, "priority": -1, "seed": 3, "stop": ["END", "x"]})"},
    {"system as a string", R"({"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]})",
     R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]})"},
    {"system as blocks",
     R"({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
         "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})",
     R"({"messages": [
         {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
         {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})"},
    {"segments stay segments",
     R"({"messages": [{"role": "user", "content": [{"type": "segment", "text": "d", "namespace": "n"}]}]})",
     R"({"messages": [{"role": "user", "content": [{"type": "segment", "text": "d", "namespace": "n"}]}]})"},
    {"a conversation with thoughts, calls and results",
     R"({"messages": [
         {"role": "user", "content": "Rain?"},
         {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Look ", "signature": "s"}, {"type": "thinking", "thinking": "it up."},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"b": 1, "a": 2}},
            {"type": "tool_use", "id": "2", "name": "weather", "input": {}}]},
         {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "yes"},
            {"type": "tool_result", "tool_use_id": "2", "is_error": true,
             "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "pe"}]},
            {"type": "text", "text": "Hurry."}]}]})",
     R"({"messages": [
         {"role": "user", "content": "Rain?"},
         {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}], "reasoning_content": "Look it up.",
          "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"b": 1, "a": 2}}},
            {"id": "2", "type": "function", "function": {"name": "weather", "arguments": {}}}]},
         {"role": "tool", "content": "yes", "tool_call_id": "1"},
         {"role": "tool", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "pe"}],
          "tool_call_id": "2", "is_error": true},
         {"role": "user", "content": [{"type": "text", "text": "Hurry."}]}]})"},
    {"a call alone, an empty result, results behind text",
     R"({"messages": [
         {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
         {"role": "user", "content": [{"type": "text", "text": "Here:"}, {"type": "tool_result", "tool_use_id": "1"}]}]})",
     R"({"messages": [
         {"role": "assistant", "content": null,
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]},
         {"role": "user", "content": [{"type": "text", "text": "Here:"}]},
         {"role": "tool", "content": "", "tool_call_id": "1"}]})"},
    {"the last answer is continued",
     R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The best is ("}]})",
     R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The best is ("}],
         "continue_final_message": true})"},
    {"tools", R"({"messages": [{"role": "user", "content": "Hi"}], "tools": [
         {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
         {"type": "custom", "name": "g", "input_schema": {}}], "tool_choice": {"type": "auto"}})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "tools": [
         {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
         {"type": "function", "function": {"name": "g", "parameters": {}}}], "tool_choice": "auto"})"},
    {"no call", R"({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": {"type": "none"}})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "none"})"},
    {"any call, one of them",
     R"({"messages": [{"role": "user", "content": "Hi"}],
         "tool_choice": {"type": "any", "disable_parallel_tool_use": true}})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "required", "parallel_tool_calls": false})"},
    {"a call of this tool",
     R"({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": {"type": "tool", "name": "f"}})",
     R"({"messages": [{"role": "user", "content": "Hi"}],
         "tool_choice": {"type": "function", "function": {"name": "f"}}})"},
    {"thinking", R"({"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "enabled"}})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": true}})"},
    {"no thinking, beside another variable",
     R"({"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"},
         "chat_template_kwargs": {"a": 1}})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": 1, "enable_thinking": false}})"},
    {"thinking as the model likes",
     R"({"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "adaptive"}})",
     R"({"messages": [{"role": "user", "content": "Hi"}]})"},
    {"effort and a schema",
     R"({"messages": [{"role": "user", "content": "Hi"}], "output_config": {"effort": "low",
         "format": {"type": "json_schema", "schema": {"type": "object"}}}})",
     R"({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low", "response_format": {
         "type": "json_schema", "json_schema": {"name": "answer", "strict": true, "schema": {"type": "object"}}}})"},
};

TEST(TranslateMessagesTest, BodiesAndTheirChats) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const auto translated = Translate(c.body);
    ASSERT_TRUE(translated.ok()) << translated.status();
    EXPECT_EQ(nlohmann::json::parse(translated->chat.dump()), nlohmann::json::parse(c.chat));
    EXPECT_THAT(translated->ignored, ElementsAre());
    const auto parsed = ParseTranslated(*translated, "messages", {});
    // A choice of tools that are not there is the chat's to refuse.
    EXPECT_TRUE(parsed.ok() || ParamOf(parsed.status()).starts_with("tool_choice")) << parsed.status();
  }
}

TEST(TranslateMessagesTest, TheChatIsReadAsAChat) {
  const auto translated = Translate(R"({"model": "m", "max_tokens": 7, "stream": true, "stop_sequences": ["x"],
      "system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": "c"}], "temperature": 0.5})");
  ASSERT_TRUE(translated.ok()) << translated.status();
  const auto request = ParseTranslated(*translated, "messages", {});
  ASSERT_TRUE(request.ok()) << request.status();
  const auto& chat = std::get<ChatPrompt>(request->generation.prompt);
  ASSERT_EQ(chat.messages.size(), 3u);
  EXPECT_EQ(chat.messages[0].role, "system");
  EXPECT_EQ(chat.messages[1].content, "ab");
  EXPECT_TRUE(chat.continue_final_message);
  EXPECT_FALSE(chat.add_generation_prompt);
  EXPECT_EQ(request->generation.api, "messages");
  EXPECT_EQ(request->generation.sampling.max_tokens, 7u);
  EXPECT_EQ(request->generation.stop, std::vector<std::string>{"x"});
  EXPECT_TRUE(request->stream.stream);
}

// The template prints tools in the client's order.
TEST(TranslateMessagesTest, SchemasKeepTheirOrder) {
  const std::string schema = R"({"type":"object","properties":{"z":{},"a":{}},"required":["z"]})";
  const auto translated = Translate(
      R"({"messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "f", "input_schema": )" + schema + "}]}");
  ASSERT_TRUE(translated.ok()) << translated.status();
  EXPECT_EQ(translated->chat["tools"][0]["function"]["parameters"].dump(), schema);
}

TEST(TranslateMessagesTest, FieldsWithoutEffectAreNamed) {
  const auto translated = Translate(R"({"messages": [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "t"}]},
        {"role": "user", "content": "Hi", "frobnicate": 1}],
      "thinking": {"type": "enabled", "budget_tokens": 2000}, "context_management": {"edits": []}, "foo": 1,
      "nothing": null, "output_config": {"bar": 1},
      "tools": [{"name": "f", "input_schema": {}, "strict": true}, {"name": "g", "input_schema": {}, "strict": false}],
      "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}})");
  ASSERT_TRUE(translated.ok()) << translated.status();
  EXPECT_THAT(translated->ignored,
              ElementsAre("messages.redacted_thinking", "tool_choice.disable_parallel_tool_use", "tools.strict",
                          "thinking.budget_tokens", "output_config.bar", "context_management", "foo"));
}

TEST(TranslateMessagesTest, ErrorsNameTheField) {
  const struct {
    const char *body, *field;
  } cases[] = {
      {R"([])", ""},
      {R"({})", "messages"},
      {R"({"system": "s", "messages": []})", "messages"},
      {R"({"messages": 5})", "messages"},
      {R"({"messages": [5]})", "messages[0]"},
      {R"({"messages": [{"role": "tool", "content": "x"}]})", "messages[0].role"},
      {R"({"messages": [{"role": "user"}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": 5}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})",
       "messages[0].content[0].type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]})",
       "messages[0].content[0].type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", "messages[0].content[0].text"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]})",
       "messages[0].content[0].tool_use_id"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
          {"type": "text", "text": ""}, {"type": "image"}]}]}]})",
       "messages[0].content[0].content[1].type"},
      {R"({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]})",
       "messages[0].content[0].id"},
      {R"({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}]})",
       "messages[0].content[0].input"},
      {R"({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]})",
       "messages"},
      {R"({"system": [{"type": "image"}], "messages": [{"role": "user", "content": "x"}]})", "system[0].type"},
      {R"({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "bash_20250124", "name": "bash"}]})",
       "tools[0].type"},
      {R"({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]})", "tools[0].input_schema"},
      {R"({"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "some"}})", "tool_choice.type"},
      {R"({"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "tool"}})", "tool_choice.name"},
      {R"({"messages": [{"role": "user", "content": "x"}], "thinking": {"type": "deep"}})", "thinking.type"},
      {R"({"messages": [{"role": "user", "content": "x"}], "mcp_servers": [{"url": "u"}]})", "mcp_servers"},
      {R"({"messages": [{"role": "user", "content": "x"}], "container": "c"})", "container"},
      {R"({"messages": [{"role": "user", "content": "x"}], "output_config": {"format": {"type": "json_schema"}}})",
       "output_config.format.schema"},
      // Those that the chat finds have the client's names, too.
      {R"({"messages": [{"role": "user", "content": "x"}], "stop_sequences": [5]})", "stop_sequences"},
      {R"({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0})", "max_tokens"},
      {R"({"messages": [{"role": "user", "content": "x"}], "temperature": 9})", "temperature"},
      {R"({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "", "input_schema": {}}]})",
       "tools[0].name"},
      {R"({"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
          {"type": "segment", "text": "x", "namespce": "n"}]}]})",
       "messages[0].content[1].namespce"},
      {R"({"system": [{"type": "text", "text": "s"}, {"type": "segment", "text": "x", "namespce": "n"}],
          "messages": [{"role": "user", "content": "x"}]})",
       "system[1].namespce"},
      {R"({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "", "input": {}}]},
          {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]})",
       "messages[0].content[0].name"},
      {R"({"messages": [{"role": "user", "content": "x"}], "splice": {"reuze": "exact"}})", "splice.reuze"},
      {R"({"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "any"}})", "tool_choice"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.body);
    const auto translated = Translate(c.body);
    const absl::Status status =
        translated.ok() ? ParseTranslated(*translated, "messages", {}).status() : translated.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ParamOf(status), c.field) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
}

}  // namespace
}  // namespace spl::router
