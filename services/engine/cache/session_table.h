// Conversations: the KV of each one's last prompt, kept for its next turn (LoopServe 3.4; algorithms.md 5.3).
//
// What is kept is the prompt, not the answer: an answer may have been decoded over chosen tokens, so the next turn
// computes it again, with the new text, against the history. Unlike the prefix index a session also keeps KV that is
// approximate (algorithms.md 6.3): it stays private to the conversation that it was computed for.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

inline constexpr size_t kSessionIdBytesMax = 256;

// Keeps its sequences, and so their pages, alive. A lease runs from the last use of a session; when it is over, the
// pages go as soon as anybody looks. Over its budget of pages the table gives up the conversation that was used longest
// ago. Any thread; times are the caller's.
class SessionTable {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // `max_pages`: of all sessions together, a page that two of them share counting twice; 0 keeps none.
  SessionTable(int64_t max_pages, std::chrono::nanoseconds lease) : max_pages_(max_pages), lease_(lease) {}

  // PermissionDenied: the session belongs to another namespace. InvalidArgument: an id that is too long.
  absl::Status Check(std::string_view id, const chunk::Digest& namespace_key, Time now);

  struct Match {
    std::shared_ptr<const SequenceKv> kv;  // null: nothing to be used
    int32_t num_pages = 0;                 // leading pages per stream whose tokens are the prompt's
  };
  // The pages that `tokens` begin with, the last token's never among them, and renews the lease. `policy`: what KV that
  // is not exact must have been computed by.
  Match Find(std::string_view id, const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
             std::string_view policy, Time now);

  // What the next turn may use, in place of what was kept before. Not kept: a sequence larger than the whole budget.
  void Keep(std::string_view id, const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
            std::string_view policy, std::shared_ptr<const SequenceKv> kv, Time now);

  bool EvictOne();        // the one that was used longest ago; false: there is none
  void Expire(Time now);  // those whose lease is over

  struct Stats {
    size_t num_sessions = 0;
    int64_t num_pages = 0;
    uint64_t num_evicted = 0, num_expired = 0;
  };
  Stats stats() const;

 private:
  struct Session {
    std::string id;
    chunk::Digest namespace_key{};
    std::string policy;
    std::vector<int32_t> tokens;
    std::shared_ptr<const SequenceKv> kv;
    Time used;
  };
  using Sessions = std::list<Session>;

  void Drop(Sessions::iterator session);
  void ExpireLocked(Time now);

  const int64_t max_pages_;
  const std::chrono::nanoseconds lease_;
  mutable std::mutex mutex_;                                        // guards all below
  Sessions sessions_;                                               // most recently used first
  std::unordered_map<std::string_view, Sessions::iterator> by_id_;  // keys are the sessions' own strings
  Stats stats_;
};

}  // namespace spl::engine
