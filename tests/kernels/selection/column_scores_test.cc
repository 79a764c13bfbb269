#include "kernels/selection/sparsex/column_scores.h"

#include <cmath>

#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int32_t kLen = 300, kQoHeads = 4, kKvHeads = 2;

// Rows at some positions of one sequence with their log-sum-exp over everything they see.
struct Problem {
  Problem(Random& random, DType dtype, int32_t dim) : pool(dtype, dim, 16), shape{kQoHeads, kKvHeads, dim, 0.0f} {
    shape.sm_scale = 1.0f / std::sqrt(static_cast<float>(dim));
    pool.Shuffle(random);
    for (int32_t h = 0; h < kKvHeads; ++h) {
      streams.push_back(MakeStream(random, kLen, dim));
      pool.Place(streams.back());
    }
    for (const TestStream& s : streams) views.push_back(s.view());
    for (int32_t p = 3; p < kLen; p += random.Int(1, 9)) positions.push_back(p);
    const size_t rows = positions.size();
    q = random.Normals(rows * kQoHeads * dim);
    lse.resize(rows * kQoHeads);
    Attend();
    for (size_t i = 0; i < rows; ++i) probes.push_back(static_cast<int32_t>(i));
  }

  // Fills `lse` by what the views let the rows see.
  void Attend() {
    std::vector<float> out(q.size());
    const PrefillSequence sequence{0, static_cast<int32_t>(positions.size()), positions, views};
    ASSERT_TRUE(ref::PrefillAttention({}, {.shape = shape,
                                           .pool = pool.view(),
                                           .q = q.data(),
                                           .q_row_stride = int64_t{kQoHeads} * shape.head_dim,
                                           .out = out.data(),
                                           .lse = lse.data(),
                                           .sequences = {&sequence, 1}})
                    .ok());
  }

  ColumnScoresArgs Args(std::vector<float>& scores) const {
    return {.shape = shape,
            .pool = pool.view(),
            .q = q.data(),
            .q_row_stride = int64_t{kQoHeads} * shape.head_dim,
            .lse = lse.data(),
            .rows = {0, static_cast<int32_t>(positions.size()), positions, views},
            .probes = probes,
            .columns = columns,
            .kv_heads = kv_heads,
            .scores = scores.data()};
  }

  TestPool pool;
  AttentionShape shape;
  std::vector<TestStream> streams;
  std::vector<HeadStreamView> views;
  std::vector<int32_t> positions, probes, kv_heads;
  std::vector<float> q, lse;
  std::vector<PositionRange> columns = {{0, kLen}};
};

class ColumnScores : public ::testing::TestWithParam<CpuIsa> {};

// Against double, and the sum over all columns.
TEST_P(ColumnScores, EqualsReferenceAndSumsToRowsTimesHeads) {
  Random random(91);
  TestContext t(GetParam(), 3);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
    for (int32_t dim : {8, 64, 128}) {
      Problem p(random, dtype, dim);
      std::vector<float> want(kLen), got(kLen);
      ASSERT_TRUE(ref::ColumnScores(t.ctx, p.Args(want)).ok());
      ASSERT_TRUE(cpu::ColumnScores(t.ctx, p.Args(got)).ok());
      ExpectClose(got, want, DType::kF32, "scores");
      const double sum = std::accumulate(got.begin(), got.end(), 0.0);
      EXPECT_NEAR(sum, static_cast<double>(p.positions.size()) * kQoHeads, 1e-4 * sum);
    }
  }
}

TEST_P(ColumnScores, TakesSomeColumnsHeadsAndProbesAndAdds) {
  Random random(92);
  TestContext t(GetParam(), 2);
  Problem p(random, DType::kBF16, 64);
  for (int i = 0; i < 20; ++i) {
    p.columns.clear();
    for (int32_t at = random.Int(0, 40); at < kLen;) {
      const int32_t end = std::min(kLen, at + random.Int(1, 100));
      p.columns.push_back({at, end});
      at = end + random.Int(0, 60);
    }
    p.kv_heads = i % 3 == 0 ? std::vector<int32_t>{1} : std::vector<int32_t>{};
    p.probes.clear();
    for (int32_t row = 0; row < static_cast<int32_t>(p.positions.size()); row += random.Int(1, 5))
      p.probes.push_back(row);
    size_t count = 0;
    for (const PositionRange& range : p.columns) count += static_cast<size_t>(range.size());
    std::vector<float> want(count, 1.0f), got(count, 1.0f);
    ASSERT_TRUE(ref::ColumnScores(t.ctx, p.Args(want)).ok());
    ASSERT_TRUE(cpu::ColumnScores(t.ctx, p.Args(got)).ok());
    ExpectClose(got, want, DType::kF32, "scores");
  }
}

TEST_P(ColumnScores, CountsOnlyWhatABandLetsARowSee) {
  Random random(98);
  TestContext t(GetParam(), 2);
  Problem p(random, DType::kBF16, 64);
  for (HeadStreamView& view : p.views) view.visibility = {VisibilityRule::kBand, 5, 70, {}};
  p.Attend();
  std::vector<float> want(kLen), got(kLen);
  ASSERT_TRUE(ref::ColumnScores(t.ctx, p.Args(want)).ok());
  ASSERT_TRUE(cpu::ColumnScores(t.ctx, p.Args(got)).ok());
  ExpectClose(got, want, DType::kF32, "scores");
  const double sum = std::accumulate(got.begin(), got.end(), 0.0);
  EXPECT_NEAR(sum, static_cast<double>(p.positions.size()) * kQoHeads, 1e-4 * sum);
}

// Rows over a list: its columns have all of their attention. Others may not be asked for.
TEST_P(ColumnScores, CountsWhatAListLetsARowSee) {
  Random random(99);
  TestContext t(GetParam(), 2);
  Problem p(random, DType::kBF16, 64);
  std::vector<int32_t> list;
  p.columns.clear();
  for (int32_t at = 0; at < kLen;) {
    const int32_t end = std::min(kLen, at + random.Int(1, 60));
    p.columns.push_back({at, end});
    for (int32_t j = at; j < end; ++j) list.push_back(j);
    at = end + random.Int(1, 70);
  }
  for (HeadStreamView& view : p.views) view.visibility = {.rule = VisibilityRule::kList, .indices = list};
  p.Attend();
  std::vector<float> want(list.size()), got(list.size());
  ASSERT_TRUE(ref::ColumnScores(t.ctx, p.Args(want)).ok());
  ASSERT_TRUE(cpu::ColumnScores(t.ctx, p.Args(got)).ok());
  ExpectClose(got, want, DType::kF32, "scores");
  const auto seeing =
      std::count_if(p.positions.begin(), p.positions.end(), [&](int32_t row) { return row >= list[0]; });
  const double sum = std::accumulate(got.begin(), got.end(), 0.0);
  EXPECT_NEAR(sum, static_cast<double>(seeing) * kQoHeads, 1e-4 * sum);
  p.columns.back().begin -= 1;  // no longer one of the list
  got.resize(got.size() + 1);
  EXPECT_EQ(cpu::ColumnScores(t.ctx, p.Args(got)).code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(ColumnScores, DoesNotDependOnThreads) {
  Random random(93);
  Problem p(random, DType::kBF16, 64);
  TestContext one(GetParam(), 1), three(GetParam(), 3);
  std::vector<float> a(kLen), b(kLen);
  ASSERT_TRUE(cpu::ColumnScores(one.ctx, p.Args(a)).ok());
  ASSERT_TRUE(cpu::ColumnScores(three.ctx, p.Args(b)).ok());
  EXPECT_TRUE(BitwiseEqual(a, b));
}

TEST_P(ColumnScores, RefusesWhatIsNotThere) {
  Random random(94);
  TestContext t(GetParam());
  const Problem good(random, DType::kF32, 64);
  std::vector<float> scores(kLen);
  const auto fails = [&](const auto& change) {
    ColumnScoresArgs a = good.Args(scores);
    change(a);
    return !cpu::ColumnScores(t.ctx, a).ok();
  };
  const std::vector<PositionRange> past = {{0, kLen + 1}}, crossed = {{0, 10}, {9, 12}}, empty = {{5, 5}};
  const std::vector<int32_t> bad_probe = {0, 1000}, bad_head = {2};
  EXPECT_TRUE(fails([&](ColumnScoresArgs& a) { a.columns = past; }));
  EXPECT_TRUE(fails([&](ColumnScoresArgs& a) { a.columns = crossed; }));
  EXPECT_TRUE(fails([&](ColumnScoresArgs& a) { a.columns = empty; }));
  EXPECT_TRUE(fails([&](ColumnScoresArgs& a) { a.probes = bad_probe; }));
  EXPECT_TRUE(fails([&](ColumnScoresArgs& a) { a.kv_heads = bad_head; }));
  EXPECT_TRUE(fails([&](ColumnScoresArgs& a) { a.lse = nullptr; }));
}

INSTANTIATE_TEST_SUITE_P(Isa, ColumnScores, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
