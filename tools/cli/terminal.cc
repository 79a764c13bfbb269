#include "tools/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

namespace spl::cli {

std::optional<WindowSize> WindowOf(int fd) {
  winsize size{};
  if (::isatty(fd) == 0 || ::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0)
    return std::nullopt;
  return WindowSize{.columns = size.ws_col, .rows = size.ws_row};
}

size_t LineWidthOf(int fd) {
  constexpr size_t kUsualWidth = 79;
  const auto window = WindowOf(fd);
  return window ? window->columns - 1 : kUsualWidth;
}

bool IsDumbTerminal() {
  const char* const term = std::getenv("TERM");
  return term != nullptr && std::string_view(term) == "dumb";
}

bool HasColor(int fd) {
  const char* const no_color = std::getenv("NO_COLOR");
  return ::isatty(fd) != 0 && (no_color == nullptr || *no_color == '\0') && !IsDumbTerminal();
}

std::string WithoutControls(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte >= 0x20 && byte != 0x7f) || c == '\n' || c == '\t') out += c;
  }
  return out;
}

}  // namespace spl::cli
