// The operators' page: the files of services/router/ui, built into the program. They hold no data: the page reads
// /control/v1/ with the key that its user enters.
//
//   /ui        page.html
//   /ui/NAME   the other files
//
// The answer's content security policy lets the page load and call this router only, and run no inline script.
#pragma once

#include <span>
#include <string_view>

#include "services/router/http/http_server.h"

namespace spl::router {

struct UiFile {
  std::string_view name;  // "app.js"
  std::string_view body;
  std::string_view etag;  // changes with its bytes; has the quotes
};
std::span<const UiFile> UiFiles();  // generated: cmake/embed_ui.cmake

// True for "/ui" and all below it.
bool IsUiPath(std::string_view path);
// 200, 304 for a file that the browser has already (If-None-Match), or 404. REQUIRES: a GET of a path IsUiPath.
HttpResponse UiResponse(const HttpRequest& request);

}  // namespace spl::router
