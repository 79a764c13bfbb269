// The header of a request, as Beast reads it. Internal to the HTTP server.
#pragma once

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>
#include <string>

#include "services/router/http/http_server.h"

namespace spl::router {

using BeastRequest = boost::beast::http::request<boost::beast::http::string_body>;
using BeastParser = boost::beast::http::request_parser<boost::beast::http::string_body>;

// Everything but the body.
HttpRequest HeaderOf(const BeastRequest& message);
// As far as the header has been read; empty: not at all.
std::string PathOf(const std::optional<BeastParser>& parser);
bool HasBody(const BeastParser& parser);
// Chunked is the one transfer coding that is understood; the parser takes whatever ends with it.
bool KnowsTransferCoding(const BeastRequest& message);
// True for a body that is packed (gzip).
bool HasContentCoding(const BeastRequest& message);

}  // namespace spl::router
