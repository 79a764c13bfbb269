// Routing and the grouped feed-forward: the definition against sums in double written out here, the CPU variants
// against the definition, and the independence of rows.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/moe/grouped_linear.h"
#include "kernels/moe/routing.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::ElementsAre;

struct Routing {
  std::vector<int32_t> ids, offsets, rows, places;
  std::vector<float> weights;
};

template <typename Op>
Routing Route(const Op& op, const KernelContext& ctx, const std::vector<float>& logits, int32_t experts, int32_t top_k,
              bool renormalize) {
  const size_t rows = logits.size() / experts, pairs = rows * top_k;
  Routing r{std::vector<int32_t>(pairs, -7), std::vector<int32_t>(experts + 1, -7), std::vector<int32_t>(pairs, -7),
            std::vector<int32_t>(pairs, -7), std::vector<float>(pairs, -7.0f)};
  RouteExpertsArgs a{.logits = logits.data(),
                     .num_rows = static_cast<int64_t>(rows),
                     .num_experts = experts,
                     .top_k = top_k,
                     .renormalize = renormalize,
                     .expert_ids = r.ids.data(),
                     .weights = r.weights.data(),
                     .offsets = r.offsets.data(),
                     .rows = r.rows.data(),
                     .places = r.places.data()};
  const absl::Status s = op(ctx, a);
  EXPECT_TRUE(s.ok()) << s;
  return r;
}

TEST(RouteExpertsReference, IsTheSoftmaxOfTheLargest) {
  Random random(81);
  TestContext t(CpuIsa::kPortable);
  const std::vector<float> logits = random.Normals(20 * 9);
  for (bool renormalize : {false, true}) {
    const Routing r = Route(ref::RouteExperts, t.ctx, logits, 9, 3, renormalize);
    for (int row = 0; row < 20; ++row) {
      const float* l = &logits[row * 9];
      double all = 0, chosen = 0;
      for (int e = 0; e < 9; ++e) all += std::exp(double(l[e]));
      for (int k = 0; k < 3; ++k) {
        const int32_t id = r.ids[row * 3 + k];
        int better = 0;
        for (int e = 0; e < 9; ++e) better += l[e] > l[id];
        EXPECT_EQ(better, k) << "rank of the chosen";
        chosen += std::exp(double(l[id]));
      }
      for (int k = 0; k < 3; ++k) {
        const double p = std::exp(double(l[r.ids[row * 3 + k]])) / (renormalize ? chosen : all);
        EXPECT_NEAR(r.weights[row * 3 + k], p, 1e-6 * p);
      }
    }
  }
}

TEST(RouteExperts, CpuEqualsReference) {
  Random random(82);
  TestContext t(DetectCpuIsa(), 3);
  for (const auto& [experts, top_k] : {std::pair{8, 2}, {128, 8}, {1, 1}, {5, 5}, {1000, 64}}) {
    for (int rows : {0, 1, 7, 200}) {
      std::vector<float> logits = random.Normals(static_cast<size_t>(rows) * experts);
      for (float& x : logits) x = std::round(8 * x) / 4;  // many ties
      for (bool renormalize : {false, true}) {
        const Routing want = Route(ref::RouteExperts, t.ctx, logits, experts, top_k, renormalize);
        const Routing got = Route(cpu::RouteExperts, t.ctx, logits, experts, top_k, renormalize);
        EXPECT_EQ(got.ids, want.ids);
        EXPECT_EQ(got.offsets, want.offsets);
        EXPECT_EQ(got.rows, want.rows);
        EXPECT_EQ(got.places, want.places);
        ExpectClose(got.weights, want.weights, DType::kF32, "weights");
      }
    }
  }
}

TEST(RouteExperts, EveryPairHasAPlaceInTheOrderOfExpertsThenRows) {
  Random random(83);
  TestContext t(DetectCpuIsa(), 3);
  const Routing r = Route(cpu::RouteExperts, t.ctx, random.Normals(50 * 16), 16, 4, true);
  std::vector<int32_t> sorted = r.places;
  std::sort(sorted.begin(), sorted.end());
  for (int32_t p = 0; p < 200; ++p) EXPECT_EQ(sorted[p], p);
  for (int32_t pair = 0; pair < 200; ++pair) {
    EXPECT_EQ(r.rows[r.places[pair]], pair / 4);
    EXPECT_GE(r.places[pair], r.offsets[r.ids[pair]]);
    EXPECT_LT(r.places[pair], r.offsets[r.ids[pair] + 1]);
  }
  for (int32_t e = 0; e < 16; ++e) {
    EXPECT_TRUE(std::is_sorted(r.rows.begin() + r.offsets[e], r.rows.begin() + r.offsets[e + 1]));
  }
}

TEST(RouteExperts, TiesGoToTheLowerIndexAndNaNLoses) {
  TestContext t(DetectCpuIsa());
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto& op : {ref::RouteExperts, cpu::RouteExperts}) {
    EXPECT_THAT(Route(op, t.ctx, {1, 1, 1, 1, 1}, 5, 3, true).ids, ElementsAre(0, 1, 2));
    EXPECT_THAT(Route(op, t.ctx, {1, 1, 1, 1, 1}, 5, 3, true).weights, Each(1.0f / 3));
    EXPECT_THAT(Route(op, t.ctx, {1, 2, 1, 2, 0}, 5, 4, false).ids, ElementsAre(1, 3, 0, 2));
    EXPECT_THAT(Route(op, t.ctx, {nan, 1, -inf, 2}, 4, 4, false).ids, ElementsAre(3, 1, 2, 0));
    EXPECT_THAT(Route(op, t.ctx, {nan, nan, nan}, 3, 2, false).ids, ElementsAre(0, 1));
    // Far apart, where the smaller probabilities vanish in f32.
    const Routing far = Route(op, t.ctx, {-500, 300, -400, 0}, 4, 3, true);
    EXPECT_THAT(far.ids, ElementsAre(1, 3, 2));
    EXPECT_THAT(far.weights, ElementsAre(1.0f, 0.0f, 0.0f));
  }
}

TEST(RouteExperts, ARowsExpertsAndWeightsDoNotDependOnOtherRows) {
  Random random(84);
  TestContext one(DetectCpuIsa(), 1), four(DetectCpuIsa(), 4);
  const std::vector<float> logits = random.Normals(300 * 32);
  const Routing all = Route(cpu::RouteExperts, four.ctx, logits, 32, 8, true);
  for (int64_t row : {0, 17, 299}) {
    const std::vector<float> alone(logits.begin() + row * 32, logits.begin() + (row + 1) * 32);
    const Routing r = Route(cpu::RouteExperts, one.ctx, alone, 32, 8, true);
    EXPECT_TRUE(std::equal(r.ids.begin(), r.ids.end(), all.ids.begin() + row * 8));
    EXPECT_TRUE(BitwiseEqual(r.weights, std::span(all.weights).subspan(row * 8, 8)));
  }
}

TEST(RouteExpertsValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> logits(8), weights(4);
  std::vector<int32_t> ids(4), offsets(5), rows(4), places(4);
  const RouteExpertsArgs good{logits.data(), 2, 4, 2, true, ids.data(), weights.data(), offsets.data(), rows.data(),
                              places.data()};
  EXPECT_TRUE(cpu::RouteExperts(t.ctx, good).ok());
  const auto refused = [&](const auto& change) {
    RouteExpertsArgs a = good;
    change(a);
    return cpu::RouteExperts(t.ctx, a).code() == absl::StatusCode::kInvalidArgument &&
           ref::RouteExperts(t.ctx, a).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.num_experts = 0; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.num_experts = kMoeExpertsMax + 1; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.top_k = 5; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.top_k = 0; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.num_rows = -1; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.num_rows = INT32_MAX; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.logits = nullptr; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.offsets = nullptr; }));
  EXPECT_TRUE(refused([](RouteExpertsArgs& a) { a.places = nullptr; }));
}

// Experts' weights as in a checkpoint, misaligned on purpose.
struct TestExperts {
  TestExperts(Random& random, int32_t experts, int64_t n, int64_t k, DType dtype)
      : bytes(experts * n * k * DTypeBytes(dtype) + 1), values(static_cast<size_t>(experts * n * k)) {
    view = {bytes.data() + 1, dtype, experts, n, k};
    for (size_t i = 0; i < values.size(); ++i) {
      const float x = random.Normal();
      const bf16 b = ToBf16(x);
      values[i] = dtype == DType::kF32 ? x : ToFloat(b);
      std::memcpy(bytes.data() + 1 + i * DTypeBytes(dtype), dtype == DType::kF32 ? static_cast<const void*>(&x) : &b,
                  DTypeBytes(dtype));
    }
  }
  std::vector<unsigned char> bytes;
  std::vector<float> values;
  GroupedWeightView view;
};

template <typename Op>
std::vector<float> Grouped(const Op& op, const KernelContext& ctx, const GroupedWeight& w, const std::vector<float>& x,
                           const Routing& r, bool gather) {
  std::vector<float> y(r.rows.size() * w.out_features(), -7.0f);
  const GroupedLinearArgs a{.x = x.data(),
                            .num_x_rows = static_cast<int64_t>(x.size()) / w.in_features(),
                            .rows = gather ? r.rows.data() : nullptr,
                            .offsets = r.offsets.data(),
                            .weight = &w,
                            .y = y.data(),
                            .num_places = static_cast<int64_t>(r.rows.size())};
  const absl::Status s = op(ctx, a);
  EXPECT_TRUE(s.ok()) << s;
  return y;
}

TEST(GroupedLinear, EqualsReferenceAndTheReferenceItsDefinition) {
  Random random(85);
  TestContext two(DetectCpuIsa(), 2), many(DetectCpuIsa(), 20);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{96, 64}, {65, 40}, {1, 7}}) {
      const TestExperts experts(random, 6, n, k, dtype);
      const auto want_weight = ref::PackGrouped(experts.view);
      const auto f32 = cpu::PackGrouped(experts.view, GemmCompute::kF32);
      ASSERT_TRUE(want_weight.ok() && f32.ok());
      for (int64_t rows : {1, 2, 33, 150}) {
        const Routing r = Route(cpu::RouteExperts, two.ctx, random.Normals(rows * 6), 6, 2, true);
        for (bool gather : {true, false}) {
          const std::vector<float> x = random.Normals((gather ? rows : rows * 2) * k);
          const std::vector<float> want = Grouped(ref::GroupedLinear, two.ctx, **want_weight, x, r, gather);
          for (int32_t e = 0; e < 6; ++e) {
            for (int64_t p = r.offsets[e]; p < r.offsets[e + 1]; ++p) {
              const int64_t row = gather ? r.rows[p] : p, j = p % n;
              double sum = 0;
              for (int64_t c = 0; c < k; ++c) sum += double(x[row * k + c]) * experts.values[(e * n + j) * k + c];
              ASSERT_EQ(want[p * n + j], static_cast<float>(sum));
            }
          }
          for (const TestContext* t : {&two, &many})
            ExpectClose(Grouped(cpu::GroupedLinear, t->ctx, **f32, x, r, gather), want, DType::kF32,
                        std::to_string(rows) + " rows");
          if (!CpuHasBf16Gemm()) continue;
          const auto b16 = cpu::PackGrouped(experts.view, GemmCompute::kBF16);
          ASSERT_TRUE(b16.ok()) << b16.status();
          // One place of one column may be a sum that cancels, so that only whole results are held to a relative error.
          if (n > 1)
            ExpectClose(Grouped(cpu::GroupedLinear, two.ctx, **b16, x, r, gather), want, DType::kBF16,
                        std::to_string(rows) + " rows in bf16");
        }
      }
    }
  }
}

// The whole chain: one row alone gives the bits that it gives among others, in f32 and bf16, with any threads.
TEST(GroupedLinear, ARowsResultDoesNotDependOnOtherRowsOrThreads) {
  Random random(86);
  TestContext one(DetectCpuIsa(), 1), four(DetectCpuIsa(), 4), many(DetectCpuIsa(), 24);
  constexpr int64_t kRows = 200, kHidden = 64, kWidth = 48;
  constexpr int32_t kExperts = 8, kTop = 2;
  const TestExperts up(random, kExperts, kWidth, kHidden, DType::kBF16);
  const TestExperts down(random, kExperts, kHidden, kWidth, DType::kBF16);
  const std::vector<float> x = random.Normals(kRows * kHidden), logits = random.Normals(kRows * kExperts);
  for (GemmCompute compute : {GemmCompute::kF32, GemmCompute::kBF16}) {
    if (compute == GemmCompute::kBF16 && !CpuHasBf16Gemm()) continue;
    const auto w_up = cpu::PackGrouped(up.view, compute), w_down = cpu::PackGrouped(down.view, compute);
    ASSERT_TRUE(w_up.ok() && w_down.ok());
    const auto run = [&](const KernelContext& ctx, int64_t begin, int64_t end) {
      const std::vector<float> part(x.begin() + begin * kHidden, x.begin() + end * kHidden);
      const std::vector<float> part_logits(logits.begin() + begin * kExperts, logits.begin() + end * kExperts);
      const Routing r = Route(cpu::RouteExperts, ctx, part_logits, kExperts, kTop, true);
      const std::vector<float> middle = Grouped(cpu::GroupedLinear, ctx, **w_up, part, r, true);
      const std::vector<float> y = Grouped(cpu::GroupedLinear, ctx, **w_down, middle, r, false);
      std::vector<float> out(part.size(), -7.0f);
      const absl::Status s = cpu::CombineExperts(
          ctx, {y.data(), r.places.data(), r.weights.data(), out.data(), end - begin, kTop, kHidden});
      EXPECT_TRUE(s.ok()) << s;
      return out;
    };
    const std::vector<float> all = run(four.ctx, 0, kRows);
    EXPECT_TRUE(BitwiseEqual(run(one.ctx, 0, kRows), all));
    EXPECT_TRUE(BitwiseEqual(run(many.ctx, 0, kRows), all));
    for (int64_t row : {0, 1, 99, 199}) {
      EXPECT_TRUE(BitwiseEqual(run(four.ctx, row, row + 1), std::span(all).subspan(row * kHidden, kHidden))) << row;
    }
    EXPECT_TRUE(BitwiseEqual(run(four.ctx, 50, 90), std::span(all).subspan(50 * kHidden, 40 * kHidden)));
  }
}

class CombineExperts : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(CombineExperts, EqualsReferenceAndItsDefinition) {
  Random random(87);
  TestContext t(GetParam(), 3);
  for (int64_t width : {1, 15, 64, 130}) {
    for (int32_t top_k : {1, 2, 8}) {
      for (int64_t rows : {1, 60}) {
        const std::vector<float> y = random.Normals(rows * top_k * width), weights = random.Normals(rows * top_k);
        std::vector<int32_t> places(rows * top_k);
        std::iota(places.begin(), places.end(), 0);
        std::shuffle(places.begin(), places.end(), random.engine());
        std::vector<float> want(rows * width), got(rows * width);
        CombineExpertsArgs a{y.data(), places.data(), weights.data(), want.data(), rows, top_k, width};
        ASSERT_TRUE(ref::CombineExperts(t.ctx, a).ok());
        a.out = got.data();
        ASSERT_TRUE(cpu::CombineExperts(t.ctx, a).ok());
        double sum = 0;
        for (int32_t k = 0; k < top_k; ++k)
          sum += double(weights[(rows - 1) * top_k + k]) * y[places[(rows - 1) * top_k + k] * width + width - 1];
        EXPECT_EQ(want.back(), static_cast<float>(sum));
        // A sum of few terms may cancel: the error is held to the size of the terms, not of the sum.
        if (rows * width > 100) ExpectClose(got, want, DType::kF32, "width " + std::to_string(width));
        for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, CombineExperts, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(GroupedLinearValidation, RefusesWhatItCannotRun) {
  Random random(88);
  TestContext t(CpuIsa::kPortable);
  const TestExperts experts(random, 2, 3, 4, DType::kF32);
  const auto weight = cpu::PackGrouped(experts.view, GemmCompute::kF32);
  const auto other = ref::PackGrouped(experts.view);
  ASSERT_TRUE(weight.ok() && other.ok());
  std::vector<float> x(8), y(9);
  std::vector<int32_t> rows = {0, 1, 0}, offsets = {0, 2, 3};
  const GroupedLinearArgs good{x.data(), 2, rows.data(), offsets.data(), weight->get(), y.data(), 3};
  const auto code = [&](const auto& change) {
    GroupedLinearArgs a = good;
    change(a);
    return cpu::GroupedLinear(t.ctx, a).code();
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](GroupedLinearArgs&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.num_places = 0; }), absl::StatusCode::kOk);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.num_places = 2; }), kInvalid);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.num_places = -1; }), kInvalid);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.num_x_rows = 1; }), kInvalid);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.rows = nullptr; }), kInvalid);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.x = nullptr; }), kInvalid);
  EXPECT_EQ(code([](GroupedLinearArgs& a) { a.weight = nullptr; }), kInvalid);
  EXPECT_EQ(code([&](GroupedLinearArgs& a) { a.y = x.data(); }), kInvalid);
  // Weights of another backend: the experts' own type gives them away.
  EXPECT_EQ(code([&](GroupedLinearArgs& a) { a.weight = other->get(); }), kInvalid);
  offsets = {0, 4, 3};
  EXPECT_EQ(code([](GroupedLinearArgs&) {}), kInvalid);
  GroupedWeightView bad = experts.view;
  bad.num_experts = 0;
  EXPECT_EQ(cpu::PackGrouped(bad, GemmCompute::kF32).status().code(), kInvalid);

  std::vector<int32_t> places = {1, 0};
  std::vector<float> weights(2), out(4);
  const CombineExpertsArgs combine{x.data(), places.data(), weights.data(), out.data(), 1, 2, 4};
  EXPECT_TRUE(cpu::CombineExperts(t.ctx, combine).ok());
  CombineExpertsArgs c = combine;
  c.out = x.data();
  EXPECT_EQ(cpu::CombineExperts(t.ctx, c).code(), kInvalid);
  c = combine;
  c.top_k = 0;
  EXPECT_EQ(cpu::CombineExperts(t.ctx, c).code(), kInvalid);
  places[0] = 2;
  EXPECT_EQ(cpu::CombineExperts(t.ctx, combine).code(), kInvalid);
}

}  // namespace
}  // namespace spl::kernels
