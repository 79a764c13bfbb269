#include "kernels/selection/sparcas/attend_hot_rows.h"

#include <numeric>
#include <vector>

#include "kernels/common/ceil_div.h"
#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/status.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/sparcas/hot_buffer_shape.h"

namespace spl::kernels {

absl::Status ValidateAttendHotRows(const AttendHotRowsArgs& a) {
  constexpr char kOp[] = "AttendHotRows";
  if (absl::Status s = ValidateSelectingShape(kOp, a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  for (const SelectingSequence& s : a.sequences) {
    if (absl::Status status = ValidateHotBuffer(kOp, s, a.lists); !status.ok()) return status;
  }
  if (!a.sequences.empty() && (a.q.data == nullptr || a.out.data == nullptr || a.pool.base == nullptr ||
                               a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": q, out, pool.base, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

namespace {

// Copies the listed rows of a stream, in the order of its list, to pages that begin at `to`.
void GatherRows(const KvPoolView& pool, const SelectingSequence& s, int32_t head, std::span<const int32_t> list,
                std::byte* to) {
  const HotStream hot = s.hot.stream(head);
  const std::span<const int32_t> table = s.page_tables[static_cast<size_t>(head)];
  const auto page_bytes = static_cast<int64_t>(pool.page_bytes());
  for (size_t i = 0; i < list.size(); ++i) {
    const int32_t position = list[i];
    const std::byte* page = nullptr;
    int32_t row = position % kPageTokens;
    if (hot.on_host(position)) {
      const int64_t at = hot.RowOf(position);
      page = pool.base + at / kPageTokens * page_bytes;
      row = static_cast<int32_t>(at % kPageTokens);
    } else {
      page = pool.k(table[static_cast<size_t>(position / kPageTokens)]);
    }
    std::byte* const gathered = to + static_cast<int64_t>(i) / kPageTokens * page_bytes;
    for (const size_t half : {size_t{0}, pool.half_bytes()})
      CopyKvRows(pool.dtype, pool.head_dim, page + half, row, gathered + half, static_cast<int32_t>(i) % kPageTokens,
                 1);
  }
}

// Attention over the gathered rows, entry i at position i: the values and their order are those of the list, and so is
// what attention makes of them.
template <typename Attend>
absl::Status GatherAndAttend(const KernelContext& ctx, const AttendHotRowsArgs& a, const Attend& attend) {
  if (absl::Status s = ValidateAttendHotRows(a); !s.ok()) return s;
  const int32_t heads = a.shape.num_kv_heads;
  const auto num_streams = static_cast<int64_t>(a.sequences.size()) * heads;
  const auto is_hot = [&](int64_t stream) {
    const SelectingSequence& s = a.sequences[static_cast<size_t>(stream / heads)];
    return s.hot.any() && s.selects(static_cast<int32_t>(stream % heads));
  };
  thread_local std::vector<std::byte> memory;
  thread_local std::vector<int32_t> numbers;
  std::vector<HeadStreamView> views(static_cast<size_t>(num_streams), {{}, 0, {VisibilityRule::kElsewhere}});
  std::vector<int64_t> first_page(static_cast<size_t>(num_streams));
  int64_t num_pages = 0;
  int32_t longest = 0;
  for (int64_t stream = 0; stream < num_streams; ++stream) {
    if (!is_hot(stream)) continue;
    first_page[static_cast<size_t>(stream)] = num_pages;
    num_pages += CeilDiv(int64_t{a.lists.counts[stream]}, int64_t{kPageTokens});
    longest = std::max(longest, a.lists.counts[stream]);
  }
  if (num_pages == 0) return absl::OkStatus();
  numbers.resize(static_cast<size_t>(std::max<int64_t>(num_pages, longest)));
  std::iota(numbers.begin(), numbers.end(), 0);
  memory.resize(static_cast<size_t>(num_pages) * a.pool.page_bytes());
  KvPoolView gathered = a.pool;
  gathered.base = memory.data();
  gathered.num_pages = static_cast<int32_t>(num_pages);
  gathered.first_page = 0;
  for (int64_t stream = 0; stream < num_streams; ++stream) {
    if (!is_hot(stream)) continue;
    const auto count = static_cast<size_t>(a.lists.counts[stream]);
    views[static_cast<size_t>(stream)] = {
        std::span(numbers).subspan(static_cast<size_t>(first_page[static_cast<size_t>(stream)]),
                                   (count + kPageTokens - 1) / kPageTokens),
        static_cast<int32_t>(count),
        {.rule = VisibilityRule::kList, .indices = std::span(numbers).first(count)}};
  }
  ParallelTasks(ctx, num_streams, [&](int64_t stream) {
    if (!is_hot(stream)) return;
    GatherRows(a.pool, a.sequences[static_cast<size_t>(stream / heads)], static_cast<int32_t>(stream % heads),
               a.lists.of(stream), gathered.base + first_page[static_cast<size_t>(stream)] * a.pool.page_bytes());
  });
  return attend(DecodeAttentionArgs{.shape = a.shape,
                                    .pool = gathered,
                                    .q = a.q,
                                    .q_row_stride = a.q_row_stride,
                                    .out = a.out,
                                    .lse = a.lse,
                                    .streams = views});
}

}  // namespace

absl::Status ref::AttendHotRows(const KernelContext& ctx, const AttendHotRowsArgs& a) {
  return GatherAndAttend({}, a, [&](const DecodeAttentionArgs& attention) { return DecodeAttention(ctx, attention); });
}

absl::Status cpu::AttendHotRows(const KernelContext& ctx, const AttendHotRowsArgs& a) {
  return GatherAndAttend(ctx, a, [&](const DecodeAttentionArgs& attention) { return DecodeAttention(ctx, attention); });
}

}  // namespace spl::kernels
