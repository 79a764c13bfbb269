// Policy samkv on whole models: the oracles of docs/methods/samkv.md, on the CPU, against the reference backend and,
// where there is one, on a GPU. Models are small and random; what counts is that two ways to a result agree.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <tuple>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/tolerance.h"
#include "kernels/kv_copy/fuse_rows.h"
#include "services/engine/cache/segment_summary.h"
#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/recovery/samkv_choice.h"
#include "services/engine/runtime/prompt_replay.h"
#include "services/engine/runtime/prompt_run.h"
#include "services/engine/selection/kept_tokens_selector.h"
#include "tests/services/engine/prompt_runs.h"
#include "tests/support/engine_devices.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using Tokens = std::vector<int32_t>;
using test::RandomTokens;
using test::RelativeL2;
using test::SeededRandom;

constexpr int32_t kLayers = 4, kHeads = 2;
constexpr const char* kConfig = R"({"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":96,
    "num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"vocab_size":512,
    "max_position_embeddings":8192,"rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1,
    "torch_dtype":"float32"})";
// Of the shape and types that tensor cores serve.
constexpr const char* kConfigBf16 = R"({"architectures":["LlamaForCausalLM"],"hidden_size":128,"intermediate_size":192,
    "num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"vocab_size":512,
    "max_position_embeddings":8192,"rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1,
    "torch_dtype":"bfloat16"})";

// One device with the model on it: cpu, ref, cuda; with _bf16 the model of bf16. ranks: two of the CPU.
struct Machine {
  static constexpr int32_t kMaxRows = 512;

  explicit Machine(const std::string& kind) {
    const bool bf16 = kind.ends_with("_bf16");
    const auto devices = test::DevicesOf(kind.substr(0, kind.find('_')), kind == "ranks" ? 2 : 1);
    if (!devices.ok()) return;
    model = Model::LoadRandom({ParseModelConfig(bf16 ? kConfigBf16 : kConfig, "test").value(), 7}, *devices,
                              {.kv_dtype = test::KvType()})
                .value();
    memory.emplace(AllocateKvMemory(*model, PagesForTokens(model->config(), 24 * 1024)).value());
    Poison(*model, *memory);  // what is read beyond what was written shows
    pool = std::make_unique<PagePool>(memory->pages, model->backends());
    executor = ParallelExecutor::Create(model, memory->pages, {.num_threads = 2, .max_rows = kMaxRows}).value();
  }
  bool there() const { return model != nullptr; }
  int32_t dim() const { return model->config().head_dim; }
  kernels::DType dtype() const { return model->kv_dtype(); }
  // The tolerance between two ways to the same K and V that round them differently. Codes have three bits of
  // mantissa.
  double tolerance() const {
    return dtype() == kernels::DType::kE4M3 ? 6e-2 : kernels::ToleranceFor(dtype()).relative_l2;
  }
  size_t row_bytes() const { return static_cast<size_t>(dim()) * kernels::DTypeBytes(dtype()); }

  std::shared_ptr<const Model> model;
  std::optional<KvMemory> memory;
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<ParallelExecutor> executor;
};

struct Result {
  std::shared_ptr<SequenceKv> kv;
  std::vector<float> logits;
  std::vector<PositionRanges> kept;
  PositionRanges only;
  double kept_share = 1;
  int64_t recomputed = 0, summaries_computed = 0;
};

Result Prefill(Machine& machine, const Tokens& tokens, const ReuseOptions& reuse,
               const std::vector<SegmentHit>& hits = {}, int32_t room = Machine::kMaxRows) {
  Result result;
  result.kv = std::make_shared<SequenceKv>(*machine.pool, KvShapeOf(machine.model->config()));
  EXPECT_TRUE(result.kv->Reserve(static_cast<int64_t>(tokens.size())).ok());
  auto policy = MakeRecoveryPolicy(reuse, machine.model->config());
  EXPECT_TRUE(policy.ok()) << policy.status();
  PromptRun run(tokens, hits, *result.kv, **policy);
  result.logits = RunToEnd(run, *machine.executor, room);
  result.kept.assign(run.kept().begin(), run.kept().end());
  result.only = run.only();
  result.kept_share = run.kept_share();
  result.recomputed = run.recomputed_tokens();
  result.summaries_computed = run.summaries_computed();
  return result;
}

// K or V of one token.
std::vector<float> Row(Machine& machine, const Result& result, int32_t layer, int32_t head, int32_t position,
                       bool value) {
  const int32_t page = result.kv->stream(layer, head)[static_cast<size_t>(position / 64)];
  std::vector<std::byte> bytes(machine.model->page_bytes());
  EXPECT_TRUE(machine.pool->ReadPages({&page, 1}, bytes.data()).ok());
  return test::KvRow(*machine.model, bytes.data() + (value ? bytes.size() / 2 : 0), position % 64);
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Documents that were computed by themselves, and a prompt of an instruction, the documents, and a question.
struct Prompt {
  Tokens tokens;
  std::vector<SegmentHit> hits;
  std::vector<Result> sources;  // keeps the pages

  Prompt(Machine& machine, std::mt19937& random, int num_documents, int32_t length_min, int32_t length_max,
         int32_t question, int32_t between = 3) {
    tokens = RandomTokens(random, between);
    for (int i = 0; i < num_documents; ++i) {
      const Tokens text = RandomTokens(random, std::uniform_int_distribution<int32_t>(length_min, length_max)(random));
      sources.push_back(Prefill(machine, text, {.policy = "exact"}));
      hits.push_back({std::make_shared<SegmentSource>(*sources.back().kv, 0, text, SourceContext{.isolated = true}), 0,
                      static_cast<int32_t>(tokens.size()), static_cast<int32_t>(text.size())});
      tokens.insert(tokens.end(), text.begin(), text.end());
      const Tokens fresh = RandomTokens(random, i + 1 < num_documents ? between : question);
      tokens.insert(tokens.end(), fresh.begin(), fresh.end());
    }
  }
};

class SamKvPolicyTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!machine_.there()) GTEST_SKIP() << "no such device";
  }
  void MixSteps(const std::string& chooses);
  Machine machine_{GetParam()};
};

// budget = 1, overwrite, everything recomputed: a full prefill, bit by bit, also in small slices.
TEST_P(SamKvPolicyTest, WithNothingLeftOutItIsAFullPrefill) {
  std::mt19937 random = SeededRandom("full prefill");
  for (const int32_t question : {0, 1, 40}) {
    const Prompt prompt(machine_, random, 3, 100, 500, question);
    const Result want = Prefill(machine_, prompt.tokens, {.policy = "exact"});
    for (const int32_t room : {Machine::kMaxRows, 128}) {
      const Result got = Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = 1, .choose = "attention"},
                                 prompt.hits, room);
      EXPECT_TRUE(SameBits(got.logits, want.logits)) << question << ", " << room;
      EXPECT_EQ(got.kept_share, 1);
      EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kApprox);  // it happens to be right, nobody proved it
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (int32_t p = 0; p < static_cast<int32_t>(prompt.tokens.size()); p += 7)
          EXPECT_TRUE(SameBits(Row(machine_, got, layer, 1, p, true), Row(machine_, want, layer, 1, p, true)));
      }
    }
  }
}

// Nothing left out, nothing recomputed: copies as they are.
TEST_P(SamKvPolicyTest, WithoutRecomputationItIsNaive) {
  std::mt19937 random = SeededRandom("naive");
  const Prompt prompt(machine_, random, 3, 100, 500, 30);
  const Result got =
      Prefill(machine_, prompt.tokens,
              {.policy = "samkv", .budget_ratio = 1, .recompute = "none", .choose = "attention"}, prompt.hits);
  EXPECT_TRUE(SameBits(got.logits, Prefill(machine_, prompt.tokens, {.policy = "naive"}, prompt.hits).logits));
  EXPECT_EQ(got.recomputed, 0);
}

TEST_P(SamKvPolicyTest, WithoutACopyItIsExact) {
  std::mt19937 random = SeededRandom("no copy");
  const Tokens tokens = RandomTokens(random, 300);
  const Result got = Prefill(machine_, tokens, {.policy = "samkv"});
  EXPECT_TRUE(SameBits(got.logits, Prefill(machine_, tokens, {.policy = "exact"}).logits));
  EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kExact);
  EXPECT_TRUE(got.kept.empty());
}

// Initial and local tiles always, the middle by the budget, the rest of the prompt whole; recomputed is what some layer
// keeps.
TEST_P(SamKvPolicyTest, KeepsWhatTheBudgetAllows) {
  std::mt19937 random = SeededRandom("budget");
  const Prompt prompt(machine_, random, 6, 700, 900, 30);
  const auto length = static_cast<int32_t>(prompt.tokens.size());
  double before = 0;
  for (const double budget : {0.2, 0.4, 0.6}) {
    const Result got =
        Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = budget, .choose = "means"}, prompt.hits);
    ASSERT_EQ(got.kept.size(), static_cast<size_t>(kLayers));
    PositionRanges any, documents;
    int64_t tiles = 0;
    for (const SegmentHit& hit : prompt.hits) {
      documents.push_back({hit.target, hit.target + hit.num_tokens});
      tiles += (hit.num_tokens + 63) / 64;
    }
    for (const PositionRanges& kept : got.kept) {
      any = UnionOf(any, kept);
      for (const PositionRange& document : documents) {
        const PositionRange first{document.begin, document.begin + 64};
        const PositionRange last{document.begin + (document.size() - 1) / 64 * 64 - 64, document.end};
        EXPECT_EQ(CountOf(IntersectionOf(kept, {&first, 1})), 64);
        EXPECT_EQ(CountOf(IntersectionOf(kept, {&last, 1})), last.size());
      }
      const int64_t kept_of_documents = CountOf(IntersectionOf(kept, documents));
      EXPECT_EQ(CountOf(kept) - kept_of_documents, length - CountOf(documents));
      EXPECT_LE(kept_of_documents, std::max<int64_t>(18, std::llround(budget * static_cast<double>(tiles))) * 64);
    }
    EXPECT_EQ(got.recomputed, CountOf(IntersectionOf(any, documents)));
    EXPECT_GE(got.kept_share, before);
    before = got.kept_share;
    for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x));
  }
  EXPECT_GT(before, 0.2);  // some middle tile was chosen
  EXPECT_LT(before, 1);
}

// By attention: the first tile of each document, and of all others those to which the question attends, the same in
// every layer; recomputed is what is kept. The attention is that over the copies as they are.
TEST_P(SamKvPolicyTest, AttentionKeepsTheTilesThatTheQuestionSees) {
  std::mt19937 random = SeededRandom("attention");
  for (const int32_t question : {0, 30, 100}) {
    const Prompt prompt(machine_, random, 4, 500, 900, question);
    const auto length = static_cast<int32_t>(prompt.tokens.size());
    const Result got =
        Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = 0.3, .choose = "attention"}, prompt.hits);
    ASSERT_EQ(got.kept.size(), static_cast<size_t>(kLayers));
    PositionRanges documents;
    int64_t tiles = 0;
    int64_t kept_tiles = 0, tokens_kept = 0;
    for (const SegmentHit& hit : prompt.hits) {
      const PositionRange document{hit.target, hit.target + hit.num_tokens};
      documents.push_back(document);
      // Tiles are pages of the prompt, the first one what is left of the page behind at least half a page.
      for (int32_t begin = document.begin, end = (begin + 95) / 64 * 64; begin < document.end; begin = end, end += 64) {
        const PositionRange tile{begin, std::min(document.end, end)};
        const int64_t of_tile = CountOf(IntersectionOf(got.kept[0], {&tile, 1}));
        EXPECT_TRUE(of_tile == 0 || of_tile == tile.size() || (question == 0 && tile.end > length - 64))
            << "whole tiles";
        if (begin == document.begin) {
          EXPECT_EQ(of_tile, tile.size());
        }
        ++tiles;
        kept_tiles += of_tile > 0;
        tokens_kept += of_tile;
      }
    }
    const int64_t budget = std::llround(0.3 * static_cast<double>(tiles));
    EXPECT_GE(kept_tiles, budget);
    EXPECT_LE(kept_tiles, budget + (question == 0 ? 2 : 0));  // the question is kept whatever it scores
    for (const PositionRanges& kept : got.kept) {
      EXPECT_EQ(kept, got.kept[0]);
      EXPECT_EQ(CountOf(kept) - CountOf(IntersectionOf(kept, documents)), length - CountOf(documents));
    }
    EXPECT_EQ(got.recomputed, tokens_kept);
    EXPECT_EQ(got.summaries_computed, 0);
  }
}

// The stages are those of sparsex, and so is what is kept: the same tiles in every layer, as many as the budget allows,
// wherever they are in the documents.
TEST_P(SamKvPolicyTest, RecoveredKeepsWhatSparseXHasRecovered) {
  std::mt19937 random = SeededRandom("recovered");
  for (const int32_t question : {0, 30, 100}) {
    for (const auto& [dense_layers, probe_layers] :
         {std::pair{-1, 0}, {0, -1}, {kLayers, -1}, {-1, 1}, {-1, kLayers}, {-1, -1}}) {
      const Prompt prompt(machine_, random, 4, 500, 900, question);
      const auto length = static_cast<int32_t>(prompt.tokens.size());
      const Result want = Prefill(
          machine_, prompt.tokens,
          {.policy = "sparsex", .dense_layers = dense_layers, .recompute_share = 0.15, .probe_layers = probe_layers},
          prompt.hits);
      for (const double budget : {0.3, 1.0}) {
        const Result got = Prefill(
            machine_, prompt.tokens,
            {.policy = "samkv", .dense_layers = dense_layers, .probe_layers = probe_layers, .budget_ratio = budget},
            prompt.hits);
        ASSERT_EQ(got.kept.size(), static_cast<size_t>(kLayers));
        EXPECT_EQ(got.recomputed, want.recomputed);
        EXPECT_EQ(got.summaries_computed, 0);
        EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kApprox);
        // The last token once more, by itself: sums in another order.
        EXPECT_LE(RelativeL2(got.logits, want.logits), machine_.tolerance());
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          for (int32_t p = 0; p + 1 < length; p += 11)
            ASSERT_TRUE(SameBits(Row(machine_, got, layer, 0, p, true), Row(machine_, want, layer, 0, p, true))) << p;
        }
        PositionRanges documents;
        int64_t tiles = 0, kept_tiles = 0;
        for (const SegmentHit& hit : prompt.hits) {
          const PositionRange document{hit.target, hit.target + hit.num_tokens};
          documents.push_back(document);
          for (int32_t begin = document.begin, end = (begin + 95) / 64 * 64; begin < document.end;
               begin = end, end += 64) {
            const PositionRange tile{begin, std::min(document.end, end)};
            const int64_t of_tile = CountOf(IntersectionOf(got.kept[0], {&tile, 1}));
            EXPECT_TRUE(of_tile == 0 || of_tile == tile.size() || (question == 0 && tile.end > length - 64));
            ++tiles;
            kept_tiles += of_tile > 0;
          }
        }
        const int64_t most = std::llround(budget * static_cast<double>(tiles));
        EXPECT_GE(kept_tiles, most);
        EXPECT_LE(kept_tiles, most + (question == 0 ? 2 : 0));  // the question is kept whatever it scores
        for (const PositionRanges& kept : got.kept) {
          EXPECT_EQ(kept, got.kept[0]);
          EXPECT_EQ(CountOf(kept) - CountOf(IntersectionOf(kept, documents)), length - CountOf(documents));
        }
      }
    }
  }
}

// recompute=sparsex: with every row chosen, or no layer behind the boundary, it is recompute=samkv; else it computes
// less, and nothing that is not kept is seen or computed.
TEST_P(SamKvPolicyTest, RowsOfSparseXAreComputedOfWhatIsKept) {
  std::mt19937 random = SeededRandom("rows of sparsex");
  for (const char* choose : {"attention", "means"}) {
    const Prompt prompt(machine_, random, 4, 500, 900, 30);
    ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.4, .recompute = "samkv", .choose = choose};
    const Result all = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    reuse.recompute = "sparsex";
    const Result some = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    EXPECT_EQ(some.kept, all.kept);
    EXPECT_LT(some.recomputed, all.recomputed / 2);
    EXPECT_GT(some.recomputed, 0);
    EXPECT_FALSE(SameBits(some.logits, all.logits));
    PositionRanges kept;
    for (const PositionRanges& of_layer : some.kept) kept = UnionOf(kept, of_layer);
    EXPECT_EQ(all.recomputed, CountOf(IntersectionOf(kept, [&] {
                PositionRanges documents;
                for (const SegmentHit& hit : prompt.hits)
                  documents.push_back({hit.target, hit.target + hit.num_tokens});
                return documents;
              }())));
    ReuseOptions every = reuse, dense = reuse;
    every.recompute_share = 1;
    dense.dense_layers = kLayers;
    EXPECT_TRUE(SameBits(Prefill(machine_, prompt.tokens, every, prompt.hits).logits, all.logits)) << choose;
    EXPECT_TRUE(SameBits(Prefill(machine_, prompt.tokens, dense, prompt.hits).logits, all.logits)) << choose;
  }
}

// What a layer does not keep is not seen by what follows: other bytes in its place change nothing.
TEST_P(SamKvPolicyTest, WhatIsNotKeptDoesNotMatter) {
  std::mt19937 random = SeededRandom("not kept");
  for (const char* recompute : {"none", "samkv", "attended"}) {
    const Prompt prompt(machine_, random, 4, 500, 900, 30);
    const ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.5, .recompute = recompute, .choose = "means"};
    const Result want = Prefill(machine_, prompt.tokens, reuse, prompt.hits);  // leaves summaries with the sources
    int64_t changed = 0;
    for (const SegmentHit& hit : prompt.hits) {
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (int32_t tile = 0; tile * 64 < hit.num_tokens; ++tile) {
          // Recomputation sees what any layer keeps.
          bool kept = false;
          for (int32_t l = 0; l < kLayers; ++l)
            kept |= (l == layer || std::string(recompute) != "none") &&
                    ContainsPosition(want.kept[static_cast<size_t>(l)], hit.target + tile * 64);
          if (kept) continue;
          ++changed;
          for (int32_t head = 0; head < kHeads; ++head) {
            const int32_t page = hit.source->page(layer * kHeads + head, tile * 64);
            std::vector<float> garbage(machine_.model->page_bytes() / sizeof(float), 1000.0f);
            EXPECT_TRUE(machine_.pool->WritePages({&page, 1}, reinterpret_cast<const std::byte*>(garbage.data())).ok());
          }
        }
      }
    }
    EXPECT_GT(changed, 0);
    const Result got = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    EXPECT_EQ(got.kept, want.kept);
    EXPECT_TRUE(SameBits(got.logits, want.logits)) << recompute;
  }
}

// The first prompt with a document finds out what is known of it, later ones read it, and choose by the same bits.
TEST_P(SamKvPolicyTest, SummariesAreComputedOnce) {
  std::mt19937 random = SeededRandom("summaries");
  struct Options {
    const char *choose, *recompute;
    double budget;
  };
  // With budget 1 there is nothing to choose, and attended tokens are wanted all the same.
  for (const auto& [choose, recompute, budget] :
       {Options{"means", "samkv", 0.5}, Options{"means", "attended", 0.5}, Options{"attention", "attended", 0.5},
        Options{"means", "attended", 1}, Options{"attention", "attended", 1}}) {
    SCOPED_TRACE(std::string(choose) + ", " + recompute);
    const Prompt prompt(machine_, random, 5, 400, 900, 30);
    const ReuseOptions reuse{.policy = "samkv", .budget_ratio = budget, .recompute = recompute, .choose = choose};
    const Result first = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    EXPECT_EQ(first.summaries_computed, 5);
    for (const SegmentHit& hit : prompt.hits) {
      const auto summary = hit.source->summary();
      ASSERT_NE(summary, nullptr);
      EXPECT_EQ(summary->tile_means.empty(), std::string(choose) == "attention") << "what nobody asked for";
      EXPECT_EQ(summary->local_query.size(), static_cast<size_t>(kLayers * 4 * machine_.dim()));
      const PositionRange middle = MiddleTilesOf({0, hit.num_tokens});
      ASSERT_EQ(summary->attended.size(), static_cast<size_t>(std::max(8, middle.size() / 4)));
      EXPECT_TRUE(std::is_sorted(summary->attended.begin(), summary->attended.end(), std::less_equal<>()));
      EXPECT_GE(summary->attended.front(), middle.begin);
      EXPECT_LT(summary->attended.back(), middle.end);
    }
    const Result second = Prefill(machine_, prompt.tokens, reuse, prompt.hits, 256);
    EXPECT_EQ(second.summaries_computed, 0);
    EXPECT_EQ(second.kept, first.kept);
    EXPECT_EQ(second.recomputed, first.recomputed);
    EXPECT_TRUE(SameBits(second.logits, first.logits));
  }
}

// A prefill that notes what the local tiles' rows attend to, by a score request of its own.
class ScoringPolicy final : public RecoveryPolicy {
 public:
  ScoringPolicy(const ModelConfig& config, const PositionRange& segment) : RecoveryPolicy(config), segment_(segment) {}
  std::string_view name() const override { return "scoring"; }
  bool reuses_segments() const override { return false; }
  void TakeScores(std::vector<float> scores) override { scores_ = std::move(scores); }
  const std::vector<float>& scores() const { return scores_; }

 protected:
  PrefillStage FirstColdStage(const ReuseLayout& layout) override {
    PrefillStage stage = AllRows(layout);
    stage.score = {.kind = ScoreKind::kColumnMass,
                   .candidates = {MiddleTilesOf(segment_)},
                   .probes = {LocalTilesOf(segment_)},
                   .all_layers = true,
                   .give_scores = true};
    return stage;
  }

 private:
  const PositionRange segment_;
  std::vector<float> scores_;
};

// Of each of the text's segments what a published context notes of it: with all that stands in front.
std::vector<SegmentSummary> Noted(Machine& machine, const Tokens& text, const PositionRanges& segments,
                                  int32_t room = Machine::kMaxRows) {
  SequenceKv kv(*machine.pool, KvShapeOf(machine.model->config()));
  EXPECT_TRUE(kv.Reserve(static_cast<int64_t>(text.size())).ok());
  ExactPolicy policy(machine.model->config(), segments);
  PromptRun run(text, {}, kv, policy);
  RunToEnd(run, *machine.executor, room);
  std::vector<SegmentSummary> noted;
  for (const PositionRange& segment : segments) noted.push_back(policy.LocalSummaryOf(segment));
  return noted;
}

std::vector<float> ReferenceScores(Machine& machine, const Tokens& text, const PositionRange& segment) {
  SequenceKv kv(*machine.pool, KvShapeOf(machine.model->config()));
  EXPECT_TRUE(kv.Reserve(static_cast<int64_t>(text.size())).ok());
  ScoringPolicy policy(machine.model->config(), segment);
  PromptRun run(text, {}, kv, policy);
  RunToEnd(run, *machine.executor, Machine::kMaxRows);
  return policy.scores();
}

// `attended` is what the scores say, but for tokens whose scores are as good as those of the last ones in the list.
void ExpectMostAttended(const std::vector<int32_t>& attended, const std::vector<float>& scores, double tolerance) {
  const int32_t begin = MiddleTilesOf({0, 4 * 64}).begin;
  const std::vector<int32_t> want = MostAttended(scores);
  ASSERT_EQ(attended.size(), want.size());
  double last = INFINITY;
  for (const int32_t i : want) last = std::min(last, double{scores[static_cast<size_t>(i)]});
  for (size_t i = 0; i < scores.size(); ++i) {
    const bool in = std::binary_search(attended.begin(), attended.end(), begin + static_cast<int32_t>(i));
    if (in) {
      EXPECT_GE(scores[i], last * (1 - tolerance)) << i;
    } else {
      EXPECT_LE(scores[i], last * (1 + tolerance)) << i;
    }
  }
}

// A published segment's attended tokens are those of the definitions, in one pass and in several, and those that a
// prompt finds out which has no summary.
TEST_P(SamKvPolicyTest, AttendedTokensAreTheSameWhoeverFindsThemOut) {
  std::mt19937 random = SeededRandom("attended");
  Machine plain(GetParam().ends_with("_bf16") ? "ref_bf16" : "ref");
  const double tolerance = machine_.dtype() == kernels::DType::kF32 ? 1e-3 : 0.05;
  const Prompt prompt(machine_, random, 3, 300, 500, 20, 0);
  const Result found =
      Prefill(machine_, prompt.tokens,
              {.policy = "samkv", .budget_ratio = 0.5, .recompute = "attended", .choose = "means"}, prompt.hits);
  EXPECT_EQ(found.summaries_computed, 3);
  for (const SegmentHit& hit : prompt.hits) {
    const PositionRange all{0, hit.num_tokens};
    const Tokens text(prompt.tokens.begin() + hit.target, prompt.tokens.begin() + hit.target + hit.num_tokens);
    const std::vector<float> scores = ReferenceScores(plain, text, all);
    ASSERT_EQ(scores.size(), static_cast<size_t>(MiddleTilesOf(all).size()));
    const std::vector<int32_t> noted = Noted(machine_, text, {all})[0].attended;
    ExpectMostAttended(noted, scores, tolerance);
    ExpectMostAttended(Noted(machine_, text, {all}, 128)[0].attended, scores, tolerance);
    ExpectMostAttended(hit.source->summary()->attended, scores, tolerance);
    // The same backend, by another way, and where the document is not turned: the same list.
    EXPECT_EQ(noted, [&] {
      std::vector<int32_t> own = MostAttended(ReferenceScores(machine_, text, all));
      for (int32_t& offset : own) offset += 64;
      return own;
    }());
    if (hit.target == 0 && GetParam().find("cuda") == std::string::npos) {
      EXPECT_EQ(hit.source->summary()->attended, noted);
    }
  }
}

// Several segments of one context are each noted by themselves.
TEST_P(SamKvPolicyTest, AttendedTokensOfAContext) {
  std::mt19937 random = SeededRandom("context");
  const Tokens text = RandomTokens(random, 1300);
  const PositionRanges segments = {{0, 400}, {400, 560}, {570, 1290}};
  const std::vector<SegmentSummary> noted = Noted(machine_, text, segments);
  for (size_t i = 0; i < segments.size(); ++i) {
    EXPECT_FALSE(noted[i].local_query.empty());
    if (MiddleTilesOf(segments[i]).size() == 0) continue;
    // A request for scores of this one alone; cut in the same passes, so to the bit.
    std::vector<int32_t> want = MostAttended(ReferenceScores(machine_, text, segments[i]));
    for (int32_t& offset : want) offset += 64;
    EXPECT_EQ(noted[i].attended, want) << i;
  }
  EXPECT_TRUE(noted[1].attended.empty()) << "three tiles";
}

// recompute=attended: initial and local tokens and the lists of what is kept, and nothing else; each of them sees all
// that is kept.
TEST_P(SamKvPolicyTest, AttendedTokensAreComputedAfresh) {
  std::mt19937 random = SeededRandom("recompute attended");
  for (const char* choose : {"means", "attention"}) {
    SCOPED_TRACE(choose);
    const Prompt prompt(machine_, random, 4, 500, 900, 30);
    ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.5, .recompute = "samkv", .choose = choose};
    const Result all = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    reuse.recompute = "attended";
    Prefill(machine_, prompt.tokens, reuse, prompt.hits);  // leaves summaries with the sources
    const Result copies = Prefill(machine_, prompt.tokens, {.policy = "naive"}, prompt.hits);
    const auto with_lists = [&](const std::function<std::vector<int32_t>(const SegmentHit&)>& list) {
      for (const SegmentHit& hit : prompt.hits)
        hit.source->KeepSummary({{}, hit.source->summary()->local_query, list(hit)});
      return Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    };
    std::vector<std::vector<int32_t>> lists;
    for (const SegmentHit& hit : prompt.hits) lists.push_back(hit.source->summary()->attended);
    for (const bool none : {false, true}) {
      size_t next = 0;
      const Result got = with_lists([&](const SegmentHit&) { return none ? std::vector<int32_t>() : lists[next++]; });
      EXPECT_EQ(got.kept, all.kept);
      PositionRanges kept;
      for (const PositionRanges& of_layer : got.kept) kept = UnionOf(kept, of_layer);
      int64_t recomputed = 0, changed = 0;
      for (size_t i = 0; i < prompt.hits.size(); ++i) {
        const SegmentHit& hit = prompt.hits[i];
        for (int32_t offset = 0; offset < hit.num_tokens; ++offset) {
          const int32_t p = hit.target + offset;
          if (!ContainsPosition(kept, p)) continue;
          const bool fixed = offset < 64 || offset >= (hit.num_tokens - 1) / 64 * 64 - 64;
          const bool afresh = fixed || (!none && std::binary_search(lists[i].begin(), lists[i].end(), offset));
          recomputed += afresh;
          const std::vector<float> row = Row(machine_, got, kLayers - 1, 0, p, true);
          if (afresh) {
            changed += !SameBits(row, Row(machine_, copies, kLayers - 1, 0, p, true));
          } else {
            ASSERT_TRUE(SameBits(row, Row(machine_, copies, kLayers - 1, 0, p, true))) << p;
          }
        }
      }
      EXPECT_EQ(got.recomputed, recomputed);
      EXPECT_GT(changed, recomputed / 2);
      EXPECT_LT(recomputed, all.recomputed);
    }
    const Result every = with_lists([](const SegmentHit& hit) {
      std::vector<int32_t> offsets;
      const PositionRange middle = MiddleTilesOf({0, hit.num_tokens});
      for (int32_t i = middle.begin; i < middle.end; ++i) offsets.push_back(i);
      return offsets;
    });
    EXPECT_EQ(every.recomputed, all.recomputed);
    EXPECT_TRUE(SameBits(every.logits, all.logits));
  }
}

// The mean keys of a document that was turned are those of its turned keys.
TEST_P(SamKvPolicyTest, SummariesTurnWithTheKeys) {
  if (machine_.dtype() != kernels::DType::kF32) GTEST_SKIP() << "turned keys are rounded";
  std::mt19937 random = SeededRandom("turned");
  const Prompt prompt(machine_, random, 2, 300, 400, 20, 37);
  const Result naive = Prefill(machine_, prompt.tokens, {.policy = "naive"}, prompt.hits);
  const SegmentHit& hit = prompt.hits[1];
  const ModelConfig& config = machine_.model->config();
  const auto keys = SummarizeKeys(hit, config, machine_.model->kv_dtype());
  ASSERT_TRUE(keys.ok()) << keys.status();
  const SegmentSummary turned = TurnSummary(*keys, hit.distance(), config);
  const int32_t tiles = (hit.num_tokens + 63) / 64;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t tile = 0; tile < tiles; ++tile) {
      for (int32_t head = 0; head < kHeads; ++head) {
        std::vector<double> mean(static_cast<size_t>(machine_.dim()));
        const int32_t begin = tile * 64, end = std::min(hit.num_tokens, begin + 64);
        for (int32_t t = begin; t < end; ++t) {
          const auto row = Row(machine_, naive, layer, head, hit.target + t, false);
          for (size_t c = 0; c < mean.size(); ++c) mean[c] += row[c] / (end - begin);
        }
        const size_t at = static_cast<size_t>(((layer * tiles + tile) * kHeads + head) * machine_.dim());
        for (size_t c = 0; c < mean.size(); ++c) EXPECT_NEAR(turned.tile_means[at + c], mean[c], 1e-4);
      }
    }
  }
}

// theta = 1: a document in its own context gets the K and V that it has, and blending changes nothing.
TEST_P(SamKvPolicyTest, FusionOfEqualRowsIsOverwriting) {
  std::mt19937 random = SeededRandom("theta one");
  const Tokens text = RandomTokens(random, 500);
  const Result want = Prefill(machine_, text, {.policy = "exact"});
  const auto source =
      std::make_shared<SegmentSource>(*want.kv, 0, std::span(text).first(450), SourceContext{.isolated = true});
  for (const bool fusion : {false, true}) {
    const Result got =
        Prefill(machine_, text, {.policy = "samkv", .budget_ratio = 1, .fusion = fusion, .choose = "attention"},
                {{source, 0, 0, 450}});
    EXPECT_TRUE(SameBits(got.logits, want.logits)) << fusion;
  }
}

// In layer 0 fresh K and V depend on the token alone: there the blend can be told from outside.
TEST_P(SamKvPolicyTest, FusionBlendsWithTheCopy) {
  std::mt19937 random = SeededRandom("blend");
  const Prompt prompt(machine_, random, 3, 300, 500, 20);
  ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.15, .choose = "means"};
  const Result fresh = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
  reuse.fusion = true;
  const Result fused = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
  const Result copies = Prefill(machine_, prompt.tokens, {.policy = "naive"}, prompt.hits);
  const int32_t first = prompt.hits[1].target;  // of an initial tile
  for (int32_t p = first; p < first + 64; ++p) {
    for (const bool value : {false, true}) {
      std::vector<float> want = Row(machine_, fresh, 0, 0, p, value);
      kernels::FuseRow(Row(machine_, copies, 0, 0, p, value), want);
      if (machine_.dtype() == kernels::DType::kE4M3) {  // rounded once more
        std::vector<uint8_t> codes(want.size());
        const auto dim = static_cast<int32_t>(want.size());
        const uint8_t scale = kernels::QuantizeRow(want.data(), dim, codes.data());
        kernels::WidenRow(codes.data(), scale, dim, want.data());
      }
      const auto row = Row(machine_, fused, 0, 0, p, value);
      // On a GPU theta, a sum of lanes, differs in its last bits; and pages of bf16 are rounded.
      if (GetParam() != "cpu") {
        EXPECT_LE(RelativeL2(row, want), machine_.tolerance()) << p;
      } else {
        EXPECT_TRUE(SameBits(row, want)) << p;
      }
    }
  }
  EXPECT_FALSE(SameBits(fused.logits, fresh.logits));
}

TEST_P(SamKvPolicyTest, AnyLayoutFinishes) {
  std::mt19937 random = SeededRandom("layouts");
  for (int round = 0; round < 25 && !HasFailure(); ++round) {
    const Prompt prompt(machine_, random, 1 + static_cast<int>(random() % 5), 40, 600,
                        static_cast<int32_t>(random() % 3 * 20), static_cast<int32_t>(random() % 70));
    constexpr const char* kChoices[] = {"recovered", "attention", "means"};
    constexpr const char* kRecomputes[] = {"", "none", "samkv", "sparsex", "attended"};
    ReuseOptions reuse{.policy = "samkv",
                       .dense_layers = static_cast<int32_t>(random() % (kLayers + 2)) - 1,
                       .budget_ratio = static_cast<double>(random() % 5) / 4,
                       .recompute = kRecomputes[random() % 5],
                       .choose = kChoices[random() % 3]};
    if (reuse.choose == "recovered" && (reuse.recompute == "sparsex" || reuse.recompute == "attended"))
      reuse.recompute = "";
    reuse.fusion = random() % 2 == 0 && reuse.choose != "recovered" && reuse.recompute != "sparsex";
    reuse.compact = random() % 2 == 0;
    const Result got = Prefill(machine_, prompt.tokens, reuse, prompt.hits, round % 2 == 0 ? 512 : 192);
    EXPECT_EQ(got.kv->num_tokens(), got.only.empty() ? static_cast<int64_t>(prompt.tokens.size()) : CountOf(got.only));
    EXPECT_TRUE(reuse.compact || got.only.empty());
    for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x)) << round;
  }
}

// Nothing stands in front of the first document, and its beginning is not chosen: the shorter prompt has it all the
// same.
TEST_P(SamKvPolicyTest, ACompactPromptMayBeginWithADocument) {
  std::mt19937 random = SeededRandom("a document first");
  for (const char* const choose : {"recovered", "attention", "means"}) {
    for (const double ratio : {0.0, 0.25}) {
      const Prompt prompt(machine_, random, 3, 200, 400, 20, /*between=*/0);
      const Result got =
          Prefill(machine_, prompt.tokens,
                  {.policy = "samkv", .budget_ratio = ratio, .choose = choose, .compact = true}, prompt.hits);
      if (got.only.empty()) continue;  // everything is kept
      EXPECT_EQ(got.only.front().begin, 0) << choose << ", " << ratio;
      EXPECT_EQ(got.kv->num_tokens(), CountOf(got.only));
      for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x)) << choose << ", " << ratio;
    }
  }
}

// What a sequence decodes with. `prompt` is read by selectors that choose by it.
struct Decoding {
  Decoding(Machine& machine, SequenceKv& sequence, const DecodeOptions& options = {}, const Tokens& prompt = {})
      : kv(&sequence) {
    auto made = MakeSelectorFor(sequence, options, *machine.model);
    EXPECT_TRUE(made.ok()) << made.status();
    Begin(machine, *std::move(made));
    PromptSelector* const of_prompt = selector->of_prompt();
    if (of_prompt == nullptr) return;
    EXPECT_TRUE(compact->Reserve(sequence.num_tokens() + 1).ok());
    auto kept = ChooseOfPrompt(*machine.executor, prompt, sequence, *of_prompt);
    EXPECT_TRUE(kept.ok()) << kept.status();
    if (!kept.ok()) return;
    EXPECT_TRUE(KeepPositions(*machine.model, *machine.pool, *kept, sequence.num_tokens(), *of_prompt, *compact).ok());
  }
  Decoding(Machine& machine, SequenceKv& sequence, std::unique_ptr<TokenSelector> made) : kv(&sequence) {
    Begin(machine, std::move(made));
  }
  void Begin(Machine& machine, std::unique_ptr<TokenSelector> made) {
    selector = std::move(made);
    auto pages = MakeCompactPages(*selector, *machine.model, *machine.pool, kv->num_tokens());
    EXPECT_TRUE(pages.ok()) << pages.status();
    compact = *std::move(pages);
    EXPECT_TRUE(BeginLists(*machine.model, *machine.pool, *selector, kv->num_tokens(), compact.get()).ok());
  }
  // Of the next step, with room for it.
  DecodeRow Row(int32_t token) const {
    EXPECT_TRUE(kv->Reserve(kv->num_tokens() + 1).ok());
    if (compact != nullptr) {
      EXPECT_TRUE(compact->Reserve(kv->num_tokens() + 1).ok());
    }
    return {token, kv, selector.get(), compact.get()};
  }

  SequenceKv* const kv;
  std::unique_ptr<TokenSelector> selector;
  std::unique_ptr<CompactPages> compact;
};

// Logits of `steps` decode steps with these tokens.
std::vector<std::vector<float>> Decode(Machine& machine, SequenceKv& kv, const Tokens& next,
                                       const DecodeOptions& options = {}, const Tokens& prompt = {}) {
  std::vector<std::vector<float>> logits;
  Decoding decoding(machine, kv, options, prompt);
  for (const int32_t token : next) {
    const DecodeRow row = decoding.Row(token);
    const absl::Status status = machine.executor->Decode({&row, 1});
    EXPECT_TRUE(status.ok()) << status;
    kv.set_num_tokens(kv.num_tokens() + 1);
    const auto row_logits = machine.executor->Logits();
    EXPECT_TRUE(row_logits.ok());
    logits.emplace_back(row_logits->begin(), row_logits->end());
  }
  return logits;
}

std::shared_ptr<const KeptTokens> KeptOf(const Result& result) {
  return std::make_shared<KeptTokens>(KeptTokens{static_cast<int32_t>(result.kv->num_tokens()), result.kept});
}

// Other bytes in every token that its layer does not keep.
void Spoil(Machine& machine, const Result& result) {
  for (int32_t stream = 0; stream < kLayers * kHeads; ++stream) {
    const auto pages = result.kv->stream(stream / kHeads, stream % kHeads);
    for (size_t i = 0; i < pages.size(); ++i) {
      if (pages[i] == kernels::kNoPage) continue;
      std::vector<std::byte> bytes(machine.model->page_bytes());
      ASSERT_TRUE(machine.pool->ReadPages({&pages[i], 1}, bytes.data()).ok());
      for (int32_t slot = 0; slot < 64; ++slot) {
        const int32_t position = static_cast<int32_t>(i) * 64 + slot;
        if (position >= result.kv->num_tokens() ||
            ContainsPosition(result.kept[static_cast<size_t>(stream / kHeads)], position))
          continue;
        for (const size_t half : {size_t{0}, bytes.size() / 2}) {
          std::fill_n(
              bytes.begin() + static_cast<std::ptrdiff_t>(half + static_cast<size_t>(slot) * machine.row_bytes()),
              machine.row_bytes(), std::byte{0x45});
        }
      }
      ASSERT_TRUE(machine.pool->WritePages({&pages[i], 1}, bytes.data()).ok());
    }
  }
}

// What no layer keeps of a page is given back, and what is kept decides alone: forks and the sequence itself go on
// alike, and other bytes in what a layer leaves out change nothing.
TEST_P(SamKvPolicyTest, DecodingSeesWhatEachLayerKeeps) {
  std::mt19937 random = SeededRandom("decoding");
  const Prompt prompt(machine_, random, 5, 600, 900, 30);
  const ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.3};
  const Result first = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
  const Result second = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
  ASSERT_TRUE(ValidateKeptTokens(*KeptOf(first), kLayers, first.kv->num_tokens()).ok());
  const Tokens next = RandomTokens(random, 80);  // past a page's end
  const int64_t all = first.kv->num_pages(), free = machine_.pool->num_free();
  first.kv->KeepOnly(KeptOf(first));
  first.kv->CheckInvariants();
  EXPECT_LT(first.kv->num_pages(), all / 2);
  EXPECT_EQ(machine_.pool->num_free() - free, all - first.kv->num_pages());
  auto fork = first.kv->Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  (*fork)->CheckInvariants();
  EXPECT_EQ((*fork)->num_pages(), first.kv->num_pages());
  // The second keeps its pages, with other bytes in every token that is not kept.
  Spoil(machine_, second);
  Decoding with_holes(machine_, *second.kv,
                      std::make_unique<KeptTokensSelector>(machine_.model->config(), KeptOf(second)));
  const auto want = Decode(machine_, *first.kv, next), forked = Decode(machine_, **fork, next);
  for (size_t step = 0; step < next.size(); ++step) {
    ASSERT_TRUE(SameBits(forked[step], want[step])) << step;
    const DecodeRow row = with_holes.Row(next[step]);
    ASSERT_TRUE(machine_.executor->Decode({&row, 1}).ok());
    second.kv->set_num_tokens(second.kv->num_tokens() + 1);
    const auto got = machine_.executor->Logits();
    ASSERT_TRUE(got.ok());
    ASSERT_TRUE(SameBits({got->begin(), got->end()}, want[step])) << step;
  }
  first.kv->CheckInvariants();
}

// With everything kept, decoding is dense decoding.
TEST_P(SamKvPolicyTest, WithNothingLeftOutDecodingIsDense) {
  std::mt19937 random = SeededRandom("dense decoding");
  const Prompt prompt(machine_, random, 3, 300, 500, 30);
  const Result kept =
      Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = 1, .choose = "attention"}, prompt.hits);
  const Result exact = Prefill(machine_, prompt.tokens, {.policy = "exact"});
  kept.kv->KeepOnly(KeptOf(kept));
  EXPECT_EQ(kept.kv->num_pages(), exact.kv->num_pages());
  const Tokens next = RandomTokens(random, 5);
  const auto got = Decode(machine_, *kept.kv, next), want = Decode(machine_, *exact.kv, next);
  for (size_t step = 0; step < next.size(); ++step)
    EXPECT_LE(RelativeL2(got[step], want[step]), machine_.tolerance()) << step;
  const auto refused = MakeSelectorFor(*kept.kv, {"head_classes"}, *machine_.model);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), testing::HasSubstr("'head_classes' needs"));
}

// Tokens at these positions.
Tokens TokensAt(const Tokens& tokens, const PositionRanges& only) {
  Tokens left;
  for (const PositionRange& range : only)
    left.insert(left.end(), tokens.begin() + range.begin, tokens.begin() + range.end);
  return left;
}

// Whole tables of what stands together behind the move: V is what it was, K is turned by the distance.
TEST_P(SamKvPolicyTest, WhatIsLeftMovesTogether) {
  std::mt19937 random = SeededRandom("moves");
  const Tokens tokens = RandomTokens(random, 1500);
  for (int round = 0; round < 4; ++round) {
    const Result was = Prefill(machine_, tokens, {.policy = "exact"});
    PositionRanges only;
    for (int32_t at = 0; at < 1500;) {  // also single tokens, and gaps of one
      const int32_t end = std::min<int32_t>(1500, at + 1 + static_cast<int32_t>(random() % (round < 2 ? 150 : 9)));
      only.push_back({at, end});
      at = end + 1 + static_cast<int32_t>(random() % (round % 2 == 0 ? 3 : 200));
    }
    auto kv = was.kv->Fork(0);
    ASSERT_TRUE(kv.ok()) << kv.status();
    Result moved;
    moved.kv = *std::move(kv);
    const ModelConfig& config = machine_.model->config();
    const auto steps = MakeCompactPlans(only, *moved.kv, config, machine_.model->num_ranks());
    EXPECT_LE(steps.size(), static_cast<size_t>(CountOf(only)));
    for (const std::vector<AlignPlan>& step : steps) ASSERT_TRUE(machine_.executor->AlignCopy(step).ok());
    const std::vector<float> frequencies = InverseFrequencies(config.rope, config.head_dim);
    int32_t target = 0;
    for (const PositionRange& range : only) {
      for (int32_t from = range.begin; from < range.end; ++from, ++target) {
        if (target % 5 != 0) continue;
        ASSERT_TRUE(SameBits(Row(machine_, moved, 2, 1, target, true), Row(machine_, was, 2, 1, from, true)))
            << target << " from " << from;
        std::vector<float> want = Row(machine_, was, 2, 1, from, false);
        for (size_t c = 0; c < frequencies.size(); ++c) {
          const double angle = static_cast<double>(target - from) * frequencies[c];
          const double x = want[c], y = want[c + frequencies.size()];
          want[c] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
          want[c + frequencies.size()] = static_cast<float>(y * std::cos(angle) + x * std::sin(angle));
        }
        ASSERT_LE(RelativeL2(Row(machine_, moved, 2, 1, target, false), want), machine_.tolerance())
            << target << " from " << from;
      }
    }
  }
}

// compact with everything computed afresh: what is left is a prompt like any other, bit by bit a full prefill of it, by
// each choice, and decoding goes on as behind that.
TEST_P(SamKvPolicyTest, CompactIsAFullPrefillOfWhatIsLeft) {
  std::mt19937 random = SeededRandom("compact");
  for (const char* choose : {"attention", "means", "recovered"}) {
    for (const int32_t question : {0, 30}) {
      const Prompt prompt(machine_, random, 4, 400, 900, question);
      ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.4, .recompute = "samkv", .choose = choose};
      const Result gaps = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
      reuse.compact = true;
      const Result got = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
      PositionRanges any;
      for (const PositionRanges& of_layer : gaps.kept) any = UnionOf(any, of_layer);
      EXPECT_EQ(got.only, any);
      EXPECT_TRUE(got.kept.empty());
      EXPECT_EQ(got.kv->num_tokens(), CountOf(any));
      EXPECT_LT(CountOf(any), static_cast<int64_t>(prompt.tokens.size()));
      EXPECT_EQ(got.recomputed, gaps.recomputed);
      EXPECT_EQ(got.kv->provenance(), chunk::Provenance::kApprox);
      if (std::string(choose) != "means") {
        EXPECT_DOUBLE_EQ(got.kept_share, gaps.kept_share);
      }
      const Tokens left = TokensAt(prompt.tokens, any);
      const Result want = Prefill(machine_, left, {.policy = "exact"});
      EXPECT_TRUE(SameBits(got.logits, want.logits)) << choose << ", " << question;
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (int32_t p = 0; p < static_cast<int32_t>(left.size()); p += 7) {
          ASSERT_TRUE(SameBits(Row(machine_, got, layer, 1, p, true), Row(machine_, want, layer, 1, p, true))) << p;
          ASSERT_TRUE(SameBits(Row(machine_, got, layer, 0, p, false), Row(machine_, want, layer, 0, p, false))) << p;
        }
      }
      got.kv->Truncate(got.kv->num_tokens());
      want.kv->Truncate(want.kv->num_tokens());
      EXPECT_EQ(got.kv->num_pages(), want.kv->num_pages());
      const Tokens next = RandomTokens(random, 5);
      const auto steps = Decode(machine_, *got.kv, next), wanted = Decode(machine_, *want.kv, next);
      for (size_t step = 0; step < next.size(); ++step)
        ASSERT_TRUE(SameBits(steps[step], wanted[step])) << choose << ", step " << step;
    }
  }
}

// recompute=attended: what stays a copy does so in what is left.
TEST_P(SamKvPolicyTest, CompactKeepsCopiesThatAreNotAttended) {
  std::mt19937 random = SeededRandom("compact, attended");
  const Prompt prompt(machine_, random, 4, 400, 900, 30);
  for (const char* choose : {"attention", "means"}) {
    ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.4, .recompute = "attended", .choose = choose};
    const Result gaps = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    reuse.compact = true;
    const Result got = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    EXPECT_EQ(got.recomputed, gaps.recomputed);
    EXPECT_LT(got.recomputed, CountOf(got.only));
    const Result copies = Prefill(machine_, prompt.tokens, {.policy = "naive"}, prompt.hits);
    PositionRanges documents;
    for (const SegmentHit& hit : prompt.hits) documents.push_back({hit.target, hit.target + hit.num_tokens});
    int64_t same = 0;
    int32_t target = 0;
    for (const PositionRange& range : got.only) {
      for (int32_t from = range.begin; from < range.end; ++from, ++target)
        same += ContainsPosition(documents, from) &&
                SameBits(Row(machine_, got, 3, 1, target, true), Row(machine_, copies, 3, 1, from, true));
    }
    EXPECT_EQ(same, CountOf(IntersectionOf(got.only, documents)) - got.recomputed) << choose;
  }
}

// Without recomputation the copies stand as they are, but for keys that turn twice: naive, of what is left.
TEST_P(SamKvPolicyTest, CompactWithoutRecomputationIsNaiveOfWhatIsLeft) {
  if (machine_.dtype() != kernels::DType::kF32) GTEST_SKIP() << "keys that turn twice are rounded twice";
  std::mt19937 random = SeededRandom("compact, naive");
  const Prompt prompt(machine_, random, 4, 400, 900, 30);
  const Result got =
      Prefill(machine_, prompt.tokens,
              {.policy = "samkv", .budget_ratio = 0.4, .recompute = "none", .choose = "attention", .compact = true},
              prompt.hits);
  EXPECT_EQ(got.recomputed, 0);
  std::vector<SegmentHit> hits;  // of what is left of each document
  for (const SegmentHit& hit : prompt.hits) {
    const PositionRange document{hit.target, hit.target + hit.num_tokens};
    for (const PositionRange& part : IntersectionOf(got.only, {&document, 1})) {
      const PositionRanges now = NumberedWithin({&part, 1}, got.only);
      hits.push_back({hit.source, part.begin - hit.target, now.front().begin, part.size()});
    }
  }
  const Result want = Prefill(machine_, TokensAt(prompt.tokens, got.only), {.policy = "naive"}, hits);
  EXPECT_LE(RelativeL2(got.logits, want.logits), machine_.tolerance());
}

// A budget below half a tile leaves the text around the documents: a prompt like any other, which is computed afresh.
TEST_P(SamKvPolicyTest, CompactMayLeaveOutEveryDocument) {
  std::mt19937 random = SeededRandom("compact, nothing kept");
  const Prompt prompt(machine_, random, 3, 100, 300, 30);
  PositionRanges documents;
  for (const SegmentHit& hit : prompt.hits) documents.push_back({hit.target, hit.target + hit.num_tokens});
  const PositionRanges around = ComplementOf(documents, {0, static_cast<int32_t>(prompt.tokens.size())});
  const Result want = Prefill(machine_, TokensAt(prompt.tokens, around), {.policy = "exact"});
  for (const char* recompute : {"samkv", "none"}) {
    const Result got = Prefill(
        machine_, prompt.tokens,
        {.policy = "samkv", .budget_ratio = 0.001, .recompute = recompute, .choose = "recovered", .compact = true},
        prompt.hits);
    EXPECT_EQ(got.only, around) << recompute;
    // The text saw the documents before they were left out.
    const bool afresh = recompute == std::string("samkv");
    EXPECT_EQ(SameBits(got.logits, want.logits), afresh) << recompute;
    for (const float x : got.logits) ASSERT_TRUE(std::isfinite(x)) << recompute;
  }
}

// A request that names no budget keeps 0.15 of the documents, but not less than 1,024 tokens.
TEST_P(SamKvPolicyTest, BudgetOfShortDocuments) {
  std::mt19937 random = SeededRandom("no budget");
  for (const char* choose : {"recovered", "means"}) {
    for (const int documents : {3, 6}) {
      const Prompt prompt(machine_, random, documents, 280, 340, 30);
      int64_t tokens = 0;
      for (const SegmentHit& hit : prompt.hits) tokens += hit.num_tokens;
      ReuseOptions reuse{.policy = "samkv", .choose = choose};
      const Result by_default = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
      reuse.budget_ratio = std::min(1.0, 1024.0 / static_cast<double>(tokens));
      const Result named = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
      EXPECT_EQ(by_default.kept, named.kept) << choose << ", " << documents;
      EXPECT_TRUE(SameBits(by_default.logits, named.logits)) << choose << ", " << documents;
      EXPECT_DOUBLE_EQ(by_default.kept_share, named.kept_share);
      EXPECT_EQ(by_default.kept_share == 1, documents == 3) << by_default.kept_share;
    }
  }
}

// recovered: what is left has the values that it has with gaps; with nothing left out nothing moves.
TEST_P(SamKvPolicyTest, CompactMovesWhatWasRecovered) {
  std::mt19937 random = SeededRandom("compact, recovered");
  const Prompt prompt(machine_, random, 4, 500, 900, 30);
  for (const double budget : {0.3, 1.0}) {
    ReuseOptions reuse{.policy = "samkv", .budget_ratio = budget};
    const Result gaps = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    reuse.compact = true;
    const Result got = Prefill(machine_, prompt.tokens, reuse, prompt.hits);
    EXPECT_EQ(got.recomputed, gaps.recomputed);
    EXPECT_DOUBLE_EQ(got.kept_share, gaps.kept_share);
    if (budget == 1) {
      EXPECT_TRUE(got.only.empty());
      EXPECT_TRUE(SameBits(got.logits, gaps.logits));
      continue;
    }
    EXPECT_EQ(got.only, gaps.kept[0]);
    EXPECT_FALSE(SameBits(got.logits, gaps.logits));
    int32_t target = 0;
    for (const PositionRange& range : got.only) {
      for (int32_t from = range.begin; from < range.end; ++from, ++target) {
        if (target % 9 != 0 || target + 1 == got.kv->num_tokens()) continue;
        for (int32_t layer = 0; layer < kLayers; ++layer)
          ASSERT_TRUE(SameBits(Row(machine_, got, layer, 1, target, true), Row(machine_, gaps, layer, 1, from, true)))
              << target << " from " << from;
      }
    }
  }
}

// Every selector that decodes behind kept tokens, with this budget.
std::vector<DecodeOptions> ChoosingSelectors(int32_t budget) {
  std::vector<DecodeOptions> all;
  for (const char* name : {"sparcas", "quest", "loopserve", "streaming", "snapkv", "adakv", "h2o"}) {
    DecodeOptions options(name);
    options.budget = budget;
    options.dense_layers = 1;
    options.recent = 16;
    options.refresh_interval = 5;
    options.dims = 8;
    if (options.selector != "h2o") options.window = 8;
    all.push_back(options);
  }
  return all;
}

// Whatever chooses: a budget beyond what is kept is what decodes everything that is kept, bit by bit; a smaller one is
// not; what a layer does not keep has no part in it; and all pages come back.
TEST_P(SamKvPolicyTest, EverySelectorChoosesAmongWhatIsKept) {
  std::mt19937 random = SeededRandom("selectors");
  for (const char* choose : {"attention", "means"}) {
    const Prompt prompt(machine_, random, 3, 500, 700, 60);
    const Result result =
        Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = 0.5, .choose = choose}, prompt.hits);
    const Result spoilt =
        Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = 0.5, .choose = choose}, prompt.hits);
    ASSERT_EQ(result.kept, spoilt.kept);
    Spoil(machine_, spoilt);
    result.kv->KeepOnly(KeptOf(result));
    spoilt.kv->KeepOnly(KeptOf(spoilt));
    const Tokens next = RandomTokens(random, 40);
    const int64_t free = machine_.pool->num_free();
    const auto decode = [&](const Result& from, const DecodeOptions& options) {
      auto fork = from.kv->Fork();
      EXPECT_TRUE(fork.ok()) << fork.status();
      return Decode(machine_, **fork, next, options, prompt.tokens);
    };
    const auto everything = decode(result, {});
    for (const DecodeOptions& options : ChoosingSelectors(4096)) {
      const auto got = decode(result, options);
      for (size_t step = 0; step < next.size(); ++step)
        ASSERT_TRUE(SameBits(got[step], everything[step])) << options.selector << ", " << choose << ", step " << step;
    }
    for (const DecodeOptions& options : ChoosingSelectors(64)) {
      const auto got = decode(result, options), again = decode(spoilt, options);
      double apart = 0;
      for (size_t step = 0; step < next.size(); ++step) {
        apart = std::max(apart, RelativeL2(got[step], everything[step]));
        ASSERT_TRUE(SameBits(got[step], again[step])) << options.selector << ", " << choose << ", step " << step;
        for (const float x : got[step]) ASSERT_TRUE(std::isfinite(x)) << options.selector;
      }
      EXPECT_GT(apart, 1e-4) << options.selector << ", " << choose << ": nothing was left out";
    }
    EXPECT_EQ(machine_.pool->num_free(), free);
    machine_.pool->CheckInvariants();
  }
}

// A cascade keeps lists of its own, and says that it cannot choose among kept tokens.
TEST_P(SamKvPolicyTest, CascadesAreRefused) {
  std::mt19937 random = SeededRandom("cascades");
  const Result result = Prefill(machine_, RandomTokens(random, 200), {.policy = "exact"});
  Result some;
  some.kv = *result.kv->Fork();
  some.kept.assign(kLayers, {{0, 100}, {150, 200}});
  some.kv->KeepOnly(KeptOf(some));
  for (const absl::Status& status : {MakeSelectorFor(*some.kv, "cascade", *machine_.model).status(),
                                     MakeSelectorBehind("samkv", 200, "cascade", *machine_.model, nullptr).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_NE(std::string(status.message()).find("choose sparcas or loopserve"), std::string::npos) << status;
  }
  EXPECT_TRUE(MakeSelectorFor(*result.kv, "cascade", *machine_.model).ok());
}

// With everything kept, a selector chooses what it does of a sequence that leaves nothing out.
TEST_P(SamKvPolicyTest, WithNothingLeftOutSelectorsChooseTheSame) {
  // Attention over a list is cut elsewhere than over a sequence. Rounded to bf16 that is a bit here and there, and of
  // two tokens that weigh the same the other one is chosen.
  if (GetParam() == "cuda_bf16") GTEST_SKIP() << "which of nearly equal tokens is chosen follows the rounding";
  std::mt19937 random = SeededRandom("everything kept");
  const Tokens prompt = RandomTokens(random, 700);
  const Result whole = Prefill(machine_, prompt, {.policy = "exact"});
  const Tokens next = RandomTokens(random, 24);
  const double tolerance = machine_.tolerance();
  for (const DecodeOptions& options : ChoosingSelectors(96)) {
    auto kept = whole.kv->Fork(), plain = whole.kv->Fork();
    ASSERT_TRUE(kept.ok() && plain.ok());
    Result all;
    all.kv = *std::move(kept);
    all.kept.assign(kLayers, {{0, 700}});
    all.kv->KeepOnly(KeptOf(all));
    const auto got = Decode(machine_, *all.kv, next, options, prompt),
               want = Decode(machine_, **plain, next, options, prompt);
    for (size_t step = 0; step < next.size(); ++step)
      EXPECT_LE(RelativeL2(got[step], want[step]), tolerance) << options.selector << ", step " << step;
  }
}

// A step of sequences with lists and without, which choose or do not, is for each of them what it is alone, recorded or
// not.
TEST_P(SamKvPolicyTest, MixedStepsAreAsAlone) {
  for (const std::string chooses : {"", "sparcas", "quest", "loopserve"}) MixSteps(chooses);
}

void SamKvPolicyTest::MixSteps(const std::string& chooses) {
  std::mt19937 random = SeededRandom(("mixed steps, " + chooses).c_str());
  std::vector<std::shared_ptr<SequenceKv>> together, alone;
  std::vector<Tokens> prompts;
  const auto named = [&](const std::string& name) -> DecodeOptions {
    for (const DecodeOptions& options : ChoosingSelectors(64)) {
      if (options.selector == name) return options;
    }
    return {};
  };
  // Only one way to score in a step, but lists go along with any.
  const std::vector<DecodeOptions> options = {
      {}, named(chooses), named("snapkv"), named(chooses), named("streaming"), named(chooses)};
  for (const double budget : {0.3, 1.0, 0.6, 0.4, 0.4, 0.8}) {  // the second one dense
    const Prompt prompt(machine_, random, 3, 300, 450, 30);
    prompts.push_back(prompt.tokens);
    const bool dense = budget == 1.0;
    const Result result =
        dense ? Prefill(machine_, prompt.tokens, {.policy = "exact"})
              : Prefill(machine_, prompt.tokens, {.policy = "samkv", .budget_ratio = budget}, prompt.hits);
    if (!dense) result.kv->KeepOnly(KeptOf(result));
    auto fork = result.kv->Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    together.push_back(result.kv);
    alone.push_back(*std::move(fork));
  }
  std::vector<std::unique_ptr<Decoding>> decodings;
  for (size_t i = 0; i < together.size(); ++i)
    decodings.push_back(std::make_unique<Decoding>(machine_, *together[i], options[i], prompts[i]));
  const Tokens next = RandomTokens(random, 70);
  std::vector<std::vector<std::vector<float>>> got(together.size()), want;
  for (const int32_t token : next) {
    std::vector<DecodeRow> rows;
    for (const auto& decoding : decodings) rows.push_back(decoding->Row(token));
    const absl::Status status = machine_.executor->Decode(rows);
    ASSERT_TRUE(status.ok()) << status;
    const auto logits = machine_.executor->Logits();
    ASSERT_TRUE(logits.ok());
    const size_t vocab = logits->size() / rows.size();
    for (size_t i = 0; i < rows.size(); ++i) {
      got[i].emplace_back(logits->begin() + static_cast<std::ptrdiff_t>(i * vocab),
                          logits->begin() + static_cast<std::ptrdiff_t>((i + 1) * vocab));
      together[i]->set_num_tokens(together[i]->num_tokens() + 1);
    }
  }
  for (size_t i = 0; i < alone.size(); ++i) want.push_back(Decode(machine_, *alone[i], next, options[i], prompts[i]));
  for (size_t i = 0; i < want.size(); ++i) {
    for (size_t step = 0; step < next.size(); ++step)
      ASSERT_TRUE(SameBits(got[i][step], want[i][step]))
          << "beside " << chooses << ", sequence " << i << ", step " << step;
  }
}

TEST(KeptTokensTest, BadListsAreRefused) {
  const auto check = [](std::vector<PositionRanges> layers) {
    return std::string(ValidateKeptTokens({100, std::move(layers)}, 2, 100).message());
  };
  EXPECT_EQ(check({{{0, 100}}, {{0, 10}, {20, 100}}}), "");
  EXPECT_THAT(check({{{0, 100}}}), testing::HasSubstr("1 layers"));
  EXPECT_THAT(check({{{0, 100}}, {{0, 99}}}), testing::HasSubstr("layer 1 end in front of position 99,"));
  EXPECT_THAT(check({{{0, 100}}, {{20, 100}, {0, 10}}}), testing::HasSubstr("layer 1"));
  EXPECT_THAT(check({{{0, 101}}, {{0, 100}}}), testing::HasSubstr("layer 0"));
  EXPECT_THAT(check({{{-5, 100}}, {{0, 100}}}), testing::HasSubstr("layer 0"));
  EXPECT_THAT(check({{}, {{0, 100}}}), testing::HasSubstr("layer 0"));
}

INSTANTIATE_TEST_SUITE_P(Devices, SamKvPolicyTest, testing::Values("cpu", "cpu_bf16", "ranks", "cuda", "cuda_bf16"),
                         [](const auto& param) { return param.param; });

// Naive reuse restricted to kept tiles, against plain loops with sums in double; what is recomputed and blended, too;
// and decoding from it.
class SamKvReferenceTest : public testing::TestWithParam<std::string> {};

TEST_P(SamKvReferenceTest, AgreesWithTheDefinitions) {
  if (test::KvType().has_value()) GTEST_SKIP() << "keys between two codes become different ones on two backends";
  Machine fast(GetParam()), plain("ref");
  if (!fast.there()) GTEST_SKIP() << "no such device";
  constexpr const char* kChoices[] = {"recovered", "attention", "means"};
  for (const char* recompute : {"none", "samkv", "sparsex", "attended"}) {
    for (const char* choose : kChoices) {
      const bool sparsex = std::string(recompute) == "sparsex", attended = std::string(recompute) == "attended";
      if ((sparsex || attended) && std::string(choose) == "recovered") continue;
      std::mt19937 a(11), b(11);
      const Prompt prompt(fast, a, 3, 300, 450, 20), same(plain, b, 3, 300, 450, 20);
      ASSERT_EQ(prompt.tokens, same.tokens);
      const ReuseOptions reuse{.policy = "samkv",
                               .budget_ratio = 0.7,
                               .fusion = std::string(choose) == "means" && !sparsex,
                               .recompute = recompute,
                               .choose = choose};
      if (attended) {  // the same lists: that they agree but for ties is shown above
        Prefill(fast, prompt.tokens, reuse, prompt.hits);
        for (size_t i = 0; i < prompt.hits.size(); ++i) {
          const auto summary = prompt.hits[i].source->summary();
          same.hits[i].source->KeepSummary({{}, summary->local_query, summary->attended});
        }
      }
      const Result got = Prefill(fast, prompt.tokens, reuse, prompt.hits),
                   want = Prefill(plain, same.tokens, reuse, same.hits);
      EXPECT_EQ(got.kept, want.kept);
      EXPECT_LT(got.kept_share, 1);
      // Whole models on a GPU: as the golden ones.
      const double tolerance = GetParam() == "cuda" ? 1e-4 : kernels::ToleranceFor(kernels::DType::kF32).relative_l2;
      EXPECT_LE(RelativeL2(got.logits, want.logits), tolerance) << recompute << ", " << choose;
      got.kv->KeepOnly(KeptOf(got));
      want.kv->KeepOnly(KeptOf(want));
      Tokens next;  // what the definitions would say next
      next.push_back(
          static_cast<int32_t>(std::max_element(want.logits.begin(), want.logits.end()) - want.logits.begin()));
      Decoding of_fast(fast, *got.kv), of_plain(plain, *want.kv);
      for (int step = 0; step < 6; ++step) {
        std::vector<float> logits[2];
        for (const auto& [machine, decoding, to] :
             {std::tuple{&fast, &of_fast, &logits[0]}, std::tuple{&plain, &of_plain, &logits[1]}}) {
          const DecodeRow row = decoding->Row(next.back());
          ASSERT_TRUE(machine->executor->Decode({&row, 1}).ok());
          decoding->kv->set_num_tokens(decoding->kv->num_tokens() + 1);
          const auto span = machine->executor->Logits();
          ASSERT_TRUE(span.ok());
          to->assign(span->begin(), span->end());
        }
        EXPECT_LE(RelativeL2(logits[0], logits[1]), tolerance) << "step " << step;
        const auto most = [](const std::vector<float>& of) {
          return std::max_element(of.begin(), of.end()) - of.begin();
        };
        EXPECT_EQ(most(logits[0]), most(logits[1])) << "step " << step;
        next.push_back(static_cast<int32_t>(most(logits[1])));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, SamKvReferenceTest, testing::Values("cpu", "ranks", "cuda"),
                         [](const auto& param) { return param.param; });

// bf16 and tensor cores against the definitions over the same weights; no tile is chosen by scores, so that both keep
// the same.
TEST(SamKvBf16Test, AgreesWithTheDefinitions) {
  Machine fast("cuda_bf16"), plain("ref_bf16");
  if (!fast.there()) GTEST_SKIP() << "no such device";
  for (const char* recompute : {"none", "samkv"}) {
    std::mt19937 a(12), b(12);
    const Prompt prompt(fast, a, 4, 300, 700, 200), same(plain, b, 4, 300, 700, 200);
    const ReuseOptions reuse{.policy = "samkv", .budget_ratio = 0.01, .recompute = recompute, .choose = "attention"};
    const Result got = Prefill(fast, prompt.tokens, reuse, prompt.hits),
                 want = Prefill(plain, same.tokens, reuse, same.hits);
    EXPECT_EQ(got.kept, want.kept);
    EXPECT_LT(got.kept_share, 0.5);
    // What the same model differs by when nothing is left out: lists add nothing to that.
    const double dense = RelativeL2(Prefill(fast, prompt.tokens, {.policy = "exact"}).logits,
                                    Prefill(plain, same.tokens, {.policy = "exact"}).logits);
    EXPECT_LE(RelativeL2(got.logits, want.logits),
              std::max(2 * dense, kernels::ToleranceFor(kernels::DType::kBF16).relative_l2))
        << recompute << ", dense " << dense;
  }
}

TEST(SamKvRefusalTest, SaysWhatItDoesNotServe) {
  const auto refuse = [](const ReuseOptions& reuse) {
    const ModelConfig config = ParseModelConfig(kConfig, "test").value();
    return MakeRecoveryPolicy(reuse, config).status();
  };
  const absl::Status budget = refuse({.policy = "samkv", .budget_ratio = 1.5});
  EXPECT_EQ(budget.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(budget.message(), testing::HasSubstr("budget_ratio is 1.5"));
  EXPECT_THAT(refuse({.policy = "samkv", .choose = "luck"}).message(), testing::HasSubstr("choose is 'luck'"));
  const absl::Status recompute = refuse({.policy = "samkv", .recompute = "all"});
  EXPECT_EQ(recompute.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(recompute.message(), testing::HasSubstr("recompute is 'all'"));
  EXPECT_THAT(refuse({.policy = "samkv", .recompute = "sparsex"}).message(),
              testing::HasSubstr("set choose to attention or means"));
  const absl::Status attended = refuse({.policy = "samkv", .recompute = "attended"});
  EXPECT_EQ(attended.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(attended.message(), testing::HasSubstr("recompute is 'attended', and choose is 'recovered'"));
  for (const char* choose : {"attention", "means"})
    EXPECT_EQ(refuse({.policy = "samkv", .fusion = true, .recompute = "attended", .choose = choose}), absl::OkStatus());
  EXPECT_THAT(refuse({.policy = "samkv", .fusion = true}).message(), testing::HasSubstr("fusion is true"));
  EXPECT_EQ(refuse({.policy = "samkv", .recompute = "sparsex", .choose = "attention"}), absl::OkStatus());
}

}  // namespace
}  // namespace spl::engine
