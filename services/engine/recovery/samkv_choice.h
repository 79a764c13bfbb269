// Which tiles of several documents a question needs, and which of their tokens are computed afresh (SamKV 3.1 to 3.3;
// docs/methods/samkv.md). Functions of numbers alone: no pages, no model.
//
// A document is cut in tiles of 64 tokens, the last one perhaps shorter: the first is its initial tile, the last two
// are its local ones, what lies between are middle tiles. Initial and local tiles are always kept.
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
// Segments that a prompt may mark: choices compare the documents with each other, on the host and for each layer.
inline constexpr int32_t kSamKvMaxDocuments = 1024;

struct SamKvShape {
  int32_t num_layers = 0;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads
  int32_t head_dim = 0;
  size_t query_size() const { return static_cast<size_t>(num_qo_heads) * static_cast<size_t>(head_dim); }
};

// What is known of a document without its KV. Borrowed for the call.
struct SamKvDocument {
  int32_t num_tiles = 0;  // >= 1
  // [num_layers, num_tiles, num_kv_heads, head_dim]: mean key of each tile, as turned to where the document stands.
  std::span<const float> tile_means;
  // [num_layers, num_qo_heads, head_dim]: mean query of the local tiles, turned likewise. Empty: unknown; the document
  // then adds nothing to what others are asked.
  std::span<const float> local_query;

  int32_t num_middle() const { return num_tiles > kSamKvFixedTiles ? num_tiles - kSamKvFixedTiles : 0; }
};

struct SamKvBudget {
  // Kept tiles as a share of all, initial and local ones included; the middle gets what they leave of it, perhaps
  // nothing. 0: the paper's number, as many middle tiles as there are divided by the number of documents (of a single
  // document all that its share takes). 1: nothing is left out, whatever the shares say.
  double ratio = 0.15;
  bool personal = true;  // false: every document is asked the question's query alone (the paper's ablation)
};

// Q^_i = Q_que + 1/(D-1) sum over j != i of |cos(Q_que, Q_loc,j)| Q_loc,j, in one layer: all heads are one vector.
// A single document, or one among others of which nothing is known, is asked Q_que. `local_queries`: [D], empty spans
// where unknown. [query size]
std::vector<double> PersonalQuery(std::span<const float> question,
                                  std::span<const std::span<const float>> local_queries, size_t document);

// s_t = sum over the query heads h of <Q^_h, K_t,g(h)> / sqrt(head_dim), of each tile of one layer. [num_tiles]
// `tile_means`: [num_tiles, num_kv_heads, head_dim].
std::vector<float> TileScores(const SamKvShape& shape, std::span<const double> query,
                              std::span<const float> tile_means);

// P = (s_max - s_anc) / (s_max - s_min) where s_min < s_anc < s_max, else 0: the largest and smallest score of the
// middle tiles, and the mean score of the others. 0 without middle tiles.
double AnchorShare(std::span<const float> tile_scores);

// Mean 0 and variance 1 over the middle tiles; all 0 where they are equal. [num_middle]
std::vector<float> NormalizedMiddle(std::span<const float> tile_scores);

struct SamKvChoice {
  // [num_layers][num_documents]: the middle tiles that are kept, numbers of tiles of the document, ascending.
  std::vector<std::vector<std::vector<int32_t>>> middle;
  std::vector<double> shares;   // [num_documents]: P_i
  std::vector<int64_t> counts;  // [num_layers]: middle tiles kept
};

// `question`: [num_layers, num_qo_heads, head_dim], the mean query of the question over initial and local tiles.
// In each layer: of each document the best ceil(P_i n_mid) middle tiles, of these over all documents the best M by
// normalised score. P_i is the mean over the layers from a quarter of the model on. Ties go to the higher score as it
// was before that, then to the lower document, then to the lower tile. Scores are f32 of sums in double, so that the
// order of the documents does not matter.
// Cost: one product of num_qo_heads head_dim for each layer and tile.
SamKvChoice ChooseTiles(const SamKvShape& shape, std::span<const float> question,
                        std::span<const SamKvDocument> documents, const SamKvBudget& budget);
// M, see SamKvBudget::ratio.
int64_t MiddleBudget(std::span<const SamKvDocument> documents, const SamKvBudget& budget);

// Ours, for what the mean of 64 keys does not show (docs/samkv.md): the tiles that get most attention, the same in all
// layers, so that what is kept is what is computed afresh. The first `num_initial` tiles of each document are kept
// anyway; local tiles compete with the middle ones. `tile_scores`: [num_documents][num_tiles]; those of initial tiles
// do not matter. `ratio`: as SamKvBudget's. Gives [num_documents] tiles besides the initial ones, ascending. Ties go to
// the lower document, then to the lower tile.
std::vector<std::vector<int32_t>> BestTiles(std::span<const std::vector<float>> tile_scores, double ratio,
                                            int32_t num_initial);
// How many that are over all documents.
int64_t BestTilesBudget(std::span<const int32_t> num_tiles, double ratio, int32_t num_initial);

// What tile [begin, end) of a document is worth: the sum of the eight best of its tokens' scores and of half the scores
// of the eight tokens on either side of it. A few tokens make a fact, so that a tile of much that is looked at a little
// is not worth more than one with a fact; and a fact that ends behind the tile's edge wants both tiles. `token_scores`:
// of the document's tokens, not negative.
float TileWorth(std::span<const float> token_scores, int32_t begin, int32_t end);

}  // namespace spl::engine
