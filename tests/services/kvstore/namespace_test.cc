// Namespaces, pins and durability of the store, without a network.
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <thread>

#include "services/base/fault_point.h"
#include "services/kvstore/tiered_store.h"
#include "tests/support/stored_chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using chunk::Pin;
using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;
using testing::TestKey;
using PutResult = TieredStore::PutResult;

chunk::Digest Id(uint8_t byte) {
  chunk::Digest id;
  id.fill(byte);
  return id;
}

chunk::Chunk In(uint8_t space, uint64_t number, size_t bytes = 1000) {
  chunk::Chunk chunk = TestChunk(number, bytes);
  chunk.header.namespace_id = Id(space);
  return chunk;
}

struct Store {
  explicit Store(const FakeClock& clock, const std::string& data_dir = "", uint64_t memory_bytes = 1 << 20,
                 uint64_t disk_bytes = 64 << 20) {
    TieredStoreOptions options;
    options.memory_bytes = memory_bytes;
    options.data_dir = data_dir;
    options.disk_bytes = disk_bytes;
    options.clock = &clock;
    auto opened = TieredStore::Open(options, metrics);
    EXPECT_TRUE(opened.ok()) << opened.status();
    store = std::move(opened).value();
  }
  ~Store() {
    store->Stop();
    store->CheckInvariants();
  }
  TieredStore* operator->() const { return store.get(); }
  bool Has(uint64_t number) {
    const auto chunk = store->Get(TestKey(number));
    EXPECT_TRUE(chunk.ok()) << chunk.status();
    return *chunk != nullptr;
  }
  void Drain() { EXPECT_TRUE(store->Drain(std::chrono::steady_clock::now() + std::chrono::seconds(30))); }
  Namespace::Stat Stat(uint8_t space) { return std::move(store->namespaces().Stat(Id(space))).value(); }

  Metrics metrics;
  std::unique_ptr<TieredStore> store;
};

TEST(Namespaces, QuotaInChunksAndBytesNamesUseAndLimit) {
  FakeClock clock;
  TempDir dir;
  Store store(clock, dir.path() + "/data");
  ASSERT_TRUE(store->namespaces().Create(Id(1), {.name = "tenant-a", .quota_chunks = 3}).ok());
  ASSERT_TRUE(store->namespaces().Create(Id(2), {.name = "tenant-b", .quota_bytes = 2500}).ok());
  for (uint64_t n = 0; n < 3; ++n) EXPECT_EQ(*store->Put(In(1, n)), PutResult::kStored);
  EXPECT_EQ(*store->Put(In(1, 2)), PutResult::kExisting) << "what is there needs no room";
  const absl::Status full = store->Put(In(1, 3)).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.ToString().find("'tenant-a'"), std::string::npos) << full;
  EXPECT_NE(full.ToString().find("holds 3 chunks of its quota of 3"), std::string::npos) << full;
  EXPECT_FALSE(store.Has(3));
  for (uint64_t n = 10; n < 12; ++n) EXPECT_TRUE(store->Put(In(2, n)).ok());
  const absl::Status bytes = store->Put(In(2, 12)).status();
  EXPECT_EQ(bytes.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(bytes.ToString().find("holds 2000 bytes of its quota of 2500"), std::string::npos) << bytes;
  EXPECT_TRUE(store->Put(In(0, 13)).ok()) << "others are not concerned";
  // A higher quota, and room after a delete.
  ASSERT_TRUE(store->namespaces().Set(Id(1), {.name = "tenant-a", .quota_chunks = 4}).ok());
  EXPECT_TRUE(store->Put(In(1, 3)).ok());
  EXPECT_EQ(store.Stat(1).num_chunks, 4u);
  EXPECT_EQ(store.Stat(1).bytes, 4000u);
}

TEST(Namespaces, EvictionGivesQuotaBack) {
  FakeClock clock;
  Store store(clock, "", 64 << 10);  // 8 slots of 8 KiB
  ASSERT_TRUE(store->namespaces().Create(Id(1), {.quota_chunks = 20}).ok());
  for (uint64_t n = 0; n < 200; ++n) ASSERT_TRUE(store->Put(In(1, n, 5000)).ok()) << n;
  EXPECT_LE(store.Stat(1).num_chunks, 8u);
  EXPECT_EQ(store.Stat(1).num_chunks, store->stats().memory.num_chunks);
}

TEST(Namespaces, RequiredOnesMustExist) {
  FakeClock clock;
  Store store(clock);
  const chunk::PutOptions required{.require_namespace = true};
  EXPECT_EQ(store->Put(In(5, 1), required).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(store->Put(In(5, 1)).ok()) << "implicitly, when nobody insists";
  EXPECT_TRUE(store.Stat(5).implicit);
  EXPECT_EQ(store->Put(In(5, 2), required).status().code(), absl::StatusCode::kNotFound) << "implicit is not created";
  ASSERT_TRUE(store->namespaces().Create(Id(5), {}).ok());
  EXPECT_EQ(store.Stat(5).num_chunks, 1u) << "it keeps what it had";
  EXPECT_TRUE(store->Put(In(5, 2), required).ok());
  EXPECT_TRUE(store->Put(In(0, 3), required).ok()) << "the default one is always there";
  EXPECT_EQ(store->namespaces().Create(Id(5), {}).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store->namespaces().Create(Id(0), {}).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store->namespaces().Set(Id(9), {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store->DeleteNamespace(Id(9)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store->DeleteNamespace(Id(0)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store->namespaces().Create(Id(6), {.name = std::string(300, 'x')}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Namespaces, ListsByOwner) {
  FakeClock clock;
  Store store(clock);
  ASSERT_TRUE(store->namespaces().Create(Id(1), {.name = "a", .owner = "x", .is_public = true}).ok());
  ASSERT_TRUE(store->namespaces().Create(Id(2), {.name = "b", .owner = "y"}).ok());
  EXPECT_EQ(store->namespaces().List("").size(), 3u);
  const auto of_x = store->namespaces().List("x");
  ASSERT_EQ(of_x.size(), 1u);
  EXPECT_EQ(of_x[0].row.settings.name, "a");
  EXPECT_TRUE(of_x[0].row.settings.is_public);
}

TEST(Namespaces, ImplicitOnesGoWithTheirLastChunk) {
  FakeClock clock;
  Store store(clock, "", 64 << 10);
  const size_t before = store->namespaces().size();
  for (uint8_t space = 10; space < 60; ++space) ASSERT_TRUE(store->Put(In(space, 100 + space, 5000)).ok());
  EXPECT_GT(store->namespaces().size(), before);
  EXPECT_LT(store->namespaces().size(), before + 16) << "of chunks that were evicted nothing is kept";
  for (uint64_t number = 1000; number < 1030; ++number) ASSERT_TRUE(store->Put(In(0, number, 5000)).ok());
  EXPECT_EQ(store->namespaces().size(), before + (Id(0) == chunk::kDefaultNamespace ? 0 : 1));
  // One that was created stays, with or without chunks.
  ASSERT_TRUE(store->namespaces().Create(Id(9), {.name = "kept"}).ok());
  ASSERT_TRUE(store->Put(In(9, 1, 5000)).ok());
  for (uint64_t number = 2000; number < 2030; ++number) ASSERT_TRUE(store->Put(In(0, number, 5000)).ok());
  EXPECT_EQ(store.Stat(9).num_chunks, 0u);
}

TEST(Namespaces, AnOwnerHasAThousandAtMost) {
  FakeClock clock;
  NamespaceTable table(clock);
  const auto id = [](uint32_t number) {
    chunk::Digest id = Id(1);
    std::memcpy(id.data(), &number, sizeof(number));
    return id;
  };
  for (uint32_t number = 0; number < 1000; ++number) ASSERT_TRUE(table.Create(id(number), {.owner = "x"}).ok());
  EXPECT_EQ(table.Create(id(1000), {.owner = "x"}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(table.Create(id(1000), {.owner = "y"}).ok());
  EXPECT_TRUE(table.Create(id(1001), {}).ok());
  ASSERT_TRUE(table.Delete(id(7)).ok());
  EXPECT_TRUE(table.Create(id(1002), {.owner = "x"}).ok());
}

// Its wall clock can be set, as a machine's.
class SettableClock final : public Clock {
 public:
  SteadyTime Now() const override { return steady.Now(); }
  WallTime WallNow() const override { return steady.WallNow() + ahead; }
  bool WaitUntil(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, SteadyTime deadline,
                 const std::function<bool()>& done) const override {
    return steady.WaitUntil(lock, changed, deadline, done);
  }

  FakeClock steady;
  std::chrono::hours ahead{0};
};

TEST(Namespaces, AWallClockThatJumpsExpiresNothing) {
  SettableClock clock;
  NamespaceTable namespaces(clock);
  ChunkCatalog catalog(namespaces, clock);
  ASSERT_TRUE(namespaces.Create(Id(1), {.ttl_seconds = 60}).ok());
  const auto record = catalog.Admit(In(1, 1).header, {});
  ASSERT_TRUE(record.ok());
  for (const int hours : {24 * 365, -24 * 365}) {
    clock.ahead = std::chrono::hours(hours);
    EXPECT_TRUE((*record)->Live(catalog.NowMs()));
  }
  clock.steady.Advance(std::chrono::seconds(61));
  EXPECT_FALSE((*record)->Live(catalog.NowMs()));
}

TEST(Namespaces, ATtlMakesMissesAndFreesTheRoom) {
  FakeClock clock;
  TempDir dir;
  Store store(clock, dir.path() + "/data");
  ASSERT_TRUE(store->namespaces().Create(Id(1), {.ttl_seconds = 60}).ok());
  ASSERT_TRUE(store->Put(In(1, 1)).ok());
  ASSERT_TRUE(store->Put(In(0, 2)).ok());
  store.Drain();
  clock.Advance(std::chrono::seconds(59));
  ASSERT_TRUE(store->Put(In(1, 3)).ok());
  store.Drain();
  EXPECT_TRUE(store.Has(1));
  clock.Advance(std::chrono::seconds(2));
  EXPECT_FALSE(store->Contains(TestKey(1)));
  EXPECT_FALSE(store.Has(1));
  EXPECT_TRUE(store.Has(2) && store.Has(3));
  EXPECT_EQ(store.Stat(1).num_chunks, 1u) << "asking for it removed it";
  EXPECT_EQ(store->stats().disk.num_chunks, 2u);
  clock.Advance(std::chrono::seconds(100));
  store->Maintain();
  // The writer may hold on to its last batch for a moment after Drain; a chunk counts until nobody holds it.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (store.Stat(1).num_chunks > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(store.Stat(1).num_chunks, 0u) << "and the sweep removes what nobody asks for";
  EXPECT_EQ(store->stats().num_expired, 1u);
  EXPECT_TRUE(store->Put(In(1, 1)).ok());
  EXPECT_TRUE(store.Has(1)) << "it can be stored anew";
}

TEST(Namespaces, DeleteRemovesEveryChunkAndNoOther) {
  FakeClock clock;
  TempDir dir;
  Store store(clock, dir.path() + "/data", 100 << 10);
  for (uint64_t n = 0; n < 300; ++n) ASSERT_TRUE(store->Put(In(n % 2 == 0 ? 1 : 2, n)).ok());
  const auto held = *store->Get(TestKey(298));
  ASSERT_NE(held, nullptr);
  const auto deleted = store->DeleteNamespace(Id(1));
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->num_chunks, 150u);
  for (uint64_t n = 0; n < 300; ++n) ASSERT_EQ(store.Has(n), n % 2 == 1) << n;
  EXPECT_TRUE(SameChunk(testing::Copy(*held), In(1, 298))) << "who reads it finishes";
  store.Drain();
  EXPECT_EQ(store->stats().disk.num_chunks, 150u) << "also what was on its way to the disk";
  ASSERT_TRUE(store->Put(In(1, 0)).ok());
  EXPECT_TRUE(store.Has(0)) << "the id can live again";
  EXPECT_EQ(store.Stat(1).num_chunks, 1u);
}

TEST(Namespaces, OutliveARestart) {
  FakeClock clock;
  TempDir dir;
  {
    Store store(clock, dir.path() + "/data");
    ASSERT_TRUE(
        store->namespaces()
            .Create(Id(1), {.name = "kb", .owner = "x", .quota_chunks = 5, .ttl_seconds = 100, .is_public = true})
            .ok());
    ASSERT_TRUE(store->namespaces().Create(Id(2), {.name = "gone"}).ok());
    for (uint64_t n = 0; n < 3; ++n) ASSERT_TRUE(store->Put(In(1, n), {.pin = Pin::kHard}).ok());
    for (uint64_t n = 10; n < 13; ++n) ASSERT_TRUE(store->Put(In(2, n)).ok());
    for (uint64_t n = 20; n < 23; ++n) ASSERT_TRUE(store->Put(In(3, n)).ok());
    store.Drain();
    ASSERT_TRUE(store->DeleteNamespace(Id(2)).ok());
  }
  clock.Advance(std::chrono::seconds(50));
  Store store(clock, dir.path() + "/data");
  const Namespace::Stat stat = store.Stat(1);
  EXPECT_EQ(stat.row.settings.name, "kb");
  EXPECT_EQ(stat.row.settings.owner, "x");
  EXPECT_EQ(stat.row.settings.quota_chunks, 5u);
  EXPECT_TRUE(stat.row.settings.is_public);
  EXPECT_FALSE(stat.implicit);
  EXPECT_EQ(stat.num_chunks, 3u);
  EXPECT_EQ(stat.bytes, 3000u);
  EXPECT_TRUE(store.Stat(3).implicit);
  EXPECT_EQ(store.Stat(3).num_chunks, 3u);
  EXPECT_EQ(store->namespaces().Stat(Id(2)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(store.Has(10));
  EXPECT_TRUE(store.Has(0));
  EXPECT_EQ(store->Put(In(1, 3)).ok() && store->Put(In(1, 4)).ok(), true);
  EXPECT_EQ(store->Put(In(1, 5)).status().code(), absl::StatusCode::kResourceExhausted) << "restored chunks count";
  clock.Advance(std::chrono::seconds(51));
  EXPECT_FALSE(store.Has(0)) << "the age of a chunk goes on";
}

// The index rows of a deleted namespace's chunks may still be there after a crash in the middle of the delete.
TEST(Namespaces, ADeleteThatWasCutOffIsFinishedAtTheNextStart) {
  FakeClock clock;
  TempDir dir;
  {
    Store store(clock, dir.path() + "/data");
    for (uint64_t n = 0; n < 5; ++n) ASSERT_TRUE(store->Put(In(1, n)).ok());
    ASSERT_TRUE(store->Put(In(2, 10)).ok());
    store.Drain();
    // The first step alone.
    ASSERT_TRUE(store->namespaces().Delete(Id(1)).ok());
    EXPECT_FALSE(store->Contains(TestKey(1)));
    ASSERT_TRUE(store->Put(In(1, 1)).ok()) << "the next life begins at once";
    store.Drain();
  }
  Store store(clock, dir.path() + "/data");
  for (uint64_t n = 0; n < 5; ++n) EXPECT_EQ(store.Has(n), n == 1) << n;
  EXPECT_TRUE(store.Has(10));
  EXPECT_EQ(store.Stat(1).num_chunks, 1u);
}

TEST(Pins, HardPinsStayAndSoftPinsGoLast) {
  FakeClock clock;
  Store store(clock, "", 128 << 10);  // 16 slots of 8 KiB
  ASSERT_TRUE(store->namespaces().Create(Id(1), {}).ok());
  ASSERT_TRUE(store->Put(In(1, 0, 5000), {.pin = Pin::kHard}).ok());
  ASSERT_TRUE(store->Put(In(1, 1, 5000)).ok());
  const chunk::ChunkKey keys[] = {TestKey(1), TestKey(77)};
  const auto pinned = store->SetPin(keys, Pin::kSoft);
  ASSERT_TRUE(pinned.ok());
  EXPECT_EQ(pinned->num_changed, 1u);
  EXPECT_EQ(pinned->num_missing, 1u);
  for (uint64_t n = 100; n < 200; ++n) ASSERT_TRUE(store->Put(In(0, n, 5000)).ok());
  EXPECT_TRUE(store.Has(0) && store.Has(1));
  // Nothing but pins: the soft one makes room, the hard ones never.
  uint64_t num_hard = 1;
  while (store->Put(In(1, 1000 + num_hard, 5000), {.pin = Pin::kHard}).ok()) ASSERT_LT(++num_hard, 100u);
  EXPECT_EQ(num_hard, 16u);
  EXPECT_FALSE(store.Has(1));
  EXPECT_EQ(store->Put(In(0, 5000, 5000)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Has(0));
  ASSERT_TRUE(store->SetNamespacePin(Id(1), Pin::kNone).ok());
  EXPECT_TRUE(store->Put(In(0, 5000, 5000)).ok());
}

TEST(Pins, HoldOnDiskAcrossARestartAndForChunksToCome) {
  FakeClock clock;
  TempDir dir;
  {
    Store store(clock, dir.path() + "/data", 64 << 10, 1 << 20);
    for (uint64_t n = 0; n < 10; ++n) ASSERT_TRUE(store->Put(In(1, n, 5000)).ok());
    const auto pinned = store->SetNamespacePin(Id(1), Pin::kHard);
    EXPECT_EQ(pinned.status().code(), absl::StatusCode::kNotFound) << "implicit: it has no settings to keep";
    ASSERT_TRUE(store->namespaces().Create(Id(1), {}).ok());
    EXPECT_EQ(store->SetNamespacePin(Id(1), Pin::kHard)->num_changed, 10u);
    for (uint64_t n = 10; n < 20; ++n) ASSERT_TRUE(store->Put(In(1, n, 5000)).ok());
    store.Drain();
  }
  Store store(clock, dir.path() + "/data", 64 << 10, 1 << 20);
  for (uint64_t n = 100; n < 400; ++n) ASSERT_TRUE(store->Put(In(0, n, 5000), {.durable = true}).ok());
  store.Drain();
  EXPECT_GT(store->stats().disk.num_evicted, 100u);
  for (uint64_t n = 0; n < 20; ++n) EXPECT_TRUE(store.Has(n)) << n;
}

TEST(Eviction, UseSurvivesARestartApproximately) {
  FakeClock clock;
  TempDir dir;
  {
    Store store(clock, dir.path() + "/data", 0, 1 << 20);
    for (uint64_t n = 0; n < 60; ++n) ASSERT_TRUE(store->Put(In(0, n, 5000)).ok());
    store.Drain();
    for (int round = 0; round < 5; ++round) {
      for (uint64_t n = 0; n < 10; ++n) ASSERT_TRUE(store.Has(n));
    }
  }
  Store store(clock, dir.path() + "/data", 0, 1 << 20);
  for (uint64_t n = 100; n < 200; ++n) ASSERT_TRUE(store->Put(In(0, n, 5000)).ok());
  store.Drain();
  EXPECT_GT(store->stats().disk.num_evicted, 20u);
  for (uint64_t n = 0; n < 10; ++n) EXPECT_TRUE(store.Has(n)) << n << " was read before the restart";
  EXPECT_FALSE(store.Has(30));
}

TEST(Durable, AnswersWhenItIsOnDisk) {
  ScopedFaults faults;
  FakeClock clock;
  TempDir dir;
  Store store(clock, dir.path() + "/data");
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.disk.synced=delay_until(go)").ok());
  std::promise<absl::Status> durable, again, asynchronous;
  ASSERT_TRUE(store->Put(In(0, 1), {.durable = true}, [&](absl::Status s) { durable.set_value(s); }).ok());
  ASSERT_EQ(*store->Put(In(0, 1), {.durable = true}, [&](absl::Status s) { again.set_value(s); }),
            PutResult::kExisting);
  ASSERT_TRUE(store->Put(In(0, 1), {}, [&](absl::Status s) { asynchronous.set_value(s); }).ok());
  EXPECT_FALSE(asynchronous.get_future().get().ok()) << "it says that it is not on disk yet";
  auto answer = durable.get_future();
  EXPECT_EQ(answer.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  EXPECT_TRUE(store.Has(1)) << "visible meanwhile";
  FireFaultEvent("go");
  EXPECT_TRUE(answer.get().ok());
  EXPECT_TRUE(again.get_future().get().ok());
  std::promise<absl::Status> at_once;
  ASSERT_TRUE(store->Put(In(0, 1), {.durable = true}, [&](absl::Status s) { at_once.set_value(s); }).ok());
  EXPECT_TRUE(at_once.get_future().get().ok());
}

TEST(Durable, FailuresAreToldAndMemoryAloneRefuses) {
  ScopedFaults faults;
  FakeClock clock;
  TempDir dir;
  Store store(clock, dir.path() + "/data");
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.write=error(UNAVAILABLE)").ok());
  std::promise<absl::Status> failed;
  ASSERT_TRUE(store->Put(In(0, 1), {.durable = true}, [&](absl::Status s) { failed.set_value(s); }).ok());
  EXPECT_EQ(failed.get_future().get().code(), absl::StatusCode::kUnavailable);
  DisarmAllFaults();
  std::promise<absl::Status> second;
  ASSERT_EQ(*store->Put(In(0, 1), {.durable = true}, [&](absl::Status s) { second.set_value(s); }),
            PutResult::kExisting);
  EXPECT_TRUE(second.get_future().get().ok()) << "what memory has is written when it is asked for";
  Store memory_only(clock);
  EXPECT_EQ(memory_only->Put(In(0, 1), {.durable = true}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(TieredStore, AnotherModelUnderTheSameKeyIsRefusedByName) {
  FakeClock clock;
  TempDir dir;
  for (const bool restart : {false, true}) {
    Store store(clock, dir.path() + "/data");
    if (!restart) {
      ASSERT_TRUE(store->Put(In(0, 1)).ok());
    }
    chunk::Chunk other = In(0, 1);
    other.header.layout_digest.fill(0x33);
    const absl::Status layout = store->Put(other).status();
    EXPECT_EQ(layout.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(layout.ToString().find(std::string(64, '2')), std::string::npos) << layout;
    EXPECT_NE(layout.ToString().find(std::string(64, '3')), std::string::npos) << layout;
    other = In(0, 1);
    other.header.model_fingerprint.fill(0x44);
    EXPECT_NE(store->Put(other).status().ToString().find(std::string(64, '4')), std::string::npos);
  }
}

}  // namespace
}  // namespace spl::kvstore
