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
    const size_t certain = held_.size() - PartialTag(held_, kEnd);
    if (inside_) {
      TakeCall(held_.substr(0, certain), held_.substr(certain), out);
    } else if (!behind_call_ || held_.find_first_not_of(kWhiteSpace) != std::string::npos) {
      out->content += held_;
    }
    held_.clear();
  }

 private:
  // Text up to the next call is content. White space in front of a call is not, so it waits for what follows. Returns
  // whether there is more to do.
  bool StartCall(OutputDelta* out) {
    if (behind_call_) {
      held_.erase(0, std::min(held_.find_first_not_of(kWhiteSpace), held_.size()));
      if (held_.empty()) return false;
    }
    const size_t start = held_.find(kStart);
    const bool found = start != std::string::npos;
    const size_t certain = found ? start : held_.size() - PartialTag(held_, kStart);
    const size_t num_content = std::string_view(held_).substr(0, certain).find_last_not_of(kWhiteSpace) + 1;  // npos: 0
    if (num_content > 0) behind_call_ = false;
    out->content += held_.substr(0, num_content);
    if (!found) {
      held_.erase(0, num_content);
      return false;
    }
    space_ = held_.substr(num_content, start - num_content);
    held_.erase(0, start + kStart.size());
    searched_ = 0;
    inside_ = true;
    return true;
  }

  bool EndCall(OutputDelta* out) {
    const size_t end = held_.find(kEnd, searched_);
    if (end == std::string::npos) {
      searched_ = held_.size() - std::min(held_.size(), kEnd.size() - 1);
      return false;
    }
    TakeCall(held_.substr(0, end), kEnd, out);
    held_.erase(0, end + kEnd.size());
    inside_ = false;
    return true;
  }

  // `text` is what stands behind the start tag; if it is no call, it is content with its tags.
  void TakeCall(const std::string& text, std::string_view end_tag, OutputDelta* out) {
    std::optional<ToolCallDelta> call = ReadToolCall(text, false);
    if (!call.has_value()) {
      out->content += space_;
      out->content += kStart;
      out->content += text;
      out->content += end_tag;
      behind_call_ = false;
      return;
    }
    call->index = num_calls_++;
    call->id = make_id_();
    out->tool_calls.push_back(*std::move(call));
    behind_call_ = true;
  }

  const MakeCallId make_id_;
  std::string held_;          // not yet decided
  std::string space_;         // in front of the call
  size_t searched_ = 0;       // bytes of held_ in which no end of a call begins
  bool inside_ = false;       // held_ begins behind a start tag
  bool behind_call_ = false;  // nothing but white space since the last call
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
