// Brings what a prompt reads of segments that are in the chunk store: quantized copies, parts by their summaries, or
// all of their KV.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "services/chunk/chunk.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/cache/summary_io.h"
#include "services/engine/model/model.h"
#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

// A segment of a prompt, of which not all KV is here.
struct WantedSegment {
  size_t index = 0;                       // the caller's
  std::span<const int32_t> text;          // with `keys` it outlives the fetch
  std::span<const chunk::ChunkKey> keys;  // of all of its chunks
  chunk::Digest namespace_key{};
  bool frozen = false;
  bool shared = false;      // ReuseSpan: chunks that were computed behind other text are refused
  bool only_whole = false;  // only all of its KV is of use: the prompt has some of it as its prefix
};

struct FetchedSegments {
  int64_t num_bytes = 0;
  // By WantedSegment::index: sources that hold what the policy reads, and perhaps nothing else
  // (SegmentSource::is_whole). They are for this prompt alone. What is in none of these went into the index, or was not
  // to be had.
  std::map<size_t, std::shared_ptr<const SegmentSource>> parts;
  // WantedSegment::index of those whose quantized copies would have done, but are not stored: all of their KV is in the
  // index now.
  std::vector<size_t> not_quantized;
};

// Any thread; `segments`, `pool` and the model outlive it. A store that fails costs time, never a request.
class SegmentFetcher {
 public:
  // make_room: asked for free pages before they are taken; any thread.
  SegmentFetcher(std::shared_ptr<const Model> model, PagePool& pool, SegmentIndex& segments,
                 std::shared_ptr<chunk::ChunkStore> store, std::function<bool(int64_t num_pages)> make_room)
      : model_(std::move(model)),
        pool_(pool),
        segments_(segments),
        store_(std::move(store)),
        make_room_(std::move(make_room)) {}

  // Several segments at a time; a text that is wanted twice is fetched once. `stop` is asked between segments, by
  // several threads. Blocks for the store, until the deadline.
  FetchedSegments Fetch(std::span<const WantedSegment> wanted, const RecoveryPolicy& policy,
                        std::chrono::steady_clock::time_point deadline, const std::function<bool()>& stop) const;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  // Of one segment; no part: all of its KV was fetched, or nothing.
  struct Fetched {
    int64_t num_bytes = 0;
    std::shared_ptr<const SegmentSource> part;
    bool not_quantized = false;
  };
  Fetched FetchOne(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline) const;
  // False: there are none.
  bool FetchQuantized(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline,
                      Fetched& fetched) const;
  // For a policy that chooses by summaries, which gives `summary`, and the KV that is read of it whatever is chosen.
  // False: the segment is wanted as a whole.
  bool FetchParts(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline, Fetched& fetched,
                  std::optional<FetchedSummary>& summary) const;

  const std::shared_ptr<const Model> model_;
  PagePool& pool_;
  SegmentIndex& segments_;
  const std::shared_ptr<chunk::ChunkStore> store_;
  const std::function<bool(int64_t num_pages)> make_room_;
};

}  // namespace spl::engine
