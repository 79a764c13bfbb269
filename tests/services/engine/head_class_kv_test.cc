// Sequences with head classes: which pages they keep, through growth, forks and restored heads, and that attention sees
// no difference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "kernels/attention/attention.h"
#include "kernels/backend/backend.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/cache/spare_pages.h"

namespace spl::engine {
namespace {

constexpr int32_t kPage = kernels::kPageTokens;

HeadClass Local(int32_t window, int32_t sinks) { return {false, window, sinks}; }

std::shared_ptr<const StreamClasses> Classes(std::initializer_list<HeadClass> heads) {
  return std::make_shared<const StreamClasses>(std::vector<HeadClass>(heads));
}

TEST(PageHole, LeavesSinksAndWindow) {
  EXPECT_EQ(HoleOf({}, 100'000), PageHole{});
  const HeadClass head = Local(256, 64);
  EXPECT_EQ(HoleOf(head, 64 + 256), PageHole{}) << "sinks and window meet";
  EXPECT_EQ(HoleOf(head, 64 + 256 + 63), PageHole{}) << "the page between them still holds the first of the window";
  EXPECT_EQ(HoleOf(head, 64 + 256 + 64), (PageHole{1, 2}));
  EXPECT_EQ(HoleOf(head, 6400), (PageHole{1, 96}));
  EXPECT_EQ(HoleOf(head, 6463), (PageHole{1, 96}));
  EXPECT_EQ(HoleOf(head, 6464), (PageHole{1, 97}));
  EXPECT_EQ(HoleOf(Local(256, 4), 6400), (PageHole{1, 96})) << "four sinks have a page";
  EXPECT_EQ(HoleOf(Local(256, 0), 6400), (PageHole{0, 96}));
  EXPECT_EQ(HoleOf(Local(1, 0), 6400), (PageHole{0, 99}));
}

TEST(PageHole, LastsAsLongAsItSays) {
  for (const HeadClass& head : {Local(1, 0), Local(64, 4), Local(100, 65), Local(256, 64), Local(63, 300)}) {
    for (int64_t n = 0; n < 1500; ++n) {
      const int64_t last = HoleLastsUntil(head, n);
      ASSERT_GE(last, n);
      EXPECT_EQ(HoleOf(head, last), HoleOf(head, n)) << n;
      // One more and the window has left a page (which changes the hole as soon as there is one).
      if (HoleOf(head, n).size() > 0) {
        EXPECT_NE(HoleOf(head, last + 1), HoleOf(head, n)) << n;
      }
    }
  }
}

TEST(PageHole, HoldsNothingThatIsSeen) {
  for (const HeadClass& head : {Local(1, 0), Local(64, 4), Local(100, 65), Local(256, 64)}) {
    for (int64_t n = 1; n < 1200; ++n) {
      const PageHole hole = HoleOf(head, n);
      for (int64_t row = n - 1; row < n + 70; row += 23) {
        for (int64_t j = 0; j <= row; ++j) {
          const bool seen = j < head.sinks || j > row - head.window;
          ASSERT_FALSE(seen && j / kPage >= hole.begin && j / kPage < hole.end) << n << " row " << row << " sees " << j;
        }
      }
    }
  }
}

// Pages filled with NaN as soon as they are free: whoever reads one shows it.
class HeadClassKvTest : public testing::Test {
 protected:
  static constexpr int32_t kPages = 600, kDim = 8;
  static constexpr KvShape kShape{.num_layers = 2, .num_kv_heads = 4};

  explicit HeadClassKvTest(int ranks = 1) : memory_(static_cast<size_t>(kPages) * 2 * kPage * kDim, std::nanf("")) {
    std::vector<std::byte*> bases;
    for (int r = 0; r < ranks; ++r)
      bases.push_back(reinterpret_cast<std::byte*>(memory_.data()) + r * PartBytes(ranks));
    pool_ = std::make_unique<PagePool>(
        KvPartitions(kernels::KvPoolView{.dtype = kernels::DType::kF32, .head_dim = kDim}, bases, kPages / ranks),
        std::vector<const kernels::Backend*>(static_cast<size_t>(ranks)));
  }
  static size_t PartBytes(int ranks) { return size_t{kPages} / ranks * 2 * kPage * kDim * sizeof(float); }
  float* Slot(int32_t page, int64_t position, bool value) const {
    const kernels::KvPoolView& view = pool_->view().rank(pool_->view().rank_of(page));
    return reinterpret_cast<float*>(value ? view.v(page) : view.k(page)) + position % kPage * kDim;
  }
  // What a position of a stream holds in every sequence with this seed.
  static float Number(uint32_t seed, size_t stream, int64_t position, int i) {
    uint64_t x = seed * 1'000'003ull + stream * 7919 + static_cast<uint64_t>(position) * 104'729 + i;
    x ^= x >> 31, x *= 0x9e3779b97f4a7c15ull, x ^= x >> 29;
    return static_cast<float>(x % 2001) / 1000.0f - 1.0f;
  }
  void Write(SequenceKv& kv, uint32_t seed, int64_t position) const {
    for (size_t s = 0; s < kv.streams().size(); ++s) {
      const int32_t page = kv.streams()[s][static_cast<size_t>(position / kPage)];
      if (page == kernels::kNoPage) continue;
      for (int i = 0; i < kDim; ++i) {
        Slot(page, position, false)[i] = Number(seed, s, position, i);
        Slot(page, position, true)[i] = Number(seed + 1, s, position, i);
      }
    }
  }
  // As a prompt that lands from elsewhere.
  void Land(SequenceKv& kv, uint32_t seed, int64_t num_tokens) const {
    for (int64_t p = 0; p < num_tokens; ++p) Write(kv, seed, p);
    kv.set_num_tokens(num_tokens);
  }
  void PoisonFree() {
    for (int32_t page = 0; page < kPages; ++page) {
      if (pool_->owners(page) == 0) std::memset(pool_->view().k(page), 0xff, pool_->view().page_bytes());
    }
  }
  // Attention of one row at the last position, all layers: [layers][qo heads][dim].
  std::vector<float> Attend(const SequenceKv& kv, const StreamClasses* classes, int64_t num_tokens, bool reference) {
    constexpr int32_t kGroup = 2;
    const int32_t heads = kShape.num_kv_heads;
    std::vector<float> q(static_cast<size_t>(heads * kGroup * kDim)), all;
    for (size_t i = 0; i < q.size(); ++i) q[i] = Number(77, i, num_tokens, 0);
    for (int32_t layer = 0; layer < kShape.num_layers; ++layer) {
      std::vector<kernels::HeadStreamView> streams;
      for (int32_t h = 0; h < heads; ++h) {
        const HeadClass head = classes == nullptr ? HeadClass{} : (*classes)[static_cast<size_t>(layer * heads + h)];
        streams.push_back({kv.stream(layer, h), static_cast<int32_t>(num_tokens), head.visibility()});
      }
      std::vector<float> out(q.size());
      const kernels::DecodeAttentionArgs args{.shape = {heads * kGroup, heads, kDim, 0.35f},
                                              .pool = pool_->view().rank(0),
                                              .q = q.data(),
                                              .q_row_stride = static_cast<int64_t>(q.size()),
                                              .out = out.data(),
                                              .streams = streams,
                                              .layer = layer};
      const kernels::KernelContext& context = session_->context();
      EXPECT_TRUE(
          (reference ? kernels::ref::DecodeAttention(context, args) : kernels::cpu::DecodeAttention(context, args))
              .ok());
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }

  std::vector<float> memory_;
  std::unique_ptr<PagePool> pool_;
  std::shared_ptr<const kernels::Backend> backend_ = kernels::MakeCpuBackend();
  std::unique_ptr<kernels::Session> session_ = *backend_->NewSession({.num_threads = 1});
};

TEST_F(HeadClassKvTest, APromptTakesSinksAndWindowOfLocalHeads) {
  const auto classes =
      Classes({{}, Local(256, 64), Local(1024, 64), {}, Local(100, 0), Local(64, 130), {}, Local(1, 4)});
  {
    SequenceKv kv(*pool_, kShape, classes);
    ASSERT_TRUE(kv.Reserve(3000).ok());  // 47 pages
    EXPECT_EQ(kv.num_pages_per_stream(), 47);
    // floor((3000 - window) / 64): 42, 30, 45, 45, 46.
    const int64_t pages = 3 * 47 + (1 + 5) + (1 + 17) + 2 + (3 + 2) + (1 + 1);
    EXPECT_EQ(kv.num_pages(), pages);
    EXPECT_EQ(pool_->num_free(), kPages - pages);
    EXPECT_EQ(PagesByRank(kShape, classes.get(), 1, 3000), std::vector<int64_t>{pages});
    EXPECT_EQ(static_cast<int64_t>(kv.AllPages().size()), pages);
    EXPECT_EQ(kv.stream(0, 1)[1], kernels::kNoPage);
    EXPECT_EQ(kv.PagesOfChunk(20)[1], kernels::kNoPage);
    EXPECT_NE(kv.PagesOfChunk(20)[0], kernels::kNoPage);
    EXPECT_EQ(kv.hole(1), (PageHole{1, 42}));
    // One stream's pages still lie together.
    EXPECT_EQ(kv.stream(0, 1)[42], kv.stream(0, 1)[0] + 1);
    kv.CheckInvariants();
    pool_->CheckInvariants();
  }
  EXPECT_EQ(pool_->num_free(), kPages);
}

TEST_F(HeadClassKvTest, AFullPoolChangesNothing) {
  SequenceKv kv(*pool_, kShape, Classes({{}, {}, {}, {}, Local(64, 4), Local(64, 4), Local(64, 4), Local(64, 4)}));
  ASSERT_TRUE(kv.Reserve(640).ok());
  std::vector<int32_t> rest;
  ASSERT_TRUE(pool_->Allocate(pool_->num_free(), rest).ok());
  const std::vector<int32_t> before = kv.AllPages();
  EXPECT_EQ(kv.Reserve(641).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(kv.AllPages(), before);
  kv.CheckInvariants();
  pool_->Release(rest);
  ASSERT_TRUE(kv.Reserve(641).ok());
  kv.CheckInvariants();
}

TEST_F(HeadClassKvTest, AttentionSeesNoDifferenceAndNoFreedPage) {
  const auto classes =
      Classes({{}, Local(100, 10), Local(64, 64), Local(1, 0), Local(200, 130), {}, Local(65, 1), Local(128, 0)});
  SequenceKv dense(*pool_, kShape), view(*pool_, kShape, classes), late(*pool_, kShape);
  constexpr int64_t kPrompt = 333;
  ASSERT_TRUE(dense.Reserve(kPrompt).ok());
  ASSERT_TRUE(late.Reserve(kPrompt).ok());
  Land(dense, 5, kPrompt);
  Land(late, 5, kPrompt);
  ASSERT_TRUE(view.Reserve(kPrompt).ok());
  Land(view, 5, kPrompt);
  const int64_t free_before = pool_->num_free();
  late.Compress(classes);
  EXPECT_EQ(late.num_pages(), view.num_pages());
  EXPECT_EQ(pool_->num_free(), free_before + dense.num_pages() - view.num_pages());
  for (int64_t n = kPrompt + 1; n < kPrompt + 300; ++n) {
    for (SequenceKv* kv : {&dense, &view, &late}) {
      ASSERT_TRUE(kv->Reserve(n).ok());
      kv->CheckInvariants();
      Write(*kv, 5, n - 1);
      kv->set_num_tokens(n);
    }
    PoisonFree();
    for (const bool reference : {true, false}) {
      const auto expected = Attend(dense, classes.get(), n, reference);
      ASSERT_TRUE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); })) << n;
      ASSERT_EQ(Attend(view, classes.get(), n, reference), expected) << n;
      ASSERT_EQ(Attend(late, classes.get(), n, reference), expected) << n;
    }
  }
  EXPECT_NE(Attend(dense, nullptr, dense.num_tokens(), false), Attend(dense, classes.get(), dense.num_tokens(), false));
}

TEST_F(HeadClassKvTest, ForksShareWhatIsKeptAndCopyTheUnfinishedPage) {
  const auto classes = Classes({{}, Local(64, 4), {}, Local(64, 4), {}, Local(64, 4), {}, Local(64, 4)});
  SequenceKv kv(*pool_, kShape, classes);
  ASSERT_TRUE(kv.Reserve(1000).ok());
  Land(kv, 3, 1000);
  const int64_t used = kPages - pool_->num_free();
  auto fork = kv.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(kPages - pool_->num_free(), used + kShape.num_streams()) << "a copy of the unfinished page each";
  EXPECT_EQ((*fork)->num_pages(), kv.num_pages());
  EXPECT_EQ((*fork)->stream(0, 1)[0], kv.stream(0, 1)[0]);
  EXPECT_EQ((*fork)->stream(0, 1)[5], kernels::kNoPage);
  EXPECT_NE((*fork)->stream(0, 1)[15], kv.stream(0, 1)[15]);
  (*fork)->CheckInvariants();
  // They go different ways; what one gives back the other still has.
  for (int64_t n = 1001; n < 1200; ++n) {
    for (SequenceKv* each : {&kv, fork->get()}) {
      ASSERT_TRUE(each->Reserve(n).ok());
      Write(*each, each == &kv ? 3 : 4, n - 1);
      each->set_num_tokens(n);
    }
    PoisonFree();
    if (n == 1010) {
      const auto mine = Attend(kv, classes.get(), n, true), other = Attend(**fork, classes.get(), n, true);
      EXPECT_NE(mine, other);
    }
    for (const float x : Attend(**fork, classes.get(), n, true)) ASSERT_TRUE(std::isfinite(x));
  }
  kv.CheckInvariants();
  fork->reset();
  pool_->CheckInvariants();
}

TEST_F(HeadClassKvTest, ARestoredHeadKeepsEverythingFromThenOn) {
  const auto classes = Classes({{}, Local(64, 4), {}, Local(64, 4), {}, Local(128, 4), {}, Local(64, 4)});
  SequenceKv kv(*pool_, kShape, classes), other(*pool_, kShape, classes);
  ASSERT_TRUE(kv.Reserve(1000).ok());
  std::vector<int32_t> spare;
  ASSERT_TRUE(pool_->Allocate(kv.hole(5).size(), spare).ok());
  kv.Restore(5, spare);
  EXPECT_EQ(kv.hole(5), PageHole{});
  EXPECT_TRUE((*kv.classes())[5].is_global);
  EXPECT_FALSE((*other.classes())[5].is_global) << "of this sequence alone";
  kv.CheckInvariants();
  Land(kv, 9, 1000);
  for (const float x : Attend(kv, kv.classes().get(), 1000, true)) EXPECT_TRUE(std::isfinite(x));
  ASSERT_TRUE(kv.Reserve(1300).ok());
  kv.CheckInvariants();
  EXPECT_EQ(kv.hole(5), PageHole{});
  EXPECT_DEATH(kv.Restore(5, spare), "a local head is restored");
}

TEST_F(HeadClassKvTest, AViewIsNoSourceOfAnything) {
  const auto classes = Classes({{}, {}, {}, {}, {}, {}, {}, {}});
  SequenceKv kv(*pool_, kShape, classes);
  ASSERT_TRUE(kv.Reserve(128).ok());
  kv.set_num_tokens(128);
  PrefixIndex index(*pool_);
  const chunk::ChunkKey key{};
  EXPECT_DEATH(index.Insert({&key, 1}, kv), "no source of a prefix");
  EXPECT_DEATH(index.AppendLeading({&key, 1}, kv), "keep everything");
  const std::vector<int32_t> text(64);
  EXPECT_DEATH(SegmentSource(kv, 0, text, SourceContext{.isolated = true}), "no source of a segment");
}

TEST_F(HeadClassKvTest, SparesAreForTheHeadsThatMayBeRestored) {
  // Heads 1 and 3 of layer 0, 5 and 6 of layer 1 are local; 6 has no hole at 1000 tokens.
  const auto classes = Classes({{}, Local(64, 4), {}, Local(64, 64), {}, Local(128, 0), Local(2000, 0), {}});
  EXPECT_EQ(HoleOf((*classes)[1], 1000), (PageHole{1, 14}));
  EXPECT_EQ(HoleOf((*classes)[5], 1000), (PageHole{0, 13}));
  SpareNeed need = SparesFor(kShape, *classes, 1, 1000, 0.1);
  EXPECT_EQ(need.lists_of_rank, std::vector<int32_t>{1}) << "ceil(0.1 * 4)";
  EXPECT_EQ(need.pages_per_list, 13);
  EXPECT_EQ(need.num_pages(), 13);
  EXPECT_EQ(SparesFor(kShape, *classes, 1, 1000, 0).num_pages(), 0);
  EXPECT_EQ(SparesFor(kShape, *classes, 1, 100, 1).num_pages(), 0) << "nothing is left out yet";
  EXPECT_EQ(SparesFor(kShape, *classes, 1, 1000, 1).lists_of_rank, std::vector<int32_t>{3});
  // Two ranks of two heads: any of a rank's heads may be restored, so each rank has room for as many as it has.
  EXPECT_EQ(SparesFor(kShape, *classes, 2, 1000, 0.5).lists_of_rank, (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(SparesFor(kShape, *classes, 4, 1000, 0.1).lists_of_rank, (std::vector<int32_t>{0, 1, 0, 1}));

  const auto assign = [&](const std::vector<int32_t>& lists, const std::vector<int32_t>& restored) {
    return AssignSpares(kShape, *classes, 1000, lists, restored);
  };
  EXPECT_EQ(*assign({3}, {1, 5, 6}), (std::vector<int32_t>{0, 1, -1}));
  EXPECT_EQ(*assign({2, 1}, {3, 6}), (std::vector<int32_t>{2, -1}));
  EXPECT_EQ(*assign({2, 1}, {1, 3, 5}), (std::vector<int32_t>{0, 2, 1})) << "heads 1 of both layers are of rank 0";
  EXPECT_EQ(*assign({}, {6}), std::vector<int32_t>{-1});
  for (const auto& wrong : std::vector<std::vector<int32_t>>{{5, 1}, {1, 1}, {0}, {-1}, {8}, {1, 3, 5}})
    EXPECT_EQ(assign({2}, wrong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(HeadClassKvTest, SparesComeBackUnlessTheyAreTaken) {
  {
    auto spares = SparePages::Reserve(*pool_, {.lists_of_rank = {2}, .pages_per_list = 10});
    ASSERT_TRUE(spares.ok());
    EXPECT_EQ(pool_->num_free(), kPages - 20);
    const auto taken = (*spares)->Take(1, 7);
    EXPECT_EQ(taken.size(), 7u);
    EXPECT_EQ((*spares)->pages()[10], kernels::kNoPage);
    spares->reset();
    EXPECT_EQ(pool_->num_free(), kPages - 7);
    pool_->Release(taken);
  }
  EXPECT_EQ(pool_->num_free(), kPages);
  EXPECT_EQ(SparePages::Reserve(*pool_, {.lists_of_rank = {100}, .pages_per_list = 10}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool_->num_free(), kPages);
}

// Random classes, growth by ones and by jumps, forks, restored heads, deaths; of one rank and of several.
class HeadClassKvRankTest : public HeadClassKvTest, public testing::WithParamInterface<int> {
 protected:
  HeadClassKvRankTest() : HeadClassKvTest(GetParam()) {}
};

TEST_P(HeadClassKvRankTest, RandomUseKeepsTheInvariants) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto random_classes = [&] {
    std::vector<HeadClass> classes;
    for (int32_t s = 0; s < kShape.num_streams(); ++s) {
      if (random() % 3 == 0)
        classes.emplace_back();
      else
        classes.push_back(Local(static_cast<int32_t>(1 + random() % 300), static_cast<int32_t>(random() % 150)));
    }
    return std::make_shared<const StreamClasses>(std::move(classes));
  };
  std::vector<std::unique_ptr<SequenceKv>> sequences;
  for (int step = 0; step < 4000; ++step) {
    const uint32_t action = random() % 10;
    if (sequences.empty() || action == 0) {
      auto kv =
          std::make_unique<SequenceKv>(*pool_, kShape, random() % 4 == 0 ? nullptr : std::shared_ptr(random_classes()));
      const int64_t prompt = 1 + random() % 700;
      const auto wanted = PagesByRank(kShape, kv->classes().get(), GetParam(), prompt);
      const bool fits = pool_->HasFree(wanted);
      ASSERT_EQ(kv->Reserve(prompt).ok(), fits);
      if (!fits) continue;
      EXPECT_EQ(kv->num_pages(), std::accumulate(wanted.begin(), wanted.end(), int64_t{0}));
      kv->set_num_tokens(prompt);
      if (kv->classes() != nullptr && random() % 3 == 0) {
        const auto stream = static_cast<int32_t>(random() % kShape.num_streams());
        std::vector<int64_t> counts(static_cast<size_t>(GetParam()));
        const auto rank = static_cast<size_t>(stream % 4 / (4 / GetParam()));
        counts[rank] = kv->hole(stream).size();
        std::vector<int32_t> spare;
        if (!(*kv->classes())[static_cast<size_t>(stream)].is_global && pool_->AllocateByRank(counts, spare).ok())
          kv->Restore(stream, spare);
      }
      sequences.push_back(std::move(kv));
    } else {
      const size_t i = random() % sequences.size();
      SequenceKv& kv = *sequences[i];
      if (action <= 6) {
        const int64_t next = kv.num_tokens() + (action <= 5 ? 1 : 1 + random() % 200);
        const std::vector<int32_t> before = kv.AllPages();
        if (kv.Reserve(next).ok()) {
          kv.set_num_tokens(next);
        } else {
          EXPECT_EQ(kv.AllPages(), before);
        }
      } else if (action == 7) {
        auto fork = kv.Fork();
        if (fork.ok()) sequences.push_back(*std::move(fork));
      } else if (action == 8 && kv.classes() == nullptr && PagesFor(kv.num_tokens()) == kv.num_pages_per_stream()) {
        kv.Compress(random_classes());
      } else {
        sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      kv.CheckInvariants();
    }
    if (step % 20 != 0) continue;
    pool_->CheckInvariants();
    std::map<int32_t, int32_t> owners;
    for (const auto& kv : sequences) {
      for (const int32_t page : kv->AllPages()) ++owners[page];
    }
    for (int32_t page = 0; page < kPages; ++page)
      ASSERT_EQ(pool_->owners(page), owners.contains(page) ? owners[page] : 0) << page;
  }
  sequences.clear();
  EXPECT_EQ(pool_->num_free(), kPages);
  pool_->CheckInvariants();
}

INSTANTIATE_TEST_SUITE_P(Ranks, HeadClassKvRankTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace spl::engine
