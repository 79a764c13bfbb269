#include "services/kvstore/byte_arena.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace spl::kvstore {
namespace {

TEST(ByteArena, GivesDisjointRangesAndJoinsThemAgain) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kSize = 1 << 20;
  ByteArena arena(kSize);
  std::map<uint64_t, uint64_t> taken;
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 2 == 0 || taken.empty()) {
      const uint64_t bytes = 4096 * (1 + random() % 20);
      const auto offset = arena.Take(bytes);
      if (!offset.has_value()) continue;
      ASSERT_LE(*offset + bytes, kSize);
      const auto next = taken.lower_bound(*offset);
      ASSERT_TRUE(next == taken.end() || *offset + bytes <= next->first);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= *offset);
      taken[*offset] = bytes;
    } else {
      const auto victim = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
      arena.Give(victim->first, victim->second);
      taken.erase(victim);
    }
    if (step % 500 == 0) arena.CheckInvariants();
  }
  for (const auto& [offset, bytes] : taken) arena.Give(offset, bytes);
  arena.CheckInvariants();
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_EQ(arena.Take(kSize), 0u) << "all of it is one range again";
  EXPECT_FALSE(arena.Take(1).has_value());
  EXPECT_FALSE(ByteArena(0).Take(1).has_value());
}

}  // namespace
}  // namespace spl::kvstore
