#include "services/router/request/response_items.h"

#include <algorithm>
#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

// The text of a content part; empty: the part has none.
const char* TextMember(const std::string& type) {
  if (type == "input_text" || type == "output_text" || type == "text") return "text";
  return type == "refusal" ? "refusal" : "";
}

}  // namespace

std::string ResponseItems::NextMessage() const { return fmt::format("messages[{}]", out_.chat["messages"].size()); }

void ResponseItems::Push(Json message, const std::string& path) {
  out_.names.Add(NextMessage(), path);
  out_.chat["messages"].push_back(std::move(message));
}

ResponseItems::Answer& ResponseItems::OpenAnswer(const std::string& path) {
  if (!answer_.open) answer_ = Answer{.open = true, .path = path};
  return answer_;
}

void ResponseItems::Finish() {
  if (!answer_.open) return;
  Answer answer = std::exchange(answer_, {});
  Json content = std::move(answer.content);
  // Reasoning that only its maker can read is nothing here.
  if (content.empty() && answer.calls.empty() && answer.reasoning.empty()) return;
  if (content.empty()) content = answer.calls.empty() ? Json("") : Json(nullptr);
  Json message = ChatMessageJson("assistant", std::move(content));
  if (!answer.reasoning.empty()) message["reasoning_content"] = answer.reasoning;
  if (!answer.calls.empty()) message["tool_calls"] = std::move(answer.calls);
  Push(std::move(message), answer.path);
}

absl::Status ResponseItems::Add(const Json& item, const std::string& path) {
  ObjectReader reader(item, path + ".");
  std::string type = "message";
  reader.String("type", &type);
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (type == "message") return AddMessage(item, path);
  if (type == "reasoning") return AddReasoning(item, path);
  if (type == "function_call") return AddCall(item, path);
  if (type == "function_call_output") return AddResult(item, path);
  return ParamError(path + ".type", "\"{}\" is not served", type);
}

// A string, or the parts of a chat's message.
absl::StatusOr<Json> ResponseItems::ReadContent(const Json& content, const std::string& path) {
  if (content.is_string()) return content;
  if (!content.is_array())
    return ParamError(path, "must be a string or a list of parts, got {}", DescribeJson(content));
  Json parts = Json::array();
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", path, i);
    ObjectReader reader(content[i], at + ".");
    std::string type, text;
    reader.String("type", &type);
    const char* const member = TextMember(type);
    if (*member != '\0') reader.String(member, &text);
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (type == "segment") {
      parts.push_back(content[i]);
      continue;
    }
    if (*member == '\0') return ParamError(at + ".type", "\"{}\" is not served; only text is", type);
    if (!reader.Has(member)) return ParamError(at + "." + member, "is required");
    Json part = Json::object();
    part["type"] = "text";
    part["text"] = std::move(text);
    parts.push_back(std::move(part));
  }
  return parts;
}

absl::Status ResponseItems::AddMessage(const Json& item, const std::string& path) {
  ObjectReader reader(item, path + ".");
  std::string role;
  reader.String("role", &role);
  const Json* const content = reader.Raw("content");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (role != "user" && role != "assistant" && role != "system" && role != "developer") {
    return ParamError(path + ".role", "must be \"user\", \"assistant\", \"system\" or \"developer\", got \"{}\"", role);
  }
  if (content == nullptr) return ParamError(path + ".content", "is required");
  SPLICE_ASSIGN_OR_RETURN(Json parts, ReadContent(*content, path + ".content"));
  if (role != "assistant") {
    Finish();
    Push(ChatMessageJson(role.c_str(), std::move(parts)), path);
    return absl::OkStatus();
  }
  Json& text = OpenAnswer(path).content;
  if (parts.is_string()) {
    Json part = Json::object();
    part["type"] = "text";
    part["text"] = std::move(parts);
    text.push_back(std::move(part));
  } else {
    for (Json& part : parts) text.push_back(std::move(part));
  }
  return absl::OkStatus();
}

// Reasoning begins an answer.
absl::Status ResponseItems::AddReasoning(const Json& item, const std::string& path) {
  ObjectReader reader(item, path + ".");
  const Json* const content = reader.List("content");
  const bool encrypted = reader.Has("encrypted_content");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (answer_.open && !(answer_.content.empty() && answer_.calls.empty())) Finish();
  Answer& answer = OpenAnswer(path);
  for (size_t i = 0; content != nullptr && i < content->size(); ++i) {
    ObjectReader part((*content)[i], fmt::format("{}.content[{}].", path, i));
    std::string text;
    part.String("text", &text);
    SPLICE_RETURN_IF_ERROR(part.FinishIgnoring(nullptr));
    answer.reasoning += text;
  }
  const auto& ignored = out_.ignored;
  const bool named = std::find(ignored.begin(), ignored.end(), "input.encrypted_content") != ignored.end();
  // Nobody but its maker can read it.
  if (encrypted && answer.reasoning.empty() && !named) out_.ignored.emplace_back("input.encrypted_content");
  return absl::OkStatus();
}

absl::Status ResponseItems::AddCall(const Json& item, const std::string& path) {
  ObjectReader reader(item, path + ".");
  std::string id, name, arguments;
  reader.String("call_id", &id);
  reader.String("name", &name);
  reader.String("arguments", &arguments);
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (id.empty()) return ParamError(path + ".call_id", "is required");
  Answer& answer = OpenAnswer(path);
  const std::string call = fmt::format("{}.tool_calls[{}]", NextMessage(), answer.calls.size());
  out_.names.Add(call, path);
  out_.names.Add(call + ".function", path);
  answer.calls.push_back(ChatCallJson(id, name, arguments));
  return absl::OkStatus();
}

absl::Status ResponseItems::AddResult(const Json& item, const std::string& path) {
  ObjectReader reader(item, path + ".");
  std::string id;
  reader.String("call_id", &id);
  const Json* const output = reader.Raw("output");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
  if (id.empty()) return ParamError(path + ".call_id", "is required");
  if (output == nullptr) return ParamError(path + ".output", "is required");
  SPLICE_ASSIGN_OR_RETURN(Json content, ReadContent(*output, path + ".output"));
  Finish();
  Json message = ChatMessageJson("tool", std::move(content));
  message["tool_call_id"] = id;
  Push(std::move(message), path);
  return absl::OkStatus();
}

}  // namespace spl::router
