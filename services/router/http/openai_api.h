// The routes of the HTTP API: translates bodies to requests and output to bodies, and nothing else.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "services/router/admission/auth.h"
#include "services/router/admission/fair_pool.h"
#include "services/router/admission/work_pool.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/http/http_server.h"
#include "services/router/kb/knowledge_bases.h"
#include "services/router/request/openai_request.h"

namespace spl::router {

class PromptMerger;

struct OpenAiApiOptions {
  std::string vllm_model_name;   // RenderMetrics
  bool strict_requests = false;  // a field that has no effect is an error
};

// Any thread may call Handle, which returns at once. The pool works on requests with a body, after they have been
// counted against their caller's limits. Borrows all arguments.
class OpenAiApi {
 public:
  // `pool` parses and tokenizes, `probes` renders the metrics.
  OpenAiApi(Dispatcher& core, KnowledgeBases& bases, const ApiKeys& keys, FairPool& pool, WorkPool& probes,
            Metrics& metrics, OpenAiApiOptions options);

  // Checks a request's header (HttpGate): returns the answer to a request without a valid key.
  std::optional<HttpResponse> Refuse(const HttpRequest& header) const;
  void Handle(std::shared_ptr<HttpExchange> exchange);
  static std::string ErrorBodyFor(int status, const std::string& message);

 private:
  using ExchangePtr = std::shared_ptr<HttpExchange>;
  using LeasePtr = std::shared_ptr<RateLimits::Lease>;
  using Handler = std::function<void(const ExchangePtr&, const Caller&, const LeasePtr&)>;
  enum class Place {
    kHere,
    kPool,    // reads a body; counts against the caller's limits
    kProbes,  // slow, but must not wait for requests
  };
  struct Route {
    const char* method;
    bool authenticated;
    Place place;
    Handler handler;  // the lease is null except for kPool
  };

  const Route* FindRoute(const HttpRequest& request) const;
  void AddGets();
  // InvalidArgument: one of these fields, and requests are strict.
  absl::Status CheckIgnored(const std::vector<std::string>& ignored) const;

  void Generate(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease, bool chat);
  void StartGeneration(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease, bool chat,
                       ApiRequest parsed);
  void Tokenize(const ExchangePtr& exchange, const Caller& caller);
  // One generation for each prompt of the request, whose outputs go to `sink`, or if that is null through the merger.
  // ResourceExhausted: so many would exceed a limit of the caller.
  absl::StatusOr<std::vector<std::shared_ptr<Generation>>> MakeGenerations(const Caller& caller, ApiRequest parsed,
                                                                           RateLimits::Lease lease,
                                                                           const std::shared_ptr<GenerationSink>& sink,
                                                                           PromptMerger& merger);
  void RespondTokens(HttpExchange& exchange, const TokenizeRequest& request, const Prompt& prompt) const;
  void Detokenize(const ExchangePtr& exchange);
  void ListModels(const ExchangePtr& exchange);
  void GetModel(const ExchangePtr& exchange);

  Dispatcher& core_;
  KnowledgeBases& bases_;
  const ApiKeys& keys_;
  FairPool& pool_;
  WorkPool& probes_;
  Metrics& metrics_;
  const OpenAiApiOptions options_;
  std::map<std::string, Route> routes_;
  const Route model_route_;
  const int64_t started_at_;  // seconds since 1970; "created" of the model list
};

}  // namespace spl::router
