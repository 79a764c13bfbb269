// Leases and reservations: who holds what, until when.
#include "services/kvstore/lease_table.h"

#include <gtest/gtest.h>

#include "services/kvstore/put_table.h"
#include "tests/support/stored_chunks.h"

namespace spl::kvstore {
namespace {

using testing::TestChunk;
using testing::TestKey;
using namespace std::chrono_literals;

struct Fixture {
  Fixture() {
    TieredStoreOptions options;
    options.memory_bytes = 128 << 10;
    options.clock = &clock;
    store = std::move(TieredStore::Open(options, metrics)).value();
  }
  ~Fixture() { store->CheckInvariants(); }
  PreparedPut Prepare(uint64_t number) {
    auto put = store->Prepare(TestChunk(number, 5000).header, {}, true);
    EXPECT_TRUE(put.ok()) << put.status();
    return std::move(put).value();
  }
  // Fills the memory several times over.
  void Press() {
    for (uint64_t n = 1000; n < 1050; ++n) (void)store->Put(TestChunk(n, 5000));
  }
  FakeClock clock;
  Metrics metrics;
  std::unique_ptr<TieredStore> store;
};

TEST(LeaseTable, NoLeaseIsRenewedForEver) {
  Fixture f;
  LeaseTable leases({.max_life = 30s, .max_bytes = 1 << 20, .max_leases = 2}, f.clock);
  ASSERT_TRUE(f.store->Put(TestChunk(1, 5000)).ok());
  const auto take = [&] { return leases.Take({*f.store->Get(TestKey(1))}, 10s); };
  const auto grant = take();
  ASSERT_TRUE(grant.ok());
  for (int i = 0; i < 3; ++i) {
    f.clock.Advance(8s);
    EXPECT_EQ(*leases.Renew(grant->id, 10s), i < 2 ? 10s : 6s);
  }
  f.clock.Advance(6s);
  EXPECT_EQ(leases.Renew(grant->id, 10s).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(take().ok());
  EXPECT_EQ(take().status().code(), absl::StatusCode::kResourceExhausted) << "one is over, but not collected";
  leases.Expire();
  EXPECT_TRUE(take().ok());
}

TEST(LeaseTable, AReaderSuspectsOnlyWhatItHolds) {
  Fixture f;
  LeaseTable leases({.max_bytes = 1 << 20}, f.clock);
  ASSERT_TRUE(f.store->Put(TestChunk(1, 5000)).ok());
  const auto grant = leases.Take({*f.store->Get(TestKey(1))}, 10s);
  ASSERT_TRUE(grant.ok());
  const std::vector<chunk::ChunkKey> suspects = {TestKey(2), TestKey(1), TestKey(1)};
  EXPECT_EQ(leases.HeldOf(grant->id, suspects), std::vector<chunk::ChunkKey>{TestKey(1)});
  leases.Release(grant->id);
  EXPECT_TRUE(leases.HeldOf(grant->id, suspects).empty());
}

TEST(PutTable, ReservationsWithoutBytesAreLimitedToo) {
  Fixture f;
  PutTable puts({.max_bytes = 1 << 20, .max_reservations = 2}, f.clock);
  const auto first = puts.Add({}, 5s);
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(puts.Add({}, 5s).ok());
  EXPECT_EQ(puts.Add({}, 5s).status().code(), absl::StatusCode::kResourceExhausted);
  puts.Abort(first->id, false);
  EXPECT_TRUE(puts.Add({}, 5s).ok());
  f.clock.Advance(5s);
  puts.Expire();
  EXPECT_EQ(puts.stats().num_reservations, 0u);
}

TEST(LeaseTable, ALeasedChunkIsNeitherEvictedNorOverwritten) {
  Fixture f;
  LeaseTable leases({.max_bytes = 1 << 20}, f.clock);
  for (uint64_t n = 0; n < 3; ++n) ASSERT_TRUE(f.store->Put(TestChunk(n, 5000)).ok());
  const std::byte* const at = (*f.store->Get(TestKey(1)))->payload().data();
  const auto grant = leases.Take({*f.store->Get(TestKey(1))}, 5s);
  ASSERT_TRUE(grant.ok());
  EXPECT_EQ(grant->ttl, 5s);
  f.Press();
  EXPECT_TRUE(f.store->Contains(TestKey(1)));
  EXPECT_FALSE(f.store->Contains(TestKey(0)));
  EXPECT_EQ(std::memcmp(at, TestChunk(1, 5000).payload.data(), 5000), 0);
  f.clock.Advance(4s);
  EXPECT_EQ(*leases.Renew(grant->id, 5s), 5s);
  f.clock.Advance(4s);
  leases.Expire();
  EXPECT_EQ(leases.stats().num_leases, 1u);
  f.clock.Advance(2s);
  EXPECT_EQ(leases.Renew(grant->id, 5s).status().code(), absl::StatusCode::kNotFound) << "over, if not yet collected";
  leases.Expire();
  EXPECT_EQ(leases.stats().num_expired, 1u);
  EXPECT_EQ(leases.stats().bytes, 0u);
  f.Press();
  f.Press();
  EXPECT_FALSE(f.store->Contains(TestKey(1)));
}

TEST(LeaseTable, IsBoundedAndCutsLongLeases) {
  Fixture f;
  LeaseTable leases({.max_ttl = 60s, .max_bytes = 12'000}, f.clock);
  for (uint64_t n = 0; n < 3; ++n) ASSERT_TRUE(f.store->Put(TestChunk(n, 5000)).ok());
  const auto first = leases.Take({*f.store->Get(TestKey(0)), *f.store->Get(TestKey(1))}, 1h);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->ttl, 60s);
  EXPECT_EQ(leases.Take({*f.store->Get(TestKey(2))}, 1s).status().code(), absl::StatusCode::kResourceExhausted);
  leases.Release(first->id);
  leases.Release(first->id);
  EXPECT_TRUE(leases.Take({*f.store->Get(TestKey(2))}, 1s).ok());
}

TEST(PutTable, AnUncommittedPutIsNeverSeenAndItsRoomWaitsForLateWrites) {
  Fixture f;
  PutTable puts({.max_bytes = 64 << 10}, f.clock);
  std::vector<PreparedPut> prepared;
  prepared.push_back(f.Prepare(1));
  const uint64_t used = f.store->memory().used();
  const auto grant = puts.Add(std::move(prepared), 5s);
  ASSERT_TRUE(grant.ok());
  EXPECT_FALSE(f.store->Contains(TestKey(1)));
  EXPECT_EQ(f.store->namespaces().Stat(chunk::kDefaultNamespace)->num_chunks, 1u) << "it is charged";
  f.clock.Advance(5s);
  EXPECT_EQ(puts.Take(grant->id).status().code(), absl::StatusCode::kNotFound);
  puts.Expire();
  EXPECT_EQ(puts.stats().num_expired, 1u);
  EXPECT_EQ(puts.stats().quarantined_bytes, 8192u);
  EXPECT_EQ(f.store->memory().used(), used) << "a late write may still arrive";
  EXPECT_EQ(f.store->namespaces().Stat(chunk::kDefaultNamespace)->num_chunks, 0u);
  f.clock.Advance(4s);
  puts.Expire();
  EXPECT_EQ(f.store->memory().used(), used);
  f.clock.Advance(1s);
  puts.Expire();
  EXPECT_EQ(puts.stats().quarantined_bytes, 0u);
  EXPECT_LT(f.store->memory().used(), used);
  EXPECT_FALSE(f.store->Contains(TestKey(1)));
}

TEST(PutTable, AbortsFreeAtOnceOnlyWhenTheWriterIsQuiet) {
  Fixture f;
  PutTable puts({.max_bytes = 20 << 10}, f.clock);
  for (const bool quiet : {true, false}) {
    std::vector<PreparedPut> prepared;
    prepared.push_back(f.Prepare(quiet ? 1 : 2));
    const auto grant = puts.Add(std::move(prepared), 5s);
    ASSERT_TRUE(grant.ok());
    puts.Abort(grant->id, quiet);
    EXPECT_EQ(f.store->memory().used(), quiet ? 0u : 8192u);
    EXPECT_EQ(puts.Take(grant->id).status().code(), absl::StatusCode::kNotFound);
  }
  std::vector<PreparedPut> two;
  two.push_back(f.Prepare(3));
  two.push_back(f.Prepare(4));
  EXPECT_EQ(puts.Add(std::move(two), 5s).status().code(), absl::StatusCode::kResourceExhausted)
      << "quarantined room counts against the bound";
}

TEST(PutTable, ACommittedPutIsVerified) {
  Fixture f;
  PutTable puts({.max_bytes = 64 << 10}, f.clock);
  for (const bool damaged : {true, false}) {
    std::vector<PreparedPut> prepared;
    prepared.push_back(f.Prepare(1));
    const auto grant = puts.Add(std::move(prepared), 5s);
    std::vector<PreparedPut> taken = std::move(puts.Take(grant->id)).value();
    const chunk::Chunk chunk = TestChunk(1, 5000);
    std::memcpy(taken[0].payload(), chunk.payload.data(), 5000);
    if (damaged) taken[0].payload()[4999] ^= std::byte(1);
    EXPECT_EQ(taken[0].Verify().code(), damaged ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk);
    if (damaged) continue;
    EXPECT_EQ(*f.store->Publish(std::move(taken[0]), nullptr), TieredStore::PutResult::kStored);
    EXPECT_TRUE(testing::SameChunk(testing::Copy(**f.store->Get(TestKey(1))), chunk));
  }
}

}  // namespace
}  // namespace spl::kvstore
