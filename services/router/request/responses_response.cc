#include "services/router/request/responses_response.h"

#include <algorithm>
#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using Kind = AnswerBlock::Kind;

constexpr size_t kIdDigits = 32;

const char* PrefixOf(Kind kind) {
  switch (kind) {
    case Kind::kReasoning:
      return "rs_";
    case Kind::kCall:
      return "fc_";
    case Kind::kContent:
      break;
  }
  return "msg_";
}

// The content part of a message or of reasoning.
OrderedJson PartJson(Kind kind, const std::string& text) {
  if (kind == Kind::kReasoning) return {{"type", "reasoning_text"}, {"text", text}};
  return {{"type", "output_text"},
          {"text", text},
          {"annotations", OrderedJson::array()},
          {"logprobs", OrderedJson::array()}};
}

OrderedJson ResponseUsage(const FinalInfo& final, uint32_t reasoning_tokens) {
  OrderedJson usage;
  usage["input_tokens"] = final.prompt_tokens;
  usage["input_tokens_details"]["cached_tokens"] = final.receipt.cached_tokens();
  usage["output_tokens"] = final.completion_tokens;
  usage["output_tokens_details"]["reasoning_tokens"] = std::min(reasoning_tokens, final.completion_tokens);
  usage["total_tokens"] = final.prompt_tokens + final.completion_tokens;
  return usage;
}

const char* ErrorCodeFor(const absl::Status& status) {
  switch (HttpStatusOf(status)) {
    case 400:
      return "invalid_prompt";
    case 429:
      return "rate_limit_exceeded";
    default:
      return "server_error";
  }
}

}  // namespace

std::string ResponseOfItem(std::string_view item_id) {
  const size_t begin = item_id.find('_');
  if (begin == std::string_view::npos || item_id.size() < begin + 1 + kIdDigits) return "";
  return "resp_" + std::string(item_id.substr(begin + 1, kIdDigits));
}

void ResponsesFormatter::SetPrompt(uint32_t /*num_tokens*/, std::span<const TokenId> prompt) {
  reader_.SetPrompt(prompt);
}

size_t ResponsesFormatter::num_items() const { return std::max<size_t>(1, reader_.blocks().size()); }

const AnswerBlock& ResponsesFormatter::BlockAt(size_t index) const {
  static const AnswerBlock kEmpty;
  return index < reader_.blocks().size() ? reader_.blocks()[index] : kEmpty;
}

std::string ResponsesFormatter::ItemId(size_t index) const {
  return PrefixOf(BlockAt(index).kind) + head_.id + "_" + std::to_string(index);
}

OrderedJson ResponsesFormatter::ItemJson(size_t index, std::string_view status) const {
  const AnswerBlock& block = BlockAt(index);
  const bool begins = status == "in_progress";
  OrderedJson content = OrderedJson::array();
  if (!begins) content.push_back(PartJson(block.kind, block.text));
  OrderedJson item;
  item["id"] = ItemId(index);
  switch (block.kind) {
    case Kind::kReasoning:
      item["type"] = "reasoning";
      item["summary"] = OrderedJson::array();
      item["content"] = std::move(content);
      break;
    case Kind::kCall:
      item["type"] = "function_call";
      item["call_id"] = block.id;
      item["name"] = block.name;
      item["arguments"] = begins ? "" : block.text;
      break;
    case Kind::kContent:
      item["type"] = "message";
      item["role"] = "assistant";
      item["content"] = std::move(content);
      break;
  }
  item["status"] = status;
  return item;
}

OrderedJson ResponsesFormatter::Response(const char* status) const {
  OrderedJson out;
  out["id"] = "resp_" + head_.id;
  out["object"] = "response";
  out["created_at"] = head_.created;
  out["status"] = status;
  out["error"] = nullptr;
  out["incomplete_details"] = nullptr;
  out["model"] = head_.model;
  out["output"] = OrderedJson::array();
  for (const auto& item : head_.echo.items()) out[item.key()] = item.value();
  out["usage"] = nullptr;
  return out;
}

OrderedJson ResponsesFormatter::Done(const FinalInfo& final) {
  OrderedJson out = Response(incomplete() ? "incomplete" : "completed");
  if (incomplete()) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
  for (size_t i = 0; i < num_items(); ++i) {
    const bool cut = incomplete() && i + 1 == num_items();
    out["output"].push_back(ItemJson(i, cut ? "incomplete" : "completed"));
  }
  out["usage"] = ResponseUsage(final, reader_.CountReasoningTokens());
  out["splice"] = ReceiptsJson(final);
  if (head_.on_done) head_.on_done(out);
  return out;
}

std::string ResponsesFormatter::Event(OrderedJson event) {
  event["sequence_number"] = sequence_number_++;
  return NamedSseEvent(event);
}

OrderedJson ResponsesFormatter::About(const char* type, size_t index) const {
  OrderedJson event;
  event["type"] = type;
  event["item_id"] = ItemId(index);
  event["output_index"] = index;
  if (BlockAt(index).kind != Kind::kCall) event["content_index"] = 0;
  return event;
}

std::string ResponsesFormatter::Begin(size_t index) {
  num_begun_ = index + 1;
  std::string events = Event(
      {{"type", "response.output_item.added"}, {"output_index", index}, {"item", ItemJson(index, "in_progress")}});
  const Kind kind = BlockAt(index).kind;
  if (kind == Kind::kCall) return events;
  OrderedJson part = About("response.content_part.added", index);
  part["part"] = PartJson(kind, "");
  return events + Event(std::move(part));
}

std::string ResponsesFormatter::Extend(size_t index, const std::string& text) {
  const char* type = "response.output_text.delta";
  const Kind kind = BlockAt(index).kind;
  if (kind == Kind::kReasoning) type = "response.reasoning_text.delta";
  if (kind == Kind::kCall) type = "response.function_call_arguments.delta";
  OrderedJson event = About(type, index);
  event["delta"] = text;
  if (kind == Kind::kContent) event["logprobs"] = OrderedJson::array();
  return Event(std::move(event));
}

std::string ResponsesFormatter::End(size_t index, std::string_view status) {
  const AnswerBlock& block = BlockAt(index);
  std::string events;
  if (block.kind == Kind::kCall) {
    OrderedJson done = About("response.function_call_arguments.done", index);
    done["name"] = block.name;
    done["arguments"] = block.text;
    events += Event(std::move(done));
  } else {
    const bool reasoning = block.kind == Kind::kReasoning;
    OrderedJson done = About(reasoning ? "response.reasoning_text.done" : "response.output_text.done", index);
    done["text"] = block.text;
    if (!reasoning) done["logprobs"] = OrderedJson::array();
    OrderedJson part = About("response.content_part.done", index);
    part["part"] = PartJson(block.kind, block.text);
    events += Event(std::move(done));
    events += Event(std::move(part));
  }
  return events +
         Event({{"type", "response.output_item.done"}, {"output_index", index}, {"item", ItemJson(index, status)}});
}

std::string ResponsesFormatter::Events(std::span<const Delta> deltas, const FinalInfo* final) {
  std::string events;
  if (!std::exchange(started_, true)) {
    events += Event({{"type", "response.created"}, {"response", Response("in_progress")}});
    events += Event({{"type", "response.in_progress"}, {"response", Response("in_progress")}});
  }
  for (const Delta& delta : deltas) {
    for (const AnswerPart& part : reader_.Read(delta)) {
      if (part.begins && part.block > 0) events += End(part.block - 1, "completed");
      if (part.begins) events += Begin(part.block);
      events += Extend(part.block, part.text);
    }
  }
  if (final == nullptr) return events;
  if (num_begun_ == 0) events += Begin(0);
  events += End(num_begun_ - 1, incomplete() ? "incomplete" : "completed");
  return events +
         Event({{"type", incomplete() ? "response.incomplete" : "response.completed"}, {"response", Done(*final)}});
}

std::string ResponsesFormatter::ErrorEvents(const absl::Status& status) {
  OrderedJson response = Response("failed");
  response["error"] = {{"code", ErrorCodeFor(status)}, {"message", MessageOf(status)}};
  return Event({{"type", "response.failed"}, {"response", std::move(response)}});
}

void ResponsesFormatter::Add(std::span<const Delta> deltas) {
  for (const Delta& delta : deltas) reader_.Read(delta);
}

OrderedJson ResponsesFormatter::Whole(const FinalInfo& final) { return Done(final); }

}  // namespace spl::router
