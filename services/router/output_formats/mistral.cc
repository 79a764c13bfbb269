#include "services/router/output_formats/mistral.h"

#include <algorithm>
#include <utility>

#include "services/router/output_formats/tool_call_json.h"

namespace spl::router {
namespace {

constexpr std::string_view kTag = "[TOOL_CALLS]", kArguments = "[ARGS]";
constexpr size_t kIdBytes = 9;
constexpr size_t kMaxNameBytes = 128;

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}

// Where the text goes on behind white space.
size_t NextAt(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(kWhiteSpace, at), text.size());
}

class Mistral final : public OutputParser {
 public:
  explicit Mistral(MakeCallId make_id) : make_id_(std::move(make_id)) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    // JSON can only end where a bracket was fed.
    if (in_json_ && text.find_first_of("}]") == std::string_view::npos) return;
    while (inside_ ? EndCalls(out) : StartCalls(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (!inside_) return start_.Finish(&held_, out);
    start_.TakeBack(held_, out);
    held_.clear();
  }

 private:
  // These two return whether there is more to do.
  bool StartCalls(OutputDelta* out) { return inside_ = start_.Find(&held_, out); }

  bool EndCalls(OutputDelta* out) {
    const std::string_view text = held_;
    const size_t begin = text.find_first_not_of(kWhiteSpace);
    if (begin == std::string_view::npos) return false;
    if (text[begin] == '[') return EndList(begin, out);
    const size_t name_end =
        std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), IsNameCharacter) - text.begin();
    if (name_end == begin || name_end - begin > kMaxNameBytes) return NoCall(out);
    size_t json = text.find_first_not_of(kWhiteSpace, name_end);
    if (json == std::string_view::npos) return false;
    const std::string_view behind = text.substr(json);
    if (behind.size() < kArguments.size() && kArguments.substr(0, behind.size()) == behind) return false;
    if (behind.substr(0, kArguments.size()) == kArguments)
      json = text.find_first_not_of(kWhiteSpace, json + kArguments.size());
    if (json == std::string_view::npos) return false;
    if (text[json] != '{') return NoCall(out);
    in_json_ = true;
    const std::optional<size_t> length = BracketLength(text.substr(json));
    if (!length.has_value()) return false;
    if (!IsJsonObject(text.substr(json, *length))) return NoCall(out);
    ToolCallDelta call;
    call.name = text.substr(begin, name_end - begin);
    call.arguments = text.substr(json, *length);
    Emit(std::move(call), out);
    return EndAt(json + *length);
  }

  // All objects of the list are calls, or none is.
  bool EndList(size_t begin, OutputDelta* out) {
    in_json_ = true;
    const std::string_view list = std::string_view(held_).substr(begin);
    const std::optional<size_t> length = BracketLength(list);
    if (!length.has_value()) return false;
    std::vector<ToolCallDelta> calls;
    const size_t end = *length - 1;  // of the items
    for (size_t at = NextAt(list, 1); at < end;) {
      const std::optional<size_t> item =
          list[at] == '{' ? BracketLength(list.substr(at, end - at)) : std::optional<size_t>();
      std::optional<ToolCallDelta> call =
          item.has_value() ? ReadToolCall(list.substr(at, *item), false) : std::optional<ToolCallDelta>();
      if (!call.has_value()) return NoCall(out);
      calls.push_back(*std::move(call));
      at = NextAt(list, at + *item);
      if (at < end && list[at] != ',') return NoCall(out);
      at = NextAt(list, at + 1);
    }
    if (calls.empty()) return NoCall(out);
    for (ToolCallDelta& call : calls) Emit(std::move(call), out);
    return EndAt(begin + *length);
  }

  void Emit(ToolCallDelta call, OutputDelta* out) {
    const std::string id = make_id_();
    call.index = num_calls_++;
    call.id = id.size() > kIdBytes ? id.substr(id.size() - kIdBytes) : id;
    out->AddCall(std::move(call));
  }

  bool EndAt(size_t end) {
    held_.erase(0, end);
    start_.Behind();
    inside_ = in_json_ = false;
    return true;
  }

  // Goes on with the text behind the tag, in which there may be another tag.
  bool NoCall(OutputDelta* out) {
    start_.TakeBack("", out);
    inside_ = in_json_ = false;
    return true;
  }

  const MakeCallId make_id_;
  CallStart start_{kTag};
  std::string held_;      // not yet decided
  bool inside_ = false;   // held_ begins behind a tag
  bool in_json_ = false;  // and has the beginning of JSON
  size_t num_calls_ = 0;
};

}  // namespace

std::unique_ptr<OutputParser> MakeMistral(const CallableTools& tools) {
  return std::make_unique<Mistral>(tools.make_id);
}

bool IsMistral(std::string_view chat_template) { return chat_template.find(kTag) != std::string_view::npos; }

}  // namespace spl::router
