#include "tests/support/pty_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>

namespace spl::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLimit{10};

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

PtyProcess::PtyProcess(const std::vector<std::string>& argv, const std::vector<std::string>& environment, int columns,
                       int rows) {
  winsize size{};
  size.ws_col = static_cast<uint16_t>(columns);
  size.ws_row = static_cast<uint16_t>(rows);
  int other_end = -1;
  std::array<char, 128> name{};
  if (::openpty(&terminal_, &other_end, name.data(), nullptr, &size) != 0) {
    ADD_FAILURE() << "openpty";
    return;
  }
  ::fcntl(terminal_, F_SETFD, FD_CLOEXEC);
  ::fcntl(other_end, F_SETFD, FD_CLOEXEC);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);  // then the first terminal that is opened sends Ctrl-C
  posix_spawn_file_actions_addopen(&actions, 0, name.data(), O_RDWR, 0);
  posix_spawn_file_actions_adddup2(&actions, 0, 1);
  posix_spawn_file_actions_adddup2(&actions, 0, 2);
  const auto arguments = Pointers(argv), variables = Pointers(environment);
  if (::posix_spawn(&pid_, arguments[0], &actions, &attributes, arguments.data(), variables.data()) != 0) {
    pid_ = -1;
    ADD_FAILURE() << "cannot start " << argv[0];
  }
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  ::close(other_end);
}

PtyProcess::~PtyProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (terminal_ >= 0) ::close(terminal_);
}

void PtyProcess::Type(const std::string& keys) {
  EXPECT_EQ(::write(terminal_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
}

// False: the deadline has passed, or the program has closed its terminal.
bool PtyProcess::ReadSome(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd entry{terminal_, POLLIN, 0};
  if (left <= 0 || ::poll(&entry, 1, static_cast<int>(left)) <= 0) return false;
  std::array<char, 4096> piece;
  const ssize_t size = ::read(terminal_, piece.data(), piece.size());
  if (size <= 0) return false;
  output_.append(piece.data(), static_cast<size_t>(size));
  return true;
}

bool PtyProcess::WaitFor(const std::string& text) {
  const auto deadline = Clock::now() + kLimit;
  while (true) {
    if (const size_t at = output_.find(text, found_); at != std::string::npos) {
      found_ = at + text.size();
      return true;
    }
    if (ReadSome(deadline)) continue;
    ADD_FAILURE() << "no \"" << text << "\" behind byte " << found_ << " of: " << output_;
    return false;
  }
}

int PtyProcess::WaitForExit() {
  const auto deadline = Clock::now() + kLimit;
  while (ReadSome(deadline)) {
  }
  int status = 0;
  if (pid_ < 0 || ::waitpid(pid_, &status, Clock::now() < deadline ? 0 : WNOHANG) != pid_) {
    ADD_FAILURE() << "has not ended: " << output_;
    return -1;
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace spl::test
