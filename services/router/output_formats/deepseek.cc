#include "services/router/output_formats/deepseek.h"

#include <algorithm>
#include <string>

#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"

namespace spl::router {
namespace {

constexpr std::string_view kCalls = "<｜tool▁calls▁begin｜>", kCallsEnd = "<｜tool▁calls▁end｜>";
constexpr std::string_view kCall = "<｜tool▁call▁begin｜>", kCallEnd = "<｜tool▁call▁end｜>";
constexpr std::string_view kSeparator = "<｜tool▁sep｜>", kFence = "```";
constexpr size_t kMaxHeadBytes = 512;  // from the beginning of a call to its arguments

// The text in front of the arguments of a call.
struct Head {
  enum State { kMore, kNone, kFound };
  State state = kNone;
  std::string_view name;
  size_t arguments = 0;       // where their bracket stands, or the end of a call that has none
  bool has_arguments = true;  // false: the call ends instead
};

// `at`: behind the name.
Head HeadOf(std::string_view text, std::string_view name, size_t at) {
  name.remove_prefix(SkipSpace(name, 0));
  name = name.substr(0, name.find_last_not_of(kWhiteSpace) + 1);  // npos: 0
  if (name.empty() || name.find_first_of(" \t\n\r{}<>\"`") != std::string_view::npos) return {};
  if (text[at] == '{') return {.state = Head::kFound, .name = name, .arguments = at};
  const std::string_view behind = text.substr(at, kCallEnd.size());
  if (behind == kCallEnd) return {.state = Head::kFound, .name = name, .arguments = at, .has_arguments = false};
  return {.state = kCallEnd.starts_with(behind) ? Head::kMore : Head::kNone};
}

// `text` begins behind the separator.
Head NamedHead(std::string_view text) {
  const size_t name_end = text.find_first_of("\n`{<", SkipSpace(text, 0));
  if (name_end == std::string_view::npos) return {.state = Head::kMore};
  const std::string_view name = text.substr(0, name_end);
  size_t at = SkipSpace(text, name_end);
  if (text.substr(at, kFence.size()) == kFence) {
    at += kFence.size();
    while (at < text.size() && text[at] >= 'a' && text[at] <= 'z') ++at;
    at = SkipSpace(text, at);
  } else if (kFence.starts_with(text.substr(at))) {
    return {.state = Head::kMore};
  }
  return at < text.size() ? HeadOf(text, name, at) : Head{.state = Head::kMore};
}

// `text` begins behind kCall. Only its first bytes count, so that the answer does not depend on where it ends.
Head ReadHead(std::string_view text) {
  const bool whole = text.size() >= kMaxHeadBytes;
  text = text.substr(0, kMaxHeadBytes);
  Head head{.state = Head::kMore};
  const size_t separator = text.find(kSeparator);
  if (separator != std::string_view::npos) {
    const size_t behind = separator + kSeparator.size();
    const size_t at = SkipSpace(text, behind);
    const bool named_first = at < text.size() && (text[at] == '{' || text[at] == '<');
    if (named_first) {
      head = HeadOf(text, text.substr(0, separator), at);
    } else if (at < text.size()) {
      head = NamedHead(text.substr(behind));
      head.arguments += behind;
    }
  }
  return head.state == Head::kMore && whole ? Head{} : head;
}

class DeepSeek final : public OutputParser {
 public:
  explicit DeepSeek(const MakeCallId& make_id) : calls_(make_id) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (Step(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    switch (state_) {
      case State::kOutside:
        return start_.Finish(&held_, out);
      case State::kBetween:
      case State::kHead:
        if (!has_calls_) return start_.TakeBack(held_, out);
        if (state_ == State::kHead) out->content += held_;
        return;
      case State::kArguments:
        return calls_.AddArguments(held_, out);
      case State::kEnd:
        return EmitRest(held_.size() - PartialTag(held_, kCallEnd), out);
    }
  }

 private:
  // kBetween: behind the first tag, or a call. kEnd: behind the arguments.
  enum class State { kOutside, kBetween, kHead, kArguments, kEnd };

  // Returns whether there is more to do.
  bool Step(OutputDelta* out) {
    switch (state_) {
      case State::kOutside:
        has_calls_ = false;
        return start_.Find(&held_, out) && Become(State::kBetween);
      case State::kBetween:
        return StartCall(out);
      case State::kHead:
        return StartArguments(out);
      case State::kArguments:
        return ReadArguments(out);
      case State::kEnd:
        return EndCall(out);
    }
    return false;
  }

  bool Become(State state) {
    state_ = state;
    return true;
  }

  bool StartCall(OutputDelta* out) {
    const size_t begin = SkipSpace(held_, 0);
    const std::string_view text = std::string_view(held_).substr(begin);
    if (text.starts_with(kCall)) {
      head_ = begin + kCall.size();
      return Become(State::kHead);
    }
    if (has_calls_ && text.starts_with(kCallsEnd)) {
      held_.erase(0, begin + kCallsEnd.size());
      start_.Behind();
      return Become(State::kOutside);
    }
    if (kCall.starts_with(text) || (has_calls_ && kCallsEnd.starts_with(text))) return false;
    return NoCall(out);
  }

  bool StartArguments(OutputDelta* out) {
    const Head head = ReadHead(std::string_view(held_).substr(head_));
    if (head.state == Head::kMore) return false;
    if (head.state == Head::kNone) return NoCall(out);
    has_calls_ = true;
    calls_.Begin(head.name, out);
    if (!head.has_arguments) calls_.AddArguments("{}", out);
    held_.erase(0, head_ + head.arguments);
    scanner_.Start();
    return Become(head.has_arguments ? State::kArguments : State::kEnd);
  }

  bool ReadArguments(OutputDelta* out) {
    const size_t length = scanner_.Scan(held_);
    calls_.AddArguments(std::string_view(held_).substr(0, length), out);
    held_.erase(0, length);
    return scanner_.ended() && Become(State::kEnd);
  }

  // The end tag may be missing in front of the next tag.
  bool EndCall(OutputDelta* out) {
    const size_t end = held_.find(kCallEnd);
    const size_t stop = std::min({end, held_.find(kCall), held_.find(kCallsEnd)});
    if (stop == std::string::npos) return false;
    EmitRest(stop, out);
    held_.erase(0, stop == end ? stop + kCallEnd.size() : stop);
    return Become(State::kBetween);
  }

  // The first `num_bytes` of what is held are content, but for white space in front of them, and a fence.
  void EmitRest(size_t num_bytes, OutputDelta* out) const {
    std::string_view rest = std::string_view(held_).substr(0, num_bytes);
    rest.remove_prefix(SkipSpace(rest, 0));
    if (rest.starts_with(kFence) || kFence.starts_with(rest)) rest.remove_prefix(std::min(rest.size(), kFence.size()));
    rest.remove_prefix(SkipSpace(rest, 0));
    out->content += rest;
  }

  // The held text is content, in which there may be another tag.
  bool NoCall(OutputDelta* out) {
    if (has_calls_) {
      start_.Behind();
    } else {
      start_.TakeBack("", out);
    }
    return Become(State::kOutside);
  }

  CallWriter calls_;
  CallStart start_{kCalls};
  BracketScanner scanner_{{kCallEnd, kCallsEnd, kCall}};
  State state_ = State::kOutside;
  std::string held_;        // not yet decided
  size_t head_ = 0;         // where in it the text behind kCall begins
  bool has_calls_ = false;  // since the last kCalls
};

}  // namespace

std::unique_ptr<OutputParser> MakeDeepSeek(const CallableTools& tools) {
  return std::make_unique<DeepSeek>(tools.make_id);
}

absl::StatusOr<GrammarPart> DeepSeekGrammar(const ForcedTools& tools) {
  const GrammarPart begin = TagPart(tools, kCall), separator = TagPart(tools, kSeparator);
  std::vector<GrammarPart> calls;
  for (const ForcedTool& tool : tools.tools) {
    calls.push_back(SequencePart({LiteralPart("function"), separator, LiteralPart(tool.name + "\n```json\n"),
                                  JsonPart(tool.parameters), LiteralPart("\n```")}));
    calls.push_back(SequencePart({LiteralPart(tool.name), separator, JsonPart(tool.parameters)}));
  }
  std::vector<GrammarPart> call = {begin, AnyOfPart(std::move(calls)), TagPart(tools, kCallEnd)};
  if (!tools.one) call.push_back(OptionalPart(LiteralPart("\n")));
  return SequencePart(
      {TagPart(tools, kCalls), RepeatedPart(SequencePart(std::move(call)), tools.one), TagPart(tools, kCallsEnd)});
}

bool IsDeepSeek(std::string_view chat_template) {
  return chat_template.find(kCalls) != std::string_view::npos && chat_template.find(kCall) != std::string_view::npos;
}

}  // namespace spl::router
