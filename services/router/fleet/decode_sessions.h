// The decode worker of each conversation's last turn, as far as this router knows: it keeps the KV of the turn's
// prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace spl::router {

// A prompt that a decode worker is expected to have kept, up to the first change of the text.
struct HeldPrompt {
  std::string worker_id;
  uint64_t epoch = 0;  // a worker that has restarted keeps nothing
  uint32_t tokens = 0;
};

// The least recently noted conversations are forgotten first. A wrong guess costs placement quality only: the decode
// worker looks up what it really has. Routers do not tell each other. Thread-safe.
class DecodeSessions {
 public:
  explicit DecodeSessions(size_t capacity = 65'536) : capacity_(capacity) {}

  // `conversation`: its name, namespace and caller as one string.
  void Note(const std::string& conversation, HeldPrompt held);
  std::optional<HeldPrompt> Find(const std::string& conversation) const;
  size_t size() const;

 private:
  struct Entry {
    std::string conversation;
    HeldPrompt held;
  };
  const size_t capacity_;
  mutable std::mutex mutex_;  // guards the two below
  std::list<Entry> entries_;  // most recently noted first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_conversation_;
};

}  // namespace spl::router
