// Requests of other APIs as chats: the parts that their translations share.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/request/field_names.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/openai_request.h"

namespace spl::router {

// A request as the body of POST /v1/chat/completions.
struct TranslatedRequest {
  Json chat = Json::object();
  FieldNames names;                  // the client's names of the chat's fields
  std::vector<std::string> ignored;  // as in ApiRequest, in the client's names
};

// Reads the chat. Errors and ignored fields have the client's names. `api`: see GenerationRequest.
absl::StatusOr<ApiRequest> ParseTranslated(const TranslatedRequest& request, const char* api, const Sampling& defaults);

// Copies the members that all APIs have under the chat's name: model, stream, temperature, top_p, top_k, and Splice's
// further ones (splice, priority, chat_template_kwargs, seed, min_p, min_tokens, penalties, logit_bias, ignore_eos,
// stop_token_ids).
void CopySharedMembers(ObjectReader& reader, Json* chat);

// Sets a member of chat_template_kwargs, unless the request has it itself.
void SetTemplateVariable(Json* chat, const char* name, Json value);

// A message of a conversation: {"role","content"}.
Json ChatMessageJson(const char* role, Json content);
// A call of an answer: {"id","type":"function","function":{"name","arguments"}}.
Json ChatCallJson(const std::string& id, const std::string& name, Json arguments);

}  // namespace spl::router
