#include "services/kvstore/tiered_store.h"

#include <gtest/gtest.h>

#include "services/base/fault_point.h"
#include "tests/support/stored_chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;
using testing::TestKey;

std::chrono::steady_clock::time_point In(std::chrono::seconds delay) {
  return std::chrono::steady_clock::now() + delay;
}

std::unique_ptr<TieredStore> OpenStore(const TieredStoreOptions& options, Metrics& metrics) {
  auto store = TieredStore::Open(options, metrics);
  EXPECT_TRUE(store.ok()) << store.status();
  return std::move(store).value();
}

TEST(TieredStore, ServesMemoryFirstAndDiskAfterEviction) {
  TempDir dir;
  Metrics metrics;
  TieredStoreOptions options;
  options.memory_bytes = 40 << 10;
  options.data_dir = dir.path() + "/data";
  const auto store = OpenStore(options, metrics);
  for (uint64_t n = 0; n < 50; ++n) {
    ASSERT_EQ(*store->Put(TestChunk(n, 10000)), TieredStore::PutResult::kStored);
    ASSERT_EQ(*store->Put(TestChunk(n, 10000)), TieredStore::PutResult::kExisting);
  }
  ASSERT_TRUE(store->Drain(In(std::chrono::seconds(30))));
  for (uint64_t n = 0; n < 50; ++n) {
    ASSERT_TRUE(store->Contains(TestKey(n)));
    const auto chunk = store->Get(TestKey(n));
    ASSERT_TRUE(chunk.ok() && *chunk != nullptr) << n;
    EXPECT_TRUE(SameChunk(testing::Copy(**chunk), TestChunk(n, 10000)));
  }
  EXPECT_EQ(*store->Get(TestKey(1000)), nullptr);
  const TieredStore::Stats stats = store->stats();
  EXPECT_EQ(stats.disk.num_chunks, 50u);
  EXPECT_LE(stats.memory.num_chunks, 4u);
  EXPECT_EQ(stats.hits, 50u);
  EXPECT_EQ(stats.misses, 1u);
  EXPECT_NE(metrics.Render().find("splice_store_chunks{tier=\"disk\"} 50"), std::string::npos);
}

TEST(TieredStore, ChunksOnTheirWayToDiskAreFound) {
  ScopedFaults faults;
  TempDir dir;
  Metrics metrics;
  TieredStoreOptions options;
  options.memory_bytes = 0;
  options.data_dir = dir.path() + "/data";
  const auto store = OpenStore(options, metrics);
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.disk.synced=delay_until(go)").ok());
  ASSERT_TRUE(store->Put(TestChunk(1, 1000)).ok());
  ASSERT_TRUE(WaitForFaultHits("kvstore.disk.synced", 1, 10'000));
  EXPECT_FALSE(store->Drain(std::chrono::steady_clock::now()));
  EXPECT_TRUE(store->Contains(TestKey(1)));
  EXPECT_NE(*store->Get(TestKey(1)), nullptr);
  FireFaultEvent("go");
  EXPECT_TRUE(store->Drain(In(std::chrono::seconds(10))));
  EXPECT_NE(*store->Get(TestKey(1)), nullptr);
}

TEST(TieredStore, AFullWriteQueueLeavesChunksInMemoryOrRefuses) {
  ScopedFaults faults;
  TempDir dir;
  Metrics metrics;
  TieredStoreOptions options;
  options.memory_bytes = 0;
  options.data_dir = dir.path() + "/data";
  options.write_queue_bytes = 5000;
  const auto store = OpenStore(options, metrics);
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.disk.synced=delay_until(go)").ok());
  ASSERT_TRUE(store->Put(TestChunk(1, 4000)).ok());
  EXPECT_EQ(store->Put(TestChunk(2, 4000)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(metrics.Render().find("splice_store_write_dropped_total 1"), std::string::npos);
  FireFaultEvent("go");
  ASSERT_TRUE(store->Drain(In(std::chrono::seconds(10))));
  EXPECT_TRUE(store->Put(TestChunk(2, 4000)).ok());
}

TEST(TieredStore, MemoryOnlyEvictsAndRefusesWhatIsTooLarge) {
  Metrics metrics;
  TieredStoreOptions options;
  options.memory_bytes = 20 << 10;
  const auto store = OpenStore(options, metrics);
  for (uint64_t n = 0; n < 10; ++n) ASSERT_TRUE(store->Put(TestChunk(n, 5000)).ok());
  EXPECT_EQ(*store->Get(TestKey(0)), nullptr);
  EXPECT_NE(*store->Get(TestKey(9)), nullptr);
  EXPECT_EQ(store->Put(TestChunk(99, 30 << 10)).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace spl::kvstore
