// SamKV's choice, attended tokens and recombination on numbers: hand cases, a plain second implementation in double,
// and what must not depend on the order of the documents.
#include "services/engine/recovery/samkv_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "services/engine/cache/segment_summary.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;
using testing::ElementsAre;
using testing::IsEmpty;

using Floats = std::vector<float>;

Floats RandomFloats(std::mt19937& random, size_t count) {
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<double> Personal(const Floats& question, const std::vector<Floats>& local, size_t document) {
  const std::vector<std::span<const float>> views(local.begin(), local.end());
  return PersonalQuery(question, views, document);
}

TEST(SamKvChoiceTest, AQueryTakesUpWhatTheOthersAskInItsDirection) {
  // cos(q, a) = 1, cos(q, b) = 0, cos(q, c) = -1: c counts by its absolute value, with its own sign.
  const Floats q = {2, 0}, a = {3, 0}, b = {0, 5}, c = {-4, 0};
  EXPECT_THAT(Personal(q, {a, b, c}, 0), ElementsAre(2 - 4.0 / 2, 0));  // of b nothing, of c half
  EXPECT_THAT(Personal(q, {a, b, c}, 1), ElementsAre(2 + (3 - 4) / 2.0, 0));
  EXPECT_THAT(Personal(q, {a, b, c}, 2), ElementsAre(2 + 3 / 2.0, 0));
  const Floats slanted = {3, 4};  // cos 0.6
  EXPECT_THAT(Personal(q, {a, slanted}, 0),
              ElementsAre(testing::DoubleNear(2 + 0.6 * 3, 1e-12), testing::DoubleNear(0.6 * 4, 1e-12)));
}

TEST(SamKvChoiceTest, ASingleDocumentAndUnknownOnesHaveNoBias) {
  const Floats q = {1, 2}, a = {3, 4}, zero = {0, 0};
  EXPECT_THAT(Personal(q, {a}, 0), ElementsAre(1, 2));
  EXPECT_THAT(Personal(q, {a, {}}, 0), ElementsAre(1, 2));
  EXPECT_THAT(Personal(q, {a, zero}, 0), ElementsAre(1, 2));  // without a direction
}

TEST(SamKvChoiceTest, ScoresSumHeadsOverTheirKvHead) {
  // Two query heads on each of two KV heads of two dimensions.
  const SamKvShape shape{.num_layers = 1, .num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 2};
  const std::vector<double> query = {1, 0, 2, 0, 0, 3, 0, 4};
  const Floats means = {1, 9, 9, 1, 10, 0, 0, 100};
  const Floats scores = TileScores(shape, query, means);
  ASSERT_EQ(scores.size(), 2u);
  EXPECT_FLOAT_EQ(scores[0], static_cast<float>((3 * 1 + 7 * 1) / std::sqrt(2.0)));
  EXPECT_FLOAT_EQ(scores[1], static_cast<float>((3 * 10 + 7 * 100) / std::sqrt(2.0)));
}

TEST(SamKvChoiceTest, TheAnchorSaysHowMuchOfADocumentMatters) {
  // Initial tile, middle tiles 1..., two local tiles; the anchor is the mean of first, last and the one before.
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{3, 0, 4, 2, 3, 3}), 0.25);
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{1, 0, 4, 0, 2}), 0.75);  // anchor (1 + 0 + 2) / 3 = 1, middle 0 and 4
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{5, 0, 4, 5, 5}), 0);     // above all
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{-1, 0, 4, -1, -1}), 0);  // below all
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{4, 0, 4, 4, 4}), 0);     // on the largest
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{0, 0, 4, 0, 0}), 0);     // on the smallest
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{2, 2, 2, 2, 2}), 0);     // all equal
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{2, 2, 2}), 0);           // no middle
  EXPECT_DOUBLE_EQ(AnchorShare(Floats{1, 7, 2, 2}), 0);        // one middle tile is both largest and smallest
}

TEST(SamKvChoiceTest, ScoresOfADocumentAreNormalisedOverItsMiddle) {
  EXPECT_THAT(NormalizedMiddle(Floats{100, 1, 3, -50, 60}), ElementsAre(-1, 1));
  EXPECT_THAT(NormalizedMiddle(Floats{0, 7, 7, 7, 0, 0}), ElementsAre(0, 0, 0));
  EXPECT_THAT(NormalizedMiddle(Floats{1, 2, 3}), IsEmpty());
}

// Documents whose tile scores are given: one head of one dimension, a question of 1, nothing known of local queries.
struct Given {
  explicit Given(std::vector<Floats> tile_scores) : scores(std::move(tile_scores)) {
    for (const Floats& s : scores) documents.push_back({static_cast<int32_t>(s.size()), s, {}});
  }
  SamKvChoice Choose(double ratio) const {
    return ChooseTiles({.num_layers = 1, .num_qo_heads = 1, .num_kv_heads = 1, .head_dim = 1}, Floats{1}, documents,
                       {.ratio = ratio});
  }
  std::vector<Floats> scores;
  std::vector<SamKvDocument> documents;
};

TEST(SamKvChoiceTest, BestOfAllDocumentsWithinTheirShares) {
  // Shares: 3/4 of four tiles, so three; of the second all scores lie below its anchor: none.
  const Given given({{1, 0, 4, 2, 3, 1, 1}, {9, 1, 2, 3, 4, 9, 9}});
  const SamKvChoice paper = given.Choose(0);  // 8 middle tiles / 2 documents = 4
  EXPECT_DOUBLE_EQ(paper.shares[0], 0.75);
  EXPECT_DOUBLE_EQ(paper.shares[1], 0);
  EXPECT_THAT(paper.middle[0][0], ElementsAre(2, 3, 4));
  EXPECT_THAT(paper.middle[0][1], IsEmpty());
  EXPECT_THAT(paper.counts, ElementsAre(3));
  // 14 tiles, half of them 7, of which 6 are initial or local: one in the middle.
  EXPECT_THAT(given.Choose(0.5).middle[0][0], ElementsAre(2));
  // What initial and local tiles take already leaves nothing.
  EXPECT_THAT(given.Choose(0.15).middle[0][0], IsEmpty());
  // Everything, whatever the shares say.
  const SamKvChoice all = given.Choose(1);
  EXPECT_THAT(all.middle[0][0], ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(all.middle[0][1], ElementsAre(1, 2, 3, 4));
}

TEST(SamKvChoiceTest, NormalisedScoresMakeDocumentsComparable) {
  // The second document's scores are a hundred times as large; its best tile stands out less.
  const Given given({{1, 0, 0, 9, 0, 1, 1}, {300, 100, 900, 800, 200, 300, 300}});
  const SamKvChoice choice = given.Choose(7.0 / 14);
  EXPECT_THAT(choice.middle[0][0], ElementsAre(3));
  EXPECT_THAT(choice.middle[0][1], IsEmpty());
}

TEST(SamKvChoiceTest, TiesGoToTheLowerTile) {
  const Given given({{1, 0, 2, 2, 2, 1, 1}});  // share 1/2 of four
  EXPECT_THAT(given.Choose(0).middle[0][0], ElementsAre(2, 3));
  // And to the lower document.
  const Given twins({{1, 0, 2, 1, 1}, {1, 0, 2, 1, 1}});
  const SamKvChoice choice = twins.Choose(0.7);  // 10 tiles, 6 fixed
  EXPECT_THAT(choice.middle[0][0], ElementsAre(2));
  EXPECT_THAT(choice.middle[0][1], IsEmpty());
}

TEST(SamKvChoiceTest, OneDocumentKeepsWhatItsShareTakes) {
  const Given given({{1, 0, 4, 2, 3, 1, 1}});
  EXPECT_THAT(given.Choose(0).middle[0][0], ElementsAre(2, 3, 4));  // total / 1 is all: no further cut
  EXPECT_THAT(given.Choose(4.0 / 7).middle[0][0], ElementsAre(2));  // a budget holds for one, too
}

TEST(SamKvChoiceTest, ShortDocumentsHaveNoMiddle) {
  const Given given({{1}, {1, 2, 3}, {1, 0, 9, 1, 1}});
  const SamKvChoice choice = given.Choose(1);
  EXPECT_THAT(choice.middle[0][0], IsEmpty());
  EXPECT_THAT(choice.middle[0][1], IsEmpty());
  EXPECT_THAT(choice.middle[0][2], ElementsAre(1, 2));
}

struct RandomCase {
  RandomCase(std::mt19937& random, int num_documents, bool some_unknown) {
    question = RandomFloats(random, static_cast<size_t>(shape.num_layers) * shape.query_size());
    for (int i = 0; i < num_documents; ++i) {
      tiles.push_back(1 + static_cast<int32_t>(random() % 20));
      means.push_back(RandomFloats(
          random, static_cast<size_t>(shape.num_layers * tiles.back() * shape.num_kv_heads * shape.head_dim)));
      local.push_back(some_unknown && random() % 3 == 0 ? Floats() : RandomFloats(random, question.size()));
    }
  }
  std::vector<SamKvDocument> Documents(const std::vector<size_t>& order) const {
    std::vector<SamKvDocument> documents;
    for (const size_t i : order) documents.push_back({tiles[i], means[i], local[i]});
    return documents;
  }
  static std::vector<size_t> InOrder(size_t count) {
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    return order;
  }

  const SamKvShape shape{.num_layers = 5, .num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 8};
  Floats question;
  std::vector<int32_t> tiles;
  std::vector<Floats> means, local;
};

// Of 3 + 5 + 1 tiles a third is three: the initial ones. Half is 4.5, rounded up 5: two more.
TEST(SamKvChoiceTest, BestTilesAreThoseWithTheHighestScores) {
  const std::vector<Floats> scores = {{9, 1, 4}, {0, 3, 4, 2, 4}, {7}};
  const auto best = [&](double ratio) { return BestTiles(scores, ratio, 1); };
  using Tiles = std::vector<std::vector<int32_t>>;
  EXPECT_EQ(best(0.01), (Tiles{{}, {}, {}}));
  EXPECT_EQ(best(0.34), (Tiles{{}, {}, {}}));
  EXPECT_EQ(best(0.45), (Tiles{{2}, {}, {}})) << "ties go to the lower document";
  EXPECT_EQ(best(0.55), (Tiles{{2}, {2}, {}})) << "and to the lower tile";
  EXPECT_EQ(best(0.67), (Tiles{{2}, {2, 4}, {}}));
  EXPECT_EQ(best(1), (Tiles{{1, 2}, {1, 2, 3, 4}, {}}));
  // The paper's number: 3 + 3 + 1 fixed tiles and (0 + 2 + 0) / 3 middle ones, less the initial ones.
  EXPECT_EQ(best(0), (Tiles{{2}, {1, 2, 4}, {}}));
  EXPECT_EQ(BestTilesBudget(std::vector<int32_t>{3, 5, 1}, 0, 1), 4);
  // Without initial tiles all compete.
  EXPECT_EQ(BestTilesBudget(std::vector<int32_t>{3, 5, 1}, 0, 0), 7);
  EXPECT_EQ(BestTiles(scores, 0.23, 0), (Tiles{{0}, {}, {0}}));
  EXPECT_EQ(BestTiles(scores, 0.01, 0), (Tiles{{}, {}, {}}));
  EXPECT_EQ(BestTiles(scores, 1, 0), (Tiles{{0, 1, 2}, {0, 1, 2, 3, 4}, {0}}));
}

TEST(SamKvChoiceTest, ATileIsWorthItsBestTokensAndHalfOfItsNeighbours) {
  Floats tokens(200);
  EXPECT_EQ(TileWorth(tokens, 64, 128), 0);
  tokens[70] = 4;
  EXPECT_EQ(TileWorth(tokens, 64, 128), 4);
  tokens[128] = 4;  // just behind it
  EXPECT_EQ(TileWorth(tokens, 64, 128), 4 + 4 * 0.5);
  tokens[135] = 1, tokens[136] = 100;  // the eighth beyond the border, and the ninth
  EXPECT_EQ(TileWorth(tokens, 64, 128), 4 + 2 + 0.5);
  tokens[56] = 1, tokens[55] = 100;
  EXPECT_EQ(TileWorth(tokens, 64, 128), 4 + 2 + 0.5 + 0.5);
  EXPECT_EQ(TileWorth(tokens, 0, 64), 100 + 1 + 4 * 0.5);
  for (int t = 80; t < 100; ++t) tokens[static_cast<size_t>(t)] = 3;  // many: the best eight count
  EXPECT_EQ(TileWorth(tokens, 64, 128), 4 + 7 * 3);
  EXPECT_EQ(TileWorth(tokens, 128, 200), 4 + 1 + 100);
  EXPECT_EQ(TileWorth(Floats{2}, 0, 1), 2);  // a document of one token
}

TEST(SamKvChoiceTest, ThePlaceOfADocumentAmongTheOthersDoesNotMatter) {
  std::mt19937 random = SeededRandom("equivariance");
  for (int round = 0; round < 200; ++round) {
    const size_t count = 1 + random() % 9;
    const RandomCase given(random, static_cast<int>(count), true);
    const SamKvBudget budget{.ratio = round % 4 * 0.25, .personal = round % 3 != 0};
    std::vector<size_t> order = RandomCase::InOrder(count);
    const SamKvChoice want = ChooseTiles(given.shape, given.question, given.Documents(order), budget);
    std::shuffle(order.begin(), order.end(), random);
    const SamKvChoice got = ChooseTiles(given.shape, given.question, given.Documents(order), budget);
    for (size_t at = 0; at < count; ++at) {
      EXPECT_NEAR(got.shares[at], want.shares[order[at]], 1e-9);
      for (size_t layer = 0; layer < 5; ++layer)
        EXPECT_EQ(got.middle[layer][at], want.middle[layer][order[at]]) << round << ", layer " << layer;
    }
  }
}

// The formulas once more, straight from the text, in double throughout.
TEST(SamKvChoiceTest, AgreesWithThePlainFormulas) {
  std::mt19937 random = SeededRandom("plain formulas");
  for (int round = 0; round < 100; ++round) {
    const size_t count = 2 + random() % 6;
    const RandomCase given(random, static_cast<int>(count), false);
    const auto documents = given.Documents(RandomCase::InOrder(count));
    const SamKvChoice got = ChooseTiles(given.shape, given.question, documents, {.ratio = 0});
    const SamKvShape& s = given.shape;
    const size_t query_size = s.query_size();
    std::vector<std::vector<std::vector<double>>> scores(5, std::vector<std::vector<double>>(count));
    std::vector<double> shares(count);
    size_t total_middle = 0;
    for (size_t i = 0; i < count; ++i) total_middle += static_cast<size_t>(documents[i].num_middle());
    for (size_t n = 0; n < 5; ++n) {
      const float* q = given.question.data() + n * query_size;
      for (size_t i = 0; i < count; ++i) {
        std::vector<double> asked(q, q + query_size);
        for (size_t j = 0; j < count; ++j) {
          if (j == i) continue;
          const float* l = given.local[j].data() + n * query_size;
          double ql = 0, qq = 0, ll = 0;
          for (size_t c = 0; c < query_size; ++c)
            ql += double{q[c]} * l[c], qq += double{q[c]} * q[c], ll += double{l[c]} * l[c];
          for (size_t c = 0; c < query_size; ++c)
            asked[c] += std::abs(ql / std::sqrt(qq) / std::sqrt(ll)) * l[c] / static_cast<double>(count - 1);
        }
        for (int32_t t = 0; t < given.tiles[i]; ++t) {
          double sum = 0;
          for (int32_t h = 0; h < 4; ++h) {
            for (int32_t c = 0; c < 8; ++c) {
              const size_t key = ((n * static_cast<size_t>(given.tiles[i]) + static_cast<size_t>(t)) * 2 +
                                  static_cast<size_t>(h / 2)) *
                                     8 +
                                 static_cast<size_t>(c);
              sum += asked[static_cast<size_t>(h * 8 + c)] * given.means[i][key];
            }
          }
          scores[n][i].push_back(sum / std::sqrt(8.0));
        }
        if (n < 1 || given.tiles[i] <= 3) continue;  // layers from a quarter of five on
        const auto& x = scores[n][i];
        const double anchor = (x[0] + x[x.size() - 1] + x[x.size() - 2]) / 3;
        const auto [low, high] = std::minmax_element(x.begin() + 1, x.end() - 2);
        if (*low < anchor && anchor < *high) shares[i] += (*high - anchor) / (*high - *low) / 4;
      }
    }
    for (size_t i = 0; i < count; ++i) EXPECT_NEAR(got.shares[i], shares[i], 1e-5);
    for (size_t n = 0; n < 5; ++n) {
      std::vector<std::tuple<float, double, size_t, int32_t>> all;  // scores are negated
      for (size_t i = 0; i < count; ++i) {
        const int32_t middle = std::max(0, given.tiles[i] - 3);
        double mean = 0, variance = 0;
        for (int32_t t = 1; t <= middle; ++t) mean += scores[n][i][static_cast<size_t>(t)] / middle;
        for (int32_t t = 1; t <= middle; ++t)
          variance += std::pow(scores[n][i][static_cast<size_t>(t)] - mean, 2) / middle;
        std::vector<std::tuple<float, double, size_t, int32_t>> own;
        for (int32_t t = 1; t <= middle; ++t) {
          const double score = scores[n][i][static_cast<size_t>(t)];
          own.emplace_back(variance > 0 ? static_cast<float>(-(score - mean) / std::sqrt(variance)) : 0, -score, i, t);
        }
        std::sort(own.begin(), own.end());
        own.resize(static_cast<size_t>(std::ceil(got.shares[i] * middle)));
        all.insert(all.end(), own.begin(), own.end());
      }
      std::sort(all.begin(), all.end());
      all.resize(std::min(all.size(), total_middle / count));
      std::vector<std::vector<int32_t>> want(count);
      for (const auto& [score, raw, i, t] : all) want[i].push_back(t);
      for (auto& tiles : want) std::sort(tiles.begin(), tiles.end());
      EXPECT_EQ(got.middle[n], want) << "round " << round << ", layer " << n;
    }
  }
}

// The middle is what initial and local tiles leave; a quarter of it is attended, and no fewer than eight.
TEST(SamKvChoiceTest, MiddleTilesAndHowManyOfTheirTokensAreAttended) {
  EXPECT_EQ(MiddleTilesOf({0, 3 * 64}).size(), 0);
  EXPECT_EQ(MiddleTilesOf({100, 103}).size(), 0);
  EXPECT_EQ(MiddleTilesOf({10, 10 + 3 * 64 + 1}), (PositionRange{74, 138}));
  EXPECT_EQ(MiddleTilesOf({0, 640}), (PositionRange{64, 512}));
  for (const auto& [middle, attended] : {std::pair{0, 0}, {5, 5}, {8, 8}, {35, 8}, {36, 9}, {448, 112}})
    EXPECT_EQ(NumAttended(middle), attended) << middle;
}

TEST(SamKvChoiceTest, TheMostAttendedTokens) {
  EXPECT_THAT(MostAttended(Floats{}), IsEmpty());
  EXPECT_THAT(MostAttended(Floats{3, 1, 2}), ElementsAre(0, 1, 2));  // fewer than eight: all
  // Of the four that have 1 the lower three; what is not a number comes last, with what has nothing.
  EXPECT_THAT(MostAttended(Floats{0, 1, 9, NAN, 1, 7, 8, 1, 6, 1, 5, 0}), ElementsAre(1, 2, 4, 5, 6, 7, 8, 10));
  std::mt19937 random = SeededRandom("most attended");
  for (int round = 0; round < 50 && !HasFailure(); ++round) {
    Floats scores(random() % 300);
    for (float& score : scores) score = static_cast<float>(random() % 20);  // many ties
    std::vector<int32_t> want(scores.size());
    std::iota(want.begin(), want.end(), 0);
    std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    want.resize(std::min(scores.size(), std::max<size_t>(8, scores.size() / 4)));
    std::sort(want.begin(), want.end());
    EXPECT_EQ(MostAttended(scores), want) << round;
  }
}

}  // namespace
}  // namespace spl::engine
