#include "services/engine/cache/segment_summary.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/common/kv_rows.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

// Rotates half-split pairs, like the model's own table.
void Turn(std::span<float> heads, std::span<const double> cos, std::span<const double> sin) {
  const size_t half = cos.size(), head_dim = 2 * half;
  for (size_t head = 0; head < heads.size(); head += head_dim) {
    for (size_t c = 0; c < half; ++c) {
      const double x = heads[head + c], y = heads[head + half + c];
      heads[head + c] = static_cast<float>(x * cos[c] - y * sin[c]);
      heads[head + half + c] = static_cast<float>(y * cos[c] + x * sin[c]);
    }
  }
}

}  // namespace

PositionRange LocalTilesOf(const PositionRange& segment) {
  const int32_t first = std::max(0, PagesFor(segment.size()) - kLocalTiles);
  return {segment.begin + first * kernels::kPageTokens, segment.end};
}

PositionRange MiddleTilesOf(const PositionRange& segment) {
  const int32_t begin = std::min(segment.end, segment.begin + kernels::kPageTokens);
  return {begin, std::max(begin, LocalTilesOf(segment).begin)};
}

int32_t NumAttended(int32_t num_middle_tokens) {
  constexpr int32_t kPart = 4, kMin = 8;
  return std::min(num_middle_tokens, std::max(kMin, num_middle_tokens / kPart));
}

std::vector<int32_t> MostAttended(std::span<const float> scores) {
  const int32_t k = NumAttended(static_cast<int32_t>(scores.size()));
  std::vector<int32_t> best(scores.size());
  std::iota(best.begin(), best.end(), 0);
  const auto score = [&](int32_t i) {
    const float s = scores[i];
    return std::isnan(s) ? -INFINITY : s;
  };
  std::nth_element(best.begin(), best.begin() + k, best.end(),
                   [&](int32_t a, int32_t b) { return score(a) != score(b) ? score(a) > score(b) : a < b; });
  best.resize(k);
  std::sort(best.begin(), best.end());
  return best;
}

absl::StatusOr<SegmentSummary> SummarizeKeys(const SegmentHit& hit, const ModelConfig& config,
                                             kernels::DType kv_dtype) {
  const auto d = static_cast<size_t>(config.head_dim), heads = static_cast<size_t>(config.num_kv_heads);
  const size_t page_bytes = kernels::KvPageBytes(kv_dtype, config.head_dim);
  const auto num_tiles = static_cast<size_t>(PagesFor(hit.num_tokens));
  const int32_t first_slot = hit.source->slot(hit.offset);
  const int32_t num_pages = PagesFor(first_slot + hit.num_tokens);
  SegmentSummary summary;
  summary.tile_means.resize(static_cast<size_t>(config.num_layers) * num_tiles * heads * d);
  std::vector<int32_t> pages(num_pages);
  std::vector<std::byte> read(pages.size() * page_bytes);
  std::vector<double> sum(d);
  std::vector<float> key(d);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (size_t head = 0; head < heads; ++head) {
      const int32_t stream = layer * config.num_kv_heads + static_cast<int32_t>(head);
      for (int32_t i = 0; i < num_pages; ++i)
        pages[i] = hit.source->page(stream, std::min(hit.offset + i * kernels::kPageTokens - (i > 0 ? first_slot : 0),
                                                     hit.offset + hit.num_tokens - 1));
      SPLICE_RETURN_IF_ERROR(hit.source->pool().ReadPages(pages, read.data()));
      for (size_t tile = 0; tile < num_tiles; ++tile) {
        const int32_t begin = static_cast<int32_t>(tile) * kernels::kPageTokens;
        const int32_t end = std::min(hit.num_tokens, begin + kernels::kPageTokens);
        std::fill(sum.begin(), sum.end(), 0);
        for (int32_t token = first_slot + begin; token < first_slot + end; ++token) {
          const std::byte* const k = read.data() + static_cast<size_t>(token / kernels::kPageTokens) * page_bytes;
          kernels::LoadKvRow(kv_dtype, config.head_dim, k, token % kernels::kPageTokens, key.data());
          for (size_t c = 0; c < d; ++c) sum[c] += key[c];
        }
        float* const to =
            summary.tile_means.data() + ((static_cast<size_t>(layer) * num_tiles + tile) * heads + head) * d;
        for (size_t c = 0; c < d; ++c) to[c] = static_cast<float>(sum[c] / (end - begin));
      }
    }
  }
  return summary;
}

SegmentSummary TurnSummary(const SegmentSummary& summary, int32_t distance, const ModelConfig& config) {
  SegmentSummary turned = summary;
  if (distance == 0) return turned;
  std::vector<double> cos, sin;
  for (const float frequency : InverseFrequencies(config.rope, config.head_dim)) {
    const double angle = static_cast<double>(distance) * frequency;
    cos.push_back(std::cos(angle));
    sin.push_back(std::sin(angle));
  }
  Turn(turned.tile_means, cos, sin);
  Turn(turned.local_query, cos, sin);
  return turned;
}

}  // namespace spl::engine
