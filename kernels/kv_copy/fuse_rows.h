// Blends freshly computed K and V with those that were in their place: SamKV's fusion (SamKV equation 4;
// docs/methods/samkv.md).
//
//   x <- θ x_new + (1 - θ) x_old,  θ = cos(x_new, x_old),  separately for K and V of each token and KV head
//
// Called twice around RopeWriteKv: kSave keeps the old contents of the pages, kBlend blends them with the new ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/rope/rope.h"

namespace spl::kernels {

// Blends one head's K or V of a token. θ is computed in double; it is 0 for vectors without a direction. False: the
// vectors are equal, and nothing changed.
bool FuseRow(std::span<const float> old_row, std::span<float> new_row);

enum class FuseStep : uint8_t { kSave, kBlend };

struct FuseRowsArgs {
  FuseStep step = FuseStep::kSave;
  KvPoolView pool;
  int32_t num_kv_heads = 0;
  RopeSequence rows;  // CUDA reads positions and page tables of the staged batch instead, by the rows' numbers
  int32_t layer = 0;  // layer number in the staged batch
  std::span<const int32_t> row_ids;  // which of `rows`, counted from row_begin; on resident pages
  // Device [row_ids.size(), num_kv_heads, 2, head_dim] of the pool's type; kE4M3: codes, then the rows' scales
  // [row_ids.size(), num_kv_heads, 2]. FusedRowsBytes of memory.
  void* saved = nullptr;
};

// Bytes of `num_rows` saved rows, of one KV head's K or V each.
size_t FusedRowsBytes(DType pool, int32_t head_dim, int64_t num_rows);

// InvalidArgument: shapes, a row that does not exist or is on a page that is not resident.
absl::Status ValidateFuseRows(const FuseRowsArgs& args);

// Plain loops on the host: the definition. kSave keeps the bits, and kBlend those of rows whose values are equal.
namespace cpu {
absl::Status FuseRows(const KernelContext& ctx, const FuseRowsArgs& args);
}
namespace ref {
using cpu::FuseRows;
}

}  // namespace spl::kernels
