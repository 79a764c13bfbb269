#include "tests/services/router/output_format_cases.h"

#include <gtest/gtest.h>

#include <random>

namespace spl::router {

const char kCaseTools[] = R"([{"type": "function", "function": {"name": "edit", "parameters": {"type": "object",
    "properties": {"path": {"type": "string"}, "note": {"type": ["null", "string"]}, "line": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "bare"}}])";

std::ostream& operator<<(std::ostream& out, const Message& m) {
  out << "reasoning \"" << m.reasoning << "\" content \"" << m.content << "\"";
  for (const std::string& call : m.calls) out << " call " << call;
  return out;
}

std::vector<OutputDelta> DeltasOf(const OutputFormat& format, const std::vector<std::string_view>& pieces,
                                  bool in_reasoning) {
  int num_ids = 0;
  const CallableTools tools{.json = kCaseTools, .make_id = [&] { return "id" + std::to_string(num_ids++); }};
  const auto parser = MakeOutputParser(format, &tools, in_reasoning);
  std::vector<OutputDelta> deltas;
  for (const std::string_view piece : pieces) parser->Feed(piece, &deltas.emplace_back());
  parser->Finish(&deltas.emplace_back());
  return deltas;
}

Message ParsePieces(const OutputFormat& format, const std::vector<std::string_view>& pieces, bool in_reasoning) {
  Message out;
  std::vector<std::string> names, arguments;
  for (const OutputDelta& delta : DeltasOf(format, pieces, in_reasoning)) {
    out.reasoning += delta.reasoning;
    out.content += delta.content;
    for (size_t i = 0; i < delta.tool_calls.size(); ++i) {
      const ToolCallDelta& call = delta.tool_calls[i];
      if (call.index == names.size()) {
        EXPECT_EQ(call.id, "id" + std::to_string(call.index));
        names.push_back(call.name);
        arguments.emplace_back();
      } else {
        EXPECT_EQ(call.index + 1, names.size()) << "a delta of a call that has ended";
        EXPECT_EQ(i, 0u) << "two parts of one call in one delta";
        EXPECT_EQ(call.id + call.name, "");
        EXPECT_NE(call.arguments, "");
      }
      if (call.index < arguments.size()) arguments[call.index] += call.arguments;
    }
  }
  for (size_t i = 0; i < names.size(); ++i) out.calls.push_back(names[i] + "(" + arguments[i] + ")");
  return out;
}

std::vector<std::string_view> BytesOf(std::string_view text) {
  std::vector<std::string_view> bytes;
  for (size_t i = 0; i < text.size(); ++i) bytes.push_back(text.substr(i, 1));
  return bytes;
}

void ExpectCases(const OutputFormat& format, const std::vector<Case>& cases) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.what) + ", seed " + std::to_string(seed));
    const std::string_view text = c.text;
    ASSERT_EQ(ParsePieces(format, {text}, c.in_reasoning), c.expected);
    ASSERT_EQ(ParsePieces(format, BytesOf(text), c.in_reasoning), c.expected) << "byte by byte";
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      ASSERT_EQ(ParsePieces(format, {text.substr(0, cut), text.substr(cut)}, c.in_reasoning), c.expected)
          << "cut at " << cut;
    }
    for (int i = 0; i < 50; ++i) {
      std::vector<std::string_view> pieces;
      for (size_t at = 0; at < text.size();) {
        const size_t length = 1 + random() % 7;
        pieces.push_back(text.substr(at, length));
        at += length;
      }
      ASSERT_EQ(ParsePieces(format, pieces, c.in_reasoning), c.expected) << "random pieces";
    }
  }
}

}  // namespace spl::router
