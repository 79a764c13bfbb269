#include "tools/cli/chat_history.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "services/base/status.h"

namespace spl::cli {
namespace {

constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
constexpr mode_t kMode = S_IRUSR | S_IWUSR;

std::string LineOf(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

bool WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

std::vector<std::string> ReadEntries(const std::string& path) {
  std::vector<std::string> entries;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto entry = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_string()) entries.push_back(entry.get<std::string>());
  }
  return entries;
}

// Replaces the file; if that fails it stays as it is, only longer than it should be.
void Rewrite(const std::string& path, const std::vector<std::string>& entries) {
  const std::string next = path + "." + std::to_string(::getpid());
  const int fd = ::open(next.c_str(), kFlags | O_EXCL, kMode);
  if (fd < 0) return;
  std::string text;
  for (const std::string& entry : entries) text += LineOf(entry);
  const bool written = WriteAll(fd, text);
  ::close(fd);
  if (!written || ::rename(next.c_str(), path.c_str()) != 0) ::unlink(next.c_str());
}

}  // namespace

std::string ChatHistory::DefaultPath() {
  const auto get = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  // A relative XDG_STATE_HOME is to be ignored, by its specification.
  if (const std::string state = get("XDG_STATE_HOME"); state.starts_with('/')) return state + "/splice/chat_history";
  const std::string home = get("HOME");
  return home.empty() ? "" : home + "/.local/state/splice/chat_history";
}

absl::StatusOr<ChatHistory> ChatHistory::Open(const std::string& path) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!std::filesystem::exists(folder, error)) {
    std::filesystem::create_directories(folder, error);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all, error);
  }
  std::vector<std::string> entries = ReadEntries(path);
  const bool too_long = entries.size() > 2 * kMaxEntries;
  if (entries.size() > kMaxEntries)
    entries.erase(entries.begin(), entries.end() - static_cast<std::ptrdiff_t>(kMaxEntries));
  if (too_long) Rewrite(path, entries);
  const int fd = ::open(path.c_str(), kFlags, kMode);
  if (fd < 0) return Errorf(absl::StatusCode::kUnavailable, "{}: {}", path, std::strerror(errno));
  ChatHistory history(fd);
  if (::fchmod(fd, kMode) != 0)  // it may be older, or a copy
    return Errorf(absl::StatusCode::kUnavailable, "{}: {}", path, std::strerror(errno));
  history.entries_ = std::move(entries);
  return history;
}

ChatHistory::ChatHistory(ChatHistory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), entries_(std::move(other.entries_)) {}

ChatHistory::~ChatHistory() {
  if (fd_ >= 0) ::close(fd_);
}

void ChatHistory::Add(std::string_view text) {
  if (fd_ >= 0) WriteAll(fd_, LineOf(text));  // one write, so that lines of several programs do not mix
}

}  // namespace spl::cli
