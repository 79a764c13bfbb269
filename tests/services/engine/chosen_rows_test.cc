// Which rows sparsex computes in a whole model when few are chosen, against equations 1 to 3 of SparseX in double
// (docs/methods/sparsex.md, "Choosing rows"): which rows ask, which columns may be chosen, over which heads the scores
// are summed, and which rows come beside the chosen ones. Once behind dense layers, and once behind a probe, whose rows
// see the copies' keys and values. With splice, whose local heads see less, the probe sees the same.
#include <algorithm>
#include <functional>
#include <set>

#include "services/engine/recovery/sparsex_probe.h"
#include "tests/services/engine/segments_fixture.h"
#include "tests/support/plain_model.h"
#include "tests/support/temp_dir.h"

namespace spl::engine {
namespace {

using test::PlainModel;

class ChosenRowsTest : public SegmentsFixture {
 protected:
  static constexpr int32_t kBeside = 16, kTail = 64;
  static constexpr int64_t kEnough = 20;  // rows that only their score makes rows; as many others

  void SetUp() override {
    random_ = SeededRandom("chosen rows");
    plain_.emplace(PlainModel::Shape{}, random_, 2.0);  // wide enough that attention prefers some tokens clearly
    plain_->Save(folder_.path());
    LoadFolder(folder_.path(), 100);  // several passes, so that scores are sums over them
  }

  // The positions of the rows that run through the last layer, and those of the pass that scores.
  std::set<int32_t> RowsOfLastLayer(const Layout& layout, const ReuseOptions& reuse) {
    auto kv = layout.prefix ? layout.prefix->Fork().value()
                            : std::make_shared<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(kv->Reserve(static_cast<int64_t>(layout.tokens.size())).ok());
    auto policy = MakeRecoveryPolicy(reuse, model_->config(), map_ ? &*map_ : nullptr);
    EXPECT_TRUE(policy.ok()) << policy.status();
    PromptRun run(layout.tokens, layout.hits, *kv, **policy);
    EXPECT_TRUE(run.Begin(*executor_).ok());
    std::set<int32_t> rows;
    while (!run.done()) {
      const PrefillSlice slice = run.Next(executor_->max_rows());
      const PassLayers layers = run.layers();
      if (layers.layers.end == model_->config().num_layers) rows.insert(slice.positions.begin(), slice.positions.end());
      EXPECT_TRUE(executor_->Prefill({&slice, 1}, layers).ok());
      EXPECT_TRUE(run.Finish(*executor_).ok());
    }
    return rows;
  }

  // The equations of a layout, for every position.
  struct Expected {
    std::vector<bool> fresh, reused, always;
    std::vector<double> scores;  // 0 where not reused
  };
  // `options`: dense_layers, or probe_layers and score_layers.
  Expected Expect(const Layout& layout, const ReuseOptions& options) const {
    const auto length = static_cast<int32_t>(layout.tokens.size());
    const auto size = layout.tokens.size();
    const auto prefix = static_cast<int32_t>(layout.prefix ? layout.prefix->num_tokens() : 0);
    Expected e{std::vector<bool>(size, true), std::vector<bool>(size), std::vector<bool>(size),
               std::vector<double>(size)};
    for (const SegmentHit& hit : layout.hits) {
      for (int32_t i = hit.target; i < hit.target + hit.num_tokens; ++i) e.reused[i] = true;
    }
    for (int32_t i = 0; i < length; ++i) e.fresh[i] = i >= prefix && !e.reused[i];
    std::vector<bool> asks = e.fresh;
    if (e.reused.back()) {  // the tail: of the last copy, which ends the prompt
      for (int32_t i = std::max(layout.hits.back().target, length - kTail); i < length; ++i) asks[i] = true;
    }
    for (int32_t i = 0; i < length; ++i) {
      bool beside = false;
      for (int32_t j = std::max(0, i - kBeside); j <= std::min(length - 1, i + kBeside); ++j) beside |= e.fresh[j];
      e.always[i] = asks[i] || i == length - 1 || (e.reused[i] && beside);
    }
    const int32_t end = std::max(1, options.probe_layers > 0 ? options.probe_layers : options.dense_layers);
    std::vector<std::vector<PlainModel::Heads>> sources;
    std::vector<PlainModel::Copy> copies;
    if (options.probe_layers > 0) {
      for (const Tokens& text : layout.texts) sources.push_back(plain_->Forward(text, end));
      for (size_t i = 0; i < layout.hits.size(); ++i) {
        const SegmentHit& hit = layout.hits[i];
        int32_t count = hit.num_tokens;  // those that ask have keys and values of their own
        while (count > 0 && asks[hit.target + count - 1]) --count;
        copies.push_back({hit.target, count, &sources[layout.parts[i].text], layout.parts[i].begin});
      }
    }
    const std::vector<PlainModel::Heads> layers = plain_->Forward(layout.tokens, end, copies);
    const int32_t scoring = options.probe_layers > 0 ? options.score_layers : 1;
    for (int32_t layer = end - scoring; layer < end; ++layer) {
      for (int32_t i = 0; i < length; ++i) {
        if (!asks[i]) continue;
        for (int32_t h = 0; h < plain_->shape().q_heads; ++h) {
          if (!options.score_all_heads && !Scores(layer, h)) continue;
          const std::vector<double> attention = plain_->Attention(layers[static_cast<size_t>(layer)], h, i);
          for (int32_t j = 0; j <= i; ++j) e.scores[j] += e.reused[j] ? attention[j] : 0;
        }
      }
    }
    return e;
  }

  // Windows of a few tokens: one head of a layer, the other, and both in the last one.
  HeadClassMap NarrowMap() const {
    const PlainModel::Shape& shape = plain_->shape();
    std::vector<HeadClass> classes(static_cast<size_t>(shape.layers) * shape.kv_heads);
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      for (int32_t h = 0; h < shape.kv_heads; ++h) {
        if (h == layer % shape.kv_heads || layer + 1 == shape.layers)
          classes[layer * shape.kv_heads + h] = {.is_global = false, .window = 8, .sinks = 2};
      }
    }
    return {shape.layers, shape.kv_heads, std::move(classes)};
  }

  // Whether a query head counts where only global heads do. A layer without a global head counts all.
  bool Scores(int32_t layer, int32_t query_head) const {
    const int32_t kv_heads = plain_->shape().kv_heads, group = plain_->shape().q_heads / kv_heads;
    bool any = false;
    for (int32_t h = 0; h < kv_heads; ++h) any |= map_->at(layer, h).is_global;
    return !any || map_->at(layer, query_head / group).is_global;
  }

  // Scores of neighbours: the best within the radius, over the candidates one behind the other.
  static void Pool(Expected& e, int32_t radius) {
    std::vector<size_t> candidates;
    for (size_t i = 0; i < e.reused.size(); ++i) {
      if (e.reused[i]) candidates.push_back(i);
    }
    const std::vector<double> scores = e.scores;
    for (size_t i = 0; i < candidates.size(); ++i) {
      for (size_t j = i > static_cast<size_t>(radius) ? i - static_cast<size_t>(radius) : 0;
           j < candidates.size() && j <= i + static_cast<size_t>(radius); ++j)
        e.scores[candidates[i]] = std::max(e.scores[candidates[i]], scores[candidates[j]]);
    }
  }

  // Random layouts and numbers of rows. `choose` sets the layers that choose. Few rows are left to their score in small
  // layouts: the test goes on until it has seen enough of them to tell.
  void CompareRows(const std::function<void(ReuseOptions&)>& choose) {
    int64_t chosen_rows = 0, mirrored = 0;
    const int rounds = GetParam() == "cpu" ? 24 : 8;
    const auto can_tell = [&] { return chosen_rows > kEnough && mirrored > kEnough; };
    for (int round = 0; round < 4 * rounds && !HasFailure() && !IsSkipped(); ++round) {
      if (round >= rounds && can_tell()) break;
      const Layout layout = RandomLayout(random_, 350);
      if (layout.hits.empty()) continue;
      int32_t num_reused = 0;
      for (const SegmentHit& hit : layout.hits) num_reused += hit.num_tokens;
      const int32_t k = std::min(num_reused, Between(random_, 1, 60)), radius = random_() % 3 == 0 ? 4 : 0;
      ReuseOptions options{.policy = "sparsex",
                           .recompute_share = 0,
                           .recompute_min = k,
                           .score_pool = radius,
                           .overflow_tokens = kBeside,
                           .tail_tokens = kTail,
                           .link_tokens = 0};
      choose(options);
      // The equations have every fresh row ask and be seen; a probe by default is the last ones only.
      const auto prefix = layout.prefix ? layout.prefix->num_tokens() : 0;
      const auto num_fresh = static_cast<int64_t>(layout.tokens.size()) - prefix - num_reused;
      if (num_fresh > SparseXProbePolicy::kProbeTokens) options.probe_tokens = 0;
      const std::set<int32_t> rows = RowsOfLastLayer(layout, options);
      Expected e = Expect(layout, options);
      Pool(e, radius);
      std::vector<double> sorted;
      for (size_t i = 0; i < e.scores.size(); ++i) {
        if (e.reused[i]) sorted.push_back(e.scores[i]);
      }
      std::sort(sorted.rbegin(), sorted.rend());
      const double least = sorted[static_cast<size_t>(k) - 1], rounding = 1e-4 * sorted[0];
      for (size_t i = 0; i < e.scores.size(); ++i) {
        const auto position = static_cast<int32_t>(i);
        const bool is_row = rows.contains(position);
        const bool must = e.always[i] || (e.reused[i] && e.scores[i] > least + rounding);
        const bool may = must || (e.reused[i] && e.scores[i] >= least - rounding);
        EXPECT_TRUE(is_row ? may : !must)
            << "round " << round << ", l* " << options.dense_layers << ", probe " << options.probe_layers << " and "
            << options.score_layers << ", k " << k << ", position " << position << (is_row ? " is" : " is not")
            << " a row, its score is " << e.scores[i] << ", the least chosen " << least;
        chosen_rows += !e.always[i] && must ? 1 : 0;
        mirrored += !e.always[i] && e.reused[i] && !may ? 1 : 0;
      }
    }
    if (IsSkipped()) return;
    // The test can tell: rows that only their score makes rows, and others that could have been.
    EXPECT_GT(chosen_rows, kEnough);
    EXPECT_GT(mirrored, kEnough);
    std::printf("%lld rows by score alone\n", static_cast<long long>(chosen_rows));
  }

  std::mt19937 random_;
  std::optional<PlainModel> plain_;
  std::optional<HeadClassMap> map_;  // for methods with head classes
  testing::TempDir folder_;
};

TEST_P(ChosenRowsTest, BehindDenseLayersAreThoseOfTheEquations) {
  CompareRows([&](ReuseOptions& options) { options.dense_layers = Between(random_, 0, 3); });
}

TEST_P(ChosenRowsTest, BehindAProbeAreThoseOfTheEquations) {
  CompareRows([&](ReuseOptions& options) {
    options.probe_layers = Between(random_, 1, 4);
    options.score_layers = Between(random_, 1, options.probe_layers);
  });
}

// The map decides what the chosen rows see, not which rows they are.
TEST_P(ChosenRowsTest, BehindAProbeOfSpliceAreThoseOfTheEquations) {
  map_ = NarrowMap();
  CompareRows([&](ReuseOptions& options) {
    options.policy = "splice";
    options.probe_layers = Between(random_, 1, 4);
    options.score_layers = Between(random_, 1, options.probe_layers);
  });
}

TEST_P(ChosenRowsTest, GlobalHeadsAloneMayScoreEachLayerOfAProbe) {
  map_ = NarrowMap();
  CompareRows([&](ReuseOptions& options) {
    options.policy = "splice";
    options.probe_layers = Between(random_, 2, 4);
    options.score_layers = Between(random_, 2, options.probe_layers);
    options.score_all_heads = false;
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, ChosenRowsTest, ::testing::Values("cpu", "ranks"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace spl::engine
