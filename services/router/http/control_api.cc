#include "services/router/http/control_api.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "services/base/clock.h"
#include "services/base/ids.h"
#include "services/base/status.h"
#include "services/base/version.h"
#include "services/methods/methods.h"
#include "services/router/dispatch/generation.h"
#include "services/router/http/admin_api.h"
#include "services/router/http/browser_guard.h"
#include "services/router/http/control_json.h"
#include "services/router/http/error_response.h"
#include "services/router/http/ui_files.h"
#include "services/router/request/api_error.h"
#include "services/router/request/json_reader.h"
#include "services/router/telemetry/audit.h"

namespace spl::router {
namespace {

constexpr std::string_view kPrefix = "/control/v1/";
constexpr std::string_view kRequests = "requests/", kWorkers = "workers/", kCancel = "/cancel", kDrain = "/drain";
constexpr std::string_view kHistory = "history", kSeconds = "seconds=";
constexpr std::chrono::milliseconds kDrainTimeout{2'000};

// "a/b/cancel" after `prefix` → "a/b", or nothing.
std::string_view NameBetween(std::string_view path, std::string_view prefix, std::string_view suffix) {
  if (path.size() <= prefix.size() + suffix.size() || !path.starts_with(prefix) || !path.ends_with(suffix)) return {};
  return path.substr(prefix.size(), path.size() - prefix.size() - suffix.size());
}

absl::Status NotHere(const HttpRequest& request) {
  return SetErrorCode(Errorf(absl::StatusCode::kNotFound, "there is no {} {} here", request.method, request.path),
                      "unknown_url");
}

absl::StatusOr<bool> ParseDrainBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  ObjectReader reader(json, "");
  std::optional<bool> draining;
  reader.Bool("draining", &draining);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (!draining.has_value()) return ParamError("draining", "is required: true or false");
  return *draining;
}

void RespondMethod(HttpExchange& exchange, const char* allowed) {
  const HttpRequest& request = exchange.request();
  const absl::Status wrong =
      Errorf(absl::StatusCode::kInvalidArgument, "{} takes {} only, got {}", request.path, allowed, request.method);
  exchange.Respond({.status = 405, .body = ErrorBody(wrong, 405), .headers = {{"allow", allowed}}});
}

// "seconds=N", or nothing: all of it.
absl::StatusOr<std::chrono::seconds> ParseSeconds(std::string_view query, std::chrono::milliseconds longest) {
  const auto most = std::chrono::ceil<std::chrono::seconds>(longest);
  if (query.empty()) return most;
  int64_t seconds = 0;
  const char* const end = query.data() + query.size();
  const char* const begin = query.data() + std::min(kSeconds.size(), query.size());
  const auto [rest, error] = std::from_chars(begin, end, seconds);
  if (!query.starts_with(kSeconds) || rest != end || error != std::errc() || seconds < 1)
    return ParamError("seconds", "must be a whole number of seconds from 1: history?seconds=1800, got \"{}\"", query);
  return std::min(std::chrono::seconds(seconds), most);
}

OrderedJson MethodsJson() {
  OrderedJson out = {{"reuse", OrderedJson::array()}, {"decode", OrderedJson::array()}};
  for (const methods::Policy& policy : methods::Policies()) out["reuse"].push_back(policy.name);
  for (const methods::Selector& selector : methods::Selectors()) out["decode"].push_back(selector.name);
  return out;
}

using DrainCall = UnaryCall<v1::SetDrainingRequest, v1::SetDrainingResponse>;

void AuditDrain(const std::string& caller, const std::string& worker_id, bool draining, const absl::Status& result) {
  WriteAudit({.caller = caller,
              .api = "http",
              .call = draining ? "DrainWorker" : "UndrainWorker",
              .target = worker_id,
              .result = result});
}

template <typename WorkerType>
void SendDrain(const std::shared_ptr<HttpExchange>& exchange, const std::string& caller, WorkerType& worker,
               const std::string& worker_id, bool draining) {
  const auto call = std::make_shared<DrainCall>();
  call->request.set_draining(draining);
  DrainCall::Start(call, worker, &WorkerType::Async::SetDraining, std::chrono::steady_clock::now() + kDrainTimeout,
                   [exchange, caller, worker_id, draining](const absl::Status& status, DrainCall&) {
                     AuditDrain(caller, worker_id, draining, status);
                     if (!status.ok()) return RespondError(*exchange, Annotate(status, "worker " + worker_id), "");
                     RespondJson(*exchange, OrderedJson{{"worker", worker_id}, {"draining", draining}});
                   });
}

}  // namespace

ControlApi::ControlApi(Dispatcher& core, const History& history, const ApiKeys& keys, ControlApiOptions options)
    : core_(core), history_(history), keys_(keys), options_(std::move(options)) {}

bool ControlApi::Serves(const std::string& path) {
  return path.starts_with(kPrefix) || path == "/debug/requests" || IsUiPath(path);
}

absl::StatusOr<Caller> ControlApi::Authorize(const HttpRequest& request) const {
  SPLICE_ASSIGN_OR_RETURN(Caller caller, keys_.Authenticate(request.authorization));
  SPLICE_RETURN_IF_ERROR(CheckOperator(keys_, caller, options_.loopback));
  return caller;
}

std::optional<HttpResponse> ControlApi::Refuse(const HttpRequest& header) const {
  if (IsUiPath(header.path) && !header.has_body) return std::nullopt;
  std::optional<Refusal> refusal = RefuseOperation(header, keys_.enabled(), [&] { return Authorize(header).status(); });
  if (!refusal.has_value()) return std::nullopt;
  if (header.method == "POST") {
    const absl::StatusOr<Caller> known = keys_.Authenticate(header.authorization);
    WriteAudit({.caller = known.ok() ? std::string_view(known->name) : std::string_view(),
                .api = "http",
                .call = "Control",
                .target = header.path,
                .result = refusal->why});
  }
  return std::move(refusal->response);
}

void ControlApi::Handle(const ExchangePtr& exchange) {
  const HttpRequest& request = exchange->request();
  if (IsUiPath(request.path)) {
    return request.method == "GET" ? exchange->Respond(UiResponse(request)) : RespondMethod(*exchange, "GET");
  }
  const absl::StatusOr<Caller> caller = Authorize(request);
  if (!caller.ok()) return RespondError(*exchange, caller.status(), "");
  const std::string_view path =
      request.path == "/debug/requests"
          ? std::string_view("requests")
          : std::string_view(request.path).substr(std::min(kPrefix.size(), request.path.size()));
  const std::string_view cancelled = NameBetween(path, kRequests, kCancel);
  const std::string_view drained = NameBetween(path, kWorkers, kDrain);
  if (cancelled.empty() && drained.empty()) return Answer(exchange, path);
  if (request.method != "POST") return RespondMethod(*exchange, "POST");
  const absl::StatusOr<std::string> name = PercentDecode(std::string(cancelled.empty() ? drained : cancelled));
  if (!name.ok()) return RespondError(*exchange, name.status(), "");
  cancelled.empty() ? Drain(exchange, *caller, *name) : Cancel(exchange, *caller, *name);
}

void ControlApi::Answer(const ExchangePtr& exchange, std::string_view path) const {
  const HttpRequest& request = exchange->request();
  const std::string_view one = NameBetween(path, kRequests, "");
  const auto read = reads_.find(path);
  if (read == reads_.end() && path != kHistory && one.empty()) return RespondError(*exchange, NotHere(request), "");
  if (request.method != "GET") return RespondMethod(*exchange, "GET");
  if (read != reads_.end()) return RespondJson(*exchange, (this->*read->second)());
  if (path == kHistory) {
    const absl::StatusOr<std::chrono::seconds> age = ParseSeconds(request.query, history_.span());
    if (!age.ok()) return RespondError(*exchange, age.status(), "");
    return RespondJson(*exchange, HistoryJson(history_, *age));
  }
  const absl::StatusOr<std::string> id = PercentDecode(std::string(one));
  if (!id.ok()) return RespondError(*exchange, id.status(), "");
  const std::optional<RequestRecord> found = core_.requests().Find(*id);
  if (found.has_value()) return RespondJson(*exchange, RecordJson(*found));
  RespondError(*exchange,
               Errorf(absl::StatusCode::kNotFound,
                      "there is no request {} among those under way and the last that ended on this router", *id),
               "");
}

OrderedJson ControlApi::Status() const {
  const auto fleet = core_.fleet().snapshot();
  OrderedJson out;
  out["version"] = Version();
  out["commit"] = Commit();
  out["ready"] = core_.ready();
  out["draining"] = core_.admission().closed();
  out["unix_seconds"] = static_cast<double>(UnixNanos()) / 1e9;
  out["uptime_seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  out["model"] = {{"name", core_.model().name()},
                  {"max_context", core_.max_context()},
                  {"fingerprint", HexEncode(fleet->model.fingerprint)},
                  {"default_reuse", fleet->model.default_reuse},
                  {"head_map", fleet->model.head_map}};
  out["requests"] = {{"running", core_.admission().num_running()}, {"waiting", core_.admission().num_waiting()}};
  out["methods"] = MethodsJson();
  out["trace_ui_url"] = options_.trace_ui_url;
  RouterMetrics& m = core_.metrics();
  out["prompt_tokens"] = {{"prefix", m.reuse_prefix_tokens.Value()},
                          {"segment", m.reuse_segment_tokens.Value()},
                          {"miss", m.reuse_miss_tokens.Value()}};
  uint64_t queued = 0, free = 0, total = 0, sequences = 0, places = 0;
  double rate = 0;
  size_t draining_prefill = 0, draining_decode = 0;
  for (const PrefillView& p : fleet->prefill) {
    queued += p.queued_tokens;
    rate += p.tokens_per_s;
    draining_prefill += p.draining ? 1 : 0;
  }
  for (const DecodeView& d : fleet->decode) {
    free += d.free_pages;
    total += d.total_pages;
    sequences += d.sequences;
    places += d.max_sequences;
    draining_decode += d.draining ? 1 : 0;
  }
  out["pools"]["prefill"] = {{"workers", fleet->prefill.size()},
                             {"draining", draining_prefill},
                             {"queued_tokens", queued},
                             {"tokens_per_second", rate}};
  out["pools"]["decode"] = {{"workers", fleet->decode.size()}, {"draining", draining_decode}, {"sequences", sequences},
                            {"max_sequences", places},         {"free_pages", free},          {"total_pages", total}};
  return out;
}

OrderedJson ControlApi::Workers() const {
  const auto fleet = core_.fleet().snapshot();
  OrderedJson data = OrderedJson::array();
  for (const PrefillView& p : fleet->prefill) {
    OrderedJson links = OrderedJson::array();
    for (const auto& [decode, link] : p.peers)
      links.push_back({{"decode", decode}, {"transport", link.transport}, {"bytes_per_second", link.bytes_per_s}});
    const WorkerLoad load = core_.loads().Of(p.worker_id);
    data.push_back({{"worker", p.worker_id},
                    {"role", "prefill"},
                    {"address", p.address},
                    {"version", p.version},
                    {"epoch", p.epoch},
                    {"draining", p.draining},
                    {"queued_tokens", p.queued_tokens},
                    {"sent_tokens", load.prefill_tokens},
                    {"tokens_per_second", p.tokens_per_s},
                    {"free_pages", p.free_pages},
                    {"total_pages", p.total_pages},
                    {"max_prompt_tokens", p.max_prompt_tokens},
                    {"clock", ClockJson(p.clock)},
                    {"links", std::move(links)}});
  }
  for (const DecodeView& d : fleet->decode) {
    const WorkerLoad load = core_.loads().Of(d.worker_id);
    OrderedJson local = nullptr;
    for (const PrefillView& p : fleet->local) {
      if (p.local->decode_id != d.worker_id) continue;
      local = {{"max_new_tokens", p.local->max_new_tokens},
               {"queued_tokens", p.queued_tokens},
               {"sent_tokens", core_.loads().Of(p.worker_id).prefill_tokens},
               {"tokens_per_second", p.tokens_per_s}};
    }
    data.push_back({{"worker", d.worker_id},
                    {"role", "decode"},
                    {"address", d.address},
                    {"version", d.version},
                    {"epoch", d.epoch},
                    {"draining", d.draining},
                    {"sequences", d.sequences},
                    {"max_sequences", d.max_sequences},
                    {"sent_sequences", load.sequences},
                    {"free_pages", d.free_pages},
                    {"total_pages", d.total_pages},
                    {"step_seconds", d.step_seconds},
                    {"max_sequence_tokens", d.max_sequence_tokens},
                    {"local_prefill", std::move(local)},
                    {"clock", ClockJson(d.clock)}});
  }
  return {{"object", "list"}, {"data", std::move(data)}};
}

OrderedJson ControlApi::Requests() const {
  OrderedJson out;
  out["active"] = OrderedJson::array();
  out["recent"] = OrderedJson::array();
  for (const RequestRecord& record : core_.requests().Active()) out["active"].push_back(RecordJson(record));
  for (const RequestRecord& record : core_.requests().Recent()) out["recent"].push_back(RecordJson(record));
  return out;
}

OrderedJson ControlApi::Scale() const {
  OrderedJson out;
  out["object"] = "list";
  out["data"] = OrderedJson::array();
  for (const auto& [pool, plan] : core_.planner().plan()) {
    out["data"].push_back({{"pool", PoolName(pool)},
                           {"current", plan.current},
                           {"desired", plan.desired},
                           {"wanted", plan.wanted},
                           {"reason", plan.reason},
                           {"leaving", plan.leaving}});
  }
  return out;
}

OrderedJson ControlApi::Quality() const {
  const SteadyTime now = std::chrono::steady_clock::now();
  OrderedJson data = OrderedJson::array();
  for (const QualityRecord& record : core_.quality_records().All()) data.push_back(QualityJson(record, now));
  return {{"object", "list"}, {"data", std::move(data)}};
}

void ControlApi::Cancel(const ExchangePtr& exchange, const Caller& caller, const std::string& request_id) {
  const size_t cancelled = core_.Cancel(request_id, absl::CancelledError("an operator ended the request"));
  absl::Status result;
  if (cancelled == 0) result = Errorf(absl::StatusCode::kNotFound, "no request {} is under way here", request_id);
  WriteAudit({.caller = caller.name, .api = "http", .call = "CancelRequest", .target = request_id, .result = result});
  if (!result.ok()) return RespondError(*exchange, result, "");
  RespondJson(*exchange, OrderedJson{{"request_id", request_id}, {"cancelled", cancelled}});
}

void ControlApi::Drain(const ExchangePtr& exchange, const Caller& caller, const std::string& worker_id) {
  const absl::StatusOr<bool> draining = ParseDrainBody(exchange->request().body);
  if (!draining.ok()) return RespondError(*exchange, draining.status(), "");
  const auto fleet = core_.fleet().snapshot();
  for (const PrefillView& p : fleet->prefill) {
    if (p.worker_id != worker_id) continue;
    return SendDrain(exchange, caller.name, *p.worker, worker_id, *draining);
  }
  for (const DecodeView& d : fleet->decode) {
    if (d.worker_id != worker_id) continue;
    return SendDrain(exchange, caller.name, *d.worker, worker_id, *draining);
  }
  const absl::Status unknown =
      Errorf(absl::StatusCode::kNotFound, "there is no worker {}; splice ctl workers lists them", worker_id);
  AuditDrain(caller.name, worker_id, *draining, unknown);
  RespondError(*exchange, unknown, "");
}

}  // namespace spl::router
