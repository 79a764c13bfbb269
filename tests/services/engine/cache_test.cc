// Page pool, head streams and prefix index, against small models of themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {
namespace {

constexpr KvShape kShape{.num_layers = 2, .num_kv_heads = 3};

class CacheTest : public testing::Test {
 protected:
  static constexpr int32_t kPages = 240;
  CacheTest() : memory_(kPages * 2 * 64 * 8 * sizeof(float)) {}
  kernels::KvPoolView view() { return {reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8, kPages}; }
  static chunk::ChunkKey Key(uint8_t x) {
    chunk::ChunkKey key;
    key.bytes[0] = x;
    return key;
  }
  static std::vector<chunk::ChunkKey> Keys(uint8_t first, int count) {
    std::vector<chunk::ChunkKey> keys;
    for (int i = 0; i < count; ++i) keys.push_back(Key(static_cast<uint8_t>(first + i)));
    return keys;
  }
  std::vector<char> memory_;
  PagePool pool_{view()};
};

TEST_F(CacheTest, AllocationIsAllOrNothingAndContiguousWhenItCan) {
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool_.Allocate(100, pages).ok());
  for (size_t i = 1; i < pages.size(); ++i) EXPECT_EQ(pages[i], pages[i - 1] + 1);
  std::vector<int32_t> more;
  EXPECT_EQ(pool_.Allocate(141, more).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(more.empty());
  EXPECT_EQ(pool_.num_free(), 140);
  pool_.Release(pages);
  EXPECT_EQ(pool_.num_free(), kPages);
  pool_.CheckInvariants();
}

TEST_F(CacheTest, RandomUseKeepsTheInvariants) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> held;
  int64_t owned = 0;
  for (int step = 0; step < 3000; ++step) {
    const int action = static_cast<int>(random() % 3);
    if (action == 0) {
      const int64_t count = random() % 40;
      std::vector<int32_t> pages;
      const bool fits = count <= pool_.num_free();
      ASSERT_EQ(pool_.Allocate(count, pages).ok(), fits);
      if (fits) held.push_back(pages);
    } else if (!held.empty()) {
      const size_t i = random() % held.size();
      if (action == 1) {
        pool_.Share(held[i]);
        held.push_back(held[i]);
      } else {
        std::shuffle(held[i].begin(), held[i].end(), random);
        pool_.Release(held[i]);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    std::set<int32_t> distinct;
    for (const auto& pages : held) distinct.insert(pages.begin(), pages.end());
    owned = static_cast<int64_t>(distinct.size());
    ASSERT_EQ(pool_.num_free(), kPages - owned);
    if (step % 50 == 0) pool_.CheckInvariants();
  }
  for (const auto& pages : held) pool_.Release(pages);
  EXPECT_EQ(pool_.num_free(), kPages);
}

TEST_F(CacheTest, DoubleReleaseDies) {
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool_.Allocate(1, pages).ok());
  pool_.Release(pages);
  EXPECT_DEATH(pool_.Release(pages), "releasing a free page");
}

TEST_F(CacheTest, StreamsGrowTogetherAndGiveEverythingBack) {
  {
    SequenceKv kv(pool_, kShape);
    ASSERT_TRUE(kv.Reserve(65).ok());
    EXPECT_EQ(kv.num_pages_per_stream(), 2);
    EXPECT_EQ(pool_.num_free(), kPages - 12);
    ASSERT_TRUE(kv.Reserve(128).ok());  // fits already
    EXPECT_EQ(kv.num_pages_per_stream(), 2);
    // One layer's pages lie together.
    EXPECT_EQ(kv.stream(0, 1)[0], kv.stream(0, 0)[1] + 1);
    EXPECT_EQ(kv.Reserve(64 * 100).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(kv.num_pages_per_stream(), 2);
  }
  EXPECT_EQ(pool_.num_free(), kPages);
}

TEST_F(CacheTest, ForkSharesFullPagesAndCopiesTheLast) {
  SequenceKv kv(pool_, kShape);
  ASSERT_TRUE(kv.Reserve(100).ok());
  kv.set_num_tokens(100);
  std::memset(pool_.view().k(kv.stream(1, 2)[1]), 0x7e, pool_.view().page_bytes());
  auto fork = kv.Fork();
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ((*fork)->num_tokens(), 100);
  EXPECT_EQ((*fork)->stream(1, 2)[0], kv.stream(1, 2)[0]);
  EXPECT_NE((*fork)->stream(1, 2)[1], kv.stream(1, 2)[1]);
  EXPECT_EQ(std::memcmp(pool_.view().k((*fork)->stream(1, 2)[1]), pool_.view().k(kv.stream(1, 2)[1]),
                        pool_.view().page_bytes()),
            0);
  EXPECT_EQ(pool_.owners(kv.stream(0, 0)[0]), 2);
}

TEST_F(CacheTest, PrefixIndexFindsLeadingChunksAndSharesTheirPages) {
  PrefixIndex index(pool_);
  const auto keys = Keys(1, 3);
  {
    SequenceKv kv(pool_, kShape);
    ASSERT_TRUE(kv.Reserve(200).ok());
    kv.set_num_tokens(200);
    index.Insert(keys, kv);
  }
  EXPECT_EQ(index.size(), 3u);
  EXPECT_EQ(pool_.num_free(), kPages - 18);  // three full pages of six streams; the unfinished ones are free
  SequenceKv other(pool_, kShape);
  std::vector<chunk::ChunkKey> asked = {keys[0], keys[1], Key(99), keys[2]};
  EXPECT_EQ(index.CountLeading(asked), 2u);
  EXPECT_EQ(index.AppendLeading(asked, other), 2u);
  EXPECT_EQ(other.num_tokens(), 128);
  EXPECT_EQ(pool_.num_free(), kPages - 18);
}

TEST_F(CacheTest, EvictionIsLeastRecentDeepestFirstAndSparesWhatIsUsed) {
  PrefixIndex index(pool_);
  const auto old_keys = Keys(1, 3), new_keys = Keys(11, 3);
  for (const auto& keys : {old_keys, new_keys}) {
    SequenceKv kv(pool_, kShape);
    ASSERT_TRUE(kv.Reserve(192).ok());
    kv.set_num_tokens(192);
    index.Insert(keys, kv);
  }
  SequenceKv user(pool_, kShape);
  EXPECT_EQ(index.AppendLeading(std::span(new_keys).first(1), user), 1u);
  EXPECT_TRUE(index.EvictUntilFree(pool_.num_free() + 6));
  EXPECT_EQ(index.CountLeading(old_keys), 2u);  // its deepest chunk went first
  EXPECT_EQ(index.CountLeading(new_keys), 3u);
  EXPECT_FALSE(index.EvictUntilFree(kPages));  // one chunk is in use
  EXPECT_EQ(index.CountLeading(old_keys), 0u);
  EXPECT_EQ(index.CountLeading(new_keys), 1u);
  EXPECT_EQ(pool_.num_free(), kPages - 6);
}

TEST_F(CacheTest, ApproximateKvNeverEntersThePrefixIndex) {
  PrefixIndex index(pool_);
  SequenceKv kv(pool_, kShape);
  ASSERT_TRUE(kv.Reserve(192).ok());
  kv.set_num_tokens(192);
  kv.LowerProvenance(chunk::Provenance::kApprox, 127);
  const auto keys = Keys(1, 3);
  index.Insert(keys, kv);
  EXPECT_EQ(index.CountLeading(keys), 1u);  // what stands in front of the first approximate position is exact
}

}  // namespace
}  // namespace spl::engine
