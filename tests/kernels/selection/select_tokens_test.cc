// SelectTokens on the host, and the oracles of docs/methods/sparcas.md that need no device.
#include "kernels/selection/sparcas/select_tokens.h"

#include <gmock/gmock.h>

#include <cstdio>

#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

struct Output {
  std::vector<int32_t> tokens, counts;
  std::vector<float> weights;
  int64_t stride = 0, weights_stride = 0;

  std::span<const int32_t> list(size_t stream) const {
    return std::span(tokens).subspan(stream * static_cast<size_t>(stride), static_cast<size_t>(counts[stream]));
  }
  std::span<const float> w(size_t stream, int32_t kv_len) const {
    return std::span(weights).subspan(stream * static_cast<size_t>(weights_stride), static_cast<size_t>(kv_len));
  }
  TokenLists lists() { return {tokens.data(), counts.data(), stride}; }
};

constexpr int32_t kUntouched = -77;

using Op = absl::Status (*)(const KernelContext&, const SelectTokensArgs&);

struct Call {
  std::vector<SelectingSequence> views;
  SelectTokensArgs args;

  Call(SelectingBatch& b, Output& out, int64_t stride = 0, bool with_weights = true) {
    int32_t longest = 1;
    for (TestSequence& s : b.sequences()) {
      views.push_back(s.view());
      stride = std::max<int64_t>(stride, s.budget);
      longest = std::max(longest, s.kv_len);
    }
    out.stride = stride;
    out.weights_stride = longest;
    out.tokens.assign(b.num_streams() * static_cast<size_t>(stride), kUntouched);
    out.counts.assign(b.num_streams(), kUntouched);
    out.weights.assign(b.num_streams() * static_cast<size_t>(longest), static_cast<float>(kUntouched));
    args.shape = b.shape().attention();
    args.pool = b.pool().view();
    args.num_dims = b.shape().num_dims;
    args.q = b.q().data();
    args.q_row_stride = b.shape().q_width();
    args.sequences = views;
    args.lists = out.lists();
    if (with_weights) {
      args.weights = out.weights.data();
      args.weights_stride = longest;
    }
  }
};

Output Select(Op op, const KernelContext& ctx, SelectingBatch& b, bool with_weights = true) {
  Output out;
  const Call call(b, out, 0, with_weights);
  const absl::Status status = op(ctx, call.args);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// Σ_h softmax_h(scores over `dims`) in double; all dimensions when empty.
std::vector<double> ExactWeights(SelectingBatch& b, size_t stream, std::span<const int32_t> dims = {}) {
  const SelectingShape& shape = b.shape();
  const int32_t kv_len = b.sequence_of(stream).kv_len;
  std::vector<double> weights(static_cast<size_t>(kv_len), 0.0);
  for (int32_t h = 0; h < shape.group; ++h) {
    const float* q = b.q_of(static_cast<int64_t>(stream)) + h * shape.head_dim;
    std::vector<double> scores(weights.size());
    for (int32_t j = 0; j < kv_len; ++j) {
      double dot = 0;
      if (dims.empty()) {
        for (int32_t c = 0; c < shape.head_dim; ++c) dot += q[c] * b.Key(stream, j, c);
      } else {
        for (const int32_t c : dims) dot += q[c] * b.Key(stream, j, c);
      }
      scores[j] = dot / std::sqrt(static_cast<double>(shape.head_dim));
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& s : scores) sum += s = std::exp(s - max);
    for (size_t j = 0; j < scores.size(); ++j) weights[j] += scores[j] / sum;
  }
  return weights;
}

std::vector<float> Rounded(const std::vector<double>& x) { return {x.begin(), x.end()}; }

class SelectTokens : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(SelectTokens, EqualsReferenceOverStepsOfMixedBatches) {
  TestContext t(GetParam());
  const SelectingShape shapes[] = {{2, 4, 128, 16, DType::kBF16},      {1, 1, 64, 16, DType::kBF16},
                                   {3, 2, 64, 8, DType::kF32},         {1, 7, 128, 32, DType::kBF16},
                                   {2, 5, 32, 4, DType::kF32},         {1, 3, 96, 96, DType::kBF16},
                                   {1, 16, 64, 128 / 2, DType::kBF16}, {2, 4, 128, 16, DType::kE4M3},
                                   {1, 3, 96, 96, DType::kE4M3},       {1, 2, 24, 16, DType::kE4M3}};
  for (size_t n = 0; n < std::size(shapes); ++n) {
    const SelectingShape& shape = shapes[n];
    const uint64_t seed = 400 + n;
    Random of_ref(seed), of_cpu(seed), steps(seed + 1000);
    const std::vector<std::pair<int32_t, int32_t>> lengths = {{1, 20},    {63, 80},   {64, 90},
                                                              {500, 530}, {37, 1400}, {2100, 2130}};
    SelectingBatch want(of_ref, shape, lengths), got(of_cpu, shape, lengths);
    want.Write();
    got.Write();
    for (int step = 0; step < 12; ++step) {
      for (size_t i = 0; i < lengths.size(); ++i) {
        const bool selects = steps.Int(0, 4) > 0, refresh = steps.Int(0, 3) == 0;
        const int32_t budget = steps.Int(1, 200), recent = steps.Int(1, budget);
        for (SelectingBatch* b : {&want, &got}) {
          TestSequence& s = b->sequences()[i];
          s.step.selects = selects;
          s.step.refresh |= refresh;
          s.budget = budget;
          s.recent = recent;
        }
      }
      const std::vector<float> q = steps.Normals(want.q().size());
      want.q() = got.q() = q;
      const Output w = Select(ref::SelectTokens, {}, want), g = Select(cpu::SelectTokens, t.ctx, got);
      ASSERT_TRUE(std::ranges::equal(want.pool().bytes(), got.pool().bytes())) << "shape " << n << ", step " << step;
      for (size_t stream = 0; stream < want.num_streams(); ++stream) {
        const TestSequence& s = want.sequence_of(stream);
        const std::string what = "shape " + std::to_string(n) + ", step " + std::to_string(step) + ", stream " +
                                 std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len);
        EXPECT_EQ(s.dims, got.sequence_of(stream).dims) << what;
        ASSERT_EQ(w.counts[stream], g.counts[stream]) << what;
        if (!s.step.selects) {
          EXPECT_EQ(g.counts[stream], kUntouched) << what;
          EXPECT_EQ(g.tokens[stream * g.stride], kUntouched) << what;
          continue;
        }
        EXPECT_EQ(g.counts[stream], std::min(s.budget, s.kv_len)) << what;
        ExpectClose(g.w(stream, s.kv_len), w.w(stream, s.kv_len), DType::kF32, what + " weights");
        EXPECT_TRUE(SameChoice(g.list(stream), w.list(stream), w.w(stream, s.kv_len), s.kv_len - s.recent)) << what;
        EXPECT_TRUE(got.CompactKeysAreThoseOf(stream, got.dims(stream))) << what;
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

TEST_P(SelectTokens, BatchAndThreadsChangeNoBit) {
  const SelectingShape shape{2, 4, 64, 16};
  const std::vector<std::pair<int32_t, int32_t>> lengths = {{900, 900}, {70, 70}, {1500, 1500}};
  std::vector<Output> outputs;
  for (const int threads : {1, 2, 5}) {
    Random random(41);
    TestContext t(GetParam(), threads);
    SelectingBatch b(random, shape, lengths);
    b.Write();
    outputs.push_back(Select(cpu::SelectTokens, t.ctx, b));
  }
  for (const Output& o : outputs) {
    EXPECT_EQ(o.tokens, outputs[0].tokens);
    EXPECT_TRUE(BitwiseEqual(o.weights, outputs[0].weights));
  }
  // Each sequence by itself: the others of the same batch do not select.
  TestContext t(GetParam());
  for (size_t only = 0; only < lengths.size(); ++only) {
    Random random(41);
    SelectingBatch b(random, shape, lengths);
    b.Write();
    for (size_t i = 0; i < lengths.size(); ++i) b.sequences()[i].step.selects = i == only;
    const Output alone = Select(cpu::SelectTokens, t.ctx, b);
    for (size_t stream = 2 * only; stream < 2 * only + 2; ++stream) {
      EXPECT_TRUE(std::ranges::equal(alone.list(stream), outputs[0].list(stream)));
      EXPECT_TRUE(BitwiseEqual(alone.w(stream, lengths[only].first), outputs[0].w(stream, lengths[only].first)));
    }
  }
}

// Tb >= len: the list names every position, and attention over it is attention over all, bit for bit.
TEST_P(SelectTokens, ABudgetOfTheWholeLengthIsDense) {
  Random random(42);
  TestContext t(GetParam());
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kE4M3}) {
    SelectingBatch b(random, {2, 2, 64, 16, dtype}, {{1, 1}, {64, 64}, {200, 200}, {700, 700}});
    b.Write();
    for (TestSequence& s : b.sequences()) s.budget = 700;
    Output out = Select(cpu::SelectTokens, t.ctx, b);
    std::vector<HeadStreamView> views;
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      const int32_t kv_len = b.sequence_of(stream).kv_len;
      ASSERT_EQ(out.counts[stream], kv_len);
      for (int32_t j = 0; j < kv_len; ++j) ASSERT_EQ(out.list(stream)[j], j);
      views.push_back({b.stream(stream).page_table, kv_len, {VisibilityRule::kSelected}});
    }
    const auto attend = [&](VisibilityRule rule) {
      std::vector<HeadStreamView> streams = views;
      for (HeadStreamView& s : streams) s.visibility.rule = rule;
      std::vector<float> result(b.q().size(), -7.0f);
      DecodeAttentionArgs a;
      a.shape = b.shape().attention();
      a.pool = b.pool().view();
      a.q = b.q().data();
      a.q_row_stride = b.shape().q_width();
      a.out = result.data();
      a.streams = streams;
      a.lists = out.lists();
      const absl::Status status = cpu::DecodeAttention(t.ctx, a);
      EXPECT_TRUE(status.ok()) << status;
      return result;
    };
    EXPECT_TRUE(BitwiseEqual(attend(VisibilityRule::kSelected), attend(VisibilityRule::kFull)));
  }
}

// Db = d: the choice is the exact one, by a computation in double that shares no code with it.
TEST_P(SelectTokens, AllDimensionsGiveTheExactLargest) {
  Random random(43);
  TestContext t(GetParam());
  for (const Op op : {&ref::SelectTokens, &cpu::SelectTokens}) {
    SelectingBatch b(random, {2, 4, 64, 64}, {{300, 300}, {1111, 1111}});
    b.Write();
    for (const int32_t budget : {1, 17, 64, 299}) {
      for (TestSequence& s : b.sequences()) s.budget = budget;
      const Output out = Select(op, t.ctx, b);
      for (size_t stream = 0; stream < b.num_streams(); ++stream) {
        const int32_t kv_len = b.sequence_of(stream).kv_len;
        const std::vector<double> weights = ExactWeights(b, stream);
        std::vector<int32_t> want(static_cast<size_t>(kv_len - 1));
        std::iota(want.begin(), want.end(), 0);
        std::stable_sort(want.begin(), want.end(), [&](int32_t x, int32_t y) { return weights[x] > weights[y]; });
        want.resize(static_cast<size_t>(budget - 1));
        want.push_back(kv_len - 1);
        std::sort(want.begin(), want.end());
        EXPECT_TRUE(SameChoice(out.list(stream), want, Rounded(weights), kv_len - 1)) << budget;
      }
    }
  }
}

TEST_P(SelectTokens, SmallerBudgetsGivePartsOfTheSameListAndKeepLess) {
  Random random(44);
  TestContext t(GetParam());
  for (const Op op : {&ref::SelectTokens, &cpu::SelectTokens}) {
    SelectingBatch b(random, {1, 4, 64, 16}, {{1700, 1700}});
    b.Write();
    const std::vector<double> exact = ExactWeights(b, 0);
    std::vector<int32_t> before;
    double kept_before = 0;
    for (const int32_t budget : {8, 9, 64, 200, 201, 1000, 1699, 1700}) {
      b.sequences()[0].budget = budget;
      b.sequences()[0].recent = 8;
      const Output out = Select(op, t.ctx, b);
      const std::vector<int32_t> list(out.list(0).begin(), out.list(0).end());
      EXPECT_TRUE(std::ranges::includes(list, before)) << budget;
      for (int32_t j = 1692; j < 1700; ++j) EXPECT_TRUE(std::ranges::binary_search(list, j)) << budget;
      double kept = 0;
      for (const int32_t j : list) kept += exact[j];
      EXPECT_GE(kept, kept_before) << budget;
      before = list;
      kept_before = kept;
    }
    EXPECT_NEAR(kept_before, 4.0, 1e-9);  // one for each query head
  }
}

// U = 1 against U = 4: where both refresh they choose the same.
TEST_P(SelectTokens, RefreshingRarelyChangesNothingWhereItRefreshes) {
  TestContext t(GetParam());
  for (const Op op : {&ref::SelectTokens, &cpu::SelectTokens}) {
    Random a(45), b(45), queries(46);
    const SelectingShape shape{2, 4, 64, 16};
    SelectingBatch always(a, shape, {{600, 640}}), rarely(b, shape, {{600, 640}});
    always.Write();
    rarely.Write();
    for (int step = 0; step < 13; ++step) {
      always.q() = rarely.q() = queries.Normals(always.q().size());
      always.sequences()[0].step.refresh = true;
      if (step % 4 == 0) rarely.sequences()[0].step.refresh = true;
      const Output x = Select(op, t.ctx, always), y = Select(op, t.ctx, rarely);
      for (size_t stream = 0; stream < 2; ++stream) {
        EXPECT_TRUE(rarely.CompactKeysAreThoseOf(stream, rarely.dims(stream)));
        if (step % 4 != 0) continue;
        std::vector<int32_t> all_dims(always.dims(stream).begin(), always.dims(stream).end());
        std::vector<int32_t> some_dims(rarely.dims(stream).begin(), rarely.dims(stream).end());
        std::ranges::sort(all_dims);
        std::ranges::sort(some_dims);
        EXPECT_EQ(all_dims, some_dims) << step;
        const int32_t kv_len = always.sequences()[0].kv_len;
        EXPECT_TRUE(SameChoice(y.list(stream), x.list(stream), x.w(stream, kv_len), kv_len - 1)) << step;
      }
      for (SelectingBatch* batch : {&always, &rarely}) {
        batch->sequences()[0].Advance();
        batch->Append(0);
      }
    }
  }
}

TEST_P(SelectTokens, DimensionsThatStayKeepTheirSlots) {
  Random random(47);
  TestContext t(GetParam());
  for (const Op op : {&ref::SelectTokens, &cpu::SelectTokens}) {
    SelectingBatch b(random, {1, 1, 32, 4, DType::kF32}, {{100, 120}});
    b.Write();
    const auto refresh_with = [&](const std::vector<int32_t>& large) {
      std::fill(b.q().begin(), b.q().end(), 0.25f);
      for (const int32_t c : large) b.q()[c] = c % 2 == 0 ? 2.0f : -2.0f;
      b.sequences()[0].step.refresh = true;
      Select(op, t.ctx, b);
      const std::vector<int32_t> dims(b.dims(0).begin(), b.dims(0).end());
      EXPECT_TRUE(b.CompactKeysAreThoseOf(0, dims));
      b.sequences()[0].Advance();
      return dims;
    };
    using ::testing::ElementsAre;
    EXPECT_THAT(refresh_with({5, 9, 20, 31}), ElementsAre(5, 9, 20, 31));
    b.Append(0);
    EXPECT_THAT(refresh_with({9, 31, 2, 30}), ElementsAre(2, 9, 30, 31));
    EXPECT_THAT(refresh_with({9, 30}), ElementsAre(0, 9, 30, 1));  // ties to the lower dimension
    b.Append(0);
    EXPECT_THAT(refresh_with({9, 30, 0, 1}), ElementsAre(0, 9, 30, 1));
    EXPECT_THAT(refresh_with({8, 10, 12, 14}), ElementsAre(8, 10, 12, 14));
  }
}

// Queries of which few dimensions are large (kurtosis about 68), keys of which few point along them.
TEST_P(SelectTokens, PlantedHeavyHittersAreFound) {
  Random random(48);
  TestContext t(GetParam());
  const SelectingShape shape{2, 4, 128, 16};
  int found = 0, planted = 0;
  double fourth = 0, second = 0;
  for (int round = 0; round < 4; ++round) {
    SelectingBatch b(random, shape, {{4000, 4000}});
    constexpr int kHitters = 100;
    std::vector<std::set<int32_t>> hitters(b.num_streams());
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      std::vector<float> large(static_cast<size_t>(shape.head_dim), 0.0f);
      // Two different dimensions: keys that are moved along one alone are not heavy enough to be found.
      const int32_t first = random.Int(0, shape.head_dim - 1);
      const int32_t other = (first + random.Int(1, shape.head_dim - 1)) % shape.head_dim;
      for (const int32_t c : {first, other}) large[c] = random.Int(0, 1) == 0 ? 9.0f : -9.0f;
      for (int32_t h = 0; h < shape.group; ++h) {
        float* q = b.q().data() + (stream * shape.group + h) * shape.head_dim;
        for (int32_t c = 0; c < shape.head_dim; ++c) {
          const float scale = large[c] == 0 ? 0.3f : 1.0f;
          q[c] = scale * q[c] + (large[c] == 0 ? 0 : large[c] * (1 + 0.5f * std::abs(random.Normal())));
          second += double{q[c]} * q[c];
          fourth += double{q[c]} * q[c] * q[c] * q[c];
        }
      }
      while (hitters[stream].size() < kHitters) hitters[stream].insert(random.Int(0, 3900));
      for (const int32_t j : hitters[stream]) {
        for (int32_t c = 0; c < shape.head_dim; ++c)
          b.stream(stream).k[static_cast<size_t>(j) * shape.head_dim + c] += 0.42f * large[c];
      }
    }
    b.Write();
    b.sequences()[0].budget = 256;
    b.sequences()[0].recent = 64;
    const Output out = Select(cpu::SelectTokens, t.ctx, b);
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      for (const int32_t j : hitters[stream]) found += std::ranges::binary_search(out.list(stream), j) ? 1 : 0;
      planted += kHitters;
    }
  }
  const double n = 4.0 * 2 * shape.group * shape.head_dim;
  std::printf("kurtosis of q %.1f, %d of %d heavy hitters found\n", fourth / n / (second / n * second / n), found,
              planted);
  EXPECT_GE(found, planted * 99 / 100);
}

INSTANTIATE_TEST_SUITE_P(Cpu, SelectTokens, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(SelectTokensValidation, NamesTheFieldThatIsWrong) {
  Random random(49);
  const auto refuses = [&](const char* field, const auto& change) {
    SelectingBatch b(random, {2, 2, 64, 16}, {{100, 100}, {200, 200}});
    b.Write();
    Output out;
    Call call(b, out, 64);
    change(call.args, call.views, b);
    const absl::Status reference = ref::SelectTokens({}, call.args), fast = cpu::SelectTokens({}, call.args);
    EXPECT_EQ(reference.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_EQ(reference, fast);
    EXPECT_THAT(std::string(reference.message()), HasSubstr(field));
    EXPECT_EQ(out.counts[0], kUntouched) << field;
  };
  using Args = SelectTokensArgs;
  using Views = std::vector<SelectingSequence>;
  using Batch = SelectingBatch;
  for (const int32_t num_dims : {0, 2, 12, 65, 128})
    refuses("num_dims", [&](Args& a, Views&, Batch&) { a.num_dims = num_dims; });
  refuses("query heads", [](Args& a, Views&, Batch&) { a.shape.num_kv_heads = 3; });
  refuses("head_dim", [](Args& a, Views&, Batch&) { a.shape.head_dim = 60; });
  refuses("pool.head_dim", [](Args& a, Views&, Batch&) { a.pool.head_dim = 128; });
  refuses("pool.dtype", [](Args& a, Views&, Batch&) { a.pool.dtype = DType::kF16; });
  refuses("sm_scale", [](Args& a, Views&, Batch&) { a.shape.sm_scale = 0; });
  refuses("q_row_stride", [](Args& a, Views&, Batch&) { a.q_row_stride = 255; });
  refuses("lists.stride", [](Args& a, Views&, Batch&) { a.lists.stride = 0; });
  refuses("at most 65536", [](Args& a, Views& v, Batch&) {
    a.lists.stride = kSelectBudgetMax + 1;
    v[0].budget = kSelectBudgetMax + 1;
  });
  refuses("lists.tokens", [](Args& a, Views&, Batch&) { a.lists.tokens = nullptr; });
  refuses("weights_stride", [](Args& a, Views&, Batch&) { a.weights_stride = 199; });
  refuses("budget", [](Args&, Views& v, Batch&) { v[1].budget = 65; });
  refuses("budget", [](Args&, Views& v, Batch&) { v[1].budget = 0; });
  refuses("recent", [](Args&, Views& v, Batch&) { v[1].recent = 0; });
  refuses("recent", [](Args&, Views& v, Batch&) { v[1].recent = 65; });
  refuses("kv_len", [](Args&, Views& v, Batch&) { v[1].kv_len = 0; });
  refuses("compact_len", [](Args&, Views& v, Batch&) { v[1].step.compact_len = 201; });
  refuses("parity", [](Args&, Views& v, Batch&) { v[1].step.parity = 2; });
  refuses("first", [](Args&, Views& v, Batch&) { v[1].step.refresh = false; });
  refuses("dims", [](Args&, Views& v, Batch&) { v[1].dims = nullptr; });
  refuses("page_tables", [](Args&, Views& v, Batch&) { v[1].page_tables = v[1].page_tables.first(1); });
  refuses("page_tables", [](Args&, Views& v, Batch&) { v[1].kv_len = 300; });
  refuses("page_tables", [](Args&, Views& v, Batch& b) {
    b.sequences()[1].streams[1].page_table[2] = kNoPage;
    v[1] = b.sequences()[1].view();
  });
  refuses("compact_tables", [](Args&, Views& v, Batch& b) {
    b.sequences()[1].compact[1][0] = 1 << 20;
    v[1] = b.sequences()[1].view();
  });
}

TEST(SelectTokensHeads, OneWithoutCompactPagesGetsNoList) {
  for (const Op op : {ref::SelectTokens, cpu::SelectTokens}) {
    Random random(50);
    SelectingBatch b(random, {2, 2, 64, 16}, {{100, 100}, {200, 200}});
    b.Write();
    b.sequences()[1].compact[0].clear();
    // Its keys need not be there either, as those of a head with a window.
    std::ranges::fill(b.sequences()[1].streams[0].page_table, kNoPage);
    Output out;
    Call call(b, out, 64);
    const absl::Status status = op({}, call.args);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(out.counts[2], kUntouched);
    EXPECT_EQ(out.counts[3], 64);
  }
}

}  // namespace
}  // namespace spl::kernels
