#include "services/router/output_formats/json_calls.h"

#include <algorithm>
#include <utility>

#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"
#include "services/router/output_formats/tool_call_json.h"

namespace spl::router {
namespace {

constexpr std::string_view kFence = "```", kSeparators = " \t\n\r,;";
constexpr size_t kMaxLanguageBytes = 32;  // behind a fence

class JsonCalls final : public OutputParser {
 public:
  explicit JsonCalls(const MakeCallId& make_id) : calls_(make_id) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (Step(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (state_ == State::kContent) return;
    // Between calls, and behind the last one, stands nothing that means anything.
    const size_t begin = calls_.num_calls() == 0 ? 0 : held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos || begin == held_.size()) return;
    const bool separates = calls_.num_calls() > 0 && held_.find_first_not_of(kSeparators) == std::string::npos;
    const bool fence = state_ == State::kFenceEnd && PartialTag(held_, kFence) == held_.size() - begin;
    if (!separates && !fence) out->content += held_.substr(begin);
  }

 private:
  // kValue: in JSON. kFenceEnd: behind JSON that stands between fences.
  enum class State { kStart, kValue, kFenceEnd, kContent };

  // Returns whether there is more to do.
  bool Step(OutputDelta* out) {
    switch (state_) {
      case State::kStart:
        return StartValue();
      case State::kValue:
        return ReadValue(out);
      case State::kFenceEnd:
        return EndFence();
      case State::kContent:
        out->content += std::exchange(held_, {});
        return false;
    }
    return false;
  }

  bool Become(State state) {
    state_ = state;
    return true;
  }

  bool StartValue() {
    const size_t begin = held_.find_first_not_of(calls_.num_calls() == 0 ? kWhiteSpace : kSeparators);
    if (begin == std::string::npos) return false;
    value_ = begin;
    const std::string_view text = std::string_view(held_).substr(begin);
    fenced_ = text.starts_with(kFence);
    if (!fenced_ && kFence.starts_with(text)) return false;
    if (fenced_) {
      const auto is_language = [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; };
      const size_t language = begin + kFence.size();
      size_t at = language;
      while (at < held_.size() && is_language(held_[at]) && at - language < kMaxLanguageBytes) ++at;
      value_ = SkipSpace(held_, at);
    }
    if (value_ == held_.size()) return false;
    if (held_[value_] != '{' && held_[value_] != '[') return NoCall();
    scanner_.Start();
    scanned_ = value_;
    return Become(State::kValue);
  }

  bool ReadValue(OutputDelta* out) {
    scanned_ += scanner_.Scan(std::string_view(held_).substr(scanned_));
    if (!scanner_.ended()) return false;
    const auto calls = ReadToolCalls(std::string_view(held_).substr(value_, scanned_ - value_), true);
    if (!calls.has_value()) return NoCall();
    for (const ToolCallDelta& call : *calls) calls_.Write(call, out);
    held_.erase(0, scanned_);
    return Become(fenced_ ? State::kFenceEnd : State::kStart);
  }

  bool EndFence() {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return false;
    const std::string_view text = std::string_view(held_).substr(begin);
    if (text.starts_with(kFence)) {
      held_.erase(0, begin + kFence.size());
    } else if (kFence.starts_with(text)) {
      return false;
    }
    return Become(State::kStart);
  }

  // All that follows is content. White space behind a call belongs to it.
  bool NoCall() {
    if (calls_.num_calls() > 0) held_.erase(0, SkipSpace(held_, 0));
    return Become(State::kContent);
  }

  CallWriter calls_;
  BracketScanner scanner_;
  State state_ = State::kStart;
  std::string held_;     // not yet decided
  size_t value_ = 0;     // where in it the JSON begins
  size_t scanned_ = 0;   // up to where it was looked at
  bool fenced_ = false;  // it stands between fences
};

}  // namespace

std::unique_ptr<OutputParser> MakeJsonCalls(const CallableTools& tools) {
  return std::make_unique<JsonCalls>(tools.make_id);
}

absl::StatusOr<GrammarPart> JsonCallsGrammar(const ForcedTools& tools) {
  std::vector<CallFrame> calls;
  for (const ForcedTool& tool : tools.tools) {
    calls.push_back({LiteralPart("{\"name\": \"" + tool.name + "\", \"arguments\": "), JsonPart(tool.parameters),
                     LiteralPart("}")});
  }
  return SeparatedPart(std::move(calls), "\n", tools.one);
}

}  // namespace spl::router
