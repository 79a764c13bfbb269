// Documents in the results of tools: by a rule of the operator they become segments, so that their KV is found again in
// other conversations and behind other results.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/request/segment_marks.h"
#include "services/tokenizer/chat_template.h"

namespace spl::router {

// Shorter ones stay text: KV is kept for 64 tokens at least.
inline constexpr size_t kMinToolDocumentBytes = 256;
inline constexpr size_t kMaxToolDocuments = 1024;  // per request; further ones stay text

struct ToolDocumentRule {
  enum class Kind { kNone, kWhole, kBetween, kJson };
  Kind kind = Kind::kNone;
  std::string text = {};  // kBetween: what separates them. kJson: the list's place, as a JSON pointer of members
};

// Reads "none", "whole", "between:TEXT" (with \n for a line end), "json" or "json:/MEMBER/…". InvalidArgument names the
// flag.
absl::StatusOr<ToolDocumentRule> ParseToolDocumentRule(std::string_view flag);

// Bytes [begin, end) of a result.
struct DocumentRange {
  size_t begin = 0, end = 0;
  bool operator==(const DocumentRange&) const = default;
};

// The documents in a tool's result, of kMinToolDocumentBytes at least, ascending and disjoint. A result that is no
// JSON, or has no list at the place, has none by kJson. Cost: linear in the result.
std::vector<DocumentRange> DocumentsIn(const ToolDocumentRule& rule, std::string_view result);

// The messages with marks for the documents in those of the role tool.
struct MarkedMessages {
  std::vector<tokenizer::ChatMessage> messages;
  SegmentMarks segments;  // in the request's own namespace
};
MarkedMessages MarkToolDocuments(const ToolDocumentRule& rule, std::vector<tokenizer::ChatMessage> messages);

}  // namespace spl::router
