// Prefill and decode engines against the plain in-process model: batching, slicing, cached prefixes, forks and stored
// chunks may change when things happen, never a token.
#include "services/base/fault_point.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

TEST_F(EnginesTest, MixedConcurrentRequestsGiveTheTokensOfThePlainModel) {
  Start();
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  struct Item {
    std::vector<int32_t> prompt;
    SamplingParams sampling;
    std::shared_ptr<Outcome> outcome;
  };
  std::vector<Item> items;
  for (size_t length : {1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 400, 700}) {
    Item item{RandomPrompt(random, length), Greedy(5 + static_cast<int64_t>(random() % 70)), nullptr};
    if (random() % 2) {  // half of them sample
      item.sampling.temperature = 0.8f;
      item.sampling.top_p = 0.9f;
      item.sampling.seed = random();
      item.sampling.repetition_penalty = 1.1f;
    }
    items.push_back(std::move(item));
  }
  for (Item& item : items) item.outcome = Submit(item.prompt, item.sampling);
  for (Item& item : items) {
    ASSERT_TRUE(item.outcome->Wait());
    ASSERT_TRUE(item.outcome->status.ok()) << item.outcome->status;
    EXPECT_EQ(item.outcome->tokens, Expected(item.prompt, item.sampling)) << item.prompt.size();
  }
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  decode_pool_->CheckInvariants();
}

TEST_F(EnginesTest, ACachedPrefixChangesNothingButTheWork) {
  Start();
  std::mt19937 random(1);
  std::vector<int32_t> prompt = RandomPrompt(random, 300);
  auto cold = Submit(prompt, Greedy(8));
  ASSERT_TRUE(cold->Wait() && cold->status.ok()) << cold->status;
  auto warm = Submit(prompt, Greedy(8));
  ASSERT_TRUE(warm->Wait() && warm->status.ok()) << warm->status;
  EXPECT_EQ(cold->stats.cached_tokens, 0);
  EXPECT_EQ(warm->stats.cached_tokens, 256);
  EXPECT_EQ(warm->stats.computed_tokens, 44);
  EXPECT_EQ(warm->tokens, cold->tokens);
  // A prompt of whole chunks still computes its last one: the first token needs its logits.
  prompt.resize(256);
  auto whole = Submit(prompt, Greedy(8));
  ASSERT_TRUE(whole->Wait() && whole->status.ok()) << whole->status;
  EXPECT_EQ(whole->stats.cached_tokens, 192);
  EXPECT_EQ(whole->tokens, Expected(prompt, Greedy(8)));
}

TEST_F(EnginesTest, AnotherNamespaceNeverHits) {
  Start();
  std::mt19937 random(2);
  const std::vector<int32_t> prompt = RandomPrompt(random, 200);
  ASSERT_TRUE(Submit(prompt, Greedy(1))->Wait());
  WaitUntilKept();
  const auto keys = [&](uint8_t salt) {
    chunk::Digest key{};
    key[0] = salt;
    return chunk::MakePrefixKeys(model_->kv_fingerprint(), key, prompt);
  };
  EXPECT_EQ(prefill_->CountCachedLeading(keys(0)), 3u);
  EXPECT_EQ(prefill_->CountCachedLeading(keys(1)), 0u);
}

TEST_F(EnginesTest, LogitsBehindThePromptAreReturnedWhenAskedFor) {
  Start();
  std::mt19937 random(5);
  const std::vector<int32_t> prompt = RandomPrompt(random, 100);
  EXPECT_TRUE(Ask(prompt, nullptr)->first_logits.empty());
  const auto outcome = Ask(prompt, [](PrefillRequest& request) { request.return_first_logits = true; });
  ASSERT_EQ(outcome->first_logits.size(), static_cast<size_t>(model_->config().vocab_size));
  const auto best = std::max_element(outcome->first_logits.begin(), outcome->first_logits.end());
  EXPECT_EQ(best - outcome->first_logits.begin(), outcome->tokens[0][0]) << "greedy takes the most likely token";
}

TEST_F(EnginesTest, ForksAreIndependentAndEqualThePlainModel) {
  Start();
  std::mt19937 random(3);
  const std::vector<int32_t> prompt = RandomPrompt(random, 100);
  SamplingParams sampling;
  sampling.num_forks = 5;
  sampling.max_tokens = 40;  // crosses a page edge
  sampling.seed = 11;
  auto outcome = Submit(prompt, sampling);
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->tokens, Expected(prompt, sampling));
  EXPECT_NE(outcome->tokens[0], outcome->tokens[1]);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

TEST_F(EnginesTest, ChunksFromTheStoreGiveTheSameTokens) {
  auto store = std::make_shared<FakeStore>();
  PrefillEngineOptions options;
  options.store = store;
  Start(8192, 8192, options);
  std::mt19937 random(4);
  const std::vector<int32_t> prompt = RandomPrompt(random, 500);
  auto cold = Submit(prompt, Greedy(6));
  ASSERT_TRUE(cold->Wait() && cold->status.ok()) << cold->status;
  ASSERT_TRUE(store->WaitForSize(7));
  Start(8192, 8192, options);  // a worker that has seen nothing
  auto warm = Submit(prompt, Greedy(6));
  ASSERT_TRUE(warm->Wait() && warm->status.ok()) << warm->status;
  EXPECT_EQ(warm->stats.stored_tokens, 448);
  EXPECT_EQ(warm->stats.computed_tokens, 52);
  EXPECT_EQ(warm->tokens, cold->tokens);
  store->fail = true;  // a store that fails costs time, never a request
  Start(8192, 8192, options);
  auto failed = Submit(prompt, Greedy(6));
  ASSERT_TRUE(failed->Wait() && failed->status.ok()) << failed->status;
  EXPECT_EQ(failed->stats.stored_tokens, 0);
  EXPECT_EQ(failed->tokens, cold->tokens);
}

// Prefixes are fetched before their prompts start; meanwhile others are computed, and fetched, too.
TEST_F(EnginesTest, OtherPromptsRunWhileOneIsFetched) {
  auto store = std::make_shared<FakeStore>();
  PrefillEngineOptions options;
  options.store = store;
  Start(8192, 8192, options);
  std::mt19937 random(17);
  const auto slow = RandomPrompt(random, 300), stored = RandomPrompt(random, 300), fresh = RandomPrompt(random, 300);
  for (const auto* prompt : {&slow, &stored}) ASSERT_TRUE(Submit(*prompt, Greedy(1))->Wait());
  ASSERT_TRUE(store->WaitForSize(8));
  Start(8192, 8192, options);
  store->BlockGetsOf(chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, slow)[0]);
  auto waiting = Submit(slow, Greedy(4));
  ASSERT_TRUE(store->WaitForBlockedGet());
  auto other = Submit(stored, Greedy(4)), third = Submit(fresh, Greedy(4));
  ASSERT_TRUE(other->Wait() && other->status.ok()) << other->status;
  ASSERT_TRUE(third->Wait() && third->status.ok()) << third->status;
  EXPECT_EQ(other->stats.stored_tokens, 256);
  EXPECT_FALSE(waiting->done);
  store->BlockGetsOf(std::nullopt);
  ASSERT_TRUE(waiting->Wait() && waiting->status.ok()) << waiting->status;
  EXPECT_EQ(waiting->stats.stored_tokens, 256);
  EXPECT_EQ(waiting->tokens, Expected(slow, Greedy(4)));
}

// The engine stops while one prompt is with a fetch thread and another one waits for its turn.
TEST_F(EnginesTest, StoppingEndsWhatIsBeingFetched) {
  auto store = std::make_shared<FakeStore>();
  PrefillEngineOptions options{.max_concurrent = 1, .store = store};
  Start(8192, 8192, options);
  std::mt19937 random(18);
  const auto slow = RandomPrompt(random, 300);
  ASSERT_TRUE(Submit(slow, Greedy(1))->Wait());
  ASSERT_TRUE(store->WaitForSize(4));
  Start(8192, 8192, options);
  store->BlockGetsOf(chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, slow)[0]);
  const auto fetched = Submit(slow, Greedy(1));
  ASSERT_TRUE(store->WaitForBlockedGet());
  const auto waiting = Submit(RandomPrompt(random, 10), Greedy(1));
  std::thread stopping([&] { prefill_->Stop(); });
  EXPECT_TRUE(waiting->Wait());
  EXPECT_EQ(waiting->status.code(), absl::StatusCode::kUnavailable);
  store->BlockGetsOf(std::nullopt);
  EXPECT_TRUE(fetched->Wait());
  EXPECT_EQ(fetched->status.code(), absl::StatusCode::kUnavailable);
  stopping.join();
  EXPECT_EQ(prefill_->load().queued_requests, 0u);
  EXPECT_EQ(prefill_->load().queued_tokens, 0);
}

// The store keeps what is dear to compute: what chunks say of themselves adds up to about what the prompt took.
TEST_F(EnginesTest, StoredChunksSayWhatTheyTakeToCompute) {
  auto store = std::make_shared<FakeStore>();
  PrefillEngineOptions options;
  options.store = store;
  Start(8192, 8192, options);
  std::mt19937 random(18);
  const auto prompt = RandomPrompt(random, 2048 + 1);
  const auto run = Submit(prompt, Greedy(1));
  ASSERT_TRUE(run->Wait() && run->status.ok());
  ASSERT_TRUE(store->WaitForSize(32));
  double sum = 0, last = 0;
  for (const auto& key : chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, prompt)) {
    const double seconds = store->Find(key)->header.recompute_seconds;
    EXPECT_GT(seconds, 0);
    sum += seconds;
    last = seconds;
  }
  const double first =
      store->Find(chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, prompt)[0])->header.recompute_seconds;
  EXPECT_GT(last, first * 1.2) << "later tokens attend to more";
  std::printf("prefill %.3f s, chunks say %.3f s\n", run->stats.prefill_s, sum);
  EXPECT_GT(sum, run->stats.prefill_s / 10);
  EXPECT_LT(sum, run->stats.prefill_s * 10);
}

TEST_F(EnginesTest, CancellingFreesEveryPage) {
  Start();
  std::mt19937 random(5);
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  auto outcome = Submit(RandomPrompt(random, 300), Greedy(4000), cancelled);
  {
    std::unique_lock lock(outcome->mutex);
    ASSERT_TRUE(outcome->changed.wait_for(lock, 30s, [&] { return outcome->tokens[0].size() > 3; }));
  }
  cancelled->store(true);
  decode_->Wake();
  ASSERT_TRUE(outcome->Wait());
  EXPECT_EQ(outcome->status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

TEST_F(EnginesTest, AnExpiredDeadlineEndsARequestInEitherEngine) {
  Start();
  std::mt19937 random(6);
  auto late = Submit(RandomPrompt(random, 300), Greedy(10), std::make_shared<std::atomic<bool>>(false),
                     std::chrono::steady_clock::now() - 1s);
  ASSERT_TRUE(late->Wait());
  EXPECT_EQ(late->status.code(), absl::StatusCode::kDeadlineExceeded);
  auto running = Submit(RandomPrompt(random, 64), Greedy(100000), std::make_shared<std::atomic<bool>>(false),
                        std::chrono::steady_clock::now() + 300ms);
  ASSERT_TRUE(running->Wait());
  EXPECT_EQ(running->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

// Sequences that do not fit together all finish, in turns, with the tokens that they have alone: those with
// continuations, those that are drawn, and those that keep something beside their KV.
TEST_F(EnginesTest, UnderPressureEverySequenceThatFitsAloneFinishes) {
  std::mt19937 random(17);
  struct Case {
    DecodeOptions decode;
    int32_t n;
    float temperature;
  };
  DecodeOptions sparcas("sparcas"), snapkv("snapkv"), loopserve("loopserve");
  sparcas.budget = snapkv.budget = loopserve.budget = 64;
  const std::vector<Case> cases = {{"dense", 1, 0},   {"dense", 4, 3}, {sparcas, 1, 0}, {snapkv, 2, 2},
                                   {loopserve, 1, 0}, {"dense", 3, 0}, {"dense", 1, 1}, {sparcas, 2, 1}};
  std::vector<std::vector<int32_t>> prompts;
  std::vector<SamplingParams> samplings;
  for (const Case& c : cases) {
    prompts.push_back(RandomPrompt(random, 190 + random() % 150));
    samplings.push_back(Greedy(110 + static_cast<int64_t>(random() % 60)));
    samplings.back().temperature = c.temperature;
    samplings.back().num_forks = c.n;
    samplings.back().seed = random();
  }
  const auto run = [&] {
    std::vector<std::shared_ptr<Outcome>> outcomes;
    for (size_t i = 0; i < cases.size(); ++i) {
      selection_ = cases[i].decode;
      outcomes.push_back(Submit(prompts[i], samplings[i]));
    }
    for (const auto& outcome : outcomes) EXPECT_TRUE(outcome->Wait());
    return outcomes;
  };
  Start(8192, 16384);
  const auto want = run();
  EXPECT_EQ(decode_->load().preemptions, 0u);
  // The prompts go through one at a time; the decode pool is what is short. It is little larger than the second request
  // alone becomes, so that neighbours give way however long a prompt takes beside a step.
  Start(8192, 3 * 512);
  const auto got = run();
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_TRUE(got[i]->status.ok()) << i << ": " << got[i]->status;
    EXPECT_EQ(got[i]->tokens, want[i]->tokens) << i << " " << cases[i].decode.selector;
  }
  EXPECT_GT(decode_->load().preemptions, 0u);
  EXPECT_EQ(decode_->load().parked_bytes, 0u);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  decode_pool_->CheckInvariants();
}

// One that waits in host memory is cancelled, and passes its deadline, like any other.
TEST_F(EnginesTest, WhoGaveWayCanBeCancelled) {
  Start(8192, 640);
  std::mt19937 random(18);
  const auto older = RandomPrompt(random, 250), younger = RandomPrompt(random, 250);
  const auto first = Submit(older, Greedy(300));
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  const auto second = Submit(younger, Greedy(300), cancelled);
  ASSERT_TRUE(test::Eventually([&] { return decode_->load().parked == 1; }));
  cancelled->store(true);
  decode_->Wake();
  ASSERT_TRUE(second->Wait());
  EXPECT_EQ(second->status.code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(first->Wait());
  EXPECT_TRUE(first->status.ok()) << first->status;
  EXPECT_EQ(first->tokens, Expected(older, Greedy(300)));
  EXPECT_EQ(decode_->load().parked_bytes, 0u);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

// Alone and still too large: it ends, and says why.
TEST_F(EnginesTest, ASequenceThatOutgrowsThePoolEnds) {
  Start(8192, 320);
  std::mt19937 random(19);
  const auto outcome = Submit(RandomPrompt(random, 250), Greedy(300));
  ASSERT_TRUE(outcome->Wait());
  EXPECT_EQ(outcome->status.code(), absl::StatusCode::kUnavailable) << outcome->status;
  EXPECT_THAT(std::string(outcome->status.message()), testing::HasSubstr("too small for this sequence"));
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

// The pages of a choice come on top of the KV. A sequence that fits without them goes on, and attends to everything.
TEST_F(EnginesTest, ASequenceThatOutgrowsThePoolWithItsChoiceStopsChoosing) {
  std::mt19937 random = test::SeededRandom("stops choosing");
  for (const char* const name : {"sparcas", "adaptive", "quest", "loopserve", "cascade"}) {
    DecodeOptions few(name), all(name);
    few.budget = 64;
    all.budget = 1024;  // more than there is: every step attends to everything
    const auto prompt = RandomPrompt(random, 240);
    Start(8192, 8192);
    selection_ = few;
    const auto roomy = Submit(prompt, Greedy(70));
    ASSERT_TRUE(roomy->Wait());
    for (const DecodeOptions& options : {few, all}) {
      Start(8192, TokensToBegin(options, 240));  // not enough for the fifth page of each head
      selection_ = options;
      const auto outcome = Submit(prompt, Greedy(70));
      ASSERT_TRUE(outcome->Wait());
      EXPECT_TRUE(outcome->status.ok()) << name << ": " << outcome->status;
      ASSERT_EQ(outcome->tokens[0].size(), 70u) << name;
      // Until its KV needs the fifth page it chooses.
      const Tokens want = options.budget == few.budget ? roomy->tokens : Expected(prompt, Greedy(70));
      const auto same = options.budget == few.budget ? 17 : 70;
      EXPECT_TRUE(std::equal(want[0].begin(), want[0].begin() + same, outcome->tokens[0].begin())) << name;
      if (name != std::string("adaptive")) {
        EXPECT_EQ(outcome->kinds[0], StepKind::kFixed) << name;
      }
      EXPECT_EQ(outcome->kinds.back(), StepKind::kDense) << name << " still chooses";
      EXPECT_EQ(decode_->load().preemptions, 0u) << name;
      EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages()) << name;
      decode_pool_->CheckInvariants();
    }
  }
}

TEST_F(EnginesTest, WithoutHostMemoryAFullPoolEndsTheYoungestAndTheOthersFinish) {
  DecodeEngineOptions decode;
  decode.parked_bytes = 0;
  Start(8192, 640, {}, decode);  // room for two sequences of 256 tokens and little growth
  std::mt19937 random(7);
  std::vector<std::shared_ptr<Outcome>> outcomes;
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 2; ++i) {
    prompts.push_back(RandomPrompt(random, 250));
    outcomes.push_back(Submit(prompts.back(), Greedy(200)));
  }
  int preempted = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i]->Wait());
    if (outcomes[i]->status.ok()) {
      EXPECT_EQ(outcomes[i]->tokens, Expected(prompts[i], Greedy(200)));
    } else {
      ++preempted;
      EXPECT_EQ(outcomes[i]->status.code(), absl::StatusCode::kUnavailable);
    }
  }
  EXPECT_EQ(preempted, 1);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

TEST_F(EnginesTest, ALostDeviceEndsEverySequenceWithUnavailableAndIsReportedOnce) {
  const auto model = model_;
  auto backend = std::make_shared<test::FakeDeviceBackend>();
  auto on_device = Model::Load(test::kTinyModel, backend);
  ASSERT_TRUE(on_device.ok()) << on_device.status();
  model_ = *on_device;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> reports;
  const auto report = [&](const absl::Status& status) {
    std::lock_guard lock(mutex);
    reports.emplace_back(status.message());
    changed.notify_all();
  };
  const auto wait_reports = [&](size_t n) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, 20s, [&] { return reports.size() >= n; });
  };
  PrefillEngineOptions prefill;
  prefill.on_device_lost = report;
  DecodeEngineOptions decode;
  decode.on_device_lost = report;
  Start(8192, 8192, prefill, decode);
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens = 4000;
  sampling.ignore_eos = true;
  const std::vector<int32_t> prompt(100, 7);
  // One that decodes when the device goes, one that comes after: both ends are heard of, by their own engine.
  auto decoding = Submit(prompt, sampling);
  ASSERT_TRUE(EventuallyRunning());
  backend->lost = true;
  auto later = Submit(prompt, sampling);
  ASSERT_TRUE(decoding->Wait());
  ASSERT_TRUE(later->Wait());
  EXPECT_EQ(decoding->status.code(), absl::StatusCode::kUnavailable) << decoding->status;
  EXPECT_EQ(later->status.code(), absl::StatusCode::kUnavailable) << later->status;
  ASSERT_TRUE(wait_reports(2));
  EXPECT_THAT(reports, testing::Each(testing::HasSubstr("illegal memory access")));
  StopAll();
  model_ = model;
}

// A step that fails is nobody's fault in it: its requests may be started again, and the worker goes on.
TEST_F(EnginesTest, AFailedStepIsInternalForItsRequestsAndTheNextOneRuns) {
  Start();
  std::mt19937 random(12);
  const std::vector<std::vector<int32_t>> prompts = {RandomPrompt(random, 100), RandomPrompt(random, 150)};
  ScopedFaults disarm;
  ASSERT_TRUE(ArmFault("engine.decode_step",
                       {.kind = FaultKind::kError, .code = absl::StatusCode::kInvalidArgument, .only_hit = 5})
                  .ok());
  std::vector<std::shared_ptr<Outcome>> outcomes;
  for (const auto& prompt : prompts) outcomes.push_back(Submit(prompt, Greedy(400)));
  int failed = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i]->Wait());
    if (outcomes[i]->status.ok()) continue;  // it was not in that step
    ++failed;
    EXPECT_EQ(outcomes[i]->status.code(), absl::StatusCode::kInternal) << outcomes[i]->status;
    EXPECT_THAT(std::string(outcomes[i]->status.message()), testing::HasSubstr("a step of the batch failed"));
  }
  EXPECT_GE(failed, 1);
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  const auto after = Submit(prompts[0], Greedy(20));
  ASSERT_TRUE(after->Wait());
  EXPECT_EQ(after->tokens, Expected(prompts[0], Greedy(20)));
}

// Whatever a caller brings, ids outside of the vocabulary go no further.
TEST_F(EnginesTest, TokensOutsideOfTheVocabularyAreRefused) {
  Start();
  const auto refused = [&](const std::function<void(DecodeRequest&)>& change) {
    DecodeRequest request;
    request.kv = std::make_unique<SequenceKv>(*decode_pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(request.kv->Reserve(10).ok());
    request.kv->set_num_tokens(10);
    request.sampling = Greedy(5);
    request.prompt = std::vector<int32_t>(10, 1);
    request.first_tokens = {{.token = 1}};
    request.on_done = [](const absl::Status&) { ADD_FAILURE() << "it was not refused"; };
    change(request);
    return decode_->Submit(std::move(request)).ToString();
  };
  using testing::AllOf, testing::HasSubstr;
  for (const int32_t id : {-1, 4096, 0x7fffff00, std::numeric_limits<int32_t>::min()}) {
    const auto named = AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(std::to_string(id)));
    EXPECT_THAT(refused([&](DecodeRequest& r) { r.prompt[3] = id; }), named);
    EXPECT_THAT(refused([&](DecodeRequest& r) { r.left_prompt = {1, id}; }), named);
    EXPECT_THAT(refused([&](DecodeRequest& r) { r.prior_output = {1, id}; }), named);
    EXPECT_THAT(refused([&](DecodeRequest& r) { r.first_tokens[0].token = id; }), named);
  }
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
}

// Greedy rows and rows that are drawn in one batch: each as if it were alone.
TEST_F(EnginesTest, GreedyAndDrawnRowsDoNotMix) {
  Start();
  std::mt19937 random(13);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<SamplingParams> samplings;
  std::vector<std::shared_ptr<Outcome>> outcomes;
  for (int i = 0; i < 6; ++i) {
    prompts.push_back(RandomPrompt(random, 60 + 10 * static_cast<size_t>(i)));
    samplings.push_back(Greedy(60));
    if (i % 2 == 1) {
      samplings.back().temperature = 4;
      samplings.back().top_p = i == 5 ? 1.0f : 0.9f;
      samplings.back().num_forks = i == 3 ? 3 : 1;
      samplings.back().seed = static_cast<uint64_t>(i);
    }
    if (i >= 4) {  // greedy and drawn
      samplings.back().repetition_penalty = 1.3f;
      samplings.back().frequency_penalty = 0.2f;
      samplings.back().logit_bias = {{7, 2.0f}};
    }
    outcomes.push_back(Submit(prompts.back(), samplings.back()));
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i]->Wait());
    ASSERT_TRUE(outcomes[i]->status.ok()) << outcomes[i]->status;
    EXPECT_EQ(outcomes[i]->tokens, Expected(prompts[i], samplings[i])) << i;
  }
}

TEST_F(EnginesTest, BadPromptsAndFullQueuesAreRefusedWithNumbers) {
  PrefillEngineOptions options;
  options.max_queued = 1;
  Start(1024, 1024, options);
  std::mt19937 random(8);
  EXPECT_THAT(Submit({}, Greedy(1))->status.ToString(), testing::HasSubstr("no tokens"));
  EXPECT_THAT(Submit({4096}, Greedy(1))->status.ToString(), testing::HasSubstr("4096"));
  EXPECT_THAT(Submit(RandomPrompt(random, 20000), Greedy(1))->status.ToString(),
              testing::AllOf(testing::HasSubstr("20000"), testing::HasSubstr("16384")));
  EXPECT_THAT(Submit(RandomPrompt(random, 1500), Greedy(1))->status.ToString(),
              testing::AllOf(testing::HasSubstr("1500"), testing::HasSubstr("1024")));
  auto first = Submit(RandomPrompt(random, 1000), Greedy(1));
  EXPECT_EQ(Submit(RandomPrompt(random, 10), Greedy(1))->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(first->Wait() && first->status.ok());
}

// ---- segments -------------------------------------------------------------------------------------------------------

TEST_F(EnginesTest, ASegmentIsFoundInAnotherPromptAndRecoveredExactlyWhenAllOfItIsRecomputed) {
  Start();
  std::mt19937 random(11);
  const auto intro = RandomPrompt(random, 30), other = RandomPrompt(random, 111), question = RandomPrompt(random, 9);
  const auto document = RandomPrompt(random, 333);
  const auto first = Ask(Concatenate({intro, document, question}), [](PrefillRequest& r) {
    r.segments = {{{30, 363}, kDocs}};
  });
  EXPECT_TRUE(first->stats.exact);
  EXPECT_EQ(first->stats.policy, "exact");  // "auto", and there is nothing to copy yet
  EXPECT_EQ(first->stats.aligned_tokens, 0);
  const auto prompt = Concatenate({other, document, intro, document, question});
  const auto with = [&](const chunk::Digest& key, const char* policy) {
    return [&, key, policy](PrefillRequest& r) {
      r.segments = {{{111, 444}, key}, {{474, 807}, key}};
      r.reuse.policy = policy;
      r.reuse.recompute_share = 1;
      r.reuse.recompute_max = 1 << 20;
      r.publish = false;
    };
  };
  for (const char* policy : {"naive", "sparsex", "epic", "cacheblend"}) {
    const auto again = Ask(prompt, with(kDocs, policy));
    EXPECT_FALSE(again->stats.exact);
    EXPECT_EQ(again->stats.policy, policy);
    EXPECT_EQ(again->stats.cached_tokens, 0);
    EXPECT_EQ(again->stats.aligned_tokens, 666);
    EXPECT_EQ(again->stats.computed_tokens, 150);
    if (std::string(policy) == "sparsex") {
      EXPECT_EQ(again->stats.recomputed_tokens, 666);
      EXPECT_EQ(again->tokens, Expected(prompt, Greedy(6)));
    }
  }
  // Without the key nothing is found, and the answer is the plain model's.
  const auto stranger = Ask(prompt, with(kOtherDocs, "naive"));
  EXPECT_EQ(stranger->stats.aligned_tokens, 0);
  EXPECT_TRUE(stranger->stats.exact);
  EXPECT_EQ(stranger->tokens, Expected(prompt, Greedy(6)));
}

TEST_F(EnginesTest, RecoveredKvStaysWithItsRequest) {
  PrefillEngineOptions options;
  options.canonical_prefill = false;  // which would compute the text behind the copy afresh
  Start(8192, 8192, options);
  std::mt19937 random(12);
  const auto intro = RandomPrompt(random, 70), document = RandomPrompt(random, 200), rest = RandomPrompt(random, 150);
  (void)Ask(document, [](PrefillRequest& r) { r.segments = {{{0, 200}, kDocs}}; });
  const auto prompt = Concatenate({intro, document, rest});
  const auto approximate = Ask(prompt, [](PrefillRequest& r) {
    r.segments = {{{70, 270}, kDocs}, {{270, 420}, kDocs}};
    r.reuse.policy = "naive";
  });
  EXPECT_EQ(approximate->stats.aligned_tokens, 200);
  // Only the chunk in front of the copy is exact and may be found again, from the start …
  const auto exact = Ask(prompt, [](PrefillRequest& r) { r.reuse.policy = "exact"; });
  EXPECT_EQ(exact->stats.cached_tokens, 64);
  EXPECT_EQ(exact->tokens, Expected(prompt, Greedy(6)));
  // … and the text behind it is no source of segments.
  const auto later = Ask(Concatenate({RandomPrompt(random, 20), rest, intro}), [](PrefillRequest& r) {
    r.segments = {{{20, 170}, kDocs}};
    r.reuse.policy = "naive";
  });
  EXPECT_EQ(later->stats.aligned_tokens, 0);
}

TEST_F(EnginesTest, UnmarkedTextIsFoundAtAnyOffset) {
  Start();
  std::mt19937 random(13);
  const auto text = RandomPrompt(random, 500);
  (void)Ask(Concatenate({RandomPrompt(random, 13), text}), [](PrefillRequest& r) { r.reuse_auto = true; });
  const std::vector<int32_t> part(text.begin() + 101, text.begin() + 431);
  const auto prompt = Concatenate({RandomPrompt(random, 77), part, RandomPrompt(random, 20)});
  const auto found = Ask(prompt, [](PrefillRequest& r) {
    r.reuse_auto = true;
    r.reuse.policy = "sparsex";  // "auto" would save too little
  });
  EXPECT_EQ(found->stats.aligned_tokens, 330);  // to the token
  EXPECT_FALSE(found->stats.exact);
  const auto strict = Ask(prompt, [](PrefillRequest& r) {
    r.reuse_auto = true;
    r.reuse.policy = "exact";
  });
  EXPECT_EQ(strict->stats.aligned_tokens, 0);
  EXPECT_EQ(strict->tokens, Expected(prompt, Greedy(6)));
}

// What one worker computed another finds in the store, at any offset of its pages, the short last chunk included.
TEST_F(EnginesTest, SegmentsTravelThroughTheStore) {
  auto store = std::make_shared<FakeStore>();
  std::mt19937 random(15);
  const auto document = RandomPrompt(random, 200), intro = RandomPrompt(random, 41), question = RandomPrompt(random, 9);
  PrefillEngineOptions options;
  options.store = store;
  Start(8192, 8192, options);
  const auto first = Ask(Concatenate({intro, document, question}), [](PrefillRequest& r) {
    r.segments = {{{41, 241}, kDocs}};
  });
  EXPECT_TRUE(first->stats.exact);
  ASSERT_TRUE(store->WaitForSize(3 + 4));  // chunks of the prompt, chunks of the segment
  Start(8192, 8192, options);
  const auto prompt = Concatenate({RandomPrompt(random, 100), document, question});
  const auto ask = [&](const chunk::Digest& key, const char* policy) {
    return Ask(prompt, [&, key, policy](PrefillRequest& r) {
      r.segments = {{{100, 300}, key}};
      r.reuse.policy = policy;
      r.reuse.recompute_share = 1;
      r.reuse.recompute_max = 1 << 20;
      r.publish = false;
    });
  };
  EXPECT_EQ(ask(kOtherDocs, "naive")->stats.aligned_tokens, 0);
  const auto naive = ask(kDocs, "naive");
  EXPECT_EQ(naive->stats.aligned_tokens, 200);
  EXPECT_EQ(naive->stats.fetched_bytes, 4 * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
  const auto again = ask(kDocs, "sparsex");
  EXPECT_EQ(again->stats.fetched_bytes, 0);  // it is here now
  EXPECT_EQ(again->stats.recomputed_tokens, 200);
  EXPECT_EQ(again->tokens, Expected(prompt, Greedy(6)));
  // The copy that came through the store is the one that was computed, bit by bit: the same naive answer.
  Start(8192, 8192, {});
  (void)Ask(Concatenate({intro, document, question}), [](PrefillRequest& r) { r.segments = {{{41, 241}, kDocs}}; });
  EXPECT_EQ(ask(kDocs, "naive")->tokens, naive->tokens);
  store->fail = true;
  Start(8192, 8192, options);
  const auto without = ask(kDocs, "naive");
  EXPECT_EQ(without->stats.aligned_tokens, 0);
  EXPECT_EQ(without->tokens, Expected(prompt, Greedy(6)));
}

TEST_F(EnginesTest, SegmentsMakeRoomWhenPagesAreShort) {
  Start(1024, 2048);
  std::mt19937 random(14);
  for (int i = 0; i < 12; ++i) {
    const auto document = RandomPrompt(random, 300);
    const auto outcome = Ask(
        document,
        [](PrefillRequest& r) {
          r.segments = {{{0, 300}, kDocs}};
        },
        2);
    EXPECT_EQ(outcome->stats.aligned_tokens, 0);
  }
  EXPECT_LE(prefill_->segment_stats().num_tokens, 1024);
  const auto whole = Ask(
      RandomPrompt(random, 1000), [](PrefillRequest&) {}, 2);
  EXPECT_TRUE(whole->status.ok());
  prefill_->pool().CheckInvariants();
}

// A pool full of what was computed before gives way to a segment that the store has.
TEST_F(EnginesTest, FetchedSegmentsMakeRoom) {
  auto store = std::make_shared<FakeStore>();
  PrefillEngineOptions options;
  options.store = store;
  std::mt19937 random(19);
  const auto document = RandomPrompt(random, 256);
  Start(1024, 2048, options);
  (void)Ask(document, [](PrefillRequest& r) { r.segments = {{{0, 256}, kDocs}}; });
  ASSERT_TRUE(store->WaitForSize(4 + 4));
  Start(1024, 2048, options);
  (void)Ask(
      RandomPrompt(random, 1020), [](PrefillRequest&) {}, 1);  // fills the pool
  const auto found = Ask(Concatenate({RandomPrompt(random, 50), document, {1, 2, 3}}), [](PrefillRequest& r) {
    r.segments = {{{50, 306}, kDocs}};
    r.reuse.policy = "naive";
  });
  EXPECT_EQ(found->stats.aligned_tokens, 256);
}

// Ordinary text passes through; a knowledge base's stays until there is nothing else, and comes back from the store.
TEST_F(EnginesTest, FrozenSegmentsOutlastOrdinaryOnesAndComeBackFromTheStore) {
  auto store = std::make_shared<FakeStore>();
  PrefillEngineOptions options;
  options.store = store;
  std::mt19937 random(16);
  const auto book = RandomPrompt(random, 256), plain = RandomPrompt(random, 256);
  const auto ask = [&](const std::vector<int32_t>& text, bool frozen, std::vector<int32_t> lead) {
    const auto begin = static_cast<int32_t>(lead.size()), end = begin + static_cast<int32_t>(text.size());
    const auto outcome = Ask(
        Concatenate({lead, text, RandomPrompt(random, 5)}),
        [&](PrefillRequest& r) {
          r.segments = {{{begin, end}, kDocs, frozen}};
          r.reuse.policy = "naive";
        },
        2);
    WaitUntilKept();
    return outcome;
  };
  const auto pass_through = [&] {
    for (int i = 0; i < 8; ++i) (void)ask(RandomPrompt(random, 300), false, {});
  };
  Start(1024, 2048, options);
  (void)ask(book, true, {});
  (void)ask(plain, false, {});
  EXPECT_EQ(prefill_->segment_stats().num_frozen, 1u);
  ASSERT_TRUE(store->WaitForSize(2 * (4 + 4)));
  pass_through();
  EXPECT_EQ(prefill_->segment_stats().num_frozen_dropped, 0u);
  const auto kept = ask(book, true, RandomPrompt(random, 50));
  EXPECT_EQ(kept->stats.aligned_tokens, 256);
  EXPECT_EQ(kept->stats.fetched_bytes, 0);
  // Nothing else is left: it goes, too, and its next use brings it from the store.
  EXPECT_TRUE(Ask(
                  RandomPrompt(random, 1020), [](PrefillRequest& r) { r.publish = false; }, 2)
                  ->status.ok());
  EXPECT_EQ(prefill_->segment_stats().num_frozen, 0u);
  EXPECT_EQ(prefill_->segment_stats().num_frozen_dropped, 1u);
  const auto back = ask(book, true, RandomPrompt(random, 50));
  EXPECT_EQ(back->stats.aligned_tokens, 256);
  EXPECT_GT(back->stats.fetched_bytes, 0);
  EXPECT_EQ(prefill_->segment_stats().num_frozen, 1u) << "what was fetched is frozen again";
  EXPECT_EQ(prefill_->segment_stats().frozen_tokens, 256);
  // Above its share the frozen pool is the first to give.
  options.frozen_share = 0.1;
  Start(1024, 2048, options);
  (void)ask(book, true, {});
  (void)ask(plain, false, {});
  pass_through();
  EXPECT_EQ(prefill_->segment_stats().num_frozen, 0u);
  prefill_->pool().CheckInvariants();
}

}  // namespace
}  // namespace spl::engine
