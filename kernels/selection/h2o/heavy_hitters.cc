#include "kernels/selection/h2o/heavy_hitters.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/common/status.h"
#include "kernels/selection/h2o/heavy_hitters_host.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels {
namespace {

constexpr char kOp[] = "HeavyHitters";

// The memory of one stream.
class KeptMemory {
 public:
  KeptMemory(const HeavyHittersArgs& a, const SelectingSequence& s, int32_t kv_head)
      : pool_(a.pool),
        per_page_(HeavyHitterPages{s.budget, a.pool.page_bytes()}.words_per_page()),
        pages_(s.compact_tables[static_cast<size_t>(kv_head)]) {}

  int32_t& count() const { return word(0); }
  int32_t& position(int32_t i) const { return word(HeavyHitterPages::kPosition + 2 * int64_t{i}); }
  int32_t& attention(int32_t i) const { return word(HeavyHitterPages::kAttention + 2 * int64_t{i}); }

 private:
  int32_t& word(int64_t i) const {
    return reinterpret_cast<int32_t*>(pool_.k(pages_[static_cast<size_t>(i / per_page_)]))[i % per_page_];
  }

  const KvPoolView& pool_;
  const int64_t per_page_;
  const std::span<const int32_t> pages_;
};

absl::Status ValidateKept(const HeavyHittersArgs& a, const SelectingSequence& s, int32_t kv_head) {
  const KeptMemory memory(a, s, kv_head);
  if (memory.count() < 0 || memory.count() > s.budget)
    return InvalidCall(kOp, ": head ", kv_head, " keeps ", memory.count(), " positions, its budget is ", s.budget);
  const std::span<const int32_t> table = s.page_tables[static_cast<size_t>(kv_head)];
  int32_t before = -1;
  for (int32_t i = 0; i <= memory.count(); ++i) {
    const int32_t position = i < memory.count() ? memory.position(i) : s.kv_len - 1;
    if (position <= before)
      return InvalidCall(kOp, ": head ", kv_head, " keeps position ", position, " behind ", before);
    const auto page = static_cast<size_t>(position / kPageTokens);
    if (page >= table.size() || !a.pool.contains(table[page]))
      return InvalidCall(kOp, ": page_tables has no page of the pool at ", page, ", where position ", position, " is");
    before = position;
  }
  return absl::OkStatus();
}

// The entry of the list that leaves: of all but the last `recent` the one with the least attention, of equal ones the
// last.
int32_t Evicted(std::span<const float> attention, int32_t recent) {
  const auto others = attention.first(attention.size() - static_cast<size_t>(recent));
  int32_t least = 0;
  for (size_t i = 1; i < others.size(); ++i) {
    if (WeightBits(others[i]) <= WeightBits(others[static_cast<size_t>(least)])) least = static_cast<int32_t>(i);
  }
  return least;
}

}  // namespace

absl::Status ValidateHeavyHitters(const HeavyHittersArgs& a) {
  if (absl::Status s = ValidateSelectingShape(kOp, a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.selects) continue;
    absl::Status status = ValidateListBudget(kOp, s, a.lists);
    if (!status.ok()) return status;
    if (int64_t{s.budget} + 1 > std::min(a.lists.stride, a.attention_stride))
      return InvalidCall(kOp, ": budget ", s.budget, " needs lists and attention of ", s.budget + 1,
                         ", their strides are ", a.lists.stride, " and ", a.attention_stride);
    // The host looks at the pages of what is kept; nothing else is read.
    status = ValidateSelectingTables(kOp, s, a.pool, a.shape.num_kv_heads,
                                     HeavyHitterPages{s.budget, a.pool.page_bytes()}.num_pages(), false);
    if (!status.ok()) return status;
  }
  if (!a.sequences.empty() && (a.q.data == nullptr || a.pool.base == nullptr || a.attention == nullptr ||
                               a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": q, pool.base, attention, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

absl::Status HeavyHitters(const HeavyHittersArgs& a, const AttentionOfStream& attend) {
  if (absl::Status s = ValidateHeavyHitters(a); !s.ok()) return s;
  if (a.q.dtype != DType::kF32) return InvalidCall(kOp, ": q is not f32, as the host computes");
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  std::vector<float> paid;
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    const SelectingSequence& s = a.sequences[i];
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      if (!s.selects(h)) continue;
      if (absl::Status status = ValidateKept(a, s, h); !status.ok()) return status;
      const KeptMemory memory(a, s, h);
      const int64_t stream = static_cast<int64_t>(i) * a.shape.num_kv_heads + h;
      const int32_t kept = memory.count(), count = kept + 1;
      int32_t* const list = a.lists.tokens + stream * a.lists.stride;
      for (int32_t k = 0; k < kept; ++k) list[k] = memory.position(k);
      list[kept] = s.kv_len - 1;
      a.lists.counts[stream] = count;
      paid.assign(static_cast<size_t>(count), 0.0f);
      absl::Status status = attend({.page_table = s.page_tables[static_cast<size_t>(h)],
                                    .kv_len = s.kv_len,
                                    .q = static_cast<const float*>(a.q) + static_cast<int64_t>(i) * a.q_row_stride +
                                         int64_t{h} * group * a.shape.head_dim,
                                    .list = {list, static_cast<size_t>(count)},
                                    .attention = paid});
      if (!status.ok()) return status;
      const std::span<float> all(a.attention + stream * a.attention_stride, static_cast<size_t>(count));
      for (int32_t k = 0; k < count; ++k) {
        const auto at = static_cast<size_t>(k);
        all[at] = (k < kept ? std::bit_cast<float>(memory.attention(k)) : 0.0f) + paid[at];
      }
      const int32_t leaves = count > s.budget ? Evicted(all, s.recent) : count;
      for (int32_t k = 0, to = 0; k < count; ++k) {
        if (k == leaves) continue;
        memory.position(to) = list[k];
        memory.attention(to++) = std::bit_cast<int32_t>(all[static_cast<size_t>(k)]);
      }
      memory.count() = std::min(count, s.budget);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
