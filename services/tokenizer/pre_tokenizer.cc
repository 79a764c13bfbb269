#include "services/tokenizer/pre_tokenizer.h"

#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/byte_level.h"
#include "services/tokenizer/pattern.h"

namespace spl::tokenizer {
namespace {

constexpr int kNestingMax = 16;

// GPT-2's pattern, which a ByteLevel step with use_regex applies.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class SplitStep final : public PreTokenizerStep {
 public:
  explicit SplitStep(Splitter splitter) : splitter_(std::move(splitter)) {}
  absl::Status Cut(const Piece& piece, Pieces* out) const override {
    std::vector<text::Span> parts;
    SPLICE_RETURN_IF_ERROR(splitter_.Split(piece.text, &parts));
    out->list.reserve(out->list.size() + parts.size());
    for (const text::Span& part : parts) {
      out->list.push_back({piece.text.substr(part.begin, part.end - part.begin), piece.at_start && part.begin == 0});
    }
    return absl::OkStatus();
  }

 private:
  Splitter splitter_;
};

class PrefixSpaceStep final : public PreTokenizerStep {
 public:
  absl::Status Cut(const Piece& piece, Pieces* out) const override {
    if (piece.text.starts_with(' ')) {
      out->list.push_back(piece);
    } else {
      out->list.push_back({out->storage.emplace_back(" " + std::string(piece.text)), piece.at_start});
    }
    return absl::OkStatus();
  }
};

// A ByteLevel that is not the last step: later steps see its characters.
class BytesToCharsStep final : public PreTokenizerStep {
 public:
  absl::Status Cut(const Piece& piece, Pieces* out) const override {
    out->list.push_back({out->storage.emplace_back(BytesToChars(piece.text)), piece.at_start});
    return absl::OkStatus();
  }
};

// Turns spaces into `replacement`, and may put one in front.
class MetaspaceStep final : public PreTokenizerStep {
 public:
  enum class Prepend { kAlways, kFirst, kNever };
  MetaspaceStep(std::string replacement, Prepend prepend) : replacement_(std::move(replacement)), prepend_(prepend) {}

  absl::Status Cut(const Piece& piece, Pieces* out) const override {
    std::string text(piece.text);
    SPLICE_RETURN_IF_ERROR(Pattern::FromLiteral(" ").ReplaceAll(replacement_, &text));
    const bool wanted = prepend_ == Prepend::kAlways || (prepend_ == Prepend::kFirst && piece.at_start);
    if (wanted && !text.starts_with(replacement_)) text.insert(0, replacement_);
    out->list.push_back({out->storage.emplace_back(std::move(text)), piece.at_start});
    return absl::OkStatus();
  }

 private:
  std::string replacement_;
  Prepend prepend_;
};

using StepOr = absl::StatusOr<std::unique_ptr<PreTokenizerStep>>;

StepOr RegexStep(std::string_view pattern, SplitBehavior behavior, bool invert = false) {
  SPLICE_ASSIGN_OR_RETURN(Pattern compiled, Pattern::FromRegex(pattern));
  return std::make_unique<SplitStep>(Splitter{std::move(compiled), behavior, invert});
}

StepOr ParseSplit(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const JsonField pattern_field, field.Require("pattern"));
  SPLICE_ASSIGN_OR_RETURN(Pattern pattern, Pattern::Parse(pattern_field));
  SPLICE_ASSIGN_OR_RETURN(const SplitBehavior behavior, ParseSplitBehavior(field));
  SPLICE_ASSIGN_OR_RETURN(const bool invert, field.BoolOr("invert", false));
  return std::make_unique<SplitStep>(Splitter{std::move(pattern), behavior, invert});
}

StepOr ParseDigits(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const bool individual, field.BoolOr("individual_digits", false));
  return RegexStep("\\p{N}", individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous);
}

StepOr ParsePunctuation(const JsonField& field) {
  SplitBehavior behavior = SplitBehavior::kIsolated;
  if (field.Find("behavior")) {
    SPLICE_ASSIGN_OR_RETURN(behavior, ParseSplitBehavior(field));
  }
  return RegexStep("[!-/:-@\\[-`{-~\\p{P}]", behavior);
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Parse(const JsonField& field) {
  PreTokenizer pre_tokenizer;
  if (!field.is_null()) SPLICE_RETURN_IF_ERROR(pre_tokenizer.ParseInto(field, 0));
  return pre_tokenizer;
}

absl::Status PreTokenizer::ParseByteLevel(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const bool add_prefix_space, field.BoolOr("add_prefix_space", true));
  SPLICE_ASSIGN_OR_RETURN(const bool use_regex, field.BoolOr("use_regex", true));
  if (add_prefix_space) steps_.push_back(std::make_unique<PrefixSpaceStep>());
  if (use_regex) {
    SPLICE_ASSIGN_OR_RETURN(std::unique_ptr<PreTokenizerStep> step, RegexStep(kGpt2Pattern, SplitBehavior::kIsolated));
    steps_.push_back(std::move(step));
  }
  byte_level_ = true;
  return absl::OkStatus();
}

absl::Status PreTokenizer::ParseInto(const JsonField& field, int depth) {
  SPLICE_ASSIGN_OR_RETURN(const std::string type, field.RequireString("type"));
  if (type == "Sequence") {
    if (depth >= kNestingMax) return InvalidArgument("{} is nested more than {} deep", field.path, kNestingMax);
    SPLICE_ASSIGN_OR_RETURN(const JsonField list, field.Require("pretokenizers"));
    SPLICE_RETURN_IF_ERROR(list.CheckList());
    for (size_t i = 0; i < list.value->size(); ++i) SPLICE_RETURN_IF_ERROR(ParseInto(list.At(i), depth + 1));
    return absl::OkStatus();
  }
  if (byte_level_) {  // a step follows, so the ByteLevel was not the last
    steps_.push_back(std::make_unique<BytesToCharsStep>());
    byte_level_ = false;
  }
  if (type == "ByteLevel") return ParseByteLevel(field);
  if (type == "Metaspace") {
    SPLICE_ASSIGN_OR_RETURN(std::string replacement, field.StringOr("replacement", "\xE2\x96\x81"));
    SPLICE_ASSIGN_OR_RETURN(const std::string scheme, field.StringOr("prepend_scheme", "always"));
    SPLICE_ASSIGN_OR_RETURN(const bool split, field.BoolOr("split", true));
    if (replacement.empty()) return InvalidArgument("{}.replacement is empty", field.path);
    if (scheme != "always" && scheme != "first" && scheme != "never") {
      return InvalidArgument("{}: the prepend_scheme \"{}\" is not supported", field.path, scheme);
    }
    using Prepend = MetaspaceStep::Prepend;
    const Prepend prepend = scheme == "always"  ? Prepend::kAlways
                            : scheme == "first" ? Prepend::kFirst
                                                : Prepend::kNever;
    steps_.push_back(std::make_unique<MetaspaceStep>(replacement, prepend));
    if (split) {
      steps_.push_back(std::make_unique<SplitStep>(
          Splitter{Pattern::FromLiteral(replacement), SplitBehavior::kMergedWithNext, false}));
    }
    return absl::OkStatus();
  }
  StepOr step = InvalidArgument("{}: the pre-tokenizer \"{}\" is not supported", field.path, type);
  if (type == "Split") step = ParseSplit(field);
  if (type == "Digits") step = ParseDigits(field);
  if (type == "Punctuation") step = ParsePunctuation(field);
  if (type == "Whitespace") step = RegexStep("\\w+|[^\\w\\s]+", SplitBehavior::kRemoved, true);
  if (type == "WhitespaceSplit") step = RegexStep("\\s", SplitBehavior::kRemoved);
  if (!step.ok()) return step.status();
  steps_.push_back(*std::move(step));
  return absl::OkStatus();
}

absl::Status PreTokenizer::Cut(const Piece& piece, Pieces* out) const {
  if (piece.text.empty()) return absl::OkStatus();
  if (steps_.size() == 1) return steps_.front()->Cut(piece, out);
  std::vector<Piece> current = {piece};
  for (const auto& step : steps_) {
    const size_t before = out->list.size();
    for (const Piece& part : current) SPLICE_RETURN_IF_ERROR(step->Cut(part, out));
    current.assign(out->list.begin() + before, out->list.end());
    out->list.resize(before);
  }
  out->list.insert(out->list.end(), current.begin(), current.end());
  return absl::OkStatus();
}

}  // namespace spl::tokenizer
