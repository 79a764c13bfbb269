#include "services/router/prefix_index.h"

#include <gtest/gtest.h>

namespace spl::router {
namespace {

using Clock = PrefixIndex::Clock;

std::vector<chunk::ChunkKey> Keys(uint8_t chain, size_t count) {
  std::vector<chunk::ChunkKey> keys(count);
  for (size_t i = 0; i < count; ++i) {
    keys[i].bytes[0] = chain;
    keys[i].bytes[1] = static_cast<uint8_t>(i);
    keys[i].bytes[2] = static_cast<uint8_t>(i >> 8);
  }
  return keys;
}

const PrefixIndex::Holder kP0{"p0", 1};
const PrefixIndex::Holder kP1{"p1", 1};

TEST(PrefixIndexTest, CountsLeadingKeysPerWorker) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const auto keys = Keys(1, 10);
  index.Insert(std::span(keys).first(6), kP0, now);
  index.Insert(std::span(keys).first(3), kP1, now);
  index.Insert(std::span(keys).last(2), kP1, now);  // past a gap: worth nothing
  const std::vector<PrefixIndex::Holder> holders = {kP0, kP1, {"p2", 1}};
  EXPECT_EQ(index.CountLeading(keys, holders, now), (std::vector<size_t>{6, 3, 0}));
  EXPECT_EQ(index.CountLeading(Keys(2, 4), holders, now), (std::vector<size_t>{0, 0, 0}));
}

TEST(PrefixIndexTest, ARestartedWorkerHasNothing) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const auto keys = Keys(1, 4);
  index.Insert(keys, kP0, now);
  const std::vector<PrefixIndex::Holder> restarted = {{"p0", 2}};
  EXPECT_EQ(index.CountLeading(keys, restarted, now)[0], 0u);
  index.Insert(std::span(keys).first(1), restarted[0], now);
  EXPECT_EQ(index.CountLeading(keys, restarted, now)[0], 1u);
}

TEST(PrefixIndexTest, GuessesExpire) {
  PrefixIndex index({.ttl = std::chrono::seconds(10)});
  const Clock::time_point now = Clock::now();
  const auto keys = Keys(1, 4);
  index.Insert(keys, kP0, now);
  const std::vector<PrefixIndex::Holder> holders = {kP0};
  EXPECT_EQ(index.CountLeading(keys, holders, now + std::chrono::seconds(9))[0], 4u);
  EXPECT_EQ(index.CountLeading(keys, holders, now + std::chrono::seconds(11))[0], 0u);
}

TEST(PrefixIndexTest, SizeIsBoundedAndTheLeastRecentlyUsedGoFirst) {
  PrefixIndex index({.capacity = 100});
  const Clock::time_point now = Clock::now();
  const auto hot = Keys(0, 10);
  index.Insert(hot, kP0, now);
  const std::vector<PrefixIndex::Holder> holders = {kP0};
  for (uint8_t chain = 1; chain < 50; ++chain) {
    index.Insert(Keys(chain, 20), kP0, now);
    EXPECT_EQ(index.CountLeading(hot, holders, now)[0], 10u);
    EXPECT_LE(index.size(), 100u);
  }
  EXPECT_EQ(index.CountLeading(Keys(1, 20), holders, now)[0], 0u);
}

}  // namespace
}  // namespace spl::router
