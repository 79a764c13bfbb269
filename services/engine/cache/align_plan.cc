#include "services/engine/cache/align_plan.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace spl::engine {

kernels::AlignCopyArgs AlignPlan::Args(const kernels::KvPoolView& pool, int32_t head_dim) const {
  return {.pool = pool,
          .num_streams = num_streams,
          .runs = runs,
          .src_pages = src_pages,
          .dst_pages = dst_pages,
          .cos = cos,
          .sin = sin,
          .rotary_dim = head_dim};
}

AlignPlan MakeAlignPlan(std::span<const SegmentHit> hits, const SequenceKv& kv, int32_t first_layer,
                        const ModelConfig& config) {
  AlignPlan plan;
  const KvShape& shape = kv.shape();
  const int32_t first_stream = first_layer * shape.num_kv_heads;
  plan.num_streams = shape.num_streams() - first_stream;
  if (plan.num_streams <= 0) return plan;
  const std::vector<float> frequencies = InverseFrequencies(config.rope, config.head_dim);
  std::map<int32_t, int32_t> rotations;  // of distances
  const auto rotation_of = [&](int32_t distance) {
    if (distance == 0) return kernels::AlignRun::kNoRotation;
    const auto [it, is_new] = rotations.try_emplace(distance, static_cast<int32_t>(rotations.size()));
    if (is_new) {
      for (const float frequency : frequencies) {
        const double angle = static_cast<double>(distance) * frequency;
        plan.cos.push_back(static_cast<float>(std::cos(angle)));
        plan.sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    return it->second;
  };
  for (const SegmentHit& hit : hits) {
    const int32_t rotation = rotation_of(hit.distance());
    for (int32_t done = 0; done < hit.num_tokens;) {
      const int32_t src_slot = hit.source->slot(hit.offset + done), target = hit.target + done;
      const int32_t dst_slot = target % kernels::kPageTokens;
      const int32_t count =
          std::min({hit.num_tokens - done, kernels::kPageTokens - src_slot, kernels::kPageTokens - dst_slot});
      plan.runs.push_back({count, src_slot, dst_slot, rotation});
      for (int32_t stream = first_stream; stream < shape.num_streams(); ++stream) {
        plan.src_pages.push_back(hit.source->page(stream, hit.offset + done));
        plan.dst_pages.push_back(
            kv.stream(stream / shape.num_kv_heads,
                      stream % shape.num_kv_heads)[static_cast<size_t>(target / kernels::kPageTokens)]);
      }
      done += count;
    }
  }
  return plan;
}

}  // namespace spl::engine
