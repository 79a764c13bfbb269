// What a stream of a decode batch may choose from when it does not hold all of its sequence: a list of positions, and
// all that was written behind them (SamKV's sparse KV, and what SnapKV and its kin choose once: docs/methods/samkv.md
// and docs/methods/baselines.md).
//
// A stream whose step is `listed` has n listed positions, ascending, all in front of first_fresh, and
//   candidate i = listed[i] for i < n, and first_fresh + i - n behind: n + kv_len - first_fresh of them.
// Every position is a candidate of a stream that is not. Operations that choose (SelectTokens, PageBoundScores and
// TopTokens, ChooseByQueryWindow) take the candidates of a listed stream as if they were a sequence of their own:
// compact keys, granules, the last `recent` ones, ties and budgets go by number of the candidate, lists name its
// position. So sinks and windows count what is held, not what the prompt once had: keys were rotated by their true
// positions before, and nothing else of a position matters to attention.
//
// Layout   list pages of a stream, out of the pool that has its keys: int32, entry 0 is n, then the positions, the next
//          page where one is full. Written before the first step, and never by one.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

inline int64_t ListEntriesPerPage(size_t page_bytes) { return static_cast<int64_t>(page_bytes / sizeof(int32_t)); }
// Pages of a list of `count` positions.
inline int64_t ListPages(int64_t count, size_t page_bytes) { return count / ListEntriesPerPage(page_bytes) + 1; }

// The candidates of one stream, on the host. Views of the sequence and the pool, which outlive it.
class Candidates {
 public:
  Candidates(const KvPoolView& pool, const SelectingSequence& sequence, int32_t kv_head);

  bool listed() const { return !pages_.empty(); }
  int32_t count() const { return count_; }
  int32_t position(int32_t i) const {
    return i < num_listed_ ? entry(int64_t{i} + 1) : first_fresh_ + (i - num_listed_);
  }
  // Positions of the candidates [begin, end), behind one another.
  int32_t* Copy(int32_t begin, int32_t end, int32_t* out) const;
  // Candidates' numbers become their positions, in place.
  void ToPositions(std::span<int32_t> tokens) const;

 private:
  int32_t entry(int64_t i) const {
    return reinterpret_cast<const int32_t*>(pool_.k(pages_[static_cast<size_t>(i / per_page_)]))[i % per_page_];
  }

  const KvPoolView& pool_;
  std::span<const int32_t> pages_;  // empty: every position is a candidate
  int64_t per_page_ = 1;
  int32_t num_listed_ = 0, first_fresh_ = 0, count_ = 0;
};

// InvalidArgument, naming `op`: a listed sequence without list tables or with pages outside of the pool, or first_fresh
// at or behind kv_len. OK: not listed. Looks at no list, which a device may have.
absl::Status ValidateCandidates(const char* op, const SelectingSequence& sequence, const KvPoolView& pool,
                                int32_t num_kv_heads);
// The same of a list, where the host may read it: that its pages hold it, and that its last position is in front of
// first_fresh. That it ascends is up to whoever wrote it: looking at all of it in every step would take longer than the
// step of a small model. REQUIRES: ValidateCandidates.
absl::Status ValidateList(const char* op, const SelectingSequence& sequence, const KvPoolView& pool, int32_t kv_head);

// The lists of the streams whose step is listed and does not select: LayerSelection's first num_sinks and last `window`
// candidates, or all. Reads and writes 4 bytes a candidate.
struct ListCandidatesArgs {
  KvPoolView pool;
  int32_t num_kv_heads = 0;
  // The host backends read these; a device reads the staged batch, and checks these where they are given.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;   // out; other streams' stay as they are
  int32_t layer = 0;  // of the staged batch
};

// InvalidArgument: as ValidateCandidates; num_sinks or window negative. The host variants also: a list that is not as
// ValidateList has it, a stride that is less than one. (A device cuts lists off at the stride.)
absl::Status ValidateListCandidates(const ListCandidatesArgs& args);

namespace ref {
absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& args);
}
namespace cpu {
absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& args);
}

}  // namespace spl::kernels
