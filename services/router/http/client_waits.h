// Tracks which connections wait for their clients, since when, and how much memory they hold. If there is no room,
// evicts the one whose client has kept the server waiting longest.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

namespace spl::router {

// One table per server. Thread-safe. Cost: constant per call; with no room, also the connections before the evicted
// one.
//
// A well-behaved client sends its request and reads its answer in far less than `min_age`, so only connections that
// have waited at least that long are evicted. If all are younger, the newcomer is refused.
class ClientWaits {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Wait {
    kNone,     // waits for the server itself: never evicted
    kIdle,     // waits for the next request
    kRequest,  // waits for the rest of a request, or of a handshake
    kAnswer,   // waits for the client to read
  };
  // Why a connection must go.
  enum class Need { kBytes, kConnection };
  // Runs on the thread that needs the room, outside the lock; must only post.
  using Evict = std::function<void(Need)>;

 private:
  struct Entry {
    Evict evict;
    Wait wait = Wait::kNone;
    Clock::time_point since{};
    size_t bytes = 0;
  };
  using Entries = std::list<Entry>;

 public:
  // A connection's entry in the table; releases its memory when destroyed.
  class Client {
   public:
    Client(std::shared_ptr<ClientWaits> table, Evict evict);
    ~Client();
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    void WaitFor(Wait wait);
    // Counts `bytes`. False: there is no room for them, and no connection could be evicted.
    [[nodiscard]] bool Hold(size_t bytes);
    // Counts `bytes` without asking, for memory that is limited in another way.
    void HoldAnyway(size_t bytes);
    void Drop(size_t bytes);
    void DropAll();

   private:
    const std::shared_ptr<ClientWaits> table_;
    Entries::iterator entry_;
  };

  ClientWaits(size_t max_bytes, Clock::duration min_age) : max_bytes_(max_bytes), min_age_(min_age) {}

  // Evicts one idle connection, or else one whose request is incomplete. False: none has waited long enough.
  bool EvictConnection();

  size_t held_bytes() const;
  // The peak of held bytes since the last call.
  size_t TakePeakBytes();

 private:
  void HoldLocked(Entry& entry, size_t bytes);
  void DropLocked(Entry& entry, size_t bytes);

  const size_t max_bytes_;
  const Clock::duration min_age_;
  mutable std::mutex mutex_;  // guards all below
  Entries entries_;           // waiting connections in the order in which they began to wait; others in any place
  size_t held_bytes_ = 0;     // sum of entries_
  size_t peak_bytes_ = 0;
};

}  // namespace spl::router
