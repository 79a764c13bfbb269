// http[s]://HOST[:PORT][/BASE], the form of every --endpoint and --url flag.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/base/http_url.h"

namespace spl::cli {

// Parses a URL. Its path is "" or "/prefix", without a slash at the end and without "/v1". InvalidArgument names the
// mistake.
absl::StatusOr<HttpUrl> ParseApiUrl(const std::string& text);

}  // namespace spl::cli
