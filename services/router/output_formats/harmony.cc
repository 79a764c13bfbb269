#include "services/router/output_formats/harmony.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"

namespace spl::router {
namespace {

constexpr std::string_view kStart = "<|start|>", kChannel = "<|channel|>", kMessage = "<|message|>";
constexpr std::string_view kEnds[] = {"<|end|>", "<|call|>", "<|return|>"};
constexpr std::string_view kConstrain = "<|constrain|>";
constexpr std::string_view kTo = "to=", kFunctions = "functions.";
constexpr std::string_view kParagraph = "\n\n";
constexpr size_t kMaxHeaderBytes = 512;

// Every tag that ends a message: by itself, or because the next one begins.
const std::vector<std::string_view>& Stops() {
  static const std::vector<std::string_view> stops = {kEnds[0], kEnds[1], kEnds[2], kStart, kChannel};
  return stops;
}

// The first of Stops() in `text` from `from` on; npos: none is there. Sets its length.
size_t FindStop(std::string_view text, size_t from, size_t* length) {
  size_t first = std::string_view::npos;
  for (const std::string_view stop : Stops()) {
    const size_t at = text.find(stop, from);
    if (at >= first) continue;
    first = at;
    *length = stop.size();
  }
  return first;
}

// The bytes at the end of `text` that could become one of Stops().
size_t EndsInTag(std::string_view text) {
  size_t partial = 0;
  for (const std::string_view tag : Stops()) partial = std::max(partial, PartialTag(text, tag));
  return partial;
}

enum class Kind { kReasoning, kContent, kCall, kOther };

struct Header {
  Kind kind = Kind::kContent;
  std::string function;
};

// `text`: a header without kMessage. Models repeat channels and put words behind them: the last one counts, up to what
// is no letter.
Header ReadHeader(std::string_view text, bool may_call) {
  Header header;
  if (const size_t to = text.rfind(kTo); to != std::string_view::npos) {
    const std::string_view behind = text.substr(to + kTo.size());
    const std::string_view recipient = behind.substr(0, behind.find_first_of(" \t\n\r<"));
    header.kind = Kind::kOther;
    if (may_call && recipient.starts_with(kFunctions) && recipient.size() > kFunctions.size()) {
      header.kind = Kind::kCall;
      header.function = recipient.substr(kFunctions.size());
    }
    return header;
  }
  const size_t channel = text.rfind(kChannel);
  if (channel == std::string_view::npos) return header;
  const std::string_view behind = text.substr(channel + kChannel.size());
  const auto letters = std::find_if(behind.begin(), behind.end(), [](char c) { return c < 'a' || c > 'z'; });
  const std::string_view name = behind.substr(0, static_cast<size_t>(letters - behind.begin()));
  if (name == "analysis") {
    header.kind = Kind::kReasoning;
  } else if (name != "final" && name != "commentary") {
    header.kind = Kind::kOther;
  }
  return header;
}

class Harmony final : public OutputParser {
 public:
  Harmony(const CallableTools* tools, bool in_reasoning, bool by_grammar)
      : may_call_(tools != nullptr), by_grammar_(by_grammar), calls_(tools != nullptr ? tools->make_id : MakeCallId()) {
    if (in_reasoning) StartText(Kind::kReasoning);
  }

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (Step(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    switch (state_) {
      case State::kStart:
      case State::kText:
      case State::kRest:
        return Emit(std::exchange(held_, {}), out);
      case State::kArguments:
        return calls_.AddArguments(held_, out);
      case State::kBetween:
      case State::kCallEnd:
        held_.erase(0, SkipSpace(held_, 0));
        if (EndsInTag(held_) < held_.size()) EmitOther(held_, out);
        return;
      case State::kHeader:
      case State::kCall:
        return EmitOther(header_ + held_, out);
    }
  }

 private:
  // kStart: the answer begins, inside of a header or with text. kBetween: behind a message. kText: in reasoning or
  // content. kRest: in content that goes on to the end. kCall: behind the header of a call. kCallEnd: behind its
  // arguments.
  enum class State { kStart, kBetween, kHeader, kText, kRest, kCall, kArguments, kCallEnd };

  // Returns whether there is more to do.
  bool Step(OutputDelta* out) {
    switch (state_) {
      case State::kStart:
      case State::kBetween:
        return FindHeader();
      case State::kHeader:
        return EndHeader(out);
      case State::kText:
        return ReadText(out);
      case State::kRest:
        Emit(std::exchange(held_, {}), out);
        return false;
      case State::kCall:
        return StartArguments(out);
      case State::kArguments:
        return ReadArguments(out);
      case State::kCallEnd:
        return EndCall(out);
    }
    return false;
  }

  bool Become(State state) {
    state_ = state;
    return true;
  }

  bool StartText(Kind kind) {
    kind_ = kind;
    begins_ = true;
    return Become(by_grammar_ && kind == Kind::kContent ? State::kRest : State::kText);
  }

  bool FindHeader() {
    const size_t begin = std::min(held_.find_first_not_of(kWhiteSpace), held_.size());
    const std::string_view text = std::string_view(held_).substr(begin);
    const bool first = state_ == State::kStart;
    bool partial = text.empty();
    for (const std::string_view tag : {kStart, kChannel, kMessage, kTo}) {
      if (!first && (tag == kMessage || tag == kTo)) continue;
      if (text.starts_with(tag)) {
        if (tag != kTo) held_.erase(0, begin);
        header_.clear();
        return Become(State::kHeader);
      }
      partial = partial || tag.starts_with(text);
    }
    if (partial) return false;
    if (!first) held_.erase(0, begin);
    return StartText(Kind::kContent);
  }

  // Only the first bytes count, and the tags in them, so that nothing depends on where the text ends.
  bool EndHeader(OutputDelta* out) {
    const std::string_view text = std::string_view(held_).substr(0, kMaxHeaderBytes);
    const size_t end = text.find(kMessage);
    size_t length = 0, stop = FindStop(text, text.starts_with(kStart) ? kStart.size() : 0, &length);
    while (stop < end && text.substr(stop, length) == kChannel) stop = FindStop(text, stop + length, &length);
    if (end == std::string_view::npos && stop == std::string_view::npos && held_.size() < kMaxHeaderBytes) return false;
    if (stop < end || end == std::string_view::npos) return NoHeader(std::min(stop, text.size()), out);
    const Header header = ReadHeader(text.substr(0, end), may_call_);
    header_ = text.substr(0, end + kMessage.size());
    held_.erase(0, header_.size());
    if (header.kind == Kind::kReasoning || header.kind == Kind::kContent) return StartText(header.kind);
    function_ = header.function;
    if (header.kind == Kind::kCall) return Become(State::kCall);
    StartText(Kind::kContent);
    Emit(header_, out);
    return true;
  }

  // The first bytes of what is held look like a header and are none.
  bool NoHeader(size_t num_bytes, OutputDelta* out) {
    EmitOther(held_.substr(0, num_bytes), out);
    held_.erase(0, num_bytes);
    return true;
  }

  // Text up to the next tag.
  bool ReadText(OutputDelta* out) {
    size_t length = 0;
    const size_t stop = FindStop(held_, 0, &length);
    if (stop == std::string::npos) {
      const size_t certain = held_.size() - EndsInTag(held_);
      Emit(held_.substr(0, certain), out);
      held_.erase(0, certain);
      return false;
    }
    Emit(held_.substr(0, stop), out);
    return EndMessage(stop, length);
  }

  // Behind the message's text, which a tag of its own ends, or the next message.
  bool EndMessage(size_t stop, size_t length) {
    const std::string_view tag = std::string_view(held_).substr(stop, length);
    const bool own = std::find(std::begin(kEnds), std::end(kEnds), tag) != std::end(kEnds);
    held_.erase(0, own ? stop + length : stop);
    return Become(State::kBetween);
  }

  bool StartArguments(OutputDelta* out) {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return false;
    const std::string_view text = std::string_view(held_).substr(begin);
    if (text.front() == '{') {
      calls_.Begin(function_, out);
      held_.erase(0, begin);
      scanner_.Start();
      return Become(State::kArguments);
    }
    for (const std::string_view stop : Stops()) {
      if (text.starts_with(stop)) {
        calls_.Write({.index = 0, .id = {}, .name = function_, .arguments = "{}"}, out);
        return Become(State::kCallEnd);
      }
    }
    for (const std::string_view stop : Stops()) {
      if (stop.starts_with(text)) return false;
    }
    StartText(Kind::kContent);
    Emit(header_, out);
    return true;
  }

  bool ReadArguments(OutputDelta* out) {
    const size_t length = scanner_.Scan(held_);
    calls_.AddArguments(std::string_view(held_).substr(0, length), out);
    held_.erase(0, length);
    return scanner_.ended() && Become(State::kCallEnd);
  }

  bool EndCall(OutputDelta* out) {
    size_t length = 0;
    const size_t stop = FindStop(held_, 0, &length);
    if (stop == std::string::npos) return false;
    const size_t begin = std::min(held_.find_first_not_of(kWhiteSpace), stop);
    if (begin < stop) EmitOther(held_.substr(begin, stop - begin), out);
    return EndMessage(stop, length);
  }

  // Content that is no message.
  void EmitOther(const std::string& text, OutputDelta* out) {
    StartText(Kind::kContent);
    Emit(text, out);
  }

  // Text of the message, in front of whose first byte a paragraph ends.
  void Emit(const std::string& text, OutputDelta* out) {
    if (text.empty()) return;
    const bool reasons = kind_ == Kind::kReasoning;
    std::string& all = reasons ? out->reasoning : out->content;
    bool& has_text = reasons ? has_reasoning_ : has_content_;
    if (begins_ && has_text) all += kParagraph;
    all += text;
    has_text = true;
    begins_ = false;
  }

  const bool may_call_;
  const bool by_grammar_;
  CallWriter calls_;
  BracketScanner scanner_{Stops()};
  State state_ = State::kStart;
  Kind kind_ = Kind::kContent;  // of the text
  bool begins_ = true;          // the message has no text yet
  bool has_reasoning_ = false, has_content_ = false;
  std::string held_;      // not yet decided
  std::string header_;    // of the message, with kMessage
  std::string function_;  // which it calls
};

}  // namespace

std::unique_ptr<OutputParser> MakeHarmony(const CallableTools* tools, bool in_reasoning, bool by_grammar) {
  return std::make_unique<Harmony>(tools, in_reasoning, by_grammar);
}

absl::StatusOr<GrammarPart> HarmonyGrammar(const ForcedTools& tools) {
  std::vector<GrammarPart> calls;
  for (const ForcedTool& tool : tools.tools) {
    calls.push_back(SequencePart(
        {TagPart(tools, kChannel),
         LiteralPart("commentary " + std::string(kTo) + std::string(kFunctions) + tool.name + " "),
         TagPart(tools, kConstrain), LiteralPart("json"), TagPart(tools, kMessage), JsonPart(tool.parameters)}));
  }
  return AnyOfPart(std::move(calls));
}

GrammarPart HarmonyAnswer(GrammarPart content, bool is_json, const SpecialTokenId& special) {
  const ForcedTools tags{.tools = {}, .one = true, .special = special};
  std::vector<std::string_view> all = Stops();
  all.insert(all.end(), {kMessage, kConstrain});
  GrammarPart reasoning =
      SequencePart({TagPart(tags, kChannel), LiteralPart("analysis"), TagPart(tags, kMessage), TextWithoutPart(all),
                    TagPart(tags, kEnds[0]), TagPart(tags, kStart), LiteralPart("assistant")});
  std::vector<GrammarPart> parts = {OptionalPart(RepeatedPart(std::move(reasoning), false)), TagPart(tags, kChannel),
                                    LiteralPart("final")};
  if (is_json)
    parts.push_back(OptionalPart(SequencePart({LiteralPart(" "), TagPart(tags, kConstrain), LiteralPart("json")})));
  parts.push_back(TagPart(tags, kMessage));
  parts.push_back(std::move(content));
  return SequencePart(std::move(parts));
}

bool IsHarmony(std::string_view chat_template) {
  return chat_template.find(kChannel) != std::string_view::npos &&
         chat_template.find(kMessage) != std::string_view::npos && chat_template.find(kStart) != std::string_view::npos;
}

}  // namespace spl::router
