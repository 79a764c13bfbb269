// Keeps the lines that were typed into `splice chat` in a file between runs.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::cli {

// The file: a JSON string a line, the newest last, with mode 0600, since prompts may be private. Several programs may
// add to it at one time. One thread.
class ChatHistory {
 public:
  static constexpr size_t kMaxEntries = 1000;

  // $XDG_STATE_HOME/splice/chat_history, or the same under ~/.local/state; empty: neither variable is set.
  static std::string DefaultPath();

  // Reads the file and makes it, and its folder, if it is not there. A file of more than twice kMaxEntries is cut to
  // the newest ones. Lines that are no JSON string are left out. Unavailable: it cannot be opened for writing.
  static absl::StatusOr<ChatHistory> Open(const std::string& path);

  ChatHistory(ChatHistory&& other) noexcept;
  ChatHistory& operator=(ChatHistory&&) = delete;
  ~ChatHistory();

  // At most kMaxEntries, as of Open.
  const std::vector<std::string>& entries() const { return entries_; }
  // Writes one entry at once. An entry that cannot be written is not kept: talking goes on without it.
  void Add(std::string_view text);

 private:
  explicit ChatHistory(int fd) : fd_(fd) {}

  int fd_;
  std::vector<std::string> entries_;
};

}  // namespace spl::cli
