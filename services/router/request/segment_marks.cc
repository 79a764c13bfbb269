#include "services/router/request/segment_marks.h"

#include <fmt/format.h>

#include <random>
#include <utility>

#include "services/base/status.h"

namespace spl::router {

std::string SegmentMarks::Mark(size_t index) const {
  return fmt::format("\uE000splice-segment-{}-{}\uE001", nonce_, index);  // private-use characters: nothing trims them
}

std::string SegmentMarks::Add(PromptSegment segment) {
  if (nonce_.empty()) {
    std::random_device random;
    for (int i = 0; i < 4; ++i) nonce_ += fmt::format("{:08x}", random());
  }
  segments_.push_back(std::move(segment));
  return Mark(segments_.size() - 1);
}

absl::StatusOr<std::vector<std::string_view>> SegmentMarks::Split(std::string_view rendered) const {
  std::vector<std::string_view> pieces;
  size_t begin = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const std::string mark = Mark(i);
    const size_t at = rendered.find(mark, begin);
    if (at == std::string_view::npos) {
      return InvalidArgument("the chat template leaves segment {} out or changes the order of the segments", i);
    }
    pieces.push_back(rendered.substr(begin, at - begin));
    begin = at + mark.size();
  }
  pieces.push_back(rendered.substr(begin));
  for (const std::string_view piece : pieces) {
    if (!nonce_.empty() && piece.find(nonce_) != std::string_view::npos)
      return InvalidArgument("the chat template repeats or changes a segment");
  }
  return pieces;
}

}  // namespace spl::router
