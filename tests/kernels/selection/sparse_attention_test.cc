// SparseAttention on the host against an oracle that shares no code with it.
#include "kernels/selection/sparcas/sparse_attention.h"

#include <gmock/gmock.h>

#include "tests/kernels/support/sparse_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

using Op = absl::Status (*)(const KernelContext&, const SparseAttentionArgs&);

const std::vector<std::pair<int32_t, int32_t>> kMixed = {{1, 20},    {63, 80},   {64, 90},    {150, 300},
                                                         {500, 530}, {191, 400}, {2100, 2130}};
constexpr int64_t kStride = 300, kLongest = 2130;

// The choices of one call are those of the oracle, its outputs attention over them, and the others untouched.
void ExpectOracle(SelectingBatch& b, const SparseCall& call, const std::string& what) {
  const SelectingShape& shape = b.shape();
  for (size_t stream = 0; stream < b.num_streams(); ++stream) {
    const TestSequence& s = b.sequence_of(stream);
    const std::string at = what + ", stream " + std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len);
    const size_t row = static_cast<size_t>(shape.group) * shape.head_dim;
    const std::span<const float> out = std::span(call.out).subspan(stream * row, row);
    const std::span<const float> lse = std::span(call.lse).subspan(stream * shape.group, shape.group);
    if (!s.step.selects) {
      EXPECT_EQ(call.counts[stream], -77) << at;
      for (const float x : out) ASSERT_EQ(x, SparseCall::kUntouched) << at;
      for (const float x : lse) ASSERT_EQ(x, SparseCall::kUntouched) << at;
      EXPECT_EQ(call.kept_mass[stream], SparseCall::kUntouched) << at;
      continue;
    }
    const std::span<const int32_t> list = call.list(stream);
    std::vector<float> want_out, want_lse;
    ReferenceAttention(b, stream, list, want_out, want_lse);
    if (s.step.refresh) {
      const std::span<const int32_t> dims = b.dims(stream);
      EXPECT_EQ(std::vector<int32_t>(dims.begin(), dims.end()), OracleDims(b, stream)) << at;
    }
    if (s.kv_len <= s.budget) {
      std::vector<int32_t> all(static_cast<size_t>(s.kv_len));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(std::vector<int32_t>(list.begin(), list.end()), all) << at;
      EXPECT_EQ(call.kept_mass[stream], 1) << at;
    } else {
      const int32_t choosable = s.kv_len - s.recent;
      std::vector<double> log_sums;
      std::vector<std::vector<double>> terms;
      const std::vector<float> want = OracleWeights(b, stream, b.dims(stream), &log_sums, &terms);
      EXPECT_NEAR(call.kept_mass[stream],
                  s.budget > s.recent ? OracleMass(terms, list, log_sums, want_lse) : double{SparseCall::kUntouched},
                  1e-5)
          << at;
      if (s.budget > s.recent) ExpectClose(call.w(stream, choosable), want, DType::kF32, at + " weights");
      std::vector<float> padded = want;  // positions that are always there
      padded.resize(static_cast<size_t>(s.kv_len), 0);
      std::vector<int32_t> order(static_cast<size_t>(choosable));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
        return want[static_cast<size_t>(i)] > want[static_cast<size_t>(j)];
      });
      order.resize(static_cast<size_t>(s.budget - s.recent));
      for (int32_t j = choosable; j < s.kv_len; ++j) order.push_back(j);
      std::sort(order.begin(), order.end());
      EXPECT_TRUE(SameChoice(list, order, padded, choosable)) << at;
    }
    ExpectClose(out, want_out, DType::kF32, at + " out");
    ExpectClose(lse, want_lse, LseSizes(want_lse), DType::kF32, at + " lse");
  }
}

// Steps as an engine makes them.
void RunSteps(Op op, const KernelContext& ctx, const SelectingShape& shape, Keys keys, uint64_t seed) {
  Random random(seed), steps(seed + 1000);
  SelectingBatch b(random, shape, kMixed, PackedPageTokens(shape));
  for (size_t stream = 0; stream < b.num_streams(); ++stream) ShapeKeys(random, shape, keys, b.stream(stream));
  b.Write();
  for (TestSequence& s : b.sequences()) s.recent = steps.Int(kPackedRecentMin, 100);
  for (int step = 0; step < 10; ++step) {
    for (TestSequence& s : b.sequences()) {
      s.step.selects = steps.Int(0, 4) > 0;
      s.step.refresh |= steps.Int(0, 3) == 0;
      s.budget = steps.Int(s.recent, static_cast<int32_t>(kStride));
    }
    for (float& x : b.q()) x = ToFloat(ToBf16(steps.Normal()));
    SparseCall call(b, kStride, kLongest);
    ExpectOk(op(ctx, call.args));
    ExpectOracle(b, call, "seed " + std::to_string(seed) + ", step " + std::to_string(step));
    for (size_t i = 0; i < b.sequences().size(); ++i) {
      TestSequence& s = b.sequences()[i];
      if (s.step.selects) s.Advance();
      for (int n = steps.Int(0, 3); n > 0 && s.kv_len < s.max_len; --n) b.Append(i);
    }
  }
}

TEST(SparseAttentionRef, EqualsTheOracle) {
  RunSteps(ref::SparseAttention, {}, SparseShape(2, 2, 64), Keys::kNormal, 900);
  RunSteps(ref::SparseAttention, {}, SparseShape(1, 3, 32, DType::kF32), Keys::kSinks, 901);
  RunSteps(ref::SparseAttention, {}, SparseShape(2, 2, 64, DType::kE4M3), Keys::kHeavyTail, 902);
}

class SparseAttention : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(SparseAttention, EqualsTheOracleOverStepsOfMixedBatches) {
  TestContext t(GetParam());
  uint64_t seed = 910;
  for (const Keys keys : {Keys::kNormal, Keys::kSinks, Keys::kHeavyTail, Keys::kEqual, Keys::kZero})
    RunSteps(cpu::SparseAttention, t.ctx, SparseShape(2, 4, 128), keys, ++seed);
  RunSteps(cpu::SparseAttention, t.ctx, SparseShape(1, 7, 64), Keys::kHeavyTail, ++seed);
  RunSteps(cpu::SparseAttention, t.ctx, SparseShape(3, 1, 40, DType::kF32), Keys::kNormal, ++seed);
  for (const Keys keys : {Keys::kNormal, Keys::kSinks, Keys::kHeavyTail})
    RunSteps(cpu::SparseAttention, t.ctx, SparseShape(2, 4, 128, DType::kE4M3), keys, ++seed);
}
INSTANTIATE_TEST_SUITE_P(Isa, SparseAttention, ::testing::ValuesIn(MachineIsas()), IsaParam);

// The share of a query head's attention that a list holds, by a plain loop over all keys.
double HeldBy(SelectingBatch& b, std::span<const int32_t> list, int32_t query_head) {
  const SelectingShape& shape = b.shape();
  double all = 0, held = 0;
  for (int32_t j = 0; j < b.sequences()[0].kv_len; ++j) {
    double score = 0;
    for (int32_t c = 0; c < shape.head_dim; ++c) score += b.q_of(0)[query_head * shape.head_dim + c] * b.Key(0, j, c);
    const double weight = std::exp(score * shape.attention().sm_scale);
    all += weight;
    if (std::binary_search(list.begin(), list.end(), j)) held += weight;
  }
  return held / all;
}

// One query head has all of its attention on a few tokens; the other one is given attention that no list can hold, then
// the same but with as much on the last tokens as makes up for it. The estimate follows the worst head, as attention
// itself has it, also where it knows a sample of the keys. One of the three fails for an estimate by the first head
// alone, by the best head, by shares of what may be chosen without the last tokens, and for one that takes what all
// heads leave out to be each one's.
void SeesMassOutsideOfTheList(Op op, const KernelContext& ctx, int32_t length) {
  constexpr int32_t kRecent = 64, kBudget = 200;
  const SelectingShape shape = SparseShape(1, 2, 64);
  Random random(950);
  SelectingBatch b(random, shape, {{length, length + 1}}, PackedPageTokens(shape));
  b.sequences()[0].budget = kBudget;
  b.sequences()[0].recent = kRecent;
  std::vector<float>& k = b.stream(0).k;
  std::fill(k.begin(), k.end(), 0.0f);
  const auto key = [&](int32_t j, int32_t c) -> float& { return k[static_cast<size_t>(j) * 64 + c]; };
  for (int32_t j = 100; j < 120; ++j) key(j, 0) = 7;                  // the first head's tokens
  for (int32_t j = 0; j < length - kRecent; ++j) key(j, 1) = 7;       // attention everywhere
  for (int32_t j = length - kRecent; j < length; ++j) key(j, 2) = 7;  // the last tokens
  b.Write();
  const auto mass = [&](const std::array<float, 2>& everywhere_and_recent) {
    std::fill(b.q().begin(), b.q().end(), 0.0f);
    b.q()[0] = 12;
    b.q()[64] = everywhere_and_recent[0] == 0 ? 12.0f : 0.0f;
    b.q()[64 + 1] = everywhere_and_recent[0];
    b.q()[64 + 2] = everywhere_and_recent[1];
    SparseCall call(b, kBudget, length + 1);
    ExpectOk(op(ctx, call.args));
    const double held = std::min(HeldBy(b, call.list(0), 0), HeldBy(b, call.list(0), 1));
    EXPECT_NEAR(call.kept_mass[0], held, 0.01);
    return call.kept_mass[0];
  };
  EXPECT_GT(mass({0, 0}), 0.95f);
  EXPECT_LT(mass({8, 0}), 0.15f);
  EXPECT_GT(mass({4, 12}), 0.9f);
}

TEST(SparseAttentionRef, SeesMassOutsideOfTheList) { SeesMassOutsideOfTheList(ref::SparseAttention, {}, 5000); }
TEST_P(SparseAttention, SeesMassOutsideOfTheList) {
  TestContext t(GetParam());
  for (const int32_t length : {1500, 5000}) SeesMassOutsideOfTheList(cpu::SparseAttention, t.ctx, length);
}

// A step that packs what came since the last one has the bits of a step that packs everything.
TEST(SparseAttentionSteps, PackingAsPagesArriveEqualsPackingAtOnce) {
  const uint64_t seed = 930;
  Random of_one(seed), of_other(seed), queries(seed + 1);
  const SelectingShape shape = SparseShape(1, 4, 64);
  const std::vector<std::pair<int32_t, int32_t>> lengths = {{700, 1000}};
  SelectingBatch grown(of_one, shape, lengths, PackedPageTokens(shape)),
      whole(of_other, shape, lengths, PackedPageTokens(shape));
  for (SelectingBatch* b : {&grown, &whole}) {
    b->Write();
    b->sequences()[0].budget = 128;
    b->sequences()[0].recent = 64;
  }
  const std::vector<float> first = queries.Normals(grown.q().size());
  for (int step = 0; step < 100; ++step) {
    grown.q() = step == 0 ? first : queries.Normals(grown.q().size());
    SparseCall call(grown, 128, 1000);
    ExpectOk(ref::SparseAttention({}, call.args));
    grown.sequences()[0].Advance();
    grown.Append(0);
    whole.Append(0);
  }
  whole.q() = first;  // the dimensions are those of the first query
  SparseCall refresh(whole, 128, 1000);
  ExpectOk(ref::SparseAttention({}, refresh.args));
  whole.sequences()[0].Advance();
  whole.q() = grown.q() = queries.Normals(grown.q().size());
  SparseCall a(grown, 128, 1000), b(whole, 128, 1000);
  ExpectOk(ref::SparseAttention({}, a.args));
  ExpectOk(ref::SparseAttention({}, b.args));
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_TRUE(BitwiseEqual(a.weights, b.weights));
  EXPECT_TRUE(BitwiseEqual(a.out, b.out));
}

TEST(SparseAttentionSteps, RefusesWhatItDoesNotServe) {
  Random random(940);
  const SelectingShape shape = SparseShape(1, 2, 64);
  SelectingBatch b(random, shape, {{200, 210}}, PackedPageTokens(shape));
  b.Write();
  TestSequence& s = b.sequences()[0];
  s.budget = 128;
  const auto message = [&](auto change) {
    s.recent = 64;
    SparseCall call(b, 128, 210);
    change(call);
    return std::string(ref::SparseAttention({}, call.args).message());
  };
  EXPECT_EQ(message([](SparseCall&) {}), "");
  EXPECT_THAT(message([](SparseCall& c) { c.views[0].recent = 63; }), HasSubstr("recent 63"));
  EXPECT_THAT(message([](SparseCall& c) { c.views[0].budget = 129; }), HasSubstr("129"));
  EXPECT_THAT(message([](SparseCall& c) { c.views[0].step.listed = true; }), HasSubstr("listed"));
  EXPECT_THAT(message([](SparseCall& c) { c.views[0].dims = nullptr; }), HasSubstr("dims"));
  EXPECT_THAT(message([](SparseCall& c) { c.args.weights_stride = 100; }), HasSubstr("weights_stride"));
  EXPECT_THAT(message([](SparseCall& c) { c.args.out = static_cast<float*>(nullptr); }), HasSubstr("null"));
}

}  // namespace
}  // namespace spl::kernels
