// Attention over the pages of the staged batch.
#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/attention/listed_keys.h"
#include "kernels/attention/listed_keys_cuda.h"
#include "kernels/backend/cuda/cuda_backend.h"
#include "kernels/backend/cuda/staged_batch.h"
#include "kernels/backend/cuda/wide_batch.h"
#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

// The heads that see lists of positions, as attention over pages with K and V of the lists (listed_keys.h).
absl::Status AttendLists(CudaSession& session, const PrefillAttentionArgs& a, PrefillArgs args) {
  const PrefillSequence& sequence = a.sequences.front();
  const DeviceBatch& b = session.batch();
  if (sequence.row_begin != 0 || sequence.row_end != b.num_rows ||
      sequence.positions.size() != static_cast<size_t>(b.num_rows))
    return absl::InvalidArgumentError(absl::StrCat("cuda: lists of rows [", sequence.row_begin, ", ", sequence.row_end,
                                                   ") of a staged pass of ", b.num_rows));
  const auto last_rows = a.last_rows > 0 ? std::min(a.last_rows, b.num_rows) : b.num_rows;
  const PagedBatch in_pages = args.batch;
  const KvPoolView& pool = in_pages.pool;
  args.rules = {};
  for (const ListedHeads& group : GroupByList(sequence.heads)) {
    const auto rows = ListRows(group.list, sequence.positions);
    if (!rows.ok()) return rows.status();
    HeadList heads;
    args.skip_heads = ~uint64_t{0};
    for (const int32_t h : group.kv_heads) {
      if (absl::Status s = CheckResident(rows->resident, sequence.heads[static_cast<size_t>(h)].page_table); !s.ok())
        return s;
      heads.head[heads.count++] = static_cast<uint8_t>(h);
      args.skip_heads &= ~(uint64_t{1} << h);
    }
    const int32_t num_pages = std::max(rows->num_pages(), 1), kv_len = static_cast<int32_t>(rows->list.size());
    std::vector<int32_t> tables(sequence.heads.size() * static_cast<size_t>(num_pages), kNoPage);
    for (int32_t n = 0; n < heads.count; ++n)
      std::iota(tables.begin() + int64_t{heads.head[n]} * num_pages,
                tables.begin() + (int64_t{heads.head[n]} + 1) * num_pages, n * num_pages);
    constexpr int64_t kNoOffset = 0;
    auto staged = session.StageChangedArrays(
        CudaSession::Use::kPrefillLists,
        {std::as_bytes(rows->list), std::as_bytes(std::span(rows->positions)), std::as_bytes(std::span(tables)),
         std::as_bytes(std::span(&kv_len, 1)), std::as_bytes(std::span(&kNoOffset, 1))});
    if (!staged.ok()) return staged.status();
    const auto total_pages = heads.count * num_pages;
    auto pages = session.Scratch(CudaSession::Use::kListedPages, static_cast<size_t>(total_pages) * pool.page_bytes());
    if (!pages.ok()) return pages.status();
    const GatherListedArgs gather{.batch = in_pages,
                                  .heads = heads,
                                  .list = reinterpret_cast<const int32_t*>((*staged)[0]),
                                  .count = kv_len,
                                  .num_pages = num_pages,
                                  .pages = *pages};
    if (absl::Status s = ToStatus(GatherListed(gather, session.stream()), "gathering a list's keys"); !s.ok()) return s;
    const EmptyRowsArgs empty{.shape = args.heads,
                              .heads = heads,
                              .dtype = args.dtype,
                              .out = args.out,
                              .lse = args.lse,
                              .first_row = b.num_rows - last_rows,
                              .end_row = rows->num_empty};
    if (absl::Status s = ToStatus(WriteEmptyRows(empty, session.stream()), "rows that see nothing"); !s.ok()) return s;
    // Attention runs only the later rows: not all of its variants can run a tile of rows that see nothing.
    args.last_rows = std::min(last_rows, b.num_rows - rows->num_empty);
    if (args.last_rows == 0) continue;
    args.positions = reinterpret_cast<const int32_t*>((*staged)[1]);
    args.max_kv_len = kv_len;
    args.batch = {.page_tables = reinterpret_cast<const int32_t*>((*staged)[2]),
                  .table_offset = reinterpret_cast<const int64_t*>((*staged)[4]),
                  .head_stride = num_pages,
                  .kv_len = reinterpret_cast<const int32_t*>((*staged)[3]),
                  .pool = {static_cast<std::byte*>(*pages), pool.dtype, pool.head_dim, total_pages},
                  .num_sequences = 1};
    if (absl::Status s = ToStatus(cuda::PrefillAttention(args, session.stream()), "PrefillAttention"); !s.ok())
      return s;
  }
  return absl::OkStatus();
}

// The lines of one sequence's heads, which lie as LinePlan lays them out.
absl::Status TakeLines(const PrefillSequence& sequence, const KvPoolView& pool, PrefillArgs& args) {
  const LineVisibility* first = nullptr;
  for (size_t h = 0; h < sequence.heads.size(); ++h) {
    if (sequence.heads[h].visibility.rule != VisibilityRule::kLines) continue;
    const LineVisibility* v = sequence.heads[h].visibility.lines;
    if (v == nullptr) return absl::InvalidArgumentError("cuda: visibility by lines without `lines`");
    const auto rows = static_cast<int32_t>(sequence.positions.size());
    if (v->num_rows != rows || rows == 0 || v->first_position != sequence.positions.front() ||
        sequence.positions.back() - sequence.positions.front() + 1 != rows)
      return absl::InvalidArgumentError(absl::StrCat("cuda: lines of ", v->num_rows, " rows from position ",
                                                     v->first_position, " for ", rows, " other ones"));
    const auto head = static_cast<int64_t>(h);
    const int64_t tiles = int64_t{v->num_row_tiles()} * v->tile_words;
    const int64_t masks = int64_t{v->num_row_tiles()} * v->column_words;
    PrefillLines lines{v->tiles - head * tiles,
                       v->column_masks - head * masks,
                       v->columns - head * 64 * v->column_words,
                       static_cast<const std::byte*>(v->column_pages) -
                           head * v->column_words * static_cast<int64_t>(pool.page_bytes()),
                       v->num_row_tiles(),
                       v->tile_words,
                       v->column_words};
    if (first != nullptr &&
        (lines.tiles != args.lines.tiles || lines.column_masks != args.lines.column_masks ||
         lines.columns != args.lines.columns || lines.column_pages != args.lines.column_pages ||
         lines.tile_words != args.lines.tile_words || lines.column_words != args.lines.column_words))
      return absl::UnimplementedError("cuda: lines of the heads of one call from different plans");
    first = v;
    args.lines = lines;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TakeRules(std::span<const HeadStreamView> heads, bool first, bool has_lists, HeadRules& rules,
                       uint64_t* listed) {
  if (heads.size() > kMaxKvHeads)
    return absl::UnimplementedError(absl::StrCat("cuda: ", heads.size(), " KV heads, at most ", kMaxKvHeads));
  for (size_t h = 0; h < heads.size(); ++h) {
    HeadVisibility v = heads[h].visibility;
    if (v.rule == VisibilityRule::kList && listed != nullptr) {
      *listed |= uint64_t{1} << h;
      v = {};
    }
    if (v.rule != VisibilityRule::kFull && v.rule != VisibilityRule::kBand && v.rule != VisibilityRule::kLines &&
        v.rule != VisibilityRule::kElsewhere && !(v.rule == VisibilityRule::kSelected && has_lists))
      return absl::UnimplementedError("cuda: attention over token lists");
    const HeadRule rule{v.rule, v.num_sinks, v.window};
    HeadRule& known = rules.head[h];
    if (first) {
      known = rule;
    } else if (known.rule != rule.rule || (rule.rule == VisibilityRule::kBand &&
                                           (known.num_sinks != rule.num_sinks || known.window != rule.window))) {
      return absl::UnimplementedError("cuda: sequences of one pass with different visibility, without staged plans");
    }
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& a) const {
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  PrefillArgs args{.heads = Heads(a.shape),
                   .batch = Batch(b, a.pool, a.layer, 0, static_cast<int32_t>(a.sequences.size())),
                   .row_begin = b.row_begin,
                   .positions = b.positions,
                   .num_rows = a.sequences.back().row_end,
                   .max_kv_len = b.max_kv_len,
                   .dtype = a.q.dtype,
                   .q = a.q.data,
                   .q_row_stride = a.q_row_stride,
                   .out = a.out.data,
                   .lse = a.lse,
                   .last_rows = a.last_rows};
  for (const PrefillSequence& sequence : a.sequences) {
    const bool first = &sequence == &a.sequences.front();
    if (absl::Status s = TakeRules(sequence.heads, first, false, args.rules, &args.skip_heads); !s.ok()) return s;
  }
  if (args.skip_heads != 0 && a.sequences.size() != 1)
    return absl::UnimplementedError("cuda: lists of tokens in a pass of several sequences");
  auto batch = InBf16(session, args.batch, a.shape.num_kv_heads, args.rules, a.sequences);
  if (!batch.ok()) return batch.status();
  // Stage copied rows, tables and lengths before the first kernel of the pass; tables of widened pages a kernel writes.
  args.early = batch->page_tables == args.batch.page_tables;
  args.batch = *batch;
  if (a.sequences.size() == 1) {
    if (absl::Status s = TakeLines(a.sequences.front(), args.batch.pool, args); !s.ok()) return s;
  }
  auto workspace = session.Scratch(CudaSession::Use::kPrefillAttention, PrefillWorkspaceBytes());
  if (!workspace.ok()) return workspace.status();
  args.workspace = *workspace;
  if (args.skip_heads != 0) {
    if (absl::Status s = AttendLists(session, a, args); !s.ok()) return s;
  }
  return ToStatus(cuda::PrefillAttention(args, session.stream()), "PrefillAttention");
}

absl::Status CudaBackend::DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& a) const {
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  const size_t heads = static_cast<size_t>(a.shape.num_kv_heads);
  const auto num_sequences = static_cast<int32_t>(a.streams.size() / heads);
  DecodeArgs args{.heads = Heads(a.shape),
                  .batch = Batch(b, a.pool, a.layer, a.first_sequence, num_sequences),
                  .max_kv_len = b.max_kv_len,
                  .dtype = a.q.dtype,
                  .q = a.q.data,
                  .q_row_stride = a.q_row_stride,
                  .out = a.out.data,
                  .lse = a.lse,
                  .lists = a.lists};
  if (a.staged_plans) {
    if (b.plans == nullptr) return absl::FailedPreconditionError("cuda: attention over staged plans, none are staged");
    args.plans = b.plans + static_cast<int64_t>(a.layer) * a.shape.num_kv_heads;
    args.plan_offset = b.plan_offset + a.first_sequence;
  }
  for (size_t begin = 0; begin < a.streams.size() && !a.staged_plans; begin += heads) {
    if (absl::Status s = TakeRules(a.streams.subspan(begin, heads), begin == 0, a.lists.tokens != nullptr, args.rules);
        !s.ok())
      return s;
  }
  auto workspace = session.Scratch(CudaSession::Use::kDecodeAttention,
                                   DecodeWorkspaceBytes(args.heads, num_sequences, b.max_kv_len,
                                                        a.lists.tokens != nullptr ? a.lists.stride : 0, a.pool.dtype));
  if (!workspace.ok()) return workspace.status();
  args.workspace = *workspace;
  // Stage copied tables and lengths before the first kernel of the pass; in a pass of one row a sequence that row is
  // the only position which the kernels since then have written.
  args.early = b.num_rows == b.num_sequences;
  return ToStatus(cuda::DecodeAttention(args, session.stream()), "DecodeAttention");
}

}  // namespace spl::kernels::cuda
