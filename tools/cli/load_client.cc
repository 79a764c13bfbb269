#include "tools/cli/load_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "services/base/http_client.h"
#include "services/base/status.h"
#include "services/base/tls_stream.h"
#include "tools/cli/endpoint.h"

namespace spl::cli {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using nlohmann::json;
using Clock = std::chrono::steady_clock;
using ErrorCode = boost::system::error_code;

constexpr size_t kMaxReplyBytes = size_t{1} << 30;

http::request<http::string_body> MakeRequest(const LoadOptions& options, const std::string& method,
                                             const std::string& path, const std::string& body) {
  http::request<http::string_body> request;
  request.method_string(method);
  request.target(options.endpoint.path + path);
  request.version(11);
  request.set(http::field::host, options.endpoint.HostHeader());
  request.set(http::field::content_type, "application/json");
  if (!options.api_key.empty()) request.set(http::field::authorization, "Bearer " + options.api_key);
  request.body() = body;
  request.prepare_payload();
  return request;
}

std::string ErrorMessageOf(unsigned status, const std::string& body) {
  const json parsed = json::parse(body, nullptr, false);
  if (parsed.is_object() && parsed.contains("error") && parsed["error"].is_object()) {
    return fmt::format("HTTP {}: {}", status, parsed["error"].value("message", ""));
  }
  return fmt::format("HTTP {}", status);
}

absl::StatusOr<tcp::resolver::results_type> Resolve(asio::io_context& io, const HttpUrl& url) {
  ErrorCode error;
  tcp::resolver resolver(io);
  auto found = resolver.resolve(url.host, url.port, error);
  if (error) return Errorf(absl::StatusCode::kUnavailable, "cannot resolve {}: {}", url.HostHeader(), error.message());
  return found;
}

// Null: plain text.
absl::StatusOr<std::shared_ptr<const TlsTrust>> TrustOf(const LoadOptions& options) {
  if (!options.endpoint.https) return nullptr;
  return TlsTrust::Load(kCaFlag, options.ca_file);
}

using Stream = TlsStream<beast::tcp_stream>;

class Run;

// One stream of the run: a connection that is kept between requests.
class Slot : public std::enable_shared_from_this<Slot> {
 public:
  Slot(Run& run, asio::io_context& io) : run_(run), io_(io) {}
  void Send(size_t index);

 private:
  void Connect();
  void Handshake();
  void Write();
  void ReadHead();
  void ReadSome();
  void OnBody();
  void OnEvent(const std::string& data);
  void Done(std::string error);
  RequestResult& result();

  Run& run_;
  asio::io_context& io_;
  std::optional<Stream> stream_;
  beast::flat_buffer buffer_;
  std::optional<http::response_parser<http::string_body>> parser_;
  http::request<http::string_body> request_;
  std::string events_;
  size_t index_ = 0;
  bool fresh_ = false;  // the connection has served no request yet
  bool finished_ = false;
};

class Run {
 public:
  Run(const LoadOptions& options, const std::vector<PlannedRequest>& plan,
      const std::function<void(const LoadProgress&)>& on_progress)
      : options_(options), plan_(plan), on_progress_(on_progress), arrival_timer_(io_), progress_timer_(io_) {
    results_.resize(plan.size());
  }

  absl::StatusOr<LoadOutcome> Execute() {
    SPLICE_ASSIGN_OR_RETURN(trust_, TrustOf(options_));
    SPLICE_ASSIGN_OR_RETURN(targets_, Resolve(io_, options_.endpoint));
    start_ = Clock::now();
    ArmProgress();
    Fill();
    io_.run();
    if (on_progress_) on_progress_(Progress());
    const bool stopped = finished_ < plan_.size();
    if (stopped) std::erase_if(results_, [](const RequestResult& result) { return result.end_s == 0; });
    return LoadOutcome{.results = std::move(results_), .duration_s = Now(), .stopped = stopped};
  }

  double Now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void OnFinished(std::shared_ptr<Slot> slot, bool failed) {
    --running_;
    ++finished_;
    failed_ += failed ? 1 : 0;
    idle_.push_back(std::move(slot));
    if (finished_ == plan_.size()) {
      progress_timer_.cancel();
      arrival_timer_.cancel();
      return;
    }
    Fill();
  }

  const LoadOptions& options_;
  const std::vector<PlannedRequest>& plan_;
  tcp::resolver::results_type targets_;
  std::shared_ptr<const TlsTrust> trust_;  // null: plain text
  std::vector<RequestResult> results_;
  uint64_t output_events_ = 0;

 private:
  // Starts the requests that may start: a stream is free and, in an open loop, the planned time has come.
  void Fill() {
    while (next_ < plan_.size() && running_ < options_.concurrency) {
      const double at = options_.open_loop ? std::chrono::duration<double>(plan_[next_].at).count() : Now();
      if (at > Now()) return WaitUntil(plan_[next_].at);
      results_[next_].scheduled_s = at;
      ++running_;
      if (idle_.empty()) idle_.push_back(std::make_shared<Slot>(*this, io_));
      const std::shared_ptr<Slot> slot = std::move(idle_.back());
      idle_.pop_back();
      slot->Send(next_++);
    }
  }

  void WaitUntil(std::chrono::nanoseconds at) {
    arrival_timer_.expires_at(start_ + std::chrono::duration_cast<Clock::duration>(at));
    arrival_timer_.async_wait([this](const ErrorCode& error) {
      if (!error) Fill();
    });
  }

  void ArmProgress() {
    if (!on_progress_ && options_.stop == nullptr) return;
    progress_timer_.expires_after(std::chrono::milliseconds(200));
    progress_timer_.async_wait([this](const ErrorCode& error) {
      if (error) return;
      if (options_.stop != nullptr && options_.stop->load()) return io_.stop();
      if (on_progress_) on_progress_(Progress());
      ArmProgress();
    });
  }

  LoadProgress Progress() const {
    return {.finished = static_cast<uint32_t>(finished_),
            .failed = failed_,
            .running = running_,
            .total = static_cast<uint32_t>(plan_.size()),
            .output_events = output_events_,
            .elapsed_s = Now()};
  }

  const std::function<void(const LoadProgress&)>& on_progress_;
  asio::io_context io_{1};
  asio::steady_timer arrival_timer_;
  asio::steady_timer progress_timer_;
  Clock::time_point start_;
  std::vector<std::shared_ptr<Slot>> idle_;
  size_t next_ = 0;
  size_t finished_ = 0;
  uint32_t running_ = 0;
  uint32_t failed_ = 0;
};

RequestResult& Slot::result() { return run_.results_[index_]; }

void Slot::Send(size_t index) {
  index_ = index;
  finished_ = false;
  events_.clear();
  request_ = MakeRequest(run_.options_, "POST", run_.plan_[index].path, run_.plan_[index].body);
  if (stream_.has_value()) {
    fresh_ = false;
    return Write();
  }
  Connect();
}

void Slot::Connect() {
  fresh_ = true;
  buffer_.clear();
  stream_.emplace(io_);
  stream_->next_layer().expires_after(run_.options_.timeout);
  const auto connected = [self = shared_from_this()](const ErrorCode& error, const tcp::endpoint&) {
    if (error) return self->Done("connect: " + error.message());
    ErrorCode ignored;
    self->stream_->next_layer().socket().set_option(tcp::no_delay(true), ignored);
    self->run_.trust_ == nullptr ? self->Write() : self->Handshake();
  };
  stream_->next_layer().async_connect(run_.targets_, connected);
}

void Slot::Handshake() {
  const std::string& host = run_.options_.endpoint.host;
  run_.trust_->Start(*stream_, host);
  stream_->async_handshake(asio::ssl::stream_base::client, [self = shared_from_this(), &host](const ErrorCode& error) {
    if (!error) return self->Write();
    self->Done("connect: " + self->run_.trust_->Explain(self->stream_->native_handle(), host, error));
  });
}

void Slot::Write() {
  stream_->next_layer().expires_after(run_.options_.timeout);
  http::async_write(*stream_, request_, [self = shared_from_this()](const ErrorCode& error, size_t) {
    // The server may have closed a kept connection meanwhile.
    if (error && !self->fresh_) return self->Connect();
    if (error) return self->Done("send: " + error.message());
    self->ReadHead();
  });
}

void Slot::ReadHead() {
  parser_.emplace();
  parser_->body_limit(uint64_t{1} << 40);  // boost::none refuses every body of known length in Boost 1.74
  http::async_read_header(*stream_, buffer_, *parser_, [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (error && !self->fresh_) return self->Connect();
    if (error) return self->Done("read: " + error.message());
    self->OnBody();
  });
}

void Slot::ReadSome() {
  http::async_read_some(*stream_, buffer_, *parser_, [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (error) return self->Done("read: " + error.message());
    self->OnBody();
  });
}

void Slot::OnBody() {
  const unsigned status = parser_->get().result_int();
  if (status == 200) {
    events_ += parser_->get().body();
    parser_->get().body().clear();
    for (size_t end; (end = events_.find("\n\n")) != std::string::npos; events_.erase(0, end + 2)) {
      if (events_.compare(0, 6, "data: ") == 0) OnEvent(events_.substr(6, end - 6));
    }
  }
  if (!parser_->is_done()) return ReadSome();
  if (status != 200) return Done(ErrorMessageOf(status, parser_->get().body()));
  if (!finished_ && result().error.empty()) result().error = "the stream ended early";
  Done(result().error);
}

void Slot::OnEvent(const std::string& data) {
  if (data == "[DONE]") {
    finished_ = true;
    return;
  }
  const json event = json::parse(data, nullptr, false);
  if (!event.is_object()) {
    result().error = "an event is not JSON";
    return;
  }
  if (event.contains("error")) {
    result().error = ErrorMessageOf(200, data);
    return;
  }
  const auto usage = event.find("usage");
  if (usage != event.end() && usage->is_object()) {
    result().prompt_tokens = usage->value("prompt_tokens", 0u);
    result().completion_tokens = usage->value("completion_tokens", 0u);
    const auto details = usage->find("prompt_tokens_details");
    if (details != usage->end() && details->is_object()) result().cached_tokens = details->value("cached_tokens", 0u);
  }
  const auto choices = event.find("choices");
  if (choices == event.end() || !choices->is_array() || choices->empty()) return;
  const json& choice = choices->front();
  const bool role_only = choice.contains("delta") && choice["delta"].contains("role");
  const bool end_only = choice.contains("delta") && choice["delta"].empty();
  if (role_only || end_only) return;
  const double now = run_.Now();
  RequestResult& r = result();
  if (r.first_token_s == 0) {
    r.first_token_s = now;
  } else {
    r.gaps_s.push_back(static_cast<float>(now - r.last_token_s));
  }
  r.last_token_s = now;
  ++run_.output_events_;
}

void Slot::Done(std::string error) {
  RequestResult& r = result();
  r.error = std::move(error);
  r.end_s = run_.Now();
  const bool keep = r.error.empty() && parser_.has_value() && parser_->get().keep_alive();
  if (!keep) stream_.reset();
  parser_.reset();
  // Posted, so that an immediate failure does not start the next request inside of this one.
  asio::post(io_, [self = shared_from_this(), failed = !r.error.empty()] { self->run_.OnFinished(self, failed); });
}

}  // namespace

absl::StatusOr<LoadOutcome> RunLoad(const LoadOptions& options, const std::vector<PlannedRequest>& plan,
                                    const std::function<void(const LoadProgress&)>& on_progress) {
  if (plan.empty()) return InvalidArgument("there is no request to send");
  return Run(options, plan, on_progress).Execute();
}

absl::StatusOr<std::string> FetchJson(const LoadOptions& options, const std::string& method, const std::string& path,
                                      const std::string& body) {
  SPLICE_ASSIGN_OR_RETURN(auto trust, TrustOf(options));
  HttpClient client({.host = options.endpoint.host,
                     .port = options.endpoint.port,
                     .server = options.endpoint.HostHeader(),
                     .trust = std::move(trust),
                     .timeout = options.timeout});
  HttpCall call{.method = method,
                .target = options.endpoint.path + path,
                .headers = {{"Content-Type", "application/json"}},
                .body = body,
                .body_timeout = options.timeout};
  if (!options.api_key.empty()) call.headers.emplace_back("Authorization", "Bearer " + options.api_key);
  SPLICE_ASSIGN_OR_RETURN(HttpAnswer answer, client.Call(call, kMaxReplyBytes));
  if (answer.status != 200)
    return Errorf(absl::StatusCode::kFailedPrecondition, "{}: {}", path,
                  ErrorMessageOf(static_cast<unsigned>(answer.status), answer.body));
  return std::move(answer.body);
}

}  // namespace spl::cli
