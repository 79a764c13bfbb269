#include "services/router/request/earlier_reasoning.h"

#include <nlohmann/json.hpp>

namespace spl::router {
namespace {

constexpr char kSent[] = "reasoning_content", kRead[] = "thinking";

}  // namespace

void NameReasoning(const tokenizer::ChatTemplate& chat_template, std::vector<tokenizer::ChatMessage>* messages) {
  if (!chat_template.Mentions("message.thinking") || chat_template.Mentions(kSent)) return;
  for (tokenizer::ChatMessage& message : *messages) {
    if (message.role != "assistant" || message.extra_json.empty()) continue;
    auto members = nlohmann::ordered_json::parse(message.extra_json, nullptr, false);
    if (!members.is_object() || !members.contains(kSent) || members.contains(kRead)) continue;
    const bool has_content = message.content.has_value() && !message.content->empty();
    if (has_content && members.contains("tool_calls")) continue;
    members[kRead] = members[kSent];
    message.extra_json = members.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
}

}  // namespace spl::router
