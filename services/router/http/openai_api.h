// The routes of the HTTP API: translates bodies to requests and output to bodies, and nothing else.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "services/router/auth.h"
#include "services/router/dispatcher.h"
#include "services/router/http/http_server.h"
#include "services/router/knowledge_bases.h"
#include "services/router/openai_request.h"
#include "services/router/work_pool.h"

namespace spl::router {

// Handle may be called from any thread and returns at once: requests with a body are worked on by the pool. Borrows
// everything it is given.
class OpenAiApi {
 public:
  OpenAiApi(Dispatcher& core, KnowledgeBases& bases, const ApiKeys& keys, WorkPool& pool, Metrics& metrics);

  void Handle(std::shared_ptr<HttpExchange> exchange);
  static std::string ErrorBodyFor(int status, const std::string& message);

 private:
  using ExchangePtr = std::shared_ptr<HttpExchange>;
  using Handler = std::function<void(const ExchangePtr&, const Caller&)>;
  struct Route {
    const char* method;
    bool authenticated;
    bool on_pool;  // reads a body
    Handler handler;
  };

  const Route* FindRoute(const ExchangePtr& exchange) const;
  void Run(const Route& route, const ExchangePtr& exchange);

  void Generate(const ExchangePtr& exchange, const Caller& caller, bool chat);
  void StartGeneration(const ExchangePtr& exchange, const Caller& caller, bool chat, ApiRequest parsed);
  void Tokenize(const ExchangePtr& exchange, const Caller& caller);
  void RespondTokens(HttpExchange& exchange, const TokenizeRequest& request, const Prompt& prompt) const;
  void Detokenize(const ExchangePtr& exchange);
  void ListModels(const ExchangePtr& exchange);
  void GetModel(const ExchangePtr& exchange);

  Dispatcher& core_;
  KnowledgeBases& bases_;
  const ApiKeys& keys_;
  WorkPool& pool_;
  Metrics& metrics_;
  std::map<std::string, Route> routes_;
  const Route model_route_;
  const int64_t started_at_;  // seconds since 1970; "created" of the model list
};

}  // namespace spl::router
