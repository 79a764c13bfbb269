#define PCRE2_CODE_UNIT_WIDTH 8
#include "services/text/regex.h"

#include <pcre2.h>

#include <utility>

#include "services/base/status.h"
#include "services/text/regex_dialect.h"
#include "services/text/utf8.h"

namespace spl::text {
namespace {

// Patterns of real tokenizers stay far below this limit. A pattern that backtracks without bound ends within a second.
constexpr uint32_t kMatchLimit = 5'000'000;
constexpr size_t kPatternBytesMax = 1 << 16;

struct MatchDataDeleter {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
using MatchData = std::unique_ptr<pcre2_match_data, MatchDataDeleter>;

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

PCRE2_SPTR Units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data() ? text.data() : ""); }

}  // namespace

struct Regex::Code {
  std::string source;
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;

  ~Code() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }

  int Match(std::string_view text, size_t start, pcre2_match_data* data) const {
    const int rc = pcre2_match(code, Units(text), text.size(), start, PCRE2_NO_UTF_CHECK, data, context);
    if (rc != PCRE2_ERROR_JIT_STACKLIMIT) return rc;
    // The interpreter keeps its frames on the heap and needs no deep stack.
    return pcre2_match(code, Units(text), text.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data, context);
  }
};

Regex::Regex(std::unique_ptr<Code> code) : code_(std::move(code)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

absl::StatusOr<Regex> Regex::Compile(std::string_view pattern) {
  if (pattern.size() > kPatternBytesMax) {
    return InvalidArgument("the pattern has {} bytes, more than {}", pattern.size(), kPatternBytesMax);
  }
  SPLICE_ASSIGN_OR_RETURN(const std::string translated, OnigurumaToPcre2(pattern));
  auto code = std::make_unique<Code>();
  code->source = std::string(pattern);
  pcre2_compile_context* compile_context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(compile_context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code->code = pcre2_compile(Units(translated), translated.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error,
                             &offset, compile_context);
  pcre2_compile_context_free(compile_context);
  if (code->code == nullptr) {
    return InvalidArgument("the pattern \"{}\" does not compile: {} (offset {} of \"{}\")", pattern, ErrorText(error),
                           offset, translated);
  }
  // Without a just-in-time compiler, pcre2_match interprets the pattern: slower, with the same matches.
  pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);
  code->context = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(code->context, kMatchLimit);
  return Regex(std::move(code));
}

absl::Status Regex::FindAll(std::string_view text, std::vector<Span>* matches) const {
  const MatchData data(pcre2_match_data_create_from_pattern(code_->code, nullptr));
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data.get());
  size_t start = 0;
  bool has_last = false;
  size_t last_end = 0;
  while (start <= text.size()) {
    const int rc = code_->Match(text, start, data.get());
    if (rc == PCRE2_ERROR_NOMATCH) return absl::OkStatus();
    if (rc < 0) return InvalidArgument("the pattern \"{}\" fails on this text: {}", code_->source, ErrorText(rc));
    const Span match{offsets[0], offsets[1]};
    if (match.end < match.begin || match.end < start) {  // only \K in a lookaround does this
      return InvalidArgument("the pattern \"{}\" gives a match that runs backwards", code_->source);
    }
    if (match.begin == match.end && has_last && last_end == match.end) {
      start = match.end + (match.end < text.size() ? DecodeUtf8(text, match.end).num_bytes : 1);
      continue;
    }
    matches->push_back(match);
    start = last_end = match.end;
    has_last = true;
  }
  return absl::OkStatus();
}

}  // namespace spl::text
