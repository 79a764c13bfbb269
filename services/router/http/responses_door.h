// The door of OpenAI's /v1/responses.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/router/admission/auth.h"
#include "services/router/http/generation_api.h"
#include "services/router/http/stored_responses.h"
#include "services/router/request/responses_request.h"
#include "services/router/request/served_model.h"

namespace spl::router {

inline constexpr char kResponsesPrefix[] = "/v1/responses/";

// Thread-safe. Borrows the model and the keys.
class ResponsesDoor {
 public:
  // `keys` tell callers apart. `metrics`: StoredResponses.
  ResponsesDoor(const ServedModel& model, const NamespaceKeys& keys, Metrics& metrics, StoredResponsesOptions options);

  // Reads a body. The response gets an id of its own, and is kept when it is done if the body says so. A request that
  // goes on with an earlier one is a turn of its conversation at the workers (GenerationRequest::session).
  absl::StatusOr<GenerationCall> Read(const std::string& body, const Caller& caller) const;
  // GET and DELETE of a response below kResponsesPrefix.
  void Answer(HttpExchange& exchange, const Caller& caller) const;

 private:
  EarlierResponses EarlierOf(const StoredResponses::Owner& owner) const;

  const ServedModel& model_;
  const NamespaceKeys& keys_;
  const std::shared_ptr<StoredResponses> stored_;  // answers that are being made hold it, too
};

}  // namespace spl::router
