// A prompt's fetch from the chunk store, and how long the prompt waits for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "services/base/clock.h"
#include "services/engine/runtime/fetch_cost.h"
#include "services/engine/runtime/incoming_prefix.h"
#include "services/engine/runtime/segment_fetcher.h"

namespace spl::engine {

// Shared by the engine thread, which holds the prompt back or computes it meanwhile, and the thread that fetches, which
// may go on after the prompt has begun or ended: what comes too late is dropped. Members without a lock are set before
// the fetch is handed over.
class PromptFetch {
 public:
  PromptFetch(const Model& model, std::shared_ptr<const RecoveryPolicy> policy, std::shared_ptr<SequenceKv> kv,
              size_t first_chunk)
      : policy(std::move(policy)),
        prefix(model, std::move(kv), static_cast<int32_t>(first_chunk)),
        first_chunk(first_chunk) {}

  // Decides what of a segment is fetched. The prompt may have another one by the time it begins, and the fetch goes on.
  const std::shared_ptr<const RecoveryPolicy> policy;
  IncomingPrefix prefix;
  const size_t first_chunk;  // earlier ones are in the prompt's pages
  std::vector<WantedSegment> wanted;
  // Whether the prompt may be computed from its start on while its chunks arrive: every row runs through all layers.
  bool overlaps = false;
  bool by_cost = false;       // false: it waits for everything that the store has
  double queue_s = 0;         // FetchTimes
  bool looked_again = false;  // the engine thread's: a prompt whose time was over got more once

  // --- the engine thread ---
  bool MayBegin(SteadyTime now) const;
  SteadyTime held_until() const;
  bool over() const;     // nothing more is coming
  bool reading() const;  // the store has answered, and bytes are on their way
  // Seconds until everything should be there; 0: nothing is coming, or it is late.
  double SecondsLeft(SteadyTime now) const;
  // Returns the segments that have come. Later ones are dropped.
  FetchedSegments TakeSegments();
  // Ends everything that is still coming, and returns what has landed of the prefix.
  PositionRange Close();

  // --- the thread that fetches ---
  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  void Begun(SteadyTime now);
  // The store has so many chunks, or tokens of a segment, that the worker does not have.
  void FoundPrefix(size_t num_chunks);
  void FoundSegment(int64_t num_tokens);
  // The prompt waits until then, unless the fetch ends earlier. `expected_s`: what the fetch should take from `now` on.
  void Hold(SteadyTime now, double held_s, std::optional<double> expected_s);
  // From here on bytes are on their way.
  void StartReading();
  void Deliver(FetchedSegments&& segments);
  // Nothing more is coming. `slower`: because the prompt computes it.
  void End(SteadyTime now, bool slower);

  struct Report {
    SteadyTime begun{};             // epoch: no thread was free for it
    std::optional<double> seconds;  // from begun until it ended
    size_t found_chunks = 0;        // prefix; 0 if the store was not asked
    int64_t found_tokens = 0;       // prefix and segments
    int64_t segment_bytes = 0;
    int64_t segment_tokens = 0;  // segments that came in time
    bool slower = false;
  };
  Report report() const;

 private:
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;  // guards all below
  SteadyTime held_until_ = SteadyTime::max();
  SteadyTime expected_end_{};
  bool over_ = false;
  bool reading_ = false;
  bool segments_taken_ = false;
  FetchedSegments segments_;
  Report report_;
};

}  // namespace spl::engine
