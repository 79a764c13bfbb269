// Prefill with head classes: the guarantees of docs/methods/redknot.md and docs/methods/splice.md on whole models, on
// the CPU and, where there is one, a GPU. Models are small and random: what counts is that two ways to a result agree.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/recovery/edge_restore.h"
#include "services/engine/recovery/ffn_rows.h"
#include "services/engine/runtime/prompt_run.h"
#include "tests/services/engine/prompt_runs.h"
#include "tests/support/engine_devices.h"
#include "tests/support/head_class_maps.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using Tokens = std::vector<int32_t>;
using test::RandomTokens;
using test::RelativeL2;
using test::SeededRandom;

constexpr int32_t kLayers = 6, kHeads = 2;
constexpr const char* kConfig = R"({"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":96,
    "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"vocab_size":512,
    "max_position_embeddings":4096,"rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1,
    "torch_dtype":"float32"})";

// Everything that makes a method with head classes one: off.
ReuseOptions Whole(const char* policy) {
  return {.policy = policy, .ffn_mass = 1, .ffn_dense_layers = 0, .restore_share = 0};
}

struct Result {
  std::shared_ptr<SequenceKv> kv;
  std::vector<float> logits;
  std::vector<std::byte> pages;
  std::vector<int32_t> restored;
  double ffn_share = 1;
};

bool SameBits(const Result& a, const Result& b) {
  return a.logits.size() == b.logits.size() && a.pages == b.pages &&
         std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)) == 0;
}

HeadClassMap RandomMap(std::mt19937& random, int32_t window_max) {
  std::vector<HeadClass> classes(kLayers * kHeads);
  for (HeadClass& head : classes) {
    if (random() % 3 == 0) continue;
    head = {.is_global = false,
            .window = 1 + static_cast<int32_t>(random() % static_cast<unsigned>(window_max)),
            .sinks = static_cast<int32_t>(random() % 70)};
  }
  return HeadClassMap(kLayers, kHeads, std::move(classes));
}

HeadClassMap AllLocal(int32_t window, int32_t sinks) {
  return HeadClassMap(kLayers, kHeads,
                      std::vector<HeadClass>(kLayers * kHeads, {.is_global = false, .window = window, .sinks = sinks}));
}

class HeadClassPoliciesTest : public testing::TestWithParam<std::string> {
 protected:
  static int num_ranks() { return GetParam() == "ranks" ? 2 : 1; }

  void SetUp() override {
    const auto devices = test::DevicesOf(GetParam(), num_ranks());
    if (!devices.ok()) GTEST_SKIP() << devices.status();
    auto config = ParseModelConfig(kConfig, "test");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = Model::LoadRandom({*config, 7}, *devices, {.kv_dtype = test::KvType()});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    memory_.emplace(AllocateKvMemory(*model_, PagesForTokens(model_->config(), 16 * 1024)).value());
    Poison(*model_, *memory_);  // what is read beyond what was written shows
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    executor_ = ParallelExecutor::Create(model_, memory_->pages, {.num_threads = 2, .max_rows = kMaxRows}).value();
  }
  static constexpr int32_t kMaxRows = 640;

  Result Run(const Tokens& tokens, const ReuseOptions& reuse, const HeadClassMap* map,
             const std::vector<SegmentHit>& hits = {}, int32_t room = kMaxRows) {
    Result result;
    result.kv = std::make_shared<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(result.kv->Reserve(static_cast<int64_t>(tokens.size())).ok());
    auto policy = MakeRecoveryPolicy(reuse, model_->config(), map);
    EXPECT_TRUE(policy.ok()) << policy.status();
    PromptRun run(tokens, hits, *result.kv, **policy);
    result.logits = RunToEnd(run, *executor_, room);
    if (result.logits.empty()) return result;
    result.restored = run.restored_heads();
    result.ffn_share = run.ffn_share();
    // Of the last pages only what was written.
    const std::vector<int32_t> pages = result.kv->AllPages();
    result.pages.resize(pages.size() * model_->page_bytes());
    EXPECT_TRUE(pool_->ReadPages(pages, result.pages.data()).ok());
    const size_t per_stream = static_cast<size_t>(result.kv->num_pages_per_stream()), half = model_->page_bytes() / 2;
    const size_t written = (tokens.size() - 1) % kernels::kPageTokens + 1;
    for (size_t last = per_stream - 1; last < pages.size(); last += per_stream) {
      for (size_t begin = last * model_->page_bytes(); begin < (last + 1) * model_->page_bytes(); begin += half)
        test::ClearRowsFrom(*model_, written, result.pages.data() + begin);
    }
    return result;
  }

  // One text computed exactly, and a prompt with a part of it behind fresh text and in front of a question.
  struct Prompt {
    Tokens tokens;
    std::vector<SegmentHit> hits;
    Result source;
  };
  Prompt PromptWithSegment(std::mt19937& random, int32_t question) {
    Prompt prompt;
    const Tokens text = RandomTokens(random, 320);
    prompt.source = Run(text, {.policy = "exact"}, nullptr);
    prompt.tokens = RandomTokens(random, 70);
    prompt.hits.push_back(
        {std::make_shared<SegmentSource>(*prompt.source.kv, 20, std::span(text).subspan(20, 290), SourceContext{}), 0,
         70, 290});
    prompt.tokens.insert(prompt.tokens.end(), text.begin() + 20, text.begin() + 310);
    const Tokens end = RandomTokens(random, question);
    prompt.tokens.insert(prompt.tokens.end(), end.begin(), end.end());
    return prompt;
  }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
};

// 2.2: all heads global and all feed-forward is a full prefill; so is a window as wide as the prompt.
TEST_P(HeadClassPoliciesTest, WithNothingLeftOutRedknotIsExact) {
  std::mt19937 random = SeededRandom("redknot is exact");
  const HeadClassMap global = test::AllGlobal(kLayers, kHeads), wide = AllLocal(500, 3);
  for (const int32_t length : {1, 63, 64, 500}) {
    const Tokens tokens = RandomTokens(random, length);
    const Result want = Run(tokens, {.policy = "exact"}, nullptr);
    EXPECT_TRUE(SameBits(Run(tokens, Whole("redknot"), &global), want)) << length;
    EXPECT_TRUE(SameBits(Run(tokens, Whole("redknot"), &global, {}, 128), want)) << length << " in slices";
    // Another order of sums where the kernel skips nothing either: equal in value, not always in bits.
    EXPECT_LT(RelativeL2(Run(tokens, Whole("redknot"), &wide).logits, want.logits), test::OrderOfSums()) << length;
    ReuseOptions dense = Whole("redknot");
    dense.ffn_mass = 0.3;
    dense.ffn_dense_layers = kLayers;  // 2.4: dense_until = L
    EXPECT_TRUE(SameBits(Run(tokens, dense, &global), want)) << length;
  }
}

// A prefill with head classes makes approximate KV, from its first own token on (P1).
TEST_P(HeadClassPoliciesTest, WhatTheyComputeIsApproximate) {
  std::mt19937 random = SeededRandom("approximate");
  const HeadClassMap map = RandomMap(random, 100);
  for (const char* policy : {"redknot", "splice+"}) {
    const Result got = Run(RandomTokens(random, 200), {.policy = policy}, &map);
    EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kApprox) << policy;
    EXPECT_EQ(got.kv->exact_tokens(), 0) << policy;
  }
  const Prompt prompt = PromptWithSegment(random, 20);
  const Result recovered = Run(prompt.tokens, {.policy = "splice"}, &map, prompt.hits);
  EXPECT_EQ(recovered.kv->provenance(), chunk::Provenance::kApprox);
  EXPECT_EQ(recovered.kv->exact_tokens(), 0);
}

// Whatever the map leaves out: a prompt without copies is where copies come from.
TEST_P(HeadClassPoliciesTest, SpliceWithoutACopyIsExact) {
  std::mt19937 random = SeededRandom("cold splice");
  for (const int32_t length : {1, 64, 500}) {
    const Tokens tokens = RandomTokens(random, length);
    const HeadClassMap map = RandomMap(random, 10);
    const Result got = Run(tokens, {.policy = "splice", .ffn_mass = 0.3}, &map, {}, 128);
    EXPECT_TRUE(SameBits(got, Run(tokens, {.policy = "exact"}, nullptr, {}, 128))) << length;
    EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kExact);
    EXPECT_TRUE(got.restored.empty());
  }
}

// 6.2: all heads global and all feed-forward turns splice into sparsex; k of everything gives exact.
TEST_P(HeadClassPoliciesTest, LimitsOfSpliceAreSparsexAndExact) {
  std::mt19937 random = SeededRandom("limits of splice");
  const HeadClassMap global = test::AllGlobal(kLayers, kHeads);
  for (int round = 0; round < 12; ++round) {
    const Prompt prompt = PromptWithSegment(random, 30);
    ReuseOptions splice = Whole("splice");
    splice.recompute_min = 20;
    if (round % 3 == 0) splice.dense_layers = static_cast<int32_t>(random() % 4);
    if (round % 3 == 1) splice.probe_layers = 1 + static_cast<int32_t>(random() % kLayers);
    ReuseOptions sparsex = splice;
    sparsex.policy = "sparsex";
    EXPECT_TRUE(
        SameBits(Run(prompt.tokens, splice, &global, prompt.hits), Run(prompt.tokens, sparsex, nullptr, prompt.hits)))
        << "dense layers " << splice.dense_layers << ", probe layers " << splice.probe_layers;
    splice.recompute_min = 1 << 20;
    splice.recompute_max = 1 << 20;
    const Result all = Run(prompt.tokens, splice, &global, prompt.hits);
    const Result exact = Run(prompt.tokens, {.policy = "exact"}, nullptr);
    EXPECT_EQ(std::memcmp(all.logits.data(), exact.logits.data(), exact.logits.size() * sizeof(float)), 0);
  }
}

// 6.2: splice+ with every row is redknot above the dense layers.
TEST_P(HeadClassPoliciesTest, SplicePlusWithEveryRowIsRedknot) {
  std::mt19937 random = SeededRandom("splice+ is redknot");
  for (int round = 0; round < 6; ++round) {
    const HeadClassMap map = RandomMap(random, 120);
    const Prompt prompt = PromptWithSegment(random, 30);
    ReuseOptions plus{.policy = "splice+",
                      .dense_layers = 1 + static_cast<int32_t>(random() % 3),
                      .ffn_mass = 0.4,
                      .ffn_recent = 40,
                      .rec_frac = 1,
                      .restore_share = 0};
    if (round % 2 == 1) {  // behind a probe there is no layer in which all rows see everything
      plus.dense_layers = -1;
      plus.probe_layers = 1 + static_cast<int32_t>(random() % kLayers);
    }
    ReuseOptions redknot = plus;
    redknot.policy = "redknot";
    const Result a = Run(prompt.tokens, plus, &map, prompt.hits), b = Run(prompt.tokens, redknot, &map);
    EXPECT_LT(b.ffn_share, 1);
    EXPECT_EQ(std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)), 0) << round;
    // Without rec_frac, and with nothing left out, it computes what splice does.
    plus.rec_frac = -1;
    ReuseOptions splice = plus;
    splice.policy = "splice";
    const HeadClassMap global = test::AllGlobal(kLayers, kHeads);
    plus.ffn_mass = splice.ffn_mass = 1;
    EXPECT_TRUE(
        SameBits(Run(prompt.tokens, plus, &global, prompt.hits), Run(prompt.tokens, splice, &global, prompt.hits)));
  }
}

// Layer plans of the stages of splice: the rows that choose see everything, and run through feed-forward, as sparsex's
// do. So does what the chosen rows in front of the question see. The question sees by class.
TEST_P(HeadClassPoliciesTest, TheQuestionOfSpliceSeesByClass) {
  const HeadClassMap narrow = AllLocal(9, 2);
  const ModelConfig& config = model_->config();
  const auto sees = [&](RecoveryPolicy& policy) {
    int32_t windows = 0, dense = 0;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const LayerPlan plan = policy.PlanLayer(layer);
      windows += std::any_of(plan.visibility.begin(), plan.visibility.end(),
                             [](const auto& head) { return head.rule != kernels::VisibilityRule::kFull; });
      dense += plan.ffn.dense();
    }
    return std::pair(windows, dense);
  };
  constexpr int32_t kWindows = kLayers - HeadClassMap::kDenseDecodeLayers;
  const ReuseOptions options{
      .policy = "splice", .probe_layers = kLayers, .link_tokens = 0, .ffn_mass = 0.3, .ffn_dense_layers = 0};
  const auto policy = MakeRecoveryPolicy(options, config, &narrow).value();
  const ReuseLayout layout{400, 0, {{50, 350}}, {CopyContext::kIsolated}};
  EXPECT_EQ(policy->FirstStage(layout).layers, (LayerRange{0, kLayers}));
  EXPECT_EQ(sees(*policy), (std::pair(0, kLayers)));
  const auto front = policy->NextStage(layout, Tokens{100, 101});
  ASSERT_TRUE(front.has_value());
  EXPECT_EQ(front->rows, (PositionRanges{{0, 66}, {100, 102}, {334, 350}}));
  EXPECT_EQ(front->final_before, 350) << "the question's pages are not computed yet";
  EXPECT_EQ(sees(*policy), (std::pair(0, 0)));
  const auto question = policy->NextStage(layout, {});
  ASSERT_TRUE(question.has_value());
  EXPECT_EQ(question->rows, (PositionRanges{{350, 400}}));
  EXPECT_EQ(question->layers, (LayerRange{0, kLayers}));
  EXPECT_EQ(question->final_before, INT32_MAX);
  EXPECT_EQ(sees(*policy), (std::pair(kWindows, 0)));
  EXPECT_FALSE(policy->NextStage(layout, {}).has_value());
  EXPECT_EQ(policy->probe_layers(), kLayers);

  // A prompt that ends with a copy: its last tokens take the question's place.
  const ReuseLayout ends{400, 0, {{50, 400}}, {CopyContext::kSame}};
  const auto same = MakeRecoveryPolicy({.policy = "splice"}, config, &narrow).value();
  EXPECT_EQ(same->FirstStage(ends).rows, (PositionRanges{{0, 50}}));
  EXPECT_EQ(sees(*same).first, 0);
  EXPECT_EQ(same->NextStage(ends, {})->rows, (PositionRanges{{399, 400}}));
  EXPECT_EQ(sees(*same).first, kWindows);
  EXPECT_FALSE(same->NextStage(ends, {}).has_value());
}

// With every row computed, what stands in front of the question is the exact prefill's bit by bit, however narrow the
// map.
TEST_P(HeadClassPoliciesTest, DocumentsOfSpliceSeeEverything) {
  std::mt19937 random = SeededRandom("documents of splice");
  const HeadClassMap narrow = AllLocal(8, 2);
  for (const int32_t dense_layers : {-1, 0, 2}) {
    const Prompt prompt = PromptWithSegment(random, 90);
    ReuseOptions all = Whole("splice");
    all.recompute_min = all.recompute_max = 1 << 20;
    all.dense_layers = dense_layers;
    all.probe_layers = dense_layers < 0 ? kLayers : -1;
    const Result got = Run(prompt.tokens, all, &narrow, prompt.hits, 128);
    const Result exact = Run(prompt.tokens, {.policy = "exact"}, nullptr);
    const size_t page = model_->page_bytes(), stream = static_cast<size_t>(exact.kv->num_pages_per_stream()) * page;
    const size_t documents = (prompt.tokens.size() - 90) / kernels::kPageTokens * page;
    ASSERT_GT(documents, 4 * page);
    for (size_t begin = 0; begin < exact.pages.size(); begin += stream)
      ASSERT_EQ(std::memcmp(got.pages.data() + begin, exact.pages.data() + begin, documents), 0)
          << "stream " << begin / stream << ", dense layers " << dense_layers;
    EXPECT_FALSE(SameBits(got, exact)) << "the question saw by class";
  }
}

// A map of windows whose heads all see everything in prefill: the methods that compute all rows are exact.
TEST_P(HeadClassPoliciesTest, HeadsThatAreWholeInPrefillSeeEverything) {
  std::mt19937 random = SeededRandom("whole in prefill");
  HeadClassMap map = AllLocal(8, 2);
  const Tokens tokens = RandomTokens(random, 300);
  const Result exact = Run(tokens, {.policy = "exact"}, nullptr);
  EXPECT_FALSE(SameBits(Run(tokens, Whole("redknot"), &map), exact));
  EXPECT_FALSE(SameBits(Run(tokens, Whole("splice+"), &map), exact));
  map.set_whole_in_prefill(std::vector<bool>(kLayers * kHeads, true));
  EXPECT_TRUE(SameBits(Run(tokens, Whole("redknot"), &map), exact));
  EXPECT_TRUE(SameBits(Run(tokens, Whole("splice+"), &map), exact));
}

// 2.4: what is not chosen adds nothing, and less mass chooses fewer rows; the end of the prompt always runs.
TEST_P(HeadClassPoliciesTest, SparseFeedForwardRunsFewerRows) {
  std::mt19937 random = SeededRandom("fewer rows");
  const HeadClassMap global = test::AllGlobal(kLayers, kHeads);
  const Tokens tokens = RandomTokens(random, 400);
  double before = 1.1;
  for (const double mass : {1.0, 0.8, 0.5, 0.2, 0.0}) {
    ReuseOptions redknot = Whole("redknot");
    redknot.ffn_mass = mass;
    redknot.ffn_recent = 16;
    const Result got = Run(tokens, redknot, &global);
    EXPECT_LT(got.ffn_share, before) << mass;
    EXPECT_GE(got.ffn_share, 16.0 / 400) << mass;
    for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x));
    before = got.ffn_share;
  }
}

// What a request does not say about feed-forward, the map says.
TEST_P(HeadClassPoliciesTest, TheMapHasTheSchedule) {
  std::mt19937 random = SeededRandom("schedule");
  HeadClassMap map = test::AllGlobal(kLayers, kHeads);
  const Tokens tokens = RandomTokens(random, 300);
  const ReuseOptions plain{.policy = "redknot"};
  ReuseOptions spelled = plain;
  spelled.ffn_mass = 0.3;
  spelled.ffn_dense_layers = 2;
  spelled.ffn_recent = 20;
  spelled.ffn_deep_layer = 4;
  spelled.ffn_deep_mass = 0.1;
  const Result want = Run(tokens, spelled, &map);
  EXPECT_LT(want.ffn_share, Run(tokens, plain, &map).ffn_share);
  map.set_ffn({.mass = 0.3, .dense_layers = 2, .recent = 20, .deep_layer = 4, .deep_mass = 0.1});
  const auto written = HeadClassMap::Parse(map.ToJson(), "written");
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_TRUE(SameBits(Run(tokens, plain, &*written), want));
  map.set_ffn({.mass = 1});
  EXPECT_EQ(Run(tokens, plain, &map).ffn_share, 1);
  EXPECT_TRUE(SameBits(Run(tokens, spelled, &map), want));
}

// 2.6: every head restored is the run with all heads global; a threshold of 1 restores none.
TEST_P(HeadClassPoliciesTest, RestoringEveryHeadIsTheRunWithAllGlobal) {
  std::mt19937 random = SeededRandom("restore");
  const HeadClassMap local = AllLocal(8, 2), global = test::AllGlobal(kLayers, kHeads);
  const Tokens tokens = RandomTokens(random, 300);
  ReuseOptions all{.policy = "redknot", .ffn_mass = 0.6, .ffn_recent = 10, .restore_share = 1, .restore_threshold = -1};
  const Result got = Run(tokens, all, &local);
  EXPECT_EQ(got.restored.size(), static_cast<size_t>((kLayers - 2) * kHeads));
  EXPECT_TRUE(SameBits(got, Run(tokens, all, &global)));
  all.restore_threshold = 1;
  const Result none = Run(tokens, all, &local);
  EXPECT_TRUE(none.restored.empty());
  all.restore_share = 0;
  EXPECT_TRUE(SameBits(none, Run(tokens, all, &local)));
  // The cap: a tenth of eight heads is none, a half is four.
  all.restore_threshold = -1;
  all.restore_share = 0.5;
  EXPECT_EQ(Run(tokens, all, &local).restored.size(), 4u);
  all.restore_share = 0.1;
  EXPECT_TRUE(Run(tokens, all, &local).restored.empty());
}

TEST_P(HeadClassPoliciesTest, EveryPolicyFinishesWithRandomMaps) {
  std::mt19937 random = SeededRandom("random maps");
  for (int round = 0; round < 30 && !HasFailure(); ++round) {
    const HeadClassMap map = RandomMap(random, 200);
    const Prompt prompt = PromptWithSegment(random, 1 + static_cast<int32_t>(random() % 50));
    for (const char* policy : {"redknot", "splice", "splice+"}) {
      const ReuseOptions reuse{.policy = policy,
                               .recompute_min = static_cast<int32_t>(random() % 40),
                               .ffn_mass = 0.1 * (random() % 11),
                               .ffn_recent = static_cast<int32_t>(random() % 64),
                               .rec_frac = policy == std::string("splice+") ? 0.1 * (random() % 11) : -1,
                               .restore_share = 0.1 * (random() % 11),
                               .restore_threshold = 0.05 * (random() % 10)};
      const bool uses = policy != std::string("redknot");
      const Result got = Run(prompt.tokens, reuse, &map, uses ? prompt.hits : std::vector<SegmentHit>{},
                             64 + static_cast<int32_t>(random() % 500));
      EXPECT_EQ(got.kv->num_tokens(), static_cast<int64_t>(prompt.tokens.size()));
      for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x)) << policy << ", round " << round;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, HeadClassPoliciesTest, testing::Values("cpu", "ref", "ranks", "cuda"),
                         [](const auto& param) { return param.param; });

TEST(HeadClassPolicies, NeedAMapAndSensibleNumbers) {
  const ModelConfig config = ParseModelConfig(kConfig, "test").value();
  const HeadClassMap map = test::AllGlobal(kLayers, kHeads);
  for (const char* policy : {"redknot", "splice", "splice+"}) {
    const absl::Status none = MakeRecoveryPolicy({.policy = policy}, config).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition) << none;
    EXPECT_THAT(std::string(none.message()), testing::HasSubstr("splice profile"));
    EXPECT_TRUE(UsesHeadClasses({.policy = policy}));
    EXPECT_FALSE(UsesHeadClasses({.policy = policy, .full_kv = true}));
  }
  const auto error = [&](const ReuseOptions& options) {
    return std::string(MakeRecoveryPolicy(options, config, &map).status().message());
  };
  EXPECT_THAT(error({.policy = "splice", .ffn_mass = 1.5}), testing::HasSubstr("ffn_mass is 1.5"));
  EXPECT_THAT(std::string(HeadClassMap::Parse(
                              R"({"format":"splice-head-classes-1","num_layers":1,"num_kv_heads":1,"class":[["global"]],
                                  "window":[[0]],"sinks":[[0]],"ffn":{"mass":1.5}})",
                              "file")
                              .status()
                              .message()),
              testing::HasSubstr("ffn.mass: must lie in (0, 1], got 1.5"));
  EXPECT_THAT(error({.policy = "splice", .ffn_dense_layers = 7}), testing::HasSubstr("ffn_dense_layers is 7"));
  EXPECT_THAT(error({.policy = "splice+", .rec_frac = -2}), testing::HasSubstr("rec_frac is -2"));
  EXPECT_THAT(error({.policy = "redknot", .restore_share = 2}), testing::HasSubstr("restore_share is 2"));
}

// A map makes splice the default only with a measured quality inside of the contract.
TEST(HeadClassPolicies, AutoIsSpliceOnceItsQualityIsKnown) {
  HeadClassMap map = test::AllGlobal(kLayers, kHeads);
  EXPECT_EQ(DefaultReusePolicy(nullptr, 100), "sparsex");
  EXPECT_EQ(DefaultReusePolicy(&map, 100), "sparsex");
  map.set_quality({"a set", 100, 98, 96});
  EXPECT_EQ(DefaultReusePolicy(&map, 100), "splice");
  map.set_quality({"a set", 100, 98, 95});
  EXPECT_EQ(DefaultReusePolicy(&map, 100), "sparsex");
  map.set_quality({"a set", 100, 95, 98});
  const auto read = HeadClassMap::Parse(map.ToJson(), "written");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->quality().splice, 98);
  EXPECT_EQ(read->quality().data, "a set");
  EXPECT_EQ(read->quality().longest, 0);
  EXPECT_EQ(DefaultReusePolicy(&*read, 1'000'000), "splice") << "it does not say how long the prompts were";
}

TEST(HeadClassPolicies, AutoIsSpliceForPromptsAsLongAsThoseOfItsQuality) {
  HeadClassMap map = test::AllGlobal(kLayers, kHeads);
  map.set_quality({.data = "a set", .samples = 100, .exact = 98, .splice = 98, .longest = 8192});
  const auto read = HeadClassMap::Parse(map.ToJson(), "written");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(DefaultReusePolicy(&*read, 8192), "splice");
  EXPECT_EQ(DefaultReusePolicy(&*read, 8193), "sparsex");
}

TEST(FfnRows, KeepTheSmallestSetThatReachesTheMass) {
  std::mt19937 random = SeededRandom("rows by mass");
  for (int round = 0; round < 200; ++round) {
    std::vector<float> importance(1 + random() % 300);
    for (float& value : importance) value = random() % 4 == 0 ? 0.0f : static_cast<float>(random() % 1000) / 7;
    const double mass = 0.001 * (random() % 1000);
    const std::vector<int32_t> rows = RowsByMass(importance, mass);
    std::vector<bool> chosen(importance.size());
    double total = 0, kept = 0, least = INFINITY, best_left_out = -1;
    for (const int32_t row : rows) chosen[static_cast<size_t>(row)] = true;
    for (size_t i = 0; i < importance.size(); ++i) {
      total += importance[i];
      if (chosen[i]) {
        kept += importance[i];
        least = std::min<double>(least, importance[i]);
      } else {
        best_left_out = std::max<double>(best_left_out, importance[i]);
      }
    }
    ASSERT_FALSE(rows.empty());
    EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
    EXPECT_GE(kept, mass * total * (1 - 1e-9));
    if (total == 0) {
      EXPECT_EQ(rows.size(), importance.size());
      continue;
    }
    EXPECT_LE(best_left_out, least);  // the largest ones
    if (rows.size() > 1) {
      EXPECT_LT(kept - least, mass * total * (1 + 1e-9));  // and no more of them
    }
    const std::vector<int32_t> more = RowsByMass(importance, std::min(1.0, mass + 0.1));
    EXPECT_TRUE(std::includes(more.begin(), more.end(), rows.begin(), rows.end()));  // nested
  }
  EXPECT_THAT(RowsByMass(std::vector<float>{1, 2, 1}, 0.5), testing::ElementsAre(1));
  EXPECT_THAT(RowsByMass(std::vector<float>{1, 2, 1}, 0.51), testing::ElementsAre(0, 1));  // the one that crosses, too
}

// The edge mass is what a window leaves out; a needle outside of one head's window fires that head and no other.
TEST(EdgeRestore, FindsTheHeadThatLooksAway) {
  constexpr int32_t kProbes = 3, kQuery = 4, kKv = 2;
  std::vector<float> seen(kProbes * kQuery), all(kProbes * kQuery);
  for (int32_t i = 0; i < kProbes; ++i) {
    for (int32_t h = 0; h < kQuery; ++h) {
      const double outside = h == 3 ? 0.4 : 0.05 * h;  // of KV head 1's second query head
      all[static_cast<size_t>(i * kQuery + h)] = 2.5f;
      seen[static_cast<size_t>(i * kQuery + h)] = static_cast<float>(2.5 + std::log(1 - outside));
    }
  }
  const std::vector<float> edge = EdgeMass({seen, all, kProbes, kQuery, kKv});
  EXPECT_NEAR(edge[0], 0.05, 1e-4);
  EXPECT_NEAR(edge[1], 0.4, 1e-4);
  const std::vector<float> thresholds{0.15f, 0.15f};
  EXPECT_THAT(HeadsToRestore(edge, thresholds, 2), testing::ElementsAre(1));
  EXPECT_THAT(HeadsToRestore(edge, thresholds, 0), testing::IsEmpty());
  EXPECT_THAT(HeadsToRestore(std::vector<float>{0.3f, 0.9f, 0.5f}, std::vector<float>{0, 0, 0}, 2),
              testing::ElementsAre(1, 2));
}

}  // namespace
}  // namespace spl::engine
