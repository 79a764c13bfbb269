#include "services/grammar/grammar_limits.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "services/base/status.h"
#include "services/grammar/json_schema_check.h"

namespace spl::grammar {
namespace {

using Json = nlohmann::json;

// Brackets that are open at one time at most. Those inside of strings and literals count as well: that only makes the
// bound a little stricter for texts with many of them.
int DepthOf(std::string_view text, std::string_view open, std::string_view close) {
  int depth = 0, deepest = 0;
  for (const char c : text) {
    if (open.find(c) != std::string_view::npos) deepest = std::max(deepest, ++depth);
    if (close.find(c) != std::string_view::npos) depth = std::max(0, depth - 1);
  }
  return deepest;
}

// How many characters and names an expression has when its repetitions are written out. Bounds
// are those of {m}, {m,} and {m,n}; * and + count once. Strings, classes and escapes count as one.
class Expansion {
 public:
  Expansion(std::string_view text, bool is_regex) : text_(text), is_regex_(is_regex) {}

  double Size() {
    std::vector<double> open = {0};  // of each parenthesis that is open: its size so far
    double last = 0;                 // of the item that a repetition would repeat; it is in open.back() already
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '(') {
        open.push_back(0);
      } else if (c == ')' && open.size() > 1) {
        last = open.back();
        open.pop_back();
        open.back() += last;
      } else if (const double times = c == '{' ? Times() : 0; times > 0) {
        open.back() += last * (times - 1);
        last *= times;
      } else {
        if (c == '\\') ++at_;
        if (c == '[') SkipTo(']');
        if (c == '"' && !is_regex_) SkipTo('"');
        if (std::string_view(" \t\r\n*+?|").find(c) != std::string_view::npos && (!is_regex_ || c != ' ')) continue;
        open.back() += last = 1;
      }
    }
    double size = 0;
    for (const double part : open) size += part;
    return size;
  }

 private:
  // Behind '{': the larger bound, and goes behind '}'. 0: it is no repetition.
  double Times() {
    const size_t end = text_.find('}', at_);
    if (end == std::string_view::npos) return 0;
    double most = 0, bound = 0;
    bool digits = false;
    for (const char c : text_.substr(at_, end - at_)) {
      if (c >= '0' && c <= '9') {
        bound = bound * 10 + (c - '0');
        digits = true;
      } else if (c == ',') {
        most = std::max(most, bound);
        bound = 0;
      } else if (c != ' ') {
        return 0;
      }
    }
    if (!digits) return 0;
    at_ = end + 1;
    return std::max({most, bound, 1.0});
  }

  void SkipTo(char end) {
    while (at_ < text_.size() && text_[at_] != end) at_ += text_[at_] == '\\' ? 2 : 1;
    ++at_;
  }

  const std::string_view text_;
  const bool is_regex_;
  size_t at_ = 0;
};

bool IsJson(GrammarKind kind) {
  return kind == GrammarKind::kJsonSchema || kind == GrammarKind::kStructuralTag || kind == GrammarKind::kChoice;
}

absl::Status CheckChoices(const std::string& text) {
  const auto choices = Json::parse(text, nullptr, false);
  if (!choices.is_array() || choices.empty()) return absl::InvalidArgumentError("must be a list of strings, not empty");
  if (choices.size() > kMaxChoices)
    return InvalidArgument("has {} choices, at most {} are served", choices.size(), kMaxChoices);
  for (const auto& choice : choices) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty())
      return absl::InvalidArgumentError("must be a list of strings that are not empty");
  }
  return absl::OkStatus();
}

absl::Status CheckSchemaText(const std::string& text, bool strict) {
  const Json schema = Json::parse(text, nullptr, false);
  if (schema.is_discarded()) return absl::InvalidArgumentError("is no JSON: it cannot be parsed");
  return CheckJsonSchema(schema, strict);
}

// Every schema in a structural tag, wherever it stands.
absl::Status CheckSchemasIn(const Json& part) {
  if (!part.is_structured()) return absl::OkStatus();
  if (part.is_object() && part.contains("json_schema")) return CheckJsonSchema(part["json_schema"], true);
  for (const Json& inner : part) SPLICE_RETURN_IF_ERROR(CheckSchemasIn(inner));
  return absl::OkStatus();
}

absl::Status CheckTag(const std::string& text) {
  const Json tag = Json::parse(text, nullptr, false);
  if (tag.is_discarded()) return absl::InvalidArgumentError("is no JSON: it cannot be parsed");
  return CheckSchemasIn(tag);
}

}  // namespace

absl::Status CheckGrammarSpec(const GrammarSpec& spec) {
  if (spec.kind == GrammarKind::kJsonObject) return absl::OkStatus();
  if (spec.text.empty()) return absl::InvalidArgumentError("is empty");
  if (spec.text.size() > kMaxGrammarBytes)
    return InvalidArgument("has {} bytes, at most {} are served", spec.text.size(), kMaxGrammarBytes);
  const int depth = IsJson(spec.kind) ? DepthOf(spec.text, "{[", "}]") : DepthOf(spec.text, "(", ")");
  if (depth > kMaxGrammarDepth) return InvalidArgument("is nested {} deep, at most {}", depth, kMaxGrammarDepth);
  switch (spec.kind) {
    case GrammarKind::kChoice:
      return CheckChoices(spec.text);
    case GrammarKind::kJsonSchema:
      return CheckSchemaText(spec.text, spec.strict);
    case GrammarKind::kStructuralTag:
      return CheckTag(spec.text);
    default:
      break;
  }
  const double size = Expansion(spec.text, spec.kind == GrammarKind::kRegex).Size();
  if (size > kMaxExpansion)
    return InvalidArgument("is {:.0f} long when its repetitions are written out, at most {} is served: repeat less",
                           size, kMaxExpansion);
  return absl::OkStatus();
}

}  // namespace spl::grammar
