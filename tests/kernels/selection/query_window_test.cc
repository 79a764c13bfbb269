#include "kernels/selection/loopserve/query_window.h"

#include <gmock/gmock.h>

#include <cmath>
#include <deque>

#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

using Op = absl::Status (*)(const KernelContext&, const QueryWindowArgs&);

constexpr int32_t kMaxLen = 1100;

QueryWindow LayoutOf(const SelectingShape& shape, int32_t window, int32_t budget) {
  const size_t page_bytes = KvPageBytes(shape.dtype, shape.head_dim);
  return {.head_dim = shape.head_dim,
          .group = shape.group,
          .window = window,
          .budget = budget,
          .query_dtype = DType::kF32,
          .page_bytes = page_bytes};
}

// Sequences of at most kMaxLen positions, with as many compact pages as windows of this size need.
std::unique_ptr<SelectingBatch> MakeBatch(Random& random, const SelectingShape& shape,
                                          const std::vector<int32_t>& lengths, int32_t window, int32_t budget) {
  const auto pages = static_cast<int32_t>(LayoutOf(shape, window, budget).num_pages());
  std::vector<std::pair<int32_t, int32_t>> both;
  for (const int32_t length : lengths) both.emplace_back(length, kMaxLen);
  auto batch = std::make_unique<SelectingBatch>(random, shape, both, kMaxLen / pages);
  batch->Write();
  for (TestSequence& s : batch->sequences()) {
    s.budget = budget;
    s.recent = std::min(budget, 3);
    s.step = {.records = true};
  }
  return batch;
}

struct Call {
  std::vector<SelectingSequence> views;
  std::vector<float> scores;
  std::vector<int32_t> tokens, counts;
  QueryWindowArgs args;

  Call(SelectingBatch& b, int32_t window, int64_t stride) {
    for (TestSequence& s : b.sequences()) views.push_back(s.view());
    scores.assign(b.num_streams() * kMaxLen, -77.0f);
    tokens.assign(b.num_streams() * static_cast<size_t>(stride), -9);
    counts.assign(b.num_streams(), -9);
    args.shape = b.shape().attention();
    args.pool = b.pool().view();
    args.window = window;
    args.q = b.q().data();
    args.q_row_stride = b.shape().q_width();
    args.sequences = views;
    args.scores = scores.data();
    args.scores_stride = kMaxLen;
    args.lists = {tokens.data(), counts.data(), stride};
  }
  std::vector<int32_t> list(size_t stream) const {
    const auto begin = tokens.begin() + static_cast<int64_t>(stream) * args.lists.stride;
    return {begin, begin + counts[stream]};
  }
};

// What the last queries of a stream pay to each position, from queries that the test has kept itself.
std::vector<float> Weights(SelectingBatch& b, size_t stream, const std::deque<std::vector<float>>& queries) {
  const TestSequence& s = b.sequence_of(stream);
  const SelectingShape& shape = b.shape();
  std::vector<double> sums(static_cast<size_t>(s.kv_len));
  for (size_t at = 0; at < queries.size(); ++at) {
    const int32_t sees = s.kv_len - static_cast<int32_t>(queries.size() - 1 - at);
    for (int32_t h = 0; h < shape.group; ++h) {
      const float* q =
          queries[at].data() + (static_cast<int64_t>(stream) * shape.group + h) * static_cast<int64_t>(shape.head_dim);
      std::vector<double> scores;
      double total = 0;
      for (int32_t j = 0; j < sees; ++j) {
        double dot = 0;
        for (int32_t c = 0; c < shape.head_dim; ++c) dot += double{q[c]} * b.Key(stream, j, c);
        scores.push_back(std::exp(dot * shape.attention().sm_scale));
        total += scores.back();
      }
      for (int32_t j = 0; j < sees; ++j) sums[static_cast<size_t>(j)] += scores[static_cast<size_t>(j)] / total;
    }
  }
  return {sums.begin(), sums.end()};
}

class QueryWindowTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  std::vector<std::pair<const char*, Op>> ops() const {
    return {{"ref", ref::ChooseByQueryWindow}, {"cpu", cpu::ChooseByQueryWindow}};
  }
};

TEST_P(QueryWindowTest, KeepsWhatTheLastQueriesAttendTo) {
  TestContext t(GetParam());
  for (const SelectingShape& shape : kShapesOfAllTypes) {
    for (const int32_t window : {1, 5, 16}) {
      for (const auto& [name, op] : ops()) {
        const uint64_t seed = 900 + static_cast<uint64_t>(window);
        SCOPED_TRACE(std::string(name) + ", window " + std::to_string(window) + ", head_dim " +
                     std::to_string(shape.head_dim));
        Random random(seed);
        const std::vector<int32_t> lengths = {64, 300, 1000};
        const int32_t budget = 48;
        const auto batch = MakeBatch(random, shape, lengths, window, budget);
        SelectingBatch& b = *batch;
        std::deque<std::vector<float>> queries;
        std::vector<std::vector<int32_t>> before(b.num_streams());
        for (int32_t step = 0; step < 3 * window + 2; ++step) {
          b.q() = random.Normals(b.q().size());
          queries.push_back(b.q());
          if (static_cast<int32_t>(queries.size()) > window) queries.pop_front();
          const bool selects = step + 1 >= window, refresh = selects && (step + 1) % window == 0;
          for (TestSequence& s : b.sequences()) {
            s.step.compact_len = step;
            s.step.selects = selects;
            s.step.refresh = refresh;
          }
          Call call(b, window, budget + window);
          const absl::Status status = op(t.ctx, call.args);
          ASSERT_TRUE(status.ok()) << status;
          for (size_t stream = 0; stream < b.num_streams(); ++stream) {
            const TestSequence& s = b.sequence_of(stream);
            if (!selects) {
              EXPECT_EQ(call.counts[stream], -9) << "not to be touched";
              continue;
            }
            const std::vector<int32_t> got = call.list(stream);
            if (refresh) {
              const std::vector<float> want = Weights(b, stream, queries);
              std::vector<float> scores(call.scores.begin() + static_cast<int64_t>(stream) * kMaxLen,
                                        call.scores.begin() + static_cast<int64_t>(stream) * kMaxLen + s.kv_len);
              ExpectClose(scores, want, DType::kF32, "step " + std::to_string(step));
              std::vector<int32_t> order(want.size());
              std::iota(order.begin(), order.end(), 0);
              std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
                const bool a = x >= s.kv_len - s.recent, c = y >= s.kv_len - s.recent;
                return a != c ? a : want[static_cast<size_t>(x)] > want[static_cast<size_t>(y)];
              });
              order.resize(static_cast<size_t>(budget));
              std::sort(order.begin(), order.end());
              EXPECT_TRUE(SameChoice(got, order, want, s.kv_len - s.recent)) << "step " << step;
            } else {
              before[stream].push_back(s.kv_len - 1);
              EXPECT_EQ(got, before[stream]) << "step " << step;
            }
            before[stream] = got;
          }
          for (size_t i = 0; i < lengths.size(); ++i) b.Append(i);
        }
      }
    }
  }
}

TEST_P(QueryWindowTest, ABudgetBeyondTheContextKeepsEverythingAndSmallerOnesAreNested) {
  TestContext t(GetParam());
  const SelectingShape shape{2, 4, 64, 16, DType::kBF16};
  const int32_t window = 3;
  for (const auto& [name, op] : ops()) {
    SCOPED_TRACE(name);
    std::vector<int32_t> smaller;
    double mass = 0;
    for (const int32_t budget : {8, 40, 100, 500, 700}) {
      Random random(77);
      const auto batch = MakeBatch(random, shape, {500}, window, 700);  // room for the largest
      SelectingBatch& b = *batch;
      b.sequences()[0].budget = budget;
      b.sequences()[0].recent = 1;
      std::deque<std::vector<float>> queries;
      for (int32_t step = 0; step < window; ++step) {
        b.q() = random.Normals(b.q().size());
        queries.push_back(b.q());
        b.sequences()[0].step.compact_len = step;
        b.sequences()[0].step.selects = b.sequences()[0].step.refresh = step + 1 == window;
        Call call(b, window, 1024);
        ASSERT_TRUE(op(t.ctx, call.args).ok());
        if (step + 1 == window) {
          const std::vector<int32_t> got = call.list(0);
          const std::vector<float> weights = Weights(b, 0, queries);
          double kept = 0;
          for (const int32_t j : got) kept += weights[static_cast<size_t>(j)];
          EXPECT_GE(kept, mass) << budget;
          EXPECT_TRUE(std::includes(got.begin(), got.end(), smaller.begin(), smaller.end())) << budget;
          EXPECT_EQ(got.size(), static_cast<size_t>(std::min(budget, b.sequences()[0].kv_len)));
          mass = kept;
          smaller = got;
        } else {
          b.Append(0);
        }
      }
    }
    EXPECT_NEAR(mass, window * shape.group, 1e-4);
  }
}

TEST_P(QueryWindowTest, BadArgumentsAreNamed) {
  TestContext t(GetParam());
  const SelectingShape shape{1, 2, 64, 16, DType::kF32};
  for (const auto& [name, op] : ops()) {
    const auto error = [&, op = op](const std::function<void(SelectingBatch&, Call&)>& change) {
      Random random(5);
      const auto batch = MakeBatch(random, shape, {300}, 4, 32);
      batch->sequences()[0].step.selects = batch->sequences()[0].step.refresh = true;
      Call call(*batch, 4, 40);
      change(*batch, call);
      const absl::Status status = op(t.ctx, call.args);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      return std::string(status.message());
    };
    EXPECT_THAT(error([](auto&, Call& c) { c.args.window = -1; }), HasSubstr("window is -1"));
    EXPECT_THAT(error([](auto&, Call& c) { c.args.window = 0; }), HasSubstr("window is 0"));
    EXPECT_THAT(error([](auto&, Call& c) { c.args.chooses = false; }), HasSubstr("says nobody does"));
    EXPECT_THAT(error([](auto&, Call& c) { c.args.window = 129; }), HasSubstr("window is 129"));
    EXPECT_THAT(error([](auto&, Call& c) { c.views[0].step.records = false; }), HasSubstr("does not record"));
    EXPECT_THAT(error([](auto&, Call& c) { c.views[0].budget = 0; }), HasSubstr("budget 0"));
    EXPECT_THAT(error([](auto&, Call& c) { c.views[0].recent = 33; }), HasSubstr("recent 33"));
    EXPECT_THAT(error([](auto&, Call& c) { c.args.lists.stride = 34; }), HasSubstr("needs lists of 35"));
    EXPECT_THAT(error([](auto&, Call& c) { c.args.scores_stride = 299; }), HasSubstr("scores_stride 299"));
    EXPECT_THAT(error([](auto&, Call& c) { c.args.scores = nullptr; }), HasSubstr("null"));
  }
}

// A device keeps queries in the type that they have: of bf16 they take half of the pages, and no more are asked for.
TEST(QueryWindowTables, QueriesOfTwoBytesNeedHalfOfThePages) {
  const SelectingShape shape{1, 4, 64, 16, DType::kBF16};
  constexpr int32_t kWindow = 64, kBudget = 32;
  QueryWindow layout = LayoutOf(shape, kWindow, kBudget);
  const int64_t wide = layout.num_pages();
  layout.query_dtype = DType::kBF16;
  const int64_t narrow = layout.num_pages();
  ASSERT_LT(narrow, wide);
  Random random(6);
  const auto batch = MakeBatch(random, shape, {420}, kWindow, kBudget);
  Call call(*batch, kWindow, 128);
  std::vector<std::span<const int32_t>> compact;
  for (const auto& table : call.views[0].compact_tables) compact.push_back(table.first(static_cast<size_t>(narrow)));
  call.views[0].compact_tables = compact;
  EXPECT_THAT(std::string(ValidateQueryWindow(call.args).message()), HasSubstr("compact_tables has"));
  call.args.q = ConstActivations(batch->q().data(), DType::kBF16);
  EXPECT_TRUE(ValidateQueryWindow(call.args).ok()) << ValidateQueryWindow(call.args);
  EXPECT_THAT(std::string(cpu::ChooseByQueryWindow({}, call.args).message()), HasSubstr("q is not f32"));
}

INSTANTIATE_TEST_SUITE_P(Cpu, QueryWindowTest, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
