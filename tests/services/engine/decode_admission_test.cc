// How sequences join the batch of a decode engine: what they do before their first step holds up the others for a slice
// at most, and an answer that began elsewhere goes on as if it had begun here.
#include <algorithm>

#include "services/base/fault_point.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

class DecodeAdmissionTest : public EnginesTest {
 protected:
  static absl::StatusCode Ended(const std::shared_ptr<Outcome>& outcome) {
    return outcome->Wait() ? outcome->status.code() : absl::StatusCode::kDeadlineExceeded;
  }
};

// h2o runs all rows of a prompt once more: 500 rows in slices of 32 are 16 slices, and between two of them the batch
// has a step.
TEST_F(DecodeAdmissionTest, AChoiceByAPromptHoldsUpOthersForASliceAtMost) {
  std::mt19937 random = SeededRandom("a choice in slices");
  constexpr int32_t kRows = 32;
  const auto short_prompt = RandomPrompt(random, 40), long_prompt = RandomPrompt(random, 500);
  const Tokens expected = Expected(short_prompt, Greedy(200));
  Start(8192, 16384, {}, {.executor = {.max_rows = kRows}});
  const int64_t free = decode_pool_->num_free();
  ScopedFaults disarm;
  ASSERT_TRUE(ArmFault("engine.decode_step", {.kind = FaultKind::kNone}).ok());
  const auto decoded = [] { return static_cast<int>(FaultHits("engine.decode_step")); };
  const auto runner = Submit(short_prompt, Greedy(200));
  ASSERT_TRUE(EventuallyRunning());
  selection_ = Selector("h2o", 64);
  std::atomic<int> came{-1}, began{-1};
  change_decode_ = [&](DecodeRequest& request) {
    came = decoded();
    request.on_start = [&] { began = decoded(); };
  };
  const auto chooser = Submit(long_prompt, Greedy(5));
  ASSERT_TRUE(chooser->Wait() && runner->Wait());
  ASSERT_TRUE(chooser->status.ok() && runner->status.ok()) << chooser->status << " " << runner->status;
  EXPECT_EQ(runner->tokens, expected);
  EXPECT_GE(began - came, 500 / kRows - 1) << "steps of the batch while the other one chose";
  EXPECT_EQ(decode_pool_->num_free(), free);
  decode_pool_->CheckInvariants();
}

// Several that choose of their prompts take turns, and one that gives up in the middle leaves nothing behind.
TEST_F(DecodeAdmissionTest, ChoicesThatAreCancelledLeaveNothingBehind) {
  std::mt19937 random = SeededRandom("cancelled choices");
  Start(8192, 16384, {}, {.executor = {.max_rows = 16}});
  const int64_t free = decode_pool_->num_free();
  std::vector<std::shared_ptr<Outcome>> outcomes;
  std::vector<CancelFlag> flags;
  for (int i = 0; i < 6; ++i) {
    selection_ = Selector(i % 2 == 0 ? "h2o" : "snapkv", 64);
    flags.push_back(std::make_shared<std::atomic<bool>>(false));
    outcomes.push_back(Submit(RandomPrompt(random, 200 + random() % 300), Greedy(8), flags.back()));
  }
  ASSERT_TRUE(test::Eventually([&] { return decode_->load().waiting > 0; }));
  *flags[0] = *flags[3] = true;
  decode_->Wake();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i]->Wait());
    const bool cancelled = i == 0 || i == 3;
    EXPECT_TRUE(cancelled || outcomes[i]->status.ok()) << outcomes[i]->status;
  }
  EXPECT_TRUE(test::Eventually([&] { return decode_pool_->num_free() == free; }));
  decode_pool_->CheckInvariants();
}

// Two prompts fit the pool beside each other, but not the pages with which the older one chooses: the younger one gives
// way until the slice has run. It used to come back before that, for ever.
TEST_F(DecodeAdmissionTest, AChoiceThatFindsNoPagesRunsOnceAnotherHasGivenWay) {
  std::mt19937 random = SeededRandom("choices in a small pool");
  const auto first = RandomPrompt(random, 40), older = RandomPrompt(random, 300), younger = RandomPrompt(random, 300);
  const auto run = [&](int64_t pool_tokens) {
    Start(8192, pool_tokens, {}, {.executor = {.max_rows = 32}});
    ScopedFaults disarm;
    EXPECT_TRUE(ArmFault("engine.decode_step", {.kind = FaultKind::kDelayUntil, .event = "all are there"}).ok());
    selection_ = DecodeOptions("dense");
    std::vector<std::shared_ptr<Outcome>> outcomes = {Submit(first, Greedy(4))};
    EXPECT_TRUE(EventuallyRunning());
    selection_ = Selector("h2o", 64);
    for (const auto& prompt : {older, younger}) outcomes.push_back(Submit(prompt, Greedy(20)));
    EXPECT_TRUE(test::Eventually([&] { return decode_->load().waiting == 2; }));
    FireFaultEvent("all are there");
    std::vector<Tokens> tokens;
    for (const auto& outcome : outcomes) {
      EXPECT_TRUE(outcome->Wait()) << "no end";
      EXPECT_TRUE(outcome->status.ok()) << outcome->status;
      tokens.push_back(outcome->tokens);
    }
    return tokens;
  };
  const auto want = run(16384);
  EXPECT_EQ(decode_->load().preemptions, 0U);
  EXPECT_EQ(run(864), want);
  EXPECT_GT(decode_->load().preemptions, 0U);
  EXPECT_EQ(decode_->load().parked_bytes, 0U);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  decode_pool_->CheckInvariants();
}

// Cached KV in the pool gives way to a choice, too, which needs more pages than the sequence goes on with. It used to
// wait for them for ever.
TEST_F(DecodeAdmissionTest, CachedKvGivesWayToAChoice) {
  std::mt19937 random = SeededRandom("a choice beside cached KV");
  Start(8192, 16384);
  selection_ = Selector("h2o", 64);
  const auto prompt = RandomPrompt(random, 300);
  const auto want = Submit(prompt, Greedy(12));
  ASSERT_TRUE(want->Wait() && want->status.ok()) << want->status;
  StopAll();
  // Twelve pages of each head: five are cached, and the prompt and its choice need five each.
  decode_pool_ = std::make_unique<PagePool>(MakeMemory(decode_memory_, 12 * 64), &model_->backend());
  const auto shared = std::make_shared<SharedPool>(*decode_pool_, nullptr);
  std::vector<std::unique_ptr<SequenceKv>> cached;
  std::mutex mutex;  // guards cached
  const auto evict_until = [&](int64_t num_pages) {
    std::lock_guard lock(mutex);
    for (; decode_pool_->num_free() < num_pages && !cached.empty(); cached.pop_back())
      decode_pool_->UnmarkCached(cached.back()->AllPages());
    return decode_pool_->num_free() >= num_pages;
  };
  for (int i = 0; i < 5; ++i) {
    cached.push_back(std::make_unique<SequenceKv>(*decode_pool_, KvShapeOf(model_->config())));
    ASSERT_TRUE(cached.back()->Reserve(64).ok());
    decode_pool_->MarkCached(cached.back()->AllPages());
  }
  shared->AttachCache({.make_room = evict_until});
  prefill_ = PrefillEngine::Create(model_, MakeMemory(prefill_memory_, 8192), {}).value();
  decode_ = DecodeEngine::Create(model_, *decode_pool_, {.executor = {.max_rows = 32}, .shared = shared}).value();
  const auto outcome = Submit(prompt, Greedy(12));
  EXPECT_TRUE(outcome->Wait()) << "no end";
  EXPECT_TRUE(outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->tokens, want->tokens);
  StopAll();
  shared->DetachCache();
  EXPECT_TRUE(evict_until(decode_pool_->num_pages()));
  decode_pool_->CheckInvariants();
}

// The pages that a choice needs are reserved for others, and nothing runs: the engine waits until they are freed, then
// goes on at once. It used to look again without a pause.
TEST_F(DecodeAdmissionTest, AChoiceWaitsForPagesThatOthersHold) {
  std::mt19937 random = SeededRandom("a choice that waits");
  std::atomic<int> looks{0};
  DecodeEngineOptions options{.executor = {.max_rows = 32}};
  Start(8192, 2048, {}, options);
  decode_->Stop();
  options.shared = std::make_shared<SharedPool>(*decode_pool_, nullptr);
  options.shared->AttachCache({.make_room = [&](int64_t) {
    ++looks;
    return false;
  }});
  auto decode = DecodeEngine::Create(model_, *decode_pool_, options);
  ASSERT_TRUE(decode.ok()) << decode.status();
  decode_ = *std::move(decode);
  const int64_t streams = KvShapeOf(model_->config()).num_streams();
  std::vector<int32_t> reserved;
  selection_ = Selector("h2o", 64);
  change_decode_ = [&](DecodeRequest&) {
    const int64_t left = 2 * streams;
    EXPECT_TRUE(decode_pool_->Allocate(decode_pool_->num_free() - left, reserved).ok());
  };
  const auto chooser = Submit(RandomPrompt(random, 300), Greedy(5));
  ASSERT_TRUE(test::Eventually([&] { return looks > 0; }));
  const int first = looks;
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(test::Eventually([&] { return looks >= first + 3; })) << "the safety net";
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 150ms) << "looks without a pause";
  EXPECT_FALSE(chooser->done);
  decode_pool_->Release(reserved);
  ASSERT_TRUE(chooser->Wait());
  EXPECT_TRUE(chooser->status.ok()) << chooser->status;
}

// Sequences whose first step gathers keys join a few at a time, and their answers do not depend on it.
TEST_F(DecodeAdmissionTest, FirstSparseStepsTakeTurns) {
  std::mt19937 random = SeededRandom("first sparse steps");
  for (const char* name : {"sparcas", "quest"}) {
    Start(8192, 16384, {}, {.gathered_tokens = 500});
    selection_ = Selector(name, 64);
    ScopedFaults disarm;
    const std::string all_are_there = std::string("waiting for ") + name;
    ASSERT_TRUE(ArmFault("engine.decode_step", {.kind = FaultKind::kDelayUntil, .event = all_are_there}).ok());
    std::mutex mutex;
    std::vector<uint64_t> began;  // in which step
    change_decode_ = [&](DecodeRequest& request) {
      request.on_start = [&] {
        std::lock_guard lock(mutex);
        began.push_back(FaultHits("engine.decode_step"));
      };
    };
    std::vector<std::shared_ptr<Outcome>> outcomes;
    for (int i = 0; i < 7; ++i) outcomes.push_back(Submit(RandomPrompt(random, 200), Greedy(12)));
    ASSERT_TRUE(test::Eventually([&] { return decode_->load().running + decode_->load().waiting == outcomes.size(); }));
    FireFaultEvent(all_are_there);
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome->Wait());
      ASSERT_TRUE(outcome->status.ok()) << outcome->status;
    }
    for (const uint64_t step : began) EXPECT_LE(std::count(began.begin(), began.end(), step), 2) << name << " " << step;
    // One prompt is longer than all that may be gathered in a step: it has a step of its own.
    EXPECT_TRUE(Submit(RandomPrompt(random, 800), Greedy(4))->Wait());
  }
}

// The answer to a request, and the rest of it as another worker continues it behind `kept` of its tokens: tokens and
// all probabilities are the same bits.
TEST_F(DecodeAdmissionTest, AReplayedAnswerGoesOnAsIfItHadBegunHere) {
  std::mt19937 random = SeededRandom("replay");
  std::vector<DecodeOptions> selectors = {"dense",
                                          Selector("sparcas", 64),
                                          Selector("quest", 64),
                                          Selector("loopserve", 64),
                                          Selector("streaming", 64),
                                          Selector("snapkv", 64),
                                          Selector("h2o", 64)};
  constexpr int64_t kTokens = 96;
  for (const DecodeOptions& selector : selectors) {
    SCOPED_TRACE(selector.selector);
    Start(8192, 16384, {}, {.executor = {.max_rows = 24}});
    const int64_t free = decode_pool_->num_free();
    selection_ = selector;
    SamplingParams sampling = WithLogprobs(kTokens);
    if (random() % 2 == 0) {
      sampling.temperature = 0.8F;
      sampling.seed = random();
      sampling.frequency_penalty = 0.3F;
      sampling.repetition_penalty = 1.1F;
    }
    const auto prompt = RandomPrompt(random, 100 + random() % 200);
    change_decode_ = nullptr;
    const auto whole = Submit(prompt, sampling);
    ASSERT_TRUE(whole->Wait());
    ASSERT_TRUE(whole->status.ok()) << whole->status;
    const std::vector<int32_t>& tokens = whole->tokens[0];
    ASSERT_EQ(tokens.size(), static_cast<size_t>(kTokens));
    const size_t probabilities = whole->logprobs.size() / (tokens.size() - 1);
    // Beside another sequence, whose steps go on meanwhile.
    change_decode_ = nullptr;
    const auto beside = Submit(RandomPrompt(random, 60), Greedy(kTokens));
    for (const size_t kept : {size_t{1}, size_t{2}, size_t{24}, size_t{25}, 26 + random() % 60, tokens.size() - 1}) {
      SCOPED_TRACE(kept);
      change_decode_ = [&](DecodeRequest& request) {
        request.replay.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(kept));
        request.first_tokens.clear();
      };
      const auto rest = Submit(prompt, sampling);
      ASSERT_TRUE(rest->Wait());
      ASSERT_TRUE(rest->status.ok()) << rest->status;
      // In front is what the prefill gave.
      EXPECT_TRUE(std::equal(rest->tokens[0].begin() + 1, rest->tokens[0].end(),
                             tokens.begin() + static_cast<std::ptrdiff_t>(kept), tokens.end()));
      const auto behind = whole->logprobs.begin() + static_cast<std::ptrdiff_t>((kept - 1) * probabilities);
      EXPECT_TRUE(std::equal(rest->logprobs.begin(), rest->logprobs.end(), behind, whole->logprobs.end()));
    }
    EXPECT_TRUE(beside->Wait());
    EXPECT_TRUE(test::Eventually([&] { return decode_pool_->num_free() == free; }));
  }
}

// How many answers of 220 tokens are other ones when they are taken up in the middle, as after the loss of a decode
// worker: by a replay, and with the tokens so far as part of the prompt. SPLICE_REPLAY_ANSWERS says how many are asked.
TEST_F(DecodeAdmissionTest, AnswersThatGoOnElsewhere) {
  const char* const wanted = std::getenv("SPLICE_REPLAY_ANSWERS");
  if (wanted == nullptr) GTEST_SKIP() << "a measurement; SPLICE_REPLAY_ANSWERS=96 runs it";
  std::mt19937 random = SeededRandom("answers that go on elsewhere");
  constexpr int64_t kTokens = 220;
  Start(8192, 16384);
  int by_replay = 0, by_prompt = 0;
  const int answers = std::atoi(wanted);
  for (int i = 0; i < answers; ++i) {
    const auto prompt = RandomPrompt(random, 50 + random() % 400);
    const auto whole = Submit(prompt, Greedy(kTokens));
    ASSERT_TRUE(whole->Wait() && whole->status.ok()) << whole->status;
    const std::vector<int32_t>& tokens = whole->tokens[0];
    const auto cut = tokens.begin() + static_cast<std::ptrdiff_t>(1 + random() % (kTokens - 2));
    const std::vector<int32_t> begun(tokens.begin(), cut);
    change_decode_ = [&](DecodeRequest& request) {
      request.replay = begun;
      request.first_tokens.clear();
    };
    const auto replayed = Submit(prompt, Greedy(kTokens));
    ASSERT_TRUE(replayed->Wait() && replayed->status.ok()) << replayed->status;
    by_replay += !std::equal(replayed->tokens[0].begin() + 1, replayed->tokens[0].end(), cut, tokens.end());
    change_decode_ = [&](DecodeRequest& request) { request.prior_output = begun; };
    const auto resumed =
        Submit(Concatenate({prompt, begun}), Greedy(kTokens), std::make_shared<std::atomic<bool>>(), SteadyTime::max(),
               [&](PrefillRequest& request) { request.num_output_tokens = static_cast<int64_t>(begun.size()); });
    ASSERT_TRUE(resumed->Wait() && resumed->status.ok()) << resumed->status;
    by_prompt += !std::equal(resumed->tokens[0].begin(), resumed->tokens[0].end(), cut, tokens.end());
    change_decode_ = nullptr;
  }
  std::printf("%d answers of %d tokens, another one: %d by a replay, %d as part of the prompt\n", answers,
              static_cast<int>(kTokens), by_replay, by_prompt);
  // As they are, the products of a GPU depend on how many rows they have.
  if (std::getenv("SPLICE_CUDA_DEFAULT") == nullptr) {
    EXPECT_EQ(by_replay, 0);
  }
}

TEST_F(DecodeAdmissionTest, AReplayIsOfOneContinuationAndOfTheVocabulary) {
  std::mt19937 random = SeededRandom("bad replays");
  Start();
  const auto prompt = RandomPrompt(random, 50);
  change_decode_ = [](DecodeRequest& request) { request.replay = {1, 1 << 30}; };
  EXPECT_EQ(Ended(Submit(prompt, Greedy(10))), absl::StatusCode::kInvalidArgument);
  change_decode_ = [](DecodeRequest& request) { request.replay = {1, 2}; };
  SamplingParams two = Greedy(10);
  two.num_forks = 2;
  EXPECT_EQ(Ended(Submit(prompt, two)), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spl::engine
