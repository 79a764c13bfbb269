#include "services/tokenizer/decode_steps.h"

#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/byte_level.h"

namespace spl::tokenizer {
namespace {

void Emit(std::string text, std::vector<std::string>* out) {
  if (!text.empty()) out->push_back(std::move(text));
}

// "<0x0A>" → 0x0A. Like the reference, takes any six bytes of that shape.
std::optional<char> FallbackByte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return std::nullopt;
  unsigned value = 0;
  const char* begin = token.data() + 3;
  // "+F" is a number for the reference's parser too.
  const bool plus = *begin == '+';
  const auto [end, error] = std::from_chars(begin + (plus ? 1 : 0), begin + 2, value, 16);
  if (error != std::errc() || end != begin + 2) return std::nullopt;
  return static_cast<char>(value);
}

}  // namespace

absl::Status JoinWithSpaces::Push(std::string token, std::vector<std::string>* out) {
  Emit(first_ ? std::move(token) : " " + token, out);
  first_ = false;
  return absl::OkStatus();
}

absl::Status JoinWithSpaces::Finish(std::vector<std::string>*) { return absl::OkStatus(); }

absl::Status HoldAll::Push(std::string token, std::vector<std::string>*) {
  held_ += token;
  return absl::OkStatus();
}

absl::Status HoldAll::Finish(std::vector<std::string>* out) {
  Emit(std::move(held_), out);
  return absl::OkStatus();
}

absl::Status BytesFromChars::Push(std::string token, std::vector<std::string>* out) {
  const std::optional<std::string> bytes = CharsToBytes(token);
  pending_ += bytes ? *bytes : token;
  std::string text;
  pending_.erase(0, text::AppendLossyUtf8(pending_, /*final=*/false, &text));
  Emit(std::move(text), out);
  return absl::OkStatus();
}

absl::Status BytesFromChars::Finish(std::vector<std::string>* out) {
  std::string text;
  text::AppendLossyUtf8(pending_, /*final=*/true, &text);
  pending_.clear();
  Emit(std::move(text), out);
  return absl::OkStatus();
}

absl::Status BytesFromFallback::Push(std::string token, std::vector<std::string>* out) {
  if (const std::optional<char> byte = FallbackByte(token)) {
    run_ += *byte;
    return absl::OkStatus();
  }
  SPLICE_RETURN_IF_ERROR(Finish(out));
  out->push_back(std::move(token));  // even an empty one: a later step may count tokens
  return absl::OkStatus();
}

absl::Status BytesFromFallback::Finish(std::vector<std::string>* out) {
  if (run_.empty()) return absl::OkStatus();
  if (text::FindInvalidUtf8(run_) == std::string_view::npos) {
    out->push_back(std::move(run_));
  } else {
    for (size_t i = 0; i < run_.size(); ++i) out->emplace_back(text::kReplacementCharacter);
  }
  run_.clear();
  return absl::OkStatus();
}

ReplaceInToken::ReplaceInToken(std::shared_ptr<const Pattern> pattern, std::string content)
    : pattern_(std::move(pattern)), content_(std::move(content)) {}

absl::Status ReplaceInToken::Push(std::string token, std::vector<std::string>* out) {
  SPLICE_RETURN_IF_ERROR(pattern_->ReplaceAll(content_, &token));
  out->push_back(std::move(token));
  return absl::OkStatus();
}

absl::Status ReplaceInToken::Finish(std::vector<std::string>*) { return absl::OkStatus(); }

StripToken::StripToken(StripOptions options) : options_(std::move(options)) {}

absl::Status StripToken::Push(std::string token, std::vector<std::string>* out) {
  std::string_view rest = token;
  for (size_t i = 0; i < options_.start && rest.starts_with(options_.content); ++i) {
    rest.remove_prefix(options_.content.size());
  }
  for (size_t i = 0; i < options_.stop && rest.ends_with(options_.content); ++i) {
    rest.remove_suffix(options_.content.size());
  }
  out->emplace_back(rest);
  return absl::OkStatus();
}

absl::Status StripToken::Finish(std::vector<std::string>*) { return absl::OkStatus(); }

StripFused::StripFused(StripOptions options) : options_(std::move(options)), num_to_strip_(options_.start) {}

absl::Status StripFused::Push(std::string token, std::vector<std::string>* out) {
  pending_ += token;
  for (; num_to_strip_ > 0 && pending_.starts_with(options_.content); --num_to_strip_) {
    pending_.erase(0, options_.content.size());
  }
  if (num_to_strip_ > 0) {
    if (pending_.size() < options_.content.size()) return absl::OkStatus();
    num_to_strip_ = 0;
  }
  size_t keep = pending_.size();
  for (size_t i = 0; i < options_.stop && std::string_view(pending_).substr(0, keep).ends_with(options_.content); ++i) {
    keep -= options_.content.size();
  }
  Emit(pending_.substr(0, keep), out);
  pending_.erase(0, keep);
  return absl::OkStatus();
}

absl::Status StripFused::Finish(std::vector<std::string>* out) {
  // All text that is held back is trailing content, unless the text ended while leading content could still be removed.
  std::string_view rest = pending_;
  for (size_t i = 0; i < options_.stop && rest.ends_with(options_.content); ++i) {
    rest.remove_suffix(options_.content.size());
  }
  Emit(std::string(rest), out);
  pending_.clear();
  return absl::OkStatus();
}

MetaspaceToSpace::MetaspaceToSpace(std::string replacement, bool prepends)
    : replacement_(std::move(replacement)), drop_(prepends) {}

absl::Status MetaspaceToSpace::Push(std::string token, std::vector<std::string>* out) {
  SPLICE_RETURN_IF_ERROR(Pattern::FromLiteral(replacement_).ReplaceAll(drop_ ? "" : " ", &token));
  drop_ = false;
  out->push_back(std::move(token));
  return absl::OkStatus();
}

absl::Status MetaspaceToSpace::Finish(std::vector<std::string>*) { return absl::OkStatus(); }

}  // namespace spl::tokenizer
