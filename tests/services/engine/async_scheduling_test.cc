// Decode steps that start before the tokens of the step in front are taken: the same answers, and no page in other
// hands while a step may write to it (DecodeFork::Free checks that).
#include <algorithm>
#include <atomic>

#include "services/base/fault_point.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

constexpr char kStepFault[] = "engine.decode_step";

// Tokens whose copy to the host fails, from a given one on: where the error of a pass is noticed.
class FailingCopies final : public test::FakeDeviceBackend {
 public:
  std::atomic<int> copies_left{INT_MAX};
  std::atomic<absl::StatusCode> code{absl::StatusCode::kInternal};

  absl::StatusOr<std::unique_ptr<kernels::Session>> NewSession(const kernels::SessionOptions& options) const override {
    auto inner = FakeDeviceBackend::NewSession(options);
    if (!inner.ok()) return inner.status();
    return std::make_unique<FailingSession>(*std::move(inner), *this);
  }

 private:
  struct FailedCopy final : kernels::HostCopy {
    explicit FailedCopy(absl::StatusCode code) : code(code) {}
    absl::StatusOr<const void*> Wait() override { return absl::Status(code, "a pass failed on the device"); }
    const absl::StatusCode code;
  };
  struct FailingSession final : kernels::Session {
    FailingSession(std::unique_ptr<kernels::Session> s, const FailingCopies& b) : inner(std::move(s)), backend(b) {
      context_ = inner->context();
      context_.session = this;
    }
    absl::Status Stage(const kernels::BatchArgs& batch) override { return inner->Stage(batch); }
    absl::Status RunStep(uint64_t key, const std::function<absl::Status()>& step) override {
      return inner->RunStep(key, step);
    }
    std::shared_ptr<const kernels::Fence> RecordFence() override { return inner->RecordFence(); }
    absl::Status Synchronize() override { return inner->Synchronize(); }
    absl::StatusOr<const void*> ReadBack(const void* device, size_t bytes) override {
      return inner->ReadBack(device, bytes);
    }
    absl::StatusOr<std::unique_ptr<kernels::HostCopy>> ReadBackLater(const void* device, size_t bytes) override {
      auto& left = const_cast<FailingCopies&>(backend).copies_left;
      if (left.fetch_sub(1) <= 0) return std::make_unique<FailedCopy>(backend.code.load());
      return inner->ReadBackLater(device, bytes);
    }
    const std::unique_ptr<kernels::Session> inner;
    const FailingCopies& backend;
  };
};

class AsyncSchedulingTest : public EnginesTest {
 protected:
  static DecodeEngineOptions Options(bool async, int32_t max_rows = 64) {
    DecodeEngineOptions options;
    options.executor.max_rows = max_rows;
    options.async_scheduling = async;
    return options;
  }
  // What a request looks like that some want and others do not.
  static SamplingParams RandomSampling(std::mt19937& random, bool may_penalize) {
    SamplingParams sampling;
    sampling.temperature = random() % 3 == 0 ? 0 : 1;
    sampling.seed = random();
    sampling.max_tokens = 1 + static_cast<int64_t>(random() % 50);
    sampling.ignore_eos = random() % 2 == 0;
    sampling.num_forks = 1 + static_cast<int32_t>(random() % 3);
    if (random() % 2 == 0) sampling.top_p = 0.9f;
    if (random() % 4 == 0) sampling.min_tokens = sampling.max_tokens / 2;
    if (random() % 4 == 0) sampling.num_logprobs = static_cast<int32_t>(random() % 4);
    if (may_penalize && random() % 6 == 0) sampling.frequency_penalty = 0.5f;
    if (random() % 4 == 0) sampling.logit_bias = {{static_cast<int32_t>(random() % 4000), 5.0f}};
    // So many that some continuation ends at any step.
    for (int i = 0; i < 120 && random() % 4 != 0; ++i)
      sampling.stop_token_ids.push_back(static_cast<int32_t>(random() % 4000));
    return sampling;
  }
};

TEST_F(AsyncSchedulingTest, AnswersAreThoseOfStepsThatWait) {
  std::mt19937 random = SeededRandom("steps that do not wait");
  struct Asked {
    std::vector<int32_t> prompt;
    SamplingParams sampling;
  };
  for (int round = 0; round < 3; ++round) {
    std::vector<Asked> all;
    // Steps with a row that penalizes wait: some of one round, so that both kinds take turns.
    for (int i = 0; i < 18; ++i)
      all.push_back({RandomPrompt(random, 20 + random() % 200), RandomSampling(random, round == 1)});
    std::vector<Tokens> answers[2];
    for (const bool async : {false, true}) {
      // The last pool is too small for all: sequences give way and come back.
      Start(8192, round == 2 ? 1600 : 16384, {}, Options(async, 16));
      std::vector<std::shared_ptr<Outcome>> outcomes;
      for (const Asked& asked : all) outcomes.push_back(Submit(asked.prompt, asked.sampling));
      for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome->Wait());
        ASSERT_TRUE(outcome->status.ok()) << outcome->status;
        answers[async].push_back(outcome->tokens);
      }
      StopAll();
      EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
      decode_pool_->CheckInvariants();
    }
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(answers[1][i], answers[0][i]) << "round " << round << ", " << i;
  }
}

// A stop token is found when its continuation has a row in the next step already; a limit is known before.
TEST_F(AsyncSchedulingTest, OnlyStopTokensCostASurplusRow) {
  std::mt19937 random = SeededRandom("a surplus row");
  std::vector<int32_t> prompt, greedy;
  size_t num_tokens = 1;
  // A stop token that is the first token ends a continuation before it has a step.
  while (num_tokens == 1) {
    prompt = RandomPrompt(random, 80);
    greedy = Expected(prompt, Greedy(20))[0];
    num_tokens = static_cast<size_t>(std::find(greedy.begin(), greedy.end(), greedy[10]) - greedy.begin() + 1);
  }
  SamplingParams stops = Greedy(40);
  stops.stop_token_ids = {greedy[10]};
  ScopedFaults disarm;
  for (const bool async : {false, true}) {
    Start(8192, 8192, {}, Options(async));
    // Counts, and never acts.
    ASSERT_TRUE(ArmFault(kStepFault, {.kind = FaultKind::kError, .only_hit = 1u << 30}).ok());
    const auto limited = Submit(prompt, Greedy(20));
    ASSERT_TRUE(limited->Wait());
    EXPECT_EQ(limited->tokens[0], greedy);
    EXPECT_EQ(FaultHits(kStepFault), 19u);
    ASSERT_TRUE(ArmFault(kStepFault, {.kind = FaultKind::kError, .only_hit = 1u << 30}).ok());
    const auto stopped = Submit(prompt, stops);
    ASSERT_TRUE(stopped->Wait());
    ASSERT_TRUE(stopped->status.ok()) << stopped->status;
    EXPECT_EQ(stopped->tokens[0], std::vector<int32_t>(greedy.begin(), greedy.begin() + num_tokens));
    EXPECT_EQ(FaultHits(kStepFault), num_tokens - 1 + (async ? 1 : 0));
    StopAll();
    EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  }
}

TEST_F(AsyncSchedulingTest, WhoIsCancelledOrLateEndsAndTheOthersGoOn) {
  std::mt19937 random = SeededRandom("cancellations");
  Start(8192, 8192, {}, Options(true));
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::shared_ptr<Outcome>> outcomes;
  std::vector<CancelFlag> flags;
  std::atomic<int> num_calls = 0;
  on_tokens_ = [&] {
    // By the clock of tokens: every fifth call somebody leaves.
    const int call = ++num_calls;
    if (call % 5 != 0 || static_cast<size_t>(call / 5) >= flags.size() / 2) return;
    flags[static_cast<size_t>(call / 5)]->store(true);
    decode_->Wake();
  };
  for (int i = 0; i < 12; ++i) flags.push_back(std::make_shared<std::atomic<bool>>(false));
  for (size_t i = 0; i < flags.size(); ++i) {
    prompts.push_back(RandomPrompt(random, 40 + random() % 100));
    const auto deadline = i == 11 ? std::chrono::steady_clock::now() + 50ms : SteadyTime::max();
    outcomes.push_back(Submit(prompts[i], Greedy(i == 11 ? 2000 : 100), flags[i], deadline));
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i]->Wait());
    if (outcomes[i]->status.ok()) {
      EXPECT_EQ(outcomes[i]->tokens, Expected(prompts[i], Greedy(100))) << i;
    } else if (i == 11) {
      EXPECT_EQ(outcomes[i]->status.code(), absl::StatusCode::kDeadlineExceeded) << outcomes[i]->status;
    } else {
      EXPECT_EQ(outcomes[i]->status.code(), absl::StatusCode::kCancelled) << outcomes[i]->status;
      EXPECT_TRUE(flags[i]->load());
    }
  }
  for (size_t i = flags.size() / 2; i < 11; ++i) EXPECT_TRUE(outcomes[i]->status.ok()) << i << outcomes[i]->status;
  on_tokens_ = nullptr;
  StopAll();
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

// Rows that penalize what came before need it on the host. The others take no other tokens beside them, whether they
// join or leave.
TEST_F(AsyncSchedulingTest, RowsThatNeedTheHostJoinAndLeave) {
  std::mt19937 random = SeededRandom("rows that need the host");
  const std::vector<int32_t> prompt = RandomPrompt(random, 60), other = RandomPrompt(random, 90);
  SamplingParams penalized = Greedy(12);
  penalized.repetition_penalty = 1.3f;
  Start(8192, 8192, {}, Options(true));
  const auto longer = Submit(prompt, Greedy(150));
  for (int i = 0; i < 3; ++i) {
    const auto beside = Submit(other, penalized);
    ASSERT_TRUE(beside->Wait());
    EXPECT_EQ(beside->tokens, Expected(other, penalized));
  }
  ASSERT_TRUE(longer->Wait());
  EXPECT_EQ(longer->tokens, Expected(prompt, Greedy(150)));
}

TEST_F(AsyncSchedulingTest, AFailedStepEndsItsRequestsAndTheNextOneRuns) {
  std::mt19937 random = SeededRandom("a failed step");
  Start(8192, 8192, {}, Options(true));
  const std::vector<int32_t> prompt = RandomPrompt(random, 60), other = RandomPrompt(random, 90);
  ScopedFaults disarm;
  ASSERT_TRUE(
      ArmFault(kStepFault, {.kind = FaultKind::kError, .code = absl::StatusCode::kInvalidArgument, .only_hit = 7})
          .ok());
  const auto failed = Submit(prompt, Greedy(100));
  ASSERT_TRUE(failed->Wait());
  EXPECT_EQ(failed->status.code(), absl::StatusCode::kInternal) << failed->status;
  // The step under way was taken before.
  const std::vector<int32_t> expected = Expected(prompt, Greedy(100))[0];
  EXPECT_EQ(failed->tokens[0], std::vector<int32_t>(expected.begin(), expected.begin() + 7));
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  const auto next = Submit(other, Greedy(30));
  ASSERT_TRUE(next->Wait());
  EXPECT_EQ(next->tokens, Expected(other, Greedy(30)));
}

// A pass that fails on the device is noticed when another one has been started behind it: both end, once.
TEST_F(AsyncSchedulingTest, APassThatFailsTakesTheOneBehindItAlong) {
  const auto model = model_;
  for (const absl::StatusCode code : {absl::StatusCode::kInternal, absl::StatusCode::kDataLoss}) {
    auto backend = std::make_shared<FailingCopies>();
    backend->code = code;
    auto on_device = Model::Load(test::kTinyModel, backend);
    ASSERT_TRUE(on_device.ok()) << on_device.status();
    model_ = *on_device;
    std::atomic<int> num_lost = 0;
    DecodeEngineOptions options = Options(true);
    options.on_device_lost = [&](const absl::Status&) { ++num_lost; };
    Start(8192, 8192, {}, options);
    std::mt19937 random = SeededRandom("a pass that fails");
    SamplingParams sampling = Greedy(2000);
    sampling.temperature = 1;
    std::vector<std::shared_ptr<Outcome>> outcomes;
    for (int i = 0; i < 3; ++i) outcomes.push_back(Submit(RandomPrompt(random, 50), sampling));
    // Until all are decoded the prefill engine copies first tokens, too.
    ASSERT_TRUE(test::Eventually([&] { return decode_->load().running == 3; }));
    backend->copies_left = 5;
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome->Wait());
      const bool lost = code == absl::StatusCode::kDataLoss;
      EXPECT_EQ(outcome->status.code(), lost ? absl::StatusCode::kUnavailable : absl::StatusCode::kInternal)
          << outcome->status;
    }
    EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
    backend->copies_left = INT_MAX;
    StopAll();
    EXPECT_EQ(num_lost, code == absl::StatusCode::kDataLoss ? 1 : 0);
    model_ = model;
  }
}

}  // namespace
}  // namespace spl::engine
