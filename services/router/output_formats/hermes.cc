#include "services/router/output_formats/hermes.h"

#include <algorithm>
#include <utility>

#include "services/router/output_formats/tool_call_json.h"

namespace spl::router {
namespace {

constexpr std::string_view kStart = "<tool_call>", kEnd = "</tool_call>";

class Hermes final : public OutputParser {
 public:
  explicit Hermes(MakeCallId make_id) : make_id_(std::move(make_id)) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (inside_ ? EndCall(out) : StartCall(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (!inside_) return start_.Finish(&held_, out);
    const size_t certain = held_.size() - PartialTag(held_, kEnd);
    TakeCall(held_.substr(0, certain), held_.substr(certain), out);
    held_.clear();
  }

 private:
  // These two return whether there is more to do.
  bool StartCall(OutputDelta* out) {
    inside_ = start_.Find(&held_, out);
    searched_ = 0;
    return inside_;
  }

  bool EndCall(OutputDelta* out) {
    const size_t end = held_.find(kEnd, searched_);
    if (end == std::string::npos) {
      searched_ = held_.size() - std::min(held_.size(), kEnd.size() - 1);
      return false;
    }
    TakeCall(held_.substr(0, end), std::string(kEnd), out);
    held_.erase(0, end + kEnd.size());
    inside_ = false;
    return true;
  }

  // `text` is what stands behind the start tag; if it is no call, it is content with its tags.
  void TakeCall(const std::string& text, const std::string& end_tag, OutputDelta* out) {
    std::optional<ToolCallDelta> call = ReadToolCall(text, false);
    if (!call.has_value()) return start_.TakeBack(text + end_tag, out);
    call->index = num_calls_++;
    call->id = make_id_();
    out->tool_calls.push_back(*std::move(call));
    start_.Behind();
  }

  const MakeCallId make_id_;
  CallStart start_{kStart};
  std::string held_;     // not yet decided
  size_t searched_ = 0;  // bytes of held_ in which no end of a call begins
  bool inside_ = false;  // held_ begins behind a start tag
  size_t num_calls_ = 0;
};

}  // namespace

std::unique_ptr<OutputParser> MakeHermes(MakeCallId make_id) { return std::make_unique<Hermes>(std::move(make_id)); }

// Qwen3-Coder and GLM-4.5 have the tag, too, around something else.
bool IsHermes(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kStart) && has("\"arguments\"") && !has("<function=") && !has("<arg_key>");
}

}  // namespace spl::router
