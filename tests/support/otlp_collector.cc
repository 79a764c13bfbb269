#include "tests/support/otlp_collector.h"

#include <algorithm>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

namespace spl::testing {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using nlohmann::json;

}  // namespace

OtlpCollector::OtlpCollector() : acceptor_(io_, tcp::endpoint(asio::ip::make_address("127.0.0.1"), 0)) {
  thread_ = std::thread([this] { Loop(); });
}

OtlpCollector::~OtlpCollector() {
  stopping_ = true;
  {
    asio::io_context io;
    tcp::socket wake(io);
    boost::system::error_code ignored;
    wake.connect(acceptor_.local_endpoint(), ignored);
  }
  thread_.join();
}

std::string OtlpCollector::endpoint() const {
  return "http://127.0.0.1:" + std::to_string(acceptor_.local_endpoint().port());
}

std::vector<OtlpCollector::ReceivedSpan> OtlpCollector::spans() const {
  std::lock_guard lock(mutex_);
  return spans_;
}

std::vector<OtlpCollector::ReceivedSpan> OtlpCollector::spans(const std::string& trace_id) const {
  std::vector<ReceivedSpan> out = spans();
  std::erase_if(out, [&](const ReceivedSpan& span) { return span.trace_id != trace_id; });
  return out;
}

std::string OtlpCollector::problems() const {
  std::lock_guard lock(mutex_);
  return problems_;
}

void OtlpCollector::Loop() {
  while (true) {
    tcp::socket socket(io_);
    boost::system::error_code error;
    acceptor_.accept(socket, error);
    if (stopping_) return;
    if (error) continue;
    Serve(socket);
  }
}

void OtlpCollector::Serve(tcp::socket& socket) {
  boost::beast::flat_buffer buffer;
  http::request_parser<http::string_body> parser;
  parser.body_limit(64 << 20);
  boost::system::error_code error;
  http::read(socket, buffer, parser, error);
  if (error) return;
  ++num_calls_;
  const auto& request = parser.get();
  const int status = status_;
  if (request.method() != http::verb::post || request.target() != "/v1/traces" ||
      request[http::field::content_type] != "application/json") {
    std::lock_guard lock(mutex_);
    problems_ += "not a POST of JSON to /v1/traces\n";
  }
  if (status == 0) {
    unanswered_.push_back(std::move(socket));
    return;
  }
  if (status == 200) Keep(request.body());
  http::response<http::string_body> response(static_cast<http::status>(status), 11);
  response.set(http::field::content_type, "application/json");
  response.body() = "{}";
  response.prepare_payload();
  http::write(socket, response, error);
}

void OtlpCollector::Keep(const std::string& body) {
  std::lock_guard lock(mutex_);
  const json request = json::parse(body, nullptr, false);
  if (request.is_discarded()) {
    problems_ += "no JSON: " + body.substr(0, 200) + "\n";
    return;
  }
  for (const json& resource : request.at("resourceSpans")) {
    std::map<std::string, std::string> names;
    for (const json& a : resource["resource"]["attributes"]) names[a["key"]] = a["value"]["stringValue"];
    for (const json& scope : resource.at("scopeSpans")) {
      for (const json& span : scope.at("spans")) {
        ReceivedSpan out{.program = names["service.name"],
                         .instance = names["service.instance.id"],
                         .trace_id = span.at("traceId"),
                         .span_id = span.at("spanId"),
                         .parent_id = span.value("parentSpanId", ""),
                         .name = span.at("name"),
                         .state = span.value("traceState", ""),
                         .kind = span.at("kind"),
                         .start_ns = std::stoll(span.at("startTimeUnixNano").get<std::string>()),
                         .end_ns = std::stoll(span.at("endTimeUnixNano").get<std::string>())};
        if (span.contains("attributes")) {
          for (const json& a : span["attributes"]) out.attributes[a.at("key")] = a.at("value");
        }
        if (span.contains("status")) out.status = span["status"];
        spans_.push_back(std::move(out));
      }
    }
  }
}

}  // namespace spl::testing
