// Finds where JSON, or a Python list, ends while it is still being written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace spl::router {

// Follows the brackets and strings of one value across pieces of text. A value ends behind the bracket that closes it,
// or in front of a tag: malformed text goes no further. Inside of a string nothing is a bracket or a tag. One thread.
class BracketScanner {
 public:
  // `quotes`: the characters that begin a string, each of which ends its own. `tags`: borrowed; none is empty.
  explicit BracketScanner(std::vector<std::string_view> tags = {}, std::string_view quotes = "\"")
      : tags_(std::move(tags)), quotes_(quotes) {}

  // The next text begins with the value's first bracket; with `depth` 1, behind it.
  void Start(int64_t depth = 0);
  // Returns how many bytes of `text` belong to the value. `text` goes on where the last result ended: bytes that could
  // become a tag are not counted and have to come again, with more behind them.
  size_t Scan(std::string_view text);
  bool ended() const { return ended_; }

 private:
  // True if a tag begins at `at`, or could with more text.
  bool AtTag(std::string_view text, size_t at);

  const std::vector<std::string_view> tags_;
  const std::string_view quotes_;
  int64_t depth_ = 0;
  char quote_ = 0;        // ends the string that was begun; 0: none was
  bool escaped_ = false;  // behind a backslash in a string
  bool ended_ = false;
};

}  // namespace spl::router
