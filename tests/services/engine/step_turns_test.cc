// Two engines of one device: one step at a time, and nobody waits for more than one of the other's.
#include "services/engine/runtime/step_turns.h"

#include <absl/cleanup/cleanup.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "services/base/fault_point.h"
#include "services/engine/runtime/step_offer.h"
#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {
namespace {

using Work = StepTurns::Work;

// Until somebody waits who did not before.
void WaitForWaiting(const StepTurns& turns, uint64_t num) {
  while (turns.num_waiting() != num) std::this_thread::yield();
}

TEST(StepTurnsTest, OfAKindWhoAskedFirstIsNext) {
  StepTurns turns;
  StepTurns::Turn mine = turns.Take(Work::kPrompts);
  std::vector<int> order;  // guarded by the turn
  std::vector<std::thread> others;
  for (int i = 0; i < 4; ++i) {
    others.emplace_back([&, i] {
      const StepTurns::Turn turn = turns.Take(Work::kPrompts);
      order.push_back(i);
    });
    WaitForWaiting(turns, static_cast<uint64_t>(i) + 1);
  }
  mine.End();
  for (std::thread& other : others) other.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(turns.num_waiting(), 0u);
}

TEST(StepTurnsTest, NeverTwoAtOnce) {
  StepTurns turns(std::chrono::microseconds(100));
  int inside = 0, most = 0, steps = 0;  // guarded by the turn
  const auto step = [&](Work work) {
    for (int i = 0; i < 2000; ++i) {
      const StepTurns::Turn turn = turns.Take(work);
      most = std::max(most, ++inside);
      ++steps;
      --inside;
    }
  };
  std::thread a(step, Work::kPrompts), b(step, Work::kDecoding), c(step, Work::kDecoding);
  a.join();
  b.join();
  c.join();
  EXPECT_EQ(most, 1);
  EXPECT_EQ(steps, 6000);
}

// Runs one turn of each kind that wait for the third to end; returns the kind that came first.
Work FirstOfBoth(StepTurns& turns, Work in_front) {
  StepTurns::Turn mine = turns.Take(in_front);
  std::vector<Work> order;  // guarded by the turn
  const auto take = [&](Work work) {
    const StepTurns::Turn turn = turns.Take(work);
    order.push_back(work);
  };
  std::thread step(take, Work::kDecoding);
  WaitForWaiting(turns, 1);
  std::thread slice(take, Work::kPrompts);
  WaitForWaiting(turns, 2);
  mine.End();
  step.join();
  slice.join();
  EXPECT_EQ(order.size(), 2u);
  return order[0];
}

TEST(StepTurnsTest, PromptsGoFirstUntilAStepIsDue) {
  StepTurns patient(std::chrono::hours(1));
  { const StepTurns::Turn step = patient.Take(Work::kDecoding); }
  EXPECT_EQ(FirstOfBoth(patient, Work::kPrompts), Work::kPrompts);
  StepTurns strict(std::chrono::nanoseconds(0));
  { const StepTurns::Turn step = strict.Take(Work::kDecoding); }
  EXPECT_EQ(FirstOfBoth(strict, Work::kPrompts), Work::kDecoding);
}

TEST(StepTurnsTest, StepsThatAreAlwaysDueLeaveEverySecondTurnToPrompts) {
  StepTurns turns(std::chrono::nanoseconds(0));
  EXPECT_EQ(FirstOfBoth(turns, Work::kDecoding), Work::kPrompts);
}

// Between two of its slices a prompt does not ask for the device: a step of few rows does not slip in there.
TEST(StepTurnsTest, AStepThatIsNotDueWaitsForPromptsThatDoNotAskYet) {
  StepTurns turns(std::chrono::hours(1));
  { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
  turns.SetPromptsReady(true);
  std::atomic<bool> decoded = false;
  std::thread step([&] {
    const StepTurns::Turn turn = turns.Take(Work::kDecoding);
    decoded = true;
  });
  WaitForWaiting(turns, 1);
  for (int i = 0; i < 3; ++i) {
    const StepTurns::Turn slice = turns.Take(Work::kPrompts);
    EXPECT_FALSE(decoded);
  }
  turns.SetPromptsReady(false);
  step.join();
  EXPECT_TRUE(decoded);
}

TEST(StepTurnsTest, AStepThatIsDueDoesNotWaitForPromptsThatNeverAsk) {
  StepTurns turns(std::chrono::milliseconds(1));
  { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
  turns.SetPromptsReady(true);
  const StepTurns::Turn step = turns.Take(Work::kDecoding);
}

TEST(StepTurnsTest, ASliceEndsWhenTheNextStepIsDue) {
  StepTurns turns(std::chrono::hours(1));
  EXPECT_EQ(turns.TimeToDecode(), std::chrono::nanoseconds::max()) << "nothing is decoded";
  turns.SetDecoding(1);
  { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
  EXPECT_GT(turns.TimeToDecode(), std::chrono::minutes(59));
  EXPECT_LE(turns.TimeToDecode(), std::chrono::hours(1));
  StepTurns strict(std::chrono::nanoseconds(0));
  strict.SetDecoding(1);
  EXPECT_EQ(strict.TimeToDecode(), std::chrono::nanoseconds(0));
}

// Offers a step on a thread of its own, and waits until it is seen.
class OfferedStep {
 public:
  explicit OfferedStep(StepTurns& turns) {
    offer_.rows = {&row_, 1};
    thread_ = std::thread([this, &turns] { rode_ = !turns.TakeOrRide(offer_).has_value(); });
    while (turns.num_offered() == 0) std::this_thread::yield();
  }
  bool Rode() {
    thread_.join();
    return rode_;
  }
  const StepOffer& offer() const { return offer_; }

 private:
  DecodeRow row_;
  StepOffer offer_;
  bool rode_ = false;
  std::thread thread_;
};

TEST(StepTurnsTest, APassTakesAlongTheStepThatWaits) {
  for (const auto target : {std::chrono::nanoseconds(0), std::chrono::nanoseconds(std::chrono::hours(1))}) {
    StepTurns turns(target);
    { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
    const StepTurns::Turn slice = turns.Take(Work::kPrompts);
    OfferedStep step(turns);
    EXPECT_EQ(turns.num_offered(), 1u);
    StepOffer* const aboard = turns.Board();
    ASSERT_EQ(aboard, &step.offer());
    EXPECT_EQ(turns.num_offered(), 0u);
    EXPECT_EQ(turns.Board(), nullptr) << "it is taken once";
    aboard->status = absl::InternalError("seen");
    turns.Land(*aboard);
    EXPECT_TRUE(step.Rode());
    EXPECT_EQ(step.offer().status.message(), "seen");
    EXPECT_EQ(turns.num_rides(), 1u);
  }
}

// Prompts whose passes cannot take it along do not keep a step waiting that is due.
TEST(StepTurnsTest, AStepThatCannotBoardGetsATurn) {
  StepTurns turns(std::chrono::nanoseconds(0));
  { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
  turns.SetPromptsReady(true);
  StepTurns::Turn slice = turns.Take(Work::kPrompts);
  OfferedStep step(turns);
  turns.CannotBoard();
  std::thread next([&] { const StepTurns::Turn turn = turns.Take(Work::kPrompts); });
  WaitForWaiting(turns, 2);
  slice.End();
  EXPECT_FALSE(step.Rode());
  next.join();
  EXPECT_EQ(turns.num_rides(), 0u);
  EXPECT_EQ(turns.num_offered(), 0u);
}

TEST(StepTurnsTest, WithoutPromptsAStepDoesNotWaitForOne) {
  StepTurns turns(std::chrono::hours(1));
  for (int i = 0; i < 3; ++i) {
    StepOffer offer;
    EXPECT_TRUE(turns.TakeOrRide(offer).has_value());
  }
}

TEST(StepTurnsTest, WhereAllLaunchAsTheyLikeNobodyWaitsForATurn) {
  StepTurns turns(std::chrono::hours(1), StepTurns::Sharing::kRides);
  turns.SetPromptsReady(true);
  const StepTurns::Turn slice = turns.Take(Work::kPrompts);
  const StepTurns::Turn step = turns.Take(Work::kDecoding);
  turns.SetDecoding(1);
  EXPECT_EQ(turns.TimeToDecode(), std::chrono::nanoseconds::max());
}

TEST(StepTurnsTest, ASmallStepWaitsForAPassThatTakesItAlong) {
  StepTurns turns(std::chrono::hours(1), StepTurns::Sharing::kRides);
  EXPECT_FALSE(turns.MayRide(1)) << "there are no prompts";
  turns.SetPromptsReady(true);
  EXPECT_TRUE(turns.MayRide(StepTurns::kMostRiders));
  EXPECT_FALSE(turns.MayRide(StepTurns::kMostRiders + 1));
  turns.NotePrompts(2048);
  turns.NoteTokens(128);
  EXPECT_TRUE(turns.MayRide(StepTurns::kMostRidersOfLongPrompts)) << "16 rows of prompts for each token";
  EXPECT_FALSE(turns.MayRide(StepTurns::kMostRidersOfLongPrompts + 1));
  turns.NoteTokens(128);
  EXPECT_FALSE(turns.MayRide(StepTurns::kMostRiders + 1)) << "8 rows";
  turns.SetDecoding(7);
  EXPECT_EQ(turns.num_riders(), 7u) << "they will wait for the pass behind this one";
  { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
  OfferedStep step(turns);
  EXPECT_EQ(turns.num_riders(), 1u);
  StepOffer* const aboard = turns.Board();
  ASSERT_EQ(aboard, &step.offer());
  turns.Land(*aboard);
  EXPECT_TRUE(step.Rode());
}

// Neither prompts that have ended, nor passes that cannot take it along, nor its own time keep a step waiting.
TEST(StepTurnsTest, AStepThatNobodyTakesAlongRunsByItself) {
  for (const auto& let_go :
       {std::function([](StepTurns& turns) { turns.SetPromptsReady(false); }),
        std::function([](StepTurns& turns) { turns.CannotBoard(); }), std::function([](StepTurns&) {})}) {
    StepTurns turns(std::chrono::milliseconds(300), StepTurns::Sharing::kRides);
    turns.SetPromptsReady(true);
    { const StepTurns::Turn step = turns.Take(Work::kDecoding); }
    OfferedStep step(turns);
    let_go(turns);
    EXPECT_FALSE(step.Rode());
    EXPECT_EQ(turns.num_offered(), 0u);
  }
}

TEST(StepTurnsTest, NobodysTurnEndsNothing) {
  StepTurns turns;
  { const StepTurns::Turn none = StepTurns::TakeOf(nullptr, Work::kPrompts); }
  StepTurns::Turn turn = turns.Take(Work::kPrompts);
  StepTurns::Turn moved = std::move(turn);
  turn.End();  // it has none any more
  moved.End();
  moved.End();
  const StepTurns::Turn again = turns.Take(Work::kPrompts);
}

using SharedDeviceTest = EnginesTest;

// Sequences are decoded while prompts are computed on the same device: tokens are those of the plain model. An engine
// that waits while the other works is next, whatever either takes: a slice follows each step that a slice waited for,
// and a step each slice that a step waited for.
TEST_F(SharedDeviceTest, StepsAndSlicesTakeTurns) {
  const auto turns = std::make_shared<StepTurns>(std::chrono::nanoseconds(0));
  PrefillEngineOptions prefill;
  prefill.turns = turns;
  prefill.executor.max_rows = 64;
  prefill.canonical_prefill = false;
  DecodeEngineOptions decode;
  decode.turns = turns;
  // It runs in each step of a sequence that chooses tokens, and so in a turn. The choice is of all there are.
  std::function<void()> in_a_step;
  decode.fidelity = {
      .share = 1, .interval = 1, .report = [&](std::string_view, const LogitAgreement&, double) { in_a_step(); }};
  selection_ = Selector("streaming", 4096);
  std::mt19937 random(4);
  const std::vector<int32_t> running = RandomPrompt(random, 100), long_prompt = RandomPrompt(random, 2560);
  struct Moment {  // of a step or a slice, in its turn
    size_t steps, slices;
    bool other_waits;
  };
  std::atomic<size_t> num_steps = 0, num_slices = 0;
  std::vector<Moment> steps, slices;  // each of its engine's thread; read when that has ended
  // An assertion that fails leaves while the engines still report to these.
  const absl::Cleanup stop = [this] { StopAll(); };
  in_a_step = [&] {
    steps.push_back({num_steps, num_slices, turns->num_waiting() > 0});
    ++num_steps;
  };
  Start(16384, 16384, prefill, decode);
  auto stream = Submit(running, Greedy(600));
  selection_ = {};
  while (num_steps < 3) std::this_thread::yield();
  auto other = Submit(long_prompt, Greedy(4), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(),
                      [&](PrefillRequest& request) {
                        request.on_layer = [&](const LayerReady& ready) {
                          if (ready.layer != 0) return;
                          slices.push_back({num_steps, num_slices, turns->num_waiting() > 0});
                          ++num_slices;
                        };
                      });
  ASSERT_TRUE(other->Wait() && other->status.ok()) << other->status;
  ASSERT_TRUE(stream->Wait() && stream->status.ok()) << stream->status;
  EXPECT_EQ(stream->tokens, Expected(running, Greedy(600)));
  EXPECT_EQ(other->tokens, Expected(long_prompt, Greedy(4)));
  ASSERT_EQ(slices.size(), 40u);
  size_t awaited = 0;
  for (size_t i = 1; i < steps.size() && steps[i].slices < 40; ++i) {
    if (!steps[i - 1].other_waits) continue;
    ++awaited;
    EXPECT_GT(steps[i].slices, steps[i - 1].slices) << "step " << i << " came before the slice that waited";
  }
  for (size_t i = 1; i < slices.size() && slices[i].steps < 599; ++i) {
    if (!slices[i - 1].other_waits) continue;
    ++awaited;
    EXPECT_GT(slices[i].steps, slices[i - 1].steps) << "slice " << i << " came before the step that waited";
  }
  // There are 79. On a busy machine the thread of the other engine is often not yet there when a turn is taken.
  EXPECT_GE(awaited, 10u) << "nobody waited for anybody";
  EXPECT_GE(slices.back().steps - slices.front().steps, 10u) << "decoding stood still";
}

TEST_F(SharedDeviceTest, APromptWithTooManyNewTokensIsRefusedBeforeItIsComputed) {
  Start();
  std::mt19937 random(5);
  const std::vector<int32_t> prompt = RandomPrompt(random, 300);
  const auto at_most = [](int64_t tokens) {
    return [tokens](PrefillRequest& request) { request.max_computed_tokens = tokens; };
  };
  const auto never = std::make_shared<std::atomic<bool>>(false);
  auto refused = Submit(prompt, Greedy(4), never, SteadyTime::max(), at_most(299));
  ASSERT_TRUE(refused->Wait());
  EXPECT_EQ(refused->status.code(), absl::StatusCode::kResourceExhausted) << refused->status;
  EXPECT_TRUE(test::Eventually([&] { return prefill_->pool().num_free() == prefill_->pool().num_pages(); }));
  auto exact = Submit(prompt, Greedy(4), never, SteadyTime::max(), at_most(300));
  ASSERT_TRUE(exact->Wait() && exact->status.ok()) << exact->status;
  // Its start is there now.
  auto cached = Submit(prompt, Greedy(4), never, SteadyTime::max(), at_most(44));
  ASSERT_TRUE(cached->Wait() && cached->status.ok()) << cached->status;
  EXPECT_EQ(cached->tokens, exact->tokens);
}

// A prompt that shares a step with another one that cannot begin announces every page all the same.
TEST_F(SharedDeviceTest, APromptThatCannotBeginCostsTheOthersOfItsStepNoPages) {
  const ScopedFaults guard;
  Start();
  std::mt19937 random(6);
  ASSERT_TRUE(ArmFault("engine.prefill.step", *ParseFaultAction("delay_until(both are queued)@1")).ok());
  ASSERT_TRUE(ArmFault("engine.prefill.begin", *ParseFaultAction("error(INTERNAL)@3")).ok());
  auto first = Submit(RandomPrompt(random, 70), Greedy(2));
  ASSERT_TRUE(WaitForFaultHits("engine.prefill.step", 1, 20'000));
  std::vector<int32_t> announced(static_cast<size_t>(model_->config().num_layers), 0);
  const auto never = std::make_shared<std::atomic<bool>>(false);
  const std::vector<int32_t> prompt = RandomPrompt(random, 100);
  auto kept = Submit(prompt, Greedy(2), never, SteadyTime::max(), [&](PrefillRequest& request) {
    request.on_layer = [&](const LayerReady& ready) {
      EXPECT_EQ(ready.pages.size(), 1u);
      EXPECT_EQ(ready.pages.front().begin, announced[static_cast<size_t>(ready.layer)]);
      announced[static_cast<size_t>(ready.layer)] = ready.pages.back().end;
    };
  });
  auto failed = Submit(RandomPrompt(random, 200), Greedy(2));
  FireFaultEvent("both are queued");
  ASSERT_TRUE(first->Wait() && first->status.ok()) << first->status;
  ASSERT_TRUE(failed->Wait());
  EXPECT_EQ(failed->status.code(), absl::StatusCode::kInternal) << failed->status;
  ASSERT_TRUE(kept->Wait() && kept->status.ok()) << kept->status;
  for (size_t layer = 0; layer < announced.size(); ++layer) EXPECT_EQ(announced[layer], 2) << layer;
  EXPECT_EQ(kept->tokens, Expected(prompt, Greedy(2)));
}

// What comes and goes is told: both kinds of chunks.
TEST_F(SharedDeviceTest, PrefixesAndSegmentsThatComeAndGoAreTold) {
  std::mutex mutex;
  std::set<std::string> present;
  PrefillEngineOptions options;
  options.on_cache_change = [&](bool stored, std::span<const chunk::ChunkKey> keys) {
    std::lock_guard lock(mutex);
    for (const chunk::ChunkKey& key : keys) {
      const std::string bytes(key.bytes.begin(), key.bytes.end());
      EXPECT_TRUE(stored ? present.insert(bytes).second : present.erase(bytes) == 1) << "told twice";
    }
  };
  const auto has = [&](const chunk::ChunkKey& key) {
    std::lock_guard lock(mutex);
    return present.contains(std::string(key.bytes.begin(), key.bytes.end()));
  };
  Start(1024, 8192, options);
  std::mt19937 random(7);
  const std::vector<int32_t> segment = RandomPrompt(random, 150);
  const std::vector<int32_t> prompt = Concatenate({RandomPrompt(random, 64), segment, RandomPrompt(random, 20)});
  (void)Ask(prompt, [&](PrefillRequest& request) {
    request.reuse.policy = "sparsex";
    request.segments = {{{64, 214}, kDocs}};
  });
  const auto prefix = chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, prompt);
  const auto chunks = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, segment);
  ASSERT_EQ(chunks.size(), 3u);
  for (const chunk::ChunkKey& key : prefix) EXPECT_TRUE(has(key));
  for (const chunk::ChunkKey& key : chunks) EXPECT_TRUE(has(key));
  // Others take the room.
  for (int i = 0; i < 3; ++i) (void)Ask(RandomPrompt(random, 1000), [](PrefillRequest&) {});
  for (const chunk::ChunkKey& key : chunks) EXPECT_FALSE(has(key));
}

}  // namespace
}  // namespace spl::engine
