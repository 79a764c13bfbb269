// The "pattern" of a Split or Replace component: a literal string or a regular expression, and cutting text at its
// matches.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/json_field.h"
#include "services/text/regex.h"

namespace spl::tokenizer {

// Treatment of the matches if a text is cut at them.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

// Immutable; any thread. Errors of FindAll and ReplaceAll are those of Regex::FindAll.
class Pattern {
 public:
  // `field`: {"String": …} or {"Regex": …}.
  static absl::StatusOr<Pattern> Parse(const JsonField& field);
  static absl::StatusOr<Pattern> FromRegex(std::string_view pattern);
  static Pattern FromLiteral(std::string literal);  // REQUIRES: not empty

  absl::Status FindAll(std::string_view text, std::vector<text::Span>* matches) const;

  // Replaces every match by `content`, which is taken literally.
  absl::Status ReplaceAll(std::string_view content, std::string* text) const;

 private:
  std::string literal_;
  std::optional<text::Regex> regex_;
};

absl::StatusOr<SplitBehavior> ParseSplitBehavior(const JsonField& component);

// Cuts `text` into parts, in order, without empty ones. `invert`: the text between matches counts as match.
struct Splitter {
  Pattern pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;

  absl::Status Split(std::string_view text, std::vector<text::Span>* parts) const;
};

}  // namespace spl::tokenizer
