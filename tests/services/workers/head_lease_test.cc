// Leases on what decode workers leave out of local heads: their budget and time, and restoring under them between two
// workers, as they come and as they break.
#include "services/prefill_work/head_lease_table.h"
#include "tests/services/workers/workers_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/restored_reference.h"

namespace spl {
namespace {

// ---- the table

struct LeaseFixture {
  LeaseFixture() {
    kv.Reserve(1000).IgnoreError();
    kv.set_num_tokens(1000);
  }
  std::shared_ptr<const prefill::LeasedHeads> Share(std::vector<int32_t> restored = {}) const {
    return prefill::LeasedHeads::Share(kv, classes, restored);
  }
  FakeClock clock;
  std::vector<std::byte> memory = std::vector<std::byte>(200 * 2 * 64 * 8 * 2);
  engine::PagePool pool{kernels::KvPoolView{memory.data(), kernels::DType::kBF16, 8, 200}};
  engine::SequenceKv kv{pool, engine::KvShape{2, 2}};
  // Holes of 1000 tokens: [1, 14) and [1, 11).
  engine::StreamClasses classes{{{}, {false, 64, 4}, {false, 256, 64}, {}}};
};

TEST(HeadLeaseTable, KeepsWhatTheHolesLeaveOut) {
  LeaseFixture f;
  auto both = f.Share();
  ASSERT_EQ(both->heads().size(), 2u);
  EXPECT_EQ(both->heads()[0].stream, 1);
  EXPECT_EQ(both->heads()[0].first_page, 1);
  EXPECT_EQ(both->heads()[0].pages.size(), 13u);
  EXPECT_EQ(both->heads()[1].pages.size(), 10u);
  EXPECT_EQ(both->num_bytes(), 23 * f.pool.view().page_bytes());
  EXPECT_EQ(both->Find(2), &both->heads()[1]);
  EXPECT_EQ(both->Find(0), nullptr);
  EXPECT_EQ(f.Share({1})->heads().size(), 1u) << "a restored head was sent";
  EXPECT_EQ(f.Share({1, 2}), nullptr);
  const int32_t page = both->heads()[0].pages[0];
  EXPECT_EQ(f.pool.owners(page), 2);
  both.reset();
  EXPECT_EQ(f.pool.owners(page), 1);
}

TEST(HeadLeaseTable, GivesNoMoreThanItsBudget) {
  LeaseFixture f;
  const uint64_t bytes = f.Share()->num_bytes();
  prefill::HeadLeaseTable leases({.max_bytes = 2 * bytes}, f.clock);
  const auto first = leases.Give(f.Share()), second = leases.Give(f.Share());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(leases.Give(f.Share()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(leases.stats().num_denied, 1u);
  EXPECT_EQ(leases.stats().bytes, 2 * bytes);
  leases.Release(*first);
  leases.Release(*first);
  EXPECT_EQ(leases.stats().bytes, bytes);
  EXPECT_TRUE(leases.Give(f.Share()).ok());
  EXPECT_TRUE(leases.ReclaimOne());
  EXPECT_TRUE(leases.ReclaimOne());
  EXPECT_FALSE(leases.ReclaimOne());
  EXPECT_EQ(leases.stats().num_reclaimed, 2u);
  EXPECT_EQ(leases.stats().bytes, 0u);
  prefill::HeadLeaseTable none({.max_bytes = 0}, f.clock);
  EXPECT_EQ(none.Give(f.Share()).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(HeadLeaseTable, EndsWithItsTimeUnlessItIsRenewed) {
  LeaseFixture f;
  prefill::HeadLeaseTable leases({.ttl = std::chrono::seconds(10)}, f.clock);
  const RandomId kept = *leases.Give(f.Share()), left = *leases.Give(f.Share({1}));
  const int32_t page = f.Share()->heads()[0].pages[0];
  f.clock.Advance(std::chrono::seconds(9));
  EXPECT_FALSE(leases.Expire());
  EXPECT_TRUE(leases.Renew(kept).ok());
  f.clock.Advance(std::chrono::seconds(2));
  EXPECT_EQ(leases.Renew(left).status().code(), absl::StatusCode::kNotFound) << "before anybody has looked";
  EXPECT_TRUE(leases.Expire());
  EXPECT_EQ(leases.stats().num_expired, 1u);
  EXPECT_EQ(leases.stats().num_leases, 1u);
  // Who reads the pages keeps them beyond the lease.
  auto reading = *leases.Renew(kept);
  f.clock.Advance(std::chrono::seconds(11));
  EXPECT_TRUE(leases.Expire());
  EXPECT_EQ(f.pool.owners(page), 2);
  reading.reset();
  EXPECT_EQ(f.pool.owners(page), 1);
  EXPECT_EQ(leases.Renew(RandomId::Make()).status().code(), absl::StatusCode::kNotFound);
  leases.Close();
  EXPECT_EQ(leases.Give(f.Share()).status().code(), absl::StatusCode::kUnavailable);
}

// ---- two workers

class HeadLeaseTest : public WorkersTest {
 protected:
  void SetUp() override {
    reuse_.set_policy("redknot");
    reuse_.mutable_heads()->set_ffn_mass(1);
    reuse_.mutable_heads()->set_restore_threshold(1);  // none during prefill
    reuse_.mutable_heads()->set_restore_share(1);
    reuse_.mutable_heads()->set_decode_restore(true);
    reuse_.mutable_heads()->set_decode_restore_threshold(-1);
    reuse_.mutable_heads()->set_decode_restore_interval(8);
    map_ = testing::TempDir() + "/head_lease_map_" + std::to_string(::getpid()) + ".json";
    const engine::HeadPreset preset{.name = "test", .global_share = 0.2, .window = 96, .sinks = 16};
    std::ofstream(map_) << engine::HeadClassMap::Spread(12, 4, preset).ToJson();
  }
  void TearDown() override {
    WorkersTest::TearDown();
    on_chunk_ = nullptr;
  }
  bool OnHost() const { return !GetParam().device; }
  uint32_t NumLocal() const {
    const auto classes = engine::ServedClasses(*model_->head_classes());
    return static_cast<uint32_t>(
        std::count_if(classes->begin(), classes->end(), [](const engine::HeadClass& h) { return !h.is_global; }));
  }
  // Sums of several ranks are not the reference's bit by bit.
  static bool OneRank() { return GetParam().prefill_ranks == 1 && GetParam().decode_ranks == 1; }
  // Drawn tokens turn with small differences that the most likely ones hide: with several ranks that is as it should
  // be.
  static v1::SamplingParams Sampled(uint32_t max_tokens) {
    v1::SamplingParams sampling = Sampling(max_tokens);
    if (!OneRank()) return sampling;
    sampling.set_temperature(2);
    sampling.set_seed(5);
    return sampling;
  }
  std::vector<int32_t> Reference(const std::vector<int32_t>& prompt, int64_t first_token, uint32_t num_tokens) const {
    return test::RestoredReference(model_, wire::FromProto(reuse_), prompt, first_token,
                                   wire::FromProto(Sampled(num_tokens)));
  }
  static constexpr uint32_t kTokens = 120;

  std::string map_;
};

TEST_P(HeadLeaseTest, AFetchedHeadSeesEverythingFromThenOn) {
  StartWorkers(map_);
  const auto prompt = Prompt(61, 900);
  if (!OnHost()) {
    // Refused before anything runs, and says what.
    const absl::Status refused = Reserve(prompt, Sampling(kTokens)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(refused.ToString(), testing::HasSubstr("decode_restore"));
    return;
  }
  const Result result = Generate(prompt, Sampled(kTokens));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_TRUE(result.receipt.has_decode_restore());
  EXPECT_EQ(result.receipt.head_classes().restored_heads(), 0u);
  EXPECT_EQ(result.restores.restored_heads(), NumLocal());
  EXPECT_EQ(result.restores.missed_lease() + result.restores.missed_pages() + result.restores.missed_fetch(), 0u);
  ASSERT_TRUE(result.restores.has_first_token());
  EXPECT_GT(result.restores.first_token(), 8u);
  EXPECT_EQ(result.tokens, Reference(prompt, result.restores.first_token(), kTokens)) << result.restores.first_token();
  // When the pages come is not up to the test; with half of the answer left they must tell.
  if (OneRank() && result.restores.first_token() < kTokens / 2) {
    EXPECT_NE(result.tokens, Reference(prompt, -1, kTokens)) << result.restores.first_token();
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadLeaseTest, NothingIsRestoredWhereNothingIsMissed) {
  if (!OnHost()) return;
  StartWorkers(map_);
  reuse_.mutable_heads()->set_decode_restore_threshold(1);
  const auto prompt = Prompt(62, 700);
  const Result result = Generate(prompt, Sampled(60));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_TRUE(result.receipt.has_decode_restore());
  EXPECT_EQ(result.restores.restored_heads(), 0u);
  EXPECT_EQ(result.tokens, Reference(prompt, -1, 60));
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadLeaseTest, WithoutRoomForALeaseTheRequestGoesOn) {
  if (!OnHost()) return;
  head_leases_.max_bytes = 1 << 20;
  StartWorkers(map_);
  const auto prompt = Prompt(63, 700);
  const Result result = Generate(prompt, Sampled(40));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_FALSE(result.receipt.has_decode_restore());
  EXPECT_EQ(result.restores.restored_heads(), 0u);
  EXPECT_EQ(result.tokens, Reference(prompt, -1, 40));
  EXPECT_TRUE(PagesComeBack());
}

// A lease that ends early, a fetch that is damaged or fails on the way: the answer is that of a local sequence.
TEST_P(HeadLeaseTest, WhatBreaksIsAMissAndChangesNoToken) {
  if (!OnHost()) return;
  head_fetches_.fetch_timeout = 2s;
  StartWorkers(map_);
  const auto prompt = Prompt(61, 900);
  const std::vector<int32_t> plain = Reference(prompt, -1, kTokens);
  for (const auto kind : {FaultKind::kCorrupt, FaultKind::kError}) {
    FaultAction action{.kind = kind};
    ASSERT_TRUE(ArmFault("prefill.fetch_heads", action).ok());
    const Result result = Generate(prompt, Sampled(kTokens));
    DisarmAllFaults();
    ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.tokens, plain);
    EXPECT_EQ(result.restores.missed_fetch(), NumLocal());
    EXPECT_EQ(result.restores.restored_heads(), 0u);
    EXPECT_TRUE(PagesComeBack(10s));
  }
}

// Its pages are for nobody until it is proved that the fetch is over, whatever the clock says.
TEST_P(HeadLeaseTest, PagesOfAFetchThatHangsWaitForAProof) {
  if (!OnHost() || GetParam().f32()) return;
  static int runs = 0;
  const std::string event = "head_lease_test.go." + std::to_string(++runs);
  head_fetches_.fetch_timeout = 500ms;
  StartWorkers(map_);
  const auto prompt = Prompt(61, 900);
  ASSERT_TRUE(ArmFault("prefill.fetch_heads", {.kind = FaultKind::kDelayUntil, .event = event}).ok());
  const Result result = Generate(prompt, Sampled(kTokens));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_EQ(result.tokens, Reference(prompt, -1, kTokens));
  const auto free = [&] { return decode_->pool().num_free() == decode_->pool().num_pages(); };
  if (carrier_ == "tcp") {
    EXPECT_TRUE(test::Eventually(free)) << "the connection is torn down";
  } else {
    EXPECT_FALSE(test::Eventually(free, 4 * head_fetches_.fetch_timeout)) << "the memory is mapped there";
  }
  FireFaultEvent(event);
  EXPECT_TRUE(PagesComeBack(10s));
}

TEST_P(HeadLeaseTest, AnExpiredLeaseIsAMiss) {
  if (!OnHost()) return;
  head_leases_.ttl = 1ms;  // over before anybody could renew it
  StartWorkers(map_);
  const auto prompt = Prompt(61, 900);
  const Result result = Generate(prompt, Sampled(kTokens));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_TRUE(result.receipt.has_decode_restore());
  EXPECT_EQ(result.tokens, Reference(prompt, -1, kTokens));
  EXPECT_EQ(result.restores.missed_lease(), NumLocal());
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadLeaseTest, TheAnswerOutlivesThePrefillWorker) {
  if (!OnHost()) return;
  head_leases_.ttl = 500ms;
  head_fetches_ = {.fetch_timeout = 500ms, .rpc_timeout = 200ms};
  StartWorkers(map_);
  reuse_.mutable_heads()->set_decode_restore_interval(60);
  const auto prompt = Prompt(61, 900);
  on_chunk_ = [&] {
    if (prefill_) prefill_->Stop();
  };
  const Result result = Generate(prompt, Sampled(kTokens));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_EQ(result.tokens, Reference(prompt, -1, kTokens));
  EXPECT_EQ(result.restores.restored_heads(), 0u);
  EXPECT_EQ(result.restores.missed_lease() + result.restores.missed_fetch(), NumLocal());
  EXPECT_TRUE(PagesComeBack(10s));
}

// A renewed lease lasts as long as the request, whatever its time is.
TEST_P(HeadLeaseTest, IsRenewedWhileTheSequenceIsDecoded) {
  if (!OnHost() || GetParam().f32()) return;
  head_leases_.ttl = 600ms;
  StartWorkers(map_);
  const auto prompt = Prompt(61, 900);
  reuse_.mutable_heads()->set_decode_restore_interval(kTokens * 4);
  const auto start = std::chrono::steady_clock::now();
  const Result result = Generate(prompt, Sampled(kTokens * 6));
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_GT(std::chrono::steady_clock::now() - start, head_leases_.ttl) << "too fast to need renewing";
  EXPECT_EQ(result.restores.restored_heads(), NumLocal());
  EXPECT_EQ(result.tokens, Reference(prompt, result.restores.first_token(), kTokens * 6));
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadLeaseTest, ForksRestoreEachOnItsOwn) {
  if (!OnHost()) return;
  StartWorkers(map_);
  v1::SamplingParams sampling = Sampling(300);  // long enough for heads to come on a busy machine
  sampling.set_temperature(1);
  sampling.set_seed(3);
  sampling.set_n(3);
  const Result result = Generate(Prompt(65, 900), sampling);
  ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
  EXPECT_EQ(result.restores.restored_heads(), 3 * NumLocal());
  EXPECT_TRUE(PagesComeBack());
}

INSTANTIATE_TEST_SUITE_P(Carriers, HeadLeaseTest,
                         testing::ValuesIn(FewOf(1, {{"tcp", false, "tcp"},
                                                     {"shm", false, "shm", 1, 2},
                                                     {"shm", false, "shm"},
                                                     {"device", true, "device"},
                                                     {"shm", false, "shm", 2, 1}})),
                         WayName);

}  // namespace
}  // namespace spl
