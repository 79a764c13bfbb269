// Request bodies of every HTTP endpoint: any bytes give a struct or InvalidArgument, and formatting the error back
// gives JSON.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "services/router/request/api_error.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/messages_request.h"
#include "services/router/request/openai_request.h"
#include "services/router/request/responses_request.h"

namespace {

template <typename Result>
void Check(const Result& result) {
  if (result.ok()) return;
  if (result.status().code() != absl::StatusCode::kInvalidArgument) std::abort();
  if (!spl::ParseJson(spl::router::ErrorBody(result.status(), 400)).ok()) std::abort();
}

// The chats of other APIs' bodies are chats, or say what is wrong with them.
void CheckTranslations(std::string_view body) {
  const auto json = spl::ParseJson(body);
  if (!json.ok()) return;
  const auto messages = spl::router::TranslateMessages(*json);
  Check(messages);
  if (messages.ok()) Check(spl::router::ParseTranslated(*messages, "messages", {}));
  const spl::router::EarlierResponses none{
      .conversation = [](const std::string&) { return absl::InvalidArgumentError("nothing is kept"); },
      .item = [](const std::string&) { return absl::InvalidArgumentError("nothing is kept"); }};
  const auto responses = spl::router::TranslateResponses(*json, none);
  Check(responses);
  if (responses.ok()) Check(spl::router::ParseTranslated(responses->translated, "responses", {}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  const auto chat = spl::router::ParseChatBody(body);
  Check(chat);
  if (chat.ok() && !spl::router::ValidateRequest(chat->generation).ok()) std::abort();
  const auto completion = spl::router::ParseCompletionBody(body);
  Check(completion);
  if (completion.ok() && !spl::router::ValidateRequest(completion->generation).ok()) std::abort();
  Check(spl::router::ParseTokenizeBody(body));
  Check(spl::router::ParseDetokenizeBody(body));
  CheckTranslations(body);
  return 0;
}
