#include "services/router/request/translated_request.h"

#include <utility>

namespace spl::router {

absl::StatusOr<ApiRequest> ParseTranslated(const TranslatedRequest& request, const char* api,
                                           const Sampling& defaults) {
  absl::StatusOr<ApiRequest> parsed = ParseChat(request.chat, defaults);
  if (!parsed.ok()) return request.names.In(parsed.status());
  parsed->generation.api = api;
  Sampling& sampling = parsed->generation.sampling;
  sampling.structured_field = request.names.Of(sampling.structured_field);
  for (std::string& name : parsed->ignored) name = request.names.Of(name);
  parsed->ignored.insert(parsed->ignored.begin(), request.ignored.begin(), request.ignored.end());
  return parsed;
}

void CopySharedMembers(ObjectReader& reader, Json* chat) {
  for (const char* name : {"model", "stream", "temperature", "top_p", "top_k", "splice", "priority",
                           "chat_template_kwargs", "seed", "min_p", "min_tokens", "repetition_penalty",
                           "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "stop_token_ids"}) {
    if (const Json* const value = reader.Raw(name); value != nullptr) (*chat)[name] = *value;
  }
}

void SetTemplateVariable(Json* chat, const char* name, Json value) {
  Json& variables = (*chat)["chat_template_kwargs"];
  if (variables.is_null()) variables = Json::object();
  if (variables.is_object() && !variables.contains(name)) variables[name] = std::move(value);
}

Json ChatMessageJson(const char* role, Json content) {
  Json message = Json::object();
  message["role"] = role;
  message["content"] = std::move(content);
  return message;
}

Json ChatCallJson(const std::string& id, const std::string& name, Json arguments) {
  Json function = Json::object();
  function["name"] = name;
  function["arguments"] = std::move(arguments);
  Json call = Json::object();
  call["id"] = id;
  call["type"] = "function";
  call["function"] = std::move(function);
  return call;
}

}  // namespace spl::router
