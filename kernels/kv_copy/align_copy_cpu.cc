#include <cstring>

#include "kernels/common/parallel.h"
#include "kernels/kv_copy/align_copy.h"
#include "kernels/kv_copy/align_copy_isa.h"

namespace spl::kernels::cpu {
namespace {

// One run of one stream. V, and K where nothing turns, are plain copies.
void CopyRun(const AlignCopyKernels& kernels, const AlignCopyArgs& a, const AlignRun& run, int32_t src, int32_t dst) {
  const size_t row_bytes = static_cast<size_t>(a.pool.head_dim) * DTypeBytes(a.pool.dtype);
  const size_t from = run.src_slot * row_bytes, to = run.dst_slot * row_bytes, bytes = run.num_tokens * row_bytes;
  std::memcpy(a.pool.v(dst) + to, a.pool.v(src) + from, bytes);
  if (run.rotation == AlignRun::kNoRotation) {
    std::memcpy(a.pool.k(dst) + to, a.pool.k(src) + from, bytes);
    return;
  }
  const int32_t half = a.rotary_dim / 2;
  const float* cos = a.cos.data() + static_cast<int64_t>(run.rotation) * half;
  const float* sin = a.sin.data() + static_cast<int64_t>(run.rotation) * half;
  kernels.rotate_rows(a.pool.k(src) + from, a.pool.dtype, run.num_tokens, a.pool.head_dim, cos, sin, half,
                      a.pool.k(dst) + to);
}

}  // namespace

absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& a) {
  if (absl::Status s = ValidateAlignCopy(a); !s.ok()) return s;
  if (a.interleaved) return ref::AlignCopy(ctx, a);  // no model of this build has it
  const AlignCopyKernels& kernels = AlignCopyKernelsFor(ctx.isa);
  const int64_t streams = a.num_streams, num_copies = static_cast<int64_t>(a.runs.size()) * streams;
  constexpr int64_t kBytesPerTask = 256 << 10;
  const int64_t grain = kBytesPerTask / static_cast<int64_t>(a.pool.page_bytes());
  ParallelRows(ctx, num_copies, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      CopyRun(kernels, a, a.runs[i / streams], a.src_pages[static_cast<size_t>(i)],
              a.dst_pages[static_cast<size_t>(i)]);
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
