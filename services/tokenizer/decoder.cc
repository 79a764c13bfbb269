#include "services/tokenizer/decoder.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/byte_level.h"
#include "services/tokenizer/decode_steps.h"

namespace spl::tokenizer {
namespace {

constexpr int kNestingMax = 16;
constexpr int64_t kStripMax = 1024;

}  // namespace

absl::Status DecodeState::RunFrom(size_t step_idx, std::vector<std::string> tokens, std::string* text) {
  for (; step_idx < steps_.size() && !tokens.empty(); ++step_idx) {
    std::vector<std::string> next;
    for (std::string& token : tokens) SPLICE_RETURN_IF_ERROR(steps_[step_idx]->Push(std::move(token), &next));
    tokens = std::move(next);
  }
  for (const std::string& token : tokens) *text += token;
  return absl::OkStatus();
}

absl::Status DecodeState::Push(std::string token, std::string* text) {
  std::vector<std::string> tokens;
  tokens.push_back(std::move(token));
  return RunFrom(0, std::move(tokens), text);
}

absl::Status DecodeState::Finish(std::string* text) {
  for (size_t i = 0; i < steps_.size(); ++i) {
    std::vector<std::string> held;
    SPLICE_RETURN_IF_ERROR(steps_[i]->Finish(&held));
    SPLICE_RETURN_IF_ERROR(RunFrom(i + 1, std::move(held), text));
  }
  return absl::OkStatus();
}

absl::StatusOr<Decoder> Decoder::Parse(const JsonField& field) {
  Decoder decoder;
  if (field.is_null()) {
    decoder.Add([] { return std::make_unique<JoinWithSpaces>(); });
  } else {
    SPLICE_RETURN_IF_ERROR(decoder.ParseInto(field, 0));
  }
  return decoder;
}

DecodeState Decoder::NewState() const {
  std::vector<std::unique_ptr<DecodeStep>> steps;
  for (const Factory& factory : factories_) steps.push_back(factory());
  return DecodeState(std::move(steps));
}

std::string Decoder::BytesOf(std::string_view token) const {
  if (byte_level_) return CharsToBytes(token).value_or(std::string(token));
  if (byte_fallback_ && token.size() == 6 && token.substr(0, 3) == "<0x" && token.back() == '>') {
    const std::string digits(token.substr(3, 2));
    char* end = nullptr;
    const long byte = std::strtol(digits.c_str(), &end, 16);
    if (*end == '\0') return std::string(1, static_cast<char>(byte));
  }
  // Behind another token, because the first one of a text may lose its space.
  const std::string_view other = "a";
  const auto text_of = [&](std::initializer_list<std::string_view> tokens) {
    std::string text;
    DecodeState state = NewState();
    for (const std::string_view each : tokens) {
      if (!state.Push(std::string(each), &text).ok()) return std::string();
    }
    return state.Finish(&text).ok() ? text : std::string();
  };
  const std::string alone = text_of({other}), both = text_of({other, token});
  return both.size() > alone.size() ? both.substr(alone.size()) : std::string();
}

// A step that needs whole tokens, behind one that joins them all, waits until the one token is complete.
void Decoder::Add(Factory factory) {
  if (fused_) {
    factories_.push_back([] { return std::make_unique<HoldAll>(); });
  }
  factories_.push_back(std::move(factory));
}

absl::Status Decoder::AddReplace(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const JsonField pattern_field, field.Require("pattern"));
  SPLICE_ASSIGN_OR_RETURN(Pattern parsed, Pattern::Parse(pattern_field));
  SPLICE_ASSIGN_OR_RETURN(const std::string content, field.RequireString("content"));
  const auto pattern = std::make_shared<const Pattern>(std::move(parsed));
  Add([pattern, content] { return std::make_unique<ReplaceInToken>(pattern, content); });
  return absl::OkStatus();
}

absl::Status Decoder::AddStrip(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const std::string content, field.RequireString("content"));
  SPLICE_ASSIGN_OR_RETURN(const int64_t start, field.IntOr("start", 0));
  SPLICE_ASSIGN_OR_RETURN(const int64_t stop, field.IntOr("stop", 0));
  if (content.empty() || start < 0 || stop < 0 || start > kStripMax || stop > kStripMax) {
    return InvalidArgument("{} needs a character as content and start and stop from 0 to {}", field.path, kStripMax);
  }
  const StripOptions options{content, static_cast<size_t>(start), static_cast<size_t>(stop)};
  const bool fused = fused_;
  factories_.push_back([options, fused]() -> std::unique_ptr<DecodeStep> {
    if (fused) return std::make_unique<StripFused>(options);
    return std::make_unique<StripToken>(options);
  });
  return absl::OkStatus();
}

absl::Status Decoder::AddMetaspace(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const std::string replacement, field.StringOr("replacement", "\xE2\x96\x81"));
  SPLICE_ASSIGN_OR_RETURN(const std::string scheme, field.StringOr("prepend_scheme", "always"));
  if (replacement.empty()) return InvalidArgument("{}.replacement is empty", field.path);
  const bool prepends = scheme != "never";
  Add([replacement, prepends] { return std::make_unique<MetaspaceToSpace>(replacement, prepends); });
  return absl::OkStatus();
}

absl::Status Decoder::ParseInto(const JsonField& field, int depth) {
  SPLICE_ASSIGN_OR_RETURN(const std::string type, field.RequireString("type"));
  if (type == "Sequence") {
    if (depth >= kNestingMax) return InvalidArgument("{} is nested more than {} deep", field.path, kNestingMax);
    SPLICE_ASSIGN_OR_RETURN(const JsonField list, field.Require("decoders"));
    SPLICE_RETURN_IF_ERROR(list.CheckList());
    for (size_t i = 0; i < list.value->size(); ++i) SPLICE_RETURN_IF_ERROR(ParseInto(list.At(i), depth + 1));
    return absl::OkStatus();
  }
  if (type == "Replace") return AddReplace(field);
  if (type == "Strip") return AddStrip(field);
  if (type == "Metaspace") return AddMetaspace(field);
  if (type == "ByteFallback") {
    Add([] { return std::make_unique<BytesFromFallback>(); });
    byte_fallback_ = true;
    return absl::OkStatus();
  }
  if (type == "ByteLevel") {
    Add([] { return std::make_unique<BytesFromChars>(); });
    byte_level_ = true;
    fused_ = true;
    return absl::OkStatus();
  }
  if (type == "Fuse") {
    fused_ = true;  // later steps see fragments of one token; joining itself changes no byte
    return absl::OkStatus();
  }
  return InvalidArgument("{}: the decoder \"{}\" is not supported", field.path, type);
}

}  // namespace spl::tokenizer
