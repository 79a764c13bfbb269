// The guard of the method `adaptive`: estimates in every step with packed keys, measurements with others, and what
// heads below the floor attend to.
#include "services/engine/runtime/mass_guard.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "tests/services/engine/adaptive_fixture.h"
#include "tests/support/engine_devices.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/forwarding_session.h"

namespace spl::engine {
namespace {

DecodeOptions Packed(int32_t budget, double floor) {
  DecodeOptions options = Options("adaptive", budget);
  options.packed_keys = true;
  options.mass_floor = floor;
  return options;
}

int32_t ChoosingHeads(const ModelConfig& config, const DecodeOptions& options) {
  return (config.num_layers - options.dense_layers) * config.num_kv_heads;
}

// With keys of 16 bits steps are measured: every chosen head below the floor is guarded, and measuring itself changes
// no answer.
TEST_F(AdaptiveDecodingTest, AHeadThatIsMeasuredBelowTheFloorIsGuarded) {
  std::mt19937 random = SeededRandom("guard");
  const auto prompt = RandomPrompt(random, 300);
  StartBy(SavesFrom(1));
  DecodeOptions options = Options("adaptive", 96);
  options.dims = 16;
  const Told unguarded = Answer(prompt, options, 60);
  EXPECT_FALSE(unguarded.report.least_mass.has_value());
  options.mass_floor = 1e-9;
  const Told measured = Answer(prompt, options, 60);
  EXPECT_EQ(measured.logprobs, unguarded.logprobs);
  EXPECT_EQ(measured.report.guarded_heads, 0);
  ASSERT_TRUE(measured.report.least_mass.has_value());
  EXPECT_GT(*measured.report.least_mass, 0);
  EXPECT_LT(*measured.report.least_mass, 1);
  options.mass_floor = 1;
  const Told guarded = Answer(prompt, options, 60);
  EXPECT_NE(guarded.logprobs, unguarded.logprobs);
  const int32_t heads = ChoosingHeads(model_->config(), options);
  EXPECT_GT(guarded.report.guarded_heads, heads / 2);
  EXPECT_LE(guarded.report.guarded_heads, heads);
  EXPECT_EQ(guarded.report.least_mass, measured.report.least_mass);
  EXPECT_EQ(guarded.report.chosen_tokens, 59);
}

// With all heads guarded a step that chooses is a dense one.
TEST_F(AdaptiveStepsTest, AGuardedHeadAttendsToEverything) {
  for (const bool packed : {false, true}) {
    DecodeOptions options = packed ? Packed(128, 0) : Options("adaptive", 128);
    Chooser chooser = Make(options);
    const auto chosen = Step(chooser, kLength, true);
    EXPECT_NE(chosen, Dense(kLength));
    for (int32_t layer = 0; layer < model_->config().num_layers; ++layer) {
      for (int32_t head = 0; head < model_->config().num_kv_heads; ++head)
        chooser.selector->Guard(layer, head, kLength + 2, kLength + 2);
    }
    const auto guarded = Step(chooser, kLength + 1, true);
    EXPECT_EQ(guarded, Dense(kLength + 1)) << packed;
    EXPECT_NE(Step(chooser, kLength + 2, true), Dense(kLength + 2)) << packed;
  }
}

// With packed keys every step tells. A guard begins with the second step after the one that found the head, also where
// the next one has not started yet: answers do not depend on that.
TEST_F(AdaptiveDecodingTest, EveryStepWithPackedKeysEstimates) {
  std::mt19937 random = SeededRandom("estimates");
  const auto prompt = RandomPrompt(random, 300);
  std::vector<std::vector<float>> answers;
  for (const bool async : {false, true}) {
    StartBy(SavesFrom(1), async);
    const Told unguarded = Answer(prompt, Packed(96, 0), 60);
    EXPECT_FALSE(unguarded.report.least_mass.has_value());
    const Told estimated = Answer(prompt, Packed(96, 1e-9), 60);
    EXPECT_EQ(estimated.logprobs, unguarded.logprobs) << "an estimate alone changes nothing";
    EXPECT_EQ(estimated.report.guarded_heads, 0);
    ASSERT_TRUE(estimated.report.least_mass.has_value());
    EXPECT_GT(*estimated.report.least_mass, 0);
    EXPECT_LT(*estimated.report.least_mass, 1);
    const Told guarded = Answer(prompt, Packed(96, 1), 60);
    // Each of them once, but for those whose list has everything up to rounding.
    EXPECT_LE(guarded.report.guarded_heads, ChoosingHeads(model_->config(), Packed(96, 1)));
    EXPECT_GT(guarded.report.guarded_heads, ChoosingHeads(model_->config(), Packed(96, 1)) / 2);
    EXPECT_EQ(guarded.report.chosen_tokens, 59);
    const auto values = static_cast<std::ptrdiff_t>(guarded.logprobs.size() / 59);
    EXPECT_TRUE(
        std::equal(guarded.logprobs.begin(), guarded.logprobs.begin() + 2 * values, unguarded.logprobs.begin()));
    EXPECT_FALSE(std::equal(guarded.logprobs.begin() + 2 * values, guarded.logprobs.begin() + 3 * values,
                            unguarded.logprobs.begin() + 2 * values));
    answers.push_back(guarded.logprobs);
  }
  EXPECT_EQ(answers[0], answers[1]) << "whether steps wait for tokens or not";
}

// Counts the steps that have been started when a step's results are waited for.
class CountingBackend final : public test::FakeDeviceBackend {
 public:
  mutable std::vector<int> started_at_wait;
  mutable std::atomic<int> started = 0;

  absl::StatusOr<std::unique_ptr<kernels::Session>> NewSession(const kernels::SessionOptions& options) const override {
    auto inner = FakeDeviceBackend::NewSession(options);
    if (!inner.ok()) return inner.status();
    return std::make_unique<CountingSession>(*std::move(inner), *this);
  }

 private:
  struct CountingCopy final : kernels::HostCopy {
    CountingCopy(std::unique_ptr<kernels::HostCopy> copy, const CountingBackend& b)
        : inner(std::move(copy)), backend(b) {}
    absl::StatusOr<const void*> Wait() override {
      if (backend.started > 0) backend.started_at_wait.push_back(backend.started);
      return inner->Wait();
    }
    const std::unique_ptr<kernels::HostCopy> inner;
    const CountingBackend& backend;
  };
  struct CountingSession final : test::ForwardingSession {
    CountingSession(std::unique_ptr<kernels::Session> s, const CountingBackend& b)
        : ForwardingSession(std::move(s)), backend(b) {}
    absl::Status RunStep(uint64_t key, const std::function<absl::Status()>& step) override {
      ++backend.started;
      return inner->RunStep(key, step);
    }
    absl::StatusOr<std::unique_ptr<kernels::HostCopy>> ReadBackLater(const void* device, size_t bytes) override {
      auto copy = inner->ReadBackLater(device, bytes);
      if (!copy.ok()) return copy.status();
      return std::make_unique<CountingCopy>(*std::move(copy), backend);
    }
    const CountingBackend& backend;
  };
};

// The host waits for the tokens and the estimates of a step when the next one has started, in each step of the answer.
TEST_F(AdaptiveDecodingTest, StepsThatEstimateStartAhead) {
  auto backend = std::make_shared<CountingBackend>();
  const auto model = Model::Load(test::kTinyModel, backend);
  ASSERT_TRUE(model.ok()) << model.status();
  model_ = *model;
  std::mt19937 random = SeededRandom("ahead");
  StartBy(SavesFrom(1), true);
  backend->started = 0;  // an engine on a device runs some before it serves
  backend->started_at_wait.clear();
  const Told told = Answer(RandomPrompt(random, 300), Packed(96, 1e-9), 30);
  StopAll();
  EXPECT_TRUE(told.report.least_mass.has_value());
  ASSERT_EQ(backend->started, 29);
  ASSERT_EQ(backend->started_at_wait.size(), 2u * 29) << "tokens and estimates of each step";
  for (int i = 0; i < 2 * 29; ++i) EXPECT_EQ(backend->started_at_wait[i], std::min(i / 2 + 2, 29)) << "wait " << i;
}

// Compares a step's estimates with what the same queries attend to, head by head: each is that of its head.
TEST_F(AdaptiveStepsTest, EstimatesAreWhatAttentionMeasures) {
  const ModelConfig& config = model_->config();
  const int32_t group = config.num_qo_heads / config.num_kv_heads;
  Chooser chooser = Make(Packed(128, 0.5));
  DenseSelector everything(config);
  MassProbe probe{.everything = &everything,
                  .kept = std::vector<float>(static_cast<size_t>(config.num_layers) * config.num_qo_heads)};
  std::vector<double> estimates, measured;
  for (int32_t step = 0; step < 8; ++step) {
    chooser.selector->Decide(true, kLength + step + 1);
    everything.BeginStep(kLength + step + 1);
    Run({.token = tokens_[kLength + step],
         .kv = kv_.get(),
         .selector = chooser.selector.get(),
         .compact = chooser.compact.get(),
         .mass = &probe,
         .estimates = true,
         .at = kLength + step});
    auto pending = executor_->BeginMass();
    ASSERT_TRUE(pending.ok()) << pending.status();
    const auto mass = pending->Wait();
    ASSERT_TRUE(mass.ok()) << mass.status();
    ASSERT_EQ(mass->values.size(), static_cast<size_t>(config.num_layers) * config.num_kv_heads);
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      for (int32_t h = 0; h < config.num_kv_heads; ++h) {
        const auto first = probe.kept.begin() + layer * config.num_qo_heads + h * group;
        const float least = *std::min_element(first, first + group);
        if (layer < 2) {
          EXPECT_EQ(least, -1) << "it sees everything";
          continue;
        }
        estimates.push_back(double{mass->of(layer, 0, h)});
        measured.push_back(double{least});
      }
    }
  }
  const auto n = static_cast<double>(estimates.size());
  double e = 0, m = 0, ee = 0, mm = 0, em = 0;
  for (size_t i = 0; i < estimates.size(); ++i) {
    e += estimates[i] / n, m += measured[i] / n;
    ee += estimates[i] * estimates[i] / n, mm += measured[i] * measured[i] / n, em += estimates[i] * measured[i] / n;
  }
  const double correlation = (em - e * m) / std::sqrt((ee - e * e) * (mm - m * m));
  std::printf("kept: estimated %.4f, measured %.4f, correlation %.3f\n", e, m, correlation);
  EXPECT_GT(correlation, 0.5) << "the heads that hold little are those that are said to";
  EXPECT_NEAR(e, m, 0.06);
}

// With two ranks each brings the estimates of its own heads, in their places.
TEST_F(AdaptiveStepsTest, EveryRankBringsItsHeads) {
  const auto one = model_;
  std::vector<std::vector<float>> kept;
  for (const int ranks : {1, 2}) {
    const auto model = Model::Load(test::kTinyModel, *test::DevicesOf("cpu", ranks));
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    const auto memory = AllocateKvMemory(*model_, PagesForTokens(model_->config(), 4096));
    ASSERT_TRUE(memory.ok()) << memory.status();
    kv_.reset();
    pool_ = std::make_unique<PagePool>(memory->pages, model_->backends());
    executor_ = *ParallelExecutor::Create(model_, memory->pages, {.num_threads = 2, .max_rows = 512});
    Prefill();
    {
      Chooser chooser = Make(Packed(128, 0.5));
      chooser.selector->Decide(true, kLength + 1);
      Run({.token = tokens_[kLength],
           .kv = kv_.get(),
           .selector = chooser.selector.get(),
           .compact = chooser.compact.get(),
           .estimates = true,
           .at = kLength});
    }
    auto pending = executor_->BeginMass();
    ASSERT_TRUE(pending.ok()) << pending.status();
    const auto mass = pending->Wait();
    ASSERT_TRUE(mass.ok()) << mass.status();
    kept.emplace_back();
    for (int32_t layer = 2; layer < model_->config().num_layers; ++layer) {
      for (int32_t h = 0; h < model_->config().num_kv_heads; ++h) kept.back().push_back(mass->of(layer, 0, h));
    }
    kv_.reset();
    executor_.reset();
    pool_.reset();
  }
  model_ = one;
  // The order of sums moves them a little; other heads differ by far more.
  double own = 0, others = 0;
  for (size_t i = 0; i < kept[0].size(); ++i) {
    own += std::abs(double{kept[0][i]} - kept[1][i]);
    others += std::abs(double{kept[0][i]} - kept[1][i % 4 < 2 ? i + 2 : i - 2]);
  }
  EXPECT_LT(own, others / 4);
}

// Head by head: found once, guarded from the second step after it on for kGuarded positions, and found again then.
TEST_F(AdaptiveStepsTest, AGuardBeginsAndEnds) {
  const ModelConfig& config = model_->config();
  const DecodeOptions options = Packed(128, 0.5);
  auto made = MakeTokenSelector(options, config, nullptr);
  ASSERT_TRUE(made.ok()) << made.status();
  AdaptiveSelector& selector = *(*made)->adaptive();
  ASSERT_TRUE(MassGuard::Estimates(selector.scoring()));
  MassGuard guard(config, nullptr);
  std::vector<float> values(2 * static_cast<size_t>(config.num_layers) * config.num_kv_heads, 0.75f);
  const KeptMass mass{values, 2, static_cast<size_t>(config.num_kv_heads)};
  const size_t low = (3 * 2 + 1) * static_cast<size_t>(config.num_kv_heads) + 2;  // layer 3, row 1, head 2
  values[low] = 0.25f;
  values[low - static_cast<size_t>(config.num_kv_heads)] = 0.125f;     // of the other row
  values[(0 * 2 + 1) * static_cast<size_t>(config.num_kv_heads)] = 0;  // layer 0 sees everything
  const int64_t found = 400, again = found + 2 + MassGuard::kGuarded;
  for (int64_t kv_len = found; kv_len <= again + 2; ++kv_len) {
    selector.Decide(true, kv_len);
    selector.BeginStep(kv_len);
    const bool guarded = (kv_len >= found + 2 && kv_len < again) || kv_len >= again + 2;
    EXPECT_EQ(selector.Select(3, 2).rule,
              guarded ? kernels::VisibilityRule::kFull : kernels::VisibilityRule::kElsewhere)
        << kv_len;
    EXPECT_EQ(selector.Select(3, 1).rule, kernels::VisibilityRule::kElsewhere);
    guard.Take(selector, kv_len, mass, 1);
    StepChoice told;
    guard.Describe(told);
    const bool finds = kv_len == found || kv_len == again;
    EXPECT_EQ(told.guarded_heads, finds ? 1 : 0) << kv_len;
    EXPECT_EQ(told.least_mass, finds ? 0.25 : 0.75) << kv_len;
  }
}

}  // namespace
}  // namespace spl::engine
