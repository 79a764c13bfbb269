// OpenAI-shaped request bodies → plain structs. Pure: text in, struct or InvalidArgument out; no sockets, no model.
// The lists of accepted, ignored and refused fields are in docs/api.md.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/request/request.h"

namespace spl::router {

struct StreamOptions {
  bool stream = false;
  bool include_usage = false;
};

struct ApiRequest {
  GenerationRequest generation;
  StreamOptions stream;
};

// POST /v1/chat/completions. `defaults`: values of the sampling parameters that the body does not name.
absl::StatusOr<ApiRequest> ParseChatBody(std::string_view body, const Sampling& defaults = {});

// POST /v1/completions, likewise. A list of several prompts is refused; a list with one is taken.
absl::StatusOr<ApiRequest> ParseCompletionBody(std::string_view body, const Sampling& defaults = {});

// POST /tokenize (vLLM's shapes): either "prompt" or "messages".
struct TokenizeRequest {
  std::string model;
  std::variant<std::string, ChatPrompt> prompt;
  bool add_special_tokens = true;
  bool return_token_strs = false;
};
absl::StatusOr<TokenizeRequest> ParseTokenizeBody(std::string_view body);

// POST /detokenize
struct DetokenizeRequest {
  std::string model;
  std::vector<TokenId> tokens;
};
absl::StatusOr<DetokenizeRequest> ParseDetokenizeBody(std::string_view body);

}  // namespace spl::router
