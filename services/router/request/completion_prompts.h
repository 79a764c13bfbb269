// Reads the prompts of a body of /v1/completions.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/request.h"

namespace spl::router {

// Upper bounds for one request: prompts, and continuations of all prompts together.
inline constexpr size_t kMaxPrompts = 128;
inline constexpr size_t kMaxPromptContinuations = 1024;

// Reads "prompt": a string, a list of token ids, a list of content parts, or several prompts as a list of strings and
// lists of token ids. `token_segments` belong to a single prompt of token ids. InvalidArgument names the field.
absl::StatusOr<std::vector<Prompt>> ReadPrompts(const Json* prompt, std::vector<TokenSegment> token_segments);

}  // namespace spl::router
