#include "kernels/selection/quest/page_bound_scores.h"

#include <gmock/gmock.h>

#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

using Op = absl::Status (*)(const KernelContext&, const PageBoundScoresArgs&);

struct Call {
  std::vector<SelectingSequence> views;
  PageBoundScoresArgs args;

  Call(SelectingBatch& b, std::vector<float>& scores, int64_t stride) {
    for (TestSequence& s : b.sequences()) views.push_back(s.view());
    scores.assign(b.num_streams() * static_cast<size_t>(stride), -77.0f);
    args.shape = b.shape().attention();
    args.pool = b.pool().view();
    args.q = b.q().data();
    args.q_row_stride = b.shape().q_width();
    args.sequences = views;
    args.scores = scores.data();
    args.scores_stride = stride;
  }
};

class PageBoundScores : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(PageBoundScores, EqualsReferenceOverStepsAndBoundsEveryScore) {
  TestContext t(GetParam());
  const SelectingShape shapes[] = {{2, 4, 128, 16, DType::kBF16}, {1, 1, 64, 16, DType::kF32},
                                   {1, 7, 40, 8, DType::kBF16},   {3, 2, 8, 4, DType::kF32},
                                   {2, 4, 128, 16, DType::kE4M3}, {1, 7, 40, 8, DType::kE4M3}};
  for (size_t n = 0; n < std::size(shapes); ++n) {
    const SelectingShape& shape = shapes[n];
    Random of_ref(500 + n), of_cpu(500 + n), steps(600 + n);
    const std::vector<std::pair<int32_t, int32_t>> lengths = {{1, 40}, {15, 40}, {16, 64}, {1000, 1100}, {2050, 2090}};
    const int32_t page_tokens = BoundPageTokens(shape.dtype);
    SelectingBatch want(of_ref, shape, lengths, page_tokens), got(of_cpu, shape, lengths, page_tokens);
    want.Write();
    got.Write();
    const int64_t stride = 2090 / kBoundTokens + 1;
    for (int step = 0; step < 8; ++step) {
      for (size_t i = 0; i < lengths.size(); ++i)
        want.sequences()[i].step.selects = got.sequences()[i].step.selects = steps.Int(0, 4) > 0;
      const std::vector<float> q = steps.Normals(want.q().size());
      want.q() = got.q() = q;
      std::vector<float> w, g;
      ASSERT_TRUE(ref::PageBoundScores({}, Call(want, w, stride).args).ok());
      ASSERT_TRUE(cpu::PageBoundScores(t.ctx, Call(got, g, stride).args).ok());
      ASSERT_TRUE(std::ranges::equal(want.pool().bytes(), got.pool().bytes())) << "shape " << n << ", step " << step;
      ExpectClose(g, w, DType::kF32, "shape " + std::to_string(n) + ", step " + std::to_string(step));
      for (size_t stream = 0; stream < got.num_streams(); ++stream) {
        const TestSequence& s = got.sequence_of(stream);
        if (!s.step.selects) {
          EXPECT_EQ(g[stream * stride], -77.0f);
          continue;
        }
        for (int32_t j = 0; j < s.kv_len; ++j) {
          for (int32_t h = 0; h < shape.group; ++h) {
            double score = 0;
            for (int32_t c = 0; c < shape.head_dim; ++c)
              score += got.q_of(static_cast<int64_t>(stream))[h * shape.head_dim + c] * got.Key(stream, j, c);
            score *= shape.attention().sm_scale;
            ASSERT_LE(score, g[stream * stride + j / kBoundTokens] + 1e-4)
                << "stream " << stream << ", position " << j << ", head " << h;
          }
        }
      }
      for (size_t i = 0; i < lengths.size(); ++i) {
        const bool grows = steps.Int(0, 3) > 0;
        for (SelectingBatch* b : {&want, &got}) {
          TestSequence& s = b->sequences()[i];
          if (s.step.selects) s.Advance();
          if (grows && s.kv_len < s.max_len) b->Append(i);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, PageBoundScores, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(PageBoundScoresValidation, NamesTheFieldThatIsWrong) {
  Random random(62);
  const auto refuses = [&](const char* field, const auto& change) {
    SelectingBatch b(random, {1, 2, 64, 16}, {{100, 100}}, BoundPageTokens(DType::kF32));
    b.Write();
    std::vector<float> scores;
    Call call(b, scores, 7);
    change(call.args, call.views[0]);
    for (const Op op : {&ref::PageBoundScores, &cpu::PageBoundScores}) {
      const absl::Status status = op({}, call.args);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
      EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    }
  };
  using Args = PageBoundScoresArgs;
  using S = SelectingSequence;
  refuses("scores_stride", [](Args& a, S&) { a.scores_stride = 6; });
  refuses("scores is null", [](Args& a, S&) { a.scores = nullptr; });
  refuses("compact_tables", [](Args&, S& s) { s.compact_tables = {}; });
  refuses("kv_len", [](Args&, S& s) { s.kv_len = 0; });
  refuses("compact_len", [](Args&, S& s) { s.step.compact_len = -1; });
  refuses("head_dim", [](Args& a, S&) { a.shape.head_dim = 63; });
}

}  // namespace
}  // namespace spl::kernels
