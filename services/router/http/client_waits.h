// Which connections wait for their clients, since when, and what they hold in memory meanwhile. Decides who has to go
// when there is no room: the one whose client has kept us waiting longest.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

namespace spl::router {

// One table for a server. Thread-safe. Cost of a call: constant; when there is no room, the connections in front of the
// one that goes.
//
// A client that works as it should sends its request and reads its answer in far less than `min_age`, so only those
// that have kept the server waiting that long are evicted. When everybody is younger the newcomer is refused instead.
class ClientWaits {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Wait {
    kNone,     // for the server itself: never evicted
    kIdle,     // for the next request
    kRequest,  // for the rest of a request, or of a handshake
    kAnswer,   // for the client to read
  };
  // Why a connection has to go.
  enum class Need { kBytes, kConnection };
  // Runs on the thread that needed the room, outside the lock; must only post.
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
  // A connection's place in the table; gives back what it holds when it goes.
  class Client {
   public:
    Client(std::shared_ptr<ClientWaits> table, Evict evict);
    ~Client();
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    void WaitFor(Wait wait);
    // False: there is no room for so many more bytes, and nobody could be evicted for them.
    [[nodiscard]] bool Hold(size_t bytes);
    // The same without asking: for what is bounded in another way. Counts all the same.
    void HoldAnyway(size_t bytes);
    void Drop(size_t bytes);
    void DropAll();

   private:
    const std::shared_ptr<ClientWaits> table_;
    Entries::iterator entry_;
  };

  ClientWaits(size_t max_bytes, Clock::duration min_age) : max_bytes_(max_bytes), min_age_(min_age) {}

  // Evicts one connection that is idle, else one whose request is not complete. False: nobody has waited long enough.
  bool EvictConnection();

  size_t held_bytes() const;
  // The most that was held since the last call.
  size_t TakePeakBytes();

 private:
  void HoldLocked(Entry& entry, size_t bytes);
  void DropLocked(Entry& entry, size_t bytes);

  const size_t max_bytes_;
  const Clock::duration min_age_;
  mutable std::mutex mutex_;  // guards all below
  Entries entries_;           // those that wait, in the order in which they began to; the others anywhere
  size_t held_bytes_ = 0;     // sum of entries_
  size_t peak_bytes_ = 0;
};

}  // namespace spl::router
