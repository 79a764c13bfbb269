#include "kernels/selection/top_tokens.h"

#include <gmock/gmock.h>

#include "kernels/selection/sparcas/select_tokens.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

using Op = absl::Status (*)(const KernelContext&, const TopTokensArgs&);
constexpr Op kOps[] = {&ref::TopTokens, &cpu::TopTokens};

SelectingSequence Sequence(int32_t kv_len, int32_t budget, int32_t recent) {
  SelectingSequence s;
  s.kv_len = kv_len;
  s.step.selects = true;
  s.budget = budget;
  s.recent = recent;
  return s;
}

struct Lists {
  std::vector<int32_t> tokens, counts;
  int64_t stride;

  Lists(size_t streams, int64_t list_stride)
      : tokens(streams * static_cast<size_t>(list_stride), -9), counts(streams, -9), stride(list_stride) {}
  std::vector<int32_t> of(size_t stream) const {
    const auto begin = tokens.begin() + static_cast<int64_t>(stream) * stride;
    return {begin, begin + std::max(counts[stream], 0)};
  }
};

std::vector<int32_t> Choose(Op op, const std::vector<float>& scores, int32_t granularity, const SelectingSequence& s) {
  TestContext t(CpuIsa::kPortable);
  Lists lists(1, s.budget);
  const absl::Status status = op(t.ctx, {.scores = scores.data(),
                                         .scores_stride = static_cast<int64_t>(scores.size()),
                                         .granularity = granularity,
                                         .num_kv_heads = 1,
                                         .sequences = {&s, 1},
                                         .lists = {lists.tokens.data(), lists.counts.data(), lists.stride}});
  EXPECT_TRUE(status.ok()) << status;
  return lists.of(0);
}

TEST(TopTokens, TakesTheLargestAndTheMostRecent) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> scores = {3, nan, 5, 5, -0.0f, 0.0f, 5, 1, 9, -1};
  for (const Op op : kOps) {
    EXPECT_THAT(Choose(op, scores, 1, Sequence(10, 1, 1)), ElementsAre(9));
    EXPECT_THAT(Choose(op, scores, 1, Sequence(10, 4, 1)), ElementsAre(2, 3, 8, 9));
    EXPECT_THAT(Choose(op, scores, 1, Sequence(10, 4, 3)), ElementsAre(2, 7, 8, 9));
    EXPECT_THAT(Choose(op, scores, 1, Sequence(10, 8, 1)), ElementsAre(0, 2, 3, 4, 6, 7, 8, 9));  // -0 is 0, first wins
    EXPECT_THAT(Choose(op, scores, 1, Sequence(10, 9, 1)), ElementsAre(0, 2, 3, 4, 5, 6, 7, 8, 9));  // NaN is last
    EXPECT_THAT(Choose(op, scores, 1, Sequence(10, 10, 1)), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
    EXPECT_THAT(Choose(op, scores, 1, Sequence(3, 10, 10)), ElementsAre(0, 1, 2));
  }
}

TEST(TopTokens, TakesWholeGranules) {
  const std::vector<float> scores = {3, 8, 5, 7};
  const auto granules = [](std::initializer_list<int32_t> which, int32_t kv_len) {
    std::vector<int32_t> all;
    for (const int32_t g : which) {
      for (int32_t j = 16 * g; j < std::min(16 * g + 16, kv_len); ++j) all.push_back(j);
    }
    return all;
  };
  for (const Op op : kOps) {
    EXPECT_THAT(Choose(op, scores, 16, Sequence(50, 16, 1)), ElementsAreArray(granules({3}, 50)));
    EXPECT_THAT(Choose(op, scores, 16, Sequence(50, 32, 1)), ElementsAreArray(granules({1, 3}, 50)));
    EXPECT_THAT(Choose(op, scores, 16, Sequence(50, 32, 3)), ElementsAreArray(granules({2, 3}, 50)));
    EXPECT_THAT(Choose(op, scores, 16, Sequence(50, 32, 32)),
                ElementsAreArray(granules({2, 3}, 50)));  // three hold one
    EXPECT_THAT(Choose(op, scores, 16, Sequence(50, 48, 1)), ElementsAreArray(granules({1, 2, 3}, 50)));
    EXPECT_THAT(Choose(op, scores, 16, Sequence(64, 48, 1)), ElementsAreArray(granules({1, 2, 3}, 64)));
  }
}

TEST(TopTokens, VariantsAgreeOnRandomBatches) {
  Random random(61);
  TestContext t(DetectCpuIsa(), 3);
  for (int round = 0; round < 60; ++round) {
    const int32_t granularity = round % 2 == 0 ? 1 : 16, heads = random.Int(1, 3);
    std::vector<SelectingSequence> sequences;
    int32_t longest = 1, largest = 1;
    for (int i = 0; i < 3; ++i) {
      const int32_t budget = random.Int(1, 60) * granularity;
      sequences.push_back(Sequence(random.Int(1, 5000), budget, random.Int(1, budget)));
      sequences.back().step.selects = random.Int(0, 3) > 0;
      longest = std::max(longest, sequences.back().kv_len);
      largest = std::max(largest, budget);
    }
    const int64_t stride = (longest + granularity - 1) / granularity;
    std::vector<float> scores = random.Normals(static_cast<size_t>(3 * heads * stride));
    if (round % 3 == 0) {
      for (float& x : scores) x = std::round(x);  // many ties
    }
    Lists want(static_cast<size_t>(3 * heads), largest), got = want;
    TopTokensArgs a{.scores = scores.data(),
                    .scores_stride = stride,
                    .granularity = granularity,
                    .num_kv_heads = heads,
                    .sequences = sequences,
                    .lists = {want.tokens.data(), want.counts.data(), largest}};
    ASSERT_TRUE(ref::TopTokens({}, a).ok());
    a.lists = {got.tokens.data(), got.counts.data(), largest};
    ASSERT_TRUE(cpu::TopTokens(t.ctx, a).ok());
    EXPECT_EQ(got.counts, want.counts) << round;
    EXPECT_EQ(got.tokens, want.tokens) << round;
  }
}

TEST(TopTokensValidation, NamesTheFieldThatIsWrong) {
  const std::vector<float> scores(10, 0.0f);
  const auto refuses = [&](const char* field, const auto& change) {
    SelectingSequence s = Sequence(10, 8, 2);
    Lists lists(1, 8);
    TopTokensArgs a{.scores = scores.data(),
                    .scores_stride = 10,
                    .num_kv_heads = 1,
                    .sequences = {&s, 1},
                    .lists = {lists.tokens.data(), lists.counts.data(), 8}};
    change(a, s);
    for (const Op op : kOps) {
      const absl::Status status = op({}, a);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
      EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    }
  };
  using S = SelectingSequence;
  refuses("granularity", [](TopTokensArgs& a, S&) { a.granularity = 8; });
  refuses("num_kv_heads", [](TopTokensArgs& a, S&) { a.num_kv_heads = 0; });
  refuses("scores_stride", [](TopTokensArgs& a, S&) { a.scores_stride = 9; });
  refuses("scores", [](TopTokensArgs& a, S&) { a.scores = nullptr; });
  refuses("lists.stride", [](TopTokensArgs& a, S&) { a.lists.stride = 0; });
  refuses("at most 65536", [](TopTokensArgs& a, S& s) {
    a.lists.stride = kSelectBudgetMax + 1;
    s.budget = kSelectBudgetMax + 1;
  });
  refuses("budget", [](TopTokensArgs&, S& s) { s.budget = 9; });
  refuses("multiple of granularity", [](TopTokensArgs& a, S& s) {
    a.granularity = 16;
    s.budget = 8;
  });
  refuses("recent", [](TopTokensArgs&, S& s) { s.recent = 9; });
  refuses("kv_len", [](TopTokensArgs&, S& s) { s.kv_len = 0; });
}

}  // namespace
}  // namespace spl::kernels
