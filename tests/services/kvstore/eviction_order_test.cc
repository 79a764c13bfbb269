#include "services/kvstore/eviction_order.h"

#include <gtest/gtest.h>

#include <deque>

#include "tests/support/chunks.h"

namespace spl::kvstore {
namespace {

using chunk::Pin;

// Records without a catalogue: the order looks at their numbers only.
struct Records {
  const ChunkRecord& Make(float cost_seconds, uint64_t bytes, uint32_t uses = 0) {
    ChunkRecord& record = all.emplace_back();
    record.cost_seconds = cost_seconds;
    record.payload_bytes = bytes;
    record.uses.store(uses);
    return record;
  }
  std::deque<ChunkRecord> all;
};

const ChunkRecord* EvictFirst(EvictionOrder& order) {
  const auto victim = order.begin();
  if (victim == order.end() || !EvictionOrder::Evictable(victim)) return nullptr;
  const ChunkRecord* const record = victim->record;
  order.AgeTo(victim);
  order.Remove(victim);
  return record;
}

TEST(EvictionOrder, CostTimesUseOverBytesDecides) {
  Records records;
  EvictionOrder order;
  const ChunkRecord& cheap = records.Make(1, 1000);
  const ChunkRecord& dear = records.Make(10, 1000);
  const ChunkRecord& large = records.Make(1, 100'000);
  const ChunkRecord& read = records.Make(1, 1000, 4);
  for (const ChunkRecord* r : {&dear, &read, &cheap, &large}) order.Add(*r, Pin::kNone);
  EXPECT_EQ(EvictFirst(order), &large);
  EXPECT_EQ(EvictFirst(order), &cheap);
  EXPECT_EQ(EvictFirst(order), &read);
  EXPECT_EQ(EvictFirst(order), &dear);
  EXPECT_EQ(EvictFirst(order), nullptr);
}

TEST(EvictionOrder, EqualValuesGoByLastUse) {
  Records records;
  EvictionOrder order;
  std::vector<EvictionOrder::Position> positions;
  for (int i = 0; i < 4; ++i) positions.push_back(order.Add(records.Make(1, 1024), Pin::kNone));
  order.Touch(positions[0], Pin::kNone);
  EXPECT_EQ(EvictFirst(order), &records.all[1]);
  EXPECT_EQ(EvictFirst(order), &records.all[2]);
  EXPECT_EQ(EvictFirst(order), &records.all[3]);
  EXPECT_EQ(EvictFirst(order), &records.all[0]);
}

// What was valuable and is not used any more leaves in the end, though each newcomer is worth less.
TEST(EvictionOrder, AgeOvertakesFormerValue) {
  Records records;
  EvictionOrder order;
  const ChunkRecord& former = records.Make(20, 1000);
  order.Add(former, Pin::kNone);
  int rounds = 0;
  for (order.Add(records.Make(1, 1000), Pin::kNone); EvictFirst(order) != &former; ++rounds) {
    ASSERT_LT(rounds, 100);
    order.Add(records.Make(1, 1000), Pin::kNone);
  }
  EXPECT_GE(rounds, 15);
  EXPECT_LE(rounds, 25);
}

TEST(EvictionOrder, SoftPinsAreLastAndHardPinsStay) {
  Records records;
  EvictionOrder order;
  const ChunkRecord& hard = records.Make(0.001f, 1000);
  const ChunkRecord& soft = records.Make(0.001f, 1000);
  const ChunkRecord& free = records.Make(1000, 1000, 50);
  const auto hard_at = order.Add(hard, Pin::kHard);
  order.Add(soft, Pin::kSoft);
  order.Add(free, Pin::kNone);
  EXPECT_EQ(EvictFirst(order), &free);
  EXPECT_EQ(EvictFirst(order), &soft);
  EXPECT_EQ(EvictFirst(order), nullptr);
  order.SetPin(hard_at, Pin::kNone);
  EXPECT_EQ(EvictFirst(order), &hard);
}

TEST(EvictionOrder, ARestoredOrderContinues) {
  Records records;
  EvictionOrder order;
  order.Restore(records.Make(1, 1000), Pin::kNone, 7.5);
  order.Restore(records.Make(1, 1000), Pin::kNone, 9.0);
  order.ResumeAge();
  EXPECT_EQ(order.age(), 7.5);
  order.Add(records.Make(1, 1000), Pin::kNone);  // 7.501
  EXPECT_EQ(EvictFirst(order), &records.all[0]);
  EXPECT_EQ(EvictFirst(order), &records.all[2]);
  EXPECT_EQ(EvictFirst(order), &records.all[1]);
}

TEST(EstimateCost, GrowsWithTokensAndPosition) {
  chunk::ChunkHeader header;
  header.num_tokens = 64;
  const float first = EstimateCost(header);
  EXPECT_NEAR(first, 0.0064, 0.0001);
  header.first_position = 16'384;
  EXPECT_NEAR(EstimateCost(header) / first, 2, 0.01);
  header.num_tokens = 32;
  EXPECT_NEAR(EstimateCost(header) / first, 1, 0.01);
}

}  // namespace
}  // namespace spl::kvstore
