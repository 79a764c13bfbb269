// Comparing steps that choose tokens with the same steps over everything.
#include <numeric>

#include "services/engine/execution/parallel_executor.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/engine_devices.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

TEST(LogitAgreement, ByHand) {
  const std::vector<float> a = {3, 4, 0};
  LogitAgreement same = CompareLogits(a, a);
  EXPECT_NEAR(same.cosine, 1, 1e-12);
  EXPECT_TRUE(same.top1);
  EXPECT_EQ(same.top10, 1);
  const std::vector<float> b = {4, 3, 0};
  EXPECT_NEAR(CompareLogits(a, b).cosine, 24.0 / 25, 1e-12);
  EXPECT_FALSE(CompareLogits(a, b).top1);
  std::vector<float> falling(40), shifted(40);
  for (int i = 0; i < 40; ++i) {
    falling[static_cast<size_t>(i)] = static_cast<float>(-i);
    shifted[static_cast<size_t>((i + 3) % 40)] = static_cast<float>(-i);
  }
  EXPECT_NEAR(CompareLogits(shifted, falling).top10, 0.7, 1e-12);
}

// What a step's attention pays to what a selector leaves, by hand: the step's own queries and the keys.
class KeptMassTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int32_t kLayers = 3, kKvHeads = 2, kQueryHeads = 8, kDim = 64, kLength = 300;

  void SetUp() override {
    const auto devices = test::DevicesOf(GetParam(), GetParam() == "ranks" ? 2 : 1);
    if (!devices.ok()) GTEST_SKIP() << devices.status();
    auto config = ParseModelConfig(R"({"architectures":["LlamaForCausalLM"],"hidden_size":128,"intermediate_size":256,
        "num_hidden_layers":3,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":64,"vocab_size":512,
        "max_position_embeddings":4096,"rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1,
        "torch_dtype":"bfloat16"})",
                                   "test");
    model_ = *Model::LoadRandom({*config, 7}, *devices);
    memory_.emplace(*AllocateKvMemory(*model_, PagesForTokens(*config, 4096)));
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    executor_ = *ParallelExecutor::Create(model_, memory_->pages, {.num_threads = 2, .max_rows = 512});
  }
  std::unique_ptr<TokenSelector> Selector(const char* name, int32_t budget) const {
    DecodeOptions options(name);
    options.budget = budget;
    options.recent = 8;
    options.dense_layers = 0;
    return *MakeTokenSelector(options, model_->config(), nullptr);
  }
  std::unique_ptr<SequenceKv> Sequence(const std::vector<int32_t>& prompt) {
    auto kv = std::make_unique<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(kv->Reserve(kLength + 1).ok());
    std::vector<int32_t> positions(prompt.size());
    std::iota(positions.begin(), positions.end(), 0);
    const auto exact = *MakeRecoveryPolicy({.policy = "exact"}, model_->config());
    const PrefillSlice slice{.tokens = prompt, .positions = positions, .kv = kv.get(), .policy = exact.get()};
    EXPECT_TRUE(executor_->Prefill({&slice, 1}).ok());
    kv->set_num_tokens(kLength);
    return kv;
  }
  // Row `row` of a page whose rows have kDim elements; `second`: of its second half.
  std::vector<double> PageRow(int32_t page, int64_t row, kernels::DType dtype, bool second = false) const {
    std::vector<std::byte> bytes(model_->page_bytes());
    EXPECT_TRUE(pool_->ReadPages({&page, 1}, bytes.data()).ok());
    const std::byte* const at = bytes.data() + (second ? bytes.size() / 2 : 0);
    std::vector<double> out;
    for (int64_t i = row * kDim; i < (row + 1) * kDim; ++i)
      out.push_back(dtype == kernels::DType::kF32
                        ? double{reinterpret_cast<const float*>(at)[i]}
                        : double{kernels::ToFloat(reinterpret_cast<const kernels::bf16*>(at)[i])});
    return out;
  }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
};

TEST_P(KeptMassTest, IsTheAttentionOnWhatIsKept) {
  std::mt19937 random = SeededRandom("kept mass");
  const auto kv = Sequence(test::RandomTokens(random, kLength)), other = Sequence(test::RandomTokens(random, kLength));
  const auto everything = Selector("dense", 64), recorder = Selector("loopserve", 4096),
             some = Selector("streaming", 64), more = Selector("streaming", 128), quest = Selector("quest", 96),
             whole = Selector("streaming", 4096);
  // The queries of this very step, which the recorder keeps; layer 0's are the same whatever is chosen.
  const auto compact = *MakeCompactPages(*recorder, *model_, *pool_, kLength);
  ASSERT_TRUE(compact->Reserve(1).ok());
  const DecodeRow record{77, kv.get(), recorder.get(), compact.get()};
  ASSERT_TRUE(executor_->Decode({&record, 1}).ok());
  const kernels::DType query_type = model_->rank(0).backend().activation_dtype(model_->config().dtype);
  const auto measure = [&](TokenSelector& selector, bool beside) {
    MassProbe probe{.everything = everything.get(), .kept = std::vector<float>(size_t{kLayers} * kQueryHeads)};
    const auto pages = *MakeCompactPages(selector, *model_, *pool_, kLength);
    EXPECT_TRUE(pages == nullptr || pages->Reserve(kLength + 1).ok());
    everything->BeginStep(kLength + 1);
    std::vector<DecodeRow> rows = {{77, kv.get(), &selector, pages.get(), &probe}};
    if (beside) rows.insert(rows.begin(), DecodeRow{5, other.get(), whole.get()});
    EXPECT_TRUE(executor_->Decode(rows).ok());
    return probe.kept;
  };
  const auto kept = measure(*some, false);
  for (int32_t head = 0; head < kQueryHeads; ++head) {
    const int32_t kv_head = head / (kQueryHeads / kKvHeads), g = head % (kQueryHeads / kKvHeads);
    const auto q = PageRow(compact->tables()[static_cast<size_t>(kv_head)][0], g, query_type);
    const auto rule = some->Select(0, kv_head);
    double seen = 0, total = 0;
    for (int32_t j = 0; j <= kLength; ++j) {
      const auto k = PageRow(kv->stream(0, kv_head)[static_cast<size_t>(j / kernels::kPageTokens)],
                             j % kernels::kPageTokens, model_->kv_dtype());
      const double weight = std::exp(std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / std::sqrt(double{kDim}));
      total += weight;
      if (j < rule.num_sinks || j > kLength - rule.window) seen += weight;
    }
    EXPECT_NEAR(kept[static_cast<size_t>(head)], seen / total, 2e-3) << "head " << head;
  }
  // Beside another sequence, and in front of it; of more; of everything.
  EXPECT_EQ(measure(*some, true), kept);
  const auto larger = measure(*more, false);
  for (size_t i = 0; i < kQueryHeads; ++i) EXPECT_GT(larger[i], kept[i]);
  for (const float share : measure(*whole, false)) EXPECT_NEAR(share, 1, 1e-5);
  for (const float share : measure(*Selector("dense", 64), false)) EXPECT_EQ(share, -1) << "it saw everything";
  // Eight recent tokens and five times the best sixteen have more than their share, in layer 0 with these queries.
  const auto best = measure(*quest, false);
  for (const float share : best) {
    EXPECT_GT(share, 0);
    EXPECT_LT(share, 1);
  }
  EXPECT_GT(std::accumulate(best.begin(), best.begin() + kQueryHeads, 0.0) / kQueryHeads, 88.0 / (kLength + 1));
}

INSTANTIATE_TEST_SUITE_P(Devices, KeptMassTest, testing::Values("ref", "cpu", "ranks", "cuda"),
                         [](const auto& info) { return info.param; });

class DecodeFidelityTest : public EnginesTest {
 protected:
  struct Seen {
    std::string selector;
    LogitAgreement agreement;
    double kept_mass;
  };
  void StartWatched(double share) {
    DecodeEngineOptions options;
    options.fidelity = {.share = share,
                        .interval = 4,
                        .report = [this](std::string_view selector, const LogitAgreement& agreement, double kept_mass) {
                          seen_.push_back({std::string(selector), agreement, kept_mass});
                        }};
    Start(8192, 8192, {}, options);
  }
  std::vector<Seen> seen_;  // by the engine thread; read when it has stopped
};

TEST_F(DecodeFidelityTest, WatchingChangesNoAnswer) {
  std::mt19937 random = SeededRandom("watched");
  const auto prompt = RandomPrompt(random, 500);
  // Mean cosine and kept mass of what was watched while `budget` of 500 to 540 tokens were attended to.
  const auto watch = [&](const char* name, int32_t budget) {
    DecodeOptions selection(name);
    selection.budget = budget;
    selection.recent = 16;
    LocalGeneratorOptions options;
    options.max_tokens = 4096;
    options.decode = selection;
    const Answer alone = Generate(options, prompt, WithLogprobs(41));
    StartWatched(1);
    seen_.clear();
    selection_ = selection;
    const auto outcome = Submit(prompt, Greedy(41));
    EXPECT_TRUE(outcome->Wait());
    EXPECT_TRUE(outcome->status.ok()) << outcome->status;
    EXPECT_EQ(outcome->tokens[0], alone.tokens) << name;
    StopAll();
    // 40 steps; LoopServe's first 16 tokens choose nothing.
    EXPECT_GE(seen_.size(), 5u) << name;
    EXPECT_LE(seen_.size(), 10u) << name;
    double cosine = 0, kept = 0;
    for (const Seen& s : seen_) {
      EXPECT_EQ(s.selector, name);
      EXPECT_LT(s.agreement.cosine, 1 - 1e-12) << name << ": compared with itself?";
      EXPECT_GT(s.kept_mass, 0.05) << name;
      EXPECT_LT(s.kept_mass, 1) << name;
      cosine += s.agreement.cosine / static_cast<double>(seen_.size());
      kept += s.kept_mass / static_cast<double>(seen_.size());
    }
    return std::pair(cosine, kept);
  };
  // The logits of most tokens are about those of all; those of an eighth of a prompt of random tokens may be anything.
  // Up to twice their budget sparcas and quest attend to everything.
  for (const auto& [name, most] : {std::pair{"sparcas", 240}, {"quest", 240}, {"loopserve", 480}, {"streaming", 480}}) {
    const auto [cosine, kept] = watch(name, most);
    EXPECT_GT(cosine, 0.8) << name << ": the logits of another row?";
    EXPECT_LT(watch(name, 64).second, kept) << name;
  }
}

TEST_F(DecodeFidelityTest, NothingToCompare) {
  std::mt19937 random = SeededRandom("not watched");
  const auto prompt = RandomPrompt(random, 200);
  DecodeOptions everything("sparcas");
  everything.budget = 300;
  for (const DecodeOptions& selection : {DecodeOptions("dense"), everything}) {
    StartWatched(1);
    selection_ = selection;
    EXPECT_TRUE(Submit(prompt, Greedy(30))->Wait());
    StopAll();
    EXPECT_TRUE(seen_.empty()) << selection.selector;
  }
  StartWatched(0);
  everything.budget = 32;
  selection_ = everything;
  EXPECT_TRUE(Submit(prompt, Greedy(30))->Wait());
  StopAll();
  EXPECT_TRUE(seen_.empty());
}

}  // namespace
}  // namespace spl::engine
