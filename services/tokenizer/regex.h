// A compiled regular expression over valid UTF-8 text (PCRE2, just-in-time compiled where the platform allows).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::tokenizer {

// Bytes [begin, end) of a text.
struct Span {
  size_t begin = 0;
  size_t end = 0;
};

// Immutable after Compile; may be used from any thread at once.
class Regex {
 public:
  // `pattern` is in Oniguruma's dialect. InvalidArgument says what does not compile or is not supported, and where.
  static absl::StatusOr<Regex> Compile(std::string_view pattern);

  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  // Every match from left to right, not overlapping, as the reference enumerates them: an empty match is not accepted
  // right where the match before it ended. REQUIRES: `text` is valid UTF-8. InvalidArgument: the pattern backtracks
  // beyond the match limit on this text.
  absl::Status FindAll(std::string_view text, std::vector<Span>* matches) const;

 private:
  struct Code;
  explicit Regex(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

}  // namespace spl::tokenizer
