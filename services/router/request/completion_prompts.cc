#include "services/router/request/completion_prompts.h"

#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/content_parts.h"

namespace spl::router {
namespace {

absl::StatusOr<std::vector<TokenId>> ReadIds(const Json& value, const std::string& field) {
  if (value.empty()) return ParamError(field, "must not be empty");
  SPLICE_ASSIGN_OR_RETURN(const std::vector<uint32_t> ids, (BasicJsonField<Json>{&value, field}).TokenIds());
  return std::vector<TokenId>(ids.begin(), ids.end());
}

absl::StatusOr<std::vector<Prompt>> ReadList(const Json& list) {
  if (list.size() > kMaxPrompts) {
    return ParamError("prompt", "holds {} prompts; at most {} are served in one request", list.size(), kMaxPrompts);
  }
  std::vector<Prompt> prompts;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string field = list.size() == 1 ? "prompt" : fmt::format("prompt[{}]", i);
    if (list[i].is_string()) {
      prompts.emplace_back(list[i].get<std::string>());
    } else if (list[i].is_array()) {
      SPLICE_ASSIGN_OR_RETURN(std::vector<TokenId> ids, ReadIds(list[i], field));
      prompts.emplace_back(std::move(ids));
    } else {
      return ParamError(field, "must be a string or a list of token ids, got {}", DescribeJson(list[i]));
    }
  }
  return prompts;
}

absl::StatusOr<std::vector<Prompt>> ReadAny(const Json& prompt) {
  if (prompt.is_string()) return std::vector<Prompt>{prompt.get<std::string>()};
  if (!prompt.is_array()) {
    return ParamError("prompt", "must be a string, a list of token ids or a list of parts, got {}",
                      DescribeJson(prompt));
  }
  if (prompt.empty()) return ParamError("prompt", "must not be empty");
  const Json& first = prompt.front();
  if (first.is_string() || first.is_array()) return ReadList(prompt);
  if (!first.is_object()) {
    SPLICE_ASSIGN_OR_RETURN(std::vector<TokenId> ids, ReadIds(prompt, "prompt"));
    return std::vector<Prompt>{std::move(ids)};
  }
  SegmentedText text;
  SPLICE_ASSIGN_OR_RETURN(text.text, ReadContentParts(prompt, "prompt", &text.segments));
  return std::vector<Prompt>{std::move(text)};
}

}  // namespace

absl::StatusOr<std::vector<Prompt>> ReadPrompts(const Json* prompt, std::vector<TokenSegment> token_segments) {
  if (prompt == nullptr) return ParamError("prompt", "is required");
  SPLICE_ASSIGN_OR_RETURN(std::vector<Prompt> prompts, ReadAny(*prompt));
  if (token_segments.empty()) return prompts;
  auto* const ids = std::get_if<std::vector<TokenId>>(&prompts.front());
  if (prompts.size() > 1 || ids == nullptr) {
    return ParamError("splice.segments", "is for one prompt of token ids; mark text with parts of type \"segment\"");
  }
  prompts.front() = TokenizedPrompt{std::move(*ids), std::move(token_segments)};
  return prompts;
}

}  // namespace spl::router
