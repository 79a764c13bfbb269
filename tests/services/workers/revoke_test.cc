// A ticket that was given up, and its prefill call: whichever comes first, pages are used by others only when nothing
// more is written to them, and then at once, not when the ticket's time is over (60 s here).
#include <optional>

#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"

namespace spl {
namespace {

class RevokeTest : public WorkersTest {
 protected:
  void Release(const v1::Ticket& ticket, bool quiet) {
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    request.set_ticket_id(ticket.ticket_id());
    request.set_generation(ticket.generation());
    request.set_writer_quiet(quiet);
    v1::ReleaseResponse response;
    EXPECT_TRUE(decode_stub_->Release(&context, request, &response).ok());
  }
  uint64_t PrefillEpoch() {
    grpc::ClientContext context;
    v1::PrefillInfo info;
    EXPECT_TRUE(prefill_stub_->GetInfo(&context, {}, &info).ok());
    return info.epoch();
  }
  v1::RevokeTicketRequest RevokeRequest(const v1::Ticket& ticket, uint64_t epoch) const {
    v1::RevokeTicketRequest request;
    request.set_ticket_id(ticket.ticket_id());
    request.set_epoch(epoch);
    request.set_ttl_ms(ticket.ttl_ms());
    return request;
  }
  absl::Status Revoke(const v1::Ticket& ticket, uint64_t epoch) {
    grpc::ClientContext context;
    v1::RevokeTicketResponse response;
    return FromGrpcStatus(prefill_stub_->RevokeTicket(&context, RevokeRequest(ticket, epoch), &response));
  }
  absl::Status Run(const std::vector<int32_t>& prompt, const v1::Ticket& ticket) {
    grpc::ClientContext context;
    v1::PrefillResponse response;
    return FromGrpcStatus(prefill_stub_->Run(&context, RunRequest(prompt, Sampling(5), ticket), &response));
  }
  bool AllFree() const { return decode_->pool().num_free() == decode_->pool().num_pages(); }
  std::vector<std::byte> BytesOf(const v1::Ticket& ticket) const {
    const std::vector<int32_t> pages(ticket.page_ids().begin(), ticket.page_ids().end());
    std::vector<std::byte> bytes(pages.size() * model_->page_bytes());
    EXPECT_TRUE(decode_->pool().ReadPages(pages, bytes.data()).ok());
    return bytes;
  }
};

TEST_P(RevokeTest, ACallThatNeverArrivedCostsNothingAndOneThatIsLateWritesNothing) {
  const auto prompt = Prompt(1, 200);
  const auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  Release(*ticket, false);
  EXPECT_FALSE(AllFree());  // it may be under way
  ASSERT_TRUE(Revoke(*ticket, PrefillEpoch()).ok());
  Release(*ticket, true);
  EXPECT_TRUE(AllFree());
  // The pages are somebody else's now.
  const auto other = Reserve(Prompt(2, 200), Sampling(5));
  ASSERT_TRUE(other.ok());
  const std::vector<std::byte> before = BytesOf(*other), before_of_first = BytesOf(*ticket);
  ASSERT_TRUE(ArmFault("prefill.push", {.kind = FaultKind::kNone}).ok());  // only counts
  EXPECT_EQ(Run(prompt, *ticket).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(FaultHits("prefill.push"), 0u);
  EXPECT_TRUE(BytesOf(*other) == before);
  EXPECT_TRUE(BytesOf(*ticket) == before_of_first);
  // The one that has them is served.
  ASSERT_TRUE(Run(Prompt(2, 200), *other).ok());
  EXPECT_TRUE(PagesComeBack());  // it was decoded
  EXPECT_FALSE(BytesOf(*other) == before);
}

TEST_P(RevokeTest, TheAnswerWaitsForWritesThatAreUnderWay) {
  static int runs = 0;
  const std::string event = "revoke_test.go." + std::to_string(++runs);  // a fired event stays fired
  const auto prompt = Prompt(3, 600);
  const auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  FaultAction hold{.kind = FaultKind::kDelayUntil, .event = event};
  hold.only_hit = 3;
  ASSERT_TRUE(ArmFault("prefill.push", hold).ok());
  grpc::ClientContext run_context;
  v1::PrefillResponse run_response;
  const auto run_request = RunRequest(prompt, Sampling(5), *ticket);
  std::promise<grpc::Status> run_done;
  prefill_stub_->async()->Run(&run_context, &run_request, &run_response,
                              [&](const grpc::Status& status) { run_done.set_value(status); });
  ASSERT_TRUE(WaitForFaultHits("prefill.push", 3, 20'000));
  run_context.TryCancel();
  EXPECT_EQ(run_done.get_future().get().error_code(), grpc::StatusCode::CANCELLED);
  Release(*ticket, false);
  grpc::ClientContext revoke_context;
  v1::RevokeTicketResponse revoke_response;
  const auto revoke_request = RevokeRequest(*ticket, PrefillEpoch());
  std::promise<grpc::Status> revoke_done;
  auto revoked = revoke_done.get_future();
  prefill_stub_->async()->RevokeTicket(&revoke_context, &revoke_request, &revoke_response,
                                       [&](const grpc::Status& status) { revoke_done.set_value(status); });
  // A call on the same connection that comes behind it has its answer: this one has none.
  EXPECT_NE(PrefillEpoch(), 0u);
  EXPECT_EQ(revoked.wait_for(0s), std::future_status::timeout);
  EXPECT_FALSE(AllFree());
  FireFaultEvent(event);
  const absl::Status answer = FromGrpcStatus(revoked.get());
  EXPECT_TRUE(answer.ok()) << answer;
  const std::vector<std::byte> before = BytesOf(*ticket);
  EXPECT_TRUE(PagesComeBack());  // the prefill worker's, too: its push has ended
  EXPECT_TRUE(BytesOf(*ticket) == before);
}

// The answer of a prefill comes before its last write: a router that is left by its client then knows nothing.
TEST_P(RevokeTest, ACommitThatComesTooLateSaysThatTheWriterIsQuiet) {
  static int runs = 0;
  const std::string event = "revoke_test.commit." + std::to_string(++runs);
  const auto prompt = Prompt(4, 200);
  const auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_TRUE(ArmFault("prefill.commit", {.kind = FaultKind::kDelayUntil, .event = event}).ok());
  ASSERT_TRUE(Run(prompt, *ticket).ok());
  Release(*ticket, false);
  EXPECT_FALSE(AllFree());
  FireFaultEvent(event);
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(RevokeTest, AnotherProcessDoesNotSpeakForTheOneBefore) {
  const auto ticket = Reserve(Prompt(5, 100), Sampling(5));
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(Revoke(*ticket, PrefillEpoch() + 1).code(), absl::StatusCode::kFailedPrecondition);
  v1::Ticket nameless = *ticket;
  nameless.set_ticket_id("short");
  EXPECT_EQ(Revoke(nameless, PrefillEpoch()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Run(Prompt(5, 100), nameless).code(), absl::StatusCode::kInvalidArgument);
  Release(*ticket, true);
}

// ---- a writer that pauses for longer than its ticket lives

class LateWriteTest : public RevokeTest {
 protected:
  // Starts a prompt whose first write stops at `fault` until Resume, and lets more than twice its ticket's time to live
  // pass.
  void PauseAt(const std::string& fault) {
    static int runs = 0;
    event_ = "late_write_test." + std::to_string(++runs);
    FaultAction pause{.kind = FaultKind::kDelayUntil, .event = event_};
    pause.only_hit = 1;
    const auto ticket = Reserve(prompt_, Sampling(5), kTtlMs);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    ticket_ = *ticket;
    ASSERT_TRUE(ArmFault(fault, pause).ok());
    run_request_ = RunRequest(prompt_, Sampling(5), ticket_);
    prefill_stub_->async()->Run(&run_context_, &run_request_, &run_response_,
                                [this](const grpc::Status& status) { run_done_.set_value(status); });
    ASSERT_TRUE(WaitForFaultHits(fault, 1, 20'000));
    // Three tickets that nobody writes to come and go, one behind the other.
    used_ = UsedPages();
    for (int i = 0; i < 3 && !AllFree(); ++i) {
      ASSERT_TRUE(Reserve(Prompt(8, 64), Sampling(5), kTtlMs).ok());
      ASSERT_TRUE(test::Eventually([&] { return UsedPages() <= used_; }));
    }
  }
  void Resume() {
    FireFaultEvent(event_);
    (void)run_done_.get_future().get();
  }

  int32_t UsedPages() const { return decode_->pool().num_pages() - decode_->pool().num_free(); }

  static constexpr uint32_t kTtlMs = 2000;
  int32_t used_ = 0;  // when the write paused
  const std::vector<int32_t> prompt_ = Prompt(7, 600);
  std::string event_;
  v1::Ticket ticket_;
  grpc::ClientContext run_context_;
  v1::PrefillRequest run_request_;
  v1::PrefillResponse run_response_;
  std::promise<grpc::Status> run_done_;
};

TEST_P(LateWriteTest, AWriteBehindItsLeaseChangesNoByteOfWhoeverHasThePages) {
  PauseAt("transport.put");
  const bool cut = GetParam().kv_transport == std::string("tcp");
  std::optional<v1::Ticket> other;
  if (cut) {
    // The connection was torn down: nothing of it can arrive, and the pages may be used.
    ASSERT_TRUE(test::Eventually([&] { return AllFree(); }));
    const auto reserved = Reserve(Prompt(9, 600), Sampling(5));
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    other = *reserved;
  } else {
    EXPECT_GE(UsedPages(), used_) << "a process that has the memory mapped may go on to write";
  }
  const std::vector<std::byte> before = BytesOf(ticket_);
  Resume();
  // The late write is dropped and its channel closed, which is the proof that all of it is over.
  EXPECT_TRUE(test::Eventually([&] { return prefill_->pool().num_free() == prefill_->pool().num_pages(); }));
  EXPECT_TRUE(BytesOf(ticket_) == before);
  if (other.has_value()) Release(*other, true);
  EXPECT_TRUE(PagesComeBack(20s));
  const absl::Status connected = Connect();
  ASSERT_TRUE(connected.ok()) << connected;
  EXPECT_EQ(Generate(prompt_, Sampling(5)).tokens, Expected(prompt_, Sampling(5)));
}

// Between the look at the lease and the copy there is no fence in shared memory: only that nobody gets the pages.
TEST_P(LateWriteTest, PagesOfACopyThatPausesHalfWayAreGivenToNobody) {
  if (GetParam().kv_transport != std::string("shm")) return;
  PauseAt("transport.piece");
  EXPECT_GE(UsedPages(), used_);
  const auto other = Reserve(Prompt(9, 600), Sampling(5));
  ASSERT_TRUE(other.ok()) << other.status();
  for (const uint32_t page : other->page_ids())
    ASSERT_EQ(std::count(ticket_.page_ids().begin(), ticket_.page_ids().end(), page), 0);
  const std::vector<std::byte> before = BytesOf(*other), late = BytesOf(ticket_);
  Resume();
  EXPECT_TRUE(test::Eventually([&] { return prefill_->pool().num_free() == prefill_->pool().num_pages(); }));
  EXPECT_TRUE(BytesOf(*other) == before);
  EXPECT_FALSE(BytesOf(ticket_) == late);  // it did write
  Release(*other, true);
  EXPECT_TRUE(PagesComeBack(20s));
}

// A ticket is good for one channel: the decode worker may have taken the end of that one for the end of all writes.
TEST_P(LateWriteTest, ATicketOfAnEarlierChannelIsRefused) {
  auto ticket = Reserve(prompt_, Sampling(5));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_NE(ticket->channel_id(), 0u);
  const v1::Ticket good = *ticket;
  ticket->set_channel_id(ticket->channel_id() + 1);
  EXPECT_EQ(Run(prompt_, *ticket).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Run(prompt_, good).ok());
  EXPECT_TRUE(PagesComeBack());
}

INSTANTIATE_TEST_SUITE_P(Carriers, LateWriteTest, ::testing::Values(Way{"shm", false, "shm"}, Way{"tcp", false, "tcp"}),
                         WayName);

INSTANTIATE_TEST_SUITE_P(Carriers, RevokeTest,
                         testing::Values(Way{"shm", false, "shm"}, Way{"tcp", false, "tcp"},
                                         Way{"shm", true, "dma+shm"}, Way{"tcp", true, "staged+tcp"}),
                         WayName);

}  // namespace
}  // namespace spl
