// How commands write to a terminal: its size, and emphasis.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace spl::cli {

struct WindowSize {
  size_t columns = 0, rows = 0;
};
// The window of the terminal that `fd` is; nullopt: it is none, or its size is not known.
std::optional<WindowSize> WindowOf(int fd);
// Columns of a line that is drawn again and again; 79 where WindowOf does not know them. The last column of a window
// stays empty: some terminals begin a new line behind it.
size_t LineWidthOf(int fd);

// True with TERM=dumb: a window that shows lines and moves no cursor.
bool IsDumbTerminal();

// True for a terminal that shows colours: not with NO_COLOR set to something, and not with TERM=dumb.
bool HasColor(int fd);

// Emphasis by escape sequences; plain where `color` is false.
struct Style {
  bool color = false;

  std::string Bold(std::string_view text) const { return Wrap("\x1b[1m", text); }
  std::string Dim(std::string_view text) const { return Wrap("\x1b[2m", text); }

 private:
  std::string Wrap(const char* begin, std::string_view text) const {
    return color ? std::string(begin).append(text).append("\x1b[0m") : std::string(text);
  }
};

// `text` without the control characters by which a text could command a terminal; tabs and line ends stay.
std::string WithoutControls(std::string_view text);

}  // namespace spl::cli
