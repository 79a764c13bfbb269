#include "services/router/http/ui_files.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/router/http/error_response.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

constexpr std::string_view kPage = "/ui", kFolder = "/ui/";

constexpr std::pair<std::string_view, std::string_view> kTypes[] = {{".html", "text/html; charset=utf-8"},
                                                                    {".css", "text/css; charset=utf-8"},
                                                                    {".js", "text/javascript; charset=utf-8"},
                                                                    {".svg", "image/svg+xml"}};

std::string_view TypeOf(std::string_view name) {
  for (const auto& [ending, type] : kTypes) {
    if (name.ends_with(ending)) return type;
  }
  return "application/octet-stream";
}

const UiFile* Find(std::string_view path) {
  const std::string_view name = path == kPage || path == kFolder ? "page.html" : path.substr(kFolder.size());
  const std::span<const UiFile> files = UiFiles();
  const auto found = std::find_if(files.begin(), files.end(), [&](const UiFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

}  // namespace

bool IsUiPath(std::string_view path) { return path == kPage || path.starts_with(kFolder); }

HttpResponse UiResponse(const HttpRequest& request) {
  const UiFile* const file = Find(request.path);
  if (file == nullptr) {
    return ErrorResponse(
        SetErrorCode(Errorf(absl::StatusCode::kNotFound, "there is no {} here", request.path), "unknown_url"));
  }
  const std::string_view known = request.if_none_match;
  const bool has_it = known == "*" || known.find(file->etag) != std::string_view::npos;
  return {.status = has_it ? 304 : 200,
          .content_type = std::string(TypeOf(file->name)),
          .body = std::string(file->body),
          .headers = {{"content-security-policy",
                       "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
                       "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
                      {"x-content-type-options", "nosniff"},
                      {"referrer-policy", "no-referrer"},
                      // Asked for each time, and not sent again while it is the same.
                      {"cache-control", "no-cache"},
                      {"etag", std::string(file->etag)}}};
}

}  // namespace spl::router
