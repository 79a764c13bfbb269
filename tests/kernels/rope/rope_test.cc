#include "kernels/rope/rope.h"

#include <algorithm>
#include <vector>

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
      : qo(qo), kv(kv), d(d), dtype(dtype), angles(d),
        positions{{0, 1, 63, 64, 65, 200, 399}, {5, 6, 7, 128}},
        qkv(random.Normals(static_cast<size_t>(11) * (qo + 2 * kv) * d)) {
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
  std::vector<float> qkv;
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
      const Problem p(random, 4, 2, d, dtype);
      const Problem::Outcome want = p.Run(ref::RopeWriteKv, t.ctx), got = p.Run(cpu::RopeWriteKv, t.ctx);
      ExpectClose(got.qkv, want.qkv, DType::kF32, "qkv");
      ExpectClose(PoolFloats(p, got.pool), PoolFloats(p, want.pool), dtype, "pages");
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

// Slots and pages that no row names keep their bytes, and neither batch nor threads change one.
TEST_P(RopeWriteKv, WritesOnlyItsOwnSlots) {
  Random random(73);
  TestContext one(GetParam(), 1), four(GetParam(), 4);
  const Problem p(random, 2, 2, 64, DType::kBF16);
  const Problem::Outcome a = p.Run(cpu::RopeWriteKv, one.ctx), b = p.Run(cpu::RopeWriteKv, four.ctx);
  EXPECT_EQ(a.pool, b.pool);
  EXPECT_TRUE(BitwiseEqual(a.qkv, b.qkv));
  size_t changed = 0;
  for (size_t i = 0; i < a.pool.size(); i += 128) {
    changed += std::any_of(a.pool.begin() + i, a.pool.begin() + i + 128, [](std::byte x) { return x != std::byte{0x11}; });
  }
  EXPECT_EQ(changed, 11u * 2 * 2);  // rows x (K, V) x KV heads
}

TEST_P(RopeWriteKv, RoundsToNearestEvenAndKeepsNaN) {
  TestContext t(GetParam());
  Random random(74);
  Problem p(random, 1, 1, 16, DType::kBF16);
  float* v = p.qkv.data() + 2 * 16;  // V of row 0
  const float values[16] = {std::bit_cast<float>(0x3f808000u), std::bit_cast<float>(0x3f818000u),
                            std::bit_cast<float>(0x3f808001u), std::bit_cast<float>(0x3f807fffu),
                            std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu), 0.0f, -0.0f,
                            std::numeric_limits<float>::max(), 1e-40f, 1.0f, -1.5f, 3.0e38f, 2.0f};
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
  EXPECT_EQ(code([](Args&, Sequences& s) { s[0].page_tables = {}; }), kInvalid);
  EXPECT_EQ(code([](Args&, Sequences& s) { s[1].row_end = 12; }), kInvalid);
  p.tables[0][3] = kNoPage;  // under position 200
  EXPECT_EQ(code([](Args&, Sequences&) {}), kInvalid);
}

}  // namespace
}  // namespace spl::kernels
