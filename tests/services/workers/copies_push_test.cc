// Copies that are final are sent while the rest of their prompt is computed, on every way that KV may go.
#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"

namespace spl {
namespace {

// A prompt with a document in its own context, one that must be recovered, and a question. Its probe is the first pass,
// the rows that the probe chooses are the second one.
class CopiesPushTest : public WorkersTest {
 protected:
  static constexpr uint32_t kLayers = 12;

  void SetUp() override {
    WorkersTest::SetUp();
    prompt_ = Prompt(61, 30);
    std::vector<v1::TokenSegment> segments;
    for (const uint32_t seed : {62u, 63u}) {
      auto text = Prompt(seed + 10, 20);  // instructions: short enough not to count as other text
      const auto document = Prompt(seed, 500);
      text.insert(text.end(), document.begin(), document.end());
      segments_ = {SegmentAt(20)};
      reuse_.set_policy("exact");
      ASSERT_TRUE(Generate(text, Sampling(1)).run.ok());
      segments.push_back(SegmentAt(static_cast<uint32_t>(prompt_.size())));
      prompt_.insert(prompt_.end(), document.begin(), document.end());
    }
    const auto question = Prompt(64, 30);
    prompt_.insert(prompt_.end(), question.begin(), question.end());
    segments_ = segments;
    reuse_.set_policy("sparsex");
    reuse_.mutable_sparsex()->set_probe_layers(5);
    reuse_.mutable_sparsex()->set_recompute_max(8);
    ASSERT_TRUE(ArmFault("prefill.push", *ParseFaultAction("drop@1000000")).ok());  // only counts
  }

  static v1::TokenSegment SegmentAt(uint32_t begin) {
    v1::TokenSegment segment;
    segment.set_namespace_key(std::string(32, 'd'));
    segment.set_begin(begin);
    segment.set_end(begin + 500);
    return segment;
  }

  // Answers once the engine is about to begin the second pass, and is held there.
  static void HoldSecondPass() {
    ASSERT_TRUE(ArmFault("engine.prefill.step", *ParseFaultAction("delay_until(copies were sent)@2")).ok());
  }

  std::vector<int32_t> prompt_;
};

TEST_P(CopiesPushTest, FinalCopiesAreSentBeforeTheChosenRowsAreComputed) {
  const Result plain = Generate(prompt_, Sampling(8));
  ASSERT_TRUE(plain.run.ok() && plain.stream.ok()) << plain.run << plain.stream;
  EXPECT_EQ(plain.receipt.copies().same_context(), 500u);
  EXPECT_EQ(plain.receipt.copies().isolated() + plain.receipt.copies().foreign(), 500u);
  EXPECT_GT(plain.receipt.recomputed_tokens(), 0u);
  ASSERT_TRUE(ArmFault("prefill.push", *ParseFaultAction("drop@1000000")).ok());  // counts from 0
  HoldSecondPass();
  auto held = std::async(std::launch::async, [&] { return Generate(prompt_, Sampling(8)); });
  // The copy in its own context, and pages of the other one without a chosen row.
  EXPECT_TRUE(WaitForFaultHits("prefill.push", 2 * kLayers, 20'000));
  EXPECT_TRUE(WaitForFaultHits("engine.prefill.step", 2, 20'000));
  EXPECT_EQ(FaultHits("prefill.push"), 2 * kLayers) << "before any row was computed that is sent";
  FireFaultEvent("copies were sent");
  const Result result = held.get();
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_EQ(result.tokens, plain.tokens);
  EXPECT_EQ(result.receipt.bytes_moved(), plain.receipt.bytes_moved());
  EXPECT_GT(FaultHits("prefill.push"), 2 * kLayers);
}

// The push thread is held at the first early pages, until the prompt has been computed and its commit waits.
TEST_P(CopiesPushTest, WhatWasNotSentEarlyIsSentWithTheCommit) {
  const Result plain = Generate(prompt_, Sampling(8));
  ASSERT_TRUE(plain.run.ok() && plain.stream.ok()) << plain.run << plain.stream;
  const auto ticket = Reserve(prompt_, Sampling(8));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_TRUE(ArmFault("prefill.push", *ParseFaultAction("delay_until(all was computed)@1")).ok());
  const auto* const device = dynamic_cast<const test::FakeDeviceBackend*>(&model_->backend());
  const int before = device != nullptr ? device->num_sends.load() : 0;
  grpc::ClientContext run_context;
  v1::PrefillResponse response;
  const grpc::Status run = prefill_stub_->Run(&run_context, RunRequest(prompt_, Sampling(8), *ticket), &response);
  EXPECT_EQ(FaultHits("prefill.push"), 1u);
  FireFaultEvent("all was computed");
  ASSERT_TRUE(run.ok()) << run.error_message();
  const Result late = StreamBehind(*ticket, response);
  EXPECT_TRUE(late.stream.ok()) << late.stream;
  EXPECT_EQ(late.tokens, plain.tokens);
  // Layers that wait go together where the device waits for them: first one, or some, of those that were early, then
  // those that were due, then the rest.
  if (device == nullptr || std::string_view(GetParam().kv_transport) != "device") return;
  EXPECT_GE(FaultHits("prefill.push"), 3 * kLayers);
  EXPECT_LE(device->num_sends - before, 6);
  EXPECT_GT(device->num_sends, before);
}

// A prompt that ends when some of its pages have been sent gives its ticket back like any other.
TEST_P(CopiesPushTest, APromptThatIsCancelledBehindItsCopiesFreesItsPages) {
  const auto ticket = Reserve(prompt_, Sampling(8));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  HoldSecondPass();
  grpc::ClientContext context;
  auto run = std::async(std::launch::async, [&] {
    v1::PrefillResponse response;
    return FromGrpcStatus(prefill_stub_->Run(&context, RunRequest(prompt_, Sampling(8), *ticket), &response));
  });
  EXPECT_TRUE(WaitForFaultHits("prefill.push", 2 * kLayers, 20'000));
  context.TryCancel();
  FireFaultEvent("copies were sent");
  EXPECT_EQ(run.get().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(test::Eventually([&] { return decode_->pool().num_free() == decode_->pool().num_pages(); }));
  const Result result = Generate(prompt_, Sampling(8));
  EXPECT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
}

INSTANTIATE_TEST_SUITE_P(Carriers, CopiesPushTest,
                         testing::ValuesIn(FewOf(3, {{"shm", false, "shm"},
                                                     {"tcp", false, "tcp"},
                                                     {"device", true, "device"},
                                                     {"shm", true, "dma+shm"},
                                                     {"tcp", true, "staged+tcp"},
                                                     {"shm", false, "shm", 2, 1}})),
                         WayName);

}  // namespace
}  // namespace spl
