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

// Handle may be called from any thread and returns at once: everything else happens on the two pools, whose threads may
// wait for the stores (`calls`) and for the workers (`publishes`). Borrows everything it is given.
class AdminApi {
 public:
  // `loopback`: the server listens on this machine only (CheckAdmin).
  AdminApi(KnowledgeBases& bases, const ApiKeys& keys, bool loopback, WorkPool& calls, WorkPool& publishes);

  // Looks at a request's header: the answer to one that may not be made (HttpGate). Writes the audit log of those.
  std::optional<HttpResponse> Refuse(const HttpRequest& header) const;
  // Of a request that was not refused, and of a path that begins with kAdminPrefix.
  void Handle(std::shared_ptr<HttpExchange> exchange);

 private:
  using ExchangePtr = std::shared_ptr<HttpExchange>;
  struct Call {
    ExchangePtr exchange;
    Caller caller;
    std::vector<std::string> names;            // what stands for the {…} of the route, decoded
    std::map<std::string, std::string> query;  // decoded
    std::string target;                        // what it is about, for the audit log
  };
  using Answer = absl::StatusOr<OrderedJson>;
  struct Route {
    std::string method;
    std::vector<std::string> path;     // "{}" takes any name
    std::function<Answer(Call&)> run;  // null: publish
    std::vector<std::string> query;    // parameters it takes
    const char* audit = "";            // what the audit log calls it; empty: it changes nothing
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
