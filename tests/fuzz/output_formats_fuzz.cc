// Answers of a model in every format of tool calls and reasoning: whatever is written, and wherever it is cut, the
// pieces make one message, and no part of it is read before its call has begun.
//
// The first bytes choose the format and where the answer is cut; each other byte is a letter or a piece of some format,
// so that calls are written that begin well.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "services/router/output_formats/registry.h"

namespace {

using spl::router::OutputDelta;
using spl::router::OutputFormat;
using spl::router::ToolCallDelta;

constexpr const char* kFormats[] = {"none", "deepseek",    "glm4",    "harmony",  "hermes",
                                    "json", "llama3_json", "mistral", "pythonic", "qwen3_coder"};
constexpr char kTools[] =
    R"([{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {)"
    R"("path": {"type": "string"}, "line": {"type": "integer"}, "deep": {"type": "object"}}}}},)"
    R"({"type": "function", "function": {"name": "bare"}}])";
constexpr std::string_view kPieces[] = {"<think>",
                                        "</think>",
                                        "<tool_call>",
                                        "</tool_call>",
                                        "[TOOL_CALLS]",
                                        "[CALL_ID]",
                                        "[ARGS]",
                                        "<|python_tag|>",
                                        "<|python_start|>",
                                        "<|python_end|>",
                                        "<function=",
                                        "</function>",
                                        "<parameter=",
                                        "</parameter>",
                                        "<arg_key>",
                                        "</arg_key>",
                                        "<arg_value>",
                                        "</arg_value>",
                                        "<|start|>",
                                        "<|channel|>",
                                        "<|message|>",
                                        "<|end|>",
                                        "<|call|>",
                                        "<|return|>",
                                        "<|constrain|>",
                                        "analysis",
                                        "commentary",
                                        "final",
                                        "assistant",
                                        "to=functions.",
                                        "<｜tool▁calls▁begin｜>",
                                        "<｜tool▁calls▁end｜>",
                                        "<｜tool▁call▁begin｜>",
                                        "<｜tool▁call▁end｜>",
                                        "<｜tool▁sep｜>",
                                        "function",
                                        "```json\n",
                                        "\n```",
                                        "edit",
                                        "bare",
                                        "path",
                                        "line",
                                        "deep",
                                        "{\"name\": \"edit\", \"arguments\": ",
                                        "{\"path\": \"a\", \"line\": 3}",
                                        "{\"deep\": {\"x\": [1, 2]}}",
                                        "\"name\"",
                                        "\"arguments\"",
                                        "\"parameters\"",
                                        "[edit(path='a', line=3)",
                                        ", bare()]",
                                        "'",
                                        "\"",
                                        "\\",
                                        "\\u00e9",
                                        "\\ud83d",
                                        "\xc3\xa9",
                                        "\xe2",
                                        "{",
                                        "}",
                                        "[",
                                        "]",
                                        "(",
                                        ")",
                                        "=",
                                        ":",
                                        ",",
                                        " ",
                                        "\n",
                                        "\n\n",
                                        "3",
                                        "-1e5",
                                        "true",
                                        "null",
                                        "None"};

struct Call {
  std::string name, arguments;
  bool operator==(const Call&) const = default;
};
struct Message {
  std::string reasoning, content;
  std::vector<Call> calls;
  bool operator==(const Message&) const = default;
};

void Check(bool holds) {
  if (!holds) std::abort();
}

void Add(const OutputDelta& delta, Message& message) {
  message.reasoning += delta.reasoning;
  message.content += delta.content;
  for (const ToolCallDelta& part : delta.tool_calls) {
    Check(part.content_bytes <= delta.content.size());
    if (part.index == message.calls.size()) {
      Check(!part.id.empty() && !part.name.empty());
      message.calls.push_back({part.name, ""});
    } else {
      Check(part.index + 1 == message.calls.size() && part.id.empty() && part.name.empty());
    }
    message.calls.back().arguments += part.arguments;
  }
}

// The message of an answer that is fed in pieces: `cuts` are their lengths, in turns.
Message Parse(const OutputFormat& format, bool has_tools, bool in_reasoning, std::string_view text,
              const std::vector<size_t>& cuts) {
  size_t ids = 0;
  const spl::router::CallableTools tools{kTools, [&] { return "call_" + std::to_string(ids++); }};
  const auto parser = MakeOutputParser(format, has_tools ? &tools : nullptr, in_reasoning);
  Message message;
  if (parser == nullptr) {
    message.content = text;
    return message;
  }
  size_t next = 0;
  while (!text.empty()) {
    const size_t length = std::min(cuts[next++ % cuts.size()], text.size());
    OutputDelta delta;
    parser->Feed(text.substr(0, length), &delta);
    Add(delta, message);
    text.remove_prefix(length);
  }
  OutputDelta rest;
  parser->Finish(&rest);
  Add(rest, message);
  return message;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4 || size > 4096) return 0;
  OutputFormat format;
  format.tools = kFormats[data[0] % std::size(kFormats)];
  format.reasoning = format.tools == "harmony" ? "harmony" : data[1] % 2 == 0 ? "none" : "think";
  const bool has_tools = data[1] / 2 % 4 != 0, in_reasoning = data[1] / 8 % 4 == 0 && format.reasoning != "none";
  std::string text;
  for (size_t i = 4; i < size; ++i) {
    if (data[i] < 0x80 || data[i] - 0x80u >= std::size(kPieces))
      text += static_cast<char>(data[i]);
    else
      text += kPieces[data[i] - 0x80u];
  }
  const Message whole = Parse(format, has_tools, in_reasoning, text, {text.size() + 1});
  Check(whole == Parse(format, has_tools, in_reasoning, text, {1}));
  Check(whole == Parse(format, has_tools, in_reasoning, text, {1 + data[2] % 16u, 1 + data[3] % 64u}));
  if (!has_tools) Check(whole.calls.empty());
  return 0;
}
