// Publishing segments on request: what is stored, and what the caller is told when it is not.
#include <future>

#include "services/engine/cache/segment_io.h"
#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {
namespace {

class PublishTest : public EnginesTest {
 protected:
  struct Published {
    absl::Status status;
    PublishOutcome outcome;
  };

  void SetUp() override {
    store_ = std::make_shared<FakeStore>();
    options_.store = store_;
  }
  void TearDown() override {
    store_->BlockPuts(false);
    EnginesTest::TearDown();
  }

  std::future<Published> StartPublish(const std::vector<int32_t>& tokens, std::vector<ReuseSpan> segments,
                                      const std::function<void(PublishRequest&)>& change = nullptr) {
    auto promise = std::make_shared<std::promise<Published>>();
    PublishRequest request;
    request.tokens = tokens;
    request.segments = std::move(segments);
    request.on_done = [promise](const absl::Status& status, const PublishOutcome& outcome) {
      promise->set_value({status, outcome});
    };
    if (change) change(request);
    if (const absl::Status status = prefill_->Publish(std::move(request)); !status.ok())
      promise->set_value({status, {}});
    return promise->get_future();
  }
  Published Publish(const std::vector<int32_t>& tokens, std::vector<ReuseSpan> segments,
                    const std::function<void(PublishRequest&)>& change = nullptr) {
    return StartPublish(tokens, std::move(segments), change).get();
  }
  static std::vector<chunk::ChunkKey> KeysOf(std::span<const int32_t> text) {
    return SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text);
  }

  std::shared_ptr<FakeStore> store_;
  PrefillEngineOptions options_;
};

TEST_F(PublishTest, StoresExactSegmentsWithWhatWasAskedForAndCountsWhatExisted) {
  Start(8192, 8192, options_);
  std::mt19937 random(21);
  const auto intro = RandomPrompt(random, 70), first = RandomPrompt(random, 200), second = RandomPrompt(random, 130);
  const auto context = Concatenate({intro, first, second});
  const std::vector<ReuseSpan> segments = {{{70, 270}, kDocs}, {{270, 400}, kDocs}};
  const auto ask = [](PublishRequest& r) { r.put = {.durable = true, .pin = chunk::Pin::kHard}; };
  const Published published = Publish(context, segments, ask);
  ASSERT_TRUE(published.status.ok()) << published.status;
  EXPECT_EQ(published.outcome.stored.num_chunks, 4u + 3u);
  EXPECT_EQ(published.outcome.stored.num_existing, 0u);
  EXPECT_EQ(published.outcome.stored.num_bytes, 7 * ChunkPayloadBytes(*model_));
  EXPECT_EQ(published.outcome.stats.computed_tokens, 400);
  EXPECT_EQ(store_->size(), 7u + 7 + 2) << "nothing but the segments, their quantized copies and a summary of each";
  for (const chunk::PutOptions& put : store_->put_options()) {
    EXPECT_TRUE(put.durable);
    EXPECT_EQ(put.pin, chunk::Pin::kHard);
  }
  for (const auto& key : KeysOf(first)) {
    const auto stored = store_->Find(key);
    ASSERT_TRUE(stored.has_value());
    EXPECT_EQ(stored->header.provenance, chunk::Provenance::kExact);
    EXPECT_EQ(stored->header.namespace_id, kDocs);
  }
  const Published again = Publish(context, segments, ask);
  ASSERT_TRUE(again.status.ok()) << again.status;
  EXPECT_EQ(again.outcome.stored.num_chunks, 7u);
  EXPECT_EQ(again.outcome.stored.num_existing, 7u);
  EXPECT_EQ(again.outcome.stats.cached_tokens, 384) << "the start of the context was computed before";
  // They are local sources, too.
  const auto found = Ask(Concatenate({second, intro, first}), [](PrefillRequest& r) {
    r.segments = {{{200, 400}, kDocs}};
    r.reuse.policy = "naive";
  });
  EXPECT_EQ(found->stats.aligned_tokens, 200);
  EXPECT_EQ(found->stats.fetched_bytes, 0);
}

// A document behind another one that has a source: copying that one would make this one's KV wrong.
TEST_F(PublishTest, NothingInFrontIsCopied) {
  std::mt19937 random(22);
  const auto intro = RandomPrompt(random, 33), known = RandomPrompt(random, 150), text = RandomPrompt(random, 150);
  const auto context = Concatenate({intro, known, text});
  const std::vector<ReuseSpan> segments = {{{183, 333}, kDocs}};
  Start(8192, 8192, options_);
  ASSERT_TRUE(Publish(context, segments).status.ok());
  std::vector<std::vector<std::byte>> want;
  for (const auto& key : KeysOf(text)) want.push_back(store_->Find(key)->payload);
  SetUp();
  Start(8192, 8192, options_);
  ASSERT_TRUE(Publish(known, {{{0, 150}, kDocs}}).status.ok());
  const Published published = Publish(context, {{{33, 183}, kDocs}, segments[0]});
  ASSERT_TRUE(published.status.ok()) << published.status;
  EXPECT_EQ(published.outcome.stats.computed_tokens, 333);
  EXPECT_EQ(published.outcome.stats.aligned_tokens, 0);
  EXPECT_EQ(published.outcome.stored.num_existing, 3u) << "of the known document";
  size_t i = 0;
  for (const auto& key : KeysOf(text)) EXPECT_EQ(store_->Find(key)->payload, want[i++]);
}

// The queue of what nobody waits for drops what does not fit; this does not go through it.
TEST_F(PublishTest, MoreSegmentsThanTheBestEffortQueueHoldsAllArrive) {
  options_.max_publish_queued = 1;
  Start(8192, 8192, options_);
  std::mt19937 random(23);
  const auto context = RandomPrompt(random, 40 * 65);
  std::vector<ReuseSpan> segments;
  for (int32_t i = 0; i < 40; ++i) segments.push_back({{i * 65, i * 65 + 65}, kDocs});
  const Published published = Publish(context, segments);
  ASSERT_TRUE(published.status.ok()) << published.status;
  EXPECT_EQ(published.outcome.stored.num_chunks, 80u);
  EXPECT_EQ(store_->size(), 80u + 80 + 40);
}

// A prompt that arrives asks the store over the same link: what nobody waits for goes in short puts over a slow one.
TEST_F(PublishTest, OffersOverASlowLinkAreShort) {
  Start(8192, 8192, options_);
  std::mt19937 random(27);
  const size_t chunk_bytes = ChunkPayloadBytes(*model_);
  store_->SetPutPace(60ms);
  (void)Ask(RandomPrompt(random, 5 * 64 + 1), [](PrefillRequest&) {});
  ASSERT_TRUE(store_->WaitForSize(5));
  for (const size_t bytes : store_->put_bytes()) EXPECT_EQ(bytes, chunk_bytes);
  store_->SetPutPace(0ns);
  (void)Ask(RandomPrompt(random, 30 * 64 + 1), [](PrefillRequest&) {});
  ASSERT_TRUE(store_->WaitForSize(35));
  EXPECT_GT(store_->put_bytes().back(), chunk_bytes) << "the window grows with the rate";
}

TEST_F(PublishTest, FailuresAreToldWithTheirCause) {
  std::mt19937 random(24);
  const auto text = RandomPrompt(random, 100);
  const std::vector<ReuseSpan> all = {{{0, 100}, kDocs}};
  Start();
  EXPECT_EQ(Publish(text, all).status.code(), absl::StatusCode::kFailedPrecondition);
  options_.publish_timeout = 100ms;
  Start(8192, 8192, options_);
  EXPECT_EQ(Publish(text, {}).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Publish(text, {{{0, 101}, kDocs}}).status.code(), absl::StatusCode::kInvalidArgument);
  store_->RefusePuts(absl::ResourceExhaustedError("namespace 'docs' is full"));
  const absl::Status full = Publish(text, all).status;
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(full.ToString(), testing::HasSubstr("'docs' is full"));
  store_->RefusePuts(absl::OkStatus());
  store_->Forget(true);
  EXPECT_EQ(Publish(text, all).status.code(), absl::StatusCode::kUnavailable) << "not acknowledged";
  store_->Forget(false);
  store_->fail = true;
  EXPECT_EQ(Publish(text, all).status.code(), absl::StatusCode::kUnavailable);
  store_->fail = false;
  store_->BlockPuts(true);
  EXPECT_EQ(Publish(text, all).status.code(), absl::StatusCode::kUnavailable) << "no answer in time";
  EXPECT_EQ(
      Publish(text, all, [](PublishRequest& r) { r.deadline = std::chrono::steady_clock::now() + 50ms; }).status.code(),
      absl::StatusCode::kDeadlineExceeded);
  store_->BlockPuts(false);
  EXPECT_TRUE(Publish(text, all).status.ok());
}

TEST_F(PublishTest, IsBoundedCancelledAndStopped) {
  options_.max_publish_calls = 2;
  Start(8192, 8192, options_);
  std::mt19937 random(25);
  const auto text = RandomPrompt(random, 100);
  const std::vector<ReuseSpan> all = {{{0, 100}, kDocs}};
  store_->BlockPuts(true);
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  auto first = StartPublish(text, all);
  auto second = StartPublish(text, all, [&](PublishRequest& r) { r.cancelled = cancelled; });
  const absl::Status refused = Publish(text, all).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.ToString(), testing::HasSubstr("2"));
  // Requests are served meanwhile.
  EXPECT_TRUE(Ask(text, [](PrefillRequest&) {})->status.ok());
  cancelled->store(true);
  prefill_->Wake();
  store_->BlockPuts(false);
  EXPECT_TRUE(first.get().status.ok());
  EXPECT_EQ(second.get().status.code(), absl::StatusCode::kCancelled);
  store_->BlockPuts(true);
  auto last = StartPublish(RandomPrompt(random, 3000), {{{0, 3000}, kDocs}});
  prefill_->Stop();
  EXPECT_EQ(last.get().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(prefill_->pool().num_free() > 0, true);
}

// The caller of the only call that is allowed may make the next one as soon as the first one has answered.
TEST_F(PublishTest, AnAnswerMakesRoomForTheNextCall) {
  options_.max_publish_calls = 1;
  Start(8192, 8192, options_);
  std::mt19937 random(26);
  const auto first = RandomPrompt(random, 100), second = RandomPrompt(random, 100);
  std::promise<absl::Status> accepted, stored;
  PublishRequest next;
  next.tokens = second;
  next.segments = {{{0, 100}, kDocs}};
  next.on_done = [&](const absl::Status& status, const PublishOutcome&) { stored.set_value(status); };
  PublishRequest request;
  request.tokens = first;
  request.segments = {{{0, 100}, kDocs}};
  request.on_done = [&](const absl::Status&, const PublishOutcome&) {
    accepted.set_value(prefill_->Publish(std::move(next)));
  };
  ASSERT_TRUE(prefill_->Publish(std::move(request)).ok());
  const absl::Status second_call = accepted.get_future().get();
  ASSERT_TRUE(second_call.ok()) << second_call;
  EXPECT_TRUE(stored.get_future().get().ok());
}

}  // namespace
}  // namespace spl::engine
