// Bodies of /v1/responses as chats.
#include "services/router/request/responses_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using ::testing::ElementsAre;

Json Parsed(const std::string& text) {
  const auto json = ParseJson(text);
  EXPECT_TRUE(json.ok()) << json.status() << "\n" << text;
  return json.value_or(Json());
}

// One response is kept, and of its items one is asked for by its id.
EarlierResponses Earlier() {
  const Json items = Parsed(R"([{"role": "user", "content": "Who?"},
      {"id": "rs_0", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
      {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Nell."}]}])");
  EarlierResponses earlier;
  earlier.conversation = [items](const std::string& id) -> absl::StatusOr<EarlierConversation> {
    if (id != "resp_1") return absl::NotFoundError("no such response");
    return EarlierConversation{items, "root"};
  };
  earlier.item = [items](const std::string& id) -> absl::StatusOr<Json> {
    if (id != "msg_1") return absl::NotFoundError("no such item");
    return items[2];
  };
  return earlier;
}

absl::StatusOr<ResponsesRequest> Translate(const std::string& body) {
  return TranslateResponses(Parsed(body), Earlier());
}

struct Case {
  const char* name;
  std::string body, chat;
};

const Case kCases[] = {
    {"the least", R"({"input": "Hi"})", R"({"messages": [{"role": "user", "content": "Hi"}]})"},
    {"instructions, sampling, limits",
     R"({"model": "m", "instructions": "Be brief.", "input": "Hi", "temperature": 0.5, "top_p": 0.9, "stream": true,
         "max_output_tokens": 9, "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "service_tier": "auto",
         "truncation": "disabled", "include": [], "background": false, "top_logprobs": 0,
         "stream_options": {"include_obfuscation": false}, "splice": {"decode": "dense"}, "seed": 1})",
     R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "model": "m",
         "stream": true, "temperature": 0.5, "top_p": 0.9, "splice": {"decode": "dense"}, "seed": 1, "max_tokens": 9})"},
    {"messages of all roles, with and without type",
     R"({"input": [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": [
           {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
         {"role": "assistant", "content": "c"}, {"role": "system", "content": "s"}, {"role": "user", "content": "e"}]})",
     R"({"messages": [{"role": "developer", "content": "d"},
         {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
         {"role": "assistant", "content": [{"type": "text", "text": "c"}]}, {"role": "system", "content": "s"},
         {"role": "user", "content": "e"}]})"},
    {"the items of a turn are one message",
     R"({"input": [{"role": "user", "content": "Rain?"},
         {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
          "content": [{"type": "reasoning_text", "text": "Look "}, {"type": "reasoning_text", "text": "it up."}]},
         {"type": "message", "role": "assistant", "id": "msg_9", "status": "completed",
          "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
         {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{\"a\":1}"},
         {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
         {"type": "function_call_output", "call_id": "1", "output": "yes"},
         {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "no"}]}]})",
     R"({"messages": [{"role": "user", "content": "Rain?"},
         {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}], "reasoning_content": "Look it up.",
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}},
                         {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
         {"role": "tool", "content": "yes", "tool_call_id": "1"},
         {"role": "tool", "content": [{"type": "text", "text": "no"}], "tool_call_id": "2"}]})"},
    {"reasoning begins another answer",
     R"({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
         {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
         {"role": "assistant", "content": "So."}, {"role": "user", "content": "x"}]})",
     R"({"messages": [{"role": "assistant", "content": null,
           "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
         {"role": "assistant", "content": [{"type": "text", "text": "So."}], "reasoning_content": "Hm."},
         {"role": "user", "content": "x"}]})"},
    {"a refusal, and a segment",
     R"({"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
         {"role": "user", "content": [{"type": "segment", "text": "d"}]}]})",
     R"({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "No."}]},
         {"role": "user", "content": [{"type": "segment", "text": "d"}]}]})"},
    {"an earlier response", R"({"instructions": "New.", "previous_response_id": "resp_1", "input": "And?"})",
     R"({"messages": [{"role": "system", "content": "New."}, {"role": "user", "content": "Who?"},
         {"role": "assistant", "content": [{"type": "text", "text": "Nell."}], "reasoning_content": "Hm."},
         {"role": "user", "content": "And?"}]})"},
    {"a reference", R"({"input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}]})",
     R"({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "Nell."}]},
         {"role": "user", "content": "x"}]})"},
    {"tools and a choice",
     R"({"input": "x", "tools": [{"type": "function", "name": "f", "description": "d", "strict": false,
           "parameters": {"type": "object"}}, {"type": "function", "name": "g", "parameters": null}],
         "tool_choice": {"type": "function", "name": "f"}})",
     R"({"messages": [{"role": "user", "content": "x"}], "tools": [
           {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
           {"type": "function", "function": {"name": "g"}}],
         "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": true})"},
    {"required", R"({"input": "x", "tool_choice": "required", "parallel_tool_calls": false})",
     R"({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "parallel_tool_calls": false})"},
    {"a schema",
     R"({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "strict": true, "schema": {"a": 1}}}})",
     R"({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema",
         "json_schema": {"name": "n", "strict": true, "schema": {"a": 1}}}})"},
    {"a JSON object", R"({"input": "x", "text": {"format": {"type": "json_object"}}})",
     R"({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}})"},
    {"effort", R"({"input": "x", "reasoning": {"effort": "high"}})",
     R"({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"})"},
};

TEST(TranslateResponsesTest, BodiesAndTheirChats) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const auto request = Translate(c.body);
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_EQ(nlohmann::json::parse(request->translated.chat.dump()), nlohmann::json::parse(c.chat));
    EXPECT_THAT(request->translated.ignored, ElementsAre());
    const auto parsed = ParseTranslated(request->translated, "responses", {});
    EXPECT_TRUE(parsed.ok() || ParamOf(parsed.status()) == "tool_choice") << parsed.status();
  }
}

TEST(TranslateResponsesTest, TheConversationIsWhole) {
  const auto request = Translate(R"({"previous_response_id": "resp_1", "store": false,
      "input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}]})");
  ASSERT_TRUE(request.ok()) << request.status();
  ASSERT_EQ(request->items.size(), 5u);
  EXPECT_EQ(request->items[3]["id"], "msg_1");
  EXPECT_EQ(request->items[4]["content"], "x");
  EXPECT_EQ(request->session, "root");
  EXPECT_FALSE(request->store);
  const auto first = Translate(R"({"input": "x"})");
  EXPECT_EQ(first->items, Parsed(R"([{"role": "user", "content": "x"}])"));
  EXPECT_TRUE(first->store);
  EXPECT_EQ(first->session, "");
}

TEST(TranslateResponsesTest, TheResponseRepeatsTheRequest) {
  const auto request = Translate(R"({"input": "x", "instructions": "i", "max_output_tokens": 4, "metadata": {"a": "b"},
      "tools": [{"type": "function", "name": "f"}], "tool_choice": "none", "text": {"format": {"type": "text"}},
      "reasoning": {"effort": "low"}, "user": "u"})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(nlohmann::json::parse(request->echo.dump()), nlohmann::json::parse(R"({
      "instructions": "i", "previous_response_id": null, "tools": [{"type": "function", "name": "f"}],
      "parallel_tool_calls": true, "tool_choice": "none", "text": {"format": {"type": "text"}},
      "reasoning": {"effort": "low", "summary": null}, "metadata": {"a": "b"}, "max_output_tokens": 4,
      "max_tool_calls": null, "prompt_cache_key": null, "safety_identifier": null, "user": "u", "background": false,
      "top_logprobs": 0, "truncation": "disabled"})"));
  EXPECT_EQ(Translate(R"({"input": "x"})")->echo["text"], Parsed(R"({"format": {"type": "text"}})"));
}

TEST(TranslateResponsesTest, FieldsWithoutEffectAreNamed) {
  const auto request = Translate(R"({"input": [
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "y"}, {"role": "user", "content": "x", "foo": 1}],
      "parallel_tool_calls": false, "tools": [{"type": "function", "name": "f", "strict": true}],
      "text": {"verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto",
      "include": ["reasoning.encrypted_content"], "frobnicate": 1, "nothing": null})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(request->translated.ignored,
              ElementsAre("input.encrypted_content", "parallel_tool_calls", "tools.strict", "text.verbosity",
                          "reasoning.summary", "truncation", "include", "frobnicate"));
  // Reasoning that nobody here can read is no message.
  EXPECT_EQ(request->translated.chat["messages"].size(), 1u);
}

TEST(TranslateResponsesTest, ErrorsNameTheField) {
  const struct {
    const char *body, *field;
  } cases[] = {
      {R"({})", "input"},
      {R"({"input": 5})", "input"},
      {R"({"input": []})", "input"},
      {R"({"input": [5]})", "input[0]"},
      {R"({"input": [{"type": "computer_call"}]})", "input[0].type"},
      {R"({"input": [{"role": "tool", "content": "x"}]})", "input[0].role"},
      {R"({"input": [{"role": "user"}]})", "input[0].content"},
      {R"({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})", "input[0].content[0].type"},
      {R"({"input": [{"role": "user", "content": [{"type": "input_text"}]}]})", "input[0].content[0].text"},
      {R"({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]})", "input[0].call_id"},
      {R"({"input": [{"type": "function_call_output", "output": "x"}]})", "input[0].call_id"},
      {R"({"input": [{"type": "function_call_output", "call_id": "1"}]})", "input[0].output"},
      {R"({"input": "x", "background": true})", "background"},
      {R"({"input": "x", "conversation": "c"})", "conversation"},
      {R"({"input": "x", "prompt": {"id": "p"}})", "prompt"},
      {R"({"input": "x", "top_logprobs": 3})", "top_logprobs"},
      {R"({"input": "x", "include": ["message.output_text.logprobs"]})", "include"},
      {R"({"input": "x", "tools": [{"type": "web_search"}]})", "tools[0].type"},
      {R"({"input": "x", "tool_choice": {"type": "allowed_tools"}})", "tool_choice.type"},
      {R"({"input": "x", "tool_choice": {"type": "function"}})", "tool_choice.name"},
      // Those that the chat finds have the client's names, too.
      {R"({"input": "x", "tool_choice": "some"})", "tool_choice"},
      {R"({"input": "x", "max_output_tokens": 0})", "max_output_tokens"},
      {R"({"input": "x", "text": {"format": {"type": "xml"}}})", "text.format.type"},
      {R"({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}})", "text.format.schema"},
      {R"({"input": "x", "tools": [{"type": "function"}]})", "tools[0].name"},
      {R"({"instructions": "i", "input": [{"role": "user", "content": "x"},
          {"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]})",
       "input[1].name"},
      {R"({"input": [{"role": "user", "content": [{"type": "segment", "text": "x", "namespce": "n"}]}]})",
       "input[0].content[0].namespce"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.body);
    const auto request = Translate(c.body);
    const absl::Status status =
        request.ok() ? ParseTranslated(request->translated, "responses", {}).status() : request.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ParamOf(status), c.field) << status;
  }
  const absl::Status unknown = Translate(R"({"input": "x", "previous_response_id": "resp_2"})").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ParamOf(unknown), "previous_response_id");
  const absl::Status item = Translate(R"({"input": [{"type": "item_reference", "id": "msg_2"}]})").status();
  EXPECT_EQ(item.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ParamOf(item), "input[0].id");
}

}  // namespace
}  // namespace spl::router
