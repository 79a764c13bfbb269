// The positions that a stream of a decode batch may choose from when it holds only part of its sequence: a list of
// positions, plus everything written after them (SamKV's sparse KV, the one-time choices of SnapKV and similar methods,
// and the choice that LoopServe keeps in a cascade: docs/methods/samkv.md, docs/methods/baselines.md and
// docs/methods/loopserve.md).
//
// A stream whose step is `listed` has n listed positions, ascending, all before first_fresh, which is at most kv_len.
// Its candidates, n + kv_len - first_fresh in number, are
//   candidate i = listed[i] for i < n, then first_fresh + i - n.
// In a stream that is not listed, every position is a candidate. Operations that choose (SelectTokens, PageBoundScores
// and TopTokens, ChooseByQueryWindow) treat the candidates of a listed stream as a sequence of their own: compact keys,
// granules, the last `recent` ones, ties and budgets go by the number of a candidate; the resulting lists name
// positions. Sinks and windows therefore count what the stream holds, not what the prompt once had. That is correct
// because keys already carry the rotation of their true position, and attention needs nothing else of it.
//
// Layout   list pages of a stream, from the pool that has its keys: int32, entry 0 is n, then the positions, continued
//          in the next page. Written before the first step, never by a step, except in a cascade: there the list lies
//          where ChooseByQueryWindow keeps it (query_window.h), which writes it in the same step.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

inline int64_t ListEntriesPerPage(size_t page_bytes) { return static_cast<int64_t>(page_bytes / sizeof(int32_t)); }
// Number of pages for a list of `count` positions.
inline int64_t ListPages(int64_t count, size_t page_bytes) { return count / ListEntriesPerPage(page_bytes) + 1; }

// The candidates of one stream, on the host. A view of the sequence and the pool, which must outlive it.
class Candidates {
 public:
  Candidates(const KvPoolView& pool, const SelectingSequence& sequence, int32_t kv_head);

  bool listed() const { return !pages_.empty(); }
  int32_t count() const { return count_; }
  int32_t position(int32_t i) const {
    return i < num_listed_ ? entry(int64_t{i} + 1) : first_fresh_ + (i - num_listed_);
  }
  // Writes the positions of the candidates [begin, end) to out, one after the other; returns the end of what it wrote.
  int32_t* Copy(int32_t begin, int32_t end, int32_t* out) const;
  // Replaces numbers of candidates by their positions, in place.
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

// Checks a sequence without looking at its lists, which may be on a device. InvalidArgument names `op`: a listed
// sequence without list tables, with pages outside the pool, or with first_fresh past kv_len. OK: not listed.
absl::Status ValidateCandidates(const char* op, const SelectingSequence& sequence, const KvPoolView& pool,
                                int32_t num_kv_heads);
// Checks a list that the host can read: its pages hold it, and its last position is before first_fresh. Ascending order
// is not checked: reading the whole list in every step would take longer than the step of a small model. REQUIRES:
// ValidateCandidates.
absl::Status ValidateList(const char* op, const SelectingSequence& sequence, const KvPoolView& pool, int32_t kv_head);

// Writes the lists of streams whose step is listed and does not select: the first num_sinks and the last `window`
// candidates (LayerSelection), or all. Reads and writes 4 bytes per candidate.
struct ListCandidatesArgs {
  KvPoolView pool;
  int32_t num_kv_heads = 0;
  // Read by host backends. A device reads the staged batch, and checks these if they are given.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;   // out; lists of other streams stay unchanged
  int32_t layer = 0;  // layer number in the staged batch
};

// InvalidArgument: as ValidateCandidates; num_sinks or window negative. Host variants also: a list that ValidateList
// refuses, a stride that is shorter than a list. (A device cuts lists off at the stride.)
absl::Status ValidateListCandidates(const ListCandidatesArgs& args);

namespace ref {
absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& args);
}
namespace cpu {
absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& args);
}

}  // namespace spl::kernels
