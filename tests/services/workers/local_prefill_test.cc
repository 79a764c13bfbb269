// A decode worker that prefills by itself, in the pool in which it decodes: the tokens of the plain model, whoever
// needs pages gets them from what is only cached, and an end that does not hang.
#include <future>

#include "tests/services/base/http_client.h"
#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/seeded_random.h"

namespace spl {
namespace {

class LocalPrefillTest : public WorkersTest {
 protected:
  void SetUp() override {
    if (test::OnGpu() && GetParam().device && GetParam().decode_ranks > 1)
      GTEST_SKIP() << "a rank has a GPU of its own";
    metrics_listen_ = "127.0.0.1:0";
    local_prefill_.max_new_tokens = 2048;
    local_prefill_.slice_tokens = 64;
    StartWorkers("none");
    UseOther();
    prefill_stub_ =
        v1::Prefill::NewStub(grpc::CreateChannel(decode_->grpc_address(), grpc::InsecureChannelCredentials()));
    // Who writes, as a router says it.
    connected_.mutable_writer()->set_grpc_address(decode_->grpc_address());
    connected_.mutable_writer()->set_epoch(Info().epoch());
  }
  // The next prompts are computed by the prefill worker instead of the decode worker itself, or the other way round.
  void UseOther() {
    std::swap(prefill_stub_, other_stub_);
    std::swap(connected_, other_);
  }
  v1::DecodeInfo Info() {
    grpc::ClientContext context;
    v1::DecodeInfo info;
    EXPECT_TRUE(decode_stub_->GetInfo(&context, {}, &info).ok());
    return info;
  }
  Result Answer(const std::vector<int32_t>& prompt, uint32_t max_tokens = 12) {
    Result result = Generate(prompt, Sampling(max_tokens));
    EXPECT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(max_tokens))) << prompt.size() << " tokens";
    return result;
  }
  double DecodeMetric(const std::string& series) const {
    return spl::testing::MetricAt(decode_->metrics_address(), series);
  }
  int64_t num_streams() const { return engine::KvShapeOf(model_->config()).num_streams(); }
  // Pages of each stream.
  int64_t NumPages() const { return decode_->pool().num_pages() / num_streams(); }
  int64_t NumFree() const { return decode_->pool().num_free() / num_streams(); }

  // A Run of which a slice has begun.
  struct Running {
    grpc::ClientContext context;
    v1::PrefillRequest request;
    v1::PrefillResponse response;
    std::promise<absl::Status> ended;
    std::future<absl::Status> status = ended.get_future();
  };
  void Run(Running& running, const std::vector<int32_t>& prompt, const v1::Ticket& ticket) {
    running.request = RunRequest(prompt, Sampling(10), ticket);
    prefill_stub_->async()->Run(&running.context, &running.request, &running.response,
                                [&](const grpc::Status& s) { running.ended.set_value(FromGrpcStatus(s)); });
  }
  // `slice`: what happens at the beginning of each.
  void Begin(Running& running, const std::vector<int32_t>& prompt, const v1::Ticket& ticket,
             const char* slice = "delay(10)") {
    ASSERT_TRUE(ArmFault("engine.prefill.step", *ParseFaultAction(slice)).ok());
    Run(running, prompt, ticket);
    ASSERT_TRUE(WaitForFaultHits("engine.prefill.step", 1, 20'000));
  }

 private:
  std::unique_ptr<v1::Prefill::Stub> other_stub_;
  v1::ConnectPeerResponse other_;
};

TEST_P(LocalPrefillTest, SaysWhatItTakes) {
  const v1::LocalPrefill info = Info().local_prefill();
  EXPECT_EQ(info.worker_id(), "d/local");
  EXPECT_EQ(info.max_new_tokens(), 2048u);
  EXPECT_EQ(info.slice_tokens(), 64u);
  EXPECT_GE(info.max_prompt_tokens(), 2048u);
  EXPECT_GT(info.prefill_tokens_per_s(), 0);
  EXPECT_EQ(info.queued_tokens(), 0u);
  EXPECT_FALSE(info.has_store());
}

TEST_P(LocalPrefillTest, TokensEqualThePlainModelForEveryPageEdge) {
  for (size_t length : {1, 63, 64, 65, 128, 257, 600}) {
    const auto prompt = Prompt(static_cast<uint32_t>(length), length);
    const Result result = Answer(prompt);
    EXPECT_EQ(result.receipt.transport(), "in place");
    EXPECT_EQ(result.receipt.prefill_worker(), "d/local");
    EXPECT_EQ(result.receipt.decode_worker(), "d");
    EXPECT_EQ(result.receipt.computed_tokens(), length);
  }
  // What was computed is found again.
  const auto prompt = Prompt(600, 600);
  EXPECT_EQ(Answer(prompt).receipt.cached_tokens(), 576u);
  EXPECT_TRUE(PagesComeBack());
}

// The same prompts by a prefill worker, and by the decode worker itself: the same tokens. Only the prefill worker's
// bytes move.
TEST_P(LocalPrefillTest, AnswersAreThoseOfAPrefillWorkerWithoutCopiedBytes) {
  std::mt19937 random = test::SeededRandom("local prompts");
  const std::string bytes_in = "splice_kv_transfer_bytes_total{direction=\"in\"}";
  for (int i = 0; i < 6; ++i) {
    const auto prompt = Prompt(random(), 1 + random() % 700);
    UseOther();
    const Result far = Generate(prompt, Sampling(20));
    ASSERT_TRUE(far.stream.ok()) << far.run << far.stream;
    EXPECT_GT(far.receipt.bytes_moved(), 0u);
    UseOther();
    const double moved = DecodeMetric(bytes_in);
    EXPECT_GT(moved, 0);
    const Result near = Generate(prompt, Sampling(20));
    ASSERT_TRUE(near.stream.ok()) << near.run << near.stream;
    EXPECT_EQ(near.tokens, far.tokens) << prompt.size();
    EXPECT_EQ(near.receipt.transport(), "in place");
    EXPECT_EQ(near.receipt.bytes_moved(), 0u);
    EXPECT_EQ(DecodeMetric(bytes_in), moved);
  }
}

TEST_P(LocalPrefillTest, APromptIsInThePoolOnce) {
  int64_t least = NumPages();
  on_chunk_ = [&] { least = std::min(least, NumFree()); };
  Answer(Prompt(7, 640), 40);
  EXPECT_EQ(least, NumPages() - 11);
}

// Several at once, beside sequences that run: nobody's tokens change.
TEST_P(LocalPrefillTest, ConcurrentRequestsDoNotMix) {
  std::vector<std::thread> threads;
  std::vector<Result> results(8);
  const auto prompt = [](size_t i) { return Prompt(static_cast<uint32_t>(100 + i), 40 + 57 * i); };
  for (size_t i = 0; i < results.size(); ++i)
    threads.emplace_back([&, i] { results[i] = Generate(prompt(i), Sampling(40)); });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(prompt(i), Sampling(40))) << i;
  }
  EXPECT_TRUE(PagesComeBack());
}

// Slices have 64 rows here: the steps of the running sequences come on top.
TEST_P(LocalPrefillTest, RunningSequencesRideInPassesOfPrompts) {
  std::vector<Result> results(8);
  std::vector<std::thread> threads;
  std::atomic<int> num_chunks = 0;
  on_chunk_ = [&] { ++num_chunks; };
  const auto prompt = [](size_t i) { return Prompt(static_cast<uint32_t>(200 + i), i < 4 ? 40 + 30 * i : 700); };
  const auto start = [&](size_t i) {
    threads.emplace_back([&, i] { results[i] = Generate(prompt(i), Sampling(150)); });
  };
  for (size_t i = 0; i < 4; ++i) start(i);
  while (num_chunks < 8) std::this_thread::yield();
  for (size_t i = 4; i < results.size(); ++i) start(i);
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(prompt(i), Sampling(150))) << i;
  }
  EXPECT_GE(decode_->shared()->turns()->num_rides(), 5u);
}

TEST_P(LocalPrefillTest, LongerPromptsAreRefusedAndTheirPagesComeBack) {
  const Result result = Generate(Prompt(1, 2048 + 65), Sampling(5));
  EXPECT_EQ(result.run.code(), absl::StatusCode::kResourceExhausted) << result.run;
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(LocalPrefillTest, CancellingFreesThePages) {
  const auto prompt = Prompt(3, 2000);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  Running running;
  Begin(running, prompt, *ticket);
  running.context.TryCancel();
  EXPECT_TRUE(PagesComeBack());
  EXPECT_EQ(running.status.get().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(test::Eventually([&] { return Info().local_prefill().queued_tokens() == 0; }));
}

// A ticket that was given up is not written to: the answer comes when the prompt has ended.
TEST_P(LocalPrefillTest, RevokingEndsAPromptUnderWay) {
  const auto prompt = Prompt(4, 2000);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  Running running;
  Begin(running, prompt, *ticket);
  grpc::ClientContext context;
  v1::RevokeTicketRequest revoke;
  revoke.set_ticket_id(ticket->ticket_id());
  revoke.set_epoch(Info().epoch());
  revoke.set_ttl_ms(ticket->ttl_ms());
  v1::RevokeTicketResponse response;
  const absl::Status revoked = FromGrpcStatus(prefill_stub_->RevokeTicket(&context, revoke, &response));
  EXPECT_TRUE(revoked.ok()) << revoked;
  EXPECT_FALSE(running.status.get().ok());
  EXPECT_TRUE(PagesComeBack());
}

// Stop ends what the drain did not see the end of, and its releases still find the worker's own service.
TEST_P(LocalPrefillTest, StoppingWithAPromptUnderWayDoesNotHang) {
  prefill_->Stop();
  const auto prompt = Prompt(5, 2000);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  Running running;
  Begin(running, prompt, *ticket, "delay(100)");  // 32 slices
  const auto start = std::chrono::steady_clock::now();
  decode_->Stop();
  const auto took = std::chrono::steady_clock::now() - start;
  // The drain's half second, what the slice under way takes, and nothing that only a timeout ends.
  EXPECT_LT(took, 4s) << std::chrono::duration<double>(took).count() << " s";
  ASSERT_EQ(running.status.wait_for(0s), std::future_status::ready);
  EXPECT_FALSE(running.status.get().ok());
  EXPECT_EQ(decode_->pool().num_free(), decode_->pool().num_pages());
}

class LocalPrefillDrainTest : public LocalPrefillTest {
 protected:
  LocalPrefillDrainTest() { drain_timeout_ = 30s; }
};

// One that ends in time is decoded to its end.
TEST_P(LocalPrefillDrainTest, FinishesAPromptUnderWay) {
  prefill_->Stop();
  const auto prompt = Prompt(6, 300);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext context;
  v1::StreamRequest request;
  request.set_ticket_id(ticket->ticket_id());
  request.set_generation(ticket->generation());
  auto reader = decode_stub_->Stream(&context, request);
  Running running;
  Begin(running, prompt, *ticket);
  std::thread stop([&] { decode_->Stop(); });
  std::vector<int32_t> tokens;
  v1::StreamChunk chunk;
  while (reader->Read(&chunk)) {
    for (const auto& token : chunk.tokens()) tokens.push_back(static_cast<int32_t>(token.token().token_id()));
  }
  EXPECT_TRUE(reader->Finish().ok());
  stop.join();
  ASSERT_TRUE(running.status.get().ok());
  tokens.insert(tokens.begin(), static_cast<int32_t>(running.response.first_tokens(0).token_id()));
  EXPECT_EQ(tokens, Expected(prompt, Sampling(10)));
}

// A pool of 40 pages for each stream, which prefixes, conversations, reservations and sequences compete for.
class OnePoolTest : public LocalPrefillTest {
 protected:
  void SetUp() override {
    pool_bytes_ = 30 << 20;
    local_prefill_.max_new_tokens = 1024;
    LocalPrefillTest::SetUp();
    ASSERT_EQ(NumPages(), 40);
  }
  // Fills pages with prefixes that nobody uses any more, eight each.
  void CachePrefixes(int count) {
    for (int i = 0; i < count; ++i) Answer(Cached(i), 2);
    EXPECT_TRUE(PagesComeBack());
  }
  static std::vector<int32_t> Cached(int i) { return Prompt(static_cast<uint32_t>(500 + i), 512); }
  uint32_t NumCached(int i) { return Answer(Cached(i), 2).receipt.cached_tokens(); }
};

// The pool is full of them when a prefill worker wants to write a prompt that takes most of it.
TEST_P(OnePoolTest, PrefixesGiveWayToReservationsOfOthers) {
  CachePrefixes(5);
  EXPECT_LE(NumFree(), 1);
  EXPECT_EQ(Info().free_pages(), static_cast<uint64_t>(decode_->pool().num_pages()));
  UseOther();
  EXPECT_EQ(Reserve(Prompt(1, 40 * 64), Sampling(4)).status().code(), absl::StatusCode::kInvalidArgument);
  const auto first = Reserve(Prompt(1, 20 * 64), Sampling(4));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->page_ids_size(), 20 * num_streams());
  const int64_t free = NumFree();
  // One that does not fit even without the rest is refused, and takes nothing away.
  const auto refused = Reserve(Prompt(2, 25 * 64), Sampling(4));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(NumFree(), free);
  EXPECT_EQ(Info().free_pages(), static_cast<uint64_t>(20 * num_streams()));
  EXPECT_TRUE(test::Eventually(
      [&] { return DecodeMetric("splice_decode_cached_pages") == static_cast<double>((20 - free) * num_streams()); }));
  const Result result = GenerateOn(*first, Prompt(1, 20 * 64), Sampling(4));
  EXPECT_EQ(result.tokens, Expected(Prompt(1, 20 * 64), Sampling(4)));
  EXPECT_TRUE(PagesComeBack());
  UseOther();
  EXPECT_EQ(NumCached(4), 448u) << "the youngest is there";
  EXPECT_EQ(NumCached(0), 0u) << "the oldest is not";
  EXPECT_TRUE(PagesComeBack());
}

// Prefixes, which are of nobody, go before conversations, and these before a sequence is preempted.
TEST_P(OnePoolTest, ConversationsAreEvictedBehindPrefixes) {
  UseOther();
  session_ = "talk";
  const auto text = Prompt(1, 600);
  Answer(text);
  EXPECT_TRUE(PagesComeBack());
  session_.clear();
  UseOther();
  CachePrefixes(5);  // of which one has no room
  EXPECT_EQ(DecodeMetric("splice_decode_sessions_dropped_total{reason=\"pages\"}"), 0);
  EXPECT_LT(NumFree(), 8);
  Answer(Prompt(2, 28 * 64), 100);
  EXPECT_EQ(DecodeMetric("splice_decode_sessions_dropped_total{reason=\"pages\"}"), 0) << "prefixes were enough";
  UseOther();
  session_ = "talk";
  EXPECT_EQ(Answer(text).receipt.held_tokens(), 576u);
  EXPECT_TRUE(PagesComeBack());
  session_.clear();
  UseOther();
  CachePrefixes(3);
  // Starts beside the conversation, and grows over it.
  Answer(Prompt(3, 30 * 64), 300);
  EXPECT_TRUE(
      test::Eventually([&] { return DecodeMetric("splice_decode_sessions_dropped_total{reason=\"pages\"}") == 1; }));
  EXPECT_EQ(DecodeMetric("splice_num_preemptions_total"), 0);
  EXPECT_TRUE(PagesComeBack());
}

// The next turn may be computed by a prefill worker: it sends only what is new.
TEST_P(OnePoolTest, ATurnThatWasComputedHereIsHeldForThePool) {
  session_ = "talk";
  auto text = Prompt(1, 400);
  Answer(text);
  EXPECT_TRUE(test::Eventually([&] { return NumFree() == NumPages() - 6; })) << "kept once";
  const auto more = Prompt(2, 100);
  text.insert(text.end(), more.begin(), more.end());
  UseOther();
  EXPECT_EQ(Answer(text).receipt.held_tokens(), 384u);
  UseOther();
  EXPECT_EQ(Answer(text).receipt.cached_tokens(), 384u) << "what came over the wire is no prefix here";
}

// Who came first: a prompt that waits for pages is not passed by reservations.
TEST_P(OnePoolTest, ReservationsOfOthersWaitBehindPrompts) {
  UseOther();
  const auto large = Reserve(Prompt(1, 30 * 64), Sampling(4));
  ASSERT_TRUE(large.ok()) << large.status();
  UseOther();
  const auto prompt = Prompt(2, 16 * 64);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_TRUE(ticket->in_place());
  Running running;
  Run(running, prompt, *ticket);
  UseOther();
  EXPECT_TRUE(test::Eventually([&] {
    const auto small = Reserve(Prompt(3, 64), Sampling(4));
    if (small.ok()) Release(*small, small->generation());
    return absl::IsResourceExhausted(small.status());
  }));
  Release(*large, large->generation());
  EXPECT_TRUE(running.status.get().ok());
  EXPECT_TRUE(test::Eventually([&] { return Reserve(Prompt(3, 64), Sampling(4)).ok(); }));
}

INSTANTIATE_TEST_SUITE_P(Pools, OnePoolTest, ::testing::Values(Way{"shm", false, "shm"}), WayName);
INSTANTIATE_TEST_SUITE_P(Pools, LocalPrefillDrainTest, ::testing::Values(Way{"shm", false, "shm"}), WayName);
INSTANTIATE_TEST_SUITE_P(Pools, LocalPrefillTest,
                         ::testing::ValuesIn(FewOf(2, {{"shm", false, "shm"},
                                                       {"device", true, "device", 1, 2},
                                                       {"device", true, "device"},
                                                       {"shm", false, "shm", 1, 2}})),
                         WayName);

TEST(LocalPrefillOptionsTest, ASmallPoolIsRefused) {
  auto model = engine::Model::Load(test::kTinyModel, kernels::MakeCpuBackend());
  ASSERT_TRUE(model.ok()) << model.status();
  decode::DecodeServerOptions options;
  options.metrics_listen = "";
  options.kv_bytes = 8 << 20;
  options.local_prefill.max_new_tokens = 4096;
  const auto server = decode::DecodeServer::Start(*model, options);
  ASSERT_FALSE(server.ok());
  EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument) << server.status();
  EXPECT_THAT(std::string(server.status().message()), ::testing::HasSubstr("--kv-bytes"));
}

}  // namespace
}  // namespace spl
