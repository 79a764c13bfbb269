// One task for each stream and compact page: bring its bounds up to date, then score them.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/quest/page_bound_scores.h"
#include "kernels/selection/quest/page_bound_scores_isa.h"
#include "kernels/selection/selecting_sequence.h"

namespace spl::kernels::cpu {
namespace {

// The keys are rows of pages of the pool, the bounds of one.
template <typename T, typename Get>
void UpdateGranule(std::span<const std::byte* const> keys, int32_t head_dim, T* bounds, const Get& get) {
  T* low = bounds;
  T* high = bounds + head_dim;
  std::copy_n(reinterpret_cast<const T*>(keys[0]), head_dim, low);
  std::copy_n(reinterpret_cast<const T*>(keys[0]), head_dim, high);
  for (const std::byte* const row : keys.subspan(1)) {
    const T* key = reinterpret_cast<const T*>(row);
    for (int32_t c = 0; c < head_dim; ++c) {
      if (get(key[c]) < get(low[c])) low[c] = key[c];
      if (get(key[c]) > get(high[c])) high[c] = key[c];
    }
  }
}

// Keys of kE4M3 are widened; the bounds are bf16.
void UpdateGranuleOfCodes(const PageBoundScoresArgs& a, const SelectingSequence& s, const Candidates& own, int32_t head,
                          int32_t begin, int32_t num_keys, bf16* bounds) {
  thread_local Scratch scratch;
  const int32_t dim = a.shape.head_dim;
  float* const row = scratch.Floats(3 * static_cast<size_t>(dim));
  float *const low = row + dim, *const high = low + dim;
  for (int32_t i = 0; i < num_keys; ++i) {
    const int32_t position = own.position(begin + i);
    LoadKvRow(a.pool.dtype, dim, a.pool.k(s.page_tables[head][position / kPageTokens]), position % kPageTokens, row);
    for (int32_t c = 0; c < dim; ++c) {
      if (i == 0 || row[c] < low[c]) low[c] = row[c];
      if (i == 0 || row[c] > high[c]) high[c] = row[c];
    }
  }
  for (int32_t c = 0; c < dim; ++c) {
    bounds[c] = ToBf16(low[c]);
    bounds[dim + c] = ToBf16(high[c]);
  }
}

void Update(const PageBoundScoresArgs& a, const SelectingSequence& s, const Candidates& own, int32_t head,
            int32_t granule) {
  const int32_t begin = granule * kBoundTokens, num_keys = std::min(kBoundTokens, own.count() - begin);
  std::byte* const bounds = a.pool.k(s.compact_tables[head][granule / BoundsPerPage(a.pool.dtype)]);
  const int64_t to = int64_t{granule % BoundsPerPage(a.pool.dtype)} * 2 * a.shape.head_dim;
  if (a.pool.dtype == DType::kE4M3)
    return UpdateGranuleOfCodes(a, s, own, head, begin, num_keys, reinterpret_cast<bf16*>(bounds) + to);
  const size_t row_bytes = static_cast<size_t>(a.shape.head_dim) * DTypeBytes(a.pool.dtype);
  std::array<const std::byte*, kBoundTokens> rows;
  for (int32_t i = 0; i < num_keys; ++i) {
    const int32_t position = own.position(begin + i);
    rows[static_cast<size_t>(i)] =
        a.pool.k(s.page_tables[head][position / kPageTokens]) + static_cast<size_t>(position % kPageTokens) * row_bytes;
  }
  const std::span<const std::byte* const> keys(rows.data(), static_cast<size_t>(num_keys));
  if (a.pool.dtype == DType::kF32) {
    UpdateGranule(keys, a.shape.head_dim, reinterpret_cast<float*>(bounds) + to, [](float x) { return x; });
  } else {
    UpdateGranule(keys, a.shape.head_dim, reinterpret_cast<bf16*>(bounds) + to, [](bf16 x) { return ToFloat(x); });
  }
}

struct Task {
  int32_t sequence, head, first_granule;
};

}  // namespace

absl::Status PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& a) {
  absl::Status valid = ValidatePageBoundScores(a);
  if (valid.ok())
    valid = ValidateListedStreams("PageBoundScores", a.sequences, a.pool, a.shape.num_kv_heads,
                                  [&](int32_t candidates) { return BoundPages(candidates, a.pool.dtype); });
  if (!valid.ok()) return valid;
  const PageBoundKernels& kernels = PageBoundKernelsFor(ctx.isa);
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads, dim = a.shape.head_dim;
  const int32_t per_page = BoundsPerPage(a.pool.dtype);
  std::vector<Task> tasks;
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    if (!a.sequences[i].step.selects) continue;
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      if (!a.sequences[i].selects(h)) continue;
      const int32_t num = Candidates(a.pool, a.sequences[i], h).count();
      for (int32_t g = 0; g * kBoundTokens < num; g += per_page) tasks.push_back({static_cast<int32_t>(i), h, g});
    }
  }
  ParallelTasks(ctx, static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    thread_local Scratch scratch;
    const Task task = tasks[static_cast<size_t>(index)];
    const SelectingSequence& s = a.sequences[static_cast<size_t>(task.sequence)];
    const Candidates own(a.pool, s, task.head);
    const int32_t num_granules = (own.count() + kBoundTokens - 1) / kBoundTokens;
    const int32_t end = std::min(task.first_granule + per_page, num_granules);
    for (int32_t g = s.step.first ? task.first_granule
                                  : std::max(task.first_granule, s.step.compact_len / kBoundTokens);
         g < end; ++g)
      Update(a, s, own, task.head, g);
    float* q = scratch.Floats(static_cast<size_t>(group) * dim);
    const float* from = a.q + task.sequence * a.q_row_stride + int64_t{task.head} * group * dim;
    std::transform(from, from + int64_t{group} * dim, q, [&](float x) { return x * a.shape.sm_scale; });
    const int64_t stream = int64_t{task.sequence} * a.shape.num_kv_heads + task.head;
    kernels.score({.bounds = a.pool.k(s.compact_tables[task.head][task.first_granule / per_page]),
                   .q = q,
                   .scores = a.scores + stream * a.scores_stride + task.first_granule,
                   .dtype = DerivedKeyType(a.pool.dtype),
                   .num_granules = end - task.first_granule,
                   .num_heads = group,
                   .head_dim = dim});
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
