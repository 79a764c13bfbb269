#include "services/tokenizer/normalizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/nfc.h"
#include "services/tokenizer/pattern.h"

namespace spl::tokenizer {
namespace {

constexpr int kNestingMax = 16;

using NormalizerOr = absl::StatusOr<std::unique_ptr<Normalizer>>;

class NfcNormalizer final : public Normalizer {
 public:
  absl::Status Apply(std::string* text) const override {
    *text = ToNfc(*text);
    return absl::OkStatus();
  }
};

class PrependNormalizer final : public Normalizer {
 public:
  explicit PrependNormalizer(std::string prefix) : prefix_(std::move(prefix)) {}
  absl::Status Apply(std::string* text) const override {
    if (!text->empty()) text->insert(0, prefix_);
    return absl::OkStatus();
  }

 private:
  std::string prefix_;
};

class ReplaceNormalizer final : public Normalizer {
 public:
  ReplaceNormalizer(Pattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  absl::Status Apply(std::string* text) const override { return pattern_.ReplaceAll(content_, text); }

 private:
  Pattern pattern_;
  std::string content_;
};

class StripNormalizer final : public Normalizer {
 public:
  StripNormalizer(bool left, bool right) : left_(left), right_(right) {}
  absl::Status Apply(std::string* text) const override {
    size_t begin = text->size();  // start of the text without leading whitespace
    size_t end = 0;
    for (size_t pos = 0; pos < text->size();) {
      const text::CodePoint c = text::DecodeUtf8(*text, pos);
      if (!text::IsWhitespace(c.value)) {
        begin = std::min(begin, pos);
        end = pos + c.num_bytes;
      }
      pos += c.num_bytes;
    }
    if (right_) text->resize(end);
    if (left_) text->erase(0, std::min(begin, text->size()));
    return absl::OkStatus();
  }

 private:
  bool left_;
  bool right_;
};

class SequenceNormalizer final : public Normalizer {
 public:
  explicit SequenceNormalizer(std::vector<std::unique_ptr<Normalizer>> parts) : parts_(std::move(parts)) {}
  absl::Status Apply(std::string* text) const override {
    for (const auto& part : parts_) SPLICE_RETURN_IF_ERROR(part->Apply(text));
    return absl::OkStatus();
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> parts_;
};

NormalizerOr Parse(const JsonField& field, int depth);

NormalizerOr ParseSequence(const JsonField& field, int depth) {
  if (depth >= kNestingMax) return InvalidArgument("{} is nested more than {} deep", field.path, kNestingMax);
  SPLICE_ASSIGN_OR_RETURN(const JsonField list, field.Require("normalizers"));
  SPLICE_RETURN_IF_ERROR(list.CheckList());
  std::vector<std::unique_ptr<Normalizer>> parts;
  for (size_t i = 0; i < list.value->size(); ++i) {
    SPLICE_ASSIGN_OR_RETURN(std::unique_ptr<Normalizer> part, Parse(list.At(i), depth + 1));
    parts.push_back(std::move(part));
  }
  return std::make_unique<SequenceNormalizer>(std::move(parts));
}

NormalizerOr ParseReplace(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const JsonField pattern_field, field.Require("pattern"));
  SPLICE_ASSIGN_OR_RETURN(Pattern pattern, Pattern::Parse(pattern_field));
  SPLICE_ASSIGN_OR_RETURN(std::string content, field.RequireString("content"));
  return std::make_unique<ReplaceNormalizer>(std::move(pattern), std::move(content));
}

NormalizerOr ParseStrip(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const bool left, field.BoolOr("strip_left", true));
  SPLICE_ASSIGN_OR_RETURN(const bool right, field.BoolOr("strip_right", true));
  return std::make_unique<StripNormalizer>(left, right);
}

NormalizerOr Parse(const JsonField& field, int depth) {
  SPLICE_ASSIGN_OR_RETURN(const std::string type, field.RequireString("type"));
  if (type == "Sequence") return ParseSequence(field, depth);
  if (type == "NFC") return std::make_unique<NfcNormalizer>();
  if (type == "Replace") return ParseReplace(field);
  if (type == "Strip") return ParseStrip(field);
  if (type == "Prepend") {
    SPLICE_ASSIGN_OR_RETURN(std::string prefix, field.RequireString("prepend"));
    return std::make_unique<PrependNormalizer>(std::move(prefix));
  }
  return InvalidArgument("{}: the normalizer \"{}\" is not supported", field.path, type);
}

}  // namespace

NormalizerOr ParseNormalizer(const JsonField& field) { return Parse(field, 0); }

}  // namespace spl::tokenizer
