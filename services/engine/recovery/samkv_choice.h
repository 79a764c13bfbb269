// Chooses the tiles of several documents that a question needs, and the tokens of them that are recomputed (SamKV 3.1
// to 3.3; docs/methods/samkv.md). Works on numbers alone: no pages, no model.
//
// A document is cut into tiles of 64 tokens; the last one may be shorter. The first tile is its initial tile, the last
// two are its local tiles, and the others are middle tiles. Initial and local tiles are always kept.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/model/position_ranges.h"

namespace spl::engine {

inline constexpr int32_t kSamKvTileTokens = 64;
inline constexpr int32_t kSamKvInitialTiles = 1;
inline constexpr int32_t kSamKvLocalTiles = 2;  // kLocalTiles of a segment's summary
inline constexpr int32_t kSamKvFixedTiles = kSamKvInitialTiles + kSamKvLocalTiles;
// The most segments that a prompt may mark: documents are compared with each other, on the host and for each layer.
inline constexpr int32_t kSamKvMaxDocuments = 1024;

struct SamKvShape {
  int32_t num_layers = 0;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads
  int32_t head_dim = 0;
  size_t query_size() const { return static_cast<size_t>(num_qo_heads) * static_cast<size_t>(head_dim); }
};

// Summary of a document, without its KV. Borrowed for the call.
struct SamKvDocument {
  int32_t num_tiles = 0;  // >= 1
  // [num_layers, num_tiles, num_kv_heads, head_dim]: mean key of each tile, rotated to the document's position.
  std::span<const float> tile_means;
  // [num_layers, num_qo_heads, head_dim]: mean query of the local tiles, rotated in the same way. Empty: unknown; the
  // document then does not change the queries for other documents.
  std::span<const float> local_query;

  int32_t num_middle() const { return num_tiles > kSamKvFixedTiles ? num_tiles - kSamKvFixedTiles : 0; }
};

struct SamKvBudget {
  // Kept tiles as a share of all tiles, initial and local ones included; middle tiles get the rest of it, perhaps
  // nothing. 1: nothing is left out, whatever the anchor shares say. 0: the paper's number of middle tiles: all of
  // them, divided by the number of documents (with a single document: as many as its anchor share takes).
  double ratio = 0.15;
  bool personal = true;  // false: the same query, the question's, for every document (the paper's ablation)
};

// Query for one document, in one layer; all heads are one vector. [query size]
//   Q^_i = Q_que + 1/(D-1) sum over j != i of |cos(Q_que, Q_loc,j)| Q_loc,j
// Q_que for a single document, and if no other local query is known. `local_queries`: [D]; empty spans are unknown.
std::vector<double> PersonalQuery(std::span<const float> question,
                                  std::span<const std::span<const float>> local_queries, size_t document);

// Score of each tile of one layer. [num_tiles] `tile_means`: [num_tiles, num_kv_heads, head_dim].
//   s_t = sum over the query heads h of <Q^_h, K_t,g(h)> / sqrt(head_dim)
std::vector<float> TileScores(const SamKvShape& shape, std::span<const double> query,
                              std::span<const float> tile_means);

// Anchor share P = (s_max - s_anc) / (s_max - s_min) if s_min < s_anc < s_max, otherwise 0. s_max and s_min: the
// largest and smallest score of the middle tiles; s_anc: the mean score of the others. 0 without middle tiles.
double AnchorShare(std::span<const float> tile_scores);

// Scales the middle tiles to mean 0 and variance 1; all 0 if they are equal. [num_middle]
std::vector<float> NormalizedMiddle(std::span<const float> tile_scores);

struct SamKvChoice {
  // [num_layers][num_documents]: the kept middle tiles, as tile numbers of the document, ascending.
  std::vector<std::vector<std::vector<int32_t>>> middle;
  std::vector<double> shares;   // [num_documents]: P_i
  std::vector<int64_t> counts;  // [num_layers]: middle tiles kept
};

// Chooses middle tiles. `question`: [num_layers, num_qo_heads, head_dim], the mean query of the question over initial
// and local tiles. Each layer takes the best ceil(P_i n_mid) middle tiles of each document, and keeps the best M of
// these over all documents by normalised score. P_i is the mean over the layers from a quarter of the model on. Ties go
// to the higher score before normalisation, then to the lower document, then to the lower tile. Scores are f32 of sums
// in double, so that the order of the documents does not matter.
// Cost: one product of num_qo_heads head_dim for each layer and tile.
SamKvChoice ChooseTiles(const SamKvShape& shape, std::span<const float> question,
                        std::span<const SamKvDocument> documents, const SamKvBudget& budget);
// M: the number of middle tiles to keep; see SamKvBudget::ratio.
int64_t MiddleBudget(std::span<const SamKvDocument> documents, const SamKvBudget& budget);

// Chooses tiles by attention, our variant, because the mean of 64 keys hides single facts (docs/samkv.md). Keeps the
// tiles with the highest scores, the same in all layers, so that kept tokens are recomputed tokens. The first
// `num_initial` tiles of each document are always kept; local tiles compete with middle ones. `tile_scores`:
// [num_documents][num_tiles]; scores of initial tiles are ignored. `ratio`: as in SamKvBudget. Returns [num_documents]
// lists of further tiles, ascending. Ties go to the lower document, then to the lower tile.
std::vector<std::vector<int32_t>> BestTiles(std::span<const std::vector<float>> tile_scores, double ratio,
                                            int32_t num_initial);
// The number of these tiles over all documents.
int64_t BestTilesBudget(std::span<const int32_t> num_tiles, double ratio, int32_t num_initial);

// Score of tile [begin, end) of a document: the sum of the eight best among its tokens' scores and half the scores of
// the eight tokens before and after it. A fact is only a few tokens long, so a tile with little attention everywhere
// must not beat one with a fact. A fact that crosses a tile's edge should keep both tiles. `token_scores`: of the
// document's tokens, not negative.
float TileWorth(std::span<const float> token_scores, int32_t begin, int32_t end);

}  // namespace spl::engine
