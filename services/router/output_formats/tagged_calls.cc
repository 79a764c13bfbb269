#include "services/router/output_formats/tagged_calls.h"

#include <algorithm>
#include <utility>

namespace spl::router {
namespace {

class TaggedCalls final : public OutputParser {
 public:
  TaggedCalls(ReadCall read, MakeCallId make_id, bool tags_inside)
      : read_(std::move(read)), make_id_(std::move(make_id)), tags_inside_(tags_inside) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (inside_ ? EndCall(out) : StartCall(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (!inside_) return start_.Finish(&held_, out);
    const size_t certain = held_.size() - PartialTag(held_, kCallEnd);
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
    const size_t end = held_.find(kCallEnd, searched_);
    if (end == std::string::npos) {
      searched_ = held_.size() - std::min(held_.size(), kCallEnd.size() - 1);
      return false;
    }
    if (tags_inside_ && !read_(std::string_view(held_).substr(0, end)).has_value()) {
      searched_ = end + kCallEnd.size();
      return true;
    }
    TakeCall(held_.substr(0, end), std::string(kCallEnd), out);
    held_.erase(0, end + kCallEnd.size());
    inside_ = false;
    return true;
  }

  // `text` is what stands behind the start tag; if it is no call, it is content with its tags.
  void TakeCall(const std::string& text, const std::string& end_tag, OutputDelta* out) {
    std::optional<ToolCallDelta> call = read_(text);
    if (!call.has_value()) return start_.TakeBack(text + end_tag, out);
    call->index = num_calls_++;
    call->id = make_id_();
    out->AddCall(*std::move(call));
    start_.Behind();
  }

  const ReadCall read_;
  const MakeCallId make_id_;
  const bool tags_inside_;
  CallStart start_{kCallStart};
  std::string held_;     // not yet decided
  size_t searched_ = 0;  // bytes of held_ in which no end of a call begins
  bool inside_ = false;  // held_ begins behind a start tag
  size_t num_calls_ = 0;
};

}  // namespace

std::unique_ptr<OutputParser> MakeTaggedCalls(ReadCall read, MakeCallId make_id, bool tags_inside) {
  return std::make_unique<TaggedCalls>(std::move(read), std::move(make_id), tags_inside);
}

}  // namespace spl::router
