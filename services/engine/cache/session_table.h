// Conversations: the KV of each one's last prompt, kept for its next turn (LoopServe 3.4; docs/methods/loopserve.md).
//
// What is kept is the prompt, not the answer: an answer may have been decoded over chosen tokens, so the next turn
// computes it again, with the new text, against the history. Unlike the prefix index a session also keeps KV that is
// approximate (docs/methods/provenance.md): it stays private to the conversation that it was computed for.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

inline constexpr size_t kSessionIdBytesMax = 256;

// A conversation. The same name of two callers, or in two namespaces, is two conversations: nobody learns which names
// others use.
struct SessionId {
  std::string_view name;
  chunk::Digest namespace_key{};
  chunk::Digest owner{};  // the caller, in whose share the conversation counts
};
// InvalidArgument: a name that is too long.
absl::Status CheckSessionName(std::string_view name);

// Keeps its sequences, and so their pages, alive. A lease runs from the last use of a session; when it is over, the
// pages go as soon as anybody looks. Over its budget of pages the table gives up, of the owner that holds the most, the
// conversation that was used longest ago: nobody loses pages to an owner that has more. Any thread; times are the
// caller's.
class SessionTable {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // `max_pages`: of all sessions together, a page that two of them share counting twice; 0 keeps none.
  SessionTable(int64_t max_pages, std::chrono::nanoseconds lease) : max_pages_(max_pages), lease_(lease) {}

  struct Match {
    std::shared_ptr<const SequenceKv> kv;  // null: nothing to be used
    int32_t num_pages = 0;                 // leading pages per stream whose tokens are the prompt's
  };
  // The pages that `tokens` begin with, the last token's never among them, and renews the lease. `method`: the policy
  // and all of its options (MethodOf); KV that is not exact is given only to the method that computed it.
  Match Find(const SessionId& id, std::span<const int32_t> tokens, std::string_view method, Time now);

  // Keeps pages for the next turn, in place of those kept before: the leading pages, as many as the budget leaves room
  // for.
  void Keep(const SessionId& id, std::span<const int32_t> tokens, std::string_view method,
            std::shared_ptr<const SequenceKv> kv, Time now);

  bool EvictOne();        // as over the budget; false: there is none
  void Expire(Time now);  // those whose lease is over

  struct Stats {
    size_t num_sessions = 0;
    int64_t num_pages = 0;
    uint64_t num_evicted = 0, num_expired = 0;
  };
  Stats stats() const;

 private:
  struct Session {
    std::string name;
    SessionId id;  // its name is the string above
    std::string method;
    std::vector<int32_t> tokens;
    std::shared_ptr<const SequenceKv> kv;
    Time used;
  };
  using Sessions = std::list<Session>;
  using Key = std::tuple<chunk::Digest, chunk::Digest, std::string_view>;  // owner, namespace key, name
  static Key KeyOf(const SessionId& id) { return {id.owner, id.namespace_key, id.name}; }

  void Add(Sessions::iterator session);
  void Subtract(Sessions::iterator session);
  Sessions::iterator Victim();
  void TrimTo(Sessions::iterator session, int64_t num_pages);
  void Drop(Sessions::iterator session);
  void ExpireLocked(Time now);

  const int64_t max_pages_;
  const std::chrono::nanoseconds lease_;
  mutable std::mutex mutex_;                         // guards all below
  Sessions sessions_;                                // most recently used first
  std::map<Key, Sessions::iterator> by_id_;          // names are the sessions' own strings
  std::map<chunk::Digest, int64_t> pages_by_owner_;  // of those who hold any
  Stats stats_;
};

}  // namespace spl::engine
