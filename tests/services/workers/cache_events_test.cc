#include "services/prefill_work/cache_events.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace spl::prefill {
namespace {

chunk::ChunkKey Key(uint8_t i) {
  chunk::ChunkKey key;
  key.bytes.fill(i);
  return key;
}

TEST(CacheEventsTest, NumbersWhatChangesOnly) {
  CacheEvents events;
  std::vector<CacheEvents::Event> read;
  EXPECT_FALSE(events.Read(0, 10, &read)) << "numbers begin with 1: zero asks for a snapshot";
  EXPECT_TRUE(events.Read(1, 10, &read));
  EXPECT_TRUE(read.empty());
  const std::vector<chunk::ChunkKey> keys = {Key(1), Key(2)};
  events.Report(true, keys);
  events.Report(true, keys);
  events.Report(false, std::span(keys).first(1));
  events.Report(false, std::span(keys).first(1));
  ASSERT_TRUE(events.Read(1, 10, &read));
  ASSERT_EQ(read.size(), 3u);
  EXPECT_TRUE(read[0].stored && read[1].stored && !read[2].stored);
  EXPECT_EQ(read[2].key, Key(1));
  ASSERT_TRUE(events.Read(2, 1, &read));
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].key, Key(2));
  EXPECT_FALSE(events.Read(5, 10, &read)) << "there are three";
}

// Whoever follows the events, however slowly, has what a snapshot has.
TEST(CacheEventsTest, FollowersAgreeWithSnapshots) {
  const uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  CacheEvents events(16);
  std::set<uint8_t> follower;
  uint64_t next = 0;
  int snapshots = 0;
  for (int step = 0; step < 2000; ++step) {
    for (uint32_t i = random() % 12; i > 0; --i) {
      const chunk::ChunkKey key = Key(static_cast<uint8_t>(random() % 50));
      events.Report(random() % 2 == 0, std::span(&key, 1));
    }
    if (random() % 3 == 0) continue;
    std::vector<CacheEvents::Event> read;
    if (!events.Read(next, 1 + random() % 8, &read)) {
      std::vector<chunk::ChunkKey> keys;
      next = events.Snapshot(&keys);
      follower.clear();
      for (const auto& key : keys) follower.insert(key.bytes[0]);
      ++snapshots;
    }
    for (const auto& event : read) {
      if (event.stored)
        EXPECT_TRUE(follower.insert(event.key.bytes[0]).second);
      else
        EXPECT_EQ(follower.erase(event.key.bytes[0]), 1u);
    }
    next += read.size();
  }
  EXPECT_GT(snapshots, 1) << "some gaps";
  // What the last reports were, a follower that is up to date takes, too.
  std::vector<chunk::ChunkKey> keys;
  next = events.Snapshot(&keys);
  follower.clear();
  for (const auto& key : keys) follower.insert(key.bytes[0]);
  for (uint8_t i = 0; i < 10; ++i) {
    const chunk::ChunkKey key = Key(i);
    events.Report(!follower.contains(i), std::span(&key, 1));
  }
  std::vector<CacheEvents::Event> read;
  ASSERT_TRUE(events.Read(next, 100, &read));
  ASSERT_EQ(read.size(), 10u);
  for (const auto& event : read) {
    if (event.stored)
      follower.insert(event.key.bytes[0]);
    else
      follower.erase(event.key.bytes[0]);
  }
  events.Snapshot(&keys);
  std::set<uint8_t> present;
  for (const auto& key : keys) present.insert(key.bytes[0]);
  EXPECT_EQ(follower, present);
}

}  // namespace
}  // namespace spl::prefill
