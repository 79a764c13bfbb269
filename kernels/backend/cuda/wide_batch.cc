#include "kernels/backend/cuda/wide_batch.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/attention/widen_pages_cuda.h"

namespace spl::kernels::cuda {

absl::StatusOr<PagedBatch> InBf16(CudaSession& session, const PagedBatch& batch, int32_t num_kv_heads,
                                  const HeadRules& rules, std::span<const PrefillSequence> sequences,
                                  int32_t min_positions) {
  if (batch.pool.dtype != DType::kE4M3) return batch;
  if (sequences.size() != static_cast<size_t>(batch.num_sequences))
    return absl::InternalError(
        absl::StrCat("cuda: ", sequences.size(), " sequences for a batch of ", batch.num_sequences));
  std::vector<WidenSequence> widened;
  WidenArgs args{.batch = batch, .num_kv_heads = num_kv_heads, .rules = rules};
  for (const PrefillSequence& s : sequences) {
    const int32_t positions = std::max(s.positions.empty() ? 0 : s.positions.back() + 1, min_positions);
    const int32_t num_pages = (positions + kPageTokens - 1) / kPageTokens;
    widened.push_back({args.total_pages, num_pages, s.positions.empty() ? 0 : s.positions.front()});
    args.total_pages += int64_t{num_kv_heads} * num_pages;
    args.table_stride = std::max(args.table_stride, num_pages);
  }
  auto staged = session.StageChangedArrays(CudaSession::Use::kWideSequences, {std::as_bytes(std::span(widened))});
  if (!staged.ok()) return staged.status();
  args.sequences = reinterpret_cast<const WidenSequence*>((*staged)[0]);
  const size_t offsets = sequences.size() * sizeof(int64_t);
  const size_t tables = sequences.size() * static_cast<size_t>(num_kv_heads) *
                        static_cast<size_t>(args.table_stride) * sizeof(int32_t);
  auto lookup = session.Scratch(CudaSession::Use::kWideTables, offsets + tables);
  if (!lookup.ok()) return lookup.status();
  args.table_offset = static_cast<int64_t*>(*lookup);
  args.tables = reinterpret_cast<int32_t*>(static_cast<std::byte*>(*lookup) + offsets);
  auto pages = session.Scratch(CudaSession::Use::kWidePages, static_cast<size_t>(args.total_pages) *
                                                                 KvPageBytes(DType::kBF16, batch.pool.head_dim));
  if (!pages.ok()) return pages.status();
  args.pages = *pages;
  if (absl::Status s = ToStatus(WidenPages(args, session.stream()), "widening pages of FP8"); !s.ok()) return s;
  PagedBatch wide = batch;
  wide.page_tables = args.tables;
  wide.table_offset = args.table_offset;
  wide.head_stride = args.table_stride;
  wide.pool = {.base = static_cast<std::byte*>(*pages),
               .dtype = DType::kBF16,
               .head_dim = batch.pool.head_dim,
               .num_pages = static_cast<int32_t>(args.total_pages)};
  return wide;
}

}  // namespace spl::kernels::cuda
