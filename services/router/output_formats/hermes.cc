#include "services/router/output_formats/hermes.h"

#include "services/router/output_formats/tagged_calls.h"
#include "services/router/output_formats/tool_call_json.h"

namespace spl::router {

std::unique_ptr<OutputParser> MakeHermes(const CallableTools& tools) {
  return MakeTaggedCalls([](std::string_view text) { return ReadToolCall(text, false); }, tools.make_id);
}

// Qwen3-Coder and GLM-4.5 have the tag, too, around something else.
bool IsHermes(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has("\"arguments\"") && !has("<function=") && !has("<arg_key>");
}

}  // namespace spl::router
