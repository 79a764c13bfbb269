#include "kernels/selection/sparcas/refill_hot_rows.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/status.h"
#include "kernels/selection/sparcas/hot_buffer_shape.h"

namespace spl::kernels {

absl::Status ValidateRefillHotRows(const RefillHotRowsArgs& a) {
  constexpr char kOp[] = "RefillHotRows";
  if (a.num_kv_heads < 1 || !IsKvType(a.pool.dtype))
    return InvalidCall(kOp, ": ", a.num_kv_heads, " KV heads, or pages of another type than f32, bf16 and fp8");
  for (const SelectingSequence& s : a.sequences) {
    if (absl::Status status = ValidateHotBuffer(kOp, s, a.lists); !status.ok()) return status;
  }
  if (!a.sequences.empty() && (a.pool.base == nullptr || a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": pool.base, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

namespace {

// One stream of a call.
struct Refill {
  const KvPoolView& pool;
  HotStream hot;
  std::span<const int32_t> list;
  int32_t kv_len;

  int32_t Age(int32_t slot) const { return std::min(kv_len - hot.listed_at[slot], kHotAgeMax); }
  // Marks the hits; returns the positions without a slot.
  std::vector<int32_t> Sort(std::vector<bool>& hits, uint64_t& num_on_host) const {
    std::vector<int32_t> misses;
    hits.assign(static_cast<size_t>(hot.num_slots), false);
    num_on_host = 0;
    for (const int32_t position : list) {
      if (!hot.on_host(position)) continue;
      ++num_on_host;
      if (hot.slot_of[position] == 0) {
        misses.push_back(position);
        continue;
      }
      const int32_t slot = hot.slot_of[position] - 1;
      hits[static_cast<size_t>(slot)] = true;
      hot.listed_at[slot] = kv_len;
    }
    return misses;
  }
  void Give(int32_t slot, int32_t position) const {
    if (const int32_t before = hot.position_of[slot]; before != 0) hot.slot_of[before - 1] = 0;
    hot.position_of[slot] = position + 1;
    hot.slot_of[position] = static_cast<uint16_t>(slot + 1);
    hot.listed_at[slot] = kv_len;
    const std::byte* const from = hot.host_pages[position / kPageTokens];
    std::byte* const to = pool.base + hot.slot_pages[slot / kPageTokens] * static_cast<int64_t>(pool.page_bytes());
    for (const size_t half : {size_t{0}, pool.half_bytes()})
      CopyKvRows(pool.dtype, pool.head_dim, from + half, position % kPageTokens, to + half, slot % kPageTokens, 1);
  }
};

// Calls run(refill, counts) for each stream that has work; counts: those of its sequence.
template <typename Run>
void ForEachStream(const RefillHotRowsArgs& a, int64_t stream, const Run& run) {
  const SelectingSequence& s = a.sequences[static_cast<size_t>(stream / a.num_kv_heads)];
  const auto head = static_cast<int32_t>(stream % a.num_kv_heads);
  if (!s.hot.any() || !s.selects(head)) return;
  run(Refill{a.pool, s.hot.stream(head), a.lists.of(stream), s.kv_len}, s.hot.counts);
}

}  // namespace

namespace ref {

absl::Status RefillHotRows(const KernelContext&, const RefillHotRowsArgs& a) {
  if (absl::Status s = ValidateRefillHotRows(a); !s.ok()) return s;
  for (int64_t stream = 0; stream < static_cast<int64_t>(a.sequences.size()) * a.num_kv_heads; ++stream) {
    ForEachStream(a, stream, [](const Refill& x, uint64_t* counts) {
      std::vector<bool> hits;
      uint64_t num_on_host = 0;
      const std::vector<int32_t> misses = x.Sort(hits, num_on_host);
      std::vector<int32_t> slots;
      for (int32_t slot = 0; slot < x.hot.num_slots; ++slot) {
        if (!hits[static_cast<size_t>(slot)]) slots.push_back(slot);
      }
      std::stable_sort(slots.begin(), slots.end(),
                       [&](int32_t first, int32_t second) { return x.Age(first) > x.Age(second); });
      slots.resize(misses.size());
      std::sort(slots.begin(), slots.end());
      for (size_t i = 0; i < misses.size(); ++i) x.Give(slots[i], misses[i]);
      counts[0] += num_on_host;
      counts[1] += misses.size();
    });
  }
  return absl::OkStatus();
}

}  // namespace ref

namespace cpu {
namespace {

void RunStream(const Refill& x, std::array<uint64_t, 2>& counts) {
  thread_local std::vector<bool> hits;
  const std::vector<int32_t> misses = x.Sort(hits, counts[0]);
  counts[1] = misses.size();
  if (misses.empty()) return;
  std::array<int32_t, kHotAgeMax + 1> of_age{};
  for (int32_t slot = 0; slot < x.hot.num_slots; ++slot) {
    if (!hits[static_cast<size_t>(slot)]) ++of_age[static_cast<size_t>(x.Age(slot))];
  }
  // Slots above `age` are all given away, and `left` of those of this age.
  int32_t age = kHotAgeMax;
  auto left = static_cast<int32_t>(misses.size());
  while (age > 0 && of_age[static_cast<size_t>(age)] < left) left -= of_age[static_cast<size_t>(age--)];
  size_t next = 0;
  for (int32_t slot = 0; slot < x.hot.num_slots && next < misses.size(); ++slot) {
    if (hits[static_cast<size_t>(slot)] || x.Age(slot) < age) continue;
    if (x.Age(slot) == age && left-- <= 0) continue;
    x.Give(slot, misses[next++]);
  }
}

}  // namespace

absl::Status RefillHotRows(const KernelContext& ctx, const RefillHotRowsArgs& a) {
  if (absl::Status s = ValidateRefillHotRows(a); !s.ok()) return s;
  const int64_t num_streams = static_cast<int64_t>(a.sequences.size()) * a.num_kv_heads;
  std::vector<std::array<uint64_t, 2>> counts(static_cast<size_t>(num_streams));
  ParallelTasks(ctx, num_streams, [&](int64_t stream) {
    ForEachStream(a, stream, [&](const Refill& x, uint64_t*) { RunStream(x, counts[static_cast<size_t>(stream)]); });
  });
  for (int64_t stream = 0; stream < num_streams; ++stream) {
    ForEachStream(a, stream, [&](const Refill&, uint64_t* of_sequence) {
      for (size_t i = 0; i < 2; ++i) of_sequence[i] += counts[static_cast<size_t>(stream)][i];
    });
  }
  return absl::OkStatus();
}

}  // namespace cpu

}  // namespace spl::kernels
