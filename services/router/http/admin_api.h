// The routes under /admin/v1/: knowledge bases and namespaces of the authenticated caller.
//
//   knowledge_bases                            GET list, POST publish
//   knowledge_bases/{name}                     GET (?version=N), DELETE
//   knowledge_bases/{name}/versions/{v}        DELETE
//   knowledge_bases/{name}/diff                GET ?from=A&to=B
//   knowledge_bases/{name}/swap, …/rollback    POST
//   namespaces                                 GET list, POST create
//   namespaces/{name}                          GET, PATCH, DELETE
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "services/router/admission/auth.h"
#include "services/router/admission/work_pool.h"
#include "services/router/http/http_server.h"
#include "services/router/kb/knowledge_bases.h"
#include "services/router/request/openai_response.h"

namespace spl::router {

inline constexpr char kAdminPrefix[] = "/admin/v1/";

// Any thread may call Handle, which returns at once. The work runs on the two pools, whose threads may wait for the
// stores (`calls`) and for the workers (`publishes`). Borrows all arguments.
class AdminApi {
 public:
  // `loopback`: the server listens on this machine only (CheckAdmin).
  AdminApi(KnowledgeBases& bases, const ApiKeys& keys, bool loopback, WorkPool& calls, WorkPool& publishes);

  // Checks a request's header (HttpGate): returns the answer to a forbidden request and writes it to the audit log.
  std::optional<HttpResponse> Refuse(const HttpRequest& header) const;
  // Handles a request that Refuse let pass and whose path begins with kAdminPrefix.
  void Handle(std::shared_ptr<HttpExchange> exchange);

 private:
  using ExchangePtr = std::shared_ptr<HttpExchange>;
  struct Call {
    ExchangePtr exchange;
    Caller caller;
    std::vector<std::string> names;            // values of the route's {…}, decoded
    std::map<std::string, std::string> query;  // decoded
    std::string target;                        // object of the call, for the audit log
  };
  using Answer = absl::StatusOr<OrderedJson>;
  struct Route {
    std::string method;
    std::vector<std::string> path;     // "{}" takes any name
    std::function<Answer(Call&)> run;  // null: publish
    std::vector<std::string> query;    // accepted parameters
    const char* audit = "";            // its name in the audit log; empty: it changes nothing
  };

  const Route* Find(const std::string& method, const std::vector<std::string>& path, std::vector<std::string>* names,
                    std::string* allowed) const;
  absl::StatusOr<Caller> Authorize(const HttpRequest& request) const;
  void Publish(const Route& route, Call call);
  static void Audit(const Route& route, const Call& call, const absl::Status& result);

  KnowledgeBases& bases_;
  const ApiKeys& keys_;
  const bool loopback_;
  WorkPool& calls_;
  WorkPool& publishes_;
  std::vector<Route> routes_;
};

// "a%20b" → "a b". InvalidArgument: a percent sign without two hex digits.
absl::StatusOr<std::string> PercentDecode(const std::string& text);

}  // namespace spl::router
