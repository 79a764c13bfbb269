// Reuse of segments: the oracles of docs/methods/sparsex.md on whole models, on the CPU and, where there is one, a GPU.
#include <gmock/gmock.h>

#include <cmath>

#include "kernels/backend/backend.h"
#include "kernels/common/tolerance.h"
#include "services/engine/recovery/sparsex.h"
#include "services/engine/recovery/sparsex_probe.h"
#include "tests/services/engine/segments_fixture.h"

namespace spl::engine {
namespace {

class SegmentsTest : public SegmentsFixture {};

// K of layer 0 depends on the token and its position alone.
TEST_P(SegmentsTest, AlignedKeysOfLayerZeroAreThoseOfAFreshPrefill) {
  std::mt19937 random = SeededRandom("layer zero");
  for (const char* scaling : {"", kLlama3Scaling, kYarnScaling}) {
    for (const kernels::DType kv : {kernels::DType::kF32, kernels::DType::kBF16}) {
      Load(scaling, kv);
      if (IsSkipped()) return;
      const Tokens source = RandomTokens(random, 500);
      const Result cached = Exact(source);
      Tokens prompt = RandomTokens(random, 901);
      prompt.insert(prompt.end(), source.begin() + 37, source.begin() + 410);
      const Tokens question = RandomTokens(random, 20);
      prompt.insert(prompt.end(), question.begin(), question.end());
      const SegmentHit hit{SourceOf(cached, source, 37, 410), 0, 901, 373};
      const Result naive = Run(prompt, {.policy = "naive"}, {hit}), exact = Exact(prompt);
      // Two roundings instead of one, and the model's own angles are rounded to f32.
      const kernels::Tolerance t = kernels::ToleranceFor(kernels::DType::kBF16);
      double error = 0, norm = 0, worst = 0, largest = 0;
      for (int32_t p = 901; p < 901 + 373; ++p) {
        for (int32_t head = 0; head < 2; ++head) {
          for (const bool value : {false, true}) {
            const auto got = Row(naive, 0, head, p, value), want = Row(exact, 0, head, p, value);
            for (size_t c = 0; c < got.size(); ++c) {
              const double d = double{got[c]} - want[c];
              error += d * d;
              norm += double{want[c]} * want[c];
              worst = std::max(worst, std::abs(d));
              largest = std::max(largest, std::abs(double{want[c]}));
            }
          }
        }
      }
      EXPECT_LE(std::sqrt(error / norm), t.relative_l2) << scaling;
      EXPECT_LE(worst, t.max_abs_of_max_ref * largest) << scaling;
    }
  }
}

// Everything recomputed is the full prefill, over hundreds of layouts, with every boundary and slices smaller than the
// prompt.
TEST_P(SegmentsTest, RecomputingEverythingIsExact) {
  std::mt19937 random = SeededRandom("everything");
  const int rounds = GetParam() == "cpu" ? 240 : 80;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    const Layout layout = RandomLayout(random, 600);
    const Result want = Exact(layout.tokens);
    const auto length = static_cast<int32_t>(layout.tokens.size());
    ReuseOptions all{.policy = "sparsex", .recompute_share = 1, .recompute_min = 1 << 20, .recompute_max = 1 << 20};
    if (round % 2 == 0) {
      all.dense_layers = Between(random, 0, 4);
    } else {
      all.probe_layers = Between(random, 1, 4);
      all.score_layers = Between(random, 1, all.probe_layers);
    }
    const Result got = Run(layout.tokens, all, layout.hits, layout.prefix);
    EXPECT_TRUE(SameKv(got, want, length))
        << "round " << round << ", dense layers " << all.dense_layers << ", probe layers " << all.probe_layers;
    EXPECT_TRUE(SameLogits(got, want)) << "round " << round;
    if (!layout.hits.empty()) {
      EXPECT_EQ(got.kv->exact_tokens(), layout.hits[0].target);
      EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kApprox);  // it happens to be right, nobody proved it
    }
  }
}

// Whatever the policy, in any layout: a finished prompt, every position written, no NaN of unwritten memory.
TEST_P(SegmentsTest, EveryPolicyFinishesEveryLayout) {
  std::mt19937 random = SeededRandom("policies");
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    const Layout layout = RandomLayout(random, 500);
    for (const char* policy : {"naive", "sparsex", "cacheblend", "epic"}) {
      ReuseOptions reuse{.policy = policy};  // by default copies in their own context are left as they are
      if (random() % 2 == 0) {
        reuse.dense_layers = Between(random, -1, 4);
        if (reuse.dense_layers < 0) reuse.probe_layers = Between(random, 0, 4);
        reuse.recompute_share = 0.1;
        reuse.recompute_min = Between(random, 0, 20);
        reuse.link_tokens = Between(random, -1, 10);
      }
      std::shared_ptr<SequenceKv> prefix;
      if (layout.prefix) prefix = layout.prefix->Fork().value();
      const Result got = Run(layout.tokens, reuse, layout.hits, prefix);
      EXPECT_EQ(got.kv->num_tokens(), static_cast<int64_t>(layout.tokens.size()));
      for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x)) << policy << ", round " << round;
      for (int32_t layer = 0; layer < 4; ++layer) {
        for (int32_t p = 0; p < static_cast<int32_t>(layout.tokens.size()); ++p) {
          for (const float x : Row(got, layer, 0, p, false))
            ASSERT_TRUE(std::isfinite(x)) << policy << ", round " << round << ", layer " << layer << ", position " << p;
        }
      }
    }
  }
}

// Without a hit everything is the exact path.
TEST_P(SegmentsTest, WithoutHitsEveryPolicyIsExact) {
  std::mt19937 random = SeededRandom("no hits");
  const Tokens prompt = RandomTokens(random, 413);
  const Result want = Exact(prompt);
  for (const char* policy : {"naive", "sparsex", "cacheblend", "epic"}) {
    const Result got = Run(prompt, {.policy = policy});
    EXPECT_TRUE(SameKv(got, want, 413)) << policy;
    EXPECT_TRUE(SameLogits(got, want)) << policy;
    EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kExact) << policy;
  }
}

// In its own context and place a copy is what would have been computed, so nothing depends on k.
TEST_P(SegmentsTest, ASegmentInItsOwnContextIsExact) {
  std::mt19937 random = SeededRandom("own context");
  const Tokens prompt = RandomTokens(random, 700);
  const Result want = Exact(prompt);
  const SegmentHit hit{SourceOf(want, prompt, 130, 610), 0, 130, 480};
  for (const int32_t k : {0, 7, 100}) {
    for (const int32_t dense_layers : {0, 1, 3}) {
      const Result got = Run(prompt,
                             {.policy = "sparsex",
                              .dense_layers = dense_layers,
                              .recompute_share = 0,
                              .recompute_min = k,
                              .recompute_max = k},
                             {hit});
      EXPECT_TRUE(SameKv(got, want, 700)) << k << ", " << dense_layers;
      EXPECT_TRUE(SameLogits(got, want)) << k << ", " << dense_layers;
    }
  }
  EXPECT_TRUE(SameLogits(Run(prompt, {.policy = "naive"}, {hit}), want));
  EXPECT_TRUE(SameLogits(Run(prompt, {.policy = "cacheblend"}, {hit}), want));
  EXPECT_TRUE(SameLogits(
      Run(prompt, {.policy = "sparsex", .recompute_min = 7, .recompute_max = 7, .probe_layers = 3}, {hit}), want));
}

// Composition limit: sparsex without a boundary, scores, edges and links is naive.
TEST_P(SegmentsTest, SparseXWithNothingToRecomputeIsNaive) {
  std::mt19937 random = SeededRandom("nothing");
  for (int round = 0; round < 20 && !HasFailure(); ++round) {
    Layout layout = RandomLayout(random, 500);
    if (layout.hits.empty()) continue;
    const Tokens end = RandomTokens(random, 3);  // so that there is no tail to fall back to
    layout.tokens.insert(layout.tokens.end(), end.begin(), end.end());
    std::shared_ptr<SequenceKv> prefix;
    if (layout.prefix) prefix = layout.prefix->Fork().value();
    const Result naive = Run(layout.tokens, {.policy = "naive"}, layout.hits, prefix);
    const Result sparsex = Run(layout.tokens,
                               {.policy = "sparsex",
                                .dense_layers = 0,
                                .recompute_share = 0,
                                .recompute_min = 0,
                                .recompute_max = 0,
                                .overflow_tokens = 0,
                                .link_tokens = 0},
                               layout.hits, layout.prefix);
    EXPECT_TRUE(SameLogits(naive, sparsex));
    EXPECT_TRUE(SameKv(naive, sparsex, static_cast<int32_t>(layout.tokens.size())));
    EXPECT_EQ(sparsex.recomputed, 0);
  }
}

// A prompt of few tokens needs no fewer computed afresh than a longer one.
TEST_P(SegmentsTest, SparseXRecomputesAMinimum) {
  if (IsSkipped()) return;
  std::mt19937 random = SeededRandom("a minimum");
  const Tokens context = RandomTokens(random, 600);
  Tokens prompt = RandomTokens(random, 10);
  prompt.insert(prompt.end(), context.begin(), context.end());
  prompt.resize(640, 7);
  const Result exact = Exact(context);
  const SegmentHit hit{SourceOf(exact, context, 10, 590), 0, 20, 580};
  const SegmentHit isolated{SourceOf(Exact({context.begin(), context.begin() + 580}), context, 0, 580), 0, 20, 580};
  ReuseOptions reuse{.policy = "sparsex", .overflow_tokens = 0, .link_tokens = 0};
  EXPECT_EQ(Run(prompt, reuse, {hit}).recomputed, 64);
  EXPECT_EQ(Run(prompt, reuse, {isolated}).recomputed, 256);
  reuse.recompute_max = 100;
  EXPECT_EQ(Run(prompt, reuse, {isolated}).recomputed, 100);
  reuse.recompute_min = 40;
  EXPECT_EQ(Run(prompt, reuse, {isolated}).recomputed, 40) << "5 % are 29";
  reuse.probe_layers = 0;
  EXPECT_EQ(Run(prompt, reuse, {isolated}).recomputed, 40) << "with dense layers, too";
  reuse = {.policy = "sparsex", .overflow_tokens = 0, .link_tokens = 0, .max_recompute_fraction = 0.25};
  EXPECT_EQ(Run(prompt, reuse, {isolated}).recomputed, 145) << "the request's contract";
}

INSTANTIATE_TEST_SUITE_P(Backends, SegmentsTest, testing::Values("cpu", "ranks", "cuda"),
                         [](const auto& info) { return info.param; });

// A model on two ranks chooses the rows that it chooses on one, and so recovers the same KV, up to the order of sums.
TEST(SegmentRanksTest, TwoRanksRecoverWhatOneDoes) {
  std::mt19937 random = SeededRandom("two ranks");
  const auto config = ParseModelConfig(Config(""), "test");
  ASSERT_TRUE(config.ok()) << config.status();
  const Tokens source = RandomTokens(random, 300), lead = RandomTokens(random, 50), end = RandomTokens(random, 30);
  Tokens prompt = lead;
  prompt.insert(prompt.end(), source.begin(), source.end());
  prompt.insert(prompt.end(), end.begin(), end.end());
  for (const char* policy : {"sparsex", "cacheblend", "naive"}) {
    std::vector<std::vector<float>> logits;
    for (const int ranks : {1, 2}) {
      Devices devices;
      for (int r = 0; r < ranks; ++r) devices.push_back(kernels::MakeCpuBackend({.gemm = kernels::GemmCompute::kF32}));
      const auto model = Model::LoadRandom({*config, 7}, devices, {.kv_dtype = kernels::DType::kF32}).value();
      const KvMemory memory = AllocateKvMemory(*model, PagesForTokens(*config, 2048)).value();
      PagePool pool(memory.pages, model->backends());
      const auto executor = ParallelExecutor::Create(model, memory.pages, {.num_threads = 2, .max_rows = 128}).value();
      const auto run = [&](const Tokens& tokens, const ReuseOptions& reuse, std::vector<SegmentHit> hits) {
        auto kv = std::make_shared<SequenceKv>(pool, KvShapeOf(*config));
        EXPECT_TRUE(kv->Reserve(static_cast<int64_t>(tokens.size())).ok());
        const auto method = MakeRecoveryPolicy(reuse, model->config()).value();
        PromptRun prompt_run(tokens, std::move(hits), *kv, *method);
        EXPECT_TRUE(prompt_run.Begin(*executor).ok());
        int32_t last = 0;
        while (!prompt_run.done()) {
          const PrefillSlice slice = prompt_run.Next(executor->max_rows());
          last = static_cast<int32_t>(slice.tokens.size()) - 1;
          EXPECT_TRUE(executor->Prefill({&slice, 1}, prompt_run.layers()).ok());
          EXPECT_TRUE(prompt_run.Finish(*executor).ok());
        }
        EXPECT_TRUE(executor->ComputeLogits({&last, 1}).ok());
        return kv;
      };
      const auto cached = run(source, {.policy = "exact"}, {});
      (void)run(prompt, {.policy = policy, .recompute_min = 20, .recompute_max = 20},
                {{std::make_shared<SegmentSource>(*cached, 0, source, SourceContext{.isolated = true}), 0, 50, 300}});
      const auto got = executor->Logits().value();
      logits.emplace_back(got.begin(), got.end());
    }
    double error = 0, norm = 0;
    for (size_t i = 0; i < logits[0].size(); ++i) {
      error += std::pow(double{logits[1][i]} - logits[0][i], 2);
      norm += double{logits[0][i]} * logits[0][i];
    }
    std::printf("%s: relative error %.2e\n", policy, std::sqrt(error / norm));
    EXPECT_LE(std::sqrt(error / norm), kernels::ToleranceFor(kernels::DType::kF32).relative_l2) << policy;
  }
}

// ---- which rows, without a model ------------------------------------------------------------------------------------

ModelConfig SmallConfig() { return *ParseModelConfig(Config(""), "test"); }

TEST(SparseXPolicyTest, RowsAreFreshTextTheSelectedAndTheEdges) {
  const ModelConfig config = SmallConfig();
  SparseXPolicy policy(config, {.dense_layers = 2, .overflow_tokens = 16, .tail_tokens = 64, .link_tokens = 2});
  const ReuseLayout layout{1000,
                           64,
                           {{100, 400}, {400, 600}, {650, 1000}},
                           {CopyContext::kSame, CopyContext::kIsolated, CopyContext::kSame}};
  const PrefillStage first = policy.FirstStage(layout);
  EXPECT_EQ(first.rows, (PositionRanges{{64, 1000}}));
  EXPECT_EQ(first.layers, (LayerRange{0, 2}));
  EXPECT_TRUE(first.keep_hidden);
  EXPECT_TRUE(first.keys_only_last);
  EXPECT_EQ(first.score.kind, ScoreKind::kNone);
  const PrefillStage probes = *policy.NextStage(layout, {});
  EXPECT_EQ(probes.score.kind, ScoreKind::kColumnMass);
  EXPECT_EQ(probes.score.candidates, layout.reused);
  EXPECT_EQ(probes.rows, (PositionRanges{{64, 100}, {600, 650}, {936, 1000}}));  // the tail probes, too
  EXPECT_EQ(probes.score.probes, probes.rows);
  EXPECT_EQ(probes.layers, (LayerRange{1, 2}));
  EXPECT_EQ(probes.final_before, 0);
  EXPECT_EQ(probes.score.k, 256) << "a segment is isolated";
  EXPECT_EQ(probes.score.pool_radius, 4);
  const Tokens selected = {205, 206, 500};
  const auto second = policy.NextStage(layout, selected);
  ASSERT_TRUE(second.has_value());
  // Fresh, 16 beside it, two links a segment, the selected, the tail.
  EXPECT_EQ(second->rows, (PositionRanges{{64, 116}, {205, 207}, {400, 402}, {500, 501}, {584, 666}, {936, 1000}}));
  EXPECT_EQ(second->layers, (LayerRange{1, 4}));
  EXPECT_FALSE(policy.NextStage(layout, {}).has_value());
}

TEST(SparseXPolicyTest, AProbeComputesFreshTextAloneBeforeItChooses) {
  const ModelConfig config = SmallConfig();
  SparseXProbePolicy policy(config, {.probe_layers = 3, .score_layers = 2, .link_tokens = 2});
  const ReuseLayout layout{1000,
                           64,
                           {{100, 400}, {400, 600}, {650, 1000}},
                           {CopyContext::kForeign, CopyContext::kIsolated, CopyContext::kSame}};
  const PrefillStage probe = policy.FirstStage(layout);
  EXPECT_EQ(probe.rows, (PositionRanges{{64, 100}, {600, 650}, {936, 1000}}));  // the tail probes, too
  EXPECT_EQ(probe.layers, (LayerRange{0, 3}));
  EXPECT_FALSE(probe.keep_hidden || probe.keys_only_last || probe.final_before > 0);
  EXPECT_EQ(probe.score.kind, ScoreKind::kColumnMass);
  EXPECT_EQ(probe.score.layer, 1);
  EXPECT_TRUE(probe.score.all_layers);
  EXPECT_EQ(probe.score.candidates, layout.reused) << "an option says how many rows: for all copies";
  EXPECT_EQ(probe.score.probes, probe.rows);
  EXPECT_EQ(probe.score.k, 576);
  EXPECT_EQ(policy.first_cached_layer(), 0) << "the probe reads the copies in its first layer";
  const auto chosen = policy.NextStage(layout, Tokens{205, 206, 500});
  ASSERT_TRUE(chosen.has_value());
  EXPECT_EQ(chosen->rows, (PositionRanges{{64, 116}, {205, 207}, {400, 402}, {500, 501}, {584, 666}, {936, 1000}}));
  EXPECT_EQ(chosen->layers, (LayerRange{0, 4}));
  EXPECT_EQ(chosen->final_before, INT32_MAX);
  EXPECT_FALSE(policy.NextStage(layout, {}).has_value());
  EXPECT_EQ(policy.probe_layers(), 3);

  SparseXProbePolicy same(config, {.probe_layers = 3});
  const ReuseLayout all{1000, 64, {{100, 400}}, {CopyContext::kSame}};
  EXPECT_EQ(same.FirstStage(all).layers, (LayerRange{0, 4})) << "nothing is recovered";
  EXPECT_FALSE(same.NextStage(all, {}).has_value());
  EXPECT_EQ(same.probe_layers(), 0);
}

TEST(SparseXPolicyTest, APromptWithoutCopiesIsComputed) {
  const ModelConfig config = SmallConfig();
  const ReuseLayout cold{1000, 64, {}, {}};
  for (const int32_t probe_layers : {-1, 2}) {
    SparseXProbePolicy policy(config, {.probe_layers = probe_layers});
    const PrefillStage stage = policy.FirstStage(cold);
    EXPECT_EQ(stage.rows, (PositionRanges{{64, 1000}}));
    EXPECT_EQ(stage.layers, (LayerRange{0, config.num_layers}));
    EXPECT_FALSE(policy.NextStage(cold, {}).has_value());
    EXPECT_EQ(policy.probe_layers(), 0);
  }
}

// The fresh text is computed twice with a probe, and rows take longer there: where it is long, dense layers cost less.
TEST(SparseXPolicyTest, WithoutOptionsTheWayThatCostsLessIsTaken) {
  ModelConfig config = SmallConfig();
  config.num_layers = 12;
  for (int32_t fresh = 100; fresh <= 9000; fresh += 100) {
    const ReuseLayout layout{10'000, 0, {{0, 10'000 - fresh}}, {CopyContext::kIsolated}};
    SparseXProbePolicy policy(config, {});
    const PrefillStage first = policy.FirstStage(layout);
    // A probe is the last 256 fresh tokens and what their pages and the copy's have besides. Behind it 576 tokens, 16
    // beside the fresh text and the segment's first 8; else 4 dense layers, and a twentieth.
    const int32_t reused = 10'000 - fresh, first_page = (reused + 63) / 64 * 64, last_page = (10'000 - 256) / 64 * 64;
    const int32_t probes = fresh - std::max(0, last_page - first_page);
    const int32_t probe = 12 * probes + 12 * (fresh + std::min(reused, 576) + 24);
    const int32_t dense = 4 * 10'000 + 8 * (fresh + std::max(256, reused / 20) + 24);
    if (1.2 * probe < dense) {
      EXPECT_EQ(first.layers, (LayerRange{0, 12})) << fresh;
      EXPECT_EQ(CountOf(first.rows), probes) << fresh;
      EXPECT_EQ(first.score.layer, 6) << fresh;
      EXPECT_EQ(first.score.k, std::min(reused, 576)) << fresh;
      EXPECT_EQ(policy.first_cached_layer(), 0) << fresh;
      EXPECT_EQ(policy.NextStage(layout, Tokens{5})->layers, (LayerRange{0, 12})) << fresh;
      EXPECT_EQ(policy.probe_layers(), 12) << fresh;
    } else {
      EXPECT_EQ(first.layers, (LayerRange{0, 4})) << fresh;
      EXPECT_EQ(first.rows, (PositionRanges{{0, 10'000}})) << fresh;
      EXPECT_EQ(policy.first_cached_layer(), 4) << fresh;
      EXPECT_EQ(policy.NextStage(layout, {})->score.k, std::max(256, reused / 20)) << fresh;
      EXPECT_EQ(policy.NextStage(layout, Tokens{5})->layers, (LayerRange{3, 12})) << fresh;
      EXPECT_EQ(policy.probe_layers(), 0) << fresh;
    }
  }
}

// The demo's prompt has 4,832 tokens, 16 % of them fresh: a probe answers a little earlier there than dense layers do
// (docs/results/2026-11-27-fewer-rows.md). With a third fresh it would compute fewer rows, and take longer.
TEST(SparseXPolicyTest, AProbeCostsMoreThanItsRows) {
  ModelConfig config = SmallConfig();
  config.num_layers = 12;
  const auto probe_layers = [&](double fresh_share) {
    constexpr int32_t kTokens = 4832, kSegments = 20;
    const int32_t segment = static_cast<int32_t>(kTokens * (1 - fresh_share)) / kSegments;
    ReuseLayout layout{.num_tokens = kTokens};
    for (int32_t i = 0; i < kSegments; ++i) {
      layout.reused.push_back({i * segment, (i + 1) * segment});
      layout.contexts.push_back(CopyContext::kIsolated);
    }
    SparseXProbePolicy policy(config, {});
    (void)policy.FirstStage(layout);
    return policy.probe_layers();
  };
  EXPECT_EQ(probe_layers(0.10), 12);
  EXPECT_EQ(probe_layers(0.16), 12);
  EXPECT_EQ(probe_layers(0.35), 0);
}

TEST(SparseXPolicyTest, CopiesInOtherContextsGetMoreDenseLayers) {
  ModelConfig config = SmallConfig();
  config.num_layers = 12;
  const auto dense_layers = [&](CopyContext context, int32_t option) {
    // An option that says how many rows are recomputed: for all copies.
    SparseXPolicy policy(config, {.dense_layers = option, .recompute_share = 0.05});
    const PrefillStage first = policy.FirstStage({500, 0, {{10, 200}, {200, 480}}, {CopyContext::kSame, context}});
    EXPECT_EQ(policy.first_cached_layer(), first.layers.end);
    return first.layers.end;
  };
  EXPECT_EQ(dense_layers(CopyContext::kSame, -1), 2);
  EXPECT_EQ(dense_layers(CopyContext::kIsolated, -1), 4);
  EXPECT_EQ(dense_layers(CopyContext::kForeign, -1), 4);
  EXPECT_EQ(dense_layers(CopyContext::kForeign, 3), 3) << "what the request says counts";
}

TEST(SparseXPolicyTest, CopiesInTheirContextHaveNoRows) {
  ModelConfig config = SmallConfig();
  config.num_layers = 12;
  const std::vector<PositionRange> copies{{100, 400}, {400, 1000}, {1020, 1500}};
  SparseXPolicy same(config, {});
  const ReuseLayout all{1510, 64, copies, {3, CopyContext::kSame}};
  const PrefillStage only = same.FirstStage(all);
  EXPECT_EQ(only.rows, (PositionRanges{{64, 100}, {1000, 1020}, {1500, 1510}}));
  EXPECT_EQ(only.layers, (LayerRange{0, 12}));
  EXPECT_EQ(same.first_cached_layer(), 0);
  EXPECT_FALSE(same.NextStage(all, {}).has_value());

  SparseXPolicy mixed(config, {});
  const ReuseLayout one{1500, 64, copies, {CopyContext::kSame, CopyContext::kForeign, CopyContext::kSame}};
  const PrefillStage dense = mixed.FirstStage(one);
  EXPECT_EQ(mixed.first_cached_layer(), 0) << "copies without rows are read in all layers";
  // The end is a copy: its tail stands for the question.
  EXPECT_EQ(dense.rows, (PositionRanges{{64, 100}, {400, 1020}, {1436, 1500}}));
  EXPECT_EQ(dense.layers, (LayerRange{0, 4}));
  const PrefillStage probes = *mixed.NextStage(one, {});
  EXPECT_EQ(probes.score.candidates, (PositionRanges{{400, 1000}}));
  EXPECT_EQ(probes.rows, (PositionRanges{{64, 100}, {1000, 1020}, {1436, 1500}}));
  EXPECT_EQ(probes.score.k, 256);
  const Tokens selected = {500};
  // Links and the side next to fresh text of the second copy alone.
  EXPECT_EQ(mixed.NextStage(one, selected)->rows,
            (PositionRanges{{64, 100}, {400, 408}, {500, 501}, {984, 1020}, {1436, 1500}}));
}

// A larger k only adds rows.
TEST(SparseXPolicyTest, MoreSelectedTokensOnlyAddRows) {
  const ModelConfig config = SmallConfig();
  const ReuseLayout layout{500, 0, {{10, 480}}, {CopyContext::kForeign}};
  Tokens selected;
  PositionRanges before;
  for (int32_t p = 20; p < 470; p += 9) {
    selected.push_back(p);
    SparseXPolicy policy(config, {});
    (void)policy.FirstStage(layout);
    (void)policy.NextStage(layout, {});
    const PositionRanges rows = policy.NextStage(layout, selected)->rows;
    EXPECT_EQ(CountOf(IntersectionOf(before, rows)), CountOf(before));
    before = rows;
  }
}

TEST(ReuseOptionsTest, BadValuesAreNamed) {
  const ModelConfig config = SmallConfig();
  const auto error = [&](const ReuseOptions& options) {
    return std::string(MakeRecoveryPolicy(options, config).status().message());
  };
  EXPECT_THAT(error({.policy = "sparsex", .dense_layers = 5}), testing::HasSubstr("dense_layers is 5"));
  EXPECT_THAT(error({.policy = "sparsex", .score_pool = 65}), testing::HasSubstr("score_pool is 65"));
  EXPECT_THAT(error({.policy = "sparsex", .probe_layers = 5}), testing::HasSubstr("probe_layers is 5"));
  EXPECT_THAT(error({.policy = "sparsex", .probe_layers = 3, .score_layers = 4}),
              testing::HasSubstr("score_layers is 4"));
  EXPECT_THAT(error({.policy = "sparsex", .score_layers = 5}), testing::HasSubstr("score_layers is 5"));
  EXPECT_THAT(error({.policy = "sparsex", .dense_layers = 2, .score_layers = 2}),
              testing::HasSubstr("score_layers is 2"));
  EXPECT_THAT(error({.policy = "sparsex", .dense_layers = 2, .probe_layers = 3}),
              testing::AllOf(testing::HasSubstr("probe_layers is 3"), testing::HasSubstr("dense_layers is 2")));
  EXPECT_THAT(error({.policy = "sparsex", .recompute_share = 1.5}), testing::HasSubstr("recompute_share is 1.5"));
  EXPECT_THAT(error({.policy = "sparsex", .recompute_min = 9, .recompute_max = 8}),
              testing::HasSubstr("recompute_max"));
  EXPECT_THAT(error({.policy = "magic"}), testing::AllOf(testing::HasSubstr("magic"), testing::HasSubstr("sparsex")));
}

TEST(RangesTest, SetOperations) {
  EXPECT_EQ(MergeRanges({{5, 9}, {1, 3}, {3, 4}, {7, 12}, {20, 20}}), (PositionRanges{{1, 4}, {5, 12}}));
  const PositionRanges a{{0, 10}, {20, 30}}, b{{5, 25}, {28, 40}};
  EXPECT_EQ(UnionOf(a, b), (PositionRanges{{0, 40}}));
  EXPECT_EQ(IntersectionOf(a, b), (PositionRanges{{5, 10}, {20, 25}, {28, 30}}));
  EXPECT_EQ(ComplementOf(a, {3, 28}), (PositionRanges{{10, 20}}));
  EXPECT_EQ(ComplementOf({}, {3, 28}), (PositionRanges{{3, 28}}));
  const Tokens positions{1, 2, 3, 7, 9, 10};
  EXPECT_EQ(RangesOf(positions), (PositionRanges{{1, 4}, {7, 8}, {9, 11}}));
  EXPECT_TRUE(ContainsPosition(a, 9));
  EXPECT_FALSE(ContainsPosition(a, 10));
  EXPECT_EQ(NumberedWithin(a, b), (PositionRanges{{0, 5}, {15, 22}}));  // b has 5 to 24 as 0 to 19, then 28 as 20
  EXPECT_EQ(NumberedWithin(b, b), (PositionRanges{{0, 32}}));
  EXPECT_TRUE(NumberedWithin({}, b).empty());
}

// What is left of a prompt: a prefix of 10, copies at 20, 40 and 60, of which the second is dropped.
TEST(ReuseLayoutTest, OnlyWhatIsLeft) {
  const ReuseLayout all{
      80, 10, {{20, 40}, {40, 55}, {60, 75}}, {CopyContext::kIsolated, CopyContext::kSame, CopyContext::kForeign}};
  const ReuseLayout left = all.Only(PositionRanges{{0, 24}, {30, 33}, {55, 61}, {74, 80}});
  EXPECT_EQ(left.num_tokens, 39);
  EXPECT_EQ(left.num_prefix, 10);
  EXPECT_EQ(left.reused, (PositionRanges{{20, 27}, {32, 34}}));
  EXPECT_EQ(left.contexts, (std::vector<CopyContext>{CopyContext::kIsolated, CopyContext::kForeign}));
  EXPECT_EQ(left.fresh(), (PositionRanges{{10, 20}, {27, 32}, {34, 39}}));
}

}  // namespace
}  // namespace spl::engine
