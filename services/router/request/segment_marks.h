// Marks for the segments of a prompt while its text is put together. A mark stands for a segment, goes through the chat
// template with the text around it, and is taken out again before tokenizing. Each segment is therefore tokenized by
// itself, whatever stands beside it, and the template never sees its text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::router {

struct PromptSegment {
  std::string text;
  std::string namespace_name;  // empty: the request's own
  // Alternatives: a knowledge base of the caller instead of a namespace, and one of its documents instead of a text.
  // KnowledgeBases then fills in the text and the fields below.
  std::string knowledge_base = {};
  std::string document = {};
  std::string field = {};          // its place in the request, for messages
  std::string namespace_key = {};  // 32 bytes; empty: derived from the name
  bool frozen = false;             // its KV is evicted after that of other text
};

class SegmentMarks {
 public:
  // Returns the mark. It holds 128 random bits, so no text contains it by accident or on purpose.
  std::string Add(PromptSegment segment);

  size_t size() const { return segments_.size(); }
  bool empty() const { return segments_.empty(); }
  const PromptSegment& operator[](size_t i) const { return segments_[i]; }
  PromptSegment& operator[](size_t i) { return segments_[i]; }

  // The text between the marks of `rendered`: size() + 1 pieces, some perhaps empty. InvalidArgument: the template left
  // out a segment, repeated one, or changed their order.
  absl::StatusOr<std::vector<std::string_view>> Split(std::string_view rendered) const;

 private:
  std::string Mark(size_t index) const;

  std::string nonce_;  // drawn with the first segment
  std::vector<PromptSegment> segments_;
};

}  // namespace spl::router
