// Prompts that ended with a pass of prompts and ride as sequences in the next one: the step behind a pass waits for
// them.
#include <absl/cleanup/cleanup.h>

#include <atomic>
#include <thread>
#include <vector>

#include "services/engine/runtime/step_offer.h"
#include "services/engine/runtime/step_turns.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using Sharing = StepTurns::Sharing;
using Work = StepTurns::Work;

// A pass that carried a step and with which prompts ended.
class JoiningTest : public testing::Test {
 protected:
  void LandWith(StepTurns& turns, size_t joins) {
    turns.SetPromptsReady(true);
    turns.SetDecoding(1);
    { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
    std::thread rider([&] { EXPECT_FALSE(turns.TakeOrRide(offer_).has_value()) << "it ran by itself"; });
    StepOffer* aboard = nullptr;
    while ((aboard = turns.Board()) == nullptr) std::this_thread::yield();
    turns.ExpectJoins(joins);
    turns.Land(*aboard);
    rider.join();
  }
  DecodeRow row_;
  StepOffer offer_{.rows = {&row_, 1}};
};

TEST_F(JoiningTest, AStepWaitsForAllPromptsThatEndedWithThePass) {
  StepTurns turns(std::chrono::hours(1), Sharing::kRides, {.joins = std::chrono::hours(1)});
  LandWith(turns, 2);
  std::atomic<bool> waited = false;
  std::thread step([&] {
    turns.WaitForJoins();
    waited = true;
  });
  turns.Joined();
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  EXPECT_FALSE(waited) << "one of two has joined";
  turns.Joined();
  step.join();
  turns.Joined();        // one that nobody expected
  turns.WaitForJoins();  // returns
}

TEST_F(JoiningTest, NobodyWaitsForLongNorForPromptsOfAnotherPass) {
  StepTurns turns(std::chrono::hours(1), Sharing::kRides, {.joins = std::chrono::milliseconds(1)});
  LandWith(turns, 3);
  turns.WaitForJoins();  // returns, although nobody joins
  StepTurns patient(std::chrono::hours(1), Sharing::kRides, {.joins = std::chrono::hours(1)});
  LandWith(patient, 3);
  LandWith(patient, 0);
  patient.WaitForJoins();
  StepTurns in_turns(std::chrono::hours(1), Sharing::kTurns, {.joins = std::chrono::hours(1)});
  in_turns.ExpectJoins(1);
  in_turns.WaitForJoins();
}

// Prompts wait for the step that waits for joins.
TEST_F(JoiningTest, ThePassBehindTakesTheStepAlong) {
  StepTurns turns(std::chrono::hours(1), Sharing::kRides, {.joins = std::chrono::hours(1)});
  LandWith(turns, 1);
  std::thread pass([&] {
    const StepTurns::Turn turn = turns.Take(Work::kPrompts);
    StepOffer* const aboard = turns.Board();
    ASSERT_NE(aboard, nullptr) << "the pass left without the step";
    turns.Land(*aboard);
  });
  while (turns.num_waiting() == 0) std::this_thread::yield();
  // Longer than a pass waits for a step that waits for nobody.
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
  turns.Joined();
  turns.WaitForJoins();
  EXPECT_FALSE(turns.TakeOrRide(offer_).has_value());
  pass.join();
}

using JoiningEnginesTest = EnginesTest;

// Two engines of one pool. Passes say how many sequences ride in them.
TEST_F(JoiningEnginesTest, APromptThatEndsWithAPassRidesInTheNext) {
  std::mt19937 random = test::SeededRandom("prompts that join");
  constexpr std::chrono::seconds kLong{30};
  const auto turns = std::make_shared<StepTurns>(kLong, Sharing::kRides, StepGraces{.offer = kLong, .joins = kLong});
  decode_pool_ = std::make_unique<PagePool>(MakeMemory(decode_memory_, 32768), &model_->backend());
  const auto shared = std::make_shared<SharedPool>(*decode_pool_, turns);
  std::vector<int32_t> riders;  // [passes]; prefill engine's thread, and read when that has ended
  PrefillEngineOptions prefill;
  prefill.shared = shared;
  prefill.turns = turns;
  prefill.executor.max_rows = prefill.slice_tokens = 64;
  prefill.prefix_cache = prefill.canonical_prefill = false;
  prefill.on_pass = [&](int32_t, int32_t carried) { riders.push_back(carried); };
  DecodeEngineOptions decode;
  decode.shared = shared;
  decode.turns = turns;
  auto d = DecodeEngine::Create(model_, *decode_pool_, decode);
  ASSERT_TRUE(d.ok()) << d.status();
  decode_ = std::move(*d);
  auto p = PrefillEngine::Create(model_, decode_pool_->view(), prefill);
  ASSERT_TRUE(p.ok()) << p.status();
  prefill_ = std::move(*p);
  const absl::Cleanup stop = [this] { StopAll(); };

  struct Answered {
    size_t passes = 0;  // until the prompt had ended
    std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
  };
  const auto submit = [&](const std::vector<int32_t>& prompt, int64_t max_tokens, Answered& answered) {
    PrefillRequest request;
    request.tokens = prompt;
    request.sampling = Greedy(max_tokens);
    request.continues_here = true;
    request.on_done = [&, outcome = answered.outcome](const absl::Status& status, PrefillOutcome computed) {
      answered.passes = riders.size();
      if (!status.ok()) return outcome->Finish(status);
      outcome->tokens.resize(1);
      outcome->tokens[0].push_back(computed.first_tokens[0].token);
      DecodeRequest next;
      next.kv = computed.kv->Continue();
      next.sampling = Greedy(max_tokens);
      next.first_tokens = computed.first_tokens;
      next.on_tokens = [outcome](std::span<const DecodeToken> tokens) {
        for (const DecodeToken& token : tokens) outcome->tokens[0].push_back(token.token.token);
      };
      next.on_done = [outcome](const absl::Status& end) { outcome->Finish(end); };
      if (const absl::Status taken = decode_->Submit(std::move(next)); !taken.ok()) outcome->Finish(taken);
    };
    ASSERT_TRUE(prefill_->Submit(std::move(request)).ok());
  };
  Answered first, background;
  submit(RandomPrompt(random, 40), 3000, first);
  ASSERT_TRUE(EventuallyRunning());
  submit(RandomPrompt(random, 6000), 1, background);  // keeps passes coming
  std::vector<Answered> joining(8);
  std::vector<std::vector<int32_t>> prompts;
  for (Answered& answered : joining) {
    prompts.push_back(RandomPrompt(random, 20 + static_cast<int64_t>(random() % 20)));
    submit(prompts.back(), 5, answered);
    ASSERT_TRUE(answered.outcome->Wait() && answered.outcome->status.ok()) << answered.outcome->status;
  }
  decode_->Stop();  // `first` need not end
  prefill_->Stop();
  size_t looked_at = 0;
  for (size_t i = 0; i < joining.size(); ++i) {
    EXPECT_EQ(joining[i].outcome->tokens[0], Expected(prompts[i], Greedy(5))[0]);
    const size_t next = joining[i].passes;
    ASSERT_GE(next, 1u);
    if (next >= background.passes || riders[next - 1] == 0) continue;  // no step was carried that others could join
    ++looked_at;
    EXPECT_GE(riders[next], 2) << "prompt " << i << " did not ride in pass " << next;
  }
  EXPECT_GE(looked_at, 4u) << "nobody rode";
}

}  // namespace
}  // namespace spl::engine
