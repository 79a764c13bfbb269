// A stage that does not see pages of a prompt (PrefillStage::unseen) computes what attention over a list of the other
// positions computes: the two differ in how pages are found and rows are turned, not in what they mean.
#include <algorithm>

#include "services/engine/recovery/sparsex_probe.h"
#include "tests/services/engine/segments_fixture.h"

namespace spl::engine {
namespace {

using test::RelativeL2;

// One stage of `rows` that scores the copies and does not see `unseen`: without its pages, or by lists of positions.
// Then everything is computed.
class ProbeOnly : public RecoveryPolicy {
 public:
  ProbeOnly(const ModelConfig& config, PositionRanges rows, PositionRanges unseen, bool by_lists)
      : RecoveryPolicy(config), rows_(std::move(rows)), unseen_(std::move(unseen)), by_lists_(by_lists) {}
  std::string_view name() const override { return "probe"; }
  bool reuses_segments() const override { return true; }
  void TakeScores(std::vector<float> scores) override { scores_ = std::move(scores); }
  LayerPlan PlanLayer(int32_t layer) override {
    if (!by_lists_ || !probing_) return RecoveryPolicy::PlanLayer(layer);
    lists_.assign(static_cast<size_t>(config().num_kv_heads),
                  {.rule = kernels::VisibilityRule::kList, .indices = seen_});
    return {.visibility = lists_};
  }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t>) override {
    if (!probing_) return std::nullopt;
    probing_ = false;
    return AllRows(layout);
  }
  const std::vector<float>& scores() const { return scores_; }

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override {
    for (const PositionRange& range : ComplementOf(unseen_, {0, layout.num_tokens})) {
      for (int32_t p = range.begin; p < range.end; ++p) seen_.push_back(p);
    }
    return {.rows = rows_,
            .layers = {0, config().num_layers},
            .final_before = 0,
            .unseen = by_lists_ ? PositionRanges() : unseen_,
            .score = {.kind = ScoreKind::kColumnMass,
                      .layer = 1,
                      .candidates = layout.reused,
                      .probes = rows_,
                      .all_layers = true,
                      .give_scores = true}};
  }

 private:
  const PositionRanges rows_, unseen_;
  const bool by_lists_;
  bool probing_ = true;
  Tokens seen_;
  std::vector<kernels::HeadVisibility> lists_;
  std::vector<float> scores_;
};

class UnseenTextTest : public SegmentsFixture {
 protected:
  // Copies between runs of fresh text, some of them pages long.
  Layout FreshAndCopies(std::mt19937& random) {
    Layout layout;
    const auto add_fresh = [&](int32_t count) {
      const Tokens fresh = RandomTokens(random, count);
      layout.tokens.insert(layout.tokens.end(), fresh.begin(), fresh.end());
    };
    add_fresh(Between(random, 1, 300));
    for (int i = Between(random, 1, 4); i > 0; --i) {
      layout.texts.push_back(RandomTokens(random, Between(random, 30, 200)));
      layout.sources.push_back(Exact(layout.texts.back()));
      const auto size = static_cast<int32_t>(layout.texts.back().size());
      layout.hits.push_back({SourceOf(layout.sources.back(), layout.texts.back(), 0, size), 0,
                             static_cast<int32_t>(layout.tokens.size()), size});
      layout.tokens.insert(layout.tokens.end(), layout.texts.back().begin(), layout.texts.back().end());
      add_fresh(Between(random, 1, random() % 2 == 0 ? 10 : 300));
    }
    return layout;
  }

  struct Probe {
    std::vector<float> scores;
    std::vector<std::vector<float>> rows;  // K and V of the rows in each layer and head
  };
  Probe RunProbe(const Layout& layout, const PositionRanges& rows, const PositionRanges& unseen, bool by_lists) {
    Result result;
    result.kv = std::make_shared<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(result.kv->Reserve(static_cast<int64_t>(layout.tokens.size())).ok());
    ProbeOnly policy(model_->config(), rows, unseen, by_lists);
    PromptRun run(layout.tokens, layout.hits, *result.kv, policy);
    EXPECT_TRUE(run.Begin(*executor_).ok());
    while (policy.scores().empty()) {
      const PrefillSlice slice = run.Next(executor_->max_rows());
      const absl::Status status = executor_->Prefill({&slice, 1}, run.layers());
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(run.Finish(*executor_).ok());
      if (!status.ok()) return {};
    }
    const std::vector<int32_t> pages = result.kv->AllPages();
    result.pages.resize(pages.size() * model_->page_bytes());
    EXPECT_TRUE(pool_->ReadPages(pages, result.pages.data()).ok());
    Probe probe{policy.scores(), {}};
    for (int32_t layer = 0; layer < model_->config().num_layers; ++layer) {
      for (const PositionRange& range : rows) {
        for (int32_t p = range.begin; p < range.end; ++p) {
          for (const bool value : {false, true}) probe.rows.push_back(Row(result, layer, 1, p, value));
        }
      }
    }
    return probe;
  }
};

// Pages of nobody's: NaN, which one look at them would show.
TEST_P(UnseenTextTest, IsWhatListsOfPositionsLeaveOut) {
  std::mt19937 random = SeededRandom("unseen");
  const double tolerance = GetParam() == "cuda" ? 2e-2 : 1e-4;
  int left_out = 0;
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    const Layout layout = FreshAndCopies(random);
    PositionRanges copies, unseen;
    for (const SegmentHit& hit : layout.hits) copies.push_back({hit.target, hit.target + hit.num_tokens});
    const auto length = static_cast<int32_t>(layout.tokens.size());
    const PositionRanges fresh = ComplementOf(copies, {0, length});
    for (const PositionRange& range : fresh) {
      for (int32_t page = (range.begin + 63) / 64; (page + 1) * 64 <= std::min(range.end, length - 1); ++page) {
        if (random() % 3 != 0) unseen.push_back({page * 64, (page + 1) * 64});
      }
    }
    unseen = MergeRanges(unseen);
    left_out += static_cast<int>(CountOf(unseen));
    const PositionRanges rows = IntersectionOf(fresh, ComplementOf(unseen, {0, length}));
    const Probe got = RunProbe(layout, rows, unseen, false), want = RunProbe(layout, rows, unseen, true);
    ASSERT_EQ(got.scores.size(), static_cast<size_t>(CountOf(copies)));
    EXPECT_LE(RelativeL2(got.scores, want.scores), tolerance) << round;
    ASSERT_EQ(got.rows.size(), want.rows.size());
    for (size_t i = 0; i < got.rows.size(); ++i) ASSERT_LE(RelativeL2(got.rows[i], want.rows[i]), tolerance) << round;
  }
  EXPECT_GT(left_out, 0);
}

// However little the probe consists of: with all rows chosen the result is the full prefill.
TEST_P(UnseenTextTest, RecomputingEverythingIsExact) {
  std::mt19937 random = SeededRandom("unseen, everything");
  for (int round = 0; round < 30 && !HasFailure(); ++round) {
    const Layout layout = FreshAndCopies(random);
    const Result want = Exact(layout.tokens);
    const Result got = Run(layout.tokens,
                           {.policy = "sparsex",
                            .recompute_share = 1,
                            .recompute_min = 1 << 20,
                            .recompute_max = 1 << 20,
                            .probe_layers = Between(random, 1, 4),
                            .probe_tokens = Between(random, 1, 200)},
                           layout.hits);
    EXPECT_TRUE(SameKv(got, want, static_cast<int32_t>(layout.tokens.size()))) << round;
    EXPECT_TRUE(SameLogits(got, want)) << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, UnseenTextTest, testing::Values("cpu", "ref", "ranks", "cuda"),
                         [](const auto& info) { return info.param; });

TEST(ProbeTokensTest, AProbeIsTheEndOfTheFreshText) {
  const ModelConfig config = ParseModelConfig(Config(""), "test").value();
  // 0 … 1000 fresh, a copy, 300 fresh, a copy, 200 fresh.
  const ReuseLayout layout{5000, 0, {{1000, 3000}, {3300, 4800}}, {CopyContext::kIsolated, CopyContext::kIsolated}};
  const auto unseen = [&](int32_t tokens, const ReuseLayout& of, const ModelConfig& model) {
    SparseXProbePolicy policy(model, {.probe_layers = 2, .probe_tokens = tokens});
    const PrefillStage stage = policy.FirstStage(of);
    EXPECT_EQ(stage.rows, stage.score.probes);
    EXPECT_EQ(stage.rows, IntersectionOf(of.fresh(), ComplementOf(stage.unseen, {0, of.num_tokens})));
    return stage.unseen;
  };
  EXPECT_EQ(unseen(0, layout, config), PositionRanges()) << "all of it";
  EXPECT_EQ(unseen(1500, layout, config), PositionRanges());
  // The first page stays, and so do pages that a copy shares: 960 … 1000, and 3000 … 3008 with 3264 … 3300.
  EXPECT_EQ(unseen(200, layout, config), (PositionRanges{{64, 960}, {3008, 3264}}));
  EXPECT_EQ(unseen(512, layout, config), (PositionRanges{{64, 960}})) << "12 of the second run, which are no page";
  EXPECT_EQ(unseen(-1, layout, config), (PositionRanges{{64, 960}, {3008, 3200}})) << "the default, 256";
  EXPECT_EQ(unseen(700, layout, config), (PositionRanges{{64, 768}})) << "800 of the first run are in front";

  const ReuseLayout prefix{5000, 640, {{1000, 4800}}, {CopyContext::kIsolated}};
  EXPECT_EQ(unseen(200, prefix, config), (PositionRanges{{640, 960}})) << "a prefix is seen, and not computed";

  ModelConfig windows = config;
  windows.sliding_windows.assign(4, 1024);
  EXPECT_EQ(unseen(200, layout, windows), PositionRanges()) << "windows count positions";
}

}  // namespace
}  // namespace spl::engine
