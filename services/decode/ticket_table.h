// Reservations of a decode worker: who may write which pages, until when.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/ids.h"
#include "services/decode/token_stream.h"
#include "services/decode/writer_fence.h"
#include "services/engine/engine.h"

namespace spl::decode {

// A ticket's way: kReserved → kLanding (commit is being verified) → kRunning → gone; or from kReserved → kQuarantined
// (given up, but its writer may still write) → gone. Pages return to the pool only from kRunning's end, or when it is
// proved that nothing can be written to them any more: the writer said so, or its channel is gone. Time proves nothing:
// a writer that was paused in front of a write does not know how long.
enum class TicketState : uint8_t { kReserved, kLanding, kRunning, kQuarantined };

struct Ticket {
  RandomId id;
  uint64_t generation = 0;
  std::string request_id;
  TicketState state = TicketState::kReserved;
  std::chrono::steady_clock::time_point expires;
  std::chrono::milliseconds ttl{0};
  TicketWriter writer;
  std::chrono::steady_clock::time_point ask_at;  // the table's: when its writer is asked next
  bool cut = false;                              // the table's: its writer's channel was torn down
  std::unique_ptr<engine::SequenceKv> kv;        // moves to the engine when running
  std::unique_ptr<engine::SequenceKv> landing;   // pages of the landing memory; null without, or when it was full
  // What local heads keep once decoding starts; null: everything. Reserved and sent is what they keep (kv->classes()),
  // or everything where that costs no more.
  std::shared_ptr<const engine::StreamClasses> classes;
  std::unique_ptr<engine::SparePages> spare, landing_spare;  // for restored heads, until the commit
  int64_t prompt_tokens = 0;
  engine::SamplingParams sampling;
  engine::DecodeOptions decode;
  engine::HeadRestoreOptions restore;
  std::unique_ptr<engine::CompactPages> compact;  // of the first continuation; null: its selector needs none
  std::vector<int32_t> prompt;                    // only when a penalty or the selector needs it, or for resumed output
  std::vector<int32_t> left_prompt;  // of it, but for its last num_output_tokens, what came, where that is less
  int64_t num_output_tokens = 0;
  std::vector<int32_t> replay;  // DecodeRequest::replay
  engine::CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<TokenStream> stream;
};

struct TicketCounts {
  size_t reserved = 0, running = 0, quarantined = 0;
  size_t stuck = 0;  // of the quarantined: for longer than a ttl past the end of theirs, and no proof is in sight
  uint64_t expired_total = 0, cut_total = 0;
};

// Owns the tickets and one thread that lets them expire, and looks for the proofs that end quarantines: a channel that
// is gone, at once; from the ticket's expiry on its writer is asked; another ttl later its channel is torn down. Any
// thread may call; no callback runs under the lock.
class TicketTable {
 public:
  // `max_tickets` bounds all states together. `proofs` outlives the table; null: only the writer itself ends a
  // quarantine.
  explicit TicketTable(size_t max_tickets, WriterProofs* proofs = nullptr);
  ~TicketTable();  // Stop() must have been called

  // Takes the ticket over and returns the generation that it got: the ticket itself may be gone already, released by
  // somebody else. ResourceExhausted when there are too many.
  absl::StatusOr<uint64_t> Add(std::unique_ptr<Ticket> ticket);

  // kReserved → kLanding; the caller verifies and then calls Launch or Drop. NotFound: unknown, expired or given up;
  // the pages of one in quarantine are free then, because a commit says that its writer is quiet. FailedPrecondition:
  // another generation. AlreadyExists: committed before; the repeat changes nothing.
  absl::StatusOr<Ticket*> BeginLanding(const RandomId& id, uint64_t generation);
  // kLanding → kRunning. False when the ticket was released meanwhile: it is dropped and freed.
  bool MarkRunning(const RandomId& id);

  // The stream of a ticket in any state but quarantined. NotFound, FailedPrecondition: as BeginLanding says.
  absl::StatusOr<std::shared_ptr<TokenStream>> FindStream(const RandomId& id, uint64_t generation) const;

  // Gives a ticket up. Reserved: freed when the writer is quiet, else quarantined. Landing or running: cancelled, the
  // engine ends it. Unknown tickets are fine (it is gone already).
  void Release(const RandomId& id, uint64_t generation, bool writer_quiet, const absl::Status& why);

  // Removes a ticket in whatever state and frees what it still owns.
  void Drop(const RandomId& id, const absl::Status& why);

  TicketCounts counts() const;
  // Returns when nothing is reserved, landing or running, or at the deadline.
  void WaitIdle(std::chrono::steady_clock::time_point deadline) const;
  // Called (without the lock) when a running ticket was cancelled: the engine should look.
  void set_on_cancel(std::function<void()> on_cancel) { on_cancel_ = std::move(on_cancel); }
  void Stop(const absl::Status& why);

 private:
  void ExpireLoop();
  void ExpireOnce(std::chrono::steady_clock::time_point now);
  void LookForProofs(std::chrono::steady_clock::time_point now);
  TicketCounts CountLocked() const;

  const size_t max_tickets_;
  WriterProofs* const proofs_;
  std::function<void()> on_cancel_;
  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable changed_;
  std::unordered_map<RandomId, std::unique_ptr<Ticket>, RandomIdHash> tickets_;
  uint64_t next_generation_ = 1;
  uint64_t expired_total_ = 0, cut_total_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace spl::decode
