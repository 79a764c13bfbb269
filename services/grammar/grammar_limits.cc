#include "services/grammar/grammar_limits.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "services/base/status.h"

namespace spl::grammar {
namespace {

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

bool IsJson(GrammarKind kind) {
  return kind == GrammarKind::kJsonSchema || kind == GrammarKind::kStructuralTag || kind == GrammarKind::kChoice;
}

absl::Status CheckChoices(const std::string& text) {
  const auto choices = nlohmann::json::parse(text, nullptr, false);
  if (!choices.is_array() || choices.empty()) return absl::InvalidArgumentError("must be a list of strings, not empty");
  if (choices.size() > kMaxChoices)
    return InvalidArgument("has {} choices, at most {} are served", choices.size(), kMaxChoices);
  for (const auto& choice : choices) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty())
      return absl::InvalidArgumentError("must be a list of strings that are not empty");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckGrammarSpec(const GrammarSpec& spec) {
  if (spec.kind == GrammarKind::kJsonObject) return absl::OkStatus();
  if (spec.text.empty()) return absl::InvalidArgumentError("is empty");
  if (spec.text.size() > kMaxGrammarBytes)
    return InvalidArgument("has {} bytes, at most {} are served", spec.text.size(), kMaxGrammarBytes);
  const int depth = IsJson(spec.kind) ? DepthOf(spec.text, "{[", "}]") : DepthOf(spec.text, "(", ")");
  if (depth > kMaxGrammarDepth) return InvalidArgument("is nested {} deep, at most {}", depth, kMaxGrammarDepth);
  return spec.kind == GrammarKind::kChoice ? CheckChoices(spec.text) : absl::OkStatus();
}

}  // namespace spl::grammar
