#include "kernels/selection/loopserve/query_window.h"

#include <algorithm>
#include <cstring>

#include "kernels/common/status.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/loopserve/query_window_host.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels {
namespace {

constexpr const char* kOp = "ChooseByQueryWindow";

QueryWindow WindowOf(const QueryWindowArgs& a, const SelectingSequence& s) {
  return {.head_dim = a.shape.head_dim,
          .group = a.shape.num_qo_heads / a.shape.num_kv_heads,
          .window = a.window,
          .budget = s.budget,
          .query_dtype = a.q.dtype,
          .page_bytes = a.pool.page_bytes()};
}

// The memory of one stream.
class StreamWindow {
 public:
  StreamWindow(const QueryWindowArgs& a, const SelectingSequence& s, int32_t kv_head)
      : pool_(a.pool), layout_(WindowOf(a, s)), pages_(s.compact_tables[static_cast<size_t>(kv_head)]) {}

  float* query(int32_t slot, int32_t group_head) const {
    const int64_t row = int64_t{slot} * layout_.group + group_head, per_page = layout_.rows_per_page();
    return reinterpret_cast<float*>(pool_.k(pages_[static_cast<size_t>(row / per_page)])) +
           row % per_page * layout_.head_dim;
  }
  // Entry 0 is the number of kept positions.
  int32_t& entry(int64_t i) const {
    const auto page = static_cast<size_t>(layout_.query_pages() + i / layout_.entries_per_page());
    return reinterpret_cast<int32_t*>(pool_.k(pages_[page]))[i % layout_.entries_per_page()];
  }

 private:
  const KvPoolView& pool_;
  const QueryWindow layout_;
  const std::span<const int32_t> pages_;
};

}  // namespace

absl::Status ValidateQueryWindow(const QueryWindowArgs& a) {
  if (absl::Status s = ValidateSelectingShape(kOp, a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  if (a.window < 1 || a.window > kQueryWindowMax)
    return InvalidCall(kOp, ": window is ", a.window, ", it must be in [1, ", kQueryWindowMax, "]");
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.records) {
      if (s.step.selects) return InvalidCall(kOp, ": a sequence that selects and does not record its queries");
      continue;
    }
    if (s.step.selects && s.step.refresh && !a.chooses)
      return InvalidCall(kOp, ": a sequence that chooses in a step that says nobody does");
    if (s.step.compact_len < 0) return InvalidCall(kOp, ": compact_len ", s.step.compact_len, " is negative");
    absl::Status status = ValidateCandidates(kOp, s, a.pool, a.shape.num_kv_heads);
    if (status.ok()) status = ValidateListBudget(kOp, s, a.lists);
    if (!status.ok()) return status;
    const QueryWindow window = WindowOf(a, s);
    if (window.list_tokens() > a.lists.stride)
      return InvalidCall(kOp, ": budget ", s.budget, " with a window of ", a.window, " needs lists of ",
                         window.list_tokens(), ", their stride is ", a.lists.stride);
    if (s.step.selects && s.step.refresh && a.scores_stride < s.kv_len)
      return InvalidCall(kOp, ": scores_stride ", a.scores_stride, " is too short for kv_len ", s.kv_len);
    // Without a choice in this step, only the kept positions need be resident.
    const bool reads_keys = s.step.selects && s.step.refresh;
    status = ValidateSelectingTables(kOp, s, a.pool, a.shape.num_kv_heads, window.num_pages(), reads_keys);
    if (!status.ok()) return status;
  }
  if (!a.sequences.empty() &&
      ((a.chooses && a.scores == nullptr) || a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": scores, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

absl::Status ChooseByQueryWindow(const QueryWindowArgs& a, const ScoreStream& score) {
  if (absl::Status s = ValidateQueryWindow(a); !s.ok()) return s;
  if (a.q.dtype != DType::kF32) return InvalidCall(kOp, ": q is not f32, as the host computes");
  // The number of compact pages does not depend on that of candidates, and was looked at.
  absl::Status listed =
      ValidateListedStreams(kOp, a.sequences, a.pool, a.shape.num_kv_heads, [](int32_t) { return int64_t{0}; });
  if (!listed.ok()) return listed;
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads, dim = a.shape.head_dim;
  std::vector<uint32_t> bits;
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    const SelectingSequence& s = a.sequences[i];
    if (!s.step.records) continue;
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      if (s.compact_tables[static_cast<size_t>(h)].empty()) continue;
      const StreamWindow memory(a, s, h);
      const int32_t slot = s.step.compact_len % a.window;
      const float* q =
          static_cast<const float*>(a.q) + static_cast<int64_t>(i) * a.q_row_stride + int64_t{h} * group * dim;
      for (int32_t g = 0; g < group; ++g) std::copy_n(q + int64_t{g} * dim, dim, memory.query(slot, g));
      if (!s.step.selects) continue;
      const int64_t stream = static_cast<int64_t>(i) * a.shape.num_kv_heads + h;
      int32_t* const tokens = a.lists.tokens + stream * a.lists.stride;
      const Candidates own(a.pool, s, h);
      int32_t count = 0;
      if (!s.step.refresh) {
        count = memory.entry(0);
        for (int32_t k = 0; k < count; ++k) tokens[k] = memory.entry(1 + k);
        tokens[count] = memory.entry(1 + count) = s.kv_len - 1;
        ++count;
      } else if (own.count() <= s.budget) {
        count = static_cast<int32_t>(own.Copy(0, own.count(), tokens) - tokens);
      } else {
        QueryWindowStream x{.page_table = s.page_tables[static_cast<size_t>(h)],
                            .kv_len = s.kv_len,
                            .candidates = own,
                            .num_queries = std::min(s.step.compact_len + 1, a.window)};
        for (int32_t b = x.num_queries - 1; b >= 0; --b) {
          const int32_t at = (slot - b + a.window) % a.window;
          for (int32_t g = 0; g < group; ++g) {
            const float* row = memory.query(at, g);
            x.queries.insert(x.queries.end(), row, row + dim);
          }
        }
        x.scores = {a.scores + stream * a.scores_stride, static_cast<size_t>(own.count())};
        if (absl::Status status = score(x); !status.ok()) return status;
        bits.resize(x.scores.size());
        std::transform(x.scores.begin(), x.scores.end(), bits.begin(), WeightBits);
        ChooseLargest(bits, s.budget, s.recent, tokens);
        count = s.budget;
        own.ToPositions({tokens, static_cast<size_t>(count)});
      }
      if (s.step.refresh) {
        for (int32_t k = 0; k < count; ++k) memory.entry(1 + k) = tokens[k];
      }
      memory.entry(0) = count;
      a.lists.counts[stream] = count;
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
