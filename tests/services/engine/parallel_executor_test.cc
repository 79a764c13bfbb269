// A model split over ranks against the same model on one: weights, pages, logits, passes that are cancelled or fail.
#include "services/engine/execution/parallel_executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <numeric>
#include <random>

#include "services/engine/engine.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/selection/dense.h"
#include "tests/support/background_idle.h"
#include "tests/support/engine_devices.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

using test::RelativeL2;

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

Devices F32Devices(int ranks) {
  Devices devices;
  for (int r = 0; r < ranks; ++r) devices.push_back(kernels::MakeCpuBackend({.gemm = kernels::GemmCompute::kF32}));
  return devices;
}

std::shared_ptr<const Model> LoadTiny(int ranks) {
  auto model = Model::Load(test::kTinyModel, F32Devices(ranks), {.kv_dtype = kernels::DType::kF32});
  EXPECT_TRUE(model.ok()) << model.status();
  return *model;
}

TEST(Shard, PartsCoverTheWholeInOrder) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int64_t vocab : {64ll, 4096ll, 128256ll, 151936ll, 151937ll}) {
      int64_t end = 0;
      for (int r = 0; r < ranks; ++r) {
        const Range part = Shard{r, ranks}.VocabPart(vocab);
        EXPECT_EQ(part.begin, end);
        EXPECT_EQ(part.begin % 8, 0);
        EXPECT_GT(part.size(), 0);
        end = part.end;
      }
      EXPECT_EQ(end, vocab);
    }
    EXPECT_EQ((Shard{ranks - 1, ranks}.PartOf(64).end), 64);
  }
}

TEST(Shard, RefusesWhatDoesNotDivideAndSaysWhich) {
  ModelConfig config;
  config.name = "m";
  config.num_kv_heads = 4;
  config.num_qo_heads = 12;
  config.intermediate_size = 96;
  config.vocab_size = 1000;
  EXPECT_TRUE(ValidateNumRanks(config, 4).ok());
  EXPECT_THAT(ValidateNumRanks(config, 3).ToString(), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("--tp is 3")));
  EXPECT_THAT(ValidateNumRanks(config, 8).ToString(), AllOf(HasSubstr("num_key_value_heads = 4"), HasSubstr("8")));
  config.num_kv_heads = 8;
  EXPECT_THAT(ValidateNumRanks(config, 8).ToString(), HasSubstr("num_attention_heads = 12"));
  config.num_qo_heads = 8;
  config.intermediate_size = 100;
  EXPECT_THAT(ValidateNumRanks(config, 8).ToString(), HasSubstr("intermediate_size = 100"));
  config.intermediate_size = 96;
  config.moe.intermediate_size = 20;
  EXPECT_THAT(ValidateNumRanks(config, 8).ToString(), HasSubstr("moe_intermediate_size = 20"));
  config.moe.intermediate_size = 0;
  config.vocab_size = 60;
  EXPECT_THAT(ValidateNumRanks(config, 8).ToString(), HasSubstr("vocab_size = 60"));
  // Splice-tiny has four KV heads.
  EXPECT_THAT(Model::Load(test::kTinyModel, F32Devices(8)).status().ToString(),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("num_key_value_heads = 4")));
}

TEST(Shard, TheModelIsTheSameForEveryNumberOfRanks) {
  const auto one = LoadTiny(1), four = LoadTiny(4);
  EXPECT_EQ(one->fingerprint(), four->fingerprint());
  EXPECT_EQ(one->layout_digest(), four->layout_digest());
  EXPECT_EQ(one->page_bytes(), four->page_bytes());
  EXPECT_EQ(four->num_ranks(), 4);
  EXPECT_EQ(four->rank(3).config().num_kv_heads * 4, one->config().num_kv_heads);
}

std::vector<int32_t> Prompt(size_t length, int32_t vocab) {
  std::mt19937 random(static_cast<uint32_t>(length));
  std::vector<int32_t> prompt(length);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab));
  return prompt;
}

// Seeded weights of a model with experts, biases, q and k norms and an uneven vocabulary: a rank makes only its part.
TEST(ParallelExecutor, SeededModelsWithExpertsGiveTheSameLogits) {
  const fs::path dir =
      fs::path(testing::TempDir()) / ("ranks-" + std::to_string(std::random_device{}())) / "little-moe";
  fs::create_directories(dir);
  std::ofstream(dir / "config.json") << R"({
      "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
      "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 301,
      "max_position_embeddings": 512, "torch_dtype": "bfloat16", "num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 40, "norm_topk_prob": true, "mlp_only_layers": [1], "attention_bias": true,
      "tie_word_embeddings": false})";
  const auto random = ParseRandomModel((dir / "config.json").string() + ":11");
  ASSERT_TRUE(random.ok()) << random.status();
  std::vector<float> want;
  chunk::Digest fingerprint{};
  for (const int ranks : {1, 2, 4}) {
    auto model = Model::LoadRandom(*random, F32Devices(ranks), {.kv_dtype = kernels::DType::kF32});
    ASSERT_TRUE(model.ok()) << model.status();
    auto generator = LocalGenerator::Create(*model, {.executor = {.max_rows = 64}, .max_tokens = 256});
    ASSERT_TRUE(generator.ok()) << generator.status();
    auto logits = (*generator)->AllLogits(Prompt(150, 301));
    ASSERT_TRUE(logits.ok()) << logits.status();
    if (ranks == 1) {
      want = *logits;
      fingerprint = (*model)->fingerprint();
      continue;
    }
    EXPECT_LE(RelativeL2(*logits, want), 1e-5) << ranks;
    EXPECT_EQ((*model)->fingerprint(), fingerprint);
  }
  fs::remove_all(dir.parent_path());
}

TEST(ParallelExecutor, GeneratesTheSameTextWithForksAndPenalties) {
  SamplingParams greedy, sampled, cut;
  greedy.temperature = 0;
  greedy.max_tokens = 24;
  greedy.ignore_eos = true;
  sampled = greedy;
  sampled.temperature = 0.8f;
  sampled.seed = 5;
  sampled.num_forks = 3;  // forks copy the unfinished page of every rank
  sampled.repetition_penalty = 1.1f;
  cut = sampled;
  cut.num_forks = 1;
  cut.top_k = 40;
  cut.top_p = 0.9f;
  cut.num_logprobs = 5;
  const std::vector<int32_t> prompt = Prompt(200, 4000);
  std::vector<std::vector<int32_t>> want;
  for (const int ranks : {1, 2, 4}) {
    auto generator = LocalGenerator::Create(LoadTiny(ranks), {.executor = {.max_rows = 128}, .max_tokens = 512});
    ASSERT_TRUE(generator.ok()) << generator.status();
    std::vector<std::vector<int32_t>> got;
    for (const SamplingParams& sampling : {greedy, sampled, cut}) {
      got.emplace_back();
      const absl::Status status = (*generator)->Generate(prompt, sampling, [&](int32_t, const SampledToken& token) {
        got.back().push_back(token.token);
        EXPECT_EQ(token.logprob.has_value(), sampling.num_logprobs.has_value());
        EXPECT_EQ(token.logprob.has_value() ? token.logprob->top.size() : 5, 5u);
        return true;
      });
      ASSERT_TRUE(status.ok()) << status;
    }
    if (ranks == 1) want = got;
    EXPECT_EQ(got, want) << ranks;
  }
}

class PassTest : public testing::Test {
 protected:
  void Make(std::shared_ptr<const Model> model) {
    model_ = std::move(model);
    auto memory = AllocateKvMemory(*model_, PagesForTokens(model_->config(), 1024));
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_.emplace(std::move(*memory));
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    auto executor = ParallelExecutor::Create(model_, memory_->pages, {.max_rows = 256, .max_sequences = 4});
    ASSERT_TRUE(executor.ok()) << executor.status();
    executor_ = std::move(*executor);
  }
  absl::Status Prefill(SequenceKv& kv, const std::vector<int32_t>& prompt, const Executor::OnLayer& on_layer) {
    ExactPolicy policy(model_->config());
    std::vector<int32_t> positions(prompt.size());
    std::iota(positions.begin(), positions.end(), 0);
    const PrefillSlice slice{prompt, positions, &kv, &policy};
    return executor_->Prefill({&slice, 1}, on_layer);
  }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
};

TEST_F(PassTest, LayersAreToldOnceInOrderWhenAllRanksHaveWrittenTheirs) {
  Make(LoadTiny(4));
  const auto prompt = Prompt(100, 4000);
  SequenceKv kv(*pool_, KvShapeOf(model_->config()));
  ASSERT_TRUE(kv.Reserve(100).ok());
  // The pages that the whole pass leaves, to compare with what they hold when the layer is told.
  ASSERT_TRUE(Prefill(kv, prompt, nullptr).ok());
  const std::vector<int32_t> all = kv.AllPages();
  std::vector<std::byte> want(all.size() * model_->page_bytes()), got(want.size());
  ASSERT_TRUE(pool_->ReadPages(all, want.data()).ok());
  for (int32_t page : all) std::memset(pool_->view().k(page), 0, model_->page_bytes());
  std::vector<int32_t> layers;
  const size_t layer_bytes = want.size() / static_cast<size_t>(model_->config().num_layers);
  ASSERT_TRUE(Prefill(kv, prompt, [&](int32_t layer) {
                EXPECT_EQ(executor_->RecordFence(), nullptr);  // the host's operations are complete when they return
                layers.push_back(layer);
                EXPECT_TRUE(pool_->ReadPages(all, got.data()).ok());
                EXPECT_EQ(std::memcmp(got.data() + static_cast<size_t>(layer) * layer_bytes,
                                      want.data() + static_cast<size_t>(layer) * layer_bytes, layer_bytes),
                          0)
                    << layer;
                return true;
              }).ok());
  ASSERT_EQ(layers.size(), static_cast<size_t>(model_->config().num_layers));
  for (size_t i = 0; i < layers.size(); ++i) EXPECT_EQ(layers[i], static_cast<int32_t>(i));
}

TEST_F(PassTest, ACancelledPassEndsOnAllRanksAndTheNextOneRuns) {
  Make(LoadTiny(2));
  SequenceKv kv(*pool_, KvShapeOf(model_->config()));
  ASSERT_TRUE(kv.Reserve(200).ok());
  for (const int32_t at : {0, 3, model_->config().num_layers - 1}) {
    int32_t last = -1;
    const absl::Status status = Prefill(kv, Prompt(200, 4000), [&](int32_t layer) {
      last = layer;
      return layer < at;
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
    EXPECT_EQ(last, at);
  }
  EXPECT_TRUE(Prefill(kv, Prompt(200, 4000), nullptr).ok());
}

TEST_F(PassTest, TooLargePassesAreRefusedAndHarmNothing) {
  Make(LoadTiny(2));
  SequenceKv kv(*pool_, KvShapeOf(model_->config()));
  ASSERT_TRUE(kv.Reserve(300).ok());
  EXPECT_EQ(Prefill(kv, Prompt(300, 4000), nullptr).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Prefill(kv, Prompt(256, 4000), nullptr).ok());
  const std::vector<int32_t> rows(257, 0);
  EXPECT_EQ(executor_->ComputeLogits(rows).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(PassTest, ARankWhoseDeviceIsLostEndsTheGroupWithinTheDeadline) {
  auto lost = std::make_shared<test::FakeDeviceBackend>();
  auto model = Model::Load(test::kTinyModel, Devices{std::make_shared<test::FakeDeviceBackend>(), lost});
  ASSERT_TRUE(model.ok()) << model.status();
  Make(*model);
  SequenceKv kv(*pool_, KvShapeOf(model_->config()));
  ASSERT_TRUE(kv.Reserve(100).ok());
  ASSERT_TRUE(Prefill(kv, Prompt(100, 4000), nullptr).ok());
  lost->lost = true;
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status = Prefill(kv, Prompt(100, 4000), nullptr);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;  // as of a lost device: the worker ends
  EXPECT_THAT(status.ToString(), AllOf(HasSubstr("rank 1 of 2"), HasSubstr("illegal memory access")));
  lost->lost = false;
  EXPECT_EQ(Prefill(kv, Prompt(100, 4000), nullptr).code(), absl::StatusCode::kDataLoss);  // for good
}

TEST_F(PassTest, PagesOfAHeadAreOnTheRankThatHasIt) {
  Make(LoadTiny(2));
  const ModelConfig& c = model_->config();
  const int64_t free = pool_->num_free();
  {
    SequenceKv kv(*pool_, KvShapeOf(c));
    ASSERT_TRUE(kv.Reserve(130).ok());
    for (int32_t layer = 0; layer < c.num_layers; ++layer) {
      for (int32_t head = 0; head < c.num_kv_heads; ++head) {
        ASSERT_EQ(kv.stream(layer, head).size(), 3u);
        for (int32_t page : kv.stream(layer, head))
          EXPECT_EQ(pool_->view().rank_of(page), head / (c.num_kv_heads / 2)) << layer << " " << head;
      }
    }
    pool_->CheckInvariants();
    EXPECT_EQ(pool_->num_free(), free - PagesForTokens(c, 130));
  }
  pool_->CheckInvariants();
  EXPECT_EQ(pool_->num_free(), free);
  SequenceKv whole(*pool_, KvShapeOf(c));
  EXPECT_TRUE(whole.Reserve(1024).ok());
  EXPECT_EQ(pool_->num_free(), 0);
  SequenceKv none(*pool_, KvShapeOf(c));
  EXPECT_EQ(none.Reserve(1).code(), absl::StatusCode::kResourceExhausted);
}

// What a token scores is the sum over all heads, wherever they are: the best of the sums need not be any rank's best.
TEST(ParallelExecutor, TheBestOfSeveralRanksAreThoseOfTheirSums) {
  const auto model = LoadTiny(2);
  auto memory = AllocateKvMemory(*model, PagesForTokens(model->config(), 256));
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto executor = ParallelExecutor::Create(model, memory->pages, {.num_threads = 2, .max_rows = 64});
  ASSERT_TRUE(executor.ok()) << executor.status();
  const auto scores = (*executor)->TakeScores(6);
  ASSERT_TRUE(scores.ok()) << scores.status();
  const std::vector<std::vector<float>> parts = {{9, 0, 5, 0, 4, 1}, {0, 8, 5, 0, 5.5, 1}};
  for (int r = 0; r < 2; ++r)
    ASSERT_TRUE(model->rank(r)
                    .backend()
                    .Copy(kernels::CopyKind::kUpload, (*scores)[r]->data(), parts[r].data(), 6 * sizeof(float))
                    .ok());
  const auto best = (*executor)->SelectTop(*scores, 6, 0, 2);
  ASSERT_TRUE(best.ok()) << best.status();
  EXPECT_EQ(*best, (std::vector<int32_t>{2, 4}));
}

// The whole way through an engine on two ranks: a copied document with all of it recomputed, text behind the copy that
// becomes a source in the background, and the tokens of the same engine without reuse.
TEST(ParallelExecutor, AnEngineOfTwoRanksReusesSegments) {
  const auto model = LoadTiny(2);
  auto memory = AllocateKvMemory(*model, PagesForTokens(model->config(), 4096));
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto engine = PrefillEngine::Create(model, memory->pages, {.executor = {.num_threads = 2, .max_rows = 256}});
  ASSERT_TRUE(engine.ok()) << engine.status();
  constexpr chunk::Digest kDocs{1};
  const auto run = [&](const std::vector<int32_t>& tokens, std::vector<ReuseSpan> segments, const char* policy) {
    std::promise<std::pair<PrefillStats, int32_t>> done;
    PrefillRequest request;
    request.tokens = tokens;
    request.segments = std::move(segments);
    request.reuse = {.policy = policy, .recompute_share = 1, .recompute_max = 1 << 20};
    request.sampling.temperature = 0;
    request.on_done = [&](const absl::Status& status, const PrefillOutcome& outcome) {
      EXPECT_TRUE(status.ok()) << status;
      done.set_value({outcome.stats, status.ok() ? outcome.first_tokens[0].token : -1});
    };
    EXPECT_TRUE((*engine)->Submit(std::move(request)).ok());
    return done.get_future().get();
  };
  const auto join = [](const std::vector<std::vector<int32_t>>& parts) {
    std::vector<int32_t> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const auto document = Prompt(200, 4000), lead = Prompt(33, 4000), text = Prompt(150, 4000), end = Prompt(9, 4000);
  (void)run(document, {{{0, 200}, kDocs}}, "exact");
  const auto prompt = join({lead, document, text, end});
  const auto reused = run(prompt, {{{33, 233}, kDocs}, {{233, 383}, kDocs}}, "sparsex");
  EXPECT_EQ(reused.first.aligned_tokens, 200);
  EXPECT_EQ(reused.first.recomputed_tokens, 200);
  ASSERT_TRUE(test::WaitBackgroundIdle(**engine));
  EXPECT_EQ((*engine)->canonical_stats().num_computed, 1u);
  const auto both = run(join({end, text, lead}), {{{9, 159}, kDocs}}, "naive");
  EXPECT_EQ(both.first.aligned_tokens, 150);
  const auto exact = run(prompt, {}, "exact");
  EXPECT_TRUE(exact.first.exact);
  EXPECT_EQ(reused.second, exact.second);
  (*engine)->Stop();
}

}  // namespace
}  // namespace spl::engine
