#include "services/router/output_formats/bracket_scanner.h"

namespace spl::router {

void BracketScanner::Start(int64_t depth) {
  depth_ = depth;
  quote_ = 0;
  escaped_ = ended_ = false;
}

bool BracketScanner::AtTag(std::string_view text, size_t at) {
  for (const std::string_view tag : tags_) {
    const std::string_view here = text.substr(at, tag.size());
    if (here != tag.substr(0, here.size())) continue;
    ended_ = here.size() == tag.size();
    return true;
  }
  return false;
}

size_t BracketScanner::Scan(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (ended_) return i;
    const char c = text[i];
    if (quote_ != 0) {
      if (!escaped_ && c == quote_) quote_ = 0;
      escaped_ = !escaped_ && c == '\\';
    } else if (quotes_.find(c) != std::string_view::npos) {
      quote_ = c;
    } else if (c == '{' || c == '[' || c == '(') {
      ++depth_;
    } else if (c == '}' || c == ']' || c == ')') {
      ended_ = --depth_ <= 0;
    } else if (AtTag(text, i)) {
      return i;
    }
  }
  return text.size();
}

}  // namespace spl::router
