// Parses OpenAI-shaped request bodies into plain structs. Pure functions: text in, struct or InvalidArgument out; no
// sockets, no model. docs/api.md lists the accepted, ignored and refused fields.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/output_formats/forced_calls.h"
#include "services/router/output_formats/registry.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/request.h"

namespace spl::router {

struct StreamOptions {
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;  // every event has the usage so far (vLLM)
};

struct ApiRequest {
  GenerationRequest generation;      // its prompt is the first one
  std::vector<Prompt> more_prompts;  // the other prompts of a list
  StreamOptions stream;
  std::optional<ForcedCalls> forced_calls;  // the answer must be calls of these tools; unset: it may be
  bool framed = false;                      // the structured output is that of FrameAnswer
  std::optional<uint32_t> prompt_logprobs;  // alternatives of each entry of the answer's "prompt_logprobs"; unset: none
  std::string tools_json;                   // tools that a chat's model may call; empty: none
  // Paths of unknown members, which have no effect ("foo", "stream_options.bar").
  std::vector<std::string> ignored;
};

// POST /v1/chat/completions. `defaults`: values of sampling parameters that the body does not name.
absl::StatusOr<ApiRequest> ParseChatBody(std::string_view body, const Sampling& defaults = {});
// The same for a body that has been parsed.
absl::StatusOr<ApiRequest> ParseChat(const Json& json, const Sampling& defaults = {});

// Makes the calls that a chat forces the structured output of its answer, as the model writes calls. InvalidArgument:
// there is no such tool, or this format cannot be forced to call it.
absl::Status ForceCalls(const OutputFormat& format, const SpecialTokenId& special, ApiRequest& request);

// POST /v1/completions, likewise.
absl::StatusOr<ApiRequest> ParseCompletionBody(std::string_view body, const Sampling& defaults = {});

// POST /tokenize (vLLM's shapes): either "prompt" or "messages".
struct TokenizeRequest {
  std::string model;
  std::variant<std::string, ChatPrompt> prompt;
  bool add_special_tokens = true;
  bool return_token_strs = false;
  std::vector<std::string> ignored;  // as in ApiRequest
};
absl::StatusOr<TokenizeRequest> ParseTokenizeBody(std::string_view body);

// POST /detokenize
struct DetokenizeRequest {
  std::string model;
  std::vector<TokenId> tokens;
  std::vector<std::string> ignored;  // as in ApiRequest
};
absl::StatusOr<DetokenizeRequest> ParseDetokenizeBody(std::string_view body);

}  // namespace spl::router
