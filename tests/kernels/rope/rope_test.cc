#include "kernels/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/e4m3_rows.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int32_t kMaxPositions = 400;

struct Angles {
  explicit Angles(int32_t head_dim) : cos(kMaxPositions * head_dim / 2), sin(cos.size()) {
    for (int32_t p = 0; p < kMaxPositions; ++p) {
      for (int32_t c = 0; c < head_dim / 2; ++c) {
        const double angle = p * std::pow(10000.0, -2.0 * c / head_dim);
        cos[p * head_dim / 2 + c] = static_cast<float>(std::cos(angle));
        sin[p * head_dim / 2 + c] = static_cast<float>(std::sin(angle));
      }
    }
  }
  std::vector<float> cos, sin;
};

// Two sequences with one page table per KV head, pages in no order.
struct Problem {
  Problem(Random& random, int32_t qo, int32_t kv, int32_t d, DType dtype)
      : qo(qo),
        kv(kv),
        d(d),
        dtype(dtype),
        angles(d),
        positions{{0, 1, 63, 64, 65, 200, 399}, {5, 6, 7, 128}},
        qkv(random.Normals(static_cast<size_t>(11) * (qo + 2 * kv) * d)),
        q_norm(random.Normals(d)),
        k_norm(random.Normals(d)) {
    std::vector<int32_t> pages(num_pages());
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), random.engine());
    for (int32_t i = 0; i < 2 * kv; ++i) tables.emplace_back(pages.begin() + i * 7, pages.begin() + (i + 1) * 7);
    for (const auto& t : tables) spans.emplace_back(t);
  }
  int32_t num_pages() const { return 2 * kv * 7; }

  struct Outcome {
    std::vector<float> qkv;
    std::vector<std::byte> pool;
  };

  RopeWriteKvArgs Args(Outcome& o, std::vector<RopeSequence>& sequences) const {
    KvPoolView pool{nullptr, dtype, d, num_pages()};
    o = {qkv, std::vector<std::byte>(pool.page_bytes() * num_pages(), std::byte{0x11})};
    pool.base = o.pool.data();
    const std::span<const std::span<const int32_t>> all(spans);
    sequences = {{0, 7, positions[0], all.first(kv)}, {7, 11, positions[1], all.subspan(kv, kv)}};
    RopeWriteKvArgs a;
    a.qkv = o.qkv.data();
    a.num_qo_heads = qo;
    a.num_kv_heads = kv;
    a.head_dim = d;
    a.table = {angles.cos.data(), angles.sin.data(), kMaxPositions};
    a.pool = pool;
    a.sequences = sequences;
    if (with_norm) a.qk_norm = {q_norm.data(), k_norm.data(), 1e-6f};
    return a;
  }

  template <typename Op>
  Outcome Run(const Op& op, const KernelContext& ctx) const {
    Outcome o;
    std::vector<RopeSequence> sequences;
    const absl::Status s = op(ctx, Args(o, sequences));
    EXPECT_TRUE(s.ok()) << s;
    return o;
  }

  int32_t qo, kv, d;
  DType dtype;
  Angles angles;
  std::vector<std::vector<int32_t>> positions;
  std::vector<float> qkv, q_norm, k_norm;
  bool with_norm = false;
  std::vector<std::vector<int32_t>> tables;
  std::vector<std::span<const int32_t>> spans;
};

std::vector<float> PoolFloats(const Problem& p, const std::vector<std::byte>& pool) {
  std::vector<float> v;
  for (size_t i = 0; i < pool.size() / DTypeBytes(p.dtype); ++i) {
    v.push_back(p.dtype == DType::kF32 ? reinterpret_cast<const float*>(pool.data())[i]
                                       : ToFloat(reinterpret_cast<const bf16*>(pool.data())[i]));
  }
  return v;
}

class RopeWriteKv : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(RopeWriteKv, EqualsReference) {
  Random random(71);
  TestContext t(GetParam(), 3);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int32_t d : {8, 16, 40, 64, 128, 256}) {
      for (bool with_norm : {false, true}) {
        Problem p(random, 4, 2, d, dtype);
        p.with_norm = with_norm;
        const Problem::Outcome want = p.Run(ref::RopeWriteKv, t.ctx), got = p.Run(cpu::RopeWriteKv, t.ctx);
        ExpectClose(got.qkv, want.qkv, DType::kF32, "qkv");
        ExpectClose(PoolFloats(p, got.pool), PoolFloats(p, want.pool), dtype, "pages");
      }
    }
  }
}

// Slots and angles apart: K in its slot is turned as the same row is at the position of its angle, V is as it was.
TEST_P(RopeWriteKv, RowsMayBeTurnedByOtherPositions) {
  Random random(74);
  TestContext t(GetParam(), 3);
  Problem p(random, 4, 2, 64, DType::kF32);
  const std::vector<int32_t> angles = {70, 71, 133, 134, 390, 391, 399};
  for (const auto& op : {+ref::RopeWriteKv, +cpu::RopeWriteKv}) {
    Problem::Outcome got, want;
    std::vector<RopeSequence> sequences;
    RopeWriteKvArgs args = p.Args(got, sequences);
    sequences[0].angles = angles;
    ASSERT_TRUE(op(t.ctx, args).ok());
    RopeWriteKvArgs plain = p.Args(want, sequences);
    sequences[0].positions = angles;
    ASSERT_TRUE(op(t.ctx, plain).ok());
    EXPECT_EQ(got.qkv, want.qkv);
    for (int32_t h = 0; h < p.kv; ++h) {
      for (size_t i = 0; i < angles.size(); ++i) {
        const auto row = [&](const Problem::Outcome& o, int32_t position, int32_t half) {
          const int64_t page = p.tables[h][position / kPageTokens];
          const auto* floats = reinterpret_cast<const float*>(o.pool.data());
          const auto* at = floats + ((2 * page + half) * kPageTokens + position % kPageTokens) * p.d;
          return std::vector<float>(at, at + p.d);
        };
        for (const int32_t half : {0, 1})
          EXPECT_EQ(row(got, p.positions[0][i], half), row(want, angles[i], half)) << "head " << h << ", row " << i;
      }
    }
    sequences[0].angles = std::span(angles).first(6);
    EXPECT_EQ(op(t.ctx, args).code(), absl::StatusCode::kInvalidArgument) << "a row without an angle";
    const std::vector<int32_t> outside = {0, 1, 2, 3, 4, 5, kMaxPositions};
    sequences[0].positions = p.positions[0];
    sequences[0].angles = outside;
    EXPECT_EQ(op(t.ctx, args).code(), absl::StatusCode::kInvalidArgument) << "an angle that the table lacks";
  }
}

// Pages of kE4M3: the rows that f32 pages get, each rounded once with a scale of its own, to the bit.
TEST_P(RopeWriteKv, RoundsEachRowOnceToCodes) {
  Random random(77);
  TestContext t(GetParam(), 3);
  for (int32_t d : {8, 40, 64, 128, 256}) {
    Problem p(random, 4, 2, d, DType::kF32);
    p.with_norm = d != 40;
    for (size_t i = 0; i < p.qkv.size(); ++i) p.qkv[i] *= std::exp2(static_cast<float>(i / d % 9) - 4);
    p.qkv[(4 + 2) * d] = std::numeric_limits<float>::infinity();  // V of position 0, KV head 0
    for (const auto op : {ref::RopeWriteKv, cpu::RopeWriteKv}) {
      p.dtype = DType::kF32;
      Problem::Outcome of_floats = p.Run(op, t.ctx);
      p.dtype = DType::kE4M3;
      Problem::Outcome got = p.Run(op, t.ctx);
      const KvPoolView floats{of_floats.pool.data(), DType::kF32, d, p.num_pages()};
      const KvPoolView codes{got.pool.data(), DType::kE4M3, d, p.num_pages()};
      std::vector<std::byte> want(codes.page_bytes() * static_cast<size_t>(p.num_pages()), std::byte{0x11});
      const KvPoolView to{want.data(), DType::kE4M3, d, p.num_pages()};
      for (size_t s = 0; s < p.positions.size(); ++s) {
        for (const int32_t position : p.positions[s]) {
          for (int32_t h = 0; h < p.kv; ++h) {
            const int32_t page = p.tables[s * static_cast<size_t>(p.kv) + h][position / 64], slot = position % 64;
            for (const size_t half : {size_t{0}, size_t{1}}) {
              const float* row = reinterpret_cast<const float*>(floats.k(page) + half * floats.half_bytes()) + slot * d;
              std::byte* const at = to.k(page) + half * to.half_bytes();
              to.scales(at)[slot] = QuantizeRow(row, d, reinterpret_cast<uint8_t*>(at) + slot * d);
            }
          }
        }
      }
      EXPECT_EQ(got.pool, want) << "head_dim " << d;
      EXPECT_TRUE(BitwiseEqual(got.qkv, of_floats.qkv));
      EXPECT_EQ(codes.scales(codes.v(p.tables[0][0]))[0], kNotFiniteScale);
    }
  }
}

// The reference itself: a rotation keeps lengths, position 0 changes nothing, K and V stay in qkv, V is only rounded.
TEST_P(RopeWriteKv, RotatesAndStoresWhatTheContractSays) {
  Random random(72);
  TestContext t(GetParam());
  const Problem p(random, 2, 1, 64, DType::kF32);
  const Problem::Outcome got = p.Run(cpu::RopeWriteKv, t.ctx);
  const int64_t stride = 4 * 64;
  EXPECT_TRUE(BitwiseEqual(std::span(got.qkv).first(128), std::span(p.qkv).first(128))) << "position 0";
  for (int32_t row = 0; row < 11; ++row) {
    double before = 0, after = 0;
    for (int32_t c = 0; c < 64; ++c) {
      before += std::pow(p.qkv[row * stride + c], 2);
      after += std::pow(got.qkv[row * stride + c], 2);
    }
    EXPECT_NEAR(before, after, 1e-4 * before);
    EXPECT_TRUE(BitwiseEqual(std::span(got.qkv).subspan(row * stride + 128, 128),
                             std::span(p.qkv).subspan(row * stride + 128, 128)));
  }
  const std::vector<float> pool = PoolFloats(p, got.pool);
  const int64_t page = p.tables[0][200 / 64], slot = 200 % 64, row = 5;
  EXPECT_TRUE(BitwiseEqual(std::span(pool).subspan((page * 2 + 1) * 64 * 64 + slot * 64, 64),
                           std::span(p.qkv).subspan(row * stride + 192, 64)));
}

// The norm written out in double: position 0 turns nothing, elsewhere the norm comes before the rotation. Only q
// changes in qkv, and V goes to its page as it was.
TEST_P(RopeWriteKv, NormalisesEachHeadBeforeTheRotation) {
  Random random(76);
  TestContext t(GetParam());
  constexpr int32_t kDim = 40, kHalf = kDim / 2;
  Problem p(random, 2, 1, kDim, DType::kF32);
  p.with_norm = true;
  const auto expected = [&](const float* in, const std::vector<float>& weight, int32_t position) {
    double sum = 0;
    for (int32_t c = 0; c < kDim; ++c) sum += double(in[c]) * in[c];
    const double scale = 1 / std::sqrt(sum / kDim + 1e-6f);
    std::vector<float> out(kDim);
    for (int32_t c = 0; c < kHalf; ++c) {
      const double x = in[c] * scale * weight[c], y = in[c + kHalf] * scale * weight[c + kHalf];
      const double cosine = p.angles.cos[position * kHalf + c], sine = p.angles.sin[position * kHalf + c];
      out[c] = static_cast<float>(x * cosine - y * sine);
      out[c + kHalf] = static_cast<float>(y * cosine + x * sine);
    }
    return out;
  };
  for (const auto& op : {ref::RopeWriteKv, cpu::RopeWriteKv}) {
    const Problem::Outcome got = p.Run(op, t.ctx);
    const std::vector<float> pool = PoolFloats(p, got.pool);
    for (int32_t row = 0; row < 11; ++row) {
      const int32_t s = row < 7 ? 0 : 1, position = p.positions[s][row - 7 * s];
      const float* in = &p.qkv[row * 4 * kDim];
      for (int32_t h = 0; h < 2; ++h) {
        ExpectClose(std::span(got.qkv).subspan((row * 4 + h) * kDim, kDim), expected(in + h * kDim, p.q_norm, position),
                    DType::kF32, "q");
      }
      EXPECT_TRUE(BitwiseEqual(std::span(got.qkv).subspan((row * 4 + 2) * kDim, 2 * kDim), {in + 2 * kDim, 2 * kDim}));
      const int64_t page = p.tables[s][position / 64], slot = position % 64;
      ExpectClose(std::span(pool).subspan((page * 2 * 64 + slot) * kDim, kDim),
                  expected(in + 2 * kDim, p.k_norm, position), DType::kF32, "k");
      EXPECT_TRUE(BitwiseEqual(std::span(pool).subspan(((page * 2 + 1) * 64 + slot) * kDim, kDim),
                               {in + 3 * kDim, static_cast<size_t>(kDim)}));
    }
  }
}

// Slots and pages that no row names keep their bytes, and neither batch nor threads change one.
TEST_P(RopeWriteKv, WritesOnlyItsOwnSlots) {
  Random random(73);
  TestContext one(GetParam(), 1), four(GetParam(), 4);
  Problem p(random, 2, 2, 64, DType::kBF16);
  p.with_norm = true;
  const Problem::Outcome a = p.Run(cpu::RopeWriteKv, one.ctx), b = p.Run(cpu::RopeWriteKv, four.ctx);
  EXPECT_EQ(a.pool, b.pool);
  EXPECT_TRUE(BitwiseEqual(a.qkv, b.qkv));
  size_t changed = 0;
  for (size_t i = 0; i < a.pool.size(); i += 128) {
    changed +=
        std::any_of(a.pool.begin() + i, a.pool.begin() + i + 128, [](std::byte x) { return x != std::byte{0x11}; });
  }
  EXPECT_EQ(changed, 11u * 2 * 2);  // rows x (K, V) x KV heads
}

TEST_P(RopeWriteKv, RoundsToNearestEvenAndKeepsNaN) {
  TestContext t(GetParam());
  Random random(74);
  Problem p(random, 1, 1, 16, DType::kBF16);
  float* v = p.qkv.data() + 2 * 16;  // V of row 0
  const float values[16] = {std::bit_cast<float>(0x3f808000u),
                            std::bit_cast<float>(0x3f818000u),
                            std::bit_cast<float>(0x3f808001u),
                            std::bit_cast<float>(0x3f807fffu),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::bit_cast<float>(0x7f800001u),
                            std::bit_cast<float>(0xffffffffu),
                            0.0f,
                            -0.0f,
                            std::numeric_limits<float>::max(),
                            1e-40f,
                            1.0f,
                            -1.5f,
                            3.0e38f,
                            2.0f};
  std::copy(values, values + 16, v);
  const Problem::Outcome got = p.Run(cpu::RopeWriteKv, t.ctx);
  const auto* stored = reinterpret_cast<const bf16*>(got.pool.data()) + (p.tables[0][0] * 2 + 1) * 64 * 16;
  for (int i = 0; i < 16; ++i) EXPECT_EQ(stored[i].bits, ToBf16(values[i]).bits) << i << ": " << values[i];
}

INSTANTIATE_TEST_SUITE_P(Cpu, RopeWriteKv, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(RopeWriteKvValidation, RefusesWhatItCannotRun) {
  Random random(75);
  TestContext t(CpuIsa::kPortable);
  Problem p(random, 2, 1, 16, DType::kBF16);
  const auto code = [&](const auto& change) {
    Problem::Outcome o;
    std::vector<RopeSequence> sequences;
    RopeWriteKvArgs a = p.Args(o, sequences);
    change(a, sequences);
    const absl::StatusCode ref_code = ref::RopeWriteKv(t.ctx, a).code();
    EXPECT_EQ(cpu::RopeWriteKv(t.ctx, a).code(), ref_code);
    return ref_code;
  };
  using Args = RopeWriteKvArgs;
  using Sequences = std::vector<RopeSequence>;
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](Args&, Sequences&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(code([](Args& a, Sequences&) { a.head_dim = 12; }), kInvalid);
  EXPECT_EQ(code([](Args& a, Sequences&) { a.pool.head_dim = 32; }), kInvalid);
  EXPECT_EQ(code([](Args& a, Sequences&) { a.pool.dtype = DType::kF16; }), kInvalid);
  EXPECT_EQ(code([](Args& a, Sequences&) { a.qkv = nullptr; }), kInvalid);
  EXPECT_EQ(code([](Args& a, Sequences&) { a.table.max_positions = 399; }), kInvalid);
  EXPECT_EQ(code([](Args& a, Sequences&) { a.pool.num_pages = 1; }), kInvalid);
  EXPECT_EQ(code([&](Args& a, Sequences&) {
              a.qk_norm = {p.q_norm.data(), p.k_norm.data(), 0};
            }),
            absl::StatusCode::kOk);
  EXPECT_EQ(code([&](Args& a, Sequences&) { a.qk_norm = {p.q_norm.data(), nullptr, 0}; }), kInvalid);
  EXPECT_EQ(code([&](Args& a, Sequences&) { a.qk_norm = {nullptr, p.k_norm.data(), 0}; }), kInvalid);
  EXPECT_EQ(code([&](Args& a, Sequences&) { a.qk_norm = {p.q_norm.data(), p.k_norm.data(), -1}; }), kInvalid);
  EXPECT_EQ(code([](Args&, Sequences& s) { s[0].page_tables = {}; }), kInvalid);
  EXPECT_EQ(code([](Args&, Sequences& s) { s[1].row_end = 12; }), kInvalid);
  p.tables[0][3] = kNoPage;  // under position 200
  EXPECT_EQ(code([](Args&, Sequences&) {}), kInvalid);
}

}  // namespace
}  // namespace spl::kernels
