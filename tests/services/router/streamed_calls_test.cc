// Arguments of calls that come out while the model writes them.
#include <gtest/gtest.h>

#include "services/router/output_formats/tool_call_json.h"
#include "tests/services/router/output_format_cases.h"

namespace spl::router {
namespace {

constexpr char kArguments[] = R"({"text": "a \"}] b", "list": [1, {"x": null}]})";

struct Shape {
  const char* tools;
  std::string begin, end;  // around the arguments of a call of f
};

std::vector<Shape> Shapes() {
  return {{"hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": ", "}\n</tool_call>"},
          {"mistral", "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": ", "}]"},
          {"mistral", "[TOOL_CALLS]f", ""},
          {"mistral", "[TOOL_CALLS]f[ARGS]", ""},
          {"mistral", "[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]", ""},
          {"deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
          {"deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
           "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
          {"harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"}};
}

OutputFormat FormatOf(const Shape& shape) {
  const bool harmony = std::string(shape.tools) == "harmony";
  return {.tools = shape.tools, .reasoning = harmony ? "harmony" : "none"};
}

// The name with the first byte of the arguments, then every byte by itself.
TEST(StreamedCallsTest, ComeOutAsTheyAreWritten) {
  for (const Shape& shape : Shapes()) {
    const std::string text = shape.begin + kArguments + shape.end;
    SCOPED_TRACE(text);
    const std::vector<OutputDelta> deltas = DeltasOf(FormatOf(shape), BytesOf(text), false);
    const size_t end = shape.begin.size() + sizeof(kArguments) - 1;
    for (size_t i = 0; i < deltas.size(); ++i) {
      if (i < shape.begin.size() || i >= end) {
        EXPECT_TRUE(deltas[i].tool_calls.empty()) << "byte " << i;
        continue;
      }
      ASSERT_EQ(deltas[i].tool_calls.size(), 1u) << "byte " << i;
      const ToolCallDelta& part = deltas[i].tool_calls[0];
      EXPECT_EQ(part.arguments, text.substr(i, 1));
      EXPECT_EQ(part.name, i == shape.begin.size() ? "f" : "");
    }
  }
}

// Calls stand between pieces of content, also where one piece of text has all of them.
TEST(StreamedCallsTest, KeepTheirPlaceInTheContent) {
  for (const Shape& shape : Shapes()) {
    const std::string call = shape.begin + "{}" + shape.end;
    const bool harmony = std::string(shape.tools) == "harmony";
    const std::string text = harmony ? "<|channel|>commentary<|message|>ab<|end|>" + call : "ab" + call;
    SCOPED_TRACE(text);
    const OutputDelta delta = DeltasOf(FormatOf(shape), {text}, false).front();
    EXPECT_EQ(delta.content, "ab");
    ASSERT_EQ(delta.tool_calls.size(), 1u);
    EXPECT_EQ(delta.tool_calls[0].content_bytes, 2u);
  }
}

// At whatever byte the answer ends, it is the same in one piece and in many, and a call that was begun has what was
// written of its arguments.
TEST(StreamedCallsTest, AnswersThatAreCutOff) {
  for (const Shape& shape : Shapes()) {
    const std::string text = shape.begin + kArguments + shape.end;
    for (size_t length = 0; length <= text.size(); ++length) {
      SCOPED_TRACE(text.substr(0, length));
      const std::string_view cut = std::string_view(text).substr(0, length);
      const Message message = ParsePieces(FormatOf(shape), {cut}, false);
      EXPECT_EQ(ParsePieces(FormatOf(shape), BytesOf(cut), false), message);
      const size_t written = length - std::min(length, shape.begin.size());
      if (written == 0) {
        EXPECT_EQ(message, (Message{"", std::string(cut), {}}));
      } else {
        EXPECT_EQ(message, (Message{"", "", {"f(" + std::string(kArguments).substr(0, written) + ")"}}));
      }
    }
  }
}

// The text alone decides what is a call and where its arguments begin.
TEST(StreamedCallsTest, HeadsOfCalls) {
  const std::string long_name(2000, 'x');
  const struct {
    std::string text;
    CallHead::State state;
  } cases[] = {
      {"{\"name\": \"f\", \"arguments\": {", CallHead::kFound},
      {"{ \"id\" : 1e3 , \"t\":\"\\\"{\", \"name\":\"f\",\"parameters\":{", CallHead::kFound},
      {"{\"name\": \"f\", \"arguments\":", CallHead::kMore},
      {"{\"name\": \"f", CallHead::kMore},
      {"{\"id\": tru", CallHead::kMore},
      {"{", CallHead::kMore},
      {"{\"name\": \"f\"}", CallHead::kNone},
      {"{\"name\": \"\", \"arguments\": {", CallHead::kNone},
      {"{\"name\": 1, \"arguments\": {", CallHead::kNone},
      {"{\"name\": \"f\", \"arguments\": \"", CallHead::kNone},
      {"{\"name\": \"f\", \"x\": {", CallHead::kNone},
      {"{\"arguments\": {", CallHead::kNone},
      {"{\"name\": \"\\x\", ", CallHead::kNone},
      {"{x", CallHead::kNone},
      {"{\"name\": \"" + long_name + "\", \"arguments\": {", CallHead::kNone},
      {"{\"name\": \"" + long_name, CallHead::kNone},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.text.substr(0, 60));
    CallHead::State state = CallHead::kMore;
    for (size_t length = 1; length <= c.text.size() && state == CallHead::kMore; ++length) {
      const CallHead head = ReadCallHead(std::string_view(c.text).substr(0, length));
      state = head.state;
      if (state == CallHead::kFound) {
        EXPECT_EQ(head.arguments, length - 1);
        EXPECT_EQ(head.name, "f");
      }
    }
    EXPECT_EQ(state, c.state);
    EXPECT_EQ(ReadCallHead(c.text).state, c.state);
  }
}

}  // namespace
}  // namespace spl::router
