#include "kernels/common/e4m3_rows_isa.h"
#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/kv_copy/align_copy.h"
#include "kernels/kv_copy/align_copy_isa.h"

namespace spl::kernels::cpu {
namespace {

// Turned keys of kE4M3: widened, turned in f32, rounded with scales of their own.
void TurnCodes(const KernelContext& ctx, const KvPoolView& pool, const AlignRun& run, std::byte* from, std::byte* to,
               const float* cos, const float* sin, int32_t half) {
  thread_local Scratch scratch;
  const int32_t width = pool.head_dim;
  float* const rows = scratch.Floats(static_cast<size_t>(run.num_tokens) * static_cast<size_t>(width));
  const E4M3RowKernels& kernels = E4M3RowKernelsFor(ctx.isa);
  kernels.widen(reinterpret_cast<const uint8_t*>(from) + int64_t{run.src_slot} * width,
                pool.scales(from) + run.src_slot, run.num_tokens, width, rows);
  AlignCopyKernelsFor(ctx.isa).rotate_rows(rows, DType::kF32, run.num_tokens, width, cos, sin, half, rows);
  kernels.quantize(rows, run.num_tokens, width, reinterpret_cast<uint8_t*>(to) + int64_t{run.dst_slot} * width,
                   pool.scales(to) + run.dst_slot);
}

// One run of one stream. V, and K where nothing turns, are plain copies.
void CopyRun(const KernelContext& ctx, const AlignCopyArgs& a, const AlignRun& run, int32_t src, int32_t dst) {
  const KvPoolView& pool = a.pool;
  CopyKvRows(pool.dtype, pool.head_dim, pool.v(src), run.src_slot, pool.v(dst), run.dst_slot, run.num_tokens);
  if (run.rotation == AlignRun::kNoRotation) {
    CopyKvRows(pool.dtype, pool.head_dim, pool.k(src), run.src_slot, pool.k(dst), run.dst_slot, run.num_tokens);
    return;
  }
  const int32_t half = a.rotary_dim / 2;
  const float* cos = a.cos.data() + static_cast<int64_t>(run.rotation) * half;
  const float* sin = a.sin.data() + static_cast<int64_t>(run.rotation) * half;
  if (pool.dtype == DType::kE4M3) return TurnCodes(ctx, pool, run, pool.k(src), pool.k(dst), cos, sin, half);
  const int64_t row_bytes = KvRowBytes(pool.dtype, pool.head_dim);
  AlignCopyKernelsFor(ctx.isa).rotate_rows(pool.k(src) + run.src_slot * row_bytes, pool.dtype, run.num_tokens,
                                           pool.head_dim, cos, sin, half, pool.k(dst) + run.dst_slot * row_bytes);
}

}  // namespace

absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& a) {
  if (absl::Status s = ValidateAlignCopy(a); !s.ok()) return s;
  if (a.interleaved) return ref::AlignCopy(ctx, a);  // no model of this build has it
  const int64_t streams = a.num_streams, num_copies = static_cast<int64_t>(a.runs.size()) * streams;
  constexpr int64_t kBytesPerTask = 256 << 10;
  const int64_t grain = kBytesPerTask / static_cast<int64_t>(a.pool.page_bytes());
  ParallelRows(ctx, num_copies, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      CopyRun(ctx, a, a.runs[i / streams], a.src_pages[static_cast<size_t>(i)], a.dst_pages[static_cast<size_t>(i)]);
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
