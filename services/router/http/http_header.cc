#include "services/router/http/http_header.h"

#include <iterator>

namespace spl::router {
namespace {

namespace http = boost::beast::http;

std::string ToStd(boost::beast::string_view text) { return std::string(text.data(), text.size()); }

}  // namespace

HttpRequest HeaderOf(const BeastRequest& message) {
  HttpRequest out;
  out.method = message.method() == http::verb::head ? "GET" : ToStd(message.method_string());
  const std::string target = ToStd(message.target());
  const size_t question = target.find('?');
  out.path = target.substr(0, question);
  if (question != std::string::npos) out.query = target.substr(question + 1);
  out.authorization = ToStd(message[http::field::authorization]);
  const std::string key = ToStd(message["x-api-key"]);
  if (out.authorization.empty() && !key.empty()) out.authorization = "Bearer " + key;
  out.request_id = ToStd(message["x-request-id"]);
  out.traceparent = ToStd(message["traceparent"]);
  out.tracestate = ToStd(message["tracestate"]);
  out.timeout_ms = ToStd(message["x-request-timeout-ms"]);
  out.host = ToStd(message[http::field::host]);
  out.origin = ToStd(message[http::field::origin]);
  out.sec_fetch_site = ToStd(message["sec-fetch-site"]);
  out.preflight_headers = ToStd(message[http::field::access_control_request_headers]);
  out.if_none_match = ToStd(message[http::field::if_none_match]);
  out.content_type = ToStd(message[http::field::content_type]);
  out.forwarded = message.count("forwarded") + message.count("x-forwarded-for") + message.count(http::field::via) > 0;
  return out;
}

std::string PathOf(const std::optional<BeastParser>& parser) {
  if (!parser.has_value()) return "";
  const std::string target = ToStd(parser->get().target());
  return target.substr(0, target.find('?'));
}

bool HasBody(const BeastParser& parser) { return parser.chunked() || parser.content_length().value_or(0) > 0; }

bool KnowsTransferCoding(const BeastRequest& message) {
  const auto [begin, end] = message.equal_range(http::field::transfer_encoding);
  return begin == end || (std::next(begin) == end && boost::beast::iequals(begin->value(), "chunked"));
}

bool HasContentCoding(const BeastRequest& message) {
  const auto coding = message[http::field::content_encoding];
  return !coding.empty() && !boost::beast::iequals(coding, "identity");
}

}  // namespace spl::router
