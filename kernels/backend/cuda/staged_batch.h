// Builds the arguments of launchers from the batch that a session has staged.
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/rope/rope_cuda.h"

namespace spl::kernels::cuda {

inline AttentionHeads Heads(const AttentionShape& s) {
  return {s.num_qo_heads, s.num_kv_heads, s.head_dim, s.sm_scale};
}
// The pool as staged page tables number its pages: from 0.
inline KvPoolView DevicePool(KvPoolView pool) {
  pool.first_page = 0;
  return pool;
}
inline PagedBatch Batch(const DeviceBatch& b, const KvPoolView& pool, int32_t layer) {
  return {.page_tables = b.page_tables + layer * b.layer_stride,
          .table_offset = b.table_offset,
          .head_stride = b.head_stride,
          .kv_len = b.kv_len,
          .pool = DevicePool(pool),
          .num_sequences = b.num_sequences};
}
// Sequences [first, first + count) of it.
inline PagedBatch Batch(const DeviceBatch& b, const KvPoolView& pool, int32_t layer, int32_t first, int32_t count) {
  PagedBatch batch = Batch(b, pool, layer);
  batch.table_offset += first;
  batch.kv_len += first;
  batch.num_sequences = count;
  return batch;
}
inline RopeBatch Rows(const DeviceBatch& b, int32_t layer) {
  return {.positions = b.positions,
          .angles = b.has_angles ? b.angles : nullptr,
          .row_sequence = b.row_sequence,
          .page_tables = b.page_tables + layer * b.layer_stride,
          .table_offset = b.table_offset,
          .head_stride = b.head_stride,
          .num_rows = b.num_rows};
}

// Appends the rules of one sequence's heads to `rules`; later sequences must have the same ones. With `listed`,
// heads of rule kList are entered as kFull and marked there, bit by bit. Unimplemented: a rule that the launchers lack.
absl::Status TakeRules(std::span<const HeadStreamView> heads, bool first, bool has_lists, HeadRules& rules,
                       uint64_t* listed = nullptr);

}  // namespace spl::kernels::cuda
