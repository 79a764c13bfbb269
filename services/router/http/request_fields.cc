#include "services/router/http/request_fields.h"

#include <algorithm>
#include <cctype>

#include "services/base/ids.h"
#include "services/router/request/api_error.h"

namespace spl::router {

int64_t UnixSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string RequestIdOf(const HttpRequest& request) {
  const std::string& given = request.request_id;
  const auto harmless = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  const bool usable = !given.empty() && given.size() <= 128 && std::all_of(given.begin(), given.end(), harmless);
  return usable ? given : RandomId::Make().ToHex();
}

absl::Status ReadTimeout(const HttpRequest& request, std::chrono::steady_clock::time_point* deadline) {
  const std::string& text = request.timeout_ms;
  if (text.empty()) return absl::OkStatus();
  const bool digits = text.size() <= 9 && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || std::stoul(text) == 0) {
    return ParamError("x-request-timeout-ms", "must be a positive number of milliseconds, got \"{}\"", text);
  }
  *deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::stoul(text));
  return absl::OkStatus();
}

HttpHeaders IgnoredHeader(const std::vector<std::string>& ignored) {
  constexpr size_t kMaxNames = 16, kMaxNameBytes = 64;
  if (ignored.empty()) return {};
  std::string value;
  for (size_t i = 0; i < std::min(ignored.size(), kMaxNames); ++i) {
    const bool plain = std::all_of(ignored[i].begin(), ignored[i].end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
    });
    value += (i > 0 ? "," : "") + (plain && ignored[i].size() <= kMaxNameBytes ? ignored[i] : "?");
  }
  if (ignored.size() > kMaxNames) value += ",...";
  return {{"x-splice-ignored", value}};
}

absl::Status CheckIgnored(const std::vector<std::string>& ignored, bool strict) {
  if (!strict || ignored.empty()) return absl::OkStatus();
  return SetErrorCode(ParamError(ignored.front(), "has no effect here (--strict-requests)"), "unknown_field");
}

}  // namespace spl::router
