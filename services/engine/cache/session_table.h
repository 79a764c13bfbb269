// Keeps the KV of each conversation's last prompt for its next turn (LoopServe 3.4; docs/methods/loopserve.md). A
// prefill worker has one table, and a decode worker another one for the pages that it decoded from (docs/sessions.md).
//
// KV of the prompt is kept, KV of the answer is not: an answer may have been decoded over chosen tokens, so that the
// next turn computes it again, with the new text, against the history. Unlike the prefix index, a session also keeps
// approximate KV (docs/methods/provenance.md): it stays private to the conversation that it was computed for.
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

// Identifies a conversation. The same name of two callers, or in two namespaces, means two conversations, so that a
// caller cannot learn which names others use.
struct SessionId {
  std::string_view name;
  chunk::Digest namespace_key{};
  chunk::Digest owner{};  // the caller, to whose share the conversation counts
};
// InvalidArgument: the name has more than kSessionIdBytesMax bytes.
absl::Status CheckSessionName(std::string_view name);

// Keeps its sequences, and so their pages, alive; a cache of the pool (PagePool::MarkCached). A session's lease runs
// from its last use. The pages of an expired session are released at the next call that looks for expired ones (Find,
// Expire). If the table exceeds its budget of pages, it evicts the least recently used conversation of the owner that
// holds the most pages: no owner loses pages to one that has more. Any thread; the caller passes the time.
class SessionTable {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // `max_pages`: budget of all sessions together; a page that two of them share counts twice; 0: no session is kept.
  SessionTable(int64_t max_pages, std::chrono::nanoseconds lease) : max_pages_(max_pages), lease_(lease) {}
  ~SessionTable();
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  struct Match {
    std::shared_ptr<const SequenceKv> kv;  // null: there is nothing to reuse
    int32_t num_pages = 0;                 // leading pages per stream that hold the prompt's tokens
  };
  // Returns the pages that hold the first of `blocks`, the keys of the prompt's full blocks of 64 tokens
  // (chunk::MakePrefixKeys), and renews the lease. `method`: the policy and all of its options (MethodOf). KV that is
  // not exact is returned only for the method that computed it.
  Match Find(const SessionId& id, std::span<const chunk::ChunkKey> blocks, std::string_view method, Time now);

  // Keeps pages for the next turn, and drops those kept before: as many leading pages as the budget has room for. `kv`
  // is whole, and its first pages hold `blocks`.
  void Keep(const SessionId& id, std::span<const chunk::ChunkKey> blocks, std::string_view method,
            std::shared_ptr<const SequenceKv> kv, Time now);

  bool EvictOne();        // evicts like an exceeded budget, for want of pages; false: there is no session
  void Expire(Time now);  // drops the sessions whose lease is over

  struct Stats {
    size_t num_sessions = 0;
    int64_t num_pages = 0;
    uint64_t num_evicted = 0;   // because the budget was exceeded
    uint64_t num_gave_way = 0;  // by EvictOne
    uint64_t num_expired = 0;
  };
  Stats stats() const;

 private:
  struct Session {
    std::string name;
    SessionId id;  // id.name refers to `name`
    std::string method;
    std::vector<chunk::ChunkKey> blocks;
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
  std::map<Key, Sessions::iterator> by_id_;          // names refer to the sessions' own strings
  std::map<chunk::Digest, int64_t> pages_by_owner_;  // owners that hold pages
  Stats stats_;
};

}  // namespace spl::engine
