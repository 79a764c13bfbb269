// The same truth for every router: what the prefill workers say that they have.
#include "services/router/fleet/cache_view.h"

#include <gtest/gtest.h>

namespace spl::router {
namespace {

chunk::ChunkKey Key(uint8_t i) {
  chunk::ChunkKey key;
  key.bytes.fill(i);
  return key;
}
std::string Bytes(std::initializer_list<uint8_t> keys) {
  std::string bytes;
  for (const uint8_t i : keys) bytes.append(32, static_cast<char>(i));
  return bytes;
}

class CacheViewTest : public ::testing::Test {
 protected:
  void Snapshot(const std::string& worker, uint64_t epoch, const std::string& keys, uint64_t next) {
    view_.BeginSnapshot(worker, epoch);
    view_.AddToSnapshot(worker, epoch, keys);
    view_.EndSnapshot(worker, epoch, next);
  }
  // -1: not known.
  int Count(const std::string& worker, uint64_t epoch) {
    const std::vector<chunk::ChunkKey> keys = {Key(1), Key(2), Key(3)};
    size_t count = 0;
    return view_.CountLeading(worker, epoch, keys, &count) ? static_cast<int>(count) : -1;
  }

  Metrics metrics_;
  CacheView view_{{.max_keys = 4}, metrics_};
};

TEST_F(CacheViewTest, FollowsSnapshotsAndEvents) {
  EXPECT_EQ(Count("p", 7), -1);
  EXPECT_EQ(view_.NextSequence("p", 7), 0u);
  view_.BeginSnapshot("p", 7);
  view_.AddToSnapshot("p", 7, Bytes({1, 3}));
  EXPECT_EQ(Count("p", 7), -1) << "not before it is whole";
  view_.EndSnapshot("p", 7, 10);
  EXPECT_EQ(Count("p", 7), 1);
  EXPECT_TRUE(view_.Apply("p", 7, 10, true, Bytes({2, 9})));
  EXPECT_EQ(Count("p", 7), 3);
  EXPECT_TRUE(view_.Apply("p", 7, 12, false, Bytes({1})));
  EXPECT_EQ(Count("p", 7), 0);
  EXPECT_EQ(view_.NextSequence("p", 7), 13u);
  EXPECT_EQ(Count("p", 8), -1) << "another life has another cache";
  EXPECT_EQ(view_.size(), 3u);
  view_.Forget("p");
  EXPECT_EQ(Count("p", 7), -1);
  EXPECT_EQ(view_.size(), 0u);
}

TEST_F(CacheViewTest, AGapIsRefused) {
  EXPECT_FALSE(view_.Apply("p", 7, 1, true, Bytes({1}))) << "no snapshot yet";
  Snapshot("p", 7, Bytes({1}), 10);
  EXPECT_FALSE(view_.Apply("p", 7, 12, true, Bytes({2})));
  EXPECT_FALSE(view_.Apply("p", 7, 9, true, Bytes({2})));
  EXPECT_FALSE(view_.Apply("p", 8, 10, true, Bytes({2})));
  EXPECT_EQ(Count("p", 7), 1);
  EXPECT_TRUE(view_.Apply("p", 7, 10, true, Bytes({2})));
  EXPECT_EQ(Count("p", 7), 2);
}

TEST_F(CacheViewTest, SegmentsAreCountedByTheirChunks) {
  const std::vector<SegmentKey> segments = {{.begin = 100, .end = 300, .chunks = {Key(1), Key(2), Key(3), Key(4)}},
                                            {.begin = 300, .end = 350, .chunks = {Key(5)}},
                                            {.begin = 350, .end = 500, .chunks = {Key(6), Key(1), Key(2)}}};
  std::vector<uint32_t> tokens;
  EXPECT_FALSE(view_.CountSegments("p", 7, segments, &tokens));
  Snapshot("p", 7, Bytes({1, 2, 4}), 10);
  ASSERT_TRUE(view_.CountSegments("p", 7, segments, &tokens));
  EXPECT_EQ(tokens, (std::vector<uint32_t>{128, 0, 0})) << "the longest start of each";
  EXPECT_FALSE(view_.CountSegments("p", 8, segments, &tokens));
  EXPECT_TRUE(view_.Apply("p", 7, 10, true, Bytes({3})));
  ASSERT_TRUE(view_.CountSegments("p", 7, segments, &tokens));
  EXPECT_EQ(tokens, (std::vector<uint32_t>{200, 0, 0})) << "a last chunk may be short";
  EXPECT_TRUE(view_.Apply("p", 7, 11, false, Bytes({1})));
  EXPECT_TRUE(view_.Apply("p", 7, 12, true, Bytes({5})));
  ASSERT_TRUE(view_.CountSegments("p", 7, segments, &tokens));
  EXPECT_EQ(tokens, (std::vector<uint32_t>{0, 50, 0}));
  // An older worker tells of prefixes alone: that it says nothing of segments does not mean that it has none.
  view_.BeginSnapshot("p", 7, /*with_segments=*/false);
  view_.EndSnapshot("p", 7, 20);
  EXPECT_FALSE(view_.CountSegments("p", 7, segments, &tokens));
  EXPECT_EQ(Count("p", 7), 0);
}

TEST_F(CacheViewTest, MemoryIsBounded) {
  Snapshot("a", 1, Bytes({1, 2, 3}), 1);
  Snapshot("b", 1, Bytes({1, 2}), 1);
  EXPECT_EQ(Count("a", 1), 3);
  EXPECT_EQ(Count("b", 1), -1) << "there was no room for all of it";
  EXPECT_EQ(view_.size(), 3u);
  EXPECT_TRUE(view_.Apply("b", 1, 1, true, Bytes({3}))) << "its events are still in order";
  // What another one gives up is free again for a new snapshot.
  view_.Forget("a");
  Snapshot("b", 1, Bytes({1, 2}), 5);
  EXPECT_EQ(Count("b", 1), 2);
}

}  // namespace
}  // namespace spl::router
