#include "services/base/otlp_exporter.h"

#include <CLI/CLI.hpp>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "services/base/address.h"
#include "services/base/http_client.h"
#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr uint64_t kMaxAnswerBytes = 1 << 20;

struct Collector {
  HostPort address;
  std::string target;
};

absl::StatusOr<Collector> ParseEndpoint(const std::string& endpoint) {
  constexpr std::string_view kScheme = "http://";
  if (!endpoint.starts_with(kScheme))
    return InvalidArgument("--otlp-endpoint '{}' is not http://HOST:PORT (TLS is for a collector beside this program)",
                           endpoint);
  const std::string rest = endpoint.substr(kScheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  Collector out;
  std::string host = rest.substr(0, slash);
  if (host.find(':') == std::string::npos) host += ":4318";  // OTLP's own
  const absl::StatusOr<HostPort> address = ParseHostPort(host);
  if (!address.ok()) return Annotate(address.status(), "--otlp-endpoint");
  out.address = *address;
  out.target = rest.substr(slash);
  while (out.target.ends_with('/')) out.target.pop_back();
  out.target += "/v1/traces";
  return out;
}

prometheus::Counter& SpansCounter(Metrics& metrics, const char* result) {
  return metrics.Counter("splice_trace_spans_total", "Spans of sampled traces, by what became of them.",
                         {{"result", result}});
}

class Exporter final : public OtlpExporter {
 public:
  Exporter(const TraceOptions& options, Collector collector, std::string program, std::string instance,
           Metrics& metrics)
      : options_(options),
        program_(std::move(program)),
        instance_(std::move(instance)),
        target_(std::move(collector.target)),
        client_({.host = collector.address.host,
                 .port = std::to_string(collector.address.port),
                 .server = "the collector at " + collector.address.ToString(),
                 .timeout = options.timeout}),
        exported_(SpansCounter(metrics, "exported")),
        queue_full_(SpansCounter(metrics, "queue_full")),
        not_sent_(SpansCounter(metrics, "not_sent")),
        thread_([this] { Loop(); }) {}

  ~Exporter() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void Take(SpanData span) override {
    std::unique_lock lock(mutex_);
    if (queue_.size() >= options_.max_queued) {
      lock.unlock();
      return queue_full_.Increment();
    }
    queue_.push_back(std::move(span));
    const bool full = queue_.size() == options_.max_batch;
    lock.unlock();
    if (full) changed_.notify_one();
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    Clock::time_point not_before = Clock::now();
    while (!stopping_ || !queue_.empty()) {
      const auto wake = std::max(not_before, Clock::now() + options_.interval);
      changed_.wait_until(
          lock, wake, [&] { return stopping_ || (queue_.size() >= options_.max_batch && Clock::now() >= not_before); });
      if (queue_.empty()) continue;
      const bool last_try = stopping_;
      lock.unlock();
      const bool sent = SendAll();
      lock.lock();
      if (sent) continue;
      not_before = Clock::now() + options_.pause;
      if (last_try) return;
    }
  }

  absl::Status Post(std::string body) {
    const auto answer = client_.Call({.method = "POST",
                                      .target = target_,
                                      .headers = {{"Content-Type", "application/json"}},
                                      .body = std::move(body),
                                      .body_timeout = options_.timeout},
                                     kMaxAnswerBytes);
    if (!answer.ok()) return answer.status();
    if (answer->status / 100 == 2) return absl::OkStatus();
    return Errorf(absl::StatusCode::kUnavailable, "the collector answered {}: {}", answer->status,
                  answer->body.substr(0, 200));
  }

  // All that is queued, batch by batch, until one is refused.
  bool SendAll() {
    while (true) {
      std::vector<SpanData> batch;
      {
        std::lock_guard lock(mutex_);
        while (!queue_.empty() && batch.size() < options_.max_batch) {
          batch.push_back(std::move(queue_.front()));
          queue_.pop_front();
        }
      }
      if (batch.empty()) return true;
      const absl::Status status = Post(EncodeOtlp(program_, instance_, batch));
      (status.ok() ? exported_ : not_sent_).Increment(static_cast<double>(batch.size()));
      if (status.ok() == failing_) {
        failing_ = !status.ok();
        if (failing_) log::Warning("trace.not_exported", log::F("status", status));
        if (!failing_) log::Info("trace.exported_again");
      }
      if (!status.ok()) return false;
    }
  }

  const TraceOptions options_;
  const std::string program_, instance_;
  const std::string target_;
  HttpClient client_;
  prometheus::Counter &exported_, &queue_full_, &not_sent_;
  bool failing_ = false;  // the thread's own
  std::mutex mutex_;      // guards the two below
  std::condition_variable changed_;
  std::deque<SpanData> queue_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest is there
};

json AttributeJson(const std::string& key, const SpanValue& value) {
  json encoded;
  // 64-bit integers are strings in proto3's JSON.
  if (const auto* text = std::get_if<std::string>(&value)) encoded = {{"stringValue", *text}};
  if (const auto* number = std::get_if<int64_t>(&value)) encoded = {{"intValue", std::to_string(*number)}};
  if (const auto* real = std::get_if<double>(&value)) encoded = {{"doubleValue", *real}};
  if (const auto* flag = std::get_if<bool>(&value)) encoded = {{"boolValue", *flag}};
  return {{"key", key}, {"value", std::move(encoded)}};
}

json SpanJson(const SpanData& span) {
  constexpr int kError = 2;
  json out = {{"traceId", HexEncode(span.context.trace_id)},
              {"spanId", HexEncode(span.context.span_id)},
              {"name", span.name},
              {"kind", static_cast<int>(span.kind)},
              {"startTimeUnixNano", std::to_string(span.start_unix_ns)},
              {"endTimeUnixNano", std::to_string(span.end_unix_ns)}};
  if (span.parent_id != std::array<uint8_t, 8>{}) out["parentSpanId"] = HexEncode(span.parent_id);
  if (!span.context.state.empty()) out["traceState"] = span.context.state;
  if (!span.attributes.empty()) {
    json attributes = json::array();
    for (const auto& [key, value] : span.attributes) attributes.push_back(AttributeJson(key, value));
    out["attributes"] = std::move(attributes);
  }
  if (!span.status.ok()) out["status"] = {{"code", kError}, {"message", span.status.ToString()}};
  return out;
}

}  // namespace

std::string EncodeOtlp(const std::string& program, const std::string& instance, const std::vector<SpanData>& spans) {
  json encoded = json::array();
  for (const SpanData& span : spans) encoded.push_back(SpanJson(span));
  const json resource = {{"attributes", json::array({AttributeJson("service.name", program),
                                                     AttributeJson("service.instance.id", instance)})}};
  const json scope = {{"scope", {{"name", "splice"}}}, {"spans", std::move(encoded)}};
  const json body = {{"resourceSpans", json::array({{{"resource", resource}, {"scopeSpans", json::array({scope})}}})}};
  return body.dump(-1, ' ', false, json::error_handler_t::replace);  // names of clients may be no UTF-8
}

absl::StatusOr<std::shared_ptr<OtlpExporter>> OtlpExporter::Start(const TraceOptions& options,
                                                                  const std::string& program,
                                                                  const std::string& instance, Metrics& metrics) {
  SPLICE_ASSIGN_OR_RETURN(Collector collector, ParseEndpoint(options.endpoint));
  return std::make_shared<Exporter>(options, std::move(collector), program, instance, metrics);
}

absl::StatusOr<std::unique_ptr<Tracer>> MakeTracer(const TraceOptions& options, const std::string& program,
                                                   const std::string& instance, Metrics& metrics) {
  if (options.endpoint.empty()) return std::make_unique<Tracer>();
  if (!(options.sample_ratio >= 0 && options.sample_ratio <= 1))
    return InvalidArgument("--trace-sample is {}, not from 0 to 1", options.sample_ratio);
  SPLICE_ASSIGN_OR_RETURN(std::shared_ptr<OtlpExporter> exporter,
                          OtlpExporter::Start(options, program, instance, metrics));
  return std::make_unique<Tracer>(std::move(exporter), options.sample_ratio);
}

void TraceOptions::Register(CLI::App& app) {
  app.add_option("--otlp-endpoint", endpoint,
                 "OpenTelemetry collector for the spans of sampled requests, http://HOST:PORT (OTLP over HTTP, JSON); "
                 "empty: no spans")
      ->envname("OTEL_EXPORTER_OTLP_ENDPOINT");
  app.add_option("--trace-sample", sample_ratio,
                 "share of the requests without a traceparent that are traced; a traceparent decides for its request")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

}  // namespace spl
