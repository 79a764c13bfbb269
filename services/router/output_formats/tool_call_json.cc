#include "services/router/output_formats/tool_call_json.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace spl::router {
namespace {

using Json = nlohmann::json;

Json Parse(std::string_view text) { return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false); }

constexpr size_t kMaxHeadBytes = 1024;  // of a call in front of its arguments, if it is to be certain by them

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

// Where the string that begins at `at` ends; npos: not in `text`.
size_t StringEnd(std::string_view text, size_t at) {
  for (++at; at < text.size(); ++at) {
    if (text[at] == '"') return at + 1;
    if (text[at] == '\\') ++at;
  }
  return std::string_view::npos;
}

// Where the number, true, false or null at `at` ends; `at`: there is none.
size_t WordEnd(std::string_view text, size_t at) {
  const auto belongs = [](unsigned char c) { return std::isalnum(c) != 0 || c == '+' || c == '-' || c == '.'; };
  while (at < text.size() && belongs(static_cast<unsigned char>(text[at]))) ++at;
  return at;
}

CallHead MembersInFront(std::string_view text) {
  const CallHead more{.state = CallHead::kMore, .name = {}, .arguments = 0}, none{};
  std::string name;
  for (size_t at = SkipSpace(text, 1); at < text.size(); at = SkipSpace(text, at + 1)) {
    if (text[at] != '"') return none;
    const size_t key_end = StringEnd(text, at);
    if (key_end == std::string_view::npos) return more;
    const std::string_view key = text.substr(at + 1, key_end - at - 2);
    const size_t colon = SkipSpace(text, key_end);
    if (colon < text.size() && text[colon] != ':') return none;
    const size_t value = SkipSpace(text, colon + 1);
    if (value >= text.size()) return more;
    if (key == "arguments" || key == "parameters") {
      if (text[value] != '{' || name.empty()) return none;
      return {.state = CallHead::kFound, .name = name, .arguments = value};
    }
    const bool is_string = text[value] == '"';
    at = is_string ? StringEnd(text, value) : WordEnd(text, value);
    if (at == value || (key == "name" && !is_string)) return none;
    if (at >= text.size()) return more;
    if (key == "name") {
      const Json parsed = Parse(text.substr(value, at - value));
      if (!parsed.is_string()) return none;
      name = parsed.get<std::string>();
    }
    at = SkipSpace(text, at);
    if (at < text.size() && text[at] != ',') return none;
  }
  return more;
}

}  // namespace

// Only the first bytes count, so that the answer does not depend on how much of the text is there.
CallHead ReadCallHead(std::string_view text) {
  const CallHead head = MembersInFront(text.substr(0, kMaxHeadBytes));
  return head.state == CallHead::kMore && text.size() >= kMaxHeadBytes ? CallHead{} : head;
}

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

std::optional<std::vector<ToolCallDelta>> ReadToolCalls(std::string_view json, bool needs_arguments) {
  std::vector<ToolCallDelta> calls;
  const bool is_list = json.front() == '[';
  const size_t end = is_list ? json.size() - 1 : json.size();  // of the items
  for (size_t at = is_list ? SkipSpace(json, 1) : 0; at < end;) {
    if (json[at] != '{') return std::nullopt;
    const std::optional<size_t> item = BracketLength(json.substr(at, end - at));
    if (!item.has_value()) return std::nullopt;
    std::optional<ToolCallDelta> call = ReadToolCall(json.substr(at, *item), needs_arguments);
    if (!call.has_value()) return std::nullopt;
    calls.push_back(*std::move(call));
    at = SkipSpace(json, at + *item);
    if (at < end && json[at] != ',') return std::nullopt;
    at = SkipSpace(json, at + 1);
  }
  if (calls.empty()) return std::nullopt;
  return calls;
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
