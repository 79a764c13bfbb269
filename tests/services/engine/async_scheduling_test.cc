// Decode steps that start before the tokens of the step in front are taken: the same answers, and no page in other
// hands while a step may write to it (DecodeFork::Free checks that).
#include <algorithm>
#include <atomic>

#include "services/base/fault_point.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/forwarding_session.h"
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
  std::atomic<bool> pass_fails{false};  // the next one that waits for the device hears of it

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
  struct FailingSession final : test::ForwardingSession {
    FailingSession(std::unique_ptr<kernels::Session> s, const FailingCopies& b)
        : ForwardingSession(std::move(s)), backend(b) {}
    absl::Status Synchronize() override {
      if (const_cast<FailingCopies&>(backend).pass_fails.exchange(false))
        return absl::Status(backend.code.load(), "a pass failed on the device");
      return inner->Synchronize();
    }
    absl::StatusOr<std::unique_ptr<kernels::HostCopy>> ReadBackLater(const void* device, size_t bytes) override {
      auto& left = const_cast<FailingCopies&>(backend).copies_left;
      if (left.fetch_sub(1) <= 0) return std::make_unique<FailedCopy>(backend.code.load());
      return inner->ReadBackLater(device, bytes);
    }
    const FailingCopies& backend;
  };
};

// Which tokens may come depends on the one before: a mask that is a token old lets others through.
class ChainGrammar final : public grammar::TokenGrammar {
 public:
  explicit ChainGrammar(int32_t width) : width_(width) {}
  std::unique_ptr<grammar::TokenMatcher> NewMatcher() const override { return std::make_unique<Matcher>(); }
  int32_t width() const override { return width_; }
  size_t num_bytes() const override { return 0; }

 private:
  class Matcher final : public grammar::TokenMatcher {
   public:
    absl::Status FillMask(std::span<uint32_t> mask) override {
      std::fill(mask.begin(), mask.end(), 0);
      for (size_t token = Next(); token < 4000; token += 7) mask[token / 32] |= 1u << (token % 32);
      return absl::OkStatus();
    }
    absl::Status Accept(int32_t token) override {
      if (static_cast<size_t>(token) % 7 != Next()) return absl::InvalidArgumentError("does not fit");
      last_ = token;
      return absl::OkStatus();
    }
    bool ended() const override { return false; }
    bool complete() const override { return true; }

   private:
    size_t Next() const { return static_cast<size_t>(last_ * 31 + 5) % 7; }
    int32_t last_ = 0;
  };
  const int32_t width_;
};

class AsyncSchedulingTest : public EnginesTest {
 protected:
  static DecodeEngineOptions Options(bool async, int32_t max_rows = 64) {
    DecodeEngineOptions options;
    options.executor.max_rows = max_rows;
    options.async_scheduling = async;
    return options;
  }
  // Small budgets, so that the methods choose.
  static DecodeOptions RandomSelection(std::mt19937& random) {
    const char* const names[] = {"dense", "sparcas", "quest", "loopserve"};
    DecodeOptions options(names[random() % std::size(names)]);
    options.budget = 64;
    options.dense_layers = 1;
    options.recent = 16;
    return options;
  }
  // What a request looks like that some want and others do not.
  static SamplingParams RandomSampling(std::mt19937& random) {
    SamplingParams sampling;
    sampling.temperature = random() % 3 == 0 ? 0 : 1;
    sampling.seed = random();
    sampling.max_tokens = 1 + static_cast<int64_t>(random() % 50);
    sampling.ignore_eos = random() % 2 == 0;
    sampling.num_forks = 1 + static_cast<int32_t>(random() % 3);
    if (random() % 2 == 0) sampling.top_p = 0.9f;
    if (random() % 4 == 0) sampling.min_tokens = sampling.max_tokens / 2;
    if (random() % 4 == 0) sampling.num_logprobs = static_cast<int32_t>(random() % 4);
    if (random() % 4 == 0) sampling.frequency_penalty = 0.5f;
    if (random() % 4 == 0) sampling.repetition_penalty = 1.2f;
    if (random() % 3 == 0) sampling.grammar = std::make_shared<ChainGrammar>(model_->config().vocab_size);
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
    DecodeOptions selection;
  };
  for (int round = 0; round < 3; ++round) {
    std::vector<Asked> all;
    for (int i = 0; i < 18; ++i)
      all.push_back({RandomPrompt(random, 20 + random() % 200), RandomSampling(random),
                     round == 1 ? RandomSelection(random) : DecodeOptions()});
    std::vector<Tokens> answers[2];
    for (const bool async : {false, true}) {
      // The last pool is too small for all: sequences give way and come back.
      Start(8192, round == 2 ? 1600 : 16384, {}, Options(async, 16));
      std::vector<std::shared_ptr<Outcome>> outcomes;
      for (const Asked& asked : all) {
        selection_ = asked.selection;
        outcomes.push_back(Submit(asked.prompt, asked.sampling));
      }
      selection_ = {};
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

// A stop token is found when its continuation has a row in the next step already; a limit is known before. So it shows
// which steps start early.
TEST_F(AsyncSchedulingTest, OnlyStopTokensCostASurplusRow) {
  std::mt19937 random = SeededRandom("a surplus row");
  const std::vector<int32_t> prompt = RandomPrompt(random, 80);
  SamplingParams plain = Greedy(20);
  plain.temperature = 8;  // a random model repeats its most likely tokens, at temperature 1 for 20 tokens, too
  plain.ignore_eos = true;
  SamplingParams held = plain;
  held.frequency_penalty = 0.5f;
  held.grammar = std::make_shared<ChainGrammar>(model_->config().vocab_size);
  DecodeOptions chooses("sparcas");
  chooses.budget = 32;
  chooses.dense_layers = 1;
  const struct {
    const char* name;
    SamplingParams sampling;
    DecodeOptions selection;
  } kinds[] = {{"plain", plain, {}}, {"penalties and masks", held, {}}, {"sparcas", plain, chooses}};
  ScopedFaults disarm;
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind.name);
    selection_ = kind.selection;
    std::vector<int32_t> all;
    for (const bool async : {false, true}) {
      Start(8192, 8192, {}, Options(async));
      // Counts, and never acts.
      ASSERT_TRUE(ArmFault(kStepFault, {.kind = FaultKind::kError, .only_hit = 1u << 30}).ok());
      const auto limited = Submit(prompt, kind.sampling);
      ASSERT_TRUE(limited->Wait());
      ASSERT_TRUE(limited->status.ok()) << limited->status;
      if (async) {
        EXPECT_EQ(limited->tokens[0], all);
      }
      all = limited->tokens[0];
      EXPECT_EQ(FaultHits(kStepFault), 19u);
      // The first token whose value was not there before, behind some steps.
      size_t last = 5;
      while (last + 1 < all.size() && std::find(all.begin(), all.begin() + last, all[last]) != all.begin() + last)
        ++last;
      ASSERT_LT(last + 1, all.size());
      SamplingParams stops = kind.sampling;
      stops.max_tokens = 40;
      stops.stop_token_ids = {all[last]};
      ASSERT_TRUE(ArmFault(kStepFault, {.kind = FaultKind::kError, .only_hit = 1u << 30}).ok());
      const auto stopped = Submit(prompt, stops);
      ASSERT_TRUE(stopped->Wait());
      ASSERT_TRUE(stopped->status.ok()) << stopped->status;
      EXPECT_EQ(stopped->tokens[0], std::vector<int32_t>(all.begin(), all.begin() + last + 1));
      EXPECT_EQ(FaultHits(kStepFault), last + (async ? 1 : 0));
      StopAll();
      EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
    }
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

// Rows whose next token is known already wait for the host. The others take no other tokens beside them, whether they
// join or leave.
TEST_F(AsyncSchedulingTest, RowsThatNeedTheHostJoinAndLeave) {
  std::mt19937 random = SeededRandom("rows that need the host");
  const std::vector<int32_t> prompt = RandomPrompt(random, 60), other = RandomPrompt(random, 90);
  Start(8192, 8192, {}, Options(true));
  const auto longer = Submit(prompt, Greedy(150));
  const std::vector<int32_t> expected = Expected(other, Greedy(12))[0];
  // Its budget is more than there is, so it answers as the model; with compact pages it replays one token a step.
  selection_ = DecodeOptions("sparcas");
  change_decode_ = [&](DecodeRequest& request) { request.replay.assign(expected.begin(), expected.begin() + 6); };
  for (int i = 0; i < 3; ++i) {
    const auto beside = Submit(other, Greedy(12));
    ASSERT_TRUE(beside->Wait());
    ASSERT_TRUE(beside->status.ok()) << beside->status;
    std::vector<int32_t> fresh(expected.begin() + 6, expected.end());
    fresh.insert(fresh.begin(), expected[0]);
    EXPECT_EQ(beside->tokens[0], fresh);
  }
  change_decode_ = nullptr;
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

// A prompt's last pass is waited for together with its first token. If that says that the pass failed, no prompt of the
// pass has its KV; if only the token is lost, the others go on.
TEST_F(AsyncSchedulingTest, APassOfPromptsThatFailsIsNoticedWithItsFirstTokens) {
  const auto model = model_;
  for (const bool pass_fails : {false, true}) {
    auto backend = std::make_shared<FailingCopies>();
    auto on_device = Model::Load(test::kTinyModel, backend);
    ASSERT_TRUE(on_device.ok()) << on_device.status();
    model_ = *on_device;
    PrefillEngineOptions prefill;
    prefill.executor.max_rows = prefill.slice_tokens = 256;
    Start(8192, 8192, prefill, Options(true));
    std::mt19937 random = SeededRandom("a pass of prompts that fails");
    SamplingParams sampling = Greedy(4);
    sampling.temperature = 1;
    ASSERT_TRUE(Submit(RandomPrompt(random, 50), sampling)->Wait());  // memory that grows waits for the device, too
    backend->copies_left = 0;
    // Short prompts go first and share their pass with the start of the long one.
    backend->pass_fails = pass_fails;
    const auto longer = Submit(RandomPrompt(random, 7000), sampling);
    const auto shorter = Submit(RandomPrompt(random, 50), sampling);
    ASSERT_TRUE(shorter->Wait());
    backend->copies_left = INT_MAX;
    EXPECT_EQ(shorter->status.code(), absl::StatusCode::kInternal) << shorter->status;
    ASSERT_TRUE(longer->Wait());
    EXPECT_EQ(longer->status.code(), pass_fails ? absl::StatusCode::kInternal : absl::StatusCode::kOk)
        << longer->status;
    StopAll();
    model_ = model;
  }
}

}  // namespace
}  // namespace spl::engine
