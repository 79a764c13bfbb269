// Reasoning between <think> and </think>, in front of the answer: Qwen3, QwQ, DeepSeek-R1, GLM-4.5 and others.
#pragma once

#include <memory>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

inline constexpr std::string_view kThinkStart = "<think>", kThinkEnd = "</think>";

// `inside`: the prompt ends with <think>, so that the answer begins with reasoning. `rest` parses what is behind the
// reasoning; null: it is content. White space at the ends of the reasoning, and in front of the content, is dropped.
std::unique_ptr<OutputParser> MakeThinkTags(bool inside, std::unique_ptr<OutputParser> rest);

}  // namespace spl::router
