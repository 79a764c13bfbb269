#include "services/chunk/memory_chunk_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <list>
#include <thread>

#include "tests/support/chunks.h"

namespace spl::chunk {
namespace {

using testing::SameChunk;
using testing::TestChunk;
using testing::TestKey;

constexpr auto kForever = std::chrono::steady_clock::time_point::max();

TEST(MemoryChunkStore, ServesTheLeadingRun) {
  MemoryChunkStore store(1 << 20);
  const std::vector<Chunk> chunks = {TestChunk(0, 100), TestChunk(1, 200), TestChunk(3, 300)};
  ASSERT_TRUE(store.Put(chunks, kForever).ok());
  const std::vector<ChunkKey> keys = {TestKey(0), TestKey(1), TestKey(2), TestKey(3)};
  EXPECT_EQ(*store.CountLeading(keys, kForever), 2u);
  std::vector<Chunk> got;
  EXPECT_EQ(*store.GetLeading(keys, kForever,
                              [&](Chunk&& c) {
                                got.push_back(std::move(c));
                                return true;
                              }),
            2u);
  ASSERT_EQ(got.size(), 2u);
  EXPECT_TRUE(SameChunk(got[0], chunks[0]));
  EXPECT_TRUE(SameChunk(got[1], chunks[1]));
  EXPECT_EQ(*store.GetLeading(keys, kForever, [&](Chunk&&) { return false; }), 0u);
  EXPECT_EQ(*store.GetLeading(keys, std::chrono::steady_clock::now(), [&](Chunk&&) { return true; }), 0u);
}

TEST(MemoryChunkStore, RefusesWhatIsDamagedOrTooLarge) {
  MemoryChunkStore store(4096);
  Chunk damaged = TestChunk(1, 100);
  damaged.payload[0] ^= std::byte(1);
  EXPECT_EQ(store.Put({&damaged, 1}, kForever).code(), absl::StatusCode::kDataLoss);
  const Chunk large = TestChunk(2, 8192);
  EXPECT_EQ(store.Put({&large, 1}, kForever).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store.stats().num_chunks, 0u);
}

TEST(MemoryChunkStore, DropsAChunkThatHasChanged) {
  MemoryChunkStore store(1 << 20);
  auto chunk = std::make_shared<Chunk>(TestChunk(1, 100));
  ASSERT_TRUE(store.Insert(chunk));
  chunk->payload[50] ^= std::byte(1);
  const std::vector<ChunkKey> keys = {TestKey(1)};
  EXPECT_EQ(*store.GetLeading(keys, kForever, [&](Chunk&&) { return true; }), 0u);
  EXPECT_FALSE(store.Contains(keys[0]));
  EXPECT_EQ(store.stats().num_corrupt, 1u);
}

// One shard: exactly least-recently-used by bytes, as a plain list does it.
TEST(MemoryChunkStore, EvictsLikeTheModel) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kCapacity = 64 << 10;
  constexpr uint64_t kEntryBytes = 512;
  MemoryChunkStore store(kCapacity);
  std::list<std::pair<uint64_t, size_t>> model;  // most recent first
  uint64_t model_bytes = 0;
  const auto find = [&](uint64_t n) {
    return std::find_if(model.begin(), model.end(), [&](auto& e) { return e.first == n; });
  };
  for (int step = 0; step < 20000; ++step) {
    const uint64_t number = random() % 60;
    const auto known = find(number);
    if (random() % 2 == 0) {
      const size_t bytes = 8 + number * 97 % 4000;
      ASSERT_TRUE(store.Insert(std::make_shared<const Chunk>(TestChunk(number, bytes))));
      if (known == model.end()) {
        model_bytes += bytes + kEntryBytes;
        while (model_bytes > kCapacity) {
          model_bytes -= model.back().second + kEntryBytes;
          model.pop_back();
        }
        model.emplace_front(number, bytes);
      }
    } else {
      const auto found = store.Find(TestKey(number));
      ASSERT_EQ(found != nullptr, known != model.end()) << "step " << step;
      if (found != nullptr) {
        ASSERT_EQ(found->header.key, TestKey(number));
        model.splice(model.begin(), model, known);
      }
    }
    ASSERT_EQ(store.stats().bytes, model_bytes);
  }
  EXPECT_GT(store.stats().num_evicted, 0u);
}

TEST(MemoryChunkStore, ManyThreads) {
  MemoryChunkStore store(256 << 20);
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t));
      for (int i = 0; i < 2000; ++i) {
        const uint64_t number = random() % 100;
        if (random() % 3 == 0) {
          store.Insert(std::make_shared<const Chunk>(TestChunk(number, 1000)));
        } else if (random() % 10 == 0) {
          store.Erase(TestKey(number));
        } else if (const auto found = store.Find(TestKey(number)); found && found->header.key != TestKey(number)) {
          ++num_wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong.load(), 0);
  EXPECT_LE(store.stats().num_chunks, 100u);
}

}  // namespace
}  // namespace spl::chunk
