// Streams that hold a part of their sequence: their lists, and that operations which choose among the tokens of a list
// choose what they would of a sequence that consists of these tokens only.
#include "kernels/selection/candidates.h"

#include <gmock/gmock.h>

#include <functional>

#include "kernels/selection/loopserve/query_window.h"
#include "kernels/selection/quest/page_bound_scores.h"
#include "kernels/selection/top_tokens.h"
#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

using ListOp = absl::Status (*)(const KernelContext&, const ListCandidatesArgs&);
constexpr ListOp kListOps[] = {&ref::ListCandidates, &cpu::ListCandidates};

// Lists of a batch, -9 where nothing was written.
struct Lists {
  std::vector<int32_t> tokens, counts;
  int64_t stride;

  Lists(size_t streams, int64_t list_stride)
      : tokens(streams * static_cast<size_t>(list_stride), -9), counts(streams, -9), stride(list_stride) {}
  TokenLists view() { return {tokens.data(), counts.data(), stride}; }
  std::span<const int32_t> of(size_t stream) const {
    return std::span(tokens).subspan(stream * static_cast<size_t>(stride), static_cast<size_t>(counts[stream]));
  }
};

TEST(ListCandidates, IsWhatIsListedAndWhatIsFresh) {
  for (const uint64_t seed : {10u, 11u, 12u, 13u}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const SelectingShape shape{2, 1, seed == 11 ? 40 : 16, 8, seed == 12 ? DType::kF32 : DType::kBF16};
    SelectingBatch b(random, shape, {{70, 90}, {2, 30}, {5000, 5020}, {700, 720}});
    b.Write();
    for (size_t i = 1; i < 4; ++i) b.HoldSome(random, i, i == 2 ? 64 : 3, i == 3 && seed == 13 ? 0 : 0.6);
    TestContext t(DetectCpuIsa(), 3);
    for (int step = 0; step < 10; ++step) {
      for (TestSequence& s : b.sequences()) {
        s.step.selects = random.Int(0, 3) == 0;
        s.step.num_sinks = random.Int(0, 40);
        s.step.window = random.Int(0, 2) == 0 ? 0 : random.Int(1, 800);
      }
      std::vector<SelectingSequence> views;
      for (TestSequence& s : b.sequences()) views.push_back(s.view());
      for (const ListOp op : kListOps) {
        Lists lists(b.num_streams(), 5020);
        const absl::Status status =
            op(t.ctx,
               {.pool = b.pool().view(), .num_kv_heads = shape.kv_heads, .sequences = views, .lists = lists.view()});
        ASSERT_TRUE(status.ok()) << status;
        for (size_t stream = 0; stream < b.num_streams(); ++stream) {
          const TestSequence& s = b.sequence_of(stream);
          const size_t head = stream % static_cast<size_t>(shape.kv_heads);
          if (s.listed.empty() || s.step.selects) {
            EXPECT_EQ(lists.counts[stream], -9) << "another's list";
            continue;
          }
          std::vector<int32_t> want;
          for (int32_t i = 0; i < s.candidates(head); ++i) {
            if (s.step.window == 0 || i < s.step.num_sinks || i >= s.candidates(head) - s.step.window)
              want.push_back(s.position(head, i));
          }
          EXPECT_TRUE(std::ranges::equal(lists.of(stream), want)) << "step " << step << ", stream " << stream;
        }
      }
      for (size_t i = 0; i < 4; ++i) b.Append(i);
    }
  }
}

TEST(ListCandidates, BadArgumentsAreNamed) {
  for (const ListOp op : kListOps) {
    const auto error = [&](const std::function<void(TestSequence&, ListCandidatesArgs&, SelectingSequence&)>& change) {
      Random random(14);
      SelectingBatch b(random, {1, 1, 16, 8}, {{300, 310}});
      b.Write();
      b.Hold(0, {{3, 4, 9, 200}}, 290);
      b.sequences()[0].step.selects = false;
      SelectingSequence view = b.sequences()[0].view();
      Lists lists(1, 100);
      ListCandidatesArgs args{
          .pool = b.pool().view(), .num_kv_heads = 1, .sequences = {&view, 1}, .lists = lists.view()};
      change(b.sequences()[0], args, view);
      const absl::Status status = op({}, args);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      return std::string(status.message());
    };
    using S = TestSequence;
    using A = ListCandidatesArgs;
    using V = SelectingSequence;
    const auto entry = [](S& s, A& a, int32_t i) -> int32_t& {
      return reinterpret_cast<int32_t*>(a.pool.k(s.list_pages[0][0]))[i];
    };
    EXPECT_THAT(error([](S&, A& a, V&) { a.num_kv_heads = 0; }), HasSubstr("num_kv_heads is 0"));
    EXPECT_THAT(error([](S&, A&, V& v) { v.list_tables = {}; }), HasSubstr("0 list_tables"));
    EXPECT_THAT(error([](S&, A&, V& v) { v.first_fresh = 301; }), HasSubstr("first_fresh is 301"));
    EXPECT_THAT(error([](S&, A&, V& v) { v.step.num_sinks = -1; }), HasSubstr("num_sinks is -1"));
    EXPECT_THAT(error([](S&, A& a, V&) { a.lists.stride = 13; }), HasSubstr("a list of 14 positions"));
    EXPECT_THAT(error([](S&, A& a, V&) { a.lists.tokens = nullptr; }), HasSubstr("null"));
    EXPECT_THAT(error([&](S& s, A& a, V&) { entry(s, a, 0) = 2000; }), HasSubstr("a list of 2000 positions"));
    EXPECT_THAT(error([&](S& s, A& a, V&) { entry(s, a, 0) = -1; }), HasSubstr("a list of -1 positions"));
    EXPECT_THAT(error([&](S& s, A& a, V&) { entry(s, a, 4) = 290; }), HasSubstr("listed position is 290"));
    EXPECT_THAT(error([](S& s, A& a, V&) { s.list_pages[0][0] = a.pool.num_pages; }), HasSubstr("list_tables names"));
  }
}

// Two batches: sequences that hold a part of what they had, and sequences of that part alone, with equal queries.
class SparseStreamsTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  struct Pair {
    std::unique_ptr<SelectingBatch> held, packed;

    // One more position in every stream of both.
    void Append() {
      for (size_t i = 0; i < held->sequences().size(); ++i) {
        held->Append(i);
        packed->Append(i);
      }
    }
    std::vector<int32_t> Positions(size_t stream, std::span<const int32_t> numbers) const {
      const TestSequence& s = held->sequence_of(stream);
      std::vector<int32_t> positions;
      for (const int32_t i : numbers)
        positions.push_back(s.position(stream % static_cast<size_t>(held->shape().kv_heads), i));
      return positions;
    }
  };

  static Pair MakePair(Random& random, const SelectingShape& shape, int32_t steps, int32_t page_tokens) {
    Pair pair;
    const std::vector<int32_t> lengths = {40, 300, 1000, 1500};
    const double shares[] = {0.5, 0.9, 0.25, 0};
    std::vector<std::pair<int32_t, int32_t>> both;
    for (const int32_t length : lengths) both.emplace_back(length, length + steps);
    pair.held = std::make_unique<SelectingBatch>(random, shape, both, page_tokens);
    pair.held->Write();
    std::vector<std::vector<TestStream>> whole;
    for (size_t i = 0; i < lengths.size(); ++i) {
      whole.push_back(pair.held->sequences()[i].streams);
      pair.held->HoldSome(random, i, i % 2 == 0 ? 64 : 2, shares[i]);
    }
    both.clear();
    for (const TestSequence& s : pair.held->sequences()) both.emplace_back(s.candidates(0), s.candidates(0) + steps);
    pair.packed = std::make_unique<SelectingBatch>(random, shape, both, page_tokens);
    for (size_t i = 0; i < lengths.size(); ++i) {
      const TestSequence& s = pair.held->sequences()[i];
      for (size_t h = 0; h < s.streams.size(); ++h) {
        TestStream& to = pair.packed->sequences()[i].streams[h];
        const auto dim = static_cast<size_t>(shape.head_dim);
        for (int32_t c = 0; c < both[i].second; ++c) {
          const auto from = static_cast<size_t>(s.position(h, c)) * dim;
          std::copy_n(whole[i][h].k.begin() + static_cast<int64_t>(from), dim,
                      to.k.begin() + static_cast<int64_t>(static_cast<size_t>(c) * dim));
          std::copy_n(whole[i][h].v.begin() + static_cast<int64_t>(from), dim,
                      to.v.begin() + static_cast<int64_t>(static_cast<size_t>(c) * dim));
        }
      }
    }
    pair.packed->Write();
    return pair;
  }
  // What both are told, and queries.
  static void Tell(Pair& pair, Random& random, const std::function<void(TestSequence&)>& change) {
    pair.held->q() = random.Normals(pair.held->q().size());
    pair.packed->q() = pair.held->q();
    for (size_t i = 0; i < pair.held->sequences().size(); ++i) {
      TestSequence& s = pair.held->sequences()[i];
      change(s);
      TestSequence& p = pair.packed->sequences()[i];
      p.step = s.step;
      p.step.listed = false;
      p.budget = s.budget;
      p.recent = s.recent;
    }
  }
  static void Advance(Pair& pair) {
    for (SelectingBatch* b : {pair.held.get(), pair.packed.get()}) {
      for (TestSequence& s : b->sequences()) {
        if (s.step.selects) s.Advance();
      }
    }
    pair.Append();
  }
  // A budget from a few tokens to more than there are.
  static void RandomBudget(Random& random, TestSequence& s, int32_t granularity) {
    const int32_t most = random.Int(0, 4) == 0 ? 2000 : s.candidates(0);
    s.budget = std::max(random.Int(1, most) / granularity, 1) * granularity;
    s.recent = random.Int(1, std::min(s.budget, 70));
  }
};

TEST_P(SparseStreamsTest, SelectTokensChoosesAsOfASequenceOfThese) {
  TestContext t(GetParam());
  using Op = absl::Status (*)(const KernelContext&, const SelectTokensArgs&);
  for (const Op op : {Op{&ref::SelectTokens}, Op{&cpu::SelectTokens}}) {
    for (size_t n = 0; n < kShapesOfAllTypes.size(); ++n) {
      const uint64_t seed = 20 + n;
      SCOPED_TRACE("seed " + std::to_string(seed));
      Random random(seed);
      const CompactKeys compact{kShapesOfAllTypes[n].head_dim, kShapesOfAllTypes[n].num_dims,
                                kShapesOfAllTypes[n].dtype};
      Pair pair = MakePair(random, kShapesOfAllTypes[n], 12, compact.page_tokens());
      for (int step = 0; step < 12; ++step) {
        Tell(pair, random, [&](TestSequence& s) {
          s.step.selects = step == 0 || random.Int(0, 4) > 0;
          s.step.refresh |= random.Int(0, 3) == 0;
          RandomBudget(random, s, 1);
        });
        constexpr int64_t kStride = 2000;
        const auto run = [&](SelectingBatch& b, Lists& lists, std::vector<float>& weights) {
          std::vector<SelectingSequence> views;
          for (TestSequence& s : b.sequences()) views.push_back(s.view());
          SelectTokensArgs a;
          a.shape = b.shape().attention();
          a.pool = b.pool().view();
          a.num_dims = b.shape().num_dims;
          a.q = b.q().data();
          a.q_row_stride = b.shape().q_width();
          a.sequences = views;
          a.lists = lists.view();
          a.weights = weights.data();
          a.weights_stride = kStride;
          const absl::Status status = op(t.ctx, a);
          ASSERT_TRUE(status.ok()) << status;
        };
        Lists got(pair.held->num_streams(), kStride), want = got;
        std::vector<float> weights(got.tokens.size(), -1.0f), packed_weights = weights;
        run(*pair.held, got, weights);
        run(*pair.packed, want, packed_weights);
        EXPECT_TRUE(BitwiseEqual(weights, packed_weights)) << "step " << step;
        for (size_t stream = 0; stream < pair.held->num_streams(); ++stream) {
          const TestSequence& s = pair.held->sequence_of(stream);
          ASSERT_EQ(got.counts[stream], want.counts[stream]);
          if (!s.step.selects) continue;
          EXPECT_TRUE(std::ranges::equal(got.of(stream), pair.Positions(stream, want.of(stream))))
              << "step " << step << ", stream " << stream << ", budget " << s.budget << " of " << s.candidates(0);
          EXPECT_TRUE(pair.held->CompactKeysAreThoseOf(stream, pair.held->dims(stream)));
        }
        Advance(pair);
      }
    }
  }
}

TEST_P(SparseStreamsTest, PageBoundsChooseAsOfASequenceOfThese) {
  TestContext t(GetParam());
  using Scores = absl::Status (*)(const KernelContext&, const PageBoundScoresArgs&);
  using Top = absl::Status (*)(const KernelContext&, const TopTokensArgs&);
  for (const auto& [score, top] : {std::pair{Scores{&ref::PageBoundScores}, Top{&ref::TopTokens}},
                                   std::pair{Scores{&cpu::PageBoundScores}, Top{&cpu::TopTokens}}}) {
    for (size_t n = 0; n < kShapesOfAllTypes.size(); ++n) {
      const uint64_t seed = 30 + n;
      SCOPED_TRACE("seed " + std::to_string(seed));
      Random random(seed);
      Pair pair = MakePair(random, kShapesOfAllTypes[n], 40, BoundPageTokens(kShapesOfAllTypes[n].dtype));
      for (int step = 0; step < 40; ++step) {  // beyond two granules
        Tell(pair, random, [&](TestSequence& s) {
          s.step.selects = step == 0 || random.Int(0, 4) > 0;
          RandomBudget(random, s, kBoundTokens);
        });
        constexpr int64_t kStride = 2048;
        const auto run = [&, score = score, top = top](SelectingBatch& b, Lists& lists, std::vector<float>& scores) {
          std::vector<SelectingSequence> views;
          for (TestSequence& s : b.sequences()) views.push_back(s.view());
          absl::Status status = score(t.ctx, {.shape = b.shape().attention(),
                                              .pool = b.pool().view(),
                                              .q = b.q().data(),
                                              .q_row_stride = b.shape().q_width(),
                                              .sequences = views,
                                              .scores = scores.data(),
                                              .scores_stride = kStride});
          ASSERT_TRUE(status.ok()) << status;
          status = top(t.ctx, {.scores = scores.data(),
                               .scores_stride = kStride,
                               .granularity = kBoundTokens,
                               .num_kv_heads = b.shape().kv_heads,
                               .pool = b.pool().view(),
                               .sequences = views,
                               .lists = lists.view()});
          ASSERT_TRUE(status.ok()) << status;
        };
        Lists got(pair.held->num_streams(), 2048), want = got;
        std::vector<float> scores(got.tokens.size(), -1.0f), packed_scores = scores;
        run(*pair.held, got, scores);
        run(*pair.packed, want, packed_scores);
        EXPECT_TRUE(BitwiseEqual(scores, packed_scores)) << "step " << step;
        for (size_t stream = 0; stream < pair.held->num_streams(); ++stream) {
          ASSERT_EQ(got.counts[stream], want.counts[stream]);
          if (!pair.held->sequence_of(stream).step.selects) continue;
          EXPECT_TRUE(std::ranges::equal(got.of(stream), pair.Positions(stream, want.of(stream))))
              << "step " << step << ", stream " << stream;
        }
        Advance(pair);
      }
    }
  }
}

TEST_P(SparseStreamsTest, QueryWindowsChooseAsOfASequenceOfThese) {
  TestContext t(GetParam());
  using Op = absl::Status (*)(const KernelContext&, const QueryWindowArgs&);
  for (const auto& [exact, op] :
       {std::pair{true, Op{&ref::ChooseByQueryWindow}}, std::pair{false, Op{&cpu::ChooseByQueryWindow}}}) {
    for (size_t n = 0; n < kShapesOfAllTypes.size(); ++n) {
      const uint64_t seed = 40 + n;
      SCOPED_TRACE("seed " + std::to_string(seed) + (exact ? ", ref" : ", cpu"));
      Random random(seed);
      const int32_t window = 5, budget = 60;
      const QueryWindow layout{.head_dim = kShapesOfAllTypes[n].head_dim,
                               .group = kShapesOfAllTypes[n].group,
                               .window = window,
                               .budget = budget,
                               .query_dtype = DType::kF32,
                               .page_bytes = KvPageBytes(kShapesOfAllTypes[n].dtype, kShapesOfAllTypes[n].head_dim)};
      // The shortest sequence has at least as many as these.
      Pair pair = MakePair(random, kShapesOfAllTypes[n], 17, 20 / static_cast<int32_t>(layout.num_pages()));
      for (int step = 0; step < 17; ++step) {
        Tell(pair, random, [&](TestSequence& s) {
          const bool selects = step + 1 >= window;
          s.step = {.selects = selects,
                    .refresh = selects && (step + 1) % window == 0,
                    .compact_len = step,
                    .records = true,
                    .listed = true};
          s.budget = budget;
          s.recent = 3;
        });
        constexpr int64_t kStride = 2000;
        const auto run = [&, op = op](SelectingBatch& b, Lists& lists, std::vector<float>& scores) {
          std::vector<SelectingSequence> views;
          for (TestSequence& s : b.sequences()) views.push_back(s.view());
          QueryWindowArgs a;
          a.shape = b.shape().attention();
          a.pool = b.pool().view();
          a.window = window;
          a.q = b.q().data();
          a.q_row_stride = b.shape().q_width();
          a.sequences = views;
          a.scores = scores.data();
          a.scores_stride = kStride;
          a.lists = lists.view();
          a.listed = &b == pair.held.get();
          const absl::Status status = op(t.ctx, a);
          ASSERT_TRUE(status.ok()) << status;
        };
        Lists got(pair.held->num_streams(), budget + window), want = got;
        std::vector<float> scores(pair.held->num_streams() * kStride, -1.0f), packed_scores = scores;
        run(*pair.held, got, scores);
        run(*pair.packed, want, packed_scores);
        for (size_t stream = 0; stream < pair.held->num_streams(); ++stream) {
          const TestSequence& s = pair.held->sequence_of(stream);
          const size_t head = stream % static_cast<size_t>(kShapesOfAllTypes[n].kv_heads);
          ASSERT_EQ(got.counts[stream], want.counts[stream]);
          if (!s.step.selects) continue;
          const std::string what = "step " + std::to_string(step) + ", stream " + std::to_string(stream);
          if (s.step.refresh) {
            const auto num = static_cast<size_t>(s.candidates(head));
            const auto of = std::span(scores).subspan(stream * kStride, num),
                       packed = std::span(packed_scores).subspan(stream * kStride, num);
            if (exact) {
              EXPECT_TRUE(BitwiseEqual(of, packed) || s.candidates(head) <= budget) << what;
            } else if (s.candidates(head) > budget) {
              ExpectClose(of, packed, DType::kF32, what);
              EXPECT_TRUE(
                  SameChoice(s.NumbersOf(head, got.of(stream)), want.of(stream), packed, s.candidates(head) - s.recent))
                  << what;
              // Joins go on from what was chosen here.
              continue;
            }
          }
          if (exact) {
            EXPECT_TRUE(std::ranges::equal(got.of(stream), pair.Positions(stream, want.of(stream)))) << what;
          }
          EXPECT_EQ(got.of(stream).back(), s.kv_len - 1) << what;
        }
        pair.Append();
      }
    }
  }
}

// A key page that is not there, compact pages for fewer candidates, a list that does not fit its pages.
TEST_P(SparseStreamsTest, WhatIsMissingIsNamed) {
  TestContext t(GetParam());
  const auto error = [&](const std::function<void(TestSequence&)>& change) {
    Random random(50);
    SelectingBatch b(random, {1, 1, 64, 16}, {{10000, 10010}});
    b.Write();
    b.HoldSome(random, 0, 64, 0.6);
    change(b.sequences()[0]);
    SelectingSequence view = b.sequences()[0].view();
    Lists lists(1, 64);
    SelectTokensArgs a;
    a.shape = b.shape().attention();
    a.pool = b.pool().view();
    a.num_dims = 16;
    a.q = b.q().data();
    a.q_row_stride = b.shape().q_width();
    a.sequences = {&view, 1};
    a.lists = lists.view();
    const absl::Status status = cpu::SelectTokens(t.ctx, a);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error([](TestSequence& s) { s.streams[0].page_table.back() = kNoPage; }),
              HasSubstr("page_tables has no"));
  EXPECT_THAT(error([](TestSequence& s) { s.compact[0].resize(1); }), HasSubstr("compact_tables has 1 pages"));
  EXPECT_THAT(error([](TestSequence& s) { s.list_pages[0].resize(1); }), HasSubstr("positions on 1 pages"));
  EXPECT_THAT(error([](TestSequence& s) { s.step.compact_len = 10001; }), HasSubstr("compact_len 10001"));
}

INSTANTIATE_TEST_SUITE_P(Cpu, SparseStreamsTest, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
