#include "services/router/request/messages_response.h"

#include <algorithm>
#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using Kind = AnswerBlock::Kind;

constexpr int kMaxInputDepth = 256;  // of a call's arguments: JSON is written with a stack of its depth

// Levels of brackets outside of strings.
int DepthOf(const std::string& json) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"') in_string = !in_string;
    if (in_string && c == '\\') ++i;  // what it escapes ends nothing
    if (in_string) continue;
    if (c == '{' || c == '[') deepest = std::max(deepest, ++depth);
    if (c == '}' || c == ']') --depth;
  }
  return deepest;
}

// The arguments as an object; those that cannot be one are its member "arguments".
OrderedJson InputOf(const std::string& arguments) {
  if (DepthOf(arguments) <= kMaxInputDepth) {
    OrderedJson input = OrderedJson::parse(arguments, nullptr, /*allow_exceptions=*/false);
    if (input.is_object()) return input;
  }
  OrderedJson input;
  input["arguments"] = arguments;
  return input;
}

// `text` empty: the block as it begins in a stream.
OrderedJson BlockJson(const AnswerBlock& block, const std::string& text) {
  switch (block.kind) {
    case Kind::kReasoning:
      return {{"type", "thinking"}, {"thinking", text}, {"signature", ""}};
    case Kind::kCall:
      return {{"type", "tool_use"},
              {"id", block.id},
              {"name", block.name},
              {"input", text.empty() ? OrderedJson::object() : InputOf(text)}};
    case Kind::kContent:
      break;
  }
  return {{"type", "text"}, {"text", text}};
}

OrderedJson DeltaJson(Kind kind, const std::string& text) {
  switch (kind) {
    case Kind::kReasoning:
      return {{"type", "thinking_delta"}, {"thinking", text}};
    case Kind::kCall:
      return {{"type", "input_json_delta"}, {"partial_json", text}};
    case Kind::kContent:
      break;
  }
  return {{"type", "text_delta"}, {"text", text}};
}

std::string BlockDelta(size_t index, OrderedJson delta) {
  return NamedSseEvent({{"type", "content_block_delta"}, {"index", index}, {"delta", std::move(delta)}});
}

// Anthropic counts prompt tokens from its cache beside input_tokens.
OrderedJson MessagesUsage(uint32_t prompt_tokens, uint32_t cached_tokens, uint32_t output_tokens) {
  const uint32_t cached = std::min(prompt_tokens, cached_tokens);
  return {{"input_tokens", prompt_tokens - cached},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", cached},
          {"output_tokens", output_tokens}};
}

OrderedJson MessagesUsage(const FinalInfo& final) {
  return MessagesUsage(final.prompt_tokens, static_cast<uint32_t>(final.receipt.cached_tokens()),
                       final.completion_tokens);
}

}  // namespace

void MessagesFormatter::SetPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) {
  prompt_tokens_ = num_tokens;
  reader_.SetPrompt(prompt);
}

OrderedJson MessagesFormatter::Message() const {
  OrderedJson message;
  message["id"] = head_.id;
  message["type"] = "message";
  message["role"] = "assistant";
  message["model"] = head_.model;
  message["content"] = OrderedJson::array();
  message["stop_reason"] = nullptr;
  message["stop_sequence"] = nullptr;
  return message;
}

void MessagesFormatter::SetEnd(OrderedJson* message) const {
  const char* reason = "end_turn";
  if (reader_.finish_reason() == FinishReason::kLength) {
    reason = "max_tokens";
  } else if (!reader_.stop_string().empty()) {
    reason = "stop_sequence";
  } else if (reader_.has_calls()) {
    reason = "tool_use";
  }
  (*message)["stop_reason"] = reason;
  (*message)["stop_sequence"] =
      reader_.stop_string().empty() ? OrderedJson(nullptr) : OrderedJson(reader_.stop_string());
}

// The number of cached tokens is not known before the end.
std::string MessagesFormatter::Start() {
  if (std::exchange(started_, true)) return "";
  OrderedJson message = Message();
  message["usage"] = MessagesUsage(prompt_tokens_, 0, 0);
  return NamedSseEvent({{"type", "message_start"}, {"message", std::move(message)}}) +
         NamedSseEvent(OrderedJson{{"type", "ping"}});
}

std::string MessagesFormatter::StopBlock() {
  if (num_open_ == 0) return "";
  const size_t index = num_open_ - 1;
  std::string events;
  // Thinking is not signed: it comes back as it is.
  if (reader_.blocks()[index].kind == Kind::kReasoning)
    events += BlockDelta(index, {{"type", "signature_delta"}, {"signature", ""}});
  return events + NamedSseEvent({{"type", "content_block_stop"}, {"index", index}});
}

std::string MessagesFormatter::PartEvents(const AnswerPart& part) {
  const AnswerBlock& block = reader_.blocks()[part.block];
  std::string events;
  if (part.begins) {
    events += StopBlock();
    num_open_ = part.block + 1;
    events += NamedSseEvent(
        {{"type", "content_block_start"}, {"index", part.block}, {"content_block", BlockJson(block, "")}});
  }
  return events + BlockDelta(part.block, DeltaJson(block.kind, part.text));
}

std::string MessagesFormatter::Events(std::span<const Delta> deltas, const FinalInfo* final) {
  std::string events = Start();
  for (const Delta& delta : deltas) {
    for (const AnswerPart& part : reader_.Read(delta)) events += PartEvents(part);
  }
  if (final == nullptr) return events;
  events += StopBlock();
  OrderedJson delta;
  SetEnd(&delta);
  events += NamedSseEvent({{"type", "message_delta"},
                           {"delta", std::move(delta)},
                           {"usage", MessagesUsage(*final)},
                           {"splice", ReceiptsJson(*final)}});
  return events + NamedSseEvent(OrderedJson{{"type", "message_stop"}});
}

std::string MessagesFormatter::ErrorEvents(const absl::Status& status) {
  return "event: error\ndata: " + AnthropicErrorBody(status, HttpStatusOf(status), head_.request_id) + "\n\n";
}

void MessagesFormatter::Add(std::span<const Delta> deltas) {
  for (const Delta& delta : deltas) reader_.Read(delta);
}

OrderedJson MessagesFormatter::Whole(const FinalInfo& final) {
  OrderedJson message = Message();
  for (const AnswerBlock& block : reader_.blocks()) message["content"].push_back(BlockJson(block, block.text));
  SetEnd(&message);
  message["usage"] = MessagesUsage(final);
  message["splice"] = ReceiptsJson(final);
  return message;
}

}  // namespace spl::router
