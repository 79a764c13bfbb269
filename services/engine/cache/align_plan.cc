#include "services/engine/cache/align_plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "kernels/common/ceil_div.h"

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

// Moves tokens of a source, or of the sequence itself, to positions of the sequence.
struct Move {
  const SegmentSource* source = nullptr;  // null: the sequence itself
  int32_t from = 0;                       // token of the source, or position of the sequence
  int32_t target = 0;
  int32_t num_tokens = 0;
  int32_t distance = 0;

  int32_t slot(int32_t token) const { return source != nullptr ? source->slot(token) : token % kernels::kPageTokens; }
  int32_t page_number(int32_t token) const {
    return source != nullptr ? source->page_number(token) : token / kernels::kPageTokens;
  }
  // The stream's pages, of which page_number counts.
  const int32_t* pages(int32_t stream, const int32_t* own) const {
    return source != nullptr ? source->pages(stream).data() : own;
  }
};

// The pages of a run: their numbers among those of any stream.
struct PagesOfRun {
  int32_t src, dst;
};

// Writes the pages of every run in every stream, [runs][num_streams]. The first pass waits for it, and there are half a
// million at 32,768 tokens: so many streams at a time that what is written together is a cache line.
void FillTables(std::span<const Move> moves, std::span<const PagesOfRun> runs, std::span<const size_t> ends,
                const SequenceKv& kv, const Range& layers, const Range& heads, AlignPlan& plan) {
  constexpr int32_t kAtOnce = 16;
  const auto num_streams = static_cast<size_t>(plan.num_streams);
  const auto num_heads = static_cast<int32_t>(heads.size());
  plan.src_pages.resize(runs.size() * num_streams);
  plan.dst_pages.resize(runs.size() * num_streams);
  for (int32_t first = 0; first < plan.num_streams; first += kAtOnce) {
    const int32_t count = std::min(kAtOnce, plan.num_streams - first);
    const int32_t *src[kAtOnce], *dst[kAtOnce];
    const auto stream = [&](int32_t i) {
      const int32_t layer = static_cast<int32_t>(layers.begin) + (first + i) / num_heads;
      return layer * kv.shape().num_kv_heads + static_cast<int32_t>(heads.begin) + (first + i) % num_heads;
    };
    for (int32_t i = 0; i < count; ++i) dst[i] = kv.streams()[static_cast<size_t>(stream(i))].data();
    size_t run = 0;
    for (size_t m = 0; m < moves.size(); ++m) {
      for (int32_t i = 0; i < count; ++i) src[i] = moves[m].pages(stream(i), dst[i]);
      for (; run < ends[m]; ++run) {
        int32_t* const to_src = plan.src_pages.data() + run * num_streams + first;
        int32_t* const to_dst = plan.dst_pages.data() + run * num_streams + first;
        for (int32_t i = 0; i < count; ++i) to_src[i] = src[i][runs[run].src];
        for (int32_t i = 0; i < count; ++i) to_dst[i] = dst[i][runs[run].dst];
      }
    }
  }
}

// The copies of these heads in these layers.
AlignPlan MakeAlignPlan(std::span<const Move> moves, const SequenceKv& kv, const Range& layers,
                        const ModelConfig& config, const Range& heads) {
  AlignPlan plan;
  plan.num_streams = static_cast<int32_t>(layers.size() * heads.size());
  if (plan.num_streams <= 0) return plan;
  const std::vector<float> frequencies = InverseFrequencies(config.rope, config.head_dim);
  std::map<int32_t, int32_t> rotations;  // distance → its number in plan.cos and plan.sin
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
  std::vector<PagesOfRun> pages;  // [plan.runs]
  std::vector<size_t> ends;       // [moves]: the end of each move's runs
  for (const Move& move : moves) {
    const int32_t rotation = rotation_of(move.distance);
    for (int32_t done = 0; done < move.num_tokens;) {
      const int32_t src_slot = move.slot(move.from + done), target = move.target + done;
      const int32_t dst_slot = target % kernels::kPageTokens;
      const int32_t count =
          std::min({move.num_tokens - done, kernels::kPageTokens - src_slot, kernels::kPageTokens - dst_slot});
      plan.runs.push_back({count, src_slot, dst_slot, rotation});
      pages.push_back({move.page_number(move.from + done), target / kernels::kPageTokens});
      done += count;
    }
    ends.push_back(pages.size());
  }
  FillTables(moves, pages, ends, kv, layers, heads, plan);
  return plan;
}

// One plan per rank.
std::vector<AlignPlan> PlansOf(std::span<const Move> moves, const SequenceKv& kv, const Range& layers,
                               const ModelConfig& config, int num_ranks) {
  std::vector<AlignPlan> plans;
  for (int rank = 0; rank < num_ranks; ++rank)
    plans.push_back(MakeAlignPlan(moves, kv, layers, config, Shard{rank, num_ranks}.PartOf(config.num_kv_heads)));
  return plans;
}

}  // namespace

std::vector<AlignPlan> MakeAlignPlans(std::span<const SegmentHit> hits, const SequenceKv& kv, const Range& layers,
                                      const ModelConfig& config, int num_ranks) {
  std::vector<Move> moves;
  for (const SegmentHit& hit : hits)
    moves.push_back({hit.source.get(), hit.offset, hit.target, hit.num_tokens, hit.distance()});
  return PlansOf(moves, kv, layers, config, num_ranks);
}

std::vector<Range> AlignStretches(std::span<const SegmentHit> hits, const Range& layers, int32_t num_kv_heads,
                                  int64_t most_entries) {
  int64_t entries = 0;  // of a layer
  for (const SegmentHit& hit : hits) entries += kernels::CeilDiv(hit.num_tokens, kernels::kPageTokens) * num_kv_heads;
  const int64_t at_once = std::max<int64_t>(1, most_entries / std::max<int64_t>(entries, 1));
  std::vector<Range> stretches;
  for (int64_t begin = layers.begin; begin < layers.end; begin += at_once)
    stretches.push_back({begin, std::min(begin + at_once, layers.end)});
  return stretches;
}

std::vector<std::vector<AlignPlan>> MakeCompactPlans(std::span<const PositionRange> only, const SequenceKv& kv,
                                                     const ModelConfig& config, int num_ranks) {
  std::vector<std::vector<AlignPlan>> steps;
  std::vector<Move> moves;  // moves of the current step
  int32_t target = 0;
  for (const PositionRange& range : only) {
    for (int32_t from = range.begin; from < range.end;) {
      if (from == target) {  // already in its place
        target = from = range.end;
        continue;
      }
      // Targets of a step end where its sources begin.
      const int32_t sources = moves.empty() ? from : moves.front().from;
      const int32_t count = std::min(range.end - from, sources - target);
      if (count > 0) moves.push_back({nullptr, from, target, count, target - from});
      from += count;
      target += count;
      if (target < sources) continue;
      steps.push_back(PlansOf(moves, kv, {0, kv.shape().num_layers}, config, num_ranks));
      moves.clear();
    }
  }
  if (!moves.empty()) steps.push_back(PlansOf(moves, kv, {0, kv.shape().num_layers}, config, num_ranks));
  return steps;
}

}  // namespace spl::engine
