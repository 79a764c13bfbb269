#include "tools/cli/line_reader.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>

namespace spl::cli {
namespace {

class PlainReader final : public LineReader {
 public:
  PlainReader(InterruptEvent& interrupt, bool prompts) : interrupt_(interrupt), prompts_(prompts) {}

  End Read(const std::string& prompt, std::string& line) override {
    if (prompts_) fmt::print("{}", prompt);
    std::fflush(stdout);
    line.clear();
    while (true) {
      if (const size_t end = ahead_.find('\n'); end != std::string::npos) {
        line = ahead_.substr(0, end);
        ahead_.erase(0, end + 1);
        return End::kLine;
      }
      if (ended_) {
        line.swap(ahead_);
        return line.empty() ? End::kInput : End::kLine;
      }
      if (!ReadMore()) {
        ahead_.clear();
        return End::kInterrupted;
      }
    }
  }

  void AddToHistory(const std::string&) override {}

 private:
  // False: interrupted.
  bool ReadMore() {
    pollfd both[] = {{STDIN_FILENO, POLLIN, 0}, {interrupt_.fd(), POLLIN, 0}};
    if (::poll(both, 2, -1) < 0 && errno != EINTR) {
      ended_ = true;
      return true;
    }
    if (interrupt_.Take()) return false;
    if (both[0].revents == 0) return true;
    std::array<char, 4096> piece;
    const ssize_t size = ::read(STDIN_FILENO, piece.data(), piece.size());
    if (size > 0) ahead_.append(piece.data(), static_cast<size_t>(size));
    ended_ = size == 0 || (size < 0 && errno != EINTR && errno != EAGAIN);
    return true;
  }

  InterruptEvent& interrupt_;
  const bool prompts_;
  std::string ahead_;  // read, and not returned yet
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<LineReader> MakePlainReader(InterruptEvent& interrupt, bool prompts) {
  return std::make_unique<PlainReader>(interrupt, prompts);
}

#ifndef SPLICE_HAVE_LIBEDIT
std::unique_ptr<LineReader> MakeTerminalReader(InterruptEvent&, Style) { return nullptr; }
#endif

}  // namespace spl::cli
