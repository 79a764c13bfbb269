// Turns of conversations over separate workers: the decode worker keeps each prompt and is sent only what is new, and
// the tokens are those of the same text without a conversation.
#include "tests/services/base/http_client.h"
#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/seeded_random.h"

namespace spl {
namespace {

using absl::StatusCode;

class ConversationsTest : public WorkersTest {
 protected:
  static constexpr int64_t kPage = kernels::kPageTokens;

  void SetUp() override {
    metrics_listen_ = "127.0.0.1:0";
    StartWorkers("none");
  }
  int64_t num_streams() const { return engine::KvShapeOf(model_->config()).num_streams(); }
  // Bytes of so many pages of every stream.
  uint64_t PageBytes(int64_t pages) const {
    return static_cast<uint64_t>(pages * num_streams()) * model_->page_bytes();
  }
  int64_t UsedByDecode() const { return decode_->pool().num_pages() - decode_->pool().num_free(); }

  // A turn that must succeed, with the tokens of the same prompt by itself. Returns the tokens that were held.
  uint32_t Turn(const std::vector<int32_t>& prompt, Result* out = nullptr) {
    const Result result = Generate(prompt, Sampling(8));
    EXPECT_TRUE(result.run.ok()) << result.run;
    EXPECT_TRUE(result.stream.ok()) << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(8)));
    const uint32_t held = result.receipt.held_tokens();
    EXPECT_EQ(result.receipt.bytes_moved(),
              PageBytes(engine::PagesFor(static_cast<int64_t>(prompt.size())) - held / kPage))
        << held << " of " << prompt.size() << " tokens held";
    if (out != nullptr) *out = result;
    return held;
  }
  static void Append(std::vector<int32_t>& text, const std::vector<int32_t>& more) {
    text.insert(text.end(), more.begin(), more.end());
  }
  // Value of a series of the decode worker; -1: it is not there.
  double DecodeMetric(const std::string& series) const {
    return spl::testing::MetricAt(decode_->metrics_address(), series);
  }
  bool MetricBecomes(const std::string& series, double value) {
    return test::Eventually([&] { return DecodeMetric(series) == value; });
  }
};

// A reference that remembers each conversation's last prompt says how many tokens are held, to the token.
TEST_P(ConversationsTest, RandomTurnsSendWhatIsNewAndAnswerAsTheWholeText) {
  std::mt19937 random = test::SeededRandom("conversations");
  EXPECT_EQ(carrier_, GetParam().carrier);
  std::map<std::string, std::vector<int32_t>> texts, sent;  // what is to be said next; the last prompt
  const int turns = GetParam().f32() ? 8 : 16;
  uint64_t held_in_all = 0;
  for (int turn = 0; turn < turns; ++turn) {
    session_ = random() % 3 == 0 ? "b" : "a";
    std::vector<int32_t>& text = texts[session_];
    if (const uint32_t change = random() % 6; change == 0 && !text.empty()) {
      text[random() % text.size()] ^= 1;  // an edit
    } else if (change == 1 && text.size() > 1) {
      text.resize(1 + random() % (text.size() - 1));
    }
    if (text.size() > 900) text.resize(300);
    // Also lengths at the edges of pages, and a prompt that is the last one again.
    const size_t more = random() % 4 == 0 ? (kPage - text.size() % kPage) % kPage : random() % 200;
    Append(text, Prompt(random(), text.empty() ? more + 1 : more));
    const std::vector<int32_t>& last = sent[session_];
    const auto equal = std::mismatch(text.begin(), text.end(), last.begin(), last.end()).first - text.begin();
    const int64_t whole = static_cast<int64_t>(last.size()) / kPage * kPage;
    const int64_t expected = std::min({int64_t{equal}, static_cast<int64_t>(text.size()) - 1, whole}) / kPage * kPage;
    Result result;
    EXPECT_EQ(Turn(text, &result), expected) << "turn " << turn << " of " << session_;
    held_in_all += static_cast<uint64_t>(expected);
    sent[session_] = text;
    if (random() % 3 > 0) Append(text, result.tokens);  // else the client leaves the answer out
  }
  int64_t kept = 0;
  for (const auto& [name, prompt] : sent) kept += static_cast<int64_t>(prompt.size()) / kPage * num_streams();
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == kept; })) << UsedByDecode() << " of " << kept;
  EXPECT_TRUE(MetricBecomes("splice_decode_session_pages", static_cast<double>(kept)));
  EXPECT_EQ(DecodeMetric("splice_decode_session_tokens_total"), static_cast<double>(held_in_all));
}

// A conversation that is begun anew: what was kept of it is of no use.
TEST_P(ConversationsTest, AShortPromptTakesThePlaceOfALongOne) {
  session_ = "talk";
  EXPECT_EQ(Turn(Prompt(1, 200)), 0u);
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == 3 * num_streams(); }));
  EXPECT_EQ(Turn(Prompt(2, 60)), 0u);
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == 0; })) << UsedByDecode();
}

// The rows that are sent are checked as before, and what was held is not lost with them.
TEST_P(ConversationsTest, DamagedRowsAreFoundBehindHeldOnes) {
  session_ = "talk";
  auto text = Prompt(1, 300);
  EXPECT_EQ(Turn(text), 0u);
  uint32_t seed = 2;
  for (const char* fault : {"decode.land", "prefill.commit", "prefill.push"}) {
    const FaultAction action{.kind = std::string(fault) == "prefill.push" ? FaultKind::kDrop : FaultKind::kCorrupt};
    ASSERT_TRUE(ArmFault(fault, action).ok()) << fault;
    auto damaged = text;
    Append(damaged, Prompt(seed++, 100));
    const Result result = Generate(damaged, Sampling(8));
    EXPECT_EQ(result.receipt.held_tokens(), 256u) << fault;
    EXPECT_EQ(result.stream.code(), StatusCode::kDataLoss) << fault << ": " << result.stream;
    DisarmAllFaults();
  }
  Append(text, Prompt(9, 100));
  EXPECT_EQ(Turn(text), 256u);
}

const std::vector<Way> kCarriers = {{"shm", false, "shm"},          {"tcp", false, "tcp", 2, 4},
                                    {"device", true, "device"},     {"tcp", true, "staged+tcp"},
                                    {"shm", true, "dma+shm", 2, 1}, {"tcp", false, "tcp"}};
INSTANTIATE_TEST_SUITE_P(Carriers, ConversationsTest, ::testing::ValuesIn(FewOf(4, kCarriers)), WayName);

// Rules that do not depend on how bytes move. The pool has 64 pages for each stream, half of them for conversations.
class KeepingTest : public ConversationsTest {
 protected:
  void SetUp() override {
    pool_bytes_ = 48 << 20;
    ConversationsTest::SetUp();
    ASSERT_EQ(decode_->pool().num_pages(), 64 * num_streams());
  }
};

TEST_P(KeepingTest, ReservationsTakeThePagesOfKeptPrompts) {
  session_ = "old";
  const auto old_text = Prompt(1, 1000);
  Turn(old_text);
  session_ = "new";
  Turn(Prompt(2, 500));
  EXPECT_EQ(UsedByDecode(), (15 + 7) * num_streams());
  v1::DecodeInfo info;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(decode_stub_->GetInfo(&context, {}, &info).ok());
  }
  EXPECT_EQ(info.free_pages(), static_cast<uint64_t>(decode_->pool().num_pages())) << "kept pages give way";
  // Without a conversation, and larger than what is free: the older one goes, of the caller's own two.
  session_.clear();
  const auto large = Prompt(3, 52 * kPage);
  const auto ticket = Reserve(large, Sampling(8));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_TRUE(MetricBecomes("splice_decode_sessions_dropped_total{reason=\"pages\"}", 1));
  // One that does not fit even without them is refused, and takes nothing away.
  EXPECT_EQ(Reserve(Prompt(4, 1000), Sampling(8)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(MetricBecomes("splice_decode_sessions", 1));
  Release(*ticket, ticket->generation());
  session_ = "new";
  EXPECT_GT(Turn(Prompt(2, 500)), 0u);
  session_ = "old";
  EXPECT_EQ(Turn(old_text), 0u) << "gone: everything is sent";
}

// The ticket owns what the answer to Reserve calls held, whatever is evicted before the rest arrives.
TEST_P(KeepingTest, HeldPagesOutliveTheirEviction) {
  session_ = "talk";
  auto text = Prompt(1, 700);
  Turn(text);
  Append(text, Prompt(2, 100));
  const auto ticket = Reserve(text, Sampling(8));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(ticket->held_tokens(), 640u);
  EXPECT_EQ(ticket->page_ids_size(), 3 * num_streams());
  session_ = "other";
  Turn(Prompt(3, 24 * kPage));
  EXPECT_TRUE(MetricBecomes("splice_decode_sessions_dropped_total{reason=\"evicted\"}", 1)) << "over the share";
  session_.clear();
  Turn(Prompt(4, 49 * kPage));  // writes all pages that are not the ticket's
  session_ = "talk";
  const Result result = GenerateOn(*ticket, text, Sampling(8));
  EXPECT_TRUE(result.run.ok()) << result.run;
  EXPECT_TRUE(result.stream.ok()) << result.stream;
  EXPECT_EQ(result.tokens, Expected(text, Sampling(8)));
}

TEST_P(KeepingTest, ANameIsOfItsCallerAndTextIsCompared) {
  session_ = "talk";
  const auto text = Prompt(1, 300);
  Turn(text);
  owner_ = 'x';
  EXPECT_EQ(Turn(text), 0u) << "another caller's conversation of that name";
  owner_ = 'o';
  EXPECT_EQ(Turn(text), 256u);
  session_.clear();
  EXPECT_EQ(Turn(text), 0u);
  session_ = "talk";
  auto edited = text;
  edited[150] ^= 1;
  EXPECT_EQ(Turn(edited), 128u) << "up to the change";
  EXPECT_EQ(Turn(text), 128u) << "the edited prompt took its place";
  // A ticket for other text than the worker gets: refused before anything is written.
  session_ = "talk";
  const auto ticket = Reserve(text, Sampling(8));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_EQ(ticket->held_tokens(), 256u);
  auto other = text;
  other[100] ^= 1;
  grpc::ClientContext context;
  v1::PrefillResponse response;
  const grpc::Status refused = prefill_stub_->Run(&context, RunRequest(other, Sampling(8), *ticket), &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << refused.error_message();
  Release(*ticket, ticket->generation());
}

// Only plain exact prompts take part: nothing of another method is kept, nor held for one.
TEST_P(KeepingTest, OtherMethodsSendEverything) {
  session_ = "talk";
  const auto text = Prompt(1, 600);
  reuse_.set_policy("tri-shape");
  reuse_.mutable_band()->set_band_window(256);
  EXPECT_EQ(Turn(text), 0u);
  EXPECT_EQ(Turn(text), 0u);
  EXPECT_EQ(UsedByDecode(), 0);
  reuse_.set_policy("exact");
  EXPECT_EQ(Turn(text), 0u) << "what was approximate was not kept";
  EXPECT_EQ(Turn(text), 576u);
  // The prefill worker goes on behind the exact rows that it keeps: the answer is not that of the method alone.
  reuse_.set_policy("tri-shape");
  const Result behind_exact = Generate(text, Sampling(8));
  EXPECT_TRUE(behind_exact.run.ok()) << behind_exact.run;
  EXPECT_TRUE(behind_exact.stream.ok()) << behind_exact.stream;
  EXPECT_EQ(behind_exact.receipt.session_tokens(), 576u);
  EXPECT_EQ(behind_exact.receipt.held_tokens(), 0u);
  EXPECT_EQ(behind_exact.receipt.bytes_moved(), PageBytes(engine::PagesFor(static_cast<int64_t>(text.size()))));
  // An answer over chosen tokens changes nothing of its prompt, and is not kept itself.
  reuse_ = {};
  reuse_.set_policy("exact");
  reuse_.set_decode("sparcas");
  EXPECT_EQ(Turn(text), 576u);
  reuse_.set_decode("dense");
  EXPECT_EQ(Turn(text), 576u);
}

// A prefill worker of an earlier version sends whole prompts.
TEST_P(KeepingTest, AnOlderWriterGetsEveryPage) {
  session_ = "talk";
  const auto text = Prompt(1, 300);
  Turn(text);
  connected_.mutable_writer()->clear_skips_held();
  EXPECT_EQ(Turn(text), 0u);
  connected_.mutable_writer()->set_skips_held(true);
  EXPECT_EQ(Turn(text), 256u);
}

// However a turn ends, its prompt was complete and checked.
TEST_P(KeepingTest, CancelledTurnsAndContinuationsKeepTheirPrompt) {
  session_ = "talk";
  const auto text = Prompt(1, 300);
  auto sampling = Sampling(1000);
  const auto ticket = Reserve(text, sampling);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  {
    grpc::ClientContext stream_context, run_context;
    v1::StreamRequest stream_request;
    stream_request.set_ticket_id(ticket->ticket_id());
    stream_request.set_generation(ticket->generation());
    auto reader = decode_stub_->Stream(&stream_context, stream_request);
    v1::PrefillResponse response;
    ASSERT_TRUE(prefill_stub_->Run(&run_context, RunRequest(text, sampling, *ticket), &response).ok());
    v1::StreamChunk chunk;
    ASSERT_TRUE(reader->Read(&chunk));
    stream_context.TryCancel();
    while (reader->Read(&chunk)) {
    }
  }
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == 4 * num_streams(); }));
  EXPECT_EQ(Turn(text), 256u);
  sampling = Sampling(4);
  sampling.set_n(3);
  const Result several = Generate(text, sampling);
  EXPECT_TRUE(several.stream.ok()) << several.stream;
  EXPECT_EQ(several.receipt.held_tokens(), 256u);
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == 4 * num_streams(); }));
  EXPECT_EQ(Turn(text), 256u);
}

// Sequences that grow take kept pages before one of them has to give way.
TEST_P(KeepingTest, RunningSequencesTakeKeptPagesFirst) {
  session_ = "talk";
  Turn(Prompt(1, 600));
  session_.clear();
  const auto text = Prompt(2, 53 * kPage);              // of 55 that are left
  const Result result = Generate(text, Sampling(300));  // five pages, two of which are free
  EXPECT_TRUE(result.stream.ok()) << result.stream;
  EXPECT_EQ(result.tokens.size(), 300u);
  EXPECT_EQ(DecodeMetric("splice_num_preemptions_total"), 0);
  EXPECT_TRUE(MetricBecomes("splice_decode_sessions_dropped_total{reason=\"pages\"}", 1));
  EXPECT_EQ(UsedByDecode(), 0);
}

TEST_P(KeepingTest, ABadConversationIsRefused) {
  session_ = std::string(257, 'x');
  EXPECT_EQ(Reserve(Prompt(1, 100), Sampling(4)).status().code(), StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(OneCarrier, KeepingTest, ::testing::Values(Way{"shm", false, "shm"}), WayName);

// One pool: the prefill worker keeps the conversation, and nothing is kept twice.
using OnePoolTest = ConversationsTest;

TEST_P(OnePoolTest, NothingIsKeptTwice) {
  session_ = "talk";
  auto text = Prompt(1, 300);
  const Result first = Generate(text, Sampling(8));
  ASSERT_TRUE(first.stream.ok()) << first.stream;
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == 4 * num_streams(); })) << UsedByDecode();
  Append(text, Prompt(2, 100));
  const Result second = Generate(text, Sampling(8));
  EXPECT_EQ(second.tokens, Expected(text, Sampling(8)));
  EXPECT_EQ(second.receipt.session_tokens(), 256u);
  EXPECT_EQ(second.receipt.held_tokens(), 0u);
  EXPECT_EQ(second.receipt.bytes_moved(), 0u);
  EXPECT_TRUE(test::Eventually([&] { return UsedByDecode() == 6 * num_streams(); })) << UsedByDecode();
}

INSTANTIATE_TEST_SUITE_P(InPlace, OnePoolTest, ::testing::Values(Way{"in place", false, "in place"}), WayName);

}  // namespace
}  // namespace spl
