// Page pool, head streams and prefix index, against small models of themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <set>

#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/prefix_index.h"
#include "tests/services/engine/cache_fixture.h"

namespace spl::engine {
namespace {

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

}  // namespace
}  // namespace spl::engine
