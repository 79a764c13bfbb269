#include "services/router/http/responses_door.h"

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <utility>

#include "services/base/ids.h"
#include "services/base/status.h"
#include "services/router/http/error_response.h"
#include "services/router/http/request_fields.h"
#include "services/router/request/api_error.h"
#include "services/router/request/responses_response.h"

namespace spl::router {
namespace {

StoredResponses::Clock::time_point Now() { return StoredResponses::Clock::now(); }

// Says what to do, too: a response that another router keeps looks like one that is kept no more.
absl::Status NotKept(const StoredResponses& stored, const char* what, const std::string& id, const char* code) {
  const std::string why =
      stored.enabled() ? fmt::format(
                             "The router that made a response keeps it in its memory, at most {} s after its "
                             "last use (--stored-responses-lease); other routers do not have it. Send all of a "
                             "conversation to one router, or its items as input",
                             stored.ttl().count())
                       : "This router keeps no responses (--stored-responses-bytes is 0): send the conversation's "
                         "items as input";
  return SetErrorCode(Errorf(absl::StatusCode::kNotFound, "{} with id '{}' not found. {}.", what, id, why), code);
}

// REQUIRES: the text of a list, written by this program.
Json ItemsOf(const StoredResponse& stored) { return Json::parse(stored.items, nullptr, /*allow_exceptions=*/false); }

// Keeps a response with its conversation, whose earlier items are written here: a text takes less memory than JSON
// while the answer is made.
std::function<void(const OrderedJson&)> Keeper(std::shared_ptr<StoredResponses> stored, StoredResponses::Owner owner,
                                               const Json& items, std::string session) {
  std::string earlier = Dump(items);
  earlier.pop_back();  // the bracket
  return [stored = std::move(stored), owner, earlier = std::move(earlier),
          session = std::move(session)](const OrderedJson& response) {
    std::string conversation = earlier;
    for (const Json& item : response.at("output")) conversation += "," + Dump(item);
    stored->Add(owner, response.at("id").get<std::string>(), {Dump(response), conversation + "]", session}, Now());
  };
}

}  // namespace

ResponsesDoor::ResponsesDoor(const ServedModel& model, const NamespaceKeys& keys, Metrics& metrics,
                             StoredResponsesOptions options)
    : model_(model), keys_(keys), stored_(std::make_shared<StoredResponses>(options, metrics)) {}

EarlierResponses ResponsesDoor::EarlierOf(const StoredResponses::Owner& owner) const {
  EarlierResponses earlier;
  earlier.conversation = [this, owner](const std::string& id) -> absl::StatusOr<EarlierConversation> {
    const auto found = stored_->Find(owner, id, Now());
    if (found == nullptr) return NotKept(*stored_, "Previous response", id, "previous_response_not_found");
    return EarlierConversation{ItemsOf(*found), found->session};
  };
  earlier.item = [this, owner](const std::string& id) -> absl::StatusOr<Json> {
    const auto found = stored_->Find(owner, ResponseOfItem(id), Now());
    const Json items = found == nullptr ? Json::array() : ItemsOf(*found);
    for (const Json& item : items) {
      if (item.value("id", Json()) == Json(id)) return item;
    }
    return NotKept(*stored_, "Item", id, "item_not_found");
  };
  return earlier;
}

absl::StatusOr<GenerationCall> ResponsesDoor::Read(const std::string& body, const Caller& caller) const {
  const StoredResponses::Owner owner = keys_.DeriveOwner(caller);
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  SPLICE_ASSIGN_OR_RETURN(ResponsesRequest request, TranslateResponses(json, EarlierOf(owner)));
  SPLICE_ASSIGN_OR_RETURN(ApiRequest parsed,
                          ParseTranslated(request.translated, "responses", model_.default_sampling()));
  const std::string id = RandomId::Make().ToHex();
  std::string& session = parsed.generation.session;
  if (session.empty()) session = request.session;
  const bool keeps = request.store && stored_->enabled();
  ResponsesFormatter::Head head{.id = id, .created = UnixSeconds(), .model = model_.name(), .echo = request.echo};
  head.echo["store"] = keeps;
  head.echo["temperature"] = Shortest(parsed.generation.sampling.temperature);
  head.echo["top_p"] = Shortest(parsed.generation.sampling.top_p);
  if (keeps) {
    head.on_done =
        Keeper(stored_, owner, std::move(request.items), request.session.empty() ? "resp_" + id : request.session);
  }
  const auto make_formatter = [&model = model_, head = std::move(head)](const ApiRequest&,
                                                                        AnswerFormat format) mutable {
    head.answer_format = std::move(format);
    return std::make_unique<ResponsesFormatter>(model.tokenizer(), std::move(head));
  };
  return GenerationCall{
      .request = std::move(parsed), .names = std::move(request.translated.names), .make_formatter = make_formatter};
}

void ResponsesDoor::Answer(HttpExchange& exchange, const Caller& caller) const {
  const HttpRequest& http = exchange.request();
  const StoredResponses::Owner owner = keys_.DeriveOwner(caller);
  const std::string id = http.path.substr(sizeof(kResponsesPrefix) - 1);
  const absl::Status missing = NotKept(*stored_, "Response", id, "response_not_found");
  if (http.method == "DELETE") {
    if (!stored_->Erase(owner, id, Now())) return RespondError(exchange, missing, "");
    return RespondJson(exchange, OrderedJson{{"id", id}, {"object", "response"}, {"deleted", true}});
  }
  if (http.query.find("stream=true") != std::string::npos)
    return RespondError(exchange, ParamError("stream", "a response that is kept is not streamed again"), "");
  const auto found = stored_->Find(owner, id, Now());
  if (found == nullptr) return RespondError(exchange, missing, "");
  exchange.Respond({.body = found->response});
}

}  // namespace spl::router
