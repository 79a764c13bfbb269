#include <cstring>

#include "kernels/kv_copy/align_copy.h"

namespace spl::kernels::ref {
namespace {

double Get(const KvPoolView& pool, const std::byte* half, int64_t at) {
  return pool.dtype == DType::kF32 ? reinterpret_cast<const float*>(half)[at]
                                   : ToFloat(reinterpret_cast<const bf16*>(half)[at]);
}

void Put(const KvPoolView& pool, std::byte* half, int64_t at, double value) {
  if (pool.dtype == DType::kF32) {
    reinterpret_cast<float*>(half)[at] = static_cast<float>(value);
  } else {
    reinterpret_cast<bf16*>(half)[at] = ToBf16(static_cast<float>(value));
  }
}

void RotateToken(const AlignCopyArgs& a, const AlignRun& run, const std::byte* from, int64_t src, std::byte* to,
                 int64_t dst) {
  const int half = a.rotary_dim / 2;
  for (int c = 0; c < half; ++c) {
    const int low = a.interleaved ? 2 * c : c, high = a.interleaved ? 2 * c + 1 : c + half;
    const double x = Get(a.pool, from, src + low), y = Get(a.pool, from, src + high);
    const double cos = a.cos[static_cast<size_t>(run.rotation) * half + c];
    const double sin = a.sin[static_cast<size_t>(run.rotation) * half + c];
    Put(a.pool, to, dst + low, x * cos - y * sin);
    Put(a.pool, to, dst + high, y * cos + x * sin);
  }
}

}  // namespace

absl::Status AlignCopy(const KernelContext&, const AlignCopyArgs& a) {
  if (absl::Status s = ValidateAlignCopy(a); !s.ok()) return s;
  const size_t row_bytes = static_cast<size_t>(a.pool.head_dim) * DTypeBytes(a.pool.dtype);
  for (size_t i = 0; i < a.runs.size(); ++i) {
    const AlignRun& run = a.runs[i];
    for (int32_t s = 0; s < a.num_streams; ++s) {
      const int32_t src = a.src_pages[i * a.num_streams + s], dst = a.dst_pages[i * a.num_streams + s];
      for (int32_t t = 0; t < run.num_tokens; ++t) {
        const size_t from = (run.src_slot + t) * row_bytes, to = (run.dst_slot + t) * row_bytes;
        std::memcpy(a.pool.v(dst) + to, a.pool.v(src) + from, row_bytes);
        std::memcpy(a.pool.k(dst) + to, a.pool.k(src) + from, row_bytes);
        if (run.rotation == AlignRun::kNoRotation) continue;
        RotateToken(a, run, a.pool.k(src), int64_t{run.src_slot + t} * a.pool.head_dim, a.pool.k(dst),
                    int64_t{run.dst_slot + t} * a.pool.head_dim);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
