#include "services/engine/recovery/samkv_choice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace spl::engine {
namespace {

template <typename A, typename B>
double Dot(std::span<const A> a, std::span<const B> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

double Cosine(std::span<const float> a, std::span<const float> b) {
  const double norms = std::sqrt(Dot(a, a) * Dot(b, b));
  return norms > 0 ? Dot(a, b) / norms : 0;
}

// The scores of the middle tiles; empty without any.
std::span<const float> MiddleOf(std::span<const float> tile_scores) {
  if (tile_scores.size() <= static_cast<size_t>(kSamKvFixedTiles)) return {};
  return tile_scores.subspan(kSamKvInitialTiles, tile_scores.size() - kSamKvFixedTiles);
}

struct Candidate {
  float score;  // normalised
  float raw;
  size_t document;
  int32_t tile;
};

bool Better(const Candidate& a, const Candidate& b) {
  if (a.score != b.score) return a.score > b.score;
  if (a.raw != b.raw) return a.raw > b.raw;  // of two middle tiles one is always at 1 and the other at -1
  return a.document != b.document ? a.document < b.document : a.tile < b.tile;
}

// The best `count` of `all`.
void KeepBest(std::vector<Candidate>& all, int64_t count) {
  std::sort(all.begin(), all.end(), Better);
  if (static_cast<int64_t>(all.size()) > count) all.resize(count);
}

}  // namespace

std::vector<double> PersonalQuery(std::span<const float> question,
                                  std::span<const std::span<const float>> local_queries, size_t document) {
  std::vector<double> query(question.begin(), question.end());
  if (local_queries.size() < 2) return query;
  for (size_t j = 0; j < local_queries.size(); ++j) {
    if (j == document || local_queries[j].empty()) continue;
    const double weight = std::abs(Cosine(question, local_queries[j])) / static_cast<double>(local_queries.size() - 1);
    for (size_t c = 0; c < query.size(); ++c) query[c] += weight * local_queries[j][c];
  }
  return query;
}

std::vector<float> TileScores(const SamKvShape& shape, std::span<const double> query,
                              std::span<const float> tile_means) {
  const auto d = static_cast<size_t>(shape.head_dim), kv_heads = static_cast<size_t>(shape.num_kv_heads);
  const size_t group = static_cast<size_t>(shape.num_qo_heads) / kv_heads;
  // Heads of a group meet the same key: their queries add up first.
  std::vector<double> summed(kv_heads * d);
  for (size_t h = 0; h < static_cast<size_t>(shape.num_qo_heads); ++h) {
    for (size_t c = 0; c < d; ++c) summed[h / group * d + c] += query[h * d + c];
  }
  std::vector<float> scores(tile_means.size() / summed.size());
  for (size_t t = 0; t < scores.size(); ++t) {
    const double dot = Dot(std::span<const double>(summed), tile_means.subspan(t * summed.size(), summed.size()));
    scores[t] = static_cast<float>(dot / std::sqrt(static_cast<double>(shape.head_dim)));
  }
  return scores;
}

double AnchorShare(std::span<const float> tile_scores) {
  const std::span<const float> middle = MiddleOf(tile_scores);
  if (middle.empty()) return 0;
  const auto [min, max] = std::minmax_element(middle.begin(), middle.end());
  double anchor = 0;
  for (int32_t i = 0; i < kSamKvInitialTiles; ++i) anchor += tile_scores[i];
  for (int32_t i = 0; i < kSamKvLocalTiles; ++i) anchor += tile_scores[tile_scores.size() - 1 - static_cast<size_t>(i)];
  anchor /= kSamKvFixedTiles;
  if (anchor <= *min || anchor >= *max) return 0;
  return (*max - anchor) / (static_cast<double>(*max) - *min);
}

std::vector<float> NormalizedMiddle(std::span<const float> tile_scores) {
  const std::span<const float> middle = MiddleOf(tile_scores);
  std::vector<float> normalized(middle.size());
  if (middle.empty()) return normalized;
  const auto count = static_cast<double>(middle.size());
  double mean = 0, variance = 0;
  for (const float score : middle) mean += score / count;
  for (const float score : middle) variance += (score - mean) * (score - mean) / count;
  if (variance <= 0) return normalized;
  for (size_t i = 0; i < middle.size(); ++i)
    normalized[i] = static_cast<float>((middle[i] - mean) / std::sqrt(variance));
  return normalized;
}

int64_t MiddleBudget(std::span<const SamKvDocument> documents, const SamKvBudget& budget) {
  int64_t middle = 0, all = 0;
  for (const SamKvDocument& document : documents) {
    middle += document.num_middle();
    all += document.num_tiles;
  }
  if (budget.ratio <= 0) return middle / std::max<int64_t>(static_cast<int64_t>(documents.size()), 1);
  const auto wanted = static_cast<int64_t>(std::llround(budget.ratio * static_cast<double>(all)));
  return std::clamp<int64_t>(wanted - (all - middle), 0, middle);
}

SamKvChoice ChooseTiles(const SamKvShape& shape, std::span<const float> question,
                        std::span<const SamKvDocument> documents, const SamKvBudget& budget) {
  const size_t num_documents = documents.size(), num_layers = static_cast<size_t>(shape.num_layers);
  const size_t query_size = shape.query_size();
  const size_t key_size = static_cast<size_t>(shape.num_kv_heads) * static_cast<size_t>(shape.head_dim);
  const size_t first_stable = num_layers / 4;  // the layers whose shares count
  SamKvChoice choice;
  choice.shares.resize(num_documents);
  choice.counts.resize(num_layers);
  choice.middle.assign(num_layers, std::vector<std::vector<int32_t>>(num_documents));
  std::vector<std::vector<std::vector<float>>> scores(num_layers);  // [layer][document][tile]
  for (size_t layer = 0; layer < num_layers; ++layer) {
    const auto asked = question.subspan(layer * query_size, query_size);
    std::vector<std::span<const float>> local(num_documents);
    for (size_t i = 0; i < num_documents && budget.personal; ++i) {
      if (!documents[i].local_query.empty())
        local[i] = documents[i].local_query.subspan(layer * query_size, query_size);
    }
    for (size_t i = 0; i < num_documents; ++i) {
      const size_t of_layer = static_cast<size_t>(documents[i].num_tiles) * key_size;
      scores[layer].push_back(TileScores(shape, PersonalQuery(asked, local, i),
                                         documents[i].tile_means.subspan(layer * of_layer, of_layer)));
      if (layer >= first_stable)
        choice.shares[i] += AnchorShare(scores[layer][i]) / static_cast<double>(num_layers - first_stable);
    }
  }
  const int64_t most = MiddleBudget(documents, budget);
  const bool everything = budget.ratio >= 1;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < num_documents; ++i) {
      const std::vector<float> normalized = NormalizedMiddle(scores[layer][i]);
      std::vector<Candidate> of_document;
      for (size_t t = 0; t < normalized.size(); ++t)
        of_document.push_back(
            {normalized[t], MiddleOf(scores[layer][i])[t], i, kSamKvInitialTiles + static_cast<int32_t>(t)});
      const double share = everything ? 1 : choice.shares[i];
      KeepBest(of_document, static_cast<int64_t>(std::ceil(share * static_cast<double>(of_document.size()))));
      candidates.insert(candidates.end(), of_document.begin(), of_document.end());
    }
    KeepBest(candidates, most);
    choice.counts[layer] = static_cast<int64_t>(candidates.size());
    for (const Candidate& kept : candidates) choice.middle[layer][kept.document].push_back(kept.tile);
    for (std::vector<int32_t>& tiles : choice.middle[layer]) std::sort(tiles.begin(), tiles.end());
  }
  return choice;
}

int64_t BestTilesBudget(std::span<const int32_t> num_tiles, double ratio, int32_t num_initial) {
  int64_t all = 0, middle = 0, initial = 0;
  for (const int32_t tiles : num_tiles) {
    all += tiles;
    initial += std::min(tiles, num_initial);
    middle += SamKvDocument{.num_tiles = tiles}.num_middle();
  }
  const auto documents = static_cast<int64_t>(num_tiles.size());
  const int64_t kept = ratio > 0 ? std::llround(ratio * static_cast<double>(all))
                                 : all - middle + middle / std::max<int64_t>(documents, 1);
  return std::clamp<int64_t>(kept - initial, 0, all - initial);
}

float TileWorth(std::span<const float> token_scores, int32_t begin, int32_t end) {
  constexpr int32_t kBeyond = 8;
  constexpr std::ptrdiff_t kBest = 8;
  const int32_t first = std::max(0, begin - kBeyond);
  const int32_t last = std::min(static_cast<int32_t>(token_scores.size()), end + kBeyond);
  std::vector<float> worth;
  for (int32_t t = first; t < last; ++t) worth.push_back(token_scores[t] * (t < begin || t >= end ? 0.5f : 1.0f));
  const auto best = worth.begin() + std::min(kBest, static_cast<std::ptrdiff_t>(worth.size()));
  std::partial_sort(worth.begin(), best, worth.end(), std::greater<>());
  return std::accumulate(worth.begin(), best, 0.0f);
}

std::vector<std::vector<int32_t>> BestTiles(std::span<const std::vector<float>> tile_scores, double ratio,
                                            int32_t num_initial) {
  std::vector<Candidate> candidates;
  std::vector<int32_t> num_tiles;
  for (size_t i = 0; i < tile_scores.size(); ++i) {
    num_tiles.push_back(static_cast<int32_t>(tile_scores[i].size()));
    for (int32_t tile = num_initial; tile < num_tiles.back(); ++tile) {
      const float score = tile_scores[i][tile];
      candidates.push_back({score, score, i, tile});
    }
  }
  KeepBest(candidates, BestTilesBudget(num_tiles, ratio, num_initial));
  std::vector<std::vector<int32_t>> best(tile_scores.size());
  for (const Candidate& kept : candidates) best[kept.document].push_back(kept.tile);
  for (std::vector<int32_t>& tiles : best) std::sort(tiles.begin(), tiles.end());
  return best;
}

}  // namespace spl::engine
