#include "kernels/kv_copy/align_copy.h"

#include <cmath>

#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr double kTheta = 10000.0;

double Angle(int32_t distance, int32_t c, int32_t rotary_dim) {
  return distance * std::pow(kTheta, -2.0 * c / rotary_dim);
}

// Source pages full of numbers, target pages that keep what was there where nothing is written, random runs.
struct Problem {
  Problem(Random& random, DType dtype, int32_t head_dim, int32_t rotary_dim, bool interleaved = false)
      : pool{nullptr, dtype, head_dim, kPages},
        rotary_dim(rotary_dim),
        interleaved(interleaved),
        initial(pool.page_bytes() * kPages) {
    const std::vector<float> values = random.Normals(initial.size() / DTypeBytes(dtype));
    for (size_t i = 0; i < values.size(); ++i) Store(initial.data(), i, values[i]);
    for (const int32_t distance : distances) {
      for (int32_t c = 0; c < rotary_dim / 2; ++c) {
        cos.push_back(static_cast<float>(std::cos(Angle(distance, c, rotary_dim))));
        sin.push_back(static_cast<float>(std::sin(Angle(distance, c, rotary_dim))));
      }
    }
    // Targets are pages of their own, each written by one or two runs that do not touch.
    std::vector<int32_t> free(kPages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random.engine());
    std::vector<int32_t> sources(free.begin(), free.begin() + kPages / 2);
    size_t next = kPages / 2;
    while (next + kStreams <= free.size()) {
      const std::vector<int32_t> targets(free.begin() + next, free.begin() + next + kStreams);
      next += kStreams;
      const int32_t split = random.Int(1, 63);
      for (const auto& [first, last] : {std::pair{0, split}, std::pair{split, 64}}) {
        const int32_t num_tokens = random.Int(1, last - first);
        runs.push_back({num_tokens, random.Int(0, 64 - num_tokens), random.Int(first, last - num_tokens),
                        random.Int(-1, static_cast<int32_t>(distances.size()) - 1)});
        for (int32_t s = 0; s < kStreams; ++s)
          src_pages.push_back(sources[random.Int(0, static_cast<int32_t>(sources.size()) - 1)]);
        dst_pages.insert(dst_pages.end(), targets.begin(), targets.end());
      }
    }
  }

  void Store(std::byte* to, size_t at, float value) const {
    if (pool.dtype == DType::kF32) {
      reinterpret_cast<float*>(to)[at] = value;
    } else {
      reinterpret_cast<bf16*>(to)[at] = ToBf16(value);
    }
  }
  float Load(const std::vector<std::byte>& from, size_t at) const {
    return pool.dtype == DType::kF32 ? reinterpret_cast<const float*>(from.data())[at]
                                     : ToFloat(reinterpret_cast<const bf16*>(from.data())[at]);
  }
  AlignCopyArgs Args(std::vector<std::byte>& memory) const {
    AlignCopyArgs a{pool, kStreams, runs, src_pages, dst_pages, cos, sin, rotary_dim, interleaved};
    a.pool.base = memory.data();
    return a;
  }
  // The definition again, in double, from the angles themselves.
  std::vector<float> Want() const {
    std::vector<float> out(initial.size() / DTypeBytes(pool.dtype));
    for (size_t i = 0; i < out.size(); ++i) out[i] = Load(initial, i);
    const size_t half_page = static_cast<size_t>(64) * pool.head_dim;
    for (size_t i = 0; i < runs.size(); ++i) {
      const AlignRun& run = runs[i];
      for (int32_t s = 0; s < kStreams; ++s) {
        for (int32_t t = 0; t < run.num_tokens; ++t) {
          const size_t src = 2 * half_page * src_pages[i * kStreams + s] + (run.src_slot + t) * pool.head_dim;
          const size_t dst = 2 * half_page * dst_pages[i * kStreams + s] + (run.dst_slot + t) * pool.head_dim;
          for (int32_t c = 0; c < pool.head_dim; ++c) {
            out[dst + c] = Load(initial, src + c);
            out[dst + half_page + c] = Load(initial, src + half_page + c);
          }
          for (int32_t c = 0; c < rotary_dim / 2 && run.rotation >= 0; ++c) {
            const int32_t low = interleaved ? 2 * c : c, high = interleaved ? low + 1 : c + rotary_dim / 2;
            const double angle = Angle(distances[run.rotation], c, rotary_dim);
            const double x = Load(initial, src + low), y = Load(initial, src + high);
            out[dst + low] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
            out[dst + high] = static_cast<float>(y * std::cos(angle) + x * std::sin(angle));
          }
        }
      }
    }
    return out;
  }

  static constexpr int32_t kPages = 48, kStreams = 3;
  const std::vector<int32_t> distances = {1, -1, 64, 777, -12345, 131071};
  KvPoolView pool;
  int32_t rotary_dim;
  bool interleaved;
  std::vector<std::byte> initial;
  std::vector<float> cos, sin;
  std::vector<AlignRun> runs;
  std::vector<int32_t> src_pages, dst_pages;
};

class AlignCopy : public ::testing::TestWithParam<CpuIsa> {};

// docs/methods/sparsex.md, Guarantees: with no distance a copy is the same bytes, else the rotation in double.
TEST_P(AlignCopy, EqualsTheRotationInDouble) {
  Random random(81);
  TestContext t(GetParam(), 3);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [dim, rotary, interleaved] : {std::tuple{128, 128, false},
                                                   {64, 64, false},
                                                   {40, 40, false},
                                                   {128, 32, false},
                                                   {64, 64, true},
                                                   {8, 0, false}}) {
      const Problem p(random, dtype, dim, rotary, interleaved);
      if (rotary == 0) continue;
      for (const auto op : {ref::AlignCopy, cpu::AlignCopy}) {
        std::vector<std::byte> got = p.initial;
        ASSERT_TRUE(op(t.ctx, p.Args(got)).ok());
        std::vector<float> values(got.size() / DTypeBytes(dtype));
        for (size_t i = 0; i < values.size(); ++i) values[i] = p.Load(got, i);
        ExpectClose(values, p.Want(), dtype, "dim " + std::to_string(dim));
      }
    }
  }
}

// Pages of kE4M3 against their definition: what is copied keeps its bytes and its scale; a key that turns is what the
// same operation makes of its value in f32, rounded once, with a scale of its own.
TEST_P(AlignCopy, CodesAreCopiedOrWidenedTurnedAndRoundedOnce) {
  Random random(84);
  TestContext t(GetParam(), 3);
  for (const auto& [dim, rotary, interleaved] :
       {std::tuple{128, 128, false}, {64, 64, false}, {40, 40, false}, {128, 32, false}, {64, 64, true}}) {
    Problem p(random, DType::kF32, dim, rotary, interleaved);
    for (size_t i = 0; i < p.initial.size() / 4; ++i)  // rows of all sizes, so that their scales differ
      p.Store(p.initial.data(), i, std::ldexp(p.Load(p.initial, i), static_cast<int>(i / dim * 7 % 13) - 8));
    p.pool.base = p.initial.data();
    const ConvertedPages rounded(p.pool, DType::kE4M3), widened(rounded.view(), DType::kF32);
    const std::vector<std::byte> before(rounded.bytes().begin(), rounded.bytes().end());
    for (const auto op : {ref::AlignCopy, cpu::AlignCopy}) {
      std::vector<std::byte> floats(widened.bytes().begin(), widened.bytes().end()), got = before, want = before;
      ASSERT_TRUE(op(t.ctx, p.Args(floats)).ok());
      AlignCopyArgs args = p.Args(got);
      args.pool.dtype = DType::kE4M3;
      ASSERT_TRUE(op(t.ctx, args).ok());
      const size_t half = static_cast<size_t>(64) * dim + 64;
      for (size_t i = 0; i < p.runs.size(); ++i) {
        const AlignRun& run = p.runs[i];
        for (int32_t s = 0; s < Problem::kStreams; ++s) {
          const size_t src = 2 * half * p.src_pages[i * Problem::kStreams + s];
          const size_t dst = 2 * half * p.dst_pages[i * Problem::kStreams + s];
          for (int32_t n = 0; n < run.num_tokens; ++n) {
            const size_t from = run.src_slot + n, to = run.dst_slot + n;
            for (const size_t part : {size_t{0}, half}) {
              std::copy_n(&before[src + part + from * dim], dim, &want[dst + part + to * dim]);
              want[dst + part + 64 * dim + to] = before[src + part + 64 * dim + from];
            }
            if (run.rotation < 0) continue;
            const auto* turned = reinterpret_cast<const float*>(floats.data()) +
                                 static_cast<size_t>(p.dst_pages[i * Problem::kStreams + s]) * 2 * 64 * dim + to * dim;
            want[dst + 64 * dim + to] =
                std::byte{QuantizeRow(turned, dim, reinterpret_cast<uint8_t*>(&want[dst + to * dim]))};
          }
        }
      }
      EXPECT_EQ(got, want) << "dim " << dim;
    }
  }
}

TEST_P(AlignCopy, TheSamePositionIsACopyOfTheBytes) {
  Random random(82);
  TestContext t(GetParam());
  Problem p(random, DType::kBF16, 64, 64);
  for (AlignRun& run : p.runs) run.rotation = AlignRun::kNoRotation;
  std::vector<std::byte> got = p.initial, want = p.initial;
  ASSERT_TRUE(cpu::AlignCopy(t.ctx, p.Args(got)).ok());
  ASSERT_TRUE(ref::AlignCopy(t.ctx, p.Args(want)).ok());
  EXPECT_EQ(got, want);
  const size_t row = 64 * 2, page = p.pool.page_bytes();
  const AlignRun& run = p.runs[0];
  EXPECT_EQ(std::memcmp(&got[page * p.dst_pages[0] + run.dst_slot * row],
                        &p.initial[page * p.src_pages[0] + run.src_slot * row], run.num_tokens * row),
            0);
}

TEST_P(AlignCopy, RefusesWhatIsNotThere) {
  Random random(83);
  TestContext t(GetParam());
  const Problem good(random, DType::kF32, 64, 64);
  std::vector<std::byte> memory = good.initial;
  const auto fails = [&](const auto& change) {
    Problem p = good;
    AlignCopyArgs a = p.Args(memory);
    change(p, a);
    return !cpu::AlignCopy(t.ctx, a).ok();
  };
  EXPECT_TRUE(fails([](Problem& p, AlignCopyArgs&) { p.runs[0].num_tokens = 65; }));
  EXPECT_TRUE(fails([](Problem& p, AlignCopyArgs&) { p.runs[0].src_slot = 64; }));
  EXPECT_TRUE(fails([](Problem& p, AlignCopyArgs&) { p.runs[0].rotation = 6; }));
  EXPECT_TRUE(fails([](Problem& p, AlignCopyArgs&) { p.src_pages[0] = Problem::kPages; }));
  EXPECT_TRUE(fails([](Problem& p, AlignCopyArgs&) { p.dst_pages[0] = -1; }));
  EXPECT_TRUE(fails([](Problem&, AlignCopyArgs& a) { a.rotary_dim = 66; }));
  EXPECT_TRUE(fails([](Problem&, AlignCopyArgs& a) { a.sin = a.sin.first(3); }));
  EXPECT_EQ(memory, good.initial);
}

INSTANTIATE_TEST_SUITE_P(Isa, AlignCopy, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
