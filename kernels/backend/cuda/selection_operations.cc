// Scores and choices of tokens, pages and lines of the staged batch.
#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/backend/cuda/cuda_backend.h"
#include "kernels/backend/cuda/staged_batch.h"
#include "kernels/backend/cuda/wide_batch.h"
#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/selection/candidates_cuda.h"
#include "kernels/selection/h2o/heavy_hitters_cuda.h"
#include "kernels/selection/loopserve/query_window_cuda.h"
#include "kernels/selection/loopserve/select_lines_cuda.h"
#include "kernels/selection/quest/page_bound_scores_cuda.h"
#include "kernels/selection/sparcas/hot_rows_cuda.h"
#include "kernels/selection/sparcas/packed_keys.h"
#include "kernels/selection/sparcas/select_tokens_cuda.h"
#include "kernels/selection/sparcas/sparse_attention_cuda.h"
#include "kernels/selection/sparsex/column_scores_cuda.h"
#include "kernels/selection/sparsex/pool_scores_cuda.h"
#include "kernels/selection/top_k_cuda.h"
#include "kernels/selection/top_tokens_cuda.h"

namespace spl::kernels::cuda {
namespace {

// Checks that the staged batch has a selection and that none of the pointers is null.
absl::Status NeedSelection(const DeviceBatch& b, const char* op, const void* in, const void* out, const void* other) {
  if (in == nullptr || out == nullptr || other == nullptr)
    return absl::InvalidArgumentError(absl::StrCat("cuda: ", op, " with a null tensor"));
  if (!b.selects)
    return absl::FailedPreconditionError(
        absl::StrCat("cuda: ", op, " needs a batch staged with BatchSequence::selection"));
  return absl::OkStatus();
}

// plan: StagedStep::PlanBit of the sequences that are served; 0: of all. outer: their outer choices.
SelectionBatch Selection(const DeviceBatch& b, const KvPoolView& pool, int32_t num_kv_heads, int32_t layer,
                         int32_t plan, bool outer = false) {
  return {.sequences = outer ? b.outer_selecting : b.selecting,
          .steps = (outer ? b.outer_steps : b.selection_steps) + layer * b.steps_stride,
          .compact_tables = b.compact_tables + layer * num_kv_heads * b.compact_stride,
          .compact_head_stride = b.compact_stride,
          .plan = plan,
          .pool = pool.base,
          .page_bytes = static_cast<int64_t>(pool.page_bytes())};
}

std::vector<ColumnPart> ColumnParts(std::span<const PositionRange> columns, int32_t* num_scores) {
  std::vector<ColumnPart> parts;
  *num_scores = 0;
  for (const PositionRange& range : columns) {
    for (int32_t j = range.begin; j < range.end;) {
      const int32_t slot = j % kPageTokens, count = std::min(range.end - j, kPageTokens - slot);
      parts.push_back({j / kPageTokens, slot, count, *num_scores});
      *num_scores += count;
      j += count;
    }
  }
  return parts;
}

}  // namespace

absl::Status CudaBackend::ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& a) const {
  if (absl::Status s = ValidateColumnScores(a); !s.ok()) return s;
  if (a.probes.empty() || a.columns.empty()) return absl::OkStatus();
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  std::vector<int32_t> heads(a.kv_heads.begin(), a.kv_heads.end());
  if (heads.empty()) {
    heads.resize(static_cast<size_t>(a.shape.num_kv_heads));
    std::iota(heads.begin(), heads.end(), 0);
  }
  ColumnTables tables{.num_probes = static_cast<int32_t>(a.probes.size()),
                      .num_kv_heads = static_cast<int32_t>(heads.size())};
  uint64_t listed = 0;  // whose columns are all in their lists, so that only causality is left
  if (absl::Status s = TakeRules(a.rows.heads, true, false, tables.rules, &listed); !s.ok()) return s;
  const std::vector<ColumnPart> parts = ColumnParts(a.columns, &tables.num_scores);
  tables.num_parts = static_cast<int32_t>(parts.size());
  const size_t scratch_bytes =
      cuda::ColumnScratchBytes(a.shape, tables.num_probes, tables.num_kv_heads, tables.num_scores);
  auto staged =
      session.StageArrays(CudaSession::Use::kColumnScores, scratch_bytes,
                          {std::as_bytes(a.probes), std::as_bytes(std::span(heads)), std::as_bytes(std::span(parts))});
  if (!staged.ok()) return staged.status();
  tables.probes = reinterpret_cast<const int32_t*>((*staged)[0]);
  tables.kv_heads = reinterpret_cast<const int32_t*>((*staged)[1]);
  tables.parts = reinterpret_cast<const ColumnPart*>((*staged)[2]);
  auto scratch = session.Scratch(CudaSession::Use::kColumnScores, scratch_bytes);
  if (!scratch.ok()) return scratch.status();
  tables.scratch = *scratch;
  ColumnScoresArgs args = a;
  PagedBatch batch = Batch(b, a.pool, a.layer);
  if (a.pool.dtype == DType::kE4M3) {
    auto wide = InBf16(session, Batch(b, a.pool, a.layer, a.sequence, 1), a.shape.num_kv_heads, tables.rules,
                       std::span(&a.rows, 1), a.columns.back().end);
    if (!wide.ok()) return wide.status();
    batch = *wide;
    args.pool = batch.pool;
    args.sequence = 0;
  }
  return ToStatus(cuda::ColumnScores(args, batch, b.positions, tables, session.stream()), "ColumnScores");
}

absl::Status CudaBackend::PoolScores(const KernelContext& ctx, const PoolScoresArgs& a) const {
  if (absl::Status s = ValidatePoolScores(a); !s.ok()) return s;
  return ToStatus(cuda::PoolScores(a, CudaSession::Of(ctx).stream()), "PoolScores");
}

absl::Status CudaBackend::TopK(const KernelContext& ctx, const TopKArgs& a) const {
  if (absl::Status s = ValidateTopK(a); !s.ok()) return s;
  return ToStatus(cuda::TopK(a, CudaSession::Of(ctx).stream()), "TopK");
}

absl::Status CudaBackend::ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& a) const {
  if (absl::Status s = ValidateListCandidates(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "ListCandidates", a.pool.base, a.lists.tokens, a.lists.counts); !s.ok())
    return s;
  return ToStatus(cuda::ListCandidates(a, Selection(b, a.pool, a.num_kv_heads, a.layer, 0), b.kv_len, b.num_sequences,
                                       b.max_kv_len, session.stream()),
                  "ListCandidates");
}

absl::Status CudaBackend::SelectTokens(const KernelContext& ctx, const SelectTokensArgs& a) const {
  if (absl::Status s = ValidateSelectTokens(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "SelectTokens", a.q.data, a.lists.tokens, a.lists.counts); !s.ok()) return s;
  SelectArgs args{.heads = Heads(a.shape),
                  .batch = Batch(b, a.pool, a.layer),
                  .selection = Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                  .num_dims = a.num_dims,
                  .dims_offset = int64_t{a.layer} * a.shape.num_kv_heads * 2 * a.num_dims,
                  .max_kv_len = b.max_kv_len,
                  .dtype = a.q.dtype,
                  .q = a.q.data,
                  .q_row_stride = a.q_row_stride,
                  .lists = a.lists,
                  .weights = a.weights,
                  .weights_stride = a.weights_stride,
                  .listed = b.listed};
  auto scratch = session.Scratch(CudaSession::Use::kSelectTokens, SelectScratchBytes(args));
  if (!scratch.ok()) return scratch.status();
  args.scratch = static_cast<float*>(*scratch);
  args.early = b.num_rows == b.num_sequences && !a.after_outer;  // as in DecodeAttention
  return ToStatus(cuda::SelectTokens(args, session.stream()), "SelectTokens");
}

bool CudaBackend::PrefersPackedKeys(const AttentionShape& shape, DType weights, int64_t max_kv_len) const {
  const DType type = PlainType(weights);
  int capability = 0, num_sms = 0;
  return DeviceInfo(&capability, &num_sms) == cudaSuccess &&
         ServesSparseAttention(capability, Heads(shape), type, type, max_kv_len);
}

absl::Status CudaBackend::SparseAttention(const KernelContext& ctx, const SparseAttentionArgs& a) const {
  if (absl::Status s = ValidateSparseAttention(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "SparseAttention", a.q.data, a.lists.tokens, a.lists.counts); !s.ok()) return s;
  const SparseArgs args{.heads = Heads(a.shape),
                        .batch = Batch(b, a.pool, a.layer),
                        .selection = Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                        .dims_offset = int64_t{a.layer} * a.shape.num_kv_heads * 2 * kPackedDims,
                        .max_kv_len = b.max_kv_len,
                        .dtype = a.q.dtype,
                        .q = a.q.data,
                        .q_row_stride = a.q_row_stride,
                        .out = a.out.data,
                        .lse = a.lse,
                        .lists = a.lists,
                        .weights = a.weights,
                        .weights_stride = a.weights_stride,
                        .early = b.num_rows == b.num_sequences,  // as in DecodeAttention
                        .kept_mass = a.kept_mass};
  return ToStatus(cuda::SparseAttention(args, session.stream()), "SparseAttention");
}

absl::Status CudaBackend::RefillHotRows(const KernelContext& ctx, const RefillHotRowsArgs& a) const {
  if (absl::Status s = ValidateRefillHotRows(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "RefillHotRows", a.pool.base, a.lists.tokens, a.lists.counts); !s.ok())
    return s;
  const HotArgs args{.heads = {.num_kv_heads = a.num_kv_heads, .head_dim = a.pool.head_dim},
                     .batch = Batch(b, a.pool, a.layer),
                     .selection = Selection(b, a.pool, a.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                     .first_stream = int64_t{a.layer} * a.num_kv_heads,
                     .lists = a.lists,
                     .early = b.num_rows == b.num_sequences};
  return ToStatus(cuda::RefillHotRows(args, session.stream()), "RefillHotRows");
}

absl::Status CudaBackend::AttendHotRows(const KernelContext& ctx, const AttendHotRowsArgs& a) const {
  if (absl::Status s = ValidateAttendHotRows(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "AttendHotRows", a.q.data, a.lists.tokens, a.lists.counts); !s.ok()) return s;
  if (a.q.dtype != DType::kBF16) return absl::UnimplementedError("cuda: AttendHotRows of queries in f32");
  const HotArgs args{.heads = Heads(a.shape),
                     .batch = Batch(b, a.pool, a.layer),
                     .selection = Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                     .first_stream = int64_t{a.layer} * a.shape.num_kv_heads,
                     .lists = a.lists,
                     .early = b.num_rows == b.num_sequences,
                     .q = a.q.data,
                     .q_row_stride = a.q_row_stride,
                     .out = a.out.data,
                     .lse = a.lse};
  return ToStatus(cuda::AttendHotRows(args, session.stream()), "AttendHotRows");
}

absl::Status CudaBackend::TopTokens(const KernelContext& ctx, const TopTokensArgs& a) const {
  if (absl::Status s = ValidateTopTokens(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "TopTokens", a.scores, a.lists.tokens, a.lists.counts); !s.ok()) return s;
  return ToStatus(cuda::TopTokens(a, Selection(b, a.pool, a.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                                  b.kv_len, b.num_sequences, b.max_kv_len, session.stream()),
                  "TopTokens");
}

absl::Status CudaBackend::ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& a) const {
  if (absl::Status s = ValidateQueryWindow(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "ChooseByQueryWindow", a.q.data, a.lists.tokens, a.lists.counts); !s.ok())
    return s;
  QueryWindowLaunch launch{
      .batch = Batch(b, a.pool, a.layer),
      .selection = Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan), a.outer),
      .max_kv_len = b.max_kv_len,
      .max_streams = static_cast<int32_t>(b.steps_stride) * a.shape.num_kv_heads};
  if (const size_t bytes = QueryWindowScratchBytes(a, launch); bytes > 0) {
    auto scratch = session.Scratch(CudaSession::Use::kQueryWindow, bytes);
    if (!scratch.ok()) return scratch.status();
    launch.scratch = *scratch;
  }
  return ToStatus(cuda::ChooseByQueryWindow(a, launch, session.stream()), "ChooseByQueryWindow");
}

absl::Status CudaBackend::HeavyHitters(const KernelContext& ctx, const HeavyHittersArgs& a) const {
  if (absl::Status s = ValidateHeavyHitters(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "HeavyHitters", a.q.data, a.attention, a.lists.tokens); !s.ok()) return s;
  return ToStatus(cuda::HeavyHitters(a, Batch(b, a.pool, a.layer),
                                     Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                                     session.stream()),
                  "HeavyHitters");
}

absl::Status CudaBackend::PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& a) const {
  if (absl::Status s = ValidatePageBoundScores(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const DeviceBatch& b = session.batch();
  if (absl::Status s = NeedSelection(b, "PageBoundScores", a.q.data, a.scores, a.pool.base); !s.ok()) return s;
  return ToStatus(
      cuda::PageBoundScores(a, Batch(b, a.pool, a.layer),
                            Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                            b.max_kv_len, session.stream()),
      "PageBoundScores");
}

absl::Status CudaBackend::SelectLines(const KernelContext& ctx, const SelectLinesArgs& a) const {
  if (absl::Status s = ValidateSelectLines(a); !s.ok()) return s;
  if (a.shape.num_kv_heads > kMaxKvHeads)
    return absl::UnimplementedError(absl::StrCat("cuda: ", a.shape.num_kv_heads, " KV heads, at most ", kMaxKvHeads));
  CudaSession& session = CudaSession::Of(ctx);
  auto batch = InBf16(session, Batch(session.batch(), a.pool, a.layer, a.sequence, 1), a.shape.num_kv_heads, {},
                      std::span(&a.rows, 1));
  if (!batch.ok()) return batch.status();
  LineJob job{.plan = a.plan,
              .scratch = PlaceLineScratch(a.plan.scratch, a.plan.sizes),
              .options = a.options,
              .batch = *batch,
              .sequence = 0,
              .q_dtype = a.q.dtype,
              .q = static_cast<const std::byte*>(a.q.data) +
                   a.rows.row_begin * a.q_row_stride * static_cast<int64_t>(DTypeBytes(a.q.dtype)),
              .q_row_stride = a.q_row_stride};
  for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
    if (a.kv_heads.empty() || std::binary_search(a.kv_heads.begin(), a.kv_heads.end(), h))
      job.head[job.num_heads++] = static_cast<uint8_t>(h);
  }
  std::copy(a.samples.begin(), a.samples.end(), job.sample);
  if (absl::Status s = ToStatus(LineWeights(job, session.stream()), "SelectLines"); !s.ok()) return s;
  return ToStatus(LineChoiceAndTiles(job, session.stream()), "SelectLines");
}

}  // namespace spl::kernels::cuda
