// Queue of segments that requests named but that have no source, or one that was computed behind other text. Text that
// first appeared after a copy has none, for its KV was recovered and may not be kept (docs/methods/provenance.md, P3
// and P6). An engine with nothing else to do computes each by itself, behind a few tokens of instructions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::engine {

struct CanonicalTask {
  chunk::Digest namespace_key{};
  // The first tokens of the prompt that named the segment, at most kLeadTokensMax, behind which it is computed: KV that
  // began with nothing in front answers worse (docs/results/2026-11-27-sixteen-thousand-tokens.md). Empty for a segment
  // that several callers share, which must not depend on the text of one of them.
  std::vector<int32_t> lead;
  std::vector<int32_t> tokens;
  std::vector<chunk::ChunkKey> keys;  // the segment's chunks; the last key identifies the segment
  bool frozen = false;
  bool quantized = false;  // to be stored with quantized copies
  bool replaces = false;   // takes the place of sources that have seen other text
};

// Bounded; the shortest segment first. One thread.
class CanonicalQueue {
 public:
  explicit CanonicalQueue(size_t capacity) : capacity_(capacity) {}

  // Adds a segment. If it is queued already, the old entry stays (and becomes frozen, quantized or replacing, if the
  // task is). If the queue is full, the longest segment is dropped, perhaps the new one. Returns how many were dropped:
  // 0 or 1.
  size_t Add(CanonicalTask task);
  // Takes the shortest segment; nothing if the queue is empty.
  std::optional<CanonicalTask> Take();
  // Drops all segments; returns how many.
  size_t Clear();
  size_t size() const { return tasks_.size(); }

 private:
  const size_t capacity_;
  std::vector<CanonicalTask> tasks_;  // longest first
};

}  // namespace spl::engine
