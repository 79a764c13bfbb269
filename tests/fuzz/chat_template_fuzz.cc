// Any bytes as a chat template: an error that says something, or text.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "services/tokenizer/chat_template.h"

using spl::tokenizer::ChatMessage;
using spl::tokenizer::ChatTemplate;
using spl::tokenizer::RenderOptions;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto parsed = ChatTemplate::Parse(std::string_view(reinterpret_cast<const char*>(data), size), "<s>", "</s>");
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  const std::vector<ChatMessage> messages = {
      {"system", "Be brief."},
      {"user", " h\xC3\xA9llo "},
      {"assistant", std::nullopt, R"({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]})"},
      {"tool", "", R"({"tool_call_id": "1", "name": "f"})"}};
  RenderOptions options;
  options.extra_json = R"({"tools": [{"name": "f", "args": {"a": 1, "b": [null, true, 2.5]}}], "n": 3})";
  const auto rendered = (*parsed)->Render(messages, options);
  if (!rendered.ok() && rendered.status().code() != absl::StatusCode::kInvalidArgument) std::abort();
  return 0;
}
