#include "services/router/output_formats/llama3_json.h"

#include <algorithm>
#include <utility>

#include "services/router/output_formats/tool_call_json.h"

namespace spl::router {
namespace {

constexpr std::string_view kTag = "<|python_tag|>";

class Llama3Json final : public OutputParser {
 public:
  explicit Llama3Json(MakeCallId make_id) : make_id_(std::move(make_id)) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    if (is_content_) {
      out->content += text;
      return;
    }
    held_ += text;
    // An object can only end where a brace was fed.
    if (in_object_ && text.find('}') == std::string_view::npos) return;
    while (TakeCall(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    const bool nothing = num_calls_ > 0 && held_.find_first_not_of(kWhiteSpace) == std::string::npos;
    if (!nothing) out->content += held_;
    held_.clear();
  }

 private:
  // Returns whether there may be another call behind.
  bool TakeCall(OutputDelta* out) {
    const size_t begin = Begin();
    if (begin == std::string::npos) return false;
    in_object_ = held_[begin] == '{';
    if (!in_object_) return BecomeContent(out);
    const std::string_view object = std::string_view(held_).substr(begin);
    const std::optional<size_t> length = BracketLength(object);
    if (!length.has_value()) return false;
    std::optional<ToolCallDelta> call = ReadToolCall(object.substr(0, *length), true);
    if (!call.has_value()) return BecomeContent(out);
    call->index = num_calls_++;
    call->id = make_id_();
    out->AddCall(*std::move(call));
    held_.erase(0, begin + *length);
    in_object_ = false;
    return true;
  }

  // Where the next object should begin, behind white space, a tag, or a semicolon; npos: that is not known yet.
  size_t Begin() const {
    size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return begin;
    const std::string_view text = std::string_view(held_).substr(begin);
    if (num_calls_ == 0) {
      if (text.size() < kTag.size() && kTag.substr(0, text.size()) == text) return std::string::npos;
      if (text.substr(0, kTag.size()) != kTag) return begin;
      return held_.find_first_not_of(kWhiteSpace, begin + kTag.size());
    }
    if (text.front() != ';') return begin;
    return held_.find_first_not_of(kWhiteSpace, begin + 1);
  }

  bool BecomeContent(OutputDelta* out) {
    // White space behind a call belongs to it.
    if (num_calls_ > 0) held_.erase(0, std::min(held_.find_first_not_of(kWhiteSpace), held_.size()));
    out->content += std::exchange(held_, {});
    is_content_ = true;
    return false;
  }

  const MakeCallId make_id_;
  std::string held_;         // not yet decided
  bool in_object_ = false;   // held_ has the beginning of an object
  bool is_content_ = false;  // all that follows is
  size_t num_calls_ = 0;
};

}  // namespace

std::unique_ptr<OutputParser> MakeLlama3Json(const CallableTools& tools) {
  return std::make_unique<Llama3Json>(tools.make_id);
}

absl::StatusOr<GrammarPart> Llama3JsonGrammar(const ForcedTools& tools) {
  std::vector<CallFrame> calls;
  for (const ForcedTool& tool : tools.tools) {
    calls.push_back({LiteralPart("{\"name\": \"" + tool.name + "\", \"parameters\": "), JsonPart(tool.parameters),
                     LiteralPart("}")});
  }
  return SeparatedPart(std::move(calls), "; ", tools.one);
}

bool IsLlama3Json(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has("<|start_header_id|>") && has("\"parameters\"") && has("tools");
}

}  // namespace spl::router
