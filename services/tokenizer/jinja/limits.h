// Bounds on one rendering, so that a template cannot exhaust the process. They are far above the needs of real
// templates and prompts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl::tokenizer::jinja {

inline constexpr size_t kTextBytesMax = 64 << 20;  // bytes of one text
inline constexpr size_t kListItemsMax = 1 << 20;   // items of one list
inline constexpr int64_t kRangeMax = 100'000;      // as in Jinja's sandbox
// Steps: expressions evaluated, items read or made, and one for each kTextBytesPerStep of text read or made. Enough for
// thousands of messages, or megabytes of them. Reads are charged before an operation runs (cost.h), results afterwards.
inline constexpr int64_t kStepsMax = 1'000'000;
inline constexpr size_t kTextBytesPerStep = 64;
inline constexpr int kCallDepthMax = 300;  // nested expressions, tags and macros in evaluation

}  // namespace spl::tokenizer::jinja
