#include "tools/cli/api_url.h"

#include "services/base/status.h"

namespace spl::cli {

absl::StatusOr<HttpUrl> ParseApiUrl(const std::string& text) {
  SPLICE_ASSIGN_OR_RETURN(HttpUrl url, ParseHttpUrl(text));
  while (url.path.ends_with('/')) url.path.pop_back();
  // People paste "/v1" from client settings, but it belongs to the paths of the API.
  if (url.path.ends_with("/v1")) url.path.resize(url.path.size() - 3);
  return url;
}

}  // namespace spl::cli
