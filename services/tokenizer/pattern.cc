#include "services/tokenizer/pattern.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"

namespace spl::tokenizer {
namespace {

struct Part {
  text::Span span;
  bool is_match = false;
};

// Matches and the parts between them; together they are the whole text.
std::vector<Part> PartsOf(size_t text_bytes, const std::vector<text::Span>& matches, bool invert) {
  std::vector<Part> parts;
  parts.reserve(matches.size() * 2 + 1);
  size_t previous_end = 0;
  for (const text::Span& match : matches) {
    if (match.begin != previous_end) parts.push_back({{previous_end, match.begin}, invert});
    parts.push_back({match, !invert});
    previous_end = match.end;
  }
  if (previous_end != text_bytes) parts.push_back({{previous_end, text_bytes}, invert});
  return parts;
}

// Joins each part to the one before it when `joins(is_match, previous_is_match)`.
template <typename Joins>
std::vector<text::Span> Merge(const std::vector<Part>& parts, Joins joins) {
  std::vector<text::Span> merged;
  bool previous = false;
  for (const Part& part : parts) {
    if (joins(part.is_match, previous) && !merged.empty()) {
      merged.back() = {std::min(merged.back().begin, part.span.begin), std::max(merged.back().end, part.span.end)};
    } else {
      merged.push_back(part.span);
    }
    previous = part.is_match;
  }
  return merged;
}

std::vector<text::Span> Apply(std::vector<Part> parts, SplitBehavior behavior) {
  const auto starts_match = [](bool is_match, bool previous) { return is_match && !previous; };
  switch (behavior) {
    case SplitBehavior::kIsolated:
      return Merge(parts, [](bool, bool) { return false; });
    case SplitBehavior::kRemoved:
      std::erase_if(parts, [](const Part& part) { return part.is_match; });
      return Merge(parts, [](bool, bool) { return false; });
    case SplitBehavior::kContiguous:
      return Merge(parts, [](bool is_match, bool previous) { return is_match == previous; });
    case SplitBehavior::kMergedWithPrevious:
      return Merge(parts, starts_match);
    case SplitBehavior::kMergedWithNext: {
      std::reverse(parts.begin(), parts.end());
      std::vector<text::Span> merged = Merge(parts, starts_match);
      std::reverse(merged.begin(), merged.end());
      return merged;
    }
  }
  return {};
}

}  // namespace

absl::StatusOr<Pattern> Pattern::Parse(const JsonField& field) {
  SPLICE_RETURN_IF_ERROR(field.CheckObject());
  if (const std::optional<JsonField> literal = field.Find("String")) {
    SPLICE_ASSIGN_OR_RETURN(std::string text, literal->String());
    if (text.empty()) return InvalidArgument("{} is empty: it would match everywhere", literal->path);
    return FromLiteral(std::move(text));
  }
  SPLICE_ASSIGN_OR_RETURN(const std::string regex, field.RequireString("Regex"));
  absl::StatusOr<Pattern> pattern = FromRegex(regex);
  if (!pattern.ok()) return Annotate(pattern.status(), field.path);
  return pattern;
}

absl::StatusOr<Pattern> Pattern::FromRegex(std::string_view source) {
  Pattern pattern;
  SPLICE_ASSIGN_OR_RETURN(pattern.regex_, text::Regex::Compile(source));
  return pattern;
}

Pattern Pattern::FromLiteral(std::string literal) {
  Pattern pattern;
  pattern.literal_ = std::move(literal);
  return pattern;
}

absl::Status Pattern::FindAll(std::string_view text, std::vector<text::Span>* matches) const {
  if (regex_) return regex_->FindAll(text, matches);
  for (size_t pos = text.find(literal_); pos != std::string_view::npos;) {
    matches->push_back({pos, pos + literal_.size()});
    pos = text.find(literal_, pos + literal_.size());
  }
  return absl::OkStatus();
}

absl::Status Pattern::ReplaceAll(std::string_view content, std::string* text) const {
  std::vector<text::Span> matches;
  SPLICE_RETURN_IF_ERROR(FindAll(*text, &matches));
  if (matches.empty()) return absl::OkStatus();
  std::string replaced;
  replaced.reserve(text->size());
  size_t previous_end = 0;
  for (const text::Span& match : matches) {
    replaced.append(*text, previous_end, match.begin - previous_end);
    replaced += content;
    previous_end = match.end;
  }
  replaced.append(*text, previous_end);
  *text = std::move(replaced);
  return absl::OkStatus();
}

absl::StatusOr<SplitBehavior> ParseSplitBehavior(const JsonField& component) {
  SPLICE_ASSIGN_OR_RETURN(const std::string name, component.RequireString("behavior"));
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return InvalidArgument("{}: the behavior \"{}\" is not supported", component.path, name);
}

absl::Status Splitter::Split(std::string_view text, std::vector<text::Span>* parts) const {
  std::vector<text::Span> matches;
  matches.reserve(text.size() / 4);
  SPLICE_RETURN_IF_ERROR(pattern.FindAll(text, &matches));
  for (const text::Span& span : Apply(PartsOf(text.size(), matches, invert), behavior)) {
    if (span.begin != span.end) parts->push_back(span);
  }
  return absl::OkStatus();
}

}  // namespace spl::tokenizer
