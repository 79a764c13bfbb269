// The KV of one sequence: a head stream (page list) for every (layer, KV head).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/page_pool.h"

namespace spl::engine {

struct KvShape {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t num_streams() const { return num_layers * num_kv_heads; }
};

// Streams [layer][kv_head] in the order in which a pool of num_ranks hands out pages for them: rank by rank, each one's
// heads layer by layer.
std::vector<int32_t> StreamsByRank(const KvShape& shape, int num_ranks);

inline int32_t PagesFor(int64_t num_tokens) {
  return static_cast<int32_t>((num_tokens + kernels::kPageTokens - 1) / kernels::kPageTokens);
}

// Owns a share of every page it lists and gives it back when destroyed. One thread at a time; may be destroyed on any.
// Every stream of a sequence has the same number of pages; pages before the first written position may be shared with
// the prefix index or a fork, a page that is still written to never is.
class SequenceKv {
 public:
  SequenceKv(PagePool& pool, const KvShape& shape);
  ~SequenceKv();
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;

  // Room for `num_tokens` positions in every stream. All or nothing: ResourceExhausted changes nothing.
  absl::Status Reserve(int64_t num_tokens);
  // Appends shared full pages, one per stream in order [layer][kv_head], as the next 64 positions. Only while every
  // page held so far is shared the same way (a prefix).
  void AppendShared(std::span<const int32_t> pages);
  // A continuation that shares every full page and owns a copy of the rest; room for num_tokens() positions.
  absl::StatusOr<std::unique_ptr<SequenceKv>> Fork() const;

  std::span<const int32_t> stream(int32_t layer, int32_t kv_head) const {
    return streams_[static_cast<size_t>(layer) * shape_.num_kv_heads + kv_head];
  }
  // [num_layers * num_kv_heads] page lists; they only grow.
  std::span<const std::vector<int32_t>> streams() const { return streams_; }
  uint64_t id() const { return id_; }                         // of this object, in this process
  std::vector<int32_t> PagesOfChunk(int32_t page_idx) const;  // [layer][kv_head], one page each
  // All page ids in order [layer][kv_head][page].
  std::vector<int32_t> AllPages() const;

  int32_t num_pages_per_stream() const { return static_cast<int32_t>(streams_.empty() ? 0 : streams_[0].size()); }
  int64_t capacity() const { return static_cast<int64_t>(num_pages_per_stream()) * kernels::kPageTokens; }
  int64_t num_tokens() const { return num_tokens_; }  // positions written in every layer
  void set_num_tokens(int64_t n) { num_tokens_ = n; }
  chunk::Provenance provenance() const { return provenance_; }
  // From `position` on the KV is of this provenance at best (P1: so is everything behind it).
  void LowerProvenance(chunk::Provenance p, int64_t position) {
    if (p >= chunk::Provenance::kExact) return;
    provenance_ = std::min(provenance_, p);
    exact_end_ = std::min(exact_end_, position);
  }
  // Leading positions that are written and exact.
  int64_t exact_tokens() const { return std::min(num_tokens_, exact_end_); }
  const KvShape& shape() const { return shape_; }
  PagePool& pool() const { return pool_; }

 private:
  PagePool& pool_;
  const uint64_t id_;
  const KvShape shape_;
  std::vector<std::vector<int32_t>> streams_;  // [num_streams][num_pages]
  int64_t num_tokens_ = 0;
  // The minimum over everything the pages were computed from (algorithms.md 6.3, P1).
  chunk::Provenance provenance_ = chunk::Provenance::kExact;
  int64_t exact_end_ = std::numeric_limits<int64_t>::max();
};

}  // namespace spl::engine
