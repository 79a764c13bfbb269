// A prefill and a decode worker as the router drives them: whatever carrier moves the KV and whatever goes wrong on the
// way, a token is never wrong and no page is lost.
#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"

namespace spl {
namespace {

// What depends on how KV goes from one pool to the other.
class TransferTest : public WorkersTest {};

TEST_P(TransferTest, TokensEqualThePlainModelForEveryPageEdge) {
  EXPECT_EQ(carrier_, GetParam().carrier);
  for (size_t length : {1, 63, 64, 65, 255, 256, 257, 600}) {
    const auto prompt = Prompt(static_cast<uint32_t>(length), length);
    const Result result = Generate(prompt, Sampling(12));
    ASSERT_TRUE(result.run.ok()) << result.run;
    ASSERT_TRUE(result.stream.ok()) << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(12))) << length;
    EXPECT_EQ(result.receipt.computed_tokens(), length);
    const uint64_t bytes =
        engine::PagesForTokens(model_->config(), static_cast<int64_t>(length)) * model_->page_bytes();
    EXPECT_EQ(result.receipt.bytes_moved(), GetParam().in_place() ? 0 : bytes);
    // What was sent, and where it ends with a page the one for the next position.
    EXPECT_GE(result.kv_bytes, bytes);
    EXPECT_LE(result.kv_bytes,
              engine::PagesForTokens(model_->config(), static_cast<int64_t>(length) + 1) * model_->page_bytes());
  }
  EXPECT_TRUE(PagesComeBack());
}

// KV of a span comes layer by layer, all of its pages at once.
TEST_P(TransferTest, ColdPromptsGiveTheTokensOfThePlainGenerator) {
  const auto prompt = Prompt(77, 900);
  for (const char* policy : {"loopserve", "minference", "tri-shape"}) {
    reuse_.set_policy(policy);
    // Ranks add up in another order, which may turn a choice of lines: there all are taken.
    reuse_.mutable_lines()->set_line_alpha(GetParam().f32() ? 1 : 0.9);
    reuse_.mutable_lines()->set_line_min_span(512);
    reuse_.mutable_lines()->set_line_slashes(GetParam().f32() ? 8192 : 64);
    reuse_.mutable_band()->set_band_window(256);
    const Result result = Generate(prompt, Sampling(8));
    ASSERT_TRUE(result.run.ok()) << policy << ": " << result.run;
    ASSERT_TRUE(result.stream.ok()) << policy << ": " << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(8))) << policy;
    EXPECT_EQ(result.receipt.reuse_policy(), policy);
    EXPECT_FALSE(result.receipt.exact());
    EXPECT_EQ(result.receipt.has_lines(), std::string(policy) != "tri-shape");
    if (!result.receipt.has_lines()) continue;
    const v1::LineReceipt& lines = result.receipt.lines();
    EXPECT_EQ(lines.heads(), std::string(policy) == "loopserve" ? 40u : 48u);
    EXPECT_LE(lines.dense_heads(), lines.heads());
    EXPECT_GT(lines.cells(), 0);
    EXPECT_LE(lines.cells(), 1);
    EXPECT_GT(lines.held_out(), 0.5);
    EXPECT_LE(lines.held_out_lowest(), lines.held_out());
    EXPECT_GE(lines.covered(), std::string(policy) == "loopserve" ? 0.899 : 0);
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(TransferTest, ConcurrentRequestsDoNotMix) {
  std::vector<std::thread> threads;
  std::vector<Result> results(12);
  for (size_t i = 0; i < results.size(); ++i)
    threads.emplace_back(
        [&, i] { results[i] = Generate(Prompt(static_cast<uint32_t>(i), 50 + 37 * i), Sampling(20)); });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(Prompt(static_cast<uint32_t>(i), 50 + 37 * i), Sampling(20))) << i;
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(TransferTest, DamagedKvIsFoundBeforeItIsUsed) {
  if (GetParam().in_place()) GTEST_SKIP() << "nothing is moved that could be damaged";
  uint32_t seed = 20;  // another prompt each time: the pages may still hold the right bytes of the one before
  for (const char* fault : {"decode.land", "prefill.commit", "prefill.push"}) {
    FaultAction action{.kind = std::string(fault) == "prefill.push" ? FaultKind::kDrop : FaultKind::kCorrupt};
    ASSERT_TRUE(ArmFault(fault, action).ok()) << fault;
    const Result result = Generate(Prompt(seed++, 200), Sampling(10));
    EXPECT_TRUE(result.run.ok()) << fault << result.run;  // the first token is right: it never left the prefill worker
    EXPECT_EQ(result.stream.code(), absl::StatusCode::kDataLoss) << fault << ": " << result.stream;
    EXPECT_EQ(result.tokens.size(), 1u) << fault;
    DisarmAllFaults();
    EXPECT_TRUE(PagesComeBack()) << fault;
  }
  const Result after = Generate(Prompt(9, 200), Sampling(10));
  EXPECT_EQ(after.tokens, Expected(Prompt(9, 200), Sampling(10)));
}

TEST_P(WorkersTest, CancellingThePrefillFreesBothSidesWithin100Ms) {
  const auto prompt = Prompt(3, 2000);
  auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext context;
  v1::PrefillResponse response;
  ASSERT_TRUE(ArmFault("prefill.push", {.kind = FaultKind::kNone}).ok());  // only counts: the first layer was pushed
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  grpc::Status status;
  const auto request = RunRequest(prompt, Sampling(10), *ticket);
  prefill_stub_->async()->Run(&context, &request, &response, [&](const grpc::Status& s) {
    std::lock_guard lock(mutex);
    status = s;
    done = true;
    changed.notify_all();
  });
  ASSERT_TRUE(WaitForFaultHits("prefill.push", 1, 20'000));
  const auto cancelled = std::chrono::steady_clock::now();
  context.TryCancel();
  EXPECT_TRUE(PagesComeBack());
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - cancelled);
  std::printf("%s: pages back after %lld ms\n", GetParam().carrier, static_cast<long long>(took.count()));
  // Cancelling takes effect between two layers, and f32 products take several times as long.
  EXPECT_LT(took, GetParam().f32() ? 400ms : 100ms);
  std::unique_lock lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, 10s, [&] { return done; }));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
}

TEST_P(WorkersTest, CancellingTheStreamFreesThePages) {
  const auto prompt = Prompt(4, 100);
  auto ticket = Reserve(prompt, Sampling(5000));
  ASSERT_TRUE(ticket.ok());
  grpc::ClientContext stream_context, run_context;
  v1::StreamRequest stream_request;
  stream_request.set_ticket_id(ticket->ticket_id());
  stream_request.set_generation(ticket->generation());
  auto reader = decode_stub_->Stream(&stream_context, stream_request);
  v1::PrefillResponse response;
  ASSERT_TRUE(prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(5000), *ticket), &response).ok());
  v1::StreamChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  const auto cancelled = std::chrono::steady_clock::now();
  stream_context.TryCancel();
  EXPECT_TRUE(PagesComeBack());
  EXPECT_LT(std::chrono::steady_clock::now() - cancelled, 100ms);
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_P(WorkersTest, AnExpiredTicketIsRefusedAndItsPagesReturn) {
  const auto prompt = Prompt(5, 100);
  auto ticket = Reserve(prompt, Sampling(5), /*ttl_ms=*/300);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(PagesComeBack());  // expiry plus one ttl of quarantine
  grpc::ClientContext context;
  v1::CommitRequest commit;
  commit.set_ticket_id(ticket->ticket_id());
  commit.set_generation(ticket->generation());
  v1::CommitResponse response;
  EXPECT_EQ(decode_stub_->Commit(&context, commit, &response).error_code(), grpc::StatusCode::NOT_FOUND);
  // A prefill worker does not write after the lease it was given.
  auto late = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(late.ok());
  late->set_ttl_ms(1);
  grpc::ClientContext run_context;
  v1::PrefillResponse run_response;
  (void)prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(5), *late), &run_response);
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(WorkersTest, ReleasingATicketDependsOnItsWriter) {
  const auto prompt = Prompt(6, 100);
  auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok());
  const auto release = [&](bool quiet) {
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    request.set_ticket_id(ticket->ticket_id());
    request.set_generation(ticket->generation());
    request.set_writer_quiet(quiet);
    v1::ReleaseResponse response;
    EXPECT_TRUE(decode_stub_->Release(&context, request, &response).ok());
  };
  release(false);  // somebody may still write: the pages must not be given to others
  EXPECT_LT(decode_->pool().num_free(), decode_->pool().num_pages());
  release(true);
  EXPECT_EQ(decode_->pool().num_free(), decode_->pool().num_pages());
  release(true);  // idempotent
}

TEST_P(WorkersTest, TicketsAreChecked) {
  const auto prompt = Prompt(7, 100);
  auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok());
  const auto run = [&](const v1::Ticket& t) {
    grpc::ClientContext context;
    v1::PrefillResponse response;
    return FromGrpcStatus(prefill_stub_->Run(&context, RunRequest(prompt, Sampling(5), t), &response));
  };
  v1::Ticket wrong_page = *ticket, short_ticket = *ticket, wrong_epoch = *ticket;
  wrong_page.set_page_ids(3, 1u << 30);
  short_ticket.mutable_page_ids()->RemoveLast();
  wrong_epoch.set_epoch(ticket->epoch() + 1);
  EXPECT_EQ(run(wrong_page).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run(short_ticket).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run(wrong_epoch).code(), absl::StatusCode::kUnavailable);
}

// A choice of tokens keeps pages beside the KV. Where only the KV has room the request is served, attends to
// everything, and its receipt says so.
TEST_P(WorkersTest, AChoiceThatFindsNoRoomDecodesDensely) {
  const auto prompt = Prompt(61, 300);
  const std::vector<int32_t> dense = Expected(prompt, Sampling(20));
  reuse_.set_decode("sparcas");
  reuse_.mutable_decoding()->set_decode_budget(64);
  const Result chosen = Generate(prompt, Sampling(20));
  ASSERT_TRUE(chosen.stream.ok()) << chosen.run << " " << chosen.stream;
  EXPECT_EQ(chosen.receipt.decode_selector(), "sparcas");
  EXPECT_NE(chosen.tokens, dense);
  ASSERT_TRUE(PagesComeBack());

  // Room for the prompt, and for the page that its first step may need.
  const auto rows_of_pages = [&] {
    const engine::KvShape shape{model_->config().num_layers, model_->config().num_kv_heads};
    return decode_->pool().num_free() / shape.num_streams();
  };
  const int64_t needed = (300 + kernels::kPageTokens - 1) / kernels::kPageTokens + 1;
  reuse_.set_decode("dense");
  std::vector<v1::Ticket> others;
  while (rows_of_pages() > needed) {
    const int64_t pages = std::min<int64_t>(rows_of_pages() - needed, 16);
    const auto ticket = Reserve(Prompt(1, static_cast<size_t>(pages * kernels::kPageTokens)), Sampling(5));
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    others.push_back(*ticket);
  }
  reuse_.set_decode("sparcas");
  const Result served = Generate(prompt, Sampling(20));
  EXPECT_TRUE(served.stream.ok()) << served.run << " " << served.stream;
  EXPECT_EQ(served.receipt.decode_selector(), "dense");
  EXPECT_EQ(served.tokens, dense);
  for (const v1::Ticket& ticket : others) Release(ticket, ticket.generation());
  EXPECT_TRUE(PagesComeBack());
}

// KV that a probe wrote is not sent: with every row chosen behind it, the tokens are those of a plain prefill.
TEST_P(WorkersTest, AProbeChoosesRowsAndTheReceiptNamesIt) {
  std::vector<int32_t> prompt = Prompt(71, 20);
  std::vector<v1::TokenSegment> segments;
  for (const uint32_t seed : {72u, 73u}) {
    const auto text = Prompt(seed, 300);
    v1::TokenSegment segment;
    segment.set_namespace_key(std::string(32, 'd'));
    segment.set_end(300);
    segments_ = {segment};
    reuse_.set_policy("exact");
    ASSERT_TRUE(Generate(text, Sampling(1)).run.ok());
    segment.set_begin(static_cast<uint32_t>(prompt.size()));
    segment.set_end(segment.begin() + 300);
    segments.push_back(segment);
    prompt.insert(prompt.end(), text.begin(), text.end());
  }
  const auto question = Prompt(74, 30);
  prompt.insert(prompt.end(), question.begin(), question.end());
  const std::vector<int32_t> exact = Expected(prompt, Sampling(12));
  segments_ = segments;
  reuse_.set_policy("sparsex");
  v1::SparseXOptions& options = *reuse_.mutable_sparsex();
  options.set_recompute_share(1);
  options.set_recompute_min(4096);
  for (const uint32_t layers : {0u, 5u, 12u}) {
    options.set_probe_layers(layers);
    const Result result = Generate(prompt, Sampling(12));
    ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.tokens, exact) << layers;
    EXPECT_EQ(result.receipt.recomputed_tokens(), 600u);
    EXPECT_EQ(result.receipt.copies().isolated(), 600u);
    EXPECT_EQ(result.receipt.copies().has_probe_layers(), layers > 0);
    EXPECT_EQ(result.receipt.copies().probe_layers(), layers);
  }
  options.set_probe_layers(13);
  const Result refused = Generate(prompt, Sampling(12));
  EXPECT_EQ(refused.run.code(), absl::StatusCode::kInvalidArgument) << refused.run;
}

// The router opens the stream beside the prefill; on a busy machine a short answer is complete before it gets there.
TEST_P(WorkersTest, AReaderThatComesBehindTheLastTokenGetsAllOfThem) {
  const auto prompt = Prompt(81, 90);
  const auto ticket = Reserve(prompt, Sampling(4));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext run_context;
  v1::PrefillResponse response;
  const grpc::Status run = prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(4), *ticket), &response);
  ASSERT_TRUE(run.ok()) << run.error_message();
  ASSERT_TRUE(test::Eventually([&] {
    grpc::ClientContext context;
    v1::DecodeInfo info;
    return decode_stub_->GetInfo(&context, {}, &info).ok() && info.reserved_tickets() + info.running_sequences() == 0;
  })) << "the sequence ends";
  const Result late = StreamBehind(*ticket, response);
  EXPECT_TRUE(late.stream.ok()) << late.stream;
  EXPECT_EQ(late.tokens, Expected(prompt, Sampling(4)));
}

TEST_P(WorkersTest, TooLargeAndTooManyAreDifferentErrors) {
  EXPECT_EQ(Reserve(Prompt(1, 16384), Sampling(1)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Reserve(Prompt(1, 12000), Sampling(1)).status().code(), absl::StatusCode::kInvalidArgument);  // > pool
  auto big = Reserve(Prompt(1, 8000), Sampling(1));
  ASSERT_TRUE(big.ok()) << big.status();
  EXPECT_EQ(Reserve(Prompt(1, 8000), Sampling(1)).status().code(), absl::StatusCode::kResourceExhausted);
}

const std::vector<Way> kCarriers = {{"shm", false, "shm"},
                                    {"device", true, "device"},
                                    {"tcp", false, "tcp"},
                                    {"tcp", true, "staged+tcp"},
                                    {"shm", true, "dma+shm"}};

INSTANTIATE_TEST_SUITE_P(Carriers, WorkersTest, testing::ValuesIn(FewOf(2, kCarriers)), WayName);
INSTANTIATE_TEST_SUITE_P(Carriers, TransferTest, testing::ValuesIn(FewOf(3, kCarriers)), WayName);

INSTANTIATE_TEST_SUITE_P(OnePool, TransferTest,
                         testing::Values(Way{"in place", false, "in place"}, Way{"in place", true, "in place"}),
                         WayName);

// Every page comes to where the other side looks for it, however many parts the two pools have.
INSTANTIATE_TEST_SUITE_P(TensorParallel, TransferTest,
                         testing::ValuesIn(FewOf(2, {{"tcp", false, "tcp", 4, 2},
                                                     {"device", true, "device", 2, 4},
                                                     {"shm", true, "dma+shm", 2, 1},
                                                     {"tcp", true, "staged+tcp", 1, 2},
                                                     {"shm", false, "shm", 2, 1},
                                                     {"shm", false, "shm", 1, 2},
                                                     {"device", true, "device", 2, 1},
                                                     {"device", true, "device", 1, 2}})),
                         WayName);

}  // namespace
}  // namespace spl
