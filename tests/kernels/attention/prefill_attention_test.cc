#include <algorithm>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct Shape {
  int32_t kv_heads, group, head_dim;
  DType dtype;
};

// Several sequences, each with its own positions, and one stream per (sequence, KV head).
struct Problem {
  AttentionShape shape;
  DType dtype;
  std::vector<std::vector<int32_t>> positions;   // [sequence][row]
  std::vector<std::vector<TestStream>> streams;  // [sequence][kv head]
  std::vector<float> q;

  int32_t num_rows() const {
    int32_t n = 0;
    for (const auto& p : positions) n += static_cast<int32_t>(p.size());
    return n;
  }
  int64_t stride() const { return shape.num_qo_heads * shape.head_dim + 24; }  // wider than a row, as in qkv
};

std::vector<int32_t> LastPositions(int32_t q_len, int32_t kv_len) {
  std::vector<int32_t> p(q_len);
  for (int32_t i = 0; i < q_len; ++i) p[i] = kv_len - q_len + i;
  return p;
}

std::vector<int32_t> SomePositions(Random& random, int32_t q_len, int32_t kv_len) {
  std::vector<int32_t> all(kv_len);
  for (int32_t i = 0; i < kv_len; ++i) all[i] = i;
  std::shuffle(all.begin(), all.end(), random.engine());
  all.resize(q_len);
  std::sort(all.begin(), all.end());
  return all;
}

Problem MakeProblem(Random& random, const Shape& s, const std::vector<std::pair<int32_t, int32_t>>& lengths) {
  Problem p;
  p.shape = {s.kv_heads * s.group, s.kv_heads, s.head_dim, 1.0f / std::sqrt(static_cast<float>(s.head_dim))};
  p.dtype = s.dtype;
  for (const auto& [q_len, kv_len] : lengths) {
    const bool sparse_rows = q_len < kv_len && random.Int(0, 1) == 1;
    p.positions.push_back(sparse_rows ? SomePositions(random, q_len, kv_len) : LastPositions(q_len, kv_len));
    p.streams.emplace_back();
    for (int32_t h = 0; h < s.kv_heads; ++h) p.streams.back().push_back(MakeStream(random, kv_len, s.head_dim));
  }
  p.q = random.Normals(static_cast<size_t>(p.num_rows()) * p.stride());
  return p;
}

void SetRule(Random& random, TestStream& s, VisibilityRule rule) {
  s.visibility.rule = rule;
  s.indices.clear();
  s.visibility.num_sinks = random.Int(0, 70);
  s.visibility.window = random.Int(1, 200);
  if (rule == VisibilityRule::kList) {
    for (int32_t i = 0; i < s.kv_len; ++i) {
      if (random.Int(0, 2) == 0) s.indices.push_back(i);
    }
  }
}

// Places every stream in a fresh poisoned pool and runs `op`; pages that no row sees are not resident.
struct Result {
  std::vector<float> out, lse;
};

class Placed {
 public:
  Placed(const Placed&) = delete;  // views_ points into p_
  Placed& operator=(const Placed&) = delete;

  Placed(const Problem& p, Random& random) : p_(p), pool_(p.dtype, p.shape.head_dim, NumPages(p)) {
    pool_.Shuffle(random);
    views_.resize(p.streams.size());
    for (size_t i = 0; i < p.streams.size(); ++i) {
      for (TestStream& s : p_.streams[i]) {
        pool_.Place(s, [&](int32_t page) { return !AnyRowSees(p.positions[i], s, page); });
        views_[i].push_back(s.view());
      }
    }
  }

  template <typename Op>
  Result Run(const Op& op, const KernelContext& ctx) const {
    Result r = Empty();
    const PrefillAttentionArgs a = Args(r);
    std::vector<PrefillSequence> sequences = Sequences();
    PrefillAttentionArgs with = a;
    with.sequences = sequences;
    const absl::Status status = op(ctx, with);
    EXPECT_TRUE(status.ok()) << status;
    return r;
  }

  // The same rows in several calls of at most `step` rows of one sequence each.
  template <typename Op>
  Result RunSliced(const Op& op, const KernelContext& ctx, int32_t step) const {
    Result r = Empty();
    for (const PrefillSequence& s : Sequences()) {
      for (int32_t begin = s.row_begin; begin < s.row_end; begin += step) {
        PrefillSequence slice = s;
        slice.row_begin = begin;
        slice.row_end = std::min(s.row_end, begin + step);
        slice.positions = s.positions.subspan(begin - s.row_begin, slice.row_end - begin);
        PrefillAttentionArgs a = Args(r);
        a.sequences = std::span<const PrefillSequence>(&slice, 1);
        const absl::Status status = op(ctx, a);
        EXPECT_TRUE(status.ok()) << status;
      }
    }
    return r;
  }

  std::vector<PrefillSequence> Sequences() const {
    std::vector<PrefillSequence> sequences;
    int32_t row = 0;
    for (size_t i = 0; i < p_.positions.size(); ++i) {
      const int32_t n = static_cast<int32_t>(p_.positions[i].size());
      sequences.push_back({row, row + n, p_.positions[i], views_[i]});
      row += n;
    }
    return sequences;
  }

  PrefillAttentionArgs Args(Result& r) const {
    PrefillAttentionArgs a;
    a.shape = p_.shape;
    a.pool = pool_.view();
    a.q = p_.q.data();
    a.q_row_stride = p_.stride();
    a.out = r.out.data();
    a.lse = r.lse.data();
    return a;
  }

  Result Empty() const {
    const size_t n = static_cast<size_t>(p_.num_rows()) * p_.shape.num_qo_heads;
    return {std::vector<float>(n * p_.shape.head_dim, -7.0f), std::vector<float>(n, -7.0f)};
  }

 private:
  static int32_t NumPages(const Problem& p) {
    int32_t n = 3;  // some are never used and stay NaN
    for (const auto& heads : p.streams) {
      for (const TestStream& s : heads) n += (s.kv_len + kPageTokens - 1) / kPageTokens;
    }
    return n;
  }

  static bool AnyRowSees(const std::vector<int32_t>& positions, const TestStream& s, int32_t page) {
    for (int32_t p : positions) {
      for (int32_t j = page * kPageTokens; j < (page + 1) * kPageTokens && j < s.kv_len; ++j) {
        if (Visible(s.visibility, s.indices, p, j)) return true;
      }
    }
    return false;
  }

  Problem p_;  // a copy: page tables differ from placement to placement
  TestPool pool_;
  std::vector<std::vector<HeadStreamView>> views_;
};

class PrefillAttention : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(PrefillAttention, EqualsReferenceForEveryRuleShapeAndLength) {
  Random random(1);
  TestContext t(GetParam());
  const Shape shapes[] = {{1, 1, 64, DType::kBF16},  {4, 2, 64, DType::kBF16}, {2, 4, 128, DType::kBF16},
                          {1, 7, 16, DType::kF32},   {2, 2, 64, DType::kF32},  {1, 4, 128, DType::kF32},
                          {1, 2, 8, DType::kBF16},   {1, 1, 88, DType::kBF16}, {1, 2, 40, DType::kF32},
                          {1, 3, 256, DType::kBF16}, {4, 2, 64, DType::kE4M3}, {2, 4, 128, DType::kE4M3},
                          {1, 1, 88, DType::kE4M3},  {1, 2, 8, DType::kE4M3}};
  for (const Shape& shape : shapes) {
    for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand, VisibilityRule::kList}) {
      Problem p =
          MakeProblem(random, shape, {{1, 1}, {1, 63}, {1, 64}, {1, 65}, {17, 17}, {17, 129}, {64, 128}, {64, 191}});
      for (auto& heads : p.streams) {
        for (TestStream& s : heads) SetRule(random, s, rule);
      }
      const Placed placed(p, random);
      const Result want = placed.Run(ref::PrefillAttention, t.ctx), got = placed.Run(cpu::PrefillAttention, t.ctx);
      const std::string what = "rule " + std::to_string(static_cast<int>(rule)) + ", head_dim " +
                               std::to_string(shape.head_dim) + ", group " + std::to_string(shape.group);
      ExpectClose(got.out, want.out, DType::kF32, what);
      ExpectClose(got.lse, want.lse, DType::kF32, what + " lse");
    }
  }
}

TEST_P(PrefillAttention, CodesGiveTheBitsOfWidenedPages) {
  Random random(9);
  TestContext t(GetParam());
  for (const int32_t head_dim : {8, 40, 64, 128}) {
    for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand, VisibilityRule::kList}) {
      Problem p = MakeProblem(random, {2, 2, head_dim, DType::kE4M3}, {{1, 1}, {17, 129}, {64, 191}, {300, 300}});
      for (auto& heads : p.streams) {
        for (TestStream& s : heads) {
          SetRule(random, s, rule);
          for (size_t i = 0; i < s.k.size(); ++i) {  // rows of all sizes, so that their scales differ
            const int exponent = static_cast<int>(i / static_cast<size_t>(head_dim)) * 7 % 13 - 8;
            s.k[i] = std::ldexp(s.k[i], exponent);
            s.v[i] = std::ldexp(s.v[i], -exponent);
          }
        }
      }
      const Placed placed(p, random);
      Result codes = placed.Empty(), widened = placed.Empty();
      const std::vector<PrefillSequence> sequences = placed.Sequences();
      PrefillAttentionArgs args = placed.Args(codes), of_bf16 = placed.Args(widened);
      const ConvertedPages pages(args.pool, DType::kBF16);
      of_bf16.pool = pages.view();
      args.sequences = of_bf16.sequences = sequences;
      for (const auto op : {ref::PrefillAttention, cpu::PrefillAttention}) {
        ExpectOk(op(t.ctx, args));
        ExpectOk(op(t.ctx, of_bf16));
        EXPECT_TRUE(BitwiseEqual(codes.out, widened.out)) << "head_dim " << head_dim;
        EXPECT_TRUE(BitwiseEqual(codes.lse, widened.lse)) << "head_dim " << head_dim;
      }
    }
  }
}

TEST_P(PrefillAttention, EqualsReferenceOverLongContexts) {
  Random random(2);
  TestContext t(GetParam());
  for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand}) {
    Problem p = MakeProblem(random, {2, 2, 64, DType::kBF16}, {{300, 1500}, {64, 1027}, {300, 300}});
    for (auto& heads : p.streams) SetRule(random, heads[1], rule);  // head 0 stays full: mixed classes in one call
    const Placed placed(p, random);
    const Result want = placed.Run(ref::PrefillAttention, t.ctx), got = placed.Run(cpu::PrefillAttention, t.ctx);
    ExpectClose(got.out, want.out, DType::kF32, "out");
    ExpectClose(got.lse, want.lse, DType::kF32, "lse");
  }
}

TEST_P(PrefillAttention, RowsThatSeeNothingAreZero) {
  Random random(3);
  TestContext t(GetParam());
  Problem p = MakeProblem(random, {1, 2, 64, DType::kBF16}, {{70, 70}});
  p.streams[0][0].visibility.rule = VisibilityRule::kList;
  p.streams[0][0].indices = {66};  // rows 0 .. 65 see nothing
  const Placed placed(p, random);
  const Result got = placed.Run(cpu::PrefillAttention, t.ctx);
  for (int32_t row = 0; row < 70; ++row) {
    for (int32_t h = 0; h < 2; ++h) {
      const float lse = got.lse[row * 2 + h];
      if (row < 66) {
        EXPECT_EQ(lse, -std::numeric_limits<float>::infinity()) << row;
        for (int32_t c = 0; c < 64; ++c) ASSERT_EQ(got.out[(row * 2 + h) * 64 + c], 0.0f) << row;
      } else {
        EXPECT_TRUE(std::isfinite(lse)) << row;
      }
    }
  }
}

TEST_P(PrefillAttention, SlicesThreadsAndPagePlacesChangeNoBit) {
  Random random(4);
  for (VisibilityRule rule : {VisibilityRule::kFull, VisibilityRule::kBand, VisibilityRule::kList}) {
    Problem p = MakeProblem(random, {2, 2, 64, DType::kBF16}, {{333, 700}, {65, 65}, {129, 130}});
    for (auto& heads : p.streams) {
      for (TestStream& s : heads) SetRule(random, s, rule);
    }
    TestContext two(GetParam(), 2), one(GetParam(), 1), five(GetParam(), 5);
    const Placed placed(p, random);
    const Result all = placed.Run(cpu::PrefillAttention, two.ctx);
    const Placed elsewhere(p, random);
    for (const Result& r :
         {placed.Run(cpu::PrefillAttention, one.ctx), placed.Run(cpu::PrefillAttention, five.ctx),
          elsewhere.Run(cpu::PrefillAttention, two.ctx), elsewhere.RunSliced(cpu::PrefillAttention, two.ctx, 1),
          elsewhere.RunSliced(cpu::PrefillAttention, two.ctx, 7),
          elsewhere.RunSliced(cpu::PrefillAttention, one.ctx, 100)}) {
      EXPECT_TRUE(BitwiseEqual(r.out, all.out)) << "rule " << static_cast<int>(rule);
      EXPECT_TRUE(BitwiseEqual(r.lse, all.lse)) << "rule " << static_cast<int>(rule);
    }
  }
}

TEST_P(PrefillAttention, LastRowsHaveTheBitsOfAllRows) {
  Random random(40);
  const Problem p = MakeProblem(random, {4, 2, 32, DType::kBF16}, {{333, 700}, {65, 65}, {1, 130}});
  TestContext two(GetParam(), 2);
  const Placed placed(p, random);
  const auto heads = static_cast<size_t>(p.shape.num_qo_heads), dim = static_cast<size_t>(p.shape.head_dim);
  const auto only = [](int32_t last, auto op) {
    return [last, op](const KernelContext& ctx, PrefillAttentionArgs a) {
      a.last_rows = last;
      return op(ctx, a);
    };
  };
  const Result all = placed.Run(cpu::PrefillAttention, two.ctx), ref_all = placed.Run(ref::PrefillAttention, two.ctx);
  for (const int32_t last : {1, 7, 64, 100, 400}) {
    const Result got = placed.Run(only(last, cpu::PrefillAttention), two.ctx);
    const Result ref_got = placed.Run(only(last, ref::PrefillAttention), two.ctx);
    for (const PrefillSequence& s : placed.Sequences()) {
      for (int32_t row = s.row_begin; row < s.row_end; ++row) {
        const bool asked = row >= s.row_end - last;
        for (size_t i = static_cast<size_t>(row) * heads; i < static_cast<size_t>(row + 1) * heads; ++i) {
          EXPECT_EQ(got.lse[i], asked ? all.lse[i] : -7.0f) << "row " << row << " of the last " << last;
          EXPECT_EQ(ref_got.lse[i], asked ? ref_all.lse[i] : -7.0f);
          EXPECT_EQ(got.out[i * dim], asked ? all.out[i * dim] : -7.0f);
        }
      }
    }
  }
}

// A slice of a prompt is run when only its own prefix is in the pages: kv_len differs, the rows do not.
TEST_P(PrefillAttention, KeysAfterARowChangeNoBit) {
  Random random(5);
  TestContext t(GetParam());
  Problem p = MakeProblem(random, {2, 2, 64, DType::kBF16}, {{200, 200}});
  p.positions[0] = LastPositions(200, 200);
  const Placed placed(p, random);
  const Result all = placed.Run(cpu::PrefillAttention, t.ctx);
  Problem prefix = p;
  prefix.positions[0].resize(77);
  for (TestStream& s : prefix.streams[0]) s.kv_len = 77;
  const Placed shorter(prefix, random);
  const Result part = shorter.Run(cpu::PrefillAttention, t.ctx);
  EXPECT_TRUE(BitwiseEqual(part.out, std::span(all.out).first(part.out.size())));
  EXPECT_TRUE(BitwiseEqual(part.lse, std::span(all.lse).first(part.lse.size())));
}

TEST_P(PrefillAttention, UnlimitedRulesEqualFullBitForBit) {
  Random random(6);
  TestContext t(GetParam());
  Problem p = MakeProblem(random, {1, 2, 64, DType::kBF16}, {{150, 333}});
  const Placed full(p, random);
  const Result want = full.Run(cpu::PrefillAttention, t.ctx);
  TestStream& s = p.streams[0][0];
  for (int32_t sinks : {0, 5, 400}) {
    s.visibility = {VisibilityRule::kBand, sinks, sinks == 400 ? 1 : 333, {}};
    EXPECT_TRUE(BitwiseEqual(Placed(p, random).Run(cpu::PrefillAttention, t.ctx).out, want.out)) << sinks;
  }
  s.visibility.rule = VisibilityRule::kList;
  s.indices = LastPositions(333, 333);
  EXPECT_TRUE(BitwiseEqual(Placed(p, random).Run(cpu::PrefillAttention, t.ctx).out, want.out));
}

// Large scores: the running maximum must carry over pages without overflow.
TEST_P(PrefillAttention, LargeScoresStayFinite) {
  Random random(7);
  TestContext t(GetParam());
  Problem p = MakeProblem(random, {1, 1, 64, DType::kF32}, {{40, 300}});
  for (float& x : p.q) x *= 60;
  const Placed placed(p, random);
  const Result want = placed.Run(ref::PrefillAttention, t.ctx), got = placed.Run(cpu::PrefillAttention, t.ctx);
  for (float x : got.out) ASSERT_TRUE(std::isfinite(x));
  ExpectClose(got.lse, want.lse, DType::kF32, "lse");
}

INSTANTIATE_TEST_SUITE_P(Cpu, PrefillAttention, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(PrefillAttentionValidation, RefusesWhatItCannotRun) {
  Random random(8);
  TestContext t(CpuIsa::kPortable);
  Problem p = MakeProblem(random, {2, 2, 64, DType::kBF16}, {{5, 70}});
  p.positions[0] = LastPositions(5, 70);
  const Placed placed(p, random);
  const std::vector<PrefillSequence> good = placed.Sequences();
  Result r = placed.Empty();
  const auto run = [&](const auto& change) {
    std::vector<HeadStreamView> heads(good[0].heads.begin(), good[0].heads.end());
    PrefillSequence s = good[0];
    s.heads = heads;
    PrefillAttentionArgs a = placed.Args(r);
    a.sequences = std::span<const PrefillSequence>(&s, 1);
    change(a, s, heads);
    EXPECT_EQ(ref::PrefillAttention(t.ctx, a).code(), cpu::PrefillAttention(t.ctx, a).code());
    return cpu::PrefillAttention(t.ctx, a).code();
  };
  using Heads = std::vector<HeadStreamView>;
  using Args = PrefillAttentionArgs;
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  std::vector<int32_t> positions = {65, 66, 68, 67, 69}, beyond = {65, 66, 67, 68, 70}, unsorted = {3, 1};
  std::vector<int32_t> bad_page = {0, 10000};
  EXPECT_EQ(run([](Args&, PrefillSequence&, Heads&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(run([](Args& a, PrefillSequence&, Heads&) { a.shape.num_qo_heads = 3; }), kInvalid);
  EXPECT_EQ(run([](Args& a, PrefillSequence&, Heads&) { a.shape.head_dim = 60; }), kInvalid);
  EXPECT_EQ(run([](Args& a, PrefillSequence&, Heads&) { a.pool.head_dim = 128; }), kInvalid);
  EXPECT_EQ(run([](Args& a, PrefillSequence&, Heads&) { a.pool.dtype = DType::kF16; }), kInvalid);
  EXPECT_EQ(run([](Args& a, PrefillSequence&, Heads&) { a.q_row_stride = 255; }), kInvalid);
  EXPECT_EQ(run([](Args& a, PrefillSequence&, Heads&) { a.q = nullptr; }), kInvalid);
  EXPECT_EQ(run([](Args&, PrefillSequence& s, Heads&) { s.row_end = 4; }), kInvalid);
  EXPECT_EQ(run([&](Args&, PrefillSequence& s, Heads&) { s.positions = positions; }), kInvalid);
  EXPECT_EQ(run([&](Args&, PrefillSequence& s, Heads&) { s.positions = beyond; }), kInvalid);
  EXPECT_EQ(run([](Args&, PrefillSequence& s, Heads&) { s.heads = s.heads.first(1); }), kInvalid);
  EXPECT_EQ(run([](Args&, PrefillSequence&, Heads& h) { h[1].page_table = h[1].page_table.first(1); }), kInvalid);
  EXPECT_EQ(run([&](Args&, PrefillSequence&, Heads& h) { h[1].page_table = bad_page; }), kInvalid);
  EXPECT_EQ(run([](Args&, PrefillSequence&, Heads& h) {
              h[0].visibility = {VisibilityRule::kBand, 0, 0, {}};
            }),
            kInvalid);
  EXPECT_EQ(run([](Args&, PrefillSequence&, Heads& h) {
              h[0].visibility = {VisibilityRule::kBand, -1, 4, {}};
            }),
            kInvalid);
  EXPECT_EQ(run([&](Args&, PrefillSequence&, Heads& h) {
              h[0].visibility = {VisibilityRule::kList, 0, 1, unsorted};
            }),
            kInvalid);
}

}  // namespace
}  // namespace spl::kernels
