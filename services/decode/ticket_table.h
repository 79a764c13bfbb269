// KV reservations ("tickets") of a decode worker: who may write which pages, and until when.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/ids.h"
#include "services/decode/conversation.h"
#include "services/decode/token_stream.h"
#include "services/decode/writer_fence.h"
#include "services/engine/engine.h"

namespace spl::decode {

// States of a ticket: kReserved → kLanding (the commit is being verified) → kRunning → gone; or kReserved →
// kQuarantined (given up, but its writer may still write) → gone. Pages return to the pool only after kRunning, or when
// it is proved that no more writes can reach them: the writer said so, or its channel is gone. Passing time proves
// nothing: a writer that was paused before a write does not know for how long.
enum class TicketState : uint8_t { kReserved, kLanding, kRunning, kQuarantined };

struct Ticket {
  RandomId id;
  uint64_t generation = 0;
  std::string request_id;
  TicketState state = TicketState::kReserved;
  std::chrono::steady_clock::time_point expires;
  std::chrono::milliseconds ttl{0};
  TicketWriter writer;
  std::chrono::steady_clock::time_point ask_at;  // owned by the table: when its writer is asked next
  bool cut = false;                              // owned by the table: its writer's channel was torn down
  std::unique_ptr<engine::SequenceKv> kv;        // moves to the engine when running; in place: null until it lands
  // Prompt and sequence share a pool: there is no remote writer, so that the ticket is never quarantined.
  bool in_place = false;
  // Pages of the landing memory for all but the held pages; null: none needed, or it was full.
  std::unique_ptr<engine::SequenceKv> landing;
  std::optional<Conversation> conversation;  // whose next turn gets the prompt's pages; nullopt: nobody's
  int32_t held_pages = 0;  // leading pages of each stream of `kv` that are not sent (v1::Ticket.held_tokens)
  // Pages of `kv` that the writer sends, in order [layer][kv_head][page].
  std::vector<int32_t> SentPages() const;
  int64_t num_sent_pages() const { return kv->num_pages() - int64_t{held_pages} * kv->shape().num_streams(); }
  // The part of the KV that local heads keep once decoding starts; null: everything. The ticket reserves, and the
  // writer sends, kv->classes(): the same part, or everything if that costs no more.
  std::shared_ptr<const engine::StreamClasses> classes;
  std::unique_ptr<engine::SparePages> spare, landing_spare;  // for restored heads, until the commit
  int64_t prompt_tokens = 0;
  engine::SamplingParams sampling;
  engine::DecodeOptions decode;
  // compact pages of the first continuation; null: its selector needs none
  std::unique_ptr<engine::CompactPages> compact;
  std::vector<int32_t> prompt;  // only if a penalty, the selector or resumed output needs it
  // the part of `prompt` (without its last num_output_tokens) that arrived, if that is less than all
  std::vector<int32_t> left_prompt;
  int64_t num_output_tokens = 0;
  std::vector<int32_t> replay;  // DecodeRequest::replay
  engine::CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<TokenStream> stream;
};

struct TicketCounts {
  size_t reserved = 0, running = 0, quarantined = 0;
  size_t stuck = 0;  // quarantined for longer than a ttl past their expiry, without a proof in sight
  uint64_t expired_total = 0, cut_total = 0;
};

// Owns the tickets and one thread, which expires tickets and looks for proofs that end quarantines. A channel that is
// gone is noticed at once. After the ticket has expired, its writer is asked; another ttl later the writer's channel is
// torn down. Any thread may call; no callback runs under the lock.
class TicketTable {
 public:
  // `max_tickets` limits all states together. `proofs` must outlive the table. Null: only the writer itself ends a
  // quarantine.
  // `unread_for`: how long the stream of a sequence that has ended waits for a reader that is late.
  explicit TicketTable(size_t max_tickets, WriterProofs* proofs = nullptr,
                       std::chrono::milliseconds unread_for = std::chrono::seconds(10));
  ~TicketTable();  // Stop() must have been called

  // Takes the ticket over and returns its generation; the ticket itself may already be gone, released by another
  // thread. ResourceExhausted: too many tickets.
  absl::StatusOr<uint64_t> Add(std::unique_ptr<Ticket> ticket);

  // kReserved → kLanding. The caller verifies the pages, then calls Launch or Drop. NotFound: unknown, expired or given
  // up; quarantined pages become free then, because a commit means that the writer is quiet. FailedPrecondition:
  // another generation. AlreadyExists: committed before; the repeat changes nothing.
  absl::StatusOr<Ticket*> BeginLanding(const RandomId& id, uint64_t generation);
  // kLanding → kRunning. False: the ticket was released in the meantime; it is dropped and freed.
  bool MarkRunning(const RandomId& id);

  // Returns the stream of a ticket in any state but kQuarantined, or of one that was dropped before anybody read it: a
  // short answer may be complete before the router's call arrives. NotFound, FailedPrecondition: as BeginLanding.
  absl::StatusOr<std::shared_ptr<TokenStream>> FindStream(const RandomId& id, uint64_t generation);

  // Gives a ticket up. Reserved: freed if the writer is quiet, otherwise quarantined. Landing or running: cancelled,
  // and the engine ends it. An unknown ticket is fine: it is gone already.
  void Release(const RandomId& id, uint64_t generation, bool writer_quiet, const absl::Status& why);

  // Removes a ticket in any state and frees its resources. Its stream stays for a while if nobody reads it yet, unless
  // the ticket was given up.
  void Drop(const RandomId& id, const absl::Status& why);

  TicketCounts counts() const;
  // Returns when no ticket is reserved, landing or running, or at the deadline.
  void WaitIdle(std::chrono::steady_clock::time_point deadline) const;
  // `on_cancel` is called, without the lock, when a running ticket was cancelled, so that the engine looks at it.
  void set_on_cancel(std::function<void()> on_cancel) { on_cancel_ = std::move(on_cancel); }
  void Stop(const absl::Status& why);

 private:
  void ExpireLoop();
  void ExpireOnce(std::chrono::steady_clock::time_point now);
  void LookForProofs(std::chrono::steady_clock::time_point now);
  TicketCounts CountLocked() const;

  // The stream of a dropped ticket that nobody reads yet.
  struct Unread {
    uint64_t generation = 0;
    std::shared_ptr<TokenStream> stream;
    std::chrono::steady_clock::time_point until;
  };

  const size_t max_tickets_;  // also of unread_
  WriterProofs* const proofs_;
  const std::chrono::milliseconds unread_for_;
  std::function<void()> on_cancel_;
  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable changed_;
  std::unordered_map<RandomId, std::unique_ptr<Ticket>, RandomIdHash> tickets_;
  std::unordered_map<RandomId, Unread, RandomIdHash> unread_;
  uint64_t next_generation_ = 1;
  uint64_t expired_total_ = 0, cut_total_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace spl::decode
