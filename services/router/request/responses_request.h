// Translates bodies of OpenAI's POST /v1/responses into chats.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "services/router/request/translated_request.h"

namespace spl::router {

// The conversation up to and with a response.
struct EarlierConversation {
  Json items;
  std::string session;  // its name as a conversation of the workers (GenerationRequest::session)
};

struct ResponsesRequest {
  TranslatedRequest translated;
  Json items = Json::array();  // the whole conversation: earlier responses, then the input
  std::string session;         // the earlier conversation's name; empty: there is none
  Json echo = Json::object();  // members of the response that repeat the request
  bool store = true;
};

// Looks up earlier responses. Both return NotFound for an id that is not kept.
struct EarlierResponses {
  std::function<absl::StatusOr<EarlierConversation>(const std::string& response_id)> conversation;
  // One item, by its own id.
  std::function<absl::StatusOr<Json>(const std::string& item_id)> item;
};

// InvalidArgument names the client's field; NotFound: previous_response_id, or the item of a reference.
// docs/api.md lists the accepted, ignored and refused fields.
//
//   instructions       the first message, of role system; those of earlier responses are not repeated
//   input              a message of the user, or items (response_items.h)
//   tools, tool_choice the flat form of functions
//   text.format        response_format
//   reasoning.effort   reasoning_effort
//   max_output_tokens  max_tokens
absl::StatusOr<ResponsesRequest> TranslateResponses(const Json& body, const EarlierResponses& earlier);

}  // namespace spl::router
