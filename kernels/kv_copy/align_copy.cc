#include "kernels/kv_copy/align_copy.h"

#include <algorithm>

#include "kernels/common/kv_rows.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

absl::Status ValidatePages(const AlignCopyArgs& a, std::span<const int32_t> pages, const char* what) {
  if (pages.size() != a.runs.size() * static_cast<size_t>(a.num_streams))
    return InvalidCall("AlignCopy: ", pages.size(), " ", what, " pages for ", a.runs.size(), " runs of ", a.num_streams,
                       " streams");
  bool all = true;  // without a way out of the loop, which is long
  for (const int32_t page : pages) all &= a.pool.contains(page);
  if (all) return absl::OkStatus();
  const auto bad = std::find_if(pages.begin(), pages.end(), [&](int32_t page) { return !a.pool.contains(page); });
  return InvalidCall("AlignCopy: ", what, " page ", *bad, " of a pool of ", a.pool.num_pages);
}

}  // namespace

absl::Status ValidateAlignCopy(const AlignCopyArgs& a) {
  if (!IsKvType(a.pool.dtype)) return InvalidCall("AlignCopy: pages are f32, bf16 or fp8");
  if (a.num_streams <= 0 || a.rotary_dim < 0 || a.rotary_dim % 2 != 0 || a.rotary_dim > a.pool.head_dim)
    return InvalidCall("AlignCopy: ", a.num_streams, " streams, rotary_dim ", a.rotary_dim, " of ", a.pool.head_dim);
  if (a.cos.size() != a.sin.size() || (a.rotary_dim > 0 && a.cos.size() % (a.rotary_dim / 2) != 0))
    return InvalidCall("AlignCopy: ", a.cos.size(), " cosines and ", a.sin.size(), " sines");
  const int64_t rotations = a.rotary_dim > 0 ? static_cast<int64_t>(a.cos.size()) / (a.rotary_dim / 2) : 0;
  for (const AlignRun& run : a.runs) {
    if (run.num_tokens < 1 || run.src_slot < 0 || run.dst_slot < 0 || run.src_slot + run.num_tokens > kPageTokens ||
        run.dst_slot + run.num_tokens > kPageTokens)
      return InvalidCall("AlignCopy: ", run.num_tokens, " tokens from slot ", run.src_slot, " to slot ", run.dst_slot);
    if (run.rotation < AlignRun::kNoRotation || run.rotation >= rotations)
      return InvalidCall("AlignCopy: rotation ", run.rotation, " of ", rotations);
  }
  if (absl::Status s = ValidatePages(a, a.src_pages, "source"); !s.ok()) return s;
  return ValidatePages(a, a.dst_pages, "target");
}

}  // namespace spl::kernels
