// Tickets that are not what a decode worker gave, or that come a second time: refused, counted, and without an effect
// on the sequence that the ticket belongs to.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>

#include "tests/services/base/http_client.h"
#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/ticket_checksums.h"

namespace spl {
namespace {

using absl::StatusCode;

class TicketsTest : public WorkersTest {
 protected:
  void SetUp() override {
    metrics_listen_ = "127.0.0.1:0";
    StartWorkers("none");
  }

  absl::Status Commit(const std::string& id, uint64_t generation, v1::CommitRequest request = {}) {
    grpc::ClientContext context;
    request.set_ticket_id(id);
    request.set_generation(generation);
    v1::CommitResponse response;
    return FromGrpcStatus(decode_stub_->Commit(&context, request, &response));
  }
  absl::Status Stream(const std::string& id, uint64_t generation) {
    grpc::ClientContext context;
    v1::StreamRequest request;
    request.set_ticket_id(id);
    request.set_generation(generation);
    const auto reader = decode_stub_->Stream(&context, request);
    v1::StreamChunk chunk;
    while (reader->Read(&chunk)) ADD_FAILURE() << "tokens without a ticket";
    return FromGrpcStatus(reader->Finish());
  }
  absl::Status Run(const std::vector<int32_t>& prompt, uint32_t max_tokens, const v1::Ticket& ticket,
                   v1::PrefillResponse* response) {
    grpc::ClientContext context;
    return FromGrpcStatus(prefill_stub_->Run(&context, RunRequest(prompt, Sampling(max_tokens), ticket), response));
  }

  // splice_kv_tickets_refused_total of one worker.
  static int Refused(const std::string& metrics_address, const std::string& reason) {
    return static_cast<int>(
        spl::testing::MetricAt(metrics_address, "splice_kv_tickets_refused_total{reason=\"" + reason + "\"}"));
  }
  int RefusedByDecode(const std::string& reason) { return Refused(decode_->metrics_address(), reason); }
  int RefusedByPrefill(const std::string& reason) { return Refused(prefill_->metrics_address(), reason); }

  int UsedPages() const { return decode_->pool().num_pages() - decode_->pool().num_free(); }
};

TEST_P(TicketsTest, UnknownAndForgedTicketsAreRefused) {
  const auto prompt = Prompt(31, 200);
  const auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const int used = UsedPages();
  const std::string other(ticket->ticket_id().size(), 'x');
  const uint64_t generation = ticket->generation();

  EXPECT_EQ(Commit(other, generation).code(), StatusCode::kNotFound);
  EXPECT_EQ(Stream(other, generation).code(), StatusCode::kNotFound);
  EXPECT_EQ(RefusedByDecode("unknown"), 2);
  EXPECT_EQ(Commit("short", generation).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Commit(ticket->ticket_id(), generation + 1).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Stream(ticket->ticket_id(), generation + 1).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(RefusedByDecode("generation"), 2);
  Release(*ticket, generation + 1);
  EXPECT_EQ(UsedPages(), used);  // it is still reserved

  // A prompt that is run for a forged generation does not start to decode.
  v1::Ticket forged = *ticket;
  forged.set_generation(generation + 1);
  v1::PrefillResponse response;
  EXPECT_TRUE(Run(prompt, 10, forged, &response).ok());  // the first token is not the decode worker's
  EXPECT_TRUE(test::Eventually([&] { return RefusedByDecode("generation") == 3; }));
  EXPECT_EQ(UsedPages(), used);
  Release(*ticket, generation);
  EXPECT_TRUE(PagesComeBack());
  EXPECT_EQ(RefusedByDecode("replayed"), 0);
  EXPECT_EQ(Generate(prompt, Sampling(10)).tokens, Expected(prompt, Sampling(10)));
}

TEST_P(TicketsTest, AReplayChangesNothingOfTheSequenceThatRuns) {
  const auto prompt = Prompt(32, 300), others = Prompt(33, 300);
  const auto ticket = Reserve(prompt, Sampling(200));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext context;
  v1::StreamRequest stream;
  stream.set_ticket_id(ticket->ticket_id());
  stream.set_generation(ticket->generation());
  const auto reader = decode_stub_->Stream(&context, stream);
  v1::PrefillResponse response;
  ASSERT_TRUE(Run(prompt, 200, *ticket, &response).ok());
  std::vector<int32_t> tokens = {static_cast<int32_t>(response.first_tokens(0).token_id())};
  v1::StreamChunk chunk;
  const auto take = [&] {
    for (const auto& token : chunk.tokens()) tokens.push_back(static_cast<int32_t>(token.token().token_id()));
  };
  while (tokens.size() < 5 && reader->Read(&chunk)) take();
  ASSERT_GE(tokens.size(), 5u);
  ASSERT_LT(tokens.size(), 200u);

  // Another prompt for the pages of the one that decodes; and the commit once more.
  v1::PrefillResponse ignored;
  EXPECT_EQ(Run(others, 200, *ticket, &ignored).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(RefusedByPrefill("replayed"), 1);
  EXPECT_EQ(Commit(ticket->ticket_id(), ticket->generation()).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(RefusedByDecode("replayed"), 1);

  while (reader->Read(&chunk)) take();
  const absl::Status end = FromGrpcStatus(reader->Finish());
  EXPECT_TRUE(end.ok()) << end;
  EXPECT_EQ(tokens, Expected(prompt, Sampling(200)));
  EXPECT_TRUE(PagesComeBack());

  // It is over: its pages may be somebody else's.
  EXPECT_EQ(Commit(ticket->ticket_id(), ticket->generation()).code(), StatusCode::kNotFound);
  EXPECT_EQ(Run(others, 200, *ticket, &ignored).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(RefusedByPrefill("replayed"), 2);
  EXPECT_TRUE(PagesComeBack());
}

// Whoever has a ticket may say what he likes: ids outside of the vocabulary end his own sequence, and nobody else's.
TEST_P(TicketsTest, IdsOutsideOfTheVocabularyEndTheirOwnSequence) {
  constexpr uint32_t kOutside[] = {4096, 0x7fffff00, 0x80000000, 0xffffffff};
  for (const uint32_t id : kOutside) {
    std::vector<int32_t> prompt = Prompt(36, 50);
    prompt[7] = static_cast<int32_t>(id);
    reserve_with_tokens_ = true;
    const auto refused = Reserve(prompt, Sampling(10));
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << refused.status();
  }
  reserve_with_tokens_ = false;

  // Somebody else decodes meanwhile.
  const auto prompt = Prompt(37, 100);
  bool sent = false;
  on_chunk_ = [&] {
    if (std::exchange(sent, true)) return;
    for (const uint32_t id : kOutside) {
      const auto ticket = Reserve(Prompt(38, 40), Sampling(50));
      ASSERT_TRUE(ticket.ok()) << ticket.status();
      auto commit = test::CommitOf(*ticket, decode_->pool(), 40);
      ASSERT_TRUE(commit.ok()) << commit.status();
      commit->add_first_tokens()->set_token_id(id);
      const absl::Status status = Commit(ticket->ticket_id(), ticket->generation(), *commit);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << id << ": " << status;
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("token"));
    }
  };
  const Result result = Generate(prompt, Sampling(200));
  on_chunk_ = nullptr;
  EXPECT_TRUE(sent);
  EXPECT_TRUE(result.stream.ok()) << result.stream;
  EXPECT_EQ(result.tokens, Expected(prompt, Sampling(200)));
  EXPECT_TRUE(PagesComeBack());
}

// A wrong checksum is answered without the right one: else whoever guesses could ask for it.
TEST_P(TicketsTest, ARefusedChecksumIsNotSaid) {
  const auto ticket = Reserve(Prompt(39, 40), Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  auto commit = test::CommitOf(*ticket, decode_->pool(), 40);
  ASSERT_TRUE(commit.ok()) << commit.status();
  const uint32_t right = commit->crc32c(0);
  commit->set_crc32c(0, right ^ 1);
  commit->add_first_tokens()->set_token_id(1);
  const absl::Status status = Commit(ticket->ticket_id(), ticket->generation(), *commit);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::Not(::testing::HasSubstr(fmt::format("{:08x}", right))));
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(TicketsTest, ReleasedAndExpiredTicketsAreOver) {
  const auto prompt = Prompt(34, 200);
  const auto released = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(released.ok()) << released.status();
  Release(*released, released->generation());
  EXPECT_EQ(Commit(released->ticket_id(), released->generation()).code(), StatusCode::kNotFound);
  const auto expired = Reserve(prompt, Sampling(5), /*ttl_ms=*/200);
  ASSERT_TRUE(expired.ok()) << expired.status();
  EXPECT_TRUE(PagesComeBack());  // after two ttl
  EXPECT_EQ(Commit(expired->ticket_id(), expired->generation()).code(), StatusCode::kNotFound);
  EXPECT_EQ(Stream(expired->ticket_id(), expired->generation()).code(), StatusCode::kNotFound);
  EXPECT_EQ(RefusedByDecode("unknown"), 3);
}

// A prompt on a slow machine may take longer than the ten minutes of the default deadline. Its router asks for the
// time.
TEST_P(TicketsTest, TicketsOfLongPromptsLastLongerThanTheDefaultDeadline) {
  constexpr uint32_t kHalfAnHourMs = 1'800'000;
  const auto ticket = Reserve(Prompt(37, 200), Sampling(5), kHalfAnHourMs);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(ticket->ttl_ms(), kHalfAnHourMs);
  Release(*ticket, ticket->generation());
}

TEST_P(TicketsTest, TicketsOfOtherPagesAreCounted) {
  const auto prompt = Prompt(35, 200);
  auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ticket->set_page_ids(0, 1u << 30);
  v1::PrefillResponse response;
  EXPECT_EQ(Run(prompt, 5, *ticket, &response).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(RefusedByPrefill("invalid"), 1);
}

// What a worker of another version, or a damaged one, may say of the positions whose KV it sent.
TEST_P(TicketsTest, ShorterPromptsThatCannotBeAreRefused) {
  const auto prompt = Prompt(36, 200);
  const auto refused = [&](const std::vector<uint32_t>& only, bool with_kept, const std::string& why) {
    const auto ticket = Reserve(prompt, Sampling(5));
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    v1::CommitRequest request;
    request.set_num_tokens(200);
    v1::KeptPositions& positions = *request.mutable_only();
    for (const uint32_t bound : only) positions.add_bounds(bound);
    for (int32_t layer = 0; with_kept && layer < model_->config().num_layers; ++layer) {
      v1::KeptPositions& kept = *request.add_kept();
      kept.add_bounds(0);
      kept.add_bounds(200);
    }
    const absl::Status status = Commit(ticket->ticket_id(), ticket->generation(), std::move(request));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(why));
    EXPECT_TRUE(PagesComeBack());
  };
  refused({}, false, "end in front of position 0,");
  refused({0, 64, 128}, false, "only has 3 bounds");
  refused({128, 200, 0, 64}, false, "[0, 64)");
  refused({0, 64, 64, 200}, false, "[64, 200)");
  refused({0, 0, 64, 200}, false, "[0, 0)");
  refused({0, 64, 128, 199}, false, "end in front of position 199,");
  refused({0, 64, 128, 201}, false, "[128, 201)");
  refused({0, 64, 128, UINT32_MAX}, false, "[128, -1)");
  refused({0, 64, 128, 200}, true, "with kept tokens");
  refused({0, 64, 128, 200}, false, "commit of 200 tokens, 136 were reserved");
  EXPECT_EQ(Generate(prompt, Sampling(5)).tokens, Expected(prompt, Sampling(5)));
}

// ---- connections to decode workers

// Takes connections and never says a word, as a program that is stopped.
class SilentListener {
 public:
  SilentListener() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd_, 16), 0);
    socklen_t size = sizeof(address);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~SilentListener() { close(fd_); }
  const std::string& address() const { return address_; }

 private:
  const int fd_;
  std::string address_;
};

TEST_P(TicketsTest, DecodeWorkersThatHangDoNotDelayOthers) {
  if (carrier_ != "tcp") return;  // by shared memory alone nobody on another host is tried
  const SilentListener silent;
  v1::DecodeInfo info;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(decode_stub_->GetInfo(&context, {}, &info).ok());
  }
  struct Call {
    grpc::ClientContext context;
    v1::ConnectPeerRequest request;
    v1::ConnectPeerResponse response;
    std::promise<absl::Status> ended;
    std::future<absl::Status> status = ended.get_future();
  };
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 3; ++i) {
    Call& call = *calls.emplace_back(std::make_unique<Call>());
    v1::DecodeEndpoint& hung = *call.request.mutable_endpoint();
    hung = info.endpoint();
    hung.set_worker_id("hung-" + std::to_string(i));
    hung.set_ucx_address(silent.address());
    hung.set_host_id("elsewhere");
    prefill_stub_->async()->ConnectPeer(&call.context, &call.request, &call.response,
                                        [&call](const grpc::Status& s) { call.ended.set_value(FromGrpcStatus(s)); });
  }
  const absl::Status connected = Connect();
  EXPECT_TRUE(connected.ok()) << connected;
  for (const auto& call : calls) EXPECT_EQ(call->status.wait_for(0s), std::future_status::timeout);
  EXPECT_EQ(Generate(Prompt(37, 200), Sampling(5)).tokens, Expected(Prompt(37, 200), Sampling(5)));
  for (const auto& call : calls) EXPECT_FALSE(call->status.get().ok());
}

// Whoever says that he is a worker with another epoch does not end the connection to the one that lives.
TEST_P(TicketsTest, AnotherEpochDoesNotReplaceALivingPeer) {
  v1::DecodeInfo info;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(decode_stub_->GetInfo(&context, {}, &info).ok());
  }
  grpc::ClientContext context;
  v1::ConnectPeerRequest request;
  v1::ConnectPeerResponse response;
  *request.mutable_endpoint() = info.endpoint();
  request.mutable_endpoint()->set_epoch(info.epoch() + 1);
  ASSERT_TRUE(prefill_stub_->ConnectPeer(&context, request, &response).ok());
  EXPECT_NE(response.writer().channel_id(), connected_.writer().channel_id());
  EXPECT_EQ(Generate(Prompt(38, 200), Sampling(5)).tokens, Expected(Prompt(38, 200), Sampling(5)));
  EXPECT_TRUE(PagesComeBack());
}

INSTANTIATE_TEST_SUITE_P(Carriers, TicketsTest, ::testing::Values(Way{"shm", false, "shm"}, Way{"tcp", false, "tcp"}),
                         WayName);

}  // namespace
}  // namespace spl
