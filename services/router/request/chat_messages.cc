#include "services/router/request/chat_messages.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/content_parts.h"

namespace spl::router {
namespace {

constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};

std::string TextOf(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// {"type":"function","function":{"name",…}}; the type may be left out.
absl::Status CheckFunction(const Json& value, const std::string& path, bool is_call) {
  ObjectReader reader(value, path + ".");
  std::string type = "function";
  reader.String("type", &type);
  const Json* const function = reader.Raw("function");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (type != "function") return ParamError(path + ".type", "\"{}\" is not served; only \"function\" is", type);
  if (function == nullptr) return ParamError(path + ".function", "is required");
  ObjectReader inner(*function, path + ".function.");
  std::string name;
  inner.String("name", &name);
  const Json* const arguments = is_call ? inner.Raw("arguments") : nullptr;
  SPLICE_RETURN_IF_ERROR(inner.FinishIgnoring(nullptr));
  if (name.empty() || name.size() > kMaxToolNameBytes)
    return ParamError(path + ".function.name", "must have 1 to {} bytes", kMaxToolNameBytes);
  if (arguments != nullptr && !arguments->is_string() && !arguments->is_object())
    return ParamError(path + ".function.arguments", "must be a string or an object, got {}", DescribeJson(*arguments));
  return absl::OkStatus();
}

absl::Status CheckFunctions(const Json& list, const std::string& path, bool are_calls) {
  if (!list.is_array()) return ParamError(path, "must be a list, got {}", DescribeJson(list));
  if (list.size() > kMaxTools) return ParamError(path, "at most {} are served, got {}", kMaxTools, list.size());
  for (size_t i = 0; i < list.size(); ++i)
    SPLICE_RETURN_IF_ERROR(CheckFunction(list[i], fmt::format("{}[{}]", path, i), are_calls));
  return absl::OkStatus();
}

// Every member that is not null, but for role and content, as it is.
std::string FurtherMembers(const Json& message) {
  Json members = Json::object();
  Json::object_t::Container& list = members.get_ref<Json::object_t&>();  // the names are known to be different
  for (const auto& item : message.items()) {
    const bool empty_calls = item.key() == "tool_calls" && item.value().empty();
    if (item.key() == "role" || item.key() == "content" || item.value().is_null() || empty_calls) continue;
    list.emplace_back(item.key(), item.value());
  }
  return members.empty() ? "" : TextOf(members);
}

absl::Status ReadContent(const Json* content, const std::string& path, bool may_lack, SegmentMarks* segments,
                         std::optional<std::string>* out) {
  if (content == nullptr && may_lack) return absl::OkStatus();
  if (content == nullptr) return ParamError(path, "is required");
  if (content->is_string()) {
    *out = content->get<std::string>();
    return absl::OkStatus();
  }
  if (!content->is_array())
    return ParamError(path, "must be a string or a list of parts, got {}", DescribeJson(*content));
  SPLICE_ASSIGN_OR_RETURN(*out, ReadContentParts(*content, path, segments));
  return absl::OkStatus();
}

absl::StatusOr<tokenizer::ChatMessage> ReadMessage(const Json& value, const std::string& path, SegmentMarks* segments) {
  ObjectReader reader(value, path + ".");
  tokenizer::ChatMessage message;
  reader.String("role", &message.role);
  reader.Refuse({"function_call", "audio"});
  std::string checked, refusal;
  for (const char* name : {"name", "tool_call_id", "reasoning_content"}) reader.String(name, &checked);
  reader.String("refusal", &refusal);
  const Json* const content = reader.Raw("content");
  const Json* const calls = reader.Raw("tool_calls");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (std::find(kRoles.begin(), kRoles.end(), message.role) == kRoles.end()) {
    return ParamError(path + ".role",
                      "must be \"system\", \"developer\", \"user\", \"assistant\" or \"tool\", got \"{}\"",
                      message.role);
  }
  const bool is_answer = message.role == "assistant";
  if (calls != nullptr && !is_answer) return ParamError(path + ".tool_calls", "is for messages of the assistant");
  if (calls != nullptr) SPLICE_RETURN_IF_ERROR(CheckFunctions(*calls, path + ".tool_calls", true));
  SPLICE_RETURN_IF_ERROR(ReadContent(content, path + ".content", is_answer, segments, &message.content));
  // An answer without a text may be None to the template if it has calls.
  const bool has_calls = calls != nullptr && !calls->empty();
  if (!message.content && !has_calls) message.content = std::move(refusal);
  message.extra_json = FurtherMembers(value);
  return message;
}

absl::Status CheckDocuments(const Json& documents) {
  if (!documents.is_array()) return ParamError("documents", "must be a list, got {}", DescribeJson(documents));
  for (size_t i = 0; i < documents.size(); ++i) {
    if (!documents[i].is_object())
      return ParamError(fmt::format("documents[{}]", i), "must be an object, got {}", DescribeJson(documents[i]));
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> ReadKwargs(const Json& kwargs) {
  if (!kwargs.is_object()) return ParamError("chat_template_kwargs", "must be an object, got {}", DescribeJson(kwargs));
  if (kwargs.size() > kMaxTemplateVariables) {
    return ParamError("chat_template_kwargs", "at most {} are served, got {}", kMaxTemplateVariables, kwargs.size());
  }
  for (const char* name : {"messages", "add_generation_prompt", "continue_final_message"}) {
    if (kwargs.contains(name))
      return ParamError(fmt::format("chat_template_kwargs.{}", name), "is a field of the body");
  }
  return kwargs;
}

}  // namespace

absl::Status ReadMessages(const Json* messages, ChatPrompt* chat) {
  if (messages == nullptr) return ParamError("messages", "is required");
  if (!messages->is_array()) return ParamError("messages", "must be a list, got {}", DescribeJson(*messages));
  if (messages->empty()) return ParamError("messages", "must hold at least one message");
  for (size_t i = 0; i < messages->size(); ++i) {
    SPLICE_ASSIGN_OR_RETURN(tokenizer::ChatMessage message,
                            ReadMessage((*messages)[i], fmt::format("messages[{}]", i), &chat->segments));
    chat->messages.push_back(std::move(message));
  }
  return absl::OkStatus();
}

void ReadTemplateFields(ObjectReader& reader, ChatPrompt* chat) {
  std::optional<bool> add_generation_prompt;
  reader.Bool("add_generation_prompt", &add_generation_prompt);
  reader.Bool("continue_final_message", &chat->continue_final_message);
  chat->add_generation_prompt = add_generation_prompt.value_or(!chat->continue_final_message);
  if (chat->add_generation_prompt && chat->continue_final_message)
    return reader.Fail(ParamError("continue_final_message", "and add_generation_prompt exclude each other"));
  Json variables = Json::object();
  if (const Json* const kwargs = reader.Raw("chat_template_kwargs"); kwargs != nullptr) {
    absl::StatusOr<Json> read = ReadKwargs(*kwargs);
    if (!read.ok()) return reader.Fail(read.status());
    variables = *std::move(read);
  }
  std::string effort;
  reader.String("reasoning_effort", &effort);
  if (!effort.empty()) variables["reasoning_effort"] = effort;
  if (const Json* const tools = reader.Raw("tools"); tools != nullptr && !tools->empty()) {
    reader.Fail(CheckFunctions(*tools, "tools", false));
    variables["tools"] = *tools;
  }
  if (const Json* const documents = reader.Raw("documents"); documents != nullptr && !documents->empty()) {
    reader.Fail(CheckDocuments(*documents));
    variables["documents"] = *documents;
  }
  for (const auto& item : variables.items()) chat->variable_names.push_back(item.key());
  if (!variables.empty()) chat->variables_json = TextOf(variables);
}

}  // namespace spl::router
