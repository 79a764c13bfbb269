// Fetches segments of a prompt from the chunk store: quantized copies, parts that their summaries lead to, or all of
// their KV.
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

// A segment of a prompt whose KV is not completely in this worker.
struct WantedSegment {
  size_t index = 0;                       // the caller's number for it
  std::span<const int32_t> text;          // `text` and `keys` outlive the fetch
  std::span<const chunk::ChunkKey> keys;  // all of its chunks
  chunk::Digest namespace_key{};
  bool frozen = false;
  bool shared = false;      // as in ReuseSpan: chunks that were computed after other text are refused
  bool only_whole = false;  // only its complete KV is of use: a part of it is in the prompt's prefix
};

struct FetchedSegments {
  int64_t num_bytes = 0;
  int64_t asked_tokens = 0;  // segments that the store was asked for
  int64_t num_tokens = 0;    // those of them that came
  // By WantedSegment::index: sources with the KV that the policy reads, perhaps nothing else (SegmentSource::is_whole),
  // for this prompt only. Segments that are not listed are in the index now, or could not be fetched.
  std::map<size_t, std::shared_ptr<const SegmentSource>> parts;
  // WantedSegment::index of segments for which quantized copies would have been enough, but are not stored. All of
  // their KV is in the index now.
  std::vector<size_t> not_quantized;
};

// Any thread. `segments`, `pool` and the model outlive it. A store that fails costs time, never a request.
class SegmentFetcher {
 public:
  // `make_room`: called to get free pages before they are taken; any thread.
  SegmentFetcher(std::shared_ptr<const Model> model, PagePool& pool, SegmentIndex& segments,
                 std::shared_ptr<chunk::ChunkStore> store, std::function<bool(int64_t num_pages)> make_room)
      : model_(std::move(model)),
        pool_(pool),
        segments_(segments),
        store_(std::move(store)),
        make_room_(std::move(make_room)) {}

  // Fetches several segments in parallel; a text that is wanted twice is fetched once. `stop` is called between
  // segments, by several threads. `deliver` gets each text when it is there, by several threads, one at a time. Blocks
  // for the store, until the deadline.
  void Fetch(std::span<const WantedSegment> wanted, const RecoveryPolicy& policy,
             std::chrono::steady_clock::time_point deadline, const std::function<bool()>& stop,
             const std::function<void(FetchedSegments&&)>& deliver) const;
  // Bytes that fetching it moves, if the store has the form that the policy prefers.
  int64_t ExpectedBytes(const WantedSegment& wanted, const RecoveryPolicy& policy) const;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  // Result for one segment. `part` null: all of its KV was fetched, or nothing.
  struct Fetched {
    int64_t num_bytes = 0;
    std::shared_ptr<const SegmentSource> part;
    bool not_quantized = false;
    bool came = false;  // it is in `part`, or in the index
  };
  Fetched FetchOne(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline) const;
  // Returns false if there are no quantized copies.
  bool FetchQuantized(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline,
                      Fetched& fetched) const;
  // Fetches the summary, for a policy that chooses by summaries, and the KV that is read whatever is chosen. Returns
  // false if the policy needs the whole segment.
  bool FetchParts(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline, Fetched& fetched,
                  std::optional<FetchedSummary>& summary) const;

  const std::shared_ptr<const Model> model_;
  PagePool& pool_;
  SegmentIndex& segments_;
  const std::shared_ptr<chunk::ChunkStore> store_;
  const std::function<bool(int64_t num_pages)> make_room_;
};

}  // namespace spl::engine
