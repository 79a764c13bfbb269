// The KV of one sequence: a head stream (page list) for every (layer, KV head).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/kept_tokens.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/stream_classes.h"

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
// Pages that a sequence of `num_tokens` positions takes of each rank; `classes` null: every stream keeps everything.
std::vector<int64_t> PagesByRank(const KvShape& shape, const StreamClasses* classes, int num_ranks, int64_t num_tokens);

// Owns a share of every page it lists and gives it back when destroyed. One thread at a time; may be destroyed on any.
// Every stream of a sequence has the same number of places for pages; pages before the first written position may be
// shared with the prefix index or a fork, a page that is still written to never is.
//
// With head classes the sequence is a view (docs/methods/provenance.md, P5): the places of a local stream that no later
// position sees are kNoPage, and such a sequence is never a source for the prefix index, a segment or a chunk. Under
// one id() an entry is set once, when its place is made, and at most goes to kNoPage later; who keeps a copy of the
// lists need not hear of that, because no visible position lies there.
class SequenceKv {
 public:
  // `classes`: of every stream, or null: all keep everything.
  SequenceKv(PagePool& pool, const KvShape& shape, std::shared_ptr<const StreamClasses> classes = nullptr);
  ~SequenceKv();
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;

  // Room for `num_tokens` positions in every stream; with classes, for what of them position num_tokens - 1 and later
  // ones see: pages that they do not see are given back, and positions in front of num_tokens - 1 may only be written
  // where there is a page. All or nothing: ResourceExhausted changes nothing. Cost: nothing until a page is filled or
  // leaves a window.
  absl::Status Reserve(int64_t num_tokens);
  // Appends shared full pages, one per stream in order [layer][kv_head] (kNoPage where nothing is kept), as the next 64
  // positions. Only while every page held so far is shared the same way (a prefix).
  void AppendShared(std::span<const int32_t> pages);
  // Shares the first `num_pages` places of another whole sequence of the same pool, and takes over what they are worth.
  // REQUIRES: an empty sequence; num_pages full pages of `from` are written.
  void AppendLeading(const SequenceKv& from, int32_t num_pages);
  // A continuation that shares the full pages in front of the one of position `own_from` and owns copies of the rest;
  // room for num_tokens() positions.
  absl::StatusOr<std::unique_ptr<SequenceKv>> Fork() const { return Fork(num_tokens_); }
  absl::StatusOr<std::unique_ptr<SequenceKv>> Fork(int64_t own_from) const;

  // From here on only what `classes` keep is kept: gives the other pages back. REQUIRES: no classes so far,
  // and no page behind the one of the last written position.
  void Compress(std::shared_ptr<const StreamClasses> classes);
  // From here on only pages that hold a token of `kept` are kept, which is never a source afterwards; others go back.
  // REQUIRES: neither head classes nor kept tokens so far; kept.num_tokens == num_tokens() (ValidateKeptTokens).
  void KeepOnly(std::shared_ptr<const KeptTokens> kept);
  // Gives the pages behind those of the first `num_tokens` positions back; num_tokens() is at most that afterwards. The
  // sequence gets another id(). REQUIRES: a whole sequence with as many positions' pages.
  void Truncate(int64_t num_tokens);
  // Gives back a share of every page and keeps the places, which name the pages that there were, for Refill: until then
  // nothing else may be called but is_evicted, streams, AllPages and num_tokens. REQUIRES: not evicted.
  void Evict();
  // Each place gets the page that takes the place of the one that it names, and a share of it from the caller; the
  // sequence gets another id(). REQUIRES: evicted, and all named ones in `pages`.
  void Refill(const std::unordered_map<int32_t, int32_t>& pages);
  bool is_evicted() const { return evicted_; }
  const std::shared_ptr<const KeptTokens>& kept() const { return kept_; }  // null: nothing was left out that way
  // Everything of the sequence is there: it may be a source of prefixes, segments and chunks (P5).
  bool is_whole() const { return classes_ == nullptr && kept_ == nullptr; }
  // The stream is global from here on: `pages`, one owner's share of each, become the pages of its hole. The sequence
  // gets another id(), because entries come back. REQUIRES: a local stream, and as many pages as its hole has.
  void Restore(int32_t stream, std::span<const int32_t> pages);
  // While holes are frozen they do not grow: what leaves a window is kept, because its head may be restored and nobody
  // else has what was generated. Thawing lets the next Reserve give it back. A fork of a frozen sequence is frozen.
  void FreezeHoles();
  void ThawHoles();
  const std::shared_ptr<const StreamClasses>& classes() const { return classes_; }  // null: everything is kept
  PageHole hole(int32_t stream) const { return classes_ == nullptr ? PageHole{} : holes_[static_cast<size_t>(stream)]; }

  std::span<const int32_t> stream(int32_t layer, int32_t kv_head) const {
    return streams_[static_cast<size_t>(layer) * shape_.num_kv_heads + kv_head];
  }
  // [num_layers * num_kv_heads] page lists.
  std::span<const std::vector<int32_t>> streams() const { return streams_; }
  uint64_t id() const { return id_; }                         // of this object with these entries, in this process
  std::vector<int32_t> PagesOfChunk(int32_t page_idx) const;  // [layer][kv_head], one each, or kNoPage
  // All pages in order [layer][kv_head][page]; holes are left out.
  std::vector<int32_t> AllPages() const;

  int32_t num_pages_per_stream() const { return static_cast<int32_t>(streams_.empty() ? 0 : streams_[0].size()); }
  int64_t num_pages() const;  // without holes
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

  void CheckInvariants() const;  // aborts on a broken one

 private:
  // Makes the places up to page `end`, fills those that are kept of `num_tokens` positions and empties the holes.
  absl::Status ReservePages(int32_t end, int64_t num_tokens);
  size_t RankOf(int32_t stream) const;
  bool Keeps(int32_t stream, int32_t page) const;  // by kept_
  PageHole HoleWith(size_t stream, int64_t num_tokens) const;

  PagePool& pool_;
  uint64_t id_;
  const KvShape shape_;
  std::shared_ptr<const StreamClasses> classes_;
  std::vector<std::vector<int32_t>> streams_;  // [num_streams][num_pages_per_stream]
  std::vector<PageHole> holes_;                // [num_streams]; empty without classes
  std::shared_ptr<const KeptTokens> kept_;
  int64_t num_dropped_ = 0;  // pages that kept_ leaves out
  bool holes_frozen_ = false;
  bool evicted_ = false;
  int64_t settled_until_ = 0;  // Reserve of up to as many positions changes nothing
  int64_t num_tokens_ = 0;
  // The minimum over everything the pages were computed from (docs/methods/provenance.md, P1).
  chunk::Provenance provenance_ = chunk::Provenance::kExact;
  int64_t exact_end_ = std::numeric_limits<int64_t>::max();
};

}  // namespace spl::engine
