#include "services/router/output_formats/think_tags.h"

#include <utility>

namespace spl::router {
namespace {

class ThinkTags final : public OutputParser {
 public:
  ThinkTags(bool inside, std::unique_ptr<OutputParser> rest)
      : rest_(std::move(rest)), state_(inside ? State::kInside : State::kStart) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    if (state_ == State::kBehind) return FeedRest(text, out);
    held_ += text;
    if (state_ == State::kStart) LookForStart(out);
    if (state_ == State::kInside) Reason(out);
  }

  void Finish(OutputDelta* out) override {
    if (state_ == State::kInside) EmitReasoning(held_.size(), out);
    if (state_ == State::kStart) FeedRest(std::exchange(held_, {}), out);
    if (rest_ != nullptr) rest_->Finish(out);
  }

 private:
  enum class State { kStart, kInside, kBehind };

  // An answer that does not begin with the tag has no reasoning.
  void LookForStart(OutputDelta* out) {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return;
    const std::string_view text = std::string_view(held_).substr(begin);
    if (text.substr(0, kThinkStart.size()) == kThinkStart) {
      held_.erase(0, begin + kThinkStart.size());
      state_ = State::kInside;
    } else if (kThinkStart.substr(0, text.size()) != text) {
      state_ = State::kBehind;
      FeedRest(std::exchange(held_, {}), out);
    }
  }

  void Reason(OutputDelta* out) {
    const size_t end = held_.find(kThinkEnd);
    if (end == std::string::npos) return EmitReasoning(held_.size() - PartialTag(held_, kThinkEnd), out);
    std::string behind = held_.substr(end + kThinkEnd.size());
    held_.resize(end);
    EmitReasoning(end, out);
    held_.clear();
    state_ = State::kBehind;
    skips_space_ = true;
    FeedRest(behind, out);
  }

  // The first `num_bytes` of what is held, but for white space at the beginning and at the end, which waits for more.
  void EmitReasoning(size_t num_bytes, OutputDelta* out) {
    const std::string_view text = std::string_view(held_).substr(0, num_bytes);
    const size_t last = text.find_last_not_of(kWhiteSpace);
    if (last == std::string_view::npos) return;
    const size_t first = reasoned_ ? 0 : text.find_first_not_of(kWhiteSpace);
    out->reasoning += text.substr(first, last + 1 - first);
    reasoned_ = true;
    held_.erase(0, last + 1);
  }

  void FeedRest(std::string_view text, OutputDelta* out) {
    if (skips_space_) {
      const size_t begin = text.find_first_not_of(kWhiteSpace);
      if (begin == std::string_view::npos) return;
      text.remove_prefix(begin);
      skips_space_ = false;
    }
    if (rest_ == nullptr) {
      out->content += text;
    } else {
      rest_->Feed(text, out);
    }
  }

  const std::unique_ptr<OutputParser> rest_;
  State state_;
  bool reasoned_ = false;     // some reasoning was emitted
  bool skips_space_ = false;  // between the reasoning and the content
  std::string held_;          // not yet decided
};

}  // namespace

std::unique_ptr<OutputParser> MakeThinkTags(bool inside, std::unique_ptr<OutputParser> rest) {
  return std::make_unique<ThinkTags>(inside, std::move(rest));
}

}  // namespace spl::router
