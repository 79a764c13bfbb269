// Prompts that fetch by cost (PrefillEngineOptions::fetch_by_cost): what they do with a store that is fast, slow, or
// stuck. Events decide the order, not time.
#include "services/base/fault_point.h"
#include "tests/services/engine/stored_prompts_fixture.h"

namespace spl::engine {
namespace {

constexpr char kStep[] = "engine.prefill.step";

class FetchOrComputeTest : public StoredPromptsTest {
 protected:
  // A worker that has seen nothing, and a store with this document, of whole chunks, alone and with the question.
  void StartWithDocument(const chunk::Digest& docs, const std::vector<int32_t>& document,
                         const std::vector<int32_t>& question) {
    options_.store = store_;
    options_.canonical_prefill = false;
    Start(8192, 8192, options_);
    const auto end = static_cast<int32_t>(document.size());
    (void)Ask(Concatenate({document, question}), [&](PrefillRequest& r) { r.segments = {{{0, end}, docs}}; });
    ASSERT_TRUE(store_->WaitForSize(2 * document.size() / 64));  // chunks of the prompt, chunks of the segment
    options_.fetch_by_cost = true;
    Start(8192, 8192, options_);
  }
  // The next pass waits for Fire.
  void HoldPasses() { ASSERT_TRUE(ArmFault(kStep, *ParseFaultAction("delay_until(go)")).ok()); }
  void Fire() {
    DisarmFault(kStep);
    FireFaultEvent("go");
  }

  ScopedFaults faults_;
};

// Every chunk is written by the fetch or by the prompt, never by both, also when its bytes are under way.
TEST_F(FetchOrComputeTest, AChunkThatIsTakenNoLongerLands) {
  const std::vector<int32_t> prompt = RandomPrompt(random_, 500);
  StartWithStored({&prompt, 1});
  auto kv = std::make_shared<SequenceKv>(*decode_pool_, KvShapeOf(model_->config()));
  ASSERT_TRUE(kv->Reserve(500).ok());
  IncomingPrefix prefix(*model_, kv, 0);
  prefix.Expect(7, IncomingPrefix::Order::kBackwards);
  const auto chunk = [&](size_t index) { return *store_->Find(KeyOf(prompt, 6 - index)); };
  const auto place = [&](size_t index) {
    const chunk::Pieces pieces = prefix.PlaceFor(index, chunk(index).header);
    if (!pieces.empty()) chunk::CopyToPieces(chunk(index).payload, pieces);
    return !pieces.empty();
  };
  for (size_t index : {0, 1, 2}) ASSERT_TRUE(place(index));
  EXPECT_TRUE(prefix.Land(0, chunk(0).header));
  EXPECT_EQ(prefix.Take(0, 4 * 64 + 10), 4 * 64 + 10);  // a part of chunk 4: all of it is the prompt's
  EXPECT_TRUE(prefix.Land(1, chunk(1).header));
  EXPECT_FALSE(prefix.Land(2, chunk(2).header));
  EXPECT_FALSE(place(3));
  EXPECT_EQ(prefix.Take(4 * 64 + 10, 512), 5 * 64);  // up to what has landed
  EXPECT_EQ(prefix.Take(5 * 64, 512), 5 * 64);
  EXPECT_EQ(prefix.Close(), (PositionRange{5 * 64, 7 * 64}));
  EXPECT_EQ(kv.use_count(), 1);  // a fetch that goes on holds no pages
  std::vector<std::byte> landed(chunk(1).payload.size());
  ASSERT_TRUE(decode_pool_->ReadPages(kv->PagesOfChunk(5), landed.data()).ok());
  EXPECT_EQ(landed, chunk(1).payload);
}

TEST_F(FetchOrComputeTest, AStoreThatIsStuckHoldsNobodyBack) {
  const std::vector<int32_t> prompt = RandomPrompt(random_, 500);
  StartWithStored({&prompt, 1});
  store_->BlockGetsOf(KeyOf(prompt, 6));  // the last of the seven comes first
  auto outcome = Submit(prompt, Greedy(6));
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;  // the get still waits
  EXPECT_EQ(outcome->tokens, Expected(prompt, Greedy(6)));
  EXPECT_EQ(outcome->stats.stored_tokens, 0);
  EXPECT_EQ(outcome->stats.computed_tokens, 500);
  EXPECT_NE(outcome->stats.store_use, StoreUse::kFetched);
  store_->BlockGetsOf(std::nullopt);
}

// The prompt computes from its start, chunks arrive from its end, and each is written once.
TEST_F(FetchOrComputeTest, ComputingAndFetchingMeet) {
  const std::vector<int32_t> prompt = RandomPrompt(random_, 500);
  StartWithStored({&prompt, 1});
  store_->BlockGetsOf(KeyOf(prompt, 3));  // 6, 5 and 4 come
  HoldPasses();
  auto outcome = Submit(prompt, Greedy(6));
  ASSERT_TRUE(store_->WaitForBlockedGet());
  Fire();
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->tokens, Expected(prompt, Greedy(6)));
  EXPECT_EQ(outcome->stats.stored_tokens, 3 * 64);
  EXPECT_EQ(outcome->stats.computed_tokens, 500 - 3 * 64);
  EXPECT_EQ(outcome->stats.skipped_tokens, 4 * 64);
  EXPECT_EQ(outcome->stats.store_use, StoreUse::kShared);
  EXPECT_TRUE(outcome->stats.exact);
  store_->BlockGetsOf(std::nullopt);
  // The KV that was put together from both is found again, here and in the store, and nothing is stored twice.
  auto again = Submit(prompt, Greedy(6));
  ASSERT_TRUE(again->Wait() && again->status.ok()) << again->status;
  EXPECT_EQ(again->stats.cached_tokens, 448);
  EXPECT_EQ(again->stats.stored_tokens, 0);
  EXPECT_EQ(again->tokens, outcome->tokens);
  EXPECT_EQ(store_->size(), 7u);
}

// A pass that others have filled has no rows for a prompt whose chunks arrive: that is not where the two meet.
TEST_F(FetchOrComputeTest, AFullPassIsNoMeeting) {
  const std::vector<int32_t> prompt = RandomPrompt(random_, 500), other = RandomPrompt(random_, 300);
  options_.slice_tokens = 64;
  StartWithStored({&prompt, 1});
  store_->BlockGetsOf(KeyOf(prompt, 3));  // 6, 5 and 4 come
  HoldPasses();
  auto outcome = Submit(prompt, Greedy(6), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(),
                        [](PrefillRequest& request) { request.background = true; });
  ASSERT_TRUE(store_->WaitForBlockedGet());
  auto first = Submit(other, Greedy(6));  // fills every pass until it is done
  Fire();
  ASSERT_TRUE(first->Wait() && first->status.ok()) << first->status;
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;
  EXPECT_EQ(first->tokens, Expected(other, Greedy(6)));
  EXPECT_EQ(outcome->tokens, Expected(prompt, Greedy(6)));
  EXPECT_EQ(outcome->stats.stored_tokens, 3 * 64);
  store_->BlockGetsOf(std::nullopt);
}

// Announced pages are those of a plain prefill, each once for every layer, and those that have arrived first.
TEST_F(FetchOrComputeTest, PagesThatHaveArrivedAreAnnouncedBeforeTheTwoMeet) {
  const std::vector<int32_t> prompt = RandomPrompt(random_, 500);
  StartWithStored({&prompt, 1});
  store_->BlockGetsOf(KeyOf(prompt, 3));
  HoldPasses();
  std::mutex mutex;
  std::map<std::pair<int32_t, int32_t>, int> announced;  // (layer, page)
  std::vector<std::pair<int32_t, int32_t>> order;        // the same
  auto outcome = Submit(prompt, Greedy(6), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(),
                        [&](PrefillRequest& request) {
                          request.on_layer = [&](const LayerReady& ready) {
                            std::lock_guard lock(mutex);
                            for (const PageRange& pages : ready.pages) {
                              for (int32_t page = pages.begin; page < pages.end; ++page)
                                if (++announced[{ready.layer, page}] == 1) order.emplace_back(ready.layer, page);
                            }
                          };
                        });
  ASSERT_TRUE(store_->WaitForBlockedGet());
  Fire();
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->stats.stored_tokens, 3 * 64);
  EXPECT_EQ(announced.size(), 8u * static_cast<size_t>(model_->config().num_layers));
  for (const auto& [page, count] : announced) EXPECT_EQ(count, 1) << page.first << " " << page.second;
  const size_t num_arrived = 3u * static_cast<size_t>(model_->config().num_layers);
  for (size_t i = 0; i < num_arrived; ++i)
    EXPECT_TRUE(order[i].second >= 4 && order[i].second < 7) << "page " << order[i].second << " is number " << i;
  store_->BlockGetsOf(std::nullopt);
}

TEST_F(FetchOrComputeTest, AStoreThatIsFastSavesTheComputing) {
  const std::vector<int32_t> prompt = RandomPrompt(random_, 500);
  StartWithStored({&prompt, 1});
  const size_t before = store_->num_gets();
  HoldPasses();
  auto outcome = Submit(prompt, Greedy(6));
  ASSERT_TRUE(store_->WaitForGets(before + 7));
  ASSERT_TRUE(test::Eventually([&] { return prefill_->store_link().bytes_per_s > 0; }));  // after the last one
  Fire();
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->tokens, Expected(prompt, Greedy(6)));
  EXPECT_GE(outcome->stats.stored_tokens, 6 * 64);  // all, unless the last was being copied just then
  EXPECT_EQ(outcome->stats.stored_tokens + outcome->stats.computed_tokens, 500);
}

TEST_F(FetchOrComputeTest, WhatIsKnownToBeSlowIsNotFetched) {
  const std::vector<std::vector<int32_t>> prompts = {RandomPrompt(random_, 500), RandomPrompt(random_, 500)};
  StartWithStored(prompts);
  store_->SetPace(300ms);  // 2.1 s for what takes some tens of milliseconds to compute
  auto first = Submit(prompts[0], Greedy(6));
  ASSERT_TRUE(first->Wait() && first->status.ok()) << first->status;
  EXPECT_EQ(first->tokens, Expected(prompts[0], Greedy(6)));
  // The link is measured behind the prompt's back.
  ASSERT_TRUE(test::Eventually([&] { return prefill_->store_link().bytes_per_s > 0; }));
  const size_t gets = store_->num_gets(), counts = store_->num_counts();
  HoldPasses();
  auto second = Submit(prompts[1], Greedy(6));
  ASSERT_TRUE(store_->WaitForCounts(counts + 1));  // what it could have fetched is on its receipt
  Fire();
  ASSERT_TRUE(second->Wait() && second->status.ok()) << second->status;
  EXPECT_EQ(second->tokens, Expected(prompts[1], Greedy(6)));
  EXPECT_EQ(second->stats.store_use, StoreUse::kSlower);
  EXPECT_EQ(second->stats.skipped_tokens, 448);
  EXPECT_EQ(second->stats.fetched_bytes, 0);
  EXPECT_LE(store_->num_gets(), gets + 1);  // a read of the measurement may have been under way
  store_->SetPace(0ns);
}

// Where the link is known to be too slow for copies, a prompt does not even wait for the answer.
TEST_F(FetchOrComputeTest, CopiesOverASlowLinkAreNotAskedFor) {
  const chunk::Digest docs{7};
  const auto document = RandomPrompt(random_, 512), other = RandomPrompt(random_, 512),
             question = RandomPrompt(random_, 9);
  options_.store = store_;
  options_.publish_share = 1;
  options_.canonical_prefill = false;
  Start(8192, 8192, options_);
  for (const auto& text : {document, other})
    (void)Ask(Concatenate({text, question}), [&](PrefillRequest& r) { r.segments = {{{0, 512}, docs}}; });
  ASSERT_TRUE(store_->WaitForSize(2 * (8 + 8)));
  options_.fetch_by_cost = true;
  Start(8192, 8192, options_);
  store_->SetPace(300ms);
  const auto with = [&](const std::vector<int32_t>& text) {
    return Submit(Concatenate({RandomPrompt(random_, 64), text, question}), Greedy(6),
                  std::make_shared<std::atomic<bool>>(false), SteadyTime::max(), [&](PrefillRequest& r) {
                    r.segments = {{{64, 576}, docs}};
                    r.reuse.policy = "naive";
                    r.publish = false;
                  });
  };
  auto first = with(document);
  ASSERT_TRUE(first->Wait() && first->status.ok()) << first->status;
  ASSERT_TRUE(test::Eventually([&] { return prefill_->store_link().bytes_per_s > 0; }));
  store_->BlockCounts(true);
  auto second = with(other);
  EXPECT_TRUE(second->Wait() && second->status.ok()) << second->status;  // though the store has not answered
  EXPECT_EQ(second->stats.aligned_tokens, 0);
  store_->BlockCounts(false);
  store_->SetPace(0ns);
}

// Copies of segments are needed before the prompt begins: it waits for them, but not for long.
TEST_F(FetchOrComputeTest, CopiesThatAreLateAreComputed) {
  const chunk::Digest docs{7};
  const auto document = RandomPrompt(random_, 256), intro = RandomPrompt(random_, 64),
             question = RandomPrompt(random_, 9);
  StartWithDocument(docs, document, question);
  std::vector<chunk::ChunkKey> keys = SegmentIndex(model_->kv_fingerprint()).KeysOf(docs, document);
  store_->BlockGetsOf(keys[0]);
  const auto prompt = Concatenate({intro, document, question});
  const auto ask = [&] {
    return Ask(prompt, [&](PrefillRequest& r) {
      r.segments = {{{64, 320}, docs}};
      r.reuse.policy = "naive";
      r.publish = false;
    });
  };
  const auto late = ask();  // returns although the get still waits
  EXPECT_EQ(late->stats.aligned_tokens, 0);
  EXPECT_EQ(late->tokens, Expected(prompt, Greedy(6)));
  store_->BlockGetsOf(std::nullopt);
  // Copies that came too late for one prompt are there for the next.
  ASSERT_TRUE(test::Eventually([&] { return prefill_->segment_stats().num_sources > 0; }));
  EXPECT_EQ(ask()->stats.aligned_tokens, 256);
}

// `auto` becomes exact when nothing has come in time. The fetch goes on by the method that it was begun for.
TEST_F(FetchOrComputeTest, AFetchOutlivesTheMethodThatItWasBegunFor) {
  const chunk::Digest docs{7};
  const auto document = RandomPrompt(random_, 256), question = RandomPrompt(random_, 9);
  StartWithDocument(docs, document, question);
  store_->BlockGetsOf(SegmentIndex(model_->kv_fingerprint()).KeysOf(docs, document)[0]);
  const auto late = Ask(Concatenate({RandomPrompt(random_, 64), document, question}), [&](PrefillRequest& r) {
    r.segments = {{{64, 320}, docs}};
    r.reuse.policy = "auto";
    r.publish = false;
  });
  EXPECT_EQ(late->stats.policy, "exact");
  EXPECT_EQ(late->stats.choice.why, ChoiceReason::kNothingToCopy);
  store_->BlockGetsOf(std::nullopt);
  EXPECT_TRUE(test::Eventually([&] { return prefill_->segment_stats().num_sources > 0; }));
}

// The link stays unmeasured, for nothing ever comes over it; what is known is that nothing comes.
TEST_F(FetchOrComputeTest, AStoreWithoutTheDocumentsIsKnownForIt) {
  const chunk::Digest docs{7};
  StartWithStored({});
  const auto ask = [&](std::vector<int32_t> document) {
    const auto question = RandomPrompt(random_, 9);
    const auto end = static_cast<int32_t>(document.size());
    return Ask(Concatenate({std::move(document), question}), [&](PrefillRequest& r) {
      r.segments = {{{0, end}, docs}};
      r.reuse.policy = "naive";
      r.publish = false;
    });
  };
  for (int i = 0; i < 6; ++i) EXPECT_EQ(ask(RandomPrompt(random_, 200))->stats.store_use, StoreUse::kNone);
  ASSERT_TRUE(test::Eventually([&] { return prefill_->store_link().found_share < 0.1; }));
  EXPECT_EQ(prefill_->store_link().bytes_per_s, 0);
}

// A prompt that the store has from its start on needs no segment that lies in there: nothing is fetched twice.
TEST_F(FetchOrComputeTest, SegmentsInAStoredStartAreNotFetchedOnceMore) {
  const chunk::Digest docs{7};
  const auto document = RandomPrompt(random_, 256), question = RandomPrompt(random_, 70);
  const auto prompt = Concatenate({document, question});
  options_.store = store_;
  options_.canonical_prefill = false;
  Start(8192, 8192, options_);
  const auto ask = [&] {
    return Ask(prompt, [&](PrefillRequest& r) {
      r.segments = {{{0, 256}, docs}};
      r.reuse.policy = "naive";
    });
  };
  (void)ask();
  ASSERT_TRUE(store_->WaitForSize(5 + 4));  // chunks of the prompt, chunks of the segment
  options_.fetch_by_cost = true;
  Start(8192, 8192, options_);
  const size_t gets = store_->num_gets();
  HoldPasses();
  auto outcome =
      Submit(prompt, Greedy(6), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(), [&](PrefillRequest& r) {
        r.segments = {{{0, 256}, docs}};
        r.reuse.policy = "naive";
      });
  ASSERT_TRUE(store_->WaitForGets(gets + 5));
  ASSERT_TRUE(test::Eventually([&] { return prefill_->store_link().bytes_per_s > 0; }));
  Fire();
  ASSERT_TRUE(outcome->Wait() && outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->tokens, Expected(prompt, Greedy(6)));
  EXPECT_EQ(store_->num_gets(), gets + 5);
}

}  // namespace
}  // namespace spl::engine
