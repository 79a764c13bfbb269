#include "services/membership/kubernetes.h"

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <utility>

#include "services/base/address.h"
#include "services/base/http_client.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/membership/endpoint_slices.h"

namespace spl::membership {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxListBytes = 64ull << 20;
constexpr size_t kMaxEventBytes = 8ull << 20;  // Kubernetes' own limit of an object is 1.5 MiB
constexpr char kListPage[] = "500";

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  std::string content = text.str();
  while (!content.empty() && (content.back() == '\n' || content.back() == '\r')) content.pop_back();
  if (!in || content.empty())
    return InvalidArgument("cannot read '{}': is the service account's token mounted in the pod?", path);
  return content;
}

absl::Status HttpError(int status, const std::string& what) {
  const auto code = status == 410                    ? absl::StatusCode::kOutOfRange
                    : status == 401 || status == 403 ? absl::StatusCode::kPermissionDenied
                                                     : absl::StatusCode::kUnavailable;
  const char* advice = code == absl::StatusCode::kPermissionDenied
                           ? " (the service account needs get, list and watch on endpointslices)"
                           : "";
  return Errorf(code, "the Kubernetes API answered {} to {}{}", status, what, advice);
}

// The text object[outer][key]. Empty: there is none.
std::string TextAt(const json& object, const char* outer, const char* key) {
  if (!object.is_object() || !object.contains(outer) || !object[outer].is_object()) return "";
  const auto found = object[outer].find(key);
  return found != object[outer].end() && found->is_string() ? found->get<std::string>() : "";
}

class KubernetesDiscovery final : public Discovery {
 public:
  KubernetesDiscovery(KubernetesOptions options, const HostPort& server, std::shared_ptr<const TlsTrust> trust)
      : options_(std::move(options)),
        api_({.host = server.host,
              .port = std::to_string(server.port),
              .server = "the Kubernetes API at " + options_.api_server,
              .trust = std::move(trust),
              .timeout = options_.call_timeout}),
        slices_(options_.service, options_.port_name) {}
  ~KubernetesDiscovery() override { Stop(); }

  void Start(OnChange on_change) override {
    on_change_ = std::move(on_change);
    thread_ = std::thread([this] { Run(); });
  }
  void Stop() override {
    if (!thread_.joinable()) return;
    api_.Cancel();
    thread_.join();
  }
  std::string description() const override {
    return fmt::format("kubernetes {} {}/{}", options_.api_server, options_.name_space, options_.service);
  }

 private:
  // `on_data` gets the body piece by piece and returns false to end the call. Any status but 200 is an error.
  absl::Status Get(const std::string& target, std::chrono::milliseconds body_timeout,
                   const std::function<bool(std::string_view)>& on_data) {
    SPLICE_ASSIGN_OR_RETURN(const std::string token, ReadFile(options_.token_file));
    SPLICE_ASSIGN_OR_RETURN(
        const int status,
        api_.Exchange({.target = target,
                       .headers = {{"Authorization", "Bearer " + token}, {"Accept", "application/json"}},
                       .body_timeout = body_timeout},
                      [&](int status, std::string_view piece) { return status == 200 && on_data(piece); }));
    return status == 200 ? absl::OkStatus() : HttpError(status, target);
  }

  void Run() {
    bool reachable = true;
    while (!api_.cancelled()) {
      absl::Status status = have_list_ ? absl::OkStatus() : List();
      if (status.ok()) {
        if (!reachable) log::Info("membership.kubernetes_back", log::F("api", options_.api_server));
        reachable = true;
        status = Watch();
      }
      if (api_.cancelled()) return;
      if (status.code() == absl::StatusCode::kOutOfRange) {
        log::Info("membership.kubernetes_list_again", log::F("resource_version", version_), log::F("status", status));
        have_list_ = false;
      } else if (!status.ok()) {
        if (reachable) log::Warning("membership.kubernetes_unreachable", log::F("status", status));
        reachable = false;
      }
      // Pauses even after a watch that ended normally: it may have ended at once, and the API server must not be called
      // in a tight loop.
      if (!api_.Pause(status.ok() ? options_.retry_pause / 10 : options_.retry_pause)) return;
    }
  }

  std::string Target(const std::string& more) const {
    // "kubernetes.io/service-name in (S-prefill,S-decode)"; the names are DNS labels.
    return "/apis/discovery.k8s.io/v1/namespaces/" + options_.name_space +
           "/endpointslices?labelSelector=kubernetes.io%2Fservice-name%20in%20%28" + options_.service + "-prefill%2C" +
           options_.service + "-decode%29" + more;
  }

  absl::Status List() {
    EndpointSlices listed(options_.service, options_.port_name);
    std::string more, version;
    do {
      std::string body;
      bool too_long = false;
      SPLICE_RETURN_IF_ERROR(
          Get(Target(std::string("&limit=") + kListPage + more), options_.call_timeout, [&](std::string_view data) {
            body += data;
            too_long = body.size() > kMaxListBytes;
            return !too_long;
          }));
      const json list = json::parse(body, nullptr, /*allow_exceptions=*/false);
      if (too_long || !list.is_object() || !list.contains("items") || !list["items"].is_array())
        return absl::UnavailableError("the Kubernetes API sent no list of EndpointSlices");
      for (const json& slice : list["items"]) Note(listed.Put(slice));
      version = TextAt(list, "metadata", "resourceVersion");
      const std::string next = TextAt(list, "metadata", "continue");
      more = next.empty() ? "" : "&continue=" + next;
    } while (!more.empty());
    slices_.Replace(std::move(listed));
    version_ = version;
    have_list_ = true;
    Deliver();
    return absl::OkStatus();
  }

  absl::Status Watch() {
    const std::string target = Target("&watch=1&allowWatchBookmarks=true&resourceVersion=" + version_ +
                                      "&timeoutSeconds=" + std::to_string(options_.watch_time.count()));
    std::string line;
    absl::Status taken;
    const absl::Status status =
        Get(target, std::chrono::milliseconds(options_.watch_time) + options_.call_timeout, [&](std::string_view data) {
          for (const char c : data) {
            if (c != '\n') {
              line += c;
              continue;
            }
            taken = Take(line);
            line.clear();
            if (!taken.ok()) return false;
          }
          if (line.size() > kMaxEventBytes) taken = absl::UnavailableError("a watch event is too long");
          return taken.ok();
        });
    return taken.ok() ? status : taken;
  }

  absl::Status Take(const std::string& line) {
    if (line.empty()) return absl::OkStatus();
    const json event = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!event.is_object() || !event.contains("object") || !event["object"].is_object())
      return absl::UnavailableError("the Kubernetes API sent a watch event that is none");
    const json& object = event["object"];
    const std::string type =
        event.contains("type") && event["type"].is_string() ? event["type"].get<std::string>() : "";
    if (type == "ERROR") {
      const bool has_code = object.contains("code") && object["code"].is_number_integer();
      return HttpError(has_code ? object["code"].get<int>() : 0, "a watch");
    }
    if (type == "ADDED" || type == "MODIFIED") Note(slices_.Put(object));
    if (type == "DELETED") slices_.Remove(object);
    if (std::string version = TextAt(object, "metadata", "resourceVersion"); !version.empty())
      version_ = std::move(version);
    if (type != "BOOKMARK") Deliver();
    return absl::OkStatus();
  }

  void Note(const absl::Status& status) {
    if (!status.ok()) log::Warning("membership.bad_slice", log::F("status", status));
  }

  void Deliver() {
    Members members = slices_.members();
    if (delivered_ && members == last_) return;
    delivered_ = true;
    last_ = std::move(members);
    on_change_(last_);
  }

  const KubernetesOptions options_;
  HttpClient api_;
  OnChange on_change_;
  // Used by the thread only.
  EndpointSlices slices_;
  std::string version_;
  bool have_list_ = false;
  Members last_;
  bool delivered_ = false;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Discovery>> MakeKubernetesDiscovery(KubernetesOptions options) {
  auto server = ParseHostPort(options.api_server);
  if (!server.ok()) return Annotate(server.status(), "the address of the Kubernetes API");
  SPLICE_ASSIGN_OR_RETURN(auto trust, TlsTrust::Load("the CA of the Kubernetes API", options.ca_file));
  SPLICE_RETURN_IF_ERROR(ReadFile(options.token_file).status());
  return std::make_unique<KubernetesDiscovery>(std::move(options), *server, std::move(trust));
}

}  // namespace spl::membership
