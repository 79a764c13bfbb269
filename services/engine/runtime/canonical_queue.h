// Segments that requests named and that have no source: text that first appeared behind a copy, whose KV there was
// recovered and so may not be kept (docs/methods/provenance.md, P3 and P6). An engine with nothing else to do computes
// them by themselves.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::engine {

struct CanonicalTask {
  chunk::Digest namespace_key{};
  std::vector<int32_t> tokens;
  std::vector<chunk::ChunkKey> keys;  // of the segment's chunks; the last one names it
  bool frozen = false;
  bool quantized = false;  // stored with quantized copies
};

// Bounded; least work first. One thread.
class CanonicalQueue {
 public:
  explicit CanonicalQueue(size_t capacity) : capacity_(capacity) {}

  // What is here already stays (and becomes frozen, or quantized, if the task is). Of a full queue the longest goes,
  // perhaps the new one. How many were dropped for want of room: 0 or 1.
  size_t Add(CanonicalTask task);
  // The shortest; nothing when empty.
  std::optional<CanonicalTask> Take();
  // Drops all; how many.
  size_t Clear();
  size_t size() const { return tasks_.size(); }

 private:
  const size_t capacity_;
  std::vector<CanonicalTask> tasks_;  // longest first
};

}  // namespace spl::engine
