// Runs the requests of all HTTP APIs that generate: from a parsed body to the answer on the exchange.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/http/answer_sink.h"
#include "services/router/http/http_server.h"
#include "services/router/kb/knowledge_bases.h"
#include "services/router/request/answer_reader.h"
#include "services/router/request/field_names.h"
#include "services/router/request/openai_request.h"

namespace spl::router {

class PromptMerger;

// A request that generates, whatever its API.
struct GenerationCall {
  ApiRequest request;
  FieldNames names = {};  // the client's names of the request's fields
  // Makes the formatter of the answer, once, when `request` has its final form.
  using MakeFormatter = std::function<std::unique_ptr<AnswerFormatter>(const ApiRequest& request, AnswerFormat format)>;
  MakeFormatter make_formatter;
};

// Any thread may call. Borrows its arguments.
class GenerationApi {
 public:
  using ExchangePtr = std::shared_ptr<HttpExchange>;
  using LeasePtr = std::shared_ptr<RateLimits::Lease>;
  // Reads a body. `request_id`: the request's, from which answers make theirs.
  using ReadCall =
      std::function<absl::StatusOr<GenerationCall>(const std::string& body, const std::string& request_id)>;

  // `strict`: a field that has no effect is an error.
  GenerationApi(Dispatcher& core, KnowledgeBases& bases, bool strict) : core_(core), bases_(bases), strict_(strict) {}

  // Takes the exchange's body, and answers when the generation is done, or as it goes on.
  void Generate(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease, const ReadCall& read);

 private:
  // Completes a request with what its header says.
  absl::Status Complete(const HttpRequest& http, const Caller& caller, const std::string& request_id,
                        GenerationCall* call) const;
  void Start(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease, GenerationCall call);
  // One generation for each prompt of the request, whose outputs go to `sink`, or if that is null through the merger.
  // ResourceExhausted: so many would exceed a limit of the caller.
  absl::StatusOr<std::vector<std::shared_ptr<Generation>>> MakeGenerations(const Caller& caller, ApiRequest parsed,
                                                                           RateLimits::Lease lease,
                                                                           const std::shared_ptr<GenerationSink>& sink,
                                                                           PromptMerger& merger);

  Dispatcher& core_;
  KnowledgeBases& bases_;
  const bool strict_;
};

}  // namespace spl::router
