// Page pool, head streams and prefix index, against small models of themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/segment_index.h"
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

TEST_F(CacheTest, TheShortestRunThatIsLongEnoughIsTaken) {
  std::vector<int32_t> all;
  ASSERT_TRUE(pool_.Allocate(kPages, all).ok());
  const auto free = [&](int32_t first, int32_t count) { pool_.Release(std::span(all).subspan(first, count)); };
  free(0, 7);
  free(20, 3);
  free(40, 5);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool_.Allocate(4, pages).ok());
  EXPECT_THAT(pages, testing::ElementsAre(40, 41, 42, 43));
  // Without one, few long ones, in ascending order.
  ASSERT_TRUE(pool_.Allocate(9, pages).ok());
  EXPECT_THAT(pages, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 20, 21));
  ASSERT_TRUE(pool_.Allocate(2, pages).ok());
  EXPECT_THAT(pages, testing::ElementsAre(22, 44));
  pool_.CheckInvariants();
}

// A pool that has served prompts for a while is full of holes of one page, and every sequence that grows asks it.
TEST_F(CacheTest, HolesDoNotSlowAllocationDown) {
  constexpr int32_t kMany = 400'000;
  PagePool pool({reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8, kMany});
  std::vector<int32_t> all, pages;
  ASSERT_TRUE(pool.Allocate(kMany, all).ok());
  for (int32_t page = 0; page < kMany - 1000; page += 2) pool.Release(std::span(all).subspan(page, 1));
  pool.Release(std::span(all).subspan(kMany - 900));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 3000; ++i) {
    ASSERT_TRUE(pool.Allocate(256, pages).ok());
    EXPECT_EQ(pages.back(), pages.front() + 255);
    pool.Release(pages);
  }
  // A walk over the holes takes milliseconds each time.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
}

TEST_F(CacheTest, RandomUseKeepsTheInvariants) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  struct Held {
    std::vector<int32_t> pages;
    bool cached = false;
  };
  std::vector<Held> held;
  int64_t owned = 0;
  for (int step = 0; step < 3000; ++step) {
    const int action = static_cast<int>(random() % 4);
    if (action == 0) {
      const int64_t count = random() % 40;
      std::vector<int32_t> pages;
      const bool fits = count <= pool_.num_free();
      ASSERT_EQ(pool_.Allocate(count, pages).ok(), fits);
      if (fits) held.push_back({pages});
    } else if (!held.empty()) {
      const size_t i = random() % held.size();
      if (action == 1) {
        pool_.Share(held[i].pages);
        held.push_back({held[i].pages});
      } else if (action == 2) {
        held[i].cached ? pool_.UnmarkCached(held[i].pages) : pool_.MarkCached(held[i].pages);
        held[i].cached = !held[i].cached;
      } else {
        std::shuffle(held[i].pages.begin(), held[i].pages.end(), random);
        if (held[i].cached) pool_.UnmarkCached(held[i].pages);
        pool_.Release(held[i].pages);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    std::set<int32_t> distinct, used;
    for (const Held& owner : held) {
      distinct.insert(owner.pages.begin(), owner.pages.end());
      if (!owner.cached) used.insert(owner.pages.begin(), owner.pages.end());
    }
    owned = static_cast<int64_t>(distinct.size());
    ASSERT_EQ(pool_.num_free(), kPages - owned);
    ASSERT_EQ(pool_.num_available(), kPages - static_cast<int64_t>(used.size()));
    if (step % 50 == 0) pool_.CheckInvariants();
  }
  for (const Held& owner : held) {
    if (owner.cached) pool_.UnmarkCached(owner.pages);
    pool_.Release(owner.pages);
  }
  EXPECT_EQ(pool_.num_free(), kPages);
}

TEST_F(CacheTest, ACacheThatKeepsItsMarkDies) {
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool_.Allocate(1, pages).ok());
  pool_.MarkCached(pages);
  EXPECT_DEATH(pool_.Release(pages), "more caches than owners");
}

TEST_F(CacheTest, WhoAsksIsToldOnceThatPagesBecameFree) {
  std::vector<int32_t> pages, more;
  ASSERT_TRUE(pool_.Allocate(10, pages).ok() && pool_.Allocate(10, more).ok());
  pool_.Share(pages);
  int told = 0;
  pool_.OnNextFree([&] {
    ++told;
    EXPECT_GE(pool_.num_free(), kPages - 10) << "told before the pages are free";
  });
  pool_.Release(pages);  // they have another owner
  EXPECT_EQ(told, 0);
  pool_.Release(pages);
  EXPECT_EQ(told, 1);
  pool_.Release(std::span(more).first(1));
  EXPECT_EQ(told, 1) << "it was asked for once";
  pool_.OnNextFree([&] { ++told; });
  pool_.OnNextFree(nullptr);
  pool_.Release(std::span(more).subspan(1));
  EXPECT_EQ(told, 1) << "taken back";
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
    // One layer's pages lie together, and behind those of all layers the ones that are not full.
    EXPECT_EQ(kv.stream(0, 1)[0], kv.stream(0, 0)[0] + 1);
    EXPECT_EQ(kv.stream(0, 0)[1], kv.stream(0, 0)[0] + kShape.num_streams());
    EXPECT_EQ(kv.stream(0, 1)[1], kv.stream(0, 0)[1] + 1);
    EXPECT_EQ(kv.Reserve(64 * 100).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(kv.num_pages_per_stream(), 2);
  }
  EXPECT_EQ(pool_.num_free(), kPages);
}

// Caches keep the full pages of a sequence that has ended: what it gives back is one run.
TEST_F(CacheTest, ASequenceWhoseFullPagesAreKeptLeavesNoHoles) {
  PrefixIndex index(pool_);
  for (const int64_t num_tokens : {150, 128}) {
    SequenceKv kv(pool_, kShape);
    ASSERT_TRUE(kv.Reserve(num_tokens).ok());
    kv.set_num_tokens(num_tokens);
    ASSERT_TRUE(kv.Reserve(num_tokens + 70).ok());
    index.Insert(Keys(static_cast<uint8_t>(num_tokens), 2), kv);
  }
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool_.Allocate(pool_.num_free(), pages).ok());
  EXPECT_EQ(pages.back(), pages.front() + static_cast<int32_t>(pages.size()) - 1);
  pool_.Release(pages);
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

// A fork of a sequence that leaves tokens out leaves them out, too, however much of it the fork owns.
TEST_F(CacheTest, PlacesOfAnotherSequenceAreSharedAsPageAfterPageIs) {
  SequenceKv from(pool_, {3, 2});
  ASSERT_TRUE(from.Reserve(20 * 64 + 5).ok());
  const int64_t free = pool_.num_free();
  {
    SequenceKv places(pool_, {3, 2}), pages(pool_, {3, 2});
    for (const auto& [begin, end] : std::vector<std::pair<int32_t, int32_t>>{{0, 1}, {4, 4}, {7, 12}, {15, 21}}) {
      places.AppendPlaces(from, begin, end);
      for (int32_t page = begin; page < end; ++page) pages.AppendShared(from.PagesOfChunk(page));
    }
    EXPECT_EQ(places.AllPages(), pages.AllPages());
    EXPECT_EQ(places.num_tokens(), 12 * 64);
    EXPECT_EQ(places.num_tokens(), pages.num_tokens());
    EXPECT_EQ(pool_.num_free(), free);
    for (const int32_t page : from.PagesOfChunk(8)) EXPECT_EQ(pool_.owners(page), 3);
    for (const int32_t page : from.PagesOfChunk(2)) EXPECT_EQ(pool_.owners(page), 1);
    places.CheckInvariants();
  }
  EXPECT_EQ(pool_.num_free(), free) << "the other sequence still owns them";
  for (const int32_t page : from.PagesOfChunk(8)) EXPECT_EQ(pool_.owners(page), 1);
}

TEST_F(CacheTest, ForksOfWhatIsKeptHaveItsHoles) {
  SequenceKv kv(pool_, kShape);
  ASSERT_TRUE(kv.Reserve(600).ok());
  kv.set_num_tokens(600);
  const int64_t whole = pool_.num_free();
  kv.KeepOnly(std::make_shared<const KeptTokens>(
      KeptTokens{600, {{{0, 10}, {200, 260}, {590, 600}}, {{320, 321}, {599, 600}}}}));
  EXPECT_EQ(pool_.num_free() - whole, 3 * (6 + 8));  // of ten pages a head keeps 0, 3, 4, 9 and 5, 9
  for (const int64_t own_from : {0, 100, 250, 330, 600}) {
    const int64_t free = pool_.num_free();
    auto fork = kv.Fork(own_from);
    ASSERT_TRUE(fork.ok()) << fork.status();
    (*fork)->CheckInvariants();
    EXPECT_EQ((*fork)->num_pages(), kv.num_pages());
    const auto full = static_cast<int32_t>(own_from / 64);
    int64_t shared = 0;
    for (int32_t s = 0; s < kShape.num_streams(); ++s) {
      for (int32_t page = 0; page < full; ++page)
        shared += kv.streams()[static_cast<size_t>(s)][static_cast<size_t>(page)] != kernels::kNoPage;
    }
    EXPECT_EQ(free - pool_.num_free(), kv.num_pages() - shared) << own_from;
    ASSERT_TRUE((*fork)->Reserve(700).ok());
    (*fork)->CheckInvariants();
  }
}

TEST_F(CacheTest, TruncatedGivesPagesBackAndGrowsAgain) {
  SequenceKv kv(pool_, kShape);
  ASSERT_TRUE(kv.Reserve(600).ok());
  kv.set_num_tokens(600);
  const int64_t free = pool_.num_free();
  const uint64_t id = kv.id();
  const std::vector<int32_t> leading = kv.PagesOfChunk(1);
  kv.Truncate(65);
  kv.CheckInvariants();
  EXPECT_EQ(kv.num_tokens(), 65);
  EXPECT_EQ(kv.num_pages_per_stream(), 2);
  EXPECT_EQ(pool_.num_free() - free, 8 * kShape.num_streams());
  EXPECT_EQ(kv.PagesOfChunk(1), leading);
  EXPECT_NE(kv.id(), id);  // who knows the lists must look again
  ASSERT_TRUE(kv.Reserve(129).ok());
  kv.CheckInvariants();
  EXPECT_EQ(kv.num_pages_per_stream(), 3);
}

// Compact pages that turn into those of other needs: every stream has what it needs, no page twice, and what is over or
// missing goes to or comes from the pool.
TEST_F(CacheTest, CompactPagesBecomeOthers) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto some_needs = [&] {
    CompactPages::Needs needs;
    needs.page_tokens = random() % 3 == 0 ? 0 : 64 << random() % 3;
    needs.fixed_pages = random() % 3;
    needs.left_out = random() % 2 * 300;
    needs.list_pages = random() % 3;
    for (int32_t s = 0; s < kShape.num_streams(); ++s) {
      needs.lists.push_back(random() % 4 > 0);
      needs.streams.push_back((needs.list_pages == 0 || needs.lists.back()) && random() % 3 > 0);
    }
    if (needs.page_tokens + needs.fixed_pages == 0) needs.list_pages = 1;
    if (needs.list_pages > 0) {
      for (size_t s = 0; s < needs.streams.size(); ++s) needs.lists[s] = needs.lists[s] || needs.streams[s];
    }
    return needs;
  };
  const auto expect = [&](const CompactPages& pages, const CompactPages::Needs& needs, int64_t num_tokens) {
    std::set<int32_t> all;
    size_t count = 0;
    for (size_t s = 0; s < needs.streams.size(); ++s) {
      int64_t want = needs.list_pages > 0 && needs.lists[s] ? needs.list_pages : 0;
      const int64_t tokens = std::max<int64_t>(num_tokens - needs.left_out, 0);
      if (needs.streams[s]) {
        want += needs.fixed_pages;
        if (needs.page_tokens > 0) want += (tokens + needs.page_tokens - 1) / needs.page_tokens;
      }
      EXPECT_EQ(static_cast<int64_t>(pages.tables()[s].size()), want) << "stream " << s;
      all.insert(pages.tables()[s].begin(), pages.tables()[s].end());
      count += pages.tables()[s].size();
    }
    EXPECT_EQ(all.size(), count) << "a page in two places";
    EXPECT_EQ(pool_.num_free(), kPages - static_cast<int64_t>(count));
    const std::vector<int64_t> by_rank = CompactPages::PagesByRank(kShape, needs, 1, num_tokens);
    EXPECT_EQ(by_rank[0], static_cast<int64_t>(count));
    pool_.CheckInvariants();
  };
  for (int round = 0; round < 300; ++round) {
    CompactPages::Needs needs = some_needs();
    int64_t tokens = 1 + static_cast<int64_t>(random() % 700);
    auto pages = CompactPages::Create(pool_, kShape, needs, {});
    ASSERT_TRUE(pages.ok()) << pages.status();
    ASSERT_TRUE((*pages)->Reserve(tokens).ok());
    expect(**pages, needs, tokens);
    for (int turn = 0; turn < 3; ++turn) {
      needs = some_needs();
      tokens = 1 + static_cast<int64_t>(random() % 700);
      ASSERT_TRUE((*pages)->Become(needs, tokens).ok());
      expect(**pages, needs, tokens);
      tokens += static_cast<int64_t>(random() % 100);
      ASSERT_TRUE((*pages)->Reserve(tokens).ok());
      expect(**pages, needs, tokens);
    }
    // What the pool cannot give changes nothing.
    const auto before = std::vector<std::vector<int32_t>>((*pages)->tables().begin(), (*pages)->tables().end());
    CompactPages::Needs many = needs;
    many.list_pages = kPages;
    many.lists.assign(many.streams.size(), true);
    EXPECT_EQ((*pages)->Become(many, tokens).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(std::ranges::equal((*pages)->tables(), before));
    expect(**pages, needs, tokens);
    pages->reset();
    EXPECT_EQ(pool_.num_free(), kPages);
  }
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

// Long answers run while short prompts come and go: their chunks are the oldest, and in use.
TEST_F(CacheTest, WhatIsUsedIsNotWalkedOverAtEachEviction) {
  constexpr int32_t kUsed = 40'000, kOthers = 6'000;
  PagePool pool({reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8,
                 (kUsed + kOthers) * kShape.num_streams()});
  PrefixIndex index(pool);
  uint32_t next = 0;
  const auto keys = [&](int32_t count) {
    std::vector<chunk::ChunkKey> made(count);
    for (chunk::ChunkKey& key : made) std::memcpy(key.bytes.data(), &++next, sizeof(next));
    return made;
  };
  SequenceKv runs(pool, kShape);
  ASSERT_TRUE(runs.Reserve(64 * kUsed).ok());
  runs.set_num_tokens(64 * kUsed);
  index.Insert(keys(kUsed), runs);
  for (int32_t i = 0; i < kOthers; ++i) {
    SequenceKv kv(pool, kShape);
    ASSERT_TRUE(kv.Reserve(64).ok());
    kv.set_num_tokens(64);
    index.Insert(keys(1), kv);
  }
  const auto start = std::chrono::steady_clock::now();
  for (int32_t i = 1; i <= kOthers; ++i) ASSERT_TRUE(index.EvictUntilFree(i * kShape.num_streams()));
  EXPECT_EQ(index.size(), static_cast<size_t>(kUsed));
  // A walk over all of them takes milliseconds each time.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
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

// ---- segment index and frozen pool ----------------------------------------------------------------------------------

class SegmentIndexTest : public CacheTest {
 protected:
  using Tokens = std::vector<int32_t>;
  static constexpr chunk::Digest kSpace{7};

  static Tokens Text(int32_t number, size_t length) {
    Tokens text(length);
    for (size_t i = 0; i < length; ++i) text[i] = number * 1000 + static_cast<int32_t>(i);
    return text;
  }
  static PositionRange All(const Tokens& text) { return {0, static_cast<int32_t>(text.size())}; }
  // In pages of its own; null when there are none.
  std::shared_ptr<const SegmentSource> Source(const Tokens& text) {
    SequenceKv kv(pool_, kShape);
    if (!kv.Reserve(static_cast<int64_t>(text.size())).ok()) return nullptr;
    kv.set_num_tokens(static_cast<int64_t>(text.size()));
    return std::make_shared<SegmentSource>(kv, 0, text, SourceContext{.isolated = true});
  }
  bool Has(const Tokens& text) { return index_.Contains(index_.KeysOf(kSpace, text)); }

  SegmentIndex index_{chunk::Digest{1}};
};

TEST_F(SegmentIndexTest, OrdinarySourcesGoByRecencyFrozenOnesByUse) {
  std::vector<Tokens> texts;
  for (int32_t i = 0; i < 6; ++i) texts.push_back(Text(i, 100));
  for (int32_t i = 0; i < 6; ++i) EXPECT_TRUE(index_.Insert(kSpace, Source(texts[i]), i >= 3));
  EXPECT_EQ(index_.stats().num_frozen, 3u);
  EXPECT_EQ(index_.stats().frozen_tokens, 300);
  EXPECT_EQ(index_.frozen_pages(), 3 * 12);
  for (const int32_t i : {3, 5, 3, 0, 5, 4}) EXPECT_EQ(index_.FindSegment(kSpace, texts[i], All(texts[i])).size(), 1u);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(Has(texts[1]));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(Has(texts[2]));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(index_.EvictOne()) << "frozen ones are not for it";
  EXPECT_TRUE(index_.EvictFrozen());
  EXPECT_FALSE(Has(texts[4]));
  EXPECT_TRUE(index_.EvictFrozen());
  EXPECT_FALSE(Has(texts[3])) << "used as often as the other, and longer ago";
  // What is new counts as if it had been used a little more than the last one dropped: it is not always the victim.
  EXPECT_TRUE(index_.Insert(kSpace, Source(texts[1]), true));
  EXPECT_EQ(index_.FindSegment(kSpace, texts[1], All(texts[1])).size(), 1u);
  EXPECT_TRUE(index_.EvictFrozen());
  EXPECT_FALSE(Has(texts[5]));
  EXPECT_EQ(index_.stats().num_frozen_dropped, 3u);
  index_.CheckInvariants();
}

TEST_F(SegmentIndexTest, WhatIsFoundOrOfferedAgainBecomesFrozen) {
  const Tokens found = Text(1, 130), offered = Text(2, 70), plain = Text(3, 64);
  for (const Tokens& text : {found, offered, plain}) EXPECT_TRUE(index_.Insert(kSpace, Source(text)));
  EXPECT_EQ(index_.FindSegment(kSpace, found, All(found), true).size(), 1u);
  EXPECT_FALSE(index_.Insert(kSpace, Source(offered), true));
  EXPECT_EQ(index_.stats().num_frozen, 2u);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(Has(plain));
  EXPECT_TRUE(Has(found) && Has(offered));
  index_.CheckInvariants();
}

// A source that has seen other text, and the one that takes its place: frozen as it was, and nothing is kept twice.
TEST_F(SegmentIndexTest, AReplacementIsFrozenIfTheReplacedWas) {
  for (const bool frozen : {false, true}) {
    const Tokens text = Text(frozen ? 1 : 2, 200);
    const auto keys = index_.KeysOf(kSpace, text);
    SequenceKv kv(pool_, kShape);
    ASSERT_TRUE(kv.Reserve(210).ok());
    kv.set_num_tokens(210);
    EXPECT_FALSE(index_.ContainsFirst(keys)) << "nothing is here";
    EXPECT_TRUE(index_.Insert(kSpace, std::make_shared<SegmentSource>(kv, 10, text, SourceContext{}), frozen));
    EXPECT_TRUE(index_.Contains(keys));
    EXPECT_FALSE(index_.ContainsFirst(keys)) << "nobody knows what it has seen";
    EXPECT_FALSE(index_.Insert(kSpace, Source(text))) << "what is here stays";
    EXPECT_FALSE(index_.ContainsFirst(keys));
    index_.Replace(kSpace, Source(text));
    EXPECT_TRUE(index_.ContainsFirst(keys));
    EXPECT_EQ(index_.stats().num_sources, 1u);
    EXPECT_EQ(index_.stats().num_frozen, frozen ? 1u : 0u);
    const auto hits = index_.FindSegment(kSpace, text, All(text));
    ASSERT_EQ(hits.size(), 1u);
    EXPECT_TRUE(hits[0].source->isolated());
    index_.CheckInvariants();
    EXPECT_TRUE(frozen ? index_.EvictFrozen() : index_.EvictOne());
  }
}

// With nothing in front, or the instructions of a prompt; not behind another segment, or what nobody knows.
TEST_F(SegmentIndexTest, SourcesThatBeganTheirPrompts) {
  SequenceKv kv(pool_, kShape);
  ASSERT_TRUE(kv.Reserve(320).ok());
  kv.set_num_tokens(320);
  const Tokens prompt = Text(3, 320);
  const auto began = [&](int32_t begin, const SourceContext& context) {
    return SegmentSource(kv, begin, std::span(prompt).subspan(begin, 64), context).began_prompt();
  };
  EXPECT_TRUE(began(0, SourceContextOf(kSpace, prompt, 0, 0)));
  EXPECT_TRUE(began(20, SourceContextOf(kSpace, prompt, 20, 20)));
  EXPECT_TRUE(began(kLeadTokensMax, SourceContextOf(kSpace, prompt, kLeadTokensMax, kLeadTokensMax)));
  EXPECT_FALSE(began(kLeadTokensMax + 1, SourceContextOf(kSpace, prompt, kLeadTokensMax + 1, kLeadTokensMax + 1)));
  EXPECT_FALSE(began(100, SourceContextOf(kSpace, prompt, 100, 20))) << "behind a segment";
  EXPECT_FALSE(began(20, SourceContextOf(kSpace, prompt, 20, 0))) << "behind a segment without instructions";
  EXPECT_FALSE(began(20, SourceContext{}));
}

// A frozen document that begins like another text stays findable when that one goes; the other way round the longer
// text takes over, and nothing is kept twice.
TEST_F(SegmentIndexTest, AFrozenSourceAnswersForAllOfItsTokens) {
  const Tokens document = Text(1, 256);
  const Tokens begin(document.begin(), document.begin() + 128);
  EXPECT_TRUE(index_.Insert(kSpace, Source(begin)));
  EXPECT_TRUE(index_.Insert(kSpace, Source(document), true));
  EXPECT_EQ(index_.stats().num_sources, 1u);
  EXPECT_FALSE(index_.EvictOne());
  EXPECT_EQ(index_.FindSegment(kSpace, document, All(document)).size(), 1u);
  Tokens longer = document;
  longer.insert(longer.end(), 100, 5);
  EXPECT_TRUE(index_.Insert(kSpace, Source(longer)));
  const auto hits = index_.FindSegment(kSpace, longer, All(longer));
  ASSERT_EQ(hits.size(), 2u) << "the document from the frozen source, the rest from the other";
  EXPECT_EQ(hits[0].num_tokens, 256);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_TRUE(Has(document));
  EXPECT_EQ(index_.stats().num_sources, 1u);
  index_.CheckInvariants();
}

// Random texts (some begin alike), inserts, uses and evictions, with a model of who must go next.
TEST_F(SegmentIndexTest, RandomUseKeepsTheInvariantsAndTheOrder) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::vector<Tokens> texts;
  for (int32_t i = 0; i < 14; ++i) texts.push_back(Text(i, 1 + random() % 250));
  struct Model {
    bool frozen = false;
    uint64_t rank = 0, used = 0;
  };
  std::map<size_t, Model> model;  // by text
  uint64_t clock = 0, age = 0;
  const auto use = [&](size_t i, bool freeze) {
    Model& entry = model[i];
    if (freeze && !entry.frozen) {
      entry.frozen = true;
      entry.rank = age + 1;
    }
    if (entry.frozen) entry.rank = std::max(entry.rank, age) + 1;
    entry.used = ++clock;
  };
  const auto victim = [&](bool frozen) {
    std::optional<size_t> first;
    for (const auto& [i, entry] : model) {
      if (entry.frozen != frozen) continue;
      const auto order = [](const Model& m) { return std::pair(m.frozen ? m.rank : 0, m.used); };
      if (!first || order(entry) < order(model[*first])) first = i;
    }
    return first;
  };
  for (int step = 0; step < 4000 && !HasFailure(); ++step) {
    const size_t i = random() % texts.size();
    const bool frozen = random() % 4 == 0;
    switch (random() % 4) {
      case 0: {
        const auto source = Source(texts[i]);
        if (source == nullptr) break;
        const bool is_new = !model.contains(i);
        EXPECT_EQ(index_.Insert(kSpace, source, frozen), is_new);
        if (!is_new) {
          use(i, frozen);
        } else {
          model[i] = {frozen, age + 1, ++clock};
        }
        break;
      }
      case 1: {
        const auto hits = index_.FindSegment(kSpace, texts[i], All(texts[i]), frozen);
        ASSERT_EQ(hits.size(), model.contains(i) ? 1u : 0u);
        if (hits.empty()) break;
        EXPECT_EQ(hits[0].num_tokens, static_cast<int32_t>(texts[i].size()));
        use(i, frozen);
        break;
      }
      default: {
        const bool pool = random() % 3 == 0;
        const auto expected = victim(pool);
        EXPECT_EQ(pool ? index_.EvictFrozen() : index_.EvictOne(), expected.has_value());
        if (!expected) break;
        EXPECT_FALSE(Has(texts[*expected])) << "step " << step << ", frozen " << pool;
        if (pool) age = model[*expected].rank;
        model.erase(*expected);
      }
    }
    int64_t pages = 0, frozen_pages = 0;
    for (const auto& [j, entry] : model) {
      EXPECT_TRUE(Has(texts[j])) << "step " << step;
      const int64_t held = int64_t{PagesFor(static_cast<int64_t>(texts[j].size()))} * kShape.num_streams();
      pages += held;
      frozen_pages += entry.frozen ? held : 0;
    }
    EXPECT_EQ(pool_.num_free(), kPages - pages);
    EXPECT_EQ(index_.frozen_pages(), frozen_pages);
    EXPECT_EQ(index_.stats().num_sources, model.size());
    if (step % 20 == 0) index_.CheckInvariants();
  }
  pool_.CheckInvariants();
}

// The same with texts that share their beginnings: who answers for what is not modelled, only that it is right.
TEST_F(SegmentIndexTest, TextsThatBeginAlikeNeverAnswerWrongly) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::vector<Tokens> texts;
  for (int32_t i = 0; i < 10; ++i) {
    Tokens text = i < 3 ? Text(i, 200) : texts[random() % texts.size()];
    text.resize(1 + random() % text.size());
    const Tokens tail = Text(100 + i, random() % 150);
    text.insert(text.end(), tail.begin(), tail.end());
    texts.push_back(text);
  }
  for (int step = 0; step < 4000 && !HasFailure(); ++step) {
    const Tokens& text = texts[random() % texts.size()];
    const bool frozen = random() % 4 == 0;
    const auto before = index_.stats();
    switch (random() % 4) {
      case 0:
        if (const auto source = Source(text)) {
          index_.Insert(kSpace, source, frozen);
          EXPECT_TRUE(Has(text));
        }
        break;
      case 1: {
        int32_t covered = 0;
        for (const SegmentHit& hit : index_.FindSegment(kSpace, text, All(text), frozen)) {
          EXPECT_EQ(hit.target, covered) << "without a gap";
          covered += hit.num_tokens;
          const auto there = hit.source->tokens().subspan(static_cast<size_t>(hit.offset), hit.num_tokens);
          EXPECT_TRUE(std::equal(there.begin(), there.end(), text.begin() + hit.target));
        }
        EXPECT_EQ(covered == static_cast<int32_t>(text.size()), Has(text));
        break;
      }
      case 2:
        if (index_.EvictOne()) {
          EXPECT_EQ(index_.stats().num_sources + 1, before.num_sources);
        }
        EXPECT_EQ(index_.stats().num_frozen, before.num_frozen) << "frozen sources are spared";
        break;
      default:
        EXPECT_EQ(index_.EvictFrozen(), before.num_frozen > 0);
        EXPECT_EQ(index_.stats().num_frozen + (before.num_frozen > 0 ? 1 : 0), before.num_frozen);
    }
    index_.CheckInvariants();
  }
  while (index_.EvictOne() || index_.EvictFrozen()) {
  }
  EXPECT_EQ(pool_.num_free(), kPages) << "every page came back";
}

}  // namespace
}  // namespace spl::engine
