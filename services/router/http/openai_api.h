// The routes of the public HTTP API: who may call them, where their work runs, and those that generate nothing.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "services/base/program_metrics.h"
#include "services/router/admission/auth.h"
#include "services/router/admission/fair_pool.h"
#include "services/router/admission/work_pool.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/http/generation_api.h"
#include "services/router/http/http_server.h"
#include "services/router/http/responses_door.h"
#include "services/router/kb/knowledge_bases.h"
#include "services/router/request/field_names.h"
#include "services/router/request/openai_request.h"

namespace spl::router {

struct OpenAiApiOptions {
  std::string vllm_model_name;   // RenderMetrics
  bool strict_requests = false;  // a field that has no effect is an error
  StoredResponsesOptions stored_responses = {};
  std::vector<ProgramMetrics> beside = {};  // other programs of this process, whose metrics /metrics has, too
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
  // HttpErrorBody
  static std::string ErrorBodyOf(int status, const std::string& message, const std::string& path);

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
    std::vector<std::string> methods;
    bool authenticated;
    Place place;
    Handler handler;  // the lease is null except for kPool

    bool Takes(const std::string& method) const;
  };

  const Route* FindRoute(const HttpRequest& request) const;
  void AddPosts();
  void AddGets();
  // The route of a POST that generates: `read` makes the call of its body.
  using ReadCall = std::function<absl::StatusOr<GenerationCall>(const std::string& body, const std::string& request_id,
                                                                const Caller& caller)>;
  Route Generating(ReadCall read);
  void Tokenize(const ExchangePtr& exchange, const Caller& caller);
  void CountMessageTokens(const ExchangePtr& exchange, const Caller& caller);
  // Tokenizes the prompt of `request`, whose fields the client calls by `names`; answers itself if that fails.
  using RespondIds = std::function<void(const TokenizeRequest& request, const std::vector<TokenId>& ids)>;
  void TokenizePrompt(const ExchangePtr& exchange, const Caller& caller, TokenizeRequest request, FieldNames names,
                      RespondIds respond);
  void Detokenize(const ExchangePtr& exchange);
  void ListModels(const ExchangePtr& exchange);
  void GetModel(const ExchangePtr& exchange);
  std::string MetricsPage() const;

  Dispatcher& core_;
  KnowledgeBases& bases_;
  const ApiKeys& keys_;
  FairPool& pool_;
  WorkPool& probes_;
  Metrics& metrics_;
  const OpenAiApiOptions options_;
  GenerationApi generations_;
  const ResponsesDoor responses_;
  std::map<std::string, Route> routes_;
  const Route model_route_, response_route_;  // for all paths below a prefix
  const int64_t started_at_;                  // seconds since 1970; "created" of the model list
};

}  // namespace spl::router
