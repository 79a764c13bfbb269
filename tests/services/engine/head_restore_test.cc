// Restoring heads while decoding: the bound by which they are chosen, and that a restored sequence is one whose heads
// were global from that step on.
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <numeric>

#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/head_restorer.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/restored_reference.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

// ---- the summaries

struct Keys {
  Keys(kernels::DType dtype, int32_t head_dim, int32_t num_pages)
      : dtype(dtype),
        head_dim(head_dim),
        memory(static_cast<size_t>(num_pages) * kernels::KvPageBytes(dtype, head_dim)),
        pool(kernels::KvPoolView{memory.data(), dtype, head_dim, num_pages}),
        pages(static_cast<size_t>(num_pages)) {
    std::iota(pages.begin(), pages.end(), 0);
  }
  void Set(int32_t key, int32_t c, float value) {
    std::vector<float> row(static_cast<size_t>(head_dim));
    kernels::LoadKvRow(dtype, head_dim, pool.view().k(key / 64), key % 64, row.data());
    row[static_cast<size_t>(c)] = value;
    kernels::StoreKvRow(dtype, head_dim, pool.view().k(key / 64), key % 64, row.data());
  }
  double Get(int32_t key, int32_t c) const {
    return kernels::KvElement(dtype, head_dim, pool.view().k(key / 64), key % 64, c);
  }
  // ln of the sum over all keys themselves.
  double LogMass(const std::vector<float>& q, float scale) const {
    std::vector<double> scores;
    for (int32_t j = 0; j < static_cast<int32_t>(pages.size()) * 64; ++j) {
      double s = 0;
      for (int32_t c = 0; c < head_dim; ++c) s += double{q[static_cast<size_t>(c)]} * Get(j, c);
      scores.push_back(s * scale);
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double s : scores) sum += std::exp(s - most);
    return most + std::log(sum);
  }

  const kernels::DType dtype;
  const int32_t head_dim;
  std::vector<std::byte> memory;
  PagePool pool;
  std::vector<int32_t> pages;
};

TEST(KeySummaryTest, IsNeverAboveTheMassOfTheKeys) {
  auto random = test::SeededRandom("KeySummary");
  std::normal_distribution<float> normal;
  double closest = -1e9;
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kE4M3}) {
    for (int trial = 0; trial < 60; ++trial) {
      const int32_t dim = 8 << random() % 5, num_pages = 1 + static_cast<int32_t>(random() % 6);
      Keys keys(dtype, dim, num_pages);
      const float spread = std::exp2(static_cast<float>(random() % 8) - 4);
      const float common = static_cast<float>(random() % 3);
      std::vector<float> direction(static_cast<size_t>(dim)), q(static_cast<size_t>(dim));
      for (float& x : direction) x = common * normal(random);
      for (int32_t j = 0; j < num_pages * 64; ++j) {
        for (int32_t c = 0; c < dim; ++c) keys.Set(j, c, direction[static_cast<size_t>(c)] + spread * normal(random));
      }
      const KeySummary summary = SummarizeKeys(keys.pool, 3, 5, keys.pages);
      // A summary has 1/32 of the rows of K. Beside keys in FP8 it is bf16.
      EXPECT_EQ(summary.keys.size(),
                static_cast<size_t>(num_pages * 2 * dim) * kernels::DTypeBytes(kernels::DerivedKeyType(dtype)));
      for (int query = 0; query < 4; ++query) {
        for (float& x : q) x = 2 * normal(random);
        const float scale = 1 / std::sqrt(static_cast<float>(dim));
        const double exact = keys.LogMass(q, scale), below = LogMassBelow(summary, dtype, q, scale);
        EXPECT_LE(below, exact + 1e-9 * std::abs(exact)) << dim << " " << num_pages << " spread " << spread;
        closest = std::max(closest, below - exact);
        const auto seen = static_cast<float>(exact + normal(random));
        EXPECT_LE(ShareOutside(below, seen), 1 / (1 + std::exp(double{seen} - exact)) + 1e-6);
      }
    }
  }
  EXPECT_GT(closest, -0.1) << "it would say nothing";
}

TEST(KeySummaryTest, FindsAKeyThatStandsApart) {
  auto random = test::SeededRandom("KeySummaryPlanted");
  std::normal_distribution<float> normal;
  Keys keys(kernels::DType::kBF16, 64, 10);
  std::vector<float> q(64);
  for (float& x : q) x = normal(random);
  for (int32_t j = 0; j < 640; ++j) {
    for (int32_t c = 0; c < 64; ++c) keys.Set(j, c, 0.3f * normal(random));
  }
  const float scale = 1.0f / 8;
  const double before = LogMassBelow(SummarizeKeys(keys.pool, 0, 0, keys.pages), keys.dtype, q, scale);
  for (int32_t c = 0; c < 64; ++c) keys.Set(333, c, 2 * q[static_cast<size_t>(c)]);
  const double exact = keys.LogMass(q, scale);
  const double below = LogMassBelow(SummarizeKeys(keys.pool, 0, 0, keys.pages), keys.dtype, q, scale);
  EXPECT_GT(exact, before + 3) << "the key that was planted holds most of it";
  EXPECT_GT(below, exact - 0.1);
  // Beside a window of 320 such keys: the head is restored for it, and not without it.
  const auto seen = static_cast<float>(std::log(320.0));
  EXPECT_GT(ShareOutside(below, seen), 0.9f);
  EXPECT_EQ(ShareOutside(-std::numeric_limits<double>::infinity(), seen), 0);
  EXPECT_EQ(ShareOutside(below, -std::numeric_limits<float>::infinity()), 1);
}

// ---- sequences

TEST(FrozenHoles, KeepWhatLeavesAWindowUntilTheyThaw) {
  constexpr int32_t kPages = 400;
  std::vector<std::byte> memory(static_cast<size_t>(kPages) * 2 * 64 * 8 * 2);
  PagePool pool(kernels::KvPoolView{memory.data(), kernels::DType::kBF16, 8, kPages});
  const KvShape shape{2, 2};
  const auto classes =
      std::make_shared<const StreamClasses>(std::vector<HeadClass>{{}, {false, 100, 4}, {false, 64, 0}, {}});
  {
    SequenceKv kv(pool, shape, classes);
    ASSERT_TRUE(kv.Reserve(1000).ok());
    kv.set_num_tokens(1000);
    const PageHole first = kv.hole(1), second = kv.hole(2);
    ASSERT_GT(first.size(), 0);
    kv.FreezeHoles();
    for (int64_t n = 1001; n <= 1400; ++n) {
      ASSERT_TRUE(kv.Reserve(n).ok());
      kv.set_num_tokens(n);
    }
    kv.CheckInvariants();
    EXPECT_EQ(kv.hole(1), first);
    EXPECT_EQ(kv.hole(2), second);
    auto fork = *kv.Fork();
    fork->CheckInvariants();
    EXPECT_EQ(fork->hole(1), first);
    // One is restored, the other goes on with its window.
    const uint64_t id = kv.id();
    std::vector<int32_t> pages;
    ASSERT_TRUE(pool.Allocate(first.size(), pages).ok());
    kv.Restore(1, pages);
    EXPECT_NE(kv.id(), id) << "tables that were copied are not right any more";
    EXPECT_EQ(kv.hole(1), PageHole{});
    kv.ThawHoles();
    ASSERT_TRUE(kv.Reserve(1401).ok());
    kv.set_num_tokens(1401);
    kv.CheckInvariants();
    EXPECT_EQ(kv.hole(2), HoleOf((*classes)[2], 1401));
    EXPECT_EQ(kv.hole(1), PageHole{});
    pool.CheckInvariants();
  }
  EXPECT_EQ(pool.num_free(), pool.num_pages());
}

// ---- the decode engine

// Has the whole sequence of a prompt, and does with fetches what a test asks for.
class FakeSource final : public HeadSource {
 public:
  FakeSource(std::shared_ptr<const SequenceKv> whole, const StreamClasses& classes) : whole_(std::move(whole)) {
    for (int32_t s = 0; s < whole_->shape().num_streams(); ++s) {
      const PageHole hole = HoleOf(classes[static_cast<size_t>(s)], whole_->num_tokens());
      if (hole.size() == 0) continue;
      const auto& pages = whole_->streams()[static_cast<size_t>(s)];
      summaries_.push_back(
          SummarizeKeys(whole_->pool(), s, hole.begin,
                        std::span(pages).subspan(static_cast<size_t>(hole.begin), static_cast<size_t>(hole.size()))));
    }
  }
  std::span<const KeySummary> summaries() const override { return summaries_; }
  bool alive() const override { return !dead; }
  void Fetch(std::shared_ptr<HeadPages> pages, std::function<void(absl::Status)> done) override {
    ++num_fetches;
    if (!fail.ok()) return done(fail);
    for (size_t i = 0; i < pages->streams.size(); ++i) {
      const auto summary = std::find_if(summaries_.begin(), summaries_.end(),
                                        [&](const KeySummary& s) { return s.stream == pages->streams[i]; });
      const auto& from = whole_->streams()[static_cast<size_t>(summary->stream)];
      for (size_t p = 0; p < pages->pages[i].size(); ++p)
        std::memcpy(pages->pool.view().k(pages->pages[i][p]),
                    whole_->pool().view().k(from[static_cast<size_t>(summary->first_page) + p]),
                    pages->pool.view().page_bytes());
    }
    done(absl::OkStatus());
  }

  absl::Status fail;
  bool dead = false;
  int num_fetches = 0;

 private:
  const std::shared_ptr<const SequenceKv> whole_;
  std::vector<KeySummary> summaries_;
};

class HeadRestoreTest : public EnginesTest {
 protected:
  static void SetUpTestSuite() {
    // All of the upper layers local: as much as can be restored.
    const std::string path = testing::TempDir() + "/head_restore_map_" + std::to_string(::getpid()) + ".json";
    const HeadPreset preset{.name = "test", .global_share = 0.2, .window = 96, .sinks = 16};
    std::ofstream(path) << HeadClassMap::Spread(12, 4, preset).ToJson();
    ModelOptions options;
    options.head_classes = path;
    auto model = Model::Load(test::kTinyModel, kernels::MakeCpuBackend(), options);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    classes_ = ServedClasses(*model_->head_classes());
  }
  static void TearDownTestSuite() {
    classes_.reset();
    model_.reset();
  }
  static int64_t NumLocal() {
    return std::count_if(classes_->begin(), classes_->end(), [](const HeadClass& h) { return !h.is_global; });
  }

  // Drawn tokens turn with small differences that the most likely ones hide.
  static SamplingParams Sampled(int64_t max_tokens) {
    SamplingParams sampling = Greedy(max_tokens);
    sampling.temperature = 2;
    sampling.seed = 5;
    return sampling;
  }
  struct Run {
    std::vector<int32_t> tokens;
    HeadRestoreReport report;
    int num_fetches = 0;
  };
  // Exact prompt KV, decoded with head classes.
  Run Decode(const std::vector<int32_t>& prompt, const HeadRestoreOptions& restore, int64_t num_tokens,
             const std::function<void(FakeSource&)>& change = nullptr) {
    Run run;
    Outcome outcome;
    std::shared_ptr<FakeSource> source;
    PrefillRequest request;
    request.tokens = prompt;
    request.sampling = Sampled(num_tokens);
    request.reuse.policy = "exact";
    request.on_done = [&](const absl::Status& status, PrefillOutcome result) {
      if (!status.ok()) return outcome.Finish(status);
      DecodeRequest next;
      next.kv = CopyKv(*result.kv);
      next.kv->Compress(classes_);
      source = std::make_shared<FakeSource>(result.kv, *classes_);
      if (change) change(*source);
      next.heads = source;
      next.restore = restore;
      next.sampling = Sampled(num_tokens);
      next.first_tokens = result.first_tokens;
      run.tokens.push_back(result.first_tokens[0].token);
      next.on_restore = [&](const HeadRestoreReport& report) { run.report = report; };
      next.on_tokens = [&](std::span<const DecodeToken> tokens) {
        for (const DecodeToken& t : tokens) run.tokens.push_back(t.token.token);
      };
      next.on_done = [&](const absl::Status& s) { outcome.Finish(s); };
      if (const absl::Status submitted = decode_->Submit(std::move(next)); !submitted.ok()) outcome.Finish(submitted);
    };
    EXPECT_TRUE(prefill_->Submit(std::move(request)).ok());
    EXPECT_TRUE(outcome.Wait());
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    run.num_fetches = source->num_fetches;
    return run;
  }
  static std::vector<int32_t> Reference(const std::vector<int32_t>& prompt, int64_t first_token, int64_t num_tokens) {
    return test::RestoredReference(model_, {.policy = "exact"}, prompt, first_token, Sampled(num_tokens), classes_);
  }

  static inline std::shared_ptr<const StreamClasses> classes_;
};

TEST_F(HeadRestoreTest, ForcedIsAsIfAllHeadsWereGlobalFromThatStepOn) {
  Start();
  std::mt19937 random(6);
  const auto prompt = RandomPrompt(random, 640);
  const std::vector<int32_t> plain = Reference(prompt, -1, 260);
  // At the first step; in the middle of a page; and when much of what was generated has left the windows.
  int num_different = 0;
  for (const int32_t interval : {1, 23, 200}) {
    const Run run = Decode(prompt, {.enabled = true, .interval = interval, .threshold = -1, .share = 1}, 260);
    EXPECT_EQ(run.report.restored, NumLocal()) << interval;
    EXPECT_EQ(run.report.missed(), 0);
    EXPECT_EQ(run.report.first_token, interval + 1);
    EXPECT_EQ(run.num_fetches, 1);
    EXPECT_EQ(run.tokens, Reference(prompt, run.report.first_token, 260)) << interval;
    num_different += run.tokens != plain;
  }
  EXPECT_EQ(num_different, 3) << "the prompt must tell the difference";
  StopAll();
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

TEST_F(HeadRestoreTest, AThresholdOfOneRestoresNothing) {
  Start();
  std::mt19937 random(4);
  const auto prompt = RandomPrompt(random, 600);
  const Run run = Decode(prompt, {.enabled = true, .interval = 3, .threshold = 1, .share = 1}, 120);
  EXPECT_EQ(run.report, HeadRestoreReport());
  EXPECT_EQ(run.tokens, Reference(prompt, -1, 120));
}

TEST_F(HeadRestoreTest, NoMoreThanTheShareAndTheWorstFirst) {
  Start();
  std::mt19937 random(5);
  const auto prompt = RandomPrompt(random, 600);
  const Run run = Decode(prompt, {.enabled = true, .interval = 4, .threshold = -1, .share = 0.1}, 60);
  EXPECT_EQ(run.report.restored, NumLocal() / 10);
  EXPECT_EQ(run.num_fetches, 1);
}

TEST_F(HeadRestoreTest, WhatCannotBeFetchedStaysLocalAndIsCounted) {
  Start();
  std::mt19937 random(6);
  const auto prompt = RandomPrompt(random, 640);
  const std::vector<int32_t> plain = Reference(prompt, -1, 200);
  const HeadRestoreOptions forced{.enabled = true, .interval = 8, .threshold = -1, .share = 1};
  const Run gone = Decode(prompt, forced, 200, [](FakeSource& source) { source.dead = true; });
  EXPECT_EQ(gone.tokens, plain);
  EXPECT_EQ(gone.report.missed_lease, NumLocal());
  EXPECT_EQ(gone.num_fetches, 0);
  const Run lost = Decode(prompt, forced, 200, [](FakeSource& source) { source.fail = absl::NotFoundError("gone"); });
  EXPECT_EQ(lost.tokens, plain);
  EXPECT_EQ(lost.report.missed_lease, NumLocal());
  const Run late =
      Decode(prompt, forced, 200, [](FakeSource& source) { source.fail = absl::DeadlineExceededError("late"); });
  EXPECT_EQ(late.tokens, plain);
  EXPECT_EQ(late.report.missed_fetch, NumLocal());
  EXPECT_EQ(late.report.restored, 0);
  StopAll();
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  // A pool with room for the local sequence, and not for all of its heads.
  Start(8192, 640);
  const Run full = Decode(prompt, {.enabled = true, .interval = 8, .threshold = -1, .share = 1}, 20);
  EXPECT_EQ(full.tokens, std::vector<int32_t>(plain.begin(), plain.begin() + 20));
  EXPECT_EQ(full.report.missed_pages, NumLocal());
}

TEST_F(HeadRestoreTest, OptionsAndSelectorsAreChecked) {
  EXPECT_EQ(ValidateHeadRestoreOptions({.interval = 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ValidateHeadRestoreOptions({.threshold = 1.5}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(ValidateHeadRestoreOptions({.threshold = -1}).ok());
  const auto sparcas = MakeTokenSelector("streaming", model_->config(), nullptr);
  ASSERT_TRUE(sparcas.ok()) << sparcas.status();
  EXPECT_EQ(CheckHeadRestore({}, **sparcas, *model_).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spl::engine
