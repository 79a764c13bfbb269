// Copies cached K and V to other positions of another sequence, all streams in one call. K is rotated from the angle of
// its old position to that of its new one; V is copied (SparseX 4.2, RedKnot 3.1; docs/methods/sparsex.md, kernel K1).
//
// R(p') R(p)^-1 = R(p' - p): only the distance counts, and it is the same for a whole segment. The rotation is applied
// in f32, with cos and sin that the caller computed in double. A magnitude factor in the model's own table (YaRN) is in
// the stored K already and is not applied again. Always align from the stored copy, never from an aligned one:
// rounding would add up.
//
// kE4M3: what is copied keeps its codes and its scale. A key that turns is widened, turned and rounded once more, with
// a scale of its own; elements past rotary_dim are rounded with that scale, too.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels {

// Consecutive tokens inside one source page and one target page of every stream.
struct AlignRun {
  int32_t num_tokens = 0;  // 1 to 64
  int32_t src_slot = 0;    // slot of the first token in its page
  int32_t dst_slot = 0;
  int32_t rotation = kNoRotation;  // row of cos and sin

  static constexpr int32_t kNoRotation = -1;  // same position: the bytes are copied, a row's scale among them
};

// Runs may share pages. No slot may be a target twice, or both a target and a source.
struct AlignCopyArgs {
  KvPoolView pool;
  int32_t num_streams = 0;
  std::span<const AlignRun> runs;
  std::span<const int32_t> src_pages;  // [runs.size(), num_streams], host memory as all spans here
  std::span<const int32_t> dst_pages;  // [runs.size(), num_streams]
  std::span<const float> cos, sin;     // [rotations, rotary_dim / 2], one row per distance
  int32_t rotary_dim = 0;              // the first elements of a head; even, at most head_dim
  bool interleaved = false;            // pairs (2c, 2c + 1); otherwise (c, c + rotary_dim / 2)
};

// InvalidArgument: shapes, a slot or page out of range, a rotation that does not exist.
absl::Status ValidateAlignCopy(const AlignCopyArgs& args);

namespace ref {
absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& args);
}
namespace cpu {
absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& args);
}

}  // namespace spl::kernels
