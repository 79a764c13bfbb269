// Bounds on one rendering, far above what real templates and prompts need, so that a template cannot exhaust the
// process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl::tokenizer::jinja {

inline constexpr size_t kTextBytesMax = 64 << 20;  // of one text
inline constexpr size_t kListItemsMax = 1 << 20;   // of one list
inline constexpr int64_t kRangeMax = 100'000;      // Jinja's sandbox has the same
// Expressions evaluated, items read or made, and 1 for each kTextBytesPerStep of text read or made: thousands of
// messages, or megabytes of them. What an operation reads is charged before it runs (cost.h), what it made afterwards.
inline constexpr int64_t kStepsMax = 1'000'000;
inline constexpr size_t kTextBytesPerStep = 64;
inline constexpr int kCallDepthMax = 300;  // of the evaluation: expressions, tags and macros inside each other

}  // namespace spl::tokenizer::jinja
