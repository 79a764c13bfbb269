#include "services/router/output_formats/mistral.h"

#include <algorithm>
#include <utility>

#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"
#include "services/router/output_formats/json_call_reader.h"

namespace spl::router {
namespace {

constexpr std::string_view kTag = "[TOOL_CALLS]", kCallId = "[CALL_ID]", kArguments = "[ARGS]";
constexpr size_t kIdBytes = 9;
constexpr size_t kMaxIdBytes = 64;  // of an id that the model writes
constexpr size_t kMaxNameBytes = 128;

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}

std::string ShortId(const std::string& id) { return id.size() > kIdBytes ? id.substr(id.size() - kIdBytes) : id; }

// Where the arguments of a call stand, behind the name that ends at `at`; npos: not in `text` yet. Anything else than
// their bracket stands there if it is no call.
size_t FindArguments(std::string_view text, size_t at) {
  for (const std::string_view tag : {kCallId, kArguments}) {
    at = text.find_first_not_of(kWhiteSpace, at);
    if (at == std::string_view::npos) return at;
    const std::string_view behind = text.substr(at);
    if (behind.size() < tag.size() && tag.substr(0, behind.size()) == behind) return std::string_view::npos;
    if (!behind.starts_with(tag)) continue;
    at += tag.size();
    if (tag == kArguments) continue;
    const size_t id = at;
    while (at < text.size() && IsNameCharacter(text[at]) && at - id < kMaxIdBytes) ++at;
  }
  return text.find_first_not_of(kWhiteSpace, at);
}

class Mistral final : public OutputParser {
 public:
  explicit Mistral(const MakeCallId& make_id) : calls_([make_id] { return ShortId(make_id()); }) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (Step(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (state_ == State::kOutside) return start_.Finish(&held_, out);
    if (state_ == State::kArguments) return calls_.AddArguments(held_, out);
    const bool begun = state_ == State::kObject && reader_.Finish(&held_, out) == JsonCallReader::Result::kCall;
    if (!begun && in_list_ == 0) return start_.TakeBack(space_ + held_, out);
    // A list that is cut off between two calls has no text.
    const size_t begin = held_.find_first_not_of(" \t\n\r,");
    if (begin != std::string::npos) out->content += held_.substr(begin);
  }

 private:
  // kStart: behind the tag. kItem: in a list, in front of an object. kNext: in a list, behind one.
  enum class State { kOutside, kStart, kItem, kObject, kNext, kArguments };

  // Returns whether there is more to do.
  bool Step(OutputDelta* out) {
    switch (state_) {
      case State::kOutside:
        if (!start_.Find(&held_, out)) return false;
        in_list_ = 0;
        space_.clear();
        return Become(State::kStart);
      case State::kStart:
        return StartCalls(out);
      case State::kItem:
        return StartItem(out);
      case State::kObject:
        return ReadItem(out);
      case State::kNext:
        return EndItem();
      case State::kArguments:
        return ReadArguments(out);
    }
    return false;
  }

  bool Become(State state) {
    state_ = state;
    return true;
  }

  bool StartCalls(OutputDelta* out) {
    const std::string_view text = held_;
    const size_t begin = text.find_first_not_of(kWhiteSpace);
    if (begin == std::string_view::npos) return false;
    if (text[begin] == '[') {
      space_ = text.substr(0, begin + 1);
      held_.erase(0, begin + 1);
      return Become(State::kItem);
    }
    const size_t name_end =
        std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), IsNameCharacter) - text.begin();
    if (name_end == begin || name_end - begin > kMaxNameBytes) return NoCall(out);
    const size_t json = FindArguments(text, static_cast<size_t>(name_end));
    if (json == std::string_view::npos) return false;
    if (text[json] != '{') return NoCall(out);
    calls_.Begin(text.substr(begin, name_end - begin), out);
    held_.erase(0, json);
    scanner_.Start();
    return Become(State::kArguments);
  }

  bool ReadArguments(OutputDelta* out) {
    const size_t length = scanner_.Scan(held_);
    calls_.AddArguments(std::string_view(held_).substr(0, length), out);
    held_.erase(0, length);
    return scanner_.ended() && EndCalls();
  }

  bool StartItem(OutputDelta* out) {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return false;
    if (held_[begin] != '{') return NoCall(out);
    space_ += held_.substr(0, begin);
    held_.erase(0, begin);
    reader_.Start();
    return Become(State::kObject);
  }

  bool ReadItem(OutputDelta* out) {
    const JsonCallReader::Result result = reader_.Read(&held_, out);
    if (result == JsonCallReader::Result::kMore) return false;
    if (result == JsonCallReader::Result::kNoCall) return NoCall(out);
    ++in_list_;
    return Become(State::kNext);
  }

  // Behind a call of the list, whatever is neither a comma nor the list's end is text again.
  bool EndItem() {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return false;
    const char c = held_[begin];
    if (c == ',' || c == ']') held_.erase(0, begin + 1);
    return c == ',' ? Become(State::kItem) : EndCalls();
  }

  bool EndCalls() {
    start_.Behind();
    return Become(State::kOutside);
  }

  // Goes on with the text behind the tag, in which there may be another tag. Behind a call of the list the text begins
  // with what is none.
  bool NoCall(OutputDelta* out) {
    if (in_list_ > 0) return EndCalls();
    start_.TakeBack("", out);
    held_.insert(0, std::exchange(space_, {}));
    return Become(State::kOutside);
  }

  CallWriter calls_;
  CallStart start_{kTag};
  JsonCallReader reader_{{}, &calls_};
  BracketScanner scanner_;  // of arguments behind a name
  State state_ = State::kOutside;
  std::string held_;    // not yet decided
  std::string space_;   // behind the tag, with the bracket of a list
  size_t in_list_ = 0;  // calls of the list so far
};

}  // namespace

std::unique_ptr<OutputParser> MakeMistral(const CallableTools& tools) {
  return std::make_unique<Mistral>(tools.make_id);
}

absl::StatusOr<GrammarPart> MistralGrammar(const ForcedTools& tools) {
  const GrammarPart arguments = TagPart(tools, kArguments), call_id = TagPart(tools, kCallId);
  const auto is_token = [](const GrammarPart& tag) { return tag["type"] == "token"; };
  std::vector<GrammarPart> named;
  std::vector<CallFrame> listed;
  for (const ForcedTool& tool : tools.tools) {
    std::vector<GrammarPart> call = {TagPart(tools, kTag), LiteralPart(tool.name)};
    if (is_token(call_id))
      call.push_back(OptionalPart(SequencePart({call_id, {{"type", "regex"}, {"pattern", "[a-zA-Z0-9]{9}"}}})));
    if (is_token(arguments)) call.push_back(arguments);
    call.push_back(JsonPart(tool.parameters));
    named.push_back(SequencePart(std::move(call)));
    listed.push_back({LiteralPart("{\"name\": \"" + tool.name + "\", \"arguments\": "), JsonPart(tool.parameters),
                      LiteralPart("}")});
  }
  GrammarPart names = RepeatedPart(AnyOfPart(std::move(named)), tools.one);
  if (is_token(arguments)) return names;
  return AnyOfPart({SequencePart({TagPart(tools, kTag), OptionalPart(LiteralPart(" ")), LiteralPart("["),
                                  SeparatedPart(std::move(listed), ", ", tools.one), LiteralPart("]")}),
                    std::move(names)});
}

bool IsMistral(std::string_view chat_template) { return chat_template.find(kTag) != std::string_view::npos; }

}  // namespace spl::router
