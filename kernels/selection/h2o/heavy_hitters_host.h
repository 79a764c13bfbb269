// Shared by the host variants of HeavyHitters: everything but the attention of a step.
#pragma once

#include <functional>
#include <span>

#include "kernels/selection/h2o/heavy_hitters.h"

namespace spl::kernels {

// A stream in one step.
struct HeavyHitterStream {
  std::span<const int32_t> page_table;
  int32_t kv_len = 0;
  const float* q = nullptr;         // [group, head_dim]
  std::span<const int32_t> list;    // positions, ascending; the last is kv_len - 1
  std::span<float> attention = {};  // out, one for each: what the query heads pay to it, all together
};

using AttentionOfStream = std::function<absl::Status(const HeavyHitterStream&)>;

// Calls `attend` for the streams one after the other.
absl::Status HeavyHitters(const HeavyHittersArgs& args, const AttentionOfStream& attend);

}  // namespace spl::kernels
