#include "services/router/fleet/prefix_index.h"

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

TEST(PrefixIndexTest, PresencesAreBoundedToo) {
  PrefixIndex index({.capacity = 100});
  const Clock::time_point now = Clock::now();
  for (uint64_t worker = 0; worker < 100; ++worker) {
    index.Insert(Keys(1, 50), {"w" + std::to_string(worker), 1}, now);  // 5,000 presences of 400
    EXPECT_LE(index.size(), 100u);
  }
  const auto newest = Keys(2, 4);
  index.Insert(newest, kP0, now);
  const std::vector<PrefixIndex::Holder> holders = {kP0};
  EXPECT_EQ(index.CountLeading(newest, holders, now)[0], 4u);
}

// A worker of 100 pages that was sent three prompts of 40 chunks has dropped half of the first.
TEST(PrefixIndexTest, AWorkerHasDroppedWhatItsPagesCannotHold) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const std::vector<PrefixIndex::Holder> holders = {{.worker_id = "p0", .epoch = 1, .max_chunks = 100},
                                                    {.worker_id = "p1", .epoch = 1}};
  for (uint8_t prompt = 1; prompt <= 3; ++prompt) {
    for (const PrefixIndex::Holder& holder : holders) index.Insert(Keys(prompt, 40), holder, now);
  }
  const auto first = index.CountLeading(Keys(1, 40), holders, now);
  EXPECT_LE(first[0], 20u) << "from its end";
  EXPECT_GE(first[0], 18u) << "to a sixty-fourth of the pages";
  EXPECT_EQ(first[1], 40u) << "its size is not known";
  EXPECT_EQ(index.CountLeading(Keys(2, 40), holders, now)[0], 40u);
  EXPECT_EQ(index.CountLeading(Keys(3, 40), holders, now)[0], 40u);
  index.Insert(Keys(1, 40), holders[0], now);  // computed again
  EXPECT_EQ(index.CountLeading(Keys(1, 40), holders, now)[0], 40u);
  EXPECT_LE(index.CountLeading(Keys(2, 40), holders, now)[0], 20u);
  EXPECT_EQ(index.CountLeading(Keys(3, 40), holders, now)[0], 40u);
  const std::vector<PrefixIndex::Holder> restarted = {{.worker_id = "p0", .epoch = 2, .max_chunks = 100}};
  index.Insert(Keys(1, 40), restarted[0], now);
  EXPECT_EQ(index.CountLeading(Keys(1, 40), restarted, now)[0], 40u) << "its pages are empty again";
}

// A text in front of all prompts stays, and takes its pages once.
TEST(PrefixIndexTest, WhatIsUsedAgainIsNotDropped) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const std::vector<PrefixIndex::Holder> holders = {{.worker_id = "p0", .epoch = 1, .max_chunks = 100}};
  index.Insert(Keys(1, 40), holders[0], now);
  for (int i = 0; i < 1000; ++i) index.Insert(Keys(2, 50), holders[0], now);
  EXPECT_EQ(index.CountLeading(Keys(1, 40), holders, now)[0], 40u);
  for (uint8_t prompt = 3; prompt < 100; ++prompt) {
    index.Insert(Keys(2, 50), holders[0], now);
    index.Insert(Keys(prompt, 10), holders[0], now);
  }
  EXPECT_EQ(index.CountLeading(Keys(2, 50), holders, now)[0], 50u);
  EXPECT_EQ(index.CountLeading(Keys(1, 40), holders, now)[0], 0u);
  EXPECT_EQ(index.CountLeading(Keys(98, 10), holders, now)[0], 10u);
}

PromptKeys WithSegments(uint8_t chain, size_t chunks, const std::vector<std::pair<uint32_t, uint32_t>>& segments) {
  PromptKeys keys{.prefix = Keys(chain, chunks)};
  for (const auto& [begin, end] : segments) {
    keys.segments.push_back(
        {.key = Keys(static_cast<uint8_t>(100 + keys.segments.size()), 1)[0], .begin = begin, .end = end});
  }
  return keys;
}

TEST(PrefixIndexTest, SegmentsCountBehindThePrefix) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const auto first = WithSegments(1, 10, {{0, 300}, {300, 600}});
  const std::vector<PrefixIndex::Holder> holders = {kP0, kP1};
  index.Insert(first, kP0, index.Predict(first, holders, now)[0].exact_tokens, now);
  const auto same = index.Predict(first, holders, now);
  EXPECT_EQ(same[0].prefix_tokens, 640u);
  EXPECT_EQ(same[0].aligned_tokens, 0u) << "the prefix covers them";
  EXPECT_EQ(same[1].prefix_tokens + same[1].aligned_tokens, 0u);
  // The same segments elsewhere.
  const auto other = WithSegments(2, 20, {{400, 700}, {900, 1200}});
  const auto reuse = index.Predict(other, holders, now);
  EXPECT_EQ(reuse[0].aligned_tokens, 600u);
  EXPECT_EQ(reuse[0].exact_tokens, 400u);
  EXPECT_EQ(reuse[0].fetched_tokens, 0u);
  EXPECT_EQ(reuse[1].aligned_tokens, 0u);
  // Behind a copy nothing is a prefix: only 400 tokens are exact, 6 chunks.
  index.Insert(other, kP0, reuse[0].exact_tokens, now);
  EXPECT_EQ(index.Predict(other, holders, now)[0].prefix_tokens, 384u);
}

TEST(PrefixIndexTest, SegmentsTakeTheirPages) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const std::vector<PrefixIndex::Holder> holders = {{.worker_id = "p0", .epoch = 1, .max_chunks = 100}};
  const auto prompt = WithSegments(1, 10, {{0, 640}});
  index.Insert(prompt, holders[0], 0, now);
  index.Insert(Keys(2, 85), holders[0], now);
  EXPECT_EQ(index.HoldsSegments(prompt.segments, holders, now)[0][0], 1) << "95 pages";
  index.Insert(Keys(3, 10), holders[0], now);
  EXPECT_EQ(index.HoldsSegments(prompt.segments, holders, now)[0][0], 0);
  EXPECT_EQ(index.Predict(prompt, holders, now)[0].aligned_tokens, 0u);
}

TEST(PrefixIndexTest, TheStoreServesEveryWorker) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const auto keys = WithSegments(1, 10, {{700, 900}});
  const std::vector<PrefixIndex::Holder> holders = {kP0, kP1};
  index.Insert(std::span(keys.prefix).first(4), kP0, now);
  index.InsertStored(keys, 1000, now);
  const auto reuse = index.Predict(keys, holders, now);
  EXPECT_EQ(reuse[0].prefix_tokens, 640u);
  EXPECT_EQ(reuse[0].fetched_tokens, 6 * 64u + 200u);
  EXPECT_EQ(reuse[1].fetched_tokens, 640u + 200u);
  EXPECT_EQ(reuse[1].aligned_tokens, 200u);
  EXPECT_EQ(index.CountLeading(keys.prefix, holders, now)[1], 0u) << "not in its own pages";
  const auto later = index.Predict(keys, holders, now + std::chrono::hours(2));
  EXPECT_EQ(later[1].prefix_tokens + later[1].aligned_tokens, 0u);
}

// What a worker says that it has counts, not what this router has sent there; what it has not is fetched where the
// store has it, unless the worker reads no store.
TEST(PrefixIndexTest, WhatIsKnownCounts) {
  PrefixIndex index({});
  const Clock::time_point now = Clock::now();
  const auto keys = WithSegments(1, 4, {{256, 456}, {456, 656}});
  const std::vector<PrefixIndex::Holder> holders = {kP0, kP1};
  index.Insert(keys, kP0, UINT32_MAX, now);
  const std::vector<KnownCache> known = {{.leading = 1, .segments = std::vector<uint32_t>{0, 128}},
                                         {.leading = 4, .segments = std::vector<uint32_t>{200, 0}}};
  auto reuse = index.Predict(keys, holders, now, known);
  EXPECT_EQ(reuse[0].prefix_tokens, 64u);
  EXPECT_EQ(reuse[0].aligned_tokens, 128u);
  EXPECT_EQ(reuse[0].exact_tokens, 456u);
  EXPECT_EQ(reuse[1].prefix_tokens, 256u);
  EXPECT_EQ(reuse[1].aligned_tokens, 200u);
  EXPECT_EQ(reuse[1].fetched_tokens, 0u);
  const auto held = index.HoldsSegments(keys.segments, holders, now);
  EXPECT_EQ(held, (std::vector<std::vector<uint8_t>>{{1, 1}, {0, 0}}));
  EXPECT_EQ(index.HoldsSegments(keys.segments, holders, now + std::chrono::hours(2))[0][0], 0);

  index.InsertStored(keys, UINT32_MAX, now);
  reuse = index.Predict(keys, holders, now, known);
  EXPECT_EQ(reuse[0].prefix_tokens, 256u);
  EXPECT_EQ(reuse[0].aligned_tokens, 400u);
  EXPECT_EQ(reuse[0].fetched_tokens, 192u + 200u + 72u);
  EXPECT_EQ(reuse[1].aligned_tokens, 400u);
  EXPECT_EQ(reuse[1].fetched_tokens, 200u);
  const std::vector<PrefixIndex::Holder> without = {{kP0.worker_id, kP0.epoch, false}, kP1};
  reuse = index.Predict(keys, without, now, known);
  EXPECT_EQ(reuse[0].prefix_tokens, 64u);
  EXPECT_EQ(reuse[0].aligned_tokens, 128u);
  EXPECT_EQ(reuse[0].fetched_tokens, 0u);
}

TEST(PrefixIndexTest, SegmentKeysAreOfModelNamespaceAndText) {
  std::vector<int32_t> tokens(130);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
  const chunk::Digest model{1}, ns{2};
  const auto key = MakeSegmentKey(model, ns, tokens);
  EXPECT_EQ(key, MakeSegmentKey(model, ns, tokens));
  EXPECT_FALSE(key == MakeSegmentKey(model, {3}, tokens));
  EXPECT_FALSE(key == MakeSegmentKey({3}, ns, tokens));
  EXPECT_FALSE(key == MakeSegmentKey(model, ns, std::span(tokens).first(129)));
  tokens[0] = 7;
  EXPECT_FALSE(key == MakeSegmentKey(model, ns, tokens));
}

}  // namespace
}  // namespace spl::router
