// A decode worker that prefills by itself: the tokens of the plain model over every way into its own pages, and an end
// that does not hang.
#include <future>

#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"

namespace spl {
namespace {

class LocalPrefillTest : public WorkersTest {
 protected:
  void SetUp() override {
    if (test::OnGpu() && GetParam().device && GetParam().decode_ranks > 1)
      GTEST_SKIP() << "a rank has a GPU of its own";
    local_prefill_.max_new_tokens = 2048;
    local_prefill_.kv_bytes = (GetParam().f32() ? 2 : 1) * (64 << 20);
    local_prefill_.slice_tokens = 64;
    StartWorkers("none");
    prefill_->Stop();  // nobody asks it anything
    prefill_stub_ =
        v1::Prefill::NewStub(grpc::CreateChannel(decode_->grpc_address(), grpc::InsecureChannelCredentials()));
    // Who writes, as a router says it.
    connected_.Clear();
    connected_.mutable_writer()->set_grpc_address(decode_->grpc_address());
    connected_.mutable_writer()->set_epoch(Info().epoch());
  }
  v1::DecodeInfo Info() {
    grpc::ClientContext context;
    v1::DecodeInfo info;
    EXPECT_TRUE(decode_stub_->GetInfo(&context, {}, &info).ok());
    return info;
  }

  // A Run under way, of which the first pages have been copied.
  struct Running {
    grpc::ClientContext context;
    v1::PrefillRequest request;
    v1::PrefillResponse response;
    std::promise<absl::Status> ended;
    std::future<absl::Status> status = ended.get_future();
  };
  void Begin(Running& running, const std::vector<int32_t>& prompt, const v1::Ticket& ticket) {
    ASSERT_TRUE(ArmFault("prefill.push", {.kind = FaultKind::kNone}).ok());  // only counts
    running.request = RunRequest(prompt, Sampling(10), ticket);
    prefill_stub_->async()->Run(&running.context, &running.request, &running.response,
                                [&](const grpc::Status& s) { running.ended.set_value(FromGrpcStatus(s)); });
    ASSERT_TRUE(WaitForFaultHits("prefill.push", 1, 20'000));
  }
};

TEST_P(LocalPrefillTest, SaysWhatItTakes) {
  const v1::LocalPrefill info = Info().local_prefill();
  EXPECT_EQ(info.worker_id(), "d/local");
  EXPECT_EQ(info.max_new_tokens(), 2048u);
  EXPECT_EQ(info.slice_tokens(), 64u);
  EXPECT_GE(info.max_prompt_tokens(), 2048u);
  EXPECT_GT(info.prefill_tokens_per_s(), 0);
  EXPECT_GT(info.copy_bytes_per_s(), 0);
  EXPECT_EQ(info.queued_tokens(), 0u);
  EXPECT_FALSE(info.has_store());
}

TEST_P(LocalPrefillTest, TokensEqualThePlainModelForEveryPageEdge) {
  for (size_t length : {1, 63, 64, 65, 128, 257, 600}) {
    const auto prompt = Prompt(static_cast<uint32_t>(length), length);
    const Result result = Generate(prompt, Sampling(12));
    ASSERT_TRUE(result.run.ok()) << result.run;
    ASSERT_TRUE(result.stream.ok()) << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(12))) << length;
    EXPECT_EQ(result.receipt.transport(), GetParam().carrier);
    EXPECT_EQ(result.receipt.prefill_worker(), "d/local");
    EXPECT_EQ(result.receipt.decode_worker(), "d");
    EXPECT_EQ(result.receipt.computed_tokens(), length);
  }
  // What was computed is found again.
  const auto prompt = Prompt(600, 600);
  const Result again = Generate(prompt, Sampling(12));
  EXPECT_EQ(again.tokens, Expected(prompt, Sampling(12)));
  EXPECT_EQ(again.receipt.cached_tokens(), 576u);
  EXPECT_TRUE(PagesComeBack());
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

TEST_P(LocalPrefillTest, LongerPromptsAreRefusedAndTheirPagesComeBack) {
  const Result result = Generate(Prompt(1, 2048 + 65), Sampling(5));
  EXPECT_EQ(result.run.code(), absl::StatusCode::kResourceExhausted) << result.run;
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(LocalPrefillTest, DamagedKvIsFoundBeforeItIsUsed) {
  ASSERT_TRUE(ArmFault("prefill.push", {.kind = FaultKind::kDrop}).ok());
  const Result result = Generate(Prompt(2, 200), Sampling(10));
  EXPECT_TRUE(result.run.ok()) << result.run;
  EXPECT_EQ(result.stream.code(), absl::StatusCode::kDataLoss) << result.stream;
  DisarmAllFaults();
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
  const auto prompt = Prompt(5, 2000);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_TRUE(ArmFault("engine.prefill.step", *ParseFaultAction("delay(100)")).ok());  // 32 slices
  Running running;
  Begin(running, prompt, *ticket);
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
  const auto prompt = Prompt(6, 300);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext context;
  v1::StreamRequest request;
  request.set_ticket_id(ticket->ticket_id());
  request.set_generation(ticket->generation());
  auto reader = decode_stub_->Stream(&context, request);
  ASSERT_TRUE(ArmFault("engine.prefill.step", *ParseFaultAction("delay(10)")).ok());
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

INSTANTIATE_TEST_SUITE_P(Pools, LocalPrefillDrainTest, testing::Values(Way{"shm", false, "memory"}), WayName);
INSTANTIATE_TEST_SUITE_P(Pools, LocalPrefillTest,
                         testing::ValuesIn(FewOf(2, {{"shm", false, "memory"},
                                                     {"device", true, "device", 1, 2},
                                                     {"device", true, "device"},
                                                     {"shm", false, "memory", 1, 2}})),
                         WayName);

TEST(LocalPrefillOptionsTest, ASmallPoolIsRefused) {
  auto model = engine::Model::Load(test::kTinyModel, kernels::MakeCpuBackend());
  ASSERT_TRUE(model.ok()) << model.status();
  decode::DecodeServerOptions options;
  options.metrics_listen = "";
  options.kv_bytes = 32 << 20;
  options.local_prefill = {.max_new_tokens = 4096, .kv_bytes = 8 << 20};
  const auto server = decode::DecodeServer::Start(*model, options);
  ASSERT_FALSE(server.ok());
  EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument) << server.status();
  EXPECT_THAT(std::string(server.status().message()), testing::HasSubstr("--local-prefill-kv-bytes"));
}

}  // namespace
}  // namespace spl
