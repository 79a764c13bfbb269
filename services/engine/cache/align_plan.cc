#include "services/engine/cache/align_plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "services/engine/model/shard.h"

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

namespace {

// The copies of heads [begin, end) in the layers from first_layer on.
AlignPlan MakeAlignPlan(std::span<const SegmentHit> hits, const SequenceKv& kv, int32_t first_layer,
                        const ModelConfig& config, const Range& heads) {
  AlignPlan plan;
  const KvShape& shape = kv.shape();
  plan.num_streams = (shape.num_layers - first_layer) * static_cast<int32_t>(heads.size());
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
  struct Place {
    const SegmentHit* hit;
    int32_t src_offset;  // of its first token
    size_t dst_page;     // of a stream
  };
  std::vector<Place> places;  // of the runs
  for (const SegmentHit& hit : hits) {
    const int32_t rotation = rotation_of(hit.distance());
    for (int32_t done = 0; done < hit.num_tokens;) {
      const int32_t src_slot = hit.source->slot(hit.offset + done), target = hit.target + done;
      const int32_t dst_slot = target % kernels::kPageTokens;
      const int32_t count =
          std::min({hit.num_tokens - done, kernels::kPageTokens - src_slot, kernels::kPageTokens - dst_slot});
      plan.runs.push_back({count, src_slot, dst_slot, rotation});
      places.push_back({&hit, hit.offset + done, static_cast<size_t>(target / kernels::kPageTokens)});
      done += count;
    }
  }
  // Stream by stream: the first pass waits for these tables, and a stream's pages lie behind one another.
  const auto num_streams = static_cast<size_t>(plan.num_streams);
  plan.src_pages.resize(places.size() * num_streams);
  plan.dst_pages.resize(places.size() * num_streams);
  size_t at = 0;
  for (int32_t layer = first_layer; layer < shape.num_layers; ++layer) {
    for (auto head = static_cast<int32_t>(heads.begin); head < heads.end; ++head, ++at) {
      const std::span<const int32_t> to = kv.stream(layer, head);
      const int32_t stream = layer * shape.num_kv_heads + head;
      for (size_t i = 0; i < places.size(); ++i) {
        plan.src_pages[i * num_streams + at] = places[i].hit->source->page(stream, places[i].src_offset);
        plan.dst_pages[i * num_streams + at] = to[places[i].dst_page];
      }
    }
  }
  return plan;
}

}  // namespace

std::vector<AlignPlan> MakeAlignPlans(std::span<const SegmentHit> hits, const SequenceKv& kv, int32_t first_layer,
                                      const ModelConfig& config, int num_ranks) {
  std::vector<AlignPlan> plans;
  for (int rank = 0; rank < num_ranks; ++rank)
    plans.push_back(MakeAlignPlan(hits, kv, first_layer, config, Shard{rank, num_ranks}.PartOf(config.num_kv_heads)));
  return plans;
}

}  // namespace spl::engine
