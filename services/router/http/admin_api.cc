#include "services/router/http/admin_api.h"

#include <algorithm>
#include <set>
#include <utility>

#include "services/base/ids.h"
#include "services/router/http/admin_json.h"
#include "services/router/http/browser_guard.h"
#include "services/router/http/error_response.h"
#include "services/router/request/api_error.h"
#include "services/router/telemetry/audit.h"

namespace spl::router {
namespace {

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

absl::StatusOr<std::map<std::string, std::string>> ParseQuery(const std::string& query,
                                                              const std::vector<std::string>& known) {
  std::map<std::string, std::string> out;
  if (query.empty()) return out;
  for (const std::string& item : Split(query, '&')) {
    const size_t equals = std::min(item.find('='), item.size());
    SPLICE_ASSIGN_OR_RETURN(const std::string name, PercentDecode(item.substr(0, equals)));
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return ParamError(name.substr(0, 64), "is no parameter of this call");
    }
    SPLICE_ASSIGN_OR_RETURN(out[name], PercentDecode(item.substr(std::min(equals + 1, item.size()))));
  }
  return out;
}

// 0 when it is not given.
absl::StatusOr<uint64_t> VersionOf(const std::map<std::string, std::string>& query, const std::string& name) {
  const auto found = query.find(name);
  if (found == query.end()) return 0;
  return ParseVersionNumber(found->second, name);
}

absl::Status PoolFull(const char* what) {
  return SetRetryAfterMs(Errorf(absl::StatusCode::kResourceExhausted, "too many {} are waiting", what), 1000);
}

// One publish as an HTTP response: events, or one object at its end. The response starts with the first event, so that
// failures before it get their own HTTP status.
class PublishResponse {
 public:
  PublishResponse(std::shared_ptr<HttpExchange> exchange, bool stream)
      : exchange_(std::move(exchange)), stream_(stream) {}

  void Progress(const PublishProgress& progress) {
    if (stream_) Event(ProgressJson(progress));
  }
  void End(const absl::StatusOr<KbVersion>& version, bool current) {
    if (!version.ok() && !started_) return RespondError(*exchange_, version.status(), "");
    if (!stream_) return RespondJson(*exchange_, VersionJson(*version, current));
    if (version.ok()) {
      Event(VersionJson(*version, current));
      exchange_->Write("data: [DONE]\n\n");
    } else {
      exchange_->Write("data: " + ErrorBody(version.status(), HttpStatusOf(version.status())) + "\n\n");
    }
    exchange_->EndStream();
  }

 private:
  void Event(const OrderedJson& json) {
    if (!started_) {
      exchange_->StartStream("text/event-stream; charset=utf-8",
                             {{"cache-control", "no-cache"}, {"x-accel-buffering", "no"}});
    }
    started_ = true;
    exchange_->Write("data: " + Dump(json) + "\n\n");  // a few hundred bytes for a context: no back-pressure needed
  }

  const std::shared_ptr<HttpExchange> exchange_;
  const bool stream_;
  bool started_ = false;
};

}  // namespace

absl::StatusOr<std::string> PercentDecode(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    const absl::StatusOr<std::string> byte = HexDecode(std::string_view(text).substr(i + 1, 2));
    if (!byte.ok() || byte->size() != 1) return InvalidArgument("the URL has a percent sign without two hex digits");
    out += *byte;
    i += 2;
  }
  return out;
}

AdminApi::AdminApi(KnowledgeBases& bases, const ApiKeys& keys, bool loopback, WorkPool& calls, WorkPool& publishes)
    : bases_(bases), keys_(keys), loopback_(loopback), calls_(calls), publishes_(publishes) {
  const auto list = [](OrderedJson items) {
    OrderedJson out;
    out["object"] = "list";
    out["data"] = std::move(items);
    return out;
  };
  const auto deleted = [](const char* object, const std::string& name) {
    OrderedJson out;
    out["object"] = object;
    out["name"] = name;
    out["deleted"] = true;
    return out;
  };
  const auto delete_version = [this, deleted](const Call& call, uint64_t version) -> Answer {
    SPLICE_ASSIGN_OR_RETURN(const auto gone, bases_.Delete(call.caller, call.names[0], version));
    OrderedJson out = deleted("knowledge_base.deleted", call.names[0]);
    out["versions"] = gone.versions;
    out["chunks"] = gone.chunks;
    out.update({{"bytes", gone.bytes}, {"kv_bytes", gone.kv_bytes}});
    return out;
  };
  routes_ = {
      {"GET",
       {"knowledge_bases"},
       [this, list](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const auto heads, bases_.List(call.caller));
         OrderedJson items = OrderedJson::array();
         for (const KbHead& head : heads) items.push_back(HeadJson(head));
         return list(std::move(items));
       },
       {}},
      {"POST", {"knowledge_bases"}, nullptr, {}, "PublishKnowledgeBase"},
      {"GET",
       {"knowledge_bases", "{}"},
       [this](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const uint64_t version, VersionOf(call.query, "version"));
         SPLICE_ASSIGN_OR_RETURN(const KbView view, bases_.Get(call.caller, call.names[0], version));
         return ViewJson(view);
       },
       {"version"}},
      {"DELETE",
       {"knowledge_bases", "{}"},
       [delete_version](const Call& call) -> Answer { return delete_version(call, 0); },
       {},
       "DeleteKnowledgeBase"},
      {"DELETE",
       {"knowledge_bases", "{}", "versions", "{}"},
       [delete_version](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const uint64_t version, ParseVersionNumber(call.names[1], "version"));
         return delete_version(call, version);
       },
       {},
       "DeleteKnowledgeBase"},
      {"GET",
       {"knowledge_bases", "{}", "diff"},
       [this](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const uint64_t from, VersionOf(call.query, "from"));
         SPLICE_ASSIGN_OR_RETURN(const uint64_t to, VersionOf(call.query, "to"));
         SPLICE_ASSIGN_OR_RETURN(const auto diff, bases_.Diff(call.caller, call.names[0], from, to));
         return DiffJson(diff, call.names[0]);
       },
       {"from", "to"}},
      {"POST",
       {"knowledge_bases", "{}", "swap"},
       [this](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const uint64_t version, ParseSwapBody(call.exchange->request().body));
         SPLICE_ASSIGN_OR_RETURN(const KbHead head, bases_.Swap(call.caller, call.names[0], version));
         return HeadJson(head);
       },
       {},
       "SwapKnowledgeBase"},
      {"POST",
       {"knowledge_bases", "{}", "rollback"},
       [this](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const KbHead head, bases_.Rollback(call.caller, call.names[0]));
         return HeadJson(head);
       },
       {},
       "RollbackKnowledgeBase"},
      {"GET",
       {"namespaces"},
       [this, list](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const auto namespaces, bases_.ListNamespaces(call.caller));
         OrderedJson items = OrderedJson::array();
         for (const CallerNamespace& ns : namespaces) items.push_back(NamespaceJson(ns));
         return list(std::move(items));
       },
       {}},
      {"POST",
       {"namespaces"},
       [this](Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const auto wanted, ParseCreateNamespaceBody(call.exchange->request().body));
         call.target = wanted.name;
         SPLICE_ASSIGN_OR_RETURN(const auto made, bases_.CreateNamespace(call.caller, wanted));
         return NamespaceJson(made);
       },
       {},
       "CreateNamespace"},
      {"GET",
       {"namespaces", "{}"},
       [this](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const auto ns, bases_.GetNamespace(call.caller, call.names[0]));
         return NamespaceJson(ns);
       },
       {}},
      {"PATCH",
       {"namespaces", "{}"},
       [this](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const auto change, ParseUpdateNamespaceBody(call.exchange->request().body));
         SPLICE_ASSIGN_OR_RETURN(const auto ns, bases_.UpdateNamespace(call.caller, call.names[0], change));
         return NamespaceJson(ns);
       },
       {},
       "UpdateNamespace"},
      {"DELETE",
       {"namespaces", "{}"},
       [this, deleted](const Call& call) -> Answer {
         SPLICE_ASSIGN_OR_RETURN(const auto gone, bases_.DeleteNamespace(call.caller, call.names[0]));
         OrderedJson out = deleted("namespace.deleted", call.names[0]);
         out["chunks"] = gone.chunks;
         out["bytes"] = gone.bytes;
         return out;
       },
       {},
       "DeleteNamespace"},
  };
}

const AdminApi::Route* AdminApi::Find(const std::string& method, const std::vector<std::string>& path,
                                      std::vector<std::string>* names, std::string* allowed) const {
  for (const Route& route : routes_) {
    if (route.path.size() != path.size()) continue;
    std::vector<std::string> taken;
    bool matches = true;
    for (size_t i = 0; i < path.size() && matches; ++i) {
      if (route.path[i] == "{}") {
        taken.push_back(path[i]);
      } else {
        matches = route.path[i] == path[i];
      }
    }
    if (!matches) continue;
    if (route.method == method) {
      *names = std::move(taken);
      return &route;
    }
    *allowed += (allowed->empty() ? "" : ", ") + route.method;
  }
  return nullptr;
}

absl::StatusOr<Caller> AdminApi::Authorize(const HttpRequest& request) const {
  SPLICE_ASSIGN_OR_RETURN(Caller caller, keys_.Authenticate(request.authorization));
  SPLICE_RETURN_IF_ERROR(CheckAdmin(keys_, caller, loopback_));
  return caller;
}

std::optional<HttpResponse> AdminApi::Refuse(const HttpRequest& header) const {
  std::optional<Refusal> refusal = RefuseOperation(header, keys_.enabled(), [&] { return Authorize(header).status(); });
  if (!refusal.has_value()) return std::nullopt;
  Call call;
  std::string allowed;
  const Route* const route =
      Find(header.method, Split(header.path.substr(sizeof(kAdminPrefix) - 1), '/'), &call.names, &allowed);
  if (route == nullptr) return std::move(refusal->response);
  if (const absl::StatusOr<Caller> known = keys_.Authenticate(header.authorization); known.ok()) call.caller = *known;
  Audit(*route, call, refusal->why);
  return std::move(refusal->response);
}

void AdminApi::Handle(ExchangePtr exchange) {
  const HttpRequest& request = exchange->request();
  absl::StatusOr<Caller> caller = Authorize(request);
  Call call{.exchange = exchange};
  std::string allowed;
  const Route* const route =
      Find(request.method, Split(request.path.substr(sizeof(kAdminPrefix) - 1), '/'), &call.names, &allowed);
  if (!caller.ok()) return RespondError(*exchange, caller.status(), "");
  call.caller = *std::move(caller);
  if (route == nullptr && !allowed.empty()) {
    const absl::Status wrong =
        Errorf(absl::StatusCode::kInvalidArgument, "{} takes {} only, got {}", request.path, allowed, request.method);
    return exchange->Respond({.status = 405, .body = ErrorBody(wrong, 405), .headers = {{"allow", allowed}}});
  }
  if (route == nullptr) {
    const absl::Status missing =
        Errorf(absl::StatusCode::kNotFound, "there is no {} {} here", request.method, request.path);
    return RespondError(*exchange, SetErrorCode(missing, "unknown_url"), "");
  }
  for (std::string& name : call.names) {
    absl::StatusOr<std::string> decoded = PercentDecode(name);
    if (!decoded.ok()) return RespondError(*exchange, decoded.status(), "");
    name = *std::move(decoded);
  }
  absl::StatusOr<std::map<std::string, std::string>> query = ParseQuery(request.query, route->query);
  if (!query.ok()) return RespondError(*exchange, query.status(), "");
  call.query = *std::move(query);
  if (!call.names.empty()) call.target = fmt::format("{}", fmt::join(call.names, "/"));
  if (route->run == nullptr) {
    if (publishes_.TryPost([this, route, call] { Publish(*route, call); })) return;
    Audit(*route, call, PoolFull("publishes"));
    return RespondError(*exchange, PoolFull("publishes"), "");
  }
  const bool posted = calls_.TryPost([route, call]() mutable {
    const Answer answer = route->run(call);
    Audit(*route, call, answer.status());
    answer.ok() ? RespondJson(*call.exchange, *answer) : RespondError(*call.exchange, answer.status(), "");
  });
  if (posted) return;
  Audit(*route, call, PoolFull("calls"));
  RespondError(*exchange, PoolFull("calls"), "");
}

void AdminApi::Audit(const Route& route, const Call& call, const absl::Status& result) {
  if (*route.audit == 0) return;
  WriteAudit({.caller = call.caller.name, .api = "http", .call = route.audit, .target = call.target, .result = result});
}

void AdminApi::Publish(const Route& route, Call call) {
  absl::StatusOr<PublishBody> body = ParsePublishBody(call.exchange->TakeBody());
  if (!body.ok()) {
    Audit(route, call, body.status());
    return RespondError(*call.exchange, body.status(), "");
  }
  call.target = body->input.name;
  PublishResponse response(call.exchange, body->stream);
  const auto control =
      std::make_shared<PublishControl>([&response](const PublishProgress& progress) { response.Progress(progress); });
  call.exchange->SetDisconnectCallback([weak = std::weak_ptr(control)] {
    if (const auto running = weak.lock()) running->Cancel(absl::CancelledError("the client left"));
  });
  const absl::StatusOr<KbVersion> version = bases_.Publish(call.caller, body->input, *control);
  Audit(route, call, version.status());
  response.End(version, body->input.swap);
}

}  // namespace spl::router
