// RefillHotRows and AttendHotRows on the host: against rules that share no code with them, against each other, and
// whole steps of sequences with pages in host memory against the same sequences with all pages in the pool.
#include <gmock/gmock.h>

#include "kernels/selection/sparcas/attend_hot_rows.h"
#include "kernels/selection/sparcas/refill_hot_rows.h"
#include "tests/kernels/support/hot_buffer.h"
#include "tests/kernels/support/sparse_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

using Refill = absl::Status (*)(const KernelContext&, const RefillHotRowsArgs&);
using Choose = absl::Status (*)(const KernelContext&, const SparseAttentionArgs&);
using Attend = absl::Status (*)(const KernelContext&, const AttendHotRowsArgs&);

constexpr int32_t kSlots = 192;

// A batch whose sequences have moved their first pages.
struct HotBatch {
  HotBatch(uint64_t seed, const SelectingShape& shape, const std::vector<std::pair<int32_t, int32_t>>& lengths,
           int32_t slots = kSlots)
      : random(seed), batch(random, shape, lengths, PackedPageTokens(shape)) {
    batch.Write();
    for (TestSequence& s : batch.sequences()) hot.push_back(std::make_unique<TestHotBuffer>(batch, s, slots));
  }
  std::vector<SelectingSequence> Views() {
    std::vector<SelectingSequence> views;
    for (size_t i = 0; i < hot.size(); ++i) {
      views.push_back(batch.sequences()[i].view());
      views.back().hot = hot[i]->rows();
    }
    return views;
  }
  Random random;
  SelectingBatch batch;
  std::vector<std::unique_ptr<TestHotBuffer>> hot;
};

// `count` different positions below kv_len, more of them near `center` than elsewhere: successive lists overlap.
std::vector<int32_t> RandomList(Random& random, int32_t kv_len, int32_t count) {
  std::set<int32_t> list;
  const int32_t width = std::min(kv_len, count * 2), begin = random.Int(0, 3) * (kv_len - width) / 3;
  while (static_cast<int32_t>(list.size()) < std::min(count, kv_len))
    list.insert(random.Int(0, 4) == 0 ? random.Int(0, kv_len - 1) : begin + random.Int(0, width - 1));
  return {list.begin(), list.end()};
}

// The rules of refill_hot_rows.h for one stream, from its tables before and after the call.
void ExpectRefilled(const HotBatch& b, size_t sequence, size_t head, const HotStream& now, const TestHotBuffer& before,
                    std::span<const int32_t> list, int32_t kv_len, const std::string& what) {
  const HotStream was = const_cast<TestHotBuffer&>(before).rows().stream(static_cast<int64_t>(head));
  const KvPoolView& pool = const_cast<HotBatch&>(b).batch.pool().view();
  std::set<int32_t> on_host, given, hits;
  for (const int32_t j : list) {
    if (now.on_host(j)) on_host.insert(j);
  }
  for (const int32_t j : on_host) {
    ASSERT_NE(now.slot_of[j], 0) << what << ", position " << j;
    const int32_t slot = now.slot_of[j] - 1;
    EXPECT_EQ(now.position_of[slot], j + 1) << what;
    EXPECT_EQ(now.listed_at[slot], kv_len) << what;
    if (was.slot_of[j] != 0) {
      EXPECT_EQ(now.slot_of[j], was.slot_of[j]) << what << ": a hit stays where it is";
      hits.insert(slot);
    } else {
      given.insert(slot);
    }
    // The row of the slot is that of the position, as the stream has it.
    const int64_t row = now.RowOf(j);
    const std::byte* const page = pool.base + row / kPageTokens * static_cast<int64_t>(pool.page_bytes());
    const std::byte* const want = now.host_pages[j / kPageTokens];
    for (const size_t half : {size_t{0}, pool.half_bytes()}) {
      for (int32_t c = 0; c < pool.head_dim; ++c)
        ASSERT_EQ(KvElement(pool, page + half, static_cast<int32_t>(row % kPageTokens), c),
                  KvElement(pool, want + half, j % kPageTokens, c))
            << what << ", sequence " << sequence << ", position " << j;
    }
  }
  const auto age = [&](int32_t slot) { return std::min(kv_len - was.listed_at[slot], 255); };
  for (int32_t slot = 0; slot < now.num_slots; ++slot) {
    const int32_t position = now.position_of[slot] - 1;
    if (position >= 0) {
      EXPECT_EQ(now.slot_of[position], slot + 1) << what;
    }
    if (given.contains(slot) || hits.contains(slot)) continue;
    EXPECT_EQ(now.position_of[slot], was.position_of[slot]) << what;
    EXPECT_EQ(now.listed_at[slot], was.listed_at[slot]) << what;
    // Whoever kept its slot is not older than anybody who lost his.
    for (const int32_t other : given) {
      EXPECT_GE(age(other), age(slot)) << what << ": " << other << " lost to " << slot;
      if (age(other) == age(slot)) {
        EXPECT_LT(other, slot) << what;
      }
    }
  }
  const int64_t positions = const_cast<HotBatch&>(b).batch.sequences()[sequence].max_len;
  for (int32_t j = 0; j < positions; ++j) {
    if (now.slot_of[j] != 0) {
      EXPECT_EQ(now.position_of[now.slot_of[j] - 1], j + 1) << what;
    }
  }
}

void RunRefills(Refill op, const KernelContext& ctx, const SelectingShape& shape, uint64_t seed) {
  const std::vector<std::pair<int32_t, int32_t>> lengths = {{700, 900}, {192, 400}, {1999, 2300}, {300, 310}};
  HotBatch b(seed, shape, lengths), expected(seed, shape, lengths);
  Random steps(seed + 1);
  constexpr int64_t kStride = 200;
  for (int step = 0; step < 24; ++step) {
    const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step);
    std::vector<int32_t> tokens(b.batch.num_streams() * kStride, -77), counts(b.batch.num_streams(), -77);
    std::vector<std::vector<int32_t>> lists;
    for (size_t stream = 0; stream < b.batch.num_streams(); ++stream) {
      TestSequence& s = b.batch.sequence_of(stream);
      if (stream % static_cast<size_t>(shape.kv_heads) == 0) {
        s.budget = steps.Int(100, kSlots);
        s.step.selects = steps.Int(0, 5) > 0;
      }
      lists.push_back(RandomList(steps, s.kv_len, s.budget));
      std::copy(lists.back().begin(), lists.back().end(), tokens.begin() + static_cast<int64_t>(stream) * kStride);
      counts[stream] = static_cast<int32_t>(lists.back().size());
    }
    for (size_t i = 0; i < b.hot.size(); ++i) {
      expected.batch.sequences()[i].budget = b.batch.sequences()[i].budget;
      expected.batch.sequences()[i].step.selects = b.batch.sequences()[i].step.selects;
    }
    const std::vector<SelectingSequence> views = b.Views(), expected_views = expected.Views();
    RefillHotRowsArgs args{.pool = b.batch.pool().view(),
                           .num_kv_heads = shape.kv_heads,
                           .sequences = views,
                           .lists = {tokens.data(), counts.data(), kStride}};
    ExpectOk(op(ctx, args));
    for (size_t stream = 0; stream < b.batch.num_streams(); ++stream) {
      const TestSequence& s = b.batch.sequence_of(stream);
      const size_t sequence = stream / static_cast<size_t>(shape.kv_heads), head = stream % shape.kv_heads;
      if (s.step.selects)
        ExpectRefilled(b, sequence, head, views[sequence].hot.stream(static_cast<int64_t>(head)),
                       *expected.hot[sequence], lists[stream], s.kv_len, what + ", stream " + std::to_string(stream));
      if (::testing::Test::HasFatalFailure()) return;
    }
    args.pool = expected.batch.pool().view();
    args.sequences = expected_views;
    ExpectOk(ref::RefillHotRows({}, args));
    for (size_t i = 0; i < b.hot.size(); ++i) EXPECT_TRUE(b.hot[i]->Equals(*expected.hot[i])) << what << ", " << i;
    // Ages of up to several hundred: most of them more than are told apart.
    const int32_t longer = steps.Int(0, 3) == 0 ? steps.Int(1, 30) : 1;
    for (HotBatch* of : {&b, &expected}) {
      Random moves(seed * 100 + static_cast<uint64_t>(step));
      for (size_t i = 0; i < of->hot.size(); ++i) {
        TestSequence& s = of->batch.sequences()[i];
        for (int32_t n = 0; n < longer && s.kv_len < s.max_len; ++n) of->batch.Append(i);
        if (step % 3 == 0) of->hot[i]->MoveSome(moves);
      }
    }
  }
}

// Steps of sequences with and without a hot buffer: the same lists, sums and packed keys.
void RunSteps(Choose choose, Refill refill, Attend attend, const KernelContext& ctx, const SelectingShape& shape,
              Keys keys, uint64_t seed) {
  // The last one never moves, and shares the steps.
  const std::vector<std::pair<int32_t, int32_t>> lengths = {{700, 1200}, {64, 500}, {2100, 2200}, {500, 700}};
  Random of_one(seed), of_other(seed), steps(seed + 1), moves(seed + 2);
  SelectingBatch whole(of_one, shape, lengths, PackedPageTokens(shape)),
      moved(of_other, shape, lengths, PackedPageTokens(shape));
  for (SelectingBatch* b : {&whole, &moved}) {
    Random random(seed + 3);
    for (size_t stream = 0; stream < b->num_streams(); ++stream) ShapeKeys(random, shape, keys, b->stream(stream));
    b->Write();
  }
  constexpr int32_t kBudget = 128;  // as many as there are slots: each list needs nearly all of them
  std::vector<std::unique_ptr<TestHotBuffer>> hot(lengths.size());
  for (int step = 0; step < 30; ++step) {
    for (size_t i = 0; i < lengths.size(); ++i) {
      TestSequence &a = whole.sequences()[i], &b = moved.sequences()[i];
      a.recent = 64;
      a.budget = steps.Int(64, kBudget);
      a.step.selects = steps.Int(0, 5) > 0;
      a.step.refresh |= steps.Int(0, 5) == 0;
      b.recent = a.recent, b.budget = a.budget, b.step = a.step;
      if (i + 1 < lengths.size() && step >= 2 && hot[i] == nullptr && b.kv_len >= 3 * kPageTokens)
        hot[i] = std::make_unique<TestHotBuffer>(moved, b, kBudget);
      if (hot[i] != nullptr && step % 4 == 0) hot[i]->MoveSome(moves);
    }
    for (float& x : whole.q()) x = ToFloat(ToBf16(steps.Normal()));
    moved.q() = whole.q();
    SparseCall want(whole, kBudget, 2200), got(moved, kBudget, 2200);
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (hot[i] != nullptr) got.views[i].hot = hot[i]->rows();
    }
    ExpectOk(choose(ctx, want.args));
    ExpectOk(choose(ctx, got.args));
    ExpectOk(refill(
        ctx, {.pool = got.args.pool, .num_kv_heads = shape.kv_heads, .sequences = got.views, .lists = got.args.lists}));
    ExpectOk(attend(ctx, {.shape = got.args.shape,
                          .pool = got.args.pool,
                          .q = got.args.q,
                          .q_row_stride = got.args.q_row_stride,
                          .out = got.args.out,
                          .lse = got.args.lse,
                          .sequences = got.views,
                          .lists = got.args.lists}));
    const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step);
    EXPECT_EQ(got.tokens, want.tokens) << what;
    EXPECT_EQ(got.counts, want.counts) << what;
    EXPECT_TRUE(BitwiseEqual(got.weights, want.weights)) << what;
    ASSERT_TRUE(BitwiseEqual(got.out, want.out)) << what;
    EXPECT_TRUE(BitwiseEqual(got.lse, want.lse)) << what;
    for (size_t i = 0; i < lengths.size(); ++i) {
      TestSequence &a = whole.sequences()[i], &b = moved.sequences()[i];
      if (a.step.selects) a.Advance(), b.Advance();
      for (int n = steps.Int(1, 9); n > 0 && a.kv_len < a.max_len; --n) whole.Append(i), moved.Append(i);
    }
  }
  ASSERT_TRUE(hot[0] != nullptr && hot[2] != nullptr);
  // Some rows of the longest sequence were there, and others had to go.
  EXPECT_GT(hot[2]->counts_[0], hot[2]->counts_[1]);
  if (keys == Keys::kNormal || keys == Keys::kHeavyTail) {
    EXPECT_GT(hot[2]->counts_[1], static_cast<uint64_t>(kBudget) * static_cast<uint64_t>(shape.kv_heads));
  }
}

TEST(HotRowsRef, FollowsTheRules) {
  RunRefills(ref::RefillHotRows, {}, SparseShape(2, 2, 64), 2000);
  RunRefills(ref::RefillHotRows, {}, SparseShape(1, 3, 40, DType::kF32), 2001);
  RunRefills(ref::RefillHotRows, {}, SparseShape(2, 2, 64, DType::kE4M3), 2002);
}

TEST(HotRowsRef, StepsHaveTheBitsOfWholeSequences) {
  RunSteps(ref::SparseAttention, ref::RefillHotRows, ref::AttendHotRows, {}, SparseShape(2, 2, 64), Keys::kNormal,
           2010);
  RunSteps(ref::SparseAttention, ref::RefillHotRows, ref::AttendHotRows, {}, SparseShape(1, 2, 64, DType::kE4M3),
           Keys::kHeavyTail, 2011);
}

class HotRows : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(HotRows, FollowTheRulesAndTheReference) {
  TestContext t(GetParam());
  RunRefills(cpu::RefillHotRows, t.ctx, SparseShape(2, 4, 128), 2020);
  RunRefills(cpu::RefillHotRows, t.ctx, SparseShape(3, 1, 40, DType::kF32), 2021);
  RunRefills(cpu::RefillHotRows, t.ctx, SparseShape(2, 2, 64, DType::kE4M3), 2022);
}

TEST_P(HotRows, StepsHaveTheBitsOfWholeSequences) {
  TestContext t(GetParam());
  uint64_t seed = 2030;
  for (const Keys keys : {Keys::kNormal, Keys::kSinks, Keys::kHeavyTail, Keys::kEqual})
    RunSteps(cpu::SparseAttention, cpu::RefillHotRows, cpu::AttendHotRows, t.ctx, SparseShape(2, 4, 128), keys, ++seed);
  RunSteps(cpu::SparseAttention, cpu::RefillHotRows, cpu::AttendHotRows, t.ctx, SparseShape(3, 1, 40, DType::kF32),
           Keys::kNormal, ++seed);
  RunSteps(cpu::SparseAttention, cpu::RefillHotRows, cpu::AttendHotRows, t.ctx, SparseShape(2, 2, 64, DType::kE4M3),
           Keys::kHeavyTail, ++seed);
}
INSTANTIATE_TEST_SUITE_P(Isa, HotRows, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(HotRowsChecks, RefuseWhatTheyDoNotServe) {
  HotBatch b(2050, SparseShape(1, 2, 64), {{300, 320}});
  std::vector<int32_t> tokens(200, 0), counts(1, 0);
  const auto message = [&](auto change) {
    std::vector<SelectingSequence> views = b.Views();
    views[0].budget = 192;
    change(views[0]);
    RefillHotRowsArgs args{.pool = b.batch.pool().view(),
                           .num_kv_heads = 1,
                           .sequences = views,
                           .lists = {tokens.data(), counts.data(), 200}};
    return std::string(ref::RefillHotRows({}, args).message());
  };
  EXPECT_EQ(message([](SelectingSequence&) {}), "");
  EXPECT_THAT(message([](SelectingSequence& s) { s.budget = 193; }), HasSubstr("budget 193"));
  EXPECT_THAT(message([](SelectingSequence& s) { s.hot.num_slots = 191; }), HasSubstr("191 slots"));
  EXPECT_THAT(message([](SelectingSequence& s) { s.hot.num_slots = 2 * kHotSlotsMax; }), HasSubstr("slots"));
  EXPECT_THAT(message([](SelectingSequence& s) { s.hot.slot_of = nullptr; }), HasSubstr("null"));
  EXPECT_THAT(message([](SelectingSequence& s) { s.kv_len = 321; }), HasSubstr("kv_len 321"));
  EXPECT_THAT(message([](SelectingSequence& s) { s.step.listed = true; }), HasSubstr("listed"));
}

}  // namespace
}  // namespace spl::kernels
