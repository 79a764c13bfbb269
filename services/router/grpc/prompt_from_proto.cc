#include "services/router/grpc/prompt_from_proto.h"

#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/chat_messages.h"
#include "services/router/request/json_reader.h"

namespace spl::router {
namespace {

std::string TextOf(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// Text with marks for the segments.
absl::StatusOr<std::string> Join(const google::protobuf::RepeatedPtrField<v1::ContentPart>& parts,
                                 SegmentMarks* segments) {
  std::string text;
  for (int i = 0; i < parts.size(); ++i) {
    const v1::ContentPart& part = parts[i];
    PromptSegment piece{.text = part.text(),
                        .namespace_name = part.namespace_name(),
                        .knowledge_base = part.knowledge_base(),
                        .document = part.document(),
                        .field = fmt::format("parts[{}]", i)};
    if (!part.segment()) {
      if (!piece.knowledge_base.empty() || !piece.document.empty())
        return ParamError(piece.field + ".segment", "must be set for a part of a knowledge base");
      text += part.text();
      continue;
    }
    SPLICE_RETURN_IF_ERROR(CheckSource(piece, !piece.text.empty() || piece.document.empty()));
    text += segments->Add(std::move(piece));
  }
  return text;
}

absl::StatusOr<Json> JsonOf(const std::string& text, const std::string& field) {
  absl::StatusOr<Json> json = ParseJson(text);
  if (!json.ok()) return ParamError(field, "{}", MessageOf(json.status()));
  if (!json->is_object()) return ParamError(field, "must be a JSON object, got {}", DescribeJson(*json));
  return json;
}

absl::StatusOr<tokenizer::ChatMessage> MessageFromProto(const v1::ChatMessage& message, SegmentMarks* segments) {
  if (message.role().empty()) return ParamError("prompt.chat.messages.role", "must not be empty");
  if (!message.parts().empty() && !message.content().empty())
    return ParamError("prompt.chat.messages.parts", "and content exclude each other");
  tokenizer::ChatMessage out{message.role(), message.content()};
  if (!message.parts().empty()) {
    SPLICE_ASSIGN_OR_RETURN(out.content, Join(message.parts(), segments));
  }
  Json further = Json::object();
  if (!message.name().empty()) further["name"] = message.name();
  if (!message.reasoning_content().empty()) further["reasoning_content"] = message.reasoning_content();
  if (!message.tool_call_id().empty()) further["tool_call_id"] = message.tool_call_id();
  for (const v1::ToolCall& call : message.tool_calls()) {
    if (call.name().empty()) return ParamError("prompt.chat.messages.tool_calls.name", "must not be empty");
    further["tool_calls"].push_back({{"id", call.id()},
                                     {"type", "function"},
                                     {"function", {{"name", call.name()}, {"arguments", call.arguments()}}}});
  }
  // An answer that consists of calls has no text, as over HTTP.
  if (!message.tool_calls().empty() && out.content->empty()) out.content.reset();
  if (!further.empty()) out.extra_json = TextOf(further);
  return out;
}

// The members of an HTTP body that mean the same.
absl::StatusOr<Json> TemplateFields(const v1::Chat& chat) {
  Json fields = Json::object();
  if (chat.has_add_generation_prompt()) fields["add_generation_prompt"] = chat.add_generation_prompt();
  if (chat.continue_final_message()) fields["continue_final_message"] = true;
  if (!chat.template_variables_json().empty()) {
    SPLICE_ASSIGN_OR_RETURN(fields["chat_template_kwargs"],
                            JsonOf(chat.template_variables_json(), "prompt.chat.template_variables_json"));
  }
  for (const v1::Tool& tool : chat.tools()) {
    Json function = {{"name", tool.name()}};
    if (!tool.description().empty()) function["description"] = tool.description();
    if (!tool.parameters_json().empty()) {
      SPLICE_ASSIGN_OR_RETURN(function["parameters"],
                              JsonOf(tool.parameters_json(), "prompt.chat.tools.parameters_json"));
    }
    fields["tools"].push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return fields;
}

absl::StatusOr<Prompt> ChatFromProto(const v1::Chat& chat) {
  if (chat.messages().empty()) return ParamError("prompt.chat.messages", "must hold at least one message");
  ChatPrompt out;
  SPLICE_ASSIGN_OR_RETURN(const Json fields, TemplateFields(chat));
  ObjectReader reader(fields, "");
  ReadTemplateFields(reader, &out);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  for (const v1::ChatMessage& message : chat.messages()) {
    SPLICE_ASSIGN_OR_RETURN(tokenizer::ChatMessage plain, MessageFromProto(message, &out.segments));
    out.messages.push_back(std::move(plain));
  }
  return Prompt(std::move(out));
}

absl::StatusOr<Prompt> TokensFromProto(const v1::TokenIds& ids) {
  std::vector<TokenId> plain(ids.ids().begin(), ids.ids().end());
  if (ids.segments().empty()) return Prompt(std::move(plain));
  TokenizedPrompt tokens{std::move(plain), {}};
  for (const v1::TokenSegment& segment : ids.segments()) {
    if (!segment.namespace_name().empty() && !segment.knowledge_base().empty())
      return ParamError("prompt.tokens.segments.namespace_name", "and knowledge_base exclude each other");
    tokens.segments.push_back({segment.begin(), segment.end(), segment.namespace_name(), segment.knowledge_base()});
  }
  return Prompt(std::move(tokens));
}

}  // namespace

absl::StatusOr<Prompt> FromProto(const v1::Prompt& prompt) {
  switch (prompt.kind_case()) {
    case v1::Prompt::kText:
      return Prompt(prompt.text());
    case v1::Prompt::kTokens:
      return TokensFromProto(prompt.tokens());
    case v1::Prompt::kParts: {
      SegmentedText text;
      SPLICE_ASSIGN_OR_RETURN(text.text, Join(prompt.parts().parts(), &text.segments));
      return Prompt(std::move(text));
    }
    case v1::Prompt::kChat:
      return ChatFromProto(prompt.chat());
    case v1::Prompt::KIND_NOT_SET:
      break;
  }
  return ParamError("prompt", "is required");
}

}  // namespace spl::router
