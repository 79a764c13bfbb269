#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// A batch of sequences with one stream per KV head; the heads of a sequence may differ in length.
struct Batch {
  AttentionShape shape;
  DType dtype;
  std::vector<TestStream> streams;  // [num_sequences * num_kv_heads]
  std::vector<float> q;

  int64_t stride() const { return shape.num_qo_heads * shape.head_dim + 8; }
  size_t num_sequences() const { return streams.size() / shape.num_kv_heads; }
};

Batch MakeBatch(Random& random, int32_t kv_heads, int32_t group, int32_t head_dim, DType dtype,
                const std::vector<int32_t>& lengths) {
  Batch b;
  b.shape = {kv_heads * group, kv_heads, head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim))};
  b.dtype = dtype;
  for (int32_t length : lengths) {
    for (int32_t h = 0; h < kv_heads; ++h)
      b.streams.push_back(MakeStream(random, std::max(0, length - 3 * h), head_dim));
  }
  b.q = random.Normals(lengths.size() * b.stride());
  return b;
}

void SetRule(Random& random, TestStream& s, VisibilityRule rule) {
  s.visibility.rule = rule;
  s.visibility.num_sinks = random.Int(0, 70);
  s.visibility.window = random.Int(1, 700);
  s.indices.clear();
  if (rule == VisibilityRule::kList) {
    for (int32_t i = 0; i < s.kv_len; ++i) {
      if (random.Int(0, 9) == 0) s.indices.push_back(i);
    }
  }
}

struct Result {
  std::vector<float> out, lse;
};

class Placed {
 public:
  Placed(const Placed&) = delete;  // views_ points into b_
  Placed& operator=(const Placed&) = delete;

  Placed(const Batch& b, Random& random) : b_(b), pool_(b.dtype, b.shape.head_dim, NumPages(b)) {
    pool_.Shuffle(random);
    for (TestStream& s : b_.streams) {
      pool_.Place(s, [&](int32_t page) {
        for (int32_t j = page * kPageTokens; j < (page + 1) * kPageTokens && j < s.kv_len; ++j) {
          if (Visible(s.visibility, s.indices, s.kv_len - 1, j)) return false;
        }
        return true;
      });
      views_.push_back(s.view());
    }
  }

  DecodeAttentionArgs Args(Result& r) const {
    const size_t n = b_.num_sequences() * b_.shape.num_qo_heads;
    r = {std::vector<float>(n * b_.shape.head_dim, -7.0f), std::vector<float>(n, -7.0f)};
    DecodeAttentionArgs a;
    a.shape = b_.shape;
    a.pool = pool_.view();
    a.q = b_.q.data();
    a.q_row_stride = b_.stride();
    a.out = r.out.data();
    a.lse = r.lse.data();
    a.streams = views_;
    return a;
  }

  template <typename Op>
  Result Run(const Op& op, const KernelContext& ctx) const {
    Result r;
    const absl::Status status = op(ctx, Args(r));
    EXPECT_TRUE(status.ok()) << status;
    return r;
  }

  // One call per sequence.
  template <typename Op>
  Result RunAlone(const Op& op, const KernelContext& ctx) const {
    Result r;
    const DecodeAttentionArgs all = Args(r);
    for (size_t i = 0; i < b_.num_sequences(); ++i) {
      DecodeAttentionArgs a = all;
      a.q = a.q + i * b_.stride();
      a.out = a.out + i * b_.shape.num_qo_heads * b_.shape.head_dim;
      a.lse += i * b_.shape.num_qo_heads;
      a.streams = all.streams.subspan(i * b_.shape.num_kv_heads, b_.shape.num_kv_heads);
      const absl::Status status = op(ctx, a);
      EXPECT_TRUE(status.ok()) << status;
    }
    return r;
  }

 private:
  static int32_t NumPages(const Batch& b) {
    int32_t n = 3;
    for (const TestStream& s : b.streams) n += (s.kv_len + kPageTokens - 1) / kPageTokens;
    return n;
  }

  Batch b_;  // a copy: page tables differ from placement to placement
  TestPool pool_;
  std::vector<HeadStreamView> views_;
};

class DecodeAttention : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(DecodeAttention, EqualsReferenceForEveryRuleShapeAndLength) {
  Random random(21);
  TestContext t(GetParam());
  struct Shape {
    int32_t kv_heads, group, head_dim;
    DType dtype;
  };
  const Shape shapes[] = {
      {1, 1, 64, DType::kBF16}, {4, 2, 64, DType::kBF16},  {2, 4, 128, DType::kBF16}, {1, 7, 16, DType::kF32},
      {2, 2, 64, DType::kF32},  {1, 4, 128, DType::kF32},  {1, 3, 8, DType::kBF16},   {1, 1, 88, DType::kBF16},
      {1, 2, 40, DType::kF32},  {1, 7, 128, DType::kBF16}, {1, 66, 32, DType::kBF16}, {2, 4, 128, DType::kE4M3},
      {4, 2, 64, DType::kE4M3}, {1, 7, 88, DType::kE4M3},  {1, 3, 8, DType::kE4M3},   {1, 66, 40, DType::kE4M3}};
  for (const Shape& shape : shapes) {
    for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand, VisibilityRule::kList}) {
      Batch b = MakeBatch(random, shape.kv_heads, shape.group, shape.head_dim, shape.dtype,
                          {1, 2, 5, 63, 64, 65, 127, 511, 512, 513, 0, 1500});
      for (TestStream& s : b.streams) SetRule(random, s, rule);
      const Placed placed(b, random);
      const Result want = placed.Run(ref::DecodeAttention, t.ctx), got = placed.Run(cpu::DecodeAttention, t.ctx);
      const std::string what = "rule " + std::to_string(static_cast<int>(rule)) + ", head_dim " +
                               std::to_string(shape.head_dim) + ", group " + std::to_string(shape.group);
      ExpectClose(got.out, want.out, DType::kF32, what);
      ExpectClose(got.lse, want.lse, DType::kF32, what + " lse");
    }
  }
}

// bf16 holds each value, and scaling a sum by a power of two rounds nothing: the bits are those of widened pages.
TEST_P(DecodeAttention, CodesGiveTheBitsOfWidenedPages) {
  Random random(25);
  TestContext t(GetParam());
  for (const int32_t head_dim : {8, 40, 64, 128, 256}) {
    for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand, VisibilityRule::kList}) {
      Batch b = MakeBatch(random, 2, 5, head_dim, DType::kE4M3, {1, 63, 64, 600, 1025});
      for (TestStream& s : b.streams) {
        SetRule(random, s, rule);
        for (size_t i = 0; i < s.k.size(); ++i) {  // rows of all sizes, so that their scales differ
          const int exponent = static_cast<int>(i / static_cast<size_t>(head_dim)) * 7 % 13 - 8;
          s.k[i] = std::ldexp(s.k[i], exponent);
          s.v[i] = std::ldexp(s.v[i], -exponent);
        }
      }
      const Placed placed(b, random);
      Result codes, widened;
      const DecodeAttentionArgs args = placed.Args(codes);
      const ConvertedPages pages(args.pool, DType::kBF16);
      DecodeAttentionArgs of_bf16 = placed.Args(widened);
      of_bf16.pool = pages.view();
      for (const auto op : {ref::DecodeAttention, cpu::DecodeAttention}) {
        ExpectOk(op(t.ctx, args));
        ExpectOk(op(t.ctx, of_bf16));
        EXPECT_TRUE(BitwiseEqual(codes.out, widened.out)) << "head_dim " << head_dim;
        EXPECT_TRUE(BitwiseEqual(codes.lse, widened.lse)) << "head_dim " << head_dim;
      }
    }
  }
}

TEST_P(DecodeAttention, ARowThatIsNotFiniteMakesItsHeadsNan) {
  Random random(26);
  TestContext t(GetParam());
  Batch b = MakeBatch(random, 2, 2, 64, DType::kE4M3, {100});
  b.streams[0].v[5 * 64 + 3] = std::numeric_limits<float>::infinity();
  const Placed placed(b, random);
  const Result got = placed.Run(cpu::DecodeAttention, t.ctx);
  EXPECT_TRUE(std::isnan(got.out[0]));
  EXPECT_TRUE(std::isfinite(got.out[2 * 64]));  // the other KV head
}

TEST_P(DecodeAttention, BatchThreadsAndPagePlacesChangeNoBit) {
  Random random(22);
  for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand, VisibilityRule::kList}) {
    Batch b = MakeBatch(random, 2, 2, 64, DType::kBF16, {1, 70, 512, 600, 1025, 2000});
    for (TestStream& s : b.streams) SetRule(random, s, rule);
    TestContext two(GetParam(), 2), one(GetParam(), 1), five(GetParam(), 5);
    const Placed placed(b, random);
    const Result want = placed.Run(cpu::DecodeAttention, two.ctx);
    const Placed elsewhere(b, random);
    for (const Result& r :
         {placed.Run(cpu::DecodeAttention, one.ctx), placed.Run(cpu::DecodeAttention, five.ctx),
          elsewhere.Run(cpu::DecodeAttention, two.ctx), elsewhere.RunAlone(cpu::DecodeAttention, one.ctx)}) {
      EXPECT_TRUE(BitwiseEqual(r.out, want.out)) << "rule " << static_cast<int>(rule);
      EXPECT_TRUE(BitwiseEqual(r.lse, want.lse)) << "rule " << static_cast<int>(rule);
    }
  }
}

TEST_P(DecodeAttention, UnlimitedRulesEqualFullBitForBit) {
  Random random(23);
  TestContext t(GetParam());
  Batch b = MakeBatch(random, 1, 2, 64, DType::kBF16, {1111});
  const Result want = Placed(b, random).Run(cpu::DecodeAttention, t.ctx);
  TestStream& s = b.streams[0];
  s.visibility = {VisibilityRule::kBand, 4, 1111, {}};
  EXPECT_TRUE(BitwiseEqual(Placed(b, random).Run(cpu::DecodeAttention, t.ctx).out, want.out));
  s.visibility.rule = VisibilityRule::kList;
  s.indices.resize(1111);
  std::iota(s.indices.begin(), s.indices.end(), 0);
  EXPECT_TRUE(BitwiseEqual(Placed(b, random).Run(cpu::DecodeAttention, t.ctx).out, want.out));
}

TEST_P(DecodeAttention, AnEmptyBatchIsANoOp) {
  TestContext t(GetParam());
  DecodeAttentionArgs a;
  a.shape = {2, 1, 64, 0.125f};
  a.pool.head_dim = 64;
  a.q_row_stride = 128;
  EXPECT_TRUE(cpu::DecodeAttention(t.ctx, a).ok());
}

INSTANTIATE_TEST_SUITE_P(Cpu, DecodeAttention, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(DecodeAttentionValidation, RefusesWhatItCannotRun) {
  Random random(24);
  TestContext t(CpuIsa::kPortable);
  Batch b = MakeBatch(random, 2, 2, 64, DType::kBF16, {100});
  const Placed placed(b, random);
  Result r;
  const DecodeAttentionArgs good = placed.Args(r);
  const std::vector<HeadStreamView> views(good.streams.begin(), good.streams.end());
  const auto run = [&](const auto& change) {
    DecodeAttentionArgs a = good;
    std::vector<HeadStreamView> heads = views;
    a.streams = heads;
    change(a, heads);
    EXPECT_EQ(ref::DecodeAttention(t.ctx, a).code(), cpu::DecodeAttention(t.ctx, a).code());
    return cpu::DecodeAttention(t.ctx, a).code();
  };
  using Heads = std::vector<HeadStreamView>;
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(run([](DecodeAttentionArgs&, Heads&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(run([](DecodeAttentionArgs& a, Heads&) { a.streams = a.streams.first(1); }), kInvalid);
  EXPECT_EQ(run([](DecodeAttentionArgs& a, Heads&) { a.out = nullptr; }), kInvalid);
  EXPECT_EQ(run([](DecodeAttentionArgs& a, Heads&) { a.shape.num_kv_heads = 0; }), kInvalid);
  EXPECT_EQ(run([](DecodeAttentionArgs&, Heads& h) { h[0].kv_len = -1; }), kInvalid);
  EXPECT_EQ(run([](DecodeAttentionArgs&, Heads& h) { h[0].kv_len = 129; }), kInvalid);
}

}  // namespace
}  // namespace spl::kernels
