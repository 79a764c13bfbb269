#include "services/router/output_formats/tool_call_json.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace spl::router {
namespace {

using Json = nlohmann::json;

Json Parse(std::string_view text) { return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false); }

size_t SkipSpace(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(kWhiteSpace, at), text.size());
}

// Where the value that begins at `at` ends. REQUIRES: `text` is JSON.
size_t ValueEnd(std::string_view text, size_t at) {
  if (text[at] == '{' || text[at] == '[') return at + BracketLength(text.substr(at)).value_or(text.size() - at);
  if (text[at] != '"') return std::min(text.find_first_of(",}] \t\n\r", at), text.size());
  for (++at; text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}

// The text of a member of the object, as it stands there; empty: there is none. REQUIRES: `text` is a JSON object.
std::string_view MemberText(std::string_view text, std::string_view name) {
  std::string_view found;
  size_t at = SkipSpace(text, SkipSpace(text, 0) + 1);
  while (at < text.size() && text[at] == '"') {
    const size_t key_end = ValueEnd(text, at);
    const std::string_view key = text.substr(at + 1, key_end - at - 2);
    const size_t begin = SkipSpace(text, SkipSpace(text, key_end) + 1);
    const size_t end = ValueEnd(text, begin);
    if (key == name) found = text.substr(begin, end - begin);
    at = SkipSpace(text, SkipSpace(text, end) + 1);
  }
  return found;
}

}  // namespace

// The arguments stay as the model wrote them: their order, and numbers that no double holds.
std::optional<ToolCallDelta> ReadToolCall(std::string_view json, bool needs_arguments) {
  const Json call = Parse(json);
  if (!call.is_object()) return std::nullopt;
  const auto name = call.find("name");
  if (name == call.end() || !name->is_string() || name->get_ptr<const std::string*>()->empty()) return std::nullopt;
  auto arguments = call.find("arguments");
  const char* const member = arguments != call.end() ? "arguments" : "parameters";
  if (arguments == call.end()) arguments = call.find(member);
  if (needs_arguments && arguments == call.end()) return std::nullopt;
  // Not copied: that would take a stack as deep as the arguments.
  ToolCallDelta out;
  out.name = name->get<std::string>();
  if (arguments == call.end() || arguments->is_null()) {
    out.arguments = "{}";
  } else if (arguments->is_object()) {
    out.arguments = MemberText(json, member);
  } else if (arguments->is_string() && Parse(*arguments->get_ptr<const std::string*>()).is_object()) {
    out.arguments = arguments->get<std::string>();
  } else {
    return std::nullopt;
  }
  return out;
}

bool IsJsonObject(std::string_view text) { return Parse(text).is_object(); }

std::optional<size_t> BracketLength(std::string_view text) {
  int64_t depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if ((c == '}' || c == ']') && --depth == 0) {
      return i + 1;
    }
  }
  return std::nullopt;
}

}  // namespace spl::router
