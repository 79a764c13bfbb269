#include "services/router/request/tool_documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "services/base/status.h"

namespace spl::router {
namespace {

constexpr std::string_view kSpace = " \t\n\r";

// Finds values in a text that is known to be JSON. A place is the offset of a value's first byte.
class JsonPlaces {
 public:
  explicit JsonPlaces(std::string_view text) : text_(text) {}

  size_t Root() const { return Skip(0); }

  std::optional<size_t> Member(size_t object, std::string_view name) const {
    if (text_[object] != '{') return std::nullopt;
    size_t at = Skip(object + 1);
    while (text_[at] != '}') {
      const size_t name_end = End(at);
      const std::string_view quoted = text_.substr(at, name_end - at);
      const size_t value = Skip(Skip(name_end) + 1);  // behind the colon
      if (nlohmann::json::parse(quoted).get_ref<const std::string&>() == name) return value;
      at = Next(value);
    }
    return std::nullopt;
  }

  // Empty: it is no list, or it has none.
  std::vector<DocumentRange> Items(size_t list) const {
    std::vector<DocumentRange> items;
    if (text_[list] != '[') return items;
    for (size_t at = Skip(list + 1); text_[at] != ']'; at = Next(at)) items.push_back({at, End(at)});
    return items;
  }

 private:
  size_t Skip(size_t at) const { return std::min(text_.find_first_not_of(kSpace, at), text_.size()); }

  // Behind the value, and a comma: the next name or item, or the closing bracket.
  size_t Next(size_t value) const {
    const size_t behind = Skip(End(value));
    return text_[behind] == ',' ? Skip(behind + 1) : behind;
  }

  // Behind the value.
  size_t End(size_t at) const {
    if (text_[at] != '"' && text_[at] != '{' && text_[at] != '[')
      return std::min(text_.find_first_of(",]} \t\n\r", at), text_.size());
    size_t depth = 0;
    bool quoted = false;
    for (;; ++at) {
      const char c = text_[at];
      if (quoted && c == '\\') {
        ++at;
        continue;
      }
      if (c == '"') quoted = !quoted;
      if (!quoted && (c == '{' || c == '[')) ++depth;
      if (!quoted && (c == '}' || c == ']')) --depth;
      if (depth == 0 && !quoted) return at + 1;
    }
  }

  const std::string_view text_;
};

// REQUIRES: `pointer` is empty or begins with /.
std::vector<DocumentRange> ItemsAt(std::string_view result, std::string_view pointer) {
  if (!nlohmann::json::accept(result.begin(), result.end())) return {};
  const JsonPlaces places(result);
  std::optional<size_t> at = places.Root();
  while (!pointer.empty() && at.has_value()) {
    const size_t end = std::min(pointer.find('/', 1), pointer.size());
    at = places.Member(*at, pointer.substr(1, end - 1));
    pointer.remove_prefix(end);
  }
  return at.has_value() ? places.Items(*at) : std::vector<DocumentRange>();
}

std::vector<DocumentRange> PartsBetween(std::string_view result, std::string_view separator) {
  std::vector<DocumentRange> parts;
  for (size_t begin = 0; begin <= result.size();) {
    const size_t end = std::min(result.find(separator, begin), result.size());
    parts.push_back({begin, end});
    begin = end + separator.size();
  }
  return parts;
}

std::string WithLineEnds(std::string_view text) {
  std::string out(text);
  for (size_t at = out.find("\\n"); at != std::string::npos; at = out.find("\\n", at + 1)) out.replace(at, 2, "\n");
  return out;
}

}  // namespace

absl::StatusOr<ToolDocumentRule> ParseToolDocumentRule(std::string_view flag) {
  using Kind = ToolDocumentRule::Kind;
  constexpr std::string_view kBetween = "between:", kJson = "json:/";
  if (flag == "none") return ToolDocumentRule{};
  if (flag == "whole") return ToolDocumentRule{Kind::kWhole};
  if (flag == "json") return ToolDocumentRule{Kind::kJson};
  if (flag.starts_with(kJson) && flag.size() > kJson.size())
    return ToolDocumentRule{Kind::kJson, std::string(flag.substr(kJson.size() - 1))};
  if (flag.starts_with(kBetween) && flag.size() > kBetween.size())
    return ToolDocumentRule{Kind::kBetween, WithLineEnds(flag.substr(kBetween.size()))};
  return InvalidArgument(
      "--tool-result-documents is '{}', not one of none, whole, between:TEXT, json and json:/MEMBER/…", flag);
}

std::vector<DocumentRange> DocumentsIn(const ToolDocumentRule& rule, std::string_view result) {
  std::vector<DocumentRange> documents;
  switch (rule.kind) {
    case ToolDocumentRule::Kind::kNone:
      break;
    case ToolDocumentRule::Kind::kWhole:
      documents = {{0, result.size()}};
      break;
    case ToolDocumentRule::Kind::kBetween:
      documents = PartsBetween(result, rule.text);
      break;
    case ToolDocumentRule::Kind::kJson:
      documents = ItemsAt(result, rule.text);
      break;
  }
  std::erase_if(documents, [](const DocumentRange& range) { return range.end - range.begin < kMinToolDocumentBytes; });
  return documents;
}

MarkedMessages MarkToolDocuments(const ToolDocumentRule& rule, std::vector<tokenizer::ChatMessage> messages) {
  MarkedMessages marked;
  for (tokenizer::ChatMessage& message : messages) {
    if (message.role != "tool" || !message.content.has_value()) continue;
    const std::string& result = *message.content;
    std::string text;
    size_t from = 0;
    for (const DocumentRange& range : DocumentsIn(rule, result)) {
      if (marked.segments.size() == kMaxToolDocuments) break;
      text += result.substr(from, range.begin - from);
      text += marked.segments.Add({.text = result.substr(range.begin, range.end - range.begin), .namespace_name = {}});
      from = range.end;
    }
    message.content = text + result.substr(from);
  }
  marked.messages = std::move(messages);
  return marked;
}

}  // namespace spl::router
