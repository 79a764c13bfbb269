// Which tickets this prefill worker may write to, and which it never will (again). A router has to know before the
// pages of a ticket that was given up can be used by others (decision 0002). A ticket is good for one prompt: when it
// comes again, its pages may belong to a sequence that is being decoded, and what is written there becomes part of
// somebody else's answer. (The decode worker refuses the second commit, but that is after the writes. Other prefill
// workers do not know which tickets this one has seen.)
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/ids.h"

namespace spl::prefill {

struct TicketGuardOptions {
  // Tickets that are remembered as revoked; one takes about 150 bytes. One more is not promised anything, and its pages
  // wait in quarantine.
  size_t max_revoked = 65'536;
  std::chrono::milliseconds max_ttl{3'600'000};  // a longer one is cut to this
  // Tickets that are remembered as used, the last ones; one takes about 100 bytes.
  size_t max_used = 65'536;
};

// Owns which tickets are being written, which are revoked and which were used. Any thread may call; no callback runs
// under the lock.
class TicketGuard {
 public:
  // OK: no write to the ticket's pages is or will be on its way. Unavailable: it cannot be said.
  using Done = std::function<void(const absl::Status&)>;
  // Set when the ticket is revoked while it is written.
  using CancelFlag = std::shared_ptr<std::atomic<bool>>;

  // The right to write to one ticket's pages. Whoever has it says when writes may be on their way and when no longer; a
  // Revoke that waits is answered then, or when this goes. Any thread may call. The guard outlives it.
  class Hold {
   public:
    Hold(TicketGuard& guard, const RandomId& ticket) : guard_(guard), ticket_(ticket) {}
    ~Hold() { EndUnflushed(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // Before anything is done for the ticket's prompt, once it is known to be good. AlreadyExists: it was used before.
    absl::Status Use() { return guard_.Use(ticket_); }
    void NoteWriting() { quiet_.store(false); }  // before the first write
    // The first one counts. Flushed: every write has arrived. Unflushed: quiet only if none was started.
    void EndFlushed() { End(true); }
    // False: writes may still be on their way.
    bool EndUnflushed() {
      if (ended_.load()) return true;
      End(quiet_.load());
      return quiet_.load();
    }

   private:
    void End(bool quiet);

    TicketGuard& guard_;
    const RandomId ticket_;
    std::atomic<bool> quiet_{true};
    std::atomic<bool> ended_{false};
  };

  TicketGuard(const TicketGuardOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  // Aborted: the ticket was revoked. AlreadyExists: it is being written.
  absl::StatusOr<std::unique_ptr<Hold>> Begin(const RandomId& ticket, CancelFlag cancelled);

  // From now on for `ttl` no Begin of this ticket succeeds. `done` runs once: at once on this thread, or, when the
  // ticket is being written, where the hold ends; that one's flag is set. Unavailable, also when it is asked again: the
  // hold ended and its writes were not flushed, only the end of the channel ends them. ResourceExhausted (and nothing
  // is promised, but what is under way is cancelled): too many are remembered. Idempotent.
  void Revoke(const RandomId& ticket, std::chrono::milliseconds ttl, Done done);

  struct Stats {
    size_t num_writing = 0, num_revoked = 0;  // now
    uint64_t num_refused = 0;                 // Begins of a revoked ticket, ever
  };
  Stats stats() const;

 private:
  struct Writer {
    CancelFlag cancelled;
    std::vector<Done> waiting;
  };
  absl::Status Use(const RandomId& ticket);
  void OnEnd(const RandomId& ticket, bool quiet);
  bool RememberLocked(const RandomId& ticket, std::chrono::milliseconds ttl);

  const TicketGuardOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<RandomId, Writer, RandomIdHash> writing_;
  std::unordered_map<RandomId, SteadyTime, RandomIdHash> revoked_;  // until when
  std::multimap<SteadyTime, RandomId> expiries_;                    // of revoked_, and of what was revoked for longer
  std::unordered_set<RandomId, RandomIdHash> used_;
  std::deque<RandomId> used_oldest_first_;  // the same
  std::unordered_set<RandomId, RandomIdHash> unflushed_;
  std::deque<RandomId> unflushed_oldest_first_;  // the same, max_used of them
  uint64_t num_refused_ = 0;
};

}  // namespace spl::prefill
