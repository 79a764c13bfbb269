#include "services/membership/kubernetes.h"

#include <utility>
// Before Asio, which uses std::exchange without it.
#include <array>
#include <atomic>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl.hpp>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "services/base/address.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/membership/endpoint_slices.h"

namespace spl::membership {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
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

// One HTTPS connection at a time, on the calling thread. Cancel, from any thread, ends the running call and all later
// ones.
class ApiClient {
 public:
  explicit ApiClient(KubernetesOptions options, HostPort server)
      : options_(std::move(options)), server_(std::move(server)) {}

  absl::Status Init() {
    boost::system::error_code error;
    context_.load_verify_file(options_.ca_file, error);
    if (error) return InvalidArgument("cannot read the CA '{}': {}", options_.ca_file, error.message());
    context_.set_verify_mode(asio::ssl::verify_peer);
    return ReadFile(options_.token_file).status();
  }

  // GET; `on_data` gets the body piece by piece and returns false to end the call. Any status but 200 is an error.
  absl::Status Get(const std::string& target, std::chrono::milliseconds body_timeout,
                   const std::function<bool(std::string_view)>& on_data) {
    if (cancelled_) return absl::CancelledError("stopped");
    SPLICE_ASSIGN_OR_RETURN(const std::string token, ReadFile(options_.token_file));
    stream_ = std::make_unique<Stream>(io_, context_);
    const absl::Status status = Exchange(target, token, body_timeout, on_data);
    beast::error_code ignored;
    beast::get_lowest_layer(*stream_).socket().close(ignored);
    stream_.reset();
    return status;
  }

  // False when cancelled.
  bool Pause(std::chrono::milliseconds time) {
    pause_.expires_after(time);
    Run([&](auto done) { pause_.async_wait([done](const boost::system::error_code&) { done(); }); });
    return !cancelled_;
  }

  void Cancel() {
    asio::post(io_, [this] {
      cancelled_ = true;
      resolver_.cancel();
      pause_.cancel();
      if (stream_ != nullptr) beast::get_lowest_layer(*stream_).cancel();
    });
  }
  bool cancelled() const { return cancelled_; }

 private:
  using Stream = beast::ssl_stream<beast::tcp_stream>;

  // Starts one operation and runs the context until it has ended.
  template <typename Start>
  void Run(Start start) {
    bool ended = false;
    if (!cancelled_) {
      start([&ended] { ended = true; });
      io_.restart();
      while (!ended) io_.run_one();
    }
    io_.restart();
    io_.poll();  // a Cancel that came meanwhile
  }

  template <typename Start>
  absl::Status Step(const char* what, std::chrono::milliseconds timeout, Start start) {
    beast::error_code error;
    beast::get_lowest_layer(*stream_).expires_after(timeout);
    Run([&](auto done) {
      start([&error, done](const beast::error_code& e, auto&&...) {
        error = e;
        done();
      });
    });
    if (cancelled_) return absl::CancelledError("stopped");
    if (!error) return absl::OkStatus();
    return Errorf(absl::StatusCode::kUnavailable, "{} the Kubernetes API at {}: {}", what, options_.api_server,
                  error.message());
  }

  absl::Status Exchange(const std::string& target, const std::string& token, std::chrono::milliseconds body_timeout,
                        const std::function<bool(std::string_view)>& on_data) {
    const auto timeout = options_.call_timeout;
    boost::system::error_code not_an_address;
    asio::ip::make_address(server_.host, not_an_address);
    // Only names may be announced.
    if (not_an_address) SSL_set_tlsext_host_name(stream_->native_handle(), server_.host.c_str());
    stream_->set_verify_callback(asio::ssl::host_name_verification(server_.host));
    tcp::resolver::results_type addresses;
    SPLICE_RETURN_IF_ERROR(Step("resolving", timeout, [&](auto done) {
      resolver_.async_resolve(server_.host, std::to_string(server_.port),
                              [&addresses, done](const beast::error_code& e, tcp::resolver::results_type found) {
                                addresses = std::move(found);
                                done(e);
                              });
    }));
    SPLICE_RETURN_IF_ERROR(Step("connecting to", timeout,
                                [&](auto done) { beast::get_lowest_layer(*stream_).async_connect(addresses, done); }));
    SPLICE_RETURN_IF_ERROR(
        Step("TLS with", timeout, [&](auto done) { stream_->async_handshake(asio::ssl::stream_base::client, done); }));
    http::request<http::empty_body> request{http::verb::get, target, 11};
    request.set(http::field::host, server_.ToString());
    request.set(http::field::authorization, "Bearer " + token);
    request.set(http::field::accept, "application/json");
    request.set(http::field::connection, "close");
    SPLICE_RETURN_IF_ERROR(Step("writing to", timeout, [&](auto done) { http::async_write(*stream_, request, done); }));
    beast::flat_buffer buffer;
    http::response_parser<http::buffer_body> parser;
    parser.body_limit(uint64_t{1} << 62);  // the readers have limits of their own
    SPLICE_RETURN_IF_ERROR(
        Step("reading from", timeout, [&](auto done) { http::async_read_header(*stream_, buffer, parser, done); }));
    const int status = static_cast<int>(parser.get().result_int());
    if (status != 200) return HttpError(status, target);
    std::array<char, 16384> piece;
    while (!parser.is_done()) {
      parser.get().body().data = piece.data();
      parser.get().body().size = piece.size();
      const absl::Status read = Step("reading from", body_timeout, [&](auto done) {
        http::async_read_some(*stream_, buffer, parser, [done](const beast::error_code& e, size_t size) {
          done(e == http::error::need_buffer ? beast::error_code() : e, size);
        });
      });
      SPLICE_RETURN_IF_ERROR(read);
      if (!on_data({piece.data(), piece.size() - parser.get().body().size})) return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  const KubernetesOptions options_;
  const HostPort server_;
  asio::ssl::context context_{asio::ssl::context::tls_client};
  asio::io_context io_;
  tcp::resolver resolver_{io_};
  asio::steady_timer pause_{io_};
  std::unique_ptr<Stream> stream_;
  std::atomic<bool> cancelled_{false};
};

class KubernetesDiscovery final : public Discovery {
 public:
  KubernetesDiscovery(KubernetesOptions options, HostPort server)
      : options_(std::move(options)),
        api_(options_, std::move(server)),
        slices_(options_.service, options_.port_name) {}
  ~KubernetesDiscovery() override { Stop(); }

  absl::Status Init() { return api_.Init(); }

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
      SPLICE_RETURN_IF_ERROR(api_.Get(Target(std::string("&limit=") + kListPage + more), options_.call_timeout,
                                      [&](std::string_view data) {
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
    const absl::Status status = api_.Get(target, std::chrono::milliseconds(options_.watch_time) + options_.call_timeout,
                                         [&](std::string_view data) {
                                           for (const char c : data) {
                                             if (c != '\n') {
                                               line += c;
                                               continue;
                                             }
                                             taken = Take(line);
                                             line.clear();
                                             if (!taken.ok()) return false;
                                           }
                                           if (line.size() > kMaxEventBytes)
                                             taken = absl::UnavailableError("a watch event is too long");
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
  ApiClient api_;
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
  auto discovery = std::make_unique<KubernetesDiscovery>(std::move(options), *std::move(server));
  SPLICE_RETURN_IF_ERROR(discovery->Init());
  return discovery;
}

}  // namespace spl::membership
