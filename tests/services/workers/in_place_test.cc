// A prefill and a decode worker of one process with one page pool: prompts are handed over in the pages in which they
// were computed, running sequences and cached KV share the room, and no page is lost.
#include "tests/services/base/http_client.h"
#include "tests/services/workers/workers_fixture.h"

namespace spl {
namespace {

class InPlaceTest : public WorkersTest {
 protected:
  void SetUp() override {}

  int64_t PagesOf(int64_t tokens) const { return engine::PagesForTokens(model_->config(), tokens); }
  int64_t PagesUsed() const { return decode_->pool().num_pages() - decode_->pool().num_free(); }
};

TEST_P(InPlaceTest, APromptIsInThePoolOnce) {
  StartWorkers("none");
  const auto prompt = Prompt(1, 640);
  int64_t most = 0;
  on_chunk_ = [&] { most = std::max(most, PagesUsed()); };
  const Result result = Generate(prompt, Sampling(40));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_EQ(result.tokens, Expected(prompt, Sampling(40)));
  EXPECT_EQ(result.receipt.transport(), "in place");
  EXPECT_EQ(result.receipt.bytes_moved(), 0u);
  EXPECT_EQ(most, PagesOf(641));
  EXPECT_TRUE(PagesComeBack());
}

// The start of a prompt stays in the prefix index while its sequence goes on in the same pages: what follows on the
// last, unfinished page is the sequence's alone.
TEST_P(InPlaceTest, SequencesShareTheirCachedStart) {
  prefix_cache_ = true;
  StartWorkers("none");
  std::vector<int32_t> start = Prompt(2, 512);
  ASSERT_TRUE(Generate(start, Sampling(2)).stream.ok());
  const int64_t cached = PagesUsed();
  EXPECT_EQ(cached, PagesOf(512));
  std::vector<std::thread> threads;
  std::vector<Result> results(6);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < results.size(); ++i) {
    prompts.push_back(start);
    const auto end = Prompt(static_cast<uint32_t>(10 + i), 5 + 11 * i);
    prompts.back().insert(prompts.back().end(), end.begin(), end.end());
  }
  std::atomic<int64_t> most = 0;
  on_chunk_ = [&] {
    for (int64_t used = PagesUsed(), known = most; used > known && !most.compare_exchange_weak(known, used);) continue;
  };
  for (size_t i = 0; i < results.size(); ++i)
    threads.emplace_back([&, i] { results[i] = Generate(prompts[i], Sampling(60)); });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(prompts[i], Sampling(60))) << i;
    EXPECT_EQ(results[i].receipt.cached_tokens(), 512u);
  }
  EXPECT_LE(most, cached + static_cast<int64_t>(results.size()) * (PagesOf(640) - PagesOf(512)));
}

// Running sequences take the pages of cached KV. There is room for the prompt that runs and little more.
TEST_P(InPlaceTest, CachedKvMakesRoomForSequencesThatGrow) {
  prefix_cache_ = true;
  pool_bytes_ = 12 << 20;
  StartWorkers("none");
  const int64_t tokens = decode_->pool().num_pages() / PagesOf(1) * 64;
  ASSERT_GE(tokens, 512);
  for (uint32_t seed = 30; seed < 33; ++seed) {
    const auto prompt = Prompt(seed, static_cast<size_t>(tokens) - 320);
    const Result result = Generate(prompt, Sampling(250));
    ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(250))) << seed;
  }
}

// More sequences than fit: they give way, and return, and no prompt takes the pages that they wait for.
TEST_P(InPlaceTest, SequencesThatGiveWayComeBack) {
  prefix_cache_ = true;
  pool_bytes_ = 16 << 20;
  StartWorkers("none");
  std::vector<std::thread> threads;
  std::vector<Result> results(10);
  const auto prompt_of = [](size_t i) { return Prompt(static_cast<uint32_t>(50 + i), 150 + 13 * i); };
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      // As the router does, one that finds no room asks again.
      const auto end = std::chrono::steady_clock::now() + 60s;
      do results[i] = Generate(prompt_of(i), Sampling(200));
      while (results[i].run.code() == absl::StatusCode::kResourceExhausted && std::chrono::steady_clock::now() < end);
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << i << ": " << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(prompt_of(i), Sampling(200))) << i;
  }
}

// With turns decode steps share passes with slices of prompts, and where both engines launch as they like, steps wait
// for such a pass. Without a target both run at the same time. Tokens are what they are without company.
class TurnsTest : public InPlaceTest {
 protected:
  // Four sequences that are decoded when six long prompts come.
  void RunBesidePrompts();
  // Sum of splice_pass_tokens of both workers.
  double PassTokens(const std::string& work) const;
};

double TurnsTest::PassTokens(const std::string& work) const {
  double sum = 0;
  for (const std::string& address : {prefill_->metrics_address(), decode_->metrics_address()}) {
    const double tokens = spl::testing::MetricAt(address, "splice_pass_tokens_sum{work=\"" + work + "\"}");
    EXPECT_GE(tokens, 0) << address << " has no series for " << work;
    sum += tokens;
  }
  return sum;
}

void TurnsTest::RunBesidePrompts() {
  metrics_listen_ = "127.0.0.1:0";
  StartWorkers("none");
  v1::SamplingParams sampled = Sampling(150);
  sampled.set_temperature(0.8f);
  sampled.set_top_p(0.9f);
  sampled.set_repetition_penalty(1.1f);
  sampled.set_seed(5);
  reserve_with_tokens_ = true;
  const auto sampling_of = [&](size_t i) { return i % 2 == 0 ? Sampling(150) : sampled; };
  const auto prompt_of = [](size_t i) { return Prompt(static_cast<uint32_t>(100 + i), i < 4 ? 40 + 30 * i : 700); };
  std::vector<Result> results(10);
  std::vector<std::thread> threads;
  std::atomic<int> num_chunks = 0;
  on_chunk_ = [&] { ++num_chunks; };
  const auto start = [&](size_t i) {
    threads.emplace_back([&, i] { results[i] = Generate(prompt_of(i), sampling_of(i)); });
  };
  for (size_t i = 0; i < 4; ++i) start(i);
  while (num_chunks < 8) std::this_thread::yield();
  for (size_t i = 4; i < results.size(); ++i) start(i);
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << i << ": " << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(prompt_of(i), sampling_of(i))) << i;
  }
  EXPECT_TRUE(PagesComeBack());
  // Every token of a prompt, and every one of an answer but its first, is a row of one pass.
  double tokens = 0;
  for (size_t i = 0; i < results.size(); ++i)
    tokens += static_cast<double>(prompt_of(i).size() + results[i].tokens.size() - 1);
  EXPECT_EQ(PassTokens("prompts") + PassTokens("decode") + PassTokens("both"), tokens);
  const bool may_share = decode_->shared()->turns() != nullptr && decode_->shared()->turns()->num_rides() > 0;
  EXPECT_EQ(PassTokens("both") > 0, may_share);
}

// No step becomes due, however busy the machine is: one that is due runs alone.
TEST_P(TurnsTest, RunningSequencesRideInPassesOfPrompts) {
  itl_target_ = 10s;
  RunBesidePrompts();
  EXPECT_GE(decode_->shared()->turns()->num_rides(), 5u);
}

// The step under way is taken before the next one is offered, and once prompts are gone steps start ahead again.
TEST_P(TurnsTest, StepsThatStartAheadRideInPassesOfPrompts) {
  sharing_ = engine::StepTurns::Sharing::kRides;
  async_scheduling_ = true;
  itl_target_ = 10s;
  RunBesidePrompts();
  EXPECT_GE(decode_->shared()->turns()->num_rides(), 5u);
}

// A step that is due waits for no pass.
TEST_P(TurnsTest, WithoutATargetForTokensStepsRunBesidePrompts) {
  sharing_ = engine::StepTurns::Sharing::kRides;
  async_scheduling_ = true;
  itl_target_ = 0ms;
  RunBesidePrompts();
  EXPECT_EQ(decode_->shared()->turns()->num_rides(), 0u);
}

TEST_P(TurnsTest, WithoutTurnsBothRunAtTheSameTime) {
  itl_target_.reset();
  RunBesidePrompts();
  EXPECT_EQ(decode_->shared()->turns(), nullptr);
}

TEST_P(InPlaceTest, WhoLeavesFreesThePages) {
  StartWorkers("none");
  for (const bool while_decoding : {false, true}) {
    const auto prompt = Prompt(70, 600);
    auto ticket = Reserve(prompt, Sampling(5000));
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    EXPECT_TRUE(ticket->in_place());
    EXPECT_EQ(ticket->page_ids_size(), 0);
    grpc::ClientContext stream_context, run_context;
    v1::StreamRequest stream_request;
    stream_request.set_ticket_id(ticket->ticket_id());
    stream_request.set_generation(ticket->generation());
    auto reader = decode_stub_->Stream(&stream_context, stream_request);
    if (!while_decoding) Release(*ticket, ticket->generation());
    v1::PrefillResponse response;
    ASSERT_TRUE(prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(5000), *ticket), &response).ok());
    v1::StreamChunk chunk;
    if (while_decoding) {
      ASSERT_TRUE(reader->Read(&chunk));
    }
    stream_context.TryCancel();
    EXPECT_FALSE(reader->Finish().ok());
    EXPECT_TRUE(PagesComeBack()) << while_decoding;
  }
}

TEST_P(InPlaceTest, ALostCommitAndAnExpiredTicketCostNoPages) {
  StartWorkers("none");
  ASSERT_TRUE(ArmFault("prefill.commit", {.kind = FaultKind::kDrop}).ok());
  const auto prompt = Prompt(80, 300);
  auto ticket = Reserve(prompt, Sampling(10), 300);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext stream_context, run_context;
  v1::StreamRequest stream_request;
  stream_request.set_ticket_id(ticket->ticket_id());
  stream_request.set_generation(ticket->generation());
  auto reader = decode_stub_->Stream(&stream_context, stream_request);
  v1::PrefillResponse response;
  ASSERT_TRUE(prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(10), *ticket), &response).ok());
  v1::StreamChunk chunk;
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(InPlaceTest, AReservationForAnotherWriterHasPages) {
  StartWorkers("none");
  connected_.mutable_writer()->set_epoch(connected_.writer().epoch() + 1);
  const auto ticket = Reserve(Prompt(90, 100), Sampling(4));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_FALSE(ticket->in_place());
  EXPECT_EQ(ticket->page_ids_size(), PagesOf(100));
  Release(*ticket, ticket->generation());
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(InPlaceTest, ACommitThatHandsNothingOverIsRefused) {
  StartWorkers("none");
  const auto ticket = Reserve(Prompt(91, 100), Sampling(4));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  v1::CommitRequest commit;
  commit.set_ticket_id(ticket->ticket_id());
  commit.set_generation(ticket->generation());
  commit.set_num_tokens(100);
  commit.set_in_place(true);
  grpc::ClientContext context;
  v1::CommitResponse response;
  EXPECT_EQ(decode_stub_->Commit(&context, commit, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(PagesComeBack());
}

const Way kOnePool[] = {{"in place", false, "in place"}, {"in place", true, "in place"}};
INSTANTIATE_TEST_SUITE_P(OnePool, InPlaceTest, ::testing::ValuesIn(kOnePool), WayName);
INSTANTIATE_TEST_SUITE_P(OnePool, TurnsTest, ::testing::ValuesIn(kOnePool), WayName);

using SeparatePoolsTest = WorkersTest;

TEST_P(SeparatePoolsTest, ATicketInPlaceIsRefused) {
  const auto prompt = Prompt(92, 100);
  auto ticket = Reserve(prompt, Sampling(4));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  v1::Ticket in_place = *ticket;
  in_place.set_in_place(true);
  in_place.clear_page_ids();
  grpc::ClientContext context;
  v1::PrefillResponse response;
  const grpc::Status status = prefill_stub_->Run(&context, RunRequest(prompt, Sampling(4), in_place), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  Release(*ticket, ticket->generation());
  EXPECT_TRUE(PagesComeBack());
}

INSTANTIATE_TEST_SUITE_P(Pools, SeparatePoolsTest, ::testing::Values(Way{"shm", false, "shm"}), WayName);

}  // namespace
}  // namespace spl
