// Rotary position embedding fused with the write of K and V into pages.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels {

// Angles of the model's (scaled) rotary embedding. Pair layout is half-split: element c pairs with c + head_dim / 2
// (Llama, Qwen and Mistral in Hugging Face's layout).
struct RopeTable {
  const float* cos = nullptr;  // [max_positions, head_dim / 2]
  const float* sin = nullptr;  // [max_positions, head_dim / 2]
  int32_t max_positions = 0;
};

// Rows [row_begin, row_end) of qkv belong to one sequence; their K and V go to slot position % 64 of logical page
// position / 64 of each KV head's stream.
struct RopeSequence {
  int32_t row_begin = 0;
  int32_t row_end = 0;
  std::span<const int32_t> positions;                     // [row_end - row_begin]
  std::span<const std::span<const int32_t>> page_tables;  // [num_kv_heads]; see attention.h
  // [row_end - row_begin]: positions by which the rows are turned, where the page tables leave out pages of the text.
  // Empty: `positions`.
  std::span<const int32_t> angles = {};

  std::span<const int32_t> turned_by() const { return angles.empty() ? positions : angles; }
};

// RMSNorm of every head's q and k before the rotation, in the same pass (Qwen3): x / sqrt(mean(x²) + eps) * weight over
// head_dim. Set both weights or neither.
struct QkNorm {
  const float* q_weight = nullptr;  // [head_dim]
  const float* k_weight = nullptr;  // [head_dim]
  float eps = 0;
};

// Rotates q in place, after the norm of qk_norm if it is set. Rotates k and writes k and v into the pages, rounded to
// nearest even to the pool's type, with the scale of their row if that is kE4M3; k and v in qkv itself stay unchanged.
// InvalidArgument: shapes; one norm weight without the other; a negative eps; a position outside the table; a position
// on a kNoPage page.
struct RopeWriteKvArgs {
  Activations qkv;  // [num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  RopeTable table;
  KvPoolView pool;
  std::span<const RopeSequence> sequences;
  int32_t layer = 0;  // layer number in the staged batch, which CUDA reads instead of `sequences`
  QkNorm qk_norm = {};
  // CUDA only: where the rotated q goes, [num_rows, num_qo_heads * head_dim], contiguous, for attention that reads q in
  // another type than the product left it. Null: back into qkv.
  Activations q_out;
};

namespace ref {
absl::Status RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& args);
}
namespace cpu {
absl::Status RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& args);
}

}  // namespace spl::kernels
