// The routes of operators: the state of the cluster, and a few switches. They show requests of all callers (never their
// text). With API keys they require an operator's key; without keys they are served on loopback only. Requests made by
// a web page of another origin are refused (http/browser_guard.h).
//
//   GET  /control/v1/status                     the router, the model, the two pools
//   GET  /control/v1/workers                    every worker with its load and its KV connections
//   GET  /control/v1/requests, /debug/requests  under way, and the last 256 that ended
//   GET  /control/v1/requests/{id}              one of them
//   GET  /control/v1/history?seconds=N          samples of the last half hour, or of less; a column for each quantity
//   GET  /control/v1/scale                      how many workers each pool should have, and why
//   GET  /control/v1/quality                    what workers' records say of methods, by namespace
//   POST /control/v1/requests/{id}/cancel
//   POST /control/v1/workers/{id}/drain         {"draining": true|false}: nothing new is sent there, by no router
//   GET  /ui, /ui/{file}                        a page that shows the above and asks for the key itself (ui_files.h)
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "services/router/admission/auth.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/http/http_server.h"
#include "services/router/request/openai_response.h"
#include "services/router/telemetry/history.h"

namespace spl::router {

struct ControlApiOptions {
  bool loopback = false;     // the server listens on this machine only
  std::string trace_ui_url;  // RouterOptions::trace_ui_url
};

// Thread-safe; never blocks. Borrows all arguments but the options.
class ControlApi {
 public:
  ControlApi(Dispatcher& core, const History& history, const ApiKeys& keys, ControlApiOptions options);

  static bool Serves(const std::string& path);
  // Checks a request's header (HttpGate): returns the answer to a forbidden request and writes it to the audit log.
  std::optional<HttpResponse> Refuse(const HttpRequest& header) const;
  // Handles a request that Refuse let pass.
  void Handle(const std::shared_ptr<HttpExchange>& exchange);

 private:
  using ExchangePtr = std::shared_ptr<HttpExchange>;

  // PermissionDenied, Unauthenticated: the caller may not operate.
  absl::StatusOr<Caller> Authorize(const HttpRequest& request) const;
  // Answers a request for something to read.
  void Answer(const ExchangePtr& exchange, std::string_view path) const;
  OrderedJson Status() const;
  OrderedJson Workers() const;
  OrderedJson Requests() const;
  OrderedJson Scale() const;
  OrderedJson Quality() const;
  void Cancel(const ExchangePtr& exchange, const Caller& caller, const std::string& request_id);
  void Drain(const ExchangePtr& exchange, const Caller& caller, const std::string& worker_id);

  using Read = OrderedJson (ControlApi::*)() const;

  const std::map<std::string_view, Read> reads_ = {{"status", &ControlApi::Status},
                                                   {"workers", &ControlApi::Workers},
                                                   {"requests", &ControlApi::Requests},
                                                   {"scale", &ControlApi::Scale},
                                                   {"quality", &ControlApi::Quality}};
  Dispatcher& core_;
  const History& history_;
  const ApiKeys& keys_;
  const ControlApiOptions options_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace spl::router
