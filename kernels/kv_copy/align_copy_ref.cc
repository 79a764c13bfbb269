#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/kv_copy/align_copy.h"

namespace spl::kernels::ref {
namespace {

// row [head_dim], turned in place.
void Rotate(const AlignCopyArgs& a, const AlignRun& run, std::vector<float>& row) {
  const int half = a.rotary_dim / 2;
  for (int c = 0; c < half; ++c) {
    const size_t low = a.interleaved ? 2 * c : c, high = a.interleaved ? 2 * c + 1 : c + half;
    const double x = row[low], y = row[high];
    const double cos = a.cos[static_cast<size_t>(run.rotation) * half + c];
    const double sin = a.sin[static_cast<size_t>(run.rotation) * half + c];
    row[low] = static_cast<float>(x * cos - y * sin);
    row[high] = static_cast<float>(y * cos + x * sin);
  }
}

}  // namespace

absl::Status AlignCopy(const KernelContext&, const AlignCopyArgs& a) {
  if (absl::Status s = ValidateAlignCopy(a); !s.ok()) return s;
  const KvPoolView& pool = a.pool;
  std::vector<float> row(static_cast<size_t>(pool.head_dim));
  for (size_t i = 0; i < a.runs.size(); ++i) {
    const AlignRun& run = a.runs[i];
    for (int32_t s = 0; s < a.num_streams; ++s) {
      const int32_t src = a.src_pages[i * a.num_streams + s], dst = a.dst_pages[i * a.num_streams + s];
      CopyKvRows(pool.dtype, pool.head_dim, pool.v(src), run.src_slot, pool.v(dst), run.dst_slot, run.num_tokens);
      if (run.rotation == AlignRun::kNoRotation) {
        CopyKvRows(pool.dtype, pool.head_dim, pool.k(src), run.src_slot, pool.k(dst), run.dst_slot, run.num_tokens);
        continue;
      }
      for (int32_t t = 0; t < run.num_tokens; ++t) {
        LoadKvRow(pool.dtype, pool.head_dim, pool.k(src), run.src_slot + t, row.data());
        Rotate(a, run, row);
        StoreKvRow(pool.dtype, pool.head_dim, pool.k(dst), run.dst_slot + t, row.data());
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
