#include "services/router/http/openai_door.h"

#include <memory>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/router/http/request_fields.h"
#include "services/router/request/echo_text.h"
#include "services/router/request/openai_response.h"

namespace spl::router {
namespace {

std::vector<std::string> EchoTexts(const ServedModel& model, const ApiRequest& parsed) {
  std::vector<std::string> texts = {EchoText(model, parsed.generation, parsed.generation.prompt)};
  for (const Prompt& prompt : parsed.more_prompts) texts.push_back(EchoText(model, parsed.generation, prompt));
  return texts;
}

}  // namespace

absl::StatusOr<GenerationCall> ReadOpenAiCall(const std::string& body, const std::string& request_id,
                                              const ServedModel& model, bool chat) {
  const Sampling& defaults = model.default_sampling();
  SPLICE_ASSIGN_OR_RETURN(ApiRequest parsed,
                          chat ? ParseChatBody(body, defaults) : ParseCompletionBody(body, defaults));
  const auto make_formatter = [&model, chat, id = (chat ? "chatcmpl-" : "cmpl-") + request_id](
                                  const ApiRequest& request, AnswerFormat format) {
    OpenAiFormatter::Head head{.chat = chat,
                               .id = id,
                               .created = UnixSeconds(),
                               .model = model.name(),
                               .logprobs = request.generation.sampling.logprobs,
                               .prompt_logprobs = request.prompt_logprobs,
                               .include_usage = request.stream.include_usage,
                               .continuous_usage = request.stream.continuous_usage,
                               .num_continuations = request.generation.sampling.n,
                               .answer_format = std::move(format)};
    if (request.generation.echo) head.echo_texts = EchoTexts(model, request);
    return std::make_unique<OpenAiFormatter>(model.tokenizer(), std::move(head));
  };
  return GenerationCall{.request = std::move(parsed), .make_formatter = make_formatter};
}

}  // namespace spl::router
