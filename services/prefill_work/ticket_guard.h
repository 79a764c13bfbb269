// Tracks which tickets this prefill worker may write to, and which it never will (again).
//
// Revocation: before other sequences may use the pages of a ticket that was given up, the router must know that no
// write to them can arrive (decision 0002). Single use: a ticket is good for one prompt. If it comes again, its pages
// may belong to a sequence that is being decoded, and writes to them would become part of another request's answer.
// (The decode worker refuses the second commit, but only after the writes; other prefill workers do not know which
// tickets this one has seen.)
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
  // Limit of tickets remembered as revoked; each takes about 150 bytes. Beyond it no promise is given, and the ticket's
  // pages wait in quarantine.
  size_t max_revoked = 65'536;
  std::chrono::milliseconds max_ttl{3'600'000};  // longer ones are cut to this
  // Limit of tickets remembered as used, the most recent ones; each takes about 100 bytes.
  size_t max_used = 65'536;
};

// Owns the sets of tickets that are being written, revoked and used. Any thread may call; no callback runs under the
// lock.
class TicketGuard {
 public:
  // OK: no write to the ticket's pages is or will be in flight. Unavailable: that cannot be said.
  using Done = std::function<void(const absl::Status&)>;
  // Set when the ticket is revoked while it is being written.
  using CancelFlag = std::shared_ptr<std::atomic<bool>>;

  // The right to write to one ticket's pages. Its holder reports when writes may be in flight and when they no longer
  // are. A waiting Revoke is answered then, or when the hold is destroyed. Any thread may call. The guard must outlive
  // it.
  class Hold {
   public:
    Hold(TicketGuard& guard, const RandomId& ticket) : guard_(guard), ticket_(ticket) {}
    ~Hold() { EndUnflushed(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // Call before any work for the ticket's prompt, once the ticket is known to be valid. AlreadyExists: it was used
    // before.
    absl::Status Use() { return guard_.Use(ticket_); }
    void NoteWriting() { quiet_.store(false); }  // call before the first write
    // Only the first End counts. Flushed: every write has arrived. Unflushed: quiet only if no write was started.
    void EndFlushed() { End(true); }
    // False: writes may still be in flight.
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

  // Makes every Begin of this ticket fail for `ttl` from now. `done` runs once: at once on this thread, or, if the
  // ticket is being written, where the hold ends; the hold's cancel flag is set. Idempotent.
  //
  // Unavailable (also on repetition): the hold ended and its writes were not flushed; only the end of the channel ends
  // them. ResourceExhausted: too many tickets are remembered; nothing is promised, but running writes are cancelled.
  void Revoke(const RandomId& ticket, std::chrono::milliseconds ttl, Done done);

  struct Stats {
    size_t num_writing = 0, num_revoked = 0;  // now
    uint64_t num_refused = 0;                 // calls of Begin for a revoked ticket, since the start
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
  std::unordered_map<RandomId, SteadyTime, RandomIdHash> revoked_;  // revoked until then
  // expiries of revoked_, and outdated ones of tickets that were revoked for longer since
  std::multimap<SteadyTime, RandomId> expiries_;
  std::unordered_set<RandomId, RandomIdHash> used_;
  std::deque<RandomId> used_oldest_first_;  // keys of the set above
  std::unordered_set<RandomId, RandomIdHash> unflushed_;
  std::deque<RandomId> unflushed_oldest_first_;  // keys of the set above, at most max_used
  uint64_t num_refused_ = 0;
};

}  // namespace spl::prefill
