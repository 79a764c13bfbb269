// Segments that no request could make a source, computed by themselves while the engine has nothing else to do.
#include "services/engine/runtime/canonical_queue.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/background_idle.h"
#include "tests/support/eventually.h"

namespace spl::engine {
namespace {

class CanonicalTest : public EnginesTest {
 protected:
  void StartEngines(int64_t tokens = 8192, bool canonical = true) {
    options_.store = store_;
    options_.canonical_prefill = canonical;
    Start(tokens, 8192, options_);
  }
  bool WaitBackground() { return test::WaitBackgroundIdle(*prefill_); }
  // [lead][known][text][end], both marked, where `known` has a source and so is copied.
  std::shared_ptr<Outcome> AskBehindACopy(const std::vector<int32_t>& known, const std::vector<int32_t>& text,
                                          bool frozen = false, bool shared = false) {
    const auto begin = static_cast<int32_t>(lead_.size()), middle = begin + static_cast<int32_t>(known.size());
    const auto end = middle + static_cast<int32_t>(text.size());
    return Ask(
        Concatenate({lead_, known, text, {1, 2, 3}}),
        [&](PrefillRequest& r) {
          r.reuse.policy = "sparsex";  // "auto" would save too little
          r.segments = {{{begin, middle}, kDocs}, {{middle, end}, kDocs, frozen, shared}};
        },
        2);
  }
  // `text` alone, or the first segment behind `lead`.
  void MakeKnown(const std::vector<int32_t>& text, const std::vector<int32_t>& lead = {}) {
    const auto begin = static_cast<int32_t>(lead.size()), size = static_cast<int32_t>(text.size());
    (void)Ask(
        Concatenate({lead, text}),
        [&](PrefillRequest& r) {
          r.segments = {{{begin, begin + size}, kDocs}};
        },
        1);
  }
  // With `text` at position 45 of a prompt; everything recomputed or nothing.
  std::shared_ptr<Outcome> AskFor(const std::vector<int32_t>& prompt, size_t text_size, const char* policy,
                                  bool shared = false) {
    return Ask(prompt, [&](PrefillRequest& r) {
      r.segments = {{{45, 45 + static_cast<int32_t>(text_size)}, kDocs, false, shared}};
      r.reuse.policy = policy;
      r.reuse.recompute_share = 1;
      r.reuse.recompute_max = 1 << 20;
      r.publish = false;
    });
  }

  std::vector<int32_t> lead_ = std::vector<int32_t>(31, 7);
  std::shared_ptr<FakeStore> store_ = std::make_shared<FakeStore>();
  PrefillEngineOptions options_;
};

TEST_F(CanonicalTest, TextBehindACopyIsASourceForTheNextRequest) {
  StartEngines();
  std::mt19937 random(31);
  const auto known = RandomPrompt(random, 150), text = RandomPrompt(random, 200);
  const auto prompt = Concatenate({RandomPrompt(random, 45), text, RandomPrompt(random, 9)});
  MakeKnown(known);
  EXPECT_EQ(AskBehindACopy(known, text, true)->stats.aligned_tokens, 150);
  ASSERT_TRUE(WaitBackground());
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 1u);
  EXPECT_EQ(prefill_->canonical_stats().num_tokens, 200u);
  EXPECT_EQ(prefill_->segment_stats().num_frozen, 1u);
  const auto naive = AskFor(prompt, 200, "naive");
  EXPECT_EQ(naive->stats.aligned_tokens, 200);
  const auto whole = AskFor(prompt, 200, "sparsex");
  EXPECT_EQ(whole->stats.recomputed_tokens, 200);
  EXPECT_EQ(whole->tokens, Expected(prompt, Greedy(6)));
  EXPECT_EQ(naive->stats.copied.same_context, 200);
  // The store has it for other workers, and says that it was the first segment of a prompt.
  const auto keys = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text);
  EXPECT_TRUE(test::Eventually([&] { return store_->Find(keys.back()).has_value(); }));
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto chunk = store_->Find(keys[i]);
    ASSERT_TRUE(chunk.has_value());
    EXPECT_EQ(chunk->header.provenance, chunk::Provenance::kExact);
    EXPECT_EQ(chunk->header.first_position, lead_.size() + 64 * i);
    EXPECT_EQ(chunk->header.context, chunk::MakeContextHash(kDocs, lead_, static_cast<uint32_t>(lead_.size())));
  }
  StartEngines();
  const auto fetched = AskFor(prompt, 200, "naive");
  EXPECT_EQ(fetched->stats.aligned_tokens, 200);
  EXPECT_GT(fetched->stats.fetched_bytes, 0);
  EXPECT_EQ(fetched->tokens, naive->tokens);
  EXPECT_EQ(fetched->stats.copied.same_context, 200);
  // It is what a request that has it behind the same instructions computes, bit by bit.
  store_ = std::make_shared<FakeStore>();
  StartEngines();
  MakeKnown(text, lead_);
  EXPECT_EQ(AskFor(prompt, 200, "naive")->tokens, naive->tokens);
  // Without the option nothing happens.
  store_ = std::make_shared<FakeStore>();
  StartEngines(8192, false);
  MakeKnown(known);
  (void)AskBehindACopy(known, text);
  ASSERT_TRUE(WaitBackground());
  EXPECT_EQ(AskFor(prompt, 200, "naive")->stats.aligned_tokens, 0);
}

// At most 64 tokens of what the prompt says first.
TEST_F(CanonicalTest, LongInstructionsAreCutOff) {
  std::mt19937 random(35);
  lead_ = RandomPrompt(random, 100);
  StartEngines();
  const auto known = RandomPrompt(random, 150), text = RandomPrompt(random, 200);
  MakeKnown(known);
  (void)AskBehindACopy(known, text);
  ASSERT_TRUE(WaitBackground());
  const auto prompt = Concatenate({RandomPrompt(random, 45), text, RandomPrompt(random, 9)});
  const auto naive = AskFor(prompt, 200, "naive");
  EXPECT_EQ(naive->stats.aligned_tokens, 200);
  const std::vector<int32_t> first(lead_.begin(), lead_.begin() + kLeadTokensMax);
  const auto last = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text).back();
  ASSERT_TRUE(test::Eventually([&] { return store_->Find(last).has_value(); }));
  EXPECT_EQ(store_->Find(last)->header.context, chunk::MakeContextHash(kDocs, first, kLeadTokensMax));
  store_ = std::make_shared<FakeStore>();
  StartEngines();
  MakeKnown(text, first);
  EXPECT_EQ(AskFor(prompt, 200, "naive")->tokens, naive->tokens);
}

// A segment that several callers share must not have seen the text of one of them.
TEST_F(CanonicalTest, ASharedSegmentIsComputedWithNothingInFront) {
  StartEngines();
  std::mt19937 random(36);
  const auto known = RandomPrompt(random, 150), text = RandomPrompt(random, 200);
  const auto prompt = Concatenate({RandomPrompt(random, 45), text, RandomPrompt(random, 9)});
  MakeKnown(known);
  (void)AskBehindACopy(known, text, false, true);
  ASSERT_TRUE(WaitBackground());
  const auto naive = AskFor(prompt, 200, "naive", true);
  EXPECT_EQ(naive->stats.aligned_tokens, 200);
  const auto last = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text).back();
  ASSERT_TRUE(test::Eventually([&] { return store_->Find(last).has_value(); }));
  EXPECT_EQ(store_->Find(last)->header.provenance, chunk::Provenance::kCanon);
  EXPECT_EQ(store_->Find(last)->header.first_position, 192u);
  store_ = std::make_shared<FakeStore>();
  StartEngines();
  MakeKnown(text);
  EXPECT_EQ(AskFor(prompt, 200, "naive")->tokens, naive->tokens);
}

TEST_F(CanonicalTest, ARequestGoesFirst) {
  StartEngines(16384);
  std::mt19937 random(32);
  const auto known = RandomPrompt(random, 150), text = RandomPrompt(random, 4000);
  MakeKnown(known);
  (void)AskBehindACopy(known, text);
  ASSERT_TRUE(test::Eventually([&] { return prefill_->canonical_stats().running; }));
  std::optional<CanonicalStats> seen;  // when the request's first layer is done
  const auto short_one = Ask(
      RandomPrompt(random, 60),
      [&](PrefillRequest& r) {
        r.on_layer = [&](const LayerReady&) {
          if (!seen) seen = prefill_->canonical_stats();
        };
      },
      1);
  ASSERT_TRUE(seen.has_value());
  EXPECT_FALSE(seen->running);
  EXPECT_EQ(seen->num_computed, 0u);
  EXPECT_EQ(seen->num_cancelled, 1u);
  EXPECT_EQ(seen->num_queued, 1u) << "its turn comes again";
  std::printf("the request waited %.1f ms\n", short_one->stats.queue_s * 1e3);
  ASSERT_TRUE(WaitBackground());
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 1u);
  EXPECT_EQ(prefill_->canonical_stats().num_tokens, 4000u);
}

TEST_F(CanonicalTest, StoppingDoesNotWaitForIt) {
  StartEngines(16384);
  std::mt19937 random(33);
  const auto known = RandomPrompt(random, 150);
  MakeKnown(known);
  (void)AskBehindACopy(known, RandomPrompt(random, 4000));
  EXPECT_FALSE(test::BackgroundIdle(*prefill_));
  prefill_->Stop();
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 0u);
}

// Requests that wait for pages: what nobody has asked for is given up.
TEST_F(CanonicalTest, IsDroppedWhenPagesAreShort) {
  StartEngines(1024);
  std::mt19937 random(34);
  const auto known = RandomPrompt(random, 128), text = RandomPrompt(random, 128);
  MakeKnown(known);
  std::mutex mutex;
  std::condition_variable changed;
  bool found = false, others_wait = false;
  // Holds the engine thread when the copy has been found, so that both others come meanwhile: what they need would
  // otherwise be taken from it.
  const auto hold = [&](const LayerReady&) {
    std::unique_lock lock(mutex);
    found = true;
    changed.notify_all();
    changed.wait_for(lock, 60s, [&] { return others_wait; });
  };
  const auto first = Submit(Concatenate({{9}, known, text, {1, 2}}), Greedy(1),
                            std::make_shared<std::atomic<bool>>(false), SteadyTime::max(), [&](PrefillRequest& r) {
                              r.segments = {{{1, 129}, kDocs}, {{129, 257}, kDocs}};
                              r.reuse.policy = "sparsex";
                              r.on_layer = hold;
                            });
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, 60s, [&] { return found; }));
  }
  const auto second = Submit(RandomPrompt(random, 900), Greedy(1)),
             third = Submit(RandomPrompt(random, 900), Greedy(1));
  {
    std::lock_guard lock(mutex);
    others_wait = true;
    changed.notify_all();
  }
  for (const auto& outcome : {first, second, third}) EXPECT_TRUE(outcome->Wait() && outcome->status.ok());
  EXPECT_EQ(first->stats.aligned_tokens, 128);
  ASSERT_TRUE(WaitBackground());
  EXPECT_GE(prefill_->canonical_stats().num_dropped, 1u);  // two when the copied one's source had to go, too
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 0u);
  prefill_->pool().CheckInvariants();
}

TEST(CanonicalQueueTest, IsBoundedShortestFirstAndHoldsEachOnce) {
  CanonicalQueue queue(3);
  const auto task = [](size_t length, uint8_t name, bool frozen = false) {
    CanonicalTask task;
    task.tokens.resize(length);
    task.keys.emplace_back().bytes[0] = name;
    task.frozen = task.quantized = frozen;
    return task;
  };
  EXPECT_EQ(queue.Add(task(50, 1)), 0u);
  EXPECT_EQ(queue.Add(task(20, 2)), 0u);
  EXPECT_EQ(queue.Add(task(50, 1, true)), 0u) << "here already";
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(queue.Add(task(30, 3)), 0u);
  EXPECT_EQ(queue.Add(task(40, 4)), 1u) << "the longest goes";
  EXPECT_EQ(queue.Add(task(60, 5)), 1u) << "which may be the new one";
  for (const size_t length : {20, 30, 40}) EXPECT_EQ(queue.Take()->tokens.size(), length);
  EXPECT_FALSE(queue.Take().has_value());
  (void)queue.Add(task(50, 1));
  (void)queue.Add(task(50, 1, true));
  const auto changed = queue.Take();
  EXPECT_TRUE(changed->frozen);
  EXPECT_TRUE(changed->quantized);
  (void)queue.Add(task(5, 1));
  EXPECT_EQ(queue.Clear(), 1u);
  EXPECT_EQ(queue.size(), 0u);
}

}  // namespace
}  // namespace spl::engine
