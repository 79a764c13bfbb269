#include <algorithm>
#include <utility>

#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

// The match that ends first counts; the longest one of several that end together. This is as if the text had come byte
// by byte, so that the result does not depend on how it was cut into pieces.
StopMatcher::Result StopMatcher::Append(std::string_view piece) {
  Result result;
  if (stopped_) return result;
  pending_ += piece;
  size_t best_end = std::string::npos;
  for (size_t i = 0; i < stops_.size(); ++i) {
    if (stops_[i].empty()) continue;
    const size_t begin = pending_.find(stops_[i]);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stops_[i].size();
    if (end > best_end || (end == best_end && stops_[i].size() <= stops_[result.stop_idx].size())) continue;
    best_end = end;
    result.stop_idx = static_cast<int>(i);
    result.text = pending_.substr(0, begin);
  }
  if (result.stop_idx >= 0) {
    result.stopped = stopped_ = true;
    pending_.clear();
    return result;
  }
  size_t held = 0;  // bytes at the end that a stop string may start with
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.empty() ? 0 : stop.size() - 1, pending_.size()); n > held; --n) {
      if (pending_.compare(pending_.size() - n, n, stop, 0, n) == 0) held = n;
    }
  }
  result.text = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, pending_.size() - held);
  return result;
}

std::string StopMatcher::Finish() { return std::exchange(pending_, std::string()); }

}  // namespace spl::tokenizer
