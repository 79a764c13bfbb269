// A compiled regular expression over valid UTF-8 text (PCRE2, just-in-time compiled if the platform allows it).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::text {

// Bytes [begin, end) of a text.
struct Span {
  size_t begin = 0;
  size_t end = 0;
};

// Immutable after Compile; any thread.
class Regex {
 public:
  // `pattern`: in Oniguruma's dialect. InvalidArgument names the construct that does not compile or is not supported,
  // and its place.
  static absl::StatusOr<Regex> Compile(std::string_view pattern);

  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  // Finds all matches from left to right, without overlap. As in the reference, an empty match does not count right at
  // the end of the match before it. REQUIRES: `text` is valid UTF-8. InvalidArgument: the pattern backtracks beyond the
  // match limit on this text.
  absl::Status FindAll(std::string_view text, std::vector<Span>* matches) const;

 private:
  struct Code;
  explicit Regex(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

}  // namespace spl::text
