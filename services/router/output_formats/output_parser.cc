#include "services/router/output_formats/output_parser.h"

#include <algorithm>

namespace spl::router {

size_t PartialTag(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n) {
    if (text.substr(text.size() - n) == tag.substr(0, n)) return n;
  }
  return 0;
}

size_t SkipSpace(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(kWhiteSpace, at), text.size());
}

bool CallStart::Find(std::string* held, OutputDelta* out) {
  if (behind_call_) {
    held->erase(0, SkipSpace(*held, 0));
    if (held->empty()) return false;
  }
  const size_t start = held->find(tag_);
  const bool found = start != std::string::npos;
  const size_t certain = found ? start : held->size() - PartialTag(*held, tag_);
  const size_t num_content = std::string_view(*held).substr(0, certain).find_last_not_of(kWhiteSpace) + 1;  // npos: 0
  if (num_content > 0) behind_call_ = false;
  out->content += held->substr(0, num_content);
  if (found) space_ = held->substr(num_content, start - num_content);
  held->erase(0, found ? start + tag_.size() : num_content);
  return found;
}

void CallStart::TakeBack(std::string_view text, OutputDelta* out) {
  out->content += space_;
  out->content += tag_;
  out->content += text;
  behind_call_ = false;
}

void CallStart::Finish(std::string* held, OutputDelta* out) {
  if (!behind_call_ || held->find_first_not_of(kWhiteSpace) != std::string::npos) out->content += *held;
  held->clear();
}

}  // namespace spl::router
