// The KV of one sequence: a head stream (block table) for every layer and KV head.
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

// Stream numbers ([layer][kv_head]) in the order in which a pool of num_ranks gives pages to them: rank by rank, and
// for each rank its heads layer by layer.
std::vector<int32_t> StreamsByRank(const KvShape& shape, int num_ranks);

inline int32_t PagesFor(int64_t num_tokens) {
  return static_cast<int32_t>((num_tokens + kernels::kPageTokens - 1) / kernels::kPageTokens);
}
// [num_ranks]: pages that a sequence of `num_tokens` positions needs on each rank. `classes` null: every stream keeps
// everything.
std::vector<int64_t> PagesByRank(const KvShape& shape, const StreamClasses* classes, int num_ranks, int64_t num_tokens);

// Is an owner of every page it lists, until it is destroyed. One thread at a time; any thread may destroy it. Every
// stream has the same number of places for pages. Full pages may be shared with the prefix index or a fork. A page that
// is still written to has one writer; other owners only read the positions that were written when they got it.
//
// With head classes the sequence is a view (docs/methods/provenance.md, P5). The places of a local stream that no later
// position sees are kNoPage, and the sequence is never a source for the prefix index, a segment or a chunk. Under one
// id(), an entry is set once, when its place is made, and at most becomes kNoPage later. Copies of the lists stay valid
// after that, because no visible position is on such a page.
class SequenceKv {
 public:
  // `classes`: a class for every stream; null: all streams keep everything.
  SequenceKv(PagePool& pool, const KvShape& shape, std::shared_ptr<const StreamClasses> classes = nullptr);
  ~SequenceKv();
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;

  // Makes room for `num_tokens` positions in every stream. With classes, only positions that are visible from position
  // num_tokens - 1 on get room: other pages are given back, and positions in front of num_tokens - 1 may only be
  // written where there is a page. All or nothing: ResourceExhausted changes nothing. Cost: none until a page is full
  // or leaves a window.
  absl::Status Reserve(int64_t num_tokens);
  // Appends shared full pages as the next 64 positions: one per stream in order [layer][kv_head], kNoPage where nothing
  // is kept. REQUIRES: all pages so far are full and shared the same way (a prefix).
  void AppendShared(std::span<const int32_t> pages);
  // The same for places [begin, end) of another sequence of the same pool. Its provenance is not taken over.
  void AppendPlaces(const SequenceKv& from, int32_t begin, int32_t end);
  // Shares the first `num_pages` places of another whole sequence of the same pool, and takes over their provenance.
  // REQUIRES: this sequence is empty; num_pages full pages of `from` are written.
  void AppendLeading(const SequenceKv& from, int32_t num_pages);
  // Makes a continuation with room for num_tokens() positions. It shares the full pages in front of the page of
  // position `own_from`, and owns copies of the rest.
  absl::StatusOr<std::unique_ptr<SequenceKv>> Fork() const { return Fork(num_tokens_); }
  absl::StatusOr<std::unique_ptr<SequenceKv>> Fork(int64_t own_from) const;
  // Makes a sequence that goes on where this one ends, on the same pages. REQUIRES: a whole sequence, to which nothing
  // is written any more.
  std::unique_ptr<SequenceKv> Continue() const;

  // Gives back the pages that `classes` do not keep, and applies them from now on. REQUIRES: no classes so far, and no
  // page behind that of the last written position.
  void Compress(std::shared_ptr<const StreamClasses> classes);
  // Gives back the pages that hold no token of `kept`. The sequence is never a source afterwards. REQUIRES: neither
  // head classes nor kept tokens so far; kept.num_tokens == num_tokens() (ValidateKeptTokens).
  void KeepOnly(std::shared_ptr<const KeptTokens> kept);
  // Gives back the pages behind those of the first `num_tokens` positions; num_tokens() is at most `num_tokens`
  // afterwards. The sequence gets another id(). REQUIRES: a whole sequence with room for `num_tokens` positions.
  void Truncate(int64_t num_tokens);
  // Takes pages [begin, end) of a stream out, whose contents are elsewhere from now on (cache/hot_buffer.h); they
  // belong to the caller. Their places become kNoPage. The sequence is never a source afterwards. REQUIRES: a sequence
  // that was whole, and pages [0, begin) of the stream were taken out before.
  std::vector<int32_t> MoveOut(int32_t stream, int32_t begin, int32_t end);
  bool is_moved() const { return num_moved_ > 0; }  // MoveOut took pages
  // Gives back all pages (preemption) but keeps their ids in the places, for Refill. Until then only is_evicted,
  // streams, AllPages and num_tokens may be called. REQUIRES: not evicted.
  void Evict();
  // Replaces the id in each place by the page that `pages` (old → new) gives for it; the caller's ownership of the new
  // pages passes to the sequence. The sequence gets another id(). REQUIRES: evicted; `pages` has all old ids.
  void Refill(const std::unordered_map<int32_t, int32_t>& pages);
  bool is_evicted() const { return evicted_; }
  const std::shared_ptr<const KeptTokens>& kept() const { return kept_; }  // null: KeepOnly was not called
  // True if nothing was left out: the sequence may be a source of prefixes, segments and chunks (P5).
  bool is_whole() const { return classes_ == nullptr && kept_ == nullptr && num_moved_ == 0; }
  // Makes a local stream global. `pages`, with one owner each, become the pages of its hole and belong to the sequence.
  // The sequence gets another id(), because entries come back. REQUIRES: a local stream, and as many pages as its hole.
  void Restore(int32_t stream, std::span<const int32_t> pages);
  const std::shared_ptr<const StreamClasses>& classes() const { return classes_; }  // null: all streams keep everything
  PageHole hole(int32_t stream) const { return classes_ == nullptr ? PageHole{} : holes_[stream]; }

  std::span<const int32_t> stream(int32_t layer, int32_t kv_head) const {
    return streams_[static_cast<size_t>(layer) * shape_.num_kv_heads + kv_head];
  }
  // [num_layers * num_kv_heads] page lists.
  std::span<const std::vector<int32_t>> streams() const { return streams_; }
  uint64_t id() const { return id_; }  // identifies this object with these entries, in this process
  std::vector<int32_t> PagesOfChunk(int32_t page_idx) const;  // [layer][kv_head]: a page or kNoPage
  // All pages in order [layer][kv_head][page], without holes.
  std::vector<int32_t> AllPages() const;

  int32_t num_pages_per_stream() const { return static_cast<int32_t>(streams_.empty() ? 0 : streams_[0].size()); }
  int64_t num_pages() const;  // without holes
  int64_t capacity() const { return static_cast<int64_t>(num_pages_per_stream()) * kernels::kPageTokens; }
  int64_t num_tokens() const { return num_tokens_; }  // positions that are written in every layer
  void set_num_tokens(int64_t n) { num_tokens_ = n; }
  chunk::Provenance provenance() const { return provenance_; }
  // Lowers the provenance of the KV from `position` on to at most `p` (P1: everything behind `position` depends on it).
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
  // Makes places up to page `end`, fills those that a sequence of `num_tokens` positions keeps, and empties the holes.
  absl::Status ReservePages(int32_t end, int64_t num_tokens);
  size_t RankOf(int32_t stream) const;
  bool Keeps(int32_t stream, int32_t page) const;  // according to kept_
  // Appends places to all streams, which own them already: pages_of(stream), `num_places` of them.
  template <typename PagesOf>
  void AppendToStreams(int32_t num_places, const PagesOf& pages_of);

  PagePool& pool_;
  uint64_t id_;
  const KvShape shape_;
  std::shared_ptr<const StreamClasses> classes_;
  std::vector<std::vector<int32_t>> streams_;  // [num_streams][num_pages_per_stream]
  std::vector<PageHole> holes_;                // [num_streams]; empty without classes
  std::shared_ptr<const KeptTokens> kept_;
  int64_t num_dropped_ = 0;         // number of pages that kept_ leaves out
  std::vector<int32_t> moved_out_;  // [num_streams]: leading pages that MoveOut took; empty if it took none
  int64_t num_moved_ = 0;           // their number over all streams
  bool evicted_ = false;
  int64_t settled_until_ = 0;  // Reserve of at most this many positions changes nothing
  int64_t num_tokens_ = 0;
  // The minimum over everything the pages were computed from (docs/methods/provenance.md, P1).
  chunk::Provenance provenance_ = chunk::Provenance::kExact;
  int64_t exact_end_ = std::numeric_limits<int64_t>::max();
};

}  // namespace spl::engine
