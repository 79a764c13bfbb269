#include "services/router/http/messages_door.h"

#include <memory>
#include <utility>

#include "services/base/status.h"
#include "services/router/request/messages_request.h"
#include "services/router/request/messages_response.h"

namespace spl::router {

absl::StatusOr<GenerationCall> ReadMessagesCall(const std::string& body, const std::string& request_id,
                                                const ServedModel& model) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  SPLICE_ASSIGN_OR_RETURN(TranslatedRequest translated, TranslateMessages(json));
  SPLICE_ASSIGN_OR_RETURN(ApiRequest parsed, ParseTranslated(translated, "messages", model.default_sampling()));
  const auto make_formatter = [&model, request_id](const ApiRequest&, AnswerFormat format) {
    format.call_id = "toolu_";
    return std::make_unique<MessagesFormatter>(model.tokenizer(),
                                               MessagesFormatter::Head{.id = "msg_" + request_id,
                                                                       .model = model.name(),
                                                                       .request_id = request_id,
                                                                       .answer_format = std::move(format)});
  };
  return GenerationCall{
      .request = std::move(parsed), .names = std::move(translated.names), .make_formatter = make_formatter};
}

}  // namespace spl::router
